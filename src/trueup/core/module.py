"""Modules that are made of their parameters: what a constructor takes is what `config` gives and a file holds."""

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
        """Small parameters in full, large ones by their shape."""
        return ", ".join(f"{name}={_brief(value)}" for name, value in self.config().items())

    def keep(self, name: str, value: Any) -> None:
        """Register a parameter as a float64 buffer: moved with the module, saved with it, never trained."""
        self.register_buffer(name, torch.as_tensor(value, dtype=torch.float64).detach().clone())


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.item():.6g}" if value.ndim == 0 else f"tensor{tuple(value.shape)}"
    return repr(value)
