"""Loaders with labels or without, as one kind of loader."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueup.clamping.fit import check_loader
from trueup.core.errors import InputError
from trueup.models.batches import LABELS, named_batch


def parse_loader(name: str, loader: Any) -> Iterable[Any]:
    """A loader, and not the samples themselves, whose rows would be taken for batches."""
    pair = isinstance(loader, tuple | list) and len(loader) == 2 and all(hasattr(part, "ndim") for part in loader)
    if pair and loader[0].ndim > loader[1].ndim == 1 and len(loader[0]) == len(loader[1]):
        hint = "a loader of one batch is [(inputs, labels)]"
        raise InputError(name, "give batches", "the inputs and the labels", hint)
    if isinstance(loader, Tensor | np.ndarray):
        got = f"{type(loader).__name__} of shape {tuple(loader.shape)}"
        raise InputError(name, "give batches", got, "a loader of one batch is [inputs]")
    try:
        return check_loader(loader)
    except InputError as error:
        raise error.replace(argument=name) from None


def labelled_batches(loader: Iterable[Any], labels: Any) -> tuple[Iterable[Any], bool]:
    """The loader, with labels that mean nothing where it has none; and whether it has."""
    if labels is None:
        return _Unlabelled(loader, drop=True), False
    iterator = iter(loader)
    first = next(iterator, None)
    rest = _Chained(first, iterator) if iterator is loader and first is not None else loader
    if first is None or _has_labels(first):
        return rest, True
    return _Unlabelled(rest, drop=False), False


def without_labels(loader: Iterable[Any]) -> Iterable[Any]:
    """The loader without its labels, if it has any."""
    batches, with_labels = labelled_batches(loader, "loader")
    return _Unlabelled(batches, drop=True) if with_labels else batches


def _has_labels(batch: Any) -> bool:
    named = named_batch(batch)
    if named is not None:
        return any(name in named for name in LABELS)
    return isinstance(batch, tuple | list) and len(batch) > 1


class _Chained:
    """An iterator whose first item was taken."""

    def __init__(self, first: Any, rest: Iterator[Any]) -> None:
        self.first, self.rest = first, rest

    def __iter__(self) -> Iterator[Any]:
        yield self.first
        yield from self.rest


class _Unlabelled:
    """Batches with the label 0, for what reads batches with labels."""

    def __init__(self, loader: Iterable[Any], *, drop: bool) -> None:
        self.loader, self.drop = loader, drop

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            named = named_batch(batch)
            if named is not None:
                inputs: Any = {name: value for name, value in named.items() if name not in LABELS}
                yield {**inputs, "labels": torch.zeros(_rows(inputs.values()), dtype=torch.int64)}
                continue
            values = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
            if self.drop and len(values) > 1:
                values = values[:-1]
            yield (*values, torch.zeros(_rows(values), dtype=torch.int64))


def _rows(values: Iterable[Any]) -> int:
    """Of the first array, or of the first inside of mappings and the like where there is no other."""
    inside: list[Any] = []
    for value in values:
        if isinstance(value, Tensor | np.ndarray) and value.ndim:
            return len(value)
        if isinstance(value, Mapping | tuple | list):
            inside += value.values() if isinstance(value, Mapping) else value
    return _rows(inside) if inside else 0
