"""Reliability diagram: accuracy against confidence in bins, with the band of a calibrated network.

With two classes it is the observed frequency of class 1 against its predicted probability.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Unpack

import numpy as np
from scipy.special import expit, logit

from trueup._core.bins import BINS, equal_width
from trueup._core.tally import Tally
from trueup._core.types import ArrayLike
from trueup.metrics.hypothesis_tests import consistency_of_tally
from trueup.metrics.resampling import Resampling, ResamplingOptions
from trueup.reports import style
from trueup.reports.audit import Audit
from trueup.reports.figures import Section, Table, band_title, panels, percent, stages, words_for
from trueup.reports.plot import Axis, Bars, Dots, Line, Mark, Plot, Rule, Text, draw_plot

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Lower and upper end of the strip of counts on the y-axis, below the accuracies and its caption
_STRIP = (-0.27, -0.17)
_MAX_BINS_WITH_LABELS = 20  # Largest number of bins with the number of rows above each bar of the strip


@dataclass(frozen=True, eq=False)
class Reliability:
    """Accuracy against confidence in bins, with the band in which a calibrated network's accuracy would lie."""

    edges: np.ndarray
    """Edges of the bins, one more than there are bins; the other arrays have one entry per bin, NaN if it is empty."""
    count: np.ndarray
    """Number of rows in each bin, or the sum of their weights."""
    confidence: np.ndarray
    """Mean confidence in each bin."""
    accuracy: np.ndarray
    """Accuracy in each bin."""
    low: np.ndarray
    """Lower end of the band."""
    high: np.ndarray
    """Upper end of the band."""
    level: float
    """Probability with which a calibrated network's accuracy in one bin lies in the band."""
    ece: float
    """Expected calibration error over these bins."""
    rows: int
    """Number of rows."""
    event: bool = False
    """Whether confidence is the probability of class 1, and accuracy its observed frequency."""
    quantiles: bool = False
    """Whether bins have equal numbers of rows; the diagram then shows only the range of the predictions."""

    @property
    def is_logit(self) -> bool:
        """Whether the diagram has log-odds axes, because the predictions are concentrated near 0 or 1."""
        return self.quantiles and not 0.1 <= float(np.median(self.confidence)) <= 0.9

    @property
    def ece_name(self) -> str:
        """Name of the calibration error."""
        return "adaptive ECE" if self.quantiles else "ECE"

    @property
    def outside(self) -> np.ndarray:
        """Which bins lie outside the band; an empty bin does not."""
        return (self.count > 0) & ((self.accuracy < self.low) | (self.accuracy > self.high))


def reliability(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    bins: int = BINS,
    top_label: bool = False,
    quantiles: bool | None = None,
    sample_weight: ArrayLike | None = None,
    clusters: ArrayLike | None = None,
    **resampling: Unpack[ResamplingOptions],
) -> Reliability:
    """Compute the reliability diagram: accuracy and mean confidence in each bin of confidence.

    With two classes these are the observed frequency and the mean predicted probability of class 1. The band is the
    central interval of Σ_i B_i / n_b over a bin's rows, where B_i is 1 with the probability c_i, the row's confidence.
    A calibrated network with these confidences lies in the band.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes).
    labels
        Classes, shape (n,).
    bins
        Number of bins.
    top_label
        Whether to use the predicted class also with two classes.
    quantiles
        Whether bins have equal numbers of rows instead of equal widths. By default they have if 99 % of the rows share
        two bins of equal width, which then hide most errors. Not available with `clusters`.
    sample_weight
        Weights of the rows, shape (n,).
    clusters
        Cluster of each row, shape (n,), where rows are correlated; the band then has their noise.
    **resampling
        The `level`, `n_resamples` and `seed` of the band.

    Returns
    -------
    Reliability
        The record.

    Examples
    --------
    >>> record = reliability(np.log([[0.9, 0.1], [0.8, 0.2], [0.3, 0.7], [0.6, 0.4]]), [0, 1, 1, 0], bins=2)
    >>> record.count, record.confidence.round(4), record.accuracy, f"{record.ece:.4f}"
    (array([3., 1.]), array([0.2333, 0.7   ]), array([0.33333333, 1.        ]), '0.1500')

    References
    ----------
    Bröcker and Smith, "Increasing the reliability of reliability diagrams" (2007), doi:10.1175/WAF993.1.
    """
    tally = Tally.of(logits, labels, bins=bins, top_label=top_label, sample_weight=sample_weight, clusters=clusters)
    simulation = Resampling(**resampling)
    top, edges = tally.score_bins, equal_width(bins)
    if quantiles is None:
        largest = float(np.sort(top.count)[-2:].sum())
        quantiles = clusters is None and bins >= 5 and tally.n >= 20 * bins and largest >= 0.99 * top.n
    if quantiles:
        top = tally.grid.binned(tally.grid.equal_mass_of_cell())
        edges, mean = top.edges.copy(), top.mean_confidence
        edges[[0, -1]] = max(2 * mean[0] - edges[1], 0.0), min(2 * mean[-1] - edges[-2], 1.0)  # about its mean
    test = consistency_of_tally(tally, simulation, metric="aece" if quantiles else "ece")
    columns = top.count, top.mean_confidence, top.accuracy, test.low, test.high
    return Reliability(edges, *columns, simulation.level, top.ece(), tally.n, tally.is_event, quantiles)


def plot_reliability(
    logits: ArrayLike, labels: ArrayLike, *, ax: Axes | None = None, title: str | None = None, **options: Any
) -> Axes:
    """Draw the reliability diagram with matplotlib.

    The figure is `.figure` of the result, and `figure.savefig("name.png")` writes it.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities, shape (n, classes).
    labels
        Classes, shape (n,).
    ax
        Axes to draw on; by default those of a new figure.
    title
        Title; an empty string draws none.
    **options
        Options of `reports.reliability`: `bins`, `top_label`, `sample_weight`, `clusters`, `level`.

    Returns
    -------
    Axes
        The axes.

    Examples
    --------
    >>> plot_reliability([[2.0, 0.0, -1.0], [0.0, 1.0, 0.0], [3.0, 0.0, 0.0]], [0, 1, 1]).get_ylabel()
    'Accuracy'
    """
    return draw_plot(plot(reliability(logits, labels, **options)), ax, title=title)


_TEXT = (
    "Predictions are binned by their confidence; each dot shows the accuracy in a bin. On the dotted diagonal, "
    "confidence equals accuracy; below it, the network is overconfident."
)
_EVENT_TEXT = (
    "Rows are binned by the predicted probability of the event, {}; each dot shows its observed frequency in a bin. "
    "On the dotted diagonal it happens as often as predicted; below it, the prediction is too high."
)


_QUANTILE_TEXT = (
    " The predictions lie in a narrow range, so the bins have equal numbers of rows and the axes show only that range. "
    "Near 0 or 1 the axes have a log-odds scale."
)
_STRIP_TEXT = " The strip below shows the number of rows in each bin on a log scale."


def section(audit: Audit) -> Section:
    """Return the section: the diagram before and after calibration."""
    scores, event = audit.scores, audit.scores.is_event
    options: dict[str, Any] = {"bins": audit.bins, "level": scores.level, "seed": audit.seed}
    options |= {"sample_weight": audit.sample_weight, "clusters": audit.clusters}
    words = words_for(event)
    dots = ("dot", f"{words.outcome}; the larger, the more rows"), ("outside", "outside the band")
    records = [reliability(*stage.arrays, **options) for stage in stages(audit)]
    kinds = {record.quantiles for record in records}
    scale = (_QUANTILE_TEXT if True in kinds else "") + (_STRIP_TEXT if False in kinds else "")
    return Section(
        name="reliability",
        title="Are its probabilities right?" if event else "Is its confidence right?",
        text=f"{_EVENT_TEXT.format(scores.event_name) if event else _TEXT} Dots inside the grey band are compatible "
        f"with {'calibrated predictions' if event else 'a calibrated network'}; those outside are diamonds.{scale}",
        legend=(*dots, ("over", words.over), ("under", words.under), ("band", band_title(scores.level))),
        panels=panels("reliability", audit, records),
    )


def plot(record: Reliability) -> Plot:
    """Plot dots for the accuracies, bars for the gaps, the band, and a strip with the numbers of rows."""
    full, (start, end) = record.count > 0, _range(record)

    def coordinate(share: np.ndarray) -> np.ndarray:
        return logit(np.clip(share, start, end)) if record.is_logit else share

    edges = coordinate(np.clip(record.edges, start, end))
    middle, width = (edges[1:] + edges[:-1])[full] / 2, np.diff(edges)[full]
    count, outside, shares = record.count[full], record.outside[full], (record.confidence, record.accuracy)
    confidence, accuracy, low, high = (coordinate(x[full]) for x in (*shares, record.low, record.high))
    gap = accuracy - confidence
    words, band = words_for(record.event), band_title(record.level)
    ends = coordinate(np.array([start, end]))
    marks: list[Mark] = [
        Line(x=ends, y=ends, color=style.MUTED, dash="dot", width=1),
        Bars(at=middle, size=high - low, base=low, width=width, color=style.BAND, name=band),
    ]
    for name, members, colour in ((words.over, gap < 0, style.GAP_OVER), (words.under, gap > 0, style.GAP_UNDER)):
        if members.any():
            bars = {"at": middle[members], "size": gap[members], "base": confidence[members]}
            marks.append(Bars(**bars, width=0.8 * width[members], color=colour, name=name))
    size = 6 + 8 * np.sqrt(count / max(count.max(initial=1.0), 1.0))
    text = f"{words.score} {{}}, {words.outcome} {{}}\nif calibrated {{}} to {{}}\n{{:,.0f}} rows"
    columns = np.stack([*shares, record.low, record.high, record.count], axis=1)[full]
    hover = [text.format(*map(percent, row[:4]), row[4]) for row in columns]
    marks.append(Dots(x=confidence, y=accuracy, size=size, color=style.BLUE, name=words.outcome, hover=hover))
    if outside.any():
        dots = {"x": confidence[outside], "y": accuracy[outside], "size": 1.25 * size[outside]}
        marks.append(Dots(**dots, color=style.VERMILION, marker="diamond", name="outside the band"))
    axes: dict[str, Any] = {"percent": True, "range": (float(ends[0]), float(ends[1]))}
    if record.is_logit:
        ticks = _logit_ticks(start, end)
        axes |= {"ticks": logit(ticks), "tick_labels": [f"{100 * tick:.6g} %" for tick in ticks]}
    x, y = (Axis(title=title.capitalize(), **axes) for title in (words.score, words.outcome))
    if not record.quantiles:
        marks += _strip(record, middle, width)
        y = replace(y, range=(_STRIP[0], 1.02), ticks=np.linspace(0, 1, 6))
    return Plot(
        title="Reliability",
        marks=marks,
        x=x,
        y=y,
        height=390,
        legend_title=f"{record.ece_name} {record.ece:.4f}, {record.rows:,} rows",
        empty="" if record.rows else "no rows",
    )


def _range(record: Reliability) -> tuple[float, float]:
    """Return the ends of the axes: of the predictions, accuracies and band with quantile bins, else 0 and 1."""
    if not record.quantiles:
        return 0.0, 1.0
    shares = np.concatenate([record.confidence, record.accuracy, record.low, record.high])
    if not record.is_logit:
        low, high = float(np.nanmin(shares)), float(np.nanmax(shares))
        margin = 0.05 * (high - low)
        return max(low - margin, 0.0), min(high + margin, 1.0)
    # Log-odds of 0 and 1 are infinite: those accuracies are drawn at the end of the axis.
    odds = logit(shares[(shares > 0) & (shares < 1)])
    return float(expit(odds.min() - 0.3)), float(expit(odds.max() + 0.3))


def _logit_ticks(start: float, end: float) -> np.ndarray:
    """Return at most six round probabilities between two ends, for a log-odds axis."""
    tails = np.outer(10.0 ** np.arange(-9, -1), (1, 2, 5)).ravel()
    ticks = np.concatenate([tails, [0.1, 0.2, 0.5, 0.8, 0.9], 1 - tails[::-1]])
    ticks = ticks[(ticks >= start) & (ticks <= end)]
    return ticks[:: max(math.ceil(len(ticks) / 6), 1)]


def _strip(record: Reliability, middle: np.ndarray, width: np.ndarray) -> list[Mark]:
    """Return the strip with the number of rows in each bin, below the accuracies."""
    count, largest = record.count[record.count > 0], record.count.max(initial=1.0)
    bottom, top = _STRIP
    share = np.log1p(count) / np.log1p(largest)  # a log scale, because one bin often has nearly all rows
    labels = [shorten_count(rows) for rows in count] if len(count) <= _MAX_BINS_WITH_LABELS else []
    bars = {"at": middle, "size": (top - bottom) * share, "base": np.full(len(count), bottom), "width": 0.8 * width}
    caption = f"rows in each bin, log scale, at most {largest:,.0f}" if record.rows else "rows in each bin"
    return [
        Bars(**bars, color=style.MUTED, hover=[f"{rows:,.0f} rows" for rows in count], labels=labels),
        Rule(at=0.0, horizontal=True, color=style.MUTED),
        Text(x=0.012, y=-0.04, text=caption, color=style.MUTED),
    ]


def shorten_count(rows: float) -> str:
    """Abbreviate a number of rows.

    >>> [shorten_count(rows) for rows in (0.4, 7, 950, 12_345, 2_400_000)]
    ['<1', '7', '950', '12k', '2.4M']
    """
    if rows < 1:
        return "<1"
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if rows >= size:
            return f"{rows / size:.2g}{unit}" if rows < 100 * size else f"{rows / size:.0f}{unit}"
    return f"{rows:.0f}"


def summary(record: Reliability) -> str:
    """Return the ECE, the number of bins outside the band, and the bin that adds most to the ECE."""
    full = record.count > 0
    gap = np.where(full, record.confidence - record.accuracy, 0.0)
    most = int(np.argmax(np.abs(gap) * record.count))
    words = words_for(record.event)
    side = words.over if gap[most] > 0 else words.under
    return (
        f"Over {record.rows:,} rows, {words.score} and {words.outcome} differ by {record.ece:.4f} on average "
        f"({record.ece_name}). Outside the band of a calibrated network: {int(record.outside.sum()) or 'none'} of "
        f"{int(full.sum())} bins. "
        f"The bin that adds most to it has {words.score} {percent(record.confidence[most])} and {words.outcome} "
        f"{percent(record.accuracy[most])}: {side}."
    )


def numbers(record: Reliability) -> Table:
    """Return one row per bin that is not empty."""
    score, outcome = words_for(record.event)[:2]
    head = [score.capitalize(), "Rows", f"Mean {score}", outcome.capitalize(), band_title(record.level)]
    rows = []
    for k in np.flatnonzero(record.count > 0):
        between = f"{100 * record.edges[k]:.3g} % – {100 * record.edges[k + 1]:.3g} %"
        band = f"{percent(record.low[k])} – {percent(record.high[k])}"
        means = percent(record.confidence[k]), percent(record.accuracy[k])
        rows.append([between, f"{record.count[k]:,.0f}", *means, band])
    return head, rows
