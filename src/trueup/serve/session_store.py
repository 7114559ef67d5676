"""Users' data in memory under unguessable ids, with an expiry time and a memory budget."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from threading import RLock
from time import monotonic
from typing import Any, NamedTuple, TypeVar

T = TypeVar("T")


class _Entry(NamedTuple):
    value: Any
    size: int
    used: float


class Missing(KeyError):
    """There is no value under that id, or it has expired."""


class Store:
    """Values by random ids: unused values expire after `seconds`, and the least recently used go when memory is full.

    >>> now = 0.0
    >>> store = Store(seconds=60, max_bytes=100, clock=lambda: now)
    >>> first, second = store.put("one", 60), store.put("two", 60)
    >>> first in store, second in store
    (False, True)
    >>> now = 61.0
    >>> second in store
    False
    """

    def __init__(self, *, seconds: float, max_bytes: int, clock: Callable[[], float] = monotonic) -> None:
        self._seconds, self._max_bytes, self._clock = seconds, max_bytes, clock
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # least recently used first
        self._lock = RLock()

    def put(self, value: Any, size: int) -> str:
        """Store a value with its size in bytes; return its id."""
        name = secrets.token_urlsafe(24)
        with self._lock:
            self._append(name, value, size)
        return name

    def get(self, name: str, kind: type[T]) -> T:
        """Return the value of that id and type, and restart its expiry time."""
        with self._lock:
            self.sweep()
            entry = self._pop(name, kind)
            self._append(name, entry.value, entry.size)
            return entry.value

    def resize(self, name: str, size: int) -> None:
        """Set the size of a value, if it is still stored."""
        with self._lock:
            if name in self._entries:
                self._append(name, self._entries.pop(name).value, size)

    def remove(self, name: str, kind: type[T] = object) -> T:  # type: ignore[assignment]
        """Delete the value of that id and type; return it."""
        with self._lock:
            return self._pop(name, kind).value

    def clear(self) -> None:
        """Delete all values."""
        with self._lock:
            self._entries.clear()

    def sweep(self) -> None:
        """Delete expired values."""
        with self._lock:
            oldest = self._clock() - self._seconds
            while self._entries and next(iter(self._entries.values())).used < oldest:
                self._entries.popitem(last=False)

    @property
    def size(self) -> int:
        """Bytes stored now."""
        with self._lock:
            return sum(entry.size for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, name: str) -> bool:
        self.sweep()
        return name in self._entries

    def _pop(self, name: str, kind: type) -> _Entry:
        if name not in self._entries or not isinstance(self._entries[name].value, kind):
            raise Missing(name)
        return self._entries.pop(name)

    def _append(self, name: str, value: Any, size: int) -> None:
        """Add a value as the most recently used; delete others if memory is full."""
        self._entries[name] = _Entry(value, size, self._clock())
        self.sweep()
        while self.size > self._max_bytes and len(self._entries) > 1:
            self._entries.popitem(last=False)
