import numpy as np
import pytest
import torch

import trueup
from strategies import calibrated
from trueup import METHODS, metrics
from trueup._core.splits import k_fold
from trueup.calibrators import OrderInvariant, Residual, Temperature
from trueup.calibrators.neural import _Examples, _gradients, _loss, average_folds, fit_folds
from trueup.integrations.onnx import TOLERANCE, check_export
from trueup.models import as_module


def faulty(n, seed=0, classes=3):
    """Logits whose fault no curve of one class and no matrix repairs: where two classes are close, both are wrong."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, classes)) * 2
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    gap = np.diff(np.sort(z, axis=1))[:, -1:]
    return np.where(gap < 1.0, -z, z), y


@pytest.fixture(scope="module")
def trained():
    return METHODS["residual"](*faulty(1500))


def slow_map(calibrator, row):
    """The formula, one row and one network at a time."""
    p = np.exp(row - row.max())
    b = np.log(p / p.sum())
    clamped = np.maximum(b, -20.0)
    each = list(clamped) if len(b) <= 50 else []
    f = np.array([*each, *sorted(clamped, reverse=True)[:6], -sum(np.exp(b) * clamped)])
    mixture = 0.0
    for first, output in zip(calibrator.first, calibrator.output, strict=True):
        a = first[:, :-1] @ f + first[:, -1]
        out = output @ (a / (1 + np.exp(-a)))
        q = np.exp(np.exp(np.clip(out[0], -3, 3)) * np.maximum(b, -80.0) + out[1:])
        mixture = mixture + q / q.sum()
    return mixture / len(calibrator.first)


@pytest.mark.parametrize("classes", [2, 4, 60])
def test_the_map_is_the_formula(classes):
    rng = np.random.default_rng(0)
    features = (classes if classes <= 50 else 0) + min(6, classes) + 1
    layers = rng.normal(size=(3, 5, features + 1)) * 0.3, rng.normal(size=(3, classes + 1, 5)) * 0.5
    calibrator = Residual(Temperature(1.0), *layers)
    z = rng.normal(size=(20, classes)) * 8
    assert np.exp(calibrator(z)) == pytest.approx(np.array([slow_map(calibrator, row) for row in z]), abs=1e-12)


def test_it_repairs_what_the_base_cannot(trained):
    z, y = faulty(4000, seed=1)
    base = METHODS["diagonal_sms"](*faulty(1500))
    assert isinstance(trained, Residual)
    assert metrics.nll(trained(z), y) < 0.98 * metrics.nll(base(z), y)


def test_where_nothing_is_to_correct_it_is_the_base():
    z, y = calibrated(600, 3, temperature=2.0)
    fitted, base = METHODS["residual"](z, y, base="temperature"), METHODS["temperature"](z, y)
    assert type(fitted) is type(base)
    assert fitted(z) == pytest.approx(base(z), abs=1e-6)


def test_few_rows_give_the_base():
    assert type(METHODS["residual"](*faulty(499), base="svs")).__name__ == "Structured"


def test_the_order_of_rows_changes_nothing(trained):
    z, y = faulty(1500)
    order = np.random.default_rng(0).permutation(len(y))
    again = METHODS["residual"](z[order], y[order])
    new = faulty(100, seed=2)[0]
    assert np.array_equal(again(new), trained(new))


def test_folds_have_not_seen_their_rows():
    """With labels of noise, a network that had seen a row would favour its label."""
    z, y = faulty(1000)
    noise = np.random.default_rng(3).integers(0, 3, 1000)
    folds = k_fold(z, noise, 5)
    models = fit_folds(Residual, z, noise, folds, [Temperature(100.0)] * 5)
    held_out = sum(
        metrics.nll(model(z[held]), noise[held]) * int(held.sum())
        for model, (_, held) in zip(models, folds, strict=True)
    )
    assert held_out / 1000 > np.log(3) - 0.01
    honest = fit_folds(Residual, z, y, k_fold(z, y, 5), [Temperature(1.0)] * 5)
    whole = average_folds(honest, Temperature(1.0))
    assert whole.first.shape[0] == 5
    assert np.array_equal(whole.first[2], honest[2].first[0])


def test_two_classes_and_their_order():
    z, y = faulty(1500, seed=1, classes=2)
    fitted = METHODS["residual"](z, y)
    assert metrics.nll(fitted(z), y) < metrics.nll(METHODS["diagonal_sms"](z, y)(z), y)


def test_files_exports_and_copies(trained, tmp_path):
    z = torch.tensor(faulty(30, seed=4)[0])
    file = tmp_path / "residual.safetensors"
    trueup.save(trained, file)
    assert torch.equal(trueup.load(file)(z), trained(z))
    program = torch.export.export(as_module(trained), (z[:5],), dynamic_shapes=({0: torch.export.Dim("rows")},))
    assert torch.allclose(program.module()(z), trained(z), atol=1e-9)
    assert trained.shift_invariant
    assert torch.allclose(trained(z + 7), trained(z), atol=1e-8)


def test_onnx(trained):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"{name} is not installed: trueup[onnx]")
    differences = check_export(as_module(trained), torch.tensor(faulty(30, seed=4)[0]).float())
    assert max(differences.values()) <= TOLERANCE, differences


def test_gradients_flow(trained):
    z = torch.tensor(faulty(20, seed=5)[0], requires_grad=True)
    trained(z)[:, 0].sum().backward()
    assert torch.isfinite(z.grad).all()
    assert z.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((np.zeros((4, 6)), np.zeros((3, 4))), "first must be"),
        ((np.zeros((1, 4, 6)), np.zeros((2, 3, 4))), "first must be"),
        ((np.zeros((1, 4, 7)), np.zeros((1, 3, 4))), "5 features"),
    ],
)
def test_other_parameters_are_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        Residual(Temperature(1.0), *layers)


@pytest.mark.parametrize("kind", [Residual, OrderInvariant])
@pytest.mark.parametrize("options", [False, True])
def test_gradients_are_finite_differences(kind, options):
    rng = np.random.default_rng(0)
    n, classes, features = 7, 4, 5
    layers = [rng.normal(size=(2, *shape)) / np.sqrt(shape[1]) for shape in kind._shapes(features, classes)]
    base = -np.sort(rng.gamma(1.0, 2.0, size=(2, classes, n)), axis=1)
    absent = np.where(np.arange(classes)[:, None] == classes - 1, -1e15, np.zeros((2, classes, n))) if options else None
    inputs = np.concatenate([rng.normal(size=(2, features, n)), np.ones((2, 1, n))], axis=1)
    rows = _Examples(base, inputs, rng.integers(0, classes - 1, (2, n)), rng.random((2, n)), absent)
    gradients = [np.empty_like(layer) for layer in layers]
    _gradients(kind, rows, layers, gradients)

    def total():
        networks = (_Examples._make(None if part is None else part[k] for part in rows) for k in range(2))
        return sum(_loss(kind, part, [x[k] for x in layers]) for k, part in enumerate(networks)) / n

    for layer, gradient in zip(layers, gradients, strict=True):
        for at in [tuple(rng.integers(0, size) for size in layer.shape) for _ in range(20)]:
            before, step = layer[at], 1e-6
            layer[at] = before + step
            high = total()
            layer[at] = before - step
            slope = (high - total()) / (2 * step)
            layer[at] = before
            assert gradient[at] == pytest.approx(slope, rel=1e-4, abs=1e-8)


def test_torchs_default_type_does_not_matter():
    z, y = faulty(600)
    for method in ("residual", "order_invariant"):
        expected = METHODS[method](z, y)(z)
        torch.set_default_dtype(torch.float64)
        try:
            assert METHODS[method](z, y)(z) == pytest.approx(expected, abs=2e-3)  # some steps round otherwise
        finally:
            torch.set_default_dtype(torch.float32)
