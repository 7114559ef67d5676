"""Named combinations of methods, and the automatic choice among all methods."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from scipy.special import chdtri

from trueup._core.arrays import as_weighted, find_absent, take_weighted, to_array, warn_users, weight_kwargs
from trueup._core.clusters import Clusters, weighted_clusters
from trueup._core.errors import silence_warnings
from trueup._core.formatting import format_percent
from trueup._core.namespace import NUMPY
from trueup._core.optimize import FitError
from trueup._core.progress import track
from trueup._core.registry import METHODS
from trueup._core.splits import is_significant_gain, stratified_folds
from trueup._core.types import ArrayLike, WeightsLike
from trueup.calibrators.base import Calibrator, row_count
from trueup.calibrators.compose import Fit, chain, record_choice, simplest, weighted_mean
from trueup.calibrators.folds import k_fold, merge_copies
from trueup.calibrators.pool import HeldOut, Mixture, UniformMixture

FEW_ROWS, FEW_ROWS_OF_CLASS = 500, 5
"""With fewer rows in total, or in a tenth of the classes, the candidates have few parameters."""
WEAK_PRIOR_ROWS = 200
"""From this number of rows on, the pseudo-rows of "few rows" count less."""
WEAK_PRIOR = {"few rows": 1 / 2, "few rows, many classes": 1 / 2, "few rows, two classes": 1 / 8}
"""Factor of the pseudo-rows from that number of rows on."""
SOME_CLASSES, MANY_CLASSES = 30, 200
"""Above the first number of classes some candidates are left out, above the second also full matrices."""
CANDIDATES: Mapping[str, tuple[str, ...]] = {
    size: tuple(names.split())
    for size, names in {
        "every row right": "identity bayesian_temperature",
        "the same for all classes": "identity temperature ets diagonal",
        "a class without rows": "identity bayesian_temperature temperature ets diagonal svs sms diagonal_sms",
        "a class without rows, up to 200 classes": "identity bayesian_temperature temperature ets diagonal svs sms "
        "diagonal_sms",
        "a class without rows, more classes": "identity bayesian_temperature temperature ets diagonal svs",
        "few rows, two classes": "identity bayesian_temperature platt beta smoothing_spline venn_abers",
        "few rows": "identity bayesian_temperature bias_corrected_temperature diagonal svs sms "
        "diagonal_sms isotonic_ovr venn_abers",
        "few rows, many classes": "identity bayesian_temperature svs",
        "two classes": "identity temperature platt beta quadratic smoothing_spline isotonic_ovr venn_abers residual",
        "up to 30 classes": "identity temperature bias_corrected_temperature svs quadratic sms loose_sms free_sms "
        "diagonal_sms isotonic_ovr order_invariant residual residual_sms residual_loose_sms",
        "up to 200 classes": "identity temperature bias_corrected_temperature svs sms loose_sms free_sms diagonal_sms "
        "low_rank isotonic_ovr order_invariant residual",
        "more classes": "identity temperature bias_corrected_temperature svs low_rank",
    }.items()
}
"""Candidates of `auto` by problem size, simplest first.

"every row right": the error rate cannot be estimated. "the same for all classes": used when the argmax must stay, and
when a class has no rows although the logits predict many.
"""
PRIOR_ROWS: Mapping[str, float] = {"temperature": 1.0, "smoothing_spline": 3.0}
"""Dirichlet prior of the mixture's weights, in rows credited to each candidate.

Candidates named here are never dropped.
"""
SMALL_PROBLEM_PRIOR: Mapping[str, Mapping[str, float]] = {
    "every row right": {"bayesian_temperature": 5.0},
    "the same for all classes": {"temperature": 5.0},
    "a class without rows": {"bayesian_temperature": 1.0},
    "a class without rows, up to 200 classes": {"diagonal": 3.0},
    "a class without rows, more classes": {"diagonal": 3.0},
    "few rows, two classes": {"bayesian_temperature": 8.0, "smoothing_spline": 5.0, "venn_abers": 2.0},
    "few rows": {"bayesian_temperature": 3.0},
    "few rows, many classes": {"bayesian_temperature": 5.0},
}
"""`PRIOR_ROWS` for small problems, where held-out losses are too noisy.

From `WEAK_PRIOR_ROWS` on they are multiplied by `WEAK_PRIOR`. With these sizes no candidate is dropped early: if nearly
all rows are right, step functions look best until they meet an error.
"""
AFTER_MIXTURE = ("platt", "quadratic", "smoothing_spline", "svs", "sms", "diagonal_sms")
"""Candidates that are also tried on mixed probabilities, if mixing in a uniform distribution raises the likelihood."""
PENALTIES = {"loose_sms": 0.1, "free_sms": 0.01}
"""Structured matrix scaling with this fraction of its penalty; the pool weighs them, which is cheaper than `sms_cv`."""
BASES = {
    "order_invariant": ("temperature",),
    "residual": ("diagonal_sms", "smoothing_spline"),
    "residual_sms": ("sms",),
    "residual_loose_sms": ("loose_sms",),
}
"""The base map of each network candidate: the first of these that is a candidate."""
_ERRORS_BEHIND = 2.0  # standard errors by which a dropped candidate is worse than the best.
_UNIFORM_ROWS = 0.1  # pseudo-rows of the uniform distribution in the final mixture.
_MIN_WEIGHT = 0.02  # smallest weight in the mixture.
_MIN_EXPECTED = 20.0  # expected rows of a class that may be called absent (by chance with probability 2e-9) or shifted.
_SHIFT_ERRORS = 6.0  # standard errors by which the frequency of a shifted class must differ from the prediction.
_SHIFT_RATIO = 1.5  # factor by which it must differ as well.
_RACE_AFTER = 2  # number of folds after which candidates can be dropped.
_MAX_HELD_OUT = 1 << 23  # number of held-out log-probabilities stored per candidate


def temperature_histogram(logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Calibrator:
    """Fit temperature scaling, then histogram binning: `chain("temperature", "histogram")`.

    Not for ranking: all confidences in a bin become equal.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities of the calibration rows, shape (n, classes).
    labels
        True classes of the rows, numbered from 0, shape (n,).
    sample_weight
        Weight of each row, shape (n,). By default all rows count equally.

    Returns
    -------
    Calibrator
        The fitted calibrator.
    """
    return chain("temperature", "histogram")(logits, labels, sample_weight=sample_weight)


def diagonal_sms(logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Calibrator:
    """Fit a diagonal map, then structured matrix scaling: `chain("diagonal", "sms")`.

    The diagonal map corrects errors that depend on confidence; the matrix corrects errors between classes.
    Not for maps that must keep the predicted class.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities of the calibration rows, shape (n, classes).
    labels
        True classes of the rows, numbered from 0, shape (n,).
    sample_weight
        Weight of each row, shape (n,). By default all rows count equally.

    Returns
    -------
    Calibrator
        The fitted calibrator.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(500, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> diagonal_sms(3 * z, y)(3 * z).shape
    (500, 3)
    """
    return chain("diagonal", "sms")(logits, labels, sample_weight=sample_weight)


def auto(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    sample_weight: WeightsLike = None,
    clusters: ArrayLike | None = None,
    keep_argmax: bool = False,
    score: str = "nll",
    n_folds: int = 5,
    progress: bool = True,
) -> Calibrator:
    """Pool the `CANDIDATES` for the problem's size, weighted by their loss on held-out rows.

    Each candidate is fitted on folds and predicts the held-out rows. The mixture's weights maximise the likelihood of
    those predictions, with a prior that favours temperature scaling; with few rows the prior is strong. Candidates with
    a positive weight are then refitted to all rows. The identity is a candidate too. If the mixture, with weights
    from the other folds, does not beat the identity, the identity is returned. With few rows this comparison is too
    noisy and is skipped.

    Parameters
    ----------
    logits
        Network outputs or log-probabilities of the calibration rows, shape (n, classes).
    labels
        True classes of the rows, numbered from 0, shape (n,).
    sample_weight
        Weight of each row, shape (n,). By default all rows count equally.
    clusters
        Cluster of each row, shape (n,), where rows are correlated, such as pixels of an image. Clusters stay in one
        fold, and standard errors are taken over clusters.
    keep_argmax
        Pool only candidates that keep every predicted class.
    score
        Loss that the weights minimise, "nll" or "brier".
    n_folds
        Number of folds.
    progress
        Show a progress bar.

    Returns
    -------
    Calibrator
        A mixture, or a single calibrator; it carries the comparison as `choice`.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> choice = auto(3 * z, y).choice
    >>> choice.loss < choice.scores["identity"]
    True
    """
    if score not in ("nll", "brier"):
        raise ValueError(f'score must be "nll" or "brier", got {score!r}')
    z, y, w = as_weighted(logits, labels, sample_weight, min_rows=2 * n_folds)
    blocks = weighted_clusters(clusters, sample_weight, len(to_array(labels, "labels")), min_clusters=2)
    if blocks is None:
        z, y, w = merge_copies(z, y, w)
    keep_odds = _warn_about_empty_classes(z, y, w)
    with silence_warnings():  # fits on folds may warn; their held-out loss decides
        shifted = None if w is not None or blocks is not None else _shifted_class(z, y)
        size = _problem_size(z, y, w, keep_odds)
        pool = "the same for all classes" if keep_argmax and size != "every row right" else size
        fits = _candidates(z, y, w, pool)
        parts = k_fold(z, y, n_folds, blocks)
        cautious = SMALL_PROBLEM_PRIOR[pool] if size in SMALL_PROBLEM_PRIOR else None
        if cautious is not None and row_count(z, w) >= WEAK_PRIOR_ROWS:
            cautious = {name: WEAK_PRIOR.get(size, 1.0) * rows for name, rows in cautious.items()}
        trial = _Trial(z, y, w, fits, parts, score, cautious, blocks)
        trial.run(progress)
        chosen = trial.conclude()
    if shifted is not None:
        warn_users(
            f"class {shifted.number} is {format_percent(shifted.observed, 1)} of the labels, but the network predicts "
            f"{format_percent(shifted.predicted, 1)}, as if these rows had other class frequencies than its training. "
            "The fit assumes that new rows have those of the labels; if not, correct it by decisions.shift_prior"
        )
    return chosen


class _Shifted(NamedTuple):
    """The class whose frequency differs most from the prediction."""

    number: int
    observed: float
    predicted: float


def _shifted_class(z: np.ndarray, y: np.ndarray) -> _Shifted | None:
    """Return the class whose frequency changed most, if a label shift explains the labels; else None.

    After temperature scaling, a frequency must clearly differ from the prediction. A bias per class,
    which is what a label shift adds to the logits, must then explain the labels as well as vector scaling does.
    """
    n, classes = z.shape
    if classes < 3 or find_absent(z) is not None:
        return None
    scaled = METHODS["temperature"](z, y)(z).astype(np.float64)
    probs = NUMPY.softmax(scaled)
    observed, predicted = np.bincount(y, minlength=classes).astype(float), probs.sum(axis=0)
    error = np.sqrt((probs * (1 - probs)).sum(axis=0))
    ratio = np.abs(np.log(np.maximum(observed, 1.0)) - np.log(np.maximum(predicted, 1.0)))
    many = np.minimum(observed, predicted) >= _MIN_EXPECTED
    moved = many & (np.abs(observed - predicted) > _SHIFT_ERRORS * error) & (ratio > math.log(_SHIFT_RATIO))
    if not moved.any():
        return None
    biased, vector = (
        NUMPY.log_softmax(METHODS[name](z, y)(z).astype(np.float64))[np.arange(n), y].sum()
        for name in ("bias_corrected_temperature", "vector")
    )
    if 2 * (vector - biased) > chdtri(classes - 1, 0.001):  # classes are wrong in ways that no shift explains
        return None
    k = int(np.where(moved, ratio, -1.0).argmax())
    return _Shifted(k, float(observed[k] / n), float(predicted[k] / n))


def _warn_about_empty_classes(z: np.ndarray, y: np.ndarray, w: np.ndarray | None) -> bool:
    """Warn if many rows were expected of a class that has none; only the user knows whether it can occur."""
    empty = np.flatnonzero(np.bincount(y, weights=w, minlength=z.shape[1]) == 0)
    if not len(empty):
        return False
    probs = NUMPY.softmax(z.astype(np.float64))[:, empty]
    expected = probs.sum(axis=0) if w is None else w @ probs
    many = expected >= _MIN_EXPECTED
    if many.any():
        which = " or ".join(str(k) for k in empty[many].tolist())
        warn_users(
            f"no row has class {which}, but the logits predict {float(expected[many].sum()):.0f} of {len(z)} rows. "
            "Its odds are kept; if it can never occur, set its logit to -inf in every row"
        )
    return bool(many.any())


def _problem_size(z: np.ndarray, y: np.ndarray, w: np.ndarray | None, keep_odds: bool) -> str:
    if (z.argmax(axis=1) == y).all():
        return "every row right"
    rows = np.bincount(y, weights=w, minlength=z.shape[1])
    if (absent := find_absent(z)) is not None:
        rows = rows[~absent.all(axis=0)]  # an option that no row offers needs no map
    classes = len(rows)
    if not rows.all():
        many = ", more classes" if classes > MANY_CLASSES else ", up to 200 classes" if classes > SOME_CLASSES else ""
        return "the same for all classes" if keep_odds else f"a class without rows{many}"
    if float(rows.sum()) < FEW_ROWS or int((rows < FEW_ROWS_OF_CLASS).sum()) >= classes / 10:
        few = "few rows" if classes <= SOME_CLASSES else "few rows, many classes"
        return "few rows, two classes" if classes == 2 else few
    if classes == 2:
        return "two classes"
    if classes <= SOME_CLASSES:
        return "up to 30 classes"
    return "up to 200 classes" if classes <= MANY_CLASSES else "more classes"


def _candidates(z: np.ndarray, y: np.ndarray, w: np.ndarray | None, size: str) -> dict[str, Fit]:
    fits = {name: _method(name) for name in CANDIDATES[size]}
    after = [name for name in fits if name in AFTER_MIXTURE]
    if after and UniformMixture.fit(z, y, **weight_kwargs(w)).share > 0:
        fits |= {f"mixed_{name}": chain(UniformMixture.fit, name) for name in after}
    return fits


def _method(name: str) -> Fit:
    if name == "temperature":
        return partial(METHODS[name], smooth=_UNIFORM_ROWS)
    if name in PENALTIES:
        return partial(METHODS["sms_cv"], penalties=(PENALTIES[name],))
    method: Fit = METHODS[name if name in METHODS else "residual"]
    return method


@dataclass(eq=False)
class _Trial:
    """Candidates fitted on folds, and the mixture made from their held-out predictions."""

    z: np.ndarray
    y: np.ndarray
    w: np.ndarray | None
    fits: dict[str, Fit]
    folds: Sequence[tuple[np.ndarray, np.ndarray]]
    score: str
    cautious: Mapping[str, float] | None
    clusters: Clusters | None

    def __post_init__(self) -> None:
        # On very large problems a stratified subsample of the rows is scored.
        rank, classes = stratified_folds(self.z, self.y, len(self.z)), self.z.shape[1]
        self.rows = np.flatnonzero(rank < max(_MAX_HELD_OUT // classes, 2 * len(self.folds)))
        self.clusters = None if self.clusters is None else self.clusters.take(self.rows)
        fold = np.argmax(np.stack([held_out[self.rows] for _, held_out in self.folds]), axis=0)
        weights = None if self.w is None else self.w[self.rows]
        self.held_out = HeldOut(self.y[self.rows], fold, classes, self.score, weights)
        self.share = _UNIFORM_ROWS / (row_count(self.z, self.w) + _UNIFORM_ROWS)
        self.models: dict[str, list[Calibrator]] = {}
        self.reasons: dict[str, str] = {}

    def run(self, progress: bool) -> None:
        """Fit every candidate on every fold, and drop candidates that cannot win."""
        without_base = [name for name in self.fits if name not in BASES]
        steps = [(k, name) for k in range(len(self.folds)) for name in without_base]
        for k, name in track(steps, label="fitting candidates to folds", enabled=progress):
            if (k, name) == (_RACE_AFTER, without_base[0]) and self.cautious is None:
                self._drop_losers_early()
            if name in self.reasons:
                continue
            try:
                *pair, share = take_weighted(self.z, self.y, self.w, self.folds[k][0])
                self._predict(k, name, self.fits[name](*pair, **weight_kwargs(share)))
            except (FitError, ValueError) as error:
                self._drop(name, str(error))
        for name in self.fits:
            if name in BASES:
                self._train_networks(name)

    def conclude(self) -> Calibrator:
        """Return the mixture or the identity, with a record of the choice."""
        losses = {name: self.held_out.losses(name) for name in self.fits if name in self.models}
        row_weights = self.held_out.row_weights
        prior = PRIOR_ROWS if self.cautious is None else self.cautious
        names = self._names_with_weight(list(losses), prior)
        loss = self.held_out.mixture_losses(names, _alphas(names, prior))
        if self.cautious is None and not weighted_mean(losses["identity"] - loss, row_weights) > 0:
            names, loss = ["identity"], losses["identity"]
        weights = self.held_out.weights(names, _alphas(names, prior))
        names, weights = [name for name, w in zip(names, weights, strict=True) if w > 0], weights[weights > 0]
        chosen = names[0] if len(names) == 1 else "mixture"
        mixture = loss, dict(zip(names, weights.tolist(), strict=True))
        options: dict[str, Any] = {"reasons": self.reasons, "sample_weight": row_weights, "clusters": self.clusters}
        choice = record_choice(losses, chosen, raw="identity", mixture=mixture, **options)
        scores = {name: choice.scores[name] for name in self.fits}
        return self._refit(names, weights).with_choice(choice._replace(scores=scores))

    def _predict(self, k: int, name: str, model: Calibrator) -> None:
        """Store the predictions of a fold's model for its held-out rows."""
        held = self.held_out.fold == k
        bounded = model if name == "identity" else Mixture([model], [1.0], share=self.share)
        log_p = NUMPY.log_softmax(bounded(self.z[self.rows[held]]).astype(np.float64))
        self.models.setdefault(name, []).append(model)
        self.held_out.add(name, held, log_p)

    def _drop(self, name: str, reason: str) -> None:
        self.reasons[name] = reason
        self.models.pop(name, None)
        self.held_out.log_probs.pop(name, None)

    def _names_with_weight(
        self, names: Sequence[str], prior: Mapping[str, float], rows: np.ndarray | slice = slice(None)
    ) -> list[str]:
        """Return the candidates that have a share in the mixture."""
        weights = self.held_out.weights(names, _alphas(names, prior), rows)
        return [name for name, weight in zip(names, weights, strict=True) if weight >= _MIN_WEIGHT]

    def _drop_losers_early(self) -> None:
        """Drop candidates that have no share in the mixture on the first folds and are clearly worse than the best."""
        scored = self.held_out.fold < _RACE_AFTER
        losses = {name: self.held_out.losses(name)[scored] for name in self.models}
        row_weights = None if self.held_out.row_weights is None else self.held_out.row_weights[scored]
        blocks = None if self.clusters is None else self.clusters.take(scored)
        best = simplest(losses, standard_errors=0.0, sample_weight=row_weights)
        kept = {"identity", *PRIOR_ROWS, *self._names_with_weight(list(losses), PRIOR_ROWS, scored)}
        kept |= {base for name in self.fits for base in BASES.get(name, ())}
        for name in [name for name in losses if name not in kept]:
            if is_significant_gain(losses[name] - losses[best], row_weights, min_z=_ERRORS_BEHIND, clusters=blocks):
                self._drop(name, "dropped after two folds: worse than the best, and without a share in the mixture")

    def _train_networks(self, name: str) -> None:
        """Train the networks of a candidate on the folds of its base, which are already fitted."""
        base = self._base(name)
        if base is None:
            self._drop(name, "its base map could not be fitted")
            return
        from trueup.calibrators.neural import OrderInvariant, Residual, fit_folds  # small problems have no networks

        kind = OrderInvariant if name == "order_invariant" else Residual
        models = fit_folds(kind, self.z, self.y, self.folds, self.models[base], w=self.w)
        if models == self.models[base]:
            self._drop(name, "did not improve on its base map")
            return
        for k, model in enumerate(models):
            self._predict(k, name, model)

    def _base(self, name: str) -> str | None:
        return next((base for base in BASES.get(name, ()) if base in self.models), None)

    def _refit(self, names: Sequence[str], weights: np.ndarray) -> Calibrator:
        """Refit the candidates to all rows and mix them."""
        if list(names) in (["identity"], ["temperature"], ["bayesian_temperature"]):
            return self.fits[names[0]](self.z, self.y, **weight_kwargs(self.w))
        pooled = len(names) > 1 and self.cautious is None  # with few rows one more parameter would overfit
        temperature = self.held_out.temperature(names, weights) if pooled else 1.0
        return Mixture([self._refit_one(name) for name in names], weights, temperature, self.share)

    def _refit_one(self, name: str) -> Calibrator:
        base = self._base(name)
        if base is None:
            return self.fits[name](self.z, self.y, **weight_kwargs(self.w))
        from trueup.calibrators.neural import average_folds

        return average_folds(self.models[name], self.fits[base](self.z, self.y, **weight_kwargs(self.w)))


def _alphas(names: Sequence[str], prior: Mapping[str, float]) -> np.ndarray:
    return np.array([1.0 + prior.get(name, 0.0) for name in names])
