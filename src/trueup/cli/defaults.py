"""Defaults of the library's functions, read from their text: help must not import what the functions need."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import trueup


def default_of(where: str, option: str) -> str:
    """What an option is unless given, as written in the signature of "module:function"; nothing if it is not told.

    A name is followed to the module that gives it a value.

    >>> default_of("trueup.metrics.table:evaluate", "bins"), default_of("trueup.metrics.table:evaluate", "level")
    ('15', '0.95')
    """
    module, name = where.split(":")
    for node in _body(module):
        if isinstance(node, ast.FunctionDef) and node.name == name:
            given = node.args
            plain = [*given.posonlyargs, *given.args]
            required = [None] * (len(plain) - len(given.defaults))
            defaults = [*required, *given.defaults, *given.kw_defaults]
            pairs = zip([*plain, *given.kwonlyargs], defaults, strict=True)
            found = next((default for argument, default in pairs if argument.arg == option), None)
            return "" if found is None else _value(module, found)
    source = _source(module, name)
    return default_of(source, option) if source else ""


def _value(module: str, node: ast.expr) -> str:
    if not isinstance(node, ast.Name):
        text = ast.unparse(node)
        return "" if text == "None" else text.strip("'")
    for line in _body(module):
        if isinstance(line, ast.Assign | ast.AnnAssign) and line.value is not None:
            targets = line.targets if isinstance(line, ast.Assign) else [line.target]
            if any(isinstance(target, ast.Name) and target.id == node.id for target in targets):
                return _value(module, line.value)
    room, _, name = _source(module, node.id).partition(":")
    return _value(room, ast.Name(name)) if room else node.id


def _source(module: str, name: str) -> str:
    """Where a module has a name from, as "module:name"; nothing if it is its own."""
    for line in _body(module):
        if isinstance(line, ast.ImportFrom) and line.module:
            for alias in line.names:
                if (alias.asname or alias.name) == name:
                    return f"{line.module}:{alias.name}"
    return ""


@cache
def _body(module: str) -> list[ast.stmt]:
    # Not by importlib, which would import the rooms around a module.
    _, *rooms = module.split(".")
    place = Path(trueup.__file__).parent.joinpath(*rooms)
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    return ast.parse(file.read_text(encoding="utf-8")).body if file.is_file() else []
