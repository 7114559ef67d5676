"""Temperature sweep: the negative log-likelihood and the ECE at each temperature."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import expit

from trueup._core.arrays import as_weighted
from trueup._core.bins import BINS, Bins, equal_width, rounding_error
from trueup._core.formatting import format_number
from trueup._core.loss_sums import temperature_sums
from trueup._core.row_scores import confidences, event_log_odds, is_event, scores_and_outcomes
from trueup._core.types import ArrayLike
from trueup.calibrators.temperature import inverse_temperature
from trueup.reports import style
from trueup.reports.audit import RAW, Audit
from trueup.reports.figures import Panel, Section, Table
from trueup.reports.plot import Axis, Dots, Line, Mark, Plot, Rule

# Number of temperatures of a sweep, and for more than this number of logits
_POINTS, _POINTS_OF_LARGE_DATA, _LARGE_DATA = 61, 25, 10_000_000


@dataclass(frozen=True, eq=False)
class TemperatureSweep:
    """NLL and ECE after dividing the logits by each temperature."""

    temperatures: np.ndarray
    """Temperatures; the other arrays have one entry per temperature."""
    nll: np.ndarray
    """Negative log-likelihood."""
    ece: np.ndarray
    """Expected calibration error."""
    best_nll: float
    """Temperature with the lowest NLL, of all positive numbers."""
    best_ece: float
    """Temperature with the lowest ECE, of those in the sweep."""
    at_one: tuple[float, float]
    """NLL and ECE at temperature 1, without calibration."""
    fitted: float | None = None
    """Temperature fitted to other rows, if known."""


def temperature_sweep(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    temperatures: Sequence[float] | None = None,
    bins: int = BINS,
    sample_weight: ArrayLike | None = None,
    fitted: float | None = None,
) -> TemperatureSweep:
    """Compute NLL and ECE of softmax(z/T) for a range of temperatures.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes).
    labels
        Classes, shape (n,).
    temperatures
        Temperatures; by default a geometric grid from min(1, best T)/3 to 3·max(1, best T).
    bins
        Number of bins of the ECE.
    sample_weight
        Weights of the rows, shape (n,).
    fitted
        Temperature fitted to other rows, to be marked.

    Returns
    -------
    TemperatureSweep
        The record.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 10))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> record = temperature_sweep(2.5 * z, y)
    >>> f"{record.temperatures[0]:.2f} {record.temperatures[-1]:.2f} {record.best_nll:.4f}"
    '0.33 7.56 2.5187'

    References
    ----------
    Guo et al., "On calibration of modern neural networks" (2017), arXiv:1706.04599.
    """
    z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
    best = 1 / inverse_temperature(z, y, w)[0]
    if temperatures is None:
        points = _POINTS if z.size <= _LARGE_DATA else _POINTS_OF_LARGE_DATA
        grid = np.geomspace(min(1.0, best) / 3, max(1.0, best) * 3, points)
    else:
        grid = np.array(temperatures, dtype=np.float64)
        if grid.ndim != 1 or not len(grid) or not ((grid > 0) & np.isfinite(grid)).all():
            raise ValueError("temperatures must be a list of positive numbers")
    hits = scores_and_outcomes(z, y, quick=True)[1]
    odds = event_log_odds(z) if is_event(z, top_label=False) else None
    edges, unit = equal_width(bins), rounding_error(z)
    total = len(z) if w is None else float(w.sum())

    def losses_at(beta: float, *, quick: bool) -> tuple[float, float]:
        nll = temperature_sums(z, y, beta, w, quick=quick)[0] / total
        score = confidences(z, beta=beta, quick=quick)[0] if odds is None else expit(beta * odds)
        return nll, Bins.from_scores(score, hits, edges, rounding=unit, sample_weight=w).ece()

    nll, ece = np.array([losses_at(beta, quick=True) for beta in (1 / grid).tolist()]).T
    return TemperatureSweep(grid, nll, ece, best, float(grid[ece.argmin()]), losses_at(1.0, quick=False), fitted)


def section(audit: Audit) -> Section:
    """Return the section: the sweep of the uncalibrated network."""
    fitted = getattr(audit.calibrators.get("temperature"), "temperature", None)
    options: dict[str, Any] = {"bins": audit.bins, "sample_weight": audit.sample_weight}
    record = temperature_sweep(*audit.pairs[RAW], **options, fitted=None if fitted is None else float(fitted))
    above = "above 1 the network becomes less confident, below 1 more confident"
    if audit.scores.is_event:
        above = "above 1 every probability moves towards 0.5, below 1 away from it"
    return Section(
        name="sweep",
        title="What would a single temperature do?",
        text=f"Temperature scaling divides all logits by one number: {above}. The curves show the effect of each "
        "temperature on the scored rows; the fitted temperature comes from the calibration rows alone.",
        panels=(Panel("sweep-chart", "Log-loss and calibration error by temperature", record),),
    )


def plot(record: TemperatureSweep) -> Plot:
    """Plot NLL and ECE in two panels, with lines at 1, at the best temperature and at the fitted one."""
    order = np.argsort(record.temperatures)
    t = record.temperatures[order]

    def panel(name: str, values: np.ndarray, best: float, look: dict[str, Any]) -> list[Mark]:
        at = np.interp(np.log(best), np.log(t), values[order], left=np.nan, right=np.nan)
        hover = [f"T = {at:.2f}\n{name} {value:.4f}" for at, value in zip(t, values[order], strict=True)]
        curve = Line(x=t, y=values[order], name=name, hover=hover, **look)
        dot = Dots(x=[best], y=[at], color=curve.color, name=f"lowest at T = {best:.3g}")
        return [curve, dot, Rule(at=1.0, color=style.MUTED, dash="dot"), Rule(at=record.best_nll, color=style.BLUE)]

    x = Axis(title="Temperature", log=True)
    fitted: list[Mark] = []
    if record.fitted is not None:
        fitted = [
            Rule(at=record.fitted, color=style.INK, dash="dash", name=f"fitted to other rows: {record.fitted:.3g}")
        ]
    ece = panel("ECE", record.ece, record.best_ece, {"color": style.VERMILION, "dash": "dash"})
    return Plot(
        title="Temperature sweep",
        marks=panel("log-loss", record.nll, record.best_nll, {"color": style.BLUE}) + fitted,
        x=x,
        y=Axis(title="Log-loss (nats)"),
        height=440,
        below=Plot(title="", marks=ece + [replace(rule, name="") for rule in fitted], x=x, y=Axis(title="ECE")),
    )


def summary(record: TemperatureSweep) -> str:
    """Return the best temperatures and the fitted one, with their NLL and ECE."""
    fitted = ""
    if record.fitted is not None:
        fitted = f" The temperature fitted to the calibration rows is {record.fitted:.2f} (dashed line)."
    nll, ece = record.at_one
    return (
        f"The log-loss is lowest at temperature {record.best_nll:.2f} (line), the ECE at {record.best_ece:.2f}. "
        f"At 1, without calibration (dotted line), they are {nll:.4f} and {ece:.4f}; "
        f"the lowest are {min(record.nll.min(), nll):.4f} and {min(record.ece.min(), ece):.4f}.{fitted}"
    )


def numbers(record: TemperatureSweep) -> Table:
    """Return one row for each of about twenty temperatures."""
    step = max(1, len(record.temperatures) // 20)
    columns = (column[::step] for column in (record.temperatures, record.nll, record.ece))
    rows = [[f"{t:.3f}", format_number(nll), format_number(ece)] for t, nll, ece in zip(*columns, strict=True)]
    return ["Temperature", "Log-loss", "ECE"], rows
