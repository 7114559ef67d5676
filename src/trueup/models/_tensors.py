"""Arrays that came in as tensors: checked pairs, and half precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueup._core import arrays


def as_tensors(logits: Any, labels: Any, *, min_rows: int = 0) -> tuple[Tensor, Tensor]:
    """Check a pair of logits (n, classes) and labels (n,), and view it as tensors on the logits' device.

    >>> as_tensors([[2.0, 1.0]], [0])
    (tensor([[2., 1.]], dtype=torch.float64), tensor([0]))
    """
    z, y = arrays.as_pair(logits, labels, min_rows=min_rows)
    return torch.as_tensor(z), torch.as_tensor(y)


def to_tensor(x: Any) -> Tensor:
    """An array of any kind as a tensor; a tensor keeps its graph."""
    return x if isinstance(x, Tensor) else torch.from_numpy(np.array(x, dtype=getattr(x, "dtype", np.float64)))


def to_numpy(*tensors: Tensor) -> tuple[np.ndarray, ...]:
    """Tensors as NumPy arrays, which share the memory of those on the CPU."""
    return tuple(upcast_half(tensor.detach()).cpu().numpy() for tensor in tensors)


def match_kind(result: Tensor, like: Any) -> Any:
    """A result as the kind of array that came in."""
    return result if isinstance(like, Tensor) else arrays.match_kind(result.numpy(), like)


def upcast_half(x: Tensor) -> Tensor:
    """Half precision is computed in float32; other types stay as they are."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
