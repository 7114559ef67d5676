"""Is there anything to learn at the input? A test of the mean input gradient."""

from __future__ import annotations

import numpy as np

DRAWS = 2000
"""Random signings of the gradients; the p-value cannot be less than about one in so many."""
_AT_ONCE = 100


def gradient_test(
    scores: np.ndarray, nuisance: np.ndarray | None = None, *, seed: int = 0, draws: int = DRAWS
) -> float:
    """The p-value of the hypothesis that per-sample gradients (n, r) have mean zero.

    The statistic is Hotelling's, n·ḡᵀS⁻¹ḡ; its distribution under the hypothesis is drawn by giving the centred
    gradients random signs, since they have tails too heavy for a textbook law. `nuisance` are the samples' gradients by
    a parameter that was fitted to them, the temperature: what it explains of the others is taken out first.

    >>> noise = np.random.default_rng(0).standard_t(3, size=(500, 4))
    >>> print(f"{gradient_test(noise):.4f} {gradient_test(noise + [0.3, 0, 0, 0]):.4f}")
    0.9220 0.0010
    """
    if nuisance is not None:
        about = nuisance - nuisance.mean()
        scores = scores - np.outer(about, about @ scores / max(float(about @ about), 1e-300))
    n, r = scores.shape
    if n <= r + 1:
        return 1.0
    spread = scores.std(axis=0)
    scores = scores / np.where(spread > 0, spread, 1.0)
    mean = scores.mean(axis=0)
    centred = scores - mean
    covariance = centred.T @ centred / (n - 1)
    # Directions without any spread of their own can say nothing.
    inverse = np.linalg.pinv(covariance, rcond=1e-10, hermitian=True)
    seen = n * float(mean @ inverse @ mean)
    rng = np.random.default_rng(seed)
    at_least = 0
    for start in range(0, draws, _AT_ONCE):
        signs = rng.integers(0, 2, size=(min(_AT_ONCE, draws - start), n)) * 2.0 - 1.0
        drawn = signs @ centred / n
        at_least += int((n * np.einsum("ij,jk,ik->i", drawn, inverse, drawn) >= seen).sum())
    return (1 + at_least) / (1 + draws)
