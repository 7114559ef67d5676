"""The verbs decide, sets and plan."""

import numpy as np
import pytest

import trueup


@pytest.fixture
def larger(tmp_path, monkeypatch, draw):
    monkeypatch.chdir(tmp_path)
    trueup.save(draw(3000, 0), "val.npz")
    trueup.save(draw(1000, 1), "test.npz")
    np.savez("traffic.npz", logits=draw(800, 2)[0])
    return tmp_path


def test_decide(larger, command, asked):
    text = command("decide", "val.npz", "--max-risk", 0.2).stdout
    assert text.startswith("Answer when the confidence is at least")
    assert "at most 20 % of the answers are wrong, with 95 % certainty" in text
    found = asked("decide", "val.npz", "--max-risk", 0.2)
    assert found["verb"] == "decide"
    assert found["threshold"]["promised"]
    assert found["prior"] is None
    assert "Nothing can be promised" in command("decide", "val.npz", "--max-risk", 0.0001).stdout


def test_decide_of_stated_confidences(larger, command):
    rng = np.random.default_rng(0)
    stated = rng.choice([0.5, 0.9, 0.95, 1.0], size=3000)
    right = rng.random(3000) < stated - 0.05
    lines = [f"{claim},{int(came)}" for claim, came in zip(stated, right, strict=True)]
    (larger / "answers.csv").write_text("stated,correct\n" + "\n".join(lines) + "\n")
    text = command("decide", "answers.csv", "--confidence", "stated", "--max-risk", 0.15).stdout
    assert "at most 15 % of the answers are wrong" in text


def test_decide_without_labels(larger, command, asked):
    found = asked("decide", "val.npz", "traffic.npz", "-o", "corrected.safetensors")
    assert len(found["prior"]["prior"]) == 3
    assert 0.5 < found["performance"]["metrics"]["accuracy"]["value"] < 0.8
    assert trueup.load("corrected.safetensors")(np.zeros((1, 3))).shape == (1, 3)
    assert "Estimated without labels on 800 rows" in command("decide", "val.npz", "traffic.npz").stdout
    command("decide", "val.npz", "-o", "corrected.safetensors", code=2)


def test_a_promise_for_other_class_frequencies_is_withheld(larger, command, asked):
    rng = np.random.default_rng(0)
    for name, p in (("val.npz", [0.4, 0.3, 0.3]), ("moved.npz", [0.85, 0.1, 0.05])):
        y = rng.choice(3, 2000, p=p)
        z = 3 * np.eye(3)[y] + 1.5 * rng.normal(size=(2000, 3))
        trueup.save((z, y), name) if name == "val.npz" else np.savez(name, logits=z)
    text = command("decide", "val.npz", "moved.npz", "--max-risk", 0.05).stdout
    assert text.startswith("No threshold is given: the class frequencies of NEW differ from those of VAL")
    assert "Answer when" not in text
    assert "as deployed" in text
    answer = asked("decide", "val.npz", "moved.npz", "--max-risk", 0.05)
    assert answer["threshold"] is None
    assert answer["text"].startswith("No threshold is given")
    assert (
        answer["performance"]["corrected"]["accuracy"]["value"] > answer["performance"]["metrics"]["accuracy"]["value"]
    )
    assert "Answer when" in command("decide", "val.npz", "--max-risk", 0.05).stdout


def test_a_threshold_near_one_is_not_rounded_to_one(larger, command):
    confidence = np.repeat([0.999996, 0.99], 2000)
    labels = np.concatenate([np.zeros(2000), np.arange(2000) % 10 == 0]).astype(int)
    trueup.save((np.log(np.stack([confidence, 1 - confidence], axis=1)), labels), "sharp.npz")
    text = command("decide", "sharp.npz", "--max-risk", 0.01).stdout
    assert text.startswith("Answer when the confidence is at least 0.999996:")


def test_sets(larger, command, asked):
    text = command("sets", "val.npz", "test.npz", "-o", "sets.safetensors").stdout
    assert "The sets contain the true class in" in text
    assert "Written: sets.safetensors" in text
    rule = trueup.load("sets.safetensors")
    assert rule(trueup.load("test.npz").logits).shape == (1000, 3)
    found = asked("sets", "val.npz", "test.npz", "--score", "lac", "--coverage", 0.8, "--by-class")
    assert len(found["limit"]) == 3
    assert abs(found["scores"]["coverage"]["value"] - 0.8) < 0.05
    assert "classes on average" in command("sets", "val.npz", "--deterministic").stdout
    command("sets", "val.npz", "--coverage", 2, code=2)


def test_plan(larger, command, asked):
    assert "With 1,000 rows a calibration error below" in command("plan", "val.npz", "--rows", 1000).stdout
    found = asked("plan", "val.npz", "--precision", 0.01, "--other", "val.npz")
    assert found["plan"]["rows_for_ece"] > 100
    assert found["plan"]["rows_for_comparison"] is None


@pytest.fixture
def grouped(larger, draw):
    for name, seed in (("val.csv", 3), ("test.csv", 4)):
        z, y = draw(1500, seed)
        rows = [",".join([*(f"{x:.5f}" for x in z[i]), str(y[i]), "abc"[i % 3]]) for i in range(len(y))]
        (larger / name).write_text("\n".join(["logit_0,logit_1,logit_2,label,region", *rows]))
    return larger


def test_groups(grouped, command, asked):
    text = command("decide", "val.csv", "--max-risk", 0.3, "--groups", "region").stdout
    assert "All promises hold at once with 95 % certainty" in text
    assert [line[:3] for line in text.splitlines()[1:]] == ["a: ", "b: ", "c: "]
    assert set(asked("decide", "val.csv", "--max-risk", 0.3, "--groups", "region")["threshold"]["groups"]) == set("abc")
    text = command("sets", "val.csv", "test.csv", "--groups", "region").stdout
    assert "one threshold per group" in text
    found = asked("sets", "val.csv", "test.csv", "--groups", "region")
    assert set(found["groups"]) == set("abc")
    assert len(found["limit"]) == 3
    assert all(0.8 < one["coverage"]["value"] < 1 for one in found["groups"].values())
    command("sets", "val.csv", "--groups", "region", "--by-class", code=2)


def test_an_event_by_name(grouped, command, asked):
    text = command("decide", "val.csv", "--event", "bee", "--class-names", "ant,bee,cat", "--max-risk", 0.5).stdout
    assert "Flag when the probability of bee" in text
    assert "treat all" in text
    found = asked("decide", "val.csv", "test.csv", "--event", 1, "--max-risk", 0.3)
    assert found["threshold"]["risk"] == "false_discovery_rate"
    assert found["net_benefit"]["event"] == 1
    assert set(found["performance"]["metrics"]) == {"accuracy", "f1", "roc_auc"}
    command("decide", "val.csv", "--event", 1, "--risk", "error", code=2)
    command("decide", "val.csv", "--event", 7, code=2)


def test_stated_confidences(larger, command):
    rng = np.random.default_rng(0)
    stated = rng.choice([0.6, 0.8, 0.9, 1.0], 2000)
    right = rng.random(2000) < np.where(stated == 1, 0.97, stated - 0.1)
    rows = "\n".join(f"{c},{int(r)}" for c, r in zip(stated, right, strict=True))
    (larger / "stated.csv").write_text(f"stated,correct\n{rows}")
    text = command("decide", "stated.csv", "--confidence", "stated", "--max-risk", 0.06).stdout
    assert text.startswith("Answer when the confidence is at least 0.9999: at most 6 % of the answers are wrong")
