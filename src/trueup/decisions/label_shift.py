"""Label shift: the class frequencies of a new population, from its logits alone, and probabilities corrected for them.

If only the frequencies of the classes changed (p(x | y) did not), the new probabilities are the old ones times the
ratios of the frequencies, renormalised. The frequencies themselves follow from unlabelled rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from scipy.special import chdtrc

from trueup._core.arrays import as_logits, as_vector, take_rows
from trueup._core.errors import InputError
from trueup._core.formatting import format_interval, format_number, format_percent, text_table
from trueup._core.namespace import NUMPY
from trueup._core.row_scores import confidences
from trueup.calibrators.base import Calibrator
from trueup.calibrators.compose import Chain
from trueup.calibrators.linear import Vector
from trueup.decisions.refits import Refits, check_rows
from trueup.metrics.table import plain_record

INDEPENDENT = "Rows are taken as independent here: where they are correlated, these intervals are too narrow."
"""What to say of estimates from rows that are known to be in clusters."""
CALIBRATION = "bias_corrected_temperature"
"""The method on which the frequencies are estimated: its mean probabilities are the frequencies of the labels."""
_LEAST_RATIO = 1e-12
Pair = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class PriorEstimate:
    """Class frequencies of a population without labels."""

    prior: np.ndarray
    low: np.ndarray
    high: np.ndarray
    level: float
    old: np.ndarray
    """Those of the labelled rows."""
    method: str
    rows: int
    p_value: float
    """Of the hypothesis that nothing moved, by counts of predicted classes; NaN without labelled rows."""
    calibrator: Calibrator = field(repr=False)
    """Maps the network's logits to corrected ones: calibrates, then shifts the prior."""

    @property
    def moved(self) -> bool:
        """Whether the predicted classes show that the population changed, at the 5 % level."""
        return self.p_value < 0.05

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        arrays = {name: getattr(self, name).tolist() for name in ("prior", "low", "high", "old")}
        record = plain_record({name: getattr(self, name) for name in ("method", "rows", "level", "p_value")})
        return {"schema": 1, **record, **arrays}

    def verdict(self) -> str:
        """Whether the frequencies moved, which of them are guesses, and what is assumed."""
        sentences = []
        if not math.isnan(self.p_value):
            chance = f"p {'=' if self.p_value > 0.001 else '≤'} {max(self.p_value, 0.001):.3f}"
            moved = "The" if self.moved else "Nothing shows that the"
            sentences.append(f"{moved} class frequencies moved ({chance}).")
        if len(unseen := np.flatnonzero(self.old == 0)):
            some = ", ".join(str(k) for k in unseen[:5]) + (" …" if len(unseen) > 5 else "")
            sentences.append(f"No labelled row has class {some}: its estimate is a guess.")
        assumed = "This assumes that only the frequencies of the classes changed, not what each class looks like."
        return "\n\n".join([*sentences, assumed])

    def __str__(self) -> str:
        change = np.argsort(-np.abs(self.prior - self.old), kind="stable")
        shown = np.sort(change[:20])
        table = [["class", "before", "now", f"{format_percent(self.level)} interval"]]
        for k in shown.tolist():
            numbers = format_number(self.old[k]), format_number(self.prior[k])
            table.append([str(k), *numbers, format_interval(self.low[k], self.high[k])])
        part = f"\n(the {len(shown)} of {len(self.prior)} classes that changed most)"
        return f"{text_table(table)}{part if len(shown) < len(self.prior) else ''}\n\n{self.verdict()}"


def shift_prior(new: Any, old: Any) -> Vector:
    """A calibrator that corrects calibrated logits for other class frequencies: adds ln(new/old) to each class.

    The same map serves a network trained on an undersampled set: `old` are the frequencies it was trained on.

    >>> corrected = shift_prior(new=[0.9, 0.1], old=[0.5, 0.5])([[0.0, 0.0]])
    >>> (np.exp(corrected) / np.exp(corrected).sum()).round(4)
    array([[0.9, 0.1]])

    Saerens, Latinne and Decaestecker (2002); Elkan (2001).
    """
    after = _check_prior(new, "new")
    before = _check_prior(old, "old", len(after))
    if before.min() == 0:
        raise InputError("old", "be positive in every class", f"0 in class {int(before.argmin())}")
    ratio = np.log(np.maximum(after / before, _LEAST_RATIO))
    return Vector(np.ones(len(after)), ratio - ratio.mean())


def estimate_prior(
    logits: Any,
    *,
    val: tuple[Any, Any] | None = None,
    old: Any = None,
    method: Literal["em", "bbse"] = "em",
    calibrate: str | Callable[..., Calibrator] | None = CALIBRATION,
    level: float = 0.95,
    n_resamples: int = 200,
    seed: int = 0,
) -> PriorEstimate:
    """The class frequencies of unlabelled rows, with bootstrap intervals.

    With labelled rows `val` of the old population, `calibrate` is fitted to them first, and the intervals carry their
    uncertainty too; without, `logits` must be calibrated for the frequencies `old`. "em" is maximum likelihood:
    π_k ← mean of w_k p_k / Σ_j w_j p_j with w = π/π_old, until it stands still; "bbse" solves C w = μ, C the joint
    frequencies of predicted and true class on `val`, μ those predicted now.

    >>> rng = np.random.default_rng(0)
    >>> y = rng.choice(3, size=6000, p=[0.2, 0.3, 0.5])
    >>> z = 2 * np.eye(3)[y] + rng.normal(size=(6000, 3))
    >>> kept = (y != 2) | (rng.random(6000) < 0.2)                    # class 2 becomes rare
    >>> found = estimate_prior(z[3000:][kept[3000:]], val=(z[:3000], y[:3000]), n_resamples=50)
    >>> found.prior.round(2), (np.bincount(y[3000:][kept[3000:]]) / kept[3000:].sum()).round(2)
    (array([0.32, 0.49, 0.19]), array([0.34, 0.48, 0.18]))
    >>> found.moved
    True

    Saerens et al. (2002); Alexandari, Kundaje and Shrikumar (2020); Lipton, Wang and Smola (2018).
    """
    z, pair = check_rows(logits, val, level, n_resamples)
    if method not in ("em", "bbse"):
        raise InputError("method", "be em or bbse", repr(method))
    if (val is None) == (old is None):
        raise ValueError("give either val, labelled rows of the old population, or old, its class frequencies")
    if pair is None:
        if method == "bbse":
            raise ValueError("bbse needs val, labelled rows of the old population")
        return _from_calibrated(z, _check_prior(old, "old", z.shape[1]), level, n_resamples, seed)
    val_z, val_y = pair
    refits = Refits(calibrate or "identity", val_z, val_y)
    estimate = _em_estimate if method == "em" else _bbse_estimate
    counts, calibrator = np.bincount(val_y, minlength=z.shape[1]), refits.calibrator
    prior, base = estimate(calibrator, z, pair, None, None)
    rng = np.random.default_rng(seed)
    drawn = []
    # Labelled rows drawn with the frequencies found play the new population: what the estimate makes of them shows its
    # noise, and its bias where the calibrated probabilities are not exact.
    chance = prior[val_y] / np.maximum(counts[val_y], 1)
    chance = chance / chance.sum() if chance.sum() > 0 else np.full(len(val_y), 1 / len(val_y))
    for _ in range(n_resamples):
        again, rows = refits.draw(rng)
        part = take_rows(val_z, val_y, rows)
        weight = rng.multinomial(len(z), chance).astype(np.float64)
        drawn.append(estimate(again if method == "em" else calibrator, val_z, part, weight, prior)[0])
    low, high = _ends(np.array(drawn), prior, level, len(z))
    corrected = Chain([calibrator, shift_prior(prior, np.maximum(base, _LEAST_RATIO))])
    old, p_value = counts / len(val_y), _shift_p_value(z, val_z)
    return PriorEstimate(prior, low, high, level, old, method, len(z), p_value, corrected)


def em_prior(
    probs: np.ndarray, old: np.ndarray, *, sample_weight: np.ndarray | None = None, start: np.ndarray | None = None
) -> np.ndarray:
    """The class frequencies that make probabilities calibrated for `old` most likely, by accelerated EM.

    The log-likelihood is concave: there is one maximum. Steps are extrapolated (SQUAREM) where that raises it.
    """
    ratio = probs / np.maximum(old, _LEAST_RATIO)
    share = np.full(len(probs), 1 / len(probs)) if sample_weight is None else sample_weight / sample_weight.sum()

    def step(prior: np.ndarray) -> tuple[np.ndarray, float]:
        density = ratio @ prior
        return prior * (ratio.T @ (share / density)), float(share @ np.log(density))

    prior = np.maximum(old if start is None else start, 1e-6)
    prior = prior / prior.sum()
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


def _em_estimate(
    calibrator: Calibrator, z: np.ndarray, val: Pair, sample_weight: np.ndarray | None, start: np.ndarray | None
) -> Pair:
    # The mean probability on labelled rows, not their labels: consistent also where calibration is imperfect.
    old = softmax(calibrator(val[0])).mean(axis=0)
    return em_prior(softmax(calibrator(z)), old, sample_weight=sample_weight, start=start), old


def _bbse_estimate(
    calibrator: Calibrator, z: np.ndarray, val: Pair, sample_weight: np.ndarray | None, start: np.ndarray | None
) -> Pair:
    (val_z, val_y), classes = val, z.shape[1]
    predicted, target = (confidences(as_logits(calibrator(part)))[1] for part in (val_z, z))
    joint = np.bincount(predicted * classes + val_y, minlength=classes**2).reshape(classes, classes) / len(val_y)
    seen = np.bincount(target, weights=sample_weight, minlength=classes)
    ratio = np.maximum(np.linalg.lstsq(joint, seen / seen.sum(), rcond=1e-6)[0], 0.0)
    before = np.bincount(val_y, minlength=classes) / len(val_y)
    prior = ratio * before
    total = prior.sum()
    return (prior / total if total > 0 else before), before


def _from_calibrated(z: np.ndarray, old: np.ndarray, level: float, n_resamples: int, seed: int) -> PriorEstimate:
    p = softmax(z)
    prior = em_prior(p, old)
    rng = np.random.default_rng(seed)
    chance = np.full(len(p), 1 / len(p))
    weights = (rng.multinomial(len(p), chance).astype(np.float64) for _ in range(n_resamples))
    drawn = [em_prior(p, old, sample_weight=weight, start=prior) for weight in weights]
    low, high = _ends(np.array(drawn), prior, level, len(z))
    return PriorEstimate(prior, low, high, level, old, "em", len(z), math.nan, shift_prior(prior, old))


def _ends(drawn: np.ndarray, prior: np.ndarray, level: float, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """The basic interval, which turns a bias round, joined with the percentiles, which it needs near 0.

    So many rows cannot show that a class is rarer than some three in them, whatever was found.
    """
    tail = (1 - level) / 2
    low, high = np.quantile(drawn, [tail, 1 - tail], axis=0)
    low, high = np.minimum(low, 2 * prior - high), np.maximum(high, 2 * prior - low)
    high = np.maximum(high, -math.expm1(math.log(tail) / rows))
    return np.clip(np.minimum(low, prior), 0.0, 1.0), np.clip(np.maximum(high, prior), 0.0, 1.0)


def _shift_p_value(z: np.ndarray, val_z: np.ndarray) -> float:
    """Of a χ² test of the predicted classes' counts in both samples; rare classes are counted together."""
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
    """Probabilities in float64."""
    return NUMPY.softmax(logits.astype(np.float64, copy=False))


def _check_prior(values: Any, name: str, length: int | None = None) -> np.ndarray:
    prior = as_vector(values, name, length=length)
    if len(prior) < 2 or prior.min() < 0 or abs(prior.sum() - 1) > 1e-3:
        got = f"{len(prior)} numbers of sum {prior.sum():.4g}"
        raise InputError(name, "be the frequencies of at least 2 classes, which sum to 1", got)
    return prior / prior.sum()
