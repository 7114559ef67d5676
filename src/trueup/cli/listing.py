"""Verbs that list what there is: methods, metrics, losses."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from trueup._core.registry import LOSSES, METHODS, METRICS
from trueup.cli import options as o
from trueup.cli.output import print_json, print_table

COMMON = ("weight", "sample_weight", "ignore_index", "reduction")
"""Options that every loss has."""


def methods(as_json: o.Json = False) -> None:
    """List the calibration methods, with their options and defaults.

    Examples:
      $ trueup methods
      $ trueup methods --json
    """
    print_registry("methods", METHODS, as_json)


def metrics(as_json: o.Json = False) -> None:
    """List the metrics, with their options and defaults.

    Examples:
      $ trueup metrics
      $ trueup metrics --json
    """
    print_registry("metrics", METRICS, as_json)


def losses(as_json: o.Json = False) -> None:
    """List the training losses, with their options and defaults.

    Examples:
      $ trueup losses
      $ trueup losses --json
    """
    print_registry("losses", LOSSES, as_json)


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The options of a function with their defaults.

    >>> defaults(METRICS["ece"])["bins"]
    15
    """
    return {
        p.name: p.default
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.default is not p.empty and p.name not in COMMON
    }


def summary(function: Any) -> str:
    """The first sentence of a docstring; of a fit, that of its class, and what this fit does.

    >>> summary(METHODS["temperature"])
    'Divide the logits by one number: q = softmax(z/T).'
    """
    if isinstance(function, partial):
        function = function.func
    if inspect.isclass(function) and hasattr(function, "function"):
        function = function.function  # of a loss, the formula says what it is
    if inspect.ismethod(function):
        of_class = _first_sentence(function.__self__.__doc__)
        return of_class if function.__name__ == "fit" else f"{of_class} {_first_sentence(_without_title(function))}"
    return _first_sentence(function.__doc__)


def _without_title(fit: Any) -> str:
    """The docstring of a fit, which begins "Title: what it does", without the title."""
    title, colon, text = (fit.__doc__ or "").partition(": ")
    return text[:1].upper() + text[1:] if colon and "." not in title else fit.__doc__ or ""


def _first_sentence(text: str | None) -> str:
    paragraph = " ".join((text or "").strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[.?!])\s+(?=[A-Z`])", paragraph)[0]


def print_registry(verb: str, registry: Mapping[str, Any], as_json: bool) -> None:
    """Print the entries of a registry, each with its options and its first sentence."""
    if as_json:
        entries = {
            name: {"summary": summary(entry), "defaults": {key: _to_json(x) for key, x in defaults(entry).items()}}
            for name, entry in registry.items()
        }
        print_json(verb, **{verb: entries})
        return
    rows = []
    for name, entry in registry.items():
        options = ", ".join(f"{key}={value}" for key, value in defaults(entry).items() if value is not None)
        rows.append([name, options, summary(entry)])
    if sys.stdout.isatty():  # three columns of words would be too narrow
        rows = [[name, f"{text}\n{options}".strip()] for name, options, text in rows]
        print_table([["name", "what it is, and its defaults"], *rows], words=True)
        return
    print_table([["name", "defaults", "what it is"], *rows], words=True)


def _to_json(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str | list | tuple) else str(value)


register = o.commands("Look up", methods, metrics, losses)
