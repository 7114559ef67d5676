"""A pool of calibrators: a mixture of what they say, weighted by how well they predict rows that they have not seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from scipy.special import xlogy

from trueup._core.arrays import MASKED_LOGIT, as_weighted, take_weighted, upcast_half
from trueup._core.namespace import Namespace
from trueup._core.row_scores import score_rows
from trueup._core.splits import stratified_folds
from trueup.calibrators.base import Calibrator, break_ties, check_positive, if_all_parts, row_count
from trueup.calibrators.temperature import Temperature, brier_inverse_temperature, inverse_temperature

SHARES = (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2)
"""Shares of the uniform distribution that `UniformMixture.fit` tries."""
_LEAST_SHARE_GAIN = 1e-4  # in the mean log-loss, or one over the rows: a share that gains less is not taken
_SHARE_NUMBERS = 1 << 21  # as many as choose a share
_RIDGE = 1e-9  # parts that say the same leave a direction without curvature
_LEAST_GAIN = 1e-9  # in the mean loss of a row


class Mixture(Calibrator):
    """Mix what several calibrators say: q ∝ (Σ_m w_m p_m)^(1/T), w > 0 and Σw = 1, and then (1 − ε) q + ε/K.

    The mean of calibrated forecasts is less sure than it should be, which the temperature T puts right. The share ε of
    the uniform distribution bounds what a row can cost, by ln(K/ε). Not for reading: no single curve shows what it
    does.

    >>> from trueup.calibrators.temperature import Temperature
    >>> Mixture([Temperature(1.0), Temperature(4.0)], weights=[0.5, 0.5])([[2.0, 0.0]]).round(4)
    array([[-0.2855, -1.3928]])
    """

    keeps_argmax = if_all_parts("keeps_argmax")
    shift_invariant = if_all_parts("shift_invariant")
    # Not sample-invariant: copies of a row are spread over the folds that choose the weights.

    calibrators: tuple[Calibrator, ...]
    weights: np.ndarray
    temperature: float
    share: float

    def __init__(
        self, calibrators: Sequence[Calibrator], weights: Any, temperature: float = 1.0, share: float = 0.0
    ) -> None:
        self.calibrators = tuple(calibrators)
        self.set_parameters(weights=weights, temperature=temperature, share=share)
        w = self.weights
        if w.shape != (len(self.calibrators),) or not bool((w > 0).all()) or abs(float(w.sum()) - 1) > 1e-6:
            raise ValueError(f"weights must be {len(self.calibrators)} positive numbers of sum 1, got {weights}")
        check_positive(self.temperature, "temperature")
        _check_share(self.share)

    def __repr__(self) -> str:
        parts = [part.temperature for part in self.calibrators if isinstance(part, Temperature)]
        if len(parts) < max(3, len(self.calibrators)):
            return super().__repr__()
        return f"Mixture({len(parts)} temperatures from {min(parts):.4g} to {max(parts):.4g})"

    def map(self, xp: Namespace, z: Any) -> Any:
        """The logarithm of the mixture."""
        parts = [
            xp.clip(xp.log_softmax(xp.double(part.forward(xp, z))), min=MASKED_LOGIT) + xp.log(self.weights[k])
            for k, part in enumerate(self.calibrators)
        ]
        log_q = xp.log_softmax(xp.logsumexp(xp.stack(parts), axis=0) / self.temperature)
        mixed = xp.astype(_add_uniform(xp, log_q, self.share, z), z.dtype)
        return break_ties(xp, z, mixed) if self.keeps_argmax else mixed

    def config(self) -> dict[str, Any]:
        """The parts and how they are mixed."""
        return super().config() | {"calibrators": list(self.calibrators)}


class UniformMixture(Calibrator):
    """Mix with the uniform distribution: q = (1 − ε) softmax(z) + ε/K.

    Sure errors of naive Bayes, boosted trees or an over-trained network rule the likelihood of every map of logits; a
    share ε of the uniform bounds what they cost. `fit` takes the ε of least log-loss, each with a temperature of its
    own, and ε = 0 where none gains: a step before another method. Not for calibration by itself.

    >>> UniformMixture(0.1)([[0.0, -1000.0]]).round(4)
    array([[-0.0513, -2.9957]])
    """

    keeps_argmax = True
    # Not sample-invariant: of very many rows, some choose the share.

    share: float

    def __init__(self, share: float) -> None:
        self.set_parameter("share", share)
        _check_share(self.share)

    def map(self, xp: Namespace, z: Any) -> Any:
        """The logarithm of the mixture."""
        return _add_uniform(xp, xp.clip(xp.log_softmax(z), min=MASKED_LOGIT), self.share, z)

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, sample_weight: Any = None) -> Self:
        """Uniform mixture: take the share of least log-loss, each with a temperature of its own."""
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        most = max(1, _SHARE_NUMBERS // z.shape[1])
        if len(z) > most:
            z, y, w = take_weighted(z, y, w, stratified_folds(z, y, len(z)) < most)
        z = upcast_half(z)
        losses = [inverse_temperature(cls(share)(z) if share else z, y, w)[1].loss for share in SHARES]
        best = min(range(len(SHARES)), key=losses.__getitem__)
        least_gain = max(_LEAST_SHARE_GAIN, 1 / row_count(z, w))
        return cls(SHARES[best] if losses[best] < losses[0] - least_gain else 0.0)


def _check_share(share: Any) -> None:
    if not (np.ndim(share) == 0 and 0 <= share < 1):
        raise ValueError(f"share must be one number in [0, 1), got {share}")


def _add_uniform(xp: Namespace, log_p: Any, share: float, z: Any) -> Any:
    """ln((1 − ε) p + ε/K), K the options that a row of the logits has."""
    shares = xp.zeros_like(log_p[:, :1]) + share
    return xp.logaddexp(log_p + xp.log1p(-shares), xp.log(shares) - xp.log_options(z, log_p.dtype))


class HeldOut:
    """What candidates say of rows that they have not seen, and how well mixtures of them would have done there."""

    def __init__(
        self, labels: np.ndarray, fold: np.ndarray, classes: int, score: str, weights: np.ndarray | None = None
    ) -> None:
        self.labels, self.fold, self.score, self.row_weights = labels, fold, score, weights
        self.shape = len(labels), classes
        self.log_probs: dict[str, np.ndarray] = {}

    def add(self, name: str, rows: np.ndarray, log_probs: np.ndarray) -> None:
        """Note a candidate's predictions of some rows."""
        if name not in self.log_probs:
            self.log_probs[name] = np.zeros(self.shape, np.float32)
        self.log_probs[name][rows] = log_probs

    def losses(self, name: str) -> np.ndarray:
        """A candidate's loss in each row."""
        return np.asarray(getattr(score_rows(self.log_probs[name].astype(np.float64), self.labels), self.score))

    def weights(self, names: Sequence[str], prior: np.ndarray, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """The best weights of a mixture on some rows."""
        each = None if self.row_weights is None else self.row_weights[rows]
        if self.score == "nll":
            return likelihood_weights(self._label_probs(names)[rows], prior, each)
        probs = [np.exp(self.log_probs[name][rows].astype(np.float64)) for name in names]
        return brier_weights(np.stack(probs), self.labels[rows], each, prior=prior)

    def mixture_losses(self, names: Sequence[str], prior: np.ndarray) -> np.ndarray:
        """The loss in each row of a mixture whose weights were fitted to the other folds (its temperature left out)."""
        losses = np.empty(len(self.fold))
        for k in np.unique(self.fold):
            rows = self.fold == k
            mixed = self._mix(names, self.weights(names, prior, ~rows), rows)
            losses[rows] = getattr(score_rows(mixed, self.labels[rows]), self.score)
        return losses

    def temperature(self, names: Sequence[str], weights: np.ndarray) -> float:
        """The best temperature of a mixture, which makes it surer or leaves it."""
        search = inverse_temperature if self.score == "nll" else brier_inverse_temperature
        beta, _ = search(self._mix(names, weights), self.labels, self.row_weights)
        return 1 / min(max(beta, 1.0), 2.0)

    def _label_probs(self, names: Sequence[str]) -> np.ndarray:
        rows = np.arange(len(self.labels))
        columns = [self.log_probs[name][rows, self.labels] for name in names]
        return np.exp(np.stack(columns, axis=1).astype(np.float64)).clip(1e-300)

    def _mix(self, names: Sequence[str], weights: np.ndarray, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        mixed = np.zeros_like(self.log_probs[names[0]][rows], dtype=np.float64)
        for name, weight in zip(names, weights, strict=True):
            mixed += weight * np.exp(self.log_probs[name][rows].astype(np.float64))
        mixed = np.log(mixed.clip(1e-300))
        mixed[self.log_probs[names[0]][rows] == -np.inf] = -np.inf  # absent options
        return mixed


def likelihood_weights(label_probs: np.ndarray, prior: np.ndarray, rows: np.ndarray | None = None) -> np.ndarray:
    """Weights of most posterior density for a mixture, from the label's probability under each part, (n, parts).

    Σ_i ln Σ_m w_m p_im + Σ_m (α_m − 1) ln w_m is concave for α ≥ 1; α − 1 are rows that a part explains alone. With
    Σ_m w_m taken off per row, the sum of the weights is one at the maximum by itself. Newton's steps, each quadratic
    model's minimum over w ≥ 0 by non-negative least squares. `rows` are weights of the rows.
    Kim, Carbonetto, Stephens & Anitescu, "A fast algorithm for maximum likelihood estimation of mixture proportions
    using sequential quadratic programming" (2020).

    >>> p = np.array([[0.9, 0.5], [0.8, 0.5], [0.3, 0.5]])
    >>> likelihood_weights(p, np.ones(2)).round(3), likelihood_weights(p, np.array([1.0, 1.5])).round(3)
    (array([1., 0.]), array([0.292, 0.708]))
    """
    p = label_probs / label_probs.max(axis=1, keepdims=True)
    alone = prior - 1
    each = np.ones(len(p)) if rows is None else rows
    total = each.sum() + alone.sum()

    def loss(w: np.ndarray) -> float:
        with np.errstate(divide="ignore"):
            return float(w.sum() - (each @ np.log(p @ w) + xlogy(alone, w).sum()) / total)

    weights = prior / prior.sum()
    now = loss(weights)
    for _ in range(100):
        a = p / (p @ weights)[:, None]
        own = np.divide(alone, weights, out=np.zeros_like(weights), where=alone > 0)
        slope = 1 - (each @ a + own) / total
        curvature = ((each * a.T) @ a + np.diag(own * own / alone.clip(1e-300))) / total + _RIDGE * np.eye(len(weights))
        step = _non_negative(curvature, curvature @ weights - slope) - weights
        gain, length = -float(slope @ step), 1.0
        while gain > _LEAST_GAIN and loss(weights + length * step) > now - 1e-4 * length * gain and length > 1e-6:
            length /= 2
        if gain <= _LEAST_GAIN or length <= 1e-6:
            break
        weights = weights + length * step
        now = loss(weights)
    return weights / weights.sum()


def brier_weights(
    probs: np.ndarray, labels: np.ndarray, rows: np.ndarray | None = None, *, prior: np.ndarray | None = None
) -> np.ndarray:
    """Weights of least Brier score for a mixture of probabilities (parts, n, classes): a quadratic form on the simplex.

    With `prior`, α_m − 1 rows more are such that part m is sure of the label and the others of one other class.

    >>> p = np.array([[[0.9, 0.1], [0.8, 0.2]], [[0.5, 0.5], [0.5, 0.5]]])
    >>> brier_weights(p, np.array([0, 0])).round(3)
    array([1., 0.])
    """
    parts, n, _ = probs.shape
    total = float(n if rows is None else rows.sum())
    each = np.full(n, 1 / n) if rows is None else rows / total
    alone = np.zeros(parts) if prior is None else 2 * (prior - 1) / total
    root = (probs * np.sqrt(each)[:, None]).reshape(parts, -1)
    # A row's squared error with the sum of the weights held to one by a penalty that outweighs it.
    square = root @ root.T + _RIDGE * np.eye(parts) + np.diag(alone) + 1e4
    weights = _non_negative(square, probs[:, np.arange(n), labels] @ each + alone + 1e4)
    return weights / weights.sum()


def _non_negative(square: np.ndarray, linear: np.ndarray) -> np.ndarray:
    """The w ≥ 0 that minimises ½ wᵀ(square)w − (linear)ᵀw."""
    from scipy.optimize import nnls  # slow to import

    root = np.linalg.cholesky(square)
    return np.asarray(nnls(root.T, np.linalg.solve(root, linear))[0])
