"""A figure as a list of marks on axes, which both matplotlib and plotly draw.

Colours come from `style`. Each backend adapts them, so that figures suit dark pages and print.
"""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from trueup.reports import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure

_PIXELS_PER_INCH = 117  # converts a chart's height on the page to that of a drawing one column wide
_DASHES = dict(zip(("solid", "dash", "dot"), style.DASHES, strict=False))
_MARKERS = {"circle": "o", "square": "s", "diamond": "D", "triangle-up": "^", "triangle-down": "v"}
_SMALL = {"color": style.MUTED, "size": 12}


@dataclass(frozen=True, eq=False, kw_only=True)
class Mark:
    """The fields of all marks."""

    color: str
    name: str = ""
    """Name in the legend; a mark without a name has no entry."""
    listed: bool = True
    """Whether the legend lists the name."""
    hover: str = ""
    """Plotly's template for a point's text; %{customdata[k]} is column k of `data`."""
    data: np.ndarray | Sequence[Any] | None = None
    """One row of values per point."""


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
    """Name of a plotly symbol; those that end in "-open" are hollow."""
    size: np.ndarray | float = 9.0
    interval: tuple[np.ndarray, np.ndarray] | None = None
    texts: Sequence[str] = ()
    """Texts for %{text} in `hover`."""


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
    """Ends of the axis; None fits an end to the marks. A logarithmic axis has no range."""
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
    """Location and columns of the legend in a drawing; plotly charts have it above."""
    legend_title: str = ""
    """Title of the legend in a drawing."""
    empty: str = ""
    """Reason for an empty plot."""
    below: Plot | None = None
    """Second panel."""
    layout: Mapping[str, Any] = field(default_factory=dict)
    """Further layout for plotly only."""


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


# plotly


def plotly_figure(plot: Plot, *, legend: bool = True) -> Figure:
    """Return a plotly figure with light axes, a horizontal grid, no background, and the legend above."""
    from plotly.graph_objects import Figure

    font = {"family": style.FONT, "size": 12, "color": style.INK}
    rows, height = plot.y.rows, plot.height
    if rows is not None:
        height = 96 + 42 * len(rows) if plot.y.names_above else 104 + 24 * max(len(rows), 3)
    clear = "rgba(0,0,0,0)"
    layout: dict[str, Any] = {"template": {}, "height": height, "autosize": True, "font": font}
    layout |= {"margin": {"l": 52, "r": 14, "t": 34 if legend else 14, "b": 46}, "dragmode": False}
    layout |= {"paper_bgcolor": clear, "plot_bgcolor": clear, "showlegend": legend}
    layout |= {
        "hoverlabel": {"bgcolor": style.PAPER, "bordercolor": style.LINE, "font": font},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "font": _SMALL, "itemclick": False}
        | {"itemdoubleclick": False, "traceorder": "normal"},
        "barmode": "stack" if plot.stacked else "overlay",
        "xaxis": _plotly_axis(plot.x) | {"showline": True, "showgrid": rows is not None},
        "yaxis": _plotly_axis(plot.y),
        "shapes": [_shape(mark) for mark in plot.marks if isinstance(mark, Rule)],
        "annotations": [_annotation(mark) for mark in plot.marks if isinstance(mark, Text)],
    }
    traces = [_trace(mark) for mark in plot.marks if not isinstance(mark, Rule | Text)]
    if plot.below is not None:
        traces += [_trace(mark) | {"yaxis": "y2"} for mark in plot.below.marks if not isinstance(mark, Rule | Text)]
        layout["yaxis"]["domain"], layout["xaxis"]["anchor"] = [0.54, 1], "y2"
        layout["yaxis2"] = _plotly_axis(plot.below.y) | {"domain": [0, 0.46]}
    if rows is not None and plot.y.names_above:
        layout["margin"] |= {"l": 8, "r": 20}
        layout["annotations"] += _names_above(plot.y)
    if plot.empty:
        middle = {"x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "showarrow": False}
        layout["annotations"].append(middle | {"text": plot.empty, "font": _SMALL})
    return Figure(traces, layout).update_layout(**plot.layout)


def _plotly_axis(axis: Axis) -> dict[str, Any]:
    title = {"font": _SMALL, "standoff": 10, "text": axis.title}
    look: dict[str, Any] = {"gridcolor": style.LINE, "linecolor": style.LINE, "zeroline": False, "ticks": ""}
    look |= {"tickfont": _SMALL, "automargin": True, "fixedrange": True, "nticks": 7, "title": title}
    look |= {"tickformat": ".1~%"} if axis.percent else {}
    look |= {"type": "log"} if axis.log else {}
    if axis.range is not None:
        look |= {"rangemode": "tozero"} if axis.range[1] is None else {"range": list(axis.range)}
        if axis.percent and axis.range == (0, 1):
            look |= {"range": [0, 1.01], "dtick": 0.2}  # room for the label at the end
    if axis.ticks is not None:
        look |= {"tickvals": list(axis.ticks), "ticktext": axis.tick_labels}
    elif axis.log:
        look["tickvals"] = [a * 10.0**k for k in range(-3, 4) for a in (1, 2, 5)]
        look["ticktext"] = [f"{value:g}" for value in look["tickvals"]]
    if axis.rows is not None:
        count = max(len(axis.rows), 1)
        look |= {"showgrid": False, "range": [count - 0.35, -0.85 if axis.names_above else -0.65]}
        names = _row_names(axis, lambda name: plain_text(style.shorten(name, 24)))
        look |= {"visible": False} if axis.names_above else {"tickvals": list(range(len(names))), "ticktext": names}
    return look


def plain_text(text: str, max_length: int = 40) -> str:
    """Escape and shorten a text for plotly, which interprets markup."""
    return html.escape(text if len(text) <= max_length else text[: max_length - 1] + "…", quote=False)


def _names_above(axis: Axis) -> list[dict[str, Any]]:
    names = _row_names(axis, lambda name: plain_text(name, 48))
    look = {"x": 0, "xref": "paper", "xanchor": "left", "yshift": 15, "showarrow": False}
    look |= {"font": {"color": style.INK, "size": 12.5}, "bgcolor": style.PAPER, "borderpad": 1}
    return [look | {"y": row, "text": f"<b>{name}</b>" if row in axis.bold else name} for row, name in enumerate(names)]


def interval_dots(
    kinds: Iterable[tuple[str, np.ndarray, str, str]],
    x: np.ndarray,
    interval: tuple[np.ndarray, np.ndarray],
    *,
    texts: Sequence[str],
    data: np.ndarray,
    **options: Any,
) -> list[Mark]:
    """Return dots with intervals, one per row; each kind of row (name, members, colour, marker) is one mark."""
    marks: list[Mark] = []
    for name, members, color, marker in kinds:
        if len(k := np.flatnonzero(members)):
            ends, names = (interval[0][k], interval[1][k]), [texts[i] for i in k.tolist()]
            look = options | {"name": name, "color": color, "marker": marker}
            marks.append(Dots(x=x[k], y=k, interval=ends, texts=names, data=data[k], **look))
    return marks


def _annotation(mark: Text) -> dict[str, Any]:
    position = {"x": mark.x, "xref": "paper", "xanchor": "left" if mark.x < 0.5 else "right", "y": mark.y}
    return position | {"text": mark.text, "showarrow": False, "font": {"color": mark.color, "size": 11}}


def _shape(rule: Rule) -> dict[str, Any]:
    ends = {"x0": 0, "x1": 1, "xref": "paper", "y0": rule.at, "y1": rule.at}
    if not rule.horizontal:
        ends = {"y0": 0, "y1": 1, "yref": "paper", "x0": rule.at, "x1": rule.at}
    line = {"color": rule.color, "width": 1.2, "dash": rule.dash}
    return ends | {"type": "line", "layer": "below", "line": line, "name": rule.name, "showlegend": bool(rule.name)}


def _trace(mark: Mark) -> dict[str, Any]:
    trace: dict[str, Any] = {"type": "scatter", "name": mark.name, "showlegend": mark.listed and bool(mark.name)}
    trace |= {"hovertemplate": mark.hover + "<extra></extra>"} if mark.hover else {"hoverinfo": "skip"}
    if mark.data is not None:
        trace["customdata"] = mark.data
    if isinstance(mark, Bars):
        at, size = ("y", "x") if mark.horizontal else ("x", "y")
        trace |= {"type": "bar", at: mark.at, size: mark.size, "width": mark.width}
        trace |= {"orientation": "vh"[mark.horizontal], "marker": {"color": mark.color, "line": {"width": 0}}}
        trace |= {"base": mark.base} if np.ndim(mark.base) or mark.base else {}
        if mark.labels:
            font = {"size": 10, "color": style.MUTED}
            trace |= {"text": list(mark.labels), "textposition": "outside", "textangle": 0, "textfont": font}
            trace["cliponaxis"] = False
    elif isinstance(mark, Area):
        x, y = np.concatenate([mark.x, mark.x[::-1]]), np.concatenate([mark.low, mark.high[::-1]])
        trace |= {"mode": "lines", "x": x, "y": y, "fill": "toself", "fillcolor": mark.color}
        trace |= {"line": {"width": 0}, "opacity": 1 if mark.color == style.BAND else 0.15}
    elif isinstance(mark, Line):
        trace |= {"mode": "lines+markers" if mark.markers else "lines", "x": mark.x, "y": mark.y}
        trace |= {"line": {"color": mark.color, "width": mark.width, "dash": mark.dash}}
        trace["line"] |= {"shape": "hv"} if mark.steps else {}
        trace |= {"marker": {"size": 7}, "cliponaxis": False} if mark.markers else {}
    elif isinstance(mark, Dots):
        trace |= {"mode": "markers", "x": mark.x, "y": mark.y, "text": list(mark.texts) or None, "cliponaxis": False}
        hollow = mark.marker.endswith("-open")
        edge = {"width": 2, "color": mark.color} if hollow else {"width": 1, "color": style.PAPER}
        trace["marker"] = {"color": mark.color, "size": mark.size, "opacity": 1, "line": edge, "symbol": mark.marker}
        if mark.interval is not None:
            low, high = (np.nan_to_num(way * (end - mark.x)) for way, end in zip((-1, 1), mark.interval, strict=True))
            line = {"color": mark.color, "thickness": 1.6, "width": 0}
            trace["error_x"] = {"type": "data", "symmetric": False, "array": high, "arrayminus": low} | line
    return trace
