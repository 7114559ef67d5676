from __future__ import annotations

import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import reference
from optional import torch
from trueup.metrics import ranking

PAIR = [
    ranking.misclassification_auroc,
    ranking.misclassification_aupr,
    ranking.misclassification_fpr95,
    ranking.aurc,
    ranking.eaurc,
]
OOD = [ranking.ood_auroc, ranking.ood_aupr, ranking.ood_fpr95]

# Few distinct values, so that ties are the rule; and scales at which no absolute slack would do.
few = st.sampled_from([-3.0, -1e-300, 0.0, 1e-20, 2e-20, 0.25, 0.5, 1e6, 1e300])
scored = st.lists(st.tuples(few, st.booleans()), max_size=12)


def same(a: float, b: float) -> bool:
    return (math.isnan(a) and math.isnan(b)) or math.isclose(a, b, rel_tol=1e-12, abs_tol=1e-12)


@given(scored)
def test_the_raw_functions_equal_slow_loops(rows):
    scores, positive = [s for s, _ in rows], [float(p) for _, p in rows]
    assert same(ranking.roc_area(scores, positive), reference.roc_area(scores, positive))
    assert same(ranking.average_precision(scores, positive), reference.average_precision(scores, positive))
    for recall in (0.3, 0.5, 0.95, 1.0):
        fast = ranking.false_positive_rate(scores, positive, recall=recall)
        assert same(fast, reference.false_positive_rate(scores, positive, recall))


def test_a_case_by_hand():
    # Down the scores: + | + − | − | + −.
    scores, positive = [9.0, 7.0, 7.0, 5.0, 1.0, 1.0], [1, 1, 0, 0, 1, 0]
    # Pairs won: the first + beats 3; the second beats 2 and ties 1; the third beats 0 and ties 1.
    assert ranking.roc_area(scores, positive) == pytest.approx((3 + 2.5 + 0.5) / 9)
    # Recall 1/3 at precision 1, 2/3 at 2/3, 1 at 3/6.
    assert ranking.average_precision(scores, positive) == pytest.approx((1 + 2 / 3 + 1 / 2) / 3)
    assert ranking.false_positive_rate(scores, positive, recall=1 / 3) == 0.0
    assert ranking.false_positive_rate(scores, positive, recall=2 / 3) == pytest.approx(1 / 3)
    assert ranking.false_positive_rate(scores, positive) == 1.0


def test_a_recall_that_is_met_exactly_suffices():
    # 55 of 100 positives lie above the first negative; 0.55·100 rounds to more than 55.
    scores = np.r_[np.full(55, 3.0), 2.0, np.full(45, 1.0), 0.0]
    positive = np.r_[np.ones(55), 0.0, np.ones(45), 0.0]
    assert ranking.false_positive_rate(scores, positive, recall=0.55) == 0.0
    assert ranking.false_positive_rate(scores, positive, recall=0.56) == 0.5


@given(scored.filter(lambda rows: len({p for _, p in rows}) == 2))
def test_negating_scores_or_marks_reflects_the_roc_area(rows):
    scores, positive = np.array([s for s, _ in rows]), np.array([p for _, p in rows])
    area = ranking.roc_area(scores, positive)
    assert area + ranking.roc_area(-scores, positive) == pytest.approx(1)
    assert area + ranking.roc_area(scores, ~positive) == pytest.approx(1)
    assert ranking.roc_area(np.cbrt(scores), positive) == area


def test_one_class_only():
    assert math.isnan(ranking.roc_area([1.0, 2.0], [1, 1]))
    assert math.isnan(ranking.roc_area([1.0, 2.0], [0, 0]))
    assert math.isnan(ranking.average_precision([1.0, 2.0], [0, 0]))
    assert ranking.average_precision([1.0, 2.0], [1, 1]) == 1.0
    assert math.isnan(ranking.false_positive_rate([1.0, 2.0], [1, 1]))
    assert math.isnan(ranking.false_positive_rate([1.0, 2.0], [0, 0]))


def test_agrees_with_scikit_learn():
    learn = pytest.importorskip("sklearn.metrics")
    rng = np.random.default_rng(0)
    scores = rng.normal(size=3000).round(2)
    positive = rng.random(3000) < 1 / (1 + np.exp(-scores))
    assert ranking.roc_area(scores, positive) == pytest.approx(learn.roc_auc_score(positive, scores), abs=1e-12)
    expected = learn.average_precision_score(positive, scores)
    assert ranking.average_precision(scores, positive) == pytest.approx(expected, abs=1e-12)


# Rows of probabilities in tenths: confidences tie often, in exact arithmetic at least.
tenths = st.integers(0, 8).flatmap(lambda a: st.integers(0, 8 - a).map(lambda b: (a + 1, b + 1, 10 - a - b)))
labelled = st.lists(st.tuples(tenths, st.integers(0, 2)), min_size=1, max_size=5)


def uncertainty(rows, score):
    """Confidence and correctness of each row, rounded so that ties are those of exact arithmetic."""
    probs = np.array([p for p, _ in rows]) / sum(rows[0][0])
    u = 1 - probs.max(axis=1) if score == "confidence" else -(probs * np.log(probs)).sum(axis=1)
    wrong = [float(p.index(max(p)) != y) for p, y in rows]
    return u.round(12).tolist(), wrong


@settings(deadline=None)
@given(labelled, st.sampled_from(["confidence", "entropy"]))
def test_the_pair_functions_equal_slow_loops(rows, score):
    u, wrong = uncertainty(rows, score)
    logits, labels = np.log([p for p, _ in rows]), np.array([y for _, y in rows])
    right, certainty = [1 - w for w in wrong], [-v for v in u]
    assert same(ranking.misclassification_auroc(logits, labels, score=score), reference.roc_area(u, wrong))
    assert same(ranking.misclassification_aupr(logits, labels, score=score), reference.average_precision(u, wrong))
    assert same(
        ranking.misclassification_fpr95(logits, labels, score=score),
        reference.false_positive_rate(certainty, right, 0.95),
    )
    slow = reference.risks(certainty, wrong)
    curve = ranking.risk_coverage(logits, labels, score=score)
    np.testing.assert_allclose(curve.risk, slow, atol=1e-12)
    np.testing.assert_array_equal(curve.coverage, np.arange(1, len(rows) + 1) / len(rows))
    assert same(ranking.aurc(logits, labels, score=score), slow.mean())
    best = reference.risks([-w for w in wrong], wrong).mean()
    assert same(ranking.eaurc(logits, labels, score=score), slow.mean() - best)


@given(labelled, labelled, st.sampled_from(["confidence", "entropy"]))
def test_the_ood_functions_equal_slow_loops(known, foreign, score):
    u = uncertainty(known, score)[0] + uncertainty(foreign, score)[0]
    is_foreign = [0.0] * len(known) + [1.0] * len(foreign)
    logits, ood = (np.log([p for p, _ in rows]) for rows in (known, foreign))
    assert same(ranking.ood_auroc(logits, ood, score=score), reference.roc_area(u, is_foreign))
    assert same(ranking.ood_aupr(logits, ood, score=score), reference.average_precision(u, is_foreign))
    fast = ranking.ood_fpr95(logits, ood, score=score)
    slow = reference.false_positive_rate([-v for v in u], [1 - f for f in is_foreign], 0.95)
    assert same(fast, slow)


def sample(n: int = 400, classes: int = 5, seed: int = 0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, classes)) * 3
    probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    labels = (probs.cumsum(axis=1) < rng.random((n, 1))).sum(axis=1)
    return logits, np.minimum(labels, classes - 1)


@pytest.mark.parametrize("metric", PAIR)
@pytest.mark.parametrize("score", ["confidence", "entropy"])
def test_the_order_of_rows_and_the_kind_of_array_do_not_matter(metric, score):
    logits, labels = sample()
    value = metric(logits, labels, score=score)
    assert isinstance(value, float)
    assert 0 <= value <= 1
    assert metric(logits[::-1], labels[::-1], score=score) == pytest.approx(value, abs=1e-14)
    assert metric(logits + 7, labels, score=score) == pytest.approx(value, abs=1e-14)
    assert metric(torch.from_numpy(logits), torch.from_numpy(labels), score=score) == value
    assert metric(logits.tolist(), labels.tolist(), score=score) == value


@pytest.mark.parametrize(
    "metric", [ranking.misclassification_auroc, ranking.misclassification_aupr, ranking.misclassification_fpr95]
)
def test_doubling_the_rows_changes_nothing(metric):
    logits, labels = sample()
    twice = metric(np.vstack([logits, logits]), np.append(labels, labels))
    assert twice == pytest.approx(metric(logits, labels), abs=1e-14)


@pytest.mark.parametrize("metric", PAIR)
def test_with_two_classes_a_temperature_and_the_choice_of_score_change_nothing(metric):
    logits, labels = sample(classes=2)
    assert metric(logits / 2.5, labels) == pytest.approx(metric(logits, labels), abs=1e-12)
    assert metric(logits, labels, score="entropy") == pytest.approx(metric(logits, labels), abs=1e-12)


@pytest.mark.parametrize("score", ["confidence", "entropy"])
def test_scores_that_differ_by_rounding_alone_are_ties(score):
    # The same three probabilities in every order: sums differ in the last digit, the rows do not.
    orders = np.array(
        [[0.6, 0.3, 0.1], [0.6, 0.1, 0.3], [0.1, 0.6, 0.3], [0.3, 0.6, 0.1], [0.3, 0.1, 0.6], [0.1, 0.3, 0.6]]
    )
    logits = np.vstack([np.log(orders) + shift for shift in (0.0, 0.1, 3.7)])
    labels = np.where(np.arange(18) % 3 == 0, 2, logits.argmax(axis=1))  # some wrong ones
    wrong = (labels != logits.argmax(axis=1)).mean()
    assert 0 < wrong < 1
    assert ranking.misclassification_auroc(logits, labels, score=score) == 0.5
    assert ranking.misclassification_aupr(logits, labels, score=score) == pytest.approx(wrong)
    assert ranking.misclassification_fpr95(logits, labels, score=score) == 1.0
    np.testing.assert_allclose(ranking.risk_coverage(logits, labels, score=score).risk, wrong)


@pytest.mark.parametrize("score", ["confidence", "entropy"])
def test_nearly_certain_rows_are_still_ranked(score):
    logits = np.array([[32.0, 0.0], [33.0, 0.0], [31.0, 0.0]])  # 1 − c is 1.3e-14, 5e-15 and 3e-14
    assert ranking.misclassification_auroc(logits, [0, 0, 1], score=score) == 1.0
    assert ranking.misclassification_auroc(logits, [1, 0, 0], score=score) == 0.5
    assert ranking.ood_auroc(logits[1:2], logits[:1], score=score) == 1.0


def test_the_two_scores_are_two_scores():
    # The first row is the more confident one, and the one of greater entropy.
    logits = np.log([[0.52, 0.12, 0.12, 0.12, 0.12], [0.5, 0.4997, 0.0001, 0.0001, 0.0001]])
    assert ranking.misclassification_auroc(logits, [1, 0]) == 0.0
    assert ranking.misclassification_auroc(logits, [1, 0], score="entropy") == 1.0
    assert ranking.ood_fpr95(logits[:1], logits[1:]) == 0.0
    assert ranking.ood_fpr95(logits[:1], logits[1:], score="entropy") == 1.0


def test_the_ideal_order_has_the_area_of_the_exact_formula_and_no_excess():
    # 800 right ones, then 200 wrong ones, n = 1000; the limit for large n is r + (1−r)·ln(1−r) = 0.02149.
    logits = np.stack([np.linspace(9, 1, 1000), np.zeros(1000)], axis=1)
    labels = (np.arange(1000) >= 800).astype(int)
    assert ranking.aurc(logits, labels) == pytest.approx(0.02159, abs=5e-6)
    assert ranking.eaurc(logits, labels) == 0.0
    assert ranking.misclassification_auroc(logits, labels) == 1.0
    assert ranking.misclassification_fpr95(logits, labels) == 0.0


def test_the_best_order_has_no_excess_however_its_error_rate_rounds():
    # 15/22·22 is not 15 in floating point, and so for many others.
    for n in range(1, 60):
        for right in range(n + 1):
            logits = np.stack([np.arange(n, 0, -1) / n, np.zeros(n)], axis=1)
            assert ranking.eaurc(logits, (np.arange(n) >= right).astype(int)) == 0.0


@pytest.mark.parametrize(
    ("labels", "expected"),
    [([0, 0, 0], (math.nan, math.nan, math.nan, 0, 0)), ([1, 1, 1], (math.nan, 1, math.nan, 1, 0))],
)
def test_all_right_and_all_wrong(labels, expected):
    logits = [[1.0, 0.0], [2.0, 0.0], [3.0, 0.0]]
    for metric, value in zip(PAIR, expected, strict=True):
        assert same(metric(logits, labels), value), metric.__name__


def test_nothing_gives_nan():
    nothing, no_labels, one = np.zeros((0, 3)), np.zeros(0, dtype=int), np.zeros((1, 3))
    assert all(math.isnan(metric(nothing, no_labels)) for metric in PAIR)
    assert len(ranking.risk_coverage(nothing, no_labels).risk) == 0
    assert all(math.isnan(metric(known, nothing)) for metric in OOD for known in (nothing, one))
    assert all(math.isnan(metric(nothing, one)) for metric in (ranking.ood_auroc, ranking.ood_fpr95))
    assert ranking.ood_aupr(nothing, one) == 1.0
    assert math.isnan(ranking.roc_area([], []))
    assert math.isnan(ranking.average_precision([], []))
    assert math.isnan(ranking.false_positive_rate([], []))


def test_errors_name_the_argument():
    z, y = np.zeros((2, 3)), [0, 1]
    with pytest.raises(ValueError, match=r'score must be "confidence" or "entropy", got \'margin\''):
        ranking.misclassification_auroc(z, y, score="margin")
    with pytest.raises(ValueError, match="ood must have as many classes as logits, 3, got 4"):
        ranking.ood_auroc(z, np.zeros((2, 4)))
    with pytest.raises(ValueError, match=r"ood must have shape \(n, classes\)"):
        ranking.ood_auroc(z, np.zeros(4))
    with pytest.raises(ValueError, match="positive must hold 0 and 1 only, got 2"):
        ranking.roc_area([0.1, 0.2], [0, 2])
    with pytest.raises(ValueError, match="positive must have 2 entries"):
        ranking.average_precision([0.1, 0.2], [0, 1, 1])
    with pytest.raises(ValueError, match="scores must be finite"):
        ranking.average_precision([0.1, math.nan], [0, 1])
    for recall in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"recall must lie in \(0, 1\]"):
            ranking.false_positive_rate([0.1, 0.2], [0, 1], recall=recall)


def test_a_curve_cannot_be_changed():
    curve = ranking.risk_coverage(*sample())
    with pytest.raises(AttributeError):
        curve.risk = None


def test_a_real_network():
    if "TRUEUP_DATA" not in os.environ:
        pytest.skip("TRUEUP_DATA names no folder of real data")
    file = Path(os.environ["TRUEUP_DATA"]) / "logits" / "cifar10_densenet40.npz"
    if not file.exists():
        pytest.skip(f"{file} does not exist")
    with np.load(file) as data:
        logits, labels = data["test_logits"], data["test_labels"]
    # Its errors are far less certain than its right answers, and its uncertainty leaves something to be wished for.
    error = (logits.argmax(axis=1) != labels).mean()
    assert 0.85 < ranking.misclassification_auroc(logits, labels) < 1
    assert error < ranking.misclassification_aupr(logits, labels) < 1
    assert 0 < ranking.misclassification_fpr95(logits, labels) < 0.95
    assert 0 < ranking.eaurc(logits, labels) < ranking.aurc(logits, labels) < error
    # Flattened outputs stand in for those of foreign inputs.
    assert ranking.ood_auroc(logits, logits / 3) > 0.6
    assert ranking.ood_auroc(logits, logits) == 0.5
