"""What a library runs for a task: ours, and the peers' from peers.py with a few more of the same kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import peers
from peers import Answer, module
from tasks import PASSES, TASKS, Forecasts, Pairs
from timing import OURS

Run = Callable[[Any], Any]
"""Data → a number, or the Answer of a fit."""


class Fitted(NamedTuple):
    """What our fit found, and how often it read the data."""

    predict: Callable[[Tensor], Tensor]
    passes: int | None


class NotOffered(LookupError):
    """The library has nothing of the kind."""


def release(library: str) -> str:
    """Its version; an ImportError where it is not installed."""
    try:
        return version("trueup" if library == OURS else library)
    except PackageNotFoundError:
        if library == OURS:  # run from the sources
            import trueup

            return trueup.__version__
        raise ImportError("not installed") from None


def offers(library: str) -> list[str]:
    """Names of the tasks that a library is asked; ours is asked all, so that what it lacks is seen."""
    if library == OURS:
        return [*TASKS, *PASSES]
    tables: dict[str, dict[str, Any]] = {**peers.METRICS, **peers.METHODS}
    return [task for task in TASKS if library in tables.get(task, {}) or library in MORE.get(task, {})]


def run_of(library: str, task: str) -> Run:
    """The function that does a task."""
    if library == OURS:
        return ours(task)
    if library in MORE.get(task, {}):
        return MORE[task][library]
    tables: dict[str, dict[str, Any]] = {**peers.METRICS, **peers.METHODS}
    return partial(_on_tensors, tables[task][library])


def _on_tensors(function: Callable[[Tensor, Tensor], Any], data: Pairs) -> Any:
    return function(torch.from_numpy(data.logits), torch.from_numpy(data.labels))


def ours(task: str) -> Run:
    import trueup
    from trueup import METHODS, METRICS, metrics
    from trueup.metrics import intervals, regression
    from trueup.metrics.table import DEFAULT

    rows = getattr(intervals, "ScoredRows", None) or intervals.Scored  # its name before 0.3

    def table(logits: Tensor, labels: Tensor) -> None:
        scored = rows.of(logits, labels)
        for name in DEFAULT:
            scored.value(name)

    def fit(logits: Tensor, labels: Tensor) -> Fitted:
        options = {"penalty": 1.0} if task == "dirichlet_odir" else {}
        found = METHODS[task](logits, labels, **options)
        certificate = getattr(found, "certificate", None)
        return Fitted(lambda z: found(z.double()), certificate and certificate.passes)

    passes: dict[str, Callable[[Tensor, Tensor], Any]] = {
        "table": table,
        "evaluate": trueup.evaluate,
        "read": lambda logits, labels: logits.sum(),
    }
    if task in passes:
        return partial(_on_tensors, passes[task])
    if TASKS[task].kind == "regression":
        return lambda data: getattr(regression, task)(*data)
    if task in METRICS:
        return partial(_on_tensors, getattr(metrics, task))
    if task in METHODS:
        return partial(_on_tensors, fit)
    raise NotOffered("not offered")


def _toolbox(name: str) -> Run:
    def run(data: Forecasts) -> float:
        return float(getattr(module("uncertainty-toolbox"), name)(*data))

    return run


def _given(classes: int) -> Any:
    """A fitted classifier for scikit-learn whose features are its probabilities."""
    from sklearn.base import BaseEstimator, ClassifierMixin

    class Given(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
        def __init__(self, classes: int = 2) -> None:
            self.classes = classes
            self.classes_ = np.arange(classes)
            self.n_features_in_ = classes

        def fit(self, X: Any, y: Any) -> Any:
            return self

        def predict_proba(self, X: Any) -> Any:
            return X

        def predict(self, X: Any) -> Any:
            return X.argmax(axis=1)

        def __sklearn_is_fitted__(self) -> bool:
            return True

    return Given(classes)


def _probs(logits: np.ndarray) -> Any:
    return torch.softmax(torch.from_numpy(logits), 1).numpy()


def _log(probs: Any) -> Tensor:
    return torch.as_tensor(probs).double().clamp(min=1e-30).log()


def _sklearn_isotonic_ovr(data: Pairs) -> Answer:
    calibration = module("scikit-learn", "sklearn.calibration")
    from sklearn.frozen import FrozenEstimator

    frozen = FrozenEstimator(_given(data.logits.shape[1]))
    fitted = calibration.CalibratedClassifierCV(frozen, method="isotonic").fit(_probs(data.logits), data.labels)
    return Answer(lambda z: _log(fitted.predict_proba(_probs(z.numpy()))))


def _mapie_isotonic(data: Pairs) -> Answer:
    peer = module("mapie", "mapie.calibration")
    fitted = peer.TopLabelCalibrator(_given(data.logits.shape[1]), calibrator="isotonic", cv="prefit")
    fitted.fit(_probs(data.logits), data.labels)

    def predict(z: Tensor) -> Tensor:
        p = torch.softmax(z.double(), 1)
        top, best = p.max(1, keepdim=True)
        # Its columns are those of the classes predicted at all; each row has one number.
        new = torch.as_tensor(np.nanmax(fitted.predict_proba(_probs(z.numpy())), axis=1)).double().reshape(-1, 1)
        return _log((p * (1 - new) / (1 - top).clamp(min=1e-30)).scatter(1, best, new))

    return Answer(predict)


def _mapie_venn_abers(data: Pairs) -> Answer:
    peer = module("mapie", "mapie.calibration")
    fitted = peer.VennAbersCalibrator(_given(data.logits.shape[1]), cv="prefit").fit(_probs(data.logits), data.labels)
    fitted.predict_proba(_probs(data.logits))
    return Answer(lambda z: _log(fitted.predict_proba(_probs(z.numpy()))))


MORE: dict[str, dict[str, Run]] = {
    "gaussian_nll": {"uncertainty-toolbox": _toolbox("nll_gaussian")},
    "crps": {"uncertainty-toolbox": _toolbox("crps_gaussian")},
    "miscalibration_area": {"uncertainty-toolbox": _toolbox("miscalibration_area")},
    "isotonic": {"mapie": _mapie_isotonic},
    "isotonic_ovr": {"scikit-learn": _sklearn_isotonic_ovr},
    "venn_abers": {"mapie": _mapie_venn_abers},
}
"""What the other benchmarks do not ask of the peers."""
