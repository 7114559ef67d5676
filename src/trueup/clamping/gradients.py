"""Gradients of what a network makes of its mapped input; of one that has none, an error says what to do instead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_WISH = "the model must be differentiable by its input, for every recipe follows gradients"
_INSTEAD = "temperature alone needs none: trueup.on_model(trueup.METHODS['temperature'])(model, loader)"


def traced(logits: Tensor) -> Tensor:
    """The same logits, if gradients can be pulled back from them."""
    if not logits.requires_grad:
        raise _refusal("logits cut off from it, as by no_grad, inference_mode or NumPy inside of the model")
    return logits


def gradients_of(value: Tensor, parameters: Sequence[Tensor], cotangent: Tensor | None = None) -> tuple[Tensor, ...]:
    """The gradients by parameters of the map before the network, on each of which the value must depend."""
    try:
        found = torch.autograd.grad(value, parameters, cotangent, allow_unused=True)
    except RuntimeError as error:  # of which NotImplementedError is one
        if not isinstance(error, NotImplementedError) and "is not implemented" not in str(error):
            raise
        raise _refusal(f"{error}") from error
    if any(gradient is None for gradient in found):
        raise _refusal("logits that do not depend on it")
    return found


def _refusal(fact: str) -> ValueError:
    return ValueError(f"{_WISH}, got {fact}; {_INSTEAD}")
