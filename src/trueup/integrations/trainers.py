"""Calibration in other people's training loops: a callback for Lightning, a function for Hugging Face's Trainer.

Both add up ECE, NLL and Brier score batch by batch (`trueup.integrations.torchmetrics`), so that nothing is stored.
Neither library is imported before it is needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any, TypeAlias

import torch
from torch import Tensor

from trueup.core.arrays import flatten
from trueup.core.bins import BINS
from trueup.models.batches import batches, logits_of

Pair: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]
"""From what a validation step returned and its batch to logits and labels."""


def lightning_callback(*, prefix: str = "val_", bins: int = BINS, pair: Pair | None = None) -> Any:
    """A Lightning callback that logs the calibration of each validation epoch as `val_ece`, `val_nll` and `val_brier`.

    The `validation_step` returns its logits, or a mapping that has them under `logits` beside the `loss`. Labels are
    its `labels`, else those of the batch. Where they are to be had in another way, `pair(outputs, batch)` gets them.
    Several validation sets are told apart as Lightning does, by `/dataloader_idx_0` behind the name; several processes
    are added up.

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


class TrainerMetrics:
    """A `compute_metrics` for Hugging Face's Trainer: it logs `eval_ece`, `eval_nll` and `eval_brier`.

    Give it to the Trainer as `compute_metrics=TrainerMetrics()`; it needs `trueup[torchmetrics]` beside `transformers`,
    which it does not import itself, and `eval_strategy="epoch"` among the training arguments logs it each epoch. With
    `batch_eval_metrics=True` among them it adds up batch by batch, and without it gets all logits at once. Where a
    model gives several outputs the first are the logits. Tokens are (n, length, classes), and those labelled
    `ignore_index` are left out; of a causal language model, whose logits are for the token that comes next,
    `shifted=True` moves the labels by one.

    >>> import pytest
    >>> _ = pytest.importorskip("torchmetrics")
    >>> from types import SimpleNamespace  # in the place of transformers.EvalPrediction
    >>> compute_metrics = TrainerMetrics()  # Trainer(model, arguments, …, compute_metrics=compute_metrics).train()
    >>> seen = SimpleNamespace(predictions=torch.tensor([[2.0, 0.0], [0.0, 1.0]]).numpy(), label_ids=[0, 1])
    >>> {name: round(value, 4) for name, value in compute_metrics(seen).items()}
    {'ece': 0.1941, 'nll': 0.2201, 'brier': 0.0865}
    """

    def __init__(self, *, bins: int = BINS, ignore_index: int = -100, shifted: bool = False) -> None:
        self.bins, self.ignore_index, self.shifted = bins, ignore_index, shifted
        self._metrics = _metrics(bins)

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
        """Add what was predicted; give the figures, and begin anew, unless more is to come."""
        logits, labels = prediction.predictions, prediction.label_ids
        logits, labels = (torch.as_tensor(x[0] if isinstance(x, tuple) else x) for x in (logits, labels))
        if self.shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        if logits.ndim > 2:
            logits, labels = flatten(logits, labels, classes="last", ignore_index=self.ignore_index)
        for metric in self._metrics.values():
            metric.update(logits, labels)
        if not compute_result:
            return {}
        found = {name: float(metric.compute()) for name, metric in self._metrics.items()}
        for metric in self._metrics.values():
            metric.reset()
        return found


def _metrics(bins: int) -> dict[str, Any]:
    from trueup.integrations import torchmetrics as streaming

    return {"ece": streaming.ECE(bins=bins), "nll": streaming.NLL(), "brier": streaming.Brier()}


@functools.cache
def _callback_class() -> Any:
    """The class, which cannot be written down before its base is known."""
    base = _lightning().Callback

    class CalibrationCallback(base):  # type: ignore[misc, valid-type]
        def __init__(self, prefix: str, bins: int, pair: Pair | None) -> None:
            self.options: dict[str, Any] = {"prefix": prefix, "bins": bins, "pair": pair}
            self.sets: dict[int, dict[str, Any]] = {}
            self.device: Any = "cpu"
            _metrics(bins)  # what is wrong shows before training begins

        def __reduce__(self) -> Any:
            return functools.partial(lightning_callback, **self.options), ()

        def on_validation_epoch_start(self, trainer: Any, module: Any) -> None:
            self.sets, self.device = {}, getattr(module, "device", "cpu")

        def on_validation_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int, dataloader_idx: int = 0
        ) -> None:
            if dataloader_idx not in self.sets:
                made = _metrics(self.options["bins"])
                self.sets[dataloader_idx] = {name: metric.to(self.device) for name, metric in made.items()}
            logits, labels = (self.options["pair"] or _pair)(outputs, batch)
            for metric in self.sets[dataloader_idx].values():
                metric.update(logits.detach(), labels)

        def on_validation_epoch_end(self, trainer: Any, module: Any) -> None:
            if not trainer.sanity_checking:
                module.log_dict(self.values(), sync_dist=trainer.world_size > 1, add_dataloader_idx=False)

        def values(self) -> dict[str, Tensor]:
            """The figures of the epoch by the names under which they are logged; those of all processes."""
            return dict(self._values())

        def _values(self) -> Iterator[tuple[str, Tensor]]:
            for place, found in sorted(self.sets.items()):
                after = f"/dataloader_idx_{place}" if len(self.sets) > 1 else ""
                for name, metric in found.items():
                    yield f"{self.options['prefix']}{name}{after}", metric.compute().float()

    return CalibrationCallback


def _lightning() -> Any:
    for room in ("lightning.pytorch", "pytorch_lightning"):  # the same library under its two names
        with suppress(ModuleNotFoundError):
            return import_module(room)
    raise ImportError("lightning_callback needs Lightning: pip install lightning")


def _pair(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    try:
        logits = logits_of(outputs)
    except ValueError:
        logits = torch.empty(0)
    if logits.ndim < 2:  # a loss alone
        fact = f"keys {', '.join(map(str, outputs))}" if isinstance(outputs, Mapping) else type(outputs).__name__
        wish = "validation_step must return logits (n, classes), or a mapping that has them under `logits`"
        raise ValueError(f"{wish}, got {fact}; or give lightning_callback(pair=…)")
    if isinstance(outputs, Mapping) and "labels" in outputs:
        return logits, outputs["labels"]
    [parsed] = batches([batch])
    return logits, parsed.labels
