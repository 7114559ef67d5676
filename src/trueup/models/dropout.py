"""Several passes of a network: its dropout switched on and nothing else, and no more of it repeated than must be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from trueup.models.batches import Arguments, logits_of
from trueup.models.freezing import frozen

Halves: TypeAlias = tuple[Callable[..., Any], Callable[..., Any]]
HALVES = (("trunk", "head"), ("forward_features", "forward_head"))  # ours, and timm's

_divided: WeakKeyDictionary[nn.Module, dict[Any, bool]] = WeakKeyDictionary()


def has_dropout(model: nn.Module) -> bool:
    """Whether a network has a dropout layer with a probability above 0."""
    return any(map(dropout_probability, model.modules()))


def dropout_probability(module: nn.Module) -> float | None:
    """With which a dropout layer, or attention or recurrence that holds one, drops; None of other layers."""
    if isinstance(module, _DropoutNd):
        return module.p
    return module.dropout if isinstance(module, nn.MultiheadAttention | nn.RNNBase) else None


@contextmanager
def dropout_enabled(model: nn.Module) -> Iterator[None]:
    """A frozen network whose dropout layers are on."""
    fast = torch.backends.mha.get_fastpath_enabled()
    with frozen(model), torch.no_grad():
        try:
            torch.backends.mha.set_fastpath_enabled(False)  # it takes no notice of dropout layers
            for module in model.modules():
                module.training = bool(dropout_probability(module))
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)


def _is_divided(model: nn.Module, whole: Callable[..., Any], halves: Halves, inputs: Arguments) -> bool:
    """Whether head(trunk(·)) is all the network does and its trunk draws nothing: asked once, of one row.

    In a stranger's network these names may mean anything, and a subclass may do more in its own forward.
    """
    (args, kwargs), (trunk, head) = inputs, halves
    known, form = _divided.setdefault(model, {}), _form(model, inputs)
    if form in known:
        return known[form]
    training, modes = model.training, [(module, module.training) for module in model.modules()]
    with dropout_enabled(model):
        if _is_rows(inputs):  # numbers are moved away from 0, where networks that differ may agree
            row = args[0][:1]
            args = (row + torch.randn_like(row) if row.is_floating_point() else row.clone(),)
        seed_rng(0)
        wanted = logits_of(whole(*args, **kwargs))
        start = seed_rng(0)
        try:
            features = trunk(*args, **kwargs)
            steady = rng_state().equal(start)
            found = logits_of(head(features))
            if steady and training:  # in training a trunk may draw what it does not otherwise
                for module, mode in modes:
                    module.training = mode
                start = seed_rng(0)
                trunk(*inputs[0], **kwargs)
                steady = rng_state().equal(start)
        except Exception:
            steady, found = False, wanted
    same = found.shape == wanted.shape and torch.allclose(found, wanted, rtol=1e-4, atol=1e-5)
    return known.setdefault(form, steady and same and found.numel() > 0)


def _form(model: nn.Module, inputs: Arguments) -> tuple[Any, ...]:
    """How it is called: a trunk may know its arguments by other names, and draw in training alone."""
    return model.training, len(inputs[0]), *inputs[1]


def _halves(model: nn.Module) -> Halves | None:
    found: Any = ([getattr(model, name, None) for name in names] for names in HALVES)
    return next((pair for pair in found if all(map(callable, pair))), None)


def _is_rows(inputs: Arguments) -> bool:
    args, kwargs = inputs
    return len(args) == 1 and not kwargs and isinstance(args[0], Tensor)


def sample_passes(
    model: nn.Module, whole: Callable[..., Any], inputs: Arguments, passes: int, memory: int | None
) -> Tensor:
    """Outputs (passes, n, …) of `whole`, the model's call, or of its head alone, in the mode it is in."""
    args, kwargs = inputs
    halves = _halves(model)
    if halves is not None and _is_divided(model, whole, halves, inputs):
        start = rng_state()
        features = halves[0](*args, **kwargs)
        if rng_state().equal(start):
            whole, args, kwargs = halves[1], (features,), {}
        else:  # it was changed since it was asked
            _divided.pop(model)
    if not _is_rows((args, kwargs)):
        return torch.stack([logits_of(whole(*args, **kwargs)) for _ in range(passes)])
    x: Tensor = args[0]
    at_once = passes if memory is None else min(passes, max(1, memory // max(1, x.nbytes)))
    samples = []
    for first in range(0, passes, at_once):
        now = min(at_once, passes - first)
        output = logits_of(whole(x.repeat(now, *(1 for _ in x.shape[1:]))))  # a copy, for dropout in place
        if len(output) != now * len(x):
            raise ValueError(f"the model's output must have a row for each input, got {len(output)} for {now * len(x)}")
        samples.append(output.reshape(now, len(x), *output.shape[1:]))
    return torch.cat(samples)


def rng_state() -> Tensor:
    """The global random states, which tell whether anything was drawn."""
    on_cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return torch.cat([torch.get_rng_state(), *on_cuda])


def seed_rng(seed: int) -> Tensor:
    """Begin the global random states anew; what they are then."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)
    return rng_state()
