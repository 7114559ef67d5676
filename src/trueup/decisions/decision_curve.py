"""Net benefit of acting on a probability, compared with acting always or never."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.special import ndtri

from trueup._core.arrays import as_arrays, as_vector, as_weights, check_share
from trueup._core.errors import InputError
from trueup._core.formatting import format_interval, format_number, format_percent, text_table
from trueup._core.row_scores import event_class, event_name, score_and_class
from trueup._core.types import ArrayLike
from trueup.metrics.intervals import binomial_bounds

THRESHOLDS = np.round(np.arange(0.01, 1.0, 0.01), 2)


@dataclass(frozen=True, eq=False)
class NetBenefit:
    """A decision curve: the net benefit of acting on P(event) ≥ t, for each t, with pointwise intervals."""

    threshold: np.ndarray
    """Thresholds t; the other arrays have one entry per threshold."""
    value: np.ndarray
    """Net benefit of acting where P(event) ≥ t."""
    low: np.ndarray
    """Lower end of its interval."""
    high: np.ndarray
    """Upper end of its interval."""
    treat_all: np.ndarray
    """Net benefit of acting on every row; acting on none has 0."""
    gain_low: np.ndarray
    """Lower end of the gain over acting always or never, whichever is better, by exact bounds."""
    rows: int
    """Number of rows."""
    event: int
    """Class of the event."""
    prevalence: float
    """Share of rows with the event."""
    level: float
    """Level of the intervals."""
    event_name: str | None = None
    """Name of the event, if its class has one."""

    @property
    def useful(self) -> list[tuple[float, float]]:
        """Ranges of thresholds with a significant gain over acting always and never."""
        better = np.concatenate([[False], self.gain_low > 0, [False]]).astype(np.int64)
        starts, ends = np.flatnonzero(np.diff(better) == 1), np.flatnonzero(np.diff(better) == -1) - 1
        return [(float(self.threshold[a]), float(self.threshold[b])) for a, b in zip(starts, ends, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        record = {name: getattr(self, name) for name in ("rows", "event", "prevalence", "level", "useful")}
        arrays = ("threshold", "value", "low", "high", "treat_all", "gain_low")
        return {"schema": 1, **record, **{name: getattr(self, name).tolist() for name in arrays}}

    def __str__(self) -> str:
        at = np.unique(np.linspace(0, len(self.threshold) - 1, min(len(self.threshold), 10)).round().astype(np.int64))
        table = [["threshold", "net benefit", f"{format_percent(self.level)} interval", "treat all"]]
        for i in at.tolist():
            value, treat_all = format_number(self.value[i]), format_number(self.treat_all[i])
            table.append([f"{self.threshold[i]:g}", value, format_interval(self.low[i], self.high[i]), treat_all])
        if spans := self.useful:
            where = " and ".join(f"{a:g} to {b:g}" if a < b else f"at {a:g}" for a, b in spans)
            words = f"Acting on the probability beats acting always and never for thresholds {where}."
        else:
            words = "The data show no threshold at which acting on the probability beats acting always and never."
        called = self.event_name or f"class {self.event}"
        event = f"The event is {called}: {format_percent(self.prevalence, 1)} of {self.rows:,} rows."
        return "\n\n".join([text_table(table), f"{event} {words}"])


def net_benefit(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    event: int | str = 1,
    class_names: Sequence[str] | None = None,
    thresholds: ArrayLike = THRESHOLDS,
    sample_weight: ArrayLike | None = None,
    level: float = 0.95,
) -> NetBenefit:
    """Compute the decision curve of an event: TP/n − FP/n · t/(1 − t) at each threshold t.

    The threshold sets the price of a false alarm: at t = 0.1, nine false alarms cost as much as one missed event. One
    acts on the rows with P(event) ≥ t. Each value is a mean over the rows and has a normal interval.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes).
    labels
        Classes, shape (n,).
    event
        Class of the event: its number, or its name among `class_names`.
    class_names
        Names of the classes.
    thresholds
        Thresholds, rising, strictly between 0 and 1.
    sample_weight
        Weights of the rows, shape (n,).
    level
        Level of the intervals.

    Returns
    -------
    NetBenefit
        The curve; prints as a table.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=2000)
    >>> z = np.stack([np.zeros(2000), 2 * x - 1], axis=1)
    >>> y = (rng.random(2000) < 1 / (1 + np.exp(1 - 2 * x))).astype(int)
    >>> curve = net_benefit(z, y, thresholds=[0.1, 0.5])
    >>> curve.value.round(2), curve.treat_all.round(2), curve.useful
    (array([0.3 , 0.15]), array([ 0.28, -0.29]), [(0.1, 0.5)])

    References
    ----------
    Vickers and Elkin, "Decision curve analysis" (2006), doi:10.1177/0272989X06295361.
    """
    z, y = as_arrays(logits, labels, min_rows=1)
    check_share(level, "level")
    number, name = event_class(event, z.shape[1], class_names), event_name(event, z.shape[1], class_names)
    w = as_weights(sample_weight, len(z))
    share = np.full(len(z), 1 / len(z)) if w is None else w / w.sum()
    t = as_vector(thresholds, "thresholds")
    if not len(t) or t.min() <= 0 or t.max() >= 1 or (np.diff(t) <= 0).any():
        raise InputError("thresholds", "rise, strictly between 0 and 1", f"{t[:3].tolist()} …")
    score = score_and_class(z, number)[0]
    happened = (y == number).astype(np.float64)
    odds, z_quantile = t / (1 - t), float(-ndtri((1 - level) / 2))
    value, low, high, gain_low = (np.empty(len(t)) for _ in range(4))
    prevalence = float(share @ happened)
    treat_all = prevalence - (1 - prevalence) * odds

    def ends(x: np.ndarray) -> tuple[float, float, float]:
        mean = float(share @ x)
        error = z_quantile * math.sqrt(float(share**2 @ (x - mean) ** 2))
        return mean, mean - error, mean + error

    for i in range(len(t)):
        on = score >= t[i]
        value[i], low[i], high[i] = ends((happened - (1 - happened) * odds[i]) * on)
        acting, waiting = (_gain(share[rows], happened[rows], t[i], level) for rows in (on, ~on))
        gain_low[i] = min(acting[0], waiting[1])
    return NetBenefit(t, value, low, high, treat_all, gain_low, len(score), number, prevalence, level, name)


def _gain(share: np.ndarray, happened: np.ndarray, t: float, level: float) -> tuple[float, float]:
    """Return lower bounds of the gain of acting on these rows over not acting, and of the reverse.

    Acting gains rate − (1 − rate)·t/(1 − t) per row, which is positive where the event's rate exceeds t. The rate has
    an exact bound, since a normal interval has zero width if no row has the event.
    """
    part = float(share.sum())
    if part == 0:
        return 0.0, 0.0
    rows = part**2 / float(share @ share)
    hits = rows * float(share @ happened) / part
    low, high = (float(end) for end in binomial_bounds(np.array(hits), np.array(rows), (1 - level) / 2))
    acting_low, acting_high = ((rate - (1 - rate) * t / (1 - t)) * part for rate in (low, high))
    return acting_low, -acting_high
