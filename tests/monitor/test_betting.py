"""Wealth of those who bet against calibration: fair under it, and the same however the rows are cut."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import reference
from trueup.monitor.betting import (
    CLASS_BETS,
    GLOBAL_BETS,
    LOCAL_BETS,
    LOCAL_BINS,
    SLOPE_BETS,
    Evidence,
    bettor_shares,
    describe_bettor,
    log_odds,
    log_payoffs,
    log_payoffs_of_classes,
    log_payoffs_of_rows,
)

ON_EVERY_ROW = np.concatenate([GLOBAL_BETS, SLOPE_BETS])


def rows(n, seed=0):
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(0.1, 0.99, n)
    return confidence, (rng.random(n) < confidence).astype(float)


def run(confidence, correct, block):
    evidence = Evidence.initial(len(ON_EVERY_ROW) + LOCAL_BINS * len(LOCAL_BETS), block)
    at = 0
    while at < len(confidence):
        step = min(evidence.rows_left_in_block(), len(confidence) - at)
        evidence = evidence.update(log_payoffs_of_rows(confidence[at : at + step], correct[at : at + step]), step)
        at += step
    return evidence


@given(p=st.floats(1e-6, 1 - 1e-6), which=st.integers(0, len(ON_EVERY_ROW) - 1))
def test_a_bet_is_fair_where_the_network_is_calibrated(p, which):
    odds = log_odds(np.array([p, p]))
    won, lost = np.exp(log_payoffs(odds, np.array([1.0, 0.0]), ON_EVERY_ROW[which : which + 1]))[:, 0]
    assert p * won + (1 - p) * lost == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("p", [0.0, 1.0, 1e-300, 1 - 1e-16])
def test_sure_confidences_leave_wealth_finite(p):
    payoffs = log_payoffs(log_odds(np.array([p, p])), np.array([0.0, 1.0]), ON_EVERY_ROW)
    assert np.isfinite(payoffs).all()


@given(n=st.integers(1, 40), block=st.integers(3, 15), seed=st.integers(0, 99))
def test_wealth_is_that_of_the_slow_loop(n, block, seed):
    confidence, correct = rows(n, seed)
    beliefs = [(*pair, 0.0, 1.0) for pair in ON_EVERY_ROW]
    parts = [(part / LOCAL_BINS, (part + 1) / LOCAL_BINS) for part in range(LOCAL_BINS)]
    beliefs += [(*pair, *part) for part in parts for pair in LOCAL_BETS]
    shares = np.full(len(beliefs), 1 / len(beliefs))
    slow = reference.slow_wealth(confidence, correct, beliefs, shares, block)
    assert np.exp(run(confidence, correct, block).log_wealth(shares)) == pytest.approx(slow, rel=1e-9)


def test_betters_on_classes_bet_on_every_class():
    rng = np.random.default_rng(0)
    said = rng.dirichlet(np.ones(4), 30)
    labels = rng.integers(0, 4, 30)
    together = log_payoffs_of_classes(said, labels).reshape(4, -1)
    for k in range(4):
        alone = log_payoffs(log_odds(said[:, k]), (labels == k).astype(float), CLASS_BETS).sum(axis=0)
        np.testing.assert_allclose(together[k], alone, atol=1e-12)


def test_money_laid_out_is_never_more_than_there_was():
    evidence = Evidence.initial(3, 2)
    for _ in range(50):
        evidence = evidence.update(np.zeros(3), 2)
    assert np.exp(evidence.log_wealth(np.full(3, 1 / 3))) == pytest.approx(1)


def test_merging_averages_over_streams_in_any_order():
    streams = [run(*rows(n, seed), 10) for seed, n in enumerate((25, 40, 7))]
    share = np.full(len(streams[0].wealth), 1 / len(streams[0].wealth))
    a, b, c = streams
    one, other = (a + b) + c, c + (b + a)
    assert one.rows == other.rows == 72
    assert one.streams == 3
    assert one.log_wealth(share) == pytest.approx(other.log_wealth(share), abs=1e-12)
    np.testing.assert_allclose(np.exp(one.wealth), np.mean([np.exp(s.wealth) for s in streams], axis=0))
    # What is not laid out counts as that of the stream that has the least left.
    assert np.exp(one.log_wealth(share)) <= np.mean([np.exp(s.log_wealth(share)) for s in streams])


def test_merging_different_settings_is_refused():
    with pytest.raises(ValueError, match="same classes and settings"):
        Evidence.initial(3, 10) + Evidence.initial(3, 20)


@pytest.mark.parametrize("classes", [0, 2, 10, 100])
def test_the_shares_sum_to_one_or_less(classes):
    shares = bettor_shares(classes)
    assert shares.sum() == pytest.approx(1)
    assert (shares > 0).all()


@pytest.mark.parametrize(
    ("slope", "shift", "mean", "problem"),
    [
        (-0.5, -4.5, 0.03, "Reversed ranking"),
        (-0.5, 6.0, 0.967, "Reversed ranking"),
        (0.0, -3.0, 0.03, "Uninformative ranking"),
        (0.0, 0.0, 0.03, "Probabilities too low"),  # far from the mean: the level is wrong, not the ranking
        (0.0, -6.0, 0.5, "Probabilities too high"),
    ],
)
def test_a_bettor_on_the_slope_says_what_it_believes(slope, shift, mean, problem):
    (bettor,) = np.flatnonzero(((slope, shift) == ON_EVERY_ROW).all(axis=1))
    text = describe_bettor(int(bettor), mean, event=True)
    assert text == f"{problem}: multiplying the log-odds by {slope:.2f}" + (
        f" and adding {shift:+.1f} would fit the data." if shift else " would fit the data."
    )


def test_bettors_who_come_later_hold_what_they_would_have_without_a_bet():
    evidence = Evidence.initial(3, 10)
    for _ in range(5):
        evidence = evidence.update(np.zeros(3), 10)
    larger = evidence.with_new_bettors(1, 2)
    assert larger.wealth == pytest.approx(np.full(5, evidence.wealth[0]))
    assert larger.log_wealth(np.full(5, 0.2)) == pytest.approx(0)
