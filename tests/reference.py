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


def ks_error(scores, hits):
    """Every distinct threshold, all rows not above it; only for scores without near ties."""
    return max(abs(sum(a - s for s, a in zip(scores, hits, strict=True) if s <= t)) for t in scores) / len(scores)


def ranked_rows(logits, labels, rank):
    """Scores and hits of the rank-th class, and of the first `rank` together; ties go to the lowest index."""
    scores, hits, sums, within = [], [], [], []
    for row, z, y in zip(softmax(logits), logits, labels, strict=True):
        order = sorted(range(len(row)), key=lambda k: (-z[k], k))
        scores.append(row[order[rank - 1]])
        hits.append(float(order[rank - 1] == y))
        sums.append(sum(row[k] for k in order[:rank]))
        within.append(float(y in order[:rank]))
    return scores, hits, sums, within


def smooth_error(confidence, correct, points=20_000):
    """The residual smoothed image by image of the reflected Gaussian, and σ by bisection."""
    t = (np.arange(points) + 0.5) / points

    def error(sigma):
        r = np.zeros(points)
        for c, a in zip(confidence, correct, strict=True):
            for k in range(-5, 6):
                for image in (2 * k + c, 2 * k - c):
                    if abs(image - 0.5) < 0.5 + 9 * sigma:
                        r += (c - a) * np.exp(-0.5 * ((t - image) / sigma) ** 2) / (sigma * math.sqrt(2 * math.pi))
        return np.abs(r).mean() / len(confidence)

    low, high = 0.0, 1.0
    for _ in range(25):
        middle = (low + high) / 2
        low, high = (middle, high) if error(middle) > middle else (low, middle)
    return high


def kernel_density_error(confidence, correct):
    """Triweight densities of half-width 3h, image by image, then the ratio, capped, wherever there is any density."""
    n, accuracy = len(confidence), sum(correct) / len(correct)
    right = [c for c, a in zip(confidence, correct, strict=True) if a]
    width = 3 * np.std(right) * (2 * n) ** -0.2
    points = max(5_000, int(1_000 / width))
    t = (np.arange(points) + 0.5) / points

    def density(centres):
        f = np.zeros(points)
        for c in centres:
            for k in range(-2, 3):
                for image in (2 * k + c, 2 * k - c):
                    if abs(image - 0.5) < 0.5 + width:
                        v = (t - image) / width
                        f += np.where(np.abs(v) < 1, 35 / 32 * (1 - v**2) ** 3, 0.0) / width
        return f / len(centres)

    f, f1 = density(confidence), density(right)
    error = [abs(x - min(accuracy * f1[i] / f[i], 1.0)) * f[i] for i, x in enumerate(t) if f[i] > 0]
    return sum(error) / points


def mmce_squared(confidence, correct, bandwidth):
    """Every pair of rows."""
    total = 0.0
    for c, a in zip(confidence, correct, strict=True):
        for d, b in zip(confidence, correct, strict=True):
            total += (a - c) * (b - d) * math.exp(-abs(c - d) / bandwidth)
    return total / len(confidence) ** 2


def skce_matrix(logits, labels, bandwidth):
    """exp(−distance/bandwidth) times the product of the residuals, for every pair of rows."""
    probs = softmax(logits)
    out = np.zeros((len(probs), len(probs)))
    for i, p in enumerate(probs):
        for j, q in enumerate(probs):
            e, f = (np.eye(len(p))[labels[i]] - p), (np.eye(len(p))[labels[j]] - q)
            out[i, j] = math.exp(-math.sqrt(sum((p - q) ** 2)) / bandwidth) * sum(e * f)
    return out


def equal_width_index(c, bins, closed="right"):
    """The bin of one confidence by comparing it with every edge."""
    for b in range(bins):
        low, high = b / bins, (b + 1) / bins
        if closed == "right" and (low < c <= high or (b == 0 and c == 0)):
            return b
        if closed == "left" and (low <= c < high or (b == bins - 1 and c == 1)):
            return b
    raise AssertionError(f"{c} lies in no bin")


def is_tied(a, b):
    """Equal up to four units of rounding."""
    return abs(a - b) <= 4 * 2.220446049250313e-16 * max(abs(a), abs(b))


def equal_mass_index(confidence, bins):
    """Chunks of the sorted confidences; a run of equal ones all goes where its first one goes."""
    n = len(confidence)
    bins = min(bins, n)
    order = sorted(range(n), key=lambda i: confidence[i])
    chunk_of_rank = []
    for b, chunk in enumerate(np.array_split(np.arange(n), bins)):
        chunk_of_rank += [b] * len(chunk)
    index = np.zeros(n, dtype=int)
    for rank, i in enumerate(order):
        same = rank > 0 and is_tied(confidence[order[rank - 1]], confidence[i])
        index[i] = index[order[rank - 1]] if same else chunk_of_rank[rank]
    return index


def bin_gaps(index, confidence, hits):
    """Per bin that is not empty: (share of rows, accuracy, mean confidence, rows)."""
    found = []
    for b in sorted(set(index.tolist())):
        inside = [i for i in range(len(index)) if index[i] == b]
        acc = sum(hits[i] for i in inside) / len(inside)
        conf = sum(confidence[i] for i in inside) / len(inside)
        found.append((len(inside) / len(index), acc, conf, len(inside)))
    return found


def binned_errors(index, confidence, hits):
    """All the binned errors by their definitions."""
    gaps = bin_gaps(index, confidence, hits)
    return {
        "ece": sum(w * abs(acc - conf) for w, acc, conf, _ in gaps),
        "mce": max(abs(acc - conf) for _, acc, conf, _ in gaps),
        "rmsce": math.sqrt(sum(w * (acc - conf) ** 2 for w, acc, conf, _ in gaps)),
        "ace": sum(abs(acc - conf) for _, acc, conf, _ in gaps) / len(gaps),
        "overconfidence": sum(w * max(conf - acc, 0) for w, acc, conf, _ in gaps),
        "underconfidence": sum(w * max(acc - conf, 0) for w, acc, conf, _ in gaps),
    }


def snap(c, bins):
    """Put a computed confidence that lies a few roundings off an edge on that edge."""
    nearest = round(c * bins) / bins
    return nearest if abs(c - nearest) <= 8 * 2.220446049250313e-16 * nearest else c


def top_label_errors(logits, labels, bins=15, closed="right"):
    confidence, correct = top_label(logits, labels)
    index = np.array([equal_width_index(snap(c, bins), bins, closed) for c in confidence])
    return binned_errors(index, confidence, correct)


def sce(logits, labels, bins=15, threshold=None):
    """Class-wise error, class by class."""
    probs = softmax(logits)
    n, classes = probs.shape
    total = 0.0
    for k in range(classes):
        for b in range(bins):
            gap = 0.0
            for i in range(n):
                kept = threshold is None or probs[i, k] > threshold
                if kept and equal_width_index(snap(probs[i, k], bins), bins) == b:
                    gap += (labels[i] == k) - probs[i, k]
            total += abs(gap) / n
    return total / classes


def debiased_square(confidence, hits, bins):
    total = 0.0
    for w, acc, conf, size in bin_gaps(equal_mass_index(confidence, bins), confidence, hits):
        if size >= 2:
            total += w * ((conf - acc) ** 2 - acc * (1 - acc) / (size - 1))
    return total


def ece_sweep(confidence, hits, norm=1):
    """Equal-mass bins by integer ranks; rows of equal confidence share their mean accuracy."""
    n = len(confidence)
    order = sorted(range(n), key=lambda i: confidence[i])
    c = [confidence[i] for i in order]
    a = [np.mean([hits[j] for j in order if is_tied(confidence[j], confidence[i])]) for i in order]

    def binned(b):
        groups = [[r for r in range(n) if r * b // n == j] for j in range(b)]
        return [(len(g) / n, np.mean([a[r] for r in g]), np.mean([c[r] for r in g])) for g in groups]

    best = 1
    for b in range(2, n):
        accuracy = [acc for _, acc, _ in binned(b)]
        if any(accuracy[j + 1] < accuracy[j] - 1e-12 for j in range(b - 1)):
            break
        best = b
    return sum(w * abs(acc - conf) ** norm for w, acc, conf in binned(best)) ** (1 / norm)
