"""The six figures of the rethinking paper, drawn for each data set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from trueup.reports import style
from trueup.reports.figures.reliability import Reliability
from trueup_studies.figures import Band, MaxLogits, draw, panels, second_axis
from trueup_studies.grid import Options, Rows
from trueup_studies.papers.rethinking.rethinking_evidence import best_coefficient
from trueup_studies.papers.rethinking.rethinking_presets import REFERENCE, SWEEP, TITLES, Growth, Plan, plans
from trueup_studies.papers.rethinking.rethinking_study import choose_coefficients, main_rows, selectors

Chosen: TypeAlias = Mapping[str, Sequence[Mapping[str, Any]]]

REGULARISED = {"label_smoothing": "ε", "norm": "α", "focal": "γ"}
"""Losses that lower confidence, and the paper's letters for their coefficients."""
STAGES = {"ece": "raw", "ece_temperature": "with TS", "ece_histogram": "with HB"}


def figures(rows: Rows, options: Options) -> dict[str, Any]:
    """Draw every figure for which there are rows; return file name → figure."""
    drawings = {}
    for plan in plans(options):
        ours = main_rows(rows, plan)
        chosen = choose_coefficients(ours, selectors(options)[0], plan.candidates)
        if REFERENCE not in chosen:
            continue
        grown = [row for row in rows if row["data"] == plan.data]
        drawn = {
            "figure_1": sensitivity(ours, grown, plan, selectors(options)[0]),
            "figure_2": diagrams(chosen),
            "figure_3": validation(chosen),
        }
        if plan.how.get("curves", True):
            drawn |= {"figure_4": epochs(ours, plan), "figure_5": histograms(chosen)}
        if plan.sweep:
            drawn["figure_6"] = sweep(ours)
        for name, figure in drawn.items():
            figure.suptitle(f"{name.replace('_', ' ').capitalize()}: {plan.title}", fontsize="small")
            drawings[f"{name}_{plan.data}"] = figure
    return drawings


def sensitivity(rows: Rows, grown: Rows, plan: Plan, by: str) -> Any:
    """Figure 1: ECE by coefficient, with the reference as a dotted line; and the best coefficients by training size."""
    several = plan.growth is not None and len({row["sizes"][0] for row in grown}) > 1
    figure, axes = panels(1, 4 if several else 3)
    for ax, (loss, letter) in zip(axes, REGULARISED.items(), strict=False):
        for index, (name, words) in enumerate(STAGES.items()):
            _curve(ax, index, *_by_coefficient(rows, plan, loss, name), words)
            level = [100 * row[name] for row in rows if row["loss"] == REFERENCE]
            ax.axhline(float(np.mean(level)), color=style.SERIES[index], linewidth=0.7, linestyle=":")
        if loss == "norm":
            ax.set_xscale("log")
            style.plain_log_ticks(ax, np.array(plan.candidates[loss]))
        _finish(ax, f"{TITLES[loss]} (dotted: {TITLES[REFERENCE]})", letter, "ECE (%)")
    if plan.growth is not None and several:
        _best_by_size(axes[3], grown, plan.growth, by)
    return figure


def _best_by_size(ax: Any, rows: Rows, growth: Growth, by: str) -> None:
    other = ax.twinx()
    for index, (loss, letter) in enumerate(REGULARISED.items()):
        best = []
        for size in growth.sizes:
            alike = [row for row in rows if row["sizes"][0] == size and row["seed"] < growth.seeds]
            value = best_coefficient(alike, growth, loss, by)
            best.append(np.nan if value is None else value)
        side = other if loss == "focal" else ax
        side.plot(growth.sizes, best, **style.line_style(index), label=letter)
    _log_sizes(ax, growth.sizes)
    style.set_labels(ax, "Best coefficient by size", "Training samples", "ε, α")
    second_axis(ax, other, "γ")


def diagrams(chosen: Chosen) -> Any:
    """Figure 2: reliability diagrams of each loss's first run, raw (top) and after temperature scaling (bottom)."""
    figure, axes = panels(2, len(chosen), height=3.0)
    for index, (loss, rows) in enumerate(chosen.items()):
        for row, (name, words) in enumerate((("reliability", "raw"), ("reliability_temperature", "with TS"))):
            record: dict[str, Any] = {k: np.array(v) if isinstance(v, list) else v for k, v in rows[0][name].items()}
            title = f"{_label(loss, rows[0]['coefficient'])}, {words}"
            draw(Reliability(**record), axes[row * len(chosen) + index], title=title)
    return figure


def validation(chosen: Chosen) -> Any:
    """Figure 3: ECE after calibration, by the number of validation samples."""
    figure, axes = panels(1, 2)
    for ax, name, words in zip(axes, list(STAGES)[1:], ("Temperature scaling", "Histogram binning"), strict=True):
        for index, (loss, rows) in enumerate(chosen.items()):
            sizes = sorted({line["size"] for line in rows[0]["validation_sizes"]})
            values = [[100 * x[name] for r in rows for x in r["validation_sizes"] if x["size"] == s] for s in sizes]
            _curve(ax, index, sizes, values, _label(loss, rows[0]["coefficient"]), band=False)
        _log_sizes(ax, sizes)
        _finish(ax, words, "Validation samples", "ECE (%)")
    return figure


def epochs(rows: Rows, plan: Plan) -> Any:
    """Figure 4: the optimal ECE after each epoch, the mean over seeds with a band from the lowest to the highest."""
    figure, axes = panels(1, len(REGULARISED))
    for ax, (loss, letter) in zip(axes, REGULARISED.items(), strict=True):
        several = [(REFERENCE, 0.0), *((loss, value) for value in plan.candidates[loss])]
        for index, (name, value) in enumerate(several):
            runs = [row["optimal_ece"] for row in rows if row["loss"] == name and row["coefficient"] == value]
            if runs:
                words = TITLES[REFERENCE] if name == REFERENCE else f"{letter} = {value:g}"
                _curve(ax, index, range(1, len(runs[0]) + 1), (100 * np.array(runs).T).tolist(), words, markers=False)
        final = [100 * row["optimal_ece"][-1] for row in rows if row["loss"] in (loss, REFERENCE)]
        ax.set_ylim(0, 2.5 * max(final))  # the first epochs lie much higher
        _finish(ax, TITLES[loss], "Epoch", "Optimal ECE (%)")
    return figure


def histograms(chosen: Chosen) -> Any:
    """Figure 5: largest logits of training samples by learned epoch, on one scale."""
    figure, axes = panels(1, len(chosen))
    records = {loss: rows[0]["max_logits"] for loss, rows in chosen.items()}
    ends = [(min(record["edges"]), max(record["edges"])) for record in records.values()]
    for ax, (loss, record) in zip(axes, records.items(), strict=True):
        bands = tuple(
            Band(band["first"], band.get("final", band.get("last")), np.array(band["count"]))
            for band in record["bands"]
        )
        whole = MaxLogits(np.array(record["edges"]), bands, record["range"], record["auc"])
        draw(whole, ax, title=_label(loss, chosen[loss][0]["coefficient"]))
        ax.set_xlim(min(end[0] for end in ends), max(end[1] for end in ends))
    return figure


def sweep(rows: Rows) -> Any:
    """Figure 6: from focal loss through cross-entropy to inverse focal loss."""
    figure, axes = panels(2, 3)
    p = np.linspace(0.01, 1, 200)
    for index, (loss, value) in enumerate(SWEEP):
        weight = (1 - p) ** value if loss == "focal" else (1 + p) ** value
        look = {**style.line_style(index), "marker": ""}
        axes[0].plot(p, -weight * np.log(p), **look, label=_label(loss, value))
    axes[0].set_ylim(0, 5)
    _finish(axes[0], "(a) losses", "Probability of the label", "Loss")
    short = {"focal": "focal {:g}", REFERENCE: "CE", "inverse_focal": "inverse {:g}"}
    for ax, name, title, words, scale in (
        (axes[1], "accuracy", "(b) accuracy", "Accuracy (%)", 100),
        (axes[2], "ece", "(c) raw", "ECE (%)", 100),
        (axes[3], "temperature", "(d) temperature", "T with the lowest validation ECE", 1),
        (axes[4], "ece_temperature", "(e) with TS", "ECE (%)", 100),
        (axes[5], "ece_histogram", "(f) with HB", "ECE (%)", 100),
    ):
        values = [[scale * v for v in _values(rows, loss, value, name)] for loss, value in SWEEP]
        _curve(ax, 0, range(len(SWEEP)), values, "")
        _finish(ax, title, "", words)
        ticks = [short[loss].format(value) for loss, value in SWEEP]
        ax.set_xticks(range(len(SWEEP)), labels=ticks, rotation=40, ha="right")
    return figure


def _curve(
    ax: Any,
    index: int,
    x: Iterable[float],
    values: Sequence[Sequence[float]],
    words: str,
    *,
    band: bool = True,
    markers: bool = True,
) -> None:
    """Draw means with a band from the lowest to the highest value; points without values are left out."""
    known = [(at, ys) for at, ys in zip(x, values, strict=True) if len(ys)]
    if not known:
        return
    at = [point for point, _ in known]
    look = {**style.line_style(index), **({} if markers else {"marker": ""})}
    ax.plot(at, [float(np.mean(ys)) for _, ys in known], **look, label=words or None)
    if band:
        low, high = ([end(ys) for _, ys in known] for end in (min, max))
        ax.fill_between(at, low, high, color=look["color"], alpha=0.15, linewidth=0)


def _log_sizes(ax: Any, sizes: Sequence[int]) -> None:
    ax.set_xscale("log")
    ax.set_xticks(sizes, labels=[f"{size:g}" for size in sizes])
    ax.minorticks_off()


def _finish(ax: Any, title: str, x: str, y: str) -> None:
    style.set_labels(ax, title, x, y)
    style.legend(ax)


def _by_coefficient(rows: Rows, plan: Plan, loss: str, name: str) -> tuple[Sequence[float], list[list[float]]]:
    values = plan.candidates[loss]
    return values, [[100 * v for v in _values(rows, loss, value, name)] for value in values]


def _values(rows: Rows, loss: str, coefficient: float, name: str) -> list[float]:
    return [row[name] for row in rows if row["loss"] == loss and row["coefficient"] == coefficient]


def _label(loss: str, coefficient: float) -> str:
    return f"{TITLES[loss]} {coefficient:g}" if coefficient else TITLES[loss]
