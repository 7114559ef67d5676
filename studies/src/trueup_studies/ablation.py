"""The papers' ablations as rows: what δ and T do apart, what γ does, and how much the start matters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from trueup import metrics
from trueup._core.arrays import Array
from trueup.calibrators.temperature import Temperature
from trueup.clamping.clamped import Clamped, FitRecord
from trueup.clamping.fit import clamp
from trueup.clamping.problem import MapOptions, Objective, Recipe
from trueup.io.predictions import Predictions
from trueup.models.calibrated import Calibrated, collect

GAMMAS = tuple(i / 20 for i in range(21))
"""0, 0.05, … 1: the exponents of the paper's second figure."""
SEEDS = tuple(range(5))
"""As many runs as the paper's boxes show."""


@dataclass(frozen=True)
class AblationRow:
    """One network on test data; the fields are the columns of the papers' tables."""

    method: str
    accuracy: float
    entropy: float
    nll: float
    ece: float
    aece: float
    sce: float
    temperature: float
    delta_norm: float
    gamma: float
    loss: float
    """The objective at the end of the fit, on the calibration data; that of T alone where nothing else was fitted."""
    seed: int


def ablate(clamped: Clamped, calibration: Iterable[Any], test: Iterable[Any]) -> list[AblationRow]:
    """Take a fitted (δ, T) apart: neither, δ alone, T alone, both, and temperature scaling by either loss.

    `temperature (focal)` has the exponent of the fit, or 1 where that was 0. Tang et al., "Neural Clamping" (2024),
    table 4.
    """
    model = clamped.model
    given = collect(model, calibration, progress=False)
    plain, shifted = (collect(m, test, progress=False) for m in (model, Calibrated(model, before=clamped.before)))
    return ablation_rows(clamped.fit_record, given, plain, shifted)


def ablation_rows(record: FitRecord, given: Predictions, plain: Predictions, shifted: Predictions) -> list[AblationRow]:
    """The same from the network's predictions: for calibration data, for test data, and for test data moved by δ."""
    gamma, labels = record.gamma or 1.0, plain.labels
    by_likelihood, by_focal = Temperature.fit(*given), Temperature.fit_focal(*given, gamma=gamma)
    one, fitted = Temperature(1.0), Temperature(record.temperature)
    # The temperature, γ, the logits, the norm of δ and the loss of each row.
    rows = {
        "uncalibrated": (one, 0.0, plain.logits, 0.0, metrics.nll(*given)),
        "temperature": (by_likelihood, 0.0, plain.logits, 0.0, _loss(by_likelihood)),
        "temperature (focal)": (by_focal, gamma, plain.logits, 0.0, _loss(by_focal)),
        "input only": (one, record.gamma, shifted.logits, record.delta_norm, record.objective),
        "output only": (fitted, record.gamma, plain.logits, 0.0, record.objective),
        "both": (fitted, record.gamma, shifted.logits, record.delta_norm, record.objective),
    }
    return [
        _row(method, (after(logits), labels), float(after.temperature), norm, exponent, loss, record.seed)
        for method, (after, exponent, logits, norm, loss) in rows.items()
    ]


def compare_starts(
    model: nn.Module,
    calibration: Iterable[Any],
    test: Iterable[Any],
    *,
    starts: Sequence[str] = ("random", "data"),
    seeds: Sequence[int] = SEEDS,
    recipe: str | Recipe = "paper",
    **options: Any,
) -> list[AblationRow]:
    """Fit from each start with each seed; `options` go to `clamp`, of which the data-driven start needs `box`.

    Tang et al., "Neural Clamping" (2024), figure 3.
    """
    return [
        _test_row(start, clamp_with(model, calibration, start=start, seed=seed, recipe=recipe, **options), test)
        for start in starts
        for seed in seeds
    ]


def _test_row(method: str, clamped: Clamped, test: Iterable[Any]) -> AblationRow:
    record = clamped.fit_record
    facts = record.temperature, record.delta_norm, record.gamma, record.objective, record.seed
    return _row(method, collect(clamped, test, progress=False), *facts)


def _row(method: str, pair: tuple[Array, Array], *facts: Any) -> AblationRow:
    """The metrics of a pair, and the last five fields of the row."""
    names = ("accuracy", "entropy", "nll", "ece", "aece", "sce")
    return AblationRow(method, *(getattr(metrics, name)(*pair) for name in names), *facts)


def _loss(fitted: Temperature) -> float:
    return float("nan") if fitted.certificate is None else fitted.certificate.loss


def clamp_with(model: nn.Module, loader: Iterable[Any], **settings: Any) -> Clamped:
    """`clamp` with the fields of its options as keywords."""
    objective = {name: settings.pop(name) for name in list(settings) if name in Objective.__dataclass_fields__}
    names = {"input_map": "kind", "start": "start", "box": "box"}
    mapped = {field: settings.pop(name) for name, field in names.items() if name in settings}
    return clamp(model, loader, objective=Objective(**objective), input_map=MapOptions(**mapped), **settings)
