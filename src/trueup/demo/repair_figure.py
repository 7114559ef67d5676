"""Figure of digits, clean, through the changed camera and repaired, and the section of the report around it."""

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
"""Distance from one image to the next, across and down, in image widths."""


SECTION_TITLE = "What if the camera changes?"


@dataclass(frozen=True, eq=False)
class ImageRow:
    """Images, and the prediction of a network for each."""

    name: str
    images: np.ndarray
    """Pixels (n, H, W); a repair may map them outside [0, 1]."""
    label: np.ndarray
    """Predicted classes."""
    probability: np.ndarray
    """Probability of each predicted class."""
    right: np.ndarray
    """Whether each prediction is right."""
    delta: np.ndarray | None = None
    """Input shift that was added to every image, (H, W)."""


def repair_figure(network: nn.Module, test: Images, shifts: Sequence[ShiftResult]) -> list[ImageRow]:
    """Take the first image of every class, and make a clean row and, for each shift, shifted and repaired rows."""
    pixels, labels = test
    first = np.unique(labels.numpy(), return_index=True)[1]
    images, labels = pixels[first], labels[first]
    rows = [_image_row("clean", images, images, network, labels)]
    for shift in shifts:
        inputs = torch.stack([corrupt(image, shift.corruption, shift.severity) for image in images])
        rows.append(_image_row(shift.corruption, inputs, inputs, network, labels))
        before, repair = shift.clamped.before, shift.repaired.before
        with torch.no_grad():
            mapped = inputs if repair is None else repair(inputs)
            delta, outputs = torch.zeros_like(inputs[0]), inputs
            if isinstance(before, Shift):  # otherwise clamping kept no shift
                delta, outputs = before.delta.cpu(), before(inputs)
        rows.append(_image_row("+ δ", outputs, inputs, shift.clamped, labels, delta))
        rows.append(_image_row("repaired", mapped, inputs, shift.repaired, labels))
    return rows


def _image_row(
    name: str, images: Tensor, inputs: Tensor, network: nn.Module, labels: Tensor, delta: Tensor | None = None
) -> ImageRow:
    with torch.no_grad():
        probability, label = torch.softmax(network(inputs), dim=1).max(dim=1)
    arrays = (images[:, 0].numpy(), label.numpy(), probability.numpy(), (label == labels).numpy())
    return ImageRow(name, *arrays, delta=None if delta is None else delta[0].numpy())


def draw(rows: Sequence[ImageRow]) -> Figure:
    """Draw the rows of images, with δ first and the predicted class and its probability above each image."""
    columns, (right, down) = len(rows[0].images) + 1, _STEP
    ax = style.axes_for(None)
    figure = ax.get_figure(root=True)
    assert figure is not None
    figure.set_size_inches(WIDTH, WIDTH * len(rows) * down / ((columns + 1) * right))
    # One colour scale for every δ, up to the largest |δ|.
    limit = max((float(np.abs(row.delta).max()) for row in rows if row.delta is not None), default=0.0) or 1.0
    for r, row in enumerate(rows):
        top = -r * down
        ax.text(-0.1, top - 0.5, row.name, ha="right", va="center", fontsize=style.TICK_SIZE)
        if row.delta is not None:
            ax.imshow(row.delta, cmap="PuOr", vmin=-limit, vmax=limit, extent=(0, 1, top - 1, top))
            _caption(ax, 0.5, top, f"δ ≈ {row.delta.mean():+.2f}".replace("-", "−"), style.BLACK)
        for i, image in enumerate(row.images):
            x = (i + 1) * right
            ax.imshow(image, cmap="gray", vmin=0, vmax=1, extent=(x, x + 1, top - 1, top))
            mark, colour = ("", style.RIGHT) if row.right[i] else ("≠ ", style.WRONG)
            _caption(ax, x + 0.5, top, f"{mark}{row.label[i]}, {100 * row.probability[i]:.0f} %", colour)
    ax.set(xlim=(-right, columns * right), ylim=(-len(rows) * down + 0.3, 0.4), aspect="equal")
    ax.set_axis_off()
    return figure


def save_png(rows: Sequence[ImageRow], path: Path) -> None:
    """Write the drawing to a PNG file, completely or not at all."""
    with atomic_write(path) as (draft,):
        draw(rows).savefig(draft, format="png", dpi=DPI)


def section_html(shifts: Sequence[ShiftResult], images: Sequence[ImageRow], png: bytes) -> str:
    """Make the section of the report on the changed camera: the drawing, and the scores of each calibration."""
    source = f"data:image/png;base64,{b64encode(png).decode('ascii')}"
    parts = [
        paragraph(messages.CAMERA),
        '<figure><div class="scroll" role="region" aria-label="Digits and their repair" tabindex="0">'
        f'<img alt="{escape(alt_text(images))}" src="{source}" style="width:100%;min-width:40rem"></div>'
        f'<figcaption class="words">{escape(messages.CAPTION)}</figcaption></figure>',
    ]
    for shift in shifts:
        head, *rows = messages.shift_rows(shift)
        head = [head[0].capitalize(), *map(style.label, messages.SHIFT_METRICS)]
        name = shift.corruption.capitalize()
        parts += [f"<h3>{escape(name)}</h3>", paragraph(shift.setting), table(name, head, rows)]
        parts += map(paragraph, messages.shift_verdicts(shift))
    return "".join(parts)


def alt_text(rows: Sequence[ImageRow]) -> str:
    """Describe the drawing in words.

    >>> row = ImageRow("clean", np.zeros((2, 8, 8)), np.array([3, 1]), np.array([0.9, 0.7]), np.array([True, False]))
    >>> alt_text([row])
    'Of the 2 digits, the network classifies correctly: clean 1.'
    """
    counts = ", ".join(f"{row.name} {int(row.right.sum())}" for row in rows)
    return f"Of the {len(rows[0].images)} digits, the network classifies correctly: {counts}."


def _caption(ax: Axes, x: float, y: float, text: str, colour: str) -> None:
    ax.text(x, y + 0.06, text, ha="center", va="bottom", fontsize=style.SMALL_SIZE, color=colour)
