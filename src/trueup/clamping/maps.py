"""Maps of a network's input, the same for every sample: a shift, and a shift with channel scales."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

Box: TypeAlias = tuple[Any, Any]
"""Lower and upper ends, each a number or an array that broadcasts to one input."""


class Shift(nn.Module):
    """Add one δ to every input: x + δ, clipped to the box if there is one.

    Parameters
    ----------
    delta
        δ, of the shape of one input without the batch axis. For tokens it is one vector, added to every embedding.
    box
        Bounds (low, high) of the result, numbers or arrays that broadcast to one input; None does not clip.

    Examples
    --------
    >>> Shift(torch.tensor([1.0, -1.0]), box=(0, 1))(torch.tensor([[0.2, 0.5], [-0.5, 1.5]]))
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000]])

    References
    ----------
    Tang et al. (2024), "Neural Clamping", section 3.1, arXiv:2209.11604.
    """

    delta: Tensor
    low: Tensor | None
    high: Tensor | None

    def __init__(self, delta: Tensor, box: Box | None = None) -> None:
        super().__init__()
        if not isinstance(delta, Tensor) or not delta.is_floating_point():
            raise ValueError(f"delta must be a tensor of floating point, got {_kind(delta)}")
        self.register_buffer("delta", delta)
        low, high = (None, None) if box is None else (_end(end, delta) for end in box)
        if low is not None and high is not None and bool((low > high).any()):
            raise ValueError("box must have its lower end below its upper one, got the reverse")
        self.register_buffer("low", low)
        self.register_buffer("high", high)

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (n, …)."""
        self._check(x)
        return self._clipped(x + self.delta.to(_working(x)))

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"delta": self.delta, "box": self.box}

    @property
    def box(self) -> Box | None:
        """Lower and upper end, or None."""
        return None if self.low is None else (self.low, self.high)

    def extra_repr(self) -> str:
        """Describe δ by its shape and norm."""
        return f"shape={tuple(self.delta.shape)}, norm={float(self.delta.detach().norm()):.6g}"

    def _check(self, x: Tensor) -> None:
        if x.ndim <= self.delta.ndim or x.shape[x.ndim - self.delta.ndim :] != self.delta.shape:
            raise ValueError(f"inputs must have shape (n, …, {_sizes(self.delta)}), got {tuple(x.shape)}")

    def _clipped(self, x: Tensor) -> Tensor:
        if self.low is None or self.high is None:
            return x
        return torch.minimum(torch.maximum(x, self.low.to(x.dtype)), self.high.to(x.dtype))


class Affine(Shift):
    """Scale each channel and add δ: s·x + δ, clipped to the box if there is one.

    Parameters
    ----------
    delta
        δ, of the shape of one input without the batch axis.
    scale
        s, an array that broadcasts to δ.
    box
        Bounds (low, high) of the result, numbers or arrays that broadcast to one input; None does not clip.

    Examples
    --------
    >>> Affine(torch.tensor([1.0, 0.0]), torch.tensor([2.0, 0.5]))(torch.tensor([[1.0, 1.0]]))
    tensor([[3.0000, 0.5000]])
    """

    scale: Tensor

    def __init__(self, delta: Tensor, scale: Tensor, box: Box | None = None) -> None:
        super().__init__(delta, box)
        if not isinstance(scale, Tensor) or not scale.is_floating_point():
            raise ValueError(f"scale must be a tensor of floating point, got {_kind(scale)}")
        if not _fits(scale, delta):
            raise ValueError(f"scale must broadcast to delta {tuple(delta.shape)}, got {tuple(scale.shape)}")
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """Map inputs (n, …)."""
        self._check(x)
        working = _working(x)
        return self._clipped(x * self.scale.to(working) + self.delta.to(working))

    def config(self) -> dict[str, Any]:
        """Return the constructor's arguments."""
        return {"delta": self.delta, "scale": self.scale, "box": self.box}


def detach_map(before: Shift) -> Shift:
    """Return the same map without gradients."""
    config: dict[str, Any] = {
        name: value.detach() if isinstance(value, Tensor) else value for name, value in before.config().items()
    }
    return type(before)(**config)


def scale_shape(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one number per channel (first axis of an input): (C, 1, 1) for images, (d,) for vectors."""
    return (*shape[:1], *(1 for _ in shape[1:]))


def _working(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16, torch.uint8) else x.dtype


def _end(end: Any, delta: Tensor) -> Tensor:
    tensor = torch.as_tensor(end, dtype=delta.dtype, device=delta.device).detach()
    if not _fits(tensor, delta):
        raise ValueError(f"box must broadcast to delta {tuple(delta.shape)}, got {tuple(tensor.shape)}")
    return tensor


def _fits(tensor: Tensor, delta: Tensor) -> bool:
    sizes = zip(reversed(tensor.shape), reversed(delta.shape), strict=False)
    return tensor.ndim <= delta.ndim and all(size in (1, full_size) for size, full_size in sizes)


def _kind(value: Any) -> str:
    return f"{value.dtype}".replace("torch.", "") if isinstance(value, Tensor) else type(value).__name__


def _sizes(delta: Tensor) -> str:
    return ", ".join(map(str, delta.shape))
