"""The benchmark of coverage runs, and its page names what misses the bar."""

import importlib
from pathlib import Path

import numpy as np
import pytest

import trueup


@pytest.fixture
def coverage(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("interval_coverage")


@pytest.mark.parametrize("world", [0, 6, 9, 11])
def test_a_world_is_measured(coverage, world):
    world = coverage.WORLDS[world]
    counts = coverage.measure(world, range(2), coverage.true_values(world), n_resamples=30)
    assert counts["interval of nll"][1] == 4  # two methods of two data sets
    assert ("test verdict" in counts) == (world.temperature == 1)
    assert "difference in ece" in counts


def test_two_networks_have_the_same_true_metrics(coverage):
    data = coverage.draw(coverage.WORLDS[2], np.random.default_rng(0), 50_000)
    changes = trueup.compare({"a": (data.logits[0], data.labels), "b": (data.logits[1], data.labels)}).changes["b"]
    assert abs(changes["nll"].value) < 0.005
    assert abs(changes["ece"].value) < 0.005


def test_a_stopped_run_goes_on(coverage, monkeypatch, tmp_path):
    monkeypatch.setattr(coverage, "PAGE", tmp_path / "coverage.md")
    monkeypatch.setattr(coverage, "WORLDS", coverage.WORLDS[:2])
    measured = []

    def measure(world, seeds, truth, *, n_resamples):
        measured.append((world.n, seeds.start))
        return {"test verdict": (len(measured), 50)}

    monkeypatch.setattr(coverage, "measure", measure)
    store = ["--store", str(tmp_path / "store.jsonl")]
    coverage.main(["--replications", "50", *store])
    coverage.main(["--replications", "100", *store])
    assert measured == [(200, 0), (5000, 0), (200, 50), (5000, 50)]
    assert "| test verdict | 4.0 | 6.0 |" in (tmp_path / "coverage.md").read_text()


def test_true_values_of_calibrated_predictions(coverage):
    truth = coverage.true_values(coverage.WORLDS[7])
    assert truth["ece"] < 1e-6
    assert truth["ici"] < 2e-4  # the smooth curve is linear between its cells
    assert truth["calibration_slope"] == pytest.approx(1, abs=1e-6)
    assert truth["predicted"] == pytest.approx(0.5, abs=0.01)


def test_the_page_marks_what_misses_the_bar(coverage):
    counts = {"one": {"interval of ece": (50, 100), "test verdict": (50, 100)}, "two": {"interval of ece": (95, 100)}}
    page = coverage.page(counts, 100, 1000)
    assert "| interval of ece | 50.0* | 95.0 |" in page
    assert "| test verdict | 50.0* |  |" in page
    assert "100 simulated data sets" in page
    assert "1. one\n2. two" in page
    assert "expected events: one (interval of ece, test verdict)" in page
