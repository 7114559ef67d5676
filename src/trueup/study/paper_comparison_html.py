"""The part of a study's page that sets our numbers beside those that the paper prints."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from trueup.report.html import definition_list, escape, paragraph, section
from trueup.study.grid import Options
from trueup.study.paper_comparison import Beside, Compared
from trueup.study.tables import MISSING

MARKS = {"agrees": "=", "differs": "≠", "same way": "✓", "other way": "✗", "not told apart": "", "no number": ""}


def beside_section(paper: str, found: Sequence[Beside], options: Options) -> str:
    """Our numbers and the printed ones, with what settings explain and what they do not."""
    heading = "Beside the paper"
    if not paper:
        return section("beside-the-paper", heading, paragraph("No printed numbers are known for this study."))
    if not found:
        said = "None of what was run is in one of the paper's tables."
        return section("beside-the-paper", heading, paragraph(said))
    same, others = [each for each in found if not each.reasons], [each for each in found if each.reasons]
    parts = [
        paragraph(
            "Each cell has our number and, below it, the printed one. Of the same data set and network, = is a "
            "difference within twice the spread of both, ≠ one beyond it. Of others the sizes cannot agree, only the "
            "way in which a method departs from the first: ✓ the same way in both, ✗ opposite ways, no sign where one "
            "of the two does not depart by more than its spread."
        )
    ]
    parts += _summary(same, others, options)
    parts += [_beside_html(each) for each in same]
    if others:
        inner = "".join(map(_beside_html, others))
        parts.append(f"<details open><summary>Other data sets or networks than the paper’s</summary>{inner}</details>")
    return section("beside-the-paper", heading, *parts)


def _summary(same: Sequence[Beside], others: Sequence[Beside], options: Options) -> list[str]:
    """What settings explain, and what they do not."""
    lines = []
    if same:
        kept, apart = (sum(len(each.of(verdict)) for each in same) for verdict in ("agrees", "differs"))
        lines.append(("Same data set and network", f"{kept} numbers agree, {apart} do not."))
        if apart:
            lines.append(("Not explained by data set or network", _listed(same, "differs")))
    if others:
        lines.append(("Explained by the settings", f"The sizes of the numbers: {_reasons(others)}."))
        kept, apart, unsure = (
            sum(len(each.of(verdict)) for each in others) for verdict in ("same way", "other way", "not told apart")
        )
        said = f"Of those from {', '.join(dict.fromkeys(each.reference for each in others))}, "
        said += f"{kept} go the same way as in the paper, {apart} the opposite way, {unsure} are within the spread."
        lines.append(("Ways of the differences", said))
        if apart:
            said = "Other data may be why, but nothing here shows that they are: "
            lines.append(("Not explained by the sizes", said + _listed(others, "other way")))
    choice = "on the test samples (oracle)" if options.oracle else "on validation samples"
    lines.append(("Choices", f"What is chosen among several was chosen {choice}."))
    return [definition_list(lines, "how")]


def _reasons(found: Sequence[Beside]) -> str:
    """Each setting once: what is ours, and what the paper had in its place."""
    theirs: dict[tuple[str, str], dict[str, None]] = {}
    for reason in (reason for each in found for reason in each.reasons):
        theirs.setdefault((reason.what, reason.ours), {})[reason.theirs] = None
    return "; ".join(f"{what} {ours} instead of {', '.join(names)}" for (what, ours), names in theirs.items())


def _listed(found: Sequence[Beside], verdict: Any) -> str:
    said = []
    for each in found:
        names = [f"{figure.method}: {_title(figure)}" for figure in each.of(verdict)]
        if names:
            said.append(f"{each.table}, {each.dataset} {each.model} ({'; '.join(names)})")
    return "; ".join(said) + "."


def _beside_html(found: Beside) -> str:
    names = list(dict.fromkeys(_title(figure) for figure in found.figures))
    lines = []
    for method in dict.fromkeys(figure.method for figure in found.figures):
        alike = {_title(figure): figure for figure in found.figures if figure.method == method}
        cells = "".join(f"<td>{_compared(alike.get(name))}</td>" for name in names)
        lines.append(f'<tr><th scope="row">{escape(method)}</th>{cells}</tr>')
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in ("method", *names))
    heading = f"{found.table.capitalize()}: {found.dataset} {found.model}".strip()
    why = (
        f"Ours is {found.group}: {' and '.join(map(str, found.reasons))}."
        if found.reasons
        else f"Ours is {found.group}."
    )
    inner = f"<thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody>"
    return f"<h3>{escape(heading)}</h3>{note(why)}{scrolling(heading, inner)}"


def _compared(figure: Compared | None) -> str:
    if figure is None:
        return MISSING
    ours, theirs = (
        _number(mean, std, figure.digits)
        for mean, std in ((figure.ours, figure.our_std), (figure.theirs, figure.their_std))
    )
    mark = MARKS[figure.verdict]
    kind = ' class="apart"' if figure.verdict in ("differs", "other way") else ""
    sign = f" <span{kind}>{mark}</span>" if mark else ""
    return f"{ours}{sign}<small>{theirs}</small>"


def _number(mean: float, std: float, digits: int) -> str:
    if math.isnan(mean):
        return MISSING
    return f"{mean:.{digits}f}" + ("" if math.isnan(std) else f" ± {std:.{digits}f}")


def _title(figure: Compared) -> str:
    unit = {"pct": "%", "x1e-2": "×10⁻²", "x1e-3": "×10⁻³", "nats": "nats"}.get(figure.unit.split(" ")[0], "")
    name = figure.figure.replace("_", ", ")
    return f"{name}, {unit}" if unit else name


def note(words: str) -> str:
    """A lesser paragraph."""
    return f'<p class="note">{escape(words)}</p>'


def scrolling(caption: str, inner: str) -> str:
    """A table in a box of its own that scrolls when it is too wide."""
    label = escape(caption)
    table = f"<table><caption>{label}</caption>{inner}</table>"
    return f'<div class="scroll" role="region" aria-label="{label}" tabindex="0">{table}</div>'
