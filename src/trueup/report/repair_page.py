"""The report on a repair: one HTML file with the verdict, inputs before and after, what was tried, and how."""

from __future__ import annotations

import io
import json
import os
import platform
from base64 import b64encode
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from trueup.clamping.repair_job import Repaired
from trueup.core import __version__
from trueup.core.formatting import format_number
from trueup.io.atomic import atomic_write
from trueup.metrics.table import Scores
from trueup.report import html as markup
from trueup.report.html import definition_list, escape, paragraph
from trueup.report.repair_figures import draw_inputs, ladder_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DEFAULT_TITLE = "Repair of a network"
_DPI = 150
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, eq=False)
class RepairReport:
    """A page about a repaired network."""

    repaired: Repaired
    images: Tensor | None
    scores: Scores | None
    title: str
    file: str
    """Of what changed."""

    def html(self) -> str:
        """The whole page, which loads nothing."""
        sections = [self._inputs(), self._ladder(), self._scores(), _usage(self.file), self._details()]
        body = f"{self._header()}<main>{''.join(sections)}</main>{markup.footer()}"
        return markup.document(self.title, body, policy=_POLICY)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file that is either complete or not there."""
        page = self.html()
        with atomic_write(Path(path)) as (draft,):
            draft.write_text(page, encoding="utf-8")

    def _header(self) -> str:
        record = self.repaired.repair_record
        facts = [("Temperature", f"{record.temperature:.3f}")]
        if record.labelled:
            facts = [
                ("Held-out loss before", format_number(record.baseline)),
                ("Held-out loss after", format_number(record.held_out)),
                *facts,
            ]
        facts.append(("Samples", f"{record.samples:,}"))
        notes = "".join(paragraph(f"{note[:1].upper()}{note[1:]}.") for note in record.notes)
        verdict = paragraph(record.verdict, "verdict")
        return f"<header><h1>{escape(self.title)}</h1>{verdict}{definition_list(facts, 'facts')}{notes}</header>"

    def _inputs(self) -> str:
        record = self.repaired.repair_record
        if "input" not in record.parts:
            return ""
        words = ", ".join(record.words) or "too small to see"
        parts = [paragraph(f"What the map does to every input: {words}.")]
        if self.images is not None and self.images.ndim == 4 and self.images.shape[1] in (1, 3):
            alt = f"Inputs as they come, and below them the same through the map: {words}."
            parts.append(_picture(draw_inputs(self.repaired, self.images), alt))
        return markup.section("inputs", "The inputs", *parts)

    def _ladder(self) -> str:
        record = self.repaired.repair_record
        if not record.labelled:
            return ""
        text = (
            "Each step is fitted without the samples that judge it. It is kept if it lowers their loss by as many "
            "standard errors as the table says; the whole way of a map must also be 1.64 of them better than where it "
            "began. Bars are one standard error of the gain over the step that it was compared with."
        )
        rows = [
            [
                rung.title,
                f"{rung.parameters:,}",
                f"{rung.loss:.4f}",
                f"{rung.gain:+.4f}" if number else "",
                f"{rung.error:.4f}" if number else "",
                f"{rung.wanted:g}" if number else "",
                "yes" if rung.kept else "no",
            ]
            for number, rung in enumerate(record.rungs)
        ]
        head = ["step", "parameters", "held-out loss", "gain", "standard error", "errors asked", "kept"]
        best = min((rung for rung in record.rungs if rung.kept), key=lambda rung: rung.loss)
        alt = f"Held-out loss of {len(record.rungs)} steps; of those kept, the lowest is {best.title}, {best.loss:.4f}."
        picture = _picture(ladder_figure(record), alt)
        return markup.section(
            "ladder", "What was tried", paragraph(text), picture, markup.table("What was tried", head, rows)
        )

    def _scores(self) -> str:
        if self.scores is None:
            return ""
        head, *rows = self.scores.table()
        notes = (paragraph(line) for note in self.scores.notes() for line in note.splitlines())
        return markup.section("scores", "On test samples", markup.table("On test samples", head, rows), *notes)

    def _details(self) -> str:
        record = self.repaired.repair_record
        families = ", ".join(f"{name} {p:.2g}" for name, p in sorted(record.p_values.items(), key=lambda item: item[1]))
        packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "scipy"))
        items = [
            ("Parts changed", ", ".join(record.parts) or "none"),
            *([("Score tests of families of maps, p-values", families)] if families else []),
            *([] if record.moved is None else [("Have the inputs moved? p-value", f"{record.moved:.2g}")]),
            ("Cost", f"{record.equivalents:.0f} forward passes over the samples"),
            ("Seed", str(record.seed)),
            ("Versions", f"trueup {__version__}, Python {platform.python_version()}, {packages}"),
        ]
        return markup.section("how", "How it was computed", definition_list(items, "how"))


def report_repair(
    repaired: Repaired,
    *,
    images: Tensor | None = None,
    scores: Scores | None = None,
    title: str | None = None,
    file: str = "repaired.safetensors",
) -> RepairReport:
    """Make the page about a repair; `.save("repair.html")` writes it.

    `images` are some inputs of the network, shown before and after the map; `scores` are of `compare` on test samples;
    `file` is the name of what `save_repaired` wrote.

    >>> import torch
    >>> from trueup.clamping import repair
    >>> x, y = torch.eye(3).repeat(20, 1), torch.tensor([0, 1, 2, 0, 1, 1]).repeat(10)
    >>> report_repair(repair(torch.nn.Identity(), [(x, y)])).html()[:15]
    '<!doctype html>'
    """
    return RepairReport(repaired, images, scores, DEFAULT_TITLE if title is None else title, file)


def _usage(file: str) -> str:
    lines = [
        "import trueup",
        f"repaired = trueup.load_repaired(network, {json.dumps(file)})   # your own network, which stays as it is",
        "logits = repaired.eval()(inputs)",
    ]
    text = "The file holds what changed and nothing else. These lines put it around the network that was repaired:"
    return markup.section("use", "How to use it", paragraph(text), markup.code(lines))


def _picture(figure: Figure, alt: str) -> str:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI, bbox_inches="tight")
    source = f"data:image/png;base64,{b64encode(drawn.getvalue()).decode('ascii')}"
    image = f'<img alt="{escape(alt)}" src="{source}" style="max-width:100%">'
    return f'<figure><div class="scroll" role="region" aria-label="Picture" tabindex="0">{image}</div></figure>'
