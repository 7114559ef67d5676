"""Does uncertainty rank? Wrong predictions and foreign inputs should be less certain than right ones.

Nothing here changes under a growing map of the scores. Rows are ranked by the confidence itself, since 1 − confidence
would gain only rounding; equal scores are taken as one step, so the order of the rows never matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from trueup._core.arrays import as_arrays, as_logits, as_vector, as_weights
from trueup._core.bins import tie_ends
from trueup._core.row_scores import RowScores, score_rows
from trueup._core.types import ArrayLike, WeightsLike

Score = Literal["confidence", "entropy"]
TieEnds = Callable[[np.ndarray], np.ndarray]
"""Marks the last of each run of ties in an ascending array."""


def roc_area(scores: ArrayLike, positive: ArrayLike, *, sample_weight: WeightsLike = None) -> float:
    """The chance that a positive scores above a negative, equal scores counting one half.

    Σ_{i positive, j negative} (1[s_i > s_j] + ½·1[s_i = s_j]) / (P·N); NaN unless there are both.

    >>> f"{roc_area([0.9, 0.7, 0.7, 0.2], [1, 1, 0, 0]):.4f}"
    '0.8750'

    Mann and Whitney (1947); Hanley and McNeil (1982).
    """
    return _roc_area(*_raw(scores, positive, sample_weight))


def average_precision(scores: ArrayLike, positive: ArrayLike, *, sample_weight: WeightsLike = None) -> float:
    """The mean precision over the recalls reached, without interpolation.

    Σ_j (R_j − R_{j−1})·P_j over the distinct thresholds, highest first; NaN without positives. Scores that say nothing
    give the share of positives.

    >>> f"{average_precision([0.9, 0.7, 0.7, 0.2], [1, 1, 0, 0]):.4f}"
    '0.8333'

    Davis and Goadrich (2006).
    """
    return _average_precision(*_raw(scores, positive, sample_weight))


def false_positive_rate(
    scores: ArrayLike, positive: ArrayLike, *, recall: float = 0.95, sample_weight: WeightsLike = None
) -> float:
    """The share of negatives that pass the highest threshold which lets `recall` of the positives pass.

    |{negatives with s ≥ t}| / N with t = max{t : |{positives with s ≥ t}| / P ≥ recall}; NaN unless there are both.

    >>> f"{false_positive_rate([0.9, 0.8, 0.7, 0.7, 0.2], [1, 0, 1, 0, 0]):.4f}"
    '0.6667'

    Liang, Li and Srikant (2018).
    """
    if not 0 < recall <= 1:
        raise ValueError(f"recall must lie in (0, 1], got {recall!r}")
    return _false_positive_rate(*_raw(scores, positive, sample_weight), recall)


def misclassification_auroc(
    logits: ArrayLike, labels: ArrayLike, *, score: Score = "confidence", sample_weight: WeightsLike = None
) -> float:
    """The chance that a wrong prediction is more uncertain than a right one (½ when uncertainty says nothing).

    `roc_area` of 1 − confidence, or of the entropy, with the wrong predictions as positives.

    >>> logits = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    >>> f"{misclassification_auroc(logits, [0, 1, 0, 1]):.4f}"
    '0.7500'

    Hendrycks and Gimpel (2017).
    """
    return _roc_area(*_descend_errors(logits, labels, score, sample_weight))


def misclassification_aupr(
    logits: ArrayLike, labels: ArrayLike, *, score: Score = "confidence", sample_weight: WeightsLike = None
) -> float:
    """How precisely uncertainty finds the wrong predictions (the error rate when it says nothing).

    `average_precision` of 1 − confidence, or of the entropy, with the wrong predictions as positives; NaN without any.

    >>> logits = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    >>> f"{misclassification_aupr(logits, [0, 1, 0, 1]):.4f}"
    '0.8333'

    Hendrycks and Gimpel (2017), who call it AUPR-Error.
    """
    return _average_precision(*_descend_errors(logits, labels, score, sample_weight))


def misclassification_fpr95(
    logits: ArrayLike, labels: ArrayLike, *, score: Score = "confidence", sample_weight: WeightsLike = None
) -> float:
    """The share of wrong predictions kept by the threshold on certainty that keeps 95 % of the right ones.

    `false_positive_rate` of the confidence, or of minus the entropy, with the right predictions as positives.

    >>> logits = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    >>> f"{misclassification_fpr95(logits, [0, 1, 0, 1]):.4f}"
    '0.5000'

    Liang, Li and Srikant (2018), with right and wrong in place of known and foreign inputs.
    """
    certainty, wrong = _certainty_and_errors(logits, labels, score)
    w = as_weights(sample_weight, len(wrong))
    return _false_positive_rate(*_descend(certainty, 1.0 - wrong, tie_ends, w), 0.95)


def ood_auroc(logits: ArrayLike, ood: ArrayLike, *, score: Score = "confidence") -> float:
    """The chance that a foreign (out-of-distribution) input is more uncertain than a known one.

    `roc_area` of 1 − confidence, or of the entropy, with the rows of `ood` as positives.

    >>> known, foreign = np.log([[0.9, 0.1], [0.8, 0.2]]), np.log([[0.6, 0.4], [0.85, 0.15]])
    >>> f"{ood_auroc(known, foreign):.4f}"
    '0.7500'

    Hendrycks and Gimpel (2017).
    """
    certainty, foreign = _certainty_and_origin(logits, ood, score)
    return _roc_area(*_descend(-certainty, foreign, tie_ends))


def ood_aupr(logits: ArrayLike, ood: ArrayLike, *, score: Score = "confidence") -> float:
    """How precisely uncertainty finds the foreign inputs (their share when it says nothing).

    `average_precision` of 1 − confidence, or of the entropy, with the rows of `ood` as positives.

    >>> known, foreign = np.log([[0.9, 0.1], [0.8, 0.2]]), np.log([[0.6, 0.4], [0.85, 0.15]])
    >>> f"{ood_aupr(known, foreign):.4f}"
    '0.8333'

    Hendrycks and Gimpel (2017), who call it AUPR-Out.
    """
    certainty, foreign = _certainty_and_origin(logits, ood, score)
    return _average_precision(*_descend(-certainty, foreign, tie_ends))


def ood_fpr95(logits: ArrayLike, ood: ArrayLike, *, score: Score = "confidence") -> float:
    """The share of foreign inputs that pass the threshold on certainty which lets 95 % of the known ones pass.

    `false_positive_rate` of the confidence, or of minus the entropy, with the known inputs as positives.

    >>> known, foreign = np.log([[0.9, 0.1], [0.8, 0.2]]), np.log([[0.6, 0.4], [0.85, 0.15]])
    >>> f"{ood_fpr95(known, foreign):.4f}"
    '0.5000'

    Liang, Li and Srikant (2018).
    """
    certainty, foreign = _certainty_and_origin(logits, ood, score)
    return _false_positive_rate(*_descend(certainty, 1.0 - foreign, tie_ends), 0.95)


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """The error rate among the most certain rows, for every number of them kept."""

    coverage: np.ndarray
    """The share of rows kept, or of their weight: k/n for k = 1..n."""
    risk: np.ndarray
    """The error rate R_k among them."""

    def area(self) -> float:
        """(1/n) Σ_k R_k, each by its row's weight; NaN without rows."""
        return float(np.diff(self.coverage, prepend=0.0) @ self.risk) if len(self.risk) else math.nan

    def excess(self) -> float:
        """The area beyond that of an order with every error last: R*_k = max(0, k − right)/k."""
        if not len(self.risk):
            return math.nan
        n = len(self.risk)
        kept, right = np.round(n * self.coverage, 9), round(n * (1 - self.risk[-1]), 9)  # rows are whole numbers
        best = np.maximum(kept - right, 0.0) / kept
        return float(np.diff(self.coverage, prepend=0.0) @ (self.risk - best))


def risk_coverage(
    logits: ArrayLike, labels: ArrayLike, *, score: Score = "confidence", sample_weight: WeightsLike = None
) -> RiskCoverage:
    """The error rate R_k among the k most certain rows, k = 1..n.

    Inside a run of equal certainty R_k is its expectation over random orders: errors grow linearly with k there. With
    weights k is the weight of those rows, the lighter first inside a run.

    >>> curve = risk_coverage(np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]]), [0, 1, 0, 1])
    >>> curve.coverage, curve.risk.round(4)
    (array([0.25, 0.5 , 0.75, 1.  ]), array([0.    , 0.5   , 0.3333, 0.5   ]))

    El-Yaniv and Wiener (2010); Geifman and El-Yaniv (2017).
    """
    certainty, wrong = _certainty_and_errors(logits, labels, score)
    w = as_weights(sample_weight, len(wrong))
    ends, errors = _descend(certainty, wrong, tie_ends, w)
    kept = np.arange(1.0, len(wrong) + 1) if w is None else _kept_weight(certainty, w)
    expected = np.interp(kept, np.append(0.0, ends), np.append(0.0, errors))
    return RiskCoverage(coverage=kept / kept[-1:], risk=expected / kept)


def aurc(
    logits: ArrayLike, labels: ArrayLike, *, score: Score = "confidence", sample_weight: WeightsLike = None
) -> float:
    """The area under the risk–coverage curve.

    (1/n) Σ_k R_k, R_k being the error rate among the k most certain rows; R_n when uncertainty says nothing.

    >>> logits = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    >>> f"{aurc(logits, [0, 1, 0, 1]):.4f}"
    '0.3333'

    Geifman, Uziel and El-Yaniv (2019).
    """
    return risk_coverage(logits, labels, score=score, sample_weight=sample_weight).area()


def eaurc(
    logits: ArrayLike, labels: ArrayLike, *, score: Score = "confidence", sample_weight: WeightsLike = None
) -> float:
    """The area under the risk–coverage curve beyond what the best possible order has at the same accuracy.

    (1/n) Σ_k (R_k − max(0, k − n(1−r))/k) ≥ 0 with error rate r = R_n.

    >>> logits = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    >>> f"{eaurc(logits, [0, 1, 0, 1]):.4f}"
    '0.1250'

    Geifman, Uziel and El-Yaniv (2019), with the exact ideal for n rows in place of its limit r + (1−r)·ln(1−r).
    """
    return risk_coverage(logits, labels, score=score, sample_weight=sample_weight).excess()


def _raw(scores: Any, positive: Any, sample_weight: Any) -> tuple[np.ndarray, np.ndarray]:
    s = as_vector(scores, "scores")
    marked = as_vector(positive, "positive", length=len(s))
    odd = marked[(marked != 0) & (marked != 1)]
    if len(odd):
        raise ValueError(f"positive must hold 0 and 1 only, got {odd[0]:g}")
    # Such scores have any scale, so that no fixed slack tells rounding from a difference: only equal ones are ties.
    return _descend(s, marked, _equal_ends, as_weights(sample_weight, len(s)))


def _certainty_and_errors(logits: Any, labels: Any, score: Score) -> tuple[np.ndarray, np.ndarray]:
    z, y = as_arrays(logits, labels)
    scored = score_rows(z, y)
    return _certainty(scored, z, score), 1.0 - scored.correct


def _descend_errors(logits: Any, labels: Any, score: Score, sample_weight: Any) -> tuple[np.ndarray, np.ndarray]:
    certainty, wrong = _certainty_and_errors(logits, labels, score)
    return _descend(-certainty, wrong, tie_ends, as_weights(sample_weight, len(wrong)))


def _certainty_and_origin(logits: Any, ood: Any, score: Score) -> tuple[np.ndarray, np.ndarray]:
    known, foreign = as_logits(logits), as_logits(ood, "ood")
    if foreign.shape[1] != known.shape[1]:
        raise ValueError(f"ood must have as many classes as logits, {known.shape[1]}, got {foreign.shape[1]}")
    certainty = []
    for z in (known, foreign):
        no_labels = np.zeros(len(z), np.int64)  # neither score depends on them
        certainty.append(_certainty(score_rows(z, no_labels), z, score))
    return np.concatenate(certainty), np.repeat([0.0, 1.0], [len(known), len(foreign)])


def _certainty(scored: RowScores, logits: np.ndarray, score: Score) -> np.ndarray:
    """What to rank by, on the scale of a probability, where `tie_ends` knows what rounding is."""
    if score == "confidence":
        return scored.confidence
    if score == "entropy":
        return -scored.entropy / math.log(logits.shape[1])
    raise ValueError(f'score must be "confidence" or "entropy", got {score!r}')


def _descend(
    scores: np.ndarray, marked: np.ndarray, ends: TieEnds = tie_ends, sample_weight: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Down the scores, at the end of each run of ties: how many rows were passed (or their weight), and marked ones."""
    order = np.argsort(-scores)
    last = np.flatnonzero(ends(-scores[order]))
    if sample_weight is None:
        return last + 1.0, np.cumsum(marked[order])[last]
    return np.cumsum(sample_weight[order])[last], np.cumsum((sample_weight * marked)[order])[last]


def _kept_weight(certainty: np.ndarray, sample_weight: np.ndarray) -> np.ndarray:
    """The weight of the most certain rows, for every number of them; of equally certain ones the lighter first."""
    order = np.argsort(-certainty)
    run = np.empty(len(order), np.int64)
    run[order] = np.cumsum(np.append(0, tie_ends(-certainty[order])[:-1]))
    kept: np.ndarray = np.cumsum(sample_weight[np.lexsort((sample_weight, run))])
    return kept[kept > 0]


def _equal_ends(ordered: np.ndarray) -> np.ndarray:
    return np.diff(ordered, append=np.inf) != 0


def _roc_area(passed: np.ndarray, hits: np.ndarray) -> float:
    false = passed - hits
    if len(passed) == 0 or hits[-1] == 0 or false[-1] == 0:
        return math.nan
    step, height = np.diff(false, prepend=0.0), hits + np.append(0.0, hits[:-1])
    return float(step @ height / (2 * hits[-1] * false[-1]))


def _average_precision(passed: np.ndarray, hits: np.ndarray) -> float:
    if len(passed) == 0 or hits[-1] == 0:
        return math.nan
    return float(np.diff(hits, prepend=0.0) @ (hits / passed) / hits[-1])


def _false_positive_rate(passed: np.ndarray, hits: np.ndarray, recall: float) -> float:
    false = passed - hits
    if len(passed) == 0 or hits[-1] == 0 or false[-1] == 0:
        return math.nan
    # The quotient of whole numbers rounds as the literal does: 55/100 ≥ 0.55 holds, where 55 ≥ 0.55·100 does not.
    at = int(np.argmax(hits / hits[-1] >= recall))
    return float(false[at] / false[-1])
