"""A map for each label of a multi-label problem, shrunk towards the map of all labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from trueup._core.errors import InputError
from trueup._core.namespace import Namespace
from trueup._core.types import ArrayLike
from trueup.calibrators.base import Calibrator, if_all_parts
from trueup.calibrators.compose import Fit
from trueup.calibrators.groupwise import STRENGTHS, PerGroup, mix, per_group
from trueup.convert import label_events


class PerLabel(Calibrator):
    """Map log-odds (n, labels) to log-odds (n, labels), each label by its part of a `PerGroup`.

    For labels that can occur together. Not for mutually exclusive classes: use any other calibrator for those.

    Parameters
    ----------
    calibrator
        Maps of two classes, with the label's number as the group.
    labels
        Number of labels.

    Examples
    --------
    >>> from trueup.calibrators.temperature import Temperature
    >>> PerLabel(PerGroup(Temperature(2.0), [], [], []), 3)(np.array([[4.0, 0.0, -2.0]])).round(6)
    array([[ 2.,  0., -1.]])
    """

    differentiable = if_all_parts("differentiable")
    shift_invariant = False  # each column holds log-odds of its own

    def __init__(self, calibrator: PerGroup, labels: int) -> None:
        self.calibrator, self.labels = calibrator, labels

    def map(self, xp: Namespace, z: Any) -> Any:
        """Calibrate each label's log-odds."""
        self._check_classes(z, self.labels)
        number = {name: k for k, name in enumerate(self.calibrator.names)}
        columns = []
        for label in range(self.labels):
            x = xp.double(z[:, label])
            pair = xp.stack([xp.zeros_like(x), x], axis=1)
            log_p = xp.log_softmax(self.calibrator.base.forward(xp, pair))
            if (k := number.get(str(label))) is not None:
                of_label = xp.log_softmax(self.calibrator.calibrators[k].forward(xp, pair))
                log_p = mix(xp, log_p, of_label, self.calibrator.shares[k])
            columns.append(log_p[:, 1] - log_p[:, 0])
        return xp.astype(xp.stack(columns, axis=1), z.dtype)


def per_label(
    fit: Fit | str = "platt", *, n_folds: int = 5, strengths: Sequence[float] = STRENGTHS, ignore_index: int = -100
) -> Fit:
    """Fit a two-class method to all labels and to each label, and mix the two by held-out likelihood (see `per_group`).

    Parameters
    ----------
    fit
        A method of two classes, or its name.
    n_folds
        Number of folds; all labels of a row stay in one fold.
    strengths
        Candidate shrinkage strengths: the shared map weighs as much as this many rows of a label; held-out rows choose.
    ignore_index
        Target of labels that are unknown.

    Returns
    -------
    Fit
        A method that takes log-odds (n, labels) and targets (n, labels), 1, 0 or `ignore_index`; it maps log-odds to
        log-odds.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> x = rng.normal(size=(2000, 2))
    >>> y = (rng.random(x.shape) < 1 / (1 + np.exp(-x * [1.0, 0.3]))).astype(int)
    >>> fitted = per_label("platt")(x, y)
    >>> fitted(np.array([[2.0, 2.0]])).round(1)  # the second label's true slope is 0.3
    array([[1.9, 0.6]])
    """

    def fitted(logits: ArrayLike, targets: ArrayLike, *, clusters: ArrayLike | None = None) -> PerLabel:
        events = label_events(logits, targets, ignore_index=ignore_index)
        labels = int(np.shape(logits)[1])
        if labels < 2:
            raise InputError("logits", "have at least 2 labels", str(labels), "one label is an event of two classes")
        rows = events.row if clusters is None else np.asarray(clusters)[events.row]
        method = per_group(fit, n_folds=n_folds, strengths=strengths)
        return fit_events(method, events.logits, events.labels, events.label, labels=labels, clusters=rows)

    return fitted


def fit_events(
    method: Fit, logits: ArrayLike, outcomes: Any, label: np.ndarray, *, labels: int, clusters: ArrayLike
) -> PerLabel:
    """Apply a `per_group` method to events (m, 2), grouped by the number of their label."""
    names = np.array([str(k) for k in range(labels)])
    mixed = method(logits, outcomes, groups=names[label], clusters=clusters)
    assert isinstance(mixed, PerGroup)
    return PerLabel(mixed, labels)
