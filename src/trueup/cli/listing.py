"""Verbs that list the registries: methods, metrics, losses."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from trueup._core.registry import LOSSES, METHODS, METRICS
from trueup.cli import options as o
from trueup.cli.output import print_json, print_table

COMMON = ("weight", "sample_weight", "ignore_index", "reduction")
"""Options that every loss has."""


def methods(as_json: o.Json = False) -> None:
    """List the calibration methods, with their options and defaults.

    $ trueup methods
    $ trueup methods --json
    """
    print_registry("methods", METHODS, as_json)


def metrics(as_json: o.Json = False) -> None:
    """List the metrics, with their options and defaults.

    $ trueup metrics
    $ trueup metrics --json
    """
    print_registry("metrics", METRICS, as_json)


def losses(as_json: o.Json = False) -> None:
    """List the training losses, with their options and defaults.

    $ trueup losses
    $ trueup losses --json
    """
    print_registry("losses", LOSSES, as_json)


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the options of a function with their defaults.

    >>> defaults(METRICS["ece"])["bins"]
    15
    """
    if inspect.isclass(function) and hasattr(function, "function"):
        function = function.function  # the class of a loss takes its options by position too
    return {
        p.name: p.default
        for p in inspect.signature(function).parameters.values()
        if p.kind is p.KEYWORD_ONLY and p.default is not p.empty and p.name not in COMMON
    }


def summary(function: Any) -> str:
    """Return the first sentence of a docstring.

    For a fit this is the first sentence of its class, followed by that of the fit itself.

    >>> summary(METHODS["temperature"])
    'Divide the logits by one number: q = softmax(z/T).'
    """
    if inspect.isclass(function) and hasattr(function, "function"):
        function = function.function  # for a loss, the function with the formula has the best summary
    if inspect.ismethod(function):
        class_summary = _first_sentence(function.__self__.__doc__)
        if function.__name__ == "fit":
            return class_summary
        return f"{class_summary} {_first_sentence(function.__doc__)}"
    return _first_sentence(function.__doc__)


def _first_sentence(text: str | None) -> str:
    paragraph = " ".join((text or "").strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[.?!])\s+(?=[A-Z`])", paragraph)[0]


def print_registry(verb: str, registry: Mapping[str, Any], as_json: bool) -> None:
    """Print the entries of a registry, each with its options and its summary."""
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
        print_table([["name", "description and defaults"], *rows], words=True)
        return
    print_table([["name", "defaults", "description"], *rows], words=True)


def _to_json(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str | list | tuple) else str(value)


register = o.commands("Look up", methods, metrics, losses)
