"""Make notebooks from tutorials with jupytext: `python docs/notebooks.py` (make pictures)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
PAGES = ("images", "forest")
"""Tutorials that need no data of their own."""
BLOCK = re.compile(r"^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PROMPT = re.compile(r"^(?:>>>|\.\.\.) ?", re.MULTILINE)
SAVED = re.compile(r"^(\w+)\.savefig\(.*\)$", re.MULTILINE)
LINE_ABOUT_THE_NOTEBOOK = re.compile(r"^This page is also a \[notebook\].*\n\n", re.MULTILINE)
PICTURE = re.compile(r"^!\[.*\n\n", re.MULTILINE)
LINK = re.compile(r"\[([^\]]+)\]\([\w./#-]*\.md[^)]*\)")


def notebook(name: str) -> Any:
    """Return a tutorial as a notebook: its code without what is printed, and its text without links to other pages."""
    import jupytext

    text = (DOCS / "tutorials" / f"{name}.md").read_text(encoding="utf-8")
    for pattern, replacement in ((LINE_ABOUT_THE_NOTEBOOK, ""), (PICTURE, ""), (LINK, r"\1"), (BLOCK, cell)):
        text = pattern.sub(replacement, text)
    made = jupytext.reads(text, "md")
    made.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    for number, each in enumerate(made.cells):
        each["id"] = f"cell-{number}"
    return made


def cell(block: re.Match[str]) -> str:
    """Return a block as code: commands with an exclamation mark, doctests without prompts and output."""
    kind, source = block.groups()
    if kind == "sh":
        lines = ["!" + line.removeprefix("$ ") for line in source.splitlines()]
    else:
        lines = [PROMPT.sub("", line) for line in source.splitlines() if PROMPT.match(line)]
    code = SAVED.sub(r"\1", "\n".join(lines))  # a notebook shows the figure
    return f"```python\n{code}\n```"


def main() -> None:
    """Write the notebooks."""
    import jupytext

    for name in PAGES:
        jupytext.write(notebook(name), DOCS / "notebooks" / f"{name}.ipynb")


if __name__ == "__main__":
    main()
