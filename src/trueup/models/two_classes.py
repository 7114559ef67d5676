"""Binary networks with one logit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trueup.convert import warn_of_probabilities
from trueup.models.batches import logits_of, with_logits
from trueup.models.calibrated import ModelSignature


class TwoClasses(nn.Module):
    """A network with one logit x, the log-odds of class 1, as a network with the two logits (0, x).

    A calibrated or repaired network of this kind has two logits too; their difference is the log-odds.

    Parameters
    ----------
    model
        A network whose logit has shape (n,), (n, 1) or, for pixels, (n, 1, …).

    Examples
    --------
    >>> network = nn.Sequential(nn.Flatten(), nn.Linear(4, 1))
    >>> TwoClasses(network)(torch.zeros(3, 4)).shape
    torch.Size([3, 2])
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._first = True

    @ModelSignature
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the network, and replace the logit of its output by two."""
        output = self.model(*args, **kwargs)
        logits = logits_of(output)
        one = logits[:, None] if logits.ndim == 1 else logits
        if one.shape[1] != 1:
            raise ValueError(f"the network must return one logit per sample, got shape {tuple(logits.shape)}")
        if self._first and not torch.compiler.is_compiling():
            self._first = False
            warn_of_probabilities(one.detach().flatten(), "logits")
        return with_logits(output, torch.cat([torch.zeros_like(one), one], dim=1))
