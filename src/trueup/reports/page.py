"""The report page: one HTML file with the verdict of an audit, the evidence, and the methods used."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from html import unescape
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from trueup._core import __version__
from trueup._core.bins import BINS
from trueup._core.errors import InputError
from trueup._core.formatting import TableCell, format_number, format_p, format_percent
from trueup._core.row_scores import event_name
from trueup._core.types import ArrayLike
from trueup.calibrators.compose import Fit
from trueup.convert import as_event, number_labels
from trueup.io.atomic import atomic_write
from trueup.io.source import file_list, is_address
from trueup.reports import html as markup
from trueup.reports.audit import RAW, Audit, Rows, fits_of, mean_metrics, method_title, methods_for, run_audit
from trueup.reports.figures import Panel, Section, chart, numbers, percent, sections, stages, summary
from trueup.reports.html import definition_list, escape, paragraph
from trueup.reports.style import label

if TYPE_CHECKING:
    from trueup.reports.forecasts import ForecastAudit

DEFAULT_TITLE = "Calibration report"
# Test → its title
_TESTS = {
    "ece": "Calibration error, bins of equal width",
    "aece": "Calibration error, bins of equal mass",
    "mean": "Mean prediction",
    "regression": "Intercept and slope together",
    "intercept": "Intercept",
    "slope": "Slope",
    "classes": "Probability of each class",
    "all": "All tests, corrected",
}
A = TypeVar("A", bound="Audit | ForecastAudit")


@dataclass(frozen=True, eq=False)
class Report(Generic[A]):
    """An audit with the settings of its page.

    Parameters
    ----------
    audit
        The audit.
    title
        Title of the page.
    sections
        Further sections for the end of the page: headings and HTML, which is not escaped.
    class_names
        Names of the classes.
    origin
        Source of the data, as terms and descriptions: the files, the command.
    made
        Time of the report.
    """

    audit: A
    title: str = DEFAULT_TITLE
    _: KW_ONLY
    sections: tuple[tuple[str, str], ...] = ()
    class_names: tuple[str, ...] | None = None
    origin: Mapping[str, str] = field(default_factory=dict)
    made: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        classes = getattr(self.audit.scores, "n_classes", None)
        if self.class_names is not None and len(self.class_names) != classes:
            raise ValueError(f"class_names must have {classes} entries, one per class, got {len(self.class_names)}")

    def html(self) -> str:
        """Return the whole page; it loads no other files."""
        if isinstance(self.audit, Audit):
            return AuditPage(self).html()
        from trueup.reports.forecasts import ForecastPage

        return ForecastPage(self).html()

    def __repr__(self) -> str:
        return f"Report({self.title!r}: {self.audit.verdict()})"

    def _repr_html_(self) -> str:
        return f"{markup.paragraph(self.title)}{self.audit._repr_html_()}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file; on failure, no partial file remains.

        Parameters
        ----------
        path
            Path of the HTML file.
        """
        page = self.html()
        with atomic_write(Path(path)) as (draft,):
            draft.write_text(page, encoding="utf-8")


def report(
    val: tuple[ArrayLike, ArrayLike],
    test: tuple[ArrayLike, ArrayLike] | None = None,
    *,
    methods: Iterable[str] | Mapping[str, Fit] | None = None,
    event: int | str | None = None,
    class_names: Sequence[str] | None = None,
    sample_weight: ArrayLike | None = None,
    test_weights: ArrayLike | None = None,
    groups: ArrayLike | Mapping[str, ArrayLike] | None = None,
    clusters: ArrayLike | None = None,
    test_clusters: ArrayLike | None = None,
    extra: Mapping[str, tuple[ArrayLike, ArrayLike]] | None = None,
    title: str | None = None,
    sections: Sequence[tuple[str, str]] = (),
    origin: Mapping[str, str] | None = None,
    bins: int = BINS,
    n_folds: int = 5,
    level: float = 0.95,
    seed: int = 0,
    on_step: Callable[[str, int, int], None] | None = None,
    progress: bool = True,
) -> Report[Audit]:
    """Fit calibration methods, score them, choose one, and lay out a page about it.

    Every method is fitted to the calibration rows `val`. Cross-validation chooses one there: the simplest whose
    held-out log-loss is within a standard error of the lowest. All are scored on the rows `test`.

    Parameters
    ----------
    val
        Calibration rows: logits (n, classes) and labels (n,).
    test
        Test rows. Without them, each calibration row is scored by a calibrator fitted to the other folds.
    methods
        Names of METHODS, or methods by name, the simplest first. The default depends on the size of the data and
        includes `auto` up to 100,000 logits.
    event
        A class, by its number or its name among `class_names`; the report is then about the probability of that class.
        With two classes the event is always class 1.
    class_names
        Names of the classes.
    sample_weight
        Weights of the calibration rows, shape (n,).
    test_weights
        Weights of the test rows.
    groups
        Groups of the scored rows to report on: one array (n,), or several by name.
    clusters
        Cluster of each calibration row, shape (n,), where rows are correlated. Folds keep clusters intact; intervals
        and tests resample clusters.
    test_clusters
        Cluster of each test row.
    extra
        Further test predictions by name, scored in the same table.
    title
        Title of the page.
    sections
        Further sections for the end of the page: headings and HTML, which is not escaped.
    origin
        Source of the data, as terms and descriptions: the files, the command.
    bins
        Number of bins.
    n_folds
        Number of folds.
    level
        Level of the intervals.
    seed
        Seed of the resampling.
    on_step
        Called as `on_step(name, done, total)` before each method is fitted.
    progress
        Whether to show a progress bar.

    Returns
    -------
    Report
        The page: `.save("report.html")` writes it, and `.audit` holds the calibrators and all numbers.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(2000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> page = report((3 * z[:1000], y[:1000]), (3 * z[1000:], y[1000:]), methods=["temperature", "vector"])
    >>> page.audit.chosen
    'temperature'
    >>> print(page.audit.verdict())
    This network is overconfident: its mean confidence is 82.3 %, its accuracy 61.6 %. Temperature scaling calibrates
    it: the calibration error (ECE) falls from 0.2070 to 0.0319, where 0.0335 is expected by chance
    (p ≤ 0.41).
    """
    if isinstance(n_folds, bool) or not isinstance(n_folds, int) or n_folds < 2:
        raise InputError("n_folds", "be a whole number of at least 2", repr(n_folds))
    of_event = None
    if event is not None:
        of_event = partial(as_event, event=event, class_names=class_names)
    if class_names is not None:
        z, y = val
        val = z, number_labels(y, class_names)
    if class_names is not None and test is not None:
        z, y = test
        test = z, number_labels(y, class_names)
    val_rows = Rows.of(val, sample_weight, clusters, event=of_event, min_rows=2 * n_folds)
    test_rows = None if test is None else Rows.of(test, test_weights, test_clusters, event=of_event, min_rows=1)
    others = {name: pair if of_event is None else of_event(*pair) for name, pair in (extra or {}).items()}
    if methods is None:
        methods = methods_for(*val_rows.logits.shape, auto=True)
    result = run_audit(
        val_rows,
        test_rows,
        fits_of(methods, others),
        n_folds=n_folds,
        scoring={"bins": bins, "level": level, "seed": seed, "groups": groups},
        extra=others,
        on_step=on_step,
        progress=progress,
    )
    if result.scores.is_event:
        name = event_name(event, np.shape(val[0])[1], class_names)
        result = replace(result, scores=replace(result.scores, event_name=name))
    return Report(
        result,
        DEFAULT_TITLE if title is None else title,
        sections=tuple(sections),
        class_names=None if class_names is None or result.scores.is_event else tuple(map(str, class_names)),
        origin=origin or {},
    )


def _p_value(p: float) -> str:
    return f"{p:.3f}" if p > 0.001 else "≤ 0.001"


def describe_file(path: str | os.PathLike[str]) -> str:
    """Return a file's name, size and SHA-256, which identify it; an address is returned as it is."""
    name = os.fspath(path)
    if is_address(name):
        return name
    parts = []
    for part in file_list(Path(name)):
        if part.is_file():
            with part.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            parts.append(f"{part.name}, {part.stat().st_size:,} bytes, SHA-256 {digest}")
    return "; ".join(parts) or name


class Page(ABC):
    """A page under construction; the data of its charts are written at the end."""

    kind: str
    """First word of the default title."""

    def __init__(self, report: Report[Any]) -> None:
        self.report, self.audit, self.scores = report, report.audit, report.audit.scores
        self.charts: dict[str, dict[str, Any]] = {}

    @abstractmethod
    def facts(self) -> list[tuple[str, str | TableCell]]:
        """Return the most important numbers, for the header."""

    def notes(self) -> list[str]:
        """Return notes on the rows, for the header."""
        if self.scores.effective_rows is None:
            return []
        return [
            "All figures of this page weight the rows; the weights have a mean of 1. "
            f"The {self.scores.rows:,} rows are equivalent to {self.scores.effective_rows:,.0f} rows of equal weight."
        ]

    def tables(self) -> str:
        """Return a section with the numbers behind the figures."""
        return ""

    @abstractmethod
    def usage(self) -> tuple[str, list[list[str]]]:
        """Return a text and blocks of code that show how to use the calibrator, or what to do next."""

    @abstractmethod
    def details(self) -> list[tuple[str, str]]:
        """Return the settings of the computation, as terms and descriptions."""

    def row_counts(self, cross_fitted: str) -> list[tuple[str, str]]:
        """Return the numbers of rows; `cross_fitted` is the text for cross-fitted rows."""
        if self.audit.cross_fitted:
            return [("Rows", cross_fitted)]
        return [("Calibration rows", f"{self.audit.calibration_rows:,}"), ("Test rows", f"{self.scores.rows:,}")]

    def html(self) -> str:
        """Return the whole page."""
        shown = list(sections(self.audit, self.report.class_names))
        extra = [
            markup.section(f"extra-{k}", heading, f'<div class="extra">{inner}</div>')
            for k, (heading, inner) in enumerate(self.report.sections)
        ]
        text, blocks = self.usage()
        heading = "What to do next" if self.audit.chosen == RAW else "How to use it"
        use = markup.section("use", heading, paragraph(text), *map(markup.code, blocks))
        parts = [use, *map(self.section, shown), self.tables(), *extra, self.how()]
        skip = f'<a class="skip" href="#{shown[0].name}">Skip to the evidence</a>'
        headings = re.findall(r'<h2 id="(.*?)-h">(.*?)</h2>', "".join(parts))
        listed = markup.contents((name, unescape(heading)) for name, heading in headings)
        body = f"{skip}{self.header()}{listed}<main>{''.join(parts)}</main>{markup.footer()}"
        folder = files("trueup.reports")
        script = "".join(folder.joinpath(name).read_text("utf-8") for name in ("chart.js", "page.js"))
        digest = b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
        policy = (
            f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
            "base-uri 'none'; form-action 'none'"
        )
        looks = f"<style>{folder.joinpath('chart.css').read_text('utf-8')}</style>"
        data = markup.json_script("charts", json.dumps(self.charts, ensure_ascii=False))
        module = f'<script type="module">{script}</script>'
        return markup.document(self.report.title, looks, body, data, module, policy=policy)

    def header(self) -> str:
        """Return the title, the verdict and the most important numbers."""
        title = escape(self.report.title)
        heading = title if self.report.title == f"{self.kind} report" else f"<span>{self.kind} of</span> {title}"
        return (
            f"<header><h1>{heading}</h1>{paragraph(self.report.audit.verdict(), 'verdict')}"
            f"{definition_list(self.facts(), 'facts')}{''.join(map(paragraph, self.notes()))}"
            "<noscript><p>The charts need JavaScript; the tables below them contain the same numbers.</p></noscript>"
            "</header>"
        )

    def how(self) -> str:
        """Return the section on the computation: time, data, settings and versions."""
        made = "Made", f"{self.report.made.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "scipy"))
        versions = "Versions", f"trueup {__version__}, Python {platform.python_version()}, {packages}"
        items = [made, *self.report.origin.items(), *self.details(), versions]
        return markup.section("how", "How it was computed", definition_list(items, "how"))

    def section(self, section: Section) -> str:
        """Return a figure's section: its text, charts, summaries and numbers."""
        legend = markup.legend(section.legend) if section.legend else ""
        panels = "".join(map(self.panel, section.panels))
        if section.legend:  # charts with a common legend are placed side by side
            panels = f'<div class="pair{" one" if len(section.panels) == 1 else ""}">{panels}</div>'
        parts = paragraph(section.text), section.html, legend, panels
        return markup.section(section.name, section.title, *parts)

    def panel(self, panel: Panel) -> str:
        """Return a chart with its summary and numbers."""
        drawn = chart(panel.record, **panel.options)
        self.charts[panel.name] = drawn.to_dict()
        data = markup.table(panel.title, *numbers(panel.record)) if panel.numbered else ""
        text = panel.summary or summary(panel.record)
        return markup.figure(panel.name, panel.title, text, data)


class AuditPage(Page):
    """The page of an audit."""

    kind = "Calibration"

    def facts(self) -> list[tuple[str, str | TableCell]]:
        """Return mean confidence, accuracy and calibration error, before and after."""
        scores = self.scores
        facts: list[tuple[str, str | TableCell]] = [
            (label(metric), percent(scores[RAW, metric].value)) for metric in mean_metrics(scores)
        ]
        terms = ("Calibration error (ECE)", "ECE after calibration")
        for term, name in zip(terms, dict.fromkeys((RAW, self.audit.chosen)), strict=False):
            test = scores.tests[name]
            note = f"{format_number(test.expected)} expected if calibrated, {format_p(test.p_value)}"
            facts.append((term, TableCell(format_number(scores[name, "ece"].value), note=note)))
        if (fitted := getattr(self.audit.calibrators.get("temperature"), "temperature", None)) is not None:
            facts.append(("Fitted temperature", f"{float(fitted):.2f}"))
        return facts

    def notes(self) -> list[str]:
        """Return notes on weights and clusters."""
        notes, scores, name = super().notes(), self.scores, self.scores.cluster_name
        if scores.clusters is not None:
            notes.append(
                f"The {scores.rows:,} rows belong to {scores.clusters:,} clusters ({name}) and are not independent. "
                f"Intervals and tests are by {name}, and all rows of one {name} are in the same fold. Promises of an "
                "error rate need independent rows and are left out."
            )
        return notes

    def tables(self) -> str:
        """Return the p-values of the tests of calibration, before and after."""
        shown = stages(self.audit)
        tests = [self.scores.tests[stage.method] for stage in shown]
        columns = [{**test.components, "all": test.p_value} for test in tests]
        rows = [
            [title, *("–" if name not in column else _p_value(column[name]) for column in columns)]
            for name, title in _TESTS.items()
            if any(name in column for column in columns)
        ]
        text = (
            "Each test has the hypothesis that the predictions are calibrated. The verdict uses the smallest p-value, "
            "multiplied by the number of tests. Above 0.05 there is no evidence of miscalibration."
        )
        head = ["Test", *(stage.title for stage in shown)]
        return markup.section("tests", "Tests of calibration", paragraph(text), markup.table("P-values", head, rows))

    def usage(self) -> tuple[str, list[list[str]]]:
        """Return commands and lines that apply the chosen calibrator."""
        if self.audit.chosen == RAW:
            text = "No calibrator was chosen. These lines evaluate the network again on new data:"
            return text, [["import trueup", "scores = trueup.evaluate(logits, labels)", "print(scores)"]]
        text = "The command fits the calibrator and writes it to a file; the three lines apply it to logits:"
        load = 'calibrator = trueup.load("calibrator.safetensors")'
        lines = ["import trueup", load, "logits = calibrator(logits)  # softmax gives the calibrated probabilities"]
        return text, [[f"trueup fit VAL -m {self.audit.chosen} -o calibrator.safetensors"], lines]

    def details(self) -> list[tuple[str, str]]:
        """Return rows, settings, the rule of choice, failures and warnings."""
        audit, scores = self.audit, self.scores
        rows = (
            f"{audit.calibration_rows:,}, cross-fitted: each was scored by a calibrator fitted to the other folds. "
            "The same rows chose the method, which favours it slightly."
        )
        folds, unused = " of the calibration rows", " The test rows were not used."
        if audit.cross_fitted:
            folds = unused = ""
        choice = f"the simplest method within one standard error of the lowest log-loss over {audit.n_folds} folds"
        simulation = "each prediction is right with the probability of its confidence"
        if scores.is_event:
            simulation = "the event happens with its predicted probability"
        fitted = audit.calibrators.get(audit.chosen)
        return [
            *self.row_counts(rows),
            ("Event", str(scores.event_name)) if scores.is_event else ("Classes", f"{scores.n_classes:,}"),
            ("Bins", f"{audit.bins} of equal width"),
            ("Choice", f"{choice}{folds}.{unused}"),
            ("Intervals", f"{format_percent(scores.level)}, from 1,000 bootstrap resamples; changes are paired"),
            ("Bands", f"from 1,000 simulations in which {simulation}"),
            *(() if fitted is None else (("Calibrator", repr(fitted)),)),
            ("Seed", str(audit.seed)),
            ("Seconds of fitting", f"{sum(audit.seconds.values()):.1f} in total"),
            *((f"Could not be fitted: {method_title(name)}", why) for name, why in audit.failures.items()),
            *((f"Warning: {method_title(name)}", "; ".join(each)) for name, each in audit.warnings.items()),
        ]
