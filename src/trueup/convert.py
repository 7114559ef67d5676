"""Other things than logits as a pair of them: probabilities, log-odds, the likeliest answers, tokens and pixels, one
event of several classes, and several labels at once. The kind of array that comes in goes out.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from trueup._core import arrays, native
from trueup._core.arrays import ROUNDING, as_arrays, check_finite, match_kind, shape_of, to_array, upcast_half
from trueup._core.errors import Hint, InputError, LooksLikeProbabilities
from trueup._core.row_scores import event_class

ClassAxis: TypeAlias = Literal["first", "last"] | None
"""Where the classes are in outputs of more than two dimensions: (n, K, …) or (n, …, K)."""

DEFAULT_FLOOR = 1e-6
"""What an exact zero becomes where there is no other probability below a half, unless a floor is given."""

MIN_FLOOR = 1e-45
"""What it becomes at least: about the smallest positive number of single precision."""

MAX_EVENT_FLOOR = 1e-4
"""By how much a probability of an event of exactly 0 or 1 is moved at most, unless a floor is given."""

_ROUNDED_SUM = 0.1
"""How far a row of rounded probabilities may be from a sum of one to be divided by it."""

_ROUNDED_TOP = 1e-2
"""How far above 1 the largest probabilities of a row may sum: services round log-probabilities, or mix precisions."""

_FEW_SCORES = 8
"""Fewer log-odds may all lie between 0 and 1 by chance."""


_HALF_PRECISION = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
"""The relative rounding of the types of 16 bits."""


def from_probs(probs: Any, *, floor: float | None = None, renormalise: bool = False, name: str = "probs") -> Any:
    """Turn probabilities (n, classes) into logits: log p, since softmax(log p) = p.

    Probabilities (n,) or (n, 1) are those of class 1, an event: a risk, a forecast, a stated confidence. They become
    (ln(1 − p), ln p), and the labels that go with them are 1 where it happened and 0 where it did not. Those of exactly
    0 or 1 are moved inwards by 1e-4, or by half of the distance that the nearest other one has if that is less, and a
    warning says so; or by `floor`. That hardly changes their mean; curves of the log-odds, such as Platt scaling, fit
    better with a larger floor.

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
    >>> np.exp(from_probs(np.array([0.9, 0.25])))
    array([[0.1 , 0.9 ],
           [0.75, 0.25]])
    """
    _check_floor(floor)
    p = to_array(probs, name)
    half = _HALF_PRECISION.get(str(getattr(probs, "dtype", "")).removeprefix("torch."))
    if p.ndim == 1 or (p.ndim == 2 and p.shape[1] == 1):
        return match_kind(_event_pair(p.ravel(), floor, name, half or ROUNDING), probs)
    if p.ndim != 2:
        raise ValueError(f"{name} must have shape (n, classes), or (n,) for one event, got {shape_of(p)}")
    kind, p = p.dtype, upcast_half(p)
    absent = np.isnan(p) if kind.kind == "f" and np.isnan(p.sum()) else None
    p = check_finite(p if absent is None else np.where(absent, p.dtype.type(0), p), name)
    if absent is not None and (few := p.shape[1] - absent.sum(axis=1) < 2).any():
        got = f"fewer in row {int(np.argmax(few))} (an absent one is NaN, or empty in a table)"
        raise InputError(name, "have at least 2 options in each row", got)
    if p.size:
        _check_range(p, half or ROUNDING, name)
        total = p.sum(axis=1, dtype=np.float64)
        off = np.abs(total - 1)
        row = int(off.argmax())
        in_sum = half or ROUNDING * max(1.0, p.shape[1] / 1000)
        if off[row] > (_ROUNDED_SUM if renormalise else in_sum):
            hint = Hint.RENORMALISE if not renormalise and off[row] <= _ROUNDED_SUM else None
            raise InputError(name, "sum to 1 in each row", f"{total[row]:.8g} in row {row}", hint)
        if renormalise:
            p = (p / total[:, None]).astype(p.dtype)
    gone = 0 if absent is None else int(absent.sum())
    if floor is None and (zeros := int((p <= 0).sum()) - gone):
        warn_of_zeros(zeros, p.size - gone, floor := resolution(p))
    if floor is not None:
        p = np.maximum(p.astype(np.float64) if floor < np.finfo(p.dtype).tiny else p, floor)
    with np.errstate(divide="ignore"):
        logits = np.log(p).astype(kind)
    if absent is not None:
        logits[absent] = -np.inf
    return match_kind(logits, probs)


def _event_pair(p: np.ndarray, floor: float | None, name: str, tolerance: float) -> np.ndarray:
    """Logits (ln(1 − p), ln p) of the probabilities of an event."""
    kind = p.dtype if p.dtype.kind == "f" else np.dtype(np.float64)
    p = check_finite(p.astype(np.float64), name)
    if len(p):
        _check_range(p, tolerance, name, of_event=True)
    both = np.maximum(np.stack([1 - p, p], axis=1), 0.0)
    if floor is None and (zeros := int((both <= 0).sum())):
        floor = min(MAX_EVENT_FLOOR, resolution(both, least=DEFAULT_FLOOR))
        warn_of_certain(zeros, len(p), floor)
    return np.log(both if floor is None else np.maximum(both, floor)).astype(kind)


def _check_range(p: np.ndarray, tolerance: float, name: str, *, of_event: bool = False) -> None:
    low, high = float(p.min()), float(p.max())
    if low < -tolerance or high > 1 + tolerance:
        event_hint = Hint.PER_CENT if low >= 0 and 1 < high <= 100 else Hint.LOG_ODDS
        hint = event_hint if of_event else Hint.NOT_PROBABILITIES
        raise InputError(name, "lie in [0, 1]", f"{low:.6g}..{high:.6g}", hint)


def _check_floor(floor: float | None) -> None:
    if floor is not None and not 0 < floor < 0.5:
        raise InputError("floor", "lie between 0 and 0.5", f"{floor}")


def resolution(probs: Any, *, least: float = MIN_FLOOR) -> float:
    """Half the smallest positive probability, and at least `least`: what an exact zero may stand for.

    Where none is below a half it is 1e-6.

    >>> resolution(np.array([[0.9, 0.1], [1.0, 0.0]]))
    0.05
    """
    p = to_array(probs, "probs")
    smallest = float(p.min(where=p > 0, initial=1.0))
    return DEFAULT_FLOOR if smallest > 0.5 else max(smallest / 2, least)


def warn_of_zeros(zeros: int, numbers: int, floor: float) -> None:
    """Say that exact zeros among probabilities were raised, and to what."""
    warnings.warn(
        f"{zeros} exact zeros among {numbers} probabilities were raised to {floor:.4g}, "
        + ("as no other one is below a half" if floor == DEFAULT_FLOOR else "about half the smallest positive one"),
        stacklevel=3,
    )


def warn_of_certain(certain: int, rows: int, floor: float) -> None:
    """Say that probabilities of an event of exactly 0 or 1 were moved, and by how much."""
    arrays.warn_users(f"{certain} of {rows} confidences are exactly 0 or 1; they were moved by {floor:.4g}")


def from_topk(log_probs: Any, *, floor: float = DEFAULT_FLOOR, name: str = "log_probs") -> Any:
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
    x = to_array(log_probs, name)
    if x.ndim != 2 or not x.shape[1]:
        raise InputError(name, "have shape (n, k)", shape_of(x))
    if x.dtype.kind != "f":
        raise ValueError(f"{name} must be floating point, got {x.dtype}")
    double = x.astype(np.float64)
    double[double <= -arrays.MIN_PADDING] = -np.inf
    check_finite(np.where(double == -np.inf, 0.0, double), name)
    total = np.exp(double).sum(axis=1, keepdims=True)
    slack = max(_ROUNDED_TOP, float(np.finfo(x.dtype).eps) * x.shape[1])
    if len(x) and (total > 1 + slack).any():
        row = int(total[:, 0].argmax())
        got = f"{total[row, 0]:.6g} in row {row}"
        raise InputError(name, "be logarithms of probabilities that sum to at most 1 in each row", got)
    # Where rounding, or the floor, makes the sum exceed one, the row is divided by it.
    rest = np.maximum(1 - total, floor)
    logits = np.concatenate([double, np.log(rest)], axis=1) - np.log(total + rest)
    return match_kind(logits.astype(x.dtype), log_probs)


def from_log_odds(scores: Any, *, name: str = "scores") -> Any:
    """Turn a binary score x (n,), the log-odds of class 1, into logits (0, x).

    >>> from_log_odds(np.array([1.5, -0.5]))
    array([[ 0. ,  1.5],
           [ 0. , -0.5]])
    """
    x = to_array(scores, name)
    x = x[:, 0] if x.ndim == 2 and x.shape[1] == 1 else x
    if x.ndim != 1:
        raise ValueError(f"{name} must have shape (n,) or (n, 1), got {shape_of(x)}")
    warn_of_probabilities(check_finite(x, name), name)
    return match_kind(np.stack([np.zeros_like(x), x], axis=1), scores)


def warn_of_probabilities(log_odds: Any, name: str) -> None:
    """Warn where log-odds (n,) look like probabilities."""
    x = to_array(log_odds, name)
    if len(x) >= _FEW_SCORES and arrays.lies_in_unit_interval(x[:_FEW_SCORES]) and arrays.lies_in_unit_interval(x):
        arrays.warn_users(
            f"all {name} lie in [0, 1] like probabilities, but are read as log-odds; probabilities of class 1 go "
            "through from_probs",
            LooksLikeProbabilities,
        )


def flatten(
    logits: Any,
    labels: Any,
    *,
    class_axis: ClassAxis = None,
    ignore_index: int = -100,
    clusters: Any = None,
) -> tuple[Any, ...]:
    """Flatten tokens or pixels to a pair (m, K), (m,), leaving out what is labelled `ignore_index`.

    `class_axis="last"` reads logits as (n, …, K), as language models give them; `class_axis="first"` as (n, K, …), as
    segmentation networks do. It must be named, because a wrong guess would be silent. With `clusters`, which has a
    value for each of the n texts or images, or is True for their numbers, a third array (m,) says which one each row is
    of: rows of one image are correlated, and `evaluate(logits, labels, clusters=…)` has intervals that know it.

    >>> z, y = flatten(np.zeros((2, 3, 5)), np.array([[0, 4, -100], [1, -100, -100]]), class_axis="last")
    >>> z.shape, y
    ((3, 5), array([0, 4, 1]))
    >>> flatten(np.zeros((2, 5, 3)), np.array([[0, 4, -100], [1, 2, 2]]), class_axis="first", clusters=["a", "b"])[2]
    array(['a', 'a', 'b', 'b', 'b'], dtype='<U1')
    """
    z, y = classes_last(to_array(logits, "logits"), class_axis), to_array(labels, "labels")
    if z.shape[:-1] != y.shape:
        raise ValueError(f"labels must have shape {z.shape[:-1]} to match the logits, got {shape_of(y)}")
    n = len(y)
    y = y.reshape(-1)
    kept = y != ignore_index
    rows = z.reshape(-1, z.shape[-1])
    z, truth = as_arrays(rows if kept.all() else rows[kept], y[kept])
    pair = match_kind(z, logits), match_kind(truth, logits)
    if clusters is None or clusters is False:
        return pair
    ids = np.arange(n) if clusters is True else np.asarray(clusters)
    if ids.shape != (n,):
        raise InputError("clusters", f"have {n} entries, one for each text or image", str(ids.shape))
    return *pair, ids[np.flatnonzero(kept) // max(len(y) // max(n, 1), 1)]


def classes_last(logits: Any, class_axis: ClassAxis) -> Any:
    """Logits of any dimension with the classes as their last, (n, …, K); `classes` says where they are.

    >>> classes_last(np.zeros((2, 5, 3, 4)), "first").shape
    (2, 3, 4, 5)
    """
    if logits.ndim < 2:
        raise ValueError(f"logits must have at least 2 dimensions, got {shape_of(logits)}")
    if class_axis not in ("first", "last") and not (class_axis is None and logits.ndim == 2):
        wanted = f'be "first" (n, K, …) or "last" (n, …, K) for logits {shape_of(logits)}'
        raise InputError("class_axis", wanted, repr(class_axis))
    if class_axis != "first":
        return logits
    return logits.movedim(1, -1) if arrays.is_tensor(logits) else np.moveaxis(logits, 1, -1)


def as_event(
    logits: Any, labels: Any, event: int | str, *, class_names: Sequence[str] | None = None
) -> tuple[Any, Any]:
    """Turn a pair into that of an event: logits (ln(1 − p), ln p) with p = P(class `event`), labels 1[y = event].

    Both logarithms are right to the last digits, however near p is to 0 or 1. Of two classes the logits stay as they
    are, with the columns exchanged for event 0. With `class_names` of the classes the event may be one of them.

    >>> z, y = as_event(np.log([[0.2, 0.3, 0.5]]), [2], 2)
    >>> np.exp(z), y
    (array([[0.5, 0.5]]), array([1]))
    """
    z, y = as_arrays(logits, labels)
    number = event_class(event, z.shape[1], class_names)
    return match_kind(_two_columns(z, number), logits), match_kind((y == number).astype(np.int64), logits)


def event_logits(logits: Any, event: int | str, *, class_names: Sequence[str] | None = None) -> Any:
    """The logits of `as_event`, where there are no labels: what a calibrator that was fitted to an event takes.

    >>> np.exp(event_logits(np.log([[0.2, 0.3, 0.5]]), 2))
    array([[0.5, 0.5]])
    """
    z = arrays.as_logits(logits)
    return match_kind(_two_columns(z, event_class(event, z.shape[1], class_names)), logits)


def _two_columns(z: np.ndarray, event: int) -> np.ndarray:
    classes = z.shape[1]
    if classes == 2:
        return z if event == 1 else z[:, ::-1]
    if arrays.find_absent(z) is not None and (gone := z[:, event] == -np.inf).any():
        got = f"absent in row {int(np.argmax(gone))} (-inf), and in {int(gone.sum())} rows in all"
        raise InputError("event", "be an option of every row", got, "leave out the rows that do not have it")
    return np.concatenate(
        [_log_odds_pair(z[rows], event) for rows in native.row_chunks(len(z), classes, native.CACHE_CHUNK)]
    )


def _log_odds_pair(z: np.ndarray, event: int) -> np.ndarray:
    """(ln(1 − p), ln p), each as a difference of logarithms of sums: nothing cancels."""
    z = upcast_half(z)
    others = np.delete(np.ascontiguousarray(z.T), event, axis=0)  # sums over few classes are faster along columns
    top = others.max(axis=0)
    others -= top
    odds = z[:, event] - top - np.log(np.exp(others, out=others).sum(axis=0))
    return -np.stack([np.logaddexp(0, odds), np.logaddexp(0, -odds)], axis=1)


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
    x, t = to_array(logits, "logits"), to_array(targets, "targets")
    if x.ndim != 2:
        raise InputError("logits", "have shape (n, labels)", shape_of(x))
    if t.shape != x.shape:
        raise InputError("targets", f"have the logits' shape {shape_of(x)}", shape_of(t), "one 0 or 1 for each label")
    kept = (t != ignore_index) & (t == t)
    bad = kept & (t != 0) & (t != 1)
    if bad.any():
        at = tuple(np.argwhere(bad)[0].tolist())
        wanted, got = f"be 0 or 1, or {ignore_index} where it is not known", f"{t[at]:g} at {list(at)}"
        raise InputError("targets", wanted, got, "ignore_index names another mark")
    row, label = kept.nonzero()
    pair = from_probs(x[kept]) if probs else from_log_odds(x[kept], name="logits")
    return LabelEvents(match_kind(pair, logits), match_kind(t[kept].astype(np.int64), logits), row, label)
