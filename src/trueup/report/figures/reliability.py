"""The reliability diagram: accuracy against confidence in bins, with the band of a calibrated network.

Of two classes it is how often class 1 happens against its predicted probability.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trueup.core.bins import BINS, equal_width
from trueup.core.formatting import format_percent
from trueup.core.tally import Tally
from trueup.metrics.hypothesis_tests import consistency_of_tally
from trueup.report import style
from trueup.report.audit import Audit
from trueup.report.figures import Panel, Section, Table, percent, stages

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure

_STRIP = (-0.25, -0.11)
"""Ends of the strip of counts, below the accuracies and its own caption."""
_LABELLED = 20
"""Up to so many bins have their number of rows written above its bar."""


@dataclass(frozen=True, eq=False)
class Reliability:
    """Accuracy against confidence in bins, with the band in which a calibrated network's accuracy would lie."""

    edges: np.ndarray
    """Of the bins, one more than there are bins; the other arrays have one entry a bin, NaN where it is empty."""
    count: np.ndarray
    confidence: np.ndarray
    """The mean in each bin."""
    accuracy: np.ndarray
    low: np.ndarray
    """Ends of the band."""
    high: np.ndarray
    level: float
    """The probability with which a calibrated network's accuracy lies in the band, bin by bin."""
    ece: float
    rows: int
    event: bool = False
    """Whether it is the probability of class 1 and how often that happens, instead of confidence and accuracy."""

    @property
    def outside(self) -> np.ndarray:
        """Which bins are further off than the band allows; none that are empty."""
        return (self.count > 0) & ((self.accuracy < self.low) | (self.accuracy > self.high))

    @property
    def words(self) -> Words:
        """How its parts are called."""
        return _EVENT_WORDS if self.event else _WORDS


class Words(NamedTuple):
    """How the parts of a diagram are called."""

    score: str
    outcome: str
    over: str
    under: str


_WORDS = Words("confidence", "accuracy", "overconfident", "underconfident")
_EVENT_WORDS = Words("predicted probability", "observed frequency", "predicted too high", "predicted too low")


def reliability(
    logits: Any,
    labels: Any,
    *,
    bins: int = BINS,
    fold: bool = False,
    weights: Any = None,
    clusters: Any = None,
    level: float = 0.95,
    n_resamples: int = 1000,
    seed: int = 0,
) -> Reliability:
    """The reliability diagram's numbers: accuracy and mean confidence in each bin of confidence.

    Of two classes these are the frequency and the mean predicted probability of class 1; `fold=True` takes the
    predicted class. The band holds the middle `level` of Σ_i B_i / n_b over a bin's rows, B_i drawn right with chance
    c_i, the row's own confidence: what a calibrated network with these confidences would show. With `clusters` the band
    has the noise that correlated rows have.

    >>> record = reliability(np.log([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]), [0, 1, 1, 0], bins=2)
    >>> record.count, record.confidence.round(4), record.accuracy, f"{record.ece:.4f}"
    (array([3., 1.]), array([0.2333, 0.7   ]), array([0.33333333, 1.        ]), '0.1500')

    Bröcker and Smith (2007).
    """
    tally = Tally.of(logits, labels, bins=bins, fold=fold, weights=weights, clusters=clusters)
    test, top = consistency_of_tally(tally, level=level, n_resamples=n_resamples, seed=seed), tally.top
    columns = top.count, top.mean_confidence, top.accuracy, test.low, test.high
    return Reliability(equal_width(bins), *columns, level, top.ece(), tally.n, tally.is_event)


def plot_reliability(
    logits: Any, labels: Any, *, ax: Axes | None = None, title: str | None = None, **options: Any
) -> Axes:
    """Draw the reliability diagram in one line, on matplotlib Axes that are given or new; return them.

    The options are those of `report.reliability`: `bins`, `fold`, `weights`, `level`. The figure is `.figure`, and
    `figure.savefig("name.png")` writes it.

    >>> plot_reliability([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]], [0, 1, 1]).get_ylabel()
    'Accuracy'
    """
    return draw(reliability(logits, labels, **options), ax, title=title)


_TEXT = (
    "Predictions are put into bins by their confidence; each dot shows the accuracy of a bin. On the dotted diagonal, "
    "confidence equals accuracy; below it, the network is overconfident. Dots inside the grey band are no further off "
    "than chance would put a calibrated network; those outside are diamonds. The strip below shows the number of rows "
    "in each bin, its bars on a log scale."
)
_EVENT_TEXT = (
    "Rows are put into bins by the predicted probability of the event, {}; each dot shows how often it happens in "
    "a bin. On the dotted diagonal it happens as often as predicted; below it, the prediction is too high. Dots inside "
    "the grey band are no further off than chance would put calibrated predictions; those outside are diamonds. The "
    "strip below shows the number of rows in each bin, its bars on a log scale."
)


def section(audit: Audit, names: Sequence[str] | None) -> Section:
    """The diagram before and after calibration."""
    options: dict[str, Any] = {
        "bins": audit.bins,
        "level": audit.scores.level,
        "seed": audit.seed,
        "weights": audit.weights,
        "clusters": audit.clusters,
    }
    event = audit.scores.is_event
    words = _EVENT_WORDS if event else _WORDS
    return Section(
        name="reliability",
        title="Are its probabilities right?" if event else "Is its confidence right?",
        text=_EVENT_TEXT.format(audit.scores.event_name) if event else _TEXT,
        legend=(
            ("dot", f"{words.outcome}; the larger, the more rows"),
            ("outside", "outside the band"),
            ("over", words.over),
            ("under", words.under),
            ("band", f"{format_percent(audit.scores.level)} band if calibrated"),
        ),
        panels=tuple(
            Panel(f"reliability-{stage.name}", stage.title, reliability(*stage.pair, **options), {"legend": False})
            for stage in stages(audit)
        ),
    )


def chart(record: Reliability, *, height: int = 380, legend: bool = True) -> Figure:
    """Dots for the accuracies, bars for the gaps, and the band."""
    full = record.count > 0
    middle, width = (record.edges[1:] + record.edges[:-1])[full] / 2, np.diff(record.edges)[full]
    confidence, accuracy, count = record.confidence[full], record.accuracy[full], record.count[full]
    gap = accuracy - confidence
    traces: list[dict[str, Any]] = [
        {
            "type": "bar",
            "name": f"{format_percent(record.level)} band if calibrated",
            "x": middle,
            "y": (record.high - record.low)[full],
            "base": record.low[full],
            "width": width,
            "marker": {"color": style.BAND, "line": {"width": 0}},
            "hoverinfo": "skip",
        }
    ]
    for name, members, colour in (
        (record.words.over, gap < 0, style.GAP_OVER),
        (record.words.under, gap > 0, style.GAP_UNDER),
    ):
        if members.any():
            traces.append(
                {
                    "type": "bar",
                    "name": name,
                    "x": middle[members],
                    "y": gap[members],
                    "base": confidence[members],
                    "width": 0.72 * width[members],
                    "marker": {"color": colour, "line": {"width": 0}},
                    "hoverinfo": "skip",
                }
            )
    traces.append(
        {
            "type": "scatter",
            "mode": "markers",
            "name": record.words.outcome,
            "x": confidence,
            "y": accuracy,
            "customdata": np.stack([count, record.low[full], record.high[full]], axis=1),
            "marker": {
                "color": [style.VERMILION if off else style.BLUE for off in record.outside[full]],
                "symbol": ["diamond" if off else "circle" for off in record.outside[full]],
                "size": 6 + 8 * np.sqrt(count / max(count.max(initial=1.0), 1.0)),
                "opacity": 1,
                "line": {"width": 1, "color": style.PAPER},
            },
            "cliponaxis": False,
            "hovertemplate": f"{record.words.score} %{{x:.1%}}, {record.words.outcome} %{{y:.1%}}<br>"
            "if calibrated %{customdata[1]:.1%} to %{customdata[2]:.1%}<br>%{customdata[0]:,.0f} rows<extra></extra>",
        }
    )
    traces.append(_count_bars(record, full, middle, width))
    diagonal = {"type": "line", "x0": 0, "y0": 0, "x1": 1, "y1": 1, "layer": "below"}
    figure = style.plotly_figure(
        traces,
        x=record.words.score.capitalize(),
        y=record.words.outcome.capitalize(),
        height=height,
        barmode="overlay",
        shapes=[diagonal | {"line": {"color": style.MUTED, "width": 1, "dash": "dot"}}],
        legend=legend,
    )
    figure.update_xaxes(range=[0, 1.01], tickformat=".0%", dtick=0.2)
    return figure.update_yaxes(range=[-0.21, 1.02], tickformat=".0%", tickvals=np.linspace(0, 1, 6))


def _count_bars(record: Reliability, full: np.ndarray, middle: np.ndarray, width: np.ndarray) -> dict[str, Any]:
    """How many rows each bin holds, on a log scale, below the diagram: nearly all lie in few bins."""
    count = record.count[full]
    return {
        "type": "bar",
        "name": "rows, log scale",
        "x": middle,
        "y": 0.1 * np.log1p(count) / np.log1p(count.max(initial=1.0)),
        "base": np.full(len(count), -0.2),
        "text": [shorten_count(rows) for rows in count] if len(count) <= _LABELLED else None,
        "textposition": "outside",
        "textangle": 0,
        "textfont": {"size": 10, "color": style.MUTED},
        "cliponaxis": False,
        "width": 0.8 * width,
        "customdata": count,
        "marker": {"color": style.MUTED, "line": {"width": 0}},
        "hovertemplate": "%{customdata:,.0f} rows<extra></extra>",
    }


def shorten_count(rows: float) -> str:
    """A number of rows in few letters.

    >>> [shorten_count(rows) for rows in (0.4, 7, 950, 12_345, 2_400_000)]
    ['<1', '7', '950', '12k', '2.4M']
    """
    if rows < 1:
        return "<1"
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if rows >= size:
            return f"{rows / size:.2g}{unit}" if rows < 100 * size else f"{rows / size:.0f}{unit}"
    return f"{rows:.0f}"


def draw(record: Reliability, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Lines for the accuracies, bars for the gaps, the band, and a strip of counts below."""
    ax = style.axes_for(ax, height=3.3)
    left, width, full = record.edges[:-1], np.diff(record.edges), record.count > 0
    ax.plot([0, 1], [0, 1], color=style.IDEAL, linewidth=0.8, linestyle="--", zorder=1)
    band: dict[str, Any] = {"color": style.GREY, "alpha": 0.35, "linewidth": 0}
    name = f"{format_percent(record.level)} band if calibrated"
    ax.bar(
        left[full], (record.high - record.low)[full], width[full], record.low[full], align="edge", label=name, **band
    )
    gap = record.accuracy - record.confidence
    for name, members, look in (
        (record.words.over, gap < 0, style.OVERCONFIDENT_BARS),
        (record.words.under, gap > 0, style.UNDERCONFIDENT_BARS),
    ):
        if members.any():
            bars = left[members] + 0.1 * width[members], gap[members], 0.8 * width[members], record.confidence[members]
            ax.bar(*bars, align="edge", label=name, linewidth=0.4, **look)
    ends = left[full], left[full] + width[full]
    line: dict[str, Any] = {"color": style.text_color(ax), "linewidth": 1.4, "clip_on": False}
    ax.hlines(record.accuracy[full], *ends, label=record.words.outcome, **line)
    if record.outside.any():
        off: dict[str, Any] = {"color": style.VERMILION, "marker": "D", "markersize": 3.5, "linestyle": ""}
        centre = (left + width / 2)[record.outside]
        ax.plot(centre, record.accuracy[record.outside], label="outside the band", clip_on=False, zorder=4, **off)
    _draw_counts(ax, record, full)
    style.set_labels(ax, "Reliability" if title is None else title, *(word.capitalize() for word in record.words[:2]))
    ax.set(xlim=(0, 1), ylim=(_STRIP[0], 1))
    if record.rows:
        style.legend(ax, title=f"ECE {record.ece:.4f}, {record.rows:,} rows", alignment="left")
    else:
        style.write_empty(ax, "no rows")
    return ax


def _draw_counts(ax: Axes, record: Reliability, full: np.ndarray) -> None:
    """How many rows each bin holds, on a log scale, since nearly all lie in few."""
    low, high = _STRIP
    most = record.count.max(initial=1.0)
    height = np.log1p(record.count) / np.log1p(most) * (high - low)
    left, width = record.edges[:-1] + 0.1 * np.diff(record.edges), 0.8 * np.diff(record.edges)
    ax.bar(left[full], height[full], width[full], low, align="edge", color=style.GREY, linewidth=0)
    ax.axhline(0, color=style.text_color(ax), linewidth=0.6)
    caption = f"rows in each bin, log scale, at most {most:,.0f}" if record.rows else "rows in each bin"
    ax.text(0.012, high / 2, caption, fontsize=style.SMALL_SIZE, va="center")
    ax.set_yticks(np.linspace(0, 1, 6))


def summary(record: Reliability) -> str:
    """The ECE, the bins outside the band, and the bin that adds most to the ECE."""
    full = record.count > 0
    gap = np.where(full, record.confidence - record.accuracy, 0.0)
    most = int(np.argmax(np.abs(gap) * record.count))
    words = record.words
    side = words.over if gap[most] > 0 else words.under
    return (
        f"Over {record.rows:,} rows, {words.score} and {words.outcome} differ by {record.ece:.3f} on average (ECE). "
        f"Outside the band of a calibrated network: {int(record.outside.sum()) or 'none'} of {int(full.sum())} bins. "
        f"The bin that adds most to the ECE has {words.score} {percent(record.confidence[most])} and {words.outcome} "
        f"{percent(record.accuracy[most])}: {side}."
    )


def numbers(record: Reliability) -> Table:
    """A row for each bin that holds any."""
    claim, outcome = record.words[:2]
    heads = claim.capitalize(), f"Mean {claim}", outcome.capitalize()
    head = [heads[0], "Rows", *heads[1:], f"{format_percent(record.level)} band if calibrated"]
    rows = []
    for k in np.flatnonzero(record.count > 0):
        between = f"{100 * record.edges[k]:.3g} % – {100 * record.edges[k + 1]:.3g} %"
        band = f"{percent(record.low[k])} – {percent(record.high[k])}"
        means = percent(record.confidence[k]), percent(record.accuracy[k])
        rows.append([between, f"{record.count[k]:,.0f}", *means, band])
    return head, rows
