"""A map for each group of rows, or for each label of a multi-label problem, shrunk towards the map of all rows."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from trueup._core.arrays import (
    as_weighted,
    as_weights,
    effective_rows,
    take_weighted,
    to_array,
    upcast_half,
    weight_kwargs,
)
from trueup._core.clusters import weighted_clusters
from trueup._core.errors import InputError
from trueup._core.namespace import NUMPY, Namespace
from trueup._core.optimize import FitError
from trueup._core.registry import METHODS
from trueup._core.splits import is_significant_gain
from trueup._core.types import Array, ArrayLike, WeightsLike
from trueup.calibrators.base import Calibrator, if_all_parts
from trueup.calibrators.compose import Fit
from trueup.calibrators.folds import k_fold
from trueup.convert import label_events
from trueup.metrics.groups import as_groups, encode_groups

STRENGTHS = (10_000.0, 3000.0, 1000.0, 300.0, 100.0, 30.0, 10.0, 3.0)
"""Numbers of rows that the pooled map counts for against a group's own; held-out rows choose one."""
_MIN_Z = 2.0  # standard errors by which the best strength must gain over the pooled map.
_FEW_ROWS = 10  # groups with fewer rows have no map of their own.


class PerGroup(Calibrator):
    """Mix the probabilities of a pooled map with those of a map of the row's group: q = (1 − λ) q_pooled + λ q_group.

    λ = n/(n + m) for a group with n rows. Cross-validated likelihood chooses m; if no m gains more than two standard
    errors over the pooled map, that map is used alone. A poor map of a small group costs a row at most −ln(1 − λ). The
    call takes `groups`, one value per row, as the fit did; a group without a map gets the pooled map. Not for groups
    that are unknown at prediction time.

    Parameters
    ----------
    base
        The pooled map.
    calibrators
        Maps of the groups.
    names
        Names of the groups.
    shares
        The λ of each group.

    Examples
    --------
    >>> from trueup.calibrators.temperature import Temperature
    >>> mixed = PerGroup(Temperature(1.0), [Temperature(2.0)], ["night"], [0.5])
    >>> mixed(np.array([[4.0, 0.0], [4.0, 0.0]]), groups=["day", "night"]).round(2)
    array([[-0.02, -4.02],
           [-0.07, -2.68]])
    """

    keeps_argmax = if_all_parts("keeps_argmax")
    shift_invariant = if_all_parts("shift_invariant")
    differentiable = if_all_parts("differentiable")
    # Not sample-invariant: the strength is chosen on folds.

    calibrators: tuple[Calibrator, ...]
    shares: np.ndarray

    def __init__(
        self, base: Calibrator, calibrators: Sequence[Calibrator], names: Sequence[str], shares: ArrayLike
    ) -> None:
        self.base, self.calibrators, self.names = base, tuple(calibrators), list(names)
        self.set_parameters(shares=shares)
        if not len(self.calibrators) == len(self.names) == len(self.shares):
            got = f"{len(self.calibrators)}, {len(self.names)} and {len(self.shares)}"
            raise ValueError(f"calibrators, names and shares must have one entry per group, got {got}")
        if not ((self.shares >= 0) & (self.shares <= 1)).all():
            raise ValueError(f"shares must lie in [0, 1], got {self.shares}")

    def map(self, xp: Namespace, z: Array, *, groups: ArrayLike | None = None) -> Array:
        """Return the log-probabilities of the row's group; the pooled ones for a group without a map."""
        if groups is None:
            raise InputError("groups", "be given, as to the fit", "none")
        known = {name: k for k, name in enumerate(self.names)}
        code = np.array([known.get(name, -1) for name in group_names(groups, z.shape[0])], dtype=np.int64)
        common = xp.log_softmax(xp.double(self.base.forward(xp, z)))
        parts, source, size = [common], np.arange(len(code)), len(code)
        for k in np.unique(code[code >= 0]).tolist():
            rows = np.flatnonzero(code == k)
            of_group = xp.log_softmax(xp.double(self.calibrators[k].forward(xp, xp.take_rows(z, rows))))
            parts.append(mix(xp, xp.take_rows(common, rows), of_group, self.shares[k]))
            source[rows] = np.arange(size, size + len(rows))
            size += len(rows)
        mixed = xp.take_rows(xp.concat(parts), source) if len(parts) > 1 else common
        return xp.astype(mixed, z.dtype)


def per_group(fit: Fit | str, *, n_folds: int = 5, strengths: Sequence[float] = STRENGTHS) -> Fit:
    """Fit one map to all rows and one to each group, and mix the two by held-out likelihood.

    Parameters
    ----------
    fit
        A method or its name.
    n_folds
        Number of folds.
    strengths
        Numbers of rows that the pooled map may count for.

    Returns
    -------
    Fit
        A method with the keyword `groups`, one value per row. It also accepts `clusters`, which stay in one fold.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> z, site = rng.normal(size=(4000, 3)) * 2, np.repeat(["A", "B"], 2000)
    >>> y = (z * np.where(site == "A", 1, 0.4)[:, None] + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> fitted = per_group("temperature")(z, y, groups=site)
    >>> fitted.names, [round(each.temperature, 1) for each in fitted.calibrators]
    (['A', 'B'], [1.0, 2.5])
    """
    method = METHODS[fit] if isinstance(fit, str) else fit

    def fitted(
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        groups: ArrayLike,
        sample_weight: WeightsLike = None,
        clusters: ArrayLike | None = None,
    ) -> PerGroup:
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=2 * n_folds)
        rows = len(to_array(labels, "labels"))
        blocks = weighted_clusters(clusters, sample_weight, rows, min_clusters=2)
        names = group_names(groups, rows)
        if (row_weights := as_weights(sample_weight, rows)) is not None:
            names = names[row_weights > 0]
        code, known = encode_groups(names)
        losses, pooled = np.empty((len(strengths), len(z))), np.empty(len(z))
        for train, test in k_fold(z, y, n_folds, blocks):
            part = _Fitted(method, *take_weighted(z, y, w, train), code[train])
            pooled[test], losses[:, test] = part.held_out(z[test], y[test], code[test], strengths)
        best = int((losses @ (np.ones(len(z)) if w is None else w)).argmin())
        maps = _Fitted(method, z, y, w, code)
        gained = is_significant_gain(pooled - losses[best], w, min_z=_MIN_Z, clusters=blocks)
        kept = maps.group_maps if gained else {}
        shares = [maps.share(k, strengths[best]) for k in kept]
        return PerGroup(maps.base, list(kept.values()), [str(known[k]) for k in kept], shares)

    return fitted


def mix(xp: Namespace, common: Array, of_group: Array, share: Array) -> Array:
    """Return ln((1 − λ) p + λ q), given ln p and ln q."""
    return xp.logaddexp(common + xp.log1p(-share), of_group + xp.log(share))


def group_names(groups: ArrayLike, rows: int) -> np.ndarray:
    """Return the name of each row's group; with several columns their values are joined."""
    columns = [[str(value) for value in column] for column in as_groups(groups, rows).values()]
    return np.array([" · ".join(values) for values in zip(*columns, strict=True)], dtype=object)


class _Fitted:
    """A pooled map, and maps of the groups with enough rows."""

    def __init__(self, method: Fit, z: np.ndarray, y: np.ndarray, w: np.ndarray | None, code: np.ndarray) -> None:
        self.base = method(z, y, **weight_kwargs(w))
        self.group_maps: dict[int, Calibrator] = {}
        self.rows: dict[int, float] = {}
        for k in np.unique(code).tolist():
            *part, weight = take_weighted(z, y, w, code == k)
            self.rows[k] = effective_rows(weight, len(part[0]))
            if self.rows[k] < _FEW_ROWS:
                continue
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a small group may have no optimum; its share is small then
                try:
                    self.group_maps[k] = method(*part, **weight_kwargs(weight))
                except (FitError, ValueError):
                    continue

    def share(self, k: int, strength: float) -> float:
        """Return λ of a group; 0 without a map of its own."""
        return self.rows[k] / (self.rows[k] + strength) if k in self.group_maps else 0.0

    def held_out(
        self, z: np.ndarray, y: np.ndarray, code: np.ndarray, strengths: Sequence[float]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return each row's loss under the pooled map, and with every strength, (strengths, n)."""
        common = _log_probs(self.base, z)
        pooled = -common[np.arange(len(y)), y]
        losses = np.tile(pooled, (len(strengths), 1))
        for k, calibrator in self.group_maps.items():
            rows = np.flatnonzero(code == k)
            if not len(rows):
                continue
            of_group = _log_probs(calibrator, z[rows])[np.arange(len(rows)), y[rows]]
            for i, strength in enumerate(strengths):
                losses[i, rows] = -mix(NUMPY, -pooled[rows], of_group, self.share(k, strength))
        return pooled, losses


def _log_probs(calibrator: Calibrator, z: np.ndarray) -> np.ndarray:
    return np.asarray(NUMPY.log_softmax(upcast_half(calibrator(z)).astype(np.float64)))


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

    def map(self, xp: Namespace, z: Array) -> Array:
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
