"""Ranking by uncertainty: wrong predictions and out-of-distribution inputs should be less certain.

No metric here changes under an increasing map of the scores. Rows are ranked by the confidence itself, since 1 −
confidence would only add rounding. Equal scores count as one step, so the order of the rows does not matter.
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
"""Marks the end of each run of ties in an ascending array."""


def roc_area(scores: ArrayLike, positive: ArrayLike, *, sample_weight: WeightsLike = None) -> float:
    """Compute the probability that a positive has a higher score than a negative, counting ties as one half.

    Σ_{i positive, j negative} (1[s_i > s_j] + ½·1[s_i = s_j]) / (P·N).

    Parameters
    ----------
    scores
        Scores, shape (n,), of any scale.
    positive
        1 for positives, 0 for negatives, shape (n,).
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The area; NaN unless there are both.

    Examples
    --------
    >>> f"{roc_area([0.9, 0.7, 0.7, 0.2], [1, 1, 0, 0]):.4f}"
    '0.8750'

    References
    ----------
    Hanley & McNeil (1982), The meaning and use of the area under a receiver operating characteristic curve.
    """
    return _roc_area(*_raw(scores, positive, sample_weight))


def average_precision(scores: ArrayLike, positive: ArrayLike, *, sample_weight: WeightsLike = None) -> float:
    """Compute the mean precision over the recalls reached, without interpolation.

    Σ_j (R_j − R_{j−1})·P_j over the distinct thresholds, highest first. Uninformative scores give the share of
    positives.

    Parameters
    ----------
    scores
        Scores, shape (n,), of any scale.
    positive
        1 for positives, 0 for negatives, shape (n,).
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The precision; NaN without positives.

    Examples
    --------
    >>> f"{average_precision([0.9, 0.7, 0.7, 0.2], [1, 1, 0, 0]):.4f}"
    '0.8333'

    References
    ----------
    Davis & Goadrich (2006), The relationship between precision-recall and ROC curves.
    """
    return _average_precision(*_raw(scores, positive, sample_weight))


def false_positive_rate(
    scores: ArrayLike, positive: ArrayLike, *, recall: float = 0.95, sample_weight: WeightsLike = None
) -> float:
    """Compute the share of negatives above the highest threshold that `recall` of the positives pass.

    {negatives with s ≥ t}| / N with t = max{t : |{positives with s ≥ t}| / P ≥ recall}.

    Parameters
    ----------
    scores
        Scores, shape (n,), of any scale.
    positive
        1 for positives, 0 for negatives, shape (n,).
    recall
        Share of the positives that must pass.
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The rate; NaN unless there are both.

    Examples
    --------
    >>> f"{false_positive_rate([0.9, 0.8, 0.7, 0.7, 0.2], [1, 0, 1, 0, 0]):.4f}"
    '0.6667'

    References
    ----------
    Liang, Li & Srikant (2018), Enhancing the reliability of out-of-distribution image detection, arXiv:1706.02690.
    """
    if not 0 < recall <= 1:
        raise ValueError(f"recall must lie in (0, 1], got {recall!r}")
    return _false_positive_rate(*_raw(scores, positive, sample_weight), recall)


def misclassification_auroc(
    logits: ArrayLike, labels: ArrayLike, *, score: Score = "confidence", sample_weight: WeightsLike = None
) -> float:
    """Compute the probability that a wrong prediction is more uncertain than a right one.

    It is `roc_area` of the uncertainty, with the wrong predictions as positives.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    score
        Uncertainty to rank by: 1 − confidence ("confidence") or the entropy ("entropy").
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The area; ½ if the uncertainty is uninformative, NaN unless there are both.

    Examples
    --------
    >>> logits = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    >>> f"{misclassification_auroc(logits, [0, 1, 0, 1]):.4f}"
    '0.7500'

    References
    ----------
    Hendrycks & Gimpel (2017), A baseline for detecting misclassified and out-of-distribution examples,
    arXiv:1610.02136.
    """
    return _roc_area(*_descend_errors(logits, labels, score, sample_weight))


def misclassification_aupr(
    logits: ArrayLike, labels: ArrayLike, *, score: Score = "confidence", sample_weight: WeightsLike = None
) -> float:
    """Compute how precisely the uncertainty identifies the wrong predictions.

    It is `average_precision` of the uncertainty, with the wrong predictions as positives (AUPR-Error in the paper).

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    score
        Uncertainty to rank by: 1 − confidence ("confidence") or the entropy ("entropy").
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The precision; the error rate if the uncertainty is uninformative, NaN without errors.

    Examples
    --------
    >>> logits = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    >>> f"{misclassification_aupr(logits, [0, 1, 0, 1]):.4f}"
    '0.8333'

    References
    ----------
    Hendrycks & Gimpel (2017), A baseline for detecting misclassified and out-of-distribution examples,
    arXiv:1610.02136.
    """
    return _average_precision(*_descend_errors(logits, labels, score, sample_weight))


def misclassification_fpr95(
    logits: ArrayLike, labels: ArrayLike, *, score: Score = "confidence", sample_weight: WeightsLike = None
) -> float:
    """Compute the share of wrong predictions that pass the threshold which 95 % of the right ones pass.

    It is `false_positive_rate` of the certainty, with the right predictions as positives.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    score
        Uncertainty to rank by: 1 − confidence ("confidence") or the entropy ("entropy").
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The rate; NaN unless there are both.

    Examples
    --------
    >>> logits = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    >>> f"{misclassification_fpr95(logits, [0, 1, 0, 1]):.4f}"
    '0.5000'

    References
    ----------
    Liang, Li & Srikant (2018), Enhancing the reliability of out-of-distribution image detection, arXiv:1706.02690.
    """
    certainty, wrong = _certainty_and_errors(logits, labels, score)
    w = as_weights(sample_weight, len(wrong))
    return _false_positive_rate(*_descend(certainty, 1.0 - wrong, tie_ends, w), 0.95)


def ood_auroc(logits: ArrayLike, ood: ArrayLike, *, score: Score = "confidence") -> float:
    """Compute the probability that an out-of-distribution input is more uncertain than an in-distribution one.

    It is `roc_area` of the uncertainty, with the rows of `ood` as positives.

    Parameters
    ----------
    logits
        Logits of in-distribution inputs, shape (n, classes).
    ood
        Logits of out-of-distribution inputs, shape (m, classes).
    score
        Uncertainty to rank by: 1 − confidence ("confidence") or the entropy ("entropy").

    Returns
    -------
    float
        The area; ½ if the uncertainty is uninformative, NaN unless there are both.

    Examples
    --------
    >>> known, foreign = np.log([[0.9, 0.1], [0.8, 0.2]]), np.log([[0.6, 0.4], [0.85, 0.15]])
    >>> f"{ood_auroc(known, foreign):.4f}"
    '0.7500'

    References
    ----------
    Hendrycks & Gimpel (2017), A baseline for detecting misclassified and out-of-distribution examples,
    arXiv:1610.02136.
    """
    certainty, foreign = _certainty_and_origin(logits, ood, score)
    return _roc_area(*_descend(-certainty, foreign, tie_ends))


def ood_aupr(logits: ArrayLike, ood: ArrayLike, *, score: Score = "confidence") -> float:
    """Compute how precisely the uncertainty identifies the out-of-distribution inputs.

    It is `average_precision` of the uncertainty, with the rows of `ood` as positives (AUPR-Out in the paper).

    Parameters
    ----------
    logits
        Logits of in-distribution inputs, shape (n, classes).
    ood
        Logits of out-of-distribution inputs, shape (m, classes).
    score
        Uncertainty to rank by: 1 − confidence ("confidence") or the entropy ("entropy").

    Returns
    -------
    float
        The precision; the share of `ood` if the uncertainty is uninformative.

    Examples
    --------
    >>> known, foreign = np.log([[0.9, 0.1], [0.8, 0.2]]), np.log([[0.6, 0.4], [0.85, 0.15]])
    >>> f"{ood_aupr(known, foreign):.4f}"
    '0.8333'

    References
    ----------
    Hendrycks & Gimpel (2017), A baseline for detecting misclassified and out-of-distribution examples,
    arXiv:1610.02136.
    """
    certainty, foreign = _certainty_and_origin(logits, ood, score)
    return _average_precision(*_descend(-certainty, foreign, tie_ends))


def ood_fpr95(logits: ArrayLike, ood: ArrayLike, *, score: Score = "confidence") -> float:
    """Compute the share of out-of-distribution inputs that pass the threshold which 95 % of the others pass.

    It is `false_positive_rate` of the certainty, with the in-distribution inputs as positives.

    Parameters
    ----------
    logits
        Logits of in-distribution inputs, shape (n, classes).
    ood
        Logits of out-of-distribution inputs, shape (m, classes).
    score
        Uncertainty to rank by: 1 − confidence ("confidence") or the entropy ("entropy").

    Returns
    -------
    float
        The rate; NaN unless there are both.

    Examples
    --------
    >>> known, foreign = np.log([[0.9, 0.1], [0.8, 0.2]]), np.log([[0.6, 0.4], [0.85, 0.15]])
    >>> f"{ood_fpr95(known, foreign):.4f}"
    '0.5000'

    References
    ----------
    Liang, Li & Srikant (2018), Enhancing the reliability of out-of-distribution image detection, arXiv:1706.02690.
    """
    certainty, foreign = _certainty_and_origin(logits, ood, score)
    return _false_positive_rate(*_descend(certainty, 1.0 - foreign, tie_ends), 0.95)


@dataclass(frozen=True, eq=False)
class RiskCoverage:
    """The error rate among the most certain rows, for every number of rows kept."""

    coverage: np.ndarray
    """Share of rows kept, or of their weight: k/n for k = 1..n."""
    risk: np.ndarray
    """Error rate R_k among them."""

    def area(self) -> float:
        """Return (1/n) Σ_k R_k, each term weighted by its row; NaN without rows."""
        return float(np.diff(self.coverage, prepend=0.0) @ self.risk) if len(self.risk) else math.nan

    def excess(self) -> float:
        """Return the area minus that of an order with all errors at the end: R*_k = max(0, k − right)/k."""
        if not len(self.risk):
            return math.nan
        n = len(self.risk)
        kept, right = np.round(n * self.coverage, 9), round(n * (1 - self.risk[-1]), 9)  # numbers of rows are whole
        best = np.maximum(kept - right, 0.0) / kept
        return float(np.diff(self.coverage, prepend=0.0) @ (self.risk - best))


def risk_coverage(
    logits: ArrayLike, labels: ArrayLike, *, score: Score = "confidence", sample_weight: WeightsLike = None
) -> RiskCoverage:
    """Compute the error rate R_k among the k most certain rows, k = 1..n.

    In a run of equal certainty R_k is its mean over random orders: errors grow linearly with k. With weights, k is the
    weight of those rows, and lighter rows come first in a run.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    score
        Uncertainty to rank by: 1 − confidence ("confidence") or the entropy ("entropy").
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    RiskCoverage
        The curve.

    Examples
    --------
    >>> curve = risk_coverage(np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]]), [0, 1, 0, 1])
    >>> curve.coverage, curve.risk.round(4)
    (array([0.25, 0.5 , 0.75, 1.  ]), array([0.    , 0.5   , 0.3333, 0.5   ]))

    References
    ----------
    El-Yaniv & Wiener (2010), On the foundations of noise-free selective classification.
    Geifman & El-Yaniv (2017), Selective classification for deep neural networks, arXiv:1705.08500.
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
    """Compute the area under the risk–coverage curve, (1/n) Σ_k R_k.

    R_k is the error rate among the k most certain rows.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    score
        Uncertainty to rank by: 1 − confidence ("confidence") or the entropy ("entropy").
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The area; R_n if the uncertainty is uninformative, NaN without rows.

    Examples
    --------
    >>> logits = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    >>> f"{aurc(logits, [0, 1, 0, 1]):.4f}"
    '0.3333'

    References
    ----------
    Geifman, Uziel & El-Yaniv (2019), Bias-reduced uncertainty estimation for deep neural classifiers, arXiv:1805.08206.
    """
    return risk_coverage(logits, labels, score=score, sample_weight=sample_weight).area()


def eaurc(
    logits: ArrayLike, labels: ArrayLike, *, score: Score = "confidence", sample_weight: WeightsLike = None
) -> float:
    """Compute the excess of the area under the risk–coverage curve over the best order with the same accuracy.

    (1/n) Σ_k (R_k − max(0, k − n(1−r))/k) ≥ 0 with error rate r = R_n. It uses the exact ideal for n rows instead of
    its limit r + (1−r)·ln(1−r).

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes). See `from_probs` for probabilities.
    labels
        Class numbers, shape (n,).
    score
        Uncertainty to rank by: 1 − confidence ("confidence") or the entropy ("entropy").
    sample_weight
        Weight of each row, shape (n,).

    Returns
    -------
    float
        The excess; NaN without rows.

    Examples
    --------
    >>> logits = np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    >>> f"{eaurc(logits, [0, 1, 0, 1]):.4f}"
    '0.1250'

    References
    ----------
    Geifman, Uziel & El-Yaniv (2019), Bias-reduced uncertainty estimation for deep neural classifiers, arXiv:1805.08206.
    """
    return risk_coverage(logits, labels, score=score, sample_weight=sample_weight).excess()


def _raw(scores: Any, positive: Any, sample_weight: Any) -> tuple[np.ndarray, np.ndarray]:
    s = as_vector(scores, "scores")
    marked = as_vector(positive, "positive", length=len(s))
    odd = marked[(marked != 0) & (marked != 1)]
    if len(odd):
        raise ValueError(f"positive must hold 0 and 1 only, got {odd[0]:g}")
    # Scores of any scale have no known rounding error, so only equal ones are ties.
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
    """Return the score to rank by, on the scale of a probability, for which `tie_ends` knows the rounding error."""
    if score == "confidence":
        return scored.confidence
    if score == "entropy":
        return -scored.entropy / math.log(logits.shape[1])
    raise ValueError(f'score must be "confidence" or "entropy", got {score!r}')


def _descend(
    scores: np.ndarray, marked: np.ndarray, ends: TieEnds = tie_ends, sample_weight: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Count rows (or weight) and positives down to the end of each run of ties, the highest score first."""
    order = np.argsort(-scores)
    run_end = np.flatnonzero(ends(-scores[order]))
    if sample_weight is None:
        return run_end + 1.0, np.cumsum(marked[order])[run_end]
    return np.cumsum(sample_weight[order])[run_end], np.cumsum((sample_weight * marked)[order])[run_end]


def _kept_weight(certainty: np.ndarray, sample_weight: np.ndarray) -> np.ndarray:
    """Return the weight of the most certain rows, for every number of rows; lighter rows come first among ties."""
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
    # A quotient of whole numbers rounds like the literal: 55/100 ≥ 0.55 holds, while 55 ≥ 0.55·100 does not.
    at = int(np.argmax(hits / hits[-1] >= recall))
    return float(false[at] / false[-1])
