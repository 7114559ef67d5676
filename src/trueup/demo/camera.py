"""A camera that changes: what it does to a network, and what calibration on its new pictures can repair."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from trueup.calibrators.base import Calibrator
from trueup.calibrators.temperature import Temperature
from trueup.clamping import Clamped, clamp
from trueup.demo.digits import Digits, Images, loader
from trueup.metrics.table import Scores, compare
from trueup.models.calibrated import Calibrated, collect
from trueup.models.corruptions import CORRUPTIONS, corrupt

SHIFTS = (("contrast", 4), ("brightness", 4))
"""What happens to the camera, with its severity."""
METRICS = ("accuracy", "confidence", "nll", "ece")
LEVEL = 0.95
"""Of the intervals."""

CLEAN, RAW, KEPT, REFITTED, CLAMPED = "clean", "raw", "kept", "temperature", "clamping"
"""Before the shift; after it the network as it is, with the calibrator of before, with a temperature fitted anew, and
clamped, also fitted anew."""


@dataclass(frozen=True, eq=False)
class Shifted:
    """A network behind a changed camera, as it is and repaired."""

    corruption: str
    severity: int
    scores: Scores
    """On the test images; paired changes are those from temperature alone."""
    clamped: Clamped

    @property
    def setting(self) -> str:
        """What became of every pixel x."""
        amount = CORRUPTIONS[self.corruption].settings[self.severity - 1]
        return f"(x − ½)·{amount:g} + ½" if self.corruption == "contrast" else f"x + {amount:g}"


def shifted(
    network: nn.Module, data: Digits, corruption: str, severity: int, *, kept: Calibrator, seed: int = 0
) -> Shifted:
    """Shift calibration and test images alike, fit on the first, and score on the second.

    `kept` is the calibrator that was fitted before the camera changed.
    """
    val, test = (changed(part, corruption, severity) for part in (data.val, data.test))
    temperature = Temperature.fit(*collect(network, loader(val), progress=False))
    clamped = clamp(network, loader(val), seed=seed, progress=False)
    networks = {
        REFITTED: Calibrated(network, after=temperature),
        RAW: network,
        KEPT: Calibrated(network, after=kept),
        CLAMPED: clamped,
    }
    pairs = {name: collect(each, loader(test), progress=False) for name, each in networks.items()}
    pairs[CLEAN] = collect(network, loader(data.test), progress=False)
    return Shifted(corruption, severity, compare(pairs, metrics=METRICS, level=LEVEL, seed=seed), clamped)


def changed(images: Images, corruption: str, severity: int) -> Images:
    """The same digits as the changed camera shows them."""
    return corrupt(images[0], corruption, severity), images[1]
