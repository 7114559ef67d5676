"""Events: a class against all others, as a pair of two classes of which class 1 is the event."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueup.core import chunks
from trueup.core.arrays import as_tensors, match_kind, upcast_half
from trueup.core.errors import InputError


def as_event(logits: Any, labels: Any, event: int) -> tuple[Any, Any]:
    """Turn a pair into that of an event: logits (ln(1 − p), ln p) with p = P(class `event`), labels 1[y = event].

    Both logarithms are right to the last digits, however near p is to 0 or 1. Of two classes the logits stay as they
    are, with the columns exchanged for event 0.

    >>> z, y = as_event(np.log([[0.2, 0.3, 0.5]]), [2], 2)
    >>> np.exp(z), y
    (array([[0.5, 0.5]]), array([1]))
    """
    z, y = as_tensors(logits, labels)
    classes = z.shape[1]
    if isinstance(event, bool) or not isinstance(event, (int, np.integer)) or not 0 <= event < classes:
        raise InputError("event", f"be a class, 0..{classes - 1}", repr(event))
    outcome = (y == int(event)).to(torch.int64)
    if classes == 2:
        two = z if event == 1 else z.flip(1)
    else:
        two = torch.cat([_log_odds_pair(z[rows], int(event)) for rows in chunks.row_chunks(len(z), classes)])
    return match_kind(two, logits), match_kind(outcome, logits)


def _log_odds_pair(z: Tensor, event: int) -> Tensor:
    """(ln(1 − p), ln p), each as a difference of logarithms of sums: nothing cancels."""
    z = upcast_half(z)
    others = torch.cat([z[:, :event], z[:, event + 1 :]], dim=1)
    pair = torch.stack([torch.logsumexp(others, dim=1), z[:, event]], dim=1)
    return torch.log_softmax(pair, dim=1)
