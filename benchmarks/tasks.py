"""What the libraries are asked to do, at which sizes, and on which data."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np

TRUE_TEMPERATURE = 1.7
LITTLE, MIDDLE, LARGE = (10_000, 10), (10_000, 100), (50_000, 1000)
VOCABULARY = (1000, 50_257)
"""Tokens of a language model."""
ALSO_WIDE = (LITTLE, MIDDLE, LARGE, VOCABULARY)
TINY = (300, 5)
"""Of the smoke run."""

Kind = Literal["metric", "regression", "fit", "pass"]


class Task(NamedTuple):
    """One thing to ask for, by our name of it."""

    name: str
    kind: Kind
    title: str
    sizes: tuple[tuple[int, int], ...] = (LITTLE, MIDDLE, LARGE)


TASKS = {
    task.name: task
    for task in (
        Task("ece", "metric", "Expected calibration error, 15 bins of equal width", ALSO_WIDE),
        Task("aece", "metric", "Adaptive ECE, 15 bins of equal mass"),
        Task("sce", "metric", "Class-wise ECE, 15 bins"),
        Task("smooth_ece", "metric", "Smooth ECE", (LITTLE, MIDDLE)),
        Task("nll", "metric", "Negative log-likelihood", ALSO_WIDE),
        Task("brier", "metric", "Brier score"),
        Task("gaussian_nll", "regression", "Likelihood of Gaussian forecasts", ((10_000, 1), (1_000_000, 1))),
        Task("crps", "regression", "CRPS of Gaussian forecasts", ((10_000, 1), (1_000_000, 1))),
        Task("miscalibration_area", "regression", "Miscalibration area", ((10_000, 1), (1_000_000, 1))),
        Task("temperature", "fit", "Temperature scaling", ALSO_WIDE),
        Task("vector", "fit", "Vector scaling"),
        Task("svs", "fit", "Structured vector scaling", (LITTLE, MIDDLE)),
        Task("sms", "fit", "Structured matrix scaling", (LITTLE, MIDDLE)),
        Task("dirichlet_odir", "fit", "Dirichlet calibration with ODIR, λ = μ = 1", (LITTLE, MIDDLE)),
        Task("ets", "fit", "Ensemble temperature scaling", (LITTLE, MIDDLE)),
        Task("isotonic", "fit", "Isotonic regression of the confidence"),
        Task("isotonic_ovr", "fit", "Isotonic regression of every class", (LITTLE, MIDDLE)),
        Task("histogram", "fit", "Histogram binning of the confidence, 15 bins"),
        Task("histogram_ovr", "fit", "Histogram binning of every class, 15 bins", (LITTLE, MIDDLE)),
        Task("bbq", "fit", "Bayesian binning into quantiles of every class", (LITTLE,)),
        Task("venn_abers", "fit", "Venn–Abers", ((2000, 5),)),
    )
}

PASSES = {
    task.name: task
    for task in (
        Task("table", "pass", "the table of `evaluate`, without intervals", ()),
        Task("evaluate", "pass", "`evaluate`, with 1,000 replicates for its intervals", ()),
        Task("read", "pass", "one sum over all logits", ()),
    )
}
"""Asked of ours alone, for how their time grows."""

CONVENTIONS = {
    ("ece", "torchmetrics"): "its bins are closed on the left, and confidence 1 has a bin of its own",
    ("aece", "netcal"): "its edges are interpolated quantiles, so a few rows lie on the other side of them",
    ("aece", "mapie"): "its edges are interpolated quantiles, so a few rows lie on the other side of them",
    ("smooth_ece", "relplot"): "it stops when the scale is known to a thousandth",
    ("isotonic", "mapie"): "it fits a curve for each predicted class",
    ("isotonic_ovr", "scikit-learn"): "what `CalibratedClassifierCV` does with a frozen classifier",
    ("bbq", "netcal"): "bins of equal width: equal mass raises",
    ("venn_abers", "mapie"): "all its work is in the prediction, so a lap predicts its own rows too",
    ("temperature", "netcal"): "it is given double precision: in single its finite differences vanish",
}
"""Where a library's answer differs by definition, or is asked for in a way that has to be said."""


class Pairs(NamedTuple):
    """Float32 logits of a classifier that is too sure, and labels drawn from its softmax at the true temperature."""

    logits: np.ndarray
    labels: np.ndarray


class Forecasts(NamedTuple):
    """Gaussian forecasts that doubt too little, and what came."""

    mean: np.ndarray
    std: np.ndarray
    targets: np.ndarray


def draw(kind: Kind, n: int, classes: int, seed: int) -> Pairs | Forecasts:
    """The data of a task; the same seed gives every library the same."""
    rng = np.random.default_rng(seed)
    if kind == "regression":
        mean, std = rng.normal(size=n), np.exp(0.4 * rng.normal(size=n))
        return Forecasts(mean, 0.7 * std, mean + std * rng.normal(size=n))
    return draw_pairs(rng, n, classes, modest=kind == "metric")


def draw_pairs(rng: np.random.Generator, n: int, classes: int, *, modest: bool = False) -> Pairs:
    """In chunks, so that the process does not keep memory that a library could then use unseen.

    A modest classifier says too little where it is unsure: errors of both signs, so that it matters which rows a
    metric puts together.
    """
    logits, labels = np.empty((n, classes), np.float32), np.empty(n, np.int64)
    step = max(1, (1 << 20) // classes)
    for start in range(0, n, step):
        z = logits[start : start + step]
        rng.standard_normal(out=z, dtype=np.float32)
        z *= 3
        temperature = np.full((len(z), 1), TRUE_TEMPERATURE, np.float32)
        if modest:
            highest = z.max(axis=1, keepdims=True)
            temperature[highest < np.median(highest)] = 0.6
        gumbel = -np.log(np.maximum(rng.standard_exponential(z.shape, dtype=np.float32), 1e-30))
        labels[start : start + step] = (z / temperature + gumbel).argmax(axis=1)
    return Pairs(logits, labels)
