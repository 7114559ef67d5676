"""Finds public names whose documentation lacks parameters, and public signatures with `Any`.

`python tests/documentation.py PACKAGE…` lists them.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from functools import cache, partial
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

from trueup import LOSSES, METHODS, METRICS

_SECTION = re.compile(r"^([A-Z][A-Za-z ]+)\n-{3,}$", re.MULTILINE)


def public_objects(package: str) -> dict[str, Any]:
    """Return the public functions and classes of a package or public module, by their full names."""
    module = import_module(f"trueup.{package}")
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith(("_", "warn_")) and getattr(value, "__module__", "") == module.__name__
    ]
    objects = {f"{package}.{name}": getattr(module, name) for name in names}
    for registry in (METHODS, METRICS, LOSSES):
        for name, entry in registry.items():
            if getattr(_plain(entry), "__module__", "").startswith(f"trueup.{package}"):
                objects.setdefault(f"{package}:{name}", entry)
    return {name: obj for name, obj in objects.items() if inspect.isroutine(_plain(obj)) or inspect.isclass(obj)}


def undocumented(package: str) -> list[str]:
    """Return the public parameters and fields of a package without a description."""
    return [f"{name}({parameter})" for name, parameter in _missing(package)]


def untyped(package: str) -> list[str]:
    """Return the public parameters and results typed `Any`, except `**options` and dictionaries for JSON."""
    return [
        f"{name}({parameter})"
        for name, function, _ in _callables(package)
        for parameter, annotation in _annotations(function).items()
        if re.search(r"\bAny\b", str(annotation).replace("dict[str, Any]", ""))
    ]


def described_parameters(docstring: str | None) -> set[str]:
    """Return the parameters that the numpydoc section Parameters of a docstring describes.

    >>> sorted(described_parameters("Parameters\\n----------\\na, b\\n    Terms.\\n**more\\n    Others.\\nc\\n"))
    ['a', 'b', 'more']
    """
    parts = _SECTION.split(inspect.cleandoc(docstring or ""))
    text = dict(zip(parts[1::2], parts[2::2], strict=True)).get("Parameters", "")
    heads = re.findall(r"^(\S.*)\n+[ ]+\S", text, re.MULTILINE)
    return {name.strip(" *").partition(" :")[0].strip(" *") for head in heads for name in head.split(",")}


def _missing(package: str) -> Iterator[tuple[str, str]]:
    for name, function, docstring in _callables(package):
        described = described_parameters(docstring)
        yield from ((name, parameter) for parameter in _parameters(function) if parameter not in described)
    for name, cls in public_objects(package).items():
        if inspect.isclass(cls) and not issubclass(cls, enum.Enum) and "__init__" not in _source_names(cls):
            described = described_parameters(cls.__doc__).union(*map(_described_fields, cls.__mro__))
            yield from ((name, field) for field in _constructor_fields(cls) if field not in described)


def _callables(package: str) -> Iterator[tuple[str, Callable[..., Any], str | None]]:
    """Yield public functions, constructors and methods, each with the docstring that describes its parameters."""
    for name, obj in public_objects(package).items():
        if not inspect.isclass(obj):
            yield name, _plain(obj), _plain(obj).__doc__
            continue
        if "__init__" in _source_names(obj):
            yield name, obj.__init__, obj.__doc__
        for key, value in vars(obj).items():
            function = getattr(value, "__func__", value)
            inherited = any(getattr(getattr(base, key, None), "__doc__", None) for base in obj.__mro__[1:])
            if (
                not key.startswith("_")
                and inspect.isfunction(function)
                and not inherited
                and not _is_internal(function)
            ):
                yield f"{name}.{key}", function, function.__doc__


def _is_internal(function: Callable[..., Any]) -> bool:
    """Return whether a method is part of the protocol of saved values, which users do not call."""
    return function.__name__ == "upgrade" or "xp" in inspect.signature(function).parameters


def _plain(obj: Any) -> Any:
    """Return the function inside partial objects and bound methods."""
    while isinstance(obj, partial):
        obj = obj.func
    return getattr(obj, "__func__", obj)


def _parameters(function: Callable[..., Any]) -> list[str]:
    names = list(inspect.signature(function).parameters)
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def _annotations(function: Callable[..., Any]) -> dict[str, Any]:
    signature = inspect.signature(function)
    typed = {p.name: p.annotation for p in signature.parameters.values() if p.kind not in (p.VAR_KEYWORD,)}
    return {**typed, "return": signature.return_annotation}


@cache
def _class_node(cls: type) -> ast.ClassDef | None:
    """Return the definition of a class of this project."""
    if not cls.__module__.startswith("trueup"):
        return None
    tree = ast.parse(Path(inspect.getfile(cls)).read_text())
    name = cls.__qualname__.split(".")[-1]
    return next((n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name), None)


def _source_names(cls: type) -> set[str]:
    node = _class_node(cls)
    return {child.name for child in node.body if isinstance(child, ast.FunctionDef)} if node else set()


def _described_fields(cls: type) -> set[str]:
    """Return the fields with a string below them."""
    body = node.body if (node := _class_node(cls)) else []
    return {
        first.target.id
        for first, second in pairwise(body)
        if isinstance(first, ast.AnnAssign) and isinstance(first.target, ast.Name)
        if isinstance(second, ast.Expr) and isinstance(second.value, ast.Constant)
    }


def _constructor_fields(cls: type) -> list[str]:
    names = [f.name for f in fields(cls) if f.init] if is_dataclass(cls) else list(getattr(cls, "_fields", ()))
    return [name for name in names if not name.startswith("_")]


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        print(*undocumented(argument), *(f"Any: {name}" for name in untyped(argument)), sep="\n")
