"""Mixup: train on mixtures of pairs of samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Mixed(NamedTuple):
    """A batch of mixtures of two samples each."""

    inputs: Tensor
    """Mixed inputs, shape (n, …)."""
    labels: Tensor
    """Labels of the first samples."""
    partners: Tensor
    """Labels of the second samples."""
    share: float
    """ρ, the share of the first sample."""

    def loss(self, loss: Callable[[Tensor, Tensor], Tensor], logits: Tensor) -> Tensor:
        """Compute ρL(z, y_i) + (1−ρ)L(z, y_j) from the network's logits for the mixture.

        Parameters
        ----------
        loss
            Function of logits and labels.
        logits
            Network outputs for the mixture.

        Returns
        -------
        Tensor
            The loss.
        """
        if self.share == 1:
            return loss(logits, self.labels)
        return self.share * loss(logits, self.labels) + (1 - self.share) * loss(logits, self.partners)


def mixup(
    inputs: Tensor, labels: Tensor, *, alpha: float = 0.2, seed: int | Sequence[int] | np.random.Generator
) -> Mixed:
    """Mix each sample of a batch with another: ρx_i + (1−ρ)x_j, with one ρ ~ Beta(α, α) for the batch.

    j is a random permutation of i. The network becomes underconfident on unmixed samples, so avoid it before
    temperature scaling. Tokens cannot be mixed.

    Parameters
    ----------
    inputs
        Floating-point inputs, shape (n, …).
    labels
        Labels or targets, shape (n, …).
    alpha
        Parameter of the beta distribution; 0 mixes nothing.
    seed
        Seed or generator. Pass a generator or (seed, epoch, step), so that each batch is mixed differently.

    Returns
    -------
    Mixed
        The mixtures; ``mixed.loss(loss, logits)`` computes their loss.

    Examples
    --------
    >>> import torch
    >>> x, y = torch.tensor([[0.0], [1.0], [2.0], [3.0]]), torch.tensor([0, 1, 2, 3])
    >>> mixed = mixup(x, y, alpha=0.4, seed=2)
    >>> f"{mixed.share:.4f}", mixed.partners.tolist(), [f"{v:.4f}" for v in mixed.inputs[:, 0]]
    ('0.4183', [0, 3, 1, 2], ['0.0000', '2.1634', '1.4183', '2.4183'])
    >>> logits = torch.eye(4)
    >>> f"{mixed.loss(torch.nn.CrossEntropyLoss(), logits):.4f}"
    '1.1799'

    References
    ----------
    Zhang et al. (2018), mixup: beyond empirical risk minimization, arXiv:1710.09412; Thulasidasan et al. (2019), On
    mixup training: improved calibration and predictive uncertainty, arXiv:1905.11001.
    """
    if not inputs.is_floating_point():
        raise ValueError(f"inputs must be floating point, got {inputs.dtype}".replace("torch.", ""))
    if labels.ndim == 0 or len(inputs) != len(labels):
        raise ValueError(f"labels must be as many as the {len(inputs)} inputs, got shape {tuple(labels.shape)}")
    if not 0 <= alpha < np.inf:
        raise ValueError(f"alpha must be a number of at least 0, got {alpha}")
    if alpha == 0:
        return Mixed(inputs, labels, labels, 1.0)
    rng = np.random.default_rng(seed)
    share = float(rng.beta(alpha, alpha))
    other = torch.from_numpy(rng.permutation(len(labels))).to(inputs.device)
    return Mixed(share * inputs + (1 - share) * inputs[other], labels, labels[other.to(labels.device)], share)
