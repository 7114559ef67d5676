"""Scores of a network over a loader, without keeping its logits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from trueup._core.bins import BINS
from trueup._core.tally import Tally
from trueup.convert import ClassAxis, flatten
from trueup.metrics.resampling import Resampling
from trueup.metrics.sharded import scores_of_tally
from trueup.metrics.table import Scores
from trueup.models.batches import Device, errors_name_batch, unpacked
from trueup.models.calibrated import outputs


def evaluate_loader(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    class_axis: ClassAxis = None,
    ignore_index: int = -100,
    bins: int = BINS,
    top_label: bool = False,
    device: Device | None = None,
    progress: bool = True,
    **resampling: Any,
) -> Scores:
    """Compute the table of `trueup.evaluate` for a network over a loader, in the memory of one batch.

    With a `class_axis`, rows of one image or text are a cluster, and intervals and tests count samples. The adaptive
    error, and with two classes the scores of the event, then have no intervals; use `collect` for these.

    Parameters
    ----------
    model
        The network.
    loader
        Batches with labels; see `collect`.
    class_axis
        Position of the classes: "first" for outputs (n, K, …), "last" for (n, …, K), None for (n, K).
    ignore_index
        Label of tokens or pixels that are left out.
    bins
        Number of bins.
    top_label
        Whether to score a binary model by the confidence of its predicted class.
    device
        Device of the inputs; by default that of the model.
    progress
        Whether to show progress.
    **resampling
        `level`, `n_resamples` and `seed` as in `trueup.evaluate`, and `unpack` as in `collect`.

    Returns
    -------
    Scores
        The table of scores.

    Examples
    --------
    >>> import torch
    >>> x, y = torch.randn(8, 3, 4, 4), torch.randint(0, 3, (8, 4, 4))
    >>> evaluate_loader(nn.Identity(), [(x[:4], y[:4]), (x[4:], y[4:])], class_axis="first", progress=False).caption()
    '128 rows, 3 classes, 15 bins, 8 clusters (sample): intervals by sample'
    """
    tally: Tally | None = None
    samples, loader = 0, unpacked(loader, unpack=resampling.pop("unpack", None))
    for number, (z, y) in enumerate(outputs(model, loader, class_axis=class_axis, device=device, progress=progress)):
        with errors_name_batch(number):
            if class_axis is None:
                part = Tally.of(z, y, bins=bins, top_label=top_label)
            else:
                ids = range(samples, samples + len(y))
                rows, labels, sample = flatten(z, y, class_axis=class_axis, ignore_index=ignore_index, clusters=ids)
                part = Tally.of(rows, labels, bins=bins, top_label=top_label, clusters=sample)
                samples += len(y)
            tally = part if tally is None else tally + part
    if tally is None:
        raise ValueError("loader must give at least one batch, got none; an iterator can be read only once")
    by: dict[str, Any] = {} if class_axis is None else {"clusters": samples, "cluster_name": "sample"}
    return scores_of_tally(tally, (), Resampling(**resampling), **by)
