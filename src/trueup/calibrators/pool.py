"""Mixtures of calibrators: weighted by how well each predicts held-out rows, or by the posterior of a temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
from scipy.special import xlogy

from trueup._core.arrays import MASKED_LOGIT, as_weighted, take_weighted, upcast_half
from trueup._core.namespace import Namespace
from trueup._core.row_scores import score_rows
from trueup._core.splits import stratified_folds
from trueup._core.types import Array, ArrayLike, WeightsLike
from trueup.calibrators import expression as e
from trueup.calibrators.base import Calibrator, break_ties, check_positive, if_all_parts, row_count
from trueup.calibrators.temperature import Temperature, brier_inverse_temperature, inverse_temperature, smoothed_loss

SHARES = (0.0, 1e-8, 1e-6, 1e-5, 1e-4, 1e-3, 3e-3, 1e-2, 3e-2)
"""Shares of the uniform distribution that `UniformMixture.fit` tries."""
_MIN_SHARE_GAIN = 1e-4  # smallest gain in mean log-loss for which a share is used (or 1/n, if that is larger)
_SHARE_NUMBERS = 1 << 21  # number of logits from which the share is chosen
_RIDGE = 1e-9  # added curvature: identical parts leave a flat direction
_MIN_GAIN = 1e-9  # predicted gain in mean loss at which the search for weights stops


class Mixture(Calibrator):
    """Mix the probabilities of several calibrators: q ∝ (Σ_m w_m p_m)^(1/T), then (1 − ε) q + ε/K.

    The mean of calibrated forecasts is underconfident, which the temperature T corrects. The share ε of the uniform
    distribution bounds the loss of a row by ln(K/ε).
    Not for interpretation: no single curve shows what it does.

    Parameters
    ----------
    calibrators
        The parts of the mixture.
    weights
        Their weights w > 0, which sum to 1.
    temperature
        The temperature T applied to the mixture.
    share
        The share ε of the uniform distribution.

    Examples
    --------
    >>> from trueup.calibrators.temperature import Temperature
    >>> Mixture([Temperature(1.0), Temperature(4.0)], weights=[0.5, 0.5])([[2.0, 0.0]]).round(4)
    array([[-0.2855, -1.3928]])
    """

    keeps_argmax = if_all_parts("keeps_argmax")
    shift_invariant = if_all_parts("shift_invariant")
    # Not sample-invariant: the weights are chosen on folds.

    calibrators: tuple[Calibrator, ...]
    weights: np.ndarray
    temperature: float
    share: float

    def __init__(
        self, calibrators: Sequence[Calibrator], weights: ArrayLike, temperature: float = 1.0, share: float = 0.0
    ) -> None:
        self.calibrators = tuple(calibrators)
        self.set_parameters(weights=weights, temperature=temperature, share=share)
        w = self.weights
        if w.shape != (len(self.calibrators),) or not bool((w > 0).all()) or abs(float(w.sum()) - 1) > 1e-6:
            raise ValueError(f"weights must be {len(self.calibrators)} positive numbers of sum 1, got {self.weights}")
        check_positive(self.temperature, "temperature")
        _check_share(self.share)

    def __repr__(self) -> str:
        parts = [part.temperature for part in self.calibrators if isinstance(part, Temperature)]
        if len(parts) < max(3, len(self.calibrators)):
            return super().__repr__()
        return f"Mixture({len(parts)} temperatures from {min(parts):.4g} to {max(parts):.4g})"

    def map(self, xp: Namespace, z: Array) -> Array:
        """Return the log-probabilities of the mixture."""
        parts = [
            xp.clip(xp.log_softmax(xp.double(part.forward(xp, z))), min=MASKED_LOGIT) + xp.log(self.weights[k])
            for k, part in enumerate(self.calibrators)
        ]
        log_q = xp.log_softmax(xp.logsumexp(xp.stack(parts), axis=0) / self.temperature)
        mixed = xp.astype(_add_uniform(xp, log_q, self.share, z), z.dtype)
        return break_ties(xp, z, mixed) if self.keeps_argmax else mixed

    def formula(self, classes: int) -> e.Formula:
        """Return the mixture of the parts' steps, then its temperature and the uniform share."""
        start = e.Formula("logits", (), "logits")
        parts = [
            e.join(e.join(start, part.formula(classes)), e.Formula("probs", (), "probs")) for part in self.calibrators
        ]
        mixed = e.Formula("logits", (e.mix(self.weights, [part.steps for part in parts]),), "probs")
        if self.temperature != 1:
            mixed = e.join(mixed, e.Formula("logits", (e.scale(1 / self.temperature),), "logits"))
        return e.join(mixed, UniformMixture(self.share).formula(classes)) if self.share else mixed


class UniformMixture(Calibrator):
    """Mix with the uniform distribution: q = (1 − ε) softmax(z) + ε/K.

    Confident errors of naive Bayes, boosted trees or an over-trained network dominate the likelihood of every map of
    logits. A share ε of the uniform distribution bounds what they cost. It is a first step before another method. Not
    for calibration by itself.

    Parameters
    ----------
    share
        The share ε in [0, 1).

    Examples
    --------
    >>> UniformMixture(0.1)([[0.0, -1000.0]]).round(4)
    array([[-0.0513, -2.9957]])
    """

    keeps_argmax = True
    # Not sample-invariant: with very many rows, a subsample chooses the share.

    share: float

    def __init__(self, share: float) -> None:
        self.set_parameters(share=share)
        _check_share(self.share)

    def map(self, xp: Namespace, z: Array) -> Array:
        """Return the log-probabilities of the mixture."""
        return _add_uniform(xp, xp.clip(xp.log_softmax(z), min=MASKED_LOGIT), self.share, z)

    def formula(self, classes: int) -> e.Formula:
        """Return the mixture as a line in each probability."""
        return e.Formula("probs", (e.piecewise(e.polynomial(self.share / classes, 1 - self.share)),), "probs")

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Take the share with the smallest log-loss, each with its own temperature; 0 if none helps.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        max_rows = max(1, _SHARE_NUMBERS // z.shape[1])
        if len(z) > max_rows:
            z, y, w = take_weighted(z, y, w, stratified_folds(z, y, len(z)) < max_rows)
        z = upcast_half(z)
        losses = [inverse_temperature(cls(share)(z) if share else z, y, w)[1].loss for share in SHARES]
        best = min(range(len(SHARES)), key=losses.__getitem__)
        min_gain = max(_MIN_SHARE_GAIN, 1 / row_count(z, w))
        return cls(SHARES[best] if losses[best] < losses[0] - min_gain else 0.0)


def _check_share(share: Any) -> None:
    if not (np.ndim(share) == 0 and 0 <= share < 1):
        raise ValueError(f"share must be one number in [0, 1), got {share}")


def _add_uniform(xp: Namespace, log_p: Array, share: float, z: Array) -> Array:
    """Return ln((1 − ε) p + ε/K), with K the number of options that a row offers."""
    shares = xp.zeros_like(log_p[:, :1]) + share
    return xp.logaddexp(log_p + xp.log1p(-shares), xp.log(shares) - xp.log_options(z, log_p.dtype))


class HeldOut:
    """Held-out predictions of candidates, and the losses of mixtures of them."""

    def __init__(
        self, labels: np.ndarray, fold: np.ndarray, classes: int, score: str, weights: np.ndarray | None = None
    ) -> None:
        self.labels, self.fold, self.score, self.row_weights = labels, fold, score, weights
        self.shape = len(labels), classes
        self.log_probs: dict[str, np.ndarray] = {}

    def add(self, name: str, rows: np.ndarray, log_probs: np.ndarray) -> None:
        """Store a candidate's log-probabilities of some rows."""
        if name not in self.log_probs:
            self.log_probs[name] = np.zeros(self.shape, np.float32)
        self.log_probs[name][rows] = log_probs

    def losses(self, name: str) -> np.ndarray:
        """Return a candidate's loss in each row."""
        return np.asarray(getattr(score_rows(self.log_probs[name].astype(np.float64), self.labels), self.score))

    def weights(self, names: Sequence[str], prior: np.ndarray, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return the best weights of a mixture on some rows."""
        each = None if self.row_weights is None else self.row_weights[rows]
        if self.score == "nll":
            return likelihood_weights(self._label_probs(names)[rows], prior, each)
        probs = [np.exp(self.log_probs[name][rows].astype(np.float64)) for name in names]
        return brier_weights(np.stack(probs), self.labels[rows], each, prior=prior)

    def mixture_losses(self, names: Sequence[str], prior: np.ndarray) -> np.ndarray:
        """Return each row's loss under a mixture with weights fitted to the other folds, without its temperature."""
        losses = np.empty(len(self.fold))
        for k in np.unique(self.fold):
            rows = self.fold == k
            mixed = self._mix(names, self.weights(names, prior, ~rows), rows)
            losses[rows] = getattr(score_rows(mixed, self.labels[rows]), self.score)
        return losses

    def temperature(self, names: Sequence[str], weights: np.ndarray) -> float:
        """Return the best temperature of a mixture, at most 1."""
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
    """Return the mixture weights of largest posterior density, from each part's probability of the label, (n, parts).

    Σ_i ln Σ_m w_m p_im + Σ_m (α_m − 1) ln w_m is concave for α ≥ 1; α − 1 counts pseudo-rows that only part m explains.
    Subtracting Σ_m w_m per row makes the weights sum to one at the maximum. Newton's method minimises each quadratic
    model over w ≥ 0 by non-negative least squares.

    Parameters
    ----------
    label_probs
        Probability of the label under each part, shape (n, parts).
    prior
        The α of each part, shape (parts,).
    rows
        Weight of each row, shape (n,).

    Returns
    -------
    array
        The weights, shape (parts,).

    Examples
    --------
    >>> p = np.array([[0.9, 0.5], [0.8, 0.5], [0.3, 0.5]])
    >>> likelihood_weights(p, np.ones(2)).round(3), likelihood_weights(p, np.array([1.0, 1.5])).round(3)
    (array([1., 0.]), array([0.292, 0.708]))

    References
    ----------
    Kim et al., "A fast algorithm for maximum likelihood estimation of mixture proportions using sequential quadratic
    programming" (2020), arXiv:1806.01412.
    """
    p = label_probs / label_probs.max(axis=1, keepdims=True)
    pseudo_rows = prior - 1
    row_weights = np.ones(len(p)) if rows is None else rows
    total = row_weights.sum() + pseudo_rows.sum()

    def loss(w: np.ndarray) -> float:
        with np.errstate(divide="ignore"):
            return float(w.sum() - (row_weights @ np.log(p @ w) + xlogy(pseudo_rows, w).sum()) / total)

    weights = prior / prior.sum()
    current = loss(weights)
    for _ in range(100):
        a = p / (p @ weights)[:, None]
        push = np.divide(pseudo_rows, weights, out=np.zeros_like(weights), where=pseudo_rows > 0)
        slope = 1 - (row_weights @ a + push) / total
        prior_curvature = np.diag(push * push / pseudo_rows.clip(1e-300))
        curvature = ((row_weights * a.T) @ a + prior_curvature) / total + _RIDGE * np.eye(len(weights))
        step = _non_negative(curvature, curvature @ weights - slope) - weights
        gain, length = -float(slope @ step), 1.0
        while gain > _MIN_GAIN and loss(weights + length * step) > current - 1e-4 * length * gain and length > 1e-6:
            length /= 2
        if gain <= _MIN_GAIN or length <= 1e-6:
            break
        weights = weights + length * step
        current = loss(weights)
    return weights / weights.sum()


def brier_weights(
    probs: np.ndarray, labels: np.ndarray, rows: np.ndarray | None = None, *, prior: np.ndarray | None = None
) -> np.ndarray:
    """Return the weights that minimise the Brier score of a mixture of probabilities: a quadratic form on the simplex.

    Parameters
    ----------
    probs
        Probabilities of each part, shape (parts, n, classes).
    labels
        True classes, shape (n,).
    rows
        Weight of each row, shape (n,).
    prior
        The α of each part: α_m − 1 pseudo-rows, in which part m is certain of the label and the others of a wrong
        class.

    Returns
    -------
    array
        The weights, shape (parts,).

    Examples
    --------
    >>> p = np.array([[[0.9, 0.1], [0.8, 0.2]], [[0.5, 0.5], [0.5, 0.5]]])
    >>> brier_weights(p, np.array([0, 0])).round(3)
    array([1., 0.])
    """
    parts, n, _ = probs.shape
    total = float(n if rows is None else rows.sum())
    row_weights = np.full(n, 1 / n) if rows is None else rows / total
    pseudo_rows = np.zeros(parts) if prior is None else 2 * (prior - 1) / total
    root = (probs * np.sqrt(row_weights)[:, None]).reshape(parts, -1)
    # The squared error, plus a large penalty that holds the sum of the weights to one.
    square = root @ root.T + _RIDGE * np.eye(parts) + np.diag(pseudo_rows) + 1e4
    weights = _non_negative(square, probs[:, np.arange(n), labels] @ row_weights + pseudo_rows + 1e4)
    return weights / weights.sum()


def _non_negative(square: np.ndarray, linear: np.ndarray) -> np.ndarray:
    """Return the w ≥ 0 that minimises ½ wᵀ(square)w − (linear)ᵀw."""
    from scipy.optimize import nnls  # slow to import

    root = np.linalg.cholesky(square)
    return np.asarray(nnls(root.T, np.linalg.solve(root, linear))[0])


_SMOOTH = 0.1  # pseudo-rows with uniform labels bound the likelihood where every prediction is correct;
_NODES = np.linspace(-5.0, 5.0, 21)  # points of the sum over the posterior, in its standard deviations
_MIN_WEIGHT = 1e-3  # nodes with less weight are dropped


def bayesian_temperature(
    logits: ArrayLike, labels: ArrayLike, *, scale: float = 0.5, sample_weight: WeightsLike = None
) -> Mixture:
    """Average temperature scaling over the posterior of T: the mean of q = softmax(z/T).

    The prior of ln T is Student's t with three degrees of freedom around 0. With few rows the logits stay nearly
    unchanged; with many rows the data determine T. One best-fitting T is overconfident where few rows leave T
    uncertain; the average is less confident there. Not for thousands of rows, where it gives the same result as
    `temperature`.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities of the calibration rows, shape (n, classes).
    labels
        True classes of the rows, numbered from 0, shape (n,).
    scale
        Scale of the prior of ln T.
    sample_weight
        Weight of each row, shape (n,). By default all rows count equally.

    Returns
    -------
    Mixture
        A mixture of temperatures.

    Examples
    --------
    >>> z = np.array([[2.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.5, 0.0]])
    >>> bayesian_temperature(z, [0, 0, 1, 1])(z[:1]).round(3)
    array([[-0.13 , -2.105]])
    """
    z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
    if not 0 < scale < math.inf:
        raise ValueError(f"scale must be a positive number, got {scale}")
    n = row_count(z, w)
    loss = smoothed_loss(z, y, w, _SMOOTH)
    likeliest = math.log(inverse_temperature(z, y, w, smooth=_SMOOTH)[0])

    def energy(x: float) -> float:
        return n * loss(math.exp(x))[0] + 2 * math.log1p((x / scale) ** 2 / 3)

    ends = sorted((0.0, likeliest))  # the prior's mode and the likelihood's
    mode = likeliest
    if ends[1] - ends[0] > 1e-3:
        from scipy.optimize import minimize_scalar  # slow to import

        mode = float(minimize_scalar(energy, bounds=ends, method="bounded", options={"xatol": 1e-3}).x)
    beta = math.exp(mode)
    width = 1 / math.sqrt(n * max(loss(beta)[2], 0.0) * beta**2 + 4 / 3 * scale**-2)
    points = mode + width * _NODES
    energies = np.array([energy(x) for x in points])
    share = np.exp(energies.min() - energies)
    kept = share >= _MIN_WEIGHT * share.sum()
    return Mixture([Temperature(math.exp(-x)) for x in points[kept]], share[kept] / share[kept].sum())
