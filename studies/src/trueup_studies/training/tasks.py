"""Tasks of a network: the shape of outputs for a loss, and the metrics after every epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from trueup import metrics
from trueup.calibrators.temperature import WIDE_GRID, Temperature
from trueup.convert import ClassAxis, flatten
from trueup.io.predictions import Predictions
from trueup.metrics import regression
from trueup.models._tensors import upcast_half
from trueup.models.batches import arguments_of, logits_of
from trueup.models.dropout import VARIANCE_FLOOR, has_dropout, mc_dropout, moments
from trueup_studies.training.data.dataset import Kind


class Forecasts(NamedTuple):
    """Gaussian forecasts and targets, each (n,), for `VarianceScaling.fit(*forecasts)`."""

    mean: Any
    std: Any
    targets: Any


@dataclass(frozen=True)
class Classification:
    """Classification from logits (n, K) and labels (n,), or of tokens or pixels with `class_axis`.

    `class_axis="last"` is (n, …, K), as in language models, and "first" is (n, K, …), with labels (n, …). Labels equal
    to `ignore_index` do not count; a loss has its own `ignore_index`.
    """

    class_axis: ClassAxis = None
    ignore_index: int = -100

    def for_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Move classes to the second axis, as losses require."""
        self._check(outputs, labels)
        return outputs.movedim(-1, 1) if self.class_axis == "last" else outputs

    def _check(self, outputs: Tensor, labels: Tensor) -> None:
        if labels.is_floating_point():
            message = "labels must be integers, or numbers with task=Regression()"
            raise ValueError(f"{message}, got {labels.dtype}".replace("torch.", ""))
        if self.class_axis is None and outputs.ndim != 2:
            message = "the network's outputs must be (n, K), or tokens with task=Classification(class_axis=…)"
            raise ValueError(f"{message}, got {tuple(outputs.shape)}")

    def predict(self, model: nn.Module, inputs: Any) -> Tensor:
        """Compute the logits."""
        args, kwargs = arguments_of(inputs)
        return logits_of(model(*args, **kwargs))

    def to_rows(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Return logits (m, K) and labels (m,)."""
        self._check(outputs, labels)
        return flatten(upcast_half(outputs), labels, class_axis=self.class_axis, ignore_index=self.ignore_index)

    def correct(self, rows: tuple[Tensor, ...]) -> Tensor:
        """Return whether the largest logit is the label's."""
        logits, labels = rows
        return logits.argmax(dim=1) == labels

    def predictions(self, rows: tuple[Tensor, ...]) -> Predictions:
        """Return the rows as predictions."""
        return Predictions(*rows)

    def figures(self, val: Predictions | None, test: Predictions | None) -> Mapping[str, float]:
        """Compute validation accuracy, NLL and ECE, and test ECE raw and with the best temperature."""
        figures: dict[str, float] = {}
        if val is not None:
            figures |= {"accuracy": metrics.accuracy(*val), "nll": metrics.nll(*val), "ece": metrics.ece(*val)}
        if test is not None:
            best = Temperature.fit_ece(*test, temperatures=WIDE_GRID)(test.logits)
            figures |= {"test_ece": metrics.ece(*test), "optimal_ece": metrics.ece(best, test.labels)}
        return figures


@dataclass(frozen=True)
class Regression:
    """Regression with outputs (n,) or (n, targets) and targets of the same shape.

    With `variance_head` outputs are (n, 2·targets): `models.moments` reads them, and `losses.gaussian_nll` trains them.
    With dropout, the forecast after an epoch uses this number of Monte-Carlo `passes`. Without dropout or a variance
    head there is no predicted variance, and NLL and ENCE are NaN.
    """

    variance_head: bool = False
    passes: int = 10

    def for_loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Reshape outputs to the shape of the targets; (n, 1) minus (n,) would give n² differences."""
        if self.variance_head or outputs.shape == labels.shape:
            return outputs
        if outputs.numel() != labels.numel() or len(outputs) != len(labels):
            message = f"the network's outputs must have the shape of the targets, {tuple(labels.shape)}"
            hint = "; a mean and a variance are task=Regression(variance_head=True)"
            twice = hint if outputs.numel() == 2 * labels.numel() else ""
            raise ValueError(f"{message}, got {tuple(outputs.shape)}{twice}")
        return outputs.reshape(labels.shape)

    def predict(self, model: nn.Module, inputs: Any) -> Tensor:
        """Compute samples (passes, n, …)."""
        if self.passes > 1 and has_dropout(model):
            return mc_dropout(model, inputs, self.passes)
        args, kwargs = arguments_of(inputs)
        return logits_of(model(*args, **kwargs))[None]

    def to_rows(self, outputs: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        """Return mean, standard deviation and target of each number, in float64."""
        if not labels.is_floating_point():
            raise ValueError(f"targets must be floating point, got {labels.dtype}".replace("torch.", ""))
        forecast = moments(outputs.double(), variance_head=self.variance_head)
        if forecast.mean.numel() != labels.numel():
            shape = tuple(outputs.shape[1:])
            raise ValueError(f"the network's outputs must fit targets {tuple(labels.shape)}, got {shape}")
        known = self.variance_head or len(outputs) > 1
        variance = forecast.variance.clamp(min=VARIANCE_FLOOR) if known else torch.zeros_like(forecast.mean)
        return forecast.mean.reshape(-1), variance.sqrt().reshape(-1), labels.double().reshape(-1)

    def correct(self, rows: tuple[Tensor, ...]) -> Tensor:
        """Return an empty tensor, since a number is never exactly right."""
        return torch.zeros(0, dtype=torch.bool)

    def predictions(self, rows: tuple[Tensor, ...]) -> Forecasts:
        """Return the rows as forecasts."""
        return Forecasts(*rows)

    def figures(self, val: Forecasts | None, test: Forecasts | None) -> Mapping[str, float]:
        """Compute validation RMSE, NLL and ENCE, and test ENCE."""
        figures: dict[str, float] = {}
        if val is not None:
            figures |= {"rmse": regression.rmse(*val), "nll": _nll(val), "ence": _ence(val)}
        if test is not None:
            figures["test_ence"] = _ence(test)
        return figures


Task: TypeAlias = Classification | Regression
"""A task of a network."""

KINDS: Mapping[Kind, Task] = {
    "image": Classification(),
    "text": Classification(),
    "characters": Classification(class_axis="last"),
    "tabular": Regression(),
}
"""Kind of data set → task."""


def _has_variance(forecasts: Forecasts) -> bool:
    return bool(np.any(np.asarray(forecasts.std) > 0))


def _nll(forecasts: Forecasts) -> float:
    return regression.gaussian_nll(*forecasts) if _has_variance(forecasts) else math.nan


def _ence(forecasts: Forecasts) -> float:
    return regression.ence(*forecasts) if _has_variance(forecasts) else math.nan
