"""Lazy packages: names in a package's stub (`__init__.pyi`) are imported on first use."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import lazy_loader


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package, from the stub next to its file.

    Modules of the package that are not in the stub are attributes too, but are not listed.
    """
    resolve, list_names, names = lazy_loader.attach_stub(package, file)

    def attribute(name: str) -> Any:
        if name in names:
            return resolve(name)
        if not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
            return import_module(f"{package}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return attribute, list_names, names
