"""The linearised network: fits for every λ and fold are small smooth problems without passes through the network."""

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
"""Largest size in bytes of the derivatives of the logits."""
STEP = 0.02
"""Step of the finite differences, relative to the root mean square norm of the inputs."""

N_RESAMPLES = 2000
"""Number of sign flips; the smallest p-value is its reciprocal."""
_AT_ONCE = 100  # sign flips that are drawn at a time


@dataclass(frozen=True)
class LinearizedModel:
    """Linear approximation z + Jθ of the logits of some samples."""

    logits: Tensor
    jacobian: Tensor
    """J, shape (n, classes, r)."""
    labels: Tensor

    def rows(self, index: Tensor) -> LinearizedModel:
        """Select samples."""
        return LinearizedModel(self.logits[index], self.jacobian[index], self.labels[index])

    def scores(self, loss: Loss, temperature: float) -> tuple[np.ndarray, np.ndarray]:
        """Return each sample's gradient by θ, (n, r), and by the inverse temperature, (n,)."""
        slope = loss.slope(self.logits, self.labels, temperature)
        return (
            torch.einsum("nk,nkr->nr", slope, self.jacobian).numpy(),
            (temperature * (slope * self.logits).sum(dim=1)).numpy(),
        )

    def curvature(self, temperature: float) -> np.ndarray:
        """Return the Gauss–Newton curvature by θ with the temperature eliminated, (r, r)."""
        p = torch.softmax(self.logits / temperature, dim=1)
        features = torch.cat([self.logits[:, :, None] * temperature, self.jacobian], dim=2) / temperature
        joint = _covariance(p, features)
        return joint[1:, 1:] - np.outer(joint[1:, 0], joint[0, 1:]) / max(joint[0, 0], 1e-300)


@dataclass(frozen=True)
class CrossValidation:
    """Held-out losses of the samples."""

    penalties: Sequence[float]
    rows: np.ndarray
    """Losses for each λ, shape (λ, n)."""
    plain: np.ndarray
    """Losses of temperature alone, (n,)."""

    def candidates(self) -> dict[float, float]:
        """Return λ → mean loss; infinity is temperature alone."""
        means = dict(zip(self.penalties, self.rows.mean(axis=1).tolist(), strict=True))
        return {math.inf: float(self.plain.mean()), **means}

    def best(self) -> float:
        """Return the λ with the lowest loss; ties go to the largest."""
        losses = self.candidates()
        return min(losses, key=lambda penalty: (losses[penalty], -penalty))

    def gain(self, penalty: float) -> tuple[float, float]:
        """Return the decrease of the loss from temperature alone, and its standard error."""
        if math.isinf(penalty):
            return 0.0, 0.0
        return paired_gain(self.plain, self.rows[list(self.penalties).index(penalty)])

    def nested_gain(self, groups: int = 10) -> tuple[float, float]:
        """Return the gain with λ, possibly infinite, chosen for each group of samples by the other groups.

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
    """Return the number of samples whose derivatives fit in memory."""
    return max(1, min(samples, MEMORY // (8 * classes * (coordinates + 1))))


def linearize(
    parameters: InputParameters, inputs: CalibrationSet, logits: Tensor, labels: Tensor, *, step_size: float = STEP
) -> LinearizedModel:
    """Compute finite differences of the logits along each coordinate, with one forward pass for each.

    `logits` are those of the original inputs. Steps are relative to the norm of the inputs. They are large enough for
    single precision, and to average over the kinks of a network.
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
    """Fit θ and T for every λ with each fold left out in turn, and compute the held-out losses."""
    n = len(linear.labels)
    features = torch.cat([linear.logits[:, :, None], linear.jacobian], dim=2)
    # A constant added to a row of logits has no effect; removing the mean improves the conditioning.
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
    """Test whether per-sample gradients (n, r) have mean zero, and return the p-value.

    The statistic is Hotelling's n·ḡᵀS⁻¹ḡ. Its null distribution is simulated by random sign flips of the centred
    gradients, since their tails are too heavy for a textbook law. `nuisance` are gradients by a fitted parameter, the
    temperature; they are projected out first.

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
    """Test whether per-sample gradients (n, r) have mean zero, and return the p-value.

    The statistic is n·ḡᵀM⁻¹ḡ, with M the second moment of `null` (m, r), gradients under the hypothesis. Its null
    distribution is simulated by random sign flips of these rows, which do not change M. If `null` are the gradients
    themselves, this is a sign test, exact for distributions symmetric about zero.

    >>> noise = np.random.default_rng(0).standard_t(3, size=(500, 4))
    >>> print(f"{score_test(noise, noise):.4f} {score_test(noise + [0.3, 0, 0, 0], noise):.4f}")
    0.9245 0.0010
    """
    n, m = len(slope), len(null)
    spread = np.sqrt((null**2).mean(axis=0))
    spread = np.where(spread > 0, spread, 1.0)
    slope, null = slope / spread, null / spread
    # The pseudo-inverse ignores directions without spread.
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
    """Minimise the mean loss of β(z + Jθ) plus the penalty over (β, βθ), in which cross-entropy is convex."""
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
    except FitError:  # separable folds have no minimum; the solution of the largest penalty stays
        return start


def _covariance(p: Tensor, features: Tensor) -> np.ndarray:
    """Return the mean over samples of the features' covariance under the class probabilities."""
    mean = torch.einsum("nk,nkr->nr", p, features)
    rooted = (p.sqrt()[:, :, None] * features).reshape(-1, features.shape[2])
    return (rooted.T @ rooted - mean.T @ mean).numpy() / len(p)
