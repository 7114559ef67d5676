"""Scores for experiment trackers and model cards: flat numbers, and a section in Markdown."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

from trueup._core import __version__
from trueup._core.formatting import format_percent
from trueup.metrics.table import Scores
from trueup.reports.style import label

__all__ = ["flat_scores", "log_scores", "model_card"]

Run: TypeAlias = Any
"""A run of a tracker with `log` and `summary`, such as `wandb.init()` returns."""


def flat_scores(scores: Scores, *, prefix: str = "") -> dict[str, float]:
    """Write a table as numbers by name, the form that experiment trackers take.

    Parameters
    ----------
    scores
        The table of `trueup.evaluate` or `trueup.compare`.
    prefix
        First part of every name, such as ``"val/"``.

    Returns
    -------
    dict[str, float]
        Per metric `ece`, `ece_low` and `ece_high`; `p_value` of calibration; `rows`. With several methods their names
        come first. Undefined numbers are left out.

    Examples
    --------
    >>> import numpy as np
    >>> from trueup import evaluate
    >>> z = np.random.default_rng(0).normal(size=(200, 3))
    >>> numbers = flat_scores(evaluate(z, z.argmax(axis=1), metrics=["ece", "nll"]), prefix="val/")
    >>> sorted(numbers)
    ['val/ece', 'val/ece_high', 'val/ece_low', 'val/nll', 'val/nll_high', 'val/nll_low', 'val/p_value', 'val/rows']
    """
    numbers: dict[str, float] = {f"{prefix}rows": float(scores.rows)}
    for method in scores.methods:
        start = prefix if len(scores.methods) == 1 else f"{prefix}{method}/"
        for metric, interval in scores.values[method].items():
            ends = {"": interval.value, "_low": interval.low, "_high": interval.high}
            numbers |= {f"{start}{metric}{end}": float(value) for end, value in ends.items()}
        numbers[f"{start}p_value"] = float(scores.tests[method].p_value)
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


def log_scores(run: Run, scores: Scores, *, prefix: str = "", **options: Any) -> None:
    """Log a table to a run of Weights & Biases: its numbers, and the verdict in the run's summary.

    Parameters
    ----------
    run
        The run that `wandb.init()` returned.
    scores
        The table of `trueup.evaluate` or `trueup.compare`.
    prefix
        First part of every name, such as ``"val/"``.
    **options
        Options of `run.log`, such as `step`.
    """
    run.log(flat_scores(scores, prefix=prefix), **options)
    for method in scores.methods:
        name = "verdict" if len(scores.methods) == 1 else f"{method}/verdict"
        run.summary[f"{prefix}{name}"] = scores.verdict(method)


def model_card(scores: Scores, *, data: str | None = None, heading: str = "## Calibration") -> str:
    """Write the section of a model card on calibration, in Markdown.

    Parameters
    ----------
    scores
        The table of `trueup.evaluate` or `trueup.compare`.
    data
        Description of the rows, such as ``"the test split of CIFAR-10"``.
    heading
        First line of the section.

    Returns
    -------
    str
        The verdict with the test of calibration, and a table with intervals.

    Examples
    --------
    >>> import numpy as np
    >>> from trueup import evaluate
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(5000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> print(model_card(evaluate(3 * z, y, metrics=["ece", "nll"]), data="5,000 simulated rows"))
    ## Calibration
    <BLANKLINE>
    It says 82.1 % on average and is right 59.4 % of the time. It is miscalibrated and overconfident
    (a calibrated network would show an ECE of 0.01...; 7 tests, corrected p ≤ 0.001).
    <BLANKLINE>
    | metric | value | 95 % interval |
    |---|---|---|
    | ECE | 0.2263 | 0.21... to 0.2... |
    | NLL (nats) | 1.2148 | 1.1... to 1.2... |
    <BLANKLINE>
    Measured on 5,000 simulated rows (5,000 rows, 3 classes) with trueup ...
    """
    several, parts = len(scores.methods) > 1, [heading]
    for method in scores.methods:
        parts += [f"### {method}"] if several else []
        parts.append(scores.verdict(method))
        table = [f"| metric | value | {format_percent(scores.level)} interval |", "|---|---|---|"]
        for metric, i in scores.values[method].items():
            digits = scores.digits(metric)
            numbers = [f"{x:.{digits}f}" if math.isfinite(x) else "–" for x in (i.value, i.low, i.high)]
            table.append(f"| {label(metric)} | {numbers[0]} | {numbers[1]} to {numbers[2]} |")
        parts.append("\n".join(table))
    rows = f"{scores.rows:,} rows, {scores.n_classes:,} classes"
    source = f"{data} ({rows})" if data else rows
    return "\n\n".join([*parts, f"Measured on {source} with trueup {__version__}."])
