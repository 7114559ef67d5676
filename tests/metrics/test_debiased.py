import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import bin_gaps, debiased_square, equal_mass_index, scores_and_outcomes, softmax
from reference import ece_sweep as slow_sweep
from strategies import calibrated, pairs
from trueup import metrics


@given(pairs(max_rows=60), st.integers(1, 20))
def test_l2_equals_the_slow_loop(pair, bins):
    slow = np.sqrt(max(debiased_square(*scores_and_outcomes(*pair), bins), 0))
    assert metrics.debiased_l2(*pair, bins=bins) == pytest.approx(slow, abs=1e-9)


@given(pairs(max_rows=40))
def test_class_wise_l2_equals_the_slow_loop(pair):
    logits, labels = pair
    p = softmax(logits)
    if p.max() > 1 - 1e-9:
        return  # where probabilities saturate, the last digit decides what is tied
    squares = np.array([debiased_square(p[:, k], (labels == k) * 1.0, 15) for k in range(p.shape[1])])
    assert metrics.debiased_l2(*pair, classwise=True) == pytest.approx(np.sqrt(np.maximum(squares, 0).mean()), abs=1e-7)
    assert metrics.debiased_l2(*pair, classwise=True, pool=True) == pytest.approx(
        np.sqrt(max(squares.mean(), 0)), abs=1e-7
    )


def test_l1_is_the_limit_of_its_simulation():
    logits, labels = calibrated(400, 4, temperature=1.3)
    c, a = scores_and_outcomes(logits, labels)
    rng = np.random.default_rng(0)
    plug_in, again = 0.0, 0.0
    for w, acc, conf, size in bin_gaps(equal_mass_index(c, 15), c, a):
        plug_in += w * abs(acc - conf)
        again += w * np.abs(acc + rng.normal(size=200_000) * np.sqrt(acc * (1 - acc) / size) - conf).mean()
    assert metrics.debiased_l1(logits, labels) == pytest.approx(2 * plug_in - again, abs=3e-4)


def test_debiasing_removes_most_of_the_bias_of_a_calibrated_network():
    plain, l1, l2_square = [], [], []
    for seed in range(60):
        pair = calibrated(1000, 4, seed=seed)
        plain.append(metrics.aece(*pair))
        l1.append(metrics.debiased_l1(*pair))
        l2_square.append(debiased_square(*scores_and_outcomes(*pair), 15))
    assert np.mean(l1) < 0.7 * np.mean(plain)
    assert abs(np.mean(l2_square)) < 4 * np.std(l2_square) / np.sqrt(60)


@given(pairs(max_rows=40), st.sampled_from([1, 2]))
def test_sweep_equals_the_slow_loop(pair, norm):
    assert metrics.ece_sweep(*pair, norm=norm) == pytest.approx(
        slow_sweep(*scores_and_outcomes(*pair), norm=norm), abs=1e-9
    )


def test_sweep_with_all_right_uses_as_many_bins_as_it_may():
    logits = np.random.default_rng(0).normal(size=(50, 3))
    c, _ = scores_and_outcomes(logits, logits.argmax(axis=1))
    assert metrics.ece_sweep(logits, logits.argmax(axis=1)) == pytest.approx(1 - c.mean())


def test_sweep_refuses_other_norms():
    with pytest.raises(ValueError, match="norm must be 1 or 2, got 3"):
        metrics.ece_sweep(*calibrated(10, 3), norm=3)


def test_the_sweep_of_a_large_set_without_an_error_ends():
    logits = np.random.default_rng(0).normal(size=(200_000, 3))
    confidence = softmax(logits).max(axis=1)
    assert metrics.ece_sweep(logits, logits.argmax(axis=1)) == pytest.approx(1 - confidence.mean())
