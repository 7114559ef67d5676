"""Inverse focal loss: its weight, and the exponent past which it is not monotone."""

import warnings

import pytest
import torch
from scipy.optimize import minimize_scalar

from trueup.losses import InverseFocal, inverse_focal
from trueup.losses._focal import MAX_MONOTONE_GAMMA

Z, Y = torch.tensor([[1.0, 0.0, -1.0]], dtype=torch.float64), torch.tensor([0])


def test_by_hand():
    """p = ½: 1.5² ln 2."""
    assert float(inverse_focal(torch.zeros(1, 2), Y, gamma=2.0)) == pytest.approx(1.5595812)


def test_detached_gradient_is_cross_entropys_times_the_weight():
    z = Z.clone().requires_grad_()
    inverse_focal(z, Y, gamma=3.0, detach_weight=True).sum().backward()
    p = torch.softmax(Z, dim=1)
    off = p - torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(z.grad, (1 + p[0, 0]) ** 3 * off)


def test_the_bound_is_where_the_loss_stops_falling():
    result = minimize_scalar(lambda p: -(1 + p) / (p * torch.tensor(p).log().item()), bounds=(0.01, 0.9))
    assert result.x == pytest.approx(0.278, abs=1e-3)
    assert pytest.approx(result.fun, abs=5e-5) == MAX_MONOTONE_GAMMA
    p = torch.linspace(0.01, 0.99, 2000, dtype=torch.float64)
    z, y = torch.stack([p, 1 - p], dim=1).log(), torch.zeros(2000, dtype=torch.int64)
    assert (inverse_focal(z, y, gamma=3.59).diff() < 0).all()
    with pytest.warns(UserWarning, match="3.7 > 3.59"):
        assert (inverse_focal(z, y, gamma=3.7).diff() > 0).any()


def test_it_warns_once_when_made_and_not_at_every_step():
    with pytest.warns(UserWarning, match="gamma 3.6 > 3.5911 rises with the label's probability"):
        loss = InverseFocal(gamma=3.6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss(Z, Y)
        InverseFocal(gamma=3.59)
        InverseFocal(gamma=9.0, detach_weight=True)
