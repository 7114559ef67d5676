"""Temperature scaling and clamping on shifted images, with an oracle where the shift adds a constant."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trueup import metrics
from trueup.calibrators.temperature import Temperature
from trueup.clamping.maps import Shift
from trueup.models.calibrated import Calibrated, collect
from trueup.models.corruptions import CORRUPTIONS, corrupt
from trueup_studies.ablation import clamp_with

OFFSETS = ("brightness", "darkness", "colour_cast")
"""Corruptions that add a constant to each channel; only clipping at 0 and 1 loses information."""

Images = tuple[Tensor, Tensor]
"""Pixels in [0, 1], (n, C, H, W), and labels (n,)."""
Normalise = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ShiftBenchmarkRow:
    """Scores of one method on shifted test images."""

    corruption: str
    severity: int
    method: str
    """uncalibrated, temperature, clamping, or oracle: subtract the known offset, then fit a temperature."""
    accuracy: float
    nll: float
    ece: float
    temperature: float
    delta_norm: float
    equivalents: float
    """Cost of the fit in forward passes over the calibration images."""
    verdict: str
    """Clamping only: whether the input shift was kept."""


def benchmark_shift(
    model: nn.Module,
    calibration: Images,
    test: Images,
    corruption: str,
    severity: int,
    *,
    normalise: Normalise | None = None,
    batch_size: int = 500,
    seed: int = 0,
    **options: Any,
) -> list[ShiftBenchmarkRow]:
    """Shift calibration and test images by one corruption, fit each method on the first and score it on the second.

    `normalise` maps pixels in [0, 1] to the network's inputs, if the model does not do it itself. The input shift δ is
    fitted after it. `options` go to `clamp`. The oracle is no upper bound: clipped pixels lost part of the offset, so
    a fitted shift can do better.
    """
    fit_loader, test_loader = (
        _ShiftedLoader(images, labels, corruption, severity, seed, first, normalise, batch_size)
        for (images, labels), first in ((calibration, 0), (test, len(calibration[0])))
    )
    networks: dict[str, tuple[nn.Module, float, float, str]] = {"uncalibrated": (model, 0.0, 0.0, "")}
    scaled = Calibrated(model, after=Temperature.fit(*collect(model, fit_loader, progress=False)))
    networks["temperature"] = scaled, 0.0, 1.0, ""
    clamped = clamp_with(model, fit_loader, seed=seed, progress=False, **options)
    record = clamped.fit_record
    networks["clamping"] = clamped, record.delta_norm, record.equivalents, record.verdict
    offset = offset_of(corruption, severity, calibration[0].shape[1])
    if offset is not None:
        pixels = -offset.expand(calibration[0].shape[1:])
        before = Shift(_apply(pixels, normalise) - _apply(torch.zeros_like(pixels), normalise))
        after = Temperature.fit(*collect(Calibrated(model, before=before), fit_loader, progress=False))
        networks["oracle"] = Calibrated(model, before, after), float(before.delta.norm()), 1.0, ""
    rows = []
    for method, (network, norm, cost, verdict) in networks.items():
        pair = collect(network, test_loader, progress=False)
        scores = (metrics.accuracy(*pair), metrics.nll(*pair), metrics.ece(*pair))
        fitted = network.after if isinstance(network, Calibrated) else None
        temperature = float(fitted.temperature) if isinstance(fitted, Temperature) else 1.0
        rows.append(ShiftBenchmarkRow(corruption, severity, method, *scores, temperature, norm, cost, verdict))
    return rows


def offset_of(corruption: str, severity: int, channels: int) -> Tensor | None:
    """The constant that a corruption adds to every pixel of a channel, (C, 1, 1); None for other corruptions."""
    if corruption not in OFFSETS or severity == 0:
        return None
    setting = CORRUPTIONS[corruption].settings[severity - 1]
    vector = setting if isinstance(setting, tuple) else (setting,) * channels
    return torch.tensor(vector).reshape(-1, 1, 1)


@dataclass(frozen=True)
class _ShiftedLoader:
    """A loader that shifts each batch when it is read; the noise depends on the image's number only."""

    images: Tensor
    labels: Tensor
    corruption: str
    severity: int
    seed: int
    first: int
    normalise: Normalise | None
    size: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for at in range(0, len(self.images), self.size):
            pixels = self.images[at : at + self.size]
            shifted = corrupt(pixels, self.corruption, self.severity, seed=self.seed, first=self.first + at)
            yield _apply(shifted, self.normalise), self.labels[at : at + self.size]


def _apply(pixels: Tensor, normalise: Normalise | None) -> Tensor:
    return pixels if normalise is None else normalise(pixels)
