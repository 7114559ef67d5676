"""Inverse focal loss."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from trueup.losses.base import Loss, per_sample
from trueup.losses.option_checks import at_least

MAX_MONOTONE_GAMMA = 3.5911
"""Up to this γ̄ the loss falls with p_y everywhere: the least over p of (1+p)/(−p ln p), attained at p = 0.278."""


def _check_gamma(name: str, options: Mapping[str, Any]) -> None:
    at_least(0)(name, options)
    if options[name] > MAX_MONOTONE_GAMMA and not options["detach_weight"]:
        warnings.warn(
            f"inverse focal loss with {name} {options[name]} > {MAX_MONOTONE_GAMMA} rises with the label's "
            "probability around p = 0.28, and may hold samples there; take a smaller one, or detach_weight=True",
            stacklevel=3,
        )


@per_sample(gamma=_check_gamma)
def inverse_focal(logits: Tensor, labels: Tensor, *, gamma: float = 2.0, detach_weight: bool = False) -> Tensor:
    """The cross-entropy, weighted up where the label is already probable: −(1+p_y)^γ̄ ln p_y.

    It spreads the logits, for a calibrator to shrink afterwards. With `detach_weight` no gradient flows through the
    weight; without, a warning says when γ̄ > 3.59 makes the loss rise with p_y. Not without such a calibrator: the
    network itself becomes overconfident.

    >>> import torch
    >>> logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    >>> [f"{v:.4f}" for v in inverse_focal(logits, torch.tensor([0, 2]), gamma=1.0)]
    ['0.4281', '1.8803']

    Wang, Feng & Zhang (2021), Rethinking calibration of deep neural networks: do not be afraid of overconfidence.
    """
    nll = functional.cross_entropy(logits, labels, reduction="none")
    weight = (1 + torch.exp(-nll)).pow(gamma)
    return (weight.detach() if detach_weight else weight) * nll


class InverseFocal(Loss, function=inverse_focal, neutral={"gamma": 0.0}):
    """The `inverse_focal` loss as a Module."""
