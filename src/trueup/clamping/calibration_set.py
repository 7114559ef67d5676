"""The calibration set: kept in memory if it fits, otherwise read again in the same order."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from collections.abc import Set as AbstractSet
from copy import copy
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, SequentialSampler

from trueup.models._distributed import all_gather_object, all_reduce_sum, raise_on_all_ranks, rank
from trueup.models.batches import Batch, Device, batches, tensors_in

MEMORY = 1 << 30
"""Largest size in bytes of calibration data in memory; larger sets are read from the loader in each pass."""
GRAPH_VALUES = 1 << 22
"""Largest number of input values in one autograd graph.

A graph keeps the activations of all inputs. ResNet-101 needs 127 MB for an image of 3 × 224 × 224, or 65 GB for 512.
This limit allows 27 such images, or 3.5 GB. A thousand images of 3 × 32 × 32 stay in one graph."""

Position = tuple[Any, ...]
"""The keys in (args, kwargs) that lead to an argument."""


@dataclass(frozen=True, eq=False)
class CalibrationSet:
    """Samples in a fixed order, on the device of the model.

    An argument with as many rows as labels in every batch has one row per sample. Every other argument is shared by all
    samples, and is never split.

    >>> x, y = torch.arange(5.0)[:, None], torch.tensor([0, 1, 0, 1, 1])
    >>> inputs = CalibrationSet.read([(x[:3], y[:3]), (x[3:], y[3:])], device="cpu")
    >>> [batch.labels.tolist() for batch in inputs.subset(torch.tensor([0, 4]))]
    [[0, 1]]
    """

    chunks: Iterable[Any]
    """Batches in memory, or the loader."""
    labels: Tensor
    """Labels of this rank, on the CPU."""
    device: Device
    kept: bool
    """Whether the samples are in memory."""
    shared: frozenset[Position]
    """Positions of the arguments that all samples share."""
    batch_size: int = 0
    """Batch size of samples in memory."""
    index: Tensor | None = None
    """Numbers of the samples in the loader; None for all."""
    model: nn.Module | None = None
    """Model for the names of arguments."""

    @classmethod
    def read(
        cls, loader: Iterable[Any], *, device: Device, limit: int = MEMORY, model: nn.Module | None = None
    ) -> CalibrationSet:
        """Read a loader once, and keep its data if it has at most `limit` bytes."""
        with raise_on_all_ranks():
            kept: list[Batch] | None = []
            labels, held, size = [], 0, 1
            shared: set[Position] = set()
            for batch in batches(loader, device=device, model=model):
                labels.append(batch.labels.cpu())
                size = max(size, len(batch.labels))
                shared |= {position for position, n in _lengths((batch.args, batch.kwargs)) if n != len(batch.labels)}
                held += sum(tensor.nbytes for _, tensor in tensors_in((batch.args, batch.kwargs)))
                if held > limit:
                    kept = None
                if kept is not None:
                    # A loader may use the same memory for its next batch.
                    kept.append(_map_rows(batch, torch.clone, shared))
            if kept is None and iter(loader) is loader:
                raise ValueError(
                    f"loader must be readable more than once, since its {held} bytes exceed the limit of {limit}; "
                    f"got an iterator, {type(loader).__name__}"
                )
        y = torch.cat(labels) if labels else torch.empty(0, dtype=torch.int64)
        # An argument may look shared on one rank only.
        common = frozenset[Position]().union(*all_gather_object(shared))
        chunks = loader if kept is None else _merge(kept, common)
        return cls(chunks, y, device, kept is not None, common, size, model=model)

    @property
    def n(self) -> int:
        """Number of samples of this rank."""
        return len(self.labels)

    @property
    def total(self) -> int:
        """Number of samples of all ranks."""
        return int(all_reduce_sum(torch.tensor(self.n)))

    def __iter__(self) -> Iterator[Batch]:
        """Iterate over the batches."""
        slices = (part for chunk in self.chunks for part in self.split(chunk, self.batch_size))
        return slices if self.kept else self._again()

    def subset(self, index: Tensor) -> CalibrationSet:
        """Select samples, in their own order."""
        index = index.sort().values
        labels = self.labels[index]
        if not self.kept:
            return replace(self, labels=labels, index=index if self.index is None else self.index[index])
        chunks, start = [], 0
        for chunk in self.chunks:
            rows = index[(index >= start) & (index < start + len(chunk.labels))] - start
            start += len(chunk.labels)
            if len(rows):
                chunks.append(self.rows(chunk, rows))
        return replace(self, chunks=chunks, labels=labels)

    def with_batch_size(self, size: int) -> CalibrationSet:
        """Return the same samples in batches of another size, if they are in memory."""
        return replace(self, batch_size=size)

    def shuffled_batches(self, size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Yield one epoch of mini-batches in a new order.

        Samples are shuffled if they are in memory with one shape, or if the loader can read samples by number. Inputs
        of several shapes keep their batches, in a new order. Any other loader keeps its order.
        """
        chunks = list(self.chunks) if self.kept else []
        samples = None if self.kept else batches_of(self.chunks)
        if samples is not None:
            numbers = torch.arange(self.n) if self.index is None else self.index
            parts = torch.split(torch.randperm(self.n, generator=generator), size)
            read = samples([numbers[index].tolist() for index in parts])
            drawn = batches(read, device=self.device, model=self.model)
            for index, batch in zip(parts, drawn, strict=True):
                self._check_labels(batch, self.labels[index])
                yield batch
        elif len(chunks) == 1:
            for index in torch.split(torch.randperm(self.n, generator=generator), size):
                yield self.rows(chunks[0], index)
        elif chunks:
            for number in torch.randperm(len(chunks), generator=generator).tolist():
                yield chunks[number]
        else:
            yield from self

    def _again(self) -> Iterator[Batch]:
        """Read the loader once more, and check that the labels are the same."""
        index = torch.arange(self.n) if self.index is None else self.index
        start = 0
        for batch in batches(self.chunks, device=self.device, model=self.model):
            at = (index >= start) & (index < start + len(batch.labels))
            rows = index[at] - start
            start += len(batch.labels)
            batch = batch if torch.equal(rows, torch.arange(len(batch.labels))) else self.rows(batch, rows)
            self._check_labels(batch, self.labels[at])
            if len(rows):
                yield batch
        if start <= int(index[-1:].sum()):
            raise ValueError(f"loader must give the same samples each time it is read, got only {start} this time")

    @staticmethod
    def _check_labels(batch: Batch, labels: Tensor) -> None:
        if not torch.equal(batch.labels.cpu(), labels):
            raise ValueError(
                "loader must give the same samples in the same order each time it is read, since they do not fit in "
                "memory; got other labels than before: turn shuffling off"
            )

    def copied(self, batch: Batch) -> Batch:
        """Copy a batch, without the arguments that all samples share."""
        return _map_rows(batch, torch.clone, self.shared)

    def split(self, batch: Batch, size: int) -> Iterator[Batch]:
        """Split a batch into parts of at most `size` rows, in order."""
        n = len(batch.labels)
        # A single remaining row joins a longer part: networks that call squeeze take no batch of one.
        ends = [end - 1 if n - end == 1 < size - 1 else end for end in range(size, n, size)]
        for start, end in itertools.pairwise([0, *ends, n]):
            yield _map_rows(batch, itemgetter(slice(start, end)), self.shared)

    def rows(self, batch: Batch, rows: Tensor) -> Batch:
        """Select rows of a batch."""
        return _map_rows(batch, lambda tensor: tensor[rows.to(tensor.device)], self.shared)


def graph_rows(values: int) -> int:
    """Return the number of samples with `values` input values each that fit in one graph.

    >>> graph_rows(3 * 32 * 32), graph_rows(3 * 224 * 224)
    (1365, 27)
    """
    return max(1, GRAPH_VALUES // values)


def batches_of(loader: Any) -> Callable[[Sequence[list[int]]], Iterable[Any]] | None:
    """Return a function that reads samples by number, batch by batch; None for a loader without such access.

    A custom loader may have a method of this name. A torch DataLoader can do it if it reads its data set in order. A
    batch size of one is excluded: its samples may differ in shape, or be batches already.
    """
    method = getattr(loader, "batches_of", None)
    if method is not None or type(loader) is not DataLoader or not isinstance(loader.sampler, SequentialSampler):
        return method
    if (loader.batch_size or 1) == 1 or not hasattr(loader.dataset, "__getitem__"):
        return None
    options = {name: getattr(loader, name) for name in ("num_workers", "collate_fn", "pin_memory", "worker_init_fn")}
    # A separate generator is passed, since a DataLoader draws a number from the global one.
    return lambda numbers: DataLoader(loader.dataset, batch_sampler=numbers, generator=torch.Generator(), **options)


def local_subset(inputs: CalibrationSet, which: Tensor) -> CalibrationSet:
    """Select this rank's share of samples, given as numbers or a mask over all ranks."""
    return inputs.subset(local_numbers(inputs, which) - _first_number(inputs))


def local_numbers(inputs: CalibrationSet, which: Tensor) -> Tensor:
    """Return this rank's sample numbers in ascending order, from numbers or a mask over all ranks."""
    index = which.nonzero()[:, 0] if which.dtype == torch.bool else which
    first = _first_number(inputs)
    return index[(index >= first) & (index < first + inputs.n)].sort().values


def _first_number(inputs: CalibrationSet) -> int:
    return sum(all_gather_object(inputs.n)[: rank()])


def _lengths(value: Any, position: Position = ()) -> Iterator[tuple[Position, int]]:
    """Yield the number of rows of each tensor, and the length of each plain list; -1 for a scalar."""
    if isinstance(value, Tensor):
        yield position, len(value) if value.ndim else -1
    elif isinstance(value, Mapping | tuple | list):
        if _is_plain(value):
            yield position, len(value)
        for key, entry in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _lengths(entry, (*position, key))


def _is_plain(value: Any) -> bool:
    return isinstance(value, list) and not any(isinstance(entry, Tensor) for entry in value)


def _map_rows(batch: Batch, change: Callable[[Tensor], Tensor], shared: AbstractSet[Position]) -> Batch:
    """Apply a function to the labels and to all arguments with one row per sample; shared arguments stay."""

    def changed(value: Any, position: Position) -> Any:
        if isinstance(value, Tensor):
            return value if position in shared else change(value)
        if isinstance(value, MutableMapping):
            new = copy(value)
            for key, entry in value.items():
                new[key] = changed(entry, (*position, key))
            return new
        if isinstance(value, Mapping):
            named = {key: changed(entry, (*position, key)) for key, entry in value.items()}
            return type(value)(named)  # type: ignore[call-arg]
        if _is_plain(value) and position not in shared:
            return [value[i] for i in change(torch.arange(len(value))).tolist()]
        if isinstance(value, tuple | list):
            entries = [changed(entry, (*position, i)) for i, entry in enumerate(value)]
            return value._make(entries) if hasattr(value, "_make") else type(value)(entries)
        return value

    args, kwargs = changed((batch.args, batch.kwargs), ())
    return Batch(args, kwargs, change(batch.labels))


def _merge(chunks: list[Batch], shared: AbstractSet[Position]) -> list[Batch]:
    """Join chunks into one if they hold only tensors of the same shape."""
    kinds = {None if shared else _outline(chunk) for chunk in chunks}
    if len(chunks) < 2 or len(kinds) > 1 or None in kinds:
        return chunks
    columns: dict[tuple[Any, ...], list[Tensor]] = {}
    for chunk in chunks:
        for position, tensor in tensors_in((chunk.args, chunk.kwargs)):
            columns.setdefault(position, []).append(tensor)
    first, labels = chunks[0], torch.cat([chunk.labels for chunk in chunks])
    chunks.clear()  # this frees memory while the tensors are joined
    joined = {position: torch.cat(columns.pop(position)) for position in list(columns)}
    args = tuple(joined[0, i] for i in range(len(first.args)))
    return [Batch(args, {name: joined[1, name] for name in first.kwargs}, labels)]


def _outline(batch: Batch) -> tuple[Any, ...] | None:
    """Return names, shapes and dtypes, in which joined batches must agree; None if an argument is not a tensor."""
    values = [*batch.args, *batch.kwargs.values()]
    if not all(isinstance(value, Tensor) for value in values):
        return None
    return (tuple(batch.kwargs), *((value.shape[1:], value.dtype) for value in values))
