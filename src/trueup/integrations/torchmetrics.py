"""Streaming metrics for torchmetrics: updated batch by batch, reset by epoch, summed over processes.

The states are sums, so memory does not grow with the number of rows. The results equal those of `trueup.metrics` on
all rows at once. Logits come first, as everywhere; convert probabilities by `from_probs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from trueup._core.arrays import as_arrays, as_weights
from trueup._core.bins import BINS, Bins
from trueup._core.errors import InputError
from trueup._core.row_scores import score_rows
from trueup._core.tally import TABLE_METRICS, Mean, Tally
from trueup._core.types import ArrayLike
from trueup.convert import flatten

try:
    from torchmetrics import Metric
except ImportError:
    raise ImportError("this module needs torchmetrics: pip install 'trueup[torchmetrics]'") from None

__all__ = ["ECE", "NLL", "SCE", "Brier", "CalibrationTable"]

_SETTINGS = ("edges", "bins", "closed", "top_label", "clusters")
"""Fields of a tally that are settings, not sums."""


class Streaming(Metric):
    """Base of the metrics: the states are the sums of a tally, in float64.

    Parameters
    ----------
    count
        Function that tallies a batch of logits and labels.
    n_classes
        Number of classes.
    class_axis
        Axis of classes for tokens or pixels: ``"first"`` for (n, K, …), ``"last"`` for (n, …, K).
    ignore_index
        Label of tokens or pixels to leave out.
    **options
        Options of `torchmetrics.Metric`.
    """

    is_differentiable = False
    higher_is_better: bool | None = False
    full_state_update = False

    def __init__(
        self,
        count: Callable[..., Any],
        n_classes: int = 2,
        *,
        class_axis: Literal["first", "last"] | None = None,
        ignore_index: int = -100,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if class_axis not in (None, "first", "last"):
            raise InputError("class_axis", 'be "first" (n, K, …) or "last" (n, …, K)', repr(class_axis))
        self._count, self.class_axis, self.ignore_index = count, class_axis, ignore_index
        self._empty = count(torch.zeros(0, n_classes), torch.zeros(0, dtype=torch.int64))
        for name, total in _sums(self._empty):
            self.add_state(name, torch.zeros(total.shape, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: ArrayLike, labels: ArrayLike, sample_weight: ArrayLike | None = None) -> None:
        """Add the rows of a batch.

        Parameters
        ----------
        logits
            Network outputs, shape (n, classes); with `class_axis` (n, K, …) or (n, …, K).
        labels
            True classes, shape (n,); with `class_axis` (n, …).
        sample_weight
            Weight of each row, text or image, shape (n,).
        """
        if self.class_axis is not None:
            options: dict[str, Any] = {"class_axis": self.class_axis, "ignore_index": self.ignore_index}
            logits, labels, sample = flatten(torch.as_tensor(logits), labels, **options, clusters=True)
            sample_weight = None if sample_weight is None else torch.as_tensor(sample_weight)[torch.from_numpy(sample)]
        # Adding to the empty tally checks the number of classes.
        batch = self._empty + self._count(logits, labels, sample_weight=sample_weight)
        for name, total in _sums(batch):
            state: Tensor = getattr(self, name)
            setattr(self, name, state + torch.from_numpy(total).to(state.device))

    @property
    def tally(self) -> Any:
        """Tally of the rows since the last reset: of this process, or inside `sync_context` of all processes."""
        return _with_sums(self._empty, {name: getattr(self, name).cpu().numpy() for name, _ in _sums(self._empty)})

    def _number(self, value: float) -> Tensor:
        return torch.tensor(value, dtype=torch.float64, device=self.device)


class ECE(Streaming):
    """Expected calibration error in equal-width bins: Σ_b (n_b/n) |acc_b − conf_b|.

    For two classes the error is about class 1; for more, or with `top_label`, about the predicted class.

    Parameters
    ----------
    bins
        Number of bins.
    top_label
        Read two classes by the predicted class instead of class 1.
    **options
        `class_axis`, `ignore_index`, and options of `torchmetrics.Metric`; see `SCE`.

    Examples
    --------
    >>> metric = ECE()
    >>> metric.update(torch.tensor([[2.0, 0.0], [0.0, 1.0]]), torch.tensor([0, 1]))
    >>> metric.update(torch.tensor([[0.5, 0.0]]), torch.tensor([1]))
    >>> f"{metric.compute():.4f}"
    '0.3369'
    """

    def __init__(self, *, bins: int = BINS, top_label: bool = False, **options: Any) -> None:
        super().__init__(partial(Bins.of, bins=bins, top_label=top_label), **options)
        self.bins, self.top_label = bins, top_label

    def compute(self) -> Tensor:
        """Return the error of all rows, or NaN without rows."""
        return self._number(self.tally.ece())


class SCE(Streaming):
    """Static calibration error: the mean of the class-wise calibration errors.

    Parameters
    ----------
    n_classes
        Number of classes.
    bins
        Number of bins.
    **options
        Options of every metric here: `class_axis` is the axis of classes for tokens or pixels, ``"first"`` for
        (n, K, …) and ``"last"`` for (n, …, K); `ignore_index` (default -100) is the label to leave out. Other options
        go to `torchmetrics.Metric`.

    Examples
    --------
    >>> metric = SCE(2)
    >>> metric.update(torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.5, 0.0]]), torch.tensor([0, 1, 1]))
    >>> f"{metric.compute():.4f}"
    '0.3369'
    """

    def __init__(self, n_classes: int, *, bins: int = BINS, **options: Any) -> None:
        super().__init__(partial(Bins.of, bins=bins, classwise=True), n_classes, **options)
        self.bins = bins

    def compute(self) -> Tensor:
        """Return the error of all rows, or NaN without rows."""
        return self._number(self.tally.ece())


class NLL(Streaming):
    """Mean negative log-likelihood −ln p_y.

    Parameters
    ----------
    **options
        `class_axis`, `ignore_index`, and options of `torchmetrics.Metric`; see `SCE`.

    Examples
    --------
    >>> metric = NLL()
    >>> metric.update(torch.tensor([[0.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 0]))
    >>> f"{metric.compute():.4f}"
    '0.5032'
    """

    _score = "nll"

    def __init__(self, **options: Any) -> None:
        super().__init__(partial(_mean_score, self._score), **options)

    def compute(self) -> Tensor:
        """Return the mean over all rows, or NaN without rows."""
        return self._number(self.tally.value)


class Brier(NLL):
    """Mean Brier score Σ_k (p_k − e_k)².

    Parameters
    ----------
    **options
        `class_axis`, `ignore_index`, and options of `torchmetrics.Metric`; see `SCE`.

    Examples
    --------
    >>> metric = Brier()
    >>> metric.update(torch.tensor([[0.0, 0.0]]), torch.tensor([0]))
    >>> f"{metric.compute():.4f}"
    '0.5000'
    """

    _score = "brier"


class CalibrationTable(Streaming):
    """The table of `evaluate` as a dictionary of numbers, from one pass over each batch.

    Parameters
    ----------
    n_classes
        Number of classes.
    bins
        Number of bins of the calibration errors.
    top_label
        Read two classes by the predicted class instead of class 1.
    **options
        `class_axis`, `ignore_index`, and options of `torchmetrics.Metric`; see `SCE`.

    Examples
    --------
    >>> metric = CalibrationTable(2)
    >>> metric.update(torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.5, 0.0]]), torch.tensor([0, 1, 1]))
    >>> table = metric.compute()
    >>> f"{table['accuracy']:.4f} {table['ece']:.4f}"
    '0.6667 0.3369'
    """

    higher_is_better = None

    def __init__(self, n_classes: int, *, bins: int = BINS, top_label: bool = False, **options: Any) -> None:
        super().__init__(partial(Tally.of, bins=bins, top_label=top_label), n_classes, **options)
        self.bins, self.top_label = bins, top_label

    def compute(self) -> dict[str, Tensor]:
        """Return every number of the table, or NaN without rows."""
        tally = self.tally
        return {name: self._number(tally.value(name)) for name in TABLE_METRICS}


def calibration_metrics(bins: int = BINS) -> dict[str, Streaming]:
    """Return the metrics that are logged during training: ECE, NLL and Brier score."""
    return {"ece": ECE(bins=bins), "nll": NLL(), "brier": Brier()}


def _mean_score(name: str, logits: Any, labels: Any, sample_weight: Any = None) -> Mean:
    z, y = as_arrays(logits, labels)
    return Mean.of(getattr(score_rows(z, y), name), as_weights(sample_weight, len(z)))


def _sums(tally: Any, prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Yield the sums of a tally and of nested tallies, with names for the states of a module."""
    for field in fields(tally):
        value = getattr(tally, field.name)
        if is_dataclass(value):
            yield from _sums(value, f"{prefix}{field.name}_")
        elif field.name not in _SETTINGS:
            yield f"{prefix}{field.name}_sum", np.asarray(value, dtype=np.float64)


def _with_sums(tally: Any, sums: Mapping[str, np.ndarray], prefix: str = "") -> Any:
    """Return the tally with other sums."""
    changed: dict[str, Any] = {}
    for field in fields(tally):
        value = getattr(tally, field.name)
        if is_dataclass(value):
            changed[field.name] = _with_sums(value, sums, f"{prefix}{field.name}_")
        elif field.name not in _SETTINGS:
            total = sums[f"{prefix}{field.name}_sum"]
            changed[field.name] = total if isinstance(value, np.ndarray) else float(total)
    return replace(tally, **changed)
