"""Temporarily frozen networks: without wrappers, in evaluation mode, and restored exactly."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

WRAPPERS = ("DataParallel", "DistributedDataParallel", "_FabricModule", "AveragedModel")
"""Wrappers whose network is `.module`."""


def unwrap(model: nn.Module, *, compiled: bool = False) -> nn.Module:
    """Return the network inside wrappers that do not change its output, but may wait for other ranks.

    With `compiled`, return the network before compilation too, since a compiled network ignores new hooks.

    >>> unwrap(torch.optim.swa_utils.AveragedModel(nn.Linear(2, 3)))
    Linear(in_features=2, out_features=3, bias=True)
    """
    while True:
        if type(model).__name__ in WRAPPERS and isinstance(model.module, nn.Module):
            model = model.module
        elif compiled and isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Hold a model in evaluation mode without gradients of its parameters, and restore it exactly on exit.

    An exception or Ctrl-C restores it too. Bit by bit this restores the mode of every module, `requires_grad` and
    `.grad` of every parameter, and the hooks and buffers of every module. It also restores the global random states of
    torch (with CUDA's, if in use), NumPy and Python.

    Parameters
    ----------
    model
        The network.

    Yields
    ------
    None
        Control to the body of the `with` statement.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.Dropout())
    >>> with frozen(model):
    ...     model.training, model[0].weight.requires_grad
    (False, False)
    >>> model.training, model[0].weight.requires_grad
    (True, True)
    """
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ValueError(f"model must have all its shapes, got lazy {', '.join(lazy)}; call it once on a batch before")
    with ExitStack() as leaving:  # restores everything, even if one part fails
        for remember in (_modes, _parameters, _hooks, _buffers, _random_states):
            state = remember(model)  # saves before its yield, restores after it
            next(state)
            leaving.callback(next, state, None)
        for module in _with_modes(model):
            module.training = False  # not .eval(), with which some models fold weights
        for parameter in model.parameters():
            if parameter.is_inference():  # has no gradient, and could not be restored
                continue
            parameter.requires_grad = False
            parameter.grad = None  # set aside, so that nothing accumulates
        yield


def copy_modes(model: nn.Module, to: nn.Module) -> None:
    """Copy the mode of every module of a model to a copy of the model.

    >>> model, copied = nn.Sequential(nn.Dropout()).eval(), nn.Sequential(nn.Dropout())
    >>> copy_modes(model, copied)
    >>> copied.training, copied[0].training
    (False, False)
    """
    for name, module in model.named_modules():
        to.get_submodule(name).training = module.training


def _with_modes(model: nn.Module) -> list[nn.Module]:
    """Return the modules with a mode; frozen scripted modules have none."""
    return [module for module in model.modules() if hasattr(module, "training")]


def _modes(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in _with_modes(model)]
    yield
    for module, mode in modes:
        module.training = mode


def _parameters(model: nn.Module) -> Iterator[None]:
    states = [(p, p.requires_grad, p.grad) for p in model.parameters() if not p.is_inference()]
    yield
    for parameter, requires_grad, grad in states:
        parameter.requires_grad = requires_grad
        parameter.grad = grad


def _hooks(model: nn.Module) -> Iterator[None]:
    """Restore the content of the hook dictionaries; the handles refer to the dictionaries themselves."""
    states = [
        (hooks, list(hooks.items()))
        for module in model.modules()
        for name, hooks in vars(module).items()
        if "_hooks" in name and isinstance(hooks, dict)
    ]
    kinds = [(module, module._is_full_backward_hook) for module in model.modules()]
    yield
    for module, kind in kinds:
        module._is_full_backward_hook = kind
    for hooks, kept in states:
        if list(hooks.items()) != kept:
            hooks.clear()
            hooks.update(kept)


def _buffers(model: nn.Module) -> Iterator[None]:
    states = [(module, dict(module._buffers), set(module._non_persistent_buffers_set)) for module in model.modules()]
    values = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    yield
    for module, kept, passing in states:
        if list(map(id, module._buffers.values())) != list(map(id, kept.values())):
            module._buffers.clear()
            module._buffers.update(kept)
        module._non_persistent_buffers_set = passing
    with torch.no_grad():
        for buffer, value in values:
            if (buffer.shape, buffer.dtype, buffer.device) != (value.shape, value.dtype, value.device):
                buffer.data = value
            elif not _same_bits(buffer, value):  # writing all of them would invalidate pending gradients
                buffer.copy_(value)


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.layout is not torch.strided:
        return False
    return torch.equal(*(x.detach().contiguous().reshape(-1).view(torch.uint8) for x in (a, b)))


def _random_states(model: nn.Module) -> Iterator[None]:
    on_cpu, legacy, python = torch.get_rng_state(), np.random.get_state(), random.getstate()  # noqa: NPY002
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
    yield
    torch.set_rng_state(on_cpu)
    np.random.set_state(legacy)  # noqa: NPY002
    random.setstate(python)
    if on_cuda is not None:
        torch.cuda.set_rng_state_all(on_cuda)
