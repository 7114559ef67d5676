"""Slow loops that are obviously right, to compare the fast code with."""

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


def claims(logits, labels):
    """Score and outcome of each row: P(class 1) with two classes, with more the confidence."""
    if logits.shape[1] > 2:
        return top_label(logits, labels)
    return softmax(logits)[:, 1], (np.asarray(labels) == 1).astype(float)


def top_label(logits, labels):
    """Confidence and correctness of each row; ties go to the lowest index."""
    probs = softmax(logits)
    confidence, correct = [], []
    for row, y in zip(probs, labels, strict=True):
        best = int(np.argmax(row))
        confidence.append(row[best])
        correct.append(1.0 if best == y else 0.0)
    return np.array(confidence), np.array(correct)


def scores_and_outcomes(logits, labels, fold=False):
    """P(class 1) and its outcome for two classes, unless `top_label`; else confidence and correctness."""
    if len(np.asarray(logits)[0]) == 2 and not fold:
        return np.array([row[1] for row in softmax(logits)]), np.array([float(y == 1) for y in labels])
    return top_label(logits, labels)


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
    """Error rate among the first k rows, averaged over every order by decreasing certainty."""
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
    for b in sorted({rank * bins // len(std) for rank in range(len(std))}):
        chunk = [i for rank, i in enumerate(order) if rank * bins // len(std) == b]
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
        position = 0
        while position < bins - 1 and v > least + (greatest - least) * (position + 1) / bins:
            position += 1
        members[position].append(i)
    return sum(abs(sum(error[i] ** 2 - variance[i] for i in m)) for m in members) / len(std)


def ks_error(scores, hits):
    """Every distinct threshold, all rows not above it; only for scores without near ties."""
    return max(abs(sum(a - s for s, a in zip(scores, hits, strict=True) if s <= t)) for t in scores) / len(scores)


def ranked_rows(logits, labels, rank):
    """Scores and hits of the rank-th class, and of the first `rank` classes; ties go to the lowest index."""
    scores, hits, sums, within = [], [], [], []
    for row, z, y in zip(softmax(logits), logits, labels, strict=True):
        order = sorted(range(len(row)), key=lambda k: (-z[k], k))
        scores.append(row[order[rank - 1]])
        hits.append(float(order[rank - 1] == y))
        sums.append(sum(row[k] for k in order[:rank]))
        within.append(float(y in order[:rank]))
    return scores, hits, sums, within


def smooth_error(confidence, correct, points=20_000):
    """The residual smoothed by the reflected Gaussian, reflection by reflection, and σ by bisection."""
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
    """Triweight densities of half-width 3h with reflections, then their capped ratio where the density is positive."""
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
    """Rank r goes to chunk r·B // n; a run of equal values goes to the chunk of its first one."""
    n = len(confidence)
    order = sorted(range(n), key=lambda i: confidence[i])
    index = np.zeros(n, dtype=int)
    for rank, i in enumerate(order):
        same = rank > 0 and is_tied(confidence[order[rank - 1]], confidence[i])
        index[i] = index[order[rank - 1]] if same else rank * bins // n
    return index


def bin_gaps(index, confidence, hits):
    """(share of rows, accuracy, mean confidence, rows) of each bin with rows."""
    result = []
    for b in sorted(set(index.tolist())):
        inside = [i for i in range(len(index)) if index[i] == b]
        acc = sum(hits[i] for i in inside) / len(inside)
        conf = sum(confidence[i] for i in inside) / len(inside)
        result.append((len(inside) / len(index), acc, conf, len(inside)))
    return result


def binned_errors(index, confidence, hits):
    """All the binned errors by their definitions."""
    gaps = bin_gaps(index, confidence, hits)
    return {
        "ece": sum(w * abs(acc - conf) for w, acc, conf, _ in gaps),
        "mce": max(abs(acc - conf) for _, acc, conf, _ in gaps),
        "rmsce": math.sqrt(sum(w * (acc - conf) ** 2 for w, acc, conf, _ in gaps)),
        "average_ce": sum(abs(acc - conf) for _, acc, conf, _ in gaps) / len(gaps),
        "overconfidence": sum(w * max(conf - acc, 0) for w, acc, conf, _ in gaps),
        "underconfidence": sum(w * max(acc - conf, 0) for w, acc, conf, _ in gaps),
    }


def snap(c, bins):
    """Move a confidence within rounding error of an edge onto that edge."""
    nearest = round(c * bins) / bins
    return nearest if abs(c - nearest) <= 8 * 2.220446049250313e-16 * nearest else c


def top_label_errors(logits, labels, bins=15, closed="right", fold=False):
    confidence, correct = scores_and_outcomes(logits, labels, fold)
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
    """Equal-mass bins, with equal confidences in one bin, as many as have increasing accuracies."""

    def binned(b):
        return [gap[:3] for gap in bin_gaps(equal_mass_index(confidence, b), confidence, hits)]

    ordered = sorted(confidence)
    values = 1 + sum(not is_tied(c, d) for c, d in itertools.pairwise(ordered))
    best = 1
    for b in range(2, values):
        accuracy = [acc for _, acc, _ in binned(b)]
        if any(later < earlier - 1e-12 for earlier, later in itertools.pairwise(accuracy)):
            break
        best = b
    return sum(w * abs(acc - conf) ** norm for w, acc, conf in binned(best)) ** (1 / norm)


def lemma_residual(logits, labels, temperature, gamma):
    """Σ w (z_y − zᵀq) row by row, divided by Σ w sqrt(Var_q z) unless that vanishes."""
    total = spread = 0.0
    for z, y, q in zip(logits, labels, softmax(np.asarray(logits) / temperature), strict=True):
        p = q[y]
        weight = 1.0
        if gamma:
            weight = 0.0 if p >= 1 else (1 - p) ** gamma - gamma * (1 - p) ** (gamma - 1) * p * np.log(max(p, 1e-300))
        mean = sum(q * z)
        total += weight * (z[y] - mean)
        spread += weight * np.sqrt(sum(q * (z - mean) ** 2))
    return total, (abs(total) / spread if spread > 1e-3 else None)


def losses(name, logits, labels, **options):
    """The loss of each row, pair or bin in a loop."""
    probs = softmax(logits)
    p = [row[y] for row, y in zip(probs, labels, strict=True)]
    nll = [cross_entropy(row, y) for row, y in zip(logits, labels, strict=True)]
    c, a = top_label(logits, labels)
    gamma, strength = options.get("gamma"), options.get("strength")
    if name == "cross_entropy":
        return nll
    if name == "label_smoothing":
        e, classes = options["smoothing"], len(probs[0])
        uniform = [sum(cross_entropy(row, k) for k in range(classes)) / classes for row in logits]
        return [(1 - e) * one + e * other for one, other in zip(nll, uniform, strict=True)]
    if name == "norm":
        order = options["order"]
        return [
            v + strength * sum(abs(z) ** order for z in row) ** (1 / order) for v, row in zip(nll, logits, strict=True)
        ]
    if name == "focal":
        return [(1 - q) ** gamma * v for q, v in zip(p, nll, strict=True)]
    if name == "flsd53":
        return [(1 - q) ** (5 if q < 0.2 else 3) * v for q, v in zip(p, nll, strict=True)]
    if name == "inverse_focal":
        return [(1 + q) ** gamma * v for q, v in zip(p, nll, strict=True)]
    if name == "dual_focal":
        below = [max([v for v in row if v < q], default=0.0) for row, q in zip(probs, p, strict=True)]
        return [(1 - q + j) ** gamma * v for q, j, v in zip(p, below, nll, strict=True)]
    if name == "brier":
        return [sum((v - (k == y)) ** 2 for k, v in enumerate(row)) for row, y in zip(probs, labels, strict=True)]
    entropy = [-sum(v * math.log(v) for v in row if v > 0) for row in probs]
    if name == "entropy_penalty":
        return [v - strength * h for v, h in zip(nll, entropy, strict=True)]
    batch = {
        "mmce": lambda: math.sqrt(max(0.0, mmce_squared(c, a, options["bandwidth"]))),
        "mmce_weighted": lambda: mmce_weighted(c, a, options["bandwidth"]),
        "avuc": lambda: accuracy_versus_uncertainty(c, a, entropy, options["threshold"]),
        "dca": lambda: abs(sum(a) / len(a) - sum(c) / len(c)),
        "soft_binned_ece": lambda: soft_binned(c, a, options["bins"], options["temperature"], options["order"]),
    }[name]()
    return [v + strength * batch for v in nll]


def cross_entropy(row, y):
    """ln Σ exp(z_k) − z_y."""
    top = max(row)
    return top + math.log(sum(math.exp(z - top) for z in row)) - row[y]


def mmce_weighted(confidence, correct, bandwidth):
    """The double sums over pairs of right, of wrong, and of one right and one wrong row."""
    right = [c for c, a in zip(confidence, correct, strict=True) if a]
    wrong = [c for c, a in zip(confidence, correct, strict=True) if not a]
    if not right or not wrong:
        return 0.0
    total = sum((1 - r) * (1 - s) * math.exp(-abs(r - s) / bandwidth) for r in right for s in right) / len(right) ** 2
    total += sum(r * s * math.exp(-abs(r - s) / bandwidth) for r in wrong for s in wrong) / len(wrong) ** 2
    mixed = sum((1 - r) * s * math.exp(-abs(r - s) / bandwidth) for r in right for s in wrong)
    return math.sqrt(max(0.0, total - 2 * mixed / (len(right) * len(wrong))))


def accuracy_versus_uncertainty(confidence, correct, entropy, threshold):
    """−ln of (n_AC + n_IU)/(n_AC + n_AU + n_IC + n_IU), each a soft count."""
    count = {"AC": 0.0, "AU": 0.0, "IC": 0.0, "IU": 0.0}
    for c, a, u in zip(confidence, correct, entropy, strict=True):
        certain = u <= threshold
        soft = (c if a else 1 - c) * (1 - math.tanh(u) if certain else math.tanh(u))
        count[("A" if a else "I") + ("C" if certain else "U")] += soft
    return -math.log((count["AC"] + count["IU"]) / (sum(count.values()) + 1e-10) + 1e-10)


def soft_binned(confidence, correct, bins, temperature, order):
    """Soft counts, accuracies and confidences, bin by bin."""
    members = []
    for c in confidence:
        near = [math.exp(-((c - (b + 0.5) / bins) ** 2) / temperature) for b in range(bins)]
        members.append([v / sum(near) for v in near])
    total = 0.0
    for b in range(bins):
        count = sum(m[b] for m in members)
        if count > 0:
            acc = sum(m[b] * a for m, a in zip(members, correct, strict=True)) / count
            conf = sum(m[b] * c for m, c in zip(members, confidence, strict=True)) / count
            total += count / len(confidence) * abs(acc - conf) ** order
    return total ** (1 / order)


def blurred(plane, sigma):
    """Each pixel as a weighted mean over a square, with repeated border."""
    height, width = plane.shape
    r = int(4 * sigma + 0.5)
    weight = [math.exp(-0.5 * (d / sigma) ** 2) for d in range(-r, r + 1)]
    out = np.zeros((height, width))
    for i, j in itertools.product(range(height), range(width)):
        for di, dj in itertools.product(range(-r, r + 1), repeat=2):
            at = min(max(i + di, 0), height - 1), min(max(j + dj, 0), width - 1)
            out[i, j] += weight[di + r] * weight[dj + r] * plane[at]
    return out / sum(weight) ** 2


def cosine_quantised(block, table, quality):
    """The JPEG transform of one 8 × 8 block by the sums of the standard, quantised by the table, and its inverse."""
    scale = 5000 // quality if quality < 50 else 200 - 2 * quality
    eight = range(8)
    norm = [math.sqrt(0.5)] + [1.0] * 7
    wave = [[math.cos((2 * i + 1) * u * math.pi / 16) for i in eight] for u in eight]
    kept = np.zeros((8, 8))
    for u, v in itertools.product(eight, eight):
        total = sum((block[i, j] - 128) * wave[u][i] * wave[v][j] for i in eight for j in eight)
        step = min(max((table[u][v] * scale + 50) // 100, 1), 255)
        size = norm[u] * norm[v] / 4 * total / step
        kept[u, v] = math.copysign(math.floor(abs(size) + 0.5 + 1e-9), size) * step
    out = np.zeros((8, 8))
    for i, j in itertools.product(eight, eight):
        total = sum(norm[u] * norm[v] * kept[u, v] * wave[u][i] * wave[v][j] for u in eight for v in eight)
        out[i, j] = min(max(math.floor(total / 4 + 128.5 + 1e-9), 0), 255)
    return out


def descent(weight, bias, x, y, orders, *, delta, gamma, penalty, norm, lr, momentum, batch):
    """δ and T of a linear network W(x + δ) + b by SGD, derivatives by hand; `orders` are the epochs' permutations."""
    delta, temperature = np.array(delta, dtype=float), 1.0
    speed_delta, speed_temperature = np.zeros_like(delta), 0.0
    for order in orders:
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            by_delta, by_temperature = np.zeros_like(delta), 0.0
            for i in rows:
                z = weight @ (x[i] + delta) + bias
                q = softmax((z / temperature)[None])[0]
                p = q[y[i]]
                factor = (1 - p) ** gamma - (gamma * (1 - p) ** (gamma - 1) * p * np.log(p) if gamma else 0.0)
                by_logit = factor * (q - np.eye(len(z))[y[i]]) / temperature
                by_delta += weight.T @ by_logit / len(rows)
                by_temperature -= by_logit @ z / temperature / len(rows)
            size = np.sqrt((delta**2).sum())
            by_delta += 2 * penalty * delta if norm == "l2sq" else penalty * delta / size if size else 0.0
            speed_delta = momentum * speed_delta + by_delta
            speed_temperature = momentum * speed_temperature + by_temperature
            delta, temperature = delta - lr * speed_delta, temperature - lr * speed_temperature
    return delta, temperature


def empirical_quantile(z, level):
    """The value below which a share `level` lies, when the i-th smallest of n has the share i/(n+1), straight between.

    Beyond them the normal distribution, scaled to the share that is left, by bisection in its distribution function.
    """
    z, n = sorted(z), len(z)

    def share(t):
        below = 0.5 * math.erfc(-t / math.sqrt(2))
        if t < z[0]:
            return below / (0.5 * math.erfc(-z[0] / math.sqrt(2))) / (n + 1)
        above = 0.5 * math.erfc(t / math.sqrt(2))
        return 1 - above / (0.5 * math.erfc(z[-1] / math.sqrt(2))) / (n + 1)

    position = level * (n + 1)
    if 1 <= position <= n:
        i = min(int(position), n - 1)
        return z[i - 1] + (position - i) * (z[min(i, n - 1)] - z[i - 1])
    low, high = (-40.0, z[0]) if position < 1 else (z[-1], 40.0)
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if share(middle) < level else (low, middle)
    return (low + high) / 2


def forecast_of_passes(samples):
    """Mean probabilities of each row over passes (passes, n, K), their entropy, information and variance."""
    probs = [softmax(one) for one in samples]
    out = []
    for i in range(len(samples[0])):
        rows = [one[i] for one in probs]
        mean = [sum(row[k] for row in rows) / len(rows) for k in range(len(rows[0]))]
        total = -sum(v * math.log(v) for v in mean if v > 0)
        inner = sum(-sum(v * math.log(v) for v in row if v > 0) for row in rows) / len(rows)
        spread = sum(sum((row[k] - mean[k]) ** 2 for row in rows) / len(rows) for k in range(len(mean)))
        out.append((mean, total, total - inner, spread))
    return out


def aligned(error, uncertainty, alpha, level, group):
    """α mean e + (1−α) times the squared gap of e and u, by hand at each level."""
    m = len(error)
    order = sorted(range(m), key=lambda i: uncertainty[i])
    if level == "sample":
        parts = [[i] for i in order]
    elif level == "batch":
        parts = [order]
    else:
        count = max(1, m // group)
        parts = [[i for at, i in enumerate(order) if at * count // m == g] for g in range(count)]
    square = 0.0
    for part in parts:
        gap = sum(error[i] for i in part) / len(part) - sum(uncertainty[i] for i in part) / len(part)
        square += len(part) / m * gap**2
    return alpha * sum(error) / m + (1 - alpha) * square


def slow_wealth(confidence, correct, beliefs, shares, block):
    """Wealth of bettors who restart each block, one payoff at a time, for each set of bets."""
    import math

    total = 0.0
    n = len(confidence)
    begun = n // block + 1
    for (slope, shift, low, high), share in zip(beliefs, shares, strict=True):
        for k in range(1, begun + 1):
            money = share / (k * (k + 1))
            for i in range((k - 1) * block, n):
                c = confidence[i]
                if low <= c < high or (high == 1 and c == 1):
                    odds = slope * math.log(c / (1 - c)) + shift
                    believed = 1 / (1 + math.exp(-odds))
                    money *= believed / c if correct[i] else (1 - believed) / (1 - c)
            total += money
    return total + 1 / (begun + 1)


def chances_of_hits(chances):
    """The Poisson-binomial distribution, one event at a time."""
    result = [1.0]
    for p in chances:
        longer = [0.0] * (len(result) + 1)
        for k, mass in enumerate(result):
            longer[k] += mass * (1 - p)
            longer[k + 1] += mass * p
        result = longer
    return result


def class_calibration_errors(logits, labels, bins):
    """Each class's calibration error, mean probability and frequency."""
    probs = softmax(logits)
    result = []
    for k in range(probs.shape[1]):
        hits = np.array([float(y == k) for y in labels])
        index = np.array([equal_width_index(snap(p, bins), bins) for p in probs[:, k]])
        error = binned_errors(index, probs[:, k], hits)["ece"]
        result.append((error, sum(probs[:, k]) / len(hits), sum(hits) / len(hits)))
    return result


def posterior_of_temperature(logits, labels, new, scale=0.5, smooth=0.1):
    """The mean of softmax(z/T) over a fine grid of ln T, by a prior of Student's t and smoothed labels."""
    n = len(labels)
    share = smooth / (n + smooth)
    points = np.linspace(-6, 6, 301)
    posterior = -2 * np.log1p((points / scale) ** 2 / 3)
    for i, x in enumerate(points):
        for z, y in zip(logits * math.exp(x), labels, strict=True):
            log_p = z - np.logaddexp.reduce(z)
            posterior[i] += (1 - share) * log_p[y] + share * log_p.mean()
    weights = np.exp(posterior - posterior.max())
    mean = 0.0
    for x, weight in zip(points, weights / weights.sum(), strict=True):
        z = new * math.exp(x)
        mean = mean + weight * np.exp(z - np.logaddexp.reduce(z, axis=1, keepdims=True))
    return mean


def em_weights(probs, labels, prior, steps=20000):
    """Weights of a mixture by EM with a Dirichlet prior that adds α − 1 rows to each part."""
    parts, n, _ = probs.shape
    true_class_prob = np.array([[probs[m, i, labels[i]] for m in range(parts)] for i in range(n)])
    weights = np.full(parts, 1 / parts)
    for _ in range(steps):
        counts = np.array(prior, dtype=float) - 1
        counts = counts + (weights * true_class_prob / (true_class_prob @ weights)[:, None]).sum(axis=0)
        before, weights = weights, counts / counts.sum()
        if np.abs(weights - before).max() < 1e-9:
            break
    return weights


def nll_of_mixture(probs, labels, sample_weight):
    """The mean log-loss of a mixture of probabilities (parts, n, classes)."""
    return -sum(
        math.log(sum(w * part[i, y] for w, part in zip(sample_weight, probs, strict=True)))
        for i, y in enumerate(labels)
    ) / len(labels)


def brier_of_mixture(probs, labels, sample_weight):
    """The mean Brier score of a mixture."""
    total = 0.0
    for i, y in enumerate(labels):
        for k in range(probs.shape[2]):
            mixed = sum(w * part[i, k] for w, part in zip(sample_weight, probs, strict=True))
            total += (mixed - (1.0 if k == y else 0.0)) ** 2
    return total / len(labels)


def loess(scores, hits, span=0.75):
    """Local quadratic regression with tricube weights over the nearest share of the rows, one row at a time."""
    fitted = []
    for at in scores:
        distance = np.abs(scores - at)
        width = np.sort(distance)[math.ceil(span * len(scores) - 1e-9) - 1]
        weight = np.maximum(1 - (distance / width) ** 3, 0.0) ** 3
        x = np.stack([np.ones(len(scores)), scores - at, (scores - at) ** 2], axis=1) * np.sqrt(weight)[:, None]
        fitted.append(np.linalg.lstsq(x, np.sqrt(weight) * hits, rcond=None)[0][0])
    return np.clip(fitted, 0.0, 1.0)


def pav(scores, hits):
    """Isotonic regression: blocks of equal scores, merged with the block before while its mean is higher."""
    order = sorted(range(len(scores)), key=lambda i: scores[i])
    blocks = []
    for i in order:
        if blocks and is_tied(scores[blocks[-1][-1]], scores[i]):
            blocks[-1].append(i)
        else:
            blocks.append([i])
    merged = []
    for block in blocks:
        merged.append(block)
        while len(merged) > 1 and np.mean([hits[i] for i in merged[-2]]) >= np.mean([hits[i] for i in merged[-1]]):
            block = merged.pop()
            merged[-1] = merged[-1] + block
    fitted = np.zeros(len(scores))
    for block in merged:
        fitted[block] = np.mean([hits[i] for i in block])
    return fitted


def corp(scores, hits):
    """Score, miscalibration, discrimination and uncertainty of the Brier score."""

    def brier(p):
        return float(np.mean((p - hits) ** 2))

    score, best, mean = brier(scores), brier(pav(scores, hits)), brier(np.full(len(hits), np.mean(hits)))
    return score, score - best, mean - best, mean


def masked_nll_temperature(logits, labels):
    """The maximum likelihood temperature, with each row's softmax over its own options, by bisection."""

    def slope(beta):
        total = 0.0
        for row, label in zip(logits, labels, strict=True):
            options = [float(x) for x in row if x > -math.inf]
            weights = [math.exp(beta * (x - max(options))) for x in options]
            mean = sum(w * x for w, x in zip(weights, options, strict=True)) / sum(weights)
            total += mean - float(row[label])
        return total

    low, high = 1e-3, 1e3
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return 1 / low


def image_class_errors(logits, labels, error, bins, ignore_index=-100):
    """|mean probability − share of the class| over the bins of its probability, for each image and class."""
    result = []
    for image, label in zip(logits, labels, strict=True):
        p = np.exp(image - image.max(axis=0))
        p = (p / p.sum(axis=0)).reshape(len(p), -1)
        kept = label.ravel() != ignore_index
        row = []
        for k in range(len(p)):
            gaps, sizes = [], []
            for b in range(bins):
                inside = kept & (p[k] > b / bins) & (p[k] <= (b + 1) / bins)
                if inside.any():
                    gaps.append(abs(p[k][inside].mean() - (label.ravel()[inside] == k).mean()))
                    sizes.append(inside.sum())
            row.append(
                {"ece": np.average(gaps, weights=sizes), "average_ce": np.mean(gaps), "mce": np.max(gaps)}[error]
            )
        result.append(row)
    return np.array(result)
