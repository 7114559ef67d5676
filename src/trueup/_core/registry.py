"""Names of metrics, methods and losses, imported on first use, so that listing them is cheap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

if TYPE_CHECKING:  # for type checkers only: this module imports nothing heavy
    from torch import nn

    from trueup.calibrators.base import Calibrator

T = TypeVar("T")


def unknown_name_message(kind: str, name: object, known: Iterable[str]) -> str:
    """Return an error message for an unknown name: the nearest names and all names.

    >>> unknown_name_message("metric", "ecee", ["ece", "nll"])
    "no metric is called 'ecee'; did you mean 'ece'? there are: ece, nll"
    """
    from difflib import get_close_matches

    names = list(known)
    near = get_close_matches(name, names, n=3, cutoff=0.6) if isinstance(name, str) else []
    meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
    return f"no {kind} is called {name!r}; {meant}there are: {', '.join(names)}"


class Entry(NamedTuple):
    """One entry of a registry."""

    name: str
    title: str
    """The name in textbooks."""
    where: str
    """The location "module:attribute"."""


class Registry(Mapping[str, T]):
    """A read-only mapping from names to objects that are imported on first access.

    >>> METHODS.title("temperature")
    'Temperature scaling'
    """

    def __init__(self, kind: str, entries: Iterable[Entry] | Mapping[str, str]) -> None:
        if isinstance(entries, Mapping):  # the names serve as titles
            entries = [Entry(name, name, where) for name, where in entries.items()]
        self._kind = kind
        self._entries = {entry.name: entry for entry in entries}

    def title(self, name: str) -> str:
        """Return the title of an entry; a name that is no entry is returned unchanged."""
        return self._entries[name].title if name in self._entries else name

    def __getitem__(self, name: str) -> T:
        try:
            module, attribute = self._entries[name].where.split(":")
        except (KeyError, TypeError):
            raise KeyError(unknown_name_message(self._kind, name, self)) from None
        return cast(T, attrgetter(attribute)(import_module(module)))

    def locations(self) -> dict[str, str]:
        """Return the location of each entry, by name."""
        return {name: entry.where for name, entry in self._entries.items()}

    def classes(self) -> dict[str, str]:
        """Return the classes that own the listed class methods, by name: "Temperature" for "…:Temperature.fit"."""
        methods = (entry.where for entry in self._entries.values() if "." in entry.where.split(":")[1])
        owners = (where.rpartition(".")[0] for where in methods)
        return {owner.split(":")[1]: owner for owner in owners}

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __repr__(self) -> str:
        plural = f"{self._kind}es" if self._kind.endswith("s") else f"{self._kind}s"
        return f"<{len(self)} {plural}: {', '.join(self)}>"


def _in(module: str, names: str) -> dict[str, str]:
    """Return the locations of names in a module; spaces separate the names."""
    return {name: f"trueup.{module}:{name}" for name in names.split()}


METRICS: Registry[Callable[..., float]] = Registry(
    "metric",
    {
        **_in("metrics.proper", "accuracy top_k nll brier top_label_brier entropy normalised_entropy"),
        **_in("metrics.binned", "ece mce rmsce average_ce overconfidence underconfidence"),
        **_in("metrics.binned", "aece sce thresholded_sce uce piece"),
        **_in("metrics.debiased", "debiased_l1 debiased_l2 ece_sweep"),
        **_in("metrics.smooth", "ks ks_within ks_classwise smooth_ece kde_ece"),
        **_in("metrics.kernel", "skce skce_biased skce_linear mmce"),
        **_in("metrics.ranking", "misclassification_auroc misclassification_aupr misclassification_fpr95 aurc eaurc"),
        **_in("metrics.events", "predicted observed observed_expected event_brier miscalibration discrimination"),
        **_in("metrics.events", "uncertainty auroc calibration_intercept calibration_slope calibration_in_the_large"),
        **_in("metrics.events", "ici e50 e90 kuiper"),
    },
)


def _method(name: str, title: str, where: str) -> Entry:
    return Entry(name, title, f"trueup.calibrators.{where}")


_SCALING = "temperature:Temperature"
METHODS: Registry[Callable[..., Calibrator]] = Registry(
    "method",
    [
        _method("identity", "No calibration", "base:Identity.fit"),
        _method("temperature", "Temperature scaling", f"{_SCALING}.fit"),
        _method("temperature_ece", "Temperature scaling (least ECE)", f"{_SCALING}.fit_ece"),
        _method("temperature_ece_wide", "Temperature scaling (least ECE, wide search)", f"{_SCALING}.fit_ece_wide"),
        _method("temperature_focal", "Temperature scaling (focal loss)", f"{_SCALING}.fit_focal"),
        _method("temperature_brier", "Temperature scaling (Brier score)", f"{_SCALING}.fit_brier"),
        _method("bayesian_temperature", "Bayesian temperature scaling", "pool:bayesian_temperature"),
        _method("vector", "Vector scaling", "linear:Vector.fit"),
        _method("bias_corrected_temperature", "Bias-corrected temperature scaling", "linear:Vector.fit_bias_corrected"),
        _method("matrix", "Matrix scaling", "linear:Matrix.fit"),
        _method("ms_odir", "Matrix scaling, ODIR", "linear:Matrix.fit_odir"),
        _method("dirichlet", "Dirichlet calibration", "linear:Dirichlet.fit"),
        _method("dirichlet_odir", "Dirichlet calibration, ODIR", "linear:Dirichlet.fit_odir"),
        _method("svs", "Structured vector scaling", "linear:Structured.fit_vector"),
        _method("sms", "Structured matrix scaling", "linear:Structured.fit_matrix"),
        _method("sms_cv", "Structured matrix scaling, cross-validated", "linear:Structured.fit_matrix_cv"),
        _method("low_rank", "Low-rank structured scaling", "low_rank:LowRank.fit"),
        _method("ets", "Ensemble temperature scaling", "ets:EnsembleTemperature.fit"),
        _method("platt", "Platt scaling", "logistic:Platt.fit"),
        _method("beta", "Beta calibration", "logistic:Beta.fit"),
        _method("quadratic", "Quadratic scaling", "logistic:Quadratic.fit"),
        _method("smoothing_spline", "Smoothing spline", "spline:SmoothingSpline.fit"),
        _method("venn_abers", "Venn–Abers", "isotonic:VennAbers.fit"),
        _method("venn_abers_cross", "Cross Venn–Abers", "isotonic:VennAbers.fit_cross"),
        _method("isotonic", "Isotonic regression", "isotonic:Isotonic.fit"),
        _method("isotonic_ovr", "Isotonic regression, one against the rest", "isotonic:IsotonicOvR.fit"),
        _method("isotonic_ovr_ts", "Isotonic regression after temperature", "isotonic:IsotonicOvR.fit_scaled"),
        _method("isotonic_pooled", "Isotonic regression, classes pooled", "isotonic:IsotonicPooled.fit"),
        _method("centred_isotonic", "Centred isotonic regression", "isotonic:IsotonicOvR.fit_centred"),
        _method("histogram", "Histogram binning", "binning:Histogram.fit"),
        _method("histogram_mass", "Histogram binning, equal mass", "binning:Histogram.fit_mass"),
        _method("histogram_ovr", "Histogram binning, one against the rest", "binning:HistogramOvR.fit"),
        _method("shrunken_histogram", "Histogram binning, shrunken", "binning:ShrunkenHistogram.fit"),
        _method("scaling_binning", "Scaling-binning", "binning:ScalingBinning.fit"),
        _method("bbq", "Bayesian binning into quantiles", "binning:BBQ.fit"),
        _method("imax", "I-Max binning", "binning:IMax.fit"),
        _method("imax_shared", "I-Max binning, classes shared", "binning:IMaxShared.fit"),
        _method("spline", "Spline calibration", "spline:Spline.fit"),
        _method("diagonal", "Diagonal map", "diagonal:Diagonal.fit"),
        _method("density_ratio", "Density-ratio calibration", "proximity_aware:DensityRatio.fit"),
        _method("bin_mean_shift", "Bin-mean shift", "proximity_aware:BinMeanShift.fit"),
        _method("order_invariant", "Order-invariant network", "neural:OrderInvariant.fit"),
        _method("residual", "Residual network", "neural:Residual.fit"),
        _method("temperature_histogram", "Temperature scaling, then histogram binning", "auto:temperature_histogram"),
        _method("diagonal_sms", "Diagonal map, then structured matrix scaling", "auto:diagonal_sms"),
        _method("auto", "Automatic choice", "auto:auto"),
    ],
)
"""Calibration methods by name: `METHODS[name](logits, labels)` returns a calibrator."""

CALIBRATORS: Registry[type[Calibrator]] = Registry(
    "calibrator",
    {
        **METHODS.classes(),
        **_in("calibrators.linear", "Linear"),
        **_in("calibrators.compose", "Chain OneEvent OneVsRest"),
        **_in("calibrators.pool", "Mixture UniformMixture"),
        **_in("calibrators.groupwise", "PerGroup PerLabel"),
    },
)
"""Calibrator classes that a file can hold, by name; those of METHODS are included."""


def _losses(module: str, **names: str) -> dict[str, str]:
    return {name: f"trueup.losses.{module}:{attribute}" for name, attribute in names.items()}


LOSSES: Registry[type[nn.Module]] = Registry(
    "loss",
    {
        **_losses("_pointwise", cross_entropy="CrossEntropy", label_smoothing="LabelSmoothing", norm="Norm"),
        **_losses("_focal", focal="Focal", flsd53="FLSD53", inverse_focal="InverseFocal", dual_focal="DualFocal"),
        **_losses("_batch", mmce="MMCE", mmce_weighted="MMCEWeighted", avuc="AvUC", dca="DCA"),
        **_losses("_pointwise", brier="Brier", entropy_penalty="EntropyPenalty"),
        **_losses("_batch", soft_binned_ece="SoftBinnedECE"),
    },
)
"""Training losses by name, as modules; `.function` computes the loss of each row."""


FORECAST_METHODS: Registry[Callable[..., Any]] = Registry(
    "forecast method",
    [
        _method("variance", "Variance scaling", "forecasts:VarianceScaling.fit"),
        _method("quantiles", "Isotonic recalibration of quantiles", "forecasts:IsotonicQuantiles.fit"),
    ],
)
"""Methods that recalibrate forecasts, by name: `fit(mean, std, targets)`."""


class ArtifactKind(NamedTuple):
    """A kind of fitted value that a file may hold."""

    title: str
    classes: Mapping[str, str]
    """Class name → "module:class". Classes inside such a value belong to its kind."""
    codec: str | None = None
    """The module with `to_artifact` and `from_artifact`; without one, the file holds the constructor's arguments."""
    needs_model: bool = False
    """Whether loading needs a network, whose weights are not in the file."""


ARTIFACTS: Mapping[str, ArtifactKind] = {
    "calibrator": ArtifactKind("calibrator", CALIBRATORS.locations()),
    "recalibrator": ArtifactKind("recalibrator", FORECAST_METHODS.classes()),
    "prediction_sets": ArtifactKind("rule of prediction sets", _in("decisions.prediction_sets", "PredictionSets")),
    "conformal_regression": ArtifactKind(
        "rule of conformal intervals", _in("decisions.conformal_regression", "ConformalResiduals ConformalQuantiles")
    ),
    "threshold": ArtifactKind("threshold", _in("decisions.thresholds", "Threshold GroupThresholds RiskCurve")),
    "monitor": ArtifactKind("monitor", _in("monitor.monitor", "Monitor"), "trueup.monitor.checkpoint"),
    "clamped": ArtifactKind(
        "clamped network", _in("clamping.clamped", "Clamped"), "trueup.clamping.clamped", needs_model=True
    ),
    "repaired": ArtifactKind(
        "repaired network", _in("adaptation.record", "Repaired"), "trueup.adaptation.record", needs_model=True
    ),
}
"""Kinds of artifacts. Their classes and codecs are imported when a file of the kind is read or written."""
