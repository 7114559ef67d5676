"""What a person reads on a terminal: whole tables, true sentences, exit codes that mean what they say."""

import re
import sys

import numpy as np
import pytest

import trueup
from trueup._core.formatting import format_evidence, format_p
from trueup.cli import output, rank
from trueup.reports import report


def terminal(monkeypatch, columns):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", str(columns))


@pytest.mark.parametrize("columns", [40, 60, 80])
def test_a_table_is_never_cut(columns, monkeypatch, capsys):
    terminal(monkeypatch, columns)
    rows = [["method", "accuracy", "nll", "brier", "calibration_slope"], ["bias_corrected", "0.9", "0.31", "0.1", "1"]]
    output.print_table(rows)
    lines = re.sub(r"\x1b\[\d*m", "", capsys.readouterr().out).splitlines()
    assert all(len(line.rstrip()) <= columns for line in lines)
    words = " ".join(lines).split()
    for cell in (*rows[0], *rows[1]):
        assert cell in words


def test_the_chosen_method_is_first_and_no_more_are_shown_than_asked_for(draw, monkeypatch, capsys):
    result = report(draw(300, 0), draw(300, 1), methods=["vector", "ets", "temperature", "svs"], progress=False).audit
    monkeypatch.setattr(rank, "MAX_METHODS_SHOWN", 4)
    rank.print_audit(result, None)
    out = capsys.readouterr().out
    table = out.split("\n\n")[1].splitlines()
    names = [line.split()[0] for line in table[1:]]
    assert names[:2] == [result.chosen, "raw"]
    assert len(names) == 4
    assert table[0].split()[:2] == ["method", "held-out"]
    losses = [float(line.split()[1]) for line in table[3:]]
    assert losses == sorted(losses)
    (hidden,) = {*result.scores.methods} - {*names}
    assert f"Not shown, with a larger held-out loss: {hidden}; --all shows them." in out
    rank.print_audit(result, None, show_all=True)
    assert hidden in capsys.readouterr().out.split("\n\n")[1]


def test_few_rows_prove_nothing(tmp_path, command):
    trueup.save((np.array([[2.0, 0.0, 0.0]]), np.array([0])), tmp_path / "one.npz")
    out = command("evaluate", tmp_path / "one.npz").stdout
    assert "No evidence of miscalibration" not in out
    assert "1 row is too few to tell whether it is calibrated" in out
    assert "with about 170 rows, a mean confidence that is 10 points off would be detected" in out


def test_probabilities_are_written_and_read_again(folder, command):
    command("fit", "val.npz", "-m", "temperature", "-o", "cal.safetensors")
    calibrated = trueup.load("cal.safetensors")(trueup.load("test.npz").logits)
    for suffix in ("npz", "npy", "csv", "jsonl", "parquet", "safetensors"):
        command("apply", "cal.safetensors", "test.npz", "--output-probs", "-o", f"after.{suffix}")
        logits, labels = trueup.load(f"after.{suffix}", probs=True)
        assert np.allclose(np.exp(logits), np.exp(calibrated) / np.exp(calibrated).sum(1, keepdims=True), atol=1e-6)
        assert np.array_equal(labels, trueup.load("test.npz").labels)
    assert (folder / "after.csv").read_text().startswith("prob_0,prob_1,prob_2,label\n")


def test_a_map_of_other_classes_is_refused(folder, command):
    command("fit", "val.npz", "-m", "temperature", "-o", "cal.safetensors")
    trueup.save((np.zeros((4, 100)), np.arange(4)), "wide.npz")
    result = command("apply", "cal.safetensors", "wide.npz", "-o", "after.npz", code=2)
    assert "logits must have the 3 classes of the fit, got 100" in result.stderr
    assert not (folder / "after.npz").exists()


def test_evidence_beyond_telling_is_told_in_words():
    assert format_evidence(1.01e304) == "more than a million"
    assert format_p(0.0) == "p < 0.0001"


def test_the_report_tells_what_it_was_made_from(folder, command):
    command("report", "val.npz", "test.npz", "-m", "temperature", "-o", "page.html")
    page = (folder / "page.html").read_text()
    fitted = float(trueup.METHODS["temperature"](*trueup.load("val.npz")).temperature)
    assert f"Temperature(temperature={fitted:.5f})" in page or f"Temperature(temperature={fitted:.6g})" in page
    assert f"The temperature fitted to the calibration rows is {fitted:.2f}" in page
    for words in ("UTC", "val.npz, ", "SHA-256", "trueup "):
        assert words in page
