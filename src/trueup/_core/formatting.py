"""Numbers and tables as aligned text and as HTML."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

Row = list[str]


class TableCell(NamedTuple):
    """A cell of an HTML table with more than its text."""

    text: str
    value: float | str | None = None
    """Sort key in a sortable table; the text by default."""
    note: str = ""
    """A second line in small print."""
    rank: Literal[0, 1, 2] = 0
    """1 for the best of its column, in bold; 2 for the second best, in italics."""
    mark: str = ""
    """A sign after the text."""
    warn: bool = False
    """Whether the sign has the colour of warnings."""


def format_percent(share: float, digits: int | None = None) -> str:
    """Format a share in per cent."""
    return f"{100 * share:g} %" if digits is None else f"{100 * share:.{digits}f} %"


def format_number(x: float, *, sign: bool = False, digits: int = 4) -> str:
    """Format a number with four decimals, or `digits`; NaN becomes a dash."""
    if math.isnan(x):
        return "–"
    return f"{x:+.{digits}f}" if sign else f"{x:.{digits}f}"


def round_up(rows: int) -> int:
    """Round up to two significant digits.

    >>> round_up(1234)
    1300
    """
    unit: int = 10 ** max(len(str(rows)) - 2, 0)
    return -(-rows // unit) * unit


def format_p(p: float) -> str:
    """Format a p-value, rounded below 0.0001.

    >>> format_p(0.0312), format_p(0.0), format_p(1.0)
    ('p ≤ 0.031', 'p < 0.0001', 'p = 1')
    """
    if p == 1:
        return "p = 1"
    return f"p ≤ {p:.2g}" if p >= 1e-4 else "p < 0.0001"


def format_evidence(wealth: float) -> str:
    """Format the growth factor of a bet, rounded above a million.

    >>> format_evidence(12.34), format_evidence(1e304)
    ('12.3', 'more than a million')
    """
    return f"{wealth:.3g}" if wealth < 1e6 else "more than a million"


def format_interval(low: float, high: float, *, sign: bool = False, digits: int = 4) -> str:
    """Format an interval in brackets."""
    if math.isnan(low):
        return "–"
    return f"[{format_number(low, sign=sign, digits=digits)}, {format_number(high, sign=sign, digits=digits)}]"


def text_table(rows: list[Row]) -> str:
    """Align the first column to the left and the others to the right."""
    first, *others = (max(map(len, column)) for column in zip(*rows, strict=True))
    lines = ("  ".join([row[0].ljust(first), *map(str.rjust, row[1:], others)]) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def html_summary(title: str, figures: Mapping[str, str], note: str = "") -> str:
    """Format a small table for notebooks: a title, numbers by name, and a note.

    >>> html_summary("Tally", {"rows": "20"})
    '<div class="trueup"><p>Tally</p><table><thead><tr><th scope="col">rows</th></tr></thead>...</table></div>'
    """
    table = html_table(list(figures), [list(figures.values())]) if figures else ""
    return f'<div class="trueup"><p>{escape(title)}</p>{table}{f"<p>{escape(note)}</p>" if note else ""}</div>'


def escape(text: object) -> str:
    """Escape text for the content and the quoted attributes of an HTML element.

    >>> escape('<b> & "co"')
    '&lt;b&gt; &amp; &quot;co&quot;'
    """
    return html.escape(str(text), quote=True).replace(" %", "\u00a0%")


def html_table(
    head: Sequence[str],
    rows: Iterable[str | Sequence[str | TableCell]],
    *,
    caption: str = "",
    sortable: bool = False,
    chosen: int | None = None,
) -> str:
    """Format an HTML table whose first column names the rows; a row that is one string is a heading.

    The head of a `sortable` table has buttons, which a script of the page must handle. `chosen` is the index of a row
    to highlight.

    >>> html_table(["method", "ece"], [["raw", TableCell("5.00", rank=2)]])
    '<table><thead><tr><th scope="col">method</th><th scope="col">ece</th></tr></thead>...<td><em>5.00</em></td>...'
    """
    button = '<button type="button">{}<span class="arrow" aria-hidden="true"></span></button>'
    columns = "".join(f'<th scope="col">{(button if sortable else "{}").format(escape(cell))}</th>' for cell in head)
    lines = []
    for index, row in enumerate(rows):
        if isinstance(row, str):
            lines.append(f'<tr><th scope="rowgroup" colspan="{len(head)}">{escape(row)}</th></tr>')
            continue
        tags = ['th scope="row"', *["td"] * (len(row) - 1)]
        cells = "".join(_html_cell(tag, cell, sortable) for tag, cell in zip(tags, row, strict=True))
        lines.append(f"<tr{' class=chosen' if index == chosen else ''}>{cells}</tr>")
    kind = ' class="sortable"' if sortable else ""
    title = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table{kind}>{title}<thead><tr>{columns}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _html_cell(tag: str, cell: str | TableCell, sortable: bool) -> str:
    cell = TableCell(cell) if isinstance(cell, str) else cell
    text = ("{}", "<strong>{}</strong>", "<em>{}</em>")[cell.rank].format(escape(cell.text))
    mark = f" <span{' class=warn' if cell.warn else ''}>{escape(cell.mark)}</span>" if cell.mark else ""
    note = f"<small>{escape(cell.note)}</small>" if cell.note else ""
    value = f' data-value="{escape(cell.text if cell.value is None else cell.value)}"' if sortable else ""
    return f"<{tag}{value}>{text}{mark}{note}</{tag[:2]}>"
