"""Label shift: estimate the class frequencies of a new population from unlabelled rows and correct probabilities.

If p(x | y) did not change, each probability is multiplied by the ratio of new to old class frequency. Each row is then
normalised again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
from scipy.special import chdtrc

from trueup._core.arrays import as_logits, as_vector, take_rows
from trueup._core.errors import InputError
from trueup._core.formatting import format_interval, format_number, format_percent, text_table
from trueup._core.namespace import NUMPY
from trueup._core.row_scores import confidences
from trueup._core.types import ArrayLike
from trueup.calibrators.base import Calibrator
from trueup.calibrators.compose import Chain
from trueup.calibrators.linear import Vector
from trueup.decisions.refits import Refits, check_rows
from trueup.metrics.table import plain_record

INDEPENDENT = "Rows are assumed to be independent. If they are correlated, these intervals are too narrow."
"""Note on estimates from rows in clusters."""
CALIBRATION = "bias_corrected_temperature"
"""Default calibration before the frequencies are estimated; its mean probabilities equal the label frequencies."""
_MIN_RATIO = 1e-12
_MAX_CLASSES_FOR_NEWTON = 64  # Each Newton step costs rows · classes²
Pair = tuple[np.ndarray, np.ndarray]
"""Logits (n, classes) and labels (n,), checked."""
Weights = np.ndarray | None


@dataclass(frozen=True, eq=False)
class PriorEstimate:
    """Estimated class frequencies of a population without labels."""

    prior: np.ndarray
    """Estimated frequency of each class."""
    low: np.ndarray
    """Lower ends of the intervals."""
    high: np.ndarray
    """Upper ends of the intervals."""
    level: float
    """Level of the intervals."""
    old: np.ndarray
    """Class frequencies of the labelled rows."""
    method: str
    """Estimator, "em" or "bbse"."""
    rows: int
    """Number of unlabelled rows."""
    p_value: float
    """P-value of a test that the predicted classes are as frequent as before; NaN without labelled rows."""
    calibrator: Calibrator = field(repr=False)
    """Calibrates the network's logits and corrects them for the new frequencies."""

    @property
    def moved(self) -> bool:
        """Whether the test shows a change at the 5 % level."""
        return self.p_value < 0.05

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        arrays = {name: getattr(self, name).tolist() for name in ("prior", "low", "high", "old")}
        record = plain_record({name: getattr(self, name) for name in ("method", "rows", "level", "p_value")})
        return {"schema": 1, **record, **arrays}

    def verdict(self) -> str:
        """Return whether the frequencies moved, which estimates are guesses, and the assumption."""
        sentences = []
        if not math.isnan(self.p_value):
            p_value = f"p {'=' if self.p_value > 0.001 else '≤'} {max(self.p_value, 0.001):.3f}"
            moved = "The class frequencies moved" if self.moved else "No evidence that the class frequencies moved"
            sentences.append(f"{moved} ({p_value}).")
        if len(unseen := np.flatnonzero(self.old == 0)):
            some = ", ".join(str(k) for k in unseen[:5]) + (" …" if len(unseen) > 5 else "")
            sentences.append(f"No labelled row has class {some}: its estimate is a guess.")
        assumption = "This assumes that only the class frequencies changed, not what each class looks like."
        return "\n\n".join([*sentences, assumption])

    def __str__(self) -> str:
        change = np.argsort(-np.abs(self.prior - self.old), kind="stable")
        shown = np.sort(change[:20])
        table = [["class", "before", "now", f"{format_percent(self.level)} interval"]]
        for k in shown.tolist():
            numbers = format_number(self.old[k]), format_number(self.prior[k])
            table.append([str(k), *numbers, format_interval(self.low[k], self.high[k])])
        part = f"\n(the {len(shown)} of {len(self.prior)} classes that changed most)"
        return f"{text_table(table)}{part if len(shown) < len(self.prior) else ''}\n\n{self.verdict()}"


def shift_prior(new: ArrayLike, old: ArrayLike) -> Vector:
    """Return a calibrator that corrects calibrated logits for new class frequencies: it adds ln(new/old).

    The same map corrects a network trained on an undersampled set; `old` then holds the training frequencies.

    Parameters
    ----------
    new
        New class frequencies, shape (classes,).
    old
        Class frequencies for which the logits are calibrated, positive, shape (classes,).

    Returns
    -------
    Vector
        The calibrator.

    Examples
    --------
    >>> corrected = shift_prior(new=[0.9, 0.1], old=[0.5, 0.5])([[0.0, 0.0]])
    >>> (np.exp(corrected) / np.exp(corrected).sum()).round(4)
    array([[0.9, 0.1]])

    References
    ----------
    Saerens, Latinne and Decaestecker, "Adjusting the outputs of a classifier to new a priori probabilities" (2002),
    doi:10.1162/089976602753284446. Elkan, "The foundations of cost-sensitive learning" (2001).
    """
    after = _check_prior(new, "new")
    before = _check_prior(old, "old", len(after))
    if before.min() == 0:
        raise InputError("old", "be positive in every class", f"0 in class {int(before.argmin())}")
    ratio = np.log(np.maximum(after / before, _MIN_RATIO))
    return Vector(np.ones(len(after)), ratio - ratio.mean())


def estimate_prior(
    logits: ArrayLike,
    *,
    val: tuple[ArrayLike, ArrayLike] | None = None,
    old: ArrayLike | None = None,
    method: Literal["em", "bbse"] = "em",
    calibrate: str | Callable[..., Calibrator] | None = CALIBRATION,
    level: float = 0.95,
    n_resamples: int = 200,
    seed: int = 0,
) -> PriorEstimate:
    """Estimate the class frequencies of unlabelled rows, with bootstrap intervals.

    "em" is maximum likelihood: it repeats π_k ← mean of w_k p_k / Σ_j w_j p_j with w = π/π_old until convergence.
    "bbse" solves C w = μ. Here C holds the joint frequencies of predicted and true class on `val`; μ holds the
    frequencies of the classes predicted now.

    Parameters
    ----------
    logits
        Network outputs of unlabelled rows, shape (n, classes).
    val
        Logits and labels of the old population. Give either `val` or `old`.
    old
        Class frequencies for which `logits` are calibrated, shape (classes,).
    method
        Estimator.
    calibrate
        Method fitted to `val` first, by name or as a function; None takes the logits as calibrated.
    level
        Level of the intervals, which include the uncertainty of `val`.
    n_resamples
        Number of bootstrap resamples.
    seed
        Seed of the resamples.

    Returns
    -------
    PriorEstimate
        The frequencies, a test of change, and a calibrator that corrects the logits.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> y = rng.choice(3, size=6000, p=[0.2, 0.3, 0.5])
    >>> z = 2 * np.eye(3)[y] + rng.normal(size=(6000, 3))
    >>> kept = (y != 2) | (rng.random(6000) < 0.2)                    # class 2 becomes rare
    >>> estimate = estimate_prior(z[3000:][kept[3000:]], val=(z[:3000], y[:3000]), n_resamples=50)
    >>> estimate.prior.round(2), (np.bincount(y[3000:][kept[3000:]]) / kept[3000:].sum()).round(2)
    (array([0.32, 0.49, 0.19]), array([0.34, 0.48, 0.18]))
    >>> estimate.moved
    True

    References
    ----------
    Saerens et al. (2002), doi:10.1162/089976602753284446. Alexandari, Kundaje and Shrikumar (2020), arXiv:1901.06852.
    Lipton, Wang and Smola (2018), arXiv:1802.03916.
    """
    z, pair = check_rows(logits, val, level, n_resamples)
    if method not in ("em", "bbse"):
        raise InputError("method", "be em or bbse", repr(method))
    if (val is None) == (old is None):
        raise ValueError("give either val, labelled rows of the old population, or old, its class frequencies")
    if pair is None:
        if method == "bbse":
            raise ValueError("bbse needs val, labelled rows of the old population")
        return _from_calibrated(z, _check_prior(cast("ArrayLike", old), "old", z.shape[1]), level, n_resamples, seed)
    val_z, val_y = pair
    refits = Refits(calibrate or "identity", val_z, val_y)
    estimate = _em_estimate if method == "em" else _bbse_estimate
    counts, calibrator = np.bincount(val_y, minlength=z.shape[1]), refits.calibrator
    prior, base = estimate(calibrator, z, pair, None, None)
    rng = np.random.default_rng(seed)
    resampled = []
    # Labelled rows, drawn with the estimated frequencies, stand in for the new population. Estimates from them show
    # the noise, and the bias that imperfect calibration causes.
    row_probs = prior[val_y] / np.maximum(counts[val_y], 1)
    row_probs = row_probs / row_probs.sum() if row_probs.sum() > 0 else np.full(len(val_y), 1 / len(val_y))
    for _ in range(n_resamples):
        refitted, rows = refits.draw(rng)
        part = take_rows(val_z, val_y, rows)
        weight = rng.multinomial(len(z), row_probs).astype(np.float64)
        resampled.append(estimate(refitted if method == "em" else calibrator, val_z, part, weight, prior)[0])
    low, high = _bootstrap_ends(np.array(resampled), prior, level, len(z))
    corrected = Chain([calibrator, shift_prior(prior, np.maximum(base, _MIN_RATIO))])
    before, p_value = counts / len(val_y), _shift_p_value(z, val_z)
    return PriorEstimate(prior, low, high, level, before, method, len(z), p_value, corrected)


def em_prior(probs: np.ndarray, old: np.ndarray, *, sample_weight: Weights = None, start: Weights = None) -> np.ndarray:
    """Return the maximum-likelihood class frequencies for probabilities calibrated for `old`.

    The log-likelihood is concave, so there is one maximum. Up to `_MAX_CLASSES_FOR_NEWTON` classes, projected Newton
    steps find it; EM is slow where a frequency is near 0. With more classes, EM is accelerated by SQUAREM.

    Parameters
    ----------
    probs
        Probabilities calibrated for the frequencies `old`, shape (n, classes).
    old
        Old class frequencies, shape (classes,).
    sample_weight
        Weights of the rows, shape (n,).
    start
        First guess of the frequencies; `old` by default.

    Returns
    -------
    np.ndarray
        The frequencies, shape (classes,).
    """
    ratio = probs / np.maximum(old, _MIN_RATIO)
    share = np.full(len(probs), 1 / len(probs)) if sample_weight is None else sample_weight / sample_weight.sum()

    def step(prior: np.ndarray) -> tuple[np.ndarray, float]:
        density = ratio @ prior
        return prior * (ratio.T @ (share / density)), float(share @ np.log(density))

    prior = np.maximum(old if start is None else start, 1e-6)
    prior = prior / prior.sum()
    if len(prior) <= _MAX_CLASSES_FOR_NEWTON:
        return _newton_prior(ratio[share > 0], share[share > 0], prior)
    for _ in range(500):
        one, before = step(prior)
        two, _ = step(one)
        r, v = one - prior, two - 2 * one + prior
        if float(np.abs(two - one).max()) < 1e-9:
            return two
        length = -math.sqrt(float(r @ r) / max(float(v @ v), 1e-300))
        ahead = np.maximum(prior - 2 * length * r + length * length * v, two * 1e-3)
        after, value = step(ahead / ahead.sum())
        prior = after if value >= before else two
    return prior


def _newton_prior(ratio: np.ndarray, share: np.ndarray, prior: np.ndarray) -> np.ndarray:
    """Maximise Σ share · log(ratio @ prior) − Σ prior over prior ≥ 0, whose maximum sums to 1."""
    for _ in range(100):
        density = ratio @ prior
        scaled = ratio * (np.sqrt(share) / density)[:, None]
        gradient = ratio.T @ (share / density) - 1
        free = (prior > 0) | (gradient > 0)
        hessian = scaled[:, free].T @ scaled[:, free]
        step = np.zeros_like(prior)
        step[free] = np.linalg.solve(hessian + 1e-10 * np.trace(hessian) * np.eye(len(hessian)), gradient[free])
        new, length, value = prior, 1.0, -math.inf
        while value < 1e-4 * float(gradient @ (new - prior)) and length > 1e-10:
            new = np.maximum(prior + length * step, 0.0)
            with np.errstate(divide="ignore"):
                value = float(share @ np.log(ratio @ new / density)) - float((new - prior).sum())
            length /= 2
        change, prior = float(np.abs(new - prior).max()), new
        if change < 1e-10:
            break
    return prior / prior.sum()


def _em_estimate(calibrator: Calibrator, z: np.ndarray, val: Pair, sample_weight: Weights, start: Weights) -> Pair:
    # The mean probability on labelled rows is consistent even if calibration is imperfect; label frequencies are not.
    old = softmax(calibrator(val[0])).mean(axis=0)
    return em_prior(softmax(calibrator(z)), old, sample_weight=sample_weight, start=start), old


def _bbse_estimate(calibrator: Calibrator, z: np.ndarray, val: Pair, sample_weight: Weights, start: Weights) -> Pair:
    (val_z, val_y), classes = val, z.shape[1]
    predicted, target = (confidences(as_logits(calibrator(part)))[1] for part in (val_z, z))
    joint = np.bincount(predicted * classes + val_y, minlength=classes**2).reshape(classes, classes) / len(val_y)
    counts = np.bincount(target, weights=sample_weight, minlength=classes)
    ratio = np.maximum(np.linalg.lstsq(joint, counts / counts.sum(), rcond=1e-6)[0], 0.0)
    before = np.bincount(val_y, minlength=classes) / len(val_y)
    prior = ratio * before
    total = prior.sum()
    return (prior / total if total > 0 else before), before


def _from_calibrated(z: np.ndarray, old: np.ndarray, level: float, n_resamples: int, seed: int) -> PriorEstimate:
    p = softmax(z)
    prior = em_prior(p, old)
    rng = np.random.default_rng(seed)
    weights = (rng.multinomial(len(p), np.full(len(p), 1 / len(p))).astype(np.float64) for _ in range(n_resamples))
    resampled = [em_prior(p, old, sample_weight=weight, start=prior) for weight in weights]
    low, high = _bootstrap_ends(np.array(resampled), prior, level, len(z))
    return PriorEstimate(prior, low, high, level, old, "em", len(z), math.nan, shift_prior(prior, old))


def _bootstrap_ends(resampled: np.ndarray, prior: np.ndarray, level: float, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the union of the basic interval, which corrects a bias, and the percentile interval, for use near 0."""
    tail = (1 - level) / 2
    low, high = np.quantile(resampled, [tail, 1 - tail], axis=0)
    low, high = np.minimum(low, 2 * prior - high), np.maximum(high, 2 * prior - low)
    # The exact bound for a class with no rows: about 3/rows at 95 %.
    high = np.maximum(high, -math.expm1(math.log(tail) / rows))
    return np.clip(np.minimum(low, prior), 0.0, 1.0), np.clip(np.maximum(high, prior), 0.0, 1.0)


def _shift_p_value(z: np.ndarray, val_z: np.ndarray) -> float:
    """Return the p-value of a χ² test that both samples have the same predicted classes; rare classes are pooled."""
    counts = np.array([np.bincount(confidences(x)[1], minlength=z.shape[1]) for x in (val_z, z)], dtype=np.float64)
    total = counts.sum(axis=0)
    rare = total * counts.sum(axis=1).min() / counts.sum() < 5
    table = np.concatenate([counts[:, ~rare], counts[:, rare].sum(axis=1, keepdims=True)], axis=1)
    table = table[:, table.sum(axis=0) > 0]
    if table.shape[1] < 2:
        return 1.0
    expected = table.sum(axis=1, keepdims=True) * table.sum(axis=0) / table.sum()
    return float(chdtrc(table.shape[1] - 1, ((table - expected) ** 2 / expected).sum()))


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return probabilities in float64."""
    return NUMPY.softmax(logits.astype(np.float64, copy=False))


def _check_prior(values: ArrayLike, name: str, length: int | None = None) -> np.ndarray:
    prior = as_vector(values, name, length=length)
    if len(prior) < 2 or prior.min() < 0 or abs(prior.sum() - 1) > 1e-3:
        got = f"{len(prior)} numbers of sum {prior.sum():.4g}"
        raise InputError(name, "be the frequencies of at least 2 classes, which sum to 1", got)
    return prior / prior.sum()
