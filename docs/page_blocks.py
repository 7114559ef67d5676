"""A hook of mkdocs for every page: prompts are highlighted as a console, rows of printed tables are marked, and
formulas become MathML.

MathML is drawn by the browser itself: the site needs no script and no fonts for its formulas, and works offline.
"""

from __future__ import annotations

import re
from typing import Any

from latex2mathml.converter import convert

FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
CONSOLE = re.compile(r"\A```python\n(?=>>> )")
DISPLAYED = re.compile(r"^\$\$\s*(.+?)\s*\$\$$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"(`[^`\n]*`)|\$([^$\n]+)\$")


PRINTED = re.compile(r'<span class="go">([^<]*)</span>')
COLUMNS = re.compile(r"\S {2,}(?=\S)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Change blocks and formulas of a page; what is inside a block of code stays as it is."""
    pieces, end = [], 0
    for fence in FENCE.finditer(markdown):
        pieces += [formulas(markdown[end : fence.start()]), console(fence.group())]
        end = fence.end()
    return "".join([*pieces, formulas(markdown[end:])])


def console(block: str) -> str:
    """A doctest as a reader sees it: highlighted, without the lines that only the test needs."""
    if not CONSOLE.match(block):
        return block
    return CONSOLE.sub("```pycon\n", block).replace("\n\n```", "\n```").replace("<BLANKLINE>", "")


def on_page_content(html: str, **_: Any) -> str:
    """Rows of printed tables are marked, since they must not go on in the next line as sentences may."""
    return PRINTED.sub(
        lambda line: line[0].replace('"go"', '"go row"', 1) if COLUMNS.search(line[1]) else line[0], html
    )


def formulas(text: str) -> str:
    """Every `$$…$$` on lines of its own, and every `$…$` inside one, as MathML."""
    text = DISPLAYED.sub(lambda found: f'<div class="formula">{convert(found[1], display="block")}</div>', text)
    return INLINE.sub(lambda found: found[1] or convert(found[2]), text)
