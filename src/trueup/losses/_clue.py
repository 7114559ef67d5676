"""CLUE: the loss of a task plus the squared difference of uncertainty and error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from trueup.convert import ClassAxis
from trueup.losses._base import as_rows
from trueup.losses._pointwise import cross_entropy, residuals
from trueup.models._distributed import all_reduce_sum, world_size
from trueup.models.batches import arguments_of
from trueup.models.dropout import entropy_of, log_probs_of, mean_log_probs, moments, rng_state, sample_passes
from trueup.models.freezing import unwrap

Level: TypeAlias = Literal["batch", "group", "sample"]
Measure: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function from outputs (passes, n, …) and labels to the error and the uncertainty of each sample."""

DEFAULT_ALPHA = {"batch": 0.5, "group": 0.5, "sample": 0.9}
"""Level → weight of the task's own loss; larger where the square is biased."""
GROUP_SIZE = 16
"""Smallest number of samples in a group at level "group"."""


def clue(
    error: Tensor,
    uncertainty: Tensor,
    *,
    alpha: float | None = None,
    level: Level = "batch",
    group: int = GROUP_SIZE,
    detach_error: bool = False,
) -> Tensor:
    """Compute the CLUE loss αe + (1−α)(e − u)², which makes uncertainties u equal errors e on average.

    The plain loss at level "sample" is biased. E[(e−u)² | x] = (E[e | x] − u)² + Var(e | x), and the last term is
    smaller for flatter predictions, so it is not a proper score. With two classes, a true probability of 0.8 and u the
    entropy, the optimum is 0.500 as α → 0, 0.563 at α = 0.3, 0.626 at 0.5, 0.693 at 0.7, 0.761 at 0.9, and 0.8 only at
    α = 1. Averaging g rows before the square divides the variance by g: at α = ½ the optimum is 0.626 for g = 1, 0.783
    for 16, 0.796 for 64 and 0.7995 for 512.

    In an initialised `torch.distributed` group the means at level "batch" are those of all ranks, and every rank must
    take part. The gradients, averaged over the ranks, are those of one process with the whole batch.

    Parameters
    ----------
    error
        Error of each row, shape (m,).
    uncertainty
        Uncertainty of each row, shape (m,).
    alpha
        α in (0, 1], the weight of the task's own loss; by default ½, at level "sample" 0.9. α = 0 is rejected, since
        the uniform prediction would be optimal.
    level
        The square: "batch" is (mean e − mean u)². "group" sorts the rows by u, cuts them into ⌊m/group⌋ parts of nearly
        equal size and computes Σ_g (m_g/m)(mean_g e − mean_g u)². "sample" is mean (e − u)², the authors' formula.
    group
        Number of rows in a part at level "group".
    detach_error
        Whether to stop the gradient of the square through e, so that only u learns from it.

    Returns
    -------
    Tensor
        The loss of the batch.

    Examples
    --------
    >>> error, uncertainty = torch.tensor([0.1, 0.7, 1.0]), torch.tensor([0.2, 0.2, 0.8])
    >>> [f"{clue(error, uncertainty, alpha=0.5, level=level):.4f}" for level in ("batch", "sample")]
    ['0.3200', '0.3500']

    References
    ----------
    Mendes, Romano & Garlan (2025), CLUE: calibration by learning uncertainty–error alignment, arXiv:2505.22803.
    """
    return _loss(error, uncertainty, 1 - _check_alpha(alpha, level, group), level, group, detach_error)


def error_and_entropy(
    samples: Tensor, labels: Tensor, *, class_axis: ClassAxis = None, ignore_index: int = -100
) -> tuple[Tensor, Tensor]:
    """Compute error −ln p̄_y and uncertainty H(p̄) of each sample or token, where p̄ is the mean of softmax(z_s).

    For a calibrated p̄ they are equal on average: E[−ln p̄_Y | p̄] = H(p̄).

    Parameters
    ----------
    samples
        Logits of several passes, shape (passes, n, classes).
    labels
        Class of each sample or token, shape (n,) or (n, …).
    class_axis
        Position of the classes of tokens or pixels: "last" for (passes, n, …, K), "first" for (passes, n, K, …).
    ignore_index
        Label of samples that are left out.

    Returns
    -------
    tuple
        Error and uncertainty in nats, each of shape (m,).

    Examples
    --------
    >>> samples = torch.tensor([[[0.6, 0.4], [0.9, 0.1]], [[0.2, 0.8], [0.9, 0.1]]]).log()
    >>> error, uncertainty = error_and_entropy(samples, torch.tensor([0, 0]))
    >>> [f"{v:.4f}" for v in (*error, *uncertainty)]
    ['0.9163', '0.1054', '0.6730', '0.3251']
    """
    log_probs = mean_log_probs(log_probs_of(samples, class_axis))
    z, y = as_rows(log_probs.movedim(-1, 1), labels)
    kept = y != ignore_index
    return cross_entropy(z[kept], y[kept]), entropy_of(z[kept])


def error_and_variance(samples: Tensor, targets: Tensor, *, variance_head: bool = False) -> tuple[Tensor, Tensor]:
    """Compute error (y − μ̄)² and predictive variance of each number, as in `models.moments`.

    Parameters
    ----------
    samples
        Outputs of several passes, shape (passes, n) or (passes, n, targets); (passes, n, 2·targets) with a variance
        head.
    targets
        True numbers, shape (n,) or (n, targets). Standardise them: CLUE's square has the fourth power of their unit.
    variance_head
        Whether the outputs are means followed by variances.

    Returns
    -------
    tuple
        Error and variance, each of shape (n · targets,).

    Examples
    --------
    >>> error, uncertainty = error_and_variance(torch.tensor([[1.0], [3.0]]), torch.tensor([2.5]))
    >>> f"{error.item():.4f}", f"{uncertainty.item():.4f}"
    ('0.2500', '1.0000')
    """
    predictive = moments(samples, variance_head=variance_head)
    twice = not variance_head and predictive.mean.numel() == 2 * targets.numel()
    hint = "; a mean and a variance are variance_head=True" if twice else ""
    error = residuals(predictive.mean, targets, f"samples {tuple(samples.shape)}", hint).square()
    return error.reshape(-1), predictive.variance.reshape(-1)


def training_passes(model: nn.Module, inputs: Any, passes: int = 5) -> Tensor:
    """Run several passes of a network with gradients, in its current mode.

    Unlike `mc_dropout`, the masks come from torch's global generator. Batch-norm has one set of statistics for passes
    that are one batch. A wrapper such as `DistributedDataParallel` is called once.

    Parameters
    ----------
    model
        A network with dropout, in training mode.
    inputs
        A tensor, a tuple of arguments or a mapping of keywords.
    passes
        Number of passes.

    Returns
    -------
    Tensor
        Outputs, shape (passes, n, …).

    Examples
    --------
    >>> net = nn.Sequential(nn.Linear(4, 2), nn.Dropout(0.5), nn.Linear(2, 3))
    >>> training_passes(net, torch.ones(7, 4), passes=5).shape
    torch.Size([5, 7, 3])
    """
    inner, (args, kwargs) = unwrap(model), arguments_of(inputs)
    forward, attributes = inner.forward, vars(inner)
    overridden = {"forward": forward} if "forward" in attributes else {}
    start = rng_state()
    # The network's own forward repeats the passes, so a wrapper that gathers gradients sees one call.
    attributes["forward"] = lambda *a, **k: sample_passes(inner, forward, (a, k), passes, None)
    try:
        samples: Tensor = model(*args, **kwargs)
    finally:
        del attributes["forward"]
        attributes.update(overridden)
    if passes > 1 and samples.numel() and rng_state().equal(start):
        message = f"model must have dropout with p above 0, in training mode, for {passes} passes to differ, got none"
        raise ValueError(f"{message}; insert_dropout adds it, mc_dropout takes a network in evaluation mode")
    return samples


class CLUE(nn.Module):
    """Module of `clue` for a training step: ``loss(model, inputs, labels)`` runs several passes with dropout.

    Only the layers from the first dropout on are repeated, where that is possible. `inputs` is a tensor, a tuple of
    arguments or a mapping of keywords. All options are attributes, which a schedule may change. For held-out data pass
    samples: ``loss.eval().of_samples(mc_dropout(model, x), y)``.

    Parameters
    ----------
    measure
        Function that computes error and uncertainty: `error_and_entropy` for classes, `error_and_variance` for
        regression. `functools.partial` sets its options, such as ``class_axis="last"`` for tokens.
    alpha
        α in (0, 1], as in `clue`.
    level
        Level of the square, as in `clue`.
    group
        Number of rows in a part at level "group".
    detach_error
        Whether to stop the gradient of the square through the error.
    passes
        Number of passes per step.
    ramp
        Number of steps over which 1−α grows linearly from 0; the count is in the state dict.

    Examples
    --------
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), nn.Linear(8, 3))
    >>> loss = CLUE(level="batch", passes=5)
    >>> loss(model, torch.rand(4, 4), torch.tensor([0, 1, 2, 0])).backward()
    >>> loss
    CLUE(level=batch, alpha=0.5, passes=5)

    References
    ----------
    Mendes, Romano & Garlan (2025), CLUE: calibration by learning uncertainty–error alignment, arXiv:2505.22803.
    """

    takes_model = True
    """Marks a loss that is called as `loss(model, inputs, labels)`."""
    step: Tensor

    def __init__(
        self,
        *,
        measure: Measure = error_and_entropy,
        alpha: float | None = None,
        level: Level = "batch",
        group: int = GROUP_SIZE,
        detach_error: bool = False,
        passes: int = 5,
        ramp: int = 0,
    ) -> None:
        super().__init__()
        self.alpha = _check_alpha(alpha, level, group)
        if not callable(measure):
            raise ValueError(f"measure must be a function such as error_and_variance, got {measure!r}")
        if passes < 1:
            raise ValueError(f"passes must be at least 1, got {passes}")
        if ramp < 0:
            raise ValueError(f"ramp must be a number of steps of at least 0, got {ramp}")
        self.measure, self.level, self.group, self.detach_error = measure, level, group, detach_error
        self.passes, self.ramp = passes, ramp
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))

    def forward(self, model: nn.Module, inputs: Any, labels: Tensor) -> Tensor:
        """Compute the loss of a batch with the network in training mode."""
        return self.of_samples(training_passes(model, inputs, self.passes), labels)

    def of_samples(self, samples: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of existing outputs (passes, n, …).

        Parameters
        ----------
        samples
            Outputs of the passes, shape (passes, n, …).
        labels
            True classes or targets, shape (n, …).

        Returns
        -------
        Tensor
            The loss, a scalar.
        """
        error, uncertainty = self.measure(samples, labels)
        share: Tensor | float = 1 - self.alpha
        if self.ramp:
            share = share * (self.step.to(samples.device) / self.ramp).clamp(max=1)
        if self.training:
            self.step += 1
        return _loss(error, uncertainty, share, self.level, self.group, self.detach_error)

    def extra_repr(self) -> str:
        """List the main options."""
        ramp = f", ramp={self.ramp}" if self.ramp else ""
        return f"level={self.level}, alpha={self.alpha}, passes={self.passes}{ramp}"


def _check_alpha(alpha: float | None, level: str, group: int) -> float:
    """Check the options of `clue` and return α."""
    if level not in DEFAULT_ALPHA:
        raise ValueError(f'level must be "batch", "group" or "sample", got {level!r}')
    alpha = DEFAULT_ALPHA[level] if alpha is None else alpha
    if not 0 < alpha <= 1:
        why = ", which makes the uniform prediction optimal" if alpha == 0 else ""
        raise ValueError(f"alpha must lie above 0 and be at most 1, got {alpha}{why}")
    if group < 1:
        raise ValueError(f"group must be at least 1, got {group}")
    return alpha


def _loss(
    error: Tensor, uncertainty: Tensor, share: Tensor | float, level: str, group: int, detach_error: bool
) -> Tensor:
    compared = error.detach() if detach_error else error
    if level == "batch":
        sums = torch.stack([error.sum(), compared.sum(), uncertainty.sum(), error.new_tensor(float(len(error)))])
        total = _over_ranks(sums)
        mean, compared, uncertainty = total[:3] / total[3]
        square = (compared - uncertainty).square()
    else:
        mean, gap = error.mean(), compared - uncertainty
        square = gap.square().mean() if level == "sample" else _group_square(gap, uncertainty.detach(), group)
    return (1 - share) * mean + share * square


def _group_square(gap: Tensor, uncertainty: Tensor, group: int) -> Tensor:
    """Compute Σ_g (m_g/m)(mean_g gap)² over ⌊m/group⌋ parts, at least one, of rows sorted by uncertainty."""
    m = len(gap)
    parts = max(1, m // group)
    part = torch.arange(m, device=gap.device) * parts // max(1, m)
    sums = gap.new_zeros(parts).index_add(0, part, gap[uncertainty.argsort(stable=True)])
    return (sums.square() / torch.bincount(part, minlength=parts)).sum() / m


def _over_ranks(sums: Tensor) -> Tensor:
    """Sum over all ranks, with a gradient that is correct after averaging over the ranks."""
    return sums if world_size() == 1 else all_reduce_sum(sums) + world_size() * (sums - sums.detach())
