"""Rough inverses of the curvature of a linear map's likelihood: what makes a search of many numbers a short one."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

Inverse = Callable[[np.ndarray], np.ndarray]
Blocks = Callable[[float, float, float], Inverse]
"""The likelihood's curvature, to be inverted with that of a penalty: off and on the diagonal, and on the bias."""

_LEVEL = 1e-6  # of the mean curvature, added where the data may have none
_PRIOR = 5.0  # rows that a class is lent by all classes
_FEW_CLASSES, _MANY_CLASSES = 32, 128  # up to so many each have a curvature of their own: K (K + 1)² numbers


def vector_blocks(u: Tensor, weight: Tensor, bias: Tensor, counts: np.ndarray) -> Blocks:
    """Of softmax(w ⊙ u + b), each class by itself: a block of 2 × 2 in (w_k, b_k).

    Of many classes few rows tell little: there a class is taken to have the curvature of its share of all labels, whose
    `counts` are known, and the moments of the logits that all classes have together.
    """
    spread = _spread(u * weight + bias)
    scaled = spread * u
    a, m, d = (x.sum(dim=0).double().numpy() for x in (scaled * u, scaled, spread))
    total = d.sum() + 1e-30
    expected = (counts + 1) / (counts + 1).sum() * total
    squares, centre = ((x + _PRIOR * x.sum() / total) / (d + _PRIOR) for x in (a, m))  # centre² ≤ squares: both means
    d = expected * (d + _PRIOR) / (expected + _PRIOR) / len(u)
    a, m = squares * d, centre * d
    level = _LEVEL * (a.mean() + d.mean()) / 2 + 1e-12

    def inverse(_: float, diagonal: float, offset: float) -> Inverse:
        first, last = a + diagonal + level, d + offset + level
        determinant = first * last - m * m

        def apply(gradient: np.ndarray) -> np.ndarray:
            g, h = np.split(gradient, 2)
            return np.concatenate([last * g - m * h, first * h - m * g]) / np.tile(determinant, 2)

        return apply

    return inverse


def matrix_blocks(u: Tensor, weight: Tensor, bias: Tensor, *, careful: bool = False) -> Blocks:
    """Of softmax(W u + b), each class by itself: Σ p_k(1 − p_k) ũũᵀ with ũ = (u, 1).

    Many classes share a covariance, unless it is to be careful at K times the cost.
    """
    spread = _spread(torch.addmm(bias, u, weight.T))
    most = _MANY_CLASSES if careful else _FEW_CLASSES
    return _own_blocks(u, spread) if u.shape[1] <= most else _pooled_blocks(u, spread)


def _own_blocks(u: Tensor, spread: Tensor) -> Blocks:
    n, classes = u.shape
    extended = torch.cat([u, torch.ones(n, 1)], dim=1)
    blocks = torch.stack([(extended * spread[:, k, None]).T @ extended / n for k in range(classes)]).double().numpy()
    level = _LEVEL * np.diagonal(blocks, axis1=1, axis2=2).mean() + 1e-12

    def inverse(off: float, diagonal: float, offset: float) -> Inverse:
        ridge = np.full((classes, classes + 1), off + level)
        np.fill_diagonal(ridge, diagonal + level)
        ridge[:, -1] = offset + level
        inverted = np.linalg.inv(blocks + ridge[:, :, None] * np.eye(classes + 1))

        def apply(gradient: np.ndarray) -> np.ndarray:
            rows = np.concatenate([gradient[:-classes].reshape(classes, -1), gradient[-classes:, None]], axis=1)
            out = (inverted @ rows[:, :, None])[:, :, 0]
            return np.concatenate([out[:, :-1].ravel(), out[:, -1]])

        return apply

    return inverse


def _pooled_blocks(u: Tensor, spread: Tensor) -> Blocks:
    """Blocks d_k [C + m_k m_kᵀ, m_k; m_kᵀ, 1].

    d_k is the sum of the weights p_k(1 − p_k) and m_k the mean of u under them. The covariance about it is taken as the
    same for all classes, since few rows have weight in a class; only of u_k itself does class k have its own variance.
    So one decomposition of C inverts all the blocks: in w_k and b_k + m_kᵀw_k the data have no mixed curvature, and
    what else there is, the k-th entry's and the bias's penalty, is of rank one each.
    """
    n, classes = u.shape
    d = (spread.sum(dim=0) / n).double().numpy() + 1e-12
    mean = (spread.T @ u / n).double().numpy() / d[:, None]
    gram = ((u * spread.sum(dim=1, keepdim=True)).T @ u / n).double().numpy()
    pooled = (gram - (mean.T * d) @ mean) / d.sum()
    own = (spread * u * u).sum(dim=0).double().numpy() / n / d - mean.diagonal() ** 2
    values, vectors = np.linalg.eigh(pooled)
    values = np.maximum(values, _LEVEL * values.mean()) + 1e-12
    turned = mean @ vectors  # in the eigenvectors' frame, as all that follows

    def inverse(off: float, diagonal: float, offset: float) -> Inverse:
        scales = 1 / (d[:, None] * values + off)  # of class k along each eigenvector
        # The k-th entry of class k: its own variance and the diagonal's penalty in place of the pooled ones.
        corner = ((vectors * scales) * vectors).sum(axis=1)
        excess = diagonal - off + d * np.maximum(own - pooled.diagonal(), 0)  # never less: it has to stay positive
        entry = scales * vectors
        entry_share = excess / (1 + excess * corner)

        def without_bias(g: np.ndarray) -> np.ndarray:
            return scales * g - entry * (entry_share * (entry * g).sum(axis=1))[:, None]

        centre = without_bias(turned)
        coupling = offset * d / (d + offset)
        centre_share = coupling / (1 + coupling * (centre * turned).sum(axis=1))

        def apply(gradient: np.ndarray) -> np.ndarray:
            g, h = gradient[:-classes].reshape(classes, classes), gradient[-classes:]
            # Along m_k, the gradient at a fixed b_k + m_kᵀw_k, and what its own penalty gives back.
            g = g @ vectors + turned * (h * (offset / (d + offset) - 1))[:, None]
            w = without_bias(g) - centre * (centre_share * (centre * g).sum(axis=1))[:, None]
            b = (h - d * (w * turned).sum(axis=1)) / (d + offset)
            return np.concatenate([(w @ vectors.T).ravel(), b])

        return apply

    return inverse


def _spread(s: Tensor) -> Tensor:
    p = torch.softmax(s, dim=1)
    return p * (1 - p)
