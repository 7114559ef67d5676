"""Ordinary files and verbs: each is read right, or rejected with a remedy that works."""

import gzip
import json
import re
from pathlib import Path

import numpy as np
import pytest

import trueup

NAMES = ("cat", "dog", "eel")


@pytest.fixture(scope="module")
def rows():
    rng = np.random.default_rng(3)
    z = 2 * rng.normal(size=(240, 3))
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    return z, y, p


def table(head, *columns, sep=",", end="\n"):
    """The text of a table of cells."""
    lines = [sep.join(map(str, cells)) for cells in zip(*columns, strict=True)]
    return end.join([sep.join(head), *lines, ""])


def cells(values, pattern="{:.6f}"):
    """Numbers as columns of text."""
    return [[pattern.format(x) for x in column] for column in np.asarray(values).T]


def csv_logits(z, y, p):
    return table(("logit_0", "logit_1", "logit_2", "label"), *cells(z), y)


def named_columns(z, y, p):
    return table((*NAMES, "label"), *cells(z), y)


def named_labels(z, y, p):
    return table((*NAMES, "label"), *cells(z), np.array(NAMES)[y])


def with_index(z, y, p):
    return table(("", "logit_0", "logit_1", "logit_2", "label"), range(len(y)), *cells(z), y)


def tabs(z, y, p):
    return table(("logit_0", "logit_1", "logit_2", "label"), *cells(z), y, sep="\t")


def european(z, y, p):
    return csv_logits(z, y, p).replace(",", ";").replace(".", ",")


def byte_order_mark(z, y, p):
    return "\ufeff" + csv_logits(z, y, p)


def windows_lines(z, y, p):
    return table(("logit_0", "logit_1", "logit_2", "label"), *cells(z), y, end="\r\n")


def float_labels(z, y, p):
    return table(("logit_0", "logit_1", "logit_2", "label"), *cells(z), y.astype(float))


def quoted(z, y, p):
    return table(('"logit_0"', '"logit_1"', '"logit_2"', '"label"'), *cells(z, '"{:.6f}"'), y)


def probabilities(z, y, p):
    return table(("probs_0", "probs_1", "probs_2", "label"), *cells(p, "{:.9f}"), y)


def rounded(z, y, p):
    return table(("probs_0", "probs_1", "probs_2", "label"), *cells(p, "{:.6f}"), y)


def percent_signs(z, y, p):
    return table(("probs_0", "probs_1", "probs_2", "label"), *cells(100 * p, "{:.9f}%"), y)


def json_lines(z, y, p):
    return "".join(json.dumps({"logits": a.tolist(), "label": int(b)}) + "\n" for a, b in zip(z, y, strict=True))


READ = [
    ("rows.csv", csv_logits, ()),
    ("rows.csv.gz", csv_logits, ()),
    ("named.csv", named_columns, ("--logits", "cat,dog,eel")),
    ("labels.csv", named_labels, ("--logits", "cat,dog,eel")),
    ("index.csv", with_index, ()),
    ("tabs.csv", tabs, ()),
    ("european.csv", european, ()),
    ("told.csv", european, ("--sep", ";", "--decimal", ",")),
    ("mark.csv", byte_order_mark, ()),
    ("windows.csv", windows_lines, ()),
    ("floats.csv", float_labels, ()),
    ("quoted.csv", quoted, ()),
    ("probs.csv", probabilities, ("--probs",)),
    ("rounded.csv", rounded, ("--probs",)),
    ("percent.csv", percent_signs, ("--probs",)),
    ("rows.jsonl", json_lines, ()),
]
"""Files that are read: name, text, options."""


@pytest.mark.parametrize(("name", "write", "options"), READ, ids=[name for name, _, _ in READ])
def test_every_verb_reads_an_ordinary_file(rows, name, write, options, tmp_path, monkeypatch, asked, command):
    monkeypatch.chdir(tmp_path)
    z, y, _ = rows
    text = write(*rows).encode()
    Path(name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    trueup.save((z, y), "plain.npz")
    found, wanted = (asked("evaluate", *words) for words in ((name, *options), ("plain.npz",)))
    for metric in ("accuracy", "nll", "ece"):
        values = [result["scores"]["methods"]["network"]["metrics"][metric]["value"] for result in (found, wanted)]
        assert values[0] == pytest.approx(values[1], abs=1e-4)
    asked("fit", name, *options, "-m", "temperature", "-o", "c.safetensors")
    asked("rank", name, *options, "-m", "temperature")
    asked("apply", "c.safetensors", name, *options, "-o", "after.npz")
    after, calibrated = trueup.load("after.npz").logits, trueup.load("c.safetensors")(z)
    centred = [x - x.mean(axis=1, keepdims=True) for x in (after, calibrated)]
    assert np.allclose(*centred, atol=2e-3)
    if "--sep" not in options:
        command("decide", name, *options, "--max-risk", "0.5")
        command("sets", name, *options)
    command("monitor", name, *options)


def one_based(z, y, p):
    return table(("logit_0", "logit_1", "logit_2", "label"), *cells(z), y + 1)


def sums_off(z, y, p):
    return table(("probs_0", "probs_1", "probs_2", "label"), *cells(1.03 * p / (1 + 0.04 * p), "{:.9f}"), y)


def probabilities_as_logits(z, y, p):
    return table(("logit_0", "logit_1", "logit_2", "label"), *cells(p, "{:.9f}"), y)


def percent_as_logits(z, y, p):
    return table(("logit_0", "logit_1", "logit_2", "label"), *cells(100 * p), y)


def one_probability(z, y, p):
    return table(("risk", "label"), *cells(p[:, :1]), y == 0)


def unknown_column(z, y, p):
    return table(("p", "label"), *cells(p[:, :1]), y == 0)


def missing_label(z, y, p):
    return csv_logits(z, y, p).replace(f",{y[3]}\n", ",\n", 1)


def missing_number(z, y, p):
    return csv_logits(z, y, p).replace(f"{z[4, 1]:.6f}", "nan", 1)


def empty(z, y, p):
    return ""


def other_names(z, y, p):
    return table(("a", "b", "c", "truth"), *cells(z), y)


REJECTED = [
    ("one.csv", one_based, (), r"labels must lie in 0\.\.2, got 1\.\.3; subtract 1", None),
    ("probs.csv", probabilities_as_logits, (), "read probabilities with --probs", ("--probs",)),
    ("probs.csv", probabilities_as_logits, ("--quiet",), "insist on logits with --no-probs", ("--no-probs",)),
    ("cent.csv", percent_as_logits, (), "--probs", None),
    ("sums.csv", sums_off, ("--probs",), "divide rounded probabilities by their sums", None),
    ("risk.csv", one_probability, (), "--confidence", ("--confidence", "risk", "--correct", "label")),
    ("p.csv", unknown_column, (), "--confidence", ("--confidence", "p", "--correct", "label")),
    ("p.csv", unknown_column, ("--probs",), "--confidence", ("--confidence", "p", "--correct", "label")),
    ("nan.csv", missing_number, (), r"nan at \[4, 1\]", None),
    ("empty.csv", empty, (), "empty|no rows|no columns", None),
    (
        "other.csv",
        other_names,
        (),
        "the file must have logits and labels, got 'a', 'b', 'c', 'truth'",
        ("--logits", "a,b,c", "--labels", "truth"),
    ),
    ("sheet.xlsx", empty, (), "suffix must be one of", None),
]
"""Files that are rejected: name, text, options, the error, and the options of its remedy."""


@pytest.mark.parametrize(
    ("name", "write", "options", "error", "remedy"), REJECTED, ids=[f"{r[0]}-{r[3]}" for r in REJECTED]
)
def test_an_ordinary_mistake_is_rejected_with_a_remedy(
    rows, name, write, options, error, remedy, tmp_path, monkeypatch, command
):
    monkeypatch.chdir(tmp_path)
    Path(name).write_text(write(*rows), encoding="utf-8")
    for verb in ("evaluate", "rank", "decide", "monitor"):
        told = command(verb, name, *options, code=2).stderr
        lines = [line for line in told.splitlines() if not line.startswith("trueup: warning:")]
        assert len(lines) == 1
        assert re.search(error, lines[0]), (verb, told)
    if remedy is not None:
        command("evaluate", name, *remedy)


def test_a_file_without_rows_is_rejected(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    Path("head.csv").write_text("logit_0,logit_1,logit_2,label\n")
    for verb in (("evaluate",), ("rank",), ("decide",), ("sets",), ("fit", "-o", "c.safetensors")):
        assert "head.csv: there are no rows" in command(verb[0], "head.csv", *verb[1:], code=2).stderr


def test_a_calibrator_rejects_other_classes(rows, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    z, y, p = rows
    Path("val.csv").write_text(named_columns(z, y, p))
    Path("reversed.csv").write_text(table((*NAMES[::-1], "label"), *cells(z[:, ::-1]), 2 - y))
    fields = ("--logits", "cat,dog,eel")
    command("fit", "val.csv", *fields, "-m", "vector", "-o", "c.safetensors")
    told = command(
        "apply", "c.safetensors", "reversed.csv", "--logits", "eel,dog,cat", "-o", "after.csv", code=2
    ).stderr
    assert "cat" in told
    assert not Path("after.csv").exists()
    command("apply", "c.safetensors", "reversed.csv", *fields, "-o", "after.csv")
    assert Path("after.csv").read_text().splitlines()[0].split(",")[:3] == ["eel", "dog", "cat"] or set(
        Path("after.csv").read_text().splitlines()[0].split(",")[:3]
    ) == set(NAMES)
    left, right = trueup.load("after.csv", logits=NAMES).logits, trueup.load("c.safetensors")(z)
    assert np.allclose(left - left.mean(axis=1, keepdims=True), right - right.mean(axis=1, keepdims=True), atol=1e-4)


def test_a_threshold_near_one_is_not_rounded_to_one(tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    gap = np.log(1 / rng.uniform(1e-6, 1e-4, size=4000))
    z = np.column_stack([gap, np.zeros(4000)])
    y = (rng.random(4000) < 0.3 * (gap < np.median(gap))).astype(int)
    trueup.save((z, y), "sure.npz")
    text = command("decide", "sure.npz", "--max-risk", "0.02", "--class-names", "no,yes").stdout
    number = re.search(r"at least (\d\.?\d*)", text)
    assert number is not None, text
    assert float(number[1]) < 1
