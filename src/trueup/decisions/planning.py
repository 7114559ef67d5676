"""Planning: the calibration error that a data set can detect, and the number of labels for a given precision."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any, cast

import numpy as np
from scipy.special import ndtri

from trueup._core.arrays import as_arrays, check_share
from trueup._core.errors import InputError
from trueup._core.formatting import round_up
from trueup._core.row_scores import score_rows
from trueup._core.tally import Tally
from trueup._core.types import ArrayLike
from trueup.decisions.thresholds import rows_to_pass, threshold
from trueup.metrics.hypothesis_tests import DetectableError, detectable_error_of_tally
from trueup.metrics.intervals import bootstrap
from trueup.metrics.table import plain_record

_MAX_ROWS = 10**9  # Largest number of rows that is searched


@dataclass(frozen=True)
class Detection:
    """Options of `plan` on detecting a calibration error.

    Parameters
    ----------
    rows
        Number of rows whose smallest detectable error is computed; the number of rows at hand by default.
    error
        Calibration error for which the number of rows is computed.
    """

    rows: int | None = None
    error: float | None = None


@dataclass(frozen=True)
class Promise:
    """Options of `plan` on the guarantee of a `threshold`.

    Parameters
    ----------
    max_risk
        Largest error rate of the answers.
    coverage
        Share of rows to answer; the share that these rows allow by default.
    level
        Certainty of the guarantee.
    """

    max_risk: float
    coverage: float | None = None
    level: float = 0.95

    def __post_init__(self) -> None:
        check_share(self.max_risk, "max_risk")
        check_share(self.level, "level")
        if self.coverage is not None:
            check_share(self.coverage, "coverage")

    def rows_needed(self, logits: np.ndarray, labels: np.ndarray) -> int | None:
        """Return the number of rows needed for the guarantee; None if no number suffices.

        Parameters
        ----------
        logits
            Logits of a sample of rows, shape (n, classes).
        labels
            Their labels, shape (n,).

        Returns
        -------
        int | None
            The number of rows, estimated from the error rates of the sample.
        """
        now = threshold(logits, labels, max_risk=self.max_risk, level=self.level)
        if self.coverage is None and not now.promised:
            return cast("int | None", now.labels_needed)
        share = now.coverage if self.coverage is None else self.coverage
        at = min(int(np.searchsorted(now.curve.coverage, share)), len(now.curve.coverage) - 1)
        kept = float(now.curve.coverage[at])
        risk = (float(now.curve.risk[at]) * kept * now.rows + 0.5) / (kept * now.rows + 1)
        if risk >= self.max_risk:
            return None
        return math.ceil(rows_to_pass(risk, self.max_risk, (1 - self.level) / 2) / kept)


@dataclass(frozen=True, eq=False)
class Comparison:
    """Options of `plan` on detecting a paired difference of the NLL.

    Parameters
    ----------
    logits
        Another method's logits for the same rows, shape (n, classes).
    difference
        Difference to detect; the observed one by default.
    """

    logits: ArrayLike
    difference: float | None = None

    def __post_init__(self) -> None:
        if self.difference is not None and not self.difference > 0:
            raise InputError("difference", "be positive", repr(self.difference))


@dataclass(frozen=True)
class Plan:
    """Numbers of labelled rows; None if a question was not put or no number of rows suffices."""

    detectable: DetectableError
    """Smallest calibration error that these rows detect."""
    rows_to_detect: int | None = None
    """Number of rows that detect the calibration error `error`."""
    error: float | None = None
    """Calibration error to detect."""
    rows_for_ece: int | None = None
    """Number of rows at which the ECE's interval has the half-width `precision`."""
    precision: float | None = None
    """Half-width of the ECE's interval."""
    rows_for_promise: int | None = None
    """Number of rows needed for the guarantee `promise`."""
    promise: Promise | None = None
    """Guarantee of a threshold."""
    rows_for_comparison: int | None = None
    """Number of rows that detect the difference `difference`."""
    difference: float | None = None
    """Difference between the NLL of two methods."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; what is not defined is None."""
        return {"schema": 1, **asdict(self), "detectable": plain_record(asdict(self.detectable))}

    def __str__(self) -> str:
        d = self.detectable
        if math.isnan(d.error):
            lines = [f"With {d.rows:,} rows no calibration error can be detected reliably."]
        else:
            power = f"one of that size is detected in {100 * d.power:g} % of cases"
            lines = [f"With {d.rows:,} rows a calibration error below {d.error:.2g} may go unnoticed: {power}."]

        def add(purpose: str, rows: int | None, otherwise: str = "") -> None:
            lines.append(f"To {purpose}, you need about {round_up(rows):,} rows." if rows else otherwise)

        if self.error is not None:
            purpose = f"detect a calibration error of {self.error:g}"
            add(purpose, self.rows_to_detect, f"To {purpose}, you need more than {_MAX_ROWS:,} rows.")
        if self.precision is not None:
            add(f"know the ECE to ± {self.precision:g}", self.rows_for_ece)
        if self.promise is not None:
            share = self.promise.coverage
            part = "" if share is None else f" on {100 * share:g} % of the rows"
            purpose = f"promise at most {100 * self.promise.max_risk:g} % errors{part}"
            add(
                purpose,
                self.rows_for_promise,
                f"At the observed error rates, no number of rows is enough to {purpose}.",
            )
        if self.difference is not None:
            purpose = f"detect an NLL difference of {self.difference:.3g}"
            add(purpose, self.rows_for_comparison, "The two methods do not differ.")
        return "\n".join(lines)


def plan(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    detection: Detection = Detection(),  # noqa: B008, it is frozen
    precision: float | None = None,
    promise: Promise | None = None,
    comparison: Comparison | None = None,
    power: float = 0.8,
    seed: int = 0,
) -> Plan:
    """Estimate the calibration error that these rows can detect, and how many rows other questions need.

    The numbers of rows are estimates from the rows at hand; a few hundred rows are enough for planning.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes).
    labels
        Classes, shape (n,).
    detection
        Number of rows, or a calibration error to detect.
    precision
        Half-width of the ECE's 95 % interval.
    promise
        Guarantee of a threshold.
    comparison
        Another method's logits for the same rows.
    power
        Probability of detecting an error or difference.
    seed
        Seed of the resamples.

    Returns
    -------
    Plan
        The numbers of rows; prints as sentences.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(1000, 3)) * 3
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> print(plan(z, y, precision=0.01, promise=Promise(max_risk=0.05, coverage=0.4)))
    With 1,000 rows a calibration error below 0.037 may go unnoticed: one of that size is detected in 80 % of cases.
    To know the ECE to ± 0.01, you need about 1,400 rows.
    To promise at most 5 % errors on 40 % of the rows, you need about 910 rows.
    """
    z, y = as_arrays(logits, labels, min_rows=10)
    tally = Tally.of(z, y)
    rows, error = detection.rows, detection.error
    if rows is not None and (not isinstance(rows, Integral) or rows < 1):
        raise InputError("rows", "be a positive whole number", repr(rows))
    answers: dict[str, Any] = {}
    if error is not None:
        needed = _rows_to_detect(tally, check_share(error, "error"), power, seed)
        answers |= {"error": error, "rows_to_detect": needed}
    if precision is not None:
        interval = bootstrap(z, y, metric="ece", seed=seed)
        half = max((interval.high - interval.low) / 2, 1e-12)
        needed = math.ceil(len(z) * (half / check_share(precision, "precision")) ** 2)
        answers |= {"precision": precision, "rows_for_ece": needed}
    if promise is not None:
        answers |= {"promise": promise, "rows_for_promise": promise.rows_needed(z, y)}
    if comparison is not None:
        gap = score_rows(z, y).nll - score_rows(*as_arrays(comparison.logits, labels)).nll
        difference = abs(float(gap.mean())) if comparison.difference is None else comparison.difference
        min_z = float(ndtri(0.975) + ndtri(power))
        needed = math.ceil((min_z * float(gap.std()) / difference) ** 2) if difference > 0 else None
        answers |= {"difference": difference, "rows_for_comparison": needed}
    return Plan(detectable_error_of_tally(tally, rows=rows, power=power, seed=seed), **answers)


def _rows_to_detect(tally: Tally, error: float, power: float, seed: int) -> int | None:
    """Find the number of rows by bisection on its logarithm."""

    def missed(rows: int) -> bool:
        detectable = detectable_error_of_tally(tally, rows=rows, power=power, n_resamples=100, seed=seed).error
        return math.isnan(detectable) or detectable > error

    low, high = 10, 10
    while missed(high):
        low, high = high, high * 10
        if high > _MAX_ROWS:
            return None
    for _ in range(7):
        middle = round(math.sqrt(low * high))
        low, high = (middle, high) if missed(middle) else (low, middle)
    return high


@dataclass(frozen=True)
class JudgePlan:
    """Number of human labels for an interval of a rate, with a judge that labels all rows and without one."""

    precision: float
    """Half-width of the interval."""
    labels: int | None
    """Number of human labels with the judge; None if even labels for all rows are too few."""
    labels_without_judge: int
    """Number of human labels without the judge."""

    def __str__(self) -> str:
        start = f"To know the rate to ± {self.precision:g}, you need"
        alone = f"about {round_up(self.labels_without_judge):,} human labels without the judge"
        if self.labels is None:
            return f"{start} more answers: {alone}."
        return f"{start} about {round_up(self.labels):,} human labels with the judge, and {alone}."


def plan_judge(
    rows: int, *, precision: float, rate: float, sensitivity: float, specificity: float, level: float = 0.95
) -> JudgePlan:
    """Estimate how many human labels `judge_rate` needs, from a guess at the judge's quality.

    With some labels at hand, `judge_rate(…).plan(precision)` needs no guess.

    Parameters
    ----------
    rows
        Number of answers, all labelled by the judge.
    precision
        Half-width of the interval.
    rate
        Rate of right answers.
    sensitivity
        Share of the right answers that the judge calls right.
    specificity
        Share of the wrong answers that the judge calls wrong.
    level
        Level of the interval.

    Returns
    -------
    JudgePlan
        The numbers of labels; prints as a sentence.

    Examples
    --------
    >>> print(plan_judge(5000, precision=0.03, rate=0.7, sensitivity=0.95, specificity=0.8))
    To know the rate to ± 0.03, you need about 410 human labels with the judge, and about 900 human labels ...
    """
    for name, share in (("precision", precision), ("rate", rate), ("level", level)):
        check_share(share, name)
    for name, share in (("sensitivity", sensitivity), ("specificity", specificity)):
        if not 0 <= share <= 1:
            raise InputError(name, "lie in [0, 1]", repr(share))
    labelled_right = rate * sensitivity + (1 - rate) * (1 - specificity)
    human_variance, judge_variance = (share * (1 - share) for share in (rate, labelled_right))
    covariance = human_variance * (sensitivity + specificity - 1)
    return plan_labels(human_variance, covariance, judge_variance, rows, precision, level)


def plan_labels(
    human_variance: float, covariance: float, judge_variance: float, rows: int, precision: float, level: float
) -> JudgePlan:
    """Find the number of labels from the variances of a human and a judge's label, and their covariance."""
    goal = (precision / -float(ndtri((1 - level) / 2))) ** 2

    def variance(labels: int) -> float:
        others = rows - labels
        if not others or judge_variance <= 0:
            return human_variance / labels
        weight = min(max(covariance / ((1 + labels / others) * judge_variance), 0.0), 1.0)
        by_label = human_variance - 2 * weight * covariance + weight**2 * judge_variance
        return by_label / labels + weight**2 * judge_variance / others

    low, high = 1, rows
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if variance(middle) <= goal else (middle + 1, high)
    return JudgePlan(precision, high if variance(high) <= goal else None, max(math.ceil(human_variance / goal), 2))
