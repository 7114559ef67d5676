"""The digits that the network gets: clean, through the changed camera, and repaired; with their section of the page."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from trueup.clamping.maps import Shift
from trueup.demo import messages
from trueup.demo.camera import ShiftResult
from trueup.demo.digits import Images
from trueup.io.atomic import atomic_write
from trueup.models.corruptions import corrupt
from trueup.reports import style
from trueup.reports.html import escape, paragraph, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.0
"""Inches: two columns of a paper."""
DPI = 160
_STEP = (1.14, 1.4)
"""From an image to the next, across and down, in widths of one."""


SECTION_TITLE = "What if the camera changes?"


@dataclass(frozen=True, eq=False)
class ImageRow:
    """Images and what a network predicts for each."""

    name: str
    images: np.ndarray
    """Pixels (n, H, W), which a repair may take out of [0, 1]."""
    label: np.ndarray
    """The predicted classes."""
    probability: np.ndarray
    right: np.ndarray
    delta: np.ndarray | None = None
    """What was added to every image of the row, (H, W)."""


@dataclass(frozen=True, eq=False)
class RepairFigure:
    """Rows of the same images: the clean ones, then of each shift the shifted and the repaired ones."""

    rows: tuple[ImageRow, ...]
    max_delta: float
    """The largest |δ|, the end of the colour scale of every δ."""


def repair_figure(network: nn.Module, test: Images, shifts: Sequence[ShiftResult]) -> RepairFigure:
    """The first image of every class, before and after each shift and its repair."""
    pixels, labels = test
    first = np.unique(labels.numpy(), return_index=True)[1]
    images, labels = pixels[first], labels[first]
    rows = [_image_row("clean", images, images, network, labels)]
    for shift in shifts:
        inputs = torch.stack([corrupt(image, shift.corruption, shift.severity) for image in images])
        delta, outputs = _shifted(shift.clamped.before, inputs)
        rows.append(_image_row(shift.corruption, inputs, inputs, network, labels))
        rows.append(_image_row("+ δ", outputs, inputs, shift.clamped, labels, delta))
        before = shift.repaired.before
        with torch.no_grad():
            mapped = inputs if before is None else before(inputs)
        rows.append(_image_row("repaired", mapped, inputs, shift.repaired, labels))
    max_delta = max((float(np.abs(row.delta).max()) for row in rows if row.delta is not None), default=0.0)
    return RepairFigure(tuple(rows), max_delta)


def _shifted(before: nn.Module | None, inputs: Tensor) -> tuple[Tensor, Tensor]:
    """The shift δ that clamping fitted, zero if it kept none, and the inputs after it."""
    if not isinstance(before, Shift):
        return torch.zeros_like(inputs[0]), inputs
    with torch.no_grad():
        return before.delta.cpu(), before(inputs)


def _image_row(
    name: str, images: Tensor, inputs: Tensor, network: nn.Module, labels: Tensor, delta: Tensor | None = None
) -> ImageRow:
    with torch.no_grad():
        probability, label = torch.softmax(network(inputs), dim=1).max(dim=1)
    return ImageRow(
        name=name,
        images=images[:, 0].numpy(),
        label=label.numpy(),
        probability=probability.numpy(),
        right=(label == labels).numpy(),
        delta=None if delta is None else delta[0].numpy(),
    )


def draw(record: RepairFigure, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Draw the rows of images, each with its δ first; above an image stand its predicted class and probability."""
    rows, columns = len(record.rows), len(record.rows[0].images) + 1
    right, down = _STEP
    if ax is None:
        ax = style.axes_for(None)
        _figure(ax).set_size_inches(WIDTH, WIDTH * rows * down / ((columns + 1) * right))
    for r, row in enumerate(record.rows):
        top = -r * down
        ax.text(-0.1, top - 0.5, row.name, ha="right", va="center", fontsize=style.TICK_SIZE)
        if row.delta is not None:
            limit = record.max_delta or 1.0
            ax.imshow(row.delta, cmap="PuOr", vmin=-limit, vmax=limit, extent=(0, 1, top - 1, top))
            _caption(ax, 0.5, top, f"δ ≈ {row.delta.mean():+.2f}".replace("-", "−"), style.BLACK)
        for i, image in enumerate(row.images):
            x = (i + 1) * right
            ax.imshow(image, cmap="gray", vmin=0, vmax=1, extent=(x, x + 1, top - 1, top))
            mark, colour = ("", style.RIGHT) if row.right[i] else ("≠ ", style.WRONG)
            _caption(ax, x + 0.5, top, f"{mark}{row.label[i]}, {100 * row.probability[i]:.0f} %", colour)
    ax.set(xlim=(-right, columns * right), ylim=(-rows * down + 0.3, 0.4), aspect="equal")
    ax.set_axis_off()
    if title:
        ax.set_title(title, fontsize=style.TITLE_SIZE, loc="left")
    return ax


def save_png(record: RepairFigure, path: Path) -> None:
    """Write the drawing to a PNG file that is either complete or not there."""
    with atomic_write(path) as (draft,):
        _figure(draw(record)).savefig(draft, format="png", dpi=DPI)


def section_html(shifts: Sequence[ShiftResult], record: RepairFigure, png: bytes) -> str:
    """The section of the report on the changed camera: the drawing, and the scores of each way to calibrate."""
    source = f"data:image/png;base64,{b64encode(png).decode('ascii')}"
    parts = [
        paragraph(messages.CAMERA),
        '<figure><div class="scroll" role="region" aria-label="Digits and their repair" tabindex="0">'
        f'<img alt="{escape(alt_text(record))}" src="{source}" style="width:100%;min-width:40rem"></div>'
        f'<figcaption class="words">{escape(messages.CAPTION)}</figcaption></figure>',
    ]
    for shift in shifts:
        head, *rows = messages.shift_rows(shift)
        head = [head[0].capitalize(), *map(style.label, messages.SHIFT_METRICS)]
        name = shift.corruption.capitalize()
        parts += [f"<h3>{escape(name)}</h3>", paragraph(messages.shift_setting(shift)), table(name, head, rows)]
        parts += map(paragraph, messages.shift_verdicts(shift))
    return "".join(parts)


def alt_text(record: RepairFigure) -> str:
    """The drawing in words.

    >>> row = ImageRow("clean", np.zeros((2, 8, 8)), np.array([3, 1]), np.array([0.9, 0.7]), np.array([True, False]))
    >>> alt_text(RepairFigure((row,), 0.0))
    'Of the 2 digits, the network classifies correctly: clean 1.'
    """
    counts = ", ".join(f"{row.name} {int(row.right.sum())}" for row in record.rows)
    return f"Of the {len(record.rows[0].images)} digits, the network classifies correctly: {counts}."


def _figure(ax: Axes) -> Figure:
    figure = ax.get_figure(root=True)
    assert figure is not None
    return figure


def _caption(ax: Axes, x: float, y: float, text: str, colour: str) -> None:
    ax.text(x, y + 0.06, text, ha="center", va="bottom", fontsize=style.SMALL_SIZE, color=colour)
