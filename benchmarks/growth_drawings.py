"""Time against rows and classes, with the limit that memory sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from scaling import SHOWN, Axis, Curve, Scaling
from timing import OURS
from trueup.reports import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NAMES: dict[Axis, str] = {"n": "rows", "classes": "classes"}


def write(scaling: Scaling, folder: Path) -> None:
    """Draw both pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    eces = [curve for curve in scaling.curves if curve.task == "ece"]
    libraries = list(dict.fromkeys(curve.library for curve in eces))
    picture(
        eces,
        scaling.per_second,
        folder / "benchmarks-ece.svg",
        label=lambda curve: "trueup" if curve.library == OURS else curve.library,
        place=lambda curve: libraries.index(curve.library),
        title="ECE",
    )
    picture(
        scaling.ours(),
        scaling.per_second,
        folder / "benchmarks-ours.svg",
        label=lambda curve: f"{curve.task} {curve.exponent():.2f}",
        place=lambda curve: SHOWN.index(curve.task),
        title="Ours, with exponents",
    )


def picture(
    curves: Sequence[Curve],
    per_second: float,
    file: Path,
    *,
    label: Callable[[Curve], str],
    place: Callable[[Curve], int],
    title: str,
) -> None:
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    figure = Figure(figsize=(8.6, 3.7), layout="constrained", facecolor="white")
    axes: dict[Axis, Axes] = dict(zip(("n", "classes"), figure.subplots(1, 2, sharey=True), strict=True))
    for axis, ax in axes.items():
        own = [curve for curve in curves if curve.sweep.axis == axis]
        if not own:
            style.write_empty(ax, "nothing was measured")
            continue
        ax.set_xscale("log")
        ax.set_yscale("log")
        ax.xaxis.set_minor_formatter(NullFormatter())  # over a short range they would write over each other
        ends = [(label(curve), *draw(ax, curve, place(curve))) for curve in own]
        ends += [limit(ax, own, fixed, per_second) for fixed in sorted({curve.sweep.fixed for curve in own})]
        name_ends(ax, ends)
        fixed = " or ".join(f"{fixed:,}" for fixed in sorted({curve.sweep.fixed for curve in own}))
        other = NAMES["classes" if axis == "n" else "n"]
        style.set_labels(ax, f"{title}: {fixed} {other}", NAMES[axis].capitalize(), "Seconds" if axis == "n" else "")
        ax.tick_params(labelleft=True)
    figure.savefig(file, metadata={"Date": None})


def draw(ax: Axes, curve: Curve, place: int) -> tuple[float, float, str]:
    look = style.line_style(place)
    if curve.library == OURS and curve.task == "ece":
        look["linewidth"] = 2.0
    ax.plot(curve.sizes, curve.seconds, **look)
    return float(curve.sizes[-1]), float(curve.seconds[-1]), str(look["color"])


def limit(ax: Axes, curves: Sequence[Curve], fixed: int, per_second: float) -> tuple[str, float, float, str]:
    """The time to read all logits once, in grey."""
    sizes = np.array(sorted({size for curve in curves if curve.sweep.fixed == fixed for size in curve.sweep.sizes}))
    seconds = sizes * fixed / per_second
    ax.plot(sizes, seconds, color=style.GREY, linewidth=1.0, linestyle=(0, (4.0, 1.5)), zorder=1)
    several = len({curve.sweep.fixed for curve in curves}) > 1
    name = f"read once, {fixed:,}" if several else "read once"
    return name, float(sizes[-1]), float(seconds[-1]), style.GREY


def name_ends(ax: Axes, ends: Sequence[tuple[str, float, float, str]]) -> None:
    """Each curve's name at its end, moved apart where they would cover each other."""
    low, high = (np.log10(bound) for bound in ax.get_ylim())
    step = (high - low) / 17
    order = sorted(range(len(ends)), key=lambda i: ends[i][2])
    heights = np.array([np.log10(ends[i][2]) for i in order])
    for _ in range(200):
        for i in range(len(heights) - 1):
            short = step - (heights[i + 1] - heights[i])
            if short > 0:
                heights[i] -= short / 2
                heights[i + 1] += short / 2
    furthest = max(end[1] for end in ends)
    for i, height in zip(order, heights, strict=True):
        name, x, y, colour = ends[i]
        arrow = {"arrowstyle": "-", "color": colour, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 2}
        ax.annotate(
            name,
            (x, y),
            (furthest * 1.6, 10**height),
            fontsize=style.TICK_SIZE,
            color=colour,
            va="center",
            arrowprops=arrow,
            annotation_clip=False,
        )
