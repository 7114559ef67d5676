"""The built-in examples: an overconfident network, and a stream that drifts; both are deterministic."""

from __future__ import annotations

from functools import cache

import numpy as np

from trueup.io.predictions import Predictions

CLASSES = 10
DRIFT_CLASSES = 5


@cache
def example(rows: int = 4000, seed: int = 0) -> tuple[Predictions, Predictions]:
    """Make calibration and test rows of an overconfident network with ten classes.

    Inputs are x = s·e_y + noise with unit variance, so the calibrated logits are s·x. The network's logits are too
    large by factors from 1.9 to 2.9, depending on the class.

    >>> val, test = example()
    >>> float(np.mean(test.logits.argmax(axis=1) == test.labels).round(3))
    0.835
    """
    rng = np.random.default_rng(seed)
    halves = []
    for _ in range(2):
        labels = rng.integers(0, CLASSES, rows)
        strength = 1.6 + rng.gamma(4.0, 0.3, (rows, 1))
        inputs = strength * np.eye(CLASSES)[labels] + rng.normal(size=(rows, CLASSES))
        scale = np.linspace(1.9, 2.9, CLASSES)
        logits = scale * strength * inputs
        halves.append(Predictions(logits.astype(np.float32), labels))
    return halves[0], halves[1]


@cache
def drifting(rows: int = 20_000, seed: int = 0) -> Predictions:
    """Make a stream that is calibrated at first and overconfident later: labels are drawn at T = 1, then at T = 1.5.

    >>> stream = drifting()
    >>> right = stream.logits.argmax(axis=1) == stream.labels
    >>> [float(half.mean().round(3)) for half in np.split(right, 2)]
    [0.645, 0.532]
    """
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(rows, DRIFT_CLASSES))
    temperature = np.where(np.arange(rows) < rows / 2, 1.0, 1.5)[:, None]
    labels = (logits / temperature + rng.gumbel(size=logits.shape)).argmax(axis=1)
    return Predictions(logits.astype(np.float32), labels)
