"""An audit measures a network's calibration, fits calibration methods, and chooses one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from time import perf_counter
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from trueup._core.arrays import as_arrays, as_weights, trusted_arrays, upcast_half
from trueup._core.clusters import Clusters, as_clusters
from trueup._core.errors import InputError, record_warnings
from trueup._core.formatting import Row, escape, format_number, format_p, format_percent
from trueup._core.progress import track
from trueup._core.registry import METHODS
from trueup._core.row_scores import score_rows
from trueup.calibrators.auto import MANY_CLASSES
from trueup.calibrators.base import Calibrator
from trueup.calibrators.compose import (
    Choice,
    Fit,
    accepts_option,
    cross_fit,
    record_choice,
    simplest,
    standard_error,
    weighted_mean,
)
from trueup.io.predictions import Predictions
from trueup.metrics.table import DEFAULT as TABLE
from trueup.metrics.table import EVENT_DEFAULT as EVENT_TABLE
from trueup.metrics.table import Scores, compare, confidence_direction, event_direction

Pair = tuple[np.ndarray, np.ndarray]
"""Logits (n, classes) and labels (n,), checked."""
EventPair = Callable[[Any, Any], tuple[Any, Any]]
"""Converts the logits and labels of a classification to those of an event."""

RAW = "raw"
"""Name of the uncalibrated network among the methods."""
# Titles of names that are compared with METHODS but are none of them
_ERRORS = {"ece": "calibration error (ECE)", "nll": "log-loss"}
"""Metrics whose fall the verdict reports, the first one that fell significantly."""
_TITLES = {RAW: "No calibration", "clamping": "Neural Clamping"}

DEFAULT = ("temperature", "ets", "histogram", "isotonic", "spline", "svs", "vector", "sms", "diagonal_sms")
"""Default methods, the simplest first: the best of each kind."""
MAX_CLASSES_FOR_SLOW = 20
SLOW = ("dirichlet_odir",)
"""Further methods for at most `MAX_CLASSES_FOR_SLOW` classes."""
FAST = ("temperature", "histogram", "isotonic", "svs")
"""Methods for at least `MIN_LOGITS_FOR_FAST` logits."""
MIN_LOGITS_FOR_FAST = 5_000_000
MAX_LOGITS_FOR_AUTO = 100_000
"""Largest number of logits for which a report includes `auto`, which is fitted six times, each time with folds."""


def method_title(name: str) -> str:
    """Return the title of a method in the registry; other names stay as they are.

    Parameters
    ----------
    name
        Name of the method.

    Returns
    -------
    str
        The title.

    Examples
    --------
    >>> method_title("temperature"), method_title("my own")
    ('Temperature scaling', 'my own')
    """
    return _TITLES.get(name) or METHODS.title(name)


def percent(share: float, digits: int = 1) -> str:
    """Return a share as a percentage, or a dash for NaN; near 0 and 1 with more digits, which tell it from them.

    >>> percent(0.9287), percent(0.00034), percent(0.99996)
    ('92.9 %', '0.034 %', '99.9960 %')
    """
    distance = min(share, 1 - share)  # from the nearer end
    if digits == 1 and 0 < distance < 0.01:
        digits = min(1 - math.floor(math.log10(100 * distance) + 1e-9), 6)
    return "–" if np.isnan(share) else format_percent(share, digits)


def methods_for(rows: int, classes: int, *, auto: bool = False) -> tuple[str, ...]:
    """Return the methods to try: `DEFAULT`, plus `SLOW` for a small number of classes, or `FAST` for large data.

    With `auto`, the automatic choice is added up to `MAX_LOGITS_FOR_AUTO` logits.

    >>> methods_for(5_000, 100) == DEFAULT, methods_for(50_000, 1000) == FAST
    (True, True)
    """
    if rows * classes >= MIN_LOGITS_FOR_FAST or classes > MANY_CLASSES:
        return FAST
    pooled = ("auto",) if auto and rows * classes <= MAX_LOGITS_FOR_AUTO else ()
    return DEFAULT + (SLOW if classes <= MAX_CLASSES_FOR_SLOW else ()) + pooled


@dataclass(frozen=True, eq=False)
class Audit:
    """Scores of a network without calibration and after each method, and the chosen method."""

    scores: Scores
    """Scores of the uncalibrated network ("raw") and of each method on the test rows, with paired changes."""
    choice: Choice
    """Record of the choice, by losses on held-out calibration rows."""
    chosen: str
    """Simplest method whose cross-validated loss is within a standard error of the lowest; it may be "raw"."""
    losses: Mapping[str, tuple[float, float]]
    """Cross-validated negative log-likelihood of each method on the calibration rows, and its standard error."""
    calibrators: Mapping[str, Calibrator]
    """Calibrators fitted to all calibration rows."""
    pairs: Mapping[str, Pair]
    """Logits after each method, and labels, of the scored rows; without test rows, from cross-fitting."""
    seconds: Mapping[str, float]
    """Fitting time of each method."""
    failures: Mapping[str, str]
    """Methods that could not be fitted, with the reason."""
    warnings: Mapping[str, tuple[str, ...]]
    """Warnings of the fits that succeeded."""
    calibration_rows: int
    """Number of rows in the calibration set."""
    cross_fitted: bool
    """Whether each row was scored by a calibrator fitted to the other folds."""
    n_folds: int
    """Number of folds of the choice."""
    bins: int
    """Number of bins."""
    seed: int
    """Seed of the resampling."""
    sample_weight: np.ndarray | None = None
    """Weights of the scored rows, with a mean of 1."""
    clusters: Clusters | None = None
    """Clusters of the scored rows."""

    @cached_property
    def predictions(self) -> Mapping[str, Predictions]:
        """Predictions of each method on the scored rows."""
        labels = self.pairs[RAW][1]
        return MappingProxyType({name: Predictions(z, labels) for name, (z, _) in self.pairs.items()})

    def verdict(self) -> str:
        """Return sentences that compare confidence with accuracy and say what the chosen method improves."""
        scores, chosen = self.scores, self.chosen
        confidence, accuracy = (scores[RAW, metric].value for metric in mean_metrics(scores))
        before = scores[RAW, "ece"].value
        event = f"its mean predicted probability of {scores.event_name} is {{}}, the observed rate {{}}"
        means = event if scores.is_event else "its mean confidence is {}, its accuracy {}"
        means = means.format(percent(confidence), percent(accuracy))
        if scores.tests[RAW].p_value > 0.05:
            opening = f"No miscalibration of this network is statistically significant: {means}."
            if few := scores.too_few_rows(RAW):
                opening += f" {few} too few to tell."
            if chosen == RAW:
                return f"{opening} The data do not show that calibration is needed."
            if scores.changes[chosen]["nll"].high >= 0:
                return f"{opening} No method improves it significantly."
            losses = "from {:.4f} to {:.4f}".format(*(scores[name, "nll"].value for name in (RAW, chosen)))
            return f"{opening} {method_title(chosen)} still lowers its log-loss {losses}."
        if scores.is_event:
            opening = f"This forecast is miscalibrated: {means}; {event_direction(scores.tests[RAW])}."
        else:
            direction = confidence_direction(scores.tests[RAW])
            if direction.startswith(" and "):
                opening = f"This network is {direction.removeprefix(' and ')}: {means}."
            else:
                opening = f"This network is miscalibrated{direction} ({means})."
        if chosen == RAW:
            tried = len(self.calibrators)
            none = "The one method tried is not" if tried == 1 else f"None of the {tried} methods is"
            return f"{opening} {none} shown to help." if tried else f"{opening} No method could be tried."
        lowered = [metric for metric in _ERRORS if scores.changes[chosen][metric].high < 0]
        if not lowered:
            after = scores[chosen, "ece"].value
            return (
                f"{opening} {method_title(chosen)} is chosen by cross-validated log-loss, but the change of the "
                f"calibration error (ECE) is not statistically significant: {before:.4f} before, {after:.4f} after."
            )
        before, after = (scores[name, lowered[0]].value for name in (RAW, chosen))
        effect = "removes most of this" if lowered[0] == "ece" and after < before / 2 else "removes part of this"
        test, expected = scores.tests[chosen], ""
        if test.p_value > 0.05 and not scores.too_few_rows(chosen):
            effect = "calibrates it"
            if lowered[0] == "ece":
                expected = f", where {test.expected:.4f} is expected by chance"
            expected += f" ({format_p(test.p_value)})"
        fall = f"the {_ERRORS[lowered[0]]} falls from {before:.4f} to {after:.4f}{expected}"
        return f"{opening} {method_title(chosen)} {effect}: {fall}."

    def __repr__(self) -> str:
        return f"Audit({len(self.scores.methods)} methods, chosen {self.chosen!r}: {self.verdict()})"

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.verdict())}</p>{self.scores._repr_html_()}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return describe_audit(
            self,
            ("calibration_rows", "cross_fitted", "n_folds", "bins", "seed"),
            titles={name: method_title(name) for name in (*self.scores.methods, *self.failures)},
            losses={name: {"nll": loss, "error": error} for name, (loss, error) in self.losses.items()},
            seconds=dict(self.seconds),
            failures=dict(self.failures),
            warnings={name: list(messages) for name, messages in self.warnings.items()},
        )


def describe_audit(audit: Any, fields: Sequence[str], **parts: Any) -> dict[str, Any]:
    """Return an audit as plain data: its verdict, its choice, these parts and fields, and its scores."""
    head = {"schema": 1, "verdict": audit.verdict(), "chosen": audit.chosen}
    return head | parts | {name: getattr(audit, name) for name in fields} | {"scores": audit.scores.to_dict()}


def mean_metrics(scores: Scores) -> tuple[str, str]:
    """Return the metrics with the mean prediction and the mean outcome."""
    return ("predicted", "observed") if scores.is_event else ("confidence", "accuracy")


def best_first(table: Sequence[Row], audit: Audit) -> list[Row]:
    """Sort a table of methods: the chosen one, the raw network, the others by held-out loss, which is a new column."""
    losses = {name: loss for name, (loss, _) in audit.losses.items()}
    (name, *columns), *rows = table
    rows.sort(key=lambda row: (row[0] != audit.chosen, row[0] != RAW, losses.get(row[0], math.inf)))
    cells = ([row[0], format_number(losses[row[0]]) if row[0] in losses else "–", *row[1:]] for row in rows)
    return [[name, "held-out", *columns], *cells]


class Rows(NamedTuple):
    """A checked pair, with the weights and clusters of its rows."""

    logits: np.ndarray
    labels: np.ndarray
    sample_weight: np.ndarray | None
    clusters: Clusters | None

    @classmethod
    def of(
        cls, pair: tuple[Any, Any], sample_weight: Any, clusters: Any, *, event: EventPair | None, min_rows: int
    ) -> Rows:
        """Check the arrays, convert half precision to float32, and copy the labels, which the audit keeps."""
        z, y = as_arrays(*pair, min_rows=min_rows)
        z, y = upcast_half(z), y.copy()
        z, y = as_arrays(*((z, y) if event is None else event(z, y)))
        return cls(z, y, as_weights(sample_weight, len(z)), as_clusters(clusters, len(z), min_clusters=2))


def run_audit(
    val: Rows,
    test: Rows | None,
    fits: Mapping[str, Fit],
    *,
    n_folds: int,
    scoring: Mapping[str, Any],
    extra: Mapping[str, tuple[Any, Any]],
    on_step: Callable[[str, int, int], None] | None,
    progress: bool,
) -> Audit:
    """Fit every method to the calibration rows, choose one by cross-validation there, and score all on the test rows.

    Without test rows, each row is scored by a calibrator fitted to the other folds. `compose.simplest` chooses the
    first method, in order of simplicity, whose cross-validated loss is within a standard error of the lowest. A method
    that fails is recorded, and the others go on.

    Parameters
    ----------
    val
        Calibration rows.
    test
        Test rows, or None.
    fits
        Methods by name, the simplest first.
    n_folds
        Number of folds.
    scoring
        Options of `compare`.
    extra
        Further test predictions by name.
    on_step
        Called as `on_step(name, done, total)` before each fit.
    progress
        Whether to show a progress bar.

    Returns
    -------
    Audit
        The audit.
    """
    z, y, sample_weight, clusters = val
    scored, classes = test or val, z.shape[1]
    if scored.logits.shape[1] != classes:
        raise ValueError(f"test must have the {classes} classes of the calibration rows, got {scored.logits.shape[1]}")
    if (clusters is None) != (scored.clusters is None):
        raise InputError("test_clusters", "come with clusters, and clusters with test_clusters", "one of them")
    losses: dict[str, np.ndarray] = {RAW: score_rows(z, y).nll}
    pairs: dict[str, Pair] = {RAW: scored[:2]}
    calibrators: dict[str, Calibrator] = {}
    seconds: dict[str, float] = {}
    failures: dict[str, str] = {}
    warnings: dict[str, tuple[str, ...]] = {}
    weights = {} if sample_weight is None else {"sample_weight": sample_weight}
    for done, (name, fit) in enumerate(track(list(fits.items()), label="fitting", enabled=progress)):
        if on_step is not None:
            on_step(name, done, len(fits))
        started = perf_counter()
        with record_warnings() as messages:
            try:
                if accepts_option(fit, "progress"):
                    fit = partial(fit, progress=False)
                held_out = as_arrays(cross_fit(fit, n_folds=n_folds)(z, y, **weights, clusters=clusters), y)
                loss = score_rows(*held_out).nll
                by_cluster = {"clusters": clusters} if clusters is not None and accepts_option(fit, "clusters") else {}
                calibrator = fit(z, y, **weights, **by_cluster)
                after = held_out if test is None else as_arrays(calibrator(test.logits), test.labels)
                losses[name], calibrators[name], pairs[name] = loss, calibrator, after
            except Exception as error:
                failures[name] = _reason(error)
        seconds[name] = perf_counter() - started
        if messages:
            warnings[name] = tuple(messages)
    scores = compare(
        {**pairs, **extra},
        metrics=tuple(dict.fromkeys((*EVENT_TABLE, *TABLE))) if classes == 2 else TABLE,
        sample_weight=scored.sample_weight,
        clusters=scored.clusters,
        **scoring,
    )
    pairs |= {name: trusted_arrays(*pair) for name, pair in extra.items()}
    by_row: dict[str, Any] = {"sample_weight": sample_weight, "clusters": clusters}
    chosen = simplest(losses, **by_row)
    means = {
        name: (weighted_mean(loss, sample_weight), standard_error(loss, **by_row)) for name, loss in losses.items()
    }
    return Audit(
        scores=scores,
        choice=record_choice(losses, chosen, raw=RAW, reasons=failures, **by_row),
        chosen=chosen,
        losses=MappingProxyType(means),
        calibrators=MappingProxyType(calibrators),
        pairs=MappingProxyType(pairs),
        seconds=MappingProxyType(seconds),
        failures=MappingProxyType(failures),
        warnings=MappingProxyType(warnings),
        calibration_rows=len(y),
        cross_fitted=test is None,
        n_folds=n_folds,
        bins=scoring["bins"],
        seed=scoring["seed"],
        sample_weight=None if scored.sample_weight is None else scored.sample_weight / scored.sample_weight.mean(),
        clusters=scored.clusters,
    )


def fits_of(methods: Iterable[str] | Mapping[str, Fit], extra: Mapping[str, Any]) -> dict[str, Fit]:
    """Return methods by name; the names of `extra` predictions must differ from them."""
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
            raise ValueError(f"the names of extra must differ from those of the methods, got {name!r}")
    return dict(methods)


def _reason(error: Exception) -> str:
    message = " ".join(str(error).split())
    if isinstance(error, ValueError) and message:
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__
