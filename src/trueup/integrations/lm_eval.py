"""lm-evaluation-harness: calibration as metrics of multiple-choice tasks.

A task in YAML names these functions. The harness imports them; nothing is registered::

    process_results: !function trueup.integrations.lm_eval.process_results
    metric_list:
      - metric: ece
        aggregation: !function trueup.integrations.lm_eval.ece
        higher_is_better: false

`trueup.load("samples_….jsonl")` reads the logged samples of any multiple-choice task instead, with intervals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from trueup._core.errors import InputError
from trueup._core.registry import METRICS

__all__ = ["brier", "ece", "nll", "process_results", "results_of"]

Item: TypeAlias = tuple[Sequence[float], int]
"""The log-likelihoods of a question's options, and the right option."""

_TARGETS = ("label", "gold", "answer", "target")


def process_results(
    doc: Mapping[str, Any], results: Sequence[tuple[float, bool]], *, target: str | None = None
) -> dict[str, object]:
    """Return the item of a question for each metric; the `process_results` of a multiple-choice task.

    Parameters
    ----------
    doc
        The question.
    results
        Log-likelihood of each option, and whether greedy decoding gives it.
    target
        Field of the question with the number of the right option; by default the only one among label, gold, answer
        and target that holds a number.

    Returns
    -------
    dict[str, object]
        For ece, nll and brier, log-likelihoods and the right option. `acc` is 0 or 1.

    Examples
    --------
    >>> process_results({"label": 1}, [(-2.0, False), (-1.0, True)])["ece"]
    ([-2.0, -1.0], 1)
    """
    scores = [float(score) for score, _ in results]
    names = [name for name in _TARGETS if _is_option(doc.get(name), len(scores))] if target is None else [target]
    if len(names) != 1 or not _is_option(doc.get(names[0]), len(scores)):
        fields = ", ".join(doc) or "no fields"
        hint = "name the field of the right option: process_results=results_of(FIELD)"
        raise InputError("doc", f"have the number of one of its {len(scores)} options in one field", fields, hint)
    item = scores, int(doc[names[0]])
    return dict.fromkeys(("ece", "nll", "brier"), item) | {"acc": float(np.argmax(scores) == item[1])}


def results_of(target: str) -> Callable[..., dict[str, object]]:
    """Return `process_results` for tasks whose right option is in another field.

    Parameters
    ----------
    target
        Field of the question with the number of the right option.

    Returns
    -------
    Callable
        A function of a question and its results.
    """
    return partial(process_results, target=target)


def _is_option(value: Any, options: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < options


def _aggregate(metric: str, items: Sequence[Item]) -> float:
    """Score the questions; those with fewer options than others are filled up with absent ones."""
    width = max(len(scores) for scores, _ in items)
    z = np.array([[*scores, *[-np.inf] * (width - len(scores))] for scores, _ in items])
    return float(METRICS[metric](z, np.array([right for _, right in items])))


ece = partial(_aggregate, "ece")
"""The expected calibration error of all questions, from their items."""
nll = partial(_aggregate, "nll")
"""The mean log-loss of all questions in nats, from their items."""
brier = partial(_aggregate, "brier")
"""The Brier score of all questions, from their items."""
