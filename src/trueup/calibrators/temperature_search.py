"""Searches for one inverse temperature β = 1/T: by likelihood, which is convex in it, Brier score and focal loss."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trueup.core import chunks
from trueup.core.arrays import NEVER, count_options, fill_absent, find_absent, upcast_half
from trueup.core.loss_sums import focal_loss, focal_weight, temperature_sums
from trueup.core.optimize import Certificate, halley, newton

Loss = Callable[[float], tuple[float, float, float]]

MAX_SCALE_RATIO = 1e6
"""How far from the logits' own scale 1/T may go before the likelihood's fit stops at a bound."""
MIN_BRIER_RATIO, MAX_BRIER_RATIO = 1e-3, 1e2
"""Where the Brier score's T is searched, as multiples of the logits' own scale."""
_FARTHEST = 1e3  # times the median distance of a row's two largest logits: what is further counts as this far
_FEW, _FEW_WIDE, _WIDE = 500, 100, 4096  # rows that a search begins with; fewer where there are so many classes
_SUBSAMPLE = 2000
_NEAR, _LAST = 5e-2, 1e-4  # a Newton step of this size leaves an error of about its square
_THIRD_NEAR, _THIRD = 0.1, 2e-4  # and one of third order of its cube


def inverse_temperature(
    z: Tensor, y: Tensor, w: Tensor | None = None, *, smooth: float = 0.0
) -> tuple[float, Certificate]:
    """1/T of most likelihood, in trusted tensors: Newton on some rows, on all of them quickly, then exactly.

    With `smooth` the labels are smoothed as if so many rows had all classes alike, ε = smooth/(n + smooth): the best
    1/T is then finite where every label has its row's largest logit.
    """
    scale = scale_of(z)
    if scale == 0:
        options = torch.as_tensor(count_options(z), dtype=torch.float64)
        return 1.0, Certificate(
            "converged", 0.0, 0, 0, float(options.log().mean())
        )  # constant rows: every T is as good
    rise = _rise(z, y, w, smooth)
    quick = None if z.dtype == torch.float64 else _tilt(_mean_loss(z, y, w, quick=True), rise)
    return search_beta(_tilt(_mean_loss(z, y, w), rise), quick, _estimate_from_few(z, y, w, scale), scale)


def smoothed_loss(z: Tensor, y: Tensor, w: Tensor | None, smooth: float) -> Loss:
    """The mean loss of labels smoothed as in `inverse_temperature`, as a function of 1/T, with two derivatives."""
    return _tilt(_mean_loss(z, y, w), _rise(z, y, w, smooth))


def _rise(z: Tensor, y: Tensor, w: Tensor | None, smooth: float) -> float:
    """The slope that smoothed labels add to the mean loss."""
    if not smooth:
        return 0.0
    n = len(z) if w is None else float(w.sum())
    ahead = torch.cat([_label_above_mean(z[rows], y[rows]) for rows in chunks.row_chunks(len(z), z.shape[1])])
    return smooth / (n + smooth) * float(ahead.mean() if w is None else w @ ahead / n)


def _label_above_mean(z: Tensor, y: Tensor) -> Tensor:
    """The label's logit less the mean of its row."""
    double = z.double()
    return double.gather(1, y[:, None])[:, 0] - fill_absent(double, find_absent(z)).mean(dim=1)


def finite_inverse_temperature(z: Tensor, y: Tensor, w: Tensor | None = None) -> float:
    """1/T of most likelihood, or of smoothed labels where every label has its row's largest logit."""
    beta, certificate = inverse_temperature(z, y, w)
    if certificate.status == "bound" and beta * scale_of(z) > 1:
        beta, _ = inverse_temperature(z, y, w, smooth=1.0)
    return beta


def _tilt(loss: Loss, rise: float) -> Loss:
    """The loss with a straight line added."""

    def tilted(beta: float) -> tuple[float, float, float]:
        value, slope, curvature = loss(beta)
        return value + rise * beta, slope + rise, curvature

    return tilted


def search_beta(
    loss: Loss, quick: Loss | None, few: SubsampleEstimate | None, scale: float
) -> tuple[float, Certificate]:
    """The best 1/T by what some rows say, then a quick loss of all rows if there is one, then the exact one.

    Where some rows say nothing it may be at a bound.
    """
    low, high = 1 / (MAX_SCALE_RATIO * scale), MAX_SCALE_RATIO / scale
    if few is None:
        bound = _bound(loss, low, high)
        if bound is None:
            return newton(loss, 1 / scale, low=low, high=high, tolerance=_LAST)
        value, slope, _ = loss(bound)
        return bound, Certificate("bound", abs(slope), 0, 3, value)
    near, passes = few.near, 0
    if quick is not None:
        near, (before, curvature_before), passes = _refine(quick, few, low, high)
        value, slope, curvature = loss(near)
        third = (curvature - curvature_before) / (near - before) if near != before else 0.0
        step = halley(slope, curvature, third)
        if abs(step) <= _THIRD * near:
            return near + step, Certificate("converged", abs(slope), 1, passes + 1, value)
        near, passes = min(max(near + step, near / 2), 2 * near), passes + 1
    beta, certificate = newton(loss, near, low=low, high=high, tolerance=_LAST)
    return beta, replace(certificate, passes=certificate.passes + passes)


def bound_reason(beta: float, scale: float) -> str:
    """Why a likelihood has no best 1/T: it rises up to the bound that was reached, of logits of this scale."""
    if beta * scale > 1:
        return "every label has its row's largest logit"
    return "the logits tell labels apart no better than chance"


def _refine(loss: Loss, few: SubsampleEstimate, low: float, high: float) -> tuple[float, tuple[float, float], int]:
    """A better 1/T, where the loss was last asked with its curvature there, and how often it was asked."""
    recorded, seen = _record(loss)
    _, slope, curvature = recorded(few.near)
    near = few.near + halley(slope, curvature, few.third * curvature)
    if abs(near - few.near) > _THIRD_NEAR * few.near:
        start = min(max(near, few.near / 2), 2 * few.near)
        near, _ = newton(recorded, start, low=low, high=high, tolerance=_NEAR)
    return near, seen[-1], len(seen)


def _record(loss: Loss) -> tuple[Loss, list[tuple[float, float]]]:
    """A loss that notes where it was asked and the curvature there."""
    seen: list[tuple[float, float]] = []

    def recorded(beta: float) -> tuple[float, float, float]:
        found = loss(beta)
        seen.append((beta, found[2]))
        return found

    return recorded, seen


def near_inverse_temperature(z: Tensor, y: Tensor, w: Tensor | None = None) -> float:
    """1/T to a few percent, where a search of more than a temperature may begin."""
    scale = scale_of(z)
    if scale == 0:
        return 1.0
    few = _estimate_from_few(z, y, w, scale)
    return finite_inverse_temperature(z, y, w) if few is None else few.near


class SubsampleEstimate(NamedTuple):
    """What some rows say."""

    near: float
    """Where their best 1/T is."""
    third: float
    """The loss's third derivative over its second there, about."""


def _estimate_from_few(z: Tensor, y: Tensor, w: Tensor | None, scale: float) -> SubsampleEstimate | None:
    """1/T of some rows; none if there are hardly more, or it is at a bound, where that of all rows need not be."""
    # As many as save a pass over all: a hundredth of them costs little, and brings the search near enough.
    least = _FEW if z.shape[1] < _WIDE else _FEW_WIDE
    few = _SUBSAMPLE if z.dtype == torch.float64 else max(least, min(len(z) // 100, 2 * _SUBSAMPLE))
    if len(z) <= 4 * few:
        return None
    some = slice(None, None, len(z) // few)
    if z.device.type == "cpu" and z.dtype in (torch.float32, torch.float64):
        rows = torch.from_numpy(z.numpy()[some].copy())  # by torch it would wake all cores
    else:
        rows = z[some].contiguous()
    return subsample_estimate(rows, y[some].contiguous(), scale, None if w is None else w[some].contiguous())


def subsample_estimate(z: Tensor, y: Tensor, scale: float, w: Tensor | None = None) -> SubsampleEstimate | None:
    """What some rows say; none if their best is at a bound."""
    low, high = 1 / (MAX_SCALE_RATIO * scale), MAX_SCALE_RATIO / scale
    if _bound(_mean_loss(z, y, w), low, high) is not None:
        return None
    loss, seen = _record(_mean_loss(z, y, w))
    near, found = newton(loss, 1 / scale, low=low, high=high, tolerance=1e-2)
    if found.status != "converged":
        return None
    (before, first), (last, second) = seen[-2:] if len(seen) > 1 else (seen[0], seen[0])
    return SubsampleEstimate(
        near, (second - first) / (last - before) / second if last != before and second > 0 else 0.0
    )


def brier_inverse_temperature(z: Tensor, y: Tensor, w: Tensor | None = None) -> tuple[float, Certificate]:
    """1/T of least Brier score, in trusted tensors.

    The score may have more than one valley: a grid over some rows finds the deepest, Newton its bottom over all rows.
    """
    every = max(1, len(z) // _SUBSAMPLE)
    some, labels, few = z[::every], y[::every], None if w is None else w[::every]
    scale = scale_of(z)
    if scale == 0:
        level = 1 - float(torch.as_tensor(1 / count_options(z)).mean())
        return 1.0, Certificate("converged", 0.0, 0, 0, level)  # constant rows: every T is as good
    grid = np.geomspace(1 / MAX_BRIER_RATIO, 1 / MIN_BRIER_RATIO, 26) / scale
    deepest = int(np.argmin([_brier(some, labels, float(beta), few)[0] for beta in grid]))
    low, high = max(deepest - 1, 0), min(deepest + 1, len(grid) - 1)
    while low > 0 and _brier(z, y, float(grid[low]), w)[1] > 0:
        low -= 1
    while high < len(grid) - 1 and _brier(z, y, float(grid[high]), w)[1] < 0:
        high += 1
    return newton(lambda b: _brier(z, y, b, w), float(grid[deepest]), low=float(grid[low]), high=float(grid[high]))


def focal_inverse_temperature(
    z: Tensor, y: Tensor, gamma: float, *, near: float | None = None, w: Tensor | None = None
) -> tuple[float, Certificate]:
    """1/T of least focal loss −(1 − p_y)^γ ln p_y, in trusted tensors; `near` is where it is searched first.

    The loss need not be convex in 1/T: a coarse walk about the likelihood's optimum finds the valley, Newton its
    bottom.
    """
    beta, certificate = inverse_temperature(z, y, w)
    if certificate.status == "bound" or not scale_of(z):
        return beta, certificate
    grid = beta * np.geomspace(0.02, 20.0, 41) if near is None else near * np.geomspace(1 / 1.5, 1.5, 9)
    values = [_focal(z, y, b, gamma, w)[0] for b in grid.tolist()]
    at = int(np.argmin(values))
    if at in (0, len(grid) - 1):
        if near is not None:
            return focal_inverse_temperature(z, y, gamma, w=w)
        slope = _focal(z, y, float(grid[at]), gamma, w)[1]
        return float(grid[at]), Certificate("bound", abs(slope), 0, 42, values[at])
    low, high = float(grid[at - 1]), float(grid[at + 1])
    return newton(lambda b: _focal(z, y, b, gamma, w), float(grid[at]), low=low, high=high)


def _focal(z: Tensor, y: Tensor, beta: float, gamma: float, w: Tensor | None = None) -> tuple[float, float, float]:
    """The mean focal loss of softmax(βz), and its first two derivatives in β."""
    sums = np.zeros(3)
    for part, labels, share in shifted_chunks(z, y, w):
        log_p = torch.log_softmax(beta * part, dim=1)
        p = log_p.exp()
        mean = (p * part).sum(dim=1, keepdim=True)
        off = mean - part.gather(1, labels)
        variance = (p * (part - mean).square()).sum(dim=1, keepdim=True)
        log_y = log_p.gather(1, labels)
        weight, turn = focal_weight(log_y, gamma)
        sums[0] += float((share * focal_loss(log_y, gamma)).sum())
        sums[1] += float((share * weight * off).sum())
        sums[2] += float((share * (weight * variance - turn * off.square())).sum())
    value, slope, curvature = sums.tolist()
    return value, slope, curvature


def _bound(loss: Loss, low: float, high: float) -> float | None:
    """The end of the range towards which a convex loss falls all the way, if it does."""
    if loss(high)[1] <= 0:
        return high
    return low if loss(low)[1] >= 0 else None


def _mean_loss(z: Tensor, y: Tensor, w: Tensor | None, *, quick: bool = False) -> Loss:
    n = len(z) if w is None else float(w.sum())

    def derivatives(beta: float) -> tuple[float, float, float]:
        value, slope, curvature = temperature_sums(z, y, beta, w, quick=quick)
        return value / n, slope / n, curvature / n

    return derivatives


def _brier(z: Tensor, y: Tensor, beta: float, w: Tensor | None = None) -> tuple[float, float, float]:
    """The mean Brier score of softmax(βz), and its first two derivatives in β."""
    sums = np.zeros(3)
    for part, labels, share in shifted_chunks(z, y, w):
        p = torch.softmax(beta * part, dim=1)
        off = part - (p * part).sum(dim=1, keepdim=True)
        rise = p * off
        bend = rise * off - p * (rise * off).sum(dim=1, keepdim=True)
        p_y, rise_y, bend_y = (x.gather(1, labels)[:, 0] for x in (p, rise, bend))
        rows = share[:, 0]
        sums[0] += float(((p * p).sum(dim=1) - 2 * p_y + 1) @ rows)
        sums[1] += float(2 * ((p * rise).sum(dim=1) - rise_y) @ rows)
        sums[2] += float(2 * ((rise * rise + p * bend).sum(dim=1) - bend_y) @ rows)
    value, slope, curvature = sums.tolist()
    return value, slope, curvature


def scale_of(z: Tensor) -> float:
    """The median standard deviation of a row's logits, of some hundred rows; absent options are left out.

    A logit counts as no further below the largest than a thousand times the median distance of the second, so that
    numbers that only fill up rows cannot make the scale.
    """
    few = z[:: max(1, len(z) // 256)]
    parts = [few[rows] for rows in chunks.row_chunks(len(few), z.shape[1], chunks.STEP)]  # a vocabulary is large
    tops = [torch.topk(upcast_half(part), 2, dim=1).values.double().cpu().numpy() for part in parts]
    farthest = _FARTHEST * np.median(np.concatenate(tops) @ [1.0, -1.0])
    spread = []
    for part, top in zip(parts, tops, strict=True):
        below = part.cpu().double().numpy() - top[:, :1]
        here = None if np.isfinite(below.min()) else np.isfinite(below)
        if farthest > 0:
            np.maximum(below, -farthest, out=below)
        spread.append(below.std(axis=1) if here is None else below.std(axis=1, where=here))
    return float(np.median(np.concatenate(spread)))


def shifted_chunks(z: Tensor, y: Tensor, w: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Rows in double, less their largest logit, with their labels and their shares of all weight as columns."""
    share = torch.full((len(z),), 1 / len(z), dtype=torch.float64, device=z.device) if w is None else w / w.sum()
    for rows in chunks.row_chunks(len(z), z.shape[1], chunks.STEP):
        double = upcast_half(z[rows]).double()
        yield (double - double.amax(dim=1, keepdim=True)).clamp(min=NEVER), y[rows, None], share[rows, None]
