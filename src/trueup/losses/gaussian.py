"""The Gaussian negative log-likelihood, for regression with a variance head."""

from __future__ import annotations

import math

from torch import Tensor

from trueup.models.dropout import moments


def gaussian_nll(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean negative log-likelihood of numbers under a network's mean and variance: ½ ln(2πσ²) + (y − μ)²/(2σ²).

    Outputs are (n, 2·targets), first the means, then v of σ² = ln(1 + eᵛ) + 1e-6, as `uncertainty.moments` reads them;
    targets (n,) or (n, targets). Not for a start far from the targets: where σ² grows first, the means learn slowly.

    >>> import torch
    >>> outputs = torch.tensor([[1.0, 0.0], [3.0, 0.0]])
    >>> f"{gaussian_nll(outputs, torch.tensor([1.0, 2.0])):.4f}"
    '1.0964'

    Nix & Weigend (1994), Estimating the mean and variance of the target probability distribution.
    """
    predictive = moments(outputs[None], variance_head=True)
    wanted = tuple(predictive.mean.shape)
    if tuple(targets.shape) not in (wanted, (*wanted, 1)):
        raise ValueError(
            f"targets must have shape {wanted} for outputs {tuple(outputs.shape)}, got {tuple(targets.shape)}"
        )
    error = targets.reshape(wanted).to(predictive.mean.dtype) - predictive.mean
    return (math.log(2 * math.pi) + predictive.within.log() + error.square() / predictive.within).mean() / 2
