"""One pass over the logits: the scores of each row and the class-wise tally, while a row is in the cache.

The compiled pass (`_native.c`) and the NumPy pass give the same numbers; NumPy is used if nothing was compiled. Results
are float64 arrays with n numbers each, which is small compared with the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from scipy.special import expit

from trueup._core import native
from trueup._core.arrays import MASKED_LOGIT, to_array, upcast_half
from trueup._core.errors import InputError
from trueup._core.native import Chunks, address, map_threads, pair_arguments, sum_chunks
from trueup._core.splits import hash_groups

_MOST_NAMED = 12
"""Largest number of class names that an error lists."""
_SUMS = 1 << 22  # numbers in the class-wise sums of all threads together


class RowScores(NamedTuple):
    """Scores of each row."""

    confidence: np.ndarray
    """The largest probability."""
    predicted: np.ndarray
    """The class with the largest probability; the lowest one in a tie."""
    nll: np.ndarray
    brier: np.ndarray
    entropy: np.ndarray
    label_prob: np.ndarray
    """The probability of the label."""
    group: np.ndarray
    """The group of the row, for class-wise tallies."""
    correct: np.ndarray
    """1.0 if `predicted` equals the label, else 0.0."""
    score: np.ndarray
    """The probability compared with the outcome: P(class 1) with two classes; the confidence with more, or with
    `top_label`."""
    outcome: np.ndarray
    """1.0 if the event occurred, else 0.0: the label is class 1, or the prediction is correct."""

    @classmethod
    def empty(cls, n: int) -> RowScores:
        """Allocate arrays for n rows."""
        confidence, correct, nll, brier, entropy, label_prob = (np.empty(n) for _ in range(6))
        predicted, group = np.empty(n, np.int64), np.zeros(n, np.int64)
        return cls(confidence, predicted, nll, brier, entropy, label_prob, group, correct, confidence, correct)


@dataclass(frozen=True)
class ClassCells:
    """Cells of a class-wise tally: p lies in bin #{cuts < p}; groups of rows are given or follow from a hash."""

    cuts: np.ndarray
    groups: int = 1
    group: np.ndarray | None = None
    weights: np.ndarray | None = None
    """Weight of each row; 1 by default."""


class ClassTally(NamedTuple):
    """Sums over the rows for each class and bin of its probability, arrays (classes, bins)."""

    counts: np.ndarray
    confidence: np.ndarray
    hits: np.ndarray
    gap: np.ndarray
    """Sum of hits − probability for each group of rows, (groups, classes, bins)."""


class _Sums(NamedTuple):
    """Class-wise sums as the passes add them: bins before classes, so that bin 0 is contiguous in memory."""

    counts: np.ndarray
    hits: np.ndarray
    gap: np.ndarray

    @classmethod
    def zero(cls, classes: int, cells: ClassCells | None) -> _Sums:
        bins, groups = (0, 0) if cells is None else (len(cells.cuts) + 1, cells.groups)
        return cls(np.zeros((bins, classes)), np.zeros((bins, classes)), np.zeros((groups, bins, classes)))


def score_rows(logits: Any, labels: Any, *, top_label: bool = False) -> RowScores:
    """Score each row of a trusted pair; `top_label` scores the predicted class also with two classes."""
    z, y = to_array(logits, "logits"), to_array(labels, "labels")
    return _with_event(_run(z, y)[0], z, y, top_label)


def is_event(logits: Any, top_label: bool) -> bool:
    """Return whether the score is the probability of class 1: two classes, without `top_label`."""
    return logits.shape[1] == 2 and not top_label


def event_class(event: int | str, classes: int, class_names: Sequence[str] | None = None) -> int:
    """Return the number of a class, given by its number or, where the classes have names, by its name.

    >>> event_class("ill", 2, ["well", "ill"])
    1
    """
    if class_names is not None and len(class_names) != classes:
        raise InputError("class_names", f"have {classes} entries, one per class", str(len(class_names)))
    if class_names is not None and isinstance(event, str) and event in class_names:
        return list(class_names).index(event)
    if isinstance(event, bool) or not isinstance(event, (int, np.integer)) or not 0 <= event < classes:
        listed = ", ".join(map(str, (class_names or ())[:_MOST_NAMED]))
        known = "" if class_names is None else f": {listed}{', …' if len(class_names) > _MOST_NAMED else ''}"
        hint = "class_names= names the classes" if isinstance(event, str) and class_names is None else None
        raise InputError("event", f"be a class, 0..{classes - 1}{known}", repr(event), hint)
    return int(event)


def event_name(event: int | str | None, classes: int, class_names: Sequence[str] | None = None) -> str:
    """Return the name of the event; None is class 1 of two.

    >>> event_name(3, 5), event_name(None, 2, ["well", "ill"])
    ('class 3', 'ill')
    """
    number = 1 if event is None else event_class(event, classes, class_names)
    return f"class {number}" if class_names is None or len(class_names) != classes else str(class_names[number])


def event_log_odds(logits: Any) -> np.ndarray:
    """Return the log-odds of class 1 of two, in float64.

    The difference of logits is exact even where probabilities round to 0 or 1.
    """
    z = to_array(logits, "logits")
    return z[:, 1].astype(np.float64) - z[:, 0].astype(np.float64)


def scores_and_outcomes(
    logits: Any, labels: Any, *, top_label: bool = False, quick: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Return the score of each row and its outcome, 1.0 or 0.0.

    With two classes these are P(class 1) and 1[y = 1]. With more, or with `top_label`, they are the confidence and
    whether the prediction is correct.
    """
    if not is_event(logits, top_label):
        return confidences_and_hits(logits, labels, quick=quick)
    # P(class 1) in float64; a softmax over two classes is ten times slower.
    return expit(event_log_odds(logits)), to_array(labels, "labels").astype(np.float64)


def _with_event(scored: RowScores, logits: np.ndarray, labels: np.ndarray, top_label: bool) -> RowScores:
    if not is_event(logits, top_label):
        return scored
    score, outcome = scores_and_outcomes(logits, labels)
    return scored._replace(score=score, outcome=outcome)


def confidences(logits: Any, *, beta: float = 1.0, quick: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return confidence and predicted class of each row of softmax(β z); `quick` has an error of 4e-7 for float32."""
    scored = _run(logits, None, beta=beta, quick=quick)[0]
    return scored.confidence, scored.predicted


def score_and_class(logits: Any, event: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the score of each row (its confidence, or the probability of an event) and the predicted class."""
    z = to_array(logits, "logits")
    confidence, predicted = confidences(z)
    if event is None:
        return confidence, predicted
    return confidence * np.exp(z[:, event] - _take(z, predicted)), predicted


def confidences_and_hits(logits: Any, labels: Any, *, quick: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Return the confidence of each row, and 1.0 where the predicted class is the label, else 0.0."""
    z = to_array(logits, "logits")
    if quick and native.compiled is not None and z.dtype != np.float64:
        scored = _run(z, labels, quick=True)[0]  # comparing with the label is cheaper than finding the class
        return scored.confidence, scored.correct
    confidence, predicted = confidences(z, quick=quick)
    return confidence, (predicted == to_array(labels, "labels")).astype(np.float64)


def top_label_tally(logits: Any, labels: Any, cuts: np.ndarray) -> np.ndarray:
    """Tally count, confidence and hits of the predicted class between cuts, (3, bins), by the quick pass."""
    z, y = to_array(logits, "logits"), np.ascontiguousarray(to_array(labels, "labels"), np.int64)
    bins = len(cuts) + 1
    if native.compiled is None:
        confidence, hits = confidences_and_hits(z, y, quick=True)
        index = native.count_below(cuts, confidence)
        return np.stack([np.bincount(index, weights=w, minlength=bins) for w in (np.ones_like(hits), confidence, hits)])

    def add(first: int, rows: np.ndarray, sums: np.ndarray) -> None:
        native.compiled.run_top(*pair_arguments(rows, y, first), address(cuts), bins, address(sums))

    return sum_chunks(z, (3, bins), add)


def score_rows_and_classes(
    logits: Any, labels: Any, cells: ClassCells, *, top_label: bool = False
) -> tuple[RowScores, ClassTally]:
    """Score each row and tally every class."""
    z, y = to_array(logits, "logits"), to_array(labels, "labels")
    scored, (count, hits, gap) = _run(z, y, cells)
    # Nearly all probabilities lie in bin 0; the passes skip it, and it follows by subtraction.
    total = len(z) if cells.weights is None else cells.weights.sum()
    count[0] = total - count[1:].sum(axis=0)
    confidence = np.maximum(hits - gap.sum(axis=0), 0.0)
    if cells.weights is not None:  # weighted sums round, but an empty bin must stay empty
        empty = (count[0] < 1e-12 * total) & (hits[0] == 0)
        count[0, empty] = confidence[0, empty] = 0.0
    tally = ClassTally(count.T, confidence.T, hits.T, gap.transpose(0, 2, 1))
    return _with_event(scored, z, y, top_label), tally


def log_sum_exp(logits: Any) -> np.ndarray:
    """Compute ln Σ_k exp z_k of each row; a logit minus this is the log-probability of its class."""
    z = to_array(logits, "logits")
    confidence, predicted = confidences(z)
    return _take(z, predicted) - np.log(confidence)


def class_probs(logits: Any) -> Iterator[tuple[int, np.ndarray]]:
    """Yield float64 probabilities in blocks of classes: the first class's number and an array (classes, rows)."""
    z = to_array(logits, "logits")
    confidence, predicted = confidences(z)
    top = _take(z, predicted)
    for classes in native.row_chunks(z.shape[1], len(z), native.LARGE_CHUNK):
        probs = z[:, classes].T.astype(np.float64, order="C")
        probs -= top
        np.exp(probs, out=probs)
        probs *= confidence
        yield classes.start, probs


def _take(z: np.ndarray, column: np.ndarray) -> np.ndarray:
    """Select one logit per row, in float64."""
    return z[np.arange(len(z)), column].astype(np.float64)


def _run(
    logits: Any, labels: Any, cells: ClassCells | None = None, *, beta: float = 1.0, quick: bool = False
) -> tuple[RowScores, _Sums]:
    z = to_array(logits, "logits")
    y = None if labels is None else np.ascontiguousarray(to_array(labels, "labels"), np.int64)
    scored, sums = RowScores.empty(len(z)), _Sums.zero(z.shape[1], cells)
    if cells is not None and cells.group is not None:
        scored.group[:] = cells.group
    if native.compiled is None:
        _numpy_pass(z, y, cells, beta, scored, sums)
    else:
        _native_pass(z, y, cells, (quick, beta), scored, sums)
    if y is not None:
        np.equal(scored.predicted, y, out=scored.correct)
    return scored, sums


def _native_pass(
    z: np.ndarray,
    y: np.ndarray | None,
    cells: ClassCells | None,
    mode: tuple[bool, float],
    scored: RowScores,
    sums: _Sums,
) -> None:
    """Score the rows and add up their sums; `mode` is whether the pass is quick, and β."""
    unused = [sums]  # the first thread adds to the sums that are returned
    cuts, weights = (None, None) if cells is None else (cells.cuts, cells.weights)
    options = len(sums.counts), len(sums.gap), cells is not None and cells.group is None, *mode

    def part(chunks: Chunks) -> _Sums:
        try:  # once per thread: with many classes the sums are larger than a chunk
            thread_sums = unused.pop()
        except IndexError:
            thread_sums = _Sums.zero(z.shape[1], cells)
        tallies = [0 if cells is None else address(array) for array in thread_sums]
        for at, chunk in chunks:
            logits = address(chunk), chunk.dtype == np.float64, *chunk.shape
            *columns, group, weight = (address(column, at) for column in (y, *scored[:7], weights))
            native.compiled.run_pass(*logits, *options, *columns, address(cuts), group, *tallies, weight)
        return thread_sums

    # Each thread holds its own sums, so the number of threads is limited with many classes.
    for part_sums in map_threads(z, part, max_threads=max(2, _SUMS // max(sums.gap.size, 1))):
        if part_sums is not sums:
            for total, of_part in zip(sums, part_sums, strict=True):
                total += of_part


def _numpy_pass(
    logits: np.ndarray, labels: np.ndarray | None, cells: ClassCells | None, beta: float, scored: RowScores, sums: _Sums
) -> None:
    for at in native.row_chunks(len(logits), logits.shape[1], native.CACHE_CHUNK):
        z = upcast_half(logits[at])
        z = z if beta == 1 else z * z.dtype.type(beta)
        rows = np.arange(len(z))
        predicted = z.argmax(axis=1)
        shifted = np.maximum(z - z[rows, predicted][:, None], z.dtype.type(MASKED_LOGIT))
        e = np.exp(shifted)
        total = e.sum(axis=1, dtype=np.float64)
        scored.confidence[at] = 1 / total
        scored.predicted[at] = predicted
        if labels is None:
            continue
        y = labels[at]
        label_shift = shifted[rows, y].astype(np.float64)
        scored.nll[at] = np.log(total) - label_shift
        scored.label_prob[at] = np.exp(label_shift) / total
        squares = np.einsum("ij,ij->i", e, e).astype(np.float64)
        scored.brier[at] = squares / total**2 - 2 * scored.label_prob[at] + 1
        scored.entropy[at] = np.log(total) - np.einsum("ij,ij->i", e, shifted).astype(np.float64) / total
        if cells is not None:
            if cells.group is None:
                scored.group[at] = hash_groups(z, y, cells.groups)
            probs = e / total.astype(e.dtype)[:, None]
            weight = np.ones(len(y)) if cells.weights is None else cells.weights[at]
            _tally_classes(probs, y, scored.group[at], weight, cells.cuts, sums)


def _tally_classes(
    probs: np.ndarray, y: np.ndarray, group: np.ndarray, weight: np.ndarray, cuts: np.ndarray, sums: _Sums
) -> None:
    count, hits, gap = sums
    members = ((np.arange(len(gap))[:, None] == group) * weight).astype(probs.dtype)
    gap[:, 0] -= members @ probs
    if len(cuts):
        # Few probabilities of a row can exceed the first cut; all others stay in bin 0. (The comparison rounds the
        # cut to the type of the probabilities, so the cut is lowered slightly; the search decides in float64.)
        row, k = (probs > probs.dtype.type(cuts[0] * (1 - 1e-6))).nonzero()
        p = probs[row, k].astype(np.float64)
        b = np.searchsorted(cuts, p, side="left")
        np.add.at(count, (b, k), weight[row])
        np.add.at(gap, (group[row], b, k), -p * weight[row])
        np.add.at(gap[:, 0], (group[row], k), p * weight[row])
    label_bin = np.searchsorted(cuts, probs[np.arange(len(y)), y].astype(np.float64), side="left")
    np.add.at(hits, (label_bin, y), weight)
    np.add.at(gap, (group, label_bin, y), weight)
