import math

import numpy as np
import pytest

from trueup._core.optimize import FitError, Stage, lbfgs, newton


def counted(function):
    def wrapped(x):
        wrapped.calls += 1
        return function(x)

    wrapped.calls = 0
    return wrapped


@pytest.mark.parametrize("best", [1e-4, 0.3, 1.0, 700.0])
@pytest.mark.parametrize("start", [1e-3, 1.0, 1e3])
def test_newton_finds_the_minimum_of_a_convex_function(best, start):
    # x − best·ln x is convex with its minimum at `best`.
    derivatives = counted(lambda x: (x - best * math.log(x), 1 - best / x, best / x**2))
    x, certificate = newton(derivatives, start, low=1e-6, high=1e6)
    assert x == pytest.approx(best, rel=1e-9)
    assert certificate.status == "converged"
    assert certificate.passes == certificate.iterations == derivatives.calls < 60


def test_newton_converges_quadratically_from_nearby():
    derivatives = counted(lambda x: (x - math.log(x), 1 - 1 / x, 1 / x**2))
    newton(derivatives, 1.01, low=1e-6, high=1e6)
    assert derivatives.calls <= 4


def test_newton_survives_a_flat_start():
    # ln cosh is flat in curvature far from 0 of its argument: plain Newton steps would fly away.
    def derivatives(x):
        u = 5 * (math.log(x) - 2)
        return math.log(math.cosh(u)), 5 * math.tanh(u) / x, max(1e-300, (25 / math.cosh(u) ** 2) / x**2)

    x, _ = newton(derivatives, 1e-4, low=1e-6, high=1e6)
    assert x == pytest.approx(math.exp(2), rel=1e-6)


def test_newton_stops_at_a_bound():
    x, certificate = newton(lambda x: (-x, -1.0, 0.0), 1.0, low=0.1, high=10.0)
    assert x == pytest.approx(10.0, rel=1e-5)
    assert certificate.status == "bound"


def test_newton_names_what_is_not_finite():
    with pytest.raises(FitError, match="not finite at 1"):
        newton(lambda x: (math.nan, 1.0, 1.0), 1.0, low=0.1, high=10.0)


def rosenbrock(x):
    value = 100 * (x[1] - x[0] ** 2) ** 2 + (1 - x[0]) ** 2
    return value, np.array([-400 * x[0] * (x[1] - x[0] ** 2) - 2 * (1 - x[0]), 200 * (x[1] - x[0] ** 2)])


def test_lbfgs_solves_a_curved_valley():
    x, certificate = lbfgs(rosenbrock, np.array([-1.2, 1.0]))
    assert x == pytest.approx([1, 1], abs=1e-6)
    assert certificate.gradient <= 1e-7


@pytest.mark.parametrize("preconditioned", [False, True])
def test_lbfgs_solves_an_ill_conditioned_quadratic(preconditioned):
    scales = np.logspace(0, 4, 30)
    objective = counted(lambda x: (0.5 * float(scales @ (x - 1) ** 2), scales * (x - 1)))
    precondition = (lambda g: g / scales) if preconditioned else None
    x, certificate = lbfgs(objective, np.zeros(30), precondition=precondition, max_iter=2000)
    assert x == pytest.approx(np.ones(30), abs=1e-6)
    assert certificate.passes == objective.calls
    assert objective.calls <= (3 if preconditioned else 1000)


def test_lbfgs_names_its_failures():
    with pytest.raises(FitError, match="no minimum was found in 5 steps"):
        lbfgs(rosenbrock, np.array([-1.2, 1.0]), max_iter=5)
    with pytest.raises(FitError, match="not finite"):
        lbfgs(lambda x: (math.nan, x), np.ones(2))
    with pytest.raises(FitError, match="no descent is possible"):
        lbfgs(lambda x: (0.0, np.ones(2)), np.ones(2))


def valley(x):
    """Rosenbrock's, whose curvature turns on the way."""
    value = (1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2
    gradient = np.array([-2 * (1 - x[0]) - 400 * x[0] * (x[1] - x[0] ** 2), 200 * (x[1] - x[0] ** 2)])
    return value, gradient


def test_a_rough_objective_does_the_descent_and_the_exact_one_the_end():
    seen = {"rough": 0, "exact": 0}

    def exact(x):
        seen["exact"] += 1
        return valley(x)

    def rough(x):
        seen["rough"] += 1
        value, gradient = valley(x)
        return float(np.float32(value)), gradient.astype(np.float32).astype(float)

    x, certificate = lbfgs(exact, np.array([-1.2, 1.0]), coarse=Stage(rough, 1e-6, 1e-6))
    assert x == pytest.approx([1, 1], abs=1e-6)
    assert seen["rough"] > 3 * seen["exact"]
    assert certificate.passes == seen["rough"] + seen["exact"]


def test_a_rough_objective_that_leads_nowhere_hands_over():
    stuck = Stage(lambda x: (0.0, np.ones(2)), 1e-6, 0.0)
    x, _ = lbfgs(valley, np.array([-1.2, 1.0]), coarse=stuck)
    assert x == pytest.approx([1, 1], abs=1e-6)


def test_a_long_search_takes_its_curvature_anew(monkeypatch):
    scales = np.geomspace(1, 1e6, 60)  # too many for a memory of two steps

    def objective(x):
        return float(scales @ np.cosh(x) - scales.sum()), scales * np.sinh(x)

    at = []

    def renew(x):
        at.append(x.copy())
        return lambda g: g / (scales * np.cosh(x))

    start = np.full(60, 0.5)
    monkeypatch.setattr("trueup._core.optimize._MEMORY", 2)
    with pytest.raises(FitError, match="no minimum was found in 70 steps"):
        lbfgs(objective, start, max_iter=70, tolerance=1e-3)
    lbfgs(objective, start, max_iter=70, tolerance=1e-3, refresh=renew)
    assert len(at) == 1


def test_a_rough_stage_that_only_shows_rounding_hands_over():
    """In single precision a value may seem to fall for ever, by less than it is known to."""
    calls = 0

    def rough(x):
        nonlocal calls
        calls += 1
        return 1 - 1e-10 * calls, 1e-3 * np.array([math.cos(calls), math.sin(calls), 0.3])

    x, certificate = lbfgs(
        lambda x: (float(x @ x) + 1, 2 * x), np.ones(3), coarse=Stage(rough, ftol=1e-9, f_noise=1e-8)
    )
    assert np.abs(x).max() < 1e-7
    assert calls < 20
    assert certificate.passes < 40


def test_newton_ends_with_a_step_of_third_order():
    """Of x − ln x, whose minimum is at 1: two evaluations leave much less than the square of the last step."""
    asked = []

    def derivatives(x):
        asked.append(x)
        return x - np.log(x), 1 - 1 / x, 1 / x**2

    x, _ = newton(derivatives, 1.2, low=1e-6, high=1e6, tolerance=1e-1)
    assert len(asked) == 2
    assert abs(x - 1) < 0.3 * (asked[-1] - 1) ** 2  # 0.5 by Newton's step
