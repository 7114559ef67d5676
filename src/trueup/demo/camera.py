"""A changed camera: how the shift affects a network, what calibration on shifted images can repair, and a picture."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from trueup._core.formatting import text_table
from trueup.adaptation import Repaired, repair
from trueup.calibrators.base import Calibrator
from trueup.calibrators.temperature import Temperature
from trueup.clamping import Clamped, clamp
from trueup.demo.digits import Digits, Images, loader
from trueup.demo.walkthrough import heading, paragraph
from trueup.io.atomic import atomic_write
from trueup.metrics.table import Scores, compare
from trueup.models.calibrated import Calibrated, collect
from trueup.models.corruptions import CORRUPTIONS, corrupt
from trueup.reports import html as markup
from trueup.reports import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHIFTS = (("contrast", 4), ("brightness", 4))
"""Corruptions, with their severities."""
METRICS = ("accuracy", "confidence", "nll", "ece")
TEXT = (
    "The camera changes: calibration and test digits are shifted, and the network stays the same. Temperature "
    "scaling and Neural Clamping are refitted to the shifted calibration digits. Repair uses the same digits to find "
    "input maps with few parameters that undo the change, and corrects the last layer. A star marks a "
    "statistically significant difference from temperature scaling: its paired 95 % bootstrap interval excludes 0."
)
CAPTION = "The first test digit of each class, with the predicted class and its probability; ≠ marks an error."


@dataclass(frozen=True, eq=False)
class ShiftResult:
    """Scores of a network on images of a changed camera, uncalibrated and calibrated in several ways."""

    corruption: str
    severity: int
    scores: Scores
    """Scores on the test images; paired differences are from temperature scaling."""
    clamped: Clamped
    repaired: Repaired

    @property
    def texts(self) -> list[str]:
        """The formula of the shift, and what clamping and repair found."""
        amount = CORRUPTIONS[self.corruption].settings[self.severity - 1]
        formula = f"(x − ½)·{amount:g} + ½" if self.corruption == "contrast" else f"x + {amount:g}"
        return [
            f"Every pixel x becomes {formula}, clipped to 0 … 1.",
            f"Does the input shift of clamping help? {self.clamped.fit_record.verdict}",
            f"Was there anything to repair? {self.repaired.repair_record.verdict}",
        ]


def evaluate_shift(
    network: nn.Module, data: Digits, corruption: str, severity: int, *, kept: Calibrator, seed: int = 0
) -> ShiftResult:
    """Apply the same shift to calibration and test images, fit on the former, and score on the latter.

    `kept` is the calibrator that was fitted before the camera changed.
    """
    val, test = (apply_shift(part, corruption, severity) for part in (data.val, data.test))
    temperature = Temperature.fit(*collect(network, loader(val), progress=False))
    clamped = clamp(network, loader(val), seed=seed, progress=False)
    repaired = repair(network, loader(val), normalise=nn.Identity(), seed=seed, progress=False)
    networks = {
        "temperature scaling, refitted": Calibrated(network, after=temperature),
        "no calibration": network,
        "calibrator fitted before the shift": Calibrated(network, after=kept),
        "Neural Clamping, refitted": clamped,
        "repair": repaired,
    }
    pairs = {name: collect(each, loader(test), progress=False) for name, each in networks.items()}
    pairs["no calibration, before the shift"] = collect(network, loader(data.test), progress=False)
    return ShiftResult(corruption, severity, compare(pairs, metrics=METRICS, seed=seed), clamped, repaired)


def apply_shift(images: Images, corruption: str, severity: int) -> Images:
    """Apply the shift of the camera to images."""
    return corrupt(images[0], corruption, severity), images[1]


def describe(shifts: Sequence[ShiftResult]) -> str:
    """Describe the shifts for a terminal, with a table of the calibrations for each."""
    parts = [heading("3. Change the camera"), paragraph(TEXT)]
    for shift in shifts:
        first, *findings = shift.texts
        title = paragraph(f"{shift.corruption.capitalize()}. {first}")
        parts += [title, text_table(shift.scores.table()), *map(paragraph, findings)]
    return "\n\n".join(parts)


def draw(network: nn.Module, test: Images, shifts: Sequence[ShiftResult]) -> Figure:
    """Draw the first digit of each class: clean, and for each shift as shifted and as repaired."""
    pixels, labels = test
    first = torch.from_numpy(np.unique(labels.numpy(), return_index=True)[1])
    images, labels = pixels[first], labels[first]
    rows = [("clean", images, network(images))]
    for shift in shifts:
        inputs = torch.stack([corrupt(image, shift.corruption, shift.severity) for image in images])
        before = shift.repaired.before or nn.Identity()
        rows += [(shift.corruption, inputs, network(inputs)), ("repaired", before(inputs), shift.repaired(inputs))]
    figure = style.axes_for(None).get_figure(root=True)
    assert figure is not None
    figure.clear()
    figure.set_size_inches(7.0, 0.95 * len(rows))
    for axes, (name, shown, logits) in zip(figure.subplots(len(rows), len(labels), squeeze=False), rows, strict=True):
        probabilities, predicted = torch.softmax(logits, dim=1).max(dim=1)
        axes[0].text(-0.3, 0.5, name, ha="right", va="center", transform=axes[0].transAxes, fontsize=style.TICK_SIZE)
        for k, ax in enumerate(axes):
            mark, colour = ("", style.RIGHT) if predicted[k] == labels[k] else ("≠ ", style.WRONG)
            ax.imshow(shown[k, 0].numpy(), cmap="gray", vmin=0, vmax=1)
            title = f"{mark}{predicted[k]}, {100 * float(probabilities[k]):.0f} %"
            ax.set_title(title, fontsize=style.SMALL_SIZE, color=colour, pad=2)
            ax.set_axis_off()
    return figure


def write_picture(network: nn.Module, test: Images, shifts: Sequence[ShiftResult], path: Path) -> None:
    """Write the drawing to a PNG file, completely or not at all."""
    with torch.no_grad():
        figure = draw(network, test, shifts)
    with atomic_write(path) as (draft,):
        figure.savefig(draft, format="png", dpi=160)


def section(shifts: Sequence[ShiftResult], picture: Path) -> tuple[str, str]:
    """Make the section of the report: its heading, and the picture with the scores of each calibration."""
    source = f"data:image/png;base64,{b64encode(picture.read_bytes()).decode('ascii')}"
    image = f'<img alt="Digits of each class and their repair" src="{source}" style="width:100%;min-width:40rem">'
    parts = [
        markup.paragraph(TEXT),
        f'<figure><div class="scroll" role="region" aria-label="Digits" tabindex="0">{image}</div>'
        f'<figcaption class="words">{markup.escape(CAPTION)}</figcaption></figure>',
    ]
    for shift in shifts:
        name, (head, *rows) = shift.corruption.capitalize(), shift.scores.table()
        parts += [f"<h3>{name}</h3>", markup.table(name, head, rows), *map(markup.paragraph, shift.texts)]
    return "What if the camera changes?", "".join(parts)
