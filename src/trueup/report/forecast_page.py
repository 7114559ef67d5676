"""The report on forecasts of a number: one HTML file with the verdict, the evidence, and how it was computed."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from trueup.calibrators.recalibration_choice import RAW
from trueup.core import __version__
from trueup.core.formatting import format_number, format_percent
from trueup.io.atomic import atomic_write
from trueup.metrics.forecast_table import ForecastScores
from trueup.report import html as markup
from trueup.report.figures import coverage_curve, pit_histogram
from trueup.report.forecast_audit import RECALIBRATION_TITLES, ForecastAudit
from trueup.report.html import definition_list, escape, paragraph
from trueup.report.page import Page

DEFAULT_TITLE = "Forecast report"


@dataclass(frozen=True, eq=False)
class ForecastReport:
    """A page about an audit of forecasts."""

    audit: ForecastAudit
    title: str

    def html(self) -> str:
        """The whole page, which loads nothing."""
        return _ForecastPage(self).html()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file that is either complete or not there."""
        page = self.html()
        with atomic_write(Path(path)) as (draft,):
            draft.write_text(page, encoding="utf-8")


def report_forecasts(audit: ForecastAudit, *, title: str | None = None) -> ForecastReport:
    """Make the page about an audit of forecasts; `.save("report.html")` writes it.

    >>> import numpy as np
    >>> from trueup.report.forecast_audit import audit_forecasts
    >>> rng = np.random.default_rng(0)
    >>> result = audit_forecasts((np.zeros(100), np.ones(100), rng.normal(size=100)))
    >>> report_forecasts(result, title="a toy").html()[:15]
    '<!doctype html>'
    """
    return ForecastReport(audit, DEFAULT_TITLE if title is None else title)


class _ForecastPage(Page):
    def __init__(self, report: ForecastReport) -> None:
        super().__init__(report.title)
        self.audit = report.audit
        sections = (figure.section(report.audit) for figure in (pit_histogram, coverage_curve))
        evidence = [self.section(section) for section in sections if section is not None]
        self.body = (
            f'<a class="skip" href="#pit">Skip to the evidence</a>{self.header()}'
            f"<main>{''.join([*evidence, self.tables(), self.usage(), self.details()])}</main>{markup.footer()}"
        )

    def header(self) -> str:
        scores = self.audit.scores
        facts = [("CRPS", format_number(scores["crps"].value, digits=scores.digits("crps")))]
        covered = [metric for metric in scores.metrics if metric.startswith("coverage_")]
        if covered:
            share = format_percent(scores[covered[-1]].value, 1)
            facts.append((f"Targets in {covered[-1].partition('_')[2]} % intervals", share))
        facts.append(("PIT error", f"{scores['pit_error'].value:.3f}"))
        facts.append(("PIT error if calibrated", f"{scores.tests[scores.methods[0]].expected:.3f}"))
        worth = ""
        if scores.effective_rows is not None:
            worth = paragraph(
                "Rows count by their weights in every figure of this page: "
                f"{scores.rows:,} rows tell as much as {scores.effective_rows:,.0f} of equal weight."
            )
        title = escape(self.title)
        heading = title if self.title == DEFAULT_TITLE else f"<span>Forecasts of</span> {title}"
        return (
            f"<header><h1>{heading}</h1>{paragraph(self.audit.verdict(), 'verdict')}{definition_list(facts, 'facts')}"
            f"{worth}"
            "<noscript><p>The charts need JavaScript; the tables under them hold the same numbers.</p></noscript>"
            "</header>"
        )

    def tables(self) -> str:
        """The numbers of the forecasts as they are, and of the recalibrations beside them."""
        scores, comparison = self.audit.scores, self.audit.comparison
        head, *rows = scores.table()
        parts = [markup.table("The forecasts as they are", head, rows)]
        parts += [paragraph(note) for note in scores.notes()[1:]]
        if comparison is not None:
            heads, lines = _comparison_rows(comparison, self.audit.chosen)
            parts.append(
                paragraph(
                    "Recalibrations are compared by the same quantiles of each, "
                    + (
                        "each row under a fit to the other folds."
                        if self.audit.cross_fitted
                        else "on rows that they were not fitted to."
                    )
                )
            )
            parts.append(markup.table("With recalibration", heads, lines))
            parts.append(
                paragraph(
                    f"* differs from no recalibration: the paired {format_percent(scores.level)} interval excludes 0."
                )
            )
        return markup.section("numbers", "All numbers", *parts)

    def usage(self) -> str:
        if self.audit.chosen == RAW:
            lines = ["import trueup", "print(trueup.evaluate_forecasts(mean, std, targets))"]
            text = "These lines evaluate the forecasts again on new data:"
            if self.audit.scores.levels is not None:
                lines[1] = "print(trueup.evaluate_forecasts(quantiles, levels, targets))"
            return markup.section("use", "What to do next", paragraph(text), markup.code(lines))
        text = "The command fits the recalibration and writes it to a file; the lines apply it to forecasts:"
        command = [
            f"trueup fit VAL --mean MEAN --std STD --target TARGET -m {self.audit.chosen} -o recalibrator.safetensors"
        ]
        lines = [
            "from trueup.io import load_recalibrator",
            'recalibrator = load_recalibrator("recalibrator.safetensors")',
            "quantiles = recalibrator.quantiles(mean, std, levels=[0.05, 0.5, 0.95])",
        ]
        return markup.section("use", "How to use it", paragraph(text), markup.code(command), markup.code(lines))

    def details(self) -> str:
        audit, scores = self.audit, self.audit.scores
        counts = [("Rows", f"{scores.rows:,}")]
        if audit.comparison is not None and audit.cross_fitted:
            counts = [("Rows", f"{scores.rows:,}; recalibrations are cross-fitted in {audit.folds} folds")]
        elif not audit.cross_fitted:
            counts = [("Calibration rows", f"{audit.calibration_rows:,}"), ("Test rows", f"{scores.rows:,}")]
        packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "scipy", "plotly"))
        items = [*counts, ("Forecasts", scores.caption().partition(", ")[2])]
        if audit.failure:
            items.append(("Recalibration", f"left out: {audit.failure}"))
        if audit.choice is not None:
            rule = (
                f"least pinball loss over {audit.folds} folds; of those within one standard error of it, the simplest"
            )
            items.append(("Choice", rule))
        items += [
            ("Intervals", f"{format_percent(scores.level)}; of errors by 1,000 resamples, of means the normal ones; "
             "changes are paired"),
            ("Bands", "binomial, as calibrated forecasts of as many independent rows would show"),
            ("Seed", str(audit.seed)),
            ("Versions", f"trueup {__version__}, Python {platform.python_version()}, {packages}"),
        ]  # fmt: skip
        return markup.section("how", "How it was computed", definition_list(items, "how"))


def _comparison_rows(scores: ForecastScores, chosen: str) -> tuple[list[str], list[list[str]]]:
    """Metrics by row, methods by column, since there are few methods; a star where the paired interval excludes 0."""
    heads = ["metric", *(RECALIBRATION_TITLES.get(name, name) for name in scores.methods)]
    rows = []
    for metric in scores.metrics:
        cells = []
        for name in scores.methods:
            change = scores.changes.get(name, {}).get(metric)
            mark = "*" if change is not None and (change.low > 0 or change.high < 0) else ""
            cells.append(format_number(scores[name, metric].value, digits=scores.digits(metric)) + mark)
        rows.append([metric, *cells])
    return heads, rows
