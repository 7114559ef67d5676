"""The ablation of Neural Clamping as rows: δ and T alone and jointly, and temperature scaling with either loss."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from trueup import metrics
from trueup.calibrators.temperature import Temperature
from trueup.clamping.clamped import Clamped, FitRecord
from trueup.clamping.fit import clamp
from trueup.clamping.problem import MapOptions, Objective
from trueup.io.predictions import Predictions

GAMMAS = tuple(i / 20 for i in range(21))
"""Exponents of the paper's figure 2: 0, 0.05, … 1."""


@dataclass(frozen=True)
class AblationRow:
    """Scores of one network on test data; the fields are the columns of the paper's tables."""

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
    """Objective at the end of the fit, on the calibration data; the loss of T alone if nothing else was fitted."""
    seed: int


def ablation_rows(record: FitRecord, fit: Predictions, plain: Predictions, shifted: Predictions) -> list[AblationRow]:
    """Score a fitted (δ, T) in parts: neither, δ alone, T alone, both, and temperature scaling with either loss.

    The network's predictions are those on the calibration data, on the test data, and on the test data shifted by δ.
    `temperature (focal)` has the exponent γ of the fit, or 1 if that is 0. Tang et al., "Neural Clamping" (2024),
    table 4.
    """
    gamma, labels = record.gamma or 1.0, plain.labels
    by_likelihood, by_focal = Temperature.fit(*fit), Temperature.fit_focal(*fit, gamma=gamma)
    one, fitted = Temperature(1.0), Temperature(record.temperature)
    # Temperature, γ, logits, norm of δ and loss of each row.
    rows = {
        "uncalibrated": (one, 0.0, plain.logits, 0.0, metrics.nll(*fit)),
        "temperature": (by_likelihood, 0.0, plain.logits, 0.0, _loss(by_likelihood)),
        "temperature (focal)": (by_focal, gamma, plain.logits, 0.0, _loss(by_focal)),
        "input only": (one, record.gamma, shifted.logits, record.delta_norm, record.objective),
        "output only": (fitted, record.gamma, plain.logits, 0.0, record.objective),
        "both": (fitted, record.gamma, shifted.logits, record.delta_norm, record.objective),
    }
    return [
        score_row(
            method,
            Predictions(after(logits), labels),
            replace(record, temperature=float(after.temperature), delta_norm=norm, gamma=exponent, objective=loss),
        )
        for method, (after, exponent, logits, norm, loss) in rows.items()
    ]


def score_row(method: str, pair: Predictions, record: FitRecord) -> AblationRow:
    """Score predictions on test data, with the facts of the fit that made them."""
    names = ("accuracy", "entropy", "nll", "ece", "aece", "sce")
    scores = {name: getattr(metrics, name)(*pair) for name in names}
    return AblationRow(
        method,
        **scores,
        temperature=record.temperature,
        delta_norm=record.delta_norm,
        gamma=record.gamma,
        loss=record.objective,
        seed=record.seed,
    )


def _loss(fitted: Temperature) -> float:
    return float("nan") if fitted.certificate is None else fitted.certificate.loss


def clamp_with(model: nn.Module, loader: Iterable[Any], **settings: Any) -> Clamped:
    """Call `clamp` with the fields of its options records as keywords."""
    objective = {name: settings.pop(name) for name in list(settings) if name in Objective.__dataclass_fields__}
    names = {"input_map": "kind", "start": "start", "box": "box"}
    mapped = {field: settings.pop(name) for name, field in names.items() if name in settings}
    return clamp(model, loader, objective=Objective(**objective), input_map=MapOptions(**mapped), **settings)
