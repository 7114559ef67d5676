"""Why this method: the held-out loss of each candidate, its weight in the choice, and what more rows would show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from trueup.calibrators.auto import BASES, CANDIDATES, FEW_ROWS, FEW_ROWS_OF_CLASS, PENALTIES
from trueup.calibrators.compose import Choice
from trueup.core.formatting import format_number, format_percent
from trueup.registry import METHODS
from trueup.report import style
from trueup.report.audit import RAW, Audit, method_title
from trueup.report.figures import Panel, Section, Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from plotly.graph_objects import Figure

AUTO = "auto"
_UNCALIBRATED = (RAW, "identity")
_MIXED = "mixed_"


@dataclass(frozen=True, eq=False)
class MethodChoice:
    """What was chosen among methods by their loss on held-out rows."""

    chosen: str
    """A method, or "mixture"."""
    methods: tuple[str, ...]
    """Those that could be compared, the least loss first."""
    loss: np.ndarray
    """Mean log-loss on held-out rows."""
    error: np.ndarray
    """Standard error of its difference from that of what was chosen."""
    weight: np.ndarray
    """Share in what was chosen; 0 of the others."""
    chosen_loss: float
    detectable: float
    """The smallest mean improvement that these rows could have shown in four of five cases."""
    dropped: tuple[tuple[str, str], ...]
    """Methods without a held-out loss, and why."""
    too_few_rows: tuple[str, ...]
    """Methods that so few rows were not given to."""


def method_choice(choice: Choice, *, classes: int | None = None) -> MethodChoice:
    """The record of an automatic choice, as a calibrator or an audit carries it.

    With the number of `classes` it names the methods that were left out because there were too few rows.

    >>> from trueup.calibrators.compose import choose
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(1000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> record = method_choice(choose(["identity", "temperature"])(3 * z, y).choice)
    >>> record.methods, record.weight
    (('temperature', 'identity'), array([1., 0.]))
    """
    losses = {name: loss for name, loss in choice.scores.items() if math.isfinite(loss)}
    methods = tuple(sorted(losses, key=lambda name: losses[name]))
    return MethodChoice(
        chosen=choice.chosen,
        methods=methods,
        loss=np.array([losses[name] for name in methods]),
        error=np.array([choice.errors.get(name, math.nan) for name in methods]),
        weight=np.array([choice.weights.get(name, 0.0) for name in methods]),
        chosen_loss=choice.loss,
        detectable=choice.detectable,
        dropped=tuple(choice.reasons.items()),
        too_few_rows=() if classes is None else _too_few_rows(choice, classes),
    )


def _too_few_rows(choice: Choice, classes: int) -> tuple[str, ...]:
    """What the automatic choice would try with more rows, if its candidates were those for few."""
    tried = tuple(name for name in choice.scores if not name.startswith(_MIXED))
    if tried == CANDIDATES["few rows, two classes"] and classes == 2:
        more = CANDIDATES["two classes"]
    elif tried in (CANDIDATES["few rows"], CANDIDATES["few rows, many classes"]) and classes > 2:
        sizes = ("up to 30 classes", "up to 200 classes", "more classes")
        more = CANDIDATES[sizes[(classes > 30) + (classes > 200)]]
    else:
        return ()
    return tuple(name for name in more if name not in tried)


def section(audit: Audit, names: Sequence[str] | None) -> Section:
    """The methods on held-out rows, what more rows would show, and what the automatic choice, if it is there, mixes."""
    panels = [Panel("choice-chart", "Methods on held-out rows", method_choice(audit.choice))]
    pooled: Choice | None = getattr(audit.calibrators.get(AUTO), "choice", None)
    if pooled is not None:
        record = method_choice(pooled, classes=audit.scores.classes)
        panels.append(Panel("pool-chart", "What the automatic choice mixes", record))
    return Section(
        name="choice",
        title="Why this method?",
        text="Each candidate is fitted to folds of the calibration rows and judged by its log-loss on the rows left "
        "out. A dot is how much more it loses there than what was chosen, a line one standard error of that, paired "
        "row by row: a candidate whose line reaches 0 is within a standard error of it. Of the methods within a "
        "standard error of the best, the simplest is taken. The bars are the weights in what was chosen.",
        panels=tuple(panels),
    )


def chart(record: MethodChoice) -> Figure:
    """A dot with its error for each candidate, and its weight as a bar beside it."""
    names = [style.plain_text(candidate_title(name), 48) for name in record.methods]
    y = -np.arange(len(names), dtype=float)
    behind = record.loss - record.chosen_loss
    used = record.weight > 0
    traces: list[dict[str, Any]] = []
    for members, colour, symbol, name in (
        (used, style.BLUE, "circle", "chosen"),
        (~used, style.MUTED, "circle-open", "not chosen"),
    ):
        k = np.flatnonzero(members)
        if not len(k):
            continue
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": behind[k],
                "y": y[k],
                "text": [names[i] for i in k],
                "customdata": np.stack([record.loss[k], record.error[k]], axis=1),
                "error_x": {"type": "data", "array": np.nan_to_num(record.error[k])}
                | {"color": colour, "thickness": 1.6, "width": 0},
                "marker": {"color": colour, "size": 9, "symbol": symbol, "line": {"width": 2, "color": colour}},
                "hovertemplate": "%{text}<br>log-loss %{customdata[0]:.4f}: %{x:+.4f} ± %{customdata[1]:.4f}"
                "<extra></extra>",
            }
        )
    traces.append(
        {
            "type": "bar",
            "orientation": "h",
            "name": "weight",
            "x": record.weight,
            "y": y,
            "xaxis": "x2",
            "width": 0.45,
            "marker": {"color": style.BLUE},
            "text": [format_percent(w, 0) if w > 0 else "" for w in record.weight],
            "textposition": "outside",
            "textfont": {"color": style.INK, "size": 12},
            "cliponaxis": False,
            "showlegend": False,
            "customdata": names,
            "hovertemplate": "%{customdata}: weight %{x:.1%}<extra></extra>",
        }
    )
    annotations = [
        {"x": 0, "xref": "paper", "xanchor": "left", "y": y[i], "yshift": 15, "showarrow": False}
        | {
            "text": f"<b>{name}</b>" if used[i] else name,
            "font": {"color": style.INK, "size": 12.5},
            "bgcolor": style.PAPER,
            "borderpad": 1,
        }
        for i, name in enumerate(names)
    ]
    most = _shown(behind + np.nan_to_num(record.error))
    annotations += [
        {"x": 0.68, "xref": "paper", "xanchor": "right", "y": y[i], "showarrow": False}
        | {"text": f"{behind[i]:+.4f} →", "font": {"color": style.MUTED, "size": 12}, "bgcolor": style.PAPER}
        for i in np.flatnonzero(behind > most)
    ]
    x = "Log-loss above that of what was chosen"
    figure = style.plotly_figure(traces, x=x, y="", height=96 + 42 * len(names), annotations=annotations)
    figure.update_layout(margin_l=8, margin_r=40, xaxis_domain=[0, 0.68], xaxis2=figure.layout.xaxis.to_plotly_json())
    figure.update_layout(xaxis2_domain=[0.76, 1.0], xaxis2_title_text="Weight", xaxis2_anchor="y")
    figure.update_layout(xaxis2_range=[0, 1], xaxis2_tickformat=".0%", xaxis2_dtick=0.5)
    figure.update_layout(xaxis_showgrid=True, xaxis_zeroline=True, xaxis_zerolinecolor=style.MUTED, xaxis_nticks=6)
    least = float(min(np.min(behind - np.nan_to_num(record.error), initial=0.0), 0.0))
    figure.update_layout(xaxis_range=[least - 0.06 * (most - least), most + 0.06 * (most - least)])
    return figure.update_yaxes(visible=False, range=[-len(names) + 0.35, 0.85])


def _shown(reach: np.ndarray) -> float:
    """How far the axis goes: to all candidates, unless one is so far behind that the others would lie on one spot."""
    if not len(reach):
        return 1.0
    return float(max(min(reach.max(), 8 * max(np.median(reach), 1e-6)), 1e-6))


def draw(record: MethodChoice, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """A dot with its error for each candidate, the weight of each in its label."""
    ax = style.axes_for(ax, height=0.95 + 0.16 * max(len(record.methods), 3))
    y = np.arange(len(record.methods))
    behind, error, used = record.loss - record.chosen_loss, np.nan_to_num(record.error), record.weight > 0
    looks: list[tuple[str, np.ndarray, dict[str, Any]]] = [
        ("chosen", used, {"color": style.BLUE, "marker": "o"}),
        ("not chosen", ~used, {"color": style.GREY, "marker": "o", "markerfacecolor": ax.get_facecolor()}),
    ]
    for name, members, look in looks:
        if members.any():
            low, high = behind[members] - error[members], behind[members] + error[members]
            ax.hlines(y[members], low, high, color=look["color"], linewidth=1.4)
            ax.plot(behind[members], y[members], linestyle="", markersize=4, label=name, **look)
    ax.axvline(0, color=style.text_color(ax), linewidth=0.6, linestyle=":", zorder=0)
    shares = [f" ({format_percent(w, 0)})" if w > 0 else "" for w in record.weight]
    labels = [style.shorten(name) + share for name, share in zip(record.methods, shares, strict=True)]
    ax.set_yticks(y, labels=labels)
    ax.set_ylim(max(len(y), 1) - 0.4, -0.6)
    heading = "Candidates on held-out rows" if title is None else title
    style.set_labels(ax, heading, "Log-loss above that of the choice", "")
    ax.tick_params(axis="y", labelsize=style.SMALL_SIZE if len(y) > 12 else style.TICK_SIZE, length=0)
    ax.locator_params(axis="x", nbins=5)
    style.legend(ax, loc="lower right", ncols=2)
    return ax


def summary(record: MethodChoice) -> str:
    """What was chosen and why, and what more rows would show."""
    return " ".join([*why(record), more_rows(record)]).strip()


def why(record: MethodChoice) -> list[str]:
    """What was chosen, its loss beside that without calibration, and what is as good."""
    losses = dict(zip(record.methods, record.loss, strict=True))
    before = next((losses[name] for name in _UNCALIBRATED if name in losses), None)
    loss = format_number(record.chosen_loss)
    weighted = sorted(zip(record.weight, record.methods, strict=True), reverse=True)
    shares = [f"{_in_words(name)} {format_percent(weight, 0)}" for weight, name in weighted if weight > 0]
    if record.chosen in _UNCALIBRATED:
        best = next((name for name in record.methods if name not in _UNCALIBRATED), None)
        beside = "" if best is None else f"; the best method, {_in_words(best)}, has {format_number(losses[best])}"
        words = [f"No calibration was chosen: its log-loss on held-out rows is {loss}{beside}."]
    else:
        alone = f"{candidate_title(record.chosen)} was chosen alone."
        words = [f"A mixture was chosen: {'; '.join(shares)}." if len(shares) > 1 else alone]
        beside = "" if before is None else f", {format_number(before)} without calibration"
        words.append(f"Its log-loss on held-out rows is {loss}{beside}.")
        if before is not None and before < record.chosen_loss:
            words.append("These rows cannot tell the two apart, and temperature scaling is favoured then.")
    return words


def more_rows(record: MethodChoice) -> str:
    """The smallest improvement that could have been seen, and what was not tried for want of rows."""
    words = []
    if math.isfinite(record.detectable) and record.detectable > 0:
        words.append(
            f"These rows would show a log-loss that is lower than the uncalibrated network's by "
            f"{format_number(record.detectable)} or more in four of five cases; four times as many would show half of "
            "that."
        )
    if record.too_few_rows:
        names = "; ".join(_in_words(name) for name in record.too_few_rows)
        words.append(
            f"With {FEW_ROWS} rows, and {FEW_ROWS_OF_CLASS} or more in nearly every class, these would be tried too: "
            f"{names}."
        )
    return " ".join(words)


def candidate_title(name: str) -> str:
    """The title of a candidate of the automatic choice.

    >>> candidate_title("temperature"), candidate_title("mixed_platt")
    ('Temperature scaling', 'Platt scaling after a share of the uniform')
    """
    if name in _UNCALIBRATED:
        return method_title(RAW)
    if name.startswith(_MIXED):
        return f"{candidate_title(name.removeprefix(_MIXED))} after a share of the uniform"
    if name in PENALTIES:
        return f"Structured matrix scaling at {PENALTIES[name]:g} of its penalty"
    if name in BASES and name not in METHODS:
        base = candidate_title(BASES[name][0])
        return f"{method_title('residual')} on {base[:1].lower()}{base[1:]}"
    return method_title(name)


def _in_words(name: str) -> str:
    title = candidate_title(name)
    proper = title.split()[0].rstrip("'s") in ("Platt", "Dirichlet", "Bayesian", "Neural", "I-Max", "Venn–Abers")
    return title if proper else title[:1].lower() + title[1:]


def numbers(record: MethodChoice) -> Table:
    """A row for each candidate, those without a loss last."""
    rows = [
        [
            candidate_title(name),
            format_number(loss),
            "–" if math.isnan(error) else f"{loss - record.chosen_loss:+.4f} ± {error:.4f}".replace("-", "−"),
            format_percent(weight, 1) if weight > 0 else "–",
        ]
        for name, loss, error, weight in zip(record.methods, record.loss, record.error, record.weight, strict=True)
    ]
    rows += [[candidate_title(name), "–", reason, "–"] for name, reason in record.dropped]
    return ["Candidate", "Held-out log-loss", "Above the choice", "Weight"], rows
