"""The other packages, each behind one function (logits, labels) → float or answer, imported when it is first asked for.

Every adapter starts from the same float32 logits and takes its peer's quickest way to the number or the fit. What turns
"bins" into fifteen equal-width bins differs between them and is said where it does. A peer that is not installed, or
cannot be imported, is absent and no more.
"""

from __future__ import annotations

import io
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NamedTuple

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
def module(package: str, where: str | None = None) -> Any:
    """Import the module that holds a peer's metrics, or another; whatever stands in the way becomes an ImportError."""
    try:
        version(package)  # a stray directory of the same name is no installation
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what a stranger's import deprecates is not ours to mend
            if package == "torch-uncertainty":
                _without_inits("torch_uncertainty", "metrics", "classification")
                _with_post_processing()
            if where == "netcal.scaling":
                _without_tensorboard()
            return import_module(where or PACKAGES[package])
    except PackageNotFoundError:
        raise ImportError("not installed") from None
    except Exception as error:
        raise ImportError(f"{type(error).__name__}: {error}") from error


def absence(package: str, where: str | None = None) -> str | None:
    """Say why a peer, or a module of it, is absent; None if it is there."""
    try:
        module(package, where)
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
        package.__spec__ = ModuleSpec(name, None, is_package=True)
        package.__spec__.submodule_search_locations = [place]
        sys.modules.setdefault(name, package)


def _with_post_processing() -> None:
    """Let torch-uncertainty's calibrators find their base class in the empty package that stands in for its parent."""
    _without_inits("torch_uncertainty", "post_processing")
    package = sys.modules["torch_uncertainty.post_processing"]
    base = import_module("torch_uncertainty.post_processing.abstract").PostProcessing
    package.PostProcessing = base  # type: ignore[attr-defined]


def _without_tensorboard() -> None:
    """Stand in for the logger that netcal's scaling imports and that maximum likelihood does not use."""
    if find_spec("tensorboard") is None:
        logger = ModuleType("torch.utils.tensorboard")
        logger.SummaryWriter = object  # type: ignore[attr-defined]
        sys.modules.setdefault("torch.utils.tensorboard", logger)


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


class Answer(NamedTuple):
    """What a peer's fit found: its map, and its parameters where they can be read."""

    predict: Callable[[Tensor], Tensor]
    """Logits → log-probabilities, in double."""
    temperature: float = 1.0
    weight: Tensor | None = None
    bias: Tensor | None = None


Fit = Callable[[Tensor, Tensor], Answer]


def _temperature(beta: Any) -> Answer:
    inverse = float(beta)
    return Answer(lambda z: torch.log_softmax(inverse * z.double(), 1), 1 / inverse)


def _log(probs: Any) -> Tensor:
    return torch.as_tensor(probs).double().clamp(min=1e-30).log()


def _sklearn_temperature(logits: Tensor, labels: Tensor) -> Answer:
    # The fit inside CalibratedClassifierCV(method="temperature"), without the checks around it.
    peer = module("scikit-learn", "sklearn.calibration")
    return _temperature(peer._TemperatureScaling().fit(logits.numpy(), labels.numpy()).beta_)


def _netcal_temperature(logits: Tensor, labels: Tensor) -> Answer:
    # In single precision its finite differences vanish and T stays 1, so it gets double.
    scaling = module("netcal", "netcal.scaling").TemperatureScaling()
    with redirect_stdout(io.StringIO()):  # it prints that a class has no label
        scaling.fit(torch.softmax(logits.double(), 1).numpy(), labels.numpy())
    return _temperature(scaling.weights.item())


def _torch_uncertainty_temperature(logits: Tensor, labels: Tensor) -> Answer:
    peer = module("torch-uncertainty", "torch_uncertainty.post_processing.calibration")
    scaler = peer.TemperatureScaler(torch.nn.Sequential())  # an empty model gives back its input
    scaler.fit([(logits, labels)], progress=False)
    return _temperature(scaler.inv_temp.item())


def _torch_uncertainty_dirichlet(logits: Tensor, labels: Tensor) -> Answer:
    peer = module("torch-uncertainty", "torch_uncertainty.post_processing.calibration")
    scaler = peer.DirichletScaler(logits.shape[1], torch.nn.Sequential(), lambda_reg=1.0, mu_reg=1.0)
    scaler.fit([(logits, labels)], progress=False)
    weight, bias = (p.detach().double() for p in scaler.inv_temperature)
    return Answer(lambda z: torch.log_softmax(scaler(z).double(), 1), 1.0, weight, bias)


def _probmetrics_fit(name: str, logits: Tensor, labels: Tensor) -> tuple[Any, Callable[[Tensor], Tensor]]:
    peer = module("probmetrics", "probmetrics.calibrators")
    distributions = import_module("probmetrics.distributions")
    fitted = getattr(peer, name)().fit_torch(distributions.CategoricalLogits(logits), labels)

    def predict(z: Tensor) -> Tensor:
        found = fitted.predict_proba_torch(distributions.CategoricalLogits(z))
        return torch.log_softmax(found.get_logits().double(), 1)

    return fitted, predict


def _probmetrics_temperature(logits: Tensor, labels: Tensor) -> Answer:
    return _temperature(_probmetrics_fit("TemperatureScalingCalibrator", logits, labels)[0].invtemp_)


def _probmetrics_vector(logits: Tensor, labels: Tensor) -> Answer:
    fitted, predict = _probmetrics_fit("VectorScalingCalibrator", logits, labels)
    return Answer(predict, 1.0, 1 / fitted.temp_.double(), fitted.bias_.double())


def _probmetrics_svs(logits: Tensor, labels: Tensor) -> Answer:
    fitted, predict = _probmetrics_fit("SVSCalibrator", logits, labels)
    weight, bias = (torch.from_numpy(p).double() for p in (fitted.v_, fitted.b_))
    return Answer(predict, _probmetrics_inner_temperature(fitted), weight, bias)


def _probmetrics_sms(logits: Tensor, labels: Tensor) -> Answer:
    fitted, predict = _probmetrics_fit("SMSCalibrator", logits, labels)
    both = torch.from_numpy(fitted.W_).double()
    return Answer(predict, _probmetrics_inner_temperature(fitted), both[:, :-1], both[:, -1])


def _probmetrics_inner_temperature(fitted: Any) -> float:
    scaler = fitted.ts_
    while not hasattr(scaler, "invtemp_"):
        scaler = scaler.cal_
    return 1 / float(scaler.invtemp_)


def _probmetrics_ets(logits: Tensor, labels: Tensor) -> Answer:
    fitted, predict = _probmetrics_fit("ETSCalibrator", logits, labels)
    return Answer(predict, float(fitted.t_))


def _netcal_binning(name: str, logits: Tensor, labels: Tensor, **options: Any) -> Answer:
    fitted = getattr(module("netcal", "netcal.binning"), name)(**options)
    with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):  # progress bars, and classes without a label
        fitted.fit(_probs(logits), labels.numpy())
    return Answer(lambda z: _log(fitted.transform(_probs(z))))


def _netcal_top_binning(name: str, logits: Tensor, labels: Tensor, **options: Any) -> Answer:
    """One curve for the confidence; the other classes share the rest as they did before."""
    fitted = getattr(module("netcal", "netcal.binning"), name)(**options)
    confidence, predicted = torch.softmax(logits, 1).max(1)
    with redirect_stderr(io.StringIO()):
        fitted.fit(confidence.numpy(), (predicted == labels).int().numpy())

    def predict(z: Tensor) -> Tensor:
        p = torch.softmax(z.double(), 1)
        top, best = p.max(1, keepdim=True)
        new = torch.as_tensor(fitted.transform(top.float().squeeze(1).numpy())).double().reshape(-1, 1)
        return _log((p * (1 - new) / (1 - top).clamp(min=1e-30)).scatter(1, best, new))

    return Answer(predict)


def _netcal_isotonic(logits: Tensor, labels: Tensor) -> Answer:
    return _netcal_top_binning("IsotonicRegression", logits, labels)


def _netcal_isotonic_ovr(logits: Tensor, labels: Tensor) -> Answer:
    return _netcal_binning("IsotonicRegression", logits, labels)


def _netcal_histogram(logits: Tensor, labels: Tensor) -> Answer:
    return _netcal_top_binning("HistogramBinning", logits, labels, bins=BINS)


def _netcal_histogram_ovr(logits: Tensor, labels: Tensor) -> Answer:
    return _netcal_binning("HistogramBinning", logits, labels, bins=BINS)


def _netcal_bbq(logits: Tensor, labels: Tensor) -> Answer:
    return _netcal_binning("BBQ", logits, labels)  # of equal width: equal mass raises


_MODULES = {
    "scikit-learn": "sklearn.calibration",
    "probmetrics": "probmetrics.calibrators",
    "torch-uncertainty": "torch_uncertainty.post_processing.calibration",
}

METHODS: dict[str, dict[str, Fit]] = {
    "temperature": {
        "scikit-learn": _sklearn_temperature,
        "probmetrics": _probmetrics_temperature,
        "netcal": _netcal_temperature,
        "torch-uncertainty": _torch_uncertainty_temperature,
    },
    "vector": {"probmetrics": _probmetrics_vector},
    "dirichlet_odir": {"torch-uncertainty": _torch_uncertainty_dirichlet},
    "svs": {"probmetrics": _probmetrics_svs},
    "sms": {"probmetrics": _probmetrics_sms},
    "ets": {"probmetrics": _probmetrics_ets},
    "isotonic": {"netcal": _netcal_isotonic},
    "isotonic_ovr": {"netcal": _netcal_isotonic_ovr},
    "histogram": {"netcal": _netcal_histogram},
    "histogram_ovr": {"netcal": _netcal_histogram_ovr},
    "bbq": {"netcal": _netcal_bbq},
}
"""Which peer offers which calibrator, by our name of the method."""


def fitting(method: str) -> dict[str, Fit]:
    """Give the peers present that offer a calibrator."""
    scaling = method == "temperature"
    places = {**_MODULES, "netcal": "netcal.scaling" if scaling else "netcal.binning"}
    return {package: fit for package, fit in METHODS[method].items() if absence(package, places[package]) is None}
