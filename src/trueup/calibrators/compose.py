"""Functions of methods: a method is a function from a pair to a calibrator, and so is what these return."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trueup.calibrators.base import Calibrator
from trueup.core.arrays import (
    NEVER,
    as_tensors,
    as_weighted,
    as_weights,
    fill_absent,
    find_absent,
    given,
    take_rows,
    take_weighted,
    upcast_half,
)
from trueup.core.clusters import Clusters, as_clusters, block_sums, mean_error, weighted_clusters
from trueup.core.errors import silence_warnings
from trueup.core.optimize import FitError
from trueup.core.row_scores import score_rows
from trueup.core.splits import k_fold
from trueup.registry import METHODS

Fit = Callable[..., Calibrator]
FOLDS = 5
"""Of `refinement`."""


class Chain(Calibrator):
    """One calibrator after another.

    >>> from trueup.calibrators.temperature import Temperature
    >>> Chain([Temperature(2.0), Temperature(3.0)])([[6.0, 0.0]])
    array([[1., 0.]])
    """

    differentiable = True

    def __init__(self, steps: Sequence[Calibrator]) -> None:
        super().__init__()
        self.steps = torch.nn.ModuleList(steps)

    @property
    def keeps_argmax(self) -> bool:  # type: ignore[override]
        """As long as every step does."""
        return all(step.keeps_argmax for step in self.steps)

    @property
    def shift_invariant(self) -> bool:  # type: ignore[override]
        """As the first step is."""
        return bool(self.steps[0].shift_invariant)

    @property
    def sample_invariant(self) -> bool:  # type: ignore[override]
        """As long as every step is."""
        return all(step.sample_invariant for step in self.steps)

    def map(self, logits: Tensor) -> Tensor:
        """Apply the steps in order."""
        for step in self.steps:
            logits = step(logits)
        return logits

    def config(self) -> dict[str, Any]:
        """The steps."""
        return {"steps": list(self.steps)}


def chain(*fits: Fit | str) -> Fit:
    """Fit one method after another, each on what the one before made of the logits.

    >>> z, y = np.random.default_rng(0).normal(size=(200, 3)), np.arange(200) % 3
    >>> [type(step).__name__ for step in chain("temperature", "histogram")(z, y).steps]
    ['Temperature', 'Histogram']
    """
    methods = [_resolve(fit) for fit in fits]

    def fit(logits: Any, labels: Any, *, weights: Any = None) -> Chain:
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        steps = []
        for method in methods:
            steps.append(method(z, y, **given(w)))
            z = steps[-1](z)
        return Chain(steps)

    return fit


class OneVsRest(Calibrator):
    """A binary calibrator for each class against the others, renormalised: q_k ∝ σ(calibrated log-odds of class k)."""

    keeps_argmax = False
    shift_invariant = True

    def __init__(self, calibrators: Sequence[Calibrator]) -> None:
        super().__init__()
        self.calibrators = torch.nn.ModuleList(calibrators)

    def map(self, logits: Tensor) -> Tensor:
        """Calibrate each class's log-odds and put the probabilities together."""
        self._check_classes(logits, len(self.calibrators))
        absent = find_absent(logits)
        odds = fill_absent(_log_odds(logits), absent)
        binary = [
            torch.log_softmax(calibrator(_binary(odds[:, k])), dim=1)[:, 1]
            for k, calibrator in enumerate(self.calibrators)
        ]
        log_q = torch.stack(binary, dim=1)
        return torch.log_softmax(log_q if absent is None else log_q.masked_fill(absent, NEVER), dim=1)

    def config(self) -> dict[str, Any]:
        """The calibrators."""
        return {"calibrators": list(self.calibrators)}


def one_vs_rest(fit: Fit | str) -> Fit:
    """Fit a method of two classes to each class against the others.

    >>> z, y = np.random.default_rng(0).normal(size=(200, 3)), np.arange(200) % 3
    >>> one_vs_rest("temperature")(z, y)(z).shape
    (200, 3)
    """
    method = _resolve(fit)

    def fitted(logits: Any, labels: Any, *, weights: Any = None) -> OneVsRest:
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        odds = _log_odds(upcast_half(z))

        def of_class(k: int) -> Calibrator:
            here = odds[:, k] > -torch.inf  # rows that have the option; none of them tell of one that no row has
            rows = here if bool(here.any()) else torch.arange(1, device=z.device)
            x = odds[rows, k] if bool(here.any()) else torch.zeros_like(odds[:1, k])
            return method(_binary(x), (y[rows] == k).long(), **given(None if w is None else w[rows]))

        return OneVsRest([of_class(k) for k in range(z.shape[1])])

    return fitted


def for_event(fit: Fit | str, event: int | str, *, names: Sequence[str] | None = None) -> Fit:
    """Fit a method to the probability of one class, a number or with `names` one of them.

    The calibrator takes what `event_logits` makes of logits, and gives (ln(1 − p), ln p).

    >>> from trueup.core.conversion import event_logits
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> calibrator = for_event("beta", 2)(3 * z, y)
    >>> calibrator(event_logits(3 * z, 2)).shape
    (2000, 2)
    """
    method = _resolve(fit)

    def fit_event(logits: Any, labels: Any, **options: Any) -> Calibrator:
        from trueup.core.conversion import as_event  # most fits are of no event

        return method(*as_event(logits, labels, event, names=names), **options)

    return fit_event


def _log_odds(logits: Tensor) -> Tensor:
    from trueup.calibrators.logistic import log_probs_and_rests

    log_p, log_rest = log_probs_and_rests(logits)
    return log_p - log_rest


def _binary(odds: Tensor) -> Tensor:
    return torch.stack([torch.zeros_like(odds), odds], dim=1)


def cross_fit(fit: Fit | str, *, folds: int = 5) -> Callable[..., np.ndarray]:
    """Calibrate every row by a calibrator that has not seen it: (logits, labels) → logits.

    `weights` are those of the rows in the fits; rows of weight zero are calibrated too. Folds are stratified by label
    and spread copies of a row; the order of the rows does not matter. `clusters`, one value a row, keep correlated rows
    (pixels of an image) in one fold.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(200, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> cross_fit("temperature")(z, y).shape
    (200, 3)
    """
    method = _resolve(fit)

    def calibrated(logits: Any, labels: Any, *, weights: Any = None, clusters: Any = None) -> np.ndarray:
        z, y = as_tensors(logits, labels, at_least=folds)
        together = as_clusters(clusters, len(z), at_least=2)
        w = None if weights is None else torch.from_numpy(as_weights(weights, len(z))).to(z.device)
        out = torch.empty_like(z)
        for train, test in k_fold(z, y, folds, together):
            *pair, share = take_weighted(z, y, w, train)
            out[test] = method(*pair, **given(share))(z[test])
        return (out.float() if out.dtype == torch.bfloat16 else out).cpu().numpy()  # NumPy has no bfloat16

    return calibrated


def grid(fit: Fit | str, *, folds: int = 5, score: str = "nll", **options: Sequence[Any]) -> Fit:
    """Fit with every combination of the options and keep that of the lowest cross-validated score.

    >>> z, y = np.random.default_rng(0).normal(size=(200, 3)), np.arange(200) % 3
    >>> type(grid("matrix", penalty=[1e-3, 1.0])(z, y)).__name__
    'Matrix'
    """
    combinations: list[dict[str, Any]] = [{}]
    for name, values in options.items():
        combinations = [{**known, name: value} for known in combinations for value in values]
    named = {str(chosen): partial(_resolve(fit), **chosen) for chosen in combinations}
    return choose(named, folds=folds, score=score, standard_errors=0.0)


class Choice(NamedTuple):
    """The cross-validated score of each method, and which was chosen."""

    chosen: str
    scores: Mapping[str, float]
    """Mean score on held-out rows; infinite where a method could not be fitted."""
    reasons: Mapping[str, str]
    """Why a method could not be fitted, or was dropped."""
    errors: Mapping[str, float] = {}
    """Standard error of each method's difference from what was chosen."""
    weights: Mapping[str, float] = {}
    """The methods that were chosen, and their weights in the mixture."""
    loss: float = float("nan")
    """Mean score of what was chosen on held-out rows."""
    detectable: float = float("nan")
    """The smallest mean improvement that these rows could have shown in four of five cases."""


DETECTED = 1.645 + 0.842
"""Standard errors of a difference that is seen in four of five samples, by a one-sided test at 5 %."""


def record_choice(
    losses: Mapping[str, np.ndarray],
    chosen: str,
    *,
    raw: str,
    reasons: Mapping[str, str] | None = None,
    weights: np.ndarray | None = None,
    clusters: Clusters | None = None,
) -> Choice:
    """The record of the choice of one method among several, by the loss of every held-out row.

    `raw` is the method that leaves everything as it is, if that is among them. What could be seen is a difference of
    the chosen method from it, or of it from the best of the others.

    >>> losses = {"identity": np.array([0.9, 0.4, 0.8, 0.3]), "temperature": np.array([0.8, 0.5, 0.6, 0.4])}
    >>> choice = record_choice(losses, "temperature", raw="identity", reasons={"svs": "too few rows"})
    >>> f"{choice.loss:.3f} {choice.errors['identity']:.3f} {choice.detectable:.3f} {choice.scores['svs']}"
    '0.575 0.065 0.162 inf'
    """
    reasons = reasons or {}
    loss = losses[chosen]
    others = {name: each for name, each in losses.items() if name != chosen}
    rival = raw if raw in others else simplest(others, standard_errors=0.0, weights=weights) if others else chosen
    return Choice(
        chosen,
        {name: weighted_mean(each, weights) for name, each in losses.items()} | dict.fromkeys(reasons, float("inf")),
        reasons,
        errors={name: standard_error(each - loss, weights, clusters) for name, each in losses.items()},
        weights={chosen: 1.0},
        loss=weighted_mean(loss, weights),
        detectable=DETECTED * standard_error(losses[rival] - loss, weights, clusters),
    )


def weighted_mean(values: np.ndarray, weights: np.ndarray | None = None) -> float:
    """The mean of one number a row."""
    return float(np.average(values, weights=weights))


def standard_error(values: np.ndarray, weights: np.ndarray | None = None, clusters: Clusters | None = None) -> float:
    """Of a mean: the standard deviation over √n, where n is (Σw)²/Σw² with weights; with clusters, that over them."""
    if clusters is not None:
        return mean_error(*block_sums(values, weights, clusters))
    w = np.ones(len(values)) if weights is None else weights
    variance = np.average((values - np.average(values, weights=w)) ** 2, weights=w)
    return float(np.sqrt(variance * (w @ w)) / w.sum())


def choose(
    fits: Iterable[str] | Mapping[str, Fit], *, folds: int = 5, score: str = "nll", standard_errors: float = 1.0
) -> Fit:
    """Fit each method on folds and keep the `simplest` that is within a standard error of the best, simplest first.

    `score` is "nll" or "brier". The calibrator that comes out carries the comparison as `choice`. The fit takes
    `clusters`, one value a row: correlated rows stay in one fold, and the standard error is that of clusters.

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(1000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> choose(["identity", "temperature"])(3 * z, y).choice.chosen
    'temperature'
    """
    methods = dict(fits) if isinstance(fits, Mapping) else {name: METHODS[name] for name in fits}
    if score not in ("nll", "brier"):
        raise ValueError(f'score must be "nll" or "brier", got {score!r}')

    def fit(logits: Any, labels: Any, *, weights: Any = None, clusters: Any = None) -> Calibrator:
        z, y, w = as_weighted(logits, labels, weights, at_least=2 * folds)
        together = weighted_clusters(clusters, weights, len(torch.as_tensor(labels)), at_least=2)
        losses, reasons = {}, {}
        for name, method in methods.items():
            try:
                losses[name] = _held_out(method, z, y, w, folds, score, together)
            except (FitError, ValueError) as error:
                reasons[name] = str(error)
        if not losses:
            raise FitError(f"none of the methods could be fitted: {reasons}")
        each = None if w is None else w.cpu().numpy()
        name = simplest(losses, standard_errors=standard_errors, weights=each, clusters=together)
        fitted: Calibrator = methods[name](z, y, **given(w))
        fitted.choice = record_choice(  # type: ignore[assignment]
            losses, name, raw="identity", reasons=reasons, weights=each, clusters=together
        )
        return fitted

    return fit


def simplest(
    losses: Mapping[str, np.ndarray],
    *,
    standard_errors: float = 1.0,
    weights: np.ndarray | None = None,
    clusters: Clusters | None = None,
) -> str:
    """Of methods, the simplest first, the first whose mean loss is within a standard error of the least.

    The standard error is that of the paired difference d from the best, row by row: mean(d) ≤ s · std(d) / √n. With
    weights, n is (Σw)²/Σw²; with clusters the standard error is that over clusters.

    >>> one, two = np.array([0.9, 0.4, 0.8, 0.3]), np.array([0.8, 0.5, 0.6, 0.4])
    >>> simplest({"identity": one, "temperature": two}), simplest({"identity": one + 0.1, "temperature": two})
    ('identity', 'temperature')
    """
    best = min(losses, key=lambda name: weighted_mean(losses[name], weights))
    for name, loss in losses.items():
        behind = loss - losses[best]
        if weighted_mean(behind, weights) <= standard_errors * standard_error(behind, weights, clusters):
            return name
    return best


class Refinement(NamedTuple):
    """A proper score split in what calibration can repair and what it cannot."""

    score: float
    calibration: float
    """What the calibrator takes off."""
    refinement: float
    """What is left after it."""


def refinement(logits: Any, labels: Any, *, method: Fit | str = "temperature", score: str = "nll") -> Refinement:
    """Split a proper score by a cross-fitted calibrator: score = calibration + refinement.

    A row is given (1 − w) q + w/K, with q by the calibrator of the n rows of the other folds and w = 1/(n + 1).

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(1000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> parts = refinement(3 * z, y)
    >>> parts.calibration > 0.1
    True
    """
    fit = _resolve(method)
    z, y = as_tensors(logits, labels, at_least=FOLDS)
    mixed = torch.empty(z.shape, dtype=torch.float64, device=z.device)
    with silence_warnings(message="temperature stopped at its bound"):  # what that would do to the score is bounded too
        for others, fold in k_fold(z, y, FOLDS):
            n = int(others.sum())
            log_q = torch.log_softmax(fit(*take_rows(z, y, others))(z[fold]).double(), dim=1)
            options = torch.isfinite(z[fold])
            uniform = torch.where(options, -options.sum(dim=1, keepdim=True).double().log(), -math.inf)
            # Where the n rows are all right, T is as good as zero, and one held-out error would outweigh all else.
            # But n rows cannot tell a chance of error of about 1/(n + 1) from none: an error costs ≤ ln((n + 1) K).
            mixed[fold] = torch.logaddexp(log_q + math.log(n / (n + 1)), uniform - math.log(n + 1))
    before, after = (float(getattr(score_rows(each, y), score).mean()) for each in (z, mixed))
    return Refinement(before, before - after, after)


def takes(fit: Fit, option: str) -> bool:
    """Whether a method takes an option, such as `clusters`.

    >>> takes(choose(["identity"]), "clusters"), takes(METHODS["temperature"], "clusters")
    (True, False)
    """
    try:
        return option in inspect.signature(fit).parameters
    except (TypeError, ValueError):  # a function of C has no signature
        return False


def _resolve(fit: Fit | str) -> Fit:
    return METHODS[fit] if isinstance(fit, str) else fit


def _held_out(
    method: Fit, z: Tensor, y: Tensor, w: Tensor | None, folds: int, score: str, clusters: Clusters | None
) -> np.ndarray:
    """The score of every row under a calibrator that has not seen it."""
    scores = np.empty(len(z))
    for train, test in k_fold(z, y, folds, clusters):
        *pair, share = take_weighted(z, y, w, train)
        calibrated = method(*pair, **given(share))(z[test])
        scores[test.cpu().numpy()] = getattr(score_rows(calibrated, y[test]), score)
    return scores
