"""KS, smooth ECE and KDE-ECE against slow loops, hand cases and laws."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optional import torch
from reference import kernel_density_error, ks_error, ranked_rows, scores_and_outcomes, smooth_error, softmax
from trueup.metrics import kde_ece, ks, ks_classwise, ks_within, smooth_ece
from trueup.metrics.smooth import _cosines, _triweight_waves

EVERY = (ks, ks_within, ks_classwise, smooth_ece, kde_ece)


def draw(seed, n, classes, *, scale=2.0, sharpness=1.0, steps=0):
    """Logits, and labels from their softmax at another sharpness; `steps` rounds the logits so that ties abound."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, classes)) * scale
    z = np.round(z * steps) / steps if steps else z
    p = softmax(z * sharpness)
    y = (p.cumsum(axis=1) < rng.random((n, 1))).sum(axis=1).clip(0, classes - 1)
    return z, y


def binary(confidences, correct):
    """Logits of two classes whose second is predicted with this confidence (≥ ½), and labels that are so correct."""
    c = np.asarray(confidences, dtype=np.float64)
    return np.log(np.stack([1 - c, c], axis=1)), np.asarray(correct)


pairs = st.builds(
    draw,
    st.integers(0, 10**6),
    st.integers(1, 30),
    st.integers(2, 5),
    scale=st.sampled_from([0.02, 0.5, 2.0, 8.0]),
    sharpness=st.sampled_from([0.2, 1.0, 3.0]),
)


@given(pairs)
def test_ks_equals_the_slow_loop(pair):
    z, y = pair
    assert ks(z, y) == pytest.approx(ks_error(*scores_and_outcomes(z, y)), abs=1e-12)


@given(pairs, st.integers(1, 5))
def test_ks_of_a_rank_equals_the_slow_loop(pair, rank):
    z, y = pair
    rank = min(rank, z.shape[1])
    scores, hits, sums, within = ranked_rows(z, y, rank)
    assert ks(z, y, rank=rank, top_label=True) == pytest.approx(ks_error(scores, hits), abs=1e-12)
    if rank < z.shape[1]:  # all classes together score 1, give or take rounding: near ties, which the loop parts
        assert ks_within(z, y, top=rank) == pytest.approx(ks_error(sums, within), abs=1e-12)


@given(pairs)
def test_ks_classwise_equals_the_slow_loop(pair):
    z, y = pair
    slow = np.mean([ks_error(p, (y == k).astype(float)) for k, p in enumerate(softmax(z).T)])
    assert ks_classwise(z, y) == pytest.approx(slow, abs=1e-12)


@given(st.integers(0, 10**6), st.integers(1, 3))
def test_equal_logits_rank_by_their_index(seed, rank):
    rng = np.random.default_rng(seed)
    z = np.broadcast_to([2.0, 2.0, 2.0], (20, 3))
    y = rng.integers(0, 3, size=20)
    assert ks(z, y, rank=rank, top_label=True) == pytest.approx(abs(np.mean(y == rank - 1) - 1 / 3), abs=1e-12)
    assert ks_within(z, y, top=rank) == pytest.approx(abs(np.mean(y < rank) - rank / 3), abs=1e-12)


def test_ks_by_hand():
    # Sorted: 0.6 right, 0.7 wrong, 0.9 right; drift 0.4, −0.3, −0.2, over 3.
    z, y = binary([0.9, 0.6, 0.7], [1, 1, 0])
    assert ks(z, y) == pytest.approx(0.4 / 3)
    # The second rank: scores 0.1, 0.3, 0.4 with hits 0, 1, 0; drift −0.1, 0.6, 0.2.
    assert ks(z, y, rank=2) == pytest.approx(0.6 / 3)


def test_ks_looks_only_where_ties_end():
    # One by one, the drift of 0.8 right, 0.8 wrong would reach 0.2 or −0.8 before it ends at −0.6.
    z, y = binary([0.8, 0.8], [1, 0])
    assert ks(z, y) == pytest.approx(0.3)
    assert ks(z, y[::-1]) == pytest.approx(0.3)


def test_all_classes_together_are_certain():
    z, y = draw(0, 50, 4)
    assert ks_within(z, y, top=4) == pytest.approx(0, abs=1e-12)
    assert ks_within(z, y, top=1) == pytest.approx(ks(z, y), abs=1e-12)


def test_ks_classwise_is_the_same_in_any_number_of_chunks(monkeypatch):
    z, y = draw(0, 40, 7)
    whole = ks_classwise(z, y), ks_within(z, y, top=3)
    monkeypatch.setattr("trueup._core.native.DEFAULT_CHUNK", 100)
    monkeypatch.setattr("trueup._core.native.LARGE_CHUNK", 100)
    assert (ks_classwise(z, y), ks_within(z, y, top=3)) == pytest.approx(whole, abs=1e-14)


@pytest.mark.parametrize("value", [0, 4, -1, 1.5, None])
def test_ranks_must_exist(value):
    z, y = draw(0, 5, 3)
    with pytest.raises(ValueError, match=r"rank must lie in 1\.\.3, the number of classes, got"):
        ks(z, y, rank=value)
    with pytest.raises(ValueError, match=r"top must lie in 1\.\.3, the number of classes, got"):
        ks_within(z, y, top=value)


@given(st.lists(st.tuples(st.floats(0, 1), st.floats(-1, 1)), min_size=1, max_size=10))
def test_waves_equal_the_sums_of_cosines(weighted):
    points, weights = (np.array(column) for column in zip((0.0, 1.0), (1.0, 1.0), *weighted, strict=True))
    exact = [np.sum(weights * np.cos(np.pi * k * points)) for k in range(16)]
    assert _cosines(points, weights, 256)[:16] == pytest.approx(exact, abs=1e-5)


def test_waves_of_the_triweight_equal_the_integral():
    v = (np.arange(20_000) + 0.5) / 10_000 - 1
    for frequency in (0.0, 0.005, 0.02, 1.0, 9.0, 40.0):
        integral = np.mean(35 / 16 * (1 - v**2) ** 3 * np.cos(frequency * v))
        assert _triweight_waves(np.array([frequency]))[0] == pytest.approx(integral, abs=1e-8)


@settings(max_examples=12)
@given(pairs)
def test_smooth_ece_equals_the_slow_loop(pair):
    z, y = pair
    slow = smooth_error(*scores_and_outcomes(z, y))
    # The loop's mesh is too coarse for a smaller σ; what is so small is tested on its own below.
    assert smooth_ece(z, y) == pytest.approx(slow, abs=1e-6 if slow > 5e-4 else 5e-5)


@pytest.mark.parametrize("apart", [0.2, 1e-2, 1e-3, 1e-4])
def test_smooth_ece_of_residuals_that_cancel(apart):
    # The closer +½ and −½ lie to each other, the smaller is σ: down to 0.004 here.
    z, y = binary([0.7, 0.7 + apart], [0, 1])
    z, y = np.concatenate([z, z]), np.concatenate([y, 1 - y])
    z[2:, :] = binary([0.7 + apart, 0.7], [0, 0])[0]
    confidence, correct = scores_and_outcomes(z, y)
    slow = smooth_error(confidence, correct)
    assert smooth_ece(z, y) == pytest.approx(slow, abs=1e-6)
    assert slow > 1e-3


@given(st.lists(st.floats(0.5, 0.999999), min_size=1, max_size=20), st.sampled_from([0, 1]))
def test_smooth_ece_of_residuals_of_one_sign_is_their_mean(confidences, correct):
    z, y = binary(confidences, [correct] * len(confidences))
    assert smooth_ece(z, y) == pytest.approx(abs(correct - np.mean(confidences)), abs=1e-9)


def test_smooth_ece_of_certain_rows():
    right, wrong = np.array([[99.0, 0.0]] * 3), np.array([[0.0, 99.0]] * 3)
    assert smooth_ece(right, [0, 0, 0]) == pytest.approx(0, abs=1e-15)
    assert smooth_ece(wrong, [0, 0, 0]) == pytest.approx(1, abs=1e-14)
    assert smooth_ece(np.zeros((4, 2)), [0, 0, 1, 1]) == pytest.approx(0, abs=1e-12)


def test_smooth_ece_resolves_residuals_smaller_than_the_mesh():
    z = np.array([[0.0, x] for x in (14.0, 15.0, 16.0)])
    expected = np.mean(1 - softmax(z)[:, 1])
    assert expected < 1e-6
    assert smooth_ece(z, [1, 1, 1]) == pytest.approx(expected, rel=1e-3)


@settings(max_examples=25)
@given(pairs)
def test_kde_ece_equals_the_slow_loop(pair):
    z, y = pair
    confidence, correct = scores_and_outcomes(z, y)
    right = confidence[correct == 1]
    steps = 3 * right.std() * (2 * len(z)) ** -0.2 * (1 << 15) if len(right) > 1 else 0
    if steps > 8:
        slow = kernel_density_error(confidence, correct)
        assert kde_ece(z, y) == pytest.approx(slow, abs=1e-6 if steps >= 256 else 1e-4)
    elif len(right) == 0:
        assert kde_ece(z, y) == pytest.approx(confidence.mean())


def test_kde_ece_does_not_depend_on_the_grid():
    z, y = draw(3, 500, 4, sharpness=0.5)
    fine = kde_ece(z, y, grid=1 << 17)
    assert kde_ece(z, y) == pytest.approx(fine, abs=1e-7)
    assert kde_ece(z, y, grid=1000) == pytest.approx(fine, abs=1e-4)


def test_kde_ece_without_spread_is_the_mean_gap():
    assert kde_ece(*binary([0.8, 0.8, 0.8, 0.8], [1, 1, 0, 0])) == pytest.approx(0.3)
    assert kde_ece(*binary([0.9, 0.6], [1, 0])) == pytest.approx(0.25)  # one correct: no spread
    assert kde_ece(*binary([0.9, 0.6], [0, 0])) == pytest.approx(0.75)  # none


def test_kde_ece_of_a_spread_below_the_grid():
    # Kernels as narrow as the grid allows see each group alone: 0.8 always right, 0.6 never.
    z, y = binary([0.8, 0.8 + 1e-9, 0.6], [1, 1, 0])
    assert kde_ece(z, y) == pytest.approx((0.2 + 0.2 + 0.6) / 3, abs=1e-4)


def test_kde_ece_all_right():
    # Far from both ends a symmetric kernel leaves the mean where it was.
    z, y = binary([0.68, 0.7, 0.72], [1, 1, 1])
    assert kde_ece(z, y) == pytest.approx(0.3, abs=1e-6)


@pytest.mark.parametrize("grid", [0, 63, 100.5, None])
def test_kde_grid_must_be_a_fair_number(grid):
    with pytest.raises(ValueError, match="grid must be a whole number of at least 64, got"):
        kde_ece(*draw(0, 5, 2), grid=grid)


@pytest.mark.parametrize("metric", EVERY)
@settings(max_examples=20)
@given(pair=pairs, steps=st.sampled_from([0, 1, 2]), seed=st.integers(0, 10**6))
def test_range_and_order(metric, pair, steps, seed):
    z, y = pair
    z = np.round(z * steps) / steps if steps else z
    if steps:  # a tie for the first place falls to another class when classes are permuted
        z = z + np.arange(z.shape[1]) * 1e-3
    rng = np.random.default_rng(seed)
    value = metric(z, y)
    assert 0 <= value <= 1
    order = rng.permutation(len(z))
    assert metric(z[order], y[order]) == pytest.approx(value, abs=1e-9)
    if z.shape[1] == 2:  # of which one is the event
        return
    new = rng.permutation(z.shape[1])
    assert metric(z[:, np.argsort(new)], new[y]) == pytest.approx(value, abs=1e-9)
    assert metric(torch.tensor(z), torch.tensor(y)) == value
    assert metric(np.concatenate([z, z]), np.concatenate([y, y])) == pytest.approx(value, abs=1e-9) or metric is kde_ece


@given(pairs)
def test_no_error_is_below_the_mean_gap(pair):
    z, y = pair
    confidence, correct = scores_and_outcomes(z, y)
    gap = abs(np.mean(correct - confidence))
    assert ks(z, y) >= gap - 1e-12
    assert smooth_ece(z, y) >= gap - 1e-9


@pytest.mark.parametrize("metric", EVERY)
def test_no_rows_no_number(metric):
    value = metric(np.zeros((0, 3)), np.zeros(0, dtype=np.int64))
    assert isinstance(value, float)
    assert math.isnan(value)


@pytest.mark.parametrize("metric", EVERY)
def test_half_and_single_precision(metric):
    z, y = draw(1, 200, 4, sharpness=0.6)
    single = torch.tensor(z, dtype=torch.float32)
    assert metric(single, y) == pytest.approx(metric(single.double(), y), abs=1e-5)
    half = single.half()
    assert metric(half, y) == pytest.approx(metric(half.float(), y), abs=1e-12)


@pytest.mark.parametrize("metric", EVERY)
def test_far_logits_and_calibration(metric):
    z, y = draw(2, 4000, 3)
    assert metric(z, y) < 0.03 < metric(z * 3, y)
    assert math.isfinite(metric(z * 1e4, y))
