"""Checks of a loss's options, each named where the loss is declared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

Check: TypeAlias = Callable[[str, Mapping[str, Any]], None]
"""Given an option's name and all the options, raises or warns."""


def at_least(bound: float) -> Check:
    """The option is a finite number of at least this."""

    def check(name: str, options: Mapping[str, Any]) -> None:
        if not _lies(options[name], lambda value: bound <= value < math.inf):
            raise ValueError(f"{name} must be a number of at least {bound}, got {options[name]!r}")

    return check


def above(bound: float) -> Check:
    """The option is a finite number above this."""

    def check(name: str, options: Mapping[str, Any]) -> None:
        if not _lies(options[name], lambda value: bound < value < math.inf):
            raise ValueError(f"{name} must be a number above {bound}, got {options[name]!r}")

    return check


def whole(bound: int) -> Check:
    """The option is a whole number of at least this."""

    def check(name: str, options: Mapping[str, Any]) -> None:
        if not isinstance(options[name], int) or options[name] < bound:
            raise ValueError(f"{name} must be a whole number of at least {bound}, got {options[name]!r}")

    return check


def between(low: float, high: float) -> Check:
    """The option is a number from low to high, both included."""

    def check(name: str, options: Mapping[str, Any]) -> None:
        if not _lies(options[name], lambda value: low <= value <= high):
            raise ValueError(f"{name} must lie in {low}..{high}, got {options[name]!r}")

    return check


def _lies(value: Any, where: Callable[[Any], bool]) -> bool:
    try:
        return bool(where(value))
    except TypeError:  # a text, or nothing
        return False
