"""Fits to shards: each shard contributes sums over its rows, and the search runs in one process.

Platt scaling, beta calibration and isotonic regression collect the log-odds of all rows instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from trueup._core.arrays import as_arrays, trusted_arrays
from trueup._core.bins import BINS, Bins
from trueup._core.errors import InputError
from trueup._core.loss_sums import temperature_sums
from trueup._core.optimize import Certificate, Stage
from trueup._core.registry import METHODS
from trueup._core.row_scores import scores_and_outcomes
from trueup._core.tally import Tally
from trueup.calibrators.base import Calibrator
from trueup.calibrators.binning import Histogram, HistogramOvR, slack_edges, tally_options
from trueup.calibrators.likelihood import MATRIX_PENALTY, VECTOR_PENALTY, Penalty, Problem
from trueup.calibrators.linear import Linear, Matrix, Structured, Vector
from trueup.calibrators.temperature import Temperature, inverse_temperature, scale_of, search_beta, subsample_estimate
from trueup.io.predictions import Predictions, PredictionTable, take_rows
from trueup.io.shards import NUMBERS, BadShard, NoRows, Shards, map_shards, warn_of_bad_shards

_FTOL = 1e-12  # predicted gain in mean loss at which a search stops.
_SAMPLE_ROWS = 20_000  # approximate number of rows, from all shards, at which a search starts.
_SAMPLE_SHARDS = 32  # number of shards whose first rows form the sample, unless all are read.


def fit(
    method: str, shards: Shards, *, executor: Executor | None = None, skip_bad: bool = False, progress: bool = True
) -> Calibrator:
    """Fit one of `FITS` to shards; it equals `METHODS[method]` on all rows in memory.

    Temperatures and minimised losses agree to 1e-9. Weights along flat directions of the loss agree to about 1e-5. Rows
    are weighted by the column that the shards name.

    Parameters
    ----------
    method
        A name in `FITS`.
    shards
        The shards.
    executor
        Runs the tasks; by default they run in this process.
    skip_bad
        Leave out unreadable shards with a warning.
    progress
        Show a progress bar.

    Returns
    -------
    Calibrator
        The fitted calibrator.

    Examples
    --------
    >>> import tempfile, trueup
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(4000, 3)) * 3
    >>> y = (z / 2 + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for i in range(4):
    ...         trueup.save((z[i::4], y[i::4]), f"{folder}/{i}.npz")
    ...     fit("temperature", Shards.of(folder))
    Temperature(temperature=1.95563)
    >>> trueup.METHODS["temperature"](z, y)
    Temperature(temperature=1.95563)
    """
    return fit_shards(method, shards, executor=executor, skip_bad=skip_bad, progress=progress).calibrator


class Fitted(NamedTuple):
    """A calibrator and the size of the data it was fitted to."""

    calibrator: Calibrator
    rows: int
    n_classes: int
    bad: tuple[str, ...]
    """Names of shards that were left out."""


def fit_shards(
    method: str, shards: Shards, *, executor: Executor | None = None, skip_bad: bool = False, progress: bool = True
) -> Fitted:
    """Fit one of `FITS` to shards, and return the numbers of rows and classes too.

    Parameters
    ----------
    method
        A name in `FITS`.
    shards
        The shards.
    executor
        Runs the tasks; by default they run in this process.
    skip_bad
        Leave out unreadable shards with a warning.
    progress
        Show a progress bar.

    Returns
    -------
    Fitted
        The calibrator, with the number of rows and classes, and the shards that were left out.
    """
    if method not in FITS:
        raise ValueError(f"for shards, method must be one of {', '.join(FITS)}, got {method!r}")
    data = _Data(shards, executor, skip_bad, progress)
    calibrator = FITS[method](data)
    warn_of_bad_shards(data.bad)
    return Fitted(calibrator, data.rows, data.sample.logits.shape[1], data.bad)


@dataclass(frozen=True)
class _Sample:
    """A sample with the same fraction of every part; beyond twice `max_rows` every other row is dropped."""

    logits: np.ndarray
    labels: np.ndarray
    every: int
    max_rows: int

    @classmethod
    def of(cls, part: PredictionTable, *, max_rows: int) -> _Sample:
        """Return the sample of a chunk."""
        return cls(np.asarray(part.logits), np.asarray(part.labels), 1, max_rows)._thin(max_rows)

    def __add__(self, other: _Sample) -> _Sample:
        return self.join(other, max_rows=self.max_rows)

    def join(self, other: _Sample, *, max_rows: int) -> _Sample:
        """Join two samples and thin them to the number of rows."""
        every = max(self.every, other.every)
        logits, labels = (
            np.concatenate([getattr(sample, name)[:: every // sample.every] for sample in (self, other)])
            for name in ("logits", "labels")
        )
        return _Sample(logits, labels, every, self.max_rows)._thin(max_rows)

    def _thin(self, max_rows: int) -> _Sample:
        logits, labels, every = self.logits, self.labels, self.every
        while len(labels) > 2 * max(64, min(max_rows, NUMBERS // logits.shape[1])):
            logits, labels, every = logits[::2], labels[::2], 2 * every
        return _Sample(logits.copy(), labels.copy(), every, self.max_rows)  # copies, to free the rest of the chunk


class _Data:
    """Shards, sums over all of their rows, and a sample of the rows."""

    def __init__(self, shards: Shards, executor: Executor | None, skip_bad: bool, progress: bool) -> None:
        self._shards, self._skip_bad = shards, skip_bad
        self._options: dict[str, Any] = {"executor": executor, "progress": progress}
        self._rows: int | None = None
        self._weight: np.ndarray | None = None
        self._sample: Predictions | None = None
        self.bad: tuple[str, ...] = ()
        """Shards that were left out, known once all were read."""

    @property
    def sample(self) -> Predictions:
        """Return a sample at which a search starts: the first rows of some shards, unless all were read."""
        if self._sample is None:
            try:
                drawn = self._draw(self._shards.heads(_SAMPLE_SHARDS, _SAMPLE_ROWS), "first rows of shards")
            except NoRows:
                drawn = self._draw(self._shards.heads(len(self._shards), _SAMPLE_ROWS), "first rows of shards")
            self._sample = drawn[0]
        return self._sample

    def read_all(self) -> None:
        """Read all shards, count their rows, and draw the sample from all of them.

        Any rows suffice for a temperature. Parameters per class need rows of all classes, which the first rows may
        lack.
        """
        self._sample, rows, bad = self._draw(self._shards, "reading shards")
        self._note(rows, bad)

    @property
    def rows(self) -> int:
        """Return the number of rows."""
        if self._rows is None:
            self.read_all()
        assert self._rows is not None
        return self._rows

    @property
    def is_unweighted(self) -> bool:
        """Return whether the shards have no column of weights."""
        return self._shards.fields.sample_weight is None

    @property
    def total(self) -> float:
        """Return the number of rows, or the effective number (Σw)²/Σw² of weighted rows."""
        if self.is_unweighted:
            return self.rows
        weight, squares = self._weights()
        return float(weight**2 / squares)

    def sum(self, task: Callable[[PredictionTable], Any], label: str) -> Any:
        """Sum a task over all rows; the first sum detects bad shards, and later sums leave them out.

        Weights are scaled to add up to `total`, as in a fit in memory.
        """
        if not self.is_unweighted:
            weight, squares = self._weights()
            task = partial(_scale_weights, task=task, factor=weight / squares)
        total, rows, bad = self._map(task, self._shards, label)
        self._note(rows, bad)
        return total

    def _weights(self) -> np.ndarray:
        """Return Σw and Σw²."""
        if self._weight is None:
            self.read_all()  # so that the sample is of all shards
            sums, rows, bad = self._map(_weight_sums, self._shards, "weights of shards")
            if not sums[0] > 0:
                raise InputError(str(self._shards.fields.sample_weight), "not all be zero", "zeros")
            self._note(rows, bad)
            self._weight = sums
        return self._weight

    def _note(self, rows: int, bad: tuple[str, ...]) -> None:
        if self._rows is None:
            self._rows, self.bad = rows, bad
            self._shards, self._skip_bad = self._shards.without(bad).reread(), False
        elif rows != self._rows:
            raise BadShard(f"shards must not change during a fit: {self._rows} rows have become {rows}")

    def _draw(self, shards: Shards, label: str) -> tuple[Predictions, int, tuple[str, ...]]:
        task = partial(_Sample.of, max_rows=max(64, _SAMPLE_ROWS // len(shards)))
        combine = partial(_Sample.join, max_rows=_SAMPLE_ROWS)
        sample, rows, bad = self._map(task, shards, label, combine=combine)
        return Predictions(sample.logits, sample.labels), rows, bad

    def _map(self, task: Callable[[PredictionTable], Any], shards: Shards, label: str, **options: Any) -> Any:
        return map_shards(task, shards, skip_bad=self._skip_bad, label=label, **self._options, **options)


def _temperature(data: _Data) -> Temperature:
    beta, certificate, scale = _inverse_temperature(data)
    return Temperature.from_search(beta, certificate, lambda: scale)


def _inverse_temperature(data: _Data) -> tuple[float, Certificate, float]:
    """Return 1/T, the certificate of its search, and the scale of the logits."""
    z, y = as_arrays(*data.sample)
    scale = scale_of(z) or data.sum(_spread, "spread of the logits, shards") / data.rows
    if scale == 0:
        return *inverse_temperature(z, y), scale

    def loss(beta: float, quick: bool = False) -> tuple[float, float, float]:
        task = partial(_temperature_sums, beta=beta, quick=quick)
        sums = data.sum(task, f"temperature {1 / beta:.4f}, shards")
        value, slope, curvature = (sums / data.total).tolist()
        return value, slope, curvature

    quick = None if z.dtype == np.float64 else partial(loss, quick=True)
    return *search_beta(loss, quick, subsample_estimate(z, y, scale), scale), scale


def _weight_sums(part: PredictionTable) -> np.ndarray:
    w = part.sample_weight
    assert w is not None
    return np.array([w.sum(), w @ w])


def _scale_weights(part: PredictionTable, *, task: Callable[[PredictionTable], Any], factor: float) -> Any:
    assert part.sample_weight is not None
    if not part.sample_weight.all():
        part = take_rows(part, part.sample_weight > 0)
    assert part.sample_weight is not None
    return task(replace(part, sample_weight=part.sample_weight * factor))


def _spread(part: PredictionTable) -> float:
    return float(np.asarray(part.logits, dtype=np.float64).std(axis=1).sum())


def _temperature_sums(part: PredictionTable, *, beta: float, quick: bool) -> np.ndarray:
    return np.array(temperature_sums(*trusted_arrays(*part), beta, part.sample_weight, quick=quick))


def _fit_structured(data: _Data, *, vector: bool) -> Linear:
    n, classes = data.total, data.sample.logits.shape[1]
    beta, _, _ = _inverse_temperature(data)
    penalty = Penalty(off=classes * (classes - 1) / n, diagonal=classes / n, bias=classes / n, centre=1.0)
    return _linear(data, partial(Structured, 1 / beta), penalty, vector=vector, on="log_probs", scale=beta)


def _linear(data: _Data, make: Callable[..., Linear], penalty: Penalty, **settings: Any) -> Linear:
    """Solve on the sample, then continue with sums over all rows; the settings are those of `Problem`."""
    rows = data.total  # reads all shards if necessary
    z, y = as_arrays(*data.sample)
    problem = Problem(z, y, penalty, **settings)
    weight, bias, _ = problem.solve(1.0 if problem.on == "log_probs" else inverse_temperature(z, y)[0])
    start = np.concatenate([weight.ravel(), bias])

    def likelihood(x: np.ndarray) -> np.ndarray:
        return np.asarray(data.sum(partial(_linear_sums, x=x, penalty=penalty, **settings), "fitting, shards"))

    x, certificate = problem.search(Stage(problem.penalise(likelihood, rows), _FTOL), start, problem.blocks(start))
    return make(*problem.weight_and_bias(x)).with_certificate(certificate)


def _linear_sums(part: PredictionTable, *, x: np.ndarray, **options: Any) -> np.ndarray:
    return Problem(*trusted_arrays(*part), **options, w=part.sample_weight).likelihood()(x)


def _histogram(data: _Data) -> Histogram:
    logits = data.sample.logits
    tally = data.sum(partial(_bins, edges=slack_edges(BINS, logits)), "counting, shards")
    return Histogram.from_tally(tally, event=logits.shape[1] == 2)


def _histogram_ovr(data: _Data) -> HistogramOvR:
    tally = data.sum(_class_bins, "counting, shards")
    return HistogramOvR.from_tally(tally, slack_edges(BINS, data.sample.logits))


def _histogram_mass(data: _Data) -> Histogram:
    """Cut on the tally's grid: a cut is off by at most one cell, 1/4000 of [0, 1] or less."""
    grid = data.sum(_tally, "counting, shards").grid
    return Histogram.from_tally(grid.binned(grid.equal_mass_of_cell()), event=data.sample.logits.shape[1] == 2)


def _bins(part: PredictionTable, *, edges: np.ndarray) -> Bins:
    scores, outcomes = scores_and_outcomes(*trusted_arrays(*part), quick=True)
    return Bins.from_scores(scores, outcomes, edges, sample_weight=part.sample_weight)


def _class_bins(part: PredictionTable) -> Bins:
    return tally_options(*trusted_arrays(*part), sample_weight=part.sample_weight)


def _tally(part: PredictionTable) -> Tally:
    return Tally.of(*part, sample_weight=part.sample_weight)


def _one_score(data: _Data, *, method: str) -> Calibrator:
    """Collect the log-odds of two classes, then fit the method in memory."""
    if (n_classes := data.sample.logits.shape[1]) != 2:
        raise InputError("logits", f"have two classes for a fit of {method} to shards", f"{n_classes} classes")
    log_odds, labels, weights = (
        np.concatenate(each) for each in zip(*data.sum(_log_odds, "log-odds, shards"), strict=True)
    )
    w = None if data.is_unweighted else weights
    logits = np.stack([np.zeros_like(log_odds), log_odds], axis=1)
    return METHODS[method](logits, labels.astype(np.int64), sample_weight=w)


def _log_odds(part: PredictionTable) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return the log-odds, label and weight of each row, as a list, so that parts can be added."""
    z, y = trusted_arrays(*part)
    w = np.ones(len(y)) if part.sample_weight is None else part.sample_weight
    return [(z[:, 1].astype(np.float64) - z[:, 0], y.astype(np.uint8), w)]


FITS: Mapping[str, Callable[[_Data], Calibrator]] = {
    "temperature": _temperature,
    "vector": partial(_linear, make=Vector, penalty=Penalty(0.0, VECTOR_PENALTY, VECTOR_PENALTY), vector=True),
    "matrix": partial(_linear, make=Matrix, penalty=Penalty(MATRIX_PENALTY, MATRIX_PENALTY, MATRIX_PENALTY)),
    "svs": partial(_fit_structured, vector=True),
    "sms": partial(_fit_structured, vector=False),
    "histogram": _histogram,
    "histogram_mass": _histogram_mass,
    "histogram_ovr": _histogram_ovr,
    "platt": partial(_one_score, method="platt"),
    "beta": partial(_one_score, method="beta"),
    "isotonic": partial(_one_score, method="isotonic"),
}
"""Methods that can be fitted to shards; they equal those of METHODS. The last three need two classes."""
