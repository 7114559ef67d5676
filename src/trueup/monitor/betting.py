"""A sequential test of calibration by betting: the evidence is valid whenever it is looked at.

A bettor disputes what the network predicts. Where the network gives an event probability p, the bettor believes
p′ = σ(s·logit p + b); the bet pays p′/p if it does and (1 − p′)/(1 − p) if not. If the network is calibrated, the mean
payoff is 1 whatever came before, so wealth is a martingale, and the chance that it *ever* reaches 1/α is at most α
(Ville). If it is not, the wealth of the bettor who comes closest to the truth grows exponentially.

The logarithm of a wealth is a sum over the rows: it adds up over chunks and machines, like every other tally here.

Ville, "Étude critique de la notion de collectif" (1939); Shafer, "Testing by betting" (2021); Arnold, Henzi & Ziegel,
"Sequentially valid tests for forecast calibration" (2023).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from scipy.special import expit, log_expit, logsumexp

EXTREME = 20.0
"""Log-odds are kept within ±20, so p stays 2e-9 away from 0 and 1; the mean payoff exceeds 1 by no more than that."""
Classes = tuple[np.ndarray, np.ndarray]
"""Probabilities (n, classes) and labels (n,), for those who bet on classes."""
LOCAL_BINS = 10
"""Equal parts of [0, 1] in each of which there are bettors for that part alone."""


def _beliefs(slopes: tuple[float, ...], shifts: tuple[float, ...]) -> np.ndarray:
    """All pairs (s, b) but the one that agrees with the network."""
    return np.array([pair for pair in product(slopes, shifts) if pair != (1.0, 0.0)])


GLOBAL_BETS = _beliefs((0.5, 0.7, 0.85, 1.0, 1.18, 1.43, 2.0), (-0.6, -0.2, 0.0, 0.2, 0.6))
"""(s, b) of those who bet on every row: s < 1 finds the network overconfident, s > 1 underconfident."""
LOCAL_BETS = _beliefs((1.0,), (-0.8, -0.3, 0.3, 0.8))
"""(s, b) of those who bet only where the confidence lies in their part."""
CLASS_BETS = _beliefs((0.67, 1.0, 1.5), (-0.4, 0.0, 0.4))
"""(s, b) of those who bet on one class's probability."""


def shares_of(classes: int) -> np.ndarray:
    """How the money is divided among the bettors; half of it goes to those on the classes, if there are any."""
    bettors = [len(GLOBAL_BETS), LOCAL_BINS * len(LOCAL_BETS), classes * len(CLASS_BETS)]
    money = [0.25, 0.25, 0.5] if classes else [0.5, 0.5, 0.0]
    return np.repeat(np.divide(money, np.maximum(bettors, 1)), bettors)


_NO_CHANGE = 0.01
"""By less than this, what is believed at the mean says nothing of a direction."""


def describe_bettor(bettor: int, mean: float, *, event: bool) -> str:
    """What the bettor who won most believes, in words; its direction is that at the mean of what is predicted."""
    if bettor < len(GLOBAL_BETS):
        slope, shift = GLOBAL_BETS[bettor]
        change = float(expit(slope * log_odds(np.array([mean]))[0] + shift)) - mean
        if abs(change) < _NO_CHANGE and slope != 1:
            how = "is too extreme" if slope < 1 else "is not extreme enough"
        elif event:
            how = "predicts too much" if change < 0 else "predicts too little"
        else:
            how = "is too sure" if change < 0 else "is not sure enough"
        moved = f" and moved by {shift:+.1f}" if shift else ""
        return f"It {how}: with its log-odds times {slope:.2f}{moved} it would fit what was seen."
    bettor -= len(GLOBAL_BETS)
    if bettor < LOCAL_BINS * len(LOCAL_BETS):
        part, belief = divmod(bettor, len(LOCAL_BETS))
        how = "less" if LOCAL_BETS[belief][1] < 0 else "more"
        between = f"{part / LOCAL_BINS:.0%} to {(part + 1) / LOCAL_BINS:.0%}"
        if event:
            return f"Where it predicts {between}, the event happens {how} often."
        return f"Where it says {between}, it is right {how} often."
    number, belief = divmod(bettor - LOCAL_BINS * len(LOCAL_BETS), len(CLASS_BETS))
    slope, shift = CLASS_BETS[belief]
    if shift == 0:
        how = "too extreme" if slope < 1 else "not extreme enough"
        return f"What it says of {'the event' if event else f'class {number}'} is {how}."
    if event:  # class 0 is that it does not happen
        return f"The event happens {'less' if (shift < 0) == (number == 1) else 'more'} often than it says."
    return f"Class {number} comes {'less' if shift < 0 else 'more'} often than it says."


def log_odds(probability: np.ndarray) -> np.ndarray:
    """ln p/(1 − p), kept within ±20."""
    with np.errstate(divide="ignore"):
        odds: np.ndarray = np.clip(np.log(probability) - np.log1p(-probability), -EXTREME, EXTREME)
    return odds


def log_payoffs(odds: np.ndarray, happened: np.ndarray, beliefs: np.ndarray) -> np.ndarray:
    """ln p′/p or ln (1 − p′)/(1 − p), for each row and belief.

    >>> log_payoffs(np.array([0.0]), np.array([1.0]), np.array([[1.0, 0.5]])).round(4)
    array([[0.2191]])
    """
    sign = np.where(happened > 0, 1.0, -1.0)[:, None]
    believed = beliefs[:, 0] * odds[:, None] + beliefs[:, 1]
    payoff: np.ndarray = log_expit(sign * believed) - log_expit(sign * odds[:, None])
    return payoff


def log_payoffs_of_rows(confidence: np.ndarray, correct: np.ndarray, classes: Classes | None = None) -> np.ndarray:
    """What all bettors win in these rows, in logarithms: GLOBAL_BETS, then by part, then those on the classes."""
    odds = log_odds(confidence)
    everywhere = log_payoffs(odds, correct, GLOBAL_BETS).sum(axis=0)
    part = np.minimum((confidence * LOCAL_BINS).astype(np.int64), LOCAL_BINS - 1)
    local = np.zeros((LOCAL_BINS, len(LOCAL_BETS)))
    np.add.at(local, part, log_payoffs(odds, correct, LOCAL_BETS))
    return np.concatenate([everywhere, local.ravel(), *([] if classes is None else [log_payoffs_of_classes(*classes)])])


def log_payoffs_of_clusters(
    confidence: np.ndarray, correct: np.ndarray, starts: np.ndarray, classes: Classes | None = None
) -> np.ndarray:
    """What all bettors win where rows come in clusters, each from its start on: one bet a cluster, in logarithms.

    Rows of a cluster are correlated, so that the product of their payoffs has a mean other than 1. Their mean has not:
    each row's payoff has the mean 1 by itself. So a bettor divides the stake evenly among the rows of a cluster.
    """
    odds, rows = log_odds(confidence), np.arange(len(confidence))
    local = np.zeros((len(rows), LOCAL_BINS, len(LOCAL_BETS)))
    part = np.minimum((confidence * LOCAL_BINS).astype(np.int64), LOCAL_BINS - 1)
    local[rows, part] = log_payoffs(odds, correct, LOCAL_BETS)
    columns = [log_payoffs(odds, correct, GLOBAL_BETS), local.reshape(len(rows), -1)]
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
    """What all bettors on the classes win in these rows together, in logarithms: (classes, beliefs), flattened."""
    odds = log_odds(probabilities)
    total = np.zeros((probabilities.shape[1], len(CLASS_BETS)))
    # As if no class came true, then corrected at the label: most of a row is not its label.
    for number, (slope, shift) in enumerate(CLASS_BETS):
        total[:, number] = (log_expit(-(slope * odds + shift)) - log_expit(-odds)).sum(axis=0)
    of_label = odds[np.arange(len(labels)), labels]
    won, lost = (log_payoffs(of_label, np.full(len(labels), sign), CLASS_BETS) for sign in (1.0, 0.0))
    np.add.at(total, labels, won - lost)
    return total.ravel()


@dataclass(frozen=True, eq=False)
class Evidence:
    """Wealth of many bettors over all rows seen, a mergeable tally.

    Who has lost against a calibrated network for long has nothing left to bet when it drifts. So every bettor begins
    anew each `block` rows, the k-th time with a share 1/(k(k+1)) of the money: all shares together are 1, as Ville
    asks. Since what was begun before and what begins now win the same from here on, one number a bettor holds both.
    """

    block: int
    rows: int
    begun: int
    """How often bettors have begun."""
    streams: int
    """How many streams were merged into this one."""
    wealth: np.ndarray
    """In logarithms; a bettor whose share is q of the money holds q·exp(wealth)."""

    @classmethod
    def initial(cls, bettors: int, block: int) -> Evidence:
        """Before the first row."""
        return cls(block, 0, 1, 1, np.full(bettors, -np.log(2)))

    def update(self, payoffs: np.ndarray, rows: int) -> Evidence:
        """Let all bets run over `rows` more rows, at most to the end of a block; at its end all begin anew.

        A cluster may reach over the end of a block: all begin anew after it.
        """
        wealth, later, begun = self.wealth + payoffs, self.rows + rows, self.begun
        if later // self.block > self.rows // self.block:
            begun += 1
            wealth = np.logaddexp(wealth, -np.log(begun * (begun + 1.0)))
        return replace(self, rows=later, begun=begun, wealth=wealth)

    def rows_left_in_block(self) -> int:
        """How many rows until all begin anew."""
        return self.block - self.rows % self.block

    def log_wealth(self, share: np.ndarray) -> float:
        """The logarithm of all wealth, the money having been divided by `share`; ln 1/α or more is proof at level α.

        What has not been laid out yet, 1/(k+1), counts as it is.
        """
        return float(np.logaddexp(logsumexp(self.wealth, b=share), -np.log(self.begun + 1.0)))

    def strongest(self, share: np.ndarray) -> int:
        """The bettor who holds most."""
        return int(np.argmax(self.wealth + np.log(share)))

    def __add__(self, other: Evidence) -> Evidence:
        """Wealth is averaged over the streams: proof at the same level, however they hang together."""
        if self.block != other.block or len(self.wealth) != len(other.wealth):
            raise ValueError("monitors must have the same classes and settings to be added")
        streams = self.streams + other.streams
        wealth = np.logaddexp(*(each.wealth + np.log(each.streams / streams) for each in (self, other)))
        # What begins next must not exceed what both have left: that of the one who has begun more often.
        return Evidence(self.block, self.rows + other.rows, max(self.begun, other.begun), streams, wealth)
