"""Calibration under shifted inputs, and detection of out-of-distribution inputs by uncertainty."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from trueup._core.arrays import as_logits, as_vector
from trueup._core.bins import BINS
from trueup._core.progress import track
from trueup.metrics import binned, proper, ranking
from trueup.models.batches import Device
from trueup.models.calibrated import collect
from trueup.models.corruptions import CORRUPTIONS, corrupt, corruptions_for

Predict: TypeAlias = nn.Module | Callable[[Tensor], Any]

SEVERITIES = (0, 1, 2, 3, 4, 5)
"""Severities of a corruption; 0 changes nothing."""
SCORES: tuple[ranking.Score, ...] = ("entropy", "confidence")
"""Uncertainties from logits; "confidence" means 1 − confidence."""


@dataclass(frozen=True)
class ShiftRow:
    """Scores of a network on images with one shift."""

    corruption: str
    """Name of the corruption."""
    severity: int
    """Severity of the corruption."""
    accuracy: float
    """Share of correct predictions."""
    nll: float
    """Mean negative log-likelihood."""
    ece: float
    """Expected calibration error."""
    entropy: float
    """Mean entropy of the predictions, in nats."""


@dataclass(frozen=True)
class OODRow:
    """Detection of out-of-distribution inputs by a score, which is larger for more uncertain predictions."""

    score: str
    """Name of the score."""
    auroc: float
    """Probability that an out-of-distribution input has a higher score than a known one."""
    aupr: float
    """Average precision with out-of-distribution inputs as positives; equals `share` for a useless score."""
    fpr95: float
    """Share of out-of-distribution inputs below the threshold that 95 % of the known inputs are below."""
    share: float
    """Share of out-of-distribution inputs among all."""


@dataclass(frozen=True)
class Shifts:
    """Selection of image shifts."""

    corruptions: Sequence[str] | None = None
    """Names in `CORRUPTIONS`; None for all that fit the number of channels."""
    severities: Sequence[int] = SEVERITIES
    """Severities of the corruptions."""
    seed: int = 0
    """Random seed of the corruptions."""


def evaluate_shift(
    model: Predict,
    images: Tensor,
    labels: Any,
    shifts: Shifts | None = None,
    *,
    bins: int = BINS,
    batch_size: int = 500,
    device: Device | None = None,
    progress: bool = True,
) -> list[ShiftRow]:
    """Compute accuracy, NLL, ECE and entropy of a model at each severity of each corruption.

    Parameters
    ----------
    model
        A network, or a function from a batch of images to logits. For normalised inputs it begins with `Normalise`.
    images
        Images (n, C, H, W) with pixels in [0, 1], or bytes.
    labels
        Class of each image, shape (n,).
    shifts
        Corruptions and severities; by default all. Severity 0 is computed once.
    bins
        Number of bins of the ECE.
    batch_size
        Images per batch.
    device
        Device of the inputs; by default that of the model.
    progress
        Whether to show progress.

    Returns
    -------
    list of ShiftRow
        One row per corruption and severity.

    Examples
    --------
    >>> from trueup.models.networks import CNN
    >>> x, y = torch.linspace(0, 1, 512).reshape(8, 1, 8, 8), torch.arange(8)
    >>> rows = evaluate_shift(CNN(channels=1), x, y, Shifts(["contrast", "haze"]), progress=False)
    >>> len(rows), rows[0].corruption, rows[0].severity, rows[0].accuracy == rows[6].accuracy
    (12, 'contrast', 0, True)

    References
    ----------
    Ovadia et al. (2019), Can you trust your model's uncertainty? Evaluating predictive uncertainty under dataset shift,
    arXiv:1906.02530.
    """
    if isinstance(images, Tensor) and images.dtype == torch.uint8:
        images = images.float() / 255
    if not isinstance(images, Tensor) or images.ndim != 4 or not len(images):
        got = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
        raise ValueError(f"images must be a torch tensor (n, C, H, W) with at least one image, got {got}")
    x, shifts = images, Shifts() if shifts is None else shifts
    names = corruptions_for(x.shape[1]) if shifts.corruptions is None else tuple(shifts.corruptions)
    unknown = [name for name in names if name not in CORRUPTIONS]
    if unknown:
        raise ValueError(f"corruptions must be among {', '.join(CORRUPTIONS)}, got {unknown[0]!r}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    y = torch.as_tensor(labels)
    if y.shape != (len(x),):
        raise ValueError(f"labels must have shape ({len(x)},), one per image, got {tuple(y.shape)}")
    network = model if isinstance(model, nn.Module) else _Function(model)

    @functools.cache
    def scores_at(name: str, severity: int) -> tuple[float, float, float, float]:
        def loader() -> Iterator[tuple[Tensor, Tensor]]:
            for first in range(0, len(x), batch_size):
                batch = slice(first, first + batch_size)
                yield corrupt(x[batch], name, severity, seed=shifts.seed, first=first), y[batch]

        pair = collect(network, loader(), device=device, progress=False)
        return proper.accuracy(*pair), proper.nll(*pair), binned.ece(*pair, bins=bins), proper.entropy(*pair)

    steps = [(name, severity) for name in names for severity in shifts.severities]
    return [
        ShiftRow(name, severity, *scores_at(name if severity else names[0], severity))
        for name, severity in track(steps, label="shifting images", enabled=progress)
    ]


def by_severity(rows: Iterable[ShiftRow]) -> list[ShiftRow]:
    """Average over corruptions at each severity.

    Parameters
    ----------
    rows
        Rows of `evaluate_shift`.

    Returns
    -------
    list of ShiftRow
        One row per severity, with "mean" as the corruption.

    Examples
    --------
    >>> rows = [ShiftRow("haze", 1, 0.5, 2.0, 0.1, 1.0), ShiftRow("jpeg", 1, 0.7, 1.0, 0.2, 0.8)]
    >>> f"{by_severity(rows)[0].accuracy:.4f}"
    '0.6000'
    """
    groups: dict[int, list[ShiftRow]] = {}
    for row in rows:
        groups.setdefault(row.severity, []).append(row)

    def mean(group: list[ShiftRow], name: str) -> float:
        return math.fsum(getattr(row, name) for row in group) / len(group)

    return [
        ShiftRow("mean", severity, *(mean(group, name) for name in ("accuracy", "nll", "ece", "entropy")))
        for severity, group in sorted(groups.items())
    ]


def evaluate_ood(logits: Any, ood: Any, *, scores: Mapping[str, tuple[Any, Any]] | None = None) -> list[OODRow]:
    """Measure how well entropy and 1 − confidence detect out-of-distribution inputs.

    Parameters
    ----------
    logits
        Logits of known inputs, shape (n, classes).
    ood
        Logits of out-of-distribution inputs, shape (m, classes).
    scores
        Further uncertainties, such as mutual information: name → a pair of vectors, for known and for
        out-of-distribution inputs.

    Returns
    -------
    list of OODRow
        One row per score.

    Examples
    --------
    >>> import numpy as np
    >>> known, ood = np.log([[0.9, 0.1], [0.8, 0.2]]), np.log([[0.6, 0.4], [0.85, 0.15]])
    >>> for row in evaluate_ood(known, ood, scores={"mutual_information": ([0.0, 0.1], [0.2, 0.3])}):
    ...     print(f"{row.score} {row.auroc:.4f} {row.aupr:.4f} {row.fpr95:.4f}")
    entropy 0.7500 0.8333 0.5000
    confidence 0.7500 0.8333 0.5000
    mutual_information 1.0000 1.0000 0.0000

    References
    ----------
    Hendrycks and Gimpel (2017), arXiv:1610.02136; Liang, Li and Srikant (2018), arXiv:1706.02690.
    """
    n_known, n_ood = len(as_logits(logits)), len(as_logits(ood, "ood"))
    share = n_ood / (n_known + n_ood) if n_known + n_ood else math.nan
    metrics = ranking.ood_auroc, ranking.ood_aupr, ranking.ood_fpr95
    rows = []
    for score in SCORES:
        auroc, aupr, fpr95 = (metric(logits, ood, score=score) for metric in metrics)
        rows.append(OODRow(score, auroc, aupr, fpr95, share))
    mark = np.repeat([0.0, 1.0], [n_known, n_ood])
    for name, (of_known, of_ood) in (scores or {}).items():
        parts = ((of_known, n_known), (of_ood, n_ood))
        uncertainty = np.concatenate([as_vector(s, f"scores[{name!r}]", length=n) for s, n in parts])
        auroc, aupr = ranking.roc_area(uncertainty, mark), ranking.average_precision(uncertainty, mark)
        rows.append(OODRow(name, auroc, aupr, ranking.false_positive_rate(-uncertainty, 1.0 - mark), share))
    return rows


class _Function(nn.Module):
    """A function as a network; the modules in the function do not change."""

    def __init__(self, function: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, images: Tensor) -> Any:
        return self.function(images)
