"""Modules that are made of their parameters: what a constructor takes is what `config` gives and a file holds.

Beside them operations that torch has and ONNX has not, made of ones that both have, so that modules can be exported.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn


class ParametricModule(nn.Module):
    """A module whose constructor takes its parameters, by names under which it keeps them.

    >>> class Scale(ParametricModule):
    ...     def __init__(self, factor):
    ...         super().__init__()
    ...         self.keep("factor", factor)
    >>> Scale(2.5), Scale([1, 2]).config()
    (Scale(factor=2.5), {'factor': tensor([1., 2.], dtype=torch.float64)})
    """

    def config(self) -> dict[str, Any]:
        """The constructor's arguments: `type(c)(**c.config())` equals `c`."""
        named = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = inspect.signature(type(self)).parameters.values()
        return {p.name: getattr(self, p.name) for p in parameters if p.kind is named}

    def extra_repr(self) -> str:
        """Small parameters in full, large ones by their shape; modules are left to torch, which shows them below."""
        shown = {name: value for name, value in self.config().items() if not _is_shown_below(value)}
        return ", ".join(f"{name}={_brief(value)}" for name, value in shown.items())

    def keep(self, name: str, value: Any) -> None:
        """Register a parameter as a float64 buffer: moved with the module, saved with it, never trained."""
        self.register_buffer(name, torch.as_tensor(value, dtype=torch.float64).detach().clone())


def _is_shown_below(value: Any) -> bool:
    several = isinstance(value, list | tuple | nn.ModuleList) and len(value) > 0
    return isinstance(value, nn.Module) or (several and all(isinstance(part, nn.Module) for part in value))


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.item():.6g}" if value.ndim == 0 else f"tensor{tuple(value.shape)}"
    return repr(value)


def count_below(places: Tensor, x: Tensor, *, right: bool = False) -> Tensor:
    """How many of the rising places lie below each x, #{places < x}, or with `right` at most at it, #{places ≤ x}.

    Places (m,) serve all x; places (rows, m) go with x (rows, n) row by row. It is `torch.searchsorted`; while a model
    is exported, the halving search is written out, in as many steps as m has bits.

    >>> count_below(torch.tensor([0.2, 0.5, 0.8]), torch.tensor([0.1, 0.5, 0.9]))
    tensor([0, 1, 3])
    """
    if not torch.compiler.is_compiling():
        return torch.searchsorted(places, x, right=right)
    return _halving(places, x, right)


def _halving(places: Tensor, x: Tensor, right: bool) -> Tensor:
    m = places.shape[-1]
    count = torch.zeros_like(x, dtype=torch.int64)
    for bit in reversed(range(m.bit_length())):
        more = count + (1 << bit)
        last = more.clamp(max=m) - 1
        place = places[last] if places.ndim == 1 else places.gather(1, last)
        below = place <= x if right else place < x
        count = torch.where(below & (more <= m), more, count)
    return count


def softplus(x: Tensor) -> Tensor:
    """ln(1 + eˣ), to the last digit also where eˣ is large or small.

    >>> softplus(torch.tensor([-40.0, 0.0, 40.0], dtype=torch.float64))
    tensor([4.2484e-18, 6.9315e-01, 4.0000e+01], dtype=torch.float64)
    """
    # At zero the gradient of the maximum is a half, as it should be; that of a clamp would be one.
    return torch.maximum(x, torch.zeros_like(x)) + torch.log1p(torch.exp(-x.abs()))
