"""Methods that are made of others, each under a name of its own, and the automatic choice among all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from trueup._core.arrays import as_weighted, find_absent, take_weighted, to_array, warn_users, weight_kwargs
from trueup._core.clusters import Clusters, weighted_clusters
from trueup._core.errors import silence_warnings
from trueup._core.namespace import NUMPY
from trueup._core.optimize import FitError
from trueup._core.progress import track
from trueup._core.registry import METHODS
from trueup._core.splits import is_significant_gain, k_fold, stratified_folds
from trueup.calibrators.base import Calibrator, row_count
from trueup.calibrators.compose import Fit, chain, record_choice, simplest, weighted_mean
from trueup.calibrators.pool import HeldOut, Mixture, UniformMixture

FEW_ROWS, FEW_ROWS_OF_CLASS = 500, 5
"""With fewer rows, on the whole or in a tenth of the classes, candidates have few parameters."""
SOME_CLASSES, MANY_CLASSES = 30, 200
"""With more of them, some candidates are left out, and then whole matrices."""
CANDIDATES: Mapping[str, tuple[str, ...]] = {
    size: tuple(names.split())
    for size, names in {
        "every row right": "identity bayesian_temperature",
        "the same for all classes": "identity temperature ets diagonal",
        "few rows, two classes": "identity bayesian_temperature platt beta smoothing_spline venn_abers",
        "few rows": "identity bayesian_temperature bias_corrected_temperature diagonal svs sms isotonic_ovr venn_abers",
        "few rows, many classes": "identity bayesian_temperature svs",
        "two classes": "identity temperature platt beta quadratic smoothing_spline isotonic_ovr venn_abers residual",
        "up to 30 classes": "identity temperature bias_corrected_temperature svs quadratic sms loose_sms free_sms "
        "diagonal_sms isotonic_ovr order_invariant residual residual_sms residual_loose_sms",
        "up to 200 classes": "identity temperature bias_corrected_temperature svs sms loose_sms free_sms diagonal_sms "
        "low_rank isotonic_ovr order_invariant residual",
        "more classes": "identity temperature bias_corrected_temperature svs low_rank",
    }.items()
}
"""What `auto` pools, by the size of the problem, the simplest first. Where every row is right nothing shows how often
one is wrong. The second list is for problems where the argmax must stay, or a class has no rows, whose odds then
stay."""
PRIOR_ROWS: Mapping[str, float] = {"temperature": 1.0, "smoothing_spline": 3.0}
"""Rows more that a candidate's weight counts, as if it alone had explained them; such candidates are never dropped."""
CAUTIOUS: Mapping[str, Mapping[str, float]] = {
    "every row right": {"bayesian_temperature": 5.0},
    "the same for all classes": {"temperature": 5.0},
    "few rows, two classes": {"bayesian_temperature": 8.0, "smoothing_spline": 5.0, "venn_abers": 2.0},
    "few rows": {"bayesian_temperature": 3.0},
    "few rows, many classes": {"bayesian_temperature": 5.0},
}
"""Sizes at which held-out losses say little, and the rows that count there. Which candidate is behind is not asked: of
rows that are nearly all right, steps are clearly ahead until they meet the first that is wrong."""
AFTER_MIXTURE = ("platt", "quadratic", "smoothing_spline", "svs", "sms", "diagonal_sms")
"""Candidates that are tried a second time after a share of the uniform distribution, where likelihood wants one."""
PENALTIES = {"loose_sms": 0.1, "free_sms": 0.01}
"""Structured matrix scaling with so much of its penalty: the pool weighs them, which costs less than `sms_cv`."""
BASES = {
    "order_invariant": ("temperature",),
    "residual": ("diagonal_sms", "smoothing_spline"),
    "residual_sms": ("sms",),
    "residual_loose_sms": ("loose_sms",),
}
"""The base of each candidate that is a network on top of another: the first that is a candidate."""
_BEHIND = 2.0  # standard errors by which a candidate is clearly behind
_UNIFORM_ROWS = 0.1  # the uniform distribution's share in the end is that of so many rows
_LEAST_WEIGHT = 0.02
_EXPECTED = 20.0  # rows of a class; that none comes by chance has odds of 2e-9
_RACE_AFTER = 2  # folds after which candidates can be dropped
_SCORED = 1 << 23  # held-out log-probabilities that are kept of each candidate


def temperature_histogram(logits: Any, labels: Any, *, sample_weight: Any = None) -> Calibrator:
    """Temperature scaling, then histogram binning: `chain("temperature", "histogram")`.

    Not for ranking: confidences of one bin become equal.
    """
    return chain("temperature", "histogram")(logits, labels, sample_weight=sample_weight)


def diagonal_sms(logits: Any, labels: Any, *, sample_weight: Any = None) -> Calibrator:
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
    return chain("diagonal", "sms")(logits, labels, sample_weight=sample_weight)


def auto(
    logits: Any,
    labels: Any,
    *,
    sample_weight: Any = None,
    clusters: Any = None,
    keep_argmax: bool = False,
    score: str = "nll",
    n_folds: int = 5,
    progress: bool = True,
) -> Calibrator:
    """Automatic choice: a mixture of the `CANDIDATES` for the problem's size, by their loss on held-out rows.

    Each candidate is fitted to folds and predicts the rows left out. The mixture's weights maximise the likelihood of
    those predictions (or, by `score="brier"`, minimise the Brier score) with a prior that favours temperature scaling,
    strongly so of few rows, where it is Bayesian; the candidates with a share are fitted again to all rows. The
    identity is a candidate too. It is taken alone where the mixture, its weights fitted to other folds, has no less
    loss; of few rows, too few to tell, it only has its share. `keep_argmax=True` pools only candidates that keep every
    predicted class. `sample_weight` are those of the rows. `clusters`, one value a row, keep correlated rows, such as
    pixels of an image, in one fold, and standard errors are those of clusters. The calibrator that comes out carries
    the comparison as `choice`.

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
    together = weighted_clusters(clusters, sample_weight, len(to_array(labels, "labels")), min_clusters=2)
    _warn_of_empty_classes(z, y, w)
    with silence_warnings():  # of fits to folds: what comes of them is judged by its held-out loss
        size = _size(z, y, w)
        pool = "the same for all classes" if keep_argmax and size != "every row right" else size
        fits = _candidates(z, y, w, pool)
        parts = k_fold(z, y, n_folds, together)
        trial = _Trial(z, y, w, fits, parts, score, CAUTIOUS[pool] if size in CAUTIOUS else None, together)
        trial.run(progress)
        return trial.conclude()


def _warn_of_empty_classes(z: np.ndarray, y: np.ndarray, w: np.ndarray | None) -> None:
    """Say which classes have no rows though many were to be expected: nobody but the user knows if they can occur."""
    empty = np.flatnonzero(np.bincount(y, weights=w, minlength=z.shape[1]) == 0)
    if not len(empty):
        return
    probs = NUMPY.softmax(z.astype(np.float64))[:, empty]
    expected = probs.sum(axis=0) if w is None else w @ probs
    many = expected >= _EXPECTED
    if many.any():
        which = " or ".join(str(k) for k in empty[many].tolist())
        warn_users(
            f"no row is of class {which}, where the logits expect {float(expected[many].sum()):.0f} of {len(z)} rows. "
            "Its odds are kept; if it can never be right, give it -inf in every row"
        )


def _size(z: np.ndarray, y: np.ndarray, w: np.ndarray | None) -> str:
    if (z.argmax(axis=1) == y).all():
        return "every row right"
    rows = np.bincount(y, weights=w, minlength=z.shape[1])
    if (absent := find_absent(z)) is not None:
        rows = rows[~absent.all(axis=0)]  # an option that no row has needs no map
    classes = len(rows)
    if not rows.all():
        return "the same for all classes"
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
    """Candidates fitted to folds, and what is made of those that predict the rows left out."""

    z: np.ndarray
    y: np.ndarray
    w: np.ndarray | None
    fits: dict[str, Fit]
    folds: Sequence[tuple[np.ndarray, np.ndarray]]
    score: str
    cautious: Mapping[str, float] | None
    clusters: Clusters | None

    def __post_init__(self) -> None:
        # Held-out losses of some rows are enough where there are very many numbers; each fold has its share of them.
        turn, classes = stratified_folds(self.z, self.y, len(self.z)), self.z.shape[1]
        self.rows = np.flatnonzero(turn < max(_SCORED // classes, 2 * len(self.folds)))
        self.clusters = None if self.clusters is None else self.clusters.take(self.rows)
        fold = np.argmax(np.stack([held_out[self.rows] for _, held_out in self.folds]), axis=0)
        weights = None if self.w is None else self.w[self.rows]
        self.held_out = HeldOut(self.y[self.rows], fold, classes, self.score, weights)
        self.share = _UNIFORM_ROWS / (row_count(self.z, self.w) + _UNIFORM_ROWS)
        self.models: dict[str, list[Calibrator]] = {}
        self.reasons: dict[str, str] = {}

    def run(self, progress: bool) -> None:
        """Fit every candidate to every fold, but drop on the way those that cannot win."""
        alone = [name for name in self.fits if name not in BASES]
        steps = [(k, name) for k in range(len(self.folds)) for name in alone]
        for k, name in track(steps, label="fitting candidates to folds", enabled=progress):
            if (k, name) == (_RACE_AFTER, alone[0]) and self.cautious is None:
                self._race()
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
        """The mixture or the identity, with a record of the choice."""
        losses = {name: self.held_out.losses(name) for name in self.fits if name in self.models}
        each = self.held_out.row_weights
        prior = PRIOR_ROWS if self.cautious is None else self.cautious
        names = self._kept(list(losses), prior)
        loss = self.held_out.mixture_losses(names, _alphas(names, prior))
        if self.cautious is None and not weighted_mean(losses["identity"] - loss, each) > 0:
            names, loss = ["identity"], losses["identity"]
        weights = self.held_out.weights(names, _alphas(names, prior))
        names, weights = [name for name, w in zip(names, weights, strict=True) if w > 0], weights[weights > 0]
        chosen = names[0] if len(names) == 1 else "mixture"
        mixture = loss, dict(zip(names, weights.tolist(), strict=True))
        options: dict[str, Any] = {"reasons": self.reasons, "sample_weight": each, "clusters": self.clusters}
        choice = record_choice(losses, chosen, raw="identity", mixture=mixture, **options)
        scores = {name: choice.scores[name] for name in self.fits}
        return self._refit(names, weights).with_choice(choice._replace(scores=scores))

    def _predict(self, k: int, name: str, model: Calibrator) -> None:
        """Note what the model of a fold says of the rows left out."""
        mine = self.held_out.fold == k
        ended = model if name == "identity" else Mixture([model], [1.0], share=self.share)
        log_p = NUMPY.log_softmax(ended(self.z[self.rows[mine]]).astype(np.float64))
        self.models.setdefault(name, []).append(model)
        self.held_out.add(name, mine, log_p)

    def _drop(self, name: str, reason: str) -> None:
        self.reasons[name] = reason
        self.models.pop(name, None)
        self.held_out.log_probs.pop(name, None)

    def _kept(
        self, names: Sequence[str], prior: Mapping[str, float], rows: np.ndarray | slice = slice(None)
    ) -> list[str]:
        """Those with a share in the mixture."""
        weights = self.held_out.weights(names, _alphas(names, prior), rows)
        return [name for name, weight in zip(names, weights, strict=True) if weight >= _LEAST_WEIGHT]

    def _race(self) -> None:
        """Drop candidates that have no share in the mixture on the first folds and are clearly behind the best."""
        seen = self.held_out.fold < _RACE_AFTER
        losses = {name: self.held_out.losses(name)[seen] for name in self.models}
        each = None if self.held_out.row_weights is None else self.held_out.row_weights[seen]
        together = None if self.clusters is None else self.clusters.take(seen)
        best = simplest(losses, standard_errors=0.0, sample_weight=each)
        kept = {"identity", *PRIOR_ROWS, *self._kept(list(losses), PRIOR_ROWS, seen)}
        kept |= {base for name in self.fits for base in BASES.get(name, ())}
        for name in [name for name in losses if name not in kept]:
            if is_significant_gain(losses[name] - losses[best], each, min_z=_BEHIND, clusters=together):
                self._drop(name, "dropped after two folds: behind the best, and without a share in the mixture")

    def _train_networks(self, name: str) -> None:
        """On the folds of its base, which are fitted already."""
        base = self._base(name)
        if base is None:
            self._drop(name, "its base map could not be fitted")
            return
        from trueup.calibrators.neural import OrderInvariant, Residual, fit_folds  # few rows have no networks

        kind = OrderInvariant if name == "order_invariant" else Residual
        models = fit_folds(kind, self.z, self.y, self.folds, self.models[base], w=self.w)
        if models == self.models[base]:
            self._drop(name, "it found nothing to correct in its base map")
            return
        for k, model in enumerate(models):
            self._predict(k, name, model)

    def _base(self, name: str) -> str | None:
        return next((base for base in BASES.get(name, ()) if base in self.models), None)

    def _refit(self, names: Sequence[str], weights: np.ndarray) -> Calibrator:
        """The candidates on all rows, mixed."""
        if list(names) in (["identity"], ["temperature"], ["bayesian_temperature"]):
            return self.fits[names[0]](self.z, self.y, **weight_kwargs(self.w))
        pooled = len(names) > 1 and self.cautious is None  # few rows leave no room for one more parameter
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
