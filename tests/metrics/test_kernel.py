"""Kernel calibration errors and their test against slow loops, hand cases and laws."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from optional import torch
from reference import mmce_squared, scores_and_outcomes, skce_matrix, softmax
from trueup.metrics import mmce, skce, skce_biased, skce_linear, skce_test
from trueup.metrics.kernel import median_distance

EVERY = (skce, skce_biased, skce_linear, mmce)


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Many tiny matrices: several threads would mostly wait for one another."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def draw(rng, n, classes, *, scale=2.0, sharpness=1.0):
    """Logits, and labels from their softmax at another sharpness; with sharpness 1 they are calibrated."""
    z = rng.normal(size=(n, classes)) * scale
    p = np.exp(z * sharpness)
    p /= p.sum(axis=1, keepdims=True)
    y = (p.cumsum(axis=1) < rng.random((n, 1))).sum(axis=1).clip(0, classes - 1)
    return z, y


pairs = st.builds(
    draw,
    st.builds(np.random.default_rng, st.integers(0, 10**6)),
    st.integers(2, 25),
    st.integers(2, 5),
    scale=st.sampled_from([0.02, 0.5, 2.0, 8.0]),
    sharpness=st.sampled_from([0.2, 1.0, 3.0]),
)
bandwidths = st.sampled_from([0.01, 0.06, 0.4, 3.0])


@given(pairs, bandwidths)
def test_skce_equals_the_slow_loop(pair, bandwidth):
    z, y = pair
    n = len(z)
    h = skce_matrix(z, y, bandwidth)
    assert skce(z, y, bandwidth=bandwidth) == pytest.approx((h.sum() - h.trace()) / (n * (n - 1)), abs=1e-9)
    assert skce_biased(z, y, bandwidth=bandwidth) == pytest.approx(h.mean(), abs=1e-9)
    neighbours = [h[2 * i, 2 * i + 1] for i in range(n // 2)]
    assert skce_linear(z, y, bandwidth=bandwidth) == pytest.approx(np.mean(neighbours), abs=1e-12)


def test_skce_by_hand():
    # Two rows (0.5, 0.5) and (0.9, 0.1), both of class 0: residuals (0.5, −0.5) and (0.1, −0.1), distance 0.4·√2.
    z = np.log([[0.5, 0.5], [0.9, 0.1]])
    h = math.exp(-0.4 * math.sqrt(2) / 0.7) * 0.1
    assert skce(z, [0, 0], bandwidth=0.7) == pytest.approx(h)
    assert skce_linear(z, [0, 0], bandwidth=0.7) == pytest.approx(h)
    assert skce_biased(z, [0, 0], bandwidth=0.7) == pytest.approx((2 * h + 0.5 + 0.02) / 4)
    assert skce(z, [0, 0]) == pytest.approx(math.exp(-1) * 0.1)  # the median of one distance is that distance


@given(pairs, st.integers(1, 4))
def test_skce_is_the_same_in_tiles_of_any_size(pair, half):
    z, y = pair
    whole = [metric(z, y) for metric in (skce, skce_biased, skce_linear)], skce_test(z, y, n_resamples=20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trueup._core.native.TILE_ROWS", 2 * half)
        assert [metric(z, y) for metric in (skce, skce_biased, skce_linear)] == pytest.approx(whole[0], abs=1e-9)
        assert skce_test(z, y, n_resamples=20).p_value == whole[1].p_value


def test_skce_keeps_its_digits_with_a_tiny_bandwidth():
    rng = np.random.default_rng(0)
    z = np.array([0.3, 0.2, 0.1]) + 1e-7 * rng.normal(size=(30, 3))
    y = rng.integers(0, 3, size=30)
    probs = softmax(z)
    apart = [math.dist(p, q) for i, p in enumerate(probs) for q in probs[:i]]
    assert median_distance(z) == pytest.approx(np.median(apart), rel=1e-6)
    h = skce_matrix(z, y, float(np.median(apart)))
    assert skce(z, y) == pytest.approx((h.sum() - h.trace()) / (30 * 29), abs=1e-7)


def test_median_distance_of_rows_that_coincide():
    assert median_distance(np.zeros((5, 3))) == 1
    assert median_distance([[0.0, 0.0]]) == 1
    # Four equal rows and one other: 6 of 10 distances are zero, the rest is what counts.
    z = np.log([[0.5, 0.5]] * 4 + [[0.8, 0.2]])
    assert median_distance(z) == pytest.approx(0.3 * math.sqrt(2))


def test_median_distance_of_many_rows():
    rng = np.random.default_rng(0)
    z, y = draw(rng, 3000, 3)
    probs = torch.softmax(torch.tensor(z), dim=1)
    assert median_distance(z) == pytest.approx(torch.pdist(probs).median().item(), rel=0.02)
    order, classes = rng.permutation(3000), rng.permutation(3)
    assert median_distance(z[order][:, classes]) == pytest.approx(median_distance(z), rel=1e-12)
    assert skce(z[order], y[order]) == pytest.approx(skce(z, y), abs=1e-10)


@given(pairs, st.sampled_from([1e-5, 1e-3, 0.01, 0.4, 10.0]))
def test_mmce_equals_the_slow_loop(pair, bandwidth):
    z, y = pair
    slow = mmce_squared(*scores_and_outcomes(z, y), bandwidth)
    assert mmce(z, y, bandwidth=bandwidth) ** 2 == pytest.approx(slow, abs=1e-13)


@pytest.mark.parametrize("bandwidth", [1e-4, 0.01, 0.4])
def test_mmce_of_many_rows(bandwidth):
    z, y = draw(np.random.default_rng(1), 2000, 3, sharpness=0.7)
    c, a = scores_and_outcomes(z, y)
    d = a - c
    slow = d @ np.exp(-np.abs(c[:, None] - c) / bandwidth) @ d / 2000**2
    assert mmce(z, y, bandwidth=bandwidth) == pytest.approx(math.sqrt(slow), rel=1e-10)


def test_mmce_by_hand():
    # Confidence 0.6 right, 0.8 wrong: residuals 0.4, −0.8, kernel exp(−0.5).
    z = np.log([[0.6, 0.4], [0.8, 0.2]])
    assert mmce(z, [0, 1]) == pytest.approx(math.sqrt(0.16 + 0.64 - 0.64 * math.exp(-0.5)) / 2)
    assert mmce(z[:1], [0]) == pytest.approx(0.4)


@given(st.lists(st.tuples(st.floats(0.5001, 0.9999), st.booleans()), min_size=2, max_size=30))
def test_skce_of_two_columns_is_twice_the_squared_mmce(confident):
    c, a = np.array([c for c, _ in confident]), np.array([int(a) for _, a in confident])
    z = np.log(np.stack([1 - c, c], axis=1))
    assert skce_biased(z, a, bandwidth=math.sqrt(2) * 0.4) == pytest.approx(2 * mmce(z, a) ** 2, abs=1e-7)


@given(pairs, st.integers(0, 10**6))
def test_order_of_rows_and_classes(pair, seed):
    z, y = pair
    rng = np.random.default_rng(seed)
    order, new = rng.permutation(len(z)), rng.permutation(z.shape[1])
    for metric in EVERY:
        value = metric(z, y)
        assert metric(z[:, np.argsort(new)], new[y]) == pytest.approx(value, abs=1e-7)
        assert metric(torch.tensor(z), torch.tensor(y)) == value
        if metric is not skce_linear:
            assert metric(z[order], y[order]) == pytest.approx(value, abs=1e-7)
    assert skce_biased(z, y) >= 0
    assert skce_biased(z, y) >= skce(z, y) - 1e-9


def test_calibrated_predictions_have_mean_zero():
    rng = np.random.default_rng(5)
    drawn = [draw(rng, 40, 3) for _ in range(400)]
    for metric in (skce, skce_linear):
        values = np.array([metric(z, y, bandwidth=0.5) for z, y in drawn])
        assert abs(values.mean()) < 4 * values.std() / math.sqrt(400)
        over = np.array([metric(3 * z, y, bandwidth=0.5) for z, y in drawn])
        assert over.mean() > 4 * over.std() / math.sqrt(400)


def test_certain_and_right_is_no_error():
    z = np.eye(4) * 99
    assert [metric(z, range(4)) for metric in EVERY] == pytest.approx([0] * 4, abs=1e-15)


@pytest.mark.parametrize("metric", EVERY)
def test_few_rows(metric):
    assert math.isnan(metric(np.zeros((0, 3)), np.zeros(0, dtype=np.int64)))
    if metric is not mmce:
        assert math.isnan(metric([[1.0, 2.0]], [0]))


@pytest.mark.parametrize("metric", EVERY)
@pytest.mark.parametrize("bandwidth", [0, -1.0, math.nan, math.inf, "median"])
def test_bandwidth_must_be_positive(metric, bandwidth):
    with pytest.raises(ValueError, match="bandwidth must be a positive number, got"):
        metric(np.zeros((3, 2)), [0, 1, 1], bandwidth=bandwidth)


@pytest.mark.parametrize("metric", EVERY)
def test_precision_and_far_logits(metric):
    z, y = draw(np.random.default_rng(1), 100, 4, sharpness=0.6)
    single = torch.tensor(z, dtype=torch.float32)
    assert metric(single, y) == pytest.approx(metric(single.double(), y), abs=1e-6)
    assert metric(single.half(), y) == pytest.approx(metric(single.half().float(), y), abs=1e-12)
    assert math.isfinite(metric(z * 1e4, y))


@pytest.mark.parametrize("method", ["quadratic", "linear"])
def test_p_values_of_calibrated_predictions_are_uniform(method):
    rng = np.random.default_rng(11)
    p = [skce_test(*draw(rng, 120, 3), method=method, n_resamples=199, seed=i).p_value for i in range(300)]
    assert kstest(p, "uniform").pvalue > 0.01
    assert 0.02 < np.mean(np.array(p) <= 0.05) < 0.09


def test_few_calibrated_rows_are_not_rejected_too_often():
    rng = np.random.default_rng(12)
    p = [skce_test(*draw(rng, 12, 3, scale=1.0), n_resamples=199, seed=i).p_value for i in range(500)]
    assert np.mean(np.array(p) <= 0.05) < 0.065


@pytest.mark.parametrize(("method", "n"), [("quadratic", 200), ("linear", 40_000)])
def test_overconfidence_is_found(method, n):
    z, y = draw(np.random.default_rng(3), n, 3)
    assert skce_test(3 * z, y, method=method).p_value < 0.01


def test_the_test_equals_the_slow_loop():
    z, y = draw(np.random.default_rng(4), 20, 3)
    result = skce_test(z, y, bandwidth=0.5, n_resamples=50, seed=7)
    h = skce_matrix(z, y, 0.5)
    np.fill_diagonal(h, 0)
    signs = np.random.default_rng(7).choice([-1.0, 1.0], size=(20, 50))
    exceeding = sum(w @ h @ w >= h.sum() for w in signs.T)
    assert result.p_value == (1 + exceeding) / 51
    assert result.statistic == pytest.approx(h.sum() / (20 * 19)) == pytest.approx(skce(z, y, bandwidth=0.5))
    assert skce_test(z, y, bandwidth=0.5, n_resamples=50, seed=7) == result
    assert 1 / 51 <= result.p_value <= 1


def test_the_linear_test_by_hand():
    # All rows (½, ½): every product is ½ for equal labels and −½ for others; here 3 of 4 pairs agree.
    result = skce_test(np.zeros((8, 2)), [0, 0, 1, 1, 0, 0, 0, 1], method="linear")
    assert result.statistic == pytest.approx(0.25)
    # Mean ¼, variance (3·¼² + ¾²)/3 = ¼, standard error ¼: one standard error above zero.
    assert result.p_value == pytest.approx(0.158655, abs=1e-6)


def test_which_test_is_run(monkeypatch):
    z, y = draw(np.random.default_rng(4), 21, 3)
    assert skce_test(z, y).method == "quadratic"
    monkeypatch.setattr("trueup.metrics.kernel.QUADRATIC_ROWS", 20)
    assert skce_test(z, y).method == "linear"
    assert skce_test(z, y, method="quadratic").method == "quadratic"


def test_edges_of_the_test():
    assert math.isnan(skce_test([[1.0, 0.0]], [0]).p_value)
    z = np.eye(4) * 999
    assert skce_test(z, range(4)).p_value == 1
    assert skce_test(z, range(4), method="linear").p_value == 1
    assert skce_test(np.zeros((4, 2)), [0] * 4, method="linear").p_value == 0
    assert math.isnan(skce_test(np.zeros((2, 2)), [0, 0], method="linear").p_value)
    with pytest.raises(dataclasses.FrozenInstanceError):
        skce_test(z, range(4)).p_value = 0.5
    with pytest.raises(ValueError, match='method must be "quadratic", "linear" or None, got \'cubic\''):
        skce_test(z, range(4), method="cubic")
    with pytest.raises(ValueError, match="n_resamples must be a whole number of at least 1, got 0"):
        skce_test(z, range(4), n_resamples=0)
