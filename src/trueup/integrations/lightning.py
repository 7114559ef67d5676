"""A Lightning callback that logs calibration metrics after each validation epoch.

The metrics of `trueup.integrations.torchmetrics` sum ECE, NLL and Brier score batch by batch, without storing rows.
Lightning is imported when a callback is made.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch import Tensor

from trueup._core.bins import BINS
from trueup._core.errors import InputError
from trueup.models.batches import batches, logits_of

__all__ = ["lightning_callback"]

PairFunction: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]
"""Maps the output of a validation step and its batch to logits and labels."""


def lightning_callback(*, prefix: str = "val_", bins: int = BINS, pair: PairFunction | None = None) -> Any:
    """Make a Lightning callback that logs `val_ece`, `val_nll` and `val_brier` after each validation epoch.

    The `validation_step` must return logits, or a mapping with `logits` and optionally `labels`. Without `labels`, the
    labels of the batch are used. With several validation sets the names end in `/dataloader_idx_0` and so on, as in
    Lightning. Sums are taken over all processes.

    Parameters
    ----------
    prefix
        Prefix of the logged names.
    bins
        Number of bins of the calibration error.
    pair
        Function of the step's output and the batch that returns logits and labels, for other outputs and batches.

    Returns
    -------
    lightning.pytorch.Callback
        Pass it to `lightning.Trainer(callbacks=[…])`.

    Examples
    --------
    >>> import pytest
    >>> lightning = pytest.importorskip("lightning.pytorch")
    >>> callback = lightning_callback()  # lightning.Trainer(callbacks=[callback]).fit(module, train, val)
    >>> callback.on_validation_epoch_start(None, torch.nn.Identity())
    >>> outputs, batch = {"logits": torch.tensor([[2.0, 0.0], [0.0, 1.0]])}, (torch.zeros(2, 5), torch.tensor([0, 1]))
    >>> callback.on_validation_batch_end(None, None, outputs, batch, 0)
    >>> for name, value in callback.values().items():
    ...     print(f"{name} {value:.4f}")
    val_ece 0.1941
    val_nll 0.2201
    val_brier 0.0865
    """
    return _callback_class()(prefix=prefix, bins=bins, pair=pair)


@functools.cache
def _callback_class() -> Any:
    """Return the class, whose base can only be imported if Lightning is installed."""
    base = _lightning().Callback
    from trueup.integrations.torchmetrics import calibration_metrics

    class CalibrationCallback(base):  # type: ignore[misc, valid-type]
        def __init__(self, prefix: str, bins: int, pair: PairFunction | None) -> None:
            self.options: dict[str, Any] = {"prefix": prefix, "bins": bins, "pair": pair}
            self.metrics_of_loader: dict[int, dict[str, Any]] = {}
            self.device: Any = "cpu"
            calibration_metrics(bins)  # bad options fail here, before training starts

        def __reduce__(self) -> Any:
            return functools.partial(lightning_callback, **self.options), ()

        def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
            self.metrics_of_loader, self.device = {}, getattr(module, "device", "cpu")

        def on_validation_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int, dataloader_idx: int = 0
        ) -> None:
            if dataloader_idx not in self.metrics_of_loader:
                self.metrics_of_loader[dataloader_idx] = {
                    name: metric.to(self.device) for name, metric in calibration_metrics(self.options["bins"]).items()
                }
            logits, labels = (self.options["pair"] or _logits_and_labels)(outputs, batch)
            for metric in self.metrics_of_loader[dataloader_idx].values():
                metric.update(logits.detach(), labels)

        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                module.log_dict(self.values(), sync_dist=trainer.world_size > 1, add_dataloader_idx=False)

        def values(self) -> dict[str, Tensor]:
            """Compute the metrics of the epoch over all processes, by the names under which they are logged."""
            prefix, several = self.options["prefix"], len(self.metrics_of_loader) > 1
            return {
                f"{prefix}{name}{f'/dataloader_idx_{index}' if several else ''}": metric.compute().float()
                for index, metrics in sorted(self.metrics_of_loader.items())
                for name, metric in metrics.items()
            }

    return CalibrationCallback


def _lightning() -> Any:
    for module in ("lightning.pytorch", "pytorch_lightning"):  # the two names of one library
        with suppress(ModuleNotFoundError):
            return import_module(module)
    raise ImportError("lightning_callback needs Lightning: pip install lightning")


def _logits_and_labels(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    try:
        logits = logits_of(outputs)
    except ValueError:
        logits = torch.empty(0)
    if logits.ndim < 2:  # a loss alone
        got = f"keys {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else type(outputs).__name__
        expected = "return logits (n, classes), or a mapping with `logits`"
        raise InputError("validation_step", expected, got, "for other outputs use lightning_callback(pair=…)")
    if isinstance(outputs, Mapping) and "labels" in outputs:
        return logits, outputs["labels"]
    [parsed] = batches([batch])
    return logits, parsed.labels
