"""Conversion of arrays to tensors: checked pairs, and half precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueup._core import arrays


def as_tensors(logits: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Check logits (n, classes) and labels (n,), and return them as tensors on the logits' device.

    >>> as_tensors([[2.0, 1.0]], [0])
    (tensor([[2., 1.]], dtype=torch.float64), tensor([0]))
    """
    z, y = arrays.as_pair(logits, labels)
    return torch.as_tensor(z), torch.as_tensor(y)


def to_tensor(x: Any) -> Tensor:
    """Convert an array to a tensor; a tensor keeps its graph."""
    return x if isinstance(x, Tensor) else torch.from_numpy(np.array(x, dtype=getattr(x, "dtype", np.float64)))


def to_numpy(*tensors: Tensor) -> tuple[np.ndarray, ...]:
    """Convert tensors to NumPy arrays, sharing memory on the CPU."""
    return tuple(upcast_half(tensor.detach()).cpu().numpy() for tensor in tensors)


def match_kind(result: Tensor, like: Any) -> Any:
    """Convert a result to the kind of array of the input."""
    return result if isinstance(like, Tensor) else arrays.match_kind(result.numpy(), like)


def upcast_half(x: Tensor) -> Tensor:
    """Convert half precision to float32; keep other types."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
