"""Events: a class against all others, as a pair of two classes of which class 1 is the event."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueup.core import chunks
from trueup.core.arrays import as_logits, as_tensors, find_absent, match_kind, upcast_half
from trueup.core.errors import InputError

_MOST_NAMED = 12
"""Of so many classes an error lists them all."""


def event_class(event: int | str, classes: int, names: Sequence[str] | None = None) -> int:
    """The number of the class that is meant: by its number, or by its name where the classes have names.

    >>> event_class("ill", 2, ["well", "ill"])
    1
    """
    if names is not None and len(names) != classes:
        raise InputError("names", f"have {classes} entries, one a class", str(len(names)))
    if names is not None and isinstance(event, str) and event in names:
        return list(names).index(event)
    if isinstance(event, bool) or not isinstance(event, (int, np.integer)) or not 0 <= event < classes:
        known = "" if names is None else f": {_listing(names)}"
        hint = "names= names the classes" if isinstance(event, str) and names is None else None
        raise InputError("event", f"be a class, 0..{classes - 1}{known}", repr(event), hint)
    return int(event)


def event_name(event: int | str | None, classes: int, names: Sequence[str] | None = None) -> str:
    """How the event is called; None is class 1 of two.

    >>> event_name(3, 5), event_name(None, 2, ["well", "ill"])
    ('class 3', 'ill')
    """
    number = 1 if event is None else event_class(event, classes, names)
    return f"class {number}" if names is None or len(names) != classes else str(names[number])


def _listing(names: Sequence[str]) -> str:
    few = ", ".join(map(str, names[:_MOST_NAMED]))
    return f"{few}, …" if len(names) > _MOST_NAMED else few


def as_event(logits: Any, labels: Any, event: int | str, *, names: Sequence[str] | None = None) -> tuple[Any, Any]:
    """Turn a pair into that of an event: logits (ln(1 − p), ln p) with p = P(class `event`), labels 1[y = event].

    Both logarithms are right to the last digits, however near p is to 0 or 1. Of two classes the logits stay as they
    are, with the columns exchanged for event 0. With `names` of the classes the event may be one of them.

    >>> z, y = as_event(np.log([[0.2, 0.3, 0.5]]), [2], 2)
    >>> np.exp(z), y
    (array([[0.5, 0.5]]), array([1]))
    """
    z, y = as_tensors(logits, labels)
    number = event_class(event, z.shape[1], names)
    outcome = (y == number).to(torch.int64)
    return match_kind(_two_columns(z, number), logits), match_kind(outcome, logits)


def event_logits(logits: Any, event: int | str, *, names: Sequence[str] | None = None) -> Any:
    """The logits of `as_event`, where there are no labels: what a calibrator that was fitted to an event takes.

    >>> np.exp(event_logits(np.log([[0.2, 0.3, 0.5]]), 2))
    array([[0.5, 0.5]])
    """
    z = as_logits(logits)
    return match_kind(_two_columns(z, event_class(event, z.shape[1], names)), logits)


def _two_columns(z: Tensor, event: int) -> Tensor:
    classes = z.shape[1]
    if classes == 2:
        return z if event == 1 else z.flip(1)
    if find_absent(z) is not None and bool((gone := z[:, event] == -torch.inf).any()):
        got = f"absent in row {int(gone.nonzero()[0])} (-inf), and in {int(gone.sum())} rows in all"
        raise InputError("event", "be an option of every row", got, "leave out the rows that do not have it")
    return torch.cat([_log_odds_pair(z[rows], event) for rows in chunks.row_chunks(len(z), classes)])


def _log_odds_pair(z: Tensor, event: int) -> Tensor:
    """(ln(1 − p), ln p), each as a difference of logarithms of sums: nothing cancels."""
    z = upcast_half(z)
    others = torch.cat([z[:, :event], z[:, event + 1 :]], dim=1)
    pair = torch.stack([torch.logsumexp(others, dim=1), z[:, event]], dim=1)
    return torch.log_softmax(pair, dim=1)
