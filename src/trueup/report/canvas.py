"""What all drawings share: an axes to draw on, its words, and how curves are told apart without their colours."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from trueup.report.palette import DASHES, GREY, HATCHES, MARKERS, SERIES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLUMN = 3.3
"""Inches: the width of one column of a paper."""
# In matplotlib's own relative sizes, so that drawings follow the reader's settings; at a font size of 10 points they
# are 8.3, 6.9 and 5.8, legible in a column.
WORDS, TICKS, SMALL = "small", "x-small", "xx-small"


def axes_for(ax: Axes | None, *, height: float = 2.6) -> Axes:
    """The axes given, or those of a new figure of one column that pyplot does not know of, so that nothing leaks."""
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


def dress(ax: Axes, title: str | None, x: str, y: str) -> None:
    """Title, labels and ticks, and no frame where nothing is read off."""
    if title:
        ax.set_title(title, fontsize=WORDS, loc="left")
    ax.set_xlabel(x, fontsize=WORDS)
    ax.set_ylabel(y, fontsize=WORDS)
    ax.tick_params(which="both", labelsize=TICKS)
    ax.spines[["top", "right"]].set_visible(False)


def ink(ax: Axes) -> Any:
    """The colour in which these axes write: black, but for those who draw on a dark ground."""
    return ax.xaxis.label.get_color()


def legend(ax: Axes, *, beside: Axes | None = None, at: str = "best", columns: int = 1, **options: Any) -> None:
    """A legend in small print of these axes' artists, and of those of axes `beside` them with the same place.

    It lies where it covers least, or at the upper or lower end of the axes, in room that is made for it there.
    """
    found = [part.get_legend_handles_labels() for part in (ax, beside) if part is not None]
    handles, names = [handle for part in found for handle in part[0]], [name for part in found for name in part[1]]
    if not handles:
        return
    if at != "best":
        for part in (ax, beside):
            if part is not None:
                _make_room(part, math.ceil(len(handles) / columns), upper=at.startswith("upper"))
    looks: dict[str, Any] = {"loc": at, "ncols": columns, "fontsize": SMALL, "title_fontsize": SMALL, **options}
    looks |= {"handlelength": 1.8, "labelspacing": 0.35, "columnspacing": 1.2, "borderpad": 0.35, "framealpha": 0.85}
    shown = (beside or ax).legend(handles, names, **looks)  # on the axes drawn last, lest curves cross it
    shown.get_frame().set_linewidth(0.4)


def _make_room(ax: Axes, lines: int, *, upper: bool) -> None:
    """Extend the y-axis at one end by the height of a legend of so many lines."""
    from matplotlib.font_manager import FontProperties

    points, whole = (box.height / ax.figure.dpi * 72 for box in (ax.get_window_extent(), ax.figure.bbox))
    points = min(points, max(whole - 54, points / 2))  # what title and labels will leave, once they are laid out
    share = min(0.6, (1.45 * lines + 1.6) * FontProperties(size=SMALL).get_size_in_points() / max(points, 1.0))
    (_, low), (_, high) = ax.transData.transform([(1.0, end) for end in ax.get_ylim()])  # even, whatever the scale
    more = (high - low) * share / (1 - share)
    end = float(ax.transData.inverted().transform((0.0, high + more if upper else low - more))[1])
    ax.set_ylim(*((ax.get_ylim()[0], end) if upper else (end, ax.get_ylim()[1])))


def line_style(place: int) -> dict[str, Any]:
    """Colour, dash and marker of the curve at this place; all three differ between neighbours."""
    at, turn = place % len(SERIES), place // len(SERIES)
    return {
        "color": SERIES[at],
        "linestyle": DASHES[(at + turn) % len(DASHES)],
        "marker": MARKERS[(at + 2 * turn) % len(MARKERS)],
        "markersize": 3.5,
        "linewidth": 1.2,
    }


def fill_style(place: int) -> dict[str, Any]:
    """Colour and hatch of the area at this place."""
    at, turn = place % len(SERIES), place // len(SERIES)
    return {"facecolor": SERIES[at] + "40", "edgecolor": SERIES[at], "hatch": HATCHES[(at + turn) % len(HATCHES)]}


def nothing(ax: Axes, why: str) -> None:
    """Say in the middle of the axes why they are empty."""
    ax.text(0.5, 0.5, why, transform=ax.transAxes, ha="center", va="center", fontsize=TICKS, color=GREY)


def shortened(name: str, most: int = 20) -> str:
    """A name that fits beside a bar, with both its ends, since names are often numbered.

    >>> shortened("a name that is much too long, number 12")
    'a name tha…number 12'
    """
    return name if len(name) <= most else f"{name[: most // 2]}…{name[1 - most + most // 2 :]}"


def second_axis(ax: Axes, other: Axes, name: str) -> None:
    """Name the axis on the right, and gather the curves of both in one legend above them."""
    other.set_ylabel(name, fontsize=WORDS)
    other.tick_params(labelsize=TICKS)
    other.spines["top"].set_visible(False)
    ax.spines["right"].set_visible(True)
    legend(ax, beside=other, at="upper center", columns=3 if len(ax.lines + other.lines) == 3 else 1)


def plain_log_ticks(ax: Axes, values: np.ndarray) -> None:
    """Ticks at 1, 2 and 5 times the powers of ten, in plain numbers, on a logarithmic x-axis over these values."""
    low, high = float(values.min()), float(values.max())
    powers = 10.0 ** np.arange(np.floor(np.log10(low)) - 1, np.ceil(np.log10(high)) + 1)
    ticks = np.array([tick for tick in np.outer(powers, (1, 2, 5)).ravel() if low <= tick <= high * (1 + 1e-9)])
    if len(ticks) > 8:
        ticks = powers[(powers >= low) & (powers <= high)]
    ax.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    ax.minorticks_off()
