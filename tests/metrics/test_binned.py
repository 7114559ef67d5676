import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optional import torch
from reference import binned_errors, equal_mass_index, scores_and_outcomes, softmax, top_label
from reference import sce as slow_sce
from strategies import calibrated, pairs
from trueup import metrics
from trueup.metrics.proximity import proximity


@given(pairs(max_rows=60), st.integers(1, 20))
def test_aece_equals_the_slow_loop(pair, bins):
    c, a = scores_and_outcomes(*pair)
    assert metrics.aece(*pair, bins=bins) == pytest.approx(
        binned_errors(equal_mass_index(c, bins), c, a)["ece"], abs=1e-12
    )


@given(seed=st.integers(0, 10_000), n=st.integers(1, 400), levels=st.sampled_from([2, 5, 999]), scale=st.floats(0.1, 8))
def test_aece_keeps_equal_confidences_in_one_bin_whatever_the_order_of_classes(seed, n, levels, scale):
    """In float32 the same numbers in another order sum up to another confidence; exact ones tie."""
    rng = np.random.default_rng(seed)
    z = (rng.integers(0, levels, (n, 45)) * (scale / levels)).astype(np.float32)
    z = rng.permuted(z[rng.integers(0, n, n)], axis=1)
    y = rng.integers(0, 45, n)
    y[::2] = z[::2].argmax(axis=1)
    assert metrics.aece(z, y) == pytest.approx(metrics.aece(z.astype(np.float64), y), abs=1e-6)


@given(pairs(max_rows=60, tied=False), st.integers(1, 20))
def test_aece_with_split_ties_has_chunks_of_equal_size(pair, bins):
    c, a = scores_and_outcomes(*pair)
    order = np.argsort(c, kind="stable")
    chunks = [[i for r, i in enumerate(order) if r * bins // len(c) == b] for b in range(bins)]
    slow = sum(abs(sum(a[i] - c[i] for i in chunk)) for chunk in chunks) / len(c)
    assert metrics.aece(*pair, bins=bins, ties="split") == pytest.approx(slow, abs=1e-12)


def test_aece_does_not_depend_on_the_order_of_tied_rows():
    z = np.log(np.tile([[0.7, 0.3]], (10, 1)))
    y = np.array([0] * 5 + [1] * 5)
    assert metrics.aece(z, y) == metrics.aece(z, y[::-1]) == pytest.approx(0.2)
    assert metrics.aece(z, y, ties="split", bins=2) == pytest.approx(0.5)


def test_aece_by_the_interpolated_edges():
    logits, labels = calibrated(101, 4, temperature=2, seed=1)
    c, a = scores_and_outcomes(logits, labels)
    n = len(c)
    edges = np.interp(np.linspace(0, n, 16), np.arange(n), np.sort(c))
    slow = 0.0
    for low, high in itertools.pairwise(edges):
        inside = (c > low) & (c <= high)
        if inside.any():
            slow += inside.mean() * abs(a[inside].mean() - c[inside].mean())
    assert metrics.aece(logits, labels, compat="mukhoti") == pytest.approx(slow, abs=1e-12)
    assert metrics.aece(logits, labels, compat="mukhoti") != metrics.aece(logits, labels)


@given(pairs(max_rows=15), st.sampled_from([0.0, 1e-3, 0.05, 1 / 15, 0.3]))
def test_thresholded_sce_equals_the_slow_loop(pair, threshold):
    if (np.abs(softmax(pair[0]) - threshold) < 1e-12).any():
        return  # on the threshold the last digit decides
    assert metrics.thresholded_sce(*pair, threshold=threshold) == pytest.approx(
        slow_sce(*pair, threshold=threshold), abs=1e-12
    )


def test_thresholded_sce_at_zero_is_sce():
    pair = calibrated(300, 5)
    assert metrics.thresholded_sce(*pair, threshold=0.0) == pytest.approx(metrics.sce(*pair), abs=1e-12)


def test_sce_over_the_classes_up_to_the_largest_label():
    logits, labels = calibrated(200, 6)
    labels = np.minimum(labels, 3)
    probs = softmax(logits)
    index = np.maximum(np.ceil(probs * 15) - 1, 0)
    slow = np.mean([binned_errors(index[:, k], probs[:, k], (labels == k) * 1.0)["ece"] for k in range(4)])
    assert metrics.sce(logits, labels, compat="nctoolkit") == pytest.approx(slow, abs=1e-12)


def test_guo_rule_is_the_widely_copied_loop():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 4, generator=generator) * 3
    labels = torch.randint(0, 4, (500,), generator=generator)
    confidence, predicted = torch.softmax(logits, dim=1).max(dim=1)
    edges = torch.linspace(0, 1, 16)
    expected = 0.0
    for low, high in itertools.pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        if inside.any():
            gap = (predicted == labels)[inside].float().mean() - confidence[inside].mean()
            expected += gap.abs().item() * inside.float().mean().item()
    assert metrics.ece(logits, labels, compat="guo") == pytest.approx(expected, abs=1e-6)


def test_torchmetrics_rule_adds_a_bin_for_confidence_one():
    logits = torch.tensor([[200.0, 0.0], [200.0, 0.0], [3.0, 0.0]])  # two confidences of 1, one of .9526
    labels = torch.tensor([0, 1, 0])
    certain, other = abs(0.5 - 1) * 2 / 3, abs(1 - 0.95257) / 3
    assert metrics.ece(logits, labels, compat="torchmetrics") == pytest.approx(certain + other, abs=1e-5)
    assert metrics.ece(logits, labels) == pytest.approx(abs(2 / 3 - (2 + 0.95257) / 3), abs=1e-5)


def test_left_and_right_differ_on_an_edge_only():
    z = np.log(np.array([[0.6, 0.4], [0.65, 0.35]]))
    assert metrics.ece(z, [0, 1], bins=5, top_label=True) == pytest.approx((0.4 + 0.65) / 2)
    assert metrics.ece(z, [0, 1], bins=5, closed="left", top_label=True) == pytest.approx(abs(1 - 1.25) / 2)


@given(pairs(max_rows=60))
def test_uce_equals_the_slow_loop(pair):
    logits, _labels = pair
    p = softmax(logits)
    with np.errstate(divide="ignore", invalid="ignore"):
        u = -np.where(p > 0, p * np.log(p), 0).sum(axis=1) / np.log(p.shape[1])
    u = np.clip(u, 0, 1)
    if (np.abs(u * 15 - np.round(u * 15)) < 1e-9).any() and not np.isin(
        np.round(u[np.abs(u * 15 - np.round(u * 15)) < 1e-9], 9), [0, 1]
    ).all():
        return
    wrong = 1 - top_label(*pair)[1]
    index = np.clip(np.ceil(u * 15 - 1e-9) - 1, 0, 14)
    assert metrics.uce(*pair) == pytest.approx(binned_errors(index, u, wrong)["ece"], abs=1e-9)


class TestProximity:
    def test_equals_the_slow_loop(self):
        rng = np.random.default_rng(0)
        x, base = rng.normal(size=(12, 4)), rng.normal(size=(30, 4))
        unit = [v / np.linalg.norm(v, axis=1, keepdims=True) for v in (x, base)]
        for k in (1, 3):
            slow = [np.exp(-np.sort([np.linalg.norm(u - v) for v in unit[1]])[:k].mean()) for u in unit[0]]
            assert proximity(x, base, neighbours=k) == pytest.approx(slow)
            squares = [np.exp(-(np.sort([np.linalg.norm(u - v) for v in unit[1]])[:k] ** 2)).mean() for u in unit[0]]
            assert proximity(x, base, neighbours=k, rule="similarity") == pytest.approx(squares)

    def test_a_row_is_not_its_own_neighbour(self):
        x = np.eye(4)
        assert proximity(x, neighbours=2) == pytest.approx(np.exp(-np.sqrt(2)))

    def test_refusals(self):
        with pytest.raises(ValueError, match=r"neighbours must lie in 1..3, the other rows there are, got 10"):
            proximity(np.eye(4))
        with pytest.raises(ValueError, match="reference must have 4 columns as features have, got 2"):
            proximity(np.eye(4), np.zeros((5, 2)), neighbours=1)
        with pytest.raises(ValueError, match="features must have 20 entries"):
            metrics.piece(*calibrated(20, 3), features=np.random.default_rng(0).normal(size=(25, 3)))


def test_piece_is_at_least_ece_and_by_hand():
    logits, labels = calibrated(400, 4, temperature=1.5)
    features = np.random.default_rng(1).normal(size=(400, 6))
    assert metrics.piece(logits, labels, features=features) >= metrics.ece(logits, labels) - 1e-12
    near = proximity(features, neighbours=10)
    c, a = scores_and_outcomes(logits, labels)
    cell = equal_mass_index(near, 5) * 15 + np.ceil(c * 15) - 1
    slow = binned_errors(cell, c, a)["ece"]
    assert metrics.piece(logits, labels, features=features, bins=(15, 5)) == pytest.approx(slow, abs=1e-12)
    assert metrics.piece(logits, labels) == metrics.piece(logits, labels, features=logits)


@pytest.mark.parametrize("name", ["ece", "mce", "rmsce", "average_ce", "aece", "sce"])
def test_unknown_options_are_refused(name):
    with pytest.raises(ValueError, match="compat must be"):
        metrics.METRICS[name](*calibrated(10, 3), compat="nonsense")


def test_compat_without_rows_is_undefined():
    none = np.zeros((0, 3)), np.zeros(0, int)
    assert np.isnan(metrics.aece(*none, compat="mukhoti"))
    assert np.isnan(metrics.sce(*none, compat="nctoolkit"))
    assert np.isnan(metrics.ece(*none, compat="guo"))
    assert np.isnan(metrics.ece(*none, compat="torchmetrics"))


def test_an_unknown_rule_of_proximity_is_refused():
    with pytest.raises(ValueError, match='rule must be "distance" or "similarity", got \'cosine\''):
        proximity(np.eye(12), rule="cosine")
