"""HTML elements for the pages of reports and studies; all text is escaped."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from importlib.resources import files

from trueup._core import __version__
from trueup._core.formatting import TableCell as TableCell
from trueup._core.formatting import escape as escape
from trueup._core.formatting import html_table


def json_script(name: str, json_text: str) -> str:
    r"""Return a script element that holds JSON, escaped so that no string can end it.

    >>> json_script("data", '{"name": "</script>"}')
    '<script type="application/json" id="data">{"name": "\\u003c/script\\u003e"}</script>'
    """
    for character in "<>&\u2028\u2029":
        json_text = json_text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{name}">{json_text}</script>'


def document(title: str, *body: str, policy: str) -> str:
    r"""Return a whole page in the style of page.css, with a content security policy.

    >>> page = document("a < b", "<p>Yes.</p>", policy="default-src 'none'")
    >>> "<title>a &lt; b</title>" in page, page.endswith("</style></head><body><p>Yes.</p></body></html>\n")
    (True, True)
    """
    style = files("trueup.reports").joinpath("page.css").read_text("utf-8")
    escaped_policy = escape(policy).replace("&#x27;", "&#39;")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{escaped_policy}">'
        '<meta name="color-scheme" content="light dark"><meta name="referrer" content="no-referrer">'
        f'<meta name="generator" content="trueup {escape(__version__)}">'
        f"<title>{escape(title)}</title><style>{style}</style></head><body>{''.join(body)}</body></html>\n"
    )


def footer() -> str:
    """Return the footer of every page."""
    return f"<footer>{paragraph(f'Made by trueup {__version__}. This page loads no other files.')}</footer>"


def paragraph(content: str, kind: str = "") -> str:
    """Return a paragraph; `kind` is its CSS class."""
    return f"<p{f' class={kind!r}' if kind else ''}>{escape(content)}</p>"


def table(
    caption: str,
    head: Sequence[str],
    rows: Iterable[str | Sequence[str | TableCell]],
    *,
    sortable: bool = False,
    chosen: int | None = None,
) -> str:
    """Return the table of `html_table` in a box that scrolls if the table is too wide."""
    inner = html_table(head, rows, caption=caption, sortable=sortable, chosen=chosen)
    return f'<div class="scroll" role="region" aria-label="{escape(caption)}" tabindex="0">{inner}</div>'


def figure(name: str, heading: str, summary: str, data: str) -> str:
    """Return a chart with its summary sentence and a folded table of its numbers."""
    return (
        f'<figure aria-labelledby="{name}-heading">'
        f'<figcaption><strong id="{name}-heading">{escape(heading)}</strong></figcaption>'
        f'<div class="chart" id="{name}" role="img" aria-label="{escape(heading)}: chart" '
        f'aria-describedby="{name}-words"></div>'
        f'<p class="words" id="{name}-words">{escape(summary)}</p>'
        f"{data and details(f'The numbers<span class=hidden> of “{escape(heading)}”</span>', data)}</figure>"
    )


def details(summary: str, content: str) -> str:
    """Return folded HTML; neither argument is escaped."""
    return f"<details><summary>{summary}</summary>{content}</details>"


def contents(items: Iterable[tuple[str, str]]) -> str:
    """Return links to the sections of a page: their ids and headings."""
    links = "".join(f'<li><a href="#{name}">{escape(heading)}</a></li>' for name, heading in items)
    return f'<nav class="contents" aria-label="Contents"><ul>{links}</ul></nav>'


def legend(items: Iterable[tuple[str, str]]) -> str:
    """Return a legend of charts; each entry is a CSS class and its text."""
    entries = "".join(f'<li class="{kind}">{escape(words)}</li>' for kind, words in items)
    return f'<ul class="legend">{entries}</ul>'


def definition_list(items: Iterable[tuple[str, str | TableCell]], kind: str = "") -> str:
    """Return a list of terms with their descriptions; `kind` is its CSS class."""
    cells = ((term, cell if isinstance(cell, TableCell) else TableCell(cell)) for term, cell in items)
    pairs = "".join(
        f"<div><dt>{escape(term)}</dt><dd>{escape(cell.text)}"
        f"{cell.note and f'<small>{escape(cell.note)}</small>'}</dd></div>"
        for term, cell in cells
    )
    return f"<dl{f' class={kind}' if kind else ''}>{pairs}</dl>"


def code(lines: Iterable[str]) -> str:
    """Return a block of code."""
    return '<pre tabindex="0"><code>' + html.escape("\n".join(lines)) + "</code></pre>"


def section(name: str, heading: str, *parts: str) -> str:
    """Return a section with a heading."""
    start = f'<section id="{name}" aria-labelledby="{name}-h"><h2 id="{name}-h">{escape(heading)}</h2>'
    return f"{start}{''.join(parts)}</section>"
