"""Audit of regression forecasts: their calibration, the choice of a recalibration, and the report page."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import ndtri

from trueup._core.arrays import as_weights
from trueup._core.errors import InputError
from trueup._core.formatting import TableCell, escape, format_number, format_percent
from trueup.calibrators.forecasts import RAW, RecalibrationChoice, choose_recalibration
from trueup.io.forecasts import ForecastTable
from trueup.metrics.forecast_table import ForecastScores, compare_forecasts, evaluate_forecasts
from trueup.metrics.forecasts import LEVELS, GaussianForecast, check_forecast
from trueup.reports import html as markup
from trueup.reports.audit import describe_audit
from trueup.reports.figures import lower_title
from trueup.reports.html import paragraph
from trueup.reports.page import Page, Report

DEFAULT_TITLE = "Forecast report"
Triple = tuple[Any, Any, Any]
"""(mean, std, targets) or (quantiles, levels, targets)."""

RECALIBRATION_TITLES = {RAW: "No recalibration", "variance": "Variance scaling", "quantiles": "Isotonic quantiles"}
_MAX_QUANTILES = 20_000_000  # Largest number of quantiles in memory; larger data are compared at fewer levels


@dataclass(frozen=True, eq=False)
class ForecastAudit:
    """Scores of forecasts without and with recalibration, and the chosen recalibration."""

    scores: ForecastScores
    """Scores of the original forecasts."""
    comparison: ForecastScores | None
    """Scores of the forecasts and each recalibration, by quantiles of the same levels; None for quantile forecasts."""
    choice: RecalibrationChoice | None
    """Record of the choice; None without recalibrations."""
    triples: Mapping[str, Triple]
    """Forecasts and targets of the scored rows, by method."""
    calibration_rows: int
    """Number of calibration rows."""
    cross_fitted: bool
    """Whether each row was scored by a recalibration fitted to the other folds."""
    n_folds: int
    """Number of folds."""
    seed: int
    """Seed of the resampling."""
    sample_weight: np.ndarray | None = None
    """Weights of the scored rows."""
    failure: str = ""
    """Reason why recalibration could not be fitted, if so."""

    @property
    def chosen(self) -> str:
        """Name of the chosen recalibration, or "raw"."""
        return RAW if self.choice is None else self.choice.chosen

    @property
    def title(self) -> str:
        """Title of the chosen recalibration."""
        return RECALIBRATION_TITLES[self.chosen]

    def verdict(self) -> str:
        """Return the result in a few sentences."""
        verdict = self.scores.verdict()
        if self.comparison is None or self.choice is None:
            return f"{verdict} Recalibration was left out: {self.failure}." if self.failure else verdict
        if self.chosen == RAW:
            return f"{verdict} No recalibration predicts held-out rows better."
        widest = [metric for metric in self.comparison.metrics if metric.startswith("coverage_")][-1]
        covered = self.comparison[self.chosen, widest].value
        crps, before = self.comparison.changes[self.chosen]["crps"], self.comparison[RAW, "crps"].value
        return (
            f"{verdict} Chosen on held-out rows: {lower_title(self.title)}{self.choice.why()}. The CRPS changes by "
            f"{100 * crps.value / before:+.1f} % "
            f"({format_percent(self.comparison.level)} interval {100 * crps.low / before:+.1f} % to "
            f"{100 * crps.high / before:+.1f} %), and {widest.partition('_')[2]} % intervals then hold "
            f"{format_percent(covered, 1)} of the targets."
        )

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.verdict())}</p>{self.scores._repr_html_()}"

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        return describe_audit(
            self,
            ("calibration_rows", "cross_fitted", "n_folds", "seed"),
            failure=self.failure or None,
            losses=None if self.choice is None else dict(self.choice.losses),
            comparison=None if self.comparison is None else self.comparison.to_dict(),
        )


def report_forecasts(
    val: Triple | ForecastTable,
    test: Triple | ForecastTable | None = None,
    *,
    methods: Sequence[str] | None = None,
    title: str | None = None,
    level: float = 0.95,
    n_folds: int = 5,
    seed: int = 0,
) -> Report[ForecastAudit]:
    """Score forecasts and recalibrations of them, choose one, and lay out a page about it.

    Parameters
    ----------
    val
        Calibration rows: a triple (mean, std, targets), or (quantiles, levels, targets), which is scored without
        recalibration. A `trueup.io.ForecastTable` also holds weights and clusters.
    test
        Test rows. Without them, recalibrations are cross-fitted on `val`.
    methods
        Names of recalibrations to try; all by default.
    title
        Title of the page.
    level
        Level of the intervals.
    n_folds
        Number of folds.
    seed
        Seed of the resampling.

    Returns
    -------
    Report
        The page: `.save("report.html")` writes it, and `.audit` holds all numbers.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> page = report_forecasts((np.zeros(600), np.ones(600), 2 * rng.normal(size=600)))
    >>> page.audit.chosen
    'variance'
    """
    calibration, scored = (x if isinstance(x, ForecastTable) else ForecastTable(*x) for x in (val, test or val))
    val_forecast, scored_forecast = check_forecast(*calibration), check_forecast(*scored)
    if type(scored_forecast) is not type(val_forecast):
        raise InputError("test", "hold forecasts of the same kind as val", type(scored_forecast).__name__)
    w = as_weights(scored.sample_weight, len(scored_forecast.targets))
    options: dict[str, Any] = {"level": level, "seed": seed, "sample_weight": w, "clusters": scored.clusters or None}
    audit = ForecastAudit(
        scores=evaluate_forecasts(*scored, **options),
        comparison=None,
        choice=None,
        triples={RAW: scored.triple},
        calibration_rows=len(val_forecast.targets),
        cross_fitted=test is None,
        n_folds=n_folds,
        seed=seed,
        sample_weight=w,
    )
    if isinstance(val_forecast, GaussianForecast) and isinstance(scored_forecast, GaussianForecast):
        try:
            choice = choose_recalibration(*calibration, methods=methods, n_folds=n_folds, **calibration.options())
        except ValueError as error:  # such as a std of 0; the forecasts can still be scored
            audit = replace(audit, failure=str(error))
        else:
            audit = _with_recalibrations(audit, choice, scored_forecast, options)
    return Report(audit, DEFAULT_TITLE if title is None else title)


def _with_recalibrations(
    audit: ForecastAudit, choice: RecalibrationChoice, scored: GaussianForecast, options: dict[str, Any]
) -> ForecastAudit:
    """Add every recalibration to the audit, compared by quantiles of the same levels."""
    step = 1 if len(scored.targets) * len(LEVELS) <= _MAX_QUANTILES else 5
    keep = slice(step - 1, None, step)
    levels = LEVELS[keep]

    def quantiles(z: np.ndarray) -> Triple:
        return scored.mean[:, None] + scored.std[:, None] * z, levels, scored.targets

    triples = dict(audit.triples)
    for name, recalibrator in choice.recalibrators.items():
        z = choice.bounds[name][:, keep][choice.fold] if audit.cross_fitted else recalibrator.standard_quantiles(levels)
        triples[name] = quantiles(z)
    coverage = [c for c in (0.5, 0.8, 0.9) if np.isclose(levels, (1 - c) / 2, rtol=0, atol=1e-9).any()]
    comparison = compare_forecasts({**triples, RAW: quantiles(ndtri(levels))}, coverage=coverage, **options)
    return replace(audit, comparison=comparison, choice=choice, triples=triples)


class ForecastPage(Page):
    """The page of an audit of forecasts."""

    kind = "Forecast"

    def facts(self) -> list[tuple[str, str | TableCell]]:
        """Return the CRPS, the coverage and the error of the PIT."""
        scores = self.scores
        facts: list[tuple[str, str | TableCell]] = [
            ("CRPS", format_number(scores["crps"].value, digits=scores.digits("crps")))
        ]
        covered = [metric for metric in scores.metrics if metric.startswith("coverage_")]
        if covered:
            share = format_percent(scores[covered[-1]].value, 1)
            facts.append((f"Targets in {covered[-1].partition('_')[2]} % intervals", share))
        facts.append(("PIT error", f"{scores['pit_error'].value:.3f}"))
        facts.append(("PIT error if calibrated", f"{scores.tests[scores.methods[0]].expected:.3f}"))
        return facts

    def tables(self) -> str:
        """Return tables of the original forecasts and of the recalibrations."""
        scores, comparison = self.scores, self.audit.comparison
        head, *rows = scores.table()
        parts = [markup.table("The original forecasts", head, rows), *map(paragraph, scores.notes()[1:])]
        if comparison is not None:
            fits = "on rows to which they were not fitted"
            if self.audit.cross_fitted:
                fits = "with each row scored by a fit to the other folds"
            star = f"* differs from no recalibration: the paired {format_percent(scores.level)} interval excludes 0."
            # One row per metric and one column per method, since there are only three methods.
            heads = ["metric", *(RECALIBRATION_TITLES.get(name, name) for name in comparison.methods)]
            rows = [[metric, *self.cells(metric)] for metric in comparison.metrics]
            parts += [
                paragraph(f"Recalibrations are compared by quantiles of the same levels, {fits}."),
                markup.table("With recalibration", heads, rows),
                paragraph(star),
            ]
        return markup.section("numbers", "All numbers", *parts)

    def cells(self, metric: str) -> Iterator[str]:
        """Yield a metric of each recalibration, with a star if the paired interval excludes 0."""
        scores = self.audit.comparison
        for name in scores.methods:
            change = scores.changes.get(name, {}).get(metric)
            star = "*" if change is not None and (change.low > 0 or change.high < 0) else ""
            yield format_number(scores[name, metric].value, digits=scores.digits(metric)) + star

    def usage(self) -> tuple[str, list[list[str]]]:
        """Return commands and lines that apply the chosen recalibration."""
        if self.audit.chosen == RAW:
            arguments = "mean, std" if self.scores.levels is None else "quantiles, levels"
            lines = ["import trueup", f"print(trueup.metrics.evaluate_forecasts({arguments}, targets))"]
            return "These lines evaluate the forecasts again on new data:", [lines]
        command = (
            f"trueup fit VAL --mean MEAN --std STD --target TARGET -m {self.audit.chosen} -o recalibrator.safetensors"
        )
        load = 'recalibrator = trueup.load("recalibrator.safetensors")'
        lines = ["import trueup", load, "quantiles = recalibrator.quantiles(mean, std, levels=[0.05, 0.5, 0.95])"]
        text = "The command fits the recalibration and writes it to a file; the lines apply it to forecasts:"
        return text, [[command], lines]

    def details(self) -> list[tuple[str, str]]:
        """Return rows, the rule of choice and the settings."""
        audit, scores = self.audit, self.scores
        folds = "" if audit.comparison is None else f"; recalibrations are cross-fitted in {audit.n_folds} folds"
        items = [*self.row_counts(f"{scores.rows:,}{folds}"), ("Forecasts", scores.caption().partition(", ")[2])]
        if audit.failure:
            items.append(("Recalibration", f"left out: {audit.failure}"))
        if audit.choice is not None:
            rule = "the simplest within one standard error of the lowest pinball loss"
            items.append(("Choice", f"{rule} over {audit.n_folds} folds"))
        intervals = "errors from 1,000 resamples, means by the normal approximation"
        return [
            *items,
            ("Intervals", f"{format_percent(scores.level)}: {intervals}; changes are paired"),
            ("Bands", "binomial, for calibrated forecasts and the same number of independent rows"),
            ("Seed", str(audit.seed)),
        ]
