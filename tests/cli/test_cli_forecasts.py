"""Forecasts of a number on the command line, from the file to the recalibrated file."""

import numpy as np
import pytest

from trueup import load
from trueup.io import load_forecasts, save_columns
from trueup.metrics import evaluate_forecasts

COLUMNS = ("--mean", "mu", "--std", "sd", "--target", "sold")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder, rng = tmp_path_factory.mktemp("forecasts"), np.random.default_rng(0)
    for name in ("val", "test"):
        mean, std = rng.normal(size=200) + 10, rng.uniform(0.5, 2, size=200)
        y = mean + 2 * std * rng.normal(size=200)
        columns = {
            "shop": np.array([f"s{i}" for i in range(200)]),
            "mu": mean,
            "sd": std,
            "sold": y,
            "w": np.ones(200),
            "town": np.arange(200) // 5,
        }
        save_columns(folder / f"{name}.csv", columns | {"q10": mean - std, "q50": mean, "q90": mean + std})
    return folder


def test_evaluate_prints_the_table(command, asked, files):
    done = command("evaluate", files / "val.csv", *COLUMNS, "--resamples", "50")
    assert "200 rows, Gaussian forecasts" in done.stdout
    assert "too narrow" in done.stdout
    found = asked("evaluate", files / "val.csv", *COLUMNS, "--sample-weight", "w", "--seed", "3")
    table = load_forecasts(files / "val.csv", mean="mu", std="sd", targets="sold", sample_weight="w")
    assert found["scores"] == evaluate_forecasts(*table, **table.options(), seed=3).to_dict()
    quantiles = command("evaluate", files / "val.csv", "--quantiles", "q10,q50,q90", "--target", "sold", "-q")
    assert "coverage_80" in quantiles.stdout
    assert "coverage_40" in command(
        "evaluate", files / "val.csv", "--quantiles", "q*", "--levels", "0.3,0.5,0.7", "--target", "sold"
    ).stdout  # fmt: skip


def test_clusters_reach_every_verb(command, asked, files, tmp_path):
    town = (*COLUMNS, "--clusters", "town")
    assert "40 clusters (town): intervals by town" in command("evaluate", files / "val.csv", *town).stdout
    assert asked("rank", files / "val.csv", files / "test.csv", *town)["audit"]["scores"]["clusters"] == 40
    assert asked("rank", files / "val.csv", *town)["audit"]["cross_fitted"]
    assert asked("fit", files / "val.csv", *town, "-o", tmp_path / "r.safetensors")["chosen"] == "variance"
    command("fit", files / "val.csv", *town, "-m", "quantiles", "-o", tmp_path / "r.safetensors")


def test_fit_and_apply(command, asked, files, tmp_path):
    fitted = tmp_path / "r.safetensors"
    done = command("fit", files / "val.csv", *COLUMNS, "-o", fitted)
    assert "Chosen: variance" in done.stdout
    scale = float(load(fitted).scale)
    assert scale == pytest.approx(2, rel=0.15)
    for suffix in (".csv", ".npz", ".parquet"):
        out = tmp_path / f"out{suffix}"
        command("apply", fitted, files / "test.csv", *COLUMNS[:4], "--levels", "0.05,0.95", "-o", out)
        after = load_forecasts(out, mean="mu_calibrated", std="sd_calibrated", targets="sold", every_column=True)
        before = load_forecasts(files / "test.csv", mean="mu", std="sd", targets="sold")
        np.testing.assert_allclose(after.spread, scale * before.spread)
        assert list(after.columns)[-4:] == ["mu_calibrated", "sd_calibrated", "q0.05", "q0.95"] or suffix == ".npz"
        assert {"shop", "q0.05", "q0.95"} <= set(after.columns)
    explicit = asked("fit", files / "val.csv", *COLUMNS, "-m", "quantiles", "-o", fitted)
    assert explicit["chosen"] == "quantiles"


def test_compare_and_report(command, asked, files, tmp_path):
    done = command("rank", files / "val.csv", files / "test.csv", *COLUMNS)
    assert "fitted to 200" in done.stdout
    page, fitted = tmp_path / "page.html", tmp_path / "r.safetensors"
    done = command("report", files / "val.csv", *COLUMNS, "-o", page, "-c", fitted, "--title", "sales")
    assert "Chosen on held-out rows: variance scaling" in done.stdout
    assert "sales" in page.read_text()
    assert load(fitted) is not None
    found = asked("report", files / "val.csv", "--quantiles", "q*", "--target", "sold", "-o", page)
    assert found["audit"]["chosen"] == "raw"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("evaluate", "val.csv", "--mean", "mu", "--std", "sd"), "the file must have targets"),
        (("evaluate", "val.csv", *COLUMNS, "--labels", "x"), "--labels does not apply to forecasts of a number"),
        (("evaluate", "val.csv", "--quantiles", "q10,q90", "--levels", "a", "--target", "sold"), "--levels must be"),
        (("fit", "val.csv", *COLUMNS, "-m", "temperature", "-o", "x.safetensors"), "no recalibration is called"),
        (("fit", "val.csv", "--quantiles", "q*", "--target", "sold", "-o", "x.safetensors"), "--mean and --std"),
        (("report", "val.csv", "--quantiles", "q*", "--target", "sold", "-c", "x.safetensors"), "no recalibrator"),
    ],
)  # fmt: skip
def test_refusals(command, files, monkeypatch, arguments, words):
    monkeypatch.chdir(files)
    done = command(*arguments, code=2)
    assert words in done.stderr
    assert not (files / "x.safetensors").exists()


def test_a_recalibrator_is_told_from_a_calibrator(command, files, tmp_path):
    fitted = tmp_path / "r.safetensors"
    command("fit", files / "val.csv", *COLUMNS, "-o", fitted)
    assert (
        "`trueup apply --mean COLUMN --std COLUMN` reads it"
        in command("apply", fitted, files / "test.csv", "-o", tmp_path / "o.csv", code=2).stderr
    )
