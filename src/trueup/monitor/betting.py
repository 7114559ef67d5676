"""A sequential test of calibration by betting: the evidence stays valid however often it is read.

A bettor bets against the model. Where the model gives an event probability p, the bettor believes
p′ = σ(s·logit p + b). The bet pays p′/p if the event happens and (1 − p′)/(1 − p) if it does not. If the model is
calibrated, the mean payoff is 1 given everything before, so the wealth is a martingale. By Ville's inequality it *ever*
reaches 1/α with probability at most α. If the model is miscalibrated, the wealth of the bettor closest to the truth
grows exponentially.

Log wealth is a sum over rows, so it adds up over chunks and machines.

Ville, "Étude critique de la notion de collectif" (1939); Shafer, "Testing by betting" (2021); Arnold, Henzi & Ziegel,
"Sequentially valid tests for forecast calibration" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from scipy.special import expit, log_expit, logsumexp

EXTREME = 20.0
"""Log-odds are clipped to ±20, so p stays 2e-9 away from 0 and 1. The mean payoff exceeds 1 by at most that."""
Classes = tuple[np.ndarray, np.ndarray]
"""Probabilities (n, classes) and labels (n,), for the bettors on single classes."""
LOCAL_BINS = 10
"""Number of equal-width bins of [0, 1]; each bin has bettors who bet only there."""


def _beliefs(slopes: tuple[float, ...], shifts: tuple[float, ...]) -> np.ndarray:
    """All pairs (s, b) except (1, 0), which agrees with the model."""
    return np.array([pair for pair in product(slopes, shifts) if pair != (1.0, 0.0)])


GLOBAL_BETS = _beliefs((0.5, 0.7, 0.85, 1.0, 1.18, 1.43, 2.0), (-0.6, -0.2, 0.0, 0.2, 0.6))
"""(s, b) of the bettors on every row: s < 1 if the model is overconfident, s > 1 if it is underconfident."""
SLOPE_BETS = np.array([(s, (1 - s) * center) for s in (-0.5, 0.0) for center in range(-6, 7)])
"""(s, b) of the bettors on every row who believe that the ranking is reversed or uninformative: the log-odds are
multiplied by s around a center, which is near the mean for one of them."""
LOCAL_BETS = _beliefs((1.0,), (-0.8, -0.3, 0.3, 0.8))
"""(s, b) of the bettors in each confidence bin."""
CLASS_BETS = _beliefs((0.67, 1.0, 1.5), (-0.4, 0.0, 0.4))
"""(s, b) of the bettors on the probability of one class."""


def bettor_shares(n_classes: int) -> np.ndarray:
    """Divide the initial wealth among the bettors; those on classes, if any, get half of it."""
    bettors = [len(GLOBAL_BETS), len(SLOPE_BETS), LOCAL_BINS * len(LOCAL_BETS), n_classes * len(CLASS_BETS)]
    wealth = np.array([0.225, 0.025, 0.25, 0.5]) if n_classes else np.array([0.45, 0.05, 0.5, 0.0])
    return np.repeat(wealth / np.maximum(bettors, 1), bettors)


_MIN_CHANGE_OF_MEAN = 0.01
"""Smallest change of the mean probability for which a direction is reported."""
_MAX_DISTANCE_OF_CENTER = 1.0
"""Largest distance of a bettor's center from the mean's log-odds at which the bettor tells of the ranking alone."""
_ON_EVERY_ROW = np.concatenate([GLOBAL_BETS, SLOPE_BETS])


def describe_bettor(bettor: int, mean: float, *, event: bool) -> str:
    """Say in words what the winning bettor believes; the direction is evaluated at the mean prediction."""
    if bettor < len(_ON_EVERY_ROW):
        slope, shift = _ON_EVERY_ROW[bettor]
        odds = float(log_odds(np.array([mean]))[0])
        change = float(expit(slope * odds + shift)) - mean
        if slope <= 0 and abs(shift / (1 - slope) - odds) <= _MAX_DISTANCE_OF_CENTER:
            problem = "Reversed ranking" if slope < 0 else "Uninformative ranking"
        elif abs(change) < _MIN_CHANGE_OF_MEAN and slope != 1:
            problem = "Too extreme" if slope < 1 else "Not extreme enough"
        elif event:
            problem = "Probabilities too high" if change < 0 else "Probabilities too low"
        else:
            problem = "Overconfident" if change < 0 else "Underconfident"
        added = f" and adding {shift:+.1f}" if shift else ""
        return f"{problem}: multiplying the log-odds by {slope:.2f}{added} would fit the data."
    bettor -= len(_ON_EVERY_ROW)
    if bettor < LOCAL_BINS * len(LOCAL_BETS):
        part, belief = divmod(bettor, len(LOCAL_BETS))
        direction = "less" if LOCAL_BETS[belief][1] < 0 else "more"
        interval = f"{part / LOCAL_BINS:.0%} to {(part + 1) / LOCAL_BINS:.0%}"
        if event:
            return f"When it predicts {interval}, the event happens {direction} often."
        return f"When its confidence is {interval}, it is right {direction} often."
    number, belief = divmod(bettor - LOCAL_BINS * len(LOCAL_BETS), len(CLASS_BETS))
    slope, shift = CLASS_BETS[belief]
    if shift == 0:
        extreme = "too extreme" if slope < 1 else "not extreme enough"
        return f"The probabilities of {'the event' if event else f'class {number}'} are {extreme}."
    if event:  # class 0 means that the event does not happen
        return f"The event happens {'less' if (shift < 0) == (number == 1) else 'more'} often than predicted."
    return f"Class {number} occurs {'less' if shift < 0 else 'more'} often than predicted."


def log_odds(probability: np.ndarray) -> np.ndarray:
    """Return ln p/(1 − p), clipped to ±20."""
    with np.errstate(divide="ignore"):
        odds: np.ndarray = np.clip(np.log(probability) - np.log1p(-probability), -EXTREME, EXTREME)
    return odds


def log_payoffs(odds: np.ndarray, happened: np.ndarray, beliefs: np.ndarray) -> np.ndarray:
    """Return ln p′/p or ln (1 − p′)/(1 − p), per row and belief.

    >>> log_payoffs(np.array([0.0]), np.array([1.0]), np.array([[1.0, 0.5]])).round(4)
    array([[0.2191]])
    """
    sign = np.where(happened > 0, 1.0, -1.0)[:, None]
    believed = beliefs[:, 0] * odds[:, None] + beliefs[:, 1]
    payoff: np.ndarray = log_expit(sign * believed) - log_expit(sign * odds[:, None])
    return payoff


def log_payoffs_of_rows(confidence: np.ndarray, correct: np.ndarray, classes: Classes | None = None) -> np.ndarray:
    """Sum the log payoffs over these rows, per bettor: on every row, then by confidence bin, then by class."""
    odds = log_odds(confidence)
    on_every_row = log_payoffs(odds, correct, _ON_EVERY_ROW).sum(axis=0)
    part = np.minimum((confidence * LOCAL_BINS).astype(np.int64), LOCAL_BINS - 1)
    local = np.zeros((LOCAL_BINS, len(LOCAL_BETS)))
    np.add.at(local, part, log_payoffs(odds, correct, LOCAL_BETS))
    return np.concatenate(
        [on_every_row, local.ravel(), *([] if classes is None else [log_payoffs_of_classes(*classes)])]
    )


def log_payoffs_of_clusters(
    confidence: np.ndarray, correct: np.ndarray, starts: np.ndarray, classes: Classes | None = None
) -> np.ndarray:
    """Sum the log payoffs over clusters of correlated rows, per bettor, with one bet per cluster.

    The rows of cluster i begin at ``starts[i]``. They are correlated, so the product of their payoffs may have a mean
    above 1. The average of their payoffs still has mean 1, so a bettor spreads the stake evenly over the cluster.
    """
    odds, rows = log_odds(confidence), np.arange(len(confidence))
    local = np.zeros((len(rows), LOCAL_BINS, len(LOCAL_BETS)))
    part = np.minimum((confidence * LOCAL_BINS).astype(np.int64), LOCAL_BINS - 1)
    local[rows, part] = log_payoffs(odds, correct, LOCAL_BETS)
    columns = [log_payoffs(odds, correct, _ON_EVERY_ROW), local.reshape(len(rows), -1)]
    if classes is not None:
        probabilities, labels = classes
        for k, of_class in enumerate(log_odds(probabilities).T):
            columns.append(log_payoffs(of_class, (labels == k).astype(np.float64), CLASS_BETS))
    payoffs = np.concatenate(columns, axis=1)
    size = np.diff(starts, append=len(rows))
    means = np.logaddexp.reduceat(payoffs, starts, axis=0) - np.log(size)[:, None]
    total: np.ndarray = means.sum(axis=0)
    return total


def log_payoffs_of_classes(probabilities: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Sum the log payoffs over these rows for the bettors on classes: (classes, beliefs), flattened."""
    odds = log_odds(probabilities)
    total = np.zeros((probabilities.shape[1], len(CLASS_BETS)))
    # First as if every class were wrong, then corrected at the labels: most classes of a row are wrong.
    for number, (slope, shift) in enumerate(CLASS_BETS):
        total[:, number] = (log_expit(-(slope * odds + shift)) - log_expit(-odds)).sum(axis=0)
    of_label = odds[np.arange(len(labels)), labels]
    won, lost = (log_payoffs(of_label, np.full(len(labels), sign), CLASS_BETS) for sign in (1.0, 0.0))
    np.add.at(total, labels, won - lost)
    return total.ravel()


@dataclass(frozen=True, eq=False)
class Evidence:
    """Log wealth of many bettors over all rows so far, as a mergeable tally.

    A bettor who has lost for long against a calibrated model has nothing left to bet when the model drifts. So every
    bettor starts again every `block` rows, the k-th time with a share 1/(k(k+1)) of the initial wealth. These shares
    sum to 1, so Ville's inequality holds. All starts of a bettor win the same from then on: one number holds their sum.
    """

    block: int
    rows: int
    begun: int
    """Number of times that the bettors have started."""
    streams: int
    """Number of streams merged into this one."""
    wealth: np.ndarray
    """Log wealth per bettor; a bettor with the share q of the initial wealth holds q·exp(wealth)."""

    @classmethod
    def initial(cls, bettors: int, block: int) -> Evidence:
        """Make the wealth before the first row."""
        return cls(block, 0, 1, 1, np.full(bettors, -np.log(2)))

    def with_new_bettors(self, index: int, count: int) -> Evidence:
        """Insert bettors who have not bet so far: they hold the wealth of all starts."""
        return replace(self, wealth=np.insert(self.wealth, [index] * count, np.log1p(-1.0 / (self.begun + 1.0))))

    def update(self, payoffs: np.ndarray, rows: int) -> Evidence:
        """Add the log payoffs of `rows` rows, at most up to the end of a block; there all bettors start again.

        A cluster may extend beyond the end of a block: all start again after it.
        """
        wealth, later, begun = self.wealth + payoffs, self.rows + rows, self.begun
        if later // self.block > self.rows // self.block:
            begun += 1
            wealth = np.logaddexp(wealth, -np.log(begun * (begun + 1.0)))
        return replace(self, rows=later, begun=begun, wealth=wealth)

    def rows_left_in_block(self) -> int:
        """Count the rows until all bettors start again."""
        return self.block - self.rows % self.block

    def log_wealth(self, share: np.ndarray) -> float:
        """Return the log of the total wealth for initial shares `share`; ln 1/α or more rejects calibration at level α.

        The part not yet used, 1/(k+1), counts at face value.
        """
        return float(np.logaddexp(logsumexp(self.wealth, b=share), -np.log(self.begun + 1.0)))

    def strongest(self, share: np.ndarray) -> int:
        """Find the richest bettor."""
        return int(np.argmax(self.wealth + np.log(share)))

    def __add__(self, other: Evidence) -> Evidence:
        """Average the wealth over streams: this keeps the level, even if the streams are dependent."""
        if self.block != other.block or len(self.wealth) != len(other.wealth):
            raise ValueError("monitors must have the same classes and settings to be added")
        streams = self.streams + other.streams
        wealth = np.logaddexp(*(each.wealth + np.log(each.streams / streams) for each in (self, other)))
        # The next start may use only what both still hold back: the stream with more starts holds back less.
        return Evidence(self.block, self.rows + other.rows, max(self.begun, other.begun), streams, wealth)
