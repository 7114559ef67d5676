"""Variable projection against a general minimiser, and its economy."""

import math
from functools import partial

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from flat_options import clamp_with as clamp
from trueup.clamping.calibration_set import CalibrationSet
from trueup.clamping.input_parameters import InputParameters
from trueup.clamping.network import Network
from trueup.clamping.problem import Loss, Penalty, Problem
from trueup.clamping.varpro import VarProObjective, descend, varpro


def sample(n=200, moved=1.0):
    """A smooth network whose inputs are off by a constant."""
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator).double()
    x = torch.randn(n, 4, generator=generator).double()
    with torch.no_grad():
        y = torch.multinomial(torch.softmax(model(x), dim=1), 1, generator=generator)[:, 0]
    return model, x + moved * torch.tensor([1.0, -1.0, 0.5, 0.0]).double(), y


def whole(model, x, y, gamma, penalty, norm):
    def objective(theta):
        with torch.no_grad():
            z = model(x + torch.from_numpy(theta[:4]))
        return Loss(gamma).mean(z, y, math.exp(theta[4])) + Penalty(penalty, norm).value(theta[:4])

    return objective


def problem_of(network, loss):
    return Problem(network, loss, 0.0, "l2sq", None, "shift", 0, lambda line: None)


@pytest.mark.parametrize(("gamma", "penalty", "norm"), [(0.0, 0.01, "l2sq"), (1.0, 0.02, "l2sq"), (0.0, 0.02, "l2")])
def test_it_ends_where_a_general_minimiser_ends(gamma, penalty, norm):
    model, x, y = sample()
    fitted = clamp(
        model,
        [(x[:120], y[:120]), (x[120:], y[120:])],
        recipe=partial(varpro, passes=200),
        loss="focal",
        gamma=gamma,
        penalty=penalty,
        norm=norm,
        progress=False,
    )
    record = fitted.fit_record
    objective = whole(model, x, y, gamma, penalty, norm)
    mine = np.append(fitted.before.delta.numpy(), math.log(record.temperature))
    assert record.objective == pytest.approx(objective(mine), abs=1e-12)
    expected = minimize(objective, mine + 0.01, tol=1e-12)
    assert record.objective == pytest.approx(expected.fun, abs=2e-5)
    assert record.objective < record.baseline - 0.05
    assert record.lemma_residual < 1e-9
    assert record.delta_norm == pytest.approx(float(fitted.before.delta.norm()))


def test_the_plain_norm_holds_delta_at_exactly_zero():
    model, x, y = sample(moved=0.0)
    fitted = clamp(model, [(x, y)], recipe="varpro", penalty=5.0, norm="l2", progress=False)
    assert not fitted.before.delta.any()
    assert fitted.fit_record.objective == pytest.approx(fitted.fit_record.baseline, abs=1e-12)
    assert fitted.fit_record.backwards == 1  # it sees at once that there is nowhere to go


def test_it_keeps_to_its_passes():
    model, x, y = sample()
    for passes in (1.0, 2.0, 6.0):
        record = clamp(model, [(x, y)], recipe=partial(varpro, passes=passes), penalty=0.001, progress=False).fit_record
        assert record.backwards <= passes
        assert record.objective <= record.baseline + 1e-12


def test_the_penalty_is_chosen_on_samples_left_out():
    model, x, y = sample(n=600)
    fitted = clamp(model, [(x, y)], recipe=partial(varpro, penalties=(1.0, 0.001)), progress=False)
    record = fitted.fit_record
    assert record.penalty == 0.001
    assert list(record.candidates) == [math.inf, 1.0, 0.001]
    assert record.candidates[0.001] < record.candidates[1.0] < record.candidates[math.inf]
    # Where there are more coordinates than samples, δ can learn all of them by heart, and temperature is better.
    generator = torch.Generator().manual_seed(0)
    wide = nn.Sequential(nn.Linear(80, 40), nn.Tanh(), nn.Linear(40, 3)).double()
    for p in wide.parameters():
        p.data = torch.randn(p.shape, generator=generator).double()
    x = torch.randn(60, 80, generator=generator).double()
    with torch.no_grad():
        y = torch.multinomial(torch.softmax(wide(x) / 3, dim=1), 1, generator=generator)[:, 0]
    record = clamp(wide, [(x, y)], recipe=partial(varpro, penalties=(1e-6,)), progress=False).fit_record
    assert record.candidates[math.inf] <= record.candidates[1e-6]
    assert math.isinf(record.penalty)
    assert record.delta_norm == 0
    assert "temperature alone" in record.verdict


def test_rules_of_the_paper():
    model, x, y = sample()
    at_start = clamp(model, [(x, y)], recipe="varpro", penalty="R1", progress=False).fit_record
    with torch.no_grad():
        assert at_start.penalty == pytest.approx(0.1 * float(nn.functional.cross_entropy(model(x), y)))
    with pytest.raises(ValueError, match="start must not be zero"):
        clamp(model, [(x, y)], recipe="varpro", penalty="R2", progress=False)
    by_second = clamp(model, [(x, y)], recipe="varpro", penalty="R2", start="random", progress=False).fit_record
    assert by_second.penalty > 1e3


def test_the_gradient_is_that_of_the_value_and_points_that_explode_are_left():
    model, x, y = sample()
    with torch.no_grad():
        network = Network(model.requires_grad_(False), CalibrationSet.read([(x, y)], device="cpu"))
    problem, chart = problem_of(network, Loss(1.0)), InputParameters(network, None, torch.ones(4))
    objective = VarProObjective(problem, chart, 0.1, temperature=1.0)
    theta = np.array([0.1, -0.2, 0.3, 0.0])
    value, gradient = objective(theta)

    def alone(theta):
        return VarProObjective(problem, chart, 0.1, temperature=1.0)(theta)[0]

    for j, step in enumerate(1e-5 * np.eye(4)):
        assert gradient[j] == pytest.approx((alone(theta + step) - alone(theta - step)) / 2e-5, abs=1e-6)
    used = objective.used
    assert objective(theta)[0] == value
    assert objective.used == used  # the last point is remembered

    class Exploding(nn.Module):
        def forward(self, x):
            return torch.where(x > 3, torch.nan, x)

    small = Network(
        Exploding(), CalibrationSet.read([(torch.zeros(4, 2).double() + 0.1, torch.tensor([0, 1, 0, 0]))], device="cpu")
    )
    bad = VarProObjective(problem_of(small, Loss()), InputParameters(small, None, torch.ones(2)), 0.0, temperature=1.0)
    assert bad(np.array([9.0, 0.0]))[0] == math.inf
    assert descend(bad, np.array([0.0, 0.0])).value < math.log(2)
