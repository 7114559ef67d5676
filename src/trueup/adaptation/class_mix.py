"""Class frequencies of the samples compared with those that the network assumes, and weights that undo a difference.

With unchanged images of each class, predictions for other class frequencies are q_k ∝ p_k · π_k / π⁰_k. Here π are the
frequencies of the samples and π⁰ those that the network assumes. The likelihood decides between π⁰ = π and equal
frequencies π⁰, each with its own temperature.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax
from scipy.stats import chi2

SIGNIFICANCE = 0.01
"""Level of the chi-square test of equal class frequencies."""
MAX_MISSING = 0.05
"""Largest share of classes without samples for which weights can undo a difference."""
_MASKED = -1e4


class ClassMix(NamedTuple):
    """Weights that bring the samples to the class frequencies of the network."""

    weights: np.ndarray
    """Weight of each sample, with mean one, (n,)."""
    p_value: float
    """p-value of the chi-square test of equal class frequencies."""
    missing: float
    """Share of classes without samples."""


def find_class_mix(logits: np.ndarray, labels: np.ndarray) -> ClassMix | None:
    """Compare class frequencies; None if the samples have those of the network, as far as labels can show.

    >>> z = 3 * np.eye(2).repeat([900, 100], axis=0) + np.random.default_rng(0).normal(size=(1000, 2))
    >>> mix = find_class_mix(z, np.arange(2).repeat([900, 100]))
    >>> bool(mix.weights[-1] > 3 * mix.weights[0])
    True
    """
    n, classes = logits.shape
    counts = np.bincount(labels, minlength=classes)
    p_value = float(chi2.sf(((counts - n / classes) ** 2).sum() * classes / n, classes - 1))
    if p_value >= SIGNIFICANCE:
        return None
    log_share = np.log((counts + 0.5) / (n + 0.5 * classes))
    z = np.maximum(logits - logits.max(axis=1, keepdims=True), _MASKED)

    def loss(log_beta: float, exponent: float) -> float:
        log_p = log_softmax(np.exp(log_beta) * z + exponent * log_share, axis=1)
        return -float(log_p[np.arange(n), labels].mean())

    same, equal = (minimize_scalar(loss, args=(exponent,)).fun for exponent in (0.0, 1.0))
    if same <= equal:
        return None
    weights = np.exp(-log_share)[labels]
    return ClassMix(weights / weights.mean(), p_value, float((counts == 0).mean()))


def resample(weights: np.ndarray) -> np.ndarray:
    """Draw as many sample numbers as there are weights, each in proportion to its weight, by systematic resampling.

    >>> resample(np.array([2.0, 0.5, 0.5, 1.0]))
    array([0, 0, 1, 3])
    """
    positions = (np.arange(len(weights)) + 0.5) / len(weights) * weights.sum()
    return np.searchsorted(np.cumsum(weights), positions)
