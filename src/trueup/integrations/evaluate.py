"""Hugging Face's `evaluate`: a metric with calibration errors and their intervals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np

from trueup.convert import from_log_odds, from_probs
from trueup.integrations.tracking import flat_scores
from trueup.metrics.table import evaluate as score

try:
    import datasets
    import evaluate
except ImportError:
    raise ImportError("trueup.integrations.evaluate needs Hugging Face's evaluate: pip install evaluate") from None

__all__ = ["Calibration"]

Scores: TypeAlias = Any
"""One number per row, or one per row and class."""


class Calibration(evaluate.Metric):
    """A metric for Hugging Face's `evaluate`: calibration errors, proper scores and their intervals.

    It collects batches by `add_batch(predictions=…, references=…)`, and works in `evaluate.combine`. The predictions
    are scores, not classes: probabilities, or logits with `input="logits"`. For two classes they may also be one number
    per row, the probability or the log-odds of class 1. The references are class numbers.

    Parameters
    ----------
    metrics
        Names of METRICS; by default the usual ones.
    input
        What the predictions hold: "probs" or "logits".
    event
        The predictions are one number per row.
    **options
        Options of `evaluate.Metric`, such as `cache_dir` and `num_process`.

    Examples
    --------
    >>> metric = Calibration(["ece", "nll"], input="logits")
    >>> metric.add_batch(predictions=[[2.0, 0.0], [0.0, 1.0]], references=[0, 1])
    >>> {name: round(value, 4) for name, value in metric.compute().items() if name in ("ece", "nll", "rows")}
    {'rows': 2.0, 'ece': 0.1941, 'nll': 0.2201}
    """

    def __init__(
        self,
        metrics: Sequence[str] | None = None,
        *,
        input: Literal["probs", "logits"] = "probs",
        event: bool = False,
        **options: Any,
    ) -> None:
        if input not in ("probs", "logits"):
            raise ValueError(f'input must be "probs" or "logits", got {input!r}')
        self.metrics, self.input, self.event = metrics, input, event
        super().__init__(**options)

    def _info(self) -> evaluate.MetricInfo:
        number = datasets.Value("float64")
        scores = number if self.event else datasets.Sequence(number)
        return evaluate.MetricInfo(
            description="Calibration errors, proper scores and their intervals.",
            citation="",
            inputs_description="predictions: scores of the classes; references: class numbers.",
            features=datasets.Features({"predictions": scores, "references": datasets.Value("int64")}),
        )

    def _compute(self, predictions: Scores, references: Sequence[int]) -> dict[str, float]:
        values = np.asarray(predictions, np.float64)
        if self.input == "probs":
            values = from_probs(values, renormalise=True, name="predictions")
        elif self.event:
            values = from_log_odds(values, name="predictions")
        return flat_scores(score(values, np.asarray(references), metrics=self.metrics))
