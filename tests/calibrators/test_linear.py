from dataclasses import replace

import numpy as np
import pytest
from scipy.special import log_softmax, softmax

from strategies import calibrated
from trueup import METHODS, load, metrics
from trueup._core import native as room
from trueup._core.loss_sums import _numpy_vector, temperature_sums, vector_sums
from trueup._core.splits import k_fold
from trueup.calibrators import Dirichlet, Linear, Matrix, Structured, Temperature, Vector, likelihood
from trueup.calibrators.likelihood import Penalty, Problem
from trueup.calibrators.linear import PENALTIES, STRUCTURED_PENALTIES, _choose_penalty

LOGITS, LABELS = calibrated(800, 4, temperature=2.0)
Z, Y = LOGITS, LABELS


def autograd(problem, x):
    """Value and gradient of the objective by torch, from its definition."""
    torch = pytest.importorskip("torch")
    classes, z, y = problem.z.shape[1], torch.tensor(problem.z), torch.tensor(problem.y)
    x = torch.tensor(x, requires_grad=True)
    weight, bias = x[:-classes], x[-classes:]
    u = torch.log_softmax(problem.scale * z, dim=1) if problem.on == "log_probs" else z
    p = problem.penalty
    if problem.vector:
        logits = u * weight + bias
        penalty = p.diagonal * (weight - p.centre).square().sum()
    else:
        matrix = weight.reshape(classes, classes)
        logits = u @ matrix.T + bias
        diagonal = matrix.diagonal()
        penalty = (
            p.off * (matrix.square().sum() - diagonal.square().sum())
            + p.diagonal * (diagonal - p.centre).square().sum()
        )
    loss = torch.nn.functional.cross_entropy(logits, y) + penalty + p.bias * bias.square().sum()
    loss.backward()
    return loss.item(), x.grad.numpy()


@pytest.mark.parametrize("vector", [True, False])
@pytest.mark.parametrize(("on", "scale"), [("logits", 1.0), ("log_probs", 1.0), ("log_probs", 0.4)])
@pytest.mark.parametrize("native", [True, False])
def test_the_objective_and_its_gradient_are_those_of_the_definition(monkeypatch, vector, on, scale, native):
    if not native:
        monkeypatch.setattr(room, "compiled", None)
    problem = Problem(Z, Y, Penalty(off=0.3, diagonal=0.2, bias=0.1, centre=1.0), on=on, scale=scale, vector=vector)
    x = problem.canonical(np.random.default_rng(0).normal(size=8 if vector else 20))
    value, gradient = problem._objective()(x)
    expected, slopes = autograd(problem, x)
    assert value == pytest.approx(expected, rel=1e-10)
    assert gradient == pytest.approx(slopes, rel=1e-8, abs=1e-10)
    value, gradient = replace(problem, z=Z.astype(np.float32))._objective(quick=True)(x)
    assert value == pytest.approx(expected, rel=1e-5)
    assert gradient == pytest.approx(slopes, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("vector", [True, False])
def test_settling_changes_no_probability_and_lowers_the_penalty(vector):
    problem = Problem(Z, Y, Penalty(off=0.3, diagonal=0.2, bias=0.1, centre=1.0), vector=vector)
    x = np.random.default_rng(0).normal(size=8 if vector else 20)
    settled = problem.canonical(x)
    (before, _), (after, slopes) = autograd(problem, x), autograd(problem, settled)
    assert after <= before
    free = Problem(Z, Y, Penalty(), vector=vector)
    assert autograd(free, settled)[0] == pytest.approx(autograd(free, x)[0], abs=1e-12)
    assert np.array_equal(problem.canonical(settled).round(12), settled.round(12))
    assert slopes[-4:].sum() == pytest.approx(0, abs=1e-12)  # nothing to gain from a constant in the bias


def hessian(problem, x):
    """By differences of the exact gradient, in the entries of each class by itself."""
    columns = []
    for j in range(len(x)):
        step = np.zeros_like(x)
        step[j] = 1e-5
        columns.append((autograd(problem, x + step)[1] - autograd(problem, x - step)[1]) / 2e-5)
    return np.stack(columns)


@pytest.mark.parametrize("vector", [True, False])
@pytest.mark.parametrize("pooled", [True, False])
def test_the_curvature_is_about_that_of_each_class(monkeypatch, vector, pooled):
    monkeypatch.setattr(likelihood, "_FEW_CLASSES", 0 if pooled else 32)
    problem = Problem(Z, Y, Penalty(off=0.03, diagonal=0.01, bias=0.02), on="log_probs", vector=vector)
    x = problem.start_point(1.0)
    inverse = problem.inverse(problem.blocks(x))
    exact, unit = hessian(problem, x), np.eye(len(x))
    applied = np.stack([inverse(row) for row in unit])
    assert np.allclose(applied, applied.T, atol=1e-9 * abs(applied).max())
    for k in range(4):
        mine = [k, 4 + k] if vector else [*range(4 * k, 4 * k + 4), 16 + k]
        block = np.ix_(mine, mine)
        sizes = np.linalg.eigvals(applied[block] @ exact[block]).real
        # With curvatures of their own the blocks are exact; with a shared covariance they are of the right size.
        low, high = (0.2, 3.0) if pooled and not vector else (0.99, 1.01)
        assert low < sizes.min()
        assert sizes.max() < high


def test_the_quick_passes_equal_the_exact_ones_to_single_precision():
    rng = np.random.default_rng(0)
    for classes in (3, 100, 200):  # of short rows, of many, and of long ones
        z, y = 4 * rng.standard_normal((75, classes), np.float32), rng.integers(classes, size=75)
        assert temperature_sums(z, y, 0.7, quick=True) == pytest.approx(temperature_sums(z, y, 0.7), rel=1e-5)
        weight, bias = rng.normal(size=(2, classes)) + 1
        shift = np.linspace(-2, 2, 75)
        exact = vector_sums(z, y, weight, bias, scale=0.7, shift=shift)
        assert exact == pytest.approx(
            _numpy_vector(z.astype(np.float64), y, (weight, bias), 0.7, shift), rel=1e-9, abs=1e-9
        )
        quick = vector_sums(z, y, weight, bias, scale=0.7, shift=shift, quick=True)
        assert quick == pytest.approx(exact, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("on", ["logits", "log_probs"])
def test_leaving_the_path_of_penalties_early_chooses_as_the_whole_path_does(data, on):
    val = load(data / "logits" / "cifar10_densenet40.npz", split="val")
    z, y = val
    problem = Problem(z, y, Penalty(), on=on)
    path = [Penalty.odir(strength, 10) for strength in sorted(PENALTIES, reverse=True)]
    each = [_choose_penalty([penalty], problem, 0.35, 5) for penalty in path]
    assert _choose_penalty(path, problem, 0.35, 5)[1] == min(each, key=lambda found: found[0])[1]


def test_the_cross_validated_loss_of_a_penalty_is_a_mean_of_held_out_rows():
    problem = Problem(Z, Y, Penalty.odir(1e-3, 4))
    weight, bias, _ = problem.solve(0.5)
    in_sample = metrics.nll(LOGITS @ weight.T + bias, LABELS)
    held_out = _choose_penalty([problem.penalty], problem, 0.5, 5)[0]
    assert in_sample < held_out < 1.1 * in_sample


def test_vector_sums_agree_between_passes():
    rng = np.random.default_rng(1)
    weight, bias, shift = rng.normal(size=4), rng.normal(size=4), rng.normal(size=800)
    native = vector_sums(Z, Y, weight, bias, scale=0.7, shift=shift)
    assert native == pytest.approx(_numpy_vector(Z, Y, (weight, bias), 0.7, shift), rel=1e-10)


@pytest.mark.parametrize("fit", [Vector.fit, Matrix.fit, Structured.fit_vector, Structured.fit_matrix])
def test_fits_end_where_the_gradient_vanishes(fit):
    found = fit(LOGITS, LABELS)
    assert found.certificate.status == "converged"
    assert found.certificate.gradient <= 1e-4
    assert metrics.nll(found(LOGITS), LABELS) <= metrics.nll(Temperature.fit(LOGITS, LABELS)(LOGITS), LABELS) + 1e-9


def test_a_known_vector_and_matrix_are_recovered():
    rng = np.random.default_rng(2)
    z = rng.normal(size=(60_000, 3)) * 2
    weight, bias = np.array([0.4, 0.7, 1.1]), np.array([0.5, 0.0, -0.5])
    y = (z * weight + bias + rng.gumbel(size=z.shape)).argmax(axis=1)
    found = Vector.fit(z, y)
    assert found.weight == pytest.approx(weight, abs=0.04)
    assert found.bias == pytest.approx(bias, abs=0.04)
    matrix = np.array([[0.6, 0.1, 0.0], [0.0, 0.8, -0.2], [0.1, 0.0, 0.5]])
    y = (z @ matrix.T + rng.gumbel(size=z.shape)).argmax(axis=1)
    fitted = Matrix.fit(z, y).weight
    # Rows of W are known up to a common row.
    assert fitted - fitted.mean(axis=0) == pytest.approx(matrix - matrix.mean(axis=0), abs=0.05)


def test_strong_penalties_leave_the_diagonal_free_and_nothing_else():
    found = Dirichlet.fit_odir(LOGITS, LABELS, penalty=1e8)
    off = found.weight - np.diag(found.weight.diagonal())
    assert abs(off).max() < 1e-5
    assert abs(found.bias).max() < 1e-5


def test_the_structured_penalty_is_that_of_least_held_out_loss():
    """Against a slow search that fits every multiple anew on every fold."""
    rng = np.random.default_rng(5)
    z = rng.normal(size=(600, 4)) * 2
    mixed = z @ (np.eye(4) + 0.8 * rng.normal(size=(4, 4)))  # a fault that a strong penalty cannot repair
    y, logits = (z + rng.gumbel(size=z.shape)).argmax(axis=1), mixed
    beta = 1 / METHODS["temperature"](logits, y).temperature

    def fit(multiple, rows, of):
        n = 600
        penalty = Penalty(off=multiple * 12 / n, diagonal=4 / n, bias=4 / n, centre=1.0)
        weight, bias, _ = Problem(logits[rows], y[rows], penalty, on="log_probs", scale=beta).solve(1.0)
        return Structured(1 / beta, weight, bias)(logits[of])

    losses = {}
    for multiple in STRUCTURED_PENALTIES:
        parts = [
            metrics.nll(fit(multiple, train, held), y[held]) * int(held.sum()) for train, held in k_fold(logits, y, 5)
        ]
        losses[multiple] = sum(parts)
    best = min(losses, key=losses.get)
    assert best < 1
    everything = np.ones(600, bool)
    found = METHODS["sms_cv"](logits, y)
    expected = fit(best, everything, everything)
    assert softmax(found(logits), axis=1) == pytest.approx(softmax(expected, axis=1), abs=3e-5)
    one = METHODS["sms_cv"](logits, y, penalties=[1.0])
    np.testing.assert_array_equal(one.weight, METHODS["sms"](logits, y).weight)


def test_structured_scaling_is_temperature_under_strong_penalties_and_minimises_its_objective():
    strong = Penalty(off=1e4, diagonal=1e4, bias=1e4, centre=1.0)
    for vector in (True, False):
        weight, bias, _ = Problem(Z, Y, strong, on="log_probs", scale=0.5, vector=vector).solve(1.0)
        assert weight == pytest.approx(np.ones(4) if vector else np.eye(4), abs=1e-4)
        assert bias == pytest.approx(np.zeros(4), abs=1e-4)
    found = Structured.fit_vector(LOGITS, LABELS)
    n, classes = LOGITS.shape

    def objective(weight, bias):
        loss = metrics.nll(log_softmax(Z / found.temperature, axis=1) * weight + bias, Y)
        return loss + classes / n * (((weight - 1) ** 2).sum() + (bias**2).sum())

    here = objective(found.weight, found.bias)
    rng = np.random.default_rng(0)
    for _ in range(20):
        nudge = rng.normal(size=(2, 4)) * 1e-3
        assert here <= objective(found.weight + nudge[0], found.bias + nudge[1]) + 1e-12


def test_normalised_and_plain_penalties_are_the_same_family():
    normalised = Dirichlet.fit_odir(LOGITS, LABELS, penalty=12.0)
    # λ/(K(K−1)) off the diagonal and μ/K on the bias, with K = 4: 1 and 3.
    plain = Problem(Z, Y, Penalty(off=1.0, bias=3.0), on="log_probs").solve(0.5)[0]
    assert normalised.weight == pytest.approx(plain, abs=1e-4)


def test_the_penalty_is_chosen_on_rows_not_fitted_on():
    logits, labels = calibrated(150, 6, temperature=1.5)
    chosen = Matrix.fit_odir(logits, labels)
    fresh = calibrated(5000, 6, temperature=1.5, seed=9)
    assert metrics.nll(chosen(fresh[0]), fresh[1]) < metrics.nll(Matrix.fit(logits, labels)(fresh[0]), fresh[1])
    full = Matrix.fit_odir(logits, labels, penalties=[1.0, 100.0], bias_penalties=[0.1, 10.0])
    assert np.isfinite(full(logits)).all()


def test_separable_data_end_at_a_finite_map():
    logits = np.random.default_rng(0).normal(size=(60, 3))
    for fit in (Vector.fit, Matrix.fit, Structured.fit_matrix):
        found = fit(logits, logits.argmax(axis=1))
        assert np.isfinite(found.weight).all()


def test_parameters_and_classes_are_checked():
    with pytest.raises(ValueError, match=r"weight must have shape \(3,\) or \(3, 3\), got \(2,\)"):
        Linear(np.ones(2), np.zeros(3))
    with pytest.raises(ValueError, match="logits must have the 4 classes of the fit, got 3"):
        Vector.fit(LOGITS, LABELS)(LOGITS[:, :3])


def test_on_a_real_network_they_do_not_overfit(data):
    file = data / "logits" / "cifar10_densenet40.npz"
    val, (logits, labels) = load(file, split="val"), load(file, split="test")
    limit = metrics.nll(Temperature.fit(*val)(logits), labels) + 0.002
    eces = {}
    for name, fit in {
        "ms": Matrix.fit_odir,
        "dir": Dirichlet.fit_odir,
        "svs": Structured.fit_vector,
        "sms": Structured.fit_matrix,
    }.items():
        found = fit(*val)(logits)
        assert metrics.nll(found, labels) <= limit, name
        eces[name] = metrics.ece(found, labels)
    assert eces["ms"] == pytest.approx(0.0099, abs=0.002)
    assert eces["dir"] == pytest.approx(0.0110, abs=0.003)


@pytest.mark.parametrize("method", ["matrix", "dirichlet", "ms_odir"])
def test_nearly_separable_rows_in_single_precision_are_no_trap(method):
    """In single precision such a loss shows descent that is only rounding, step after step."""
    rng = np.random.default_rng(1)
    z = (12 * rng.normal(size=(350, 10))).astype(np.float32)
    y = np.where(rng.random(350) < 0.06, rng.integers(0, 10, 350), z.argmax(axis=1))
    single, double = METHODS[method](z, y), METHODS[method](z.astype(np.float64), y)
    assert single.certificate.passes < 1000
    assert single.certificate.loss == pytest.approx(double.certificate.loss, abs=1e-8)


@pytest.mark.parametrize(("n", "classes", "skew"), [(6000, 500, 0.0), (20_000, 50, 1.0)])
def test_many_classes_and_rare_ones_take_few_passes(n, classes, skew):
    """Where the curvature is taken from a row a class, or a class is rare, frequencies known of all rows stand in."""
    rng = np.random.default_rng(0)
    z = 3 * rng.standard_normal((n, classes), dtype=np.float32)
    shift = skew * rng.standard_normal(classes, dtype=np.float32)
    y = (z / 1.7 + shift - np.log(rng.standard_exponential(z.shape))).argmax(axis=1)
    assert Vector.fit(z, y).certificate.passes <= 20


@pytest.mark.parametrize("method", ["vector", "matrix", "ms_odir"])
@pytest.mark.parametrize("offset", [1e5, -1e6])
def test_a_common_offset_is_taken_out_before_the_fit(method, offset):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(300, 3)) * 2
    y = (z / 2 + rng.gumbel(size=z.shape)).argmax(axis=1)
    z = z - z.mean()
    plain, far = METHODS[method](z, y), METHODS[method](z + offset, y)
    assert np.allclose(softmax(far(z + offset), axis=1), softmax(plain(z), axis=1), atol=1e-3)
    assert far.certificate.passes < 3 * plain.certificate.passes + 50


@pytest.mark.parametrize("weighted", [False, True])
def test_the_whole_curvature_is_that_of_the_objective(weighted):
    w = np.linspace(0.5, 2.0, len(Z)) if weighted else None
    problem = Problem(Z, Y, Penalty(off=0.01, diagonal=0.02, bias=0.03), w=w)
    rng = np.random.default_rng(0)
    x = problem.canonical(np.concatenate([np.eye(4).ravel(), np.zeros(4)]) + 0.1 * rng.normal(size=20))
    step = 1e-5 * problem.canonical(rng.normal(size=20))
    gradients = [problem._objective()(problem.canonical(x + sign * step))[1] for sign in (1, -1)]
    change = (gradients[0] - gradients[1]) / 2
    assert problem.canonical(problem.inverse(problem.blocks(x, careful=True))(change)) == pytest.approx(step, rel=1e-3)


@pytest.mark.parametrize("name", ["resnet20", "resnet32"])
def test_logits_that_nearly_add_up_to_zero_take_few_steps(data, name):
    """The rows of these networks' last layers add up to nearly nothing, and so do their logits."""
    with np.load(data / "logits" / f"cifar10_{name}.npz") as file:
        z, y = (np.concatenate([file[f"val_{kind}"], file[f"test_{kind}"]]) for kind in ("logits", "labels"))
    for seed in range(3):
        rows = np.random.default_rng(seed).permutation(len(z))[:5000]
        certificate = Matrix.fit(z[rows], y[rows]).certificate
        assert certificate.status == "converged"
        assert certificate.iterations < 100
        assert certificate.gradient < 1e-5
