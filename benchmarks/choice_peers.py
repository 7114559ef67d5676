"""The calibrators of other packages, each a function (probabilities, labels, others to calibrate) → probabilities.

Each gets the stored probabilities, exact zeros too, and is left at its defaults. A peer that raises has no loss there,
which counts as the greatest.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from peers import absence, module
from trueup_studies import Options, Study
from trueup_studies.papers.calarena import benchmark_files as files

Peer = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
CLIP = float(np.finfo(float).eps)
"""The least probability of a label, as scikit-learn's log-loss has it: isotonic regression gives exact zeros."""
MANY_PAIRS = 20
"""Classes above which Venn–Abers goes by one class against the rest, not by pairs."""


def _probmetrics(fit: np.ndarray, labels: np.ndarray, test: np.ndarray) -> np.ndarray:
    calibrator = module("probmetrics", "probmetrics.calibrators").get_calibrator("logistic")
    calibrator.fit(fit, labels)
    return calibrator.predict_proba(test)


def _sklearn(method: str, fit: np.ndarray, labels: np.ndarray, test: np.ndarray) -> np.ndarray:
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.calibration import CalibratedClassifierCV
    from sklearn.frozen import FrozenEstimator

    class Given(ClassifierMixin, BaseEstimator):
        """A classifier whose features are its probabilities."""

        def fit(self, x: Any, y: Any) -> Any:
            return self

        def predict_proba(self, x: Any) -> Any:
            return x

        def predict(self, x: Any) -> Any:
            return self.classes_[x.argmax(axis=1)]

    given = Given()
    given.classes_, given.n_features_in_ = np.arange(fit.shape[1]), fit.shape[1]
    return CalibratedClassifierCV(FrozenEstimator(given), method=method).fit(fit, labels).predict_proba(test)


def _netcal(name: str, fit: np.ndarray, labels: np.ndarray, test: np.ndarray) -> np.ndarray:
    calibrator = getattr(module("netcal", "netcal.scaling"), name)()
    two = fit.shape[1] == 2
    calibrator.fit(fit[:, 1] if two else fit, labels)
    after = calibrator.transform(test[:, 1] if two else test)
    return np.stack([1 - after, after], axis=1) if two else after


def _betacal(fit: np.ndarray, labels: np.ndarray, test: np.ndarray) -> np.ndarray:
    after = module("betacal", "betacal").BetaCalibration("abm").fit(fit[:, 1:], labels).predict(test[:, 1:]).reshape(-1)
    return np.stack([1 - after, after], axis=1)


def _venn_abers(fit: np.ndarray, labels: np.ndarray, test: np.ndarray) -> np.ndarray:
    peer = module("venn-abers", "venn_abers")
    if fit.shape[1] == 2:
        return peer.VennAbers().fit(fit, labels).predict_proba(test)[0]
    how = "one_vs_rest" if fit.shape[1] > MANY_PAIRS else "one_vs_one"
    after = np.zeros_like(test)  # it leaves classes without rows out
    after[:, np.unique(labels)] = peer.venn_abers.predict_proba_prefitted_va(fit, labels, test, va_tpe=how)[0]
    return after


PEERS: Mapping[str, tuple[str, str, Peer]] = {
    "probmetrics": ("probmetrics", "probmetrics.calibrators", _probmetrics),
    "scikit-learn sigmoid": ("scikit-learn", "sklearn.calibration", partial(_sklearn, "sigmoid")),
    "scikit-learn isotonic": ("scikit-learn", "sklearn.calibration", partial(_sklearn, "isotonic")),
    "scikit-learn temperature": ("scikit-learn", "sklearn.calibration", partial(_sklearn, "temperature")),
    "netcal temperature": ("netcal", "netcal.scaling", partial(_netcal, "TemperatureScaling")),
    "netcal logistic": ("netcal", "netcal.scaling", partial(_netcal, "LogisticCalibration")),
    "betacal": ("betacal", "betacal", _betacal),
    "venn-abers": ("venn-abers", "venn_abers", _venn_abers),
}
"""Name → package, module and function."""
BINARY = ("betacal", "netcal logistic")
"""Of two classes alone: the first takes no more, the second minutes."""


def present() -> dict[str, str]:
    """The peers that are installed, with why each of the others is not used."""
    return {name: absence(package, where) or "" for name, (package, where, _) in PEERS.items()}


def grid(options: Options) -> Iterator[dict[str, Any]]:
    for experiment in files.experiments(str(options.data_dir)):
        for name in options.methods:
            if experiment["classes"] == 2 or name not in BINARY:
                yield {**experiment, "method": name}


def work(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One peer on one experiment."""
    path = Path(settings["folder"]) / f"{settings['benchmark']}.h5"
    with files._h5py().File(path, "r") as file:
        group = file[f"{settings['data']}/{settings['model']}"]
        fit, test = (files.as_probs(np.asarray(group[f"probas_{part}"])) for part in ("cal", "test"))
        labels, truth = (np.asarray(group[f"labels_{part}"]).astype(np.int64) for part in ("cal", "test"))
    row: dict[str, Any] = {"fit_rows": len(fit), "test_rows": len(test), "nll": math.nan, "brier": math.nan}
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            after = np.asarray(PEERS[settings["method"]][2](fit, labels, test), dtype=float)
        if after.shape != test.shape:
            raise ValueError(f"shape {after.shape} where {test.shape} was wanted")
    except Exception as error:
        return [row | {"error": f"{type(error).__name__}: {error}"}]
    after = after / after.sum(axis=1, keepdims=True)
    of_label = after[np.arange(len(truth)), truth]
    row["nll"] = float(-np.log(of_label.clip(CLIP)).mean())
    row["brier"] = float(((after - np.eye(after.shape[1])[truth]) ** 2).sum(axis=1).mean())
    return [row | {"error": ""}]


STUDY = Study(
    "choice-peers",
    1,
    grid=grid,
    work="choice_peers:work",
    tables=lambda rows, options: {},
    local=lambda options: {"folder": str(files.predictions_folder(str(options.data_dir)))},
)
