"""Net benefit of acting on the probability of an event, compared with acting always or never."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trueup._core.types import ArrayLike
from trueup.decisions.decision_curve import NetBenefit, net_benefit
from trueup.reports import style
from trueup.reports.audit import Audit
from trueup.reports.figures import Panel, Section, Table, percent
from trueup.reports.plot import Area, Axis, Line, Plot, Rule


@dataclass(frozen=True, eq=False)
class DecisionCurve:
    """The decision curve of an event, as a figure."""

    curve: NetBenefit
    """The numbers."""


def decision_curve(
    logits: ArrayLike, labels: ArrayLike, *, event: int = 1, sample_weight: ArrayLike | None = None
) -> DecisionCurve:
    """Compute the net benefit of acting on P(event) ≥ t for thresholds t from 1 % to 99 %.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes).
    labels
        Classes, shape (n,).
    event
        Class of the event.
    sample_weight
        Weights of the rows, shape (n,).

    Returns
    -------
    DecisionCurve
        The record.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z = np.stack([np.zeros(2000), 2 * rng.normal(size=2000) - 1], axis=1)
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> summary(decision_curve(z, y))
    'Acting on the probability clearly beats acting always and never for thresholds 4 % to 80 %.'
    """
    return DecisionCurve(net_benefit(logits, labels, event=event, sample_weight=sample_weight))


def section(audit: Audit) -> Section:
    """Return the section: the curve of the chosen method on rows that did not fit it."""
    record = decision_curve(*audit.pairs[audit.chosen], sample_weight=audit.sample_weight)
    return Section(
        name="net-benefit",
        title="Does acting on it pay?",
        text="Act if the probability is at least a threshold t, which sets the price of a false alarm: at 10 %, nine "
        "false alarms cost as much as one missed event. The net benefit is the rate of detected events minus the "
        "rate of false alarms at that price. Acting on the probability pays where the curve lies above acting always "
        "and above 0, acting never.",
        panels=(Panel("net-benefit-chart", "Net benefit at each threshold", record),),
    )


def plot(record: DecisionCurve) -> Plot:
    """Plot the curve with its band, and the lines of acting always and never."""
    c = record.curve
    x = c.threshold
    top = max(float(np.max(c.high)), float(c.treat_all[0]), 0.01)  # acting always falls without end
    acted = x[c.low < c.high]  # no prediction reaches the other thresholds
    end = min(1.0, 1.5 * float(acted.max(initial=0.05)))

    def hover(values: np.ndarray) -> list[str]:
        return [f"at {percent(t, 0)}: {value:.4f}" for t, value in zip(x, values, strict=True)]

    marks = [
        Area(x=x, low=c.low, high=c.high, color=style.BLUE, name="95 % interval"),
        Line(x=x, y=c.value, color=style.BLUE, name="by probability", hover=hover(c.value)),
        Line(
            x=x,
            y=c.treat_all,
            color=style.VERMILION,
            dash="dash",
            width=1.5,
            name="act always",
            hover=hover(c.treat_all),
        ),
        Rule(at=0.0, horizontal=True, color=style.MUTED, dash="dot", name="act never"),
    ]
    return Plot(
        title="Net benefit",
        marks=marks,
        x=Axis(title="Threshold: act from this probability on", range=(0, end), percent=True),
        y=Axis(title="Net benefit", range=(-0.25 * top, 1.05 * top)),
        height=320,
        legend=("upper right", 1),
    )


def summary(record: DecisionCurve) -> str:
    """Return the thresholds at which acting on the probability pays."""
    spans = [percent(a, 0) if a == b else f"{percent(a, 0)} to {percent(b, 0)}" for a, b in record.curve.useful]
    if not spans:
        return "The data show no threshold at which acting on the probability beats acting always and never."
    return f"Acting on the probability clearly beats acting always and never for thresholds {' and '.join(spans)}."


def numbers(record: DecisionCurve) -> Table:
    """Return one row for every tenth threshold and for 1, 2 and 5 %."""
    c = record.curve
    at = [i for i, t in enumerate(c.threshold) if round(100 * t) % 10 == 0 or round(100 * t) in (1, 2, 5)]
    head = ["Threshold", "By probability", "95 % interval", "Act always"]
    return head, [
        [percent(c.threshold[i], 0), f"{c.value[i]:.4f}", f"{c.low[i]:.4f} – {c.high[i]:.4f}", f"{c.treat_all[i]:.4f}"]
        for i in at
    ]
