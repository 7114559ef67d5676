"""Drawings of a repair: the ladder of what was tried, and inputs before and after."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from trueup.clamping.input_repair import RepairRecord
from trueup.core.errors import InputError
from trueup.io.atomic import atomic_write
from trueup.report import style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PICTURES = 8


def draw_ladder(record: RepairRecord, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """The held-out loss of each rung, its error bar that of the gain over the rung below; hollow ones were refused.

    >>> from trueup.clamping.input_repair import repair
    >>> x, y = torch.eye(3).repeat(20, 1), torch.tensor([0, 1, 2, 0, 1, 1]).repeat(10)
    >>> ax = draw_ladder(repair(torch.nn.Identity(), [(x, y)]).repair_record)
    >>> ax.get_xlabel()
    'Held-out log-loss (nats)'
    """
    if not record.labelled:
        raise InputError("record", "be of a repair with labels", "one without", "there is no held-out loss to draw")
    ax = style.axes_for(ax, height=max(1.6, 0.9 + 0.3 * len(record.rungs)))
    for number, rung in enumerate(record.rungs):
        colour = style.line_style(0 if rung.kept else 1)["color"]
        look = {"color": colour, "markerfacecolor": colour if rung.kept else "none"}
        ax.errorbar([rung.loss], [number], xerr=[rung.error], fmt="o", markersize=4, capsize=2, **look)
    ax.set_yticks(range(len(record.rungs)), [style.shorten(rung.title, 40) for rung in record.rungs])
    ax.invert_yaxis()
    style.set_labels(ax, "What was tried (hollow: refused)" if title is None else title, "Held-out log-loss (nats)", "")
    return ax


def ladder_figure(record: RepairRecord) -> Figure:
    """The ladder in a figure of its own."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, max(1.8, 0.9 + 0.3 * len(record.rungs))), layout="constrained")
    draw_ladder(record, figure.subplots())
    return figure


def save_ladder(record: RepairRecord, path: str | os.PathLike[str]) -> None:
    """Draw the ladder to a file, whose suffix says which format, and which is complete or not there."""
    figure = ladder_figure(record)
    with atomic_write(Path(path)) as (draft,):
        figure.savefig(draft, format=Path(path).suffix[1:])


def save_inputs(repaired: Any, images: torch.Tensor, path: str | os.PathLike[str]) -> None:
    """Draw some inputs before and after the map to a file, as `save_ladder` does."""
    figure = draw_inputs(repaired, images)
    with atomic_write(Path(path)) as (draft,):
        figure.savefig(draft, format=Path(path).suffix[1:], dpi=150, bbox_inches="tight")


def draw_inputs(repaired: Any, images: torch.Tensor) -> Figure:
    """A strip of a network's inputs as they come, above the same through the input map, in pixels.

    `images` are inputs of the network, (n, C, H, W); a few are shown. Where there is no map, there is one row. Returns
    the figure.
    """
    from matplotlib.figure import Figure

    shown = images[:_PICTURES].detach().float().cpu()
    before = repaired.before
    with torch.no_grad():
        after = shown if before is None else before(shown.to(before.low.device)).cpu()
    if before is not None:
        low, width = before.low.cpu(), (before.high - before.low).cpu()
        shown, after = (shown - low) / width, (after - low) / width
    rows = [("as they come", shown), *([] if before is None else [("repaired", after)])]
    figure = Figure(figsize=(0.8 * len(shown), 0.95 * len(rows)))
    axes = figure.subplots(len(rows), len(shown), squeeze=False)
    for row, (name, pictures) in enumerate(rows):
        for column, picture in enumerate(pictures):
            pixels = picture.clamp(0, 1).movedim(0, -1).numpy()
            ax = axes[row, column]
            ax.imshow(pixels[..., 0] if pixels.shape[-1] != 3 else pixels, cmap="gray", vmin=0, vmax=1)
            ax.set_axis_off()
        axes[row, 0].set_title(name, fontsize=8, loc="left")
    return figure
