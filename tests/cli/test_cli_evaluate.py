"""evaluate, compare and report."""

import json

import numpy as np
import pytest

import trueup
from trueup.reports.audit import DEFAULT, SLOW


@pytest.mark.parametrize("suffix", [".npz", ".npy", ".csv", ".parquet", ".safetensors"])
def test_evaluate_reads_every_format(folder, asked, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    pair = trueup.load("test.npz")
    trueup.save(pair, f"copy{suffix}")
    found = asked("evaluate", f"copy{suffix}")["scores"]
    assert found["rows"] == 400
    metrics = found["methods"]["network"]["metrics"]
    assert metrics["ece"]["value"] == pytest.approx(trueup.metrics.ece(*pair), abs=1e-6)
    assert metrics["accuracy"]["value"] == pytest.approx(trueup.metrics.accuracy(*pair))


def test_evaluate_prints_the_librarys_table(folder, command):
    assert command("evaluate", "test.npz").stdout == f"{trueup.evaluate(*trueup.load('test.npz'))}\n"


def test_quiet_is_the_table_alone(folder, command):
    lines = command("evaluate", "test.npz", "--quiet").stdout.splitlines()
    assert lines[0].split() == ["metric", "value", "95", "%", "interval"]
    assert len(lines) == 11


def test_options_reach_the_library(folder, asked):
    words = ("--metric", "ece", "--metric", "smooth_ece", "--bins", 7, "--level", 0.8, "--resamples", 50, "--seed", 3)
    pair = trueup.load("test.npz")
    wanted = trueup.evaluate(*pair, metrics=("ece", "smooth_ece"), bins=7, level=0.8, n_resamples=50, seed=3)
    assert asked("evaluate", "test.npz", *words)["scores"] == wanted.to_dict()


def test_what_is_not_a_number_is_null(folder, asked):
    found = asked("evaluate", "test.npz", "--metric", "smooth_ece")
    interval = found["scores"]["methods"]["network"]["metrics"]["smooth_ece"]
    assert interval["low"] is None
    assert interval["value"] > 0


def test_names_of_arrays_and_columns(folder, asked):
    logits, labels = trueup.load("test.npz")
    np.savez("own.npz", z=logits, y=labels)
    table = np.column_stack([logits, labels])
    np.savetxt("own.csv", table, delimiter=",", fmt=["%.9g"] * 3 + ["%d"], header="cat,dog,fish,truth", comments="")
    one = asked("evaluate", "own.npz", "--logits", "z", "--labels", "y")
    two = asked("evaluate", "own.csv", "--logits", "cat,dog,fish", "--labels", "truth")
    values = [x["scores"]["methods"]["network"]["metrics"]["nll"]["value"] for x in (one, two)]
    assert values == pytest.approx([trueup.metrics.nll(logits, labels)] * 2, rel=1e-6)


def test_probabilities_are_read_when_asked_for(folder, asked, command):
    logits, labels = trueup.load("test.npz")
    shares = np.exp(logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)).astype(np.float64)
    np.savez("probs.npz", probs=shares / shares.sum(axis=1, keepdims=True), labels=labels)
    assert "--probs" in command("evaluate", "probs.npz", code=2).stderr
    found, plain = asked("evaluate", "probs.npz", "--probs"), asked("evaluate", "test.npz")
    values = [x["scores"]["methods"]["network"]["metrics"]["nll"]["value"] for x in (found, plain)]
    assert values[0] == pytest.approx(values[1], rel=1e-5)


def test_halves_of_a_file(folder, asked, command):
    assert asked("evaluate", "both.npz", "--split", "test")["scores"] == asked("evaluate", "test.npz")["scores"]
    assert "choose --split val or test" in command("evaluate", "both.npz", code=2).stderr
    assert (
        "--split must be val or test, got 'train'" in command("evaluate", "both.npz", "--split", "train", code=2).stderr
    )


def test_rank_takes_two_files_or_both_halves_of_one(folder, asked):
    names = ("-m", "temperature", "-m", "histogram")
    two, one = (asked("rank", *files, *names)["audit"] for files in (("val.npz", "test.npz"), ("both.npz",)))
    assert one["scores"] == two["scores"]
    assert list(two["scores"]["methods"]) == ["raw", "temperature", "histogram"]
    assert (two["calibration_rows"], two["cross_fitted"], two["chosen"]) == (300, False, "temperature")


def test_rank_crosses_the_fits_of_one_file(folder, asked):
    found = asked("rank", "val.npz", "-m", "temperature", "--n-folds", 4)["audit"]
    assert (found["cross_fitted"], found["n_folds"], found["scores"]["rows"]) == (True, 4, 300)


def test_rank_prints_a_table_of_eighty_columns(folder, command):
    out = command("rank", "val.npz", "test.npz").stdout
    lines = out.splitlines()
    assert lines[0] == "400 rows, 3 classes, 15 bins; fitted to 300"
    assert max(map(len, lines[:14])) <= 80
    shown = [line.split()[0] for line in lines[3:13]]
    assert shown[:2] == ["temperature", "raw"]
    assert {*shown} < {"raw", *DEFAULT, *SLOW}
    assert "Chosen by cross-validation: temperature, Temperature scaling." in out
    assert "This network is overconfident" in lines[-1]


def test_rank_shows_the_metrics_that_were_asked_for(folder, command):
    words = ("rank", "both.npz", "-m", "temperature", "-m", "vector", "-q")
    assert command(*words, "--metric", "mce").stdout.splitlines()[0].split() == ["method", "held-out", "mce"]
    assert "no metric of the comparison is called 'skce'" in command(*words, "--metric", "skce", code=2).stderr


def test_a_method_that_fails_is_told_and_the_others_go_on(folder, command, monkeypatch):
    from trueup import METHODS

    def broken(logits, labels):
        raise ValueError("it cannot be\ndone")

    monkeypatch.setattr("trueup.calibrators.logistic.Beta.fit", broken)
    assert METHODS["beta"] is broken
    result = command("rank", "both.npz", "-m", "beta", "-m", "temperature")
    assert "trueup: warning: beta was left out: it cannot be done\n" in result.stderr
    assert "Chosen by cross-validation: temperature" in result.stdout
    assert "beta" not in command("rank", "both.npz", "-m", "beta", "-m", "temperature", "-q").stderr


def test_all_and_names_exclude_each_other(folder, command):
    assert "either --try-all or --method" in command("rank", "both.npz", "--try-all", "-m", "ets", code=2).stderr


def test_report_writes_a_page_and_the_chosen_calibrator(folder, command, asked):
    words = (
        "report",
        "val.npz",
        "test.npz",
        "-m",
        "temperature",
        "-m",
        "svs",
        "-o",
        "page.html",
        "-c",
        "cal.safetensors",
    )
    out = command(*words).stdout
    assert "Written: page.html and cal.safetensors" in out
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "<html" in page
    assert "Temperature scaling" in page
    fitted = trueup.load("cal.safetensors")
    assert float(fitted.temperature) == pytest.approx(
        float(trueup.METHODS["temperature"](*trueup.load("val.npz")).temperature)
    )
    found = asked(*words)
    assert (found["verb"], found["output"], found["audit"]["chosen"]) == ("report", "page.html", "temperature")
    assert command(*words, "--quiet", "--title", "Pets", "--class-names", "cat,dog,fish").output == ""
    page = (folder / "page.html").read_text(encoding="utf-8")
    assert "<title>Pets" in page
    assert "fish" in page


def test_where_nothing_helps_the_calibrator_is_the_identity(folder, command, draw):
    trueup.save(draw(300, 2, sharper=1.0), "good.npz")
    command("report", "good.npz", "-m", "histogram", "-o", "page.html", "-c", "cal.safetensors")
    assert repr(trueup.load("cal.safetensors")) == "Identity()"


def test_report_looks_at_its_outputs_before_it_works(folder, command):
    assert "the suffix must be .html or .htm" in command("report", "val.npz", "-o", "page.pdf", code=2).stderr
    assert "there is no folder" in command("report", "val.npz", "-o", "no/page.html", code=2).stderr


def test_compare_scores_two_models_on_the_same_rows(folder, asked, command, draw):
    logits, labels = draw(400, 1)
    trueup.save((logits / 3, labels), "calmer.npz")
    theirs = trueup.compare(test=(logits, labels), calmer=(logits / 3, labels)).to_dict()
    assert asked("compare", "test.npz", "calmer.npz")["scores"] == json.loads(json.dumps(theirs))
    text = command("compare", "test.npz", "calmer.npz").stdout
    assert "calmer" in text
    assert "change       95 % interval" in text
    trueup.save((logits[:-1], labels[:-1]), "short.npz")
    assert "short" in command("compare", "test.npz", "short.npz", code=2).stderr
    assert "two files are needed" in command("compare", "test.npz", code=2).stderr
    assert "the same file twice" in command("compare", "test.npz", "test.npz", code=2).stderr


def test_compare_takes_clusters_groups_and_an_event(folder, asked, draw):
    rng = np.random.default_rng(0)
    logits, labels = draw(400, 1)
    more = {"patient": np.repeat(np.arange(100), 4), "site": rng.integers(0, 2, 400)}
    np.savez("a.npz", logits=logits, labels=labels, **more)
    np.savez("b.npz", logits=logits / 2, labels=labels, **more)
    ours = asked("compare", "a.npz", "b.npz", "--clusters", "patient", "--event", "1", "--resamples", 50)["scores"]
    pairs = {"a": (logits, labels), "b": (logits / 2, labels)}
    theirs = trueup.compare(pairs, clusters={"patient": more["patient"]}, event=1, n_resamples=50).to_dict()
    assert ours["methods"] == json.loads(json.dumps(theirs))["methods"]
    assert ours["clusters"] == 100
    assert "groups" in asked("compare", "a.npz", "b.npz", "--groups", "site", "-q")["scores"]["methods"]["b"]
