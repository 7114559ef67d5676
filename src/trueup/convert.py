"""Convert other outputs to logits: probabilities, log-odds, top-k answers, tokens, pixels, events and multi-labels.

Functions return the kind of array that they were given.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from trueup._core import arrays, native
from trueup._core.arrays import ROUNDING, as_arrays, check_finite, match_kind, shape_of, to_array, upcast_half
from trueup._core.errors import Hint, InputError
from trueup._core.row_scores import event_class
from trueup._core.types import ArrayLike, ArrayT

ClassAxis: TypeAlias = Literal["first", "last"] | None
"""Position of the classes in outputs with more than two dimensions: (n, K, …) or (n, …, K)."""

DEFAULT_FLOOR = 1e-6
"""Replaces exact zeros if no other probability is below a half and no floor is given."""

MIN_FLOOR = 1e-45
"""Smallest replacement of exact zeros: about the smallest positive number of single precision."""

MAX_EVENT_FLOOR = 1e-4
"""Largest shift of an event's probability of exactly 0 or 1, unless a floor is given."""

_ROUNDED_SUM = 0.1
"""With `renormalise`, row sums may differ from one by this."""

_ROUNDED_TOP = 1e-2
"""The top probabilities of a row may sum to this above 1: services round log-probabilities, or mix precisions."""

_FEW_SCORES = 8
"""Fewer log-odds than this may all lie between 0 and 1 by chance."""


_HALF_PRECISION = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Relative rounding of 16-bit types."""


def from_probs(probs: ArrayT, *, floor: float | None = None, renormalise: bool = False, name: str = "probs") -> ArrayT:
    """Convert probabilities (n, classes) to logits: log p, since softmax(log p) = p.

    Probabilities of shape (n,) or (n, 1) are those of class 1, an event such as a risk, a forecast or a stated
    confidence. They become (ln(1 − p), ln p). Their labels are 1 where the event occurred and 0 where it did not.

    Exact zeros, as in the votes of a forest, would have infinite logits. They are raised to half the smallest positive
    probability, which is the resolution of the data, and a warning says so. If all other probabilities are above a
    half, they are raised to 1e-6. An event's probability of exactly 0 or 1 is shifted inwards by 1e-4, or by half the
    distance of the nearest other value if that is less. Small positive probabilities stay: 1e-6 and 1e-30 are different
    confidences, and calibrators can use that.

    Parameters
    ----------
    probs
        Probabilities, shape (n, classes), or (n,) for an event. NaN is an option that the row does not have and becomes
        −∞; the others sum to 1.
    floor
        Smallest probability. Give later, smaller batches the floor of the calibration set (see `resolution`). Curves of
        the log-odds, such as Platt scaling, fit better with a larger floor.
    renormalise
        Divide rows by their sum if it is in [0.9, 1.1]. Without it, a sum may differ from 1 by 1e-6 per thousand
        classes. For half precision, it may differ by the type's epsilon. If rounding to a number of decimals
        explains the difference, rows are divided by their sum in any case, with a warning.
    name
        Name of the argument in errors.

    Returns
    -------
    array like `probs`
        Logits, shape (n, classes), or (n, 2) for an event.

    Examples
    --------
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
        if in_sum < off[row] <= _ROUNDED_SUM and not renormalise and (decimals := _decimals(p, off[row])):
            arrays.warn_users(f"{name} are rounded to {decimals} decimals; each row is divided by its sum")
            renormalise = True
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


def _decimals(p: np.ndarray, off: float) -> int | None:
    """Return the number of decimals of five or more rounded rows, if that explains sums that differ from 1 by `off`.

    >>> _decimals(np.full((5, 3), 0.33), 0.01), _decimals(np.full((5, 3), 1 / 3), 0.01)
    (2, None)
    """
    unit = 4 * np.finfo(p.dtype).eps
    for decimals in range(1, 9) if len(p) >= arrays.MIN_ROWS_OF_PROBABILITIES else ():
        scaled = p.astype(np.float64) * 10**decimals
        if (np.abs(scaled - scaled.round()) <= unit * np.maximum(scaled, 1)).all():
            return decimals if off <= p.shape[1] * 0.5 * 10.0**-decimals + ROUNDING else None
    return None


def _event_pair(p: np.ndarray, floor: float | None, name: str, tolerance: float) -> np.ndarray:
    """Return logits (ln(1 − p), ln p) of the probabilities of an event."""
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
        in_per_cent = low >= 0 and np.abs(p.reshape(len(p), -1).sum(axis=1) - 100).max() <= 2
        hint = event_hint if of_event else Hint.PER_CENT if in_per_cent else Hint.NOT_PROBABILITIES
        raise InputError(name, "lie in [0, 1]", f"{low:.6g}..{high:.6g}", hint)


def _check_floor(floor: float | None) -> None:
    if floor is not None and not 0 < floor < 0.5:
        raise InputError("floor", "lie between 0 and 0.5", f"{floor}")


def resolution(probs: ArrayLike, *, least: float = MIN_FLOOR) -> float:
    """Return half the smallest positive probability, which replaces exact zeros.

    Parameters
    ----------
    probs
        Probabilities, any shape.
    least
        Smallest result.

    Returns
    -------
    float
        At least `least`; 1e-6 if no probability is below a half.

    Examples
    --------
    >>> resolution(np.array([[0.9, 0.1], [1.0, 0.0]]))
    0.05
    """
    p = to_array(probs, "probs")
    smallest = float(p.min(where=p > 0, initial=1.0))
    return DEFAULT_FLOOR if smallest > 0.5 else max(smallest / 2, least)


def warn_of_zeros(zeros: int, numbers: int, floor: float) -> None:
    """Warn that exact zeros among probabilities were raised."""
    warnings.warn(
        f"{zeros} exact zeros among {numbers} probabilities were raised to {floor:.4g}, "
        + ("as no other one is below a half" if floor == DEFAULT_FLOOR else "about half the smallest positive one"),
        stacklevel=3,
    )


def warn_of_certain(certain: int, rows: int, floor: float) -> None:
    """Warn that probabilities of an event of exactly 0 or 1 were shifted."""
    arrays.warn_users(f"{certain} of {rows} confidences are exactly 0 or 1; they were moved by {floor:.4g}")


def number_labels(labels: ArrayLike, class_names: Sequence[str]) -> np.ndarray:
    """Convert labels that are names of classes to class numbers.

    Parameters
    ----------
    labels
        Names of classes, shape (n,). Numbers are returned unchanged.
    class_names
        Names of the classes, in the order of the logits.

    Returns
    -------
    ndarray
        Class of each row, shape (n,).

    Examples
    --------
    >>> number_labels(["dog", "cat", "dog"], ["cat", "dog"])
    array([1, 0, 1])
    """
    values: Any = labels if arrays.is_tensor(labels) else np.asarray(labels)
    if arrays.is_tensor(labels) or values.dtype.kind not in "USOT":
        return values
    number = {str(name): k for k, name in enumerate(class_names)}
    names = values.ravel().tolist()
    numbers = [number.get(str(name), -1) for name in names]
    if -1 in numbers:
        row = numbers.index(-1)
        hint = None if isinstance(names[row], str) else "leave out rows without a label"
        raise InputError("labels", f"be classes ({', '.join(list(number)[:8])})", f"{names[row]!r} in row {row}", hint)
    return np.array(numbers, dtype=np.int64).reshape(values.shape)


def from_topk(log_probs: ArrayT, *, floor: float = DEFAULT_FLOOR, name: str = "log_probs") -> ArrayT:
    """Convert log-probabilities of the k likeliest answers (n, k) to logits (n, k + 1), the last for all other answers.

    The added logit is ln(1 − Σp), and at least ln `floor`, since the rest is rounding noise if the probabilities sum to
    1. The label of a row is the index of the right answer, or k if it is another answer.

    Parameters
    ----------
    log_probs
        Log-probabilities, shape (n, k). Rows with fewer answers have −∞, or −9999 as some services write.
    floor
        Smallest probability of all other answers.
    name
        Name of the argument in errors.

    Returns
    -------
    array like `log_probs`
        Logits, shape (n, k + 1).

    Examples
    --------
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
    # Rounding, or the floor, can make the sum exceed one, so the row is divided by it.
    rest = np.maximum(1 - total, floor)
    logits = np.concatenate([double, np.log(rest)], axis=1) - np.log(total + rest)
    return match_kind(logits.astype(x.dtype), log_probs)


def from_log_odds(scores: ArrayT, *, name: str = "scores") -> ArrayT:
    """Convert binary scores x, the log-odds of class 1, to logits (0, x).

    Parameters
    ----------
    scores
        Log-odds of class 1, shape (n,) or (n, 1).
    name
        Name of the argument in errors.

    Returns
    -------
    array like `scores`
        Logits, shape (n, 2).

    Examples
    --------
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


def warn_of_probabilities(log_odds: ArrayLike, name: str) -> None:
    """Warn if log-odds (n,) look like probabilities."""
    x = to_array(log_odds, name)
    if len(x) >= _FEW_SCORES and arrays.lies_in_unit_interval(x[:_FEW_SCORES]) and arrays.lies_in_unit_interval(x):
        arrays.warn_users(
            f"all {name} lie in [0, 1] like probabilities, but are read as log-odds; probabilities of class 1 go "
            "through from_probs"
        )


def flatten(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    class_axis: ClassAxis = None,
    ignore_index: int = -100,
    clusters: Any = None,
) -> tuple[Any, ...]:
    """Flatten tokens or pixels to a pair (m, K), (m,), leaving out the label `ignore_index`.

    Parameters
    ----------
    logits
        Logits of shape (n, …, K) or (n, K, …).
    labels
        Labels of shape (n, …).
    class_axis
        "last" for (n, …, K), as language models return; "first" for (n, K, …), as segmentation networks return. It is
        required, because a wrong guess would go unnoticed.
    ignore_index
        Label of entries to leave out.
    clusters
        A value for each of the n texts or images, or True for their numbers. Rows of one image are correlated;
        `evaluate(logits, labels, clusters=…)` takes that into account.

    Returns
    -------
    tuple of arrays
        Logits (m, K) and labels (m,). With `clusters`, also the text or image of each row, (m,).

    Examples
    --------
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
    """Move the classes to the last axis, (n, …, K).

    Parameters
    ----------
    logits
        Logits of any number of dimensions.
    class_axis
        "last" or "first"; not needed with two dimensions.

    Returns
    -------
    array like `logits`
        Logits with the classes last.

    Examples
    --------
    >>> classes_last(np.zeros((2, 5, 3, 4)), "first").shape
    (2, 3, 4, 5)
    """
    if logits.ndim < 2:
        raise ValueError(f"logits must have at least 2 dimensions, got {shape_of(logits)}")
    if class_axis not in ("first", "last") and not (class_axis is None and logits.ndim == 2):
        requirement = f'be "first" (n, K, …) or "last" (n, …, K) for logits {shape_of(logits)}'
        raise InputError("class_axis", requirement, repr(class_axis))
    if class_axis != "first":
        return logits
    return logits.movedim(1, -1) if arrays.is_tensor(logits) else np.moveaxis(logits, 1, -1)


def as_event(
    logits: ArrayLike, labels: ArrayLike, event: int | str, *, class_names: Sequence[str] | None = None
) -> tuple[Any, Any]:
    """Convert a pair to that of an event: logits (ln(1 − p), ln p) with p = P(class `event`), and labels 1[y = event].

    Both logarithms keep full precision however near p is to 0 or 1. With two classes the logits are unchanged, or have
    their columns exchanged for event 0.

    Parameters
    ----------
    logits
        Logits, shape (n, classes).
    labels
        Class of each row, shape (n,).
    event
        The class, by number or by name.
    class_names
        Names of the classes.

    Returns
    -------
    tuple of arrays
        Logits (n, 2) and labels (n,) of the event.

    Examples
    --------
    >>> z, y = as_event(np.log([[0.2, 0.3, 0.5]]), [2], 2)
    >>> np.exp(z), y
    (array([[0.5, 0.5]]), array([1]))
    """
    z, y = as_arrays(logits, labels if class_names is None else number_labels(labels, class_names))
    number = event_class(event, z.shape[1], class_names)
    return match_kind(_two_columns(z, number), logits), match_kind((y == number).astype(np.int64), logits)


def event_logits(logits: ArrayT, event: int | str, *, class_names: Sequence[str] | None = None) -> ArrayT:
    """Return the logits of `as_event` without labels, to apply a calibrator that was fitted to an event.

    Parameters
    ----------
    logits
        Logits, shape (n, classes).
    event
        The class, by number or by name.
    class_names
        Names of the classes.

    Returns
    -------
    array like `logits`
        Logits of the event, shape (n, 2).

    Examples
    --------
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
    """Return (ln(1 − p), ln p), each as a difference of log-sums, without cancellation."""
    z = upcast_half(z)
    others = np.delete(np.ascontiguousarray(z.T), event, axis=0)  # with few classes, sums along columns are faster
    top = others.max(axis=0)
    others -= top
    odds = z[:, event] - top - np.log(np.exp(others, out=others).sum(axis=0))
    return -np.stack([np.logaddexp(0, odds), np.logaddexp(0, -odds)], axis=1)


class LabelEvents(NamedTuple):
    """Labels of rows as events: a two-class pair with the row and label of each entry."""

    logits: Any
    """(m, 2): the event is class 1."""
    labels: Any
    """(m,): 1 if the label applies to the row."""
    row: np.ndarray
    """Row of each entry, shape (m,)."""
    label: np.ndarray
    """Label of each entry, shape (m,)."""


def label_events(
    logits: ArrayLike, targets: ArrayLike, *, ignore_index: int = -100, probs: bool = False
) -> LabelEvents:
    """Convert log-odds and targets (n, labels) to a pair of events (m, 2), (m,), row by row.

    Parameters
    ----------
    logits
        Log-odds of each label, shape (n, labels).
    targets
        1 where the label applies, else 0, shape (n, labels). Entries with `ignore_index` or NaN are left out.
    ignore_index
        The target of unknown entries.
    probs
        Read `logits` as probabilities.

    Returns
    -------
    LabelEvents
        The pair, and the row and label of each entry.

    Examples
    --------
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
        requirement, got = f"be 0 or 1, or {ignore_index} if unknown", f"{t[at]:g} at {list(at)}"
        raise InputError("targets", requirement, got, "ignore_index names another mark")
    row, label = kept.nonzero()
    pair = from_probs(x[kept]) if probs else from_log_odds(x[kept], name="logits")
    return LabelEvents(match_kind(pair, logits), match_kind(t[kept].astype(np.int64), logits), row, label)
