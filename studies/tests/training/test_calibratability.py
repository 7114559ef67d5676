"""Rows of calibratability against slow loops."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from trueup import losses, metrics
from trueup.calibrators.temperature import WIDE_GRID
from trueup_studies.training.calibratability import (
    SIZES,
    LossSetting,
    list_settings,
    measure_calibratability,
    validation_sizes,
)
from trueup_studies.training.loop import train


def halves(seed, scale, n=400, classes=4):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(2 * n, classes))
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    return (scale * z[:n], y[:n]), (scale * z[n:], y[n:])


def confidences(z):
    p = np.exp(z - z.max(axis=1, keepdims=True))
    return p.max(axis=1) / p.sum(axis=1)


def slow_ece(c, a):
    """15 right-closed bins of equal width, by a loop."""
    total = 0.0
    for b in range(15):
        inside = [i for i in range(len(c)) if b / 15 < c[i] <= (b + 1) / 15]
        if inside:
            total += abs(sum(a[i] for i in inside) - sum(c[i] for i in inside))
    return total / len(c)


def slow_binned(val, test):
    c, a = confidences(val[0]), val[0].argmax(axis=1) == val[1]
    out = []
    for confidence in confidences(test[0]):
        b = next(b for b in range(15) if confidence <= (b + 1) / 15)
        inside = [a[i] for i in range(len(c)) if b / 15 < c[i] <= (b + 1) / 15]
        out.append(sum(inside) / len(inside) if inside else (b + 0.5) / 15)
    return slow_ece(out, test[0].argmax(axis=1) == test[1])


@pytest.mark.parametrize(("seed", "scale"), [(0, 3.0), (1, 0.4), (2, 1.0)])
def test_a_row_equals_the_slow_loops(seed, scale):
    val, test = halves(seed, scale)
    [row] = measure_calibratability({("focal", 3.0, seed): (val, test)})
    assert (row.loss, row.coefficient, row.seed) == ("focal", 3.0, seed)
    assert row.accuracy == pytest.approx((test[0].argmax(axis=1) == test[1]).mean())
    assert row.ece == pytest.approx(slow_ece(confidences(test[0]), test[0].argmax(axis=1) == test[1]))
    assert row.nll == pytest.approx(metrics.nll(*test))
    errors = [metrics.ece(val[0] / t, val[1]) for t in WIDE_GRID]
    assert metrics.ece(val[0] / row.temperature, val[1]) == pytest.approx(min(errors), abs=1e-9)
    assert row.ece_temperature == pytest.approx(metrics.ece(test[0] / row.temperature, test[1]), abs=1e-9)
    assert row.ece_histogram == pytest.approx(slow_binned(val, test), abs=1e-9)
    assert (row.val_ece, row.val_nll) == pytest.approx((metrics.ece(*val), metrics.nll(*val)))


def test_single_precision_puts_frequencies_on_edges_where_double_does():
    z = np.log(np.array([[0.61, 0.39]] * 5 + [[0.9, 0.1]] * 5))
    y = np.array([0, 0, 0, 1, 1, 0, 0, 0, 0, 1])
    double, single = (
        measure_calibratability({("x", 0.0, 0): ((z.astype(t), y), (z.astype(t), 1 - y))})[0]
        for t in (np.float64, np.float32)
    )
    assert single.ece_histogram == pytest.approx(double.ece_histogram, abs=1e-12)


def test_a_function_trains_each_wanted_setting_and_what_train_gave_is_a_run():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 2, generator=generator)
    parts = torch.utils.data.random_split(TensorDataset(x, (x[:, 0] > 0).long()), [100, 50, 50], generator)
    asked = []

    def run(setting):
        asked.append(setting)
        torch.manual_seed(setting.seed)
        return train(nn.Linear(2, 2), tuple(parts), losses.Focal(gamma=setting.coefficient), 1, progress=False)

    wanted = list_settings({"focal": [0.0, 2.0]}, seeds=[3, 4])
    rows = measure_calibratability(run, wanted)
    assert asked == wanted == [LossSetting("focal", c, s) for c in (0.0, 2.0) for s in (3, 4)]
    assert [(row.coefficient, row.seed) for row in rows] == [(0.0, 3), (0.0, 4), (2.0, 3), (2.0, 4)]
    with pytest.raises(ValueError, match="settings must name the losses"):
        measure_calibratability(run)


def test_a_run_without_a_half_is_named():
    with pytest.raises(ValueError, match="focal 2, seed 1: val and test are required"):
        measure_calibratability({("focal", 2.0, 1): (None, halves(0, 1.0)[1])})


def test_only_wanted_runs_of_a_mapping_are_measured():
    runs = {("a", 0.0, seed): halves(seed, 1.0, n=50) for seed in range(3)}
    assert [row.seed for row in measure_calibratability(runs, [("a", 0.0, 2)])] == [2]


def test_validation_sizes_are_nested_repeatable_and_end_at_the_whole():
    val, test = halves(0, 3.0, n=600)
    rows = validation_sizes(val, test, repeats=2, seed=5)
    assert [row.size for row in rows] == [size for size in SIZES if size <= 600 for _ in range(2)]
    assert rows == validation_sizes(val, test, repeats=2, seed=5)
    assert rows != validation_sizes(val, test, repeats=2, seed=6)
    [whole] = measure_calibratability({("x", 0.0, 0): (val, test)})
    for row in validation_sizes(val, test, sizes=[600], repeats=2):
        assert (row.ece_temperature, row.ece_histogram) == pytest.approx((whole.ece_temperature, whole.ece_histogram))
    order = np.random.default_rng([5, 1]).permutation(600)[:50]
    [first] = measure_calibratability({("x", 0.0, 0): ((val[0][order], val[1][order]), test)})
    assert rows[1].temperature == first.temperature
    assert rows[1].ece_histogram == first.ece_histogram


@pytest.mark.parametrize(
    ("options", "named"), [({"sizes": [50, 601]}, "1..600.*got 601"), ({"repeats": 0}, "repeats must be")]
)
def test_wrong_sizes_are_named(options, named):
    with pytest.raises(ValueError, match=named):
        validation_sizes(*halves(0, 1.0, n=600), **options)
