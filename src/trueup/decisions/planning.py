"""How many labels does it take? What a test of so many rows can see, and the rows for a wanted precision."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from numbers import Integral
from typing import Any

import numpy as np
from scipy.special import ndtri

from trueup.core.arrays import as_tensors, check_share
from trueup.core.errors import InputError
from trueup.core.row_scores import score_rows
from trueup.core.tally import Tally
from trueup.decisions.thresholds import Threshold, rows_to_pass, threshold
from trueup.metrics.hypothesis_tests import DetectableError, detectable_error_of_tally
from trueup.metrics.intervals import bootstrap

_MOST_ROWS = 10**9


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
    at_most: float | None
    coverage: float | None
    """The share of rows answered, for which the promise is planned."""
    certainty: float
    rows_for_comparison: int | None
    difference: float | None
    """Of the two methods' NLL, which that many rows show."""

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; what is not defined is None."""
        plain = asdict(self)
        plain["detectable"] = {
            name: None if isinstance(x, float) and math.isnan(x) else x for name, x in plain["detectable"].items()
        }
        return {"schema": 1, **plain}

    def __str__(self) -> str:
        d = self.detectable
        if math.isnan(d.error):
            lines = [f"With {d.rows:,} rows no calibration error is sure to be seen."]
        else:
            found = f"one of that size is found in {100 * d.power:g} % of cases"
            lines = [f"With {d.rows:,} rows a calibration error below {d.error:.2g} may go unseen: {found}."]
        if self.error is not None:
            lines.append(
                f"To see a calibration error of {self.error:g} takes {_about(self.rows_to_detect)} rows."
                if self.rows_to_detect
                else f"To see a calibration error of {self.error:g} takes more than {_MOST_ROWS:,} rows."
            )
        if self.precision is not None:
            lines.append(f"To know the ECE to ± {self.precision:g} takes {_about(self.rows_for_ece)} rows.")
        if self.at_most is not None:
            what = f"at most {100 * self.at_most:g} % errors"
            where = "" if self.coverage is None else f" on {100 * self.coverage:g} % of the rows"
            lines.append(
                f"To promise {what}{where} takes {_about(self.rows_for_promise)} rows."
                if self.rows_for_promise
                else f"If errors stay as frequent as seen, no number of rows would promise {what}{where}."
            )
        if self.difference is not None:
            lines.append(
                f"To see a difference in NLL of {self.difference:.3g} takes {_about(self.rows_for_comparison)} rows."
                if self.rows_for_comparison
                else "The two methods do not differ."
            )
        return "\n".join(lines)


def plan(
    logits: Any,
    labels: Any,
    *,
    rows: int | None = None,
    error: float | None = None,
    precision: float | None = None,
    at_most: float | None = None,
    coverage: float | None = None,
    certainty: float = 0.95,
    beside: Any = None,
    difference: float | None = None,
    power: float = 0.8,
    seed: int = 0,
) -> Plan:
    """The smallest calibration error that `rows` rows can show, and how many rows other questions take.

    `error`: to detect this calibration error; `precision`: the half-width of the ECE's 95 % interval; `at_most` (on the
    share `coverage` of the rows): a threshold's promise; `beside`, another method's logits of the same rows: a paired
    difference of the NLL, the one seen or `difference`. All by what these rows look like, so that a few hundred suffice
    to plan with; numbers of rows are estimates.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(1000, 3)) * 3
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> print(plan(z, y, precision=0.01, at_most=0.05, coverage=0.4))
    With 1,000 rows a calibration error below 0.037 may go unseen: one of that size is found in 80 % of cases.
    To know the ECE to ± 0.01 takes about 1,400 rows.
    To promise at most 5 % errors on 40 % of the rows takes about 910 rows.
    """
    z, y = as_tensors(logits, labels, at_least=10)
    tally = Tally.of(z, y)
    if rows is not None and (not isinstance(rows, Integral) or rows < 1):
        raise InputError("rows", "be a positive whole number", repr(rows))
    check_share(certainty, "certainty")
    if coverage is not None and at_most is None:
        raise ValueError("coverage goes with at_most, the promise that so many rows are to have")
    if difference is not None and (beside is None or not difference > 0):
        raise ValueError("difference must be positive, and goes with beside, the other method's logits")
    detectable = detectable_error_of_tally(tally, rows=rows, power=power, seed=seed)
    found: dict[str, Any] = dict.fromkeys(
        ("rows_to_detect", "rows_for_ece", "rows_for_promise", "rows_for_comparison", "difference")
    )
    if error is not None:
        found["rows_to_detect"] = _rows_to_detect(tally, check_share(error, "error"), power, seed)
    if precision is not None:
        check_share(precision, "precision")
        interval = bootstrap(z, y, metric="ece", seed=seed)
        half = max((interval.high - interval.low) / 2, 1e-12)
        found["rows_for_ece"] = math.ceil(len(z) * (half / precision) ** 2)
    if at_most is not None:
        found["rows_for_promise"] = _rows_for_promise(
            threshold(z, y, at_most=at_most, certainty=certainty), at_most, certainty, coverage
        )
    if beside is not None:
        other, _ = as_tensors(beside, labels)
        gap = score_rows(z, y).nll - score_rows(other, y).nll
        wanted = abs(float(gap.mean())) if difference is None else difference
        reach = float(ndtri(0.975) + ndtri(power))
        found["difference"] = wanted
        found["rows_for_comparison"] = math.ceil((reach * float(gap.std()) / wanted) ** 2) if wanted > 0 else None
    return Plan(
        detectable=detectable,
        error=error,
        precision=precision,
        at_most=at_most,
        coverage=coverage,
        certainty=certainty,
        **found,
    )


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


def _rows_for_promise(found: Threshold, at_most: float, certainty: float, coverage: float | None) -> int | None:
    if coverage is None:
        if not found.promised:
            return found.labels_needed
        wanted = found.coverage
    else:
        wanted = check_share(coverage, "coverage")
    curve = found.curve
    at = min(int(np.searchsorted(curve.coverage, wanted)), len(curve.coverage) - 1)
    kept = float(curve.coverage[at])
    risk = (float(curve.risk[at]) * kept * found.rows + 0.5) / (kept * found.rows + 1)
    if risk >= at_most:
        return None
    return math.ceil(rows_to_pass(risk, at_most, (1 - certainty) / 2) / kept)


def _about(rows: int | None) -> str:
    if rows is None:
        return "more"
    digits = max(len(str(rows)) - 2, 0)
    return f"about {math.ceil(rows / 10**digits) * 10**digits:,}"
