"""Focal losses: gradients against their closed forms, saturation, and Mukhoti's two exponents."""

import pytest
import torch
from torch import nn

from trueup.losses import FLSD53, DualFocal, Focal, dual_focal, flsd53, focal
from trueup.losses._focal import label_rest

Z = torch.tensor([[0.3, -1.0, 2.0], [1.5, 0.2, -0.7], [0.0, 0.1, 0.2]], dtype=torch.float64)
Y = torch.tensor([0, 0, 1])


def slope(loss, logits, labels):
    z = logits.clone().requires_grad_()
    loss(z, labels).sum().backward()
    return z.grad


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 3.0, 7.0])
def test_gradient_is_a_weight_times_that_of_cross_entropy(gamma):
    p = torch.softmax(Z, dim=1)
    q = p.gather(1, Y[:, None])
    weight = (1 - q) ** gamma - gamma * (1 - q) ** (gamma - 1) * q * q.log()
    off = p - nn.functional.one_hot(Y, 3)
    torch.testing.assert_close(slope(Focal(gamma=gamma, reduction="sum"), Z, Y), weight * off)
    detached = Focal(gamma=gamma, detach_weight=True, reduction="sum")
    torch.testing.assert_close(slope(detached, Z, Y), (1 - q) ** gamma * off)
    torch.testing.assert_close(detached(Z, Y), Focal(gamma=gamma, reduction="sum")(Z, Y))


def test_by_hand():
    """p = ¾: ¼ ln(4/3), and with γ = 2 a quarter of that."""
    z = torch.tensor([[3.0, 1.0]]).log()
    assert float(focal(z, torch.tensor([0]), gamma=1.0)) == pytest.approx(0.0719205)
    assert float(focal(z, torch.tensor([0]), gamma=2.0)) == pytest.approx(0.0179801, abs=1e-7)


@pytest.mark.parametrize("gamma", [0.1, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sure_label_has_a_small_finite_gradient(gamma, dtype):
    """Below 1 the power's slope at p = 1 is infinite and must not meet a zero."""
    for margin in (5.0, 15.0, 16.5, 17.5, 35.0, 100.0, 1e4):
        z = torch.tensor([[margin, 0.0]], dtype=dtype)
        grad = slope(Focal(gamma=gamma), z, torch.tensor([0]))
        assert grad.isfinite().all()
        assert grad.abs().max() <= 0.02
        assert focal(z, torch.tensor([0]), gamma=gamma) >= 0


def test_small_unlikelihoods_keep_their_digits():
    """Taken from p itself, 1 − p would be 0 in single precision."""
    nll = torch.tensor([1e-3, 1e-6, 1e-9])
    torch.testing.assert_close(label_rest(-nll), nll, rtol=1e-3, atol=0)
    assert label_rest(torch.zeros(1)) > 0


def test_flsd53_takes_5_below_a_fifth():
    p = torch.tensor([0.1, 0.199, 0.201, 0.7], dtype=torch.float64)
    z = torch.stack([p, 1 - p], dim=1).log()
    y = torch.zeros(4, dtype=torch.int64)
    low, high = focal(z, y, gamma=5.0), focal(z, y, gamma=3.0)
    torch.testing.assert_close(flsd53(z, y), torch.where(p < 0.2, low, high))
    ce = slope(nn.CrossEntropyLoss(reduction="sum"), z, y)
    exponent = torch.where(p < 0.2, 5.0, 3.0)
    torch.testing.assert_close(
        slope(FLSD53(detach_weight=True, reduction="sum"), z, y), ((1 - p) ** exponent)[:, None] * ce
    )
    both = slope(Focal(gamma=5.0, reduction="sum"), z, y), slope(Focal(gamma=3.0, reduction="sum"), z, y)
    torch.testing.assert_close(slope(FLSD53(reduction="sum"), z, y), torch.where(p[:, None] < 0.2, *both))


def test_dual_focal_by_hand():
    """p = (.5, .3, .2): below the label's .3 lies .2; below .2 nothing; below .5 lies .3."""
    z = torch.tensor([[0.5, 0.3, 0.2]] * 3, dtype=torch.float64).log()
    y = torch.tensor([0, 1, 2])
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    weight = torch.tensor([0.8, 0.9, 0.8], dtype=torch.float64)
    torch.testing.assert_close(dual_focal(z, y, gamma=2.0), -(weight**2) * p.log())


def test_dual_focal_with_ties_takes_strictly_less():
    z = torch.tensor([[0.4, 0.4, 0.2], [0.25, 0.25, 0.5]], dtype=torch.float64).log()
    result = dual_focal(z, torch.tensor([1, 0]), gamma=1.0)
    p = torch.tensor([0.4, 0.25], dtype=torch.float64)
    torch.testing.assert_close(result, -torch.tensor([0.8, 0.75], dtype=torch.float64) * p.log())
    assert slope(DualFocal(), z, torch.tensor([1, 0])).isfinite().all()
