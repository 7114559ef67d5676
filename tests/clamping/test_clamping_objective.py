"""The loss, its slopes, the best temperature and the penalty."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trueup.calibrators import Temperature
from trueup.clamping.problem import Loss, Penalty


def pair(n=300, classes=5, seed=0, scale=2.0):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, classes)) * scale
    y = (z / 2 + rng.gumbel(size=z.shape)).argmax(axis=1)
    return torch.from_numpy(z), torch.from_numpy(y)


@given(st.floats(0, 3), st.floats(0.2, 5), st.integers(0, 99))
def test_slopes_are_autograds(gamma, temperature, seed):
    z, y = pair(n=20, seed=seed)
    z.requires_grad_()
    log_p = torch.log_softmax(z / temperature, dim=1).gather(1, y[:, None])[:, 0]
    rows = -((1 - log_p.exp()) ** gamma) * log_p
    loss = Loss(gamma)
    torch.testing.assert_close(loss.rows(z.detach(), y, temperature), rows.detach())
    torch.testing.assert_close(loss.slope(z.detach(), y, temperature), torch.autograd.grad(rows.sum(), z)[0])
    assert loss.mean(z.detach(), y, temperature) == pytest.approx(float(rows.detach().mean()))


@pytest.mark.parametrize("gamma", [0.0, 0.05, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("near", [None, 1.0, 40.0])
@pytest.mark.parametrize("scale", [0.02, 2.0, 500.0])
def test_the_temperature_is_a_minimum_to_rounding(gamma, near, scale):
    z, y = pair(scale=2.0)
    z = z * (scale / 2)
    loss = Loss(gamma)
    fitted = loss.temperature(z, y, near)
    # The slope by ln T, whose size is that of the loss itself: at a minimum it is zero.
    slope = loss.slope(z, y, fitted) * -z
    assert abs(float(slope.sum(dim=1).mean())) < 1e-9
    for other in (0.9 * fitted, 1.1 * fitted, 0.3 * fitted, 3 * fitted):
        assert loss.mean(z, y, fitted) < loss.mean(z, y, other)
    if gamma == 0:
        assert fitted == pytest.approx(float(Temperature.fit(z, y).temperature), rel=1e-8)
    elif near is None:
        assert fitted == pytest.approx(float(Temperature.fit_focal(z, y, gamma=gamma).temperature), rel=1e-4)


def test_a_network_that_is_always_right_has_a_temperature_at_a_bound():
    assert 0 < Loss().temperature(torch.eye(3, dtype=torch.float64), torch.arange(3)) < 1e-5


def test_confident_rows_have_finite_slopes():
    z, y = torch.tensor([[1e4, 0.0], [-1e4, 0.0]], dtype=torch.float64), torch.tensor([0, 0])
    for gamma in (0.0, 0.05, 1.0):
        assert torch.isfinite(Loss(gamma).slope(z, y, 1.0)).all()
        assert torch.isfinite(Loss(gamma).rows(z, y, 1.0)).all()


@pytest.mark.parametrize("norm", ["l2sq", "l2"])
def test_the_penaltys_slope_is_its_difference(norm):
    penalty, at = Penalty(0.3, norm), np.array([0.5, -2.0, 1.0])
    for j, step in enumerate(1e-6 * np.eye(3)):
        expected = (penalty.value(at + step) - penalty.value(at - step)) / 2e-6
        assert penalty.slope(at)[j] == pytest.approx(expected, rel=1e-6)
    assert not penalty.slope(np.zeros(3)).any()


def test_a_gamma_that_is_none_is_refused():
    for gamma in (-1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="gamma must be a non-negative number"):
            Loss(gamma)
