"""Sums and concatenations over the processes of a `torch.distributed` group; no effect without a group."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist


def world_size() -> int:
    """Return the number of processes in the group; 1 without a group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Return the number of this process in the group, from 0."""
    return dist.get_rank() if world_size() > 1 else 0


def all_gather_rows(tensor: Tensor) -> Tensor:
    """Concatenate the rows of all ranks, in the order of the ranks; the numbers of rows may differ.

    A rank without rows may have any shape and type. Without a group the result is the tensor itself.

    >>> all_gather_rows(torch.arange(3))
    tensor([0, 1, 2])
    """
    if world_size() == 1:
        return tensor
    shapes = all_gather_object((tuple(tensor.shape), tensor.dtype))
    kinds = {(shape[1:], dtype) for shape, dtype in shapes if shape[0]}
    if len(kinds) > 1:
        got = ", ".join(f"{shape} {dtype}" for shape, dtype in shapes)
        raise ValueError(f"the ranks' tensors may differ in the number of rows only, got {got}".replace("torch.", ""))
    rest, dtype = kinds.pop() if kinds else (tuple(tensor.shape[1:]), tensor.dtype)
    parts = []
    for source, (shape, _) in enumerate(shapes):
        if not shape[0]:
            continue
        if source == rank():
            part = tensor.detach().to(_carrier(), copy=True).contiguous()
        else:
            part = torch.empty((shape[0], *rest), dtype=dtype, device=_carrier())
        dist.broadcast(part, src=source)
        parts.append(part)
    return torch.cat(parts).to(tensor.device) if parts else tensor


def all_reduce_sum(tensor: Tensor) -> Tensor:
    """Sum a tensor over the ranks, entry by entry; without a group the result is the tensor itself.

    >>> all_reduce_sum(torch.tensor([1.0, 2.0]))
    tensor([1., 2.])
    """
    if world_size() == 1:
        return tensor
    total = tensor.detach().to(_carrier(), copy=True).contiguous()
    dist.all_reduce(total)
    return total.to(tensor.device)


def all_gather_object(value: Any) -> list[Any]:
    """Gather a small picklable object from each rank, in the order of the ranks."""
    values: list[Any] = [value]
    if world_size() > 1:
        values = [None] * world_size()
        dist.all_gather_object(values, value)
    return values


@contextmanager
def raise_on_all_ranks() -> Iterator[None]:
    """Raise on every rank if the body raises on one, so that no rank waits forever.

    The body must not gather or reduce. The other ranks raise a `RuntimeError` that names the rank and its error.
    """
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    failures = all_gather_object(failure and f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for source, message in enumerate(failures):
        if message:
            raise RuntimeError(f"rank {source} failed with {message}")


def _carrier() -> torch.device:
    """Return the device for communication; NCCL does not support CPU tensors."""
    backend = str(dist.get_backend())
    if "nccl" in backend and "gloo" not in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")
