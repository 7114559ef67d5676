"""Tables as aligned text and as HTML."""

from __future__ import annotations

import html
import math

Row = list[str]


def format_percent(share: float, digits: int | None = None) -> str:
    """A share in per cent."""
    return f"{100 * share:g} %" if digits is None else f"{100 * share:.{digits}f} %"


def format_number(x: float, *, sign: bool = False) -> str:
    """Four digits behind the point; a dash for what is not defined."""
    if math.isnan(x):
        return "–"
    return f"{x:+.4f}" if sign else f"{x:.4f}"


def format_interval(low: float, high: float, *, sign: bool = False) -> str:
    """An interval in brackets."""
    if math.isnan(low):
        return "–"
    return f"[{format_number(low, sign=sign)}, {format_number(high, sign=sign)}]"


def text_table(rows: list[Row]) -> str:
    """The first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *others]).rstrip())
    return "\n".join(lines)


def html_table(rows: list[Row]) -> str:
    """A table whose first row and column are headers."""
    head, *body = rows
    cells = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in head)
    lines = []
    for first, *others in body:
        numbers = "".join(f'<td style="text-align:right">{html.escape(cell)}</td>' for cell in others)
        lines.append(f'<tr><th scope="row" style="text-align:left">{html.escape(first)}</th>{numbers}</tr>')
    return f"<table><thead><tr>{cells}</tr></thead><tbody>{''.join(lines)}</tbody></table>"
