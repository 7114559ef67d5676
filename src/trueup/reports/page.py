"""The report: one HTML file with the verdict of an audit, the evidence for it, and how it was computed."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from trueup._core import __version__
from trueup._core.bins import BINS
from trueup._core.errors import InputError
from trueup._core.formatting import format_percent
from trueup._core.row_scores import event_name
from trueup.calibrators.compose import Fit
from trueup.io.atomic import atomic_write
from trueup.io.source import file_list, is_address
from trueup.reports import html as markup
from trueup.reports.audit import POOLED, RAW, Audit, Rows, fits_of, mean_metrics, method_title, methods_for, run_audit
from trueup.reports.figures import Panel, Section, chart, numbers, sections, summary
from trueup.reports.html import definition_list, escape, paragraph
from trueup.reports.style import DARK, label

if TYPE_CHECKING:
    from trueup.reports.forecasts import ForecastAudit

DEFAULT_TITLE = "Calibration report"
A = TypeVar("A", bound="Audit | ForecastAudit")


@dataclass(frozen=True, eq=False)
class Report(Generic[A]):
    """A page about an audit."""

    audit: A
    title: str = DEFAULT_TITLE
    _: KW_ONLY
    sections: tuple[tuple[str, str], ...] = ()
    """Further headings with HTML, which is trusted, for the end of the page."""
    class_names: tuple[str, ...] | None = None
    """Of the classes."""
    origin: Mapping[str, str] = field(default_factory=dict)
    """What it was made from, term by term: the files, the command."""
    made: datetime = field(default_factory=lambda: datetime.now(UTC))

    def __post_init__(self) -> None:
        classes = getattr(self.audit.scores, "n_classes", None)
        if self.class_names is not None and len(self.class_names) != classes:
            raise ValueError(f"class_names must have {classes} entries, one a class, got {len(self.class_names)}")

    def html(self) -> str:
        """The whole page, which loads nothing."""
        if isinstance(self.audit, Audit):
            return AuditPage(self).html()
        from trueup.reports.forecasts import ForecastPage

        return ForecastPage(self).html()

    def __repr__(self) -> str:
        return f"Report({self.title!r}: {self.audit.verdict()})"

    def _repr_html_(self) -> str:
        return f"{markup.paragraph(self.title)}{self.audit._repr_html_()}"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file that is either complete or not there."""
        page = self.html()
        with atomic_write(Path(path)) as (draft,):
            draft.write_text(page, encoding="utf-8")


def report(
    val: tuple[Any, Any],
    test: tuple[Any, Any] | None = None,
    *,
    methods: Iterable[str] | Mapping[str, Fit] | None = None,
    event: int | str | None = None,
    class_names: Sequence[str] | None = None,
    sample_weight: Any = None,
    test_weights: Any = None,
    groups: Any = None,
    clusters: Any = None,
    test_clusters: Any = None,
    extra: Mapping[str, tuple[Any, Any]] | None = None,
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

    Every method is fitted to the calibration pair `val`. One is chosen there by cross-validation: the simplest whose
    log-loss on held-out rows is within a standard error of the least. All are scored on the pair `test`; without it,
    each row is scored by a calibrator that was fitted to the other folds. `.save("report.html")` writes the page, and
    `.audit` holds the calibrators and all numbers.

    Parameters
    ----------
    val, test : pairs (logits, labels)
        Rows that the methods are fitted to, and rows that they are scored on.
    methods : names of METHODS or mapping of names to methods, optional
        What to try, the simplest first. By default those that suit the size of the data, and `auto` up to 100,000
        logits.
    event : int or str, optional
        A class, by its number or one of `class_names`: the report is then about the probability of that class. Two
        classes are always an event, class 1.
    class_names : sequence of str, optional
        Names of the classes.
    weights, test_weights : arrays (n,), optional
        One weight per row of each pair.
    groups : array (n,) or mapping of such, optional
        Subgroups of the scored rows to report on.
    clusters, test_clusters : arrays (n,), optional
        Which rows are correlated: folds keep them together, and intervals and tests resample clusters.
    extra : mapping of names to pairs, optional
        Test predictions made elsewhere, scored in the same table.
    title : str, optional
        Title of the page.
    sections : sequence of (heading, HTML), optional
        Further sections at the end of the page; the HTML is trusted.
    origin : mapping, optional
        What the page was made from, term by term, such as files and the command.
    bins, folds, level, seed
        Number of bins and folds, level of the intervals, seed of the resampling.
    on_step : callable, optional
        Called as `on_step(name, done, total)` before each method is fitted.
    progress : bool
        Whether to show a progress bar.

    Returns
    -------
    Report
        The page, with the audit that it is about.

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
    This network is overconfident: its mean confidence is 82 %, its accuracy 62 %. Temperature scaling calibrates it:
    the calibration error (ECE) falls from 0.207 to 0.032.
    """
    if isinstance(n_folds, bool) or not isinstance(n_folds, int) or n_folds < 2:
        raise InputError("n_folds", "be a whole number of at least 2", repr(n_folds))
    of_event = None
    if event is not None:
        from trueup.convert import as_event  # most audits are of no event

        of_event = partial(as_event, event=event, class_names=class_names)
    val_rows = Rows.of(val, sample_weight, clusters, event=of_event, min_rows=2 * n_folds)
    test_rows = None if test is None else Rows.of(test, test_weights, test_clusters, event=of_event, min_rows=1)
    others = {name: pair if of_event is None else of_event(*pair) for name, pair in (extra or {}).items()}
    n, classes = val_rows.logits.shape
    if methods is None:
        methods = [*methods_for(n, classes), *(["auto"] if n * classes <= POOLED else [])]
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
        named = event_name(event, np.shape(val[0])[1], class_names)
        result = replace(result, scores=replace(result.scores, event_name=named))
    return Report(
        result,
        DEFAULT_TITLE if title is None else title,
        sections=tuple(sections),
        class_names=None if class_names is None or result.scores.is_event else tuple(map(str, class_names)),
        origin=origin or {},
    )


def describe_file(path: str | os.PathLike[str]) -> str:
    """A file by its name, size and SHA-256, so that a reader can tell which it was; an address by its name alone."""
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
    """A page while it is put together; its charts are collected for the end."""

    about: str
    """What the page says of what, in front of its title."""

    def __init__(self, report: Report[Any]) -> None:
        self.report, self.audit, self.scores = report, report.audit, report.audit.scores
        self.charts: dict[str, str] = {}

    @abstractmethod
    def facts(self) -> list[tuple[str, str]]:
        """The most important numbers, for the head."""

    def notes(self) -> list[str]:
        """What to know of the rows, for the head."""
        if self.scores.effective_rows is None:
            return []
        return [
            "Rows count by their weights, which have a mean of 1, in every figure of this page: "
            f"{self.scores.rows:,} rows tell as much as {self.scores.effective_rows:,.0f} of equal weight."
        ]

    def tables(self) -> str:
        """A section of numbers behind the figures."""
        return ""

    @abstractmethod
    def usage(self) -> tuple[str, list[list[str]]]:
        """A text on what to do next, or on how to use what was fitted, and blocks of code."""

    @abstractmethod
    def details(self) -> list[tuple[str, str]]:
        """How it was computed, term by term."""

    def row_counts(self, cross_fitted: str) -> list[tuple[str, str]]:
        """How many rows there are, with these words where they were cross-fitted."""
        if self.audit.cross_fitted:
            return [("Rows", cross_fitted)]
        return [("Calibration rows", f"{self.audit.calibration_rows:,}"), ("Test rows", f"{self.scores.rows:,}")]

    def html(self) -> str:
        """The whole page."""
        from plotly.offline import get_plotlyjs

        shown = list(sections(self.audit, self.report.class_names))
        extra = [
            markup.section(f"extra-{k}", heading, f'<div class="extra">{inner}</div>')
            for k, (heading, inner) in enumerate(self.report.sections)
        ]
        text, blocks = self.usage()
        heading = "What to do next" if self.audit.chosen == RAW else "How to use it"
        use = markup.section("use", heading, paragraph(text), *map(markup.code, blocks))
        parts = [*map(self.section, shown), self.tables(), *extra, use, self.how()]
        skip = f'<a class="skip" href="#{shown[0].name}">Skip to the evidence</a>'
        body = f"{skip}{self.header()}<main>{''.join(parts)}</main>{markup.footer()}"
        script = files("trueup.reports").joinpath("page.js").read_text("utf-8")
        scripts = [get_plotlyjs().replace("</script", "<\\/script"), script]
        digests = (b64encode(hashlib.sha256(each.encode("utf-8")).digest()).decode("ascii") for each in scripts)
        allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
        policy = (
            f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
            "form-action 'none'"
        )
        charts = "{" + ",".join(f"{json.dumps(name)}:{chart}" for name, chart in self.charts.items()) + "}"
        data = markup.json_script("charts", charts) + markup.json_script("dark", json.dumps(DARK))
        elements = [data, *(f"<script>{each}</script>" for each in scripts)]
        return markup.document(self.report.title, body, *elements, policy=policy)

    def header(self) -> str:
        """The title, the verdict and the most important numbers."""
        title = escape(self.report.title)
        heading = title if self.report.title == f"{self.about} report" else f"<span>{self.about} of</span> {title}"
        return (
            f"<header><h1>{heading}</h1>{paragraph(self.report.audit.verdict(), 'verdict')}"
            f"{definition_list(self.facts(), 'facts')}{''.join(map(paragraph, self.notes()))}"
            "<noscript><p>The charts need JavaScript; the tables under them hold the same numbers.</p></noscript>"
            "</header>"
        )

    def how(self) -> str:
        """How it was computed, when, from what and with what."""
        made = "Made", f"{self.report.made.astimezone(UTC):%Y-%m-%d %H:%M} UTC"
        packages = ", ".join(f"{name} {version(name)}" for name in ("numpy", "scipy", "plotly"))
        versions = "Versions", f"trueup {__version__}, Python {platform.python_version()}, {packages}"
        items = [made, *self.report.origin.items(), *self.details(), versions]
        return markup.section("how", "How it was computed", definition_list(items, "how"))

    def section(self, section: Section) -> str:
        """A figure's section: what to know, the charts, their summaries and their numbers."""
        legend = markup.legend(section.legend) if section.legend else ""
        panels = "".join(map(self.panel, section.panels))
        if section.legend:  # charts that share a legend stand side by side
            panels = f'<div class="pair{" one" if len(section.panels) == 1 else ""}">{panels}</div>'
        parts = paragraph(section.text), section.html, legend, panels
        return markup.section(section.name, section.title, *parts)

    def panel(self, panel: Panel) -> str:
        """A chart with its words and numbers."""
        drawn = chart(panel.record, **panel.options)
        self.charts[panel.name] = drawn.to_json()
        data = markup.table(panel.title, *numbers(panel.record))
        words = panel.summary or summary(panel.record)
        return markup.figure(panel.name, panel.title, words, drawn.layout.height, data)


class AuditPage(Page):
    """The page about an audit."""

    about = "Calibration"

    def facts(self) -> list[tuple[str, str]]:
        """Mean confidence, accuracy and calibration error, before and after."""
        scores, chosen = self.scores, self.audit.chosen
        facts = [(label(metric), format_percent(scores[RAW, metric].value, 1)) for metric in mean_metrics(scores)]
        facts.append(("Calibration error (ECE)", f"{scores[RAW, 'ece'].value:.3f}"))
        if chosen == RAW:
            return [*facts, ("ECE if it were calibrated", f"{scores.tests[RAW].expected:.3f}")]
        facts.append(("ECE after calibration", f"{scores[chosen, 'ece'].value:.3f}"))
        if (fitted := getattr(self.audit.calibrators.get("temperature"), "temperature", None)) is not None:
            facts.append(("Fitted temperature", f"{float(fitted):.3f}"))
        return facts

    def notes(self) -> list[str]:
        """Also that rows are in clusters."""
        notes, scores, name = super().notes(), self.scores, self.scores.cluster_name
        if scores.clusters is not None:
            notes.append(
                f"The {scores.rows:,} rows are of {scores.clusters:,} clusters ({name}) and not independent: intervals "
                f"and tests of this page are by {name}, and folds keep the rows of one {name} together. Promises of an "
                "error rate, which count independent rows, are left out."
            )
        return notes

    def usage(self) -> tuple[str, list[list[str]]]:
        """Commands and lines that apply the chosen calibrator."""
        if self.audit.chosen == RAW:
            text = "No calibrator is needed. These lines evaluate the network again on new data:"
            return text, [["import trueup", "scores = trueup.evaluate(logits, labels)", "print(scores)"]]
        text = "The command fits the calibrator and writes it to a file; the three lines apply it to logits:"
        load = 'calibrator = trueup.load("calibrator.safetensors")'
        lines = ["import trueup", load, "logits = calibrator(logits)  # their softmax is the calibrated probability"]
        return text, [[f"trueup fit VAL -m {self.audit.chosen} -o calibrator.safetensors"], lines]

    def details(self) -> list[tuple[str, str]]:
        """Rows, settings, the choice, and what failed."""
        audit, scores = self.audit, self.scores
        rows = (
            f"{audit.calibration_rows:,}, cross-fitted: each was scored by a calibrator fitted on the other folds. "
            "The choice was made on the same rows, which favours the chosen method a little."
        )
        folds, unused = " of the calibration rows", " The test rows were not used."
        if audit.cross_fitted:
            folds = unused = ""
        choice = f"least log-loss over {audit.n_folds} folds{folds}; of those within one standard error, the simplest."
        drawn = "each prediction is right with the probability of its confidence"
        if scores.is_event:
            drawn = "the event happens with its predicted probability"
        fitted = audit.calibrators.get(audit.chosen)
        return [
            *self.row_counts(rows),
            ("Event", str(scores.event_name)) if scores.is_event else ("Classes", f"{scores.n_classes:,}"),
            ("Bins", f"{audit.bins} of equal width"),
            ("Choice", choice + unused),
            ("Intervals", f"{format_percent(scores.level)}, from 1,000 bootstrap resamples; changes are paired"),
            ("Bands", f"from 1,000 resamples in which {drawn}"),
            *(() if fitted is None else (("Calibrator", repr(fitted)),)),
            ("Seed", str(audit.seed)),
            ("Seconds of fitting", f"{sum(audit.seconds.values()):.1f} in total"),
            *((f"Could not be fitted: {method_title(name)}", why) for name, why in audit.failures.items()),
            *((f"Warning: {method_title(name)}", "; ".join(each)) for name, each in audit.warnings.items()),
        ]
