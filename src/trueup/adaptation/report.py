"""The report of a repair as one HTML file, and its figures: the steps, and inputs before and after the map."""

from __future__ import annotations

import io
import json
import os
import platform
from base64 import b64encode
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from trueup._core import __version__
from trueup._core.errors import InputError
from trueup._core.formatting import format_number
from trueup.adaptation.record import Repaired, RepairRecord
from trueup.io.atomic import atomic_write
from trueup.metrics.table import Scores
from trueup.reports import html as markup
from trueup.reports import style
from trueup.reports.html import definition_list, escape, paragraph

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DEFAULT_TITLE = "Repair of a network"
_DPI = 150
_MAX_PICTURES = 8
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


@dataclass(frozen=True, eq=False)
class RepairReport:
    """Report of a repair, one HTML page.

    Parameters
    ----------
    repaired
        The repaired network.
    images
        Some inputs of the network, shown before and after the map; None shows none.
    scores
        Scores on test samples; None shows none.
    title
        Title of the page.
    file
        Name of the saved file, for the lines of code that load it.
    """

    repaired: Repaired
    images: Tensor | None
    scores: Scores | None
    title: str
    file: str

    def html(self) -> str:
        """Return the page; it loads nothing from elsewhere.

        Returns
        -------
        str
            The HTML document.
        """
        sections = [self._inputs(), self._steps(), self._scores(), _usage(self.file), self._details()]
        body = f"{self._header()}<main>{''.join(sections)}</main>{markup.footer()}"
        return markup.document(self.title, body, policy=_POLICY)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the page to a file, atomically.

        Parameters
        ----------
        path
            Path of the HTML file.
        """
        page = self.html()
        with atomic_write(Path(path)) as (draft,):
            draft.write_text(page, encoding="utf-8")

    def _header(self) -> str:
        record = self.repaired.repair_record
        losses = {"Held-out loss before": record.baseline, "Held-out loss after": record.held_out}
        facts = [(name, format_number(loss)) for name, loss in losses.items()] if record.labelled else []
        facts += [("Temperature", f"{record.temperature:.3f}"), ("Samples", f"{record.samples:,}")]
        notes = "".join(paragraph(f"{note[:1].upper()}{note[1:]}.") for note in record.notes)
        verdict = paragraph(record.verdict, "verdict")
        return f"<header><h1>{escape(self.title)}</h1>{verdict}{definition_list(facts, 'facts')}{notes}</header>"

    def _inputs(self) -> str:
        record = self.repaired.repair_record
        if "input" not in record.parts:
            return ""
        words = ", ".join(record.words) or "barely visible"
        parts = [paragraph(f"Effect of the map on every input: {words}.")]
        if self.images is not None and self.images.ndim == 4 and self.images.shape[1] in (1, 3):
            alt = f"Original inputs, and below them the same inputs after the map: {words}."
            parts.append(_picture(draw_inputs(self.repaired, self.images), alt))
        return markup.section("inputs", "The inputs", *parts)

    def _steps(self) -> str:
        record = self.repaired.repair_record
        if not record.labelled:
            return ""
        text = (
            "Each step is fitted without the samples that score it. It is kept if its gain exceeds the required number "
            "of standard errors. A full step of a map must also beat the step before its half step by 1.64 standard "
            "errors. Bars show one standard error of the gain over the step it is compared with."
        )
        rows = []
        for number, step in enumerate(record.steps):
            gain = [f"{step.gain:+.4f}", f"{step.error:.4f}", f"{step.required_errors:g}"] if number else [""] * 3
            rows.append([step.title, f"{step.parameters:,}", f"{step.loss:.4f}", *gain, "yes" if step.kept else "no"])
        head = ["step", "parameters", "held-out loss", "gain", "standard error", "errors required", "kept"]
        best = min((step for step in record.steps if step.kept), key=lambda step: step.loss)
        alt = f"Held-out loss of {len(record.steps)} steps; the lowest one kept is {best.title}, {best.loss:.4f}."
        title, picture = "Steps tried", _picture(steps_figure(record), alt)
        return markup.section("steps", title, paragraph(text), picture, markup.table(title, head, rows))

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
        items = {
            "Parts changed": ", ".join(record.parts) or "none",
            "Score tests of families of maps, p-values": families,
            "Test for an input shift, p-value": "" if record.shift_p_value is None else f"{record.shift_p_value:.2g}",
            "Cost": f"{record.equivalents:.0f} forward passes over the samples",
            "Seed": str(record.seed),
            "Versions": f"trueup {__version__}, Python {platform.python_version()}, {packages}",
        }
        shown = definition_list(((name, text) for name, text in items.items() if text), "how")
        return markup.section("how", "How it was computed", shown)


def report_repair(
    repaired: Repaired,
    *,
    images: Tensor | None = None,
    scores: Scores | None = None,
    title: str | None = None,
    file: str = "repaired.safetensors",
) -> RepairReport:
    """Make a report of a repair; `.save("repair.html")` writes it.

    Parameters
    ----------
    repaired
        The repaired network.
    images
        Some inputs of the network, shape (n, channels, height, width), shown before and after the map.
    scores
        Scores on test samples, from `trueup.compare`.
    title
        Title of the page; None takes a default.
    file
        Name of the file that `trueup.save` wrote.

    Returns
    -------
    RepairReport
        The report.

    Examples
    --------
    >>> import torch
    >>> from trueup.adaptation import repair
    >>> x, y = torch.eye(3).repeat(20, 1), torch.tensor([0, 1, 2, 0, 1, 1]).repeat(10)
    >>> report_repair(repair(torch.nn.Identity(), [(x, y)])).html()[:15]
    '<!doctype html>'
    """
    return RepairReport(repaired, images, scores, DEFAULT_TITLE if title is None else title, file)


def _usage(file: str) -> str:
    lines = [
        "import trueup",
        f"repaired = trueup.load({json.dumps(file)}, model=model)   # your model does not change",
        "logits = repaired.eval()(inputs)",
    ]
    text = "The file holds only the changes. These lines apply it to the network that was repaired:"
    return markup.section("use", "How to use it", paragraph(text), markup.code(lines))


def _picture(figure: Figure, alt: str) -> str:
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=_DPI, bbox_inches="tight")
    source = f"data:image/png;base64,{b64encode(drawn.getvalue()).decode('ascii')}"
    image = f'<img alt="{escape(alt)}" src="{source}" style="max-width:100%">'
    return f'<figure><div class="scroll" role="region" aria-label="Picture" tabindex="0">{image}</div></figure>'


def draw_steps(record: RepairRecord, ax: Axes | None = None, *, title: str | None = None) -> Axes:
    """Draw the held-out loss of each step; error bars are those of the gain, and hollow markers were refused.

    >>> from trueup.adaptation import repair
    >>> x, y = torch.eye(3).repeat(20, 1), torch.tensor([0, 1, 2, 0, 1, 1]).repeat(10)
    >>> ax = draw_steps(repair(torch.nn.Identity(), [(x, y)]).repair_record)
    >>> ax.get_xlabel()
    'Held-out log-loss (nats)'
    """
    if not record.labelled:
        raise InputError("record", "be of a repair with labels", "one without", "only labels give a held-out loss")
    ax = style.axes_for(ax, height=max(1.6, 0.9 + 0.3 * len(record.steps)))
    for number, step in enumerate(record.steps):
        colour = style.line_style(0 if step.kept else 1)["color"]
        look = {"color": colour, "markerfacecolor": colour if step.kept else "none"}
        ax.errorbar([step.loss], [number], xerr=[step.error], fmt="o", markersize=4, capsize=2, **look)
    ax.set_yticks(range(len(record.steps)), [style.shorten(step.title, 40) for step in record.steps])
    ax.invert_yaxis()
    style.set_labels(ax, "Steps tried (hollow: refused)" if title is None else title, "Held-out log-loss (nats)", "")
    return ax


def steps_figure(record: RepairRecord) -> Figure:
    """Draw the steps in a new figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.6, max(1.8, 0.9 + 0.3 * len(record.steps))), layout="constrained")
    draw_steps(record, figure.subplots())
    return figure


def save_steps(record: RepairRecord, path: str | os.PathLike[str]) -> None:
    """Draw the steps to a file, atomically; its suffix sets the format."""
    _save_figure(steps_figure(record), Path(path))


def save_inputs(repaired: Any, images: Tensor, path: str | os.PathLike[str]) -> None:
    """Draw some inputs before and after the map to a file, atomically; its suffix sets the format."""
    _save_figure(draw_inputs(repaired, images), Path(path), dpi=_DPI, bbox_inches="tight")


def _save_figure(figure: Figure, path: Path, **options: Any) -> None:
    with atomic_write(path) as (draft,):
        figure.savefig(draft, format=path.suffix[1:], **options)


def draw_inputs(repaired: Any, images: Tensor) -> Figure:
    """Draw some inputs of a network (n, C, H, W) as pixels, and below them the same inputs after the map, if any."""
    from matplotlib.figure import Figure

    shown = images[:_MAX_PICTURES].detach().float().cpu()
    rows, before = [("original", shown)], repaired.before
    if before is not None:
        with torch.no_grad():
            rows.append(("repaired", before(shown.to(before.low.device)).cpu()))
        low, width = before.low.cpu(), (before.high - before.low).cpu()
        rows = [(name, (inputs - low) / width) for name, inputs in rows]
    figure = Figure(figsize=(0.8 * len(shown), 0.95 * len(rows)))
    axes = figure.subplots(len(rows), len(shown), squeeze=False)
    for row, (name, pictures) in enumerate(rows):
        for column, picture in enumerate(pictures):
            pixels = picture.clamp(0, 1).movedim(0, -1).numpy()
            ax = axes[row, column]
            ax.imshow(pixels[..., 0] if pixels.shape[-1] != 3 else pixels, cmap="gray", vmin=0, vmax=1)
            ax.set_axis_off()
        axes[row, 0].set_title(name, fontsize=8, loc="left")
    return figure
