"""Copies of the same sample stay in one fold; equal rows of discrete scores do not."""

import warnings

import numpy as np
import pytest

from strategies import calibrated
from trueup import METHODS, metrics
from trueup.calibrators import choose, cross_fit, grid
from trueup.calibrators.folds import k_fold, merge_copies

LOGITS, LABELS = calibrated(300, 5, temperature=2.0, scale=2.0)
NOTE = "rows are copies of other rows"


def copies(number):
    rows = np.random.default_rng(0).permutation(np.repeat(np.arange(len(LABELS)), number))
    return LOGITS[rows], LABELS[rows]


@pytest.mark.parametrize("number", [2, 5, 20])
def test_copies_share_a_fold_and_a_note_says_so(number):
    z, y = copies(number)
    with pytest.warns(UserWarning, match=f"{len(z)} of {len(z)} {NOTE}"):
        folds = k_fold(z, y, 5)
    fold = np.argmax([held_out for _, held_out in folds], axis=0)
    _, sample = np.unique(z[:, 0], return_inverse=True)
    assert all(len(set(fold[sample == k])) == 1 for k in range(300))
    assert np.ptp(np.bincount(fold)) <= 2 * number


def test_merged_copies_are_the_samples():
    z, y = copies(3)
    with pytest.warns(UserWarning, match=NOTE):
        merged, labels, weights = merge_copies(z, y, None)
    order, original = np.argsort(merged[:, 0]), np.argsort(LOGITS[:, 0])
    assert np.array_equal(merged[order], LOGITS[original])
    assert np.array_equal(labels[order], LABELS[original])
    assert weights is None


def test_samples_with_different_numbers_of_copies_are_weighted():
    rows = np.append(np.arange(300), np.repeat(np.arange(200), 2))
    with pytest.warns(UserWarning, match=NOTE):
        merged, _, weights = merge_copies(LOGITS[rows], LABELS[rows], None)
    three = np.isin(merged[:, 0], LOGITS[:200, 0])
    assert weights[three] == pytest.approx(3 * weights[~three][0])
    assert weights.sum() == pytest.approx(700**2 / (200 * 9 + 100))


@pytest.mark.parametrize("decimals", [1, 2])
def test_equal_rows_of_discrete_scores_are_spread(decimals):
    rng = np.random.default_rng(0)
    p = np.round(rng.uniform(0.01, 0.99, 3000), decimals).clip(0.02, 0.98)
    z, y = np.log(np.stack([1 - p, p], axis=1)), (rng.random(3000) < p).astype(int)
    fold = np.argmax([held_out for _, held_out in k_fold(z, y, 5)], axis=0)
    assert len(set(fold[z[:, 0] == z[0, 0]])) == 5
    assert merge_copies(z, y, None)[0] is z


def test_rounded_predictions_of_an_event_that_hardly_ever_happens_are_no_copies():
    """A model trained on as many events as non-events predicts far too many; nearly all equal rows agree."""
    rng = np.random.default_rng(0)
    odds = rng.normal(size=1000)
    y = (rng.random(1000) < 1 / (1 + np.exp(5 - odds))).astype(int)
    p = np.round(1 / (1 + np.exp(-odds)), 1).clip(0.1, 0.9)
    z = np.log(np.stack([1 - p, p], axis=1))
    assert 0 < y.sum() < 20
    assert merge_copies(z, y, None)[0] is z


def test_clusters_are_used_instead_of_copies():
    z, y = copies(4)
    fitted = choose(["identity", "temperature"])(z, y, clusters=np.unique(z[:, 0], return_inverse=True)[1])
    assert fitted.choice.chosen == "temperature"


@pytest.mark.parametrize("number", [2, 5, 20])
@pytest.mark.parametrize("name", ["auto", "choose", "grid", "sms_cv", "ms_odir", "smoothing_spline"])
def test_repeated_rows_change_no_choice_for_the_worse(name, number):
    fit = {
        "choose": choose(["identity", "temperature", "matrix", "isotonic_ovr"]),
        "grid": grid("matrix", penalty=[1e-6, 1e-3, 1e-1]),
    }.get(name) or METHODS[name]
    new = calibrated(4000, 5, temperature=2.0, scale=2.0, seed=1)
    once = metrics.nll(fit(LOGITS, LABELS)(new[0]), new[1])
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*rows are copies of other rows")
        repeated = metrics.nll(fit(*copies(number))(new[0]), new[1])
    assert repeated < once + 0.01


def test_repeated_rows_are_calibrated_by_a_map_that_has_not_seen_them():
    z, y = copies(5)
    fit = cross_fit("matrix")
    with pytest.warns(UserWarning, match=NOTE):
        repeated = fit(z, y)
    assert abs(metrics.nll(repeated, y) - metrics.nll(fit(LOGITS, LABELS), LABELS)) < 0.02
