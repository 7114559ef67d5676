"""Write docs/catalogue.md, the page of all methods, from their docstrings: `python docs/catalogue.py`."""

from __future__ import annotations

import inspect
import re
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import trueup
from trueup.report.audit import method_title

PAGE = Path(__file__).with_name("catalogue.md")
HEAD = """# Every method

z are the logits of a row, p = softmax(z), c the confidence max p, a whether the predicted class is right, and q the
calibrated probabilities. *When not to use it* follows from what a method can and cannot represent;
[Choosing a method](methods.md) starts from what you want instead. (This page is written from the docstrings by
`python docs/catalogue.py`, and a test compares them.)
"""


class Said(NamedTuple):
    """The parts of a docstring."""

    what: str
    unfit: str
    source: str


def page() -> str:
    """The whole page: a section for each kind of map, with the methods that fit it."""
    names = groupby(trueup.METHODS, key=lambda name: str(described(name)))
    return "\n".join([HEAD, *(section(list(group)) for _, group in names)])


def described(name: str) -> Any:
    """What carries the description: the class that a fit makes, or the fit itself."""
    fit = trueup.METHODS[name]
    return getattr(fit, "__self__", fit)


def section(names: list[str]) -> str:
    """What is said of one kind of map: formula, when not to use it, its fits, where it comes from."""
    what = described(names[0])
    said = parts(inspect.getdoc(what) or "")
    lines = [f"## {', '.join(f'`{name}`' for name in names)}", "", said.what, ""]
    if isinstance(what, type):
        lines += [fitted(name) for name in names] + [""]
        held = "always stays" if what.keeps_argmax else "may change"  # type: ignore[attr-defined]
        lines += [f"The predicted class {held}.", ""]
    if said.unfit:
        lines += [f"**When not to use it.** {said.unfit}", ""]
    if said.source:
        lines += [f"*{said.source}*", ""]
    return "\n".join(lines)


def fitted(name: str) -> str:
    """How one method fits, with its options."""
    fit, title = trueup.METHODS[name], method_title(name)
    how = " ".join((inspect.getdoc(fit) or "").split("\n\n")[0].split()).removeprefix(f"{title}: ")
    return f"- **{title}** (`{name}`): {how}{options(fit)}"


def options(fit: Any) -> str:
    """The keyword options with their defaults; long ones are told by their ends."""
    shown = []
    for name, parameter in inspect.signature(fit).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY:
            value = parameter.default
            text = f"({value[0]}, …, {value[-1]})" if isinstance(value, tuple) and len(value) > 5 else repr(value)
            shown.append(f"`{name}={text}`")
    return f" Options: {', '.join(shown)}." if shown else ""


def parts(docstring: str) -> Said:
    """Split off the last sentence that names a year, and "Not for …"."""
    text = docstring.split(">>>")[0].strip()
    source = re.search(r"\n([A-Z](?:(?!\n\n|\.\s(?!\()).)*\(\d{4}\)(?:; [^\n]*)?\.)$", text, re.DOTALL)
    if source:
        text = text[: source.start()]
    body = " ".join(text.split())
    unfit = re.search(r"Not for [^.]*\.", body)
    if unfit:
        body = " ".join(body.replace(unfit.group(), "").split())
    return Said(body, unfit.group() if unfit else "", " ".join(source.group(1).split()) if source else "")


if __name__ == "__main__":
    PAGE.write_text(page())
