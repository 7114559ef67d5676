"""Which recalibration of Gaussian forecasts predicts held-out targets best: cross-validation by the pinball loss."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.special import ndtri

from trueup.calibrators.regression import Recalibrator
from trueup.core.arrays import as_weights
from trueup.core.clusters import as_clusters, block_sums, mean_error
from trueup.core.errors import InputError
from trueup.core.splits import cluster_folds, stratified_folds
from trueup.core.tally import Mean
from trueup.metrics.forecasts import LEVELS, GaussianForecast, check_forecast, scaled_pinball
from trueup.registry import RECALIBRATIONS

__all__ = ["RAW", "RecalibrationChoice", "choose_recalibration"]

RAW = "raw"
"""The forecasts as they are."""


@dataclass(frozen=True, eq=False)
class RecalibrationChoice:
    """What cross-validation found: the chosen recalibration, fitted to all rows, and the others beside it."""

    chosen: str
    """A name of RECALIBRATIONS, or "raw" where none helps."""
    losses: Mapping[str, float]
    """The held-out pinball loss of each, `raw` first."""
    recalibrators: Mapping[str, Recalibrator]
    """Each fitted to all rows."""
    bounds: Mapping[str, np.ndarray]
    """Of each, for each fold, where the quantiles of `LEVELS` lie in units of σ, (folds, levels)."""
    fold: np.ndarray
    """The fold of each row."""

    @property
    def recalibrator(self) -> Recalibrator | None:
        """The chosen one; None where the forecasts are best as they are."""
        return self.recalibrators.get(self.chosen)

    def why(self) -> str:
        """Why the chosen one is not the one of the least loss, in words that end a sentence; else nothing.

        >>> losses = {"raw": 0.56, "variance": 0.544, "quantiles": 0.542}
        >>> RecalibrationChoice("variance", losses, {}, {}, np.zeros(0)).why()
        ', the simplest within one standard error of the best, quantiles'
        """
        best = min(self.losses, key=self.losses.__getitem__)
        return "" if self.chosen == best else f", the simplest within one standard error of the best, {best}"


def choose_recalibration(
    mean: Any,
    std: Any,
    targets: Any,
    *,
    methods: Sequence[str] | None = None,
    weights: Any = None,
    clusters: Any = None,
    folds: int = 5,
) -> RecalibrationChoice:
    """Fit each recalibration to the other folds, and choose by the pinball loss of the fold left out.

    The first, in the order raw, variance, quantiles, whose loss is within one standard error of the best is chosen.
    Rows of one of the `clusters`, one value a row, stay in one fold, and the standard error is then by cluster.

    >>> rng = np.random.default_rng(0)
    >>> choose_recalibration(np.zeros(500), np.ones(500), 2 * rng.normal(size=500)).chosen
    'variance'
    """
    forecast = check_forecast(mean, std, targets)
    if not isinstance(forecast, GaussianForecast):
        raise InputError("forecasts", "be means and standard deviations to be recalibrated", "quantiles")
    m, s, y = forecast.mean, forecast.std, forecast.targets
    w = as_weights(weights, len(y))
    if isinstance(folds, bool) or int(folds) != folds or not 2 <= folds <= len(y):
        raise InputError("folds", f"be a whole number of 2..{len(y)}, the number of rows", repr(folds))
    names = list(RECALIBRATIONS) if methods is None else list(methods)
    fits = {name: RECALIBRATIONS[name] for name in names}
    rows = torch.from_numpy(np.stack([m, s, y], axis=1))
    together, alike = as_clusters(clusters, len(y), at_least=folds), torch.zeros(len(y), dtype=torch.int64)
    fold = stratified_folds(rows, alike, folds) if together is None else cluster_folds(alike, together, folds)
    bounds = {RAW: np.tile(ndtri(LEVELS), (folds, 1))}
    fitted: dict[str, Recalibrator] = {}
    for name, fit in fits.items():
        fitted[name] = fit(m, s, y, weights=w)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the fit to all rows has warned
            parts = [fit(*(x[fold != k] for x in (m, s, y)), weights=_take(w, fold != k)) for k in range(folds)]
        bounds[name] = np.stack([part.standard_quantiles(LEVELS) for part in parts])
    losses = {name: held_out_losses(m, s, y, fold, bound) for name, bound in bounds.items()}
    means = {name: Mean.of(loss, w).value for name, loss in losses.items()}
    best = min(means, key=means.__getitem__)
    chosen = best
    for name in losses:
        gap = losses[name] - losses[best]
        behind = Mean.of(gap, w)
        error = behind.error if together is None else mean_error(*block_sums(gap, w, together))
        if behind.value <= error:
            chosen = name
            break
    return RecalibrationChoice(chosen, means, fitted, bounds, fold)


def held_out_losses(
    mean: np.ndarray, std: np.ndarray, targets: np.ndarray, fold: np.ndarray, bounds: np.ndarray
) -> np.ndarray:
    """The pinball loss of each row under the recalibration that has not seen its fold."""
    losses = np.empty(len(targets))
    for k, bound in enumerate(bounds):
        here = fold == k
        losses[here] = scaled_pinball(targets[here] - mean[here], std[here], LEVELS, bound)
    return losses


def _take(weights: np.ndarray | None, rows: np.ndarray) -> np.ndarray | None:
    return None if weights is None else weights[rows]
