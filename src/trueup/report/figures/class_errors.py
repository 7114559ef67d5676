"""The calibration error of each class."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trueup.core.bins import BINNED_ERRORS, BINS, Bins
from trueup.core.formatting import format_number
from trueup.report import style
from trueup.report.audit import Audit
from trueup.report.figures import Panel, Section, Table, percent, stages

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure

_HIGH, _LOW = "probability too high", "probability too low"


@dataclass(frozen=True, eq=False)
class ClassErrors:
    """The calibration error of each class."""

    names: tuple[str, ...]
    error: np.ndarray
    """Of the class's probability against its occurrence, in bins; their mean is the class-wise error of the table."""
    probability: np.ndarray
    """The mean probability of the class."""
    frequency: np.ndarray
    """How often the class occurred, as a share of the rows."""


def class_errors(
    logits: Any, labels: Any, *, bins: int = BINS, names: Sequence[str] | None = None, weights: Any = None
) -> ClassErrors:
    """The calibration error of each class's probability: Σ_b (n_kb/n) |acc_kb − conf_kb| for class k.

    With `weights`, one a row, n is their sum.

    >>> record = class_errors(np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]]), [0, 0, 1], names=["cat", "dog"])
    >>> for row in zip(record.names, record.error, record.probability, record.frequency):
    ...     print("{} {:.4f} {:.4f} {:.4f}".format(*row))
    cat 0.3333 0.8000 0.6667
    dog 0.3333 0.2000 0.3333

    Nixon et al., "Measuring calibration in deep learning" (2019), called static calibration error there.
    """
    tally = Bins.of(logits, labels, bins=bins, classwise=True, weights=weights)
    classes = len(tally.count)
    named = tuple(str(k) for k in range(classes)) if names is None else tuple(map(str, names))
    if len(named) != classes:
        raise ValueError(f"names must have {classes} entries, one a class, got {len(named)}")
    n = tally.n or np.nan
    error = BINNED_ERRORS["ece"](tally.count, tally.confidence, tally.hits) if tally.n else np.full(classes, np.nan)
    return ClassErrors(named, error, tally.confidence.sum(axis=1) / n, tally.hits.sum(axis=1) / n)


def section(audit: Audit, names: Sequence[str] | None) -> Section:
    """The classes before and after calibration, on the same scale."""
    how: dict[str, Any] = {"bins": audit.bins, "names": names, "weights": audit.weights}
    records = [class_errors(*stage.pair, **how) for stage in stages(audit)]
    options = {
        "top": max(float(record.error.max()) for record in records),
        "legend": False,
        "order": np.argsort(-records[0].error, kind="stable"),
    }
    return Section(
        name="classes",
        title="Which classes are miscalibrated?",
        text="Every class has a probability in every row, whether it is predicted or not. The error of a class is how "
        "far that probability is from how often the class occurs, bin by bin. The classes stand in the order of their "
        "errors without calibration.",
        legend=(("over", _HIGH), ("under", _LOW)),
        panels=tuple(
            Panel(f"classes-{stage.name}", stage.title, record, options)
            for stage, record in zip(stages(audit), records, strict=True)
        ),
    )


def chart(
    record: ClassErrors,
    *,
    most: int = 20,
    top: float | None = None,
    legend: bool = True,
    order: np.ndarray | None = None,
) -> Figure:
    """A bar for each of the `most` worst classes, the worst on top; the x-axis ends above `top`.

    `order` gives the classes of another record's order instead, so that the two can be compared line by line.
    """
    order = (np.argsort(-record.error, kind="stable") if order is None else order)[:most]
    names = [style.plain_text(record.names[k], 24) for k in order]
    high = (record.probability > record.frequency)[order]
    traces: list[dict[str, Any]] = []
    for name, members, colour in ((_HIGH, high, style.GAP_OVER), (_LOW, ~high, style.GAP_UNDER)):
        if members.any():
            k = np.flatnonzero(members)
            traces.append(
                {
                    "type": "bar",
                    "orientation": "h",
                    "name": name,
                    "x": record.error[order[k]],
                    "y": k,
                    "text": [names[i] for i in k],
                    "textposition": "none",
                    "customdata": np.stack([record.probability[order[k]], record.frequency[order[k]]], axis=1),
                    "marker": {"color": colour, "line": {"width": 0}},
                    "hovertemplate": "%{text}<br>error %{x:.4f}<br>mean probability %{customdata[0]:.2%}, frequency "
                    "%{customdata[1]:.2%}<extra></extra>",
                }
            )
    height = 90 + 22 * max(len(order), 4)
    figure = style.plotly_figure(traces, x=style.label("sce"), y="", height=height, bargap=0.35, legend=legend)
    figure.update_xaxes(showgrid=True, rangemode="tozero", nticks=5)
    if top is not None:
        figure.update_xaxes(range=[0, 1.04 * top])
    ticks = {"tickvals": list(range(len(order))), "ticktext": names, "showgrid": False}
    return figure.update_yaxes(autorange="reversed", **ticks)


def draw(record: ClassErrors, ax: Axes | None = None, *, title: str | None = None, most: int = 20) -> Axes:
    """A bar for each of the `most` worst classes, the worst on top."""
    order = np.argsort(-record.error, kind="stable")[:most]
    ax = style.axes_for(ax, height=0.9 + 0.14 * max(len(order), 4))
    y, error, high = np.arange(len(order)), record.error[order], (record.probability > record.frequency)[order]
    low = (record.probability <= record.frequency)[order]
    for name, members, look in (
        (_HIGH, high, style.OVERCONFIDENT_BARS),
        (_LOW, low, style.UNDERCONFIDENT_BARS),
    ):
        if members.any():
            ax.barh(y[members], error[members], 0.75, label=name, linewidth=0.4, **look)
    classes, mean = len(record.error), float(record.error.mean())
    if np.isnan(mean):
        style.write_empty(ax, "no rows")
    else:
        ax.axvline(mean, color=style.text_color(ax), linewidth=0.9, linestyle="--", label=f"mean of all {mean:.4f}")
    ax.set_yticks(y, labels=[style.shorten(record.names[k]) for k in order])
    ax.set_ylim(max(len(order), 1) - 0.4, -0.6)
    if title is None:
        title = f"{most} worst of {classes:,} classes" if classes > most else "Calibration by class"
    style.set_labels(ax, title, style.label("sce"), "")
    ax.tick_params(axis="y", labelsize=style.SMALL_SIZE, length=0)
    ax.locator_params(axis="x", nbins=4)
    style.legend(ax, loc="lower right", ncols=2)
    return ax


def summary(record: ClassErrors) -> str:
    """The mean error, the worst class, and how many probabilities are too high or too low."""
    worst = int(record.error.argmax())
    high = int((record.probability > record.frequency).sum())
    classes = len(record.names)
    return (
        f"The mean over {classes:,} classes is {record.error.mean():.4f}. Class {record.names[worst]} is worst with "
        f"{record.error[worst]:.4f}: its mean probability is {percent(record.probability[worst], 2)}, its frequency "
        f"{percent(record.frequency[worst], 2)}. The mean probability is too high for {high:,} classes and too low for "
        f"{classes - high:,}."
    )


def numbers(record: ClassErrors, most: int = 200) -> Table:
    """A row for each of the `most` worst classes."""
    order = np.argsort(-record.error, kind="stable")[:most]
    rows = [
        [
            record.names[k],
            format_number(record.error[k]),
            percent(record.probability[k], 2),
            percent(record.frequency[k], 2),
        ]
        for k in order
    ]
    return ["Class", "Error", "Mean probability", "Frequency"], rows
