"""The linear model of a network: derivatives, small problems and cross-validation."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from trueup.clamping import linearized as linear
from trueup.clamping.calibration_set import CalibrationSet
from trueup.clamping.input_parameters import InputParameters, channel_norms
from trueup.clamping.linearized import LinearizedModel, cross_validate, linearize, max_samples_in_memory
from trueup.clamping.network import Network
from trueup.clamping.problem import Loss, Penalty
from trueup_studies.networks import MLP


def drawn(n=400, classes=4, coordinates=3, signal=0.0, seed=0):
    """Logits and derivatives, with labels that follow logits moved by a multiple of the derivatives."""
    rng = np.random.default_rng(seed)
    z, jacobian = rng.normal(size=(n, classes)) * 2, rng.normal(size=(n, classes, coordinates))
    moved = z + jacobian @ np.full(coordinates, signal)
    y = (moved / 1.5 + rng.gumbel(size=z.shape)).argmax(axis=1)
    return LinearizedModel(torch.from_numpy(z), torch.from_numpy(jacobian), torch.from_numpy(y))


@pytest.mark.parametrize("gamma", [0.0, 0.7])
@pytest.mark.parametrize(("norm", "penalty"), [("l2sq", 0.01), ("l2sq", 0.0), ("l2", 0.01)])
def test_a_small_problem_is_solved(gamma, norm, penalty):
    given = drawn(signal=0.5)
    loss, penalty = Loss(gamma), Penalty(penalty, norm)
    temperature = loss.temperature(given.logits, given.labels)
    features = torch.cat([given.logits[:, :, None], given.jacobian], dim=2)

    def objective(x):
        logits = given.logits + given.jacobian @ torch.from_numpy(x[1:])
        return loss.mean(logits, given.labels, math.exp(x[0])) + penalty.value(x[1:])

    start = np.concatenate([[1 / temperature], np.zeros(3)])
    weights = linear._solve(features, given.labels, loss, penalty, start)
    mine = np.concatenate([[-math.log(weights[0])], weights[1:] / weights[0]])
    expected = minimize(objective, np.concatenate([[math.log(temperature)], np.full(3, 0.1)]), tol=1e-10)
    assert objective(mine) == pytest.approx(expected.fun, abs=1e-7)
    np.testing.assert_allclose(mine, expected.x, atol=1e-3)


def test_the_plain_norm_may_hold_everything_at_zero():
    given = drawn()
    features = torch.cat([given.logits[:, :, None], given.jacobian], dim=2)
    start = np.array([1 / Loss().temperature(given.logits, given.labels), 0.0, 0.0, 0.0])
    weights = linear._solve(features, given.labels, Loss(), Penalty(1.0, "l2"), start)
    assert not weights[1:].any()


def test_temperature_wins_where_there_is_nothing_to_gain_and_not_where_there_is():
    lams = (1e-1, 1e-2, 1e-4)
    nothing = cross_validate(drawn(), Loss(), "l2sq", lams, n_folds=5)
    gain, error = nothing.gain(nothing.best())
    assert gain <= error
    something = cross_validate(drawn(signal=0.5), Loss(), "l2sq", lams, n_folds=5)
    assert something.best() == 1e-2
    gain, error = something.gain(1e-2)
    assert gain > 4 * error > 0
    assert set(something.candidates()) == {math.inf, *lams}
    assert something.gain(math.inf) == (0.0, 0.0)


def test_rows_are_judged_by_fits_that_did_not_see_them():
    given = drawn(n=50)
    fitted = cross_validate(given, Loss(), "l2sq", (1e-3,), n_folds=5)
    fold = np.arange(50) % 5
    features = torch.cat([given.logits[:, :, None], given.jacobian], dim=2)
    for f in range(5):
        out = torch.from_numpy(fold == f)
        temperature = Loss().temperature(given.logits[~out], given.labels[~out])
        np.testing.assert_allclose(
            fitted.plain[fold == f], Loss().rows(given.logits[out], given.labels[out], temperature), rtol=1e-9
        )
        start = np.concatenate([[1 / temperature], np.zeros(3)])
        weights = linear._solve(features[~out], given.labels[~out], Loss(), Penalty(1e-3), start)
        judged = Loss().rows(features[out] @ torch.from_numpy(weights), given.labels[out], 1.0)
        np.testing.assert_allclose(fitted.rows[0, fold == f], judged, rtol=1e-4)


@pytest.mark.parametrize("scaled", [False, True])
def test_differences_are_derivatives(scaled):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 5, generator=generator).double(), torch.randint(0, 3, (30,), generator=generator)
    model = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 3)).double()
    network = Network(model.requires_grad_(False), CalibrationSet.read([(x, y)], device="cpu"))
    basis = torch.linalg.qr(torch.randn(5, 2, generator=generator).double())[0].T
    chart = InputParameters(network, basis, channel_norms(network), has_scale=scaled)
    part = network.inputs.subset(torch.arange(10))
    fitted = linearize(chart, part, network.plain_logits()[:10], y[:10], step_size=1e-6)
    assert fitted.jacobian.shape == (10, 3, 7 if scaled else 2)
    theta = torch.zeros(chart.size, dtype=torch.float64)

    def logits(theta):
        moved = x[:10] + theta[:2] @ basis
        return model(moved if not scaled else x[:10] * torch.exp(theta[2:] / chart.channel_norms) + theta[:2] @ basis)

    expected = torch.autograd.functional.jacobian(logits, theta)
    torch.testing.assert_close(fitted.jacobian, expected, atol=1e-5, rtol=1e-4)
    # So are each sample's gradient and the curvature.
    scores, by_inverse = fitted.scores(Loss(), 1.3)

    def losses(theta, beta=1 / 1.3):
        return nn.functional.cross_entropy(logits(theta) * beta, y[:10], reduction="none")

    np.testing.assert_allclose(scores, torch.autograd.functional.jacobian(losses, theta), atol=1e-5)
    beta = torch.tensor(1 / 1.3, dtype=torch.float64)
    np.testing.assert_allclose(
        by_inverse, torch.autograd.functional.jacobian(lambda b: losses(theta, b), beta), atol=1e-5
    )
    curvature = fitted.curvature(1.3)
    p = torch.softmax(logits(theta) / 1.3, dim=1)
    whole = np.zeros((chart.size + 1, chart.size + 1))
    for i in range(10):
        rows = torch.cat([logits(theta)[i][:, None], expected[i] / 1.3], dim=1).numpy()
        q = p[i].numpy()
        whole += rows.T @ (np.diag(q) - np.outer(q, q)) @ rows / 10
    np.testing.assert_allclose(curvature, np.linalg.inv(np.linalg.inv(whole)[1:, 1:]), rtol=1e-3, atol=1e-6)


def test_memory_limits_the_samples():
    assert max_samples_in_memory(10**6, 1000, 13) == linear.MEMORY // (8 * 1000 * 14)
    assert max_samples_in_memory(50, 10, 13) == 50


def test_the_gradient_of_a_chart_is_that_of_its_map():
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(20, 2, 3, 3, generator=generator).double(), torch.randint(0, 3, (20,), generator=generator)
    model = MLP(3, inputs=18, hidden=(8,)).double().requires_grad_(False)
    network = Network(model, CalibrationSet.read([(x, y)], device="cpu"))
    basis = torch.linalg.qr(torch.randn(18, 4, generator=generator).double())[0].T.reshape(4, 2, 3, 3)
    spread = channel_norms(network)
    torch.testing.assert_close(spread, x.square().sum(dim=(2, 3)).mean(dim=0).sqrt())
    for chart in (
        InputParameters(network, basis, spread, has_scale=True),
        InputParameters(network, None, spread, has_scale=True),
        InputParameters(network, basis, spread),
    ):
        theta = np.random.default_rng(0).normal(size=chart.size)

        def value(theta, chart=chart):
            return float(nn.functional.cross_entropy(network.logits(chart.map(theta)[0]), y, reduction="sum"))

        before, leaves = chart.map(theta)
        slope = lambda z, y: torch.softmax(z, dim=1) - nn.functional.one_hot(y, 3)  # noqa: E731
        _, gradients = network.forward_backward(before, leaves, slope)
        mine = chart.gradient(theta, gradients)
        for j, step in enumerate(1e-6 * np.eye(chart.size)):
            assert mine[j] == pytest.approx((value(theta + step) - value(theta - step)) / 2e-6, abs=1e-5)
    delta = torch.randn(2, 3, 3, generator=generator).double()
    assert InputParameters(network, basis, spread).theta_of(delta) == pytest.approx(
        (basis.reshape(4, -1) @ delta.reshape(-1)).numpy()
    )
