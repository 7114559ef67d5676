"""An audit: how calibrated a network is, which method calibrates it best, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from trueup._core.arrays import as_arrays, as_weights, effective_rows, trusted_arrays, upcast_half
from trueup._core.bins import BINS
from trueup._core.clusters import Clusters, as_clusters, block_sums, mean_error
from trueup._core.errors import InputError, record_warnings
from trueup._core.formatting import escape, format_percent
from trueup._core.progress import track
from trueup._core.registry import METHODS
from trueup._core.row_scores import score_rows
from trueup.calibrators.auto import MANY_CLASSES
from trueup.calibrators.base import Calibrator
from trueup.calibrators.compose import Choice, Fit, cross_fit, record_choice, simplest, takes
from trueup.io.predictions import Predictions
from trueup.metrics.table import DEFAULT as TABLE
from trueup.metrics.table import EVENT_DEFAULT as EVENT_TABLE
from trueup.metrics.table import Scores, compare, event_direction

Pair = tuple[np.ndarray, np.ndarray]
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
    """The title of a method in the registry; other names stay as they are.

    >>> method_title("temperature"), method_title("my own")
    ('Temperature scaling', 'my own')
    """
    return _TITLES.get(name) or METHODS.title(name)


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
    """Test predictions as checked arrays; without test rows, each row's by a calibrator fitted on the other folds."""
    seconds: Mapping[str, float]
    failures: Mapping[str, str]
    """Why a method could not be fitted."""
    warnings: Mapping[str, tuple[str, ...]]
    """Of the fits that succeeded."""
    calibration_rows: int
    cross_fitted: bool
    n_folds: int
    bins: int
    seed: int
    sample_weight: np.ndarray | None = None
    """Of the rows that were scored, with a mean of 1."""
    clusters: Clusters | None = None
    """Of the rows that were scored."""

    @cached_property
    def predictions(self) -> Mapping[str, Predictions]:
        """Test predictions as NumPy arrays."""
        labels = self.pairs[RAW][1]
        return MappingProxyType({name: Predictions(z, labels) for name, (z, _) in self.pairs.items()})

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
            "n_folds": self.n_folds,
            "bins": self.bins,
            "seed": self.seed,
            "scores": self.scores.to_dict(),
        }


class Rows(NamedTuple):
    """A checked pair, with what is known of its rows."""

    logits: np.ndarray
    labels: np.ndarray
    sample_weight: np.ndarray | None
    clusters: Clusters | None

    @classmethod
    def of(
        cls, pair: tuple[Any, Any], sample_weight: Any, clusters: Any, *, event: Event | None, at_least: int
    ) -> Rows:
        """Check them; half precision becomes float32, and the labels a copy, since they outlast the call."""
        z, y = as_arrays(*pair, at_least=at_least)
        z, y = upcast_half(z), y.copy()
        z, y = as_arrays(*((z, y) if event is None else event.of(z, y)))
        return cls(z, y, as_weights(sample_weight, len(z)), as_clusters(clusters, len(z), at_least=2))

    @property
    def pair(self) -> Pair:
        """Logits and labels."""
        return self.logits, self.labels


class Event(NamedTuple):
    """The class whose probability an audit is about."""

    event: int | str
    class_names: Sequence[str] | None

    def of(self, logits: Any, labels: Any) -> Any:
        """The pair of two classes: it happens or not."""
        from trueup.convert import as_event  # most audits are of no event

        return as_event(logits, labels, self.event, class_names=self.class_names)


@dataclass(frozen=True)
class Settings:
    """How methods are compared."""

    bins: int = BINS
    n_folds: int = 5
    level: float = 0.95
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.n_folds, bool) or not isinstance(self.n_folds, int) or self.n_folds < 2:
            raise InputError("n_folds", "be a whole number of at least 2", repr(self.n_folds))


def run_audit(
    val: Rows,
    test: Rows | None,
    fits: Mapping[str, Fit],
    *,
    settings: Settings,
    groups: Any = None,
    extra: Mapping[str, tuple[Any, Any]] | None = None,
    on_step: Callable[[str, int, int], None] | None = None,
    progress: bool = True,
) -> Audit:
    """Fit every method to the calibration rows, choose one by cross-validation there, and score all on the test rows.

    Without test rows every row is scored by a calibrator fitted to the other folds. The choice is that of
    `compose.simplest`: of the methods, the simplest first, the first whose cross-validated loss is within a standard
    error of the least. A method that fails is recorded, and the others go on.
    """
    scored, classes = test or val, val.logits.shape[1]
    if scored.logits.shape[1] != classes:
        raise ValueError(f"test must have the {classes} classes of the calibration rows, got {scored.logits.shape[1]}")
    if (val.clusters is None) != (scored.clusters is None):
        raise InputError("test_clusters", "come with clusters, and clusters with test_clusters", "one of them")
    runs = _Runs(val, test, settings.n_folds)
    for done, (name, fit) in enumerate(track(list(fits.items()), label="fitting", enabled=progress)):
        if on_step is not None:
            on_step(name, done, len(fits))
        runs.add(name, fit)
    extra = extra or {}
    scores = compare(
        {**runs.pairs, **extra},
        metrics=tuple(dict.fromkeys((*EVENT_TABLE, *TABLE))) if classes == 2 else TABLE,
        bins=settings.bins,
        level=settings.level,
        seed=settings.seed,
        sample_weight=scored.sample_weight,
        groups=groups,
        clusters=scored.clusters,
    )
    pairs = runs.pairs | {name: trusted_arrays(*pair) for name, pair in extra.items()}
    by_row: dict[str, Any] = {"sample_weight": val.sample_weight, "clusters": val.clusters}
    chosen = simplest(runs.losses, **by_row)
    return Audit(
        scores=scores,
        choice=record_choice(runs.losses, chosen, raw=RAW, reasons=runs.failures, **by_row),
        chosen=chosen,
        losses=MappingProxyType({name: _mean_and_error(losses, **by_row) for name, losses in runs.losses.items()}),
        calibrators=MappingProxyType(runs.calibrators),
        pairs=MappingProxyType(pairs),
        seconds=MappingProxyType(runs.seconds),
        failures=MappingProxyType(runs.failures),
        warnings=MappingProxyType(runs.warnings),
        calibration_rows=len(val.labels),
        cross_fitted=test is None,
        n_folds=settings.n_folds,
        bins=settings.bins,
        seed=settings.seed,
        sample_weight=None if scored.sample_weight is None else scored.sample_weight / scored.sample_weight.mean(),
        clusters=scored.clusters,
    )


class _Runs:
    """The results of the methods, which are added one after another."""

    def __init__(self, val: Rows, test: Rows | None, n_folds: int) -> None:
        self.val, self.test, self.n_folds = val, test, n_folds
        self.options = {} if val.sample_weight is None else {"sample_weight": val.sample_weight}
        self.losses: dict[str, np.ndarray] = {RAW: score_rows(*val.pair).nll}
        self.calibrators: dict[str, Calibrator] = {}
        self.pairs: dict[str, Pair] = {RAW: (test or val).pair}
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
        z, y, _, clusters = self.val
        cross_fitted = cross_fit(fit, n_folds=self.n_folds)(z, y, **self.options, clusters=clusters)
        held_out = as_arrays(cross_fitted, y)
        loss = score_rows(*held_out).nll
        by_cluster = {"clusters": clusters} if clusters is not None and takes(fit, "clusters") else {}
        calibrator = fit(z, y, **self.options, **by_cluster)
        after = held_out
        if self.test is not None:
            after = as_arrays(calibrator(self.test.logits), self.test.labels)
        self.losses[name], self.calibrators[name], self.pairs[name] = loss, calibrator, after


def fits_of(methods: Iterable[str] | Mapping[str, Fit], extra: Mapping[str, Any]) -> dict[str, Fit]:
    """Methods by name; predictions made elsewhere must have names of their own."""
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


def _mean_and_error(
    losses: np.ndarray, sample_weight: np.ndarray | None, clusters: Clusters | None
) -> tuple[float, float]:
    mean = float(np.average(losses, weights=sample_weight))
    if clusters is not None:
        return mean, mean_error(*block_sums(losses, sample_weight, clusters))
    spread = np.sqrt(np.average((losses - mean) ** 2, weights=sample_weight))
    return mean, float(spread / np.sqrt(effective_rows(sample_weight, len(losses))))


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
