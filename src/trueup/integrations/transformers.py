"""Hugging Face's transformers: calibration metrics for its Trainer, calibrated networks in its pipelines and folders.

`collect`, `calibrate` and `Calibrated` take its networks unchanged. A `Calibrated` network passes attributes such as
`config`, `device` and `generate` on to the network inside. `transformers` is imported only where it is used.
"""

from __future__ import annotations

import os
from typing import Any

import torch

from trueup._core.bins import BINS
from trueup.convert import flatten
from trueup.models.calibrated import Calibrated
from trueup.models.pretrained import from_pretrained, save_pretrained

__all__ = ["TrainerMetrics", "from_pretrained", "pipeline", "save_pretrained"]


def pipeline(task: str, model: Calibrated | str | os.PathLike[str], **options: Any) -> Any:
    """Make a pipeline of transformers with calibrated scores.

    `transformers.pipeline` takes a calibrated network too, but logs that it does not know the class.

    Parameters
    ----------
    task
        Task of the pipeline, such as ``"text-classification"``.
    model
        The calibrated network, or a folder that `save_pretrained` wrote. The folder may also hold the tokenizer.
    **options
        Options of `transformers.pipeline`, such as `tokenizer`.

    Returns
    -------
    transformers.Pipeline
        The pipeline; its scores are calibrated probabilities.
    """
    import transformers

    source = model.model if isinstance(model, Calibrated) else os.fspath(model)
    result = transformers.pipeline(task, model=source, **options)
    calibrated = model if isinstance(model, Calibrated) else from_pretrained(model, result.model)
    result.model = calibrated.to(result.device)
    return result


class TrainerMetrics:
    """A `compute_metrics` for Hugging Face's Trainer: it logs `eval_ece`, `eval_nll` and `eval_brier`.

    Pass it to the Trainer as `compute_metrics=TrainerMetrics()`. It needs `trueup[torchmetrics]`. The training argument
    `eval_strategy="epoch"` logs it after each epoch. With `batch_eval_metrics=True` it sums batch by batch; without it
    the Trainer passes all logits at once. If a model returns several outputs, the first are the logits. Logits of
    tokens have shape (n, length, classes).

    Parameters
    ----------
    bins
        Number of bins of the calibration error.
    ignore_index
        Label of tokens to leave out.
    shifted
        Set it for a causal language model, whose logits are for the next token: labels then move by one.

    Examples
    --------
    >>> import pytest
    >>> _ = pytest.importorskip("torchmetrics")
    >>> from types import SimpleNamespace  # stands for transformers.EvalPrediction
    >>> compute_metrics = TrainerMetrics()  # Trainer(model, arguments, …, compute_metrics=compute_metrics).train()
    >>> prediction = SimpleNamespace(predictions=torch.tensor([[2.0, 0.0], [0.0, 1.0]]).numpy(), label_ids=[0, 1])
    >>> {name: round(value, 4) for name, value in compute_metrics(prediction).items()}
    {'ece': 0.1941, 'nll': 0.2201, 'brier': 0.0865}
    """

    def __init__(self, *, bins: int = BINS, ignore_index: int = -100, shifted: bool = False) -> None:
        from trueup.integrations.torchmetrics import calibration_metrics

        self.bins, self.ignore_index, self.shifted = bins, ignore_index, shifted
        self._metrics = calibration_metrics(bins)

    def __call__(self, prediction: Any, compute_result: bool = True) -> dict[str, float]:
        """Add a batch of predictions; with `compute_result`, return the metrics and reset.

        Parameters
        ----------
        prediction
            A `transformers.EvalPrediction` with `predictions` and `label_ids`.
        compute_result
            False if more batches follow.

        Returns
        -------
        dict[str, float]
            The metrics, or nothing if more batches follow.
        """
        logits, labels = prediction.predictions, prediction.label_ids
        logits, labels = (torch.as_tensor(x[0] if isinstance(x, tuple) else x) for x in (logits, labels))
        if self.shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        if logits.ndim > 2:
            logits, labels = flatten(logits, labels, class_axis="last", ignore_index=self.ignore_index)
        for metric in self._metrics.values():
            metric.update(logits, labels)
        if not compute_result:
            return {}
        values = {name: float(metric.compute()) for name, metric in self._metrics.items()}
        for metric in self._metrics.values():
            metric.reset()
        return values
