import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optional import torch
from strategies import calibrated
from trueup import load, metrics
from trueup._core import native as room
from trueup._core.loss_sums import temperature_sums
from trueup._core.optimize import FitError, newton
from trueup._core.row_scores import score_rows
from trueup.calibrators import Temperature
from trueup.calibrators.temperature import FINE_GRID, WIDE_GRID, grid_errors, inverse_temperature


def best_nll(logits, labels):
    """The exact optimum by golden sections in ln T, in float64."""
    from scipy.optimize import minimize_scalar

    scale = np.std(logits, axis=1).mean()
    found = minimize_scalar(
        lambda u: metrics.nll(logits / (scale * np.exp(u)), labels),
        bounds=(-12, 12),
        method="bounded",
        options={"xatol": 1e-10},
    )
    return found.fun


@pytest.mark.parametrize("scale", [0.02, 1, 5, 50, 500])
@pytest.mark.parametrize("classes", [2, 10, 60])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_optimum_is_exact_at_every_scale(scale, classes, dtype):
    logits, labels = calibrated(3000, classes, temperature=1.0, scale=1.0)
    logits = (logits * scale).astype(dtype)
    found = Temperature.fit(logits, labels)
    exact = logits.astype(np.float64)
    assert metrics.nll(exact / found.temperature, labels) - best_nll(exact, labels) <= 1e-9
    assert found.temperature == pytest.approx(scale, rel=0.25)
    assert found.certificate.status == "converged"


def test_a_constant_added_to_a_row_changes_nothing():
    logits, labels = calibrated(500, 5)
    shift = np.full((500, 1), 1e4)
    assert Temperature.fit(logits + shift, labels).temperature == pytest.approx(
        Temperature.fit(logits, labels).temperature, rel=1e-8
    )


def test_the_maximum_entropy_identity_holds_at_the_optimum():
    logits, labels = calibrated(2000, 6, temperature=1.8)
    t = Temperature.fit(logits, labels).temperature
    q = np.exp(logits / t - np.log(np.exp(logits / t).sum(axis=1, keepdims=True)))
    residual = (logits[np.arange(2000), labels] - (logits * q).sum(axis=1)).sum()
    spread = np.sqrt((q * logits**2).sum(axis=1) - (q * logits).sum(axis=1) ** 2).sum()
    assert abs(residual) / spread < 1e-9


def test_a_large_set_is_fitted_from_a_subsample_in_few_passes():
    logits, labels = calibrated(20_000, 8, temperature=2.5)
    found = Temperature.fit(logits, labels)
    assert found.temperature == pytest.approx(2.5, rel=0.05)
    assert found.certificate.passes <= 3
    assert metrics.nll(logits / found.temperature, labels) - best_nll(logits, labels) <= 1e-9


@pytest.mark.parametrize("classes", [2, 10, 100, 200])
@pytest.mark.parametrize("scale", [0.02, 1.0, 50.0])
def test_the_quick_way_ends_at_the_exact_optimum(classes, scale):
    logits, labels = calibrated(6000, classes, temperature=1.7, scale=3.0)
    z, y = torch.tensor(logits * scale).float(), torch.tensor(labels)
    found, certificate = inverse_temperature(z, y)
    exact, _ = newton(
        lambda b: tuple(v / len(y) for v in temperature_sums(z.double(), y, b)),
        found,
        low=found / 2,
        high=found * 2,
        tolerance=1e-12,
    )
    assert found == pytest.approx(exact, rel=3e-7)
    assert certificate.passes <= 4


@pytest.mark.parametrize("native", [True, False])
@given(st.integers(0, 2**32 - 1), st.sampled_from([0.1, 1.0, 7.0]))
def test_sums_are_the_loss_and_its_derivatives(native, seed, beta):
    rng = np.random.default_rng(seed)
    z = torch.tensor(rng.normal(size=(int(rng.integers(1, 40)), int(rng.choice([2, 3, 17, 127, 128, 129, 300])))) * 3)
    y = torch.tensor(rng.integers(0, z.shape[1], len(z)))
    b = torch.tensor(beta, dtype=torch.float64, requires_grad=True)
    loss = torch.nn.functional.cross_entropy(b * z, y, reduction="sum")
    (slope,) = torch.autograd.grad(loss, b, create_graph=True)
    (curvature,) = torch.autograd.grad(slope, b)
    compiled = room.compiled
    room.compiled = compiled if native else None
    try:
        found = temperature_sums(z, y, beta)
    finally:
        room.compiled = compiled
    assert found == pytest.approx((loss.item(), slope.item(), curvature.item()), rel=1e-9, abs=1e-9)


def test_hopeless_data_stop_at_a_bound_and_say_why():
    logits = np.random.default_rng(0).normal(size=(50, 4))
    with pytest.warns(UserWarning, match="every label has its row's largest logit"):
        sure = Temperature.fit(logits, logits.argmax(axis=1))
    with pytest.warns(UserWarning, match="no better than chance"):
        hopeless = Temperature.fit(logits, logits.argmin(axis=1))
    assert sure.certificate.status == hopeless.certificate.status == "bound"
    assert 0 < sure.temperature < 1e-5
    assert hopeless.temperature > 1e5
    assert Temperature.fit(np.zeros((5, 3)), np.zeros(5, int)).temperature == 1


def test_a_subsample_without_an_error_does_not_mislead():
    logits, labels = calibrated(20_000, 3, scale=6.0)
    labels = logits.argmax(axis=1)
    labels[[17, 4242, 9001]] = logits.argmin(axis=1)[[17, 4242, 9001]]  # rows that the subsample misses
    found = Temperature.fit(logits, labels)
    assert found.certificate.status == "converged"
    assert metrics.nll(logits / found.temperature, labels) - best_nll(logits, labels) <= 1e-9


@pytest.mark.parametrize("temperature", [0.0, -1.0, np.nan, np.inf, [1.0, 2.0]])
def test_a_temperature_is_one_positive_number(temperature):
    with pytest.raises(ValueError, match="temperature must be one positive number"):
        Temperature(torch.tensor(temperature))


class TestGrid:
    def test_the_minimum_is_that_of_the_naive_loop(self):
        logits, labels = calibrated(700, 5, temperature=1.6)
        grid = np.array(FINE_GRID[99:4000:25])
        naive = np.array([metrics.ece(logits / t, labels) for t in grid])
        quick = grid_errors(torch.tensor(logits), torch.tensor(labels), grid, 15)
        assert quick.min() == pytest.approx(naive.min(), abs=1e-12)
        means = np.array([torch.tensor(logits / t).softmax(dim=1).amax(dim=1).mean().item() for t in grid])
        possible = abs(means - metrics.accuracy(logits, labels)) <= naive.min()  # on both sides of the crossing
        np.testing.assert_allclose(quick[possible], naive[possible], atol=1e-12)
        best = grid[np.flatnonzero(naive <= naive.min() + 1e-12)]
        nearest = best[np.abs(np.log(best)).argmin()]
        assert Temperature.fit_ece(logits, labels, temperatures=grid.tolist()).temperature == nearest

    def test_the_grids_of_the_papers(self):
        assert (FINE_GRID[0], FINE_GRID[-1], len(FINE_GRID)) == (0.001, 5.0, 5000)
        assert (WIDE_GRID[0], WIDE_GRID[-1], len(WIDE_GRID)) == (0.01, 10.0, 1000)

    def test_equal_errors_fall_to_the_temperature_nearest_to_one(self):
        # Constant rows: every temperature gives the same confidence.
        found = Temperature.fit_ece(np.zeros((10, 4)), np.zeros(10, int), temperatures=[0.2, 0.9, 3.0])
        assert found.temperature == 0.9

    def test_bad_grids_are_named(self):
        with pytest.raises(ValueError, match="temperatures must be a list of positive numbers"):
            Temperature.fit_ece(*calibrated(10, 3), temperatures=[0.0, 1.0])


def test_focal_loss_is_at_its_minimum():
    logits, labels = calibrated(2000, 5, temperature=1.5)
    z, y = torch.tensor(logits), torch.tensor(labels)

    def focal(t, gamma):
        p = score_rows(z / t, y).label_prob
        return np.mean(-((1 - p) ** gamma) * np.log(p))

    for gamma in (0.0, 1.0, 3.0):
        t = Temperature.fit_focal(logits, labels, gamma=gamma).temperature
        assert focal(t, gamma) <= min(focal(t * f, gamma) for f in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0))
    nll = Temperature.fit(logits, labels).temperature
    assert Temperature.fit_focal(logits, labels, gamma=0.0).temperature == pytest.approx(nll, rel=1e-5)
    assert Temperature.fit_focal(logits, labels).temperature > nll  # it raises entropy
    with pytest.raises(ValueError, match="gamma must be a number from 0 on"):
        Temperature.fit_focal(logits, labels, gamma=-1.0)


def test_brier_score_is_at_its_minimum():
    logits, labels = calibrated(2000, 5, temperature=1.5)
    t = Temperature.fit_brier(logits, labels).temperature
    here = metrics.brier(logits / t, labels)
    assert here <= min(metrics.brier(logits / (t * f), labels) for f in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0))


def test_the_published_oracle(data):
    file = data / "logits" / "cifar10_densenet40.npz"
    found = Temperature.fit(*load(file, split="val"))
    logits, labels = load(file, split="test")
    assert found.temperature == pytest.approx(2.8826, abs=1e-3)
    assert metrics.nll(found(logits), labels) == pytest.approx(0.225086, abs=2e-6)
    assert metrics.ece(found(logits), labels) == pytest.approx(0.009464, abs=2e-5)


def test_fit_errors_are_value_errors():
    assert issubclass(FitError, ValueError)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(12))
def test_it_is_the_optimum_to_a_few_parts_in_a_billion(seed, dtype):
    """However the search went: shards, which go another way, must end at the same number."""
    rng = np.random.default_rng(seed)
    classes, n = int(rng.choice([3, 10, 50])), int(rng.choice([2000, 5000, 10000]))
    z = torch.from_numpy(rng.normal(size=(n, classes)) * rng.choice([0.3, 1, 3, 10])).to(dtype)
    y = torch.from_numpy((z.numpy() / rng.uniform(0.5, 4) + rng.gumbel(size=z.shape)).argmax(axis=1))
    found, _ = inverse_temperature(z, y)
    best, _ = newton(lambda b: temperature_sums(z, y, b), found, low=found / 2, high=2 * found, tolerance=1e-13)
    assert found == pytest.approx(best, rel=5e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("rows", [300, 9000])
@pytest.mark.parametrize("wrong", [0, 1])
def test_separable_rows_are_a_bound_however_many(rows, wrong, dtype):
    """Where no row is wrong the loss falls for ever, ever more slowly; one wrong row gives it a minimum."""
    z = np.tile(4 * np.eye(3, dtype=dtype), (rows, 1))
    y = np.tile(np.arange(3), rows)
    if wrong:
        y[0] = 1
        found = Temperature.fit(z, y)
        # Of 3 rows·n with a gap of 4: the share wrong is that which the softmax gives the other two classes, about.
        assert float(found.temperature) == pytest.approx(4 / np.log(3 * rows * 2), rel=0.2)
    else:
        with pytest.warns(UserWarning, match="every label has its row's largest logit"):
            found = Temperature.fit(z, y)
        assert found.certificate.status == "bound"
