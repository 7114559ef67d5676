"""Style of figures: colours, names of metrics, and helpers for matplotlib axes.

The colours are those of Okabe and Ito, "Color universal design" (2008). Markers, dashes and hatches repeat what a
colour means, so that no figure depends on colour alone.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLACK, ORANGE, SKY, GREEN = "#000000", "#E69F00", "#56B4E9", "#009E73"
YELLOW, BLUE, VERMILION, PURPLE = "#F0E442", "#0072B2", "#D55E00", "#CC79A7"
GREY = "#8C8C8C"
"""For background lines such as the diagonal."""

SERIES = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, BLACK)
"""Colours of curves, in order; yellow is left out because it is hard to see on white."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_GAPS = (4.0, 1.5), (1.0, 1.2), (5.0, 1.5, 1.0, 1.5), (3.0, 1.0, 1.0, 1.0, 1.0, 1.0), (7.0, 2.0), (2.0, 2.0)
DASHES: tuple[str | tuple[int, tuple[float, ...]], ...] = ("-", *((0, gaps) for gaps in _GAPS))

RIGHT, WRONG = BLUE, VERMILION
BETTER, WORSE = GREEN, VERMILION

LABELS = {"confidence": "Mean confidence", "predicted": "Mean predicted", "observed": "Observed rate"}
LABELS |= {"nll": "NLL (nats)", "entropy": "Mean entropy (nats)", "loss": "Objective (nats)"}
LABELS |= {
    "brier": "Brier score",
    "top_label_brier": "Top-label Brier score",
    "event_brier": "Brier score of the event",
}
LABELS |= {"ece": "ECE", "aece": "Adaptive ECE", "smooth_ece": "Smooth ECE", "sce": "Class-wise calibration error"}
LABELS |= {"mce": "Maximum calibration error", "rmsce": "Root mean square calibration error", "ks": "KS error"}
LABELS |= {"average_ce": "Average calibration error", "delta_norm": "Norm of the shift δ"}
LABELS |= {"aurc": "AURC", "eaurc": "Excess AURC", "auroc": "AUROC"}
LABELS |= {"misclassification_auroc": "AUROC of errors", "misclassification_aupr": "AUPR"}
_HIGHER = frozenset({"accuracy", "top_k", "auroc", "misclassification_auroc", "misclassification_aupr"})
_NEITHER = frozenset({"confidence", "entropy", "normalised_entropy", "temperature", "delta_norm", "gamma"})


def label(metric: str) -> str:
    """Return a metric's name for an axis, with its unit if it has one.

    >>> label("nll"), label("thresholded_sce")
    ('NLL (nats)', 'Thresholded sce')
    """
    return LABELS.get(metric, metric.replace("_", " ").capitalize())


def better(metric: str) -> int:
    """Return 1 if higher is better, −1 if lower is better, 0 if neither.

    >>> better("accuracy"), better("ece"), better("entropy")
    (1, -1, 0)
    """
    return 1 if metric in _HIGHER else 0 if metric in _NEITHER else -1


INK, MUTED, LINE, PAPER = "#1c2024", "#60646c", "#e3e5e8", "#ffffff"
"""Colours of text, secondary text, grid lines and the background."""
BAND = "rgba(96,100,108,0.17)"
GAP_OVER, GAP_UNDER = "rgba(213,94,0,0.28)", "rgba(86,180,233,0.38)"

_VARIABLES = {INK: "ink", MUTED: "muted", LINE: "line", PAPER: "paper", BAND: "band", GREY: "grey", BLACK: "ink"}
_VARIABLES |= {GAP_OVER: "over", GAP_UNDER: "under", BLUE: "blue", VERMILION: "vermilion"}
_VARIABLES |= {GREEN: "green", PURPLE: "purple"}
CSS = {color: f"var(--chart-{name})" for color, name in _VARIABLES.items()}
"""Colour → its variable in chart.css, which has another value on a dark page."""

FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif'


COLUMN = 3.3
"""Width of one column of a paper, in inches."""
# Relative font sizes follow the user's matplotlib settings. At a font size of 10 points they are 8.3, 6.9 and 5.8.
TITLE_SIZE, TICK_SIZE, SMALL_SIZE = "small", "x-small", "xx-small"


def axes_for(ax: Axes | None, *, height: float = 2.6) -> Axes:
    """Return `ax`, or the axes of a new figure one column wide; pyplot does not register it, so no memory leaks."""
    if ax is not None:
        return ax
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("drawing needs matplotlib: pip install 'trueup[report]'") from None
    figure = Figure(figsize=(COLUMN, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure.add_subplot()


def set_labels(ax: Axes, title: str | None, x: str, y: str) -> None:
    """Set title, labels and ticks, without a frame at the top and on the right."""
    if title:
        ax.set_title(title, fontsize=TITLE_SIZE, loc="left")
    ax.set_xlabel(x, fontsize=TITLE_SIZE)
    ax.set_ylabel(y, fontsize=TITLE_SIZE)
    ax.tick_params(which="both", labelsize=TICK_SIZE)
    ax.spines[["top", "right"]].set_visible(False)


def text_color(ax: Axes) -> Any:
    """Return the colour of the axes' text: black, or a light colour on a dark background."""
    return ax.xaxis.label.get_color()


def legend(ax: Axes, *, other: Axes | None = None, loc: str = "best", ncols: int = 1, **options: Any) -> None:
    """Add a small legend for the artists of these axes, and of `other` axes with the same frame.

    With `loc="best"` it covers as little as possible; with an upper or lower location the y-axis is extended for it.
    """
    both = [axes for axes in (ax, other) if axes is not None]
    entries = [entry for axes in both for entry in zip(*axes.get_legend_handles_labels(), strict=True)]
    if not entries:
        return
    if loc != "best":
        for axes in both:
            _extend_y(axes, math.ceil(len(entries) / ncols), upper=loc.startswith("upper"))
    look = {"loc": loc, "ncols": ncols, "fontsize": SMALL_SIZE, "title_fontsize": SMALL_SIZE} | options
    look |= {"handlelength": 1.8, "labelspacing": 0.35, "columnspacing": 1.2, "borderpad": 0.35, "framealpha": 0.85}
    drawn = both[-1].legend(*zip(*entries, strict=True), **look)  # on top of all curves
    drawn.get_frame().set_linewidth(0.4)


def _extend_y(ax: Axes, lines: int, *, upper: bool) -> None:
    """Extend the y-axis at one end by the height of a legend with this number of lines."""
    from matplotlib.font_manager import FontProperties

    points, whole = (box.height / ax.figure.dpi * 72 for box in (ax.get_window_extent(), ax.figure.bbox))
    points = min(points, max(whole - 54, points / 2))  # the height that remains below the title and above the labels
    share = min(0.6, (1.45 * lines + 1.6) * FontProperties(size=SMALL_SIZE).get_size_in_points() / max(points, 1.0))
    (_, low), (_, high) = ax.transData.transform([(1.0, end) for end in ax.get_ylim()])  # also for a log scale
    more = (high - low) * share / (1 - share)
    end = float(ax.transData.inverted().transform((0.0, high + more if upper else low - more))[1])
    ax.set_ylim(*((ax.get_ylim()[0], end) if upper else (end, ax.get_ylim()[1])))


def line_style(index: int) -> dict[str, Any]:
    """Return colour, dash and marker of the curve with this index; neighbours differ in all three."""
    turn, at = divmod(index, len(SERIES))
    look = {"color": SERIES[at], "linestyle": DASHES[(at + turn) % len(DASHES)], "markersize": 3.5, "linewidth": 1.2}
    return look | {"marker": MARKERS[(at + 2 * turn) % len(MARKERS)]}


def write_empty(ax: Axes, why: str) -> None:
    """Write the reason for an empty plot in the middle of the axes."""
    ax.text(0.5, 0.5, why, transform=ax.transAxes, ha="center", va="center", fontsize=TICK_SIZE, color=GREY)


def shorten(name: str, max_length: int = 20) -> str:
    """Shorten a name to fit next to a bar; both ends stay, because names are often numbered.

    >>> shorten("a name that is much too long, number 12")
    'a name tha…number 12'
    """
    if len(name) <= max_length:
        return name
    return f"{name[: max_length // 2]}…{name[1 - max_length + max_length // 2 :]}"


def split_axes(ax: Axes) -> Axes:
    """Move the axes to the upper half of their area, and return new ones for the lower half with the same x-axis."""
    figure, cell = ax.figure, ax.get_subplotspec()
    if cell is None:  # axes with a position and no grid
        x, y, width, height = ax.get_position(original=True).bounds
        ax.set_position((x, y + 0.55 * height, width, 0.45 * height))
        return figure.add_axes((x, y, width, 0.45 * height), sharex=ax)
    halves = cell.subgridspec(2, 1, hspace=0.1)
    ax.set_subplotspec(halves[0])
    return figure.add_subplot(halves[1], sharex=ax)


def plain_log_ticks(ax: Axes, values: np.ndarray) -> None:
    """Set ticks at 1, 2 and 5 times the powers of ten, in plain numbers, on a logarithmic x-axis over these values."""
    low, high = float(values.min()), float(values.max())
    powers = 10.0 ** np.arange(np.floor(np.log10(low)) - 1, np.ceil(np.log10(high)) + 1)
    ticks = np.array([tick for tick in np.outer(powers, (1, 2, 5)).ravel() if low <= tick <= high * (1 + 1e-9)])
    if len(ticks) > 8:
        ticks = powers[(powers >= low) & (powers <= high)]
    ax.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
