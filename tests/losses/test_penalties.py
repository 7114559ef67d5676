"""Losses of single rows that add a term to the cross-entropy or replace it: smoothing, norm, entropy, Brier."""

import math

import pytest
import torch
from torch import nn

from trueup import metrics
from trueup.losses import Brier, CrossEntropy, brier, cross_entropy, entropy_penalty, label_smoothing, norm

rng = torch.Generator().manual_seed(0)
Z = torch.randn(50, 6, generator=rng, dtype=torch.float64) * 2
Y = torch.randint(6, (50,), generator=rng)


def test_means_are_the_metrics():
    assert float(CrossEntropy()(Z, Y)) == pytest.approx(metrics.nll(Z, Y), rel=1e-12)
    assert float(Brier()(Z, Y)) == pytest.approx(metrics.brier(Z, Y), rel=1e-12)
    shrunk = cross_entropy(Z, Y).mean() - entropy_penalty(Z, Y, strength=0.7).mean()
    assert float(shrunk) == pytest.approx(0.7 * metrics.entropy(Z, Y), rel=1e-12)


def test_full_smoothing_forgets_the_label():
    torch.testing.assert_close(label_smoothing(Z, Y, smoothing=1.0), label_smoothing(Z, (Y + 1) % 6, smoothing=1.0))


def test_smoothing_is_least_at_the_smoothed_label():
    smoothed = torch.full((1, 6), 0.3 / 6, dtype=torch.float64)
    smoothed[0, 2] += 0.7
    z = smoothed.log().requires_grad_()
    label_smoothing(z, torch.tensor([2]), smoothing=0.3).backward(torch.ones(1))
    assert z.grad.abs().max() < 1e-12


@pytest.mark.parametrize("order", [1.0, 1.5, 2.0, 4.0, 20.0])
def test_norm_at_zero_and_at_large_logits(order):
    z = torch.stack([torch.zeros(3), torch.tensor([1e4, -1e4, 0.0])]).requires_grad_()
    loss = norm(z, torch.tensor([0, 0]), strength=1.0, order=order)
    assert loss.tolist() == pytest.approx([math.log(3), 1e4 * 2 ** (1 / order)], rel=1e-6)
    loss.sum().backward()
    assert z.grad.isfinite().all()


def test_norm_is_a_sum_over_classes():
    z = torch.ones(1, 100)
    assert float(norm(z, torch.tensor([0]), strength=0.01)) == pytest.approx(math.log(100) + 1)


def test_brier_by_hand_and_its_range():
    z = torch.tensor([[0.5, 0.3, 0.2]], dtype=torch.float64).log()
    assert float(brier(z, torch.tensor([0]))) == pytest.approx(0.25 + 0.09 + 0.04)
    sure = 1e4 * torch.eye(3)
    assert brier(sure, torch.tensor([0, 2, 1])).tolist() == [0.0, 2.0, 2.0]


def test_entropy_of_a_uniform_row():
    assert float(entropy_penalty(torch.zeros(1, 5), torch.tensor([3]), strength=1.0)) == pytest.approx(0, abs=1e-6)


def test_cross_entropy_is_torchs():
    torch.testing.assert_close(CrossEntropy()(Z, Y), nn.CrossEntropyLoss()(Z, Y))
