"""Laws of weights, run over METRICS: whole numbers are copies of a row, and a factor in all of them changes nothing."""

import inspect
import math

import numpy as np
import pytest
from sklearn.metrics import brier_score_loss, log_loss, roc_auc_score

from optional import torch
from strategies import calibrated
from trueup import METRICS, compare, evaluate, from_probs, metrics
from trueup._core.arrays import as_weights
from trueup.metrics import Tally

RNG = np.random.default_rng(7)
PAIRS = {classes: calibrated(240, classes, temperature=1.6, scale=1.5, seed=classes) for classes in (2, 4)}
WHOLE = RNG.integers(0, 4, 240)
WEIGHTS = RNG.gamma(1.0, size=240)
COUNTS_ROWS = {
    "debiased_l1": "its bias is that of n rows",
    "debiased_l2": "its bias is that of n rows",
    "kde_ece": "its bandwidth is that of n rows",
    "skce": "a row is not paired with itself, but with its copy",
    "skce_linear": "it pairs neighbours",
    "aurc": "its curve has a point a row",
    "eaurc": "its curve has a point a row",
    "piece": "a copy is a neighbour",
}
names = pytest.mark.parametrize("name", METRICS)
sizes = pytest.mark.parametrize("classes", PAIRS)


def value(name, logits, labels, **options):
    if name == "top_k":
        options["k"] = 2
    if name.startswith("skce"):
        options["bandwidth"] = 0.4  # else the median distance of the rows, whatever their weights
    return METRICS[name](logits, labels, **options)


@names
def test_every_metric_takes_weights(name):
    assert "sample_weight" in inspect.signature(METRICS[name]).parameters


@sizes
@names
def test_whole_weights_are_copies(name, classes):
    if name in COUNTS_ROWS:
        pytest.skip(COUNTS_ROWS[name])
    if name == "top_k" and classes == 2:
        pytest.skip("of two classes both are among the first two")
    z, y = PAIRS[classes]
    copies = np.repeat(np.arange(240), WHOLE)
    assert value(name, z, y, sample_weight=WHOLE) == pytest.approx(value(name, z[copies], y[copies]), abs=1e-9)


@sizes
@names
def test_a_factor_changes_nothing(name, classes):
    z, y = PAIRS[classes]
    expected = value(name, z, y, sample_weight=WEIGHTS)
    assert value(name, z, y, sample_weight=1e-3 * WEIGHTS) == pytest.approx(expected, abs=1e-9)
    assert value(name, z, y, sample_weight=torch.tensor(700 * WEIGHTS)) == pytest.approx(expected, abs=1e-9)


@sizes
@names
def test_equal_weights_are_none(name, classes):
    z, y = PAIRS[classes]
    assert value(name, z, y, sample_weight=np.full(240, 0.3)) == pytest.approx(value(name, z, y), abs=1e-9)


@sizes
def test_tables_intervals_and_tests_know_no_factor(classes):
    z, y = PAIRS[classes]
    pairs = {"raw": (z, y), "half": (z / 2, y)}
    one, other = (compare(pairs, sample_weight=c * WEIGHTS, n_resamples=60) for c in (1.0, 1e-4))
    for method in pairs:
        for metric in one.metrics:
            a, b = one[method, metric], other[method, metric]
            assert (a.value, a.low, a.high) == pytest.approx((b.value, b.low, b.high), abs=1e-7), metric
        assert one.tests[method].p_value == pytest.approx(other.tests[method].p_value, rel=1e-6)
        assert one.tests[method].overconfidence_z == pytest.approx(other.tests[method].overconfidence_z, abs=1e-7)
    for metric in one.metrics:
        a, b = one.changes["half"][metric], other.changes["half"][metric]
        assert (a.value, a.low, a.high) == pytest.approx((b.value, b.low, b.high), abs=1e-7), metric
    assert one.effective_rows == pytest.approx(WEIGHTS.sum() ** 2 / (WEIGHTS**2).sum())


def test_unequal_weights_widen_intervals():
    z, y = PAIRS[4]
    for metric in ("accuracy", "nll", "ece", "sce"):
        plain, weighted = (
            evaluate(z, y, metrics=[metric], sample_weight=w, n_resamples=200)[metric] for w in (None, WEIGHTS**2)
        )
        assert weighted.high - weighted.low > plain.high - plain.low, metric


def test_scikit_learns_weighted_scores():
    z, y = PAIRS[4]
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    assert metrics.nll(z, y, sample_weight=WEIGHTS) == pytest.approx(log_loss(y, p, sample_weight=WEIGHTS), abs=1e-8)
    z, y = PAIRS[2]
    p = np.exp(z[:, 1]) / np.exp(z).sum(axis=1)
    theirs = brier_score_loss(y, p, sample_weight=WEIGHTS)
    assert metrics.event_brier(z, y, sample_weight=WEIGHTS) == pytest.approx(theirs, abs=1e-8)
    assert metrics.brier(z, y, sample_weight=WEIGHTS) == pytest.approx(2 * theirs, abs=1e-8)
    theirs = roc_auc_score(y, p, sample_weight=WEIGHTS)
    assert metrics.auroc(z, y, sample_weight=WEIGHTS) == pytest.approx(theirs, abs=1e-8)


@sizes
@pytest.mark.parametrize("top_label", [False, True])
def test_tallies_with_weights_add_up(classes, top_label):
    z, y = PAIRS[classes]
    whole = Tally.of(z, y, sample_weight=WEIGHTS, top_label=top_label)
    parts = Tally.of(z[:90], y[:90], sample_weight=WEIGHTS[:90], top_label=top_label)
    parts += Tally.of(z[90:], y[90:], sample_weight=WEIGHTS[90:], top_label=top_label)
    assert (parts.n, parts.effective_rows) == (240, pytest.approx(whole.effective_rows))
    for name in ("accuracy", "predicted", "ece", "mce", "aece", "sce"):
        assert parts.value(name) == pytest.approx(whole.value(name), abs=1e-12), name
    if classes == 2:
        with pytest.raises(ValueError, match="both have top_label or neither"):
            whole + Tally.of(z, y, top_label=not top_label)


def test_torch_and_compiled_passes_agree_on_weights(monkeypatch):
    z, y = PAIRS[4]
    fast = Tally.of(z, y, sample_weight=WEIGHTS)
    monkeypatch.setattr("trueup._core.native.compiled", None)
    slow = Tally.of(z, y, sample_weight=WEIGHTS)
    for name in ("count", "confidence", "hits"):
        assert getattr(fast.classes, name) == pytest.approx(getattr(slow.classes, name), abs=1e-9)
    assert fast.gap == pytest.approx(slow.gap, abs=1e-9)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (-WEIGHTS, "sample_weight must not be negative"),
        (np.zeros(240), "sample_weight must not all be zero"),
        (np.where(WEIGHTS > 1, math.nan, WEIGHTS), "sample_weight must be finite"),
        (WEIGHTS[:-1], "sample_weight must have 240 entries"),
        (WEIGHTS[:, None], r"sample_weight must have shape \(n,\)"),
    ],
)
def test_bad_weights_are_named(bad, message):
    for call in (evaluate, metrics.ece, metrics.ici, metrics.misclassification_auroc):
        with pytest.raises(ValueError, match=message):
            call(*PAIRS[2], sample_weight=bad)
    assert as_weights(None, 5) is None


def test_confidences_with_weights():
    scores = evaluate(from_probs(np.array([0.2, 0.6, 0.9])), [0, 1, 1], sample_weight=[2, 1, 1], n_resamples=20)
    assert scores["predicted"].value == pytest.approx((0.4 + 0.6 + 0.9) / 4)
    assert scores["observed"].value == 0.5
    assert scores.rows == 3
    assert "weighted; effectively 3" in scores.caption()
