"""What the right answers are: each metric straight from its definition, in double, and what a fit can reach at best."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_softmax, ndtr, ndtri

from tasks import TRUE_TEMPERATURE, Forecasts, Pairs

BINS = 15
_CHUNK = 1 << 21


class Excess(NamedTuple):
    """How good a fit is on fresh rows."""

    nll: float
    """By how many nats the expected loss exceeds the least possible, which only the true probabilities reach."""
    ece: float


def reference(task: str, data: Pairs | Forecasts) -> float:
    """The exact value of a metric."""
    if isinstance(data, Forecasts):
        return REGRESSION[task](data)
    return METRICS[task](data)


def excess(data: Pairs, predict: Callable[[np.ndarray], np.ndarray]) -> Excess:
    """Judge a fitted map, logits → log-probabilities, against the truth that the labels were drawn from.

    Σ_k p_k (ln p_k − ln q_k), meant over the rows: the labels' own noise is not in it.
    """
    total, confidence, correct = 0.0, [], []
    for z, y in chunks(data):
        truth = log_softmax(z.astype(np.float64) / TRUE_TEMPERATURE, axis=1)
        found = log_softmax(np.asarray(predict(z), dtype=np.float64), axis=1)
        total += float((np.exp(truth) * (truth - found)).sum())
        confidence.append(np.exp(found.max(axis=1)))
        correct.append(found.argmax(axis=1) == y)
    return Excess(total / len(data.labels), binned(np.concatenate(confidence), np.concatenate(correct), EDGES))


def chunks(data: Pairs) -> Iterator[Pairs]:
    step = max(1, _CHUNK // data.logits.shape[1])
    for start in range(0, len(data.labels), step):
        yield Pairs(data.logits[start : start + step], data.labels[start : start + step])


EDGES = np.arange(BINS + 1) / BINS


def binned(confidence: np.ndarray, correct: np.ndarray, edges: np.ndarray) -> float:
    """Σ_b |Σ_{i in b} (correct − confidence)| / n over bins closed on the right."""
    total = 0.0
    for low, high in pairwise(edges):
        inside = (confidence > low) & (confidence <= high)
        total += abs(float((correct[inside] - confidence[inside]).sum()))
    return total / len(confidence)


def top(data: Pairs) -> tuple[np.ndarray, np.ndarray]:
    """Confidences, and whether the prediction was right."""
    both = [
        (np.exp(log_softmax(z.astype(np.float64), axis=1).max(axis=1)), z.argmax(axis=1) == y) for z, y in chunks(data)
    ]
    return np.concatenate([c for c, _ in both]), np.concatenate([a for _, a in both]).astype(np.float64)


def ece(data: Pairs) -> float:
    return binned(*top(data), EDGES)


def aece(data: Pairs) -> float:
    """Chunks of the sorted confidences whose sizes differ by at most one."""
    confidence, correct = top(data)
    order, n = np.argsort(confidence, kind="stable"), len(confidence)
    parts = np.split(order, [-(-b * n // BINS) for b in range(1, BINS)])
    return sum(abs(float((correct[part] - confidence[part]).sum())) for part in parts) / len(confidence)


def sce(data: Pairs) -> float:
    """The binned error of each class against the rest, meant over the classes."""
    classes = data.logits.shape[1]
    sums = np.zeros(classes * BINS)
    for z, y in chunks(data):
        gap = np.exp(log_softmax(z.astype(np.float64), axis=1))
        place = np.clip(np.searchsorted(EDGES, gap, side="left") - 1, 0, BINS - 1) + BINS * np.arange(classes)
        gap[np.arange(len(y)), y] -= 1
        sums += np.bincount(place.ravel(), gap.ravel(), len(sums))
    return float(np.abs(sums).sum() / len(data.labels) / classes)


def nll(data: Pairs) -> float:
    rows = [log_softmax(z.astype(np.float64), axis=1)[np.arange(len(y)), y] for z, y in chunks(data)]
    return -float(np.concatenate(rows).mean())


def brier(data: Pairs) -> float:
    total = 0.0
    for z, y in chunks(data):
        p = np.exp(log_softmax(z.astype(np.float64), axis=1))
        p[np.arange(len(y)), y] -= 1
        total += float((p**2).sum())
    return total / len(data.labels)


def smooth_ece(data: Pairs) -> float:
    """The σ at which ∫|r_σ| = σ, r_σ the residuals smoothed by a Gaussian that the ends of [0, 1] reflect.

    In cosines that kernel is exact: 1 + 2 Σ_m exp(−π²m²σ²/2) cos(πmt) cos(πmc).
    """
    confidence, correct = top(data)
    waves = np.arange(1, 1201)
    residual = confidence - correct
    moments = np.array([float((residual * np.cos(np.pi * m * confidence)).mean()) for m in waves])
    t = (np.arange(4000) + 0.5) / 4000
    cosines = np.cos(np.pi * np.outer(t, waves))

    def above(sigma: float) -> float:
        smoothed = residual.mean() + 2 * cosines @ (np.exp(-((np.pi * waves * sigma) ** 2) / 2) * moments)
        return float(np.abs(smoothed).mean()) - sigma

    return float(brentq(above, 0.003, 1.0, xtol=1e-12))


def gaussian_nll(data: Forecasts) -> float:
    m, s, y = data
    return float((0.5 * math.log(2 * math.pi) + np.log(s) + (y - m) ** 2 / (2 * s * s)).mean())


def crps(data: Forecasts) -> float:
    m, s, y = data
    z = (y - m) / s
    density = np.exp(-z * z / 2) / math.sqrt(2 * math.pi)
    return float((s * (z * (2 * ndtr(z) - 1) + 2 * density - 1 / math.sqrt(math.pi))).mean())


def miscalibration_area(data: Forecasts) -> float:
    """Between the diagonal and the shares inside centred intervals of a hundred levels, joined by straight lines."""
    m, s, y = data
    levels = np.linspace(0, 1, 100)
    distance = np.sort(np.abs(y - m) / s)
    with np.errstate(divide="ignore"):
        shares = np.searchsorted(distance, ndtri((1 + levels) / 2), side="right") / len(y)
    gaps = shares - levels
    area = 0.0
    for a, b in pairwise(gaps):
        crossing = a * b < 0
        area += (a * a + b * b) / (2 * (abs(a) + abs(b))) if crossing else (abs(a) + abs(b)) / 2
    return float(area / (len(levels) - 1))


METRICS = {"ece": ece, "aece": aece, "sce": sce, "nll": nll, "brier": brier, "smooth_ece": smooth_ece}
REGRESSION = {"gaussian_nll": gaussian_nll, "crps": crps, "miscalibration_area": miscalibration_area}
