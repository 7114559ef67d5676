"""The whole question at once: how calibrated is a network, which method repairs it best, and by how much."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueup.calibrators.auto import MANY_CLASSES
from trueup.calibrators.base import Calibrator
from trueup.calibrators.compose import Fit, cross_fit, simplest
from trueup.core.arrays import as_logits, as_tensors, upcast_half
from trueup.core.bins import BINS
from trueup.core.progress import track
from trueup.core.row_scores import score_rows
from trueup.core.warning_capture import record_warnings
from trueup.io.predictions import Predictions
from trueup.metrics.table import Scores, compare
from trueup.registry import METHODS
from trueup.report.method_titles import RAW, title
from trueup.report.verdict import verdict

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
"""What is tried unless told otherwise, the simplest first: the best of each kind."""
FEW_CLASSES = 20
SLOW = ("dirichlet_odir",)
"""Tried as well where there are no more than that many classes."""
FAST = ("temperature", "histogram", "isotonic", "svs")
"""What is tried on very many numbers."""
MANY = 5_000_000
"""Logits from which on they are very many."""


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
    """What was found of a network and of every repair that was tried."""

    scores: Scores
    """Of the network as it is ("raw") and of each method on the test rows, with paired changes."""
    chosen: str
    """The simplest method within a standard error of the least cross-validated loss, perhaps "raw"; never by test."""
    losses: Mapping[str, tuple[float, float]]
    """Cross-validated negative log-likelihood on the calibration rows, and its standard error."""
    calibrators: Mapping[str, Calibrator]
    """Fitted on all calibration rows."""
    predictions: Mapping[str, Predictions]
    """On the test rows; where there are none apart, each row's by a calibrator that has not seen it."""
    seconds: Mapping[str, float]
    failures: Mapping[str, str]
    """Why a method could not be fitted."""
    warnings: Mapping[str, tuple[str, ...]]
    """What a fit that ended well had to say."""
    calibration_rows: int
    cross_fitted: bool
    folds: int
    bins: int
    seed: int

    def verdict(self) -> str:
        """One or two sentences in plain words."""
        return verdict(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "schema": 1,
            "verdict": self.verdict(),
            "chosen": self.chosen,
            "titles": {name: title(name) for name in (*self.scores.methods, *self.failures)},
            "losses": {name: {"nll": loss, "error": error} for name, (loss, error) in self.losses.items()},
            "seconds": dict(self.seconds),
            "failures": dict(self.failures),
            "warnings": {name: list(said) for name, said in self.warnings.items()},
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
    bins: int = BINS,
    folds: int = 5,
    level: float = 0.95,
    seed: int = 0,
    extra: Mapping[str, tuple[Any, Any]] | None = None,
    on_step: Callable[[str, int, int], None] | None = None,
    progress: bool = True,
) -> Audit:
    """Fit every method on the calibration pair, choose one by cross-validation there, and score all on the test pair.

    Without a test pair every row is scored by a calibrator that has not seen it. The choice is that of
    `combine.simplest`: of the methods, the simplest first, the first whose cross-validated loss is within a standard
    error of the least. A method that fails is recorded, and the others go on. `extra` puts test predictions that were
    made elsewhere into the same table. `on_step(name, done, total)` is called before each method is fitted.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> found = audit((3 * z[:1000], y[:1000]), (3 * z[1000:], y[1000:]), methods=["temperature", "vector"])
    >>> found.chosen
    'temperature'
    >>> print(found.verdict())
    This network says 82 % when it is right 62 % of the time. Temperature scaling repairs it: its calibration error
    (ECE) falls from 0.207 to 0.032.
    """
    if isinstance(folds, bool) or not isinstance(folds, int) or folds < 2:
        raise ValueError(f"folds must be a whole number of at least 2, got {folds!r}")
    z, y = _computable(*as_tensors(*val, at_least=2 * folds))
    fits = _fits(methods_for(*z.shape) if methods is None else methods, extra or {})
    shown = (z, y) if test is None else _computable(*as_tensors(*test, at_least=1))
    if shown[0].shape[1] != z.shape[1]:
        raise ValueError(f"test must have the {z.shape[1]} classes of the calibration rows, got {shown[0].shape[1]}")
    truth = shown[1].cpu().numpy()
    made = _Made(fits, (z, y), None if test is None else shown[0], folds, truth)
    made.predictions[RAW] = Predictions(shown[0].cpu().numpy(), truth)
    made.losses[RAW] = score_rows(z, y).nll
    for done, name in enumerate(track(list(fits), label="fitting", enabled=progress)):
        if on_step is not None:
            on_step(name, done, len(fits))
        made.add(name)
    for name, pair in (extra or {}).items():
        made.predictions[name] = Predictions(*pair)
    scores = compare(made.predictions, bins=bins, level=level, seed=seed)
    return Audit(
        scores=scores,
        chosen=simplest(made.losses),
        losses=MappingProxyType({name: _mean_and_error(found) for name, found in made.losses.items()}),
        calibrators=MappingProxyType(made.calibrators),
        predictions=MappingProxyType(made.predictions),
        seconds=MappingProxyType(made.seconds),
        failures=MappingProxyType(made.failures),
        warnings=MappingProxyType(made.warnings),
        calibration_rows=len(z),
        cross_fitted=test is None,
        folds=folds,
        bins=bins,
        seed=seed,
    )


class _Made:
    """What the methods gave, one after another."""

    def __init__(
        self, fits: Mapping[str, Fit], val: tuple[Tensor, Tensor], test: Tensor | None, folds: int, truth: np.ndarray
    ) -> None:
        self.fits, self.val, self.test, self.folds, self.truth = fits, val, test, folds, truth
        self.losses: dict[str, np.ndarray] = {}
        self.calibrators: dict[str, Calibrator] = {}
        self.predictions: dict[str, Predictions] = {}
        self.seconds: dict[str, float] = {}
        self.failures: dict[str, str] = {}
        self.warnings: dict[str, tuple[str, ...]] = {}

    def add(self, name: str) -> None:
        started = perf_counter()
        with record_warnings() as messages:
            try:
                self._fit(name)
            except Exception as error:
                self.failures[name] = _reason(error)
        self.seconds[name] = perf_counter() - started
        if messages:
            self.warnings[name] = tuple(messages)

    def _fit(self, name: str) -> None:
        fit, (z, y) = self.fits[name], self.val
        held_out = as_logits(cross_fit(_applied_in_parts(fit), folds=self.folds)(z, y))
        loss = score_rows(held_out, y).nll
        calibrator = fit(z, y)
        after = held_out if self.test is None else as_logits(_apply(calibrator, self.test))
        self.losses[name], self.calibrators[name] = loss, calibrator
        self.predictions[name] = Predictions(after.cpu().numpy(), self.truth)


_PART = 1 << 18  # logits to which a calibrator is applied at a time: what stays in the cache is up to four times faster


def _apply(calibrator: Calibrator, logits: Tensor) -> Tensor:
    after = torch.empty_like(logits)
    step = max(1, _PART // logits.shape[1])
    for start in range(0, len(logits), step):
        after[start : start + step] = calibrator(logits[start : start + step])
    return after


def _applied_in_parts(fit: Fit) -> Callable[[Tensor, Tensor], Any]:
    return lambda logits, labels: partial(_apply, fit(logits, labels))


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


def _mean_and_error(losses: np.ndarray) -> tuple[float, float]:
    return float(losses.mean()), float(losses.std() / np.sqrt(len(losses)))


def _computable(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    return upcast_half(logits), labels


def _reason(error: Exception) -> str:
    said = " ".join(str(error).split())
    if isinstance(error, ValueError) and said:
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
