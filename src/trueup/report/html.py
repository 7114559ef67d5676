"""Pieces of HTML: whatever is given as text comes out escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from trueup.core.version import __version__

Cells = Sequence[str]


class Cell(NamedTuple):
    """What a cell of a sortable table shows, what it is sorted by, and a lesser remark."""

    text: str
    value: float | str
    note: str = ""


def text(words: object) -> str:
    """Escape for element content and quoted attributes.

    >>> text('<b> & "co"')
    '&lt;b&gt; &amp; &quot;co&quot;'
    """
    return html.escape(str(words), quote=True).replace(" %", "\u00a0%")


def embedded(json_text: str) -> str:
    """JSON that may stand inside a script element, whatever its strings hold.

    >>> embedded('{"name": "</script>"}')
    '{"name": "\\\\u003c/script\\\\u003e"}'
    """
    for character in "<>&\u2028\u2029":
        json_text = json_text.replace(character, f"\\u{ord(character):04x}")
    return json_text


def document(title: str, *body: str, policy: str, style: str) -> str:
    """A whole page, which nothing but its policy lets do anything.

    >>> page = document("a < b", "<p>Yes.</p>", policy="default-src 'none'", style="p { margin: 0 }")
    >>> "<title>a &lt; b</title><style>p { margin: 0 }</style></head><body><p>Yes.</p></body></html>" in page
    True
    """
    allowed = text(policy).replace("&#x27;", "&#39;")
    return "".join(
        [
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f'<meta http-equiv="Content-Security-Policy" content="{allowed}">',
            '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">',
            f'<meta name="generator" content="trueup {text(__version__)}">',
            f"<title>{text(title)}</title><style>{style}</style></head><body>",
            *body,
            "</body></html>\n",
        ]
    )


def footer() -> str:
    """The last words of every page."""
    words = f"Made by trueup {__version__}. This page holds all that it shows and asks nothing of the network."
    return f"<footer>{paragraph(words)}</footer>"


def paragraph(words: str, kind: str = "") -> str:
    """A paragraph, of a class perhaps."""
    return f"<p{f' class={kind!r}' if kind else ''}>{text(words)}</p>"


def table(caption: str, head: Cells, rows: Iterable[Cells]) -> str:
    """A table whose first column names the rows, in a box of its own that scrolls when it is too wide."""
    columns = "".join(f'<th scope="col">{text(cell)}</th>' for cell in head)
    lines = "".join(
        f'<tr><th scope="row">{text(first)}</th>{"".join(f"<td>{text(cell)}</td>" for cell in others)}</tr>'
        for first, *others in rows
    )
    return _scrolling(
        caption,
        f"<table><caption>{text(caption)}</caption><thead><tr>{columns}</tr></thead><tbody>{lines}</tbody></table>",
    )


def sortable(caption: str, head: Cells, rows: Iterable[tuple[Sequence[Cell], bool]]) -> str:
    """A table whose columns sort at the press of their heads; a row may be marked."""
    arrow = '<span class="arrow" aria-hidden="true"></span>'
    columns = "".join(f'<th scope="col"><button type="button">{text(cell)}{arrow}</button></th>' for cell in head)
    lines = []
    for (first, *others), marked in rows:
        cells = "".join(f'<td data-value="{text(cell.value)}">{_noted(cell)}</td>' for cell in others)
        name = f'<th scope="row" data-value="{text(first.value)}">{_noted(first)}</th>'
        lines.append(f"<tr{' class=chosen' if marked else ''}>{name}{cells}</tr>")
    return _scrolling(
        caption,
        f'<table class="sortable"><caption>{text(caption)}</caption><thead><tr>{columns}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table>",
    )


def figure(name: str, heading: str, summary: str, height: int, data: str) -> str:
    """A place for a chart, what it shows in words, and its numbers."""
    return (
        f'<figure aria-labelledby="{name}-heading">'
        f'<figcaption><strong id="{name}-heading">{text(heading)}</strong></figcaption>'
        f'<div class="chart" id="{name}" style="height:{height}px" role="img" aria-label="{text(heading)}: chart" '
        f'aria-describedby="{name}-words"></div>'
        f'<p class="words" id="{name}-words">{text(summary)}</p>'
        f"<details><summary>The numbers<span class=hidden> of “{text(heading)}”</span></summary>{data}</details>"
        "</figure>"
    )


def legend(items: Iterable[tuple[str, str]]) -> str:
    """What the colours of charts mean, each a class of the style sheet and its words."""
    return '<ul class="legend">' + "".join(f'<li class="{kind}">{text(words)}</li>' for kind, words in items) + "</ul>"


def described(items: Iterable[tuple[str, str]], kind: str = "") -> str:
    """A list of terms, each with what is said of it."""
    pairs = "".join(f"<div><dt>{text(term)}</dt><dd>{text(words)}</dd></div>" for term, words in items)
    return f"<dl{f' class={kind}' if kind else ''}>{pairs}</dl>"


def code(lines: Iterable[str]) -> str:
    """Lines of a program."""
    return '<pre tabindex="0"><code>' + html.escape("\n".join(lines)) + "</code></pre>"


def section(name: str, heading: str, *parts: str) -> str:
    """A section under a heading."""
    opened = f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{text(heading)}</h2>'
    return f"{opened}{''.join(parts)}</section>"


def _noted(cell: Cell) -> str:
    return text(cell.text) + (f"<small>{text(cell.note)}</small>" if cell.note else "")


def _scrolling(caption: str, inner: str) -> str:
    return f'<div class="scroll" role="region" aria-label="{text(caption)}" tabindex="0">{inner}</div>'
