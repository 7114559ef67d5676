"""The other packages, each behind one function (logits, labels) → float, imported when it is first asked for.

Every adapter starts from the same float32 logits and takes its peer's quickest public way to the number. What turns
"bins" into fifteen equal-width bins differs between them and is said where it does. A peer that is not installed, or
cannot be imported, is absent and no more.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

BINS = 15
Metric = Callable[[Tensor, Tensor], float]

PACKAGES = {
    "netcal": "netcal.metrics",
    "torch-uncertainty": "torch_uncertainty.metrics.classification.calibration",
    "probmetrics": "probmetrics.metrics",
    "scikit-learn": "sklearn.metrics",
    "torchmetrics": "torchmetrics.functional.classification",
    "uncertainty-calibration": "calibration",
    "mapie": "mapie.metrics.calibration",
    "relplot": "relplot",
    "uncertainty-toolbox": "uncertainty_toolbox",
}
"""Distribution names and the module of each that holds its metrics."""


@cache
def module(package: str) -> Any:
    """Import the module that holds a peer's metrics; whatever stands in the way becomes an ImportError."""
    try:
        version(package)  # a stray directory of the same name is no installation
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a stranger's import deprecates is not ours to mend
            if package == "torch-uncertainty":
                _without_inits("torch_uncertainty", "metrics", "classification")
            return import_module(PACKAGES[package])
    except PackageNotFoundError:
        raise ImportError("not installed") from None
    except Exception as error:
        raise ImportError(f"{type(error).__name__}: {error}") from error


def absence(package: str) -> str | None:
    """Say why a peer is absent; None if it is there."""
    try:
        module(package)
    except ImportError as error:
        return str(error)
    return None


def _without_inits(root: str, *inner: str) -> None:
    """Stand empty packages in for a package and its inner ones, at their real places on disk.

    torch-uncertainty's own __init__ pulls in Lightning, timm and torchvision, which its metrics do not need and which
    have no CPU build beside our torch. Behind empty parents the metric modules are imported unchanged.
    """
    spec = find_spec(root)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{root} is not installed")
    name, place = root, spec.submodule_search_locations[0]
    for part in ("", *inner):
        name, place = (f"{name}.{part}", f"{place}/{part}") if part else (name, place)
        package = ModuleType(name)
        package.__path__ = [place]
        sys.modules.setdefault(name, package)


def _probs(logits: Tensor) -> Any:
    return torch.softmax(logits, 1).numpy()


def _netcal(logits: Tensor, labels: Tensor, *, equal_mass: bool = False) -> float:
    measure = module("netcal").ECE(BINS, equal_intervals=not equal_mass).measure
    return float(measure(_probs(logits), labels.numpy()))


def _netcal_equal_mass(logits: Tensor, labels: Tensor) -> float:
    return _netcal(logits, labels, equal_mass=True)


def _torchmetrics(logits: Tensor, labels: Tensor) -> float:
    error = module("torchmetrics").multiclass_calibration_error
    return float(error(torch.softmax(logits, 1), labels, logits.shape[1], n_bins=BINS, validate_args=False))


def _torch_uncertainty(logits: Tensor, labels: Tensor, *, adaptive: bool = False) -> float:
    metric = module("torch-uncertainty").CalibrationError(
        "multiclass", adaptive=adaptive, num_bins=BINS, num_classes=logits.shape[1], validate_args=False
    )
    metric.update(torch.softmax(logits, 1), labels)
    return float(metric.compute())


def _torch_uncertainty_adaptive(logits: Tensor, labels: Tensor) -> float:
    return _torch_uncertainty(logits, labels, adaptive=True)


def _torch_uncertainty_classwise(logits: Tensor, labels: Tensor) -> float:
    metric = module("torch-uncertainty").ClasswiseCalibrationError(logits.shape[1], num_bins=BINS)
    metric.update(torch.softmax(logits, 1), labels)
    return float(metric.compute())


def _probmetrics(logits: Tensor, labels: Tensor) -> float:
    peer = module("probmetrics")
    distributions = import_module("probmetrics.distributions")
    truth = distributions.CategoricalDirac(labels, logits.shape[1])
    return float(peer.CalibrationError(BINS).compute(truth, distributions.CategoricalLogits(logits)))


def _mapie(logits: Tensor, labels: Tensor, *, strategy: str = "uniform") -> float:
    # MAPIE's number of bins counts the edges: sixteen of them make fifteen bins.
    confidence, predicted = torch.softmax(logits, 1).max(1)
    error = module("mapie").expected_calibration_error
    return float(error((predicted == labels).int().numpy(), confidence.numpy(), BINS + 1, strategy))


def _mapie_quantile(logits: Tensor, labels: Tensor) -> float:
    return _mapie(logits, labels, strategy="quantile")


def _mapie_classwise(logits: Tensor, labels: Tensor) -> float:
    error = module("mapie").expected_calibration_error
    y = labels.numpy()
    return float(error(y, _probs(logits), BINS + 1, "uniform", classwise=True, class_labels=y))


def _uncertainty_calibration(logits: Tensor, labels: Tensor) -> float:
    return float(module("uncertainty-calibration").get_ece(_probs(logits), labels.numpy(), num_bins=BINS))


def _uncertainty_calibration_equal_mass(logits: Tensor, labels: Tensor) -> float:
    return float(module("uncertainty-calibration").get_ece_em(_probs(logits), labels.numpy(), num_bins=BINS))


def _uncertainty_calibration_marginal(logits: Tensor, labels: Tensor) -> float:
    error = module("uncertainty-calibration").get_ece
    return float(error(_probs(logits), labels.numpy(), num_bins=BINS, mode="marginal"))


def _sklearn_nll(logits: Tensor, labels: Tensor) -> float:
    return float(module("scikit-learn").log_loss(labels.numpy(), _probs(logits), labels=range(logits.shape[1])))


def _sklearn_brier(logits: Tensor, labels: Tensor) -> float:
    error = module("scikit-learn").brier_score_loss
    return float(error(labels.numpy(), _probs(logits), labels=range(logits.shape[1]), scale_by_half=False))


def _relplot(logits: Tensor, labels: Tensor) -> float:
    confidence, predicted = torch.softmax(logits, 1).max(1)
    return float(module("relplot").smECE(confidence.double().numpy(), (predicted == labels).double().numpy()))


METRICS: dict[str, dict[str, Metric]] = {
    "ece": {
        "torchmetrics": _torchmetrics,
        "torch-uncertainty": _torch_uncertainty,
        "netcal": _netcal,
        "mapie": _mapie,
        "probmetrics": _probmetrics,
        "uncertainty-calibration": _uncertainty_calibration,
    },
    "aece": {
        "torch-uncertainty": _torch_uncertainty_adaptive,
        "netcal": _netcal_equal_mass,
        "mapie": _mapie_quantile,
        "uncertainty-calibration": _uncertainty_calibration_equal_mass,
    },
    "sce": {
        "mapie": _mapie_classwise,
        "torch-uncertainty": _torch_uncertainty_classwise,
        "uncertainty-calibration": _uncertainty_calibration_marginal,
    },
    "nll": {"scikit-learn": _sklearn_nll},
    "brier": {"scikit-learn": _sklearn_brier},
    "smooth_ece": {"relplot": _relplot},
}
"""Which peer offers which metric, by our name of the metric."""


def offering(metric: str) -> dict[str, Metric]:
    """Give the peers present that offer a metric."""
    return {package: function for package, function in METRICS[metric].items() if absence(package) is None}
