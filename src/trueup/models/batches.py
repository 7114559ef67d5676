"""Inputs and outputs of a network: batches of any kind, and the logits in any kind of output."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple, TypeAlias, TypedDict

import numpy as np
import torch
from torch import Tensor, nn

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
Device: TypeAlias = torch.device | str | int
UnpackBatch: TypeAlias = Callable[[Any], Any]
"""Function from a batch of any form to one of a form that `batches` reads, such as (inputs, labels)."""

LABELS = ("labels", "label", "targets", "target", "y")
"""Names of labels in a batch, by priority."""


INPUTS = ("image", "images", "pixel_values", "inputs", "input", "x")
"""Names of inputs in a batch for a model whose only positional argument has another name."""

_REMEDY = "for batches of another form pass unpack=lambda batch: (inputs, labels)"


class Reading(TypedDict, total=False):
    """How a loader is read."""

    unpack: UnpackBatch | None
    """Function from a batch to (inputs, labels), for batches of another form."""


class _Unpacked:
    """A loader that can be read again, with each batch unpacked."""

    def __init__(self, loader: Iterable[Any], unpack: UnpackBatch) -> None:
        self.loader = loader
        self.unpack = unpack

    def __iter__(self) -> Iterator[Any]:
        return map(self.unpack, self.loader)


def unpacked(loader: Iterable[Any], *, unpack: UnpackBatch | None = None) -> Iterable[Any]:
    """Return a loader with each batch unpacked; an iterator can still be read only once.

    >>> list(unpacked([{"a": 1, "b": 2}], unpack=lambda batch: (batch["a"], batch["b"])))
    [(1, 2)]
    """
    if unpack is None or not isinstance(loader, Iterable):
        return loader
    return map(unpack, loader) if isinstance(loader, Iterator) else _Unpacked(loader, unpack)


class Batch(NamedTuple):
    """One parsed batch: the arguments of the model, and the labels."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    labels: Tensor


def batches(
    loader: Iterable[Any],
    *,
    device: Device | None = None,
    any_shape: bool = False,
    numbers: bool = False,
    model: nn.Module | None = None,
) -> Iterator[Batch]:
    """Parse the batches of a loader, moving tensors to `device` if one is named.

    A tuple or a list has positional arguments and then the labels. A mapping, a dataclass or a named tuple has the
    labels under `labels`, `label`, `targets`, `target` or `y`, and its other fields are keywords. NumPy arrays become
    tensors, and labels int64 of shape (n,), or of any shape with `any_shape`. With `numbers` they are targets of a
    regression, in double precision.

    >>> [batch] = batches([{"x": torch.zeros(2, 3), "label": [1, 0]}])
    >>> list(batch.kwargs), batch.labels
    (['x'], tensor([1, 0]))
    """
    for number, batch in enumerate(loader):
        with errors_name_batch(number):
            args, kwargs, labels = _parts(batch)
            args, kwargs = _positional(model, args, kwargs)
            labels = _numbers(labels) if numbers else _labels(labels, any_shape)
        yield Batch(*_to_device((args, kwargs, labels), device))


def _positional(model: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments:
    """Pass a named input by position if the model has one argument; other entries are dropped."""
    if model is None or not kwargs:
        return args, kwargs
    parameters = list(inspect.signature(model.forward).parameters.values())
    if len(parameters) != 1 or parameters[0].kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
        return args, kwargs
    name = next((name for name in (parameters[0].name, *INPUTS) if name in kwargs), None)
    return (args, kwargs) if name is None else ((kwargs[name],), {})


@contextmanager
def errors_name_batch(number: int) -> Iterator[None]:
    """Add the number of the batch to error messages."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"batch {number}: {error}") from None


def arguments_of(inputs: Any) -> Arguments:
    """Return the positional arguments and keywords of inputs: a tensor, a tuple of arguments, or a mapping.

    >>> arguments_of((1, 2)), arguments_of({"x": 3})
    (((1, 2), {}), ((), {'x': 3}))
    """
    if isinstance(inputs, Batch):
        return inputs.args, inputs.kwargs
    if isinstance(inputs, Mapping):
        return (), {name: _without_numpy(value) for name, value in inputs.items()}
    return tuple(map(_without_numpy, inputs if isinstance(inputs, tuple | list) else [inputs])), {}


def logits_of(output: Any) -> Tensor:
    """Find the logits in a model's output: the output, its entry or attribute `logits`, or a tuple's first tensor.

    >>> logits_of({"loss": None, "logits": torch.ones(1, 2)})
    tensor([[1., 1.]])
    """
    key = _key(output)
    return output if key is None else _entry(output, key)


def with_logits(output: Any, logits: Tensor) -> Any:
    """Return a copy of an output with its logits replaced.

    >>> with_logits((torch.ones(1, 2), "state"), torch.zeros(1, 2))
    (tensor([[0., 0.]]), 'state')
    """
    key = _key(output)
    return logits if key is None else replace_entry(output, key, logits)


def tensors_in(inputs: Any) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """Yield the path and the tensor of each tensor in nested tuples, lists and mappings.

    >>> [keys for keys, tensor in tensors_in(((torch.ones(1), {"mask": torch.ones(1)}), {"scale": 2.0}))]
    [(0, 0), (0, 1, 'mask')]
    """
    if isinstance(inputs, Tensor):
        yield (), inputs
    elif isinstance(inputs, Mapping | tuple | list):
        for key, value in inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs):
            yield from (((key, *keys), tensor) for keys, tensor in tensors_in(value))


def replace_at(inputs: Any, keys: tuple[Any, ...], change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of inputs with the tensor at a path changed.

    >>> replace_at((torch.ones(2), "text"), (0,), lambda x: x + 1)
    (tensor([2., 2.]), 'text')
    """
    if not keys:
        return change(inputs)
    return replace_entry(inputs, keys[0], replace_at(inputs[keys[0]], keys[1:], change))


def _key(output: Any) -> Any:
    """Return the index, key or attribute of the logits; None if the output is the logits."""
    if isinstance(output, Tensor):
        return None
    kind = type(output).__name__
    key: int | str = "logits"
    logits: Any = None
    if isinstance(output, Mapping) and key not in output:
        got = f"{kind} with keys {_names(output)}"
    elif isinstance(output, Mapping) or hasattr(output, "logits"):
        logits = _entry(output, key)
        got = f"{kind} whose logits are of type {type(logits).__name__}"
    elif isinstance(output, tuple | list):
        key, logits = next(((i, entry) for i, entry in enumerate(output) if isinstance(entry, Tensor)), (0, None))
        got = f"{kind} of {', '.join(type(entry).__name__ for entry in output) or 'nothing'}"
    else:
        got = kind
    if not isinstance(logits, Tensor):
        raise ValueError(
            "the model's output must be a tensor, a tuple or list that holds one, or have one under `logits`, "
            f"got {got}; wrap the model in one that returns its logits"
        )
    return key


def _entry(container: Any, key: Any) -> Any:
    indexed = isinstance(container, Mapping) or not isinstance(key, str)
    return container[key] if indexed else getattr(container, key)


def replace_entry(container: Any, key: Any, value: Any) -> Any:
    """Copy a tuple, a list, a mapping or an object with one entry or attribute replaced."""
    if isinstance(container, tuple):
        at = container._fields.index(key) if isinstance(key, str) else key  # type: ignore[attr-defined]
        return _like(container, [value if i == at else entry for i, entry in enumerate(container)])
    if isinstance(container, Mapping) and not isinstance(container, MutableMapping):
        return type(container)({**container, key: value})  # type: ignore[call-arg]
    changed = copy.copy(container)
    if isinstance(container, MutableMapping | list):
        changed[key] = value
        return changed
    try:
        setattr(changed, key, value)
    except AttributeError:  # a frozen dataclass
        object.__setattr__(changed, key, value)
    return changed


def _like(container: Any, entries: list[Any]) -> Any:
    return container._make(entries) if hasattr(container, "_make") else type(container)(entries)


def _parts(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    named = named_batch(batch)
    if named is not None:
        label = next((name for name in LABELS if name in named), None)
        if label is None:
            raise ValueError(f"labels must be under one of {', '.join(LABELS)}, got {_names(named)}; {_REMEDY}")
        labels = named.pop(label)
        return (), named, labels
    kind = type(batch).__name__
    if isinstance(batch, tuple | list):
        if len(batch) < 2:
            raise ValueError(f"a {kind} must hold the inputs and then the labels, got {len(batch)} in it")
        return tuple(batch[:-1]), {}, batch[-1]
    shape = f" of shape {tuple(batch.shape)}" if hasattr(batch, "shape") else ""
    raise ValueError(
        "it must be a tuple or list that ends in the labels, or a mapping, dataclass or named tuple, "
        f"got {kind}{shape}; a loader of one batch is [(inputs, labels)], and {_REMEDY}"
    )


def named_batch(batch: Any) -> dict[str, Any] | None:
    """Return the fields of a mapping, a dataclass or a named tuple; None for any other batch."""
    if isinstance(batch, Mapping):
        return dict(batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        return {field.name: getattr(batch, field.name) for field in fields(batch)}
    if isinstance(batch, tuple) and hasattr(batch, "_asdict"):
        return dict(batch._asdict())
    return None


def _labels(labels: Any, any_shape: bool = False) -> Tensor:
    try:
        y = torch.as_tensor(_without_numpy(labels))
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"labels must be an array of integers, got {type(labels).__name__}: {error}") from None
    if y.ndim != 1 and not (any_shape and y.ndim):
        hint = "" if y.ndim < 2 else '; tokens and pixels need class_axis="first" or "last"'
        if y.ndim == 2 and not y.is_complex() and bool((y.sum(dim=1) == 1).all() & ((y == 0) | (y == 1)).all()):
            hint = "; one-hot labels become classes by argmax(dim=1)"
        if y.ndim == 2 and y.shape[1] == 1:
            hint = "; squeeze(1) takes the second dimension away"
        raise ValueError(f"labels must have shape (n,), got {tuple(y.shape)}{hint}")
    if y.is_complex() or (y.is_floating_point() and len(y)):  # an empty list has no meaningful type
        raise ValueError(f"labels must be integers, got {y.dtype}".replace("torch.", ""))
    return y.detach().to(torch.int64)


def _numbers(targets: Any) -> Tensor:
    """Check targets of a regression, (n,) or (n, 1)."""
    y = torch.as_tensor(_without_numpy(targets))
    y = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if y.ndim != 1 or y.is_complex():
        raise ValueError(f"targets must be numbers of shape (n,), got {tuple(y.shape)} {y.dtype}".replace("torch.", ""))
    return y.detach().double()


def _to_device(value: Any, device: Device | None) -> Any:
    """Move tensors to the device, also inside tuples, lists, mappings and objects with a method `to`."""
    value = _without_numpy(value)
    if callable(getattr(value, "to", None)):
        return value if device is None else value.to(device)
    if isinstance(value, MutableMapping):
        moved = copy.copy(value)
        for key, entry in value.items():
            moved[key] = _to_device(entry, device)
        return moved
    if isinstance(value, tuple | list):
        return _like(value, [_to_device(entry, device) for entry in value])
    return value


def _without_numpy(value: Any) -> Any:
    """Convert a numeric NumPy array to a tensor, copying it if it is not writable."""
    numbers = isinstance(value, np.ndarray) and value.dtype.kind in "fiub"
    return torch.from_numpy(np.require(value, requirements=["C", "W"])) if numbers else value


def _names(named: Mapping[str, Any]) -> str:
    return ", ".join(map(repr, named)) or "nothing"
