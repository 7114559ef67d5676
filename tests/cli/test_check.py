"""The verb check: its exit codes, its files, and what it says about wrong input."""

import hashlib
import json
from xml.etree import ElementTree

import numpy as np
import pytest

import trueup
from trueup._core import __version__


@pytest.fixture
def files(tmp_path, monkeypatch, draw):
    """A calibrated and an overconfident network on the same rows, and a file with few of them."""
    monkeypatch.chdir(tmp_path)
    z, y = draw(3000, 0, sharper=1.0)
    trueup.save((z, y), "good.npz")
    trueup.save((3 * z, y), "bad.npz")
    trueup.save((z[:100], y[:100]), "few.npz")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "code"),
    [
        ("good.npz --max ece=0.05", 0),
        ("good.npz --max ece=0.05 --min accuracy=0.5 --max nll=1", 0),
        ("bad.npz --max ece=0.05", 1),
        ("good.npz --max ece=0.05 --min accuracy=0.9", 1),
        ("few.npz --max ece=0.05", 3),
        ("few.npz --max ece=0.05 --strict", 1),
        ("good.npz --max ece=0.05 --strict", 0),
        ("good.npz --baseline bad.npz", 0),
        ("bad.npz --baseline good.npz", 1),
        ("bad.npz --baseline good.npz --max ece=0.9", 1),
    ],
)
def test_exit_codes(files, command, words, code):
    command("check", *words.split(), code=code)


def test_the_text_names_the_limit_the_interval_and_the_rows_that_are_needed(files, command):
    text = command("check", "few.npz", "--max", "ece=0.05", code=3).stdout
    assert text.startswith("100 rows; wrong passes and wrong failures: 2.5 % each\n\nlimit ")
    assert "Too few rows to tell: ece may be below or above 0.05 (interval [0.0000, " in text
    assert "rows are needed." in text
    assert "Failed: ece is above 0.05" in command("check", "bad.npz", "--max", "ECE=0.05", code=1).stdout
    quiet = command("check", "good.npz", "--max", "ece=0.05", "-q").stdout.splitlines()
    assert [line.split()[-1] for line in quiet] == ["outcome", "passed"]


def test_json(files, command):
    done = command("check", "bad.npz", "--max", "ece=0.05", "--min", "accuracy=0.3", "--json", code=1)
    result = json.loads(done.stdout)
    assert (result["verb"], result["exit_code"], result["check"]["outcome"]) == ("check", 1, "failed")
    assert [limit["name"] for limit in result["check"]["limits"]] == ["ece ≤ 0.05", "accuracy ≥ 0.3"]
    assert [limit["outcome"] for limit in result["check"]["limits"]] == ["failed", "passed"]
    few = json.loads(command("check", "few.npz", "--max", "ece=0.05", "--json", "--strict", code=1).stdout)
    assert few["exit_code"] == 1
    assert few["check"]["outcome"] == "undecided"
    assert few["check"]["limits"][0]["rows_needed"] > 100


@pytest.mark.parametrize(("strict", "tag"), [(False, "skipped"), (True, "failure")])
def test_junit(files, command, strict, tag):
    flags = ["--strict"] * strict
    command(
        "check", "few.npz", "--max", "ece=0.05", "--max", "nll=9", "--junit", "out.xml", *flags, code=1 if strict else 3
    )
    suite = ElementTree.parse("out.xml").getroot()
    assert [case.get("name") for case in suite] == ["ece ≤ 0.05", "nll ≤ 9"]
    assert [[entry.tag for entry in case] for case in suite] == [[tag], []]


def test_the_receipt_holds_what_the_outcome_depends_on(files, command):
    words = [
        "good.npz",
        "--max",
        "ece=0.05",
        "--baseline",
        "bad.npz",
        "--receipt",
        "r.json",
        "--model-id",
        "resnet-7",
        "--prompt-id",
        "p3",
    ]
    command("check", *words)
    receipt = json.loads((files / "r.json").read_text())
    digest = {name: hashlib.sha256((files / name).read_bytes()).hexdigest() for name in ("good.npz", "bad.npz")}
    assert receipt["sha256"] == digest
    assert receipt["versions"]["trueup"] == __version__
    assert (receipt["model_id"], receipt["prompt_id"], receipt["exit_code"]) == ("resnet-7", "p3", 0)
    ece = receipt["check"]["limits"][0]
    assert ece["low"] <= ece["high"] <= 0.05
    before = (files / "r.json").read_bytes()
    command("check", *words)
    assert (files / "r.json").read_bytes() == before


def test_stated_confidences_with_groups_and_clusters(files, command):
    rng = np.random.default_rng(0)
    stated = rng.choice([0.6, 0.8, 0.9], 2000)
    topic = rng.choice(["law", "art"], 2000)
    right = rng.random(2000) < stated - 0.25 * (topic == "law")
    lines = [f"{c},{r},{t},{i // 2}" for i, (c, r, t) in enumerate(zip(stated, right, topic, strict=True))]
    lines[5] = f",{right[5]},law,2"
    (files / "answers.csv").write_text("stated,correct,topic,question\n" + "\n".join(lines) + "\n")
    words = ["answers.csv", "--confidence", "stated", "--groups", "topic", "--max", "groups=0.1"]
    done = command("check", *words, code=1)
    assert "worst in topic=law" in done.stdout
    assert "1 row was left out" in done.stderr
    assert "in 1,000 clusters" in command("check", *words, "--clusters", "question", code=1).stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("good.npz", "name a limit with --max METRIC=X or --min METRIC=X, or another model with --baseline FILE"),
        ("good.npz --max ece", "--max must be METRIC=X with a number X, such as ece=0.02, got 'ece'"),
        ("good.npz --max ece=low", "got 'ece=low'"),
        ("good.npz --max ece=0.1 --max ece=0.2", "--max must have one limit per metric, got two for ece"),
        ("good.npz --max ece=nan", "--max must hold finite numbers"),
        ("good.npz --max accuracy=0.9", "--max must hold metrics that are worse when larger, got accuracy"),
        ("good.npz --min accuracy=90", "--min must lie in [0, 1] for accuracy, got 90; divide per cent by 100"),
        ("good.npz --max eec=0.1", "did you mean 'ece'?"),
        ("good.npz --max groups=0.1", "--groups must be given for the maximum of groups"),
        ("good.npz --max ece=0.1 --model-id x", "--model-id and --prompt-id go with --receipt"),
        ("good.npz --max ece=0.1 --receipt good.npz", "this would overwrite the input good.npz"),
        ("good.npz --max ece=0.1 --junit no/out.xml", "there is no folder no"),
        ("good.npz --baseline few.npz", "model must have the 100 rows that baseline has, got 3000"),
        ("none.npz --max ece=0.1", "none.npz"),
    ],
)
def test_wrong_input_ends_with_2(files, command, words, message):
    assert message in command("check", *words.split(), code=2).stderr
