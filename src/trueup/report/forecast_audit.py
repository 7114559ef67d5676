"""An audit of forecasts of a number: how calibrated they are, which recalibration helps, and by how much."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.special import ndtri

from trueup.calibrators.recalibration_choice import RAW, RecalibrationChoice, choose_recalibration
from trueup.core.arrays import as_weights
from trueup.core.errors import InputError
from trueup.core.formatting import format_percent
from trueup.metrics.forecast_table import ForecastScores, compare_forecasts, evaluate_forecasts
from trueup.metrics.forecasts import LEVELS, GaussianForecast, check_forecast

__all__ = ["RECALIBRATION_TITLES", "ForecastAudit", "ForecastStage", "audit_forecasts"]

Triple = tuple[Any, Any, Any]
"""(mean, std, targets) or (quantiles, levels, targets)."""

RECALIBRATION_TITLES = {
    RAW: "No recalibration",
    "variance": "Variance scaling",
    "quantiles": "Isotonic quantiles",
}
_MANY = 20_000_000
"""Quantiles that are held at once; of more rows fewer levels are compared."""


class ForecastStage(NamedTuple):
    """Forecasts of the scored rows, before or after recalibration."""

    name: str
    title: str
    triple: Triple


@dataclass(frozen=True, eq=False)
class ForecastAudit:
    """How calibrated forecasts are, and what recalibration does to them."""

    scores: ForecastScores
    """Of the forecasts as they are."""
    comparison: ForecastScores | None
    """Of them and each recalibration, all by their quantiles of the same levels; None of quantiles."""
    choice: RecalibrationChoice | None
    triples: Mapping[str, Triple]
    """By method, of the scored rows."""
    calibration_rows: int
    cross_fitted: bool
    """Whether each row was scored by a recalibration fitted to the other folds."""
    folds: int
    seed: int
    weights: np.ndarray | None = None
    failure: str = ""
    """Why recalibration was left out, where it could not be fitted."""

    @property
    def chosen(self) -> str:
        """The recalibration that is recommended, or "raw"."""
        return RAW if self.choice is None else self.choice.chosen

    def stages(self) -> list[ForecastStage]:
        """The forecasts as they are and, if one was chosen, after recalibration."""
        stages = [ForecastStage("before", "As forecast", self.triples[RAW])]
        if self.chosen != RAW:
            title = RECALIBRATION_TITLES[self.chosen]
            stages.append(ForecastStage("after", f"After {title[0].lower()}{title[1:]}", self.triples[self.chosen]))
        return stages

    def verdict(self) -> str:
        """What was found, in a few sentences."""
        verdict = self.scores.verdict()
        if self.comparison is None or self.choice is None:
            return f"{verdict} Recalibration was left out: {self.failure}." if self.failure else verdict
        if self.chosen == RAW:
            return f"{verdict} No recalibration predicts held-out rows better."
        change = self.comparison.changes[self.chosen]
        widest = [metric for metric in self.comparison.metrics if metric.startswith("coverage_")][-1]
        covered = self.comparison[self.chosen, widest].value
        crps, before = change["crps"], self.comparison[RAW, "crps"].value
        title = RECALIBRATION_TITLES[self.chosen]
        return (
            f"{verdict} Chosen on held-out rows: {title[0].lower()}{title[1:]}{self.choice.why()}. The CRPS changes by "
            f"{100 * crps.value / before:+.1f} % "
            f"({format_percent(self.comparison.level)} interval {100 * crps.low / before:+.1f} % to "
            f"{100 * crps.high / before:+.1f} %), and {widest.partition('_')[2]} % intervals then hold "
            f"{format_percent(covered, 1)} of the targets."
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return {
            "schema": 1,
            "verdict": self.verdict(),
            "chosen": self.chosen,
            "failure": self.failure or None,
            "calibration_rows": self.calibration_rows,
            "cross_fitted": self.cross_fitted,
            "folds": self.folds,
            "seed": self.seed,
            "losses": None if self.choice is None else dict(self.choice.losses),
            "scores": self.scores.to_dict(),
            "comparison": None if self.comparison is None else self.comparison.to_dict(),
        }


def audit_forecasts(
    val: Triple,
    test: Triple | None = None,
    *,
    methods: Sequence[str] | None = None,
    weights: Any = None,
    test_weights: Any = None,
    clusters: Any = None,
    test_clusters: Any = None,
    level: float = 0.95,
    folds: int = 5,
    seed: int = 0,
) -> ForecastAudit:
    """Score forecasts, and recalibrations of them: fitted to `val` and scored on `test`, or cross-fitted on `val`.

    Forecasts are triples (mean, std, targets), or (quantiles, levels, targets), which are scored as they are.

    >>> rng = np.random.default_rng(0)
    >>> y = 2 * rng.normal(size=600)
    >>> audit_forecasts((np.zeros(600), np.ones(600), y)).chosen
    'variance'
    """
    calibration = check_forecast(*val)
    scored = calibration if test is None else check_forecast(*test)
    scored_triple: Triple = tuple(val if test is None else test)
    if type(scored) is not type(calibration):
        raise InputError("test", "hold forecasts of the kind that val has", type(scored).__name__)
    w = as_weights(weights if test is None else test_weights, len(scored.targets))
    options: dict[str, Any] = {"level": level, "seed": seed, "weights": w}
    options["clusters"] = clusters if test is None else test_clusters
    scores = evaluate_forecasts(*scored_triple, **options)
    facts = {"calibration_rows": len(calibration.targets), "cross_fitted": test is None, "folds": folds, "seed": seed}
    if not isinstance(calibration, GaussianForecast) or not isinstance(scored, GaussianForecast):
        return ForecastAudit(scores, None, None, {RAW: scored_triple}, **facts, weights=w)  # type: ignore[arg-type]
    try:
        choice = choose_recalibration(*val, methods=methods, weights=weights, clusters=clusters, folds=folds)
    except ValueError as error:  # a std of 0, say: the forecasts can still be scored
        return ForecastAudit(scores, None, None, {RAW: scored_triple}, **facts, weights=w, failure=str(error))  # type: ignore[arg-type]
    step = 1 if len(scored.targets) * len(LEVELS) <= _MANY else 5
    keep = slice(step - 1, None, step)
    levels = LEVELS[keep]
    triples: dict[str, Triple] = {RAW: scored_triple}
    for name, recalibrator in choice.recalibrators.items():
        z = choice.bounds[name][:, keep][choice.fold] if test is None else recalibrator.standard_quantiles(levels)
        triples[name] = scored.mean[:, None] + scored.std[:, None] * z, levels, scored.targets
    raw = scored.mean[:, None] + scored.std[:, None] * ndtri(levels), levels, scored.targets
    coverage = [c for c in (0.5, 0.8, 0.9) if _has(levels, (1 - c) / 2)]
    comparison = compare_forecasts({**triples, RAW: raw}, coverage=coverage, **options)
    return ForecastAudit(scores, comparison, choice, triples, **facts, weights=w)  # type: ignore[arg-type]


def _has(levels: np.ndarray, level: float) -> bool:
    return bool(np.isclose(levels, level, rtol=0, atol=1e-9).any())
