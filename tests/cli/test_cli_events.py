"""Confidences, events, weights, groups and names of classes at the command line; shards from end to end."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

import trueup
from trueup.cli import app

REAL = "llm/mmlu_pro_gpt-4.1-mini.csv"


@pytest.fixture
def answers(folder):
    rng = np.random.default_rng(0)
    stated = rng.choice([0.6, 0.7, 0.8, 0.9, 0.95], 300)
    right = (rng.random(300) < stated - 0.2).astype(int)
    region = np.where(np.arange(300) % 3 == 0, "eu", "us")
    rows = [
        f"{i},{c},{r},{g},{w}"
        for i, (c, r, g, w) in enumerate(zip(stated, right, region, 1 + np.arange(300) % 2, strict=True))
    ]
    (folder / "answers.csv").write_text("id,stated,right,region,w\n" + "\n".join([*rows, "300,,1,eu,1"]) + "\n")
    return stated, right, region


SAID = ("--confidence", "stated", "--correct", "right")


def test_a_stated_confidence_is_evaluated_by_group(answers, asked, command):
    stated, right, region = answers
    found = asked("evaluate", "answers.csv", *SAID, "--groups", "region", "-q")["scores"]["methods"]["network"]
    assert found["metrics"]["predicted"]["value"] == pytest.approx(stated.mean())
    assert found["metrics"]["observed"]["value"] == pytest.approx(right.mean())
    groups = {row["group"]: row for row in found["groups"]["groups"]}
    assert groups["eu"]["observed"] == pytest.approx(right[region == "eu"].mean())
    result = command("evaluate", "answers.csv", *SAID, "--groups", "region")
    assert "region=eu" in result.stdout
    assert "1 row was left out, without a label or a confidence" in result.stderr


def test_weights_are_duplicated_rows(answers, asked):
    stated, right, _ = answers
    weighted = asked("evaluate", "answers.csv", *SAID, "--sample-weight", "w", "-q")["scores"]["methods"]["network"][
        "metrics"
    ]
    twice = 1 + np.arange(300) % 2
    assert weighted["observed"]["value"] == pytest.approx(np.repeat(right, twice).mean())
    assert weighted["predicted"]["value"] == pytest.approx(np.repeat(stated, twice).mean())


def test_fit_and_apply_a_confidence_and_keep_the_columns(answers, command, asked):
    command("fit", "answers.csv", *SAID, "-m", "platt", "-o", "cal.safetensors", "-q")
    command("apply", "cal.safetensors", "answers.csv", "--confidence", "stated", "-o", "after.jsonl", "-q")
    with open("after.jsonl") as file:
        rows = [json.loads(line) for line in file]
    assert [*rows[0]] == ["id", "stated", "stated_calibrated", "right", "region", "w"]
    assert len(rows) == 301
    assert rows[-1]["stated_calibrated"] is None
    now = asked("evaluate", "after.jsonl", "--confidence", "stated_calibrated", "--correct", "right", "-q")
    metrics = now["scores"]["methods"]["network"]["metrics"]
    assert metrics["predicted"]["value"] == pytest.approx(metrics["observed"]["value"], abs=0.01)


def test_compare_and_report_take_confidences_and_groups(answers, command, folder):
    out = command("rank", "answers.csv", *SAID, "-m", "platt", "--groups", "region", "--sample-weight", "w").stdout
    assert "region=us" in out
    assert "the event is right" in out
    assert "calibration_slope" in out
    command(
        "report",
        "answers.csv",
        *SAID,
        "-m",
        "platt",
        "--groups",
        "region",
        "--sample-weight",
        "w",
        "-o",
        "page.html",
        "-q",
    )
    page = (folder / "page.html").read_text("utf-8")
    assert "its mean predicted probability of right is" in page
    assert "Where is it wrong?" in page
    assert "Which classes are miscalibrated?" not in page


def test_an_event_by_name_or_number(folder, asked, command):
    ours = asked("evaluate", "test.npz", "--event", "cat", "--class-names", "ant,bee,cat")
    assert ours["scores"]["event_name"] == "cat"
    by_number = asked("evaluate", "test.npz", "--event", "2")["scores"]
    assert ours["scores"] == {**by_number, "event_name": "cat"}
    y = trueup.load("test.npz").labels
    assert ours["scores"]["methods"]["network"]["metrics"]["observed"]["value"] == pytest.approx((y == 2).mean())
    fitted = asked("fit", "val.npz", "-m", "platt", "--event", "2", "-o", "cal.safetensors")
    assert fitted["n_classes"] == 2
    command("apply", "cal.safetensors", "test.npz", "-o", "after.npz")
    assert trueup.io.load_logits("after.npz").shape == (400, 2)
    assert "400 rows, the event is class 1 of 3," in command("monitor", "test.npz", "--event", "1", code=3).stdout
    command("monitor", "test.npz", "--event", "1", "--state", "watch.safetensors", code=3)
    again = command("monitor", "test.npz", "--event", "2", "--state", "watch.safetensors", code=2)
    assert "watches the event 1, got --event 2" in again.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--confidence", "statd"], "did you mean stated?"),
        (["--confidence", "stated"], "answers.csv: the file must have correct, got 'id', 'stated'"),
        (["--confidence", "id", "--correct", "right"], "id must lie in [0, 1]"),
        (["--confidence", "stated", "--correct", "w"], "w must be 0 or 1, wrong or right, got '2'"),
        ([*SAID, "--groups", "regoin"], "did you mean region?"),
        ([*SAID, "--sample-weight", "region"], "region must be numbers, got 'eu'"),
        ([*SAID, "--event", "7"], "--event must be a class, 0..1"),
        ([*SAID, "--event", "cat"], "--event must be a class number, or with --class-names a name, got 'cat'"),
        (["--correct", "right"], "--correct goes with --confidence"),
        ([*SAID, "--probs"], "--confidence replaces"),
        ([], "the file must have logits and labels, got 'id', 'stated', 'right', 'region', 'w'"),
    ],
)
@pytest.mark.parametrize("verb", ["evaluate", "fit"])
def test_bad_input_is_one_line(answers, folder, command, verb, words, said):
    if verb == "fit" and "--groups" in words:
        words = [word for word in words if word not in ("--groups", "regoin")] + ["--sample-weight", "regoin"]
    more = ["-m", "platt", "-o", "cal.safetensors"] if verb == "fit" else []
    result = command(verb, "answers.csv", *words, *more, "-q", code=2)
    assert said in result.stderr
    assert result.stderr.count("\n") == 1
    assert "Traceback" not in result.stderr
    assert not (folder / "cal.safetensors").exists()


@pytest.mark.parametrize(
    ("sample_weight", "said"),
    [
        (["1", "-1"], "w must be weights, finite and not negative, got -1"),
        (["1", "nan"], "w must be weights, finite and not negative, got nan"),
        (["0", "0"], "--sample-weight must not all be zero"),
    ],
)
def test_bad_weights_are_one_line(folder, command, sample_weight, said):
    rows = "\n".join(f"0.{5 + i % 4},{i % 2},{sample_weight[i % 2]}" for i in range(40))
    (folder / "a.csv").write_text(f"stated,right,w\n{rows}\n")
    for words in (["evaluate", "a.csv"], ["fit", "a.csv", "-m", "platt", "-o", "cal.safetensors"]):
        assert said in command(*words, *SAID, "--sample-weight", "w", "-q", code=2).stderr


def test_string_labels_through_classes(folder, asked, command):
    z, y = trueup.load("test.npz")
    names = np.array(["ant", "bee", "cat"])
    rows = "\n".join(",".join(map(str, row)) + f",{names[label]}" for row, label in zip(z.tolist(), y, strict=True))
    (folder / "named.csv").write_text(f"logit_0,logit_1,logit_2,label\n{rows}\n")
    (folder / "names.txt").write_text("ant\nbee\ncat\n")
    plain = asked("evaluate", "test.npz")["scores"]["methods"]["network"]["metrics"]["nll"]["value"]
    for classes in ("ant,bee,cat", "names.txt"):
        found = asked("evaluate", "named.csv", "--class-names", classes)["scores"]["methods"]["network"]["metrics"]
        assert found["nll"]["value"] == pytest.approx(plain, rel=1e-6)
    assert "list the classes of text labels with --class-names" in command("evaluate", "named.csv", code=2).stderr


def test_shards_end_to_end(folder, draw, command, asked):
    import pandas as pd

    z, y = draw(900, 3)
    for i, region in enumerate(("eu", "us", "us")):
        place = folder / "parts" / f"region={region}"
        place.mkdir(parents=True, exist_ok=True)
        frame = pd.DataFrame({"id": range(i, 900, 3), "logits": z[i::3].tolist(), "label": y[i::3]})
        frame.to_parquet(place / f"{i}.parquet")
    trueup.save((z, y), "whole.npz")
    found = asked("evaluate", "parts", "--groups", "region")["scores"]["methods"]["network"]["groups"]["groups"]
    assert {row["group"]: row["rows"] for row in found} == {"eu": 300, "us": 600}
    command("fit", "parts", "-m", "temperature", "-o", "cal.safetensors", "-q")
    out = command("apply", "cal.safetensors", "parts", "-o", "after").stdout
    assert "900 rows of 3 classes in 3 files" in out
    after = pd.read_parquet(folder / "after" / "region=us" / "1.parquet", partitioning=None)
    assert after["id"].tolist() == list(range(1, 900, 3))
    assert after["label"].tolist() == y[1::3].tolist()
    assert "after" not in command("rank", "parts", "-m", "temperature").stdout
    ours = asked("rank", "parts", "after", "-m", "temperature")["audit"]
    assert ours["calibration_rows"] == 900
    assert ours["scores"]["rows"] == 900
    command("report", "parts", "-m", "temperature", "-o", "page.html", "-q")
    assert (folder / "page.html").exists()
    assert "-o must be a folder" in command("apply", "cal.safetensors", "parts", "-o", "one.csv", code=2).stderr


def test_the_stated_confidences_of_a_language_model(data, asked):
    found = asked("evaluate", data / REAL, "--confidence", "stated_confidence", "--groups", "category", "-q")["scores"]
    metrics = found["methods"]["network"]["metrics"]
    assert metrics["predicted"]["value"] == pytest.approx(0.9283, abs=5e-5)
    assert metrics["observed"]["value"] == pytest.approx(0.7601, abs=5e-5)
    assert found["rows"] == 11_861
    assert len(found["methods"]["network"]["groups"]["groups"]) == 14


def test_report_by_group_and_weight(answers, command):
    command(
        "report",
        "answers.csv",
        *SAID,
        "--groups",
        "region",
        "--sample-weight",
        "w",
        "-m",
        "temperature",
        "-o",
        "a.html",
        "-q",
    )
    with open("a.html", encoding="utf-8") as file:
        page = file.read()
    assert "Where is it wrong?" in page
    assert "by region" in page
    assert "All figures of this page weight the rows" in page


def test_monitor_by_group_goes_on_after_a_restart(answers):
    _, right, region = answers
    words = ("monitor", "answers.csv", *SAID, "--groups", "region", "--state", "watch.safetensors")
    for times in (1, 2):
        result = CliRunner().invoke(app, [*words, "--json", "-q"])
        assert result.exit_code in (0, 3), result.output
        groups = {row["group"]: row for row in json.loads(result.stdout)["groups"]["groups"]}
        assert groups["eu"]["rows"] == times * (region == "eu").sum()
        assert groups["eu"]["observed"] == pytest.approx(right[region == "eu"].mean())
    told = CliRunner().invoke(app, [*words]).stdout
    assert "region=us" in told
    assert "observed" in told
