"""The page of all methods, from their docstrings: a hook of mkdocs appends them to catalogue.md.

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
    """All methods: a section for each calibrator, with the methods that fit it."""
    groups = groupby(trueup.METHODS, key=lambda name: str(documented(name)))
    return "\n".join(section(list(names)) for _, names in groups)


def documented(name: str) -> Any:
    """The object whose docstring describes a method: the calibrator class, or the fit if it is a function."""
    fit = trueup.METHODS[name]
    return getattr(fit, "__self__", fit)


def section(names: list[str]) -> str:
    """One calibrator: its formula, its methods, when not to use it, and its reference."""
    calibrator = documented(names[0])
    docstring = parts(inspect.getdoc(calibrator) or "")
    lines = [f"## {', '.join(f'`{name}`' for name in names)}", "", docstring.description, ""]
    if isinstance(calibrator, type):
        lines += [method(name) for name in names] + [""]
        argmax = "always stays" if calibrator.keeps_argmax else "may change"  # type: ignore[attr-defined]
        lines += [f"The predicted class {argmax}.", ""]
    if docstring.not_for:
        lines += [f"**When not to use it.** {docstring.not_for}", ""]
    if docstring.reference:
        lines += [f"*{docstring.reference}*", ""]
    return "\n".join(lines)


def method(name: str) -> str:
    """How one method fits, with its options."""
    fit, title = trueup.METHODS[name], method_title(name)
    how = " ".join((inspect.getdoc(fit) or "").split("\n\n")[0].split()).removeprefix(f"{title}: ")
    return f"- **{title}** (`{name}`): {how}{options(fit)}"


def options(fit: Any) -> str:
    """The keyword options with their defaults; of long sequences, the first and the last value."""
    shown = []
    for name, parameter in inspect.signature(fit).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            value = parameter.default
            text = f"({value[0]}, …, {value[-1]})" if isinstance(value, tuple) and len(value) > 5 else repr(value)
            shown.append(f"`{name}={text}`")
    return f" Options: {', '.join(shown)}." if shown else ""


def parts(docstring: str) -> Parts:
    """Split a docstring: the last sentence that names a year is its reference, and "Not for …" is on its own."""
    text = docstring.split(">>>")[0].strip()
    reference = re.search(r"\n([A-Z](?:(?!\n\n|\.\s(?!\()).)*\(\d{4}\)(?:; [^\n]*)?\.)$", text, re.DOTALL)
    if reference:
        text = text[: reference.start()]
    body = " ".join(text.split())
    not_for = re.search(r"Not for [^.]*\.", body)
    if not_for:
        body = " ".join(body.replace(not_for.group(), "").split())
    return Parts(body, not_for.group() if not_for else "", " ".join(reference.group(1).split()) if reference else "")


if __name__ == "__main__":
    print(methods())
