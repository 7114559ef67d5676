"""Shifted images repaired: temperature beside clamping, and beside an oracle where the shift is a constant offset."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trueup import metrics
from trueup.calibrators.temperature import Temperature
from trueup.clamping.maps import Shift
from trueup.models.calibrated import Calibrated, collect
from trueup.models.corruptions import CORRUPTIONS, corrupt, corruptions_for
from trueup_studies.ablation import clamp_with

SEVERITIES = (1, 2, 3, 4, 5)
OFFSETS = ("brightness", "darkness", "colour_cast")
"""The corruptions that add a constant, which an oracle can take away again, but for what was clipped."""

Images = tuple[Tensor, Tensor]
"""Pixels in [0, 1], (n, C, H, W), and labels (n,)."""
Normalise = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class ShiftBenchmarkRow:
    """One method on shifted test images."""

    corruption: str
    severity: int
    method: str
    """uncalibrated, temperature, clamping, or oracle: the known offset taken away, then temperature."""
    accuracy: float
    nll: float
    ece: float
    temperature: float
    delta_norm: float
    equivalents: float
    """What the fit cost in forward passes over the calibration images."""
    verdict: str
    """Of clamping: whether the shift of inputs earned its place."""


@dataclass(frozen=True)
class ShiftPicture:
    """A shift as an image, beside what it does to one; all (C, H, W) in pixels, which δ and repair may leave [0, 1]."""

    delta: Tensor
    clean: Tensor
    shifted: Tensor
    repaired: Tensor


def shift_benchmark(
    model: nn.Module,
    calibration: Images,
    test: Images,
    *,
    normalise: Normalise | None = None,
    corruptions: Sequence[str] | None = None,
    severities: Sequence[int] = SEVERITIES,
    batch_size: int = 500,
    seed: int = 0,
    **options: Any,
) -> list[ShiftBenchmarkRow]:
    """Shift calibration and test images alike, calibrate on the first and score on the second, for every shift.

    `normalise` is what the network's inputs underwent after [0, 1], if the model does not do it itself; the shift δ is
    fitted behind it. `options` go to `clamp`. Without names, all corruptions that the number of channels allows.
    The oracle takes the known offset away, after which temperature is fitted. It is no upper bound: pixels that were
    clipped at 0 or 1 lost part of the offset, so that a smaller shift, or one that differs from place to place, can be
    better, and clamping may find it.
    """
    names = corruptions_for(calibration[0].shape[1]) if corruptions is None else corruptions
    return [
        row
        for name in names
        for severity in severities
        for row in benchmark_shift(
            model, calibration, test, name, severity, normalise=normalise, batch_size=batch_size, seed=seed, **options
        )
    ]


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
    """The rows of one corruption at one severity."""
    given, unseen = (
        _ShiftedLoader(images, labels, corruption, severity, seed, first, normalise, batch_size)
        for (images, labels), first in ((calibration, 0), (test, len(calibration[0])))
    )
    networks: dict[str, tuple[nn.Module, float, float, str]] = {"uncalibrated": (model, 0.0, 0.0, "")}
    scaled = Calibrated(model, after=Temperature.fit(*collect(model, given, progress=False)))
    networks["temperature"] = scaled, 0.0, 1.0, ""
    clamped = clamp_with(model, given, seed=seed, progress=False, **options)
    record = clamped.fit_record
    networks["clamping"] = clamped, record.delta_norm, record.equivalents, record.verdict
    offset = offset_of(corruption, severity, calibration[0].shape[1])
    if offset is not None:
        before = Shift(_to_input_space(-offset.expand(calibration[0].shape[1:]), normalise))
        shifted = Calibrated(model, before=before)
        after = Temperature.fit(*collect(shifted, given, progress=False))
        networks["oracle"] = Calibrated(model, before, after), float(before.delta.norm()), 1.0, ""
    rows = []
    for method, (network, norm, cost, verdict) in networks.items():
        pair = collect(network, unseen, progress=False)
        scores = (metrics.accuracy(*pair), metrics.nll(*pair), metrics.ece(*pair))
        fitted = network.after if isinstance(network, Calibrated) else None
        temperature = float(fitted.temperature) if isinstance(fitted, Temperature) else 1.0
        rows.append(ShiftBenchmarkRow(corruption, severity, method, *scores, temperature, norm, cost, verdict))
    return rows


def shift_picture(
    clamped: Calibrated,
    image: Tensor,
    corruption: str,
    severity: int,
    *,
    normalise: Normalise | None = None,
    seed: int = 0,
) -> ShiftPicture:
    """What a fitted shift looks like in pixels, beside an image (C, H, W), the shifted image and the repaired one.

    >>> from trueup.models.calibrated import Calibrated
    >>> fitted = Calibrated(nn.Identity(), before=Shift(torch.full((1, 2, 2), -0.25)))
    >>> shown = shift_picture(fitted, torch.full((1, 2, 2), 0.5), "brightness", 3)
    >>> [f"{x.mean():.2f}" for x in (shown.delta, shown.clean, shown.shifted, shown.repaired)]
    ['-0.25', '0.50', '0.80', '0.55']
    """
    before, shifted = clamped.before, corrupt(image, corruption, severity, seed=seed)
    if not isinstance(before, Shift):
        return ShiftPicture(torch.zeros_like(image), image, shifted, shifted)
    with torch.no_grad():
        repaired = before(_apply_normalise(shifted[None], normalise))[0]
    black = _apply_normalise(torch.zeros_like(image), normalise)
    delta, repaired = (_to_pixels(x, normalise) for x in (before.delta.cpu() + black, repaired))
    return ShiftPicture(delta, image, shifted, repaired)


def offset_of(corruption: str, severity: int, channels: int) -> Tensor | None:
    """What a corruption adds to every pixel of a channel, (C, 1, 1), or None where it is no such thing.

    >>> offset_of("darkness", 2, 1).flatten().tolist(), offset_of("jpeg", 2, 1)
    ([-0.20000000298023224], None)
    """
    if corruption not in OFFSETS or severity == 0:
        return None
    setting = CORRUPTIONS[corruption].settings[severity - 1]
    vector = setting if isinstance(setting, tuple) else (setting,) * channels
    return torch.tensor(vector).reshape(-1, 1, 1)


@dataclass(frozen=True)
class _ShiftedLoader:
    """A loader of shifted images, each batch shifted when its turn comes, always to the same effect."""

    images: Tensor
    labels: Tensor
    corruption: str
    severity: int
    seed: int
    first: int
    """The number of the first image among all, on which its noise depends."""
    normalise: Normalise | None
    size: int

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for at in range(0, len(self.images), self.size):
            pixels = self.images[at : at + self.size]
            shifted = corrupt(pixels, self.corruption, self.severity, seed=self.seed, first=self.first + at)
            yield _apply_normalise(shifted, self.normalise), self.labels[at : at + self.size]


def _apply_normalise(pixels: Tensor, normalise: Normalise | None) -> Tensor:
    return pixels if normalise is None else normalise(pixels)


def _to_input_space(difference: Tensor, normalise: Normalise | None) -> Tensor:
    """A difference of pixels as one of the network's inputs; normalising must be affine, pixel by pixel."""
    return _apply_normalise(difference, normalise) - _apply_normalise(torch.zeros_like(difference), normalise)


def _to_pixels(inputs: Tensor, normalise: Normalise | None) -> Tensor:
    black = _apply_normalise(torch.zeros_like(inputs), normalise)
    return (inputs - black) / (_apply_normalise(torch.ones_like(inputs), normalise) - black)
