"""One increasing function for the logits of all classes."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from trueup.calibrators.base import Calibrator
from trueup.calibrators.temperature import Temperature
from trueup.core import native
from trueup.core.arrays import as_weighted, fill_absent, find_absent, upcast_half
from trueup.core.optimize import Certificate, lbfgs

_SMOOTH = 1e-3
"""Penalty on the squared steps between the logarithms of neighbouring slopes."""


class Diagonal(Calibrator):
    """Put every logit, less its row's mean, through one increasing function: o_k = g(z_k − z̄).

    The slope of g is positive, linear between knots and constant beyond them, so that g is smooth and g(u) = u/T among
    the candidates; it is fitted by likelihood from there, with a slight penalty on the roughness of ln g′. (The paper
    integrates a positive network; knots come as close to any such function, and need no seed.)
    Not for networks whose miscalibration differs between classes.
    Rahimi et al., "Intra order-preserving functions for calibration of multi-class neural networks" (2020).

    >>> z = torch.tensor([[2.0, 1.0, 0.0]])
    >>> Diagonal(knots=[-1.0, 0.0, 1.0], slopes=[2.0, 1.0, 1.0])(z)
    tensor([[2.5000, 1.5000, 0.0000]])
    """

    keeps_argmax = True
    shift_invariant = True
    sample_invariant = True
    differentiable = True

    knots: Tensor
    slopes: Tensor

    def __init__(self, knots: Any, slopes: Any) -> None:
        super().__init__()
        self.keep("knots", knots)
        self.keep("slopes", slopes)
        if self.knots.ndim != 1 or len(self.knots) < 2 or not bool((self.knots.diff() > 0).all()):
            raise ValueError(f"knots must be at least two numbers that rise, got {knots}")
        if self.slopes.shape != self.knots.shape or not bool((self.slopes > 0).all()):
            raise ValueError(f"slopes must be positive, one for each of {len(self.knots)} knots, got {slopes}")

    def map(self, logits: Tensor) -> Tensor:
        """Apply g, taken to be 0 at the first knot."""
        u = centre_rows(logits.double())
        result = torch.zeros_like(u)
        for slope, integral in zip(self.slopes, _integrals(u, self.knots), strict=True):
            result = result + slope * integral
        return result.to(logits.dtype)

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, knots: int = 8, weights: Any = None) -> Self:
        """Diagonal map: minimise the negative log-likelihood in the slopes' logarithms, from temperature scaling."""
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        if knots < 2:
            raise ValueError(f"knots must be at least 2, got {knots}")
        start = Temperature.fit(z, y, weights=w)
        temperature = float(start.temperature)
        at = _knots(z, w, temperature, knots)
        slopes, certificate = _increasing(z, y, w, at, 1 / temperature)
        if start.certificate is not None:
            certificate = dataclasses.replace(certificate, status=start.certificate.status)
        return cls(at, slopes).with_certificate(certificate)


def centre_rows(z: Tensor) -> Tensor:
    """Rows less their mean: a constant added to a row of logits means nothing. An absent option becomes 0."""
    # Less the largest first: the mean of logits far from zero would lose their last digits.
    z = fill_absent(z - z.amax(dim=1, keepdim=True), find_absent(z))
    return z - z.mean(dim=1, keepdim=True)


def _mask(scores: Tensor, absent: Tensor | None) -> Tensor:
    return scores if absent is None else scores.masked_fill(absent, -torch.inf)


def _integrals(u: Tensor, knots: Tensor) -> Iterator[Tensor]:
    """∫ from the first knot to u of each knot's hat function; the outer two stay at 1 beyond the ends."""
    carried = (u - knots[0]).clamp(max=0.0)
    for low, high in itertools.pairwise(knots):
        inside = torch.minimum((u - low).clamp(min=0.0), high - low)
        rising = inside.square() / (2 * (high - low))
        yield carried + inside - rising
        carried = rising
    yield carried + (u - knots[-1]).clamp(min=0.0)


def _knots(z: Tensor, w: Tensor | None, temperature: float, number: int) -> Tensor:
    """Places of equal information p(1 − p) between them, among each row's ten largest logits."""
    values, weights = [], []
    for rows in native.row_chunks(len(z), z.shape[1], native.STEP):
        u = centre_rows(upcast_half(z[rows]).double())
        scaled = _mask(u / temperature, find_absent(z[rows]))
        p, place = torch.softmax(scaled, dim=1).topk(min(10, u.shape[1]), dim=1)
        values.append(u.gather(1, place).flatten())
        information = p * (1 - p)
        weights.append((information if w is None else information * w[rows, None]).flatten())
    u, weight = torch.cat(values), torch.cat(weights)
    ordered, order = u.sort()
    share = (weight[order] + 1e-9 * weight.mean() + 1e-300).cumsum(dim=0)
    wanted = (torch.arange(number, dtype=share.dtype, device=share.device) + 0.5) / number * share[-1]
    quantiles = ordered[torch.searchsorted(share, wanted).clamp(max=len(u) - 1)]
    # Knots that all but coincide are one.
    apart = 1e-6 * max(float(quantiles[-1] - quantiles[0]), temperature)
    kept = [quantiles[0], *(here for before, here in itertools.pairwise(quantiles) if here - before > apart)]
    return torch.stack(kept if len(kept) > 1 else [quantiles[0], quantiles[0] + temperature])


def _increasing(z: Tensor, y: Tensor, w: Tensor | None, knots: Tensor, start: float) -> tuple[Tensor, Certificate]:
    """The slopes at the knots of most penalised likelihood."""
    n, size = len(z), z.numel() * len(knots)
    share = torch.full((n, 1), 1 / n, dtype=torch.float64, device=z.device) if w is None else (w / w.sum())[:, None]

    def pieces() -> Iterator[tuple[Tensor, Tensor | None, Tensor, Tensor]]:
        for rows in native.row_chunks(n, z.shape[1] * len(knots), native.STEP):
            basis = torch.stack(list(_integrals(centre_rows(upcast_half(z[rows]).double()), knots)), dim=2)
            yield basis, find_absent(z[rows]), y[rows, None], share[rows]

    cache = list(pieces()) if size <= native.KEPT else None

    def objective(theta: np.ndarray) -> tuple[float, np.ndarray]:
        slopes = start * torch.exp(torch.from_numpy(theta).to(z.device))
        value, gradient = 0.0, torch.zeros_like(slopes)
        for basis, absent, labels, part in cache or pieces():
            log_q = torch.log_softmax(_mask(basis @ slopes, absent), dim=1)
            value -= float((part * log_q.gather(1, labels)).sum())
            off = torch.exp(log_q).scatter_add(1, labels, -torch.ones_like(log_q[:, :1]))
            gradient += torch.einsum("nk,nkm->m", part * off, basis)
        steps = np.diff(theta)
        # The level is penalised less than a hundredth as much: only where the data say nothing of it.
        value += _SMOOTH * (float(steps @ steps) + 0.01 * float(theta @ theta))
        rough = np.zeros_like(theta)
        rough[1:] += steps
        rough[:-1] -= steps
        return value, (gradient * slopes).cpu().numpy() + 2 * _SMOOTH * (rough + 0.01 * theta)

    theta, certificate = lbfgs(objective, np.zeros(len(knots)))
    return start * torch.exp(torch.from_numpy(theta).to(z.device)), certificate
