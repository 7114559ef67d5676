"""How many labels does it take? What a test of so many rows can see, and the rows for a wanted precision."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any, cast

import numpy as np
from scipy.special import ndtri

from trueup._core.arrays import as_arrays, check_share
from trueup._core.errors import InputError
from trueup._core.row_scores import score_rows
from trueup._core.tally import Tally
from trueup.decisions.thresholds import round_up, rows_to_pass, threshold
from trueup.metrics.hypothesis_tests import DetectableError, detectable_error_of_tally
from trueup.metrics.intervals import bootstrap
from trueup.metrics.table import plain_record

_MOST_ROWS = 10**9


@dataclass(frozen=True)
class Detection:
    """What so many rows can show; how many rows show a calibration error."""

    rows: int | None = None
    """Those that there are, unless given."""
    error: float | None = None
    """A calibration error to be detected."""


@dataclass(frozen=True)
class Promise:
    """A promise of a `threshold` to be made."""

    max_risk: float
    coverage: float | None = None
    """The share of rows that is to be answered; that of these rows by default."""
    level: float = 0.95

    def __post_init__(self) -> None:
        check_share(self.max_risk, "max_risk")
        check_share(self.level, "level")
        if self.coverage is not None:
            check_share(self.coverage, "coverage")

    def rows_needed(self, logits: np.ndarray, labels: np.ndarray) -> int | None:
        """How many rows it takes, by what these look like; None where no number would do."""
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
    """Another method's logits of the same rows, to see a paired difference of the NLL."""

    logits: Any
    difference: float | None = None
    """To be seen; the one that there is by default."""

    def __post_init__(self) -> None:
        if self.difference is not None and not self.difference > 0:
            raise InputError("difference", "be positive", repr(self.difference))


@dataclass(frozen=True)
class Plan:
    """How many labelled rows it takes; None where it was not asked for or no number of rows would do."""

    detectable: DetectableError
    rows_to_detect: int | None
    error: float | None
    """The calibration error that `rows_to_detect` rows find."""
    rows_for_ece: int | None
    precision: float | None
    """The half-width that the interval of the ECE then has."""
    rows_for_promise: int | None
    promise: Promise | None
    rows_for_comparison: int | None
    difference: float | None
    """Of the two methods' NLL, which that many rows show."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; what is not defined is None."""
        return {"schema": 1, **asdict(self), "detectable": plain_record(asdict(self.detectable))}

    def __str__(self) -> str:
        d = self.detectable
        if math.isnan(d.error):
            lines = [f"With {d.rows:,} rows no calibration error is sure to be seen."]
        else:
            found = f"one of that size is found in {100 * d.power:g} % of cases"
            lines = [f"With {d.rows:,} rows a calibration error below {d.error:.2g} may go unseen: {found}."]

        def add(question: str, rows: int | None, otherwise: str = "") -> None:
            lines.append(f"To {question} takes about {round_up(rows):,} rows." if rows else otherwise)

        if self.error is not None:
            what = f"see a calibration error of {self.error:g}"
            add(what, self.rows_to_detect, f"To {what} takes more than {_MOST_ROWS:,} rows.")
        if self.precision is not None:
            add(f"know the ECE to ± {self.precision:g}", self.rows_for_ece)
        if self.promise is not None:
            share = self.promise.coverage
            where = "" if share is None else f" on {100 * share:g} % of the rows"
            what = f"promise at most {100 * self.promise.max_risk:g} % errors{where}"
            add(what, self.rows_for_promise, f"If errors stay as frequent as seen, no number of rows would {what}.")
        if self.difference is not None:
            what = f"see a difference in NLL of {self.difference:.3g}"
            add(what, self.rows_for_comparison, "The two methods do not differ.")
        return "\n".join(lines)


def plan(
    logits: Any,
    labels: Any,
    *,
    detection: Detection = Detection(),  # noqa: B008, it is frozen
    precision: float | None = None,
    promise: Promise | None = None,
    comparison: Comparison | None = None,
    power: float = 0.8,
    seed: int = 0,
) -> Plan:
    """The smallest calibration error that so many rows can show, and how many rows other questions take.

    `precision` is a half-width of the ECE's 95 % interval. All by what these rows look like, so that a few hundred
    suffice to plan with; numbers of rows are estimates.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(1000, 3)) * 3
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> print(plan(z, y, precision=0.01, promise=Promise(max_risk=0.05, coverage=0.4)))
    With 1,000 rows a calibration error below 0.037 may go unseen: one of that size is found in 80 % of cases.
    To know the ECE to ± 0.01 takes about 1,400 rows.
    To promise at most 5 % errors on 40 % of the rows takes about 910 rows.
    """
    z, y = as_arrays(logits, labels, min_rows=10)
    tally = Tally.of(z, y)
    rows, error = detection.rows, detection.error
    if rows is not None and (not isinstance(rows, Integral) or rows < 1):
        raise InputError("rows", "be a positive whole number", repr(rows))
    rows_to_detect = rows_for_ece = rows_for_promise = rows_for_comparison = difference = None
    if error is not None:
        rows_to_detect = _rows_to_detect(tally, check_share(error, "error"), power, seed)
    if precision is not None:
        interval = bootstrap(z, y, metric="ece", seed=seed)
        half = max((interval.high - interval.low) / 2, 1e-12)
        rows_for_ece = math.ceil(len(z) * (half / check_share(precision, "precision")) ** 2)
    if promise is not None:
        rows_for_promise = promise.rows_needed(z, y)
    if comparison is not None:
        gap = score_rows(z, y).nll - score_rows(*as_arrays(comparison.logits, labels)).nll
        difference = abs(float(gap.mean())) if comparison.difference is None else comparison.difference
        reach = float(ndtri(0.975) + ndtri(power))
        rows_for_comparison = math.ceil((reach * float(gap.std()) / difference) ** 2) if difference > 0 else None
    detectable = detectable_error_of_tally(tally, rows=rows, power=power, seed=seed)
    answers = rows_to_detect, error, rows_for_ece, precision, rows_for_promise, promise, rows_for_comparison, difference
    return Plan(detectable, *answers)


def _rows_to_detect(tally: Tally, error: float, power: float, seed: int) -> int | None:
    """Bisection on the logarithm of the rows."""

    def missed(rows: int) -> bool:
        least = detectable_error_of_tally(tally, rows=rows, power=power, n_resamples=100, seed=seed).error
        return math.isnan(least) or least > error

    low, high = 10, 10
    while missed(high):
        low, high = high, high * 10
        if high > _MOST_ROWS:
            return None
    for _ in range(7):
        middle = round(math.sqrt(low * high))
        low, high = (middle, high) if missed(middle) else (low, middle)
    return high
