import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strategies import calibrated, pairs
from trueup import metrics
from trueup._core.tally import TABLE_METRICS, Grid
from trueup.metrics import Mean, Tally

EXACT = [name for name in TABLE_METRICS if name != "aece"]
FUNCTIONS = {name: metrics.METRICS[name] for name in EXACT if name != "confidence"}


@given(pairs())
def test_the_table_is_what_the_functions_say(pair):
    tally = Tally.of(*pair)
    for name, function in FUNCTIONS.items():
        assert tally.value(name) == pytest.approx(function(*pair), abs=1e-12), name


@given(pairs(max_rows=300, tied=False))
def test_adaptive_error_is_within_the_bound_that_it_states(pair):
    grid = Tally.of(*pair).grid
    assert abs(grid.aece() - metrics.aece(*pair)) <= grid.aece_error() + 1e-12


def test_adaptive_error_from_the_grid_is_close_on_a_crowded_set():
    pair = calibrated(20_000, 10, temperature=1.5, scale=5)  # most confidences next to 1
    grid = Tally.of(*pair).grid
    assert abs(grid.aece() - metrics.aece(*pair)) < 2e-3
    assert abs(grid.aece() - metrics.aece(*pair)) <= grid.aece_error() < 0.05


@given(pairs(min_rows=3), st.data())
def test_parts_add_up_to_the_whole_in_any_order(pair, draw):
    logits, labels = pair
    cut = sorted(draw.draw(st.lists(st.integers(0, len(labels)), min_size=2, max_size=2)))
    a, b, c = (Tally.of(logits[p], labels[p]) for p in (slice(0, cut[0]), slice(cut[0], cut[1]), slice(cut[1], None)))
    whole = Tally.of(logits, labels)
    for total in ((a + b) + c, a + (b + c), c + a + b):
        assert total.n == whole.n
        for name in TABLE_METRICS:
            assert total.value(name) == pytest.approx(whole.value(name), abs=1e-12)
        assert np.allclose(total.gap, whole.gap, atol=1e-12)
        assert np.array_equal(total.weight_of_group, whole.weight_of_group)


def test_tallies_of_other_shapes_do_not_add():
    one = Tally.of(np.zeros((2, 3)), [0, 1])
    with pytest.raises(ValueError, match=r"same classes and bins to be added, got \(3, 15\) and \(4, 15\)"):
        one + Tally.of(np.zeros((2, 4)), [0, 1])
    with pytest.raises(ValueError, match="same"):
        one + Tally.of(np.zeros((2, 3)), [0, 1], bins=10)


def test_nothing_is_neutral():
    pair = calibrated(100, 4)
    nothing = Tally.of(np.zeros((0, 4)), np.zeros(0, int))
    assert all(np.isnan(nothing.value(name)) for name in TABLE_METRICS)
    total = Tally.of(*pair) + nothing
    assert [total.value(name) for name in TABLE_METRICS] == [Tally.of(*pair).value(name) for name in TABLE_METRICS]


def test_an_unknown_metric_is_named():
    with pytest.raises(ValueError, match="metric must be one of accuracy, .* got 'beauty'"):
        Tally.of(*calibrated(10, 3)).value("beauty")


def test_a_stream_takes_constant_memory():
    rng = np.random.default_rng(0)

    def run(chunks):
        tracemalloc.start()
        total = None
        for _ in range(chunks):
            z = rng.normal(size=(2000, 10)).astype(np.float32)
            part = Tally.of(z, rng.integers(0, 10, 2000))
            total = part if total is None else total + part
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert total.n == 2000 * chunks
        return peak

    run(1)
    assert run(40) < 1.5 * run(2) + 1e6


@given(st.integers(1, 60))
def test_the_grid_divides_the_bins_exactly(bins):
    edges = Grid.fine_edges(bins)
    assert np.isin(np.arange(bins + 1) / bins, edges).all()
    assert (np.diff(edges) > 0).all()
    assert len(edges) < 5000


def test_mean_and_its_error():
    values = np.random.default_rng(0).normal(size=50)
    total = Mean.of(values[:20]) + Mean.of(values[20:])
    assert total.value == pytest.approx(values.mean())
    assert total.error == pytest.approx(values.std(ddof=1) / np.sqrt(50))
    assert np.isnan(Mean.of(np.array([])).value)
    assert np.isnan(Mean.of(np.array([1.0])).error)
