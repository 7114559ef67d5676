"""A cell: one independent run of a study, known by its settings."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class Cell:
    """What is to be run: settings in plain data, which say everything that the result depends on.

    `local` tells where this machine keeps things and how much of it to use. The work sees it among the settings, but
    it is no part of the cell's identity, nor kept with the results.

    >>> cell = Cell("demo", 1, {"method": "temperature", "seed": 0}, local={"folder": "/data"})
    >>> cell.key == Cell("demo", 1, {"seed": 0.0, "method": "temperature"}).key
    True
    >>> cell.key == Cell("demo", 2, {"method": "temperature", "seed": 0}).key
    False
    """

    study: str
    version: int
    """Of the study: a change of what it computes makes new cells of it."""
    settings: Mapping[str, Any]
    local: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", plain(self.settings, "settings"))
        object.__setattr__(self, "local", plain(self.local, "local"))
        if both := sorted(self.settings.keys() & self.local.keys()):
            raise ValueError(f"local must not repeat the names of settings, got {both[0]!r} in both")

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def key(self) -> str:
        """The identity: a hash of study, version and settings, however these are ordered."""
        known = [self.study, self.version, _canonical(self.settings)]
        return hashlib.sha256(as_json(known, sort_keys=True).encode()).hexdigest()[:32]

    def __str__(self) -> str:
        return f"{self.study}({', '.join(f'{name}={value}' for name, value in self.settings.items())})"


def plain(value: Any, name: str) -> Any:
    """The value as JSON has it: NumPy's and torch's numbers become Python's, arrays and tuples become lists.

    >>> plain({"sizes": (50, 100)}, "settings")
    {'sizes': [50, 100]}
    >>> plain({"when": {1, 2}}, "settings")
    Traceback (most recent call last):
    ValueError: settings['when'] must be plain data (None, bool, number, text, list, dict), got set
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        if strange := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"{name} must have names for keys, got {strange[0]!r}")
        return {str(key): plain(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if hasattr(value, "tolist"):
        return plain(value.tolist(), name)
    for kind in (bool, int, float, str):  # an IntEnum or a str of a subclass is what it is of
        if isinstance(value, kind):
            return kind(value)
    wanted = "plain data (None, bool, number, text, list, dict)"
    raise ValueError(f"{name} must be {wanted}, got {type(value).__name__}")


def as_json(value: Any, *, sort_keys: bool = False) -> str:
    """Text that `json.loads` turns into the very same value, NaN and infinities too."""
    return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), ensure_ascii=False)


def _canonical(value: Any) -> Any:
    """Equal numbers written equally: 1.0 is 1."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
