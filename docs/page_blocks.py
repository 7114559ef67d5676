"""A hook of mkdocs that highlights prompts, marks rows of printed tables, and turns formulas into MathML.

Browsers draw MathML themselves, so the site needs no script and no fonts for its formulas, and works offline.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"\A```python\n(?=>>> )")
DISPLAYED = re.compile(r"^\$\$\s*(.+?)\s*\$\$$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(`[^`\n]*`)|\$([^$\n]+)\$")
TRACES = re.compile(r"\\\||BLANKLINE|>Any<")
"""Text that readers should not see: escaped bars, directives of doctest, and a type that says nothing."""


PRINTED = re.compile(r'<span class="go">([^<]*)</span>')
COLUMNS = re.compile(r"\S {2,}(?=\S)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Change blocks and formulas of a page, except formulas inside blocks of code."""
    pieces, end = [], 0
    for fence in FENCE.finditer(markdown):
        pieces += [formulas(markdown[end : fence.start()]), console(fence.group())]
        end = fence.end()
    return "".join([*pieces, formulas(markdown[end:])])


def console(block: str) -> str:
    """Highlight a doctest, and drop the lines that only the test needs."""
    if not CONSOLE.match(block):
        return block
    return CONSOLE.sub("```pycon\n", block).replace("\n\n```", "\n```").replace("<BLANKLINE>", "")


def on_page_content(html: str, *, page: Any, **_: Any) -> str:
    """Mark rows of printed tables, which must not wrap as sentences may; stop at traces of the source."""
    if trace := TRACES.search(html):
        raise ValueError(f"{page.file.src_uri} shows {trace[0]!r}")
    return PRINTED.sub(
        lambda line: line[0].replace('"go"', '"go row"', 1) if COLUMNS.search(line[1]) else line[0], html
    )


def formulas(text: str) -> str:
    """Turn every `$$…$$` on its own lines, and every `$…$` within a line, into MathML."""
    text = DISPLAYED.sub(lambda match: f'<div class="formula">{convert(match[1], display="block")}</div>', text)
    return INLINE.sub(lambda match: match[1] or convert(match[2]), text)
