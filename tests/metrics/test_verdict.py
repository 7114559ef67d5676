"""The verdict weighs all tests of calibration, whatever metrics were asked for."""

import json
import math

import numpy as np
import pytest
from typer.testing import CliRunner

from trueup import compare, evaluate, from_probs
from trueup.cli import app
from trueup.convert import from_log_odds
from trueup.metrics.hypothesis_tests import CalibrationTests
from trueup.metrics.intervals import ScoredRows
from trueup.metrics.resampling import Resampling

NO_EVIDENCE = "evidence of miscalibration"
"""Part of both "No evidence of miscalibration" and "No clear evidence of miscalibration"."""


def reversed_risks(n=20000):
    rng = np.random.default_rng(0)
    p = rng.uniform(0.001, 0.06, n)
    return from_probs(0.061 - p), (rng.random(n) < p).astype(int), from_probs(p)


def network(confidence, correct, classes=5, seed=1):
    """Logits with these confidences, and labels of which these are correct."""
    rng = np.random.default_rng(seed)
    n = len(confidence)
    labels = rng.integers(0, classes, n)
    predicted = np.where(correct, labels, (labels + rng.integers(1, classes, n)) % classes)
    probs = np.repeat((1 - confidence)[:, None] / (classes - 1), classes, axis=1)
    probs[np.arange(n), predicted] = confidence
    return np.log(probs), labels


def reversed_confidences(n=20000):
    rng = np.random.default_rng(0)
    c = rng.uniform(0.935, 0.999, n)
    return network(0.935 + 0.999 - c, rng.random(n) < c)


def test_reversed_risks_that_share_a_bin_are_miscalibrated():
    reversed_, labels, calibrated = reversed_risks()
    scores = evaluate(reversed_, labels)
    assert "in the wrong order (calibration slope -0.5" in scores.verdict()
    assert "It is miscalibrated" in scores.verdict()
    test = scores.tests["network"]
    assert test.components["ece"] > 0.2  # equal-width bins cannot show it
    assert test.components["aece"] < 0.01
    assert test.components["regression"] < 1e-15
    assert "aece" in scores.metrics
    assert NO_EVIDENCE in evaluate(calibrated, labels).verdict()


def test_reversed_confidences_that_share_a_bin_are_miscalibrated():
    scores = evaluate(*reversed_confidences())
    assert "It is miscalibrated: right on average, but its confidences are in the wrong order" in scores.verdict()


@pytest.mark.parametrize("example", [lambda: reversed_risks()[:2], reversed_confidences])
def test_the_command_line_says_so_too(tmp_path, example):
    logits, labels = example()
    path = tmp_path / "predictions.npz"
    np.savez(path, logits=logits, labels=labels)
    result = CliRunner().invoke(app, ["evaluate", str(path)])
    assert result.exit_code == 0
    assert "miscalibrated" in " ".join(result.output.split())
    assert NO_EVIDENCE not in " ".join(result.output.split())
    record = json.loads(CliRunner().invoke(app, ["evaluate", str(path), "--json"]).stdout)
    assert record["scores"]["methods"]["network"]["test"]["p_value"] < 1e-6


@pytest.mark.parametrize("clusters", [None, np.arange(1200) // 100])
@pytest.mark.parametrize("classes", [2, 4])
def test_the_verdict_does_not_depend_on_the_metrics(classes, clusters):
    rng = np.random.default_rng(2)
    z = rng.normal(size=(1200, classes))
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    for scale in (1.0, 2.0):
        verdicts = {
            evaluate(scale * z, y, metrics=metrics, clusters=clusters).verdict()
            for metrics in (None, ["ece"], ["accuracy", "ece"], ["nll"], ["observed"])
        }
        assert len(verdicts) == 1


WORLDS = [
    (n, slope, shift, spread)
    for n in (200, 2000)
    for slope in (-0.3, 0.5, 0.8, 1.0, 1.3)
    for shift in (0.0, 0.25)
    for spread in (0.2, 1.5)
]


@pytest.mark.parametrize(("n", "slope", "shift", "spread"), WORLDS)
def test_no_verdict_contradicts_the_slope_the_intercept_or_the_mean(n, slope, shift, spread):
    rng = np.random.default_rng(n)
    x = -1 + spread * rng.normal(size=n)
    y = (rng.random(n) < 1 / (1 + np.exp(-(shift + slope * x)))).astype(int)
    pair = from_log_odds(x), y
    scores = evaluate(*pair)
    corrected = evaluate(*pair, level=1 - 0.05 / len(scores.tests["network"].components))
    excluded = [
        not corrected["calibration_slope"].low <= 1 <= corrected["calibration_slope"].high,
        not corrected["calibration_intercept"].low <= 0 <= corrected["calibration_intercept"].high,
        not corrected["observed"].low <= corrected["predicted"].value <= corrected["observed"].high,
    ]
    assert not (any(excluded) and NO_EVIDENCE in scores.verdict())
    assert (scores.tests["network"].p_value <= 0.05) == (NO_EVIDENCE not in scores.verdict())
    shown = [
        not scores["calibration_slope"].low <= 1 <= scores["calibration_slope"].high,
        not scores["calibration_intercept"].low <= 0 <= scores["calibration_intercept"].high,
        not scores["observed"].low <= scores["predicted"].value <= scores["observed"].high,
    ]
    assert not (any(shown) and "No evidence" in scores.verdict())


def test_the_p_value_is_corrected_by_holm():
    rng = np.random.default_rng(3)
    z = rng.normal(size=(500, 3))
    test = evaluate(z, rng.integers(0, 3, 500)).tests["network"]
    assert set(test.components) == {"ece", "aece", "mean", "regression", "intercept", "slope", "classes"}
    assert test.p_value == min(1.0, 7 * min(test.components.values()))


def test_a_class_that_is_wrong_is_detected():
    """Two classes are confused with each other, so that the top label stays calibrated."""
    rng = np.random.default_rng(4)
    probs = np.tile([0.4, 0.35, 0.25], (6000, 1))
    labels = rng.choice(3, size=6000, p=[0.4, 0.25, 0.35])
    test = evaluate(np.log(probs), labels).tests["network"]
    assert test.components["classes"] < 1e-6
    assert test.components["ece"] > 0.05
    assert test.p_value < 1e-5


def rejection_rate(draw, replications=150, clusters=None):
    p_values = []
    for seed in range(replications):
        logits, labels = draw(np.random.default_rng(seed))
        scored = ScoredRows.of(logits, labels, clusters=clusters)
        p_values.append(CalibrationTests.of(scored.tally, Resampling(n_resamples=200, seed=seed), scored).p_value)
    return float(np.mean(np.array(p_values) <= 0.05))


def rare(rng, n=200):
    p = rng.uniform(0.001, 0.02, n)
    return from_probs(p), (rng.random(n) < p).astype(int)


def confident(rng, n=600):
    z = 6 * rng.normal(size=(n, 4))
    return z, (z + rng.gumbel(size=z.shape)).argmax(axis=1)


@pytest.mark.parametrize("draw", [rare, confident])
def test_the_combined_test_keeps_its_level(draw):
    assert rejection_rate(draw) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 150)


def test_it_keeps_its_level_with_few_clusters():
    clusters = np.arange(800) // 80

    def draw(rng):
        x = rng.normal(size=800)
        u = 0.5 * rng.normal(size=10)[clusters] + math.sqrt(0.75) * rng.normal(size=800)
        p = 1 / (1 + np.exp(-x))
        return from_probs(p), (np.array([math.erf(v / math.sqrt(2)) / 2 + 0.5 for v in u]) < p).astype(int)

    assert rejection_rate(draw, clusters=clusters) <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 150)


def test_every_method_of_a_comparison_has_its_tests():
    reversed_, labels, calibrated = reversed_risks(4000)
    scores = compare(right=(calibrated, labels), reversed=(reversed_, labels))
    assert scores.tests["right"].p_value > 0.05 > scores.tests["reversed"].p_value


def test_too_few_rows_of_unequal_weight_are_counted_by_their_information():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(800, 3))
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    weight = np.full(800, 1e-9)
    weight[0] = 1
    verdict = evaluate(z, y, sample_weight=weight, n_resamples=100).verdict()
    assert (
        "800 rows of unequal weight carry as much information as about 1 independent row, which is too few" in verdict
    )
