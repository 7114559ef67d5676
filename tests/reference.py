"""Slow loops, obviously right: what the fast code is held against."""

from __future__ import annotations

import itertools
import math

import numpy as np


def softmax(logits):
    """Row by row, in float64."""
    out = []
    for row in np.asarray(logits, dtype=np.float64):
        top = max(row)
        exps = [math.exp(v - top) for v in row]
        out.append([e / sum(exps) for e in exps])
    return np.array(out).reshape(len(out), -1)


def top_label(logits, labels):
    """Confidence and correctness of each row; ties go to the lowest index."""
    probs = softmax(logits)
    confidence, correct = [], []
    for row, y in zip(probs, labels, strict=True):
        best = int(np.argmax(row))
        confidence.append(row[best])
        correct.append(1.0 if best == y else 0.0)
    return np.array(confidence), np.array(correct)


def roc_area(scores, positive):
    """Every pair of a positive and a negative."""
    wins = pairs = 0.0
    for s, p in zip(scores, positive, strict=True):
        for t, q in zip(scores, positive, strict=True):
            if p and not q:
                pairs += 1
                wins += 1 if s > t else 0.5 if s == t else 0
    return wins / pairs if pairs else math.nan


def average_precision(scores, positive):
    """Every distinct threshold, highest first."""
    total, recall = sum(positive), 0.0
    if not total:
        return math.nan
    area = 0.0
    for t in sorted(set(scores), reverse=True):
        passed = [p for s, p in zip(scores, positive, strict=True) if s >= t]
        area += (sum(passed) / total - recall) * sum(passed) / len(passed)
        recall = sum(passed) / total
    return area


def false_positive_rate(scores, positive, recall):
    """The first threshold, highest first, that lets enough positives pass."""
    yes = [s for s, p in zip(scores, positive, strict=True) if p]
    no = [s for s, p in zip(scores, positive, strict=True) if not p]
    if not yes or not no:
        return math.nan
    for t in sorted(set(scores), reverse=True):
        if sum(s >= t for s in yes) / len(yes) >= recall:
            return sum(s >= t for s in no) / len(no)
    raise AssertionError("the lowest threshold lets everything pass")


def risks(certainty, wrong):
    """Errors among the first k over k, averaged over every order that has the certain ones first."""
    n = len(wrong)
    total, orders = np.zeros(n), 0
    for order in itertools.permutations(range(n)):
        if all(certainty[i] >= certainty[j] for i, j in itertools.pairwise(order)):
            total += [sum(wrong[i] for i in order[:k]) / k for k in range(1, n + 1)]
            orders += 1
    return total / orders


def gaussian_crps(mean, std, target):
    """The integral of (F(t) − 1[t ≥ y])² by the midpoint rule, with the jump between two cells."""

    def squares(low, high, step):
        t = low + (high - low) * (np.arange(100_000) + 0.5) / 100_000
        below = np.array([0.5 * math.erfc(-(v - mean) / std / math.sqrt(2)) for v in t])
        return ((below - step) ** 2).sum() * (high - low) / 100_000

    reach = abs(target - mean) + 10 * std
    return squares(mean - reach, target, 0.0) + squares(target, mean + reach, 1.0)


def expected_normalised_error(std, error, bins):
    """Chunks of the rows sorted by std; only for std without ties."""
    order = sorted(range(len(std)), key=lambda i: std[i])
    terms = []
    for chunk in np.array_split(order, min(bins, len(std))):
        announced = math.sqrt(sum(std[i] ** 2 for i in chunk) / len(chunk))
        seen = math.sqrt(sum(error[i] ** 2 for i in chunk) / len(chunk))
        terms.append(abs(announced - seen) / announced)
    return sum(terms) / len(terms)


def variance_error(std, error, bins):
    """Right-closed bins of equal width between the least and the greatest variance."""
    variance = [s * s for s in std]
    least, greatest = min(variance), max(variance)
    members = [[] for _ in range(bins)]
    for i, v in enumerate(variance):
        place = 0
        while place < bins - 1 and v > least + (greatest - least) * (place + 1) / bins:
            place += 1
        members[place].append(i)
    return sum(abs(sum(error[i] ** 2 - variance[i] for i in m)) for m in members) / len(std)
