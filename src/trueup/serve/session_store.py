"""What users left with the server, each under a name nobody can guess, for a while and within a budget of memory."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock
from time import monotonic
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass
class _Kept:
    value: Any
    size: int
    used: float


class Missing(KeyError):
    """Nothing is kept under that name, or no longer."""


class Store:
    """Values by random names; what was not used for `seconds` is gone, and the longest unused go when it gets full.

    >>> now = 0.0
    >>> store = Store(seconds=60, most_bytes=100, clock=lambda: now)
    >>> first, second = store.put("one", 60), store.put("two", 60)
    >>> first in store, second in store
    (False, True)
    >>> now = 61.0
    >>> second in store
    False
    """

    def __init__(self, *, seconds: float, most_bytes: int, clock: Callable[[], float] = monotonic) -> None:
        self._seconds, self._most, self._clock = seconds, most_bytes, clock
        self._kept: OrderedDict[str, _Kept] = OrderedDict()  # the longest unused first
        self._lock = Lock()

    def put(self, value: Any, size: int) -> str:
        """Keep a value of so many bytes, and return its name."""
        name = secrets.token_urlsafe(24)
        with self._lock:
            self._kept[name] = _Kept(value, size, self._clock())
            self._make_room(name)
        return name

    def get(self, name: str, kind: type[T]) -> T:
        """The value of that name and kind, whose time begins anew."""
        with self._lock:
            self._forget_old()
            kept = self._kept.get(name)
            if kept is None or not isinstance(kept.value, kind):
                raise Missing(name)
            kept.used = self._clock()
            self._kept.move_to_end(name)
            return kept.value

    def resize(self, name: str, size: int) -> None:
        """Say that a value has grown, if it is still kept."""
        with self._lock:
            if name in self._kept:
                self._kept[name].size = size
                self._kept[name].used = self._clock()
                self._kept.move_to_end(name)
                self._make_room(name)

    def remove(self, name: str) -> Any:
        """Forget a value and return it."""
        with self._lock:
            if name not in self._kept:
                raise Missing(name)
            return self._kept.pop(name).value

    def sweep(self) -> None:
        """Forget what has expired."""
        with self._lock:
            self._forget_old()

    @property
    def size(self) -> int:
        """Bytes kept now."""
        with self._lock:
            return sum(kept.size for kept in self._kept.values())

    def __len__(self) -> int:
        return len(self._kept)

    def __contains__(self, name: str) -> bool:
        self.sweep()
        return name in self._kept

    def _forget_old(self) -> None:
        oldest = self._clock() - self._seconds
        while self._kept and next(iter(self._kept.values())).used < oldest:
            self._kept.popitem(last=False)

    def _make_room(self, newest: str) -> None:
        self._forget_old()
        total = sum(kept.size for kept in self._kept.values())
        for name in list(self._kept):
            if total <= self._most or name == newest:
                return
            total -= self._kept.pop(name).size
