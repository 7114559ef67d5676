"""The histogram of confidences, right and wrong predictions apart."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trueup.core.arrays import as_tensors
from trueup.core.bins import Bins
from trueup.core.formatting import format_percent
from trueup.core.row_scores import is_event
from trueup.report import style
from trueup.report.audit import Audit
from trueup.report.figures import Panel, Section, Table, percent, stages

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure


@dataclass(frozen=True, eq=False)
class ConfidenceHistogram:
    """How many predictions have which confidence, right and wrong ones apart."""

    edges: np.ndarray
    right: np.ndarray
    wrong: np.ndarray
    """Numbers of rows, or their weights, as are those of `right`."""
    mean: float
    """Mean confidence."""
    accuracy: float
    event: bool = False
    """Whether it is the probability of class 1, and where that happened, instead of confidence and right ones."""

    @property
    def words(self) -> tuple[str, str, str, str]:
        """What its axis, bars and first line are called."""
        if self.event:
            return "predicted probability", "happened", "did not", "observed"
        return "confidence", "right", "wrong", "accuracy"

    @property
    def mean_word(self) -> str:
        """What its second line is called."""
        return "mean predicted" if self.event else "mean confidence"


def confidence_histogram(
    logits: Any, labels: Any, *, bins: int = 20, fold: bool = False, weights: Any = None
) -> ConfidenceHistogram:
    """How many predictions of each confidence were right, and how many wrong.

    Of two classes it is the probability of class 1, and where that happened; `fold=True` takes the predicted class.
    With `weights`, one a row, they are sums of weights.

    >>> record = confidence_histogram(np.log([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7]]), [0, 1, 1], bins=4)
    >>> record.right, record.wrong, f"{record.mean:.4f} {record.accuracy:.4f}"
    (array([1., 0., 1., 0.]), array([1., 0., 0., 0.]), '0.3333 0.6667')
    """
    z, y = as_tensors(logits, labels)
    tally = Bins.of(z, y, bins=bins, fold=fold, weights=weights)
    n = tally.n or np.nan
    mean, accuracy = float(tally.confidence.sum() / n), float(tally.hits.sum() / n)
    return ConfidenceHistogram(tally.edges, tally.hits, tally.count - tally.hits, mean, accuracy, is_event(z, fold))


def section(audit: Audit, names: Sequence[str] | None) -> Section:
    """The histogram before and after calibration, on the same scale."""
    records = [confidence_histogram(*stage.pair, weights=audit.weights) for stage in stages(audit)]
    total = float((records[0].right + records[0].wrong).sum())
    top = max(float((record.right + record.wrong).max()) for record in records) / total
    options = {"top": top, "legend": False}
    _, right, wrong, rate = records[0].words
    event = records[0].event
    named = audit.scores.event_name
    about = f"How many rows have which predicted probability of {named}, and in how many of them it happened."
    return Section(
        name="confidence",
        title="What does it predict?" if event else "How confident is it?",
        text=about if event else "How many predictions have which confidence, and how many of each are wrong.",
        legend=(("right", right), ("wrong", wrong), ("says", records[0].mean_word), ("hits", rate)),
        panels=tuple(
            Panel(f"confidence-{stage.name}", stage.title, record, options)
            for stage, record in zip(stages(audit), records, strict=True)
        ),
    )


def chart(record: ConfidenceHistogram, *, height: int = 300, top: float | None = None, legend: bool = True) -> Figure:
    """Stacked bars, with lines at the mean confidence and the accuracy; the y-axis ends above the share `top`."""
    middle, width = (record.edges[1:] + record.edges[:-1]) / 2, np.diff(record.edges)
    total = max(float((record.right + record.wrong).sum()), 1.0)
    score, right, wrong, rate = record.words
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": name,
            "x": middle,
            "y": count / total,
            "width": 0.86 * width,
            "customdata": count,
            "marker": {"color": colour, "line": {"width": 0}},
            "hovertemplate": f"{score} near %{{x:.0%}}<br>{name}: %{{customdata:,.0f}} rows<extra></extra>",
        }
        for name, count, colour in ((right, record.right, style.BLUE), (wrong, record.wrong, style.VERMILION))
    ]
    high = 1.08 * (float((record.right + record.wrong).max(initial=0.0)) / total if top is None else top)
    traces += [
        {"type": "scatter", "mode": "lines", "x": [at, at], "y": [0, high], "hoverinfo": "skip"}
        | {"name": f"{name} {format_percent(at, 1)}", "line": {"color": style.INK, "width": 1.2, "dash": dash}}
        for name, at, dash in ((record.mean_word, record.mean, "dot"), (rate, record.accuracy, "solid"))
    ]
    options: dict[str, Any] = {"barmode": "stack", "legend_traceorder": "normal"}
    figure = style.plotly_figure(
        traces, x=score.capitalize(), y="Share of rows", height=height, legend=legend, **options
    )
    figure.update_xaxes(range=[0, 1.01], tickformat=".0%", dtick=0.2)
    return figure.update_yaxes(tickformat=".0%", nticks=5, range=[0, high or 1])


def draw(record: ConfidenceHistogram, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Steps of right and wrong predictions on a log scale, with lines at the mean confidence and the accuracy."""
    ax = style.axes_for(ax)
    score, right, wrong, rate = record.words
    floor = 0.5  # below one row, for nothing lies at 0 on a logarithmic scale
    for name, count, colour, hatch in (
        (right, record.right, style.RIGHT, ""),
        (wrong, record.wrong, style.WRONG, "/////"),
    ):
        look: dict[str, Any] = {"facecolor": colour + "50", "edgecolor": colour, "hatch": hatch, "linewidth": 1.0}
        label = f"{name} ({count.sum():,.0f})"
        ax.stairs(np.maximum(count, floor), record.edges, baseline=floor, fill=True, label=label, **look)
    if record.right.any() or record.wrong.any():
        ink = style.text_color(ax)
        for value, name, dash in (
            (record.mean, record.mean_word, (0, (4.0, 1.5))),
            (record.accuracy, rate, "-"),
        ):
            ax.axvline(value, color=ink, linewidth=1, linestyle=dash, label=f"{name} {100 * value:.1f} %")
    else:
        style.write_empty(ax, "no rows")
    ax.set_yscale("log")
    ax.set(xlim=(0, 1), ylim=(floor, 1.3 * max(record.right.max(), record.wrong.max(), 10)))
    named = "Predicted probability" if record.event else "Confidence of right and wrong predictions"
    style.set_labels(ax, named if title is None else title, score.capitalize(), "Rows")
    style.legend(ax, loc="upper left", ncols=2)
    return ax


def summary(record: ConfidenceHistogram) -> str:
    """Mean confidence and accuracy, and the predictions of highest confidence."""
    total = record.right + record.wrong
    last = total[-1] / max(total.sum(), 1.0)
    wrong = record.wrong[-1] / max(total[-1], 1.0)
    if record.event:
        return (
            f"The mean predicted probability is {percent(record.mean)} (dotted line), the observed frequency "
            f"{percent(record.accuracy)} (solid line). {percent(last, 0)} of the rows have a predicted probability "
            f"above {100 * record.edges[-2]:.3g} %"
            + (f"; in {percent(1 - wrong)} of those it happened." if total[-1] else ".")
        )
    return (
        f"The mean confidence is {percent(record.mean)} (dotted line), the accuracy {percent(record.accuracy)} "
        f"(solid line). {percent(last, 0)} of the rows have a confidence above {100 * record.edges[-2]:.3g} %; "
        f"{percent(wrong)} of those are wrong."
    )


def numbers(record: ConfidenceHistogram) -> Table:
    """A row for each bin that holds any."""
    rows = [
        [f"{100 * a:.3g} % – {100 * b:.3g} %", f"{right:,.0f}", f"{wrong:,.0f}"]
        for a, b, right, wrong in zip(record.edges[:-1], record.edges[1:], record.right, record.wrong, strict=True)
        if right + wrong
    ]
    return [word.capitalize() for word in record.words[:3]], rows
