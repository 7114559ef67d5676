"""Several labels at once: each is an event of its own, and those of one row are correlated."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from trueup.core.arrays import from_binary, from_confidence, match_kind
from trueup.core.conversion import to_tensor
from trueup.core.errors import InputError


class LabelEvents(NamedTuple):
    """Labels of rows as events, a pair of two classes with the row and the label each comes from."""

    logits: Any
    """(m, 2): the event is class 1."""
    labels: Any
    """(m,): 1 where the row has the label."""
    row: np.ndarray
    label: np.ndarray


def label_events(logits: Any, targets: Any, *, ignore_index: int = -100, probs: bool = False) -> LabelEvents:
    """Turn log-odds (n, labels) and targets (n, labels), 1, 0 or ignored, into the pair of events (m, 2), (m,).

    Entries whose target is `ignore_index` or NaN are left out; the rest come row by row. With `probs` the numbers are
    probabilities.

    >>> events = label_events([[2.0, -1.0], [0.5, 3.0]], [[1, 0], [-100, 1]])
    >>> events.labels, events.row, events.label
    (array([1, 0, 1]), array([0, 0, 1]), array([0, 1, 1]))
    """
    x, t = to_tensor(logits, "logits"), to_tensor(targets, "targets")
    if x.ndim != 2:
        raise InputError("logits", "have shape (n, labels)", str(tuple(x.shape)))
    if t.shape != x.shape:
        raise InputError(
            "targets", f"have the logits' shape {tuple(x.shape)}", str(tuple(t.shape)), "one 0 or 1 for each label"
        )
    t = t.to(x.device)
    kept = t != ignore_index
    if t.is_floating_point():
        kept &= ~torch.isnan(t)
    bad = kept & (t != 0) & (t != 1)
    if bool(bad.any()):
        at = tuple(int(i) for i in bad.nonzero()[0])
        got = f"{t[at].item():g} at {list(at)}"
        raise InputError(
            "targets", f"be 0 or 1, or {ignore_index} where it is not known", got, "ignore_index names another mark"
        )
    row, label = (i.cpu().numpy() for i in kept.nonzero(as_tuple=True))
    values = x[kept]
    pair = from_confidence(values, name="probs") if probs else from_binary(values, name="logits")
    return LabelEvents(match_kind(pair, logits), match_kind(t[kept].to(torch.int64), logits), row, label)
