"""A figure as a list of marks on axes, which both matplotlib and the script of a page (chart.js) draw.

Colours come from `style`. Each backend adapts them, so that figures suit dark pages and print.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from html import escape
from importlib.resources import files
from json import dumps
from typing import TYPE_CHECKING, Any

import numpy as np

from trueup.reports import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_PIXELS_PER_INCH = 117  # converts a chart's height on the page to that of a drawing one column wide
_DASHES = dict(zip(("solid", "dash", "dot"), style.DASHES, strict=False))
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "triangle-down": "v"}


@dataclass(frozen=True, eq=False, kw_only=True)
class Mark:
    """The fields of all marks."""

    color: str
    name: str = ""
    """Name in the legend; a mark without a name has no entry."""
    listed: bool = True
    """Whether the legend lists the name."""
    hover: Sequence[str] = ()
    """One text per point or bar, which a page shows under the pointer."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Bars(Mark):
    """Bars of length `size` from `base`, centred at `at`; horizontal bars have their centres on the y-axis."""

    at: np.ndarray
    size: np.ndarray
    width: np.ndarray | float
    base: np.ndarray | float = 0.0
    horizontal: bool = False
    labels: Sequence[str] = ()
    """Texts above the bars."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Line(Mark):
    """A line through points."""

    x: np.ndarray | Sequence[float]
    y: np.ndarray | Sequence[float]
    dash: str = "solid"
    width: float = 2.0
    markers: bool = False
    steps: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Area(Mark):
    """The area between two curves."""

    x: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True, eq=False, kw_only=True)
class Dots(Mark):
    """Points, with horizontal intervals if given."""

    x: np.ndarray | Sequence[float]
    y: np.ndarray | Sequence[float]
    marker: str = "circle"
    """A name of `_MARKERS`; with "-open" at the end it is hollow."""
    size: np.ndarray | float = 9.0
    interval: tuple[np.ndarray, np.ndarray] | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class Rule(Mark):
    """A straight line across all panels at one value of x or y."""

    at: float
    dash: str = "solid"
    horizontal: bool = False


@dataclass(frozen=True, eq=False, kw_only=True)
class Text(Mark):
    """A text at a share of the width and a value of y."""

    x: float
    y: float
    text: str


@dataclass(frozen=True, eq=False, kw_only=True)
class Axis:
    """Title, range and ticks of an axis."""

    title: str = ""
    range: tuple[float, float | None] | None = None
    """Ends of the axis; None fits an end to the marks."""
    percent: bool = False
    """Whether ticks are percentages."""
    log: bool = False
    """Whether the scale is logarithmic."""
    ticks: np.ndarray | Sequence[float] | None = None
    """Positions of the ticks."""
    tick_labels: Sequence[str] | None = None
    """Labels of the ticks, if they differ from the positions."""
    rows: Sequence[str] | None = None
    """Names of the rows at 0, 1, …, from the top."""
    notes: Sequence[str] = ()
    """Notes in brackets after the names of the rows."""
    bold: frozenset[int] = frozenset()
    """Rows with bold names on a page."""
    names_above: bool = False
    """Whether a page shows the names above the rows instead of on the left, for narrow screens."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Slider:
    """The positions of a slider."""

    title: str
    labels: Sequence[str]
    """Label of each position."""
    texts: Sequence[str]
    """Sentence for each position."""
    active: int
    """First position."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Plot:
    """Marks on a pair of axes, with an optional second panel below that has the same x-axis."""

    title: str
    """Title of a matplotlib drawing; a page adds its own headings."""
    marks: Sequence[Mark]
    x: Axis
    y: Axis
    height: int = 300
    """Height on a page in pixels; with rows on the y-axis, their number sets the height."""
    stacked: bool = False
    """Whether bars are stacked."""
    legend: tuple[str, int] = ("best", 1)
    """Location and columns of the legend in a drawing; a page has it above the chart."""
    legend_title: str = ""
    """Title of the legend in a drawing."""
    empty: str = ""
    """Reason for an empty plot."""
    below: Plot | None = None
    """Second panel."""
    slider: Slider | None = None
    """Slider of a page, which moves the last mark along the points of the first."""


# matplotlib


def draw_plot(plot: Plot, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Draw on `ax`, or on the axes of a new figure one column wide."""
    rows = plot.y.rows
    inches = plot.height / _PIXELS_PER_INCH if rows is None else 0.95 + 0.15 * max(len(rows), 3)
    ax = style.axes_for(ax, height=inches)
    below = None if plot.below is None else style.split_axes(ax)
    _draw_panel(plot, ax, plot.title if title is None else title)
    if plot.below is not None and below is not None:
        _draw_panel(plot.below, below, "")
        ax.tick_params(labelbottom=False)
        ax.set_xlabel("")
    return ax


def _draw_panel(plot: Plot, ax: Axes, title: str) -> None:
    top: np.ndarray | float = 0.0
    for mark in plot.marks:
        if isinstance(mark, Bars):
            _draw_bars(ax, mark, top if plot.stacked else mark.base)
            top = top + mark.size if plot.stacked else 0.0
        else:
            _draw_mark(ax, mark)
    if plot.empty:
        style.write_empty(ax, plot.empty)
    style.set_labels(ax, title, plot.x.title, plot.y.title)
    _set_axis(ax, plot.x, "x")
    _set_axis(ax, plot.y, "y")
    if not plot.empty:
        ends: dict[str, Any] = {"title": plot.legend_title, "alignment": "left"} if plot.legend_title else {}
        style.legend(ax, loc=plot.legend[0], ncols=plot.legend[1], **ends)


def _ink(ax: Axes, color: str) -> Any:
    return {style.INK: style.text_color(ax), style.MUTED: style.GREY, style.PAPER: ax.get_facecolor()}.get(color, color)


def _draw_bars(ax: Axes, mark: Bars, base: Any) -> None:
    over, under = ({"facecolor": color + "80", "linewidth": 0.4} for color in (style.VERMILION, style.SKY))
    looks: dict[str, dict[str, Any]] = {
        style.BAND: {"color": style.GREY, "alpha": 0.35, "linewidth": 0},
        style.GAP_OVER: over | {"edgecolor": style.VERMILION, "hatch": "//////"},
        style.GAP_UNDER: under | {"edgecolor": style.BLUE, "hatch": "......"},
        style.MUTED: {"color": style.GREY, "linewidth": 0},
    }
    hatch = "/////" if mark.color == style.VERMILION else ""
    plain = {"facecolor": mark.color + "50", "edgecolor": mark.color, "hatch": hatch, "linewidth": 0.6}
    look = looks.get(mark.color, plain) | {"label": mark.name or None}
    (ax.barh if mark.horizontal else ax.bar)(mark.at, mark.size, mark.width, base, **look)
    ends = np.broadcast_to(base, np.shape(mark.size)) + mark.size
    for at, end, label in zip(mark.at, ends, mark.labels, strict=False):
        ax.text(at, end, label, ha="center", va="bottom", fontsize=style.SMALL_SIZE, color=style.GREY)


def _draw_mark(ax: Axes, mark: Mark) -> None:
    color = _ink(ax, mark.color)
    look: dict[str, Any] = {"color": color, "label": (mark.listed and mark.name) or None}
    if isinstance(mark, Area):
        fill = {"color": style.GREY, "alpha": 0.35} if mark.color == style.BAND else {"alpha": 0.15}
        ax.fill_between(mark.x, mark.low, mark.high, linewidth=0, **(look | fill))
    elif isinstance(mark, Line):
        look |= {"linewidth": 0.7 * mark.width, "linestyle": _DASHES[mark.dash]}
        look |= {"marker": "o", "markersize": 3.5} if mark.markers else {}
        ax.plot(mark.x, mark.y, drawstyle="steps-post" if mark.steps else "default", **look)
    elif isinstance(mark, Rule):
        look |= {"linewidth": 0.9, "linestyle": _DASHES[mark.dash], "zorder": 1}
        (ax.axhline if mark.horizontal else ax.axvline)(mark.at, **look)
    elif isinstance(mark, Dots):
        if mark.interval is not None:
            ax.hlines(mark.y, *mark.interval, color=color, linewidth=1.4)
        look |= {"marker": _MARKERS[mark.marker.removesuffix("-open")], "clip_on": False, "zorder": 3}
        if np.ndim(mark.size):
            ax.scatter(mark.x, mark.y, s=(0.45 * np.asarray(mark.size)) ** 2, linewidths=0, **look)
        else:
            look |= {"markerfacecolor": ax.get_facecolor()} if mark.marker.endswith("-open") else {}
            ax.plot(mark.x, mark.y, linestyle="", markersize=0.45 * float(mark.size), **look)
    elif isinstance(mark, Text):
        look |= {"transform": ax.get_yaxis_transform(), "va": "center", "fontsize": style.SMALL_SIZE, "color": color}
        ax.text(mark.x, mark.y, mark.text, ha="left" if mark.x < 0.5 else "right", **look)


def _set_axis(ax: Axes, axis: Axis, which: str) -> None:
    line = ax.xaxis if which == "x" else ax.yaxis
    if axis.log:
        ax.set(**{f"{which}scale": "log"})
    if axis.rows is not None:
        ax.set_yticks(range(len(axis.rows)), labels=_row_names(axis, style.shorten))
        ax.set_ylim(max(len(axis.rows), 1) - 0.4, -0.6)
        small = len(axis.rows) > 12 or axis.notes
        ax.tick_params(axis="y", labelsize=style.SMALL_SIZE if small else style.TICK_SIZE, length=0)
        ax.xaxis.label.set(x=1.0, horizontalalignment="right")  # row names leave too little room to centre the label
        ax.locator_params(axis="x", nbins=5)
    if axis.range is not None:
        ax.set(**{f"{which}lim": axis.range})
    if axis.ticks is not None:
        line.set_ticks(axis.ticks, labels=axis.tick_labels)
    elif axis.log:
        style.plain_log_ticks(ax, np.asarray(ax.get_xlim()))
    if (axis.log or axis.percent) and axis.tick_labels is None:
        unit = 100 if axis.percent else 1
        line.set_major_formatter(lambda value, _: f"{unit * value:.4g}{' %' if axis.percent else ''}")
        ax.minorticks_off()


def _row_names(axis: Axis, shorten: Any) -> list[str]:
    notes = axis.notes or [""] * len(axis.rows or ())
    return [shorten(name) + (f" ({note})" if note else "") for name, note in zip(axis.rows or (), notes, strict=True)]


# The page


@dataclass(frozen=True, eq=False)
class Chart:
    """An interactive chart; notebooks show it, and `html()` is a page of its own."""

    plot: Plot
    legend: bool = True

    def to_dict(self) -> dict[str, Any]:
        """Return the marks and axes as plain data, which chart.js draws."""
        data: dict[str, Any] = _plain(self.plot)
        return data if self.legend else data | {"legend": False}

    def html(self) -> str:
        """Return a page with the chart alone; it loads no other files."""
        style_sheet, script = (
            files("trueup.reports").joinpath(f"chart.{kind}").read_text("utf-8") for kind in ("css", "js")
        )
        data = dumps(self.to_dict()).replace("<", "\\u003c")
        return (
            f'<!doctype html><meta charset="utf-8"><title>{escape(self.plot.title)}</title><style>{style_sheet}'
            f"body {{font-family: {style.FONT}; max-width: 40rem}}</style><div class=chart></div>"
            f'<script type="module">{script}\nshowChart(document.querySelector(".chart"), {data});</script>'
        )

    def _repr_html_(self) -> str:
        height = 60 + (self.plot.height if self.plot.y.rows is None else 100 + 42 * len(self.plot.y.rows))
        return f'<iframe style="border:0; width:100%; height:{height}px" srcdoc="{escape(self.html())}"></iframe>'


def _plain(value: Any) -> Any:
    """Return a description as plain data: without defaults, with colours as CSS variables and NaN as None."""
    if is_dataclass(value):
        items = ((each.name, getattr(value, each.name), each.default) for each in fields(value))
        kind = {"kind": type(value).__name__.lower()} if isinstance(value, Mark) else {}
        return kind | {name: _plain(x) for name, x, default in items if default is MISSING or x is not default}
    if isinstance(value, np.ndarray | np.generic):
        return _plain(value.tolist())
    if isinstance(value, list | tuple | frozenset):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if np.isfinite(value) else None
    return style.CSS.get(value, value) if isinstance(value, str) else value


def interval_dots(
    kinds: Iterable[tuple[str, np.ndarray, str, str]],
    x: np.ndarray,
    interval: tuple[np.ndarray, np.ndarray],
    *,
    hover: Sequence[str],
    size: float = 9.0,
) -> list[Mark]:
    """Return dots with intervals, one per row; each kind of row (name, members, colour, marker) is one mark."""
    marks: list[Mark] = []
    for name, members, color, marker in kinds:
        if len(k := np.flatnonzero(members)):
            look: dict[str, Any] = {"name": name, "color": color, "marker": marker, "size": size}
            ends, texts = (interval[0][k], interval[1][k]), [hover[i] for i in k.tolist()]
            marks.append(Dots(x=x[k], y=k, interval=ends, hover=texts, **look))
    return marks


def cut_outliers(
    low: np.ndarray, value: np.ndarray, high: np.ndarray, *, reference: float, sign: bool = False
) -> tuple[tuple[float, float] | None, list[Mark]]:
    """Return the ends of an x-axis that no outlier stretches, and the values beyond it as texts.

    Values far above most others are cut off; the reference stays visible.
    """
    ends = np.fmax(high, value)
    if not np.isfinite(ends).any():
        return None, []
    left = float(np.nanmin([np.nanmin(np.fmin(low, value)), reference]))
    typical = float(np.nanmedian(ends)) - left
    right = float(min(np.nanmax(ends), max(left + 5 * max(typical, 1e-6), reference)))
    margin = 0.06 * max(right - left, 1e-6)
    beyond = np.flatnonzero(value > right + margin)
    texts = [f"{value[k]:{'+' if sign else ''}.4f} →" for k in beyond]
    marks = [Text(x=0.98, y=float(k), text=text, color=style.MUTED) for k, text in zip(beyond, texts, strict=True)]
    return (left - margin, right + margin), [*marks]
