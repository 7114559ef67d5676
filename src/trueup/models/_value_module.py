"""Frozen values (calibrators, recalibrators, rules of prediction sets) as torch modules."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from trueup._core.namespace import namespace_of
from trueup._core.values import Value, map_parameters

_TORCH = namespace_of(torch.empty(0))


class ValueModule(nn.Module):
    """A module that calls a frozen value `wrapped`; its parameters are buffers, so they are saved but not trained."""

    wrapped: Any

    def __init__(self, value: Value) -> None:
        super().__init__()
        self.wrapped = value
        map_parameters(value, self._register)
        self.register_load_state_dict_post_hook(_read_back)  # type: ignore[no-untyped-call]

    def _register(self, path: str, parameter: Any) -> None:
        *parents, name = path.split(".")
        module: nn.Module = self
        for parent in parents:
            if parent not in module._modules:
                module.add_module(parent, nn.Module())
            module = module.get_submodule(parent)
        module.register_buffer(name, torch.tensor(parameter, dtype=torch.float64))

    def forward(self, array: torch.Tensor, **extra: Any) -> Any:
        """Apply the value to a tensor."""
        return self._run(array, **extra)

    def _run(self, *arrays: torch.Tensor, **extra: Any) -> Any:
        bound = map_parameters(self.wrapped, lambda path, _: self.get_buffer(path))
        return bound.forward(_TORCH, *arrays, **extra)

    def __repr__(self) -> str:
        return repr(self.wrapped)


class PairModule(ValueModule):
    """A module that calls a frozen value of two arrays, such as means and standard deviations."""

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> Any:  # type: ignore[override]
        """Apply the value to two tensors."""
        return self._run(first, second)


def _read_back(module: ValueModule, _: Any) -> None:
    """Update the wrapped value after its buffers were loaded."""

    def parameter(path: str, _: Any) -> Any:
        array = module.get_buffer(path).detach().cpu().double().numpy().copy()
        array.flags.writeable = False
        return array if array.ndim else float(array)

    module.wrapped = map_parameters(module.wrapped, parameter)


def as_module(value: Any) -> nn.Module:
    """Wrap a calibrator, a recalibrator or a rule of prediction sets as an `nn.Module`.

    Its parameters are buffers. It runs on any device, and under `torch.export`, `torch.compile` and the ONNX exporter.

    Parameters
    ----------
    value
        The frozen value; a module is returned unchanged.

    Returns
    -------
    Module
        The module, from logits to the value's output.

    Examples
    --------
    >>> from trueup.calibrators.temperature import Temperature
    >>> module = as_module(Temperature(2.0))
    >>> module(torch.tensor([[4.0, 1.0]])), list(module.state_dict())
    (tensor([[2.0000, 0.5000]]), ['temperature'])
    """
    if isinstance(value, nn.Module):
        return value
    named = inspect.Parameter.POSITIONAL_OR_KEYWORD
    arrays = [p for p in inspect.signature(value.forward).parameters.values() if p.kind is named][1:]
    return (PairModule if len(arrays) == 2 else ValueModule)(value)
