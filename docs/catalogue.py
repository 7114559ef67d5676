"""The page of all methods, made from their docstrings; a hook of mkdocs appends them to catalogue.md.

`python docs/catalogue.py` prints them.
"""

from __future__ import annotations

import inspect
import re
from itertools import groupby
from typing import Any, NamedTuple

import trueup
from trueup.reports.audit import method_title


class Parts(NamedTuple):
    """The parts of a docstring."""

    description: str
    not_for: str
    reference: str


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Append the methods to the page catalogue.md, when mkdocs builds it."""
    return f"{markdown}\n{methods()}" if page.file.src_uri == "catalogue.md" else markdown


def methods() -> str:
    """Return all methods: one section per calibrator, with the methods that fit it."""
    groups = groupby(trueup.METHODS, key=lambda name: str(documented(name)))
    return "\n".join(section(list(names)) for _, names in groups)


def documented(name: str) -> Any:
    """Return the object whose docstring describes a method: the calibrator class, or the function that fits it."""
    fit = trueup.METHODS[name]
    return getattr(fit, "__self__", fit)


def section(names: list[str]) -> str:
    """Return the section of one calibrator: its formula, its methods, when not to use it, and its reference."""
    calibrator = documented(names[0])
    docstring = parts(inspect.getdoc(calibrator) or "")
    lines = [f"## {', '.join(f'`{name}`' for name in names)}", "", docstring.description, ""]
    if isinstance(calibrator, type):
        lines += [method(name) for name in names] + [""]
        argmax = "never changes" if calibrator.keeps_argmax else "may change"  # type: ignore[attr-defined]
        lines += [f"The predicted class {argmax}.", ""]
    if docstring.not_for:
        lines += [f"**When not to use it.** {docstring.not_for}", ""]
    if docstring.reference:
        lines += [f"*{docstring.reference}*", ""]
    return "\n".join(lines)


def method(name: str) -> str:
    """Return one line about a method: how it fits, and its options."""
    fit = trueup.METHODS[name]
    summary = " ".join((inspect.getdoc(fit) or "").split("\n\n")[0].split())
    return f"- **{method_title(name)}** (`{name}`): {summary}{options(fit)}"


def options(fit: Any) -> str:
    """Return the keyword options with their defaults; long sequences are shortened."""
    shown = []
    for name, parameter in inspect.signature(fit).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            value = parameter.default
            text = f"({value[0]}, …, {value[-1]})" if isinstance(value, tuple) and len(value) > 5 else repr(value)
            shown.append(f"`{name}={text}`")
    return f" Options: {', '.join(shown)}." if shown else ""


def parts(docstring: str) -> Parts:
    """Split a numpydoc docstring into its description, the sentence "Not for …", and its references."""
    text, *sections = re.split(r"\n([A-Z][a-z]+)\n-+\n", docstring)
    references = dict(zip(sections[::2], sections[1::2], strict=True)).get("References", "")
    body = " ".join(text.split())
    not_for = re.search(r"Not for .*?\.(?= [A-Z>]|$)", body)
    if not_for:
        body = " ".join(body.replace(not_for.group(), "").split())
    return Parts(body, not_for.group() if not_for else "", " ".join(references.split()))


if __name__ == "__main__":
    print(methods())
