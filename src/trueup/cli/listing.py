"""Verbs that list what there is: methods, metrics, losses, networks, datasets."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import typer

from trueup.cli import options as o
from trueup.cli.output import print_json, print_table
from trueup.registry import LOSSES, METHODS, METRICS, NETWORKS

COMMON = ("weight", "ignore_index", "reduction")
"""Options that every loss has."""
FEW = 4
"""Longer sequences are told by their length."""


def methods(as_json: o.Json = False) -> None:
    """List the calibration methods, with their options and defaults."""
    _print("methods", METHODS, as_json)


def metrics(as_json: o.Json = False) -> None:
    """List the metrics, with their options and defaults."""
    _print("metrics", METRICS, as_json)


def losses(as_json: o.Json = False) -> None:
    """List the training losses, with their options and defaults."""
    _print("losses", LOSSES, as_json)


def networks(as_json: o.Json = False) -> None:
    """List the networks that `train` can make, with their options and defaults."""
    _print("networks", NETWORKS, as_json)


def datasets(as_json: o.Json = False) -> None:
    """List the data sets that `train` and `clamp` know by name."""
    from trueup.training.data import DATASETS

    _print("datasets", DATASETS, as_json)


def defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The options of a function, and what they are unless given.

    >>> defaults(METRICS["ece"])["bins"]
    15
    """
    found = inspect.signature(function).parameters.values()
    return {
        p.name: p.default
        for p in found
        if p.kind is p.KEYWORD_ONLY and p.default is not p.empty and p.name not in COMMON
    }


def summary(function: Any) -> str:
    """The first sentence that a function, or the class behind it, says of itself.

    >>> summary(METHODS["temperature"])
    'Divide the logits by one number: q = softmax(z/T).'
    """
    if isinstance(function, partial):
        function = function.func
    if inspect.isclass(function) and hasattr(function, "function"):
        function = function.function  # of a loss, the formula says what it is
    if inspect.ismethod(function):
        kind = _sentence(function.__self__.__doc__)
        return kind if function.__name__ == "fit" else f"{kind} {_sentence(function.__doc__)}"
    return _sentence(function.__doc__)


def _sentence(text: str | None) -> str:
    paragraph = " ".join((text or "").strip().partition("\n\n")[0].split())
    return re.split(r"(?<=[.?!])\s+(?=[A-Z`])", paragraph)[0]


def _print(verb: str, registry: Mapping[str, Any], as_json: bool) -> None:
    found = {name: registry[name] for name in registry}
    if as_json:
        entries = {
            name: {"summary": summary(entry), "defaults": {key: _plain(x) for key, x in defaults(entry).items()}}
            for name, entry in found.items()
        }
        print_json(verb, **{verb: entries})
        return
    rows = [[name, _told(defaults(entry)), summary(entry)] for name, entry in found.items()]
    if sys.stdout.isatty():  # three columns of words would be too narrow
        rows = [[name, f"{said}\n{told}".strip()] for name, told, said in rows]
        print_table([["name", "what it is, and its defaults"], *rows], words=True)
        return
    print_table([["name", "defaults", "what it is"], *rows], words=True)


def _told(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_shown(value)}" for name, value in options.items() if value is not None)


def _shown(value: Any) -> str:
    long = isinstance(value, list | tuple) and len(value) > FEW
    return f"<{len(value)} values>" if long else f"{value}"


def _plain(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str | list | tuple) else str(value)


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    for verb in (methods, metrics, losses, networks, datasets):
        name = verb.__name__
        app.command(rich_help_panel="Look up", epilog=o.examples(f"trueup {name}", f"trueup {name} --json"))(verb)
