"""Rows for the data frames of Spark and Ray, and the checks that both pass."""

import numpy as np
import pytest

from trueup import METHODS, evaluate, from_probs
from trueup.calibrators.sharded import fit
from trueup.io import Predictions
from trueup.metrics.sharded import evaluate_shards


def overconfident(rows=4000, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    z = (3 * rng.normal(size=(rows, classes))).astype(np.float32)
    return Predictions(z, (z / 2 + rng.gumbel(size=z.shape)).argmax(axis=1))


def softmax(z):
    p = np.exp(z - z.max(axis=1, keepdims=True).astype(np.float64))
    return p / p.sum(axis=1, keepdims=True)


FROM_A_GRID = (
    *("aece", "event_brier", "miscalibration", "discrimination", "auroc"),
    *("calibration_intercept", "calibration_slope", "ici"),
)
"""Metrics that a stream computes from a fine grid of confidences or log-odds, also on one machine."""


def assert_same_table(shards, expected, **options):
    """Each number and interval is that of one process, up to the grid."""
    scores = evaluate_shards(shards, progress=False, **options)
    assert scores.rows == expected.rows
    for metric in scores.metrics:
        tolerance = 5e-3 if metric in FROM_A_GRID else 1e-12
        ours, theirs = scores[metric], expected[metric]
        assert ours.value == pytest.approx(theirs.value, abs=tolerance), metric
        assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=0.02), metric
    return scores


def assert_same_fit(shards, pair):
    ours, alone = fit("temperature", shards, progress=False), METHODS["temperature"](*pair)
    assert ours.temperature == pytest.approx(alone.temperature, rel=1e-9)
    return ours


def votes(rows=500, trees=20, seed=1):
    """A forest's votes: many exact zeros, and partitions whose smallest positive share differs."""
    rng = np.random.default_rng(seed)
    p = np.concatenate([rng.multinomial(trees, [0.8, 0.15, 0.05], rows), 2 * rng.multinomial(10, [0.9, 0.1, 0], rows)])
    p = p / trees
    return p, np.array([rng.choice(3, p=row) for row in p])


def table_of_votes(p, y):
    with pytest.warns(UserWarning, match="exact zeros"):
        return evaluate(from_probs(p), y)
