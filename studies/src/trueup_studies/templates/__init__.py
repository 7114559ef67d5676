"""Pages by Jinja2. It does not escape here; the helpers of `trueup.reports.html` escape all text."""

from __future__ import annotations

from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader

from trueup.reports import html


@cache
def _environment() -> Environment:
    environment = Environment(loader=PackageLoader("trueup_studies"), extensions=["jinja2.ext.do"])
    environment.globals |= {name: getattr(html, name) for name in ("definition_list", "escape", "paragraph", "section")}
    environment.filters["squash"] = lambda text: " ".join(text.split())
    environment.filters["note"] = lambda text: html.paragraph(text, "note")
    return environment


def render(template: str, **values: Any) -> str:
    """Fill a template of this folder."""
    return _environment().get_template(template).render(**values)
