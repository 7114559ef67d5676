"""Forecasts of a number: how calibrated they are, which recalibration helps and by how much, and the page about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import ndtri

from trueup._core.arrays import as_weights
from trueup._core.errors import InputError
from trueup._core.formatting import escape, format_number, format_percent
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
_MANY = 20_000_000
"""Quantiles that are held at once; of more rows fewer levels are compared."""


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
    n_folds: int
    seed: int
    sample_weight: np.ndarray | None = None
    failure: str = ""
    """Why recalibration was left out, where it could not be fitted."""

    @property
    def chosen(self) -> str:
        """The recalibration that is recommended, or "raw"."""
        return RAW if self.choice is None else self.choice.chosen

    @property
    def title(self) -> str:
        """The title of the recommended recalibration."""
        return RECALIBRATION_TITLES[self.chosen]

    def verdict(self) -> str:
        """What was found, in a few sentences."""
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

    Forecasts are triples (mean, std, targets), or (quantiles, levels, targets), which are scored as they are; a
    `trueup.io.ForecastTable` has weights and clusters too. Recalibrations are fitted to `val` and scored on `test`, or
    cross-fitted on `val`. `.save("report.html")` writes the page, and `.audit` holds all numbers.

    >>> rng = np.random.default_rng(0)
    >>> page = report_forecasts((np.zeros(600), np.ones(600), 2 * rng.normal(size=600)))
    >>> page.audit.chosen
    'variance'
    """
    calibration, scored = (x if isinstance(x, ForecastTable) else ForecastTable(*x) for x in (val, test or val))
    given, scored_forecast = check_forecast(*calibration), check_forecast(*scored)
    if type(scored_forecast) is not type(given):
        raise InputError("test", "hold forecasts of the kind that val has", type(scored_forecast).__name__)
    w = as_weights(scored.sample_weight, len(scored_forecast.targets))
    options: dict[str, Any] = {"level": level, "seed": seed, "sample_weight": w, "clusters": scored.clusters or None}
    audit = ForecastAudit(
        scores=evaluate_forecasts(*scored, **options),
        comparison=None,
        choice=None,
        triples={RAW: scored.triple},
        calibration_rows=len(given.targets),
        cross_fitted=test is None,
        n_folds=n_folds,
        seed=seed,
        sample_weight=w,
    )
    if isinstance(given, GaussianForecast) and isinstance(scored_forecast, GaussianForecast):
        try:
            choice = choose_recalibration(*calibration, methods=methods, n_folds=n_folds, **calibration.options())
        except ValueError as error:  # a std of 0, say: the forecasts can still be scored
            audit = replace(audit, failure=str(error))
        else:
            audit = _with_recalibrations(audit, choice, scored_forecast, options)
    return Report(audit, DEFAULT_TITLE if title is None else title)


def _with_recalibrations(
    audit: ForecastAudit, choice: RecalibrationChoice, scored: GaussianForecast, options: dict[str, Any]
) -> ForecastAudit:
    """The audit with every recalibration, all compared by their quantiles of the same levels."""
    step = 1 if len(scored.targets) * len(LEVELS) <= _MANY else 5
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
    """The page about an audit of forecasts."""

    about = "Forecast"

    def facts(self) -> list[tuple[str, str]]:
        """CRPS, coverage and the error of the PIT."""
        scores = self.scores
        facts = [("CRPS", format_number(scores["crps"].value, digits=scores.digits("crps")))]
        covered = [metric for metric in scores.metrics if metric.startswith("coverage_")]
        if covered:
            share = format_percent(scores[covered[-1]].value, 1)
            facts.append((f"Targets in {covered[-1].partition('_')[2]} % intervals", share))
        facts.append(("PIT error", f"{scores['pit_error'].value:.3f}"))
        facts.append(("PIT error if calibrated", f"{scores.tests[scores.methods[0]].expected:.3f}"))
        return facts

    def tables(self) -> str:
        """The numbers of the forecasts as they are, and of the recalibrations."""
        scores, comparison = self.scores, self.audit.comparison
        head, *rows = scores.table()
        parts = [markup.table("The forecasts as they are", head, rows), *map(paragraph, scores.notes()[1:])]
        if comparison is not None:
            fits = "on rows that they were not fitted to"
            if self.audit.cross_fitted:
                fits = "each row under a fit to the other folds"
            star = f"* differs from no recalibration: the paired {format_percent(scores.level)} interval excludes 0."
            # Metrics by row, methods by column, since there are few methods.
            heads = ["metric", *(RECALIBRATION_TITLES.get(name, name) for name in comparison.methods)]
            rows = [[metric, *self.cells(metric)] for metric in comparison.metrics]
            parts += [
                paragraph(f"Recalibrations are compared by the same quantiles of each, {fits}."),
                markup.table("With recalibration", heads, rows),
                paragraph(star),
            ]
        return markup.section("numbers", "All numbers", *parts)

    def cells(self, metric: str) -> Iterator[str]:
        """A metric of each recalibration, with a star where the paired interval excludes 0."""
        scores = self.audit.comparison
        for name in scores.methods:
            change = scores.changes.get(name, {}).get(metric)
            star = "*" if change is not None and (change.low > 0 or change.high < 0) else ""
            yield format_number(scores[name, metric].value, digits=scores.digits(metric)) + star

    def usage(self) -> tuple[str, list[list[str]]]:
        """Commands and lines that apply the chosen recalibration."""
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
        """Rows, the choice and the settings."""
        audit, scores = self.audit, self.scores
        folds = "" if audit.comparison is None else f"; recalibrations are cross-fitted in {audit.n_folds} folds"
        items = [*self.row_counts(f"{scores.rows:,}{folds}"), ("Forecasts", scores.caption().partition(", ")[2])]
        if audit.failure:
            items.append(("Recalibration", f"left out: {audit.failure}"))
        if audit.choice is not None:
            rule = "folds; of those within one standard error of it, the simplest"
            items.append(("Choice", f"least pinball loss over {audit.n_folds} {rule}"))
        intervals = f"{format_percent(scores.level)}; of errors by 1,000 resamples, of means the normal ones; "
        return [
            *items,
            ("Intervals", f"{intervals}changes are paired"),
            ("Bands", "binomial, as calibrated forecasts of as many independent rows would show"),
            ("Seed", str(audit.seed)),
        ]
