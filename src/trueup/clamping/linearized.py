"""The network as its first derivatives see it: every λ and every fold is a small smooth problem without the network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trueup.clamping.calibration_set import Inputs
from trueup.clamping.coordinates import Chart
from trueup.clamping.objective import Loss, Norm, Penalty
from trueup.core.optimize import FitError, lbfgs

MEMORY = 1 << 28
"""Bytes that the derivatives of the logits may take."""
STEP = 0.02
"""Length of a difference beside the root mean square norm of the inputs."""


@dataclass(frozen=True)
class Linear:
    """Logits z + Jθ of some samples."""

    logits: Tensor
    jacobian: Tensor
    """(n, classes, r)."""
    labels: Tensor

    def scores(self, loss: Loss, temperature: float) -> tuple[np.ndarray, np.ndarray]:
        """Each sample's gradient by θ, (n, r), and by the inverse temperature, (n,)."""
        slope = loss.slope(self.logits, self.labels, temperature)
        return (
            torch.einsum("nk,nkr->nr", slope, self.jacobian).numpy(),
            (temperature * (slope * self.logits).sum(dim=1)).numpy(),
        )

    def curvature(self, temperature: float) -> np.ndarray:
        """The Gauss-Newton curvature by θ once the temperature is eliminated, (r, r)."""
        p = torch.softmax(self.logits / temperature, dim=1)
        features = torch.cat([self.logits[:, :, None] * temperature, self.jacobian], dim=2) / temperature
        whole = _covariance(p, features)
        return whole[1:, 1:] - np.outer(whole[1:, 0], whole[0, 1:]) / max(whole[0, 0], 1e-300)


@dataclass(frozen=True)
class Validated:
    """Losses of the samples when each was left out of the fit."""

    lams: Sequence[float]
    rows: np.ndarray
    """(λ, n)."""
    plain: np.ndarray
    """(n,), of temperature alone."""

    def candidates(self) -> dict[float, float]:
        """λ → mean loss; infinity is temperature alone."""
        means = dict(zip(self.lams, self.rows.mean(axis=1).tolist(), strict=True))
        return {math.inf: float(self.plain.mean()), **means}

    def best(self) -> float:
        """The λ of least loss; of equal ones the largest."""
        found = self.candidates()
        return min(found, key=lambda lam: (found[lam], -lam))

    def gain(self, lam: float) -> tuple[float, float]:
        """By how much less than temperature's the loss is, and the standard error of that."""
        if math.isinf(lam):
            return 0.0, 0.0
        gains = self.plain - self.rows[list(self.lams).index(lam)]
        return float(gains.mean()), float(gains.std(ddof=1)) / math.sqrt(len(gains))


def room(samples: int, classes: int, coordinates: int) -> int:
    """How many samples' derivatives the memory holds."""
    return max(1, min(samples, MEMORY // (8 * classes * (coordinates + 1))))


def differentiate(chart: Chart, inputs: Inputs, logits: Tensor, labels: Tensor, *, relative: float = STEP) -> Linear:
    """Differences of the logits along each coordinate, by one forward pass over the inputs for each.

    `logits` are those of the inputs as they are. Steps, in units of the inputs' own norm, are large enough for single
    precision, and for the kinks of a network to average out.
    """
    step = relative * chart.reach
    base = logits.double()
    jacobian = torch.empty(*base.shape, chart.size, dtype=torch.float64)
    for j in range(chart.size):
        before, _ = chart.map(step * np.eye(chart.size)[j])
        jacobian[:, :, j] = (chart.network.logits(before, inputs=inputs).double() - base) / step
    return Linear(base, jacobian, labels)


def validate(linear: Linear, loss: Loss, norm: Norm, lams: Sequence[float], *, folds: int) -> Validated:
    """Fit θ and T for every λ with each fold left out in turn, and note the losses there."""
    n = len(linear.labels)
    features = torch.cat([linear.logits[:, :, None], linear.jacobian], dim=2)
    # A row's logits may all be raised alike; without their mean the sums are better conditioned.
    features = features - features.mean(dim=1, keepdim=True)
    fold = torch.arange(n) % folds
    rows, plain = np.zeros((len(lams), n)), np.zeros(n)
    for out in (fold == f for f in range(folds)):
        fitted, labels = features[~out], linear.labels[~out]
        temperature = loss.temperature(linear.logits[~out], labels)
        plain[out] = loss.rows(linear.logits[out], linear.labels[out], temperature).numpy()
        weights = np.concatenate([[1 / temperature], np.zeros(linear.jacobian.shape[2])])
        for i in np.argsort(lams)[::-1]:
            weights = _solve(fitted, labels, loss, Penalty(lams[i], norm), weights)
            judged = features[out] @ torch.from_numpy(weights)
            rows[i, out] = loss.rows(judged, linear.labels[out], 1.0).numpy()
    return Validated(lams, rows, plain)


def _solve(features: Tensor, labels: Tensor, loss: Loss, penalty: Penalty, start: np.ndarray) -> np.ndarray:
    """Minimise the mean loss of β(z + Jθ) plus the penalty of θ over (β, βθ), in which cross-entropy is convex."""
    n = len(labels)

    def objective(weights: np.ndarray) -> tuple[float, np.ndarray]:
        beta, theta = weights[0], weights[1:] / weights[0]
        if beta <= 0:
            return math.inf, np.zeros_like(weights)
        s = features @ torch.from_numpy(weights)
        slope = loss.slope(s, labels, 1.0)
        gradient = (torch.einsum("nk,nkr->r", slope, features) / n).numpy()
        if penalty.norm == "l2" and not theta.any():
            size = float(np.linalg.norm(gradient[1:]))
            gradient[1:] *= max(0.0, 1 - penalty.lam / (beta * size)) if size else 1.0
        by_theta = penalty.slope(theta)
        gradient[1:] += by_theta / beta
        gradient[0] -= by_theta @ theta / beta
        return loss.mean(s, labels, 1.0) + penalty.value(theta), gradient

    p = torch.softmax(features @ torch.from_numpy(start), dim=1)
    curvature = _covariance(p, features)
    curvature[1:, 1:] += (2 * penalty.lam / start[0] ** 2) * np.eye(len(start) - 1)
    curvature += 1e-10 * np.trace(curvature) / len(curvature) * np.eye(len(curvature))
    inverse = np.linalg.inv(curvature)
    best = start
    try:
        best, _ = lbfgs(objective, start, precondition=lambda g: inverse @ g, ftol=1e-8, tolerance=1e-9)
    except FitError:  # separable folds have no minimum: the largest penalty's solution is as good as any
        return start
    return best


def _covariance(p: Tensor, features: Tensor) -> np.ndarray:
    """The mean over samples of the features' covariance under their class probabilities."""
    mean = torch.einsum("nk,nkr->nr", p, features)
    rooted = (p.sqrt()[:, :, None] * features).reshape(-1, features.shape[2])
    return (rooted.T @ rooted - mean.T @ mean).numpy() / len(p)
