"""Names of metrics, methods, losses and networks, resolved on first use: listing them imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:  # for checkers alone: this module imports nothing heavy, and nothing above it
    from torch import nn

    from trueup.calibrators.base import Calibrator

T = TypeVar("T")


class Lazy(Mapping[str, T]):
    """A read-only mapping from names to objects that are imported when they are first asked for."""

    def __init__(self, kind: str, where: Mapping[str, str]) -> None:
        self._kind = kind
        self._where = dict(where)

    def __getitem__(self, name: str) -> T:
        try:
            module, attribute = self._where[name].split(":")
        except (KeyError, TypeError):
            raise KeyError(self._unknown(name)) from None
        found: Any = import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
        return cast(T, found)

    def _unknown(self, name: object) -> str:
        from difflib import get_close_matches

        near = get_close_matches(name, self, n=3, cutoff=0.6) if isinstance(name, str) else []
        meant = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        return f"no {self._kind} is called {name!r}; {meant}there are: {', '.join(self)}"

    def classes(self) -> dict[str, str]:
        """The classes whose methods are in the mapping, by name: "Temperature" for "…:Temperature.fit"."""
        owners = (place.rpartition(".")[0] for place in self._where.values() if "." in place.split(":")[1])
        return {owner.split(":")[1]: owner for owner in owners}

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def __repr__(self) -> str:
        plural = f"{self._kind}es" if self._kind.endswith("s") else f"{self._kind}s"
        return f"<{len(self)} {plural}: {', '.join(self)}>"


def lazy_names(
    package: str, modules: Mapping[str, str], registry: Mapping[str, Any] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """What a package takes as its `__getattr__` and `__dir__`: names that are imported when they are first used.

    `modules` has the names of each module, which is relative to the package, separated by blanks; without names the
    module itself is meant. `registry` has further names.
    """
    where = {name: module for module, names in modules.items() for name in names.split() or [module]}

    def attribute(name: str) -> Any:
        if registry is not None and name in registry:
            return registry[name]
        if name not in where:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = import_module(f".{where[name]}", package)
        return getattr(module, name) if modules[where[name]] else module

    return attribute, lambda: sorted({*import_module(package).__all__, *(registry or ())})


def _in(module: str, *names: str) -> dict[str, str]:
    return {name: f"trueup.metrics.{module}:{name}" for name in names}


METRICS: Lazy[Callable[..., float]] = Lazy(
    "metric",
    {
        **_in("proper", "accuracy", "top_k", "nll", "brier", "top_label_brier", "entropy", "normalised_entropy"),
        **_in(
            "binned",
            "ece",
            "mce",
            "rmsce",
            "ace",
            "overconfidence",
            "underconfidence",
            "aece",
            "sce",
            "thresholded_sce",
        ),
        **_in("binned", "uce", "piece"),
        **_in("debiased", "debiased_l1", "debiased_l2", "ece_sweep"),
        **_in("smooth", "ks", "ks_within", "ks_classwise", "smooth_ece", "kde_ece"),
        **_in("kernel", "skce", "skce_biased", "skce_linear", "mmce"),
        **_in("ranking", "auroc", "aupr", "fpr95", "aurc", "eaurc"),
        **_in(
            "events", "predicted", "observed", "observed_expected", "event_brier", "miscalibration", "discrimination"
        ),
        **_in("events", "uncertainty", "event_auroc", "calibration_intercept", "calibration_slope"),
        **_in("events", "calibration_in_the_large", "ici", "e50", "e90", "kuiper"),
    },
)


def _fits(module: str, **names: str) -> dict[str, str]:
    return {name: f"trueup.calibrators.{module}:{attribute}" for name, attribute in names.items()}


METHODS: Lazy[Callable[..., Calibrator]] = Lazy(
    "method",
    {
        **_fits("base", identity="Identity.fit"),
        **_fits(
            "temperature",
            temperature="Temperature.fit",
            temperature_ece="Temperature.fit_ece",
            temperature_ece_wide="Temperature.fit_ece_wide",
            temperature_focal="Temperature.fit_focal",
            temperature_brier="Temperature.fit_brier",
        ),
        **_fits("bayesian_temperature", bayesian_temperature="bayesian_temperature"),
        **_fits(
            "linear",
            vector="Vector.fit",
            bias_corrected_temperature="Vector.fit_bias_corrected",
            matrix="Matrix.fit",
            ms_odir="Matrix.fit_odir",
            dirichlet="Dirichlet.fit",
            dirichlet_odir="Dirichlet.fit_odir",
            svs="Structured.fit_vector",
            sms="Structured.fit_matrix",
            sms_cv="Structured.fit_matrix_cv",
        ),
        **_fits("low_rank", low_rank="LowRank.fit"),
        **_fits("ets", ets="EnsembleTemperature.fit"),
        **_fits("logistic", platt="Platt.fit", beta="Beta.fit", quadratic="Quadratic.fit"),
        **_fits("smoothing_spline", smoothing_spline="SmoothingSpline.fit"),
        **_fits("venn_abers", venn_abers="VennAbers.fit", venn_abers_cross="VennAbers.fit_cross"),
        **_fits(
            "isotonic",
            isotonic="Isotonic.fit",
            isotonic_ovr="IsotonicOvR.fit",
            isotonic_ovr_ts="IsotonicOvR.fit_scaled",
            isotonic_pooled="IsotonicPooled.fit",
            centred_isotonic="IsotonicOvR.fit_centred",
        ),
        **_fits(
            "histogram",
            histogram="Histogram.fit",
            histogram_mass="Histogram.fit_mass",
            histogram_ovr="HistogramOvR.fit",
        ),
        **_fits("shrunken_histogram", shrunken_histogram="ShrunkenHistogram.fit"),
        **_fits("scaling_binning", scaling_binning="ScalingBinning.fit"),
        **_fits("bbq", bbq="BBQ.fit"),
        **_fits("imax", imax="IMax.fit", imax_shared="IMaxShared.fit"),
        **_fits("spline", spline="Spline.fit"),
        **_fits("diagonal", diagonal="Diagonal.fit"),
        **_fits("proximity_aware", density_ratio="DensityRatio.fit", bin_mean_shift="BinMeanShift.fit"),
        **_fits("fold_networks", order_invariant="OrderInvariant.fit", residual="Residual.fit"),
        "temperature_histogram": "trueup.calibrators.auto:temperature_histogram",
        "diagonal_sms": "trueup.calibrators.auto:diagonal_sms",
        "auto": "trueup.calibrators.auto:auto",
    },
)
"""Method → `fit(logits, labels) -> Calibrator`."""

CALIBRATORS: Lazy[type[Calibrator]] = Lazy(
    "calibrator",
    {
        **METHODS.classes(),
        "Linear": "trueup.calibrators.linear:Linear",
        "Chain": "trueup.calibrators.compose:Chain",
        "OneVsRest": "trueup.calibrators.compose:OneVsRest",
        "Mixture": "trueup.calibrators.pool:Mixture",
        "UniformMixture": "trueup.calibrators.pool:UniformMixture",
        "PerGroup": "trueup.calibrators.groupwise:PerGroup",
        "PerLabel": "trueup.calibrators.multilabel:PerLabel",
    },
)
"""Class → itself: every calibrator that a file can hold; those of METHODS are there by themselves."""


def _losses(module: str, **names: str) -> dict[str, str]:
    return {name: f"trueup.losses.{module}:{attribute}" for name, attribute in names.items()}


LOSSES: Lazy[type[nn.Module]] = Lazy(
    "loss",
    {
        **_losses("cross_entropy", cross_entropy="CrossEntropy"),
        **_losses("label_smoothing", label_smoothing="LabelSmoothing"),
        **_losses("norm", norm="Norm"),
        **_losses("focal", focal="Focal", flsd53="FLSD53"),
        **_losses("inverse_focal", inverse_focal="InverseFocal"),
        **_losses("dual_focal", dual_focal="DualFocal"),
        **_losses("mmce", mmce="MMCE", mmce_weighted="MMCEWeighted"),
        **_losses("avuc", avuc="AvUC"),
        **_losses("dca", dca="DCA"),
        **_losses("brier", brier="Brier"),
        **_losses("entropy_penalty", entropy_penalty="EntropyPenalty"),
        **_losses("soft_binned", soft_binned_ece="SoftBinnedECE"),
    },
)
"""Loss → Module class; its `.function` gives the loss of each row."""


class _Networks(Lazy[Callable[..., "nn.Module"]]):
    """With every network of timm besides, under `timm:` and its name there."""

    def __getitem__(self, name: str) -> Callable[..., nn.Module]:
        if isinstance(name, str) and name.startswith("timm:"):
            return partial(import_module("trueup.models.timm_networks").timm_network, name.removeprefix("timm:"))
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and name.startswith("timm:"))


NETWORKS = _Networks(
    "network",
    {
        **{
            name: f"trueup.models.networks:{name}"
            for name in ("resnet8", "resnet20", "resnet32", "resnet110", "wrn16x4", "wrn28x10", "wrn40x10")
        },
        "cnn": "trueup.models.networks:CNN",
        "mlp": "trueup.models.networks:MLP",
        "text_cnn": "trueup.models.sequences:TextCNN",
        "char_transformer": "trueup.models.sequences:CharTransformer",
    },
)
"""Network → its maker, which takes the number of outputs first; `timm:resnet18` is timm's."""

RECALIBRATIONS: Lazy[Callable[..., Any]] = Lazy(
    "recalibration",
    {
        "variance": "trueup.calibrators.regression:VarianceScaling.fit",
        "quantiles": "trueup.calibrators.regression:IsotonicQuantiles.fit",
    },
)
"""Recalibration → `fit(mean, std, targets)`, for regression."""
