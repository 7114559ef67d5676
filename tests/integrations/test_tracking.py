"""Weights & Biases in offline mode, flat numbers and sections of model cards."""

import math

import numpy as np
import pytest
from frame_rows import overconfident

from trueup import compare, evaluate
from trueup.integrations.tracking import flat_scores, log_scores, model_card


@pytest.fixture(scope="module")
def pair():
    return overconfident(900, classes=3)


def test_a_run_of_weights_and_biases(pair, tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb", reason="wandb is not installed: make test-integrations")
    monkeypatch.setenv("WANDB_SILENT", "true")
    scores = evaluate(*pair, metrics=["ece", "nll"])
    with wandb.init(mode="offline", dir=tmp_path, project="trueup") as run:
        log_scores(run, scores, prefix="val/", step=3)
        log_scores(run, compare(a=pair, b=(pair.logits / 2, pair.labels), metrics=["ece"]), prefix="test/")
        logged = dict(run.summary)
    assert logged["val/ece"] == pytest.approx(scores["ece"].value)
    assert (logged["val/ece_low"], logged["val/ece_high"]) == pytest.approx((scores["ece"].low, scores["ece"].high))
    assert logged["val/verdict"] == scores.verdict()
    assert {"test/a/ece", "test/b/ece", "test/a/verdict", "test/b/p_value"} <= set(logged)


def test_numbers_that_are_undefined_are_left_out():
    z = np.array([[2.0, 1.0], [0.5, 0.0]])
    numbers = flat_scores(evaluate(z, [0, 0]))
    assert all(map(math.isfinite, numbers.values()))
    assert "auroc" not in numbers  # of one class only


def test_a_model_card_of_two_methods(pair):
    half = pair.logits / 2, pair.labels
    card = model_card(compare(raw=pair, halved=half, metrics=["ece"], level=0.9), heading="## Honesty")
    lines = card.splitlines()
    assert lines[0] == "## Honesty"
    assert [line for line in lines if line.startswith("###")] == ["### raw", "### halved"]
    assert lines.count("| metric | value | 90 % interval |") == 2
    assert "900 rows, 5 classes" not in card
    assert lines[-1].startswith("Measured on 900 rows, 3 classes with trueup")


def test_a_model_card_of_an_event():
    rng = np.random.default_rng(0)
    log_odds = rng.normal(size=500)
    z = np.stack([np.zeros(500), log_odds], axis=1)
    card = model_card(evaluate(z, rng.random(500) < 1 / (1 + np.exp(-log_odds))), data="visits in May")
    assert "visits in May (500 rows, 2 classes)" in card
    assert "nan" not in card
