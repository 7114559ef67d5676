"""The report: one HTML file with the verdict of an audit, the evidence for it, and how it was computed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

from trueup.core import __version__
from trueup.core.formatting import format_percent
from trueup.io.atomic import atomic_write
from trueup.io.source import file_list, is_address
from trueup.report import html as markup
from trueup.report.audit import RAW, Audit, method_title
from trueup.report.figures import Panel, Section, chart, numbers, sections, summary
from trueup.report.html import definition_list, escape, paragraph
from trueup.report.style import DARK

DEFAULT_TITLE = "Calibration report"


@dataclass(frozen=True, eq=False)
class Report:
    """A page about an audit."""

    audit: Audit
    title: str
    sections: tuple[tuple[str, str], ...]
    names: tuple[str, ...] | None
    origin: tuple[tuple[str, str], ...] = ()
    """What it was made from, term by term: the files, the command."""
    made: datetime | None = None

    def html(self) -> str:
        """The whole page, which loads nothing."""
        return _Page(self).html()

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
    audit: Audit,
    *,
    title: str | None = None,
    sections: Sequence[tuple[str, str]] = (),
    names: Sequence[str] | None = None,
    origin: Mapping[str, str] | None = None,
    made: datetime | None = None,
) -> Report:
    """Make the page about an audit; `.save("report.html")` writes it.

    `sections` are further headings with HTML, which is trusted, for the end of the page; `names` those of the classes.
    `origin` says what it was made from, term by term, such as files and the command; `made` is its date, or else now.

    >>> import numpy as np
    >>> from trueup.report.audit import audit
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(300, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> result = audit((3 * z, y), methods=["temperature"])
    >>> report(result, title="a toy").html()[:15]
    '<!doctype html>'
    """
    classes = audit.scores.classes
    if names is not None and len(names) != classes:
        raise ValueError(f"names must have {classes} entries, one a class, got {len(names)}")
    named = None if names is None else tuple(map(str, names))
    heading = DEFAULT_TITLE if title is None else title
    when = datetime.now(UTC) if made is None else made
    return Report(audit, heading, tuple(sections), named, tuple((origin or {}).items()), when)


def describe_file(path: str | os.PathLike[str]) -> str:
    """A file by its name, size and SHA-256, so that a reader can tell which it was; an address by its name alone."""
    name = os.fspath(path)
    if is_address(name):
        return name
    parts = [part for part in file_list(Path(name)) if part.is_file()]
    return (
        "; ".join(f"{part.name}, {part.stat().st_size:,} bytes, SHA-256 {_file_digest(part)}" for part in parts) or name
    )


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Page:
    """A page while it is put together; its charts are collected for the end."""

    def __init__(self, title: str) -> None:
        self.title, self.body = title, ""
        self.charts: dict[str, str] = {}

    def html(self) -> str:
        """The whole page."""
        from plotly.offline import get_plotlyjs

        script = files("trueup.report").joinpath("page.js").read_text("utf-8")
        scripts = [get_plotlyjs().replace("</script", "<\\/script"), script]
        allowed = " ".join(f"'sha256-{_digest(each)}'" for each in scripts)
        policy = (
            f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
            "form-action 'none'"
        )
        charts = "{" + ",".join(f"{json.dumps(name)}:{chart}" for name, chart in self.charts.items()) + "}"
        data = {"charts": charts, "dark": json.dumps(DARK)}
        return markup.document(
            self.title,
            self.body,
            *(
                f'<script type="application/json" id="{name}">{markup.embed_json(value)}</script>'
                for name, value in data.items()
            ),
            *(f"<script>{each}</script>" for each in scripts),
            policy=policy,
        )

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


class _Page(Page):
    """The page about an audit."""

    def __init__(self, report: Report) -> None:
        super().__init__(report.title)
        self.audit, self.origin, self.made = report.audit, report.origin, report.made
        evidence = [self.section(section) for section in sections(report.audit, report.names)]
        extra = [
            markup.section(f"extra-{k}", heading, f'<div class="extra">{inner}</div>')
            for k, (heading, inner) in enumerate(report.sections)
        ]
        self.body = (
            f'<a class="skip" href="#reliability">Skip to the evidence</a>{self.header()}'
            f"<main>{''.join([*evidence, *extra, self.usage(), self.details()])}</main>{markup.footer()}"
        )

    def header(self) -> str:
        scores, chosen = self.audit.scores, self.audit.chosen
        claim, outcome = ("predicted", "observed") if scores.is_event else ("confidence", "accuracy")
        heads = ("Mean predicted", "Observed rate") if scores.is_event else ("Mean confidence", "Accuracy")
        facts = [
            (heads[0], format_percent(scores[RAW, claim].value, 1)),
            (heads[1], format_percent(scores[RAW, outcome].value, 1)),
            ("Calibration error (ECE)", f"{scores[RAW, 'ece'].value:.3f}"),
        ]
        if chosen == RAW:
            facts.append(("ECE if it were calibrated", f"{scores.tests[RAW].expected:.3f}"))
        else:
            facts.append(("ECE after calibration", f"{scores[chosen, 'ece'].value:.3f}"))
            if (fitted := getattr(self.audit.calibrators.get("temperature"), "temperature", None)) is not None:
                facts.append(("Fitted temperature", f"{float(fitted):.3f}"))
        worth = ""
        if scores.effective_rows is not None:
            worth = paragraph(
                "Rows count by their weights, which have a mean of 1, in every figure of this page: "
                f"{scores.rows:,} rows tell as much as {scores.effective_rows:,.0f} of equal weight."
            )
        if scores.clusters is not None:
            name = scores.cluster_name
            worth += paragraph(
                f"The {scores.rows:,} rows are of {scores.clusters:,} clusters ({name}) and not independent: intervals "
                f"and tests of this page are by {name}, and folds keep the rows of one {name} together. Promises of an "
                "error rate, which count independent rows, are left out."
            )
        title = escape(self.title)
        heading = title if self.title == DEFAULT_TITLE else f"<span>Calibration of</span> {title}"
        return (
            f"<header><h1>{heading}</h1>{paragraph(self.audit.verdict(), 'verdict')}{definition_list(facts, 'facts')}"
            f"{worth}"
            "<noscript><p>The charts need JavaScript; the tables under them hold the same numbers.</p></noscript>"
            "</header>"
        )

    def usage(self) -> str:
        chosen = self.audit.chosen
        if chosen == RAW:
            text = "No calibrator is needed. These lines evaluate the network again on new data:"
            lines = ["import trueup", "scores = trueup.evaluate(logits, labels)", "print(scores)"]
            return markup.section("use", "What to do next", paragraph(text), markup.code(lines))
        text = "The command fits the calibrator and writes it to a file; the three lines apply it to logits:"
        lines = [
            "import trueup",
            'calibrator = trueup.load_calibrator("calibrator.safetensors")',
            "logits = calibrator(logits)  # their softmax is the calibrated probability",
        ]
        command = [f"trueup fit VAL -m {chosen} -o calibrator.safetensors"]
        return markup.section("use", "How to use it", paragraph(text), markup.code(command), markup.code(lines))

    def details(self) -> str:
        audit, scores = self.audit, self.audit.scores
        if audit.cross_fitted:
            rows = (
                f"{audit.calibration_rows:,}, cross-fitted: each was scored by a calibrator fitted on the other folds. "
                "The choice was made on the same rows, which favours the chosen method a little."
            )
            counts = [("Rows", rows)]
        else:
            counts = [("Calibration rows", f"{audit.calibration_rows:,}"), ("Test rows", f"{scores.rows:,}")]
        packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "scipy", "plotly"))
        what = ("Event", scores.event_name) if scores.is_event else ("Classes", f"{scores.classes:,}")
        drawn = (
            "the event happens with its predicted probability"
            if scores.is_event
            else ("each prediction is right with the probability of its confidence")
        )
        items = [
            *counts,
            what,
            ("Bins", f"{audit.bins} of equal width"),
            ("Choice", f"least log-loss over {audit.folds} folds of the calibration rows; of those within one standard "
             "error of it, the simplest. The test rows were not used." if not audit.cross_fitted else
             f"least log-loss over {audit.folds} folds; of those within one standard error of it, the simplest."),
            ("Intervals", f"{format_percent(scores.level)}, from 1,000 bootstrap resamples; changes are paired"),
            ("Bands", f"from 1,000 resamples in which {drawn}"),
            *(() if (fitted := audit.calibrators.get(audit.chosen)) is None else (("Calibrator", repr(fitted)),)),
            ("Seed", str(audit.seed)),
            ("Seconds of fitting", f"{sum(audit.seconds.values()):.1f} in total"),
            ("Versions", f"trueup {__version__}, Python {platform.python_version()}, {packages}"),
        ]  # fmt: skip
        made = () if self.made is None else (("Made", f"{self.made.astimezone(UTC):%Y-%m-%d %H:%M} UTC"),)
        items = [*made, *self.origin, *items]
        items += [(f"Could not be fitted: {method_title(name)}", why) for name, why in audit.failures.items()]
        items += [(f"Warning: {method_title(name)}", "; ".join(each)) for name, each in audit.warnings.items()]
        return markup.section("how", "How it was computed", definition_list(items, "how"))


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
