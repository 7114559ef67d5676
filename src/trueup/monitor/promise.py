"""Checks of a promised error rate, and estimates for rows whose labels have not arrived."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
from scipy.special import ndtri

from trueup._core.arrays import check_share, warn_users
from trueup._core.errors import InputError
from trueup._core.row_scores import score_and_class
from trueup.decisions.recheck import Recheck

RISKS = ("error", "false_discovery_rate")


@dataclass(frozen=True)
class PromiseCheck:
    """A promised bound on the error rate of answered rows, checked again whenever labels arrive.

    Rows are answered if their confidence (for an event: its probability) is at least `threshold`. The promise is that
    at most the share `max_risk` of the answers is wrong. `check` holds the bounds, which stay valid at any time.
    """

    threshold: float
    max_risk: float
    level: float = 0.95
    risk: str = "error"
    check: Recheck = field(default=Recheck(0.5), repr=False)
    seen: int = 0
    """Number of rows with labels, answered or not."""

    @classmethod
    def of(cls, promise: Any) -> Self:
        """Make one from a `decisions.Threshold` or from a mapping.

        A mapping has the entries `threshold` and `max_risk`, and optionally `level` and `risk`.
        """
        names = ("threshold", "max_risk", "level", "risk")
        if isinstance(promise, Mapping):
            if unknown := [name for name in promise if name not in names]:
                raise InputError("promise", f"have the entries {', '.join(names)}", repr(unknown[0]))
            if missing := [name for name in names[:2] if name not in promise]:
                raise InputError("promise", f"have the entry {missing[0]}", "none")
            entries = dict(promise)
        else:
            try:
                entries = {name: getattr(promise, name) for name in names}
            except AttributeError:
                kind = type(promise).__name__
                raise InputError("promise", "be a Threshold, or a mapping with threshold and max_risk", kind) from None
        if getattr(promise, "calibrator", None) is not None:
            warn_users("the promise is about calibrated confidences: give the monitor promise.calibrator(logits)")
        number = entries["threshold"]
        if isinstance(number, bool) or not isinstance(number, (int, float, np.floating)) or not 0 <= number <= 1:
            raise InputError("promise", "have a threshold between 0 and 1", repr(number))
        max_risk, level = check_share(entries["max_risk"], "max_risk"), check_share(entries.get("level", 0.95), "level")
        risk = entries.get("risk", "error")
        if risk not in RISKS:
            raise InputError("promise", f"bound the risk {' or '.join(RISKS)}", repr(risk))
        return cls(float(number), max_risk, level, risk, Recheck(max_risk, level))

    def settings(self) -> dict[str, Any]:
        """Return the entries that `of` takes."""
        return {name: getattr(self, name) for name in ("threshold", "max_risk", "level", "risk")}

    def update(self, score: np.ndarray, right: np.ndarray) -> PromiseCheck:
        """Count rows with labels."""
        answered = score >= self.threshold
        return replace(self, check=self.check.update(1.0 - right[answered]), seen=self.seen + len(score))

    def __add__(self, other: PromiseCheck) -> PromiseCheck:
        return replace(self, check=self.check + other.check, seen=self.seen + other.seen)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain data for JSON; undefined values are None."""
        check = self.check
        coverage = check.rows / self.seen if self.seen else None
        observed = check.wrong / check.rows if check.rows else None
        counts = {"answered": check.rows, "wrong": check.wrong, "coverage": coverage, "observed": observed}
        bounds = {"low": check.low, "high": check.high, "evidence": check.wealth, "broken": check.refuted}
        return {**self.settings(), **counts, **bounds, "text": str(check)}


@dataclass(frozen=True)
class Unlabelled:
    """Sums over the rows without labels; the estimates from them assume that the model is still calibrated."""

    rows: int = 0
    confidence: float = 0.0
    """Σ confidence, or Σ P(event) for an event."""
    variance: float = 0.0
    """Σ c(1 − c)."""
    answered: int = 0
    """Number of rows at or above the promise's threshold."""
    errors: float = 0.0
    """Σ(1 − score) over the answered rows."""
    error_variance: float = 0.0
    """Σ score(1 − score) over the answered rows."""

    @classmethod
    def of(cls, watched: np.ndarray, promised: np.ndarray | None, threshold: float) -> Self:
        """Sum the watched probabilities and, if there is a promise, the scores that it refers to."""
        above = np.zeros(0) if promised is None else promised[promised >= threshold]
        variance, error_variance = (float((p * (1 - p)).sum()) for p in (watched, above))
        sums = float(watched.sum()), variance, len(above), float((1 - above).sum()), error_variance
        return cls(len(watched), *sums)

    def __add__(self, other: Unlabelled) -> Unlabelled:
        return Unlabelled(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    def __sub__(self, other: Unlabelled) -> Unlabelled:
        if other.rows > self.rows or other.answered > self.answered:
            raise InputError("awaited", f"mark at most the {self.rows:,} rows without labels", f"{other.rows:,}")
        if other.rows == self.rows:
            return Unlabelled()
        return Unlabelled(*(max(getattr(self, f.name) - getattr(other, f.name), 0) for f in fields(self)))

    def to_dict(self, level: float = 0.95) -> dict[str, Any]:
        """Estimate accuracy and error, with prediction intervals for the values that labels would show."""
        accuracy = _estimate(self.rows, self.confidence, self.variance, level)
        error = _estimate(self.answered, self.errors, self.error_variance, level)
        return {"rows": self.rows, "accuracy": accuracy, "answered": self.answered, "error": error}

    def check(self) -> Self:
        """Reject sums that no rows can have: a file may contain anything."""
        for name, value in asdict(self).items():
            whole = name in ("rows", "answered")
            most = 2**53 if whole else (self.rows if name in ("confidence", "variance") else self.answered)
            kind = type(value) is int if whole else type(value) in (int, float)
            if not kind or not (math.isfinite(value) and 0 <= value <= most):
                raise ValueError(f"its sums over rows without labels contradict each other ({name})")
        if self.answered > self.rows:
            raise ValueError("its sums over rows without labels contradict each other (answered)")
        return self


def _estimate(rows: int, total: float, variance: float, level: float) -> dict[str, float | None]:
    if not rows:
        return dict.fromkeys(("value", "low", "high"))
    value, half_width = total / rows, float(-ndtri((1 - level) / 2)) * math.sqrt(variance) / rows
    return {"value": value, "low": max(value - half_width, 0.0), "high": min(value + half_width, 1.0)}


def promise_scores(
    risk: str, logits: np.ndarray, labels: np.ndarray, event: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Scores and 0/1 outcomes that a promise refers to: those of the prediction, or those of the event."""
    if risk == "error":
        score, predicted = score_and_class(logits, None)
        return score, (predicted == labels).astype(np.float64)
    number = 1 if event is None else event
    return score_and_class(logits, number)[0], (labels == number).astype(np.float64)
