"""A changed camera: how the shift affects a network, and what calibration on shifted images can repair."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from trueup.adaptation import Repaired, repair
from trueup.calibrators.base import Calibrator
from trueup.calibrators.temperature import Temperature
from trueup.clamping import Clamped, clamp
from trueup.demo.digits import Digits, Images, loader
from trueup.demo.messages import CLAMPED, CLEAN, KEPT, LEVEL, RAW, REFITTED, REPAIRED, SHIFT_METRICS
from trueup.metrics.table import Scores, compare
from trueup.models.calibrated import Calibrated, collect
from trueup.models.corruptions import CORRUPTIONS, corrupt

SHIFTS = (("contrast", 4), ("brightness", 4))
"""Corruptions, with their severities."""


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
    def setting(self) -> str:
        """Sentence with the formula of the shift."""
        amount = CORRUPTIONS[self.corruption].settings[self.severity - 1]
        formula = f"(x − ½)·{amount:g} + ½" if self.corruption == "contrast" else f"x + {amount:g}"
        return f"Every pixel x becomes {formula}, clipped to 0 … 1."


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
        REFITTED: Calibrated(network, after=temperature),
        RAW: network,
        KEPT: Calibrated(network, after=kept),
        CLAMPED: clamped,
        REPAIRED: repaired,
    }
    pairs = {name: collect(each, loader(test), progress=False) for name, each in networks.items()}
    pairs[CLEAN] = collect(network, loader(data.test), progress=False)
    scores = compare(pairs, metrics=SHIFT_METRICS, level=LEVEL, seed=seed)
    return ShiftResult(corruption, severity, scores, clamped, repaired)


def apply_shift(images: Images, corruption: str, severity: int) -> Images:
    """Apply the shift of the camera to images."""
    return corrupt(images[0], corruption, severity), images[1]
