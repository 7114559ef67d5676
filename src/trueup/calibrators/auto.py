"""Methods that are made of others, each under a name of its own."""

from __future__ import annotations

from typing import Any

from trueup.calibrators.base import Calibrator
from trueup.calibrators.compose import chain, choose
from trueup.core.arrays import as_weighted

CHOICES = ("identity", "temperature", "svs", "diagonal_sms", "dirichlet_odir")
"""What `auto` chooses from, the simplest first: few, since of near equals the luck of the folds would choose."""
MANY_CLASSES = 200
MANY_CLASSES_CHOICES = ("identity", "temperature", "ets", "svs")
"""What it chooses from where there are more than that many classes: a matrix of them would take hours."""


def temperature_histogram(logits: Any, labels: Any, *, weights: Any = None) -> Calibrator:
    """Temperature scaling, then histogram binning: `chain("temperature", "histogram")`.

    Not for ranking: confidences of one bin become equal.
    """
    return chain("temperature", "histogram")(logits, labels, weights=weights)


def diagonal_sms(logits: Any, labels: Any, *, weights: Any = None) -> Calibrator:
    """Diagonal map, then structured matrix scaling: `chain("diagonal", "sms")`.

    The first repairs what is wrong at each confidence, the second what is wrong between classes. Not for maps that must
    keep the predicted class.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(500, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> diagonal_sms(3 * z, y)(3 * z).shape
    (500, 3)
    """
    return chain("diagonal", "sms")(logits, labels, weights=weights)


def auto(logits: Any, labels: Any, *, weights: Any = None) -> Calibrator:
    """Automatic choice: the best of `CHOICES`, or of `MANY_CLASSES_CHOICES`, by cross-validated likelihood.

    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(500, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> auto(3 * z, y).choice.chosen
    'temperature'
    """
    z, y, w = as_weighted(logits, labels, weights, at_least=10)
    return choose(CHOICES if z.shape[1] <= MANY_CLASSES else MANY_CLASSES_CHOICES)(z, y, weights=w)
