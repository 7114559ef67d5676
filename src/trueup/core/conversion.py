"""Other things than logits as a pair of them: probabilities, stated confidences, binary scores, the likeliest answers,
tokens and pixels, one event of several classes, and several labels at once.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import numpy as np
import torch
from torch import Tensor

from trueup.core import native
from trueup.core.arrays import (
    MIN_PADDING,
    ROUNDING,
    A,
    as_logits,
    as_tensors,
    check_finite,
    find_absent,
    is_half,
    lies_in_unit_interval,
    match_kind,
    shape_of,
    to_tensor,
    upcast_half,
    warn_users,
)
from trueup.core.errors import Hint, InputError, LooksLikeProbabilities
from trueup.core.row_scores import event_class

FLOOR = 1e-6
"""What an exact zero becomes where there is no other probability below a half, unless a floor is given."""

LEAST_FLOOR = 1e-45
"""What it becomes at least: about the smallest positive number of single precision."""

CERTAIN = 1e-4
"""By how much a stated confidence of exactly 0 or 1 is moved at most, unless a floor is given."""

_ROUNDED_SUM = 0.1
"""How far a row of rounded probabilities may be from a sum of one to be divided by it."""

_ROUNDED_TOP = 1e-2
"""How far above 1 the largest probabilities of a row may sum: services round log-probabilities, or mix precisions."""

_FEW_SCORES = 8
"""Fewer log-odds may all lie between 0 and 1 by chance."""


def from_probs(probs: A, *, floor: float | None = None, renormalise: bool = False, name: str = "probs") -> A:
    """Turn probabilities (n, classes) into logits: log p, since softmax(log p) = p.

    Rounding up to 1e-6 is tolerated, in a row's sum 1e-6 for every thousand classes, since a float32 softmax of a whole
    vocabulary strays that far (for half precision, up to the type's own epsilon); anything worse is refused.
    Exact zeros, as in the votes of a forest, are raised to half the smallest positive probability, which is the
    resolution of the data (to 1e-6 where all others are above a half), and a warning says so. What is positive stays:
    naive Bayes is not as sure at 1e-6 as at 1e-30, and maps can use that. With `floor` nothing is smaller than that:
    give later, smaller batches the floor of the calibration set (`resolution`).
    With `renormalise` rows that sum to nearly 1, as probabilities rounded for a file do, are divided by their sum; a
    sum outside [0.9, 1.1] is refused all the same. NaN is an option that the row does not have, and becomes −∞; the
    others sum to 1.

    >>> from_probs(np.array([[0.5, 0.5]]))
    array([[-0.69314718, -0.69314718]])
    >>> np.exp(from_probs(np.array([[0.9, 0.1], [1.0, 0.0]]), floor=0.01))
    array([[0.9 , 0.1 ],
           [1.  , 0.01]])
    """
    _check_floor(floor)
    p = to_tensor(probs, name)
    if p.ndim != 2 or p.shape[1] < 2:
        raise ValueError(f"{name} must have shape (n, classes) with at least 2 classes, got {shape_of(p)}")
    dtype, half = p.dtype, is_half(p.dtype)
    tolerance = torch.finfo(dtype).eps if half else ROUNDING
    in_sum = tolerance if half else ROUNDING * max(1.0, p.shape[1] / 1000)
    p = p.float() if half else p
    absent = torch.isnan(p) if p.is_floating_point() and bool(torch.isnan(p.sum())) else None
    p = check_finite(p if absent is None else p.masked_fill(absent, 0.0), name)
    if absent is not None and bool((few := p.shape[1] - absent.sum(dim=1) < 2).any()):
        got = f"fewer in row {int(few.nonzero()[0])} (an absent one is NaN, or empty in a table)"
        raise InputError(name, "have at least 2 options in each row", got)
    if p.numel():
        low, high = p.min().item(), p.max().item()
        if low < -tolerance or high > 1 + tolerance:
            raise InputError(name, "lie in [0, 1]", f"{low:.6g}..{high:.6g}", Hint.NOT_PROBABILITIES)
        total = p.sum(dim=1, dtype=torch.float64)
        off = (total - 1).abs()
        row = int(off.argmax())
        if off[row] > (_ROUNDED_SUM if renormalise else in_sum):
            hint = Hint.RENORMALISE if not renormalise and off[row] <= _ROUNDED_SUM else None
            raise InputError(name, "sum to 1 in each row", f"{total[row].item():.8g} in row {row}", hint)
        if renormalise:
            p = (p / total[:, None]).to(p.dtype)
    gone = 0 if absent is None else int(absent.sum())
    if floor is None and (zeros := int((p <= 0).sum()) - gone):
        warn_of_zeros(zeros, p.numel() - gone, floor := resolution(p))
    if floor is not None:
        p = (p.double() if floor < torch.finfo(p.dtype).tiny else p).clamp(min=floor)
    logits = torch.log(p)
    logits = logits if absent is None else logits.masked_fill(absent, -torch.inf)
    return match_kind(logits.to(dtype), probs)


def from_confidence(confidence: A, *, floor: float | None = None, name: str = "confidence") -> A:
    """Turn stated confidences c (n,), the claimed probability of being right, into logits (ln(1 − c), ln c).

    The labels that go with them are 1 where the claim came true and 0 where it did not. Nothing is turned over: a
    confidence below ½ stays the probability of class 1. It serves a language model's or a judge's stated confidence, a
    risk score, a forecast. Confidences of exactly 0 or 1 are moved inwards by 1e-4, or by half of the distance that the
    nearest other one has if that is less, and a warning says so; or by `floor`. That hardly changes their mean; curves
    of the log-odds, such as Platt scaling, fit better with a larger floor, `auto` finds its own.

    >>> np.exp(from_confidence(np.array([0.9, 0.25])))
    array([[0.1 , 0.9 ],
           [0.75, 0.25]])
    """
    _check_floor(floor)
    x = to_tensor(confidence, name)
    if x.ndim == 2 and x.shape[1] == 1:
        x = x[:, 0]
    if x.ndim != 1:
        raise ValueError(f"{name} must have shape (n,) or (n, 1), got {shape_of(x)}")
    dtype = x.dtype if x.is_floating_point() else torch.float64
    tolerance = torch.finfo(dtype).eps if is_half(dtype) else ROUNDING
    c = check_finite(x.double(), name)
    if len(c):
        low, high = c.min().item(), c.max().item()
        if low < -tolerance or high > 1 + tolerance:
            hint = Hint.PER_CENT if low >= 0 and 1 < high <= 100 else Hint.LOG_ODDS
            raise InputError(name, "lie in [0, 1]", f"{low:.6g}..{high:.6g}", hint)
    both = torch.stack([1 - c, c], dim=1).clamp(min=0.0)
    if floor is None and (zeros := int((both <= 0).sum())):
        floor = min(CERTAIN, resolution(both, least=FLOOR))
        warn_of_certain(zeros, len(c), floor)
    return match_kind(torch.log(both if floor is None else both.clamp(min=floor)).to(dtype), confidence)


def _check_floor(floor: float | None) -> None:
    if floor is not None and not 0 < floor < 0.5:
        raise InputError("floor", "lie between 0 and 0.5", f"{floor}")


def resolution(probs: Any, *, least: float = LEAST_FLOOR) -> float:
    """Half the smallest positive probability, and at least `least`: what an exact zero may stand for.

    Where none is below a half it is 1e-6.

    >>> resolution(np.array([[0.9, 0.1], [1.0, 0.0]]))
    0.05
    """
    p = to_tensor(probs, "probs")
    smallest = float(torch.where(p > 0, p, 1.0).min()) if p.numel() else 1.0
    return FLOOR if smallest > 0.5 else max(smallest / 2, least)


def warn_of_zeros(zeros: int, numbers: int, floor: float) -> None:
    """Say that exact zeros among probabilities were raised, and to what."""
    warnings.warn(
        f"{zeros} exact zeros among {numbers} probabilities were raised to {floor:.4g}, "
        + ("as no other one is below a half" if floor == FLOOR else "about half the smallest positive one"),
        stacklevel=3,
    )


def warn_of_certain(certain: int, rows: int, floor: float) -> None:
    """Say that confidences of exactly 0 or 1 were moved, and by how much."""
    warnings.warn(f"{certain} of {rows} confidences are exactly 0 or 1; they were moved by {floor:.4g}", stacklevel=3)


def from_topk(log_probs: A, *, floor: float = FLOOR, name: str = "log_probs") -> A:
    """Turn the log-probabilities of the k likeliest answers (n, k) into logits (n, k + 1): the last is of all others.

    That is ln(1 − Σp), which never falls below ln `floor`: of probabilities that sum to 1 up to rounding it would be
    noise. The labels that go with them are the place of the right answer among the k, or k where it is none of them.
    A row with fewer answers has −∞ in the places left over; so is −9999 read, which some services write for what they
    leave out.

    >>> np.exp(from_topk(np.log([[0.7, 0.2], [0.5, 0.25]])))
    array([[0.7 , 0.2 , 0.1 ],
           [0.5 , 0.25, 0.25]])
    """
    _check_floor(floor)
    x = to_tensor(log_probs, name)
    if x.ndim != 2 or not x.shape[1]:
        raise InputError(name, "have shape (n, k)", shape_of(x))
    if not x.is_floating_point():
        raise ValueError(f"{name} must be floating point, got {x.dtype}".replace("torch.", ""))
    double = x.double()
    double = double.masked_fill(double <= -MIN_PADDING, -torch.inf)
    check_finite(double.masked_fill(double == -torch.inf, 0.0), name)
    total = double.exp().sum(dim=1, keepdim=True)
    slack = max(_ROUNDED_TOP, torch.finfo(x.dtype).eps * x.shape[1])
    if len(x) and bool((total > 1 + slack).any()):
        row = int(total[:, 0].argmax())
        got = f"{total[row].item():.6g} in row {row}"
        raise InputError(name, "be logarithms of probabilities that sum to at most 1 in each row", got)
    # Where rounding, or the floor, makes the sum exceed one, the row is divided by it.
    rest = (1 - total).clamp(min=floor)
    logits = torch.cat([double, rest.log()], dim=1) - (total + rest).log()
    return match_kind(logits.to(x.dtype), log_probs)


def from_binary(scores: A, *, name: str = "scores") -> A:
    """Turn a binary score x (n,), the log-odds of class 1, into logits (0, x).

    >>> from_binary(np.array([1.5, -0.5]))
    array([[ 0. ,  1.5],
           [ 0. , -0.5]])
    """
    x = to_tensor(scores, name)
    if x.ndim == 2 and x.shape[1] == 1:
        x = x[:, 0]
    if x.ndim != 1:
        raise ValueError(f"{name} must have shape (n,) or (n, 1), got {shape_of(x)}")
    x = check_finite(x, name)
    warn_of_probabilities(x, name)
    return match_kind(torch.stack([torch.zeros_like(x), x], dim=1), scores)


def warn_of_probabilities(x: Tensor, name: str) -> None:
    """Warn where log-odds (n,) look like probabilities."""
    if len(x) >= _FEW_SCORES and lies_in_unit_interval(x[:_FEW_SCORES]) and lies_in_unit_interval(x):
        warn_users(
            f"all {name} lie in [0, 1] like probabilities, but are read as log-odds; probabilities of class 1 go "
            "through from_confidence",
            LooksLikeProbabilities,
        )


@overload
def flatten(
    logits: A,
    labels: Any,
    *,
    classes: Literal["first", "last"] | None = None,
    ignore_index: int = -100,
    clusters: None = None,
) -> tuple[A, A]: ...


@overload
def flatten(
    logits: A,
    labels: Any,
    *,
    classes: Literal["first", "last"] | None = None,
    ignore_index: int = -100,
    clusters: Any,
) -> tuple[A, A, np.ndarray]: ...


def flatten(
    logits: A,
    labels: Any,
    *,
    classes: Literal["first", "last"] | None = None,
    ignore_index: int = -100,
    clusters: Any = None,
) -> tuple[Any, ...]:
    """Flatten tokens or pixels to a pair (m, K), (m,), leaving out what is labelled `ignore_index`.

    `classes="last"` reads logits as (n, …, K), as language models give them; `classes="first"` as (n, K, …), as
    segmentation networks do. It must be named, because a wrong guess would be silent. With `clusters`, which has a
    value for each of the n texts or images, or is True for their numbers, a third array (m,) says which one each row is
    of: rows of one image are correlated, and `evaluate(logits, labels, clusters=…)` has intervals that know it.

    >>> z, y = flatten(np.zeros((2, 3, 5)), np.array([[0, 4, -100], [1, -100, -100]]), classes="last")
    >>> z.shape, y
    ((3, 5), array([0, 4, 1]))
    >>> flatten(np.zeros((2, 5, 3)), np.array([[0, 4, -100], [1, 2, 2]]), classes="first", clusters=["a", "b"])[2]
    array(['a', 'a', 'b', 'b', 'b'], dtype='<U1')
    """
    z, y = to_tensor(logits, "logits"), to_tensor(labels, "labels")
    z = classes_last(z, classes)
    if tuple(z.shape[:-1]) != tuple(y.shape):
        raise ValueError(f"labels must have shape {tuple(z.shape[:-1])} to match the logits, got {shape_of(y)}")
    n = len(y)
    y = y.to(z.device).reshape(-1)
    kept = y != ignore_index
    each = len(y) // max(n, 1)
    z, y = as_tensors(z.reshape(-1, z.shape[-1])[kept], y[kept])
    pair: tuple[Any, Any] = (match_kind(z, logits), match_kind(y, logits))
    if clusters is None or clusters is False:
        return pair
    ids = np.arange(n) if clusters is True else np.asarray(clusters)
    if ids.shape != (n,):
        raise InputError("clusters", f"have {n} entries, one for each text or image", str(ids.shape))
    return *pair, ids[np.flatnonzero(kept.cpu().numpy()) // max(each, 1)]


def classes_last(logits: Tensor, classes: Literal["first", "last"] | None) -> Tensor:
    """Logits of any dimension with the classes as their last, (n, …, K); `classes` says where they are.

    >>> classes_last(torch.zeros(2, 5, 3, 4), "first").shape
    torch.Size([2, 3, 4, 5])
    """
    if logits.ndim < 2:
        raise ValueError(f"logits must have at least 2 dimensions, got {shape_of(logits)}")
    if classes not in ("first", "last") and not (classes is None and logits.ndim == 2):
        raise ValueError(
            f'classes must be "first" (n, K, …) or "last" (n, …, K) for logits {shape_of(logits)}, got {classes!r}'
        )
    return logits.movedim(1, -1) if classes == "first" else logits


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
    return torch.cat([_log_odds_pair(z[rows], event) for rows in native.row_chunks(len(z), classes)])


def _log_odds_pair(z: Tensor, event: int) -> Tensor:
    """(ln(1 − p), ln p), each as a difference of logarithms of sums: nothing cancels."""
    z = upcast_half(z)
    others = torch.cat([z[:, :event], z[:, event + 1 :]], dim=1)
    pair = torch.stack([torch.logsumexp(others, dim=1), z[:, event]], dim=1)
    return torch.log_softmax(pair, dim=1)


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
