"""The network as its first derivatives see it: every λ and every fold is a small smooth problem without the network."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trueup._core.optimize import FitError, Stage, lbfgs
from trueup.clamping.calibration_set import CalibrationSet
from trueup.clamping.input_parameters import InputParameters
from trueup.clamping.problem import Loss, Norm, Penalty, paired_gain

MEMORY = 1 << 28
"""Bytes that the derivatives of the logits may take."""
STEP = 0.02
"""Length of a difference beside the root mean square norm of the inputs."""

N_RESAMPLES = 2000
"""Random signs of the gradients; the p-value cannot be less than about one in so many."""
_AT_ONCE = 100


@dataclass(frozen=True)
class LinearizedModel:
    """Logits z + Jθ of some samples."""

    logits: Tensor
    jacobian: Tensor
    """(n, classes, r)."""
    labels: Tensor

    def rows(self, index: Tensor) -> LinearizedModel:
        """Some of the samples."""
        return LinearizedModel(self.logits[index], self.jacobian[index], self.labels[index])

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
class CrossValidation:
    """Losses of the samples when each was left out of the fit."""

    penalties: Sequence[float]
    rows: np.ndarray
    """(λ, n)."""
    plain: np.ndarray
    """(n,), of temperature alone."""

    def candidates(self) -> dict[float, float]:
        """λ → mean loss; infinity is temperature alone."""
        means = dict(zip(self.penalties, self.rows.mean(axis=1).tolist(), strict=True))
        return {math.inf: float(self.plain.mean()), **means}

    def best(self) -> float:
        """The λ of least loss; of equal ones the largest."""
        losses = self.candidates()
        return min(losses, key=lambda penalty: (losses[penalty], -penalty))

    def gain(self, penalty: float) -> tuple[float, float]:
        """By how much less than temperature's the loss is, and the standard error of that."""
        if math.isinf(penalty):
            return 0.0, 0.0
        return paired_gain(self.plain, self.rows[list(self.penalties).index(penalty)])

    def nested_gain(self, groups: int = 10) -> tuple[float, float]:
        """The same where λ, infinity among them, is chosen for each group of samples by the others alone.

        >>> rows = np.array([[0.9, 1.1, 0.9, 1.1], [0.8, 0.8, 0.8, 0.8]])
        >>> gain, error = CrossValidation([1.0, 0.1], rows, np.ones(4)).nested_gain(2)
        >>> print(f"{gain:.1f} {error:.1f}")
        0.2 0.0
        """
        every = np.vstack([self.plain, self.rows])
        chosen = self.plain.copy()
        for group in range(groups):
            out = np.arange(len(chosen)) % groups == group
            chosen[out] = every[every[:, ~out].mean(axis=1).argmin(), out]
        return paired_gain(self.plain, chosen)


def max_samples_in_memory(samples: int, classes: int, coordinates: int) -> int:
    """How many samples' derivatives the memory holds."""
    return max(1, min(samples, MEMORY // (8 * classes * (coordinates + 1))))


def linearize(
    parameters: InputParameters, inputs: CalibrationSet, logits: Tensor, labels: Tensor, *, step_size: float = STEP
) -> LinearizedModel:
    """Differences of the logits along each coordinate, by one forward pass over the inputs for each.

    `logits` are those of the inputs as they are. Steps, in units of the inputs' own norm, are large enough for single
    precision, and for the kinks of a network to average out.
    """
    step = step_size * parameters.input_norm
    base = logits.double()
    jacobian = torch.empty(*base.shape, parameters.size, dtype=torch.float64)
    for j in range(parameters.size):
        before, _ = parameters.map(step * np.eye(parameters.size)[j])
        jacobian[:, :, j] = (parameters.network.logits(before, inputs=inputs).double() - base) / step
    return LinearizedModel(base, jacobian, labels)


def cross_validate(
    linear: LinearizedModel, loss: Loss, norm: Norm, penalties: Sequence[float], *, n_folds: int
) -> CrossValidation:
    """Fit θ and T for every λ with each fold left out in turn, and note the losses there."""
    n = len(linear.labels)
    features = torch.cat([linear.logits[:, :, None], linear.jacobian], dim=2)
    # A row's logits may all be raised alike; without their mean the sums are better conditioned.
    features = features - features.mean(dim=1, keepdim=True)
    fold = torch.arange(n) % n_folds
    rows, plain = np.zeros((len(penalties), n)), np.zeros(n)
    for out in (fold == f for f in range(n_folds)):
        train, labels = features[~out], linear.labels[~out]
        temperature = loss.temperature(linear.logits[~out], labels)
        plain[out] = loss.rows(linear.logits[out], linear.labels[out], temperature).numpy()
        weights = np.concatenate([[1 / temperature], np.zeros(linear.jacobian.shape[2])])
        for i in np.argsort(penalties)[::-1]:
            weights = _solve(train, labels, loss, Penalty(penalties[i], norm), weights)
            predicted = features[out] @ torch.from_numpy(weights)
            rows[i, out] = loss.rows(predicted, linear.labels[out], 1.0).numpy()
    return CrossValidation(penalties, rows, plain)


def gradient_test(
    scores: np.ndarray, nuisance: np.ndarray | None = None, *, seed: int = 0, n_resamples: int = N_RESAMPLES
) -> float:
    """The p-value of the hypothesis that per-sample gradients (n, r) have mean zero.

    The statistic is Hotelling's, n·ḡᵀS⁻¹ḡ; its distribution under the hypothesis is resampled by giving the centred
    gradients random signs, since they have tails too heavy for a textbook law. `nuisance` are the samples' gradients by
    a parameter that was fitted to them, the temperature: what it explains of the others is taken out first.

    >>> noise = np.random.default_rng(0).standard_t(3, size=(500, 4))
    >>> print(f"{gradient_test(noise):.4f} {gradient_test(noise + [0.3, 0, 0, 0]):.4f}")
    0.9220 0.0010
    """
    if nuisance is not None:
        centred = nuisance - nuisance.mean()
        scores = scores - np.outer(centred, centred @ scores / max(float(centred @ centred), 1e-300))
    n, r = scores.shape
    return score_test(scores, scores - scores.mean(axis=0), seed=seed, n_resamples=n_resamples) if n > r + 1 else 1.0


def score_test(slope: np.ndarray, null: np.ndarray, *, seed: int = 0, n_resamples: int = N_RESAMPLES) -> float:
    """The p-value of the hypothesis that per-sample gradients (n, r) have mean zero.

    The statistic is n·ḡᵀM⁻¹ḡ, M the second moment of the rows of `null` (m, r), gradients as the hypothesis has them.
    Its distribution is resampled by giving these random signs, which leaves M as it is. With `null` the gradients
    themselves it is a sign test, exact where they are symmetric about zero.

    >>> noise = np.random.default_rng(0).standard_t(3, size=(500, 4))
    >>> print(f"{score_test(noise, noise):.4f} {score_test(noise + [0.3, 0, 0, 0], noise):.4f}")
    0.9245 0.0010
    """
    n, m = len(slope), len(null)
    spread = np.sqrt((null**2).mean(axis=0))
    spread = np.where(spread > 0, spread, 1.0)
    slope, null = slope / spread, null / spread
    # Directions without any spread of their own can say nothing.
    inverse = np.linalg.pinv(null.T @ null / m, rcond=1e-10, hermitian=True)
    mean = slope.mean(axis=0)
    observed = n * float(mean @ inverse @ mean)
    rng, at_least = np.random.default_rng(seed), 0
    for start in range(0, n_resamples, _AT_ONCE):
        signs = rng.integers(0, 2, size=(min(_AT_ONCE, n_resamples - start), m)) * 2.0 - 1.0
        drawn = signs @ null / math.sqrt(m)
        at_least += int((np.einsum("ij,jk,ik->i", drawn, inverse, drawn) >= observed * (1 - 1e-9)).sum())
    return (1 + at_least) / (1 + n_resamples)


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
            gradient[1:] *= max(0.0, 1 - penalty.weight / (beta * size)) if size else 1.0
        by_theta = penalty.slope(theta)
        gradient[1:] += by_theta / beta
        gradient[0] -= by_theta @ theta / beta
        return loss.mean(s, labels, 1.0) + penalty.value(theta), gradient

    p = torch.softmax(features @ torch.from_numpy(start), dim=1)
    curvature = _covariance(p, features)
    curvature[1:, 1:] += (2 * penalty.weight / start[0] ** 2) * np.eye(len(start) - 1)
    curvature += 1e-10 * np.trace(curvature) / len(curvature) * np.eye(len(curvature))
    inverse = np.linalg.inv(curvature)
    try:
        return lbfgs(Stage(objective, 1e-8), start, precondition=lambda g: inverse @ g, tolerance=1e-9)[0]
    except FitError:  # separable folds have no minimum: the largest penalty's solution is as good as any
        return start


def _covariance(p: Tensor, features: Tensor) -> np.ndarray:
    """The mean over samples of the features' covariance under their class probabilities."""
    mean = torch.einsum("nk,nkr->nr", p, features)
    rooted = (p.sqrt()[:, :, None] * features).reshape(-1, features.shape[2])
    return (rooted.T @ rooted - mean.T @ mean).numpy() / len(p)
