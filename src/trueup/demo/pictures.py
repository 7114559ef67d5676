"""The digits as the network meets them: clean, through the changed camera, and repaired."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from trueup.clamping.shift_benchmark import shift_picture
from trueup.demo.camera import Shifted
from trueup.demo.digits import Images
from trueup.io.atomic import atomic_write
from trueup.report import canvas, palette
from trueup.report.drawings import draw

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 7.0
"""Inches: two columns of a paper."""
DPI = 160
_STEP = (1.14, 1.4)
"""From an image to the next, across and down, in widths of one."""


@dataclass(frozen=True, eq=False)
class Strip:
    """A row of images with what a network says of each."""

    name: str
    images: np.ndarray
    """Pixels (n, H, W), which a repair may take out of [0, 1]."""
    label: np.ndarray
    """What the network takes each for."""
    probability: np.ndarray
    right: np.ndarray
    delta: np.ndarray | None = None
    """What was added to every image of the row, (H, W)."""


@dataclass(frozen=True, eq=False)
class Repairs:
    """Rows of the same images: the clean ones, then of each shift the shifted and the repaired ones."""

    strips: tuple[Strip, ...]
    reach: float
    """The largest |δ|, the end of the scale that all pictures of δ share."""


def repairs(network: nn.Module, test: Images, found: Sequence[Shifted]) -> Repairs:
    """The first image of every class, which nobody has picked, before and after each shift and its repair."""
    pixels, labels = test
    first = np.unique(labels.numpy(), return_index=True)[1]
    images, labels = pixels[first], labels[first]
    strips = [_strip("clean", images, images, network, labels)]
    for each in found:
        shown = [shift_picture(each.clamped, image, each.corruption, each.severity) for image in images]
        given, repaired = (torch.stack([getattr(p, name) for p in shown]) for name in ("shifted", "repaired"))
        strips.append(_strip(each.corruption, given, given, network, labels))
        strips.append(_strip("+ δ", repaired, given, each.clamped, labels, shown[0].delta))
    reach = max((float(np.abs(s.delta).max()) for s in strips if s.delta is not None), default=0.0)
    return Repairs(tuple(strips), reach)


def _strip(
    name: str, shown: Tensor, given: Tensor, network: nn.Module, labels: Tensor, delta: Tensor | None = None
) -> Strip:
    with torch.no_grad():
        probability, label = torch.softmax(network(given), dim=1).max(dim=1)
    return Strip(
        name=name,
        images=shown[:, 0].numpy(),
        label=label.numpy(),
        probability=probability.numpy(),
        right=(label == labels).numpy(),
        delta=None if delta is None else delta[0].numpy(),
    )


@draw.register(Repairs)
def _repairs(record: Repairs, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """A row a strip, δ before it, and over each image what the network takes it for and how surely."""
    rows, columns = len(record.strips), len(record.strips[0].images) + 1
    right, down = _STEP
    if ax is None:
        ax = canvas.axes_for(None)
        _figure(ax).set_size_inches(WIDTH, WIDTH * rows * down / ((columns + 1) * right))
    for r, strip in enumerate(record.strips):
        top = -r * down
        ax.text(-0.1, top - 0.5, strip.name, ha="right", va="center", fontsize=canvas.TICKS)
        if strip.delta is not None:
            reach = record.reach or 1.0
            ax.imshow(strip.delta, cmap="PuOr", vmin=-reach, vmax=reach, extent=(0, 1, top - 1, top))
            _word(ax, 0.5, top, f"δ ≈ {strip.delta.mean():+.2f}".replace("-", "−"), palette.BLACK)
        for i, image in enumerate(strip.images):
            x = (i + 1) * right
            ax.imshow(image, cmap="gray", vmin=0, vmax=1, extent=(x, x + 1, top - 1, top))
            mark, colour = ("", palette.RIGHT) if strip.right[i] else ("≠ ", palette.WRONG)
            _word(ax, x + 0.5, top, f"{mark}{strip.label[i]}, {100 * strip.probability[i]:.0f} %", colour)
    ax.set(xlim=(-right, columns * right), ylim=(-rows * down + 0.3, 0.4), aspect="equal")
    ax.set_axis_off()
    if title:
        ax.set_title(title, fontsize=canvas.WORDS, loc="left")
    return ax


def save_picture(record: Repairs, path: Path) -> None:
    """Write the drawing to a PNG file that is either complete or not there."""
    with atomic_write(path) as (draft,):
        _figure(draw(record)).savefig(draft, format="png", dpi=DPI)


def _figure(ax: Axes) -> Figure:
    found = ax.get_figure(root=True)
    assert found is not None
    return found


def _word(ax: Axes, x: float, y: float, text: str, colour: str) -> None:
    ax.text(x, y + 0.06, text, ha="center", va="bottom", fontsize=canvas.SMALL, color=colour)
