"""The benchmark of coverage runs, and its page names what misses the bar."""

import importlib
from pathlib import Path

import pytest


@pytest.fixture
def coverage(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("coverage")


@pytest.mark.parametrize("world", [0, 6, 9, 11])
def test_a_world_is_measured(coverage, world):
    rates = coverage.measure(coverage.WORLDS[world], 2, n_resamples=30)
    assert rates.coverage["nll"] in (0.0, 0.5, 1.0)
    assert ("verdict" in rates.rejected) == (coverage.WORLDS[world].temperature == 1)
    assert bool(rates.differ) == coverage.WORLDS[world].event


def test_true_values_of_calibrated_predictions(coverage):
    truth = coverage.true_values(coverage.WORLDS[7])
    assert truth["ece"] < 1e-6
    assert truth["ici"] < 2e-4  # the smooth curve is linear between its cells
    assert truth["calibration_slope"] == pytest.approx(1, abs=1e-6)
    assert truth["predicted"] == pytest.approx(0.5, abs=0.01)


def test_the_page_marks_what_misses_the_bar(coverage):
    rates = {"one": coverage.Rates({"ece": 0.5}, {"verdict": 0.5}, {}), "two": coverage.Rates({"ece": 0.95}, {}, {})}
    page = coverage.page(rates, 100)
    assert "| interval of ece | 50.0* | 95.0 |" in page
    assert "| test verdict | 50.0* |  |" in page
    assert "100 data sets" in page
