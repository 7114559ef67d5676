"""An audit: how calibrated a network is, which method calibrates it best, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueup.calibrators.auto import MANY_CLASSES
from trueup.calibrators.base import Calibrator
from trueup.calibrators.compose import Choice, Fit, cross_fit, record_choice, simplest, takes
from trueup.core.arrays import as_tensors, as_weights, effective_rows, trusted_tensors, upcast_half
from trueup.core.bins import BINS
from trueup.core.clusters import Clusters, as_clusters, block_sums, mean_error
from trueup.core.errors import InputError, record_warnings
from trueup.core.formatting import escape, format_percent
from trueup.core.progress import track
from trueup.core.row_scores import event_name, score_rows
from trueup.io.predictions import Predictions
from trueup.metrics.table import DEFAULT as TABLE
from trueup.metrics.table import EVENT_DEFAULT as EVENT_TABLE
from trueup.metrics.table import Scores, compare, event_direction
from trueup.registry import METHODS

Pair = tuple[Tensor, Tensor]
"""Logits (n, classes) and labels (n,), checked."""

RAW = "raw"
"""The uncalibrated network among the methods."""
_TITLES = {RAW: "No calibration", "clamping": "Neural Clamping"}
"""Of what is compared with the methods and is none of METHODS."""

DEFAULT = (
    "temperature",
    "ets",
    "histogram",
    "isotonic",
    "spline",
    "svs",
    "vector",
    "sms",
    "diagonal_sms",
)
"""The methods tried by default, the simplest first: the best of each kind."""
FEW_CLASSES = 20
SLOW = ("dirichlet_odir",)
"""Tried as well if there are at most `FEW_CLASSES` classes."""
FAST = ("temperature", "histogram", "isotonic", "svs")
"""The methods tried on `MANY` logits."""
MANY = 5_000_000


def method_title(name: str) -> str:
    """The textbook name of a method, which its docstring begins with; other names stay as they are.

    >>> method_title("temperature"), method_title("my own")
    ('Temperature scaling', 'my own')
    """
    if name in METHODS:
        return (METHODS[name].__doc__ or name).partition(":")[0]
    return _TITLES.get(name, name)


POOLED = 100_000
"""Logits up to which a report tries the automatic choice too: it is fitted six times, each time on folds of its own."""


def methods_for(rows: int, classes: int) -> tuple[str, ...]:
    """The methods to try on so many logits: `DEFAULT`, more for few classes, `FAST` for very many.

    >>> methods_for(5_000, 100) == DEFAULT, methods_for(50_000, 1000) == FAST
    (True, True)
    """
    if rows * classes >= MANY or classes > MANY_CLASSES:
        return FAST
    return DEFAULT + SLOW if classes <= FEW_CLASSES else DEFAULT


@dataclass(frozen=True, eq=False)
class Audit:
    """How calibrated a network is, without calibration and after each method."""

    scores: Scores
    """Of the uncalibrated network ("raw") and of each method on the test rows, with paired changes."""
    choice: Choice
    """Of one method among those that were compared, by their losses on held-out calibration rows."""
    chosen: str
    """The simplest method within a standard error of the least cross-validated loss, perhaps "raw"; never by test."""
    losses: Mapping[str, tuple[float, float]]
    """Cross-validated negative log-likelihood on the calibration rows, and its standard error."""
    calibrators: Mapping[str, Calibrator]
    """Fitted on all calibration rows."""
    pairs: Mapping[str, Pair]
    """Test predictions as checked tensors; without test rows, each row's by a calibrator fitted on the other folds."""
    seconds: Mapping[str, float]
    failures: Mapping[str, str]
    """Why a method could not be fitted."""
    warnings: Mapping[str, tuple[str, ...]]
    """Of the fits that succeeded."""
    calibration_rows: int
    cross_fitted: bool
    folds: int
    bins: int
    seed: int
    weights: np.ndarray | None = None
    """Of the rows that were scored, with a mean of 1."""
    clusters: Clusters | None = None
    """Of the rows that were scored."""

    @cached_property
    def predictions(self) -> Mapping[str, Predictions]:
        """Test predictions as NumPy arrays."""
        labels = self.pairs[RAW][1].cpu().numpy()
        arrays = {name: Predictions(z.cpu().numpy(), labels) for name, (z, _) in self.pairs.items()}
        return MappingProxyType(arrays)

    def verdict(self) -> str:
        """How the network's confidence compares with its accuracy, and what a method improves, in a few sentences."""
        return _verdict(self)

    def __repr__(self) -> str:
        return f"Audit({len(self.scores.methods)} methods, chosen {self.chosen!r}: {self.verdict()})"

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.verdict())}</p>{self.scores._repr_html_()}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "schema": 1,
            "verdict": self.verdict(),
            "chosen": self.chosen,
            "titles": {name: method_title(name) for name in (*self.scores.methods, *self.failures)},
            "losses": {name: {"nll": loss, "error": error} for name, (loss, error) in self.losses.items()},
            "seconds": dict(self.seconds),
            "failures": dict(self.failures),
            "warnings": {name: list(messages) for name, messages in self.warnings.items()},
            "calibration_rows": self.calibration_rows,
            "cross_fitted": self.cross_fitted,
            "folds": self.folds,
            "bins": self.bins,
            "seed": self.seed,
            "scores": self.scores.to_dict(),
        }


def audit(
    val: tuple[Any, Any],
    test: tuple[Any, Any] | None = None,
    *,
    methods: Iterable[str] | Mapping[str, Fit] | None = None,
    event: int | str | None = None,
    names: Sequence[str] | None = None,
    bins: int = BINS,
    folds: int = 5,
    level: float = 0.95,
    seed: int = 0,
    weights: Any = None,
    test_weights: Any = None,
    groups: Any = None,
    clusters: Any = None,
    test_clusters: Any = None,
    extra: Mapping[str, tuple[Any, Any]] | None = None,
    on_step: Callable[[str, int, int], None] | None = None,
    progress: bool = True,
) -> Audit:
    """Fit every method on the calibration pair, choose one by cross-validation there, and score all on the test pair.

    Without a test pair every row is scored by a calibrator fitted on the other folds. The choice is that of
    `compose.simplest`: of the methods, the simplest first, the first whose cross-validated loss is within a standard
    error of the least. A method that fails is recorded, and the others go on. `extra` adds test predictions that were
    made elsewhere to the same table. `event`, a class or with `names` of the classes one of them, makes it an audit of
    the probability of that class, and two classes are always one of class 1: the methods are then fitted to the pairs
    of `as_event`. `on_step(name, done, total)` is called before each method is fitted. `weights` and
    `test_weights` have one number a row of each pair; `groups`, of the rows that are scored, are those of `compare`.
    `clusters` and `test_clusters` say which rows are correlated, as those of `compare`: folds keep them together.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> result = audit((3 * z[:1000], y[:1000]), (3 * z[1000:], y[1000:]), methods=["temperature", "vector"])
    >>> result.chosen
    'temperature'
    >>> print(result.verdict())
    This network is overconfident: its mean confidence is 82 %, its accuracy 62 %. Temperature scaling calibrates it:
    the calibration error (ECE) falls from 0.207 to 0.032.
    """
    if isinstance(folds, bool) or not isinstance(folds, int) or folds < 2:
        raise ValueError(f"folds must be a whole number of at least 2, got {folds!r}")
    val_pair = _as_pair(val, event, names, at_least=2 * folds)
    classes = val_pair[0].shape[1]
    others = dict(extra or {})
    if event is not None:
        from trueup.core.conversion import as_event

        others = {name: as_event(*pair, event, names=names) for name, pair in others.items()}
    fits = _fits(methods_for(*val_pair[0].shape) if methods is None else methods, others)
    test_pair = val_pair if test is None else _as_pair(test, event, names, at_least=1)
    if test_pair[0].shape[1] != classes:
        raise ValueError(f"test must have the {classes} classes of the calibration rows, got {test_pair[0].shape[1]}")
    w = as_weights(weights, len(val_pair[0]))
    scored_weights = w if test is None else as_weights(test_weights, len(test_pair[0]))
    together = as_clusters(clusters, len(val_pair[0]), at_least=2)
    scored_clusters = clusters if test is None else test_clusters
    if test is not None and (clusters is None) != (test_clusters is None):
        raise InputError("test_clusters", "come with clusters, and clusters with test_clusters", "one of them")
    runs = _Runs(val_pair, None if test is None else test_pair, folds, w, together)
    runs.pairs[RAW] = test_pair
    runs.losses[RAW] = score_rows(*val_pair).nll
    for done, (name, fit) in enumerate(track(list(fits.items()), label="fitting", enabled=progress)):
        if on_step is not None:
            on_step(name, done, len(fits))
        runs.add(name, fit)
    wanted = tuple(dict.fromkeys((*EVENT_TABLE, *TABLE))) if classes == 2 else TABLE
    options: dict[str, Any] = {"bins": bins, "level": level, "seed": seed}
    options |= {"weights": scored_weights, "groups": groups, "clusters": scored_clusters}
    scores = compare({**runs.pairs, **others}, metrics=wanted, **options)
    if scores.is_event:
        scores = replace(scores, event_name=event_name(event, np.shape(val[0])[1], names))
    for name, pair in others.items():
        runs.pairs[name] = trusted_tensors(*pair)
    chosen = simplest(runs.losses, weights=w, clusters=together)
    return Audit(
        scores=scores,
        choice=record_choice(runs.losses, chosen, raw=RAW, reasons=runs.failures, weights=w, clusters=together),
        chosen=chosen,
        losses=MappingProxyType({name: _mean_and_error(losses, w, together) for name, losses in runs.losses.items()}),
        calibrators=MappingProxyType(runs.calibrators),
        pairs=MappingProxyType(runs.pairs),
        seconds=MappingProxyType(runs.seconds),
        failures=MappingProxyType(runs.failures),
        warnings=MappingProxyType(runs.warnings),
        calibration_rows=len(val_pair[0]),
        cross_fitted=test is None,
        folds=folds,
        bins=bins,
        seed=seed,
        weights=None if scored_weights is None else scored_weights / scored_weights.mean(),
        clusters=as_clusters(scored_clusters, len(test_pair[0])),
    )


class _Runs:
    """The results of the methods, which are added one after another."""

    def __init__(
        self, val: Pair, test: Pair | None, folds: int, weights: np.ndarray | None, clusters: Clusters | None
    ) -> None:
        self.val, self.test, self.folds, self.clusters = val, test, folds, clusters
        self.options = {} if weights is None else {"weights": weights}
        self.losses: dict[str, np.ndarray] = {}
        self.calibrators: dict[str, Calibrator] = {}
        self.pairs: dict[str, Pair] = {}
        self.seconds: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.warnings: dict[str, tuple[str, ...]] = {}

    def add(self, name: str, fit: Fit) -> None:
        started = perf_counter()
        with record_warnings() as messages:
            try:
                self._fit(name, fit)
            except Exception as error:
                self.failures[name] = _reason(error)
        self.seconds[name] = perf_counter() - started
        if messages:
            self.warnings[name] = tuple(messages)

    def _fit(self, name: str, fit: Fit) -> None:
        z, y = self.val
        cross_fitted = cross_fit(_apply_in_chunks(fit), folds=self.folds)(z, y, **self.options, clusters=self.clusters)
        held_out = as_tensors(cross_fitted, y)
        loss = score_rows(*held_out).nll
        together = {"clusters": self.clusters} if self.clusters is not None and takes(fit, "clusters") else {}
        calibrator = fit(z, y, **self.options, **together)
        after = held_out if self.test is None else as_tensors(_apply(calibrator, self.test[0]), self.test[1])
        self.losses[name], self.calibrators[name], self.pairs[name] = loss, calibrator, after


_CHUNK = 1 << 18  # logits to which a calibrator is applied at a time: in the cache it is up to four times faster


def _apply(calibrator: Calibrator, logits: Tensor) -> Tensor:
    after = torch.empty_like(logits)
    rows = max(1, _CHUNK // logits.shape[1])
    for start in range(0, len(logits), rows):
        after[start : start + rows] = calibrator(logits[start : start + rows])
    return after


def _apply_in_chunks(fit: Fit) -> Callable[..., Any]:
    return lambda logits, labels, **options: partial(_apply, fit(logits, labels, **options))


def _fits(methods: Iterable[str] | Mapping[str, Fit], extra: Mapping[str, Any]) -> dict[str, Fit]:
    if isinstance(methods, str):
        raise ValueError(f"methods must be several names, such as ({methods!r},), got {methods!r}")
    if not isinstance(methods, Mapping):
        names = list(dict.fromkeys(methods))
        unknown = [name for name in names if name not in METHODS and name != RAW]
        if unknown:
            raise ValueError(f"methods must be names of METHODS, got {unknown[0]!r}; there are: {', '.join(METHODS)}")
        methods = {name: METHODS[name] for name in names if name not in (RAW, "identity")}
    for name in extra:
        if name == RAW or name in methods:
            raise ValueError(f"extra must have names of its own, got {name!r}, which is there already")
    return dict(methods)


def _mean_and_error(losses: np.ndarray, weights: np.ndarray | None, clusters: Clusters | None) -> tuple[float, float]:
    mean = float(np.average(losses, weights=weights))
    if clusters is not None:
        return mean, mean_error(*block_sums(losses, weights, clusters))
    spread = np.sqrt(np.average((losses - mean) ** 2, weights=weights))
    return mean, float(spread / np.sqrt(effective_rows(weights, len(losses))))


def _as_pair(pair: tuple[Any, Any], event: int | str | None, names: Sequence[str] | None, *, at_least: int) -> Pair:
    """Checked tensors, half precision as float32; the labels a copy, since they are indices and outlast the call."""
    z, y = as_tensors(*pair, at_least=at_least)
    z, y = upcast_half(z), y.clone()
    if event is None:
        return as_tensors(z, y)
    from trueup.core.conversion import as_event  # most audits are of no event

    return as_tensors(*as_event(z, y, event, names=names))


def _reason(error: Exception) -> str:
    message = " ".join(str(error).split())
    if isinstance(error, ValueError) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def _verdict(audit: Audit) -> str:
    scores, chosen = audit.scores, audit.chosen
    claim, outcome = ("predicted", "observed") if scores.is_event else ("confidence", "accuracy")
    confidence, accuracy = (scores[RAW, metric].value for metric in (claim, outcome))
    before = scores[RAW, "ece"].value
    close = abs(confidence - accuracy) < 0.01
    digits = 1 if close or max(confidence, accuracy) >= 0.995 else 0  # no accuracy is 100 % by rounding
    shares = (format_percent(share, digits) for share in (confidence, accuracy))
    about = f"its mean predicted probability of {scores.event_name} is {{}}, the observed rate {{}}"
    means = (about if scores.is_event else "its mean confidence is {}, its accuracy {}").format(*shares)
    if scores.tests[RAW].p_value > 0.05:
        opening = f"No miscalibration of this network is statistically significant: {means}."
        if few := scores.too_few_rows(RAW):
            opening += f" {few} too few to tell."
        if chosen == RAW:
            return f"{opening} No calibration is shown to be needed."
        if scores.changes[chosen]["nll"].high >= 0:
            return f"{opening} No method improves it significantly."
        losses = "from {:.3f} to {:.3f}".format(*(scores[name, "nll"].value for name in (RAW, chosen)))
        return f"{opening} {method_title(chosen)} still lowers its log-loss {losses}."
    if scores.is_event:
        opening = f"On these rows {means}: {event_direction(scores.tests[RAW])}."
    elif close:
        opening = (
            f"On average this network's confidence is right ({means}), but it is overconfident in some predictions and "
            "underconfident in others."
        )
    else:
        side = "overconfident" if confidence > accuracy else "underconfident"
        opening = f"This network is {side}: {means}."
    if chosen == RAW:
        tried = len(audit.calibrators)
        none = "The one method tried is not" if tried == 1 else f"None of the {tried} methods is"
        return f"{opening} {none} shown to help." if tried else f"{opening} No method could be tried."
    after, change = scores[chosen, "ece"].value, scores.changes[chosen]["ece"]
    if change.high >= 0:
        return (
            f"{opening} {method_title(chosen)} is chosen by cross-validated log-loss, but the change of the "
            f"calibration error (ECE) is not statistically significant: {before:.3f} before, {after:.3f} after."
        )
    calibrated = scores.tests[chosen].p_value > 0.05
    how = "calibrates it" if calibrated else "removes most of this" if after < before / 2 else "removes part of this"
    fall = f"the calibration error (ECE) falls from {before:.3f} to {after:.3f}"
    return f"{opening} {method_title(chosen)} {how}: {fall}."
