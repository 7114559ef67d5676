import numpy as np
import pytest

import trueup
from strategies import calibrated
from trueup import METHODS, metrics
from trueup.calibrators import LowRank, Structured
from trueup.calibrators.low_rank import _Problem


def mixed(n, classes=30, seed=0):
    """Logits whose classes are mixed by two directions."""
    mix = np.random.default_rng(7)
    directions = np.eye(classes) + mix.normal(size=(classes, 2)) @ mix.normal(size=(2, classes)) / 8
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, classes)) * 2
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    return z @ directions, y


@pytest.fixture(scope="module")
def fitted():
    return METHODS["low_rank"](*mixed(2000))


def test_the_map_is_the_formula(fitted):
    rng = np.random.default_rng(1)
    parts = rng.random(5) + 0.5, rng.normal(size=5), rng.normal(size=(5, 2)), rng.normal(size=(5, 2))
    z = rng.normal(size=(10, 5)) * 15
    found = LowRank(1.7, *parts)(z)
    for row, out in zip(z / 1.7, found, strict=True):
        u = row - row.max() - np.log(np.exp(row - row.max()).sum())
        c = np.clip(u - u.mean(), -20, 20)
        expected = [
            parts[0][k] * u[k] + parts[1][k] + sum(parts[2][k, r] * (parts[3][:, r] @ c) for r in range(2))
            for k in range(5)
        ]
        assert out == pytest.approx(expected, abs=1e-9)


def test_the_gradient_is_that_of_the_definition():
    torch = pytest.importorskip("torch")
    z, y = mixed(60, classes=6)
    about = Structured.fit_vector(z, y)
    problem = _Problem(z, y, None, about)
    x = np.random.default_rng(0).normal(size=12 + 2 * 6 * 3) * 0.3
    value, slopes = problem._sums(x)
    at, z, y = torch.tensor(x, requires_grad=True), torch.tensor(z), torch.tensor(y)
    u = torch.log_softmax(z / about.temperature, dim=1)
    c = (u - u.mean(dim=1, keepdim=True)).clamp(-20, 20)
    left, right = at[12:].view(2, 6, 3)
    loss = torch.nn.functional.cross_entropy(u * at[:6] + at[6:12] + c @ right @ left.T, y, reduction="sum")
    loss.backward()
    assert value == pytest.approx(loss.item(), rel=1e-5)
    assert slopes == pytest.approx(at.grad.numpy(), rel=1e-3, abs=1e-2)


def test_it_finds_the_directions_in_which_classes_are_mixed(fitted):
    z, y = mixed(4000, seed=1)
    assert isinstance(fitted, LowRank)
    assert fitted.certificate.status == "converged"
    for other in ("svs", "sms"):
        assert metrics.nll(fitted(z), y) < metrics.nll(METHODS[other](*mixed(2000))(z), y) - 0.01


def test_where_nothing_is_mixed_it_does_no_harm():
    (z, y), (new, truth) = calibrated(1500, 10, temperature=2.0), calibrated(4000, 10, temperature=2.0, seed=1)
    found, vector = METHODS["low_rank"](z, y), METHODS["svs"](z, y)
    assert metrics.nll(found(new), truth) < metrics.nll(vector(new), truth) + 0.005


def test_files_and_exports(fitted, tmp_path):
    torch = pytest.importorskip("torch")
    from trueup.models import as_module

    z = torch.tensor(mixed(20, seed=2)[0])
    file = tmp_path / "low_rank.safetensors"
    trueup.save(fitted, file)
    assert torch.equal(trueup.load(file)(z), fitted(z))
    program = torch.export.export(as_module(fitted), (z[:5],), dynamic_shapes=({0: torch.export.Dim("rows")},))
    assert torch.allclose(program.module()(z), fitted(z), atol=1e-9)


def test_other_parameters_are_refused():
    with pytest.raises(ValueError, match="left and right"):
        LowRank(1.0, np.ones(3), np.zeros(3), np.zeros((3, 2)), np.zeros((3, 1)))
    with pytest.raises(ValueError, match="rank must be at least 1"):
        METHODS["low_rank"](*mixed(100), rank=0)
