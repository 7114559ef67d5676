"""The verbs decide, sets and plan."""

import numpy as np
import pytest

import trueup


@pytest.fixture
def larger(tmp_path, monkeypatch, draw):
    monkeypatch.chdir(tmp_path)
    trueup.save("val.npz", draw(3000, 0))
    trueup.save("test.npz", draw(1000, 1))
    np.savez("traffic.npz", logits=draw(800, 2)[0])
    return tmp_path


def test_decide(larger, command, asked):
    text = command("decide", "val.npz", "--at-most", 0.2).stdout
    assert text.startswith("Answer when the confidence is at least")
    assert "at most 20 % of the answers are wrong, with 95 % certainty" in text
    found = asked("decide", "val.npz", "--at-most", 0.2)
    assert found["verb"] == "decide"
    assert found["threshold"]["promised"]
    assert found["prior"] is None
    assert "Nothing can be promised" in command("decide", "val.npz", "--at-most", 0.0001).stdout


def test_decide_of_stated_confidences(larger, command):
    rng = np.random.default_rng(0)
    stated = rng.choice([0.5, 0.9, 0.95, 1.0], size=3000)
    right = rng.random(3000) < stated - 0.05
    lines = [f"{claim},{int(came)}" for claim, came in zip(stated, right, strict=True)]
    (larger / "answers.csv").write_text("stated,correct\n" + "\n".join(lines) + "\n")
    text = command("decide", "answers.csv", "--confidence", "stated", "--at-most", 0.15).stdout
    assert "at most 15 % of the rows flagged as the event are not the event" in text


def test_decide_without_labels(larger, command, asked):
    found = asked("decide", "val.npz", "traffic.npz", "-o", "corrected.safetensors")
    assert len(found["prior"]["prior"]) == 3
    assert 0.5 < found["performance"]["metrics"]["accuracy"]["value"] < 0.8
    assert trueup.load_calibrator("corrected.safetensors")(np.zeros((1, 3))).shape == (1, 3)
    assert "Estimated without labels on 800 rows" in command("decide", "val.npz", "traffic.npz").stdout
    command("decide", "val.npz", "-o", "corrected.safetensors", code=2)


def test_sets(larger, command, asked):
    text = command("sets", "val.npz", "test.npz", "-o", "sets.safetensors").stdout
    assert "The sets hold the truth in" in text
    assert "Written: sets.safetensors" in text
    rule = trueup.decisions.load_prediction_sets("sets.safetensors")
    assert rule(trueup.load("test.npz").logits).shape == (1000, 3)
    found = asked("sets", "val.npz", "test.npz", "--score", "lac", "--alpha", 0.2, "--by-class")
    assert len(found["limit"]) == 3
    assert abs(found["scores"]["coverage"]["value"] - 0.8) < 0.05
    assert "classes on average on those rows" in command("sets", "val.npz", "--deterministic").stdout
    command("sets", "val.npz", "--alpha", 2, code=2)


def test_plan(larger, command, asked):
    assert "With 1,000 rows nothing below" in command("plan", "val.npz", "--rows", 1000).stdout
    found = asked("plan", "val.npz", "--precision", 0.01, "--beside", "val.npz")
    assert found["plan"]["rows_for_ece"] > 100
    assert found["plan"]["rows_for_comparison"] is None
