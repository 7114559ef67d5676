"""Order-preserving maps: the order stays, temperature is a special case, and known functions are found."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optional import torch
from strategies import calibrated, pairs
from trueup import metrics
from trueup.calibrators import Diagonal, OrderInvariant, Temperature


def bent(n=4000, classes=5, seed=0):
    """Labels from logits whose positive part was stretched by two: no temperature undoes it."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(n, classes)) * 2
    truth -= truth.mean(axis=1, keepdims=True)
    labels = (truth + rng.gumbel(size=truth.shape)).argmax(axis=1)
    return np.where(truth > 0, 3 * truth, truth), truth, labels


def slow_g(u, knots, slopes):
    """The integral of the slope from the first knot to u, by many small steps."""
    grid = np.linspace(knots[0], u, 20_001)
    slope = np.interp(grid, knots, slopes)
    return float(np.sum((slope[1:] + slope[:-1]) / 2 * np.diff(grid)))


def slow_order_invariant(row, fitted):
    ordered = np.sort(row)[::-1]
    slopes = 0.0
    for first, second, third in zip(*fitted.layers, strict=True):
        x = ordered - ordered.mean()
        for layer in (first, second):
            x = np.maximum(layer[:, :-1] @ x + layer[:, -1], 0)
        m = third[:, :-1] @ x + third[:, -1]
        slopes = slopes + 1e-3 + np.log1p(np.exp(m + np.log(np.expm1(1 - 1e-3))))
    slopes = slopes / len(fitted.first) / float(fitted.temperature)
    value, out = 0.0, [0.0]
    for j in range(len(row) - 1):
        value -= slopes[j] * (ordered[j] - ordered[j + 1])
        out.append(value)
    return [out[list(ordered).index(v)] for v in row]


@given(st.lists(st.floats(0.1, 3), min_size=2, max_size=6), st.integers(0, 1000))
@settings(max_examples=20)
def test_diagonal_equals_slow_integration(slopes, seed):
    rng = np.random.default_rng(seed)
    knots = np.cumsum(rng.random(len(slopes)) + 0.1) - 2
    logits = rng.normal(size=(2, 3)) * 3
    after = Diagonal(knots, slopes)(logits)
    for i in range(2):
        for k in range(3):
            u = logits[i, k] - logits[i].mean()
            assert after[i, k] == pytest.approx(slow_g(u, knots, slopes), abs=1e-6)


def test_order_invariant_equals_the_slow_loop():
    rng = np.random.default_rng(0)
    layers = rng.normal(size=(3, 6, 5)), rng.normal(size=(3, 7, 7)), rng.normal(size=(3, 3, 8))
    fitted = OrderInvariant(1.7, *layers)
    logits = rng.normal(size=(20, 4)) * 2
    for row, after in zip(logits, fitted(logits), strict=True):
        assert after == pytest.approx(slow_order_invariant(row, fitted), abs=1e-9)
    alone = OrderInvariant(1.7, *(layer[0] for layer in layers))
    assert (alone(logits) == OrderInvariant(1.7, *(layer[:1] for layer in layers))(logits)).all()


@pytest.mark.parametrize("fit", [Diagonal.fit, OrderInvariant.fit])
@pytest.mark.filterwarnings("ignore:temperature stopped at its bound")
def test_order_stays_and_the_fit_is_no_worse_than_temperature(fit):
    @settings(max_examples=10)
    @given(pairs(min_rows=3))
    def check(pair):
        logits, labels = pair
        fitted = fit(logits, labels)
        after = fitted(logits)
        assert np.isfinite(after).all()
        assert_order_stays(logits, after)
        scaled = Temperature.fit(logits, labels)(logits)
        assert metrics.nll(after, labels) <= metrics.nll(scaled, labels) + 1e-9

    check()


def assert_order_stays(logits, after):
    i, j = np.triu_indices(logits.shape[1], 1)
    before, now = logits[:, i] - logits[:, j], after[:, i] - after[:, j]
    assert (now[before > 1e-9] > 0).all()
    assert (now[before < -1e-9] < 0).all()
    assert (now[before == 0] == 0).all()


def test_diagonal_finds_the_function_that_bent_the_logits():
    logits, truth, labels = bent(20_000)
    raw, best = metrics.nll(Temperature.fit(logits, labels)(logits), labels), metrics.nll(truth, labels)
    fitted = Diagonal.fit(logits, labels)
    assert fitted.certificate.status == "converged"
    fresh, fresh_truth, fresh_labels = bent(20_000, seed=1)
    assert metrics.nll(fitted(fresh), fresh_labels) < metrics.nll(fresh_truth, fresh_labels) + 0.25 * (raw - best)


def test_order_invariant_learns_what_temperature_cannot():
    logits, _, labels = bent(6000)
    fitted = OrderInvariant.fit(logits, labels)
    assert fitted.first.shape == (5, 32, 6)
    fresh, fresh_truth, fresh_labels = bent(seed=1)
    gain = metrics.nll(Temperature.fit(logits, labels)(fresh), fresh_labels) - metrics.nll(fresh_truth, fresh_labels)
    assert metrics.nll(fitted(fresh), fresh_labels) < metrics.nll(fresh_truth, fresh_labels) + 0.5 * gain
    assert_order_stays(fresh, fitted(fresh))
    order = np.random.default_rng(0).permutation(len(labels))
    assert (OrderInvariant.fit(logits[order], labels[order])(fresh) == fitted(fresh)).all()


def test_few_rows_and_calibrated_ones_get_temperature_scaling():
    for logits, labels in (bent(499)[::2], calibrated(600, 3, temperature=2.0)):
        fitted, scaled = OrderInvariant.fit(logits, labels), Temperature.fit(logits, labels)
        assert fitted(logits) == pytest.approx(scaled(logits), abs=1e-6)


def test_temperature_is_all_that_calibrated_data_need():
    logits, labels = calibrated(20_000, 4, temperature=2.5, scale=5.0)
    fitted = Diagonal.fit(logits, labels)
    assert fitted.slopes == pytest.approx(1 / 2.5, rel=0.2)
    assert fitted.slopes.mean() == pytest.approx(1 / 2.5, rel=0.05)


def test_training_depends_on_the_seed_alone():
    logits, labels = bent(500, 3)[::2]
    state = torch.get_rng_state()
    once, again, other = (OrderInvariant.fit(logits, labels, epochs=3, seed=s) for s in (0, 0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    assert (once(logits) == again(logits)).all()
    assert not (once(logits) == other(logits)).all()
    with torch.no_grad():
        assert (OrderInvariant.fit(logits, labels, epochs=3)(logits) == once(logits)).all()


def test_a_fit_in_chunks_is_the_same(monkeypatch):
    logits, _, labels = bent(300, 4)
    whole = Diagonal.fit(logits, labels)
    monkeypatch.setattr("trueup._core.native.DEFAULT_CHUNK", 500)
    monkeypatch.setattr("trueup._core.native.MAX_CACHED_NUMBERS", 0)
    assert Diagonal.fit(logits, labels).slopes == pytest.approx(whole.slopes, rel=1e-5)


def test_wrong_parameters_are_named():
    with pytest.raises(ValueError, match="knots must be at least two ascending numbers"):
        Diagonal([1.0, 1.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="slopes must be positive, one for each of 2 knots"):
        Diagonal([0.0, 1.0], [1.0, -1.0])
    with pytest.raises(ValueError, match="knots must be at least 2, got 1"):
        Diagonal.fit(np.eye(3), [0, 1, 2], knots=1)
    with pytest.raises(ValueError, match="layers must be"):
        OrderInvariant(1.0, np.zeros((5, 4)), np.zeros((5, 5)), np.zeros((2, 6)))
    with pytest.raises(ValueError, match="temperature must be one positive number"):
        OrderInvariant(0.0, np.zeros((5, 4)), np.zeros((5, 6)), np.zeros((2, 6)))


def test_real_predictions_get_better(data):
    with np.load(data / "logits" / "cifar10_densenet40.npz") as file:
        val, test = ((file[f"{half}_logits"], file[f"{half}_labels"]) for half in ("val", "test"))
    after = Diagonal.fit(*val)(test[0])
    assert metrics.nll(after, test[1]) == pytest.approx(0.2259, abs=2e-4)
    assert metrics.ece(after, test[1]) < 0.009
    after = OrderInvariant.fit(*val)(test[0])
    assert metrics.nll(after, test[1]) < 0.227
    assert metrics.accuracy(after, test[1]) == metrics.accuracy(*test)


def test_classes_are_treated_alike():
    logits, _, labels = bent(800, 4)
    turned = np.array([2, 0, 3, 1])
    for fit in (OrderInvariant.fit, Diagonal.fit):
        fitted, other = fit(logits, labels), fit(logits[:, turned], np.argsort(turned)[labels])
        assert fitted(logits[:, turned]) == pytest.approx(fitted(logits)[:, turned], abs=1e-9)
        assert np.exp(other(logits[:, turned])) == pytest.approx(np.exp(fitted(logits)[:, turned]), rel=1e-5)
