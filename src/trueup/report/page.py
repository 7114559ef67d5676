"""The report: one HTML file that says what was found, shows why, and tells how it was computed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from trueup.core.formatting import format_percent
from trueup.core.version import __version__
from trueup.io.atomic import atomic_write
from trueup.report import html as markup
from trueup.report import records
from trueup.report.audit import Audit
from trueup.report.charts import DARK, chart
from trueup.report.explain import SECTIONS, numbers, summary
from trueup.report.html import definition_list, escape, paragraph, section
from trueup.report.method_titles import RAW, title
from trueup.report.methods import methods_table


@dataclass(frozen=True, eq=False)
class Report:
    """A page about an audit."""

    audit: Audit
    title: str
    sections: tuple[tuple[str, str], ...]
    names: tuple[str, ...] | None

    def html(self) -> str:
        """The whole page, with all that it needs inside."""
        return _Page(self).html

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
) -> Report:
    """Make the page about an audit; `.save("report.html")` writes it.

    `sections` are further headings with HTML, which is trusted, to stand after the evidence; `names` those of the
    classes.

    >>> import numpy as np
    >>> from trueup.report.audit import audit
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(300, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> found = audit((3 * z, y), methods=["temperature"])
    >>> report(found, title="a toy").html()[:15]
    '<!doctype html>'
    """
    classes = audit.scores.classes
    if names is not None and len(names) != classes:
        raise ValueError(f"names must have {classes} entries, one a class, got {len(names)}")
    named = None if names is None else tuple(map(str, names))
    return Report(audit, "Calibration report" if title is None else title, tuple(sections), named)


class _Page:
    """The page while it is put together: the charts found on the way are gathered for the end."""

    def __init__(self, wanted: Report) -> None:
        self.wanted, self.audit = wanted, wanted.audit
        self.charts: dict[str, str] = {}
        before, after = self.audit.predictions[RAW], self.audit.predictions[self.audit.chosen]
        self.pairs = [("before", "As it is", before)]
        if self.audit.chosen != RAW:
            self.pairs.append(("after", f"After {_inside(title(self.audit.chosen))}", after))

    @cached_property
    def html(self) -> str:
        from plotly.offline import get_plotlyjs

        body = self.body()
        script = files("trueup.report").joinpath("page.js").read_text("utf-8")
        scripts = [get_plotlyjs().replace("</script", "<\\/script"), script]
        allowed = " ".join(f"'sha256-{_digest(each)}'" for each in scripts)
        policy = (
            f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; "
            "form-action 'none'"
        )
        charts = "{" + ",".join(f"{json.dumps(name)}:{found}" for name, found in self.charts.items()) + "}"
        data = {"charts": charts, "dark": json.dumps(DARK)}
        return markup.document(
            self.wanted.title,
            body,
            *(
                f'<script type="application/json" id="{name}">{markup.embed_json(value)}</script>'
                for name, value in data.items()
            ),
            *(f"<script>{each}</script>" for each in scripts),
            policy=policy,
        )

    def body(self) -> str:
        extra = [
            section(f"extra-{k}", heading, f'<div class="extra">{inner}</div>')
            for k, (heading, inner) in enumerate(self.wanted.sections)
        ]
        evidence = [self.reliability(), self.confidence(), self.methods(), self.sweep(), self.risk(), self.classes()]
        return (
            f'<a class="skip" href="#reliability">Skip to the evidence</a>{self.header()}'
            f"<main>{''.join([*evidence, *extra, self.use(), self.how()])}</main>{markup.footer()}"
        )

    def header(self) -> str:
        scores, chosen = self.audit.scores, self.audit.chosen
        facts = [
            ("It says, on average", format_percent(scores[RAW, "confidence"].value, 1)),
            ("It is right", format_percent(scores[RAW, "accuracy"].value, 1)),
            ("Calibration error (ECE)", f"{scores[RAW, 'ece'].value:.3f}"),
        ]
        if chosen == RAW:
            facts.append(("ECE if it were calibrated", f"{scores.tests[RAW].expected:.3f}"))
        else:
            facts.append(("ECE after calibration", f"{scores[chosen, 'ece'].value:.3f}"))
        name = self.wanted.title
        heading = escape(name) if name == "Calibration report" else f"<span>Calibration of</span> {escape(name)}"
        return (
            f"<header><h1>{heading}</h1>{paragraph(self.audit.verdict(), 'verdict')}{definition_list(facts, 'facts')}"
            "<noscript><p>The charts need JavaScript; the tables under them hold the same numbers.</p></noscript>"
            "</header>"
        )

    def figure(self, name: str, heading: str, record: Any, words: str | None = None, **options: Any) -> str:
        drawn = chart(record, **options)
        self.charts[name] = drawn.to_json()
        said = summary(record) if words is None else words
        return markup.figure(name, heading, said, drawn.layout.height, markup.table(heading, *numbers(record)))

    def pair(self, name: str, found: Sequence[Any], **options: Any) -> str:
        """The same chart before and after, on the same scale."""
        shown = [
            self.figure(f"{name}-{when}", heading, record, **options)
            for (when, heading, _), record in zip(self.pairs, found, strict=True)
        ]
        return f'<div class="pair{" one" if len(shown) == 1 else ""}">{"".join(shown)}</div>'

    def told(self, name: str, *parts: str) -> str:
        heading, words = SECTIONS[name]
        return section(name, heading, paragraph(words), *parts)

    def reliability(self) -> str:
        options: dict[str, Any] = {"bins": self.audit.bins, "level": self.audit.scores.level, "seed": self.audit.seed}
        found = [records.reliability(*pair, **options) for _, _, pair in self.pairs]
        key = (("dot", "accuracy; the larger, the more rows"), ("over", "says too much"), ("under", "says too little"))
        band = ("band", f"{format_percent(found[0].level)} band if calibrated")
        return self.told("reliability", markup.legend([*key, band]), self.pair("reliability", found, legend=False))

    def confidence(self) -> str:
        found = [records.confidences(*pair) for _, _, pair in self.pairs]
        top = max(float((each.right + each.wrong).max()) for each in found) / self.audit.scores.rows
        key = (("right", "right"), ("wrong", "wrong"), ("says", "mean confidence"), ("hits", "accuracy"))
        return self.told("confidence", markup.legend(key), self.pair("confidence", found, top=top, legend=False))

    def methods(self) -> str:
        scores, chosen = self.audit.scores, self.audit.chosen
        shown = ""
        if len(scores.methods) > 1:
            titles = {name: title(name) for name in scores.methods}
            record = records.comparison(scores, "ece")
            words = summary(record, titles=titles)
            heading = "Calibration error of each method"
            shown = self.figure("methods-chart", heading, record, words, titles=titles, chosen=chosen)
        return section("methods", "Which repair is best?", *methods_table(self.audit), shown)

    def sweep(self) -> str:
        record = records.temperature_sweep(*self.audit.predictions[RAW], bins=self.audit.bins)
        return self.told("sweep", self.figure("sweep-chart", "Log-loss and calibration error by temperature", record))

    def risk(self) -> str:
        first, *others = (records.risk_coverage(*pair) for _, _, pair in self.pairs)
        options = {"beside": others[0]} if others else {}
        words = summary(first, **options)
        return self.told("risk", self.figure("risk-chart", "Error rate among the surest", first, words, **options))

    def classes(self) -> str:
        options: dict[str, Any] = {"bins": self.audit.bins, "names": self.wanted.names}
        found = [records.class_errors(*pair, **options) for _, _, pair in self.pairs]
        top = max(float(each.error.max()) for each in found)
        key = markup.legend((("over", "said too often"), ("under", "said too rarely")))
        return self.told("classes", key, self.pair("classes", found, top=top, legend=False))

    def use(self) -> str:
        chosen = self.audit.chosen
        if chosen == RAW:
            told = "No calibrator is needed. These lines judge the network again on new data:"
            lines = ["import trueup", "scores = trueup.evaluate(logits, labels)", "print(scores)"]
            return section("use", "How to go on", paragraph(told), markup.code(lines))
        told = "The command fits the calibrator and writes it; the three lines use it wherever logits come out:"
        lines = [
            "import trueup",
            'calibrator = trueup.load_calibrator("calibrator.safetensors")',
            "logits = calibrator(logits)  # their softmax is the calibrated probability",
        ]
        command = [f"trueup fit VAL -m {chosen} -o calibrator.safetensors"]
        return section("use", "How to use it", paragraph(told), markup.code(command), markup.code(lines))

    def how(self) -> str:
        found, scores = self.audit, self.audit.scores
        if found.cross_fitted:
            rows = (
                f"{found.calibration_rows:,}, cross-fitted: each was scored by a calibrator fitted on the other folds. "
                "The choice saw the same rows, which flatters the chosen method a little."
            )
            counts = [("Rows", rows)]
        else:
            counts = [("Calibration rows", f"{found.calibration_rows:,}"), ("Test rows", f"{scores.rows:,}")]
        packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "scipy", "plotly"))
        items = [
            *counts,
            ("Classes", f"{scores.classes:,}"),
            ("Bins", f"{found.bins} of equal width"),
            ("Choice", f"least log-loss over {found.folds} folds of the calibration rows; of those within one standard "
             "error of it, the simplest. The test rows had no part in it." if not found.cross_fitted else
             f"least log-loss over {found.folds} folds; of those within one standard error of it, the simplest."),
            ("Intervals", f"{format_percent(scores.level)}, from 1,000 bootstrap resamples; changes are paired"),
            ("Bands", "from 1,000 redrawings of right and wrong by the confidences themselves"),
            ("Seed", str(found.seed)),
            ("Seconds of fitting", f"{sum(found.seconds.values()):.1f} in all"),
            ("Versions", f"trueup {__version__}, Python {platform.python_version()}, {packages}"),
        ]  # fmt: skip
        items += [(f"Could not be fitted: {title(name)}", why) for name, why in found.failures.items()]
        items += [(f"Warning: {title(name)}", "; ".join(said)) for name, said in found.warnings.items()]
        return section("how", "How it was computed", definition_list(items, "how"))


def _inside(name: str) -> str:
    """A method's name inside a sentence: no capital, unless it is somebody's name."""
    keep = name.split()[0] in ("Platt", "Dirichlet", "Bayesian", "Neural", "I-Max")
    return name if keep else name[:1].lower() + name[1:]


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
