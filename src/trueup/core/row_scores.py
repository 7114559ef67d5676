"""One pass over the logits: everything that is scored per row, and the class-wise tally, while a row is in the cache.

The compiled pass (`_native.c`) and the torch pass give the same numbers; the torch one runs on accelerators, and where
nothing was compiled. Results are float64 NumPy arrays: n numbers each, small beside the logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trueup.core import native
from trueup.core.arrays import NEVER, upcast_half
from trueup.core.errors import InputError
from trueup.core.native import as_float64, map_threads
from trueup.core.splits import hash_groups

_MOST_NAMED = 12
"""Of so many classes an error lists them all."""
_SUMS = 1 << 22  # numbers in the class-wise sums of all threads together


class RowScores(NamedTuple):
    """What the pass says of each row."""

    confidence: np.ndarray
    """The largest probability."""
    predicted: np.ndarray
    """Its class; of equal ones the lowest."""
    correct: np.ndarray
    """1.0 where predicted equals the label, else 0.0."""
    nll: np.ndarray
    brier: np.ndarray
    entropy: np.ndarray
    label_prob: np.ndarray
    """The probability of the label."""
    group: np.ndarray
    """The group of the row, where class-wise tallies were asked for."""
    score: np.ndarray
    """The probability that is held against what happened: that of class 1 where there are two classes, the confidence
    where there are more, or where the two are folded."""
    outcome: np.ndarray
    """1.0 where it happened, else 0.0: the label is class 1, or the prediction is right."""

    @classmethod
    def empty(cls, n: int) -> RowScores:
        """Room for n rows."""
        confidence, correct, nll, brier, entropy, label_prob = (np.empty(n) for _ in range(6))
        predicted, group = np.empty(n, np.int64), np.zeros(n, np.int64)
        return cls(confidence, predicted, correct, nll, brier, entropy, label_prob, group, confidence, correct)


@dataclass(frozen=True)
class ClassCells:
    """What a class-wise tally counts: p lies in bin #{cuts < p}; rows go to groups by their hash, or come with them."""

    cuts: np.ndarray
    groups: int = 1
    group: np.ndarray | None = None
    weights: np.ndarray | None = None
    """Of the rows; each counts 1 without them."""


class _How(NamedTuple):
    """Options of the confidence pass."""

    beta: float = 1.0
    quick: bool = False


class ClassTally(NamedTuple):
    """Sums over the rows for each class and bin of its probability, arrays (classes, bins)."""

    counts: np.ndarray
    confidence: np.ndarray
    hits: np.ndarray
    gap: np.ndarray
    """Sum of hits − probability, apart for each group of rows: (groups, classes, bins)."""


class _Sums(NamedTuple):
    """Class-wise sums as the passes add them up: bins before classes, so that bin 0 is one run of memory."""

    counts: np.ndarray
    hits: np.ndarray
    gap: np.ndarray

    @classmethod
    def zero(cls, classes: int, cells: ClassCells | None) -> _Sums:
        bins, groups = (0, 0) if cells is None else (len(cells.cuts) + 1, cells.groups)
        return cls(np.zeros((bins, classes)), np.zeros((bins, classes)), np.zeros((groups, bins, classes)))

    def add(self, other: _Sums) -> None:
        for mine, theirs in zip(self, other, strict=True):
            mine += theirs


def score_rows(logits: Tensor, labels: Tensor, *, fold: bool = False) -> RowScores:
    """Score each row of a trusted pair; `fold` takes two classes by the predicted one, as more are."""
    return _with_event(_run(logits, labels, None)[0], logits, labels, fold)


def is_event(logits: Tensor, fold: bool) -> bool:
    """Whether a pair is about the probability of class 1: of two classes, unless they are folded."""
    return logits.shape[1] == 2 and not fold


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


def event_log_odds(logits: Tensor) -> Tensor:
    """The log-odds of class 1 of two, in float64: a difference of logits, exact where probabilities round to 0 or 1."""
    return logits[:, 1].double() - logits[:, 0].double()


def scores_and_outcomes(
    logits: Tensor, labels: Tensor, *, fold: bool = False, quick: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """The probability of each row that is held against what happened, and 1.0 where it did, else 0.0.

    P(class 1) and 1[y = 1] for two classes; confidence and whether the prediction is right for more, or with `fold`.
    """
    if not is_event(logits, fold):
        return confidences_and_hits(logits, labels, quick=quick)
    return as_float64(event_probs(logits)), as_float64(labels)


def _with_event(scored: RowScores, logits: Tensor, labels: Tensor, fold: bool) -> RowScores:
    if not is_event(logits, fold):
        return scored
    score, outcome = scores_and_outcomes(logits, labels)
    return scored._replace(score=score, outcome=outcome)


def confidences(logits: Tensor, *, beta: float = 1.0, quick: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Confidence and predicted class of each row of softmax(β z); quick is right to 4e-7 for float32 logits."""
    scored = _run(logits, None, None, _How(beta, quick))[0]
    return scored.confidence, scored.predicted


def score_and_class(logits: Tensor, event: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The score of each row, its confidence or the probability of an event, and the predicted class."""
    confidence, predicted = confidences(logits)
    if event is None:
        return confidence, predicted
    top = logits.gather(1, torch.from_numpy(predicted).to(logits.device)[:, None])[:, 0].double()
    chance = confidence * torch.exp(logits[:, event].double() - top).cpu().numpy()
    return chance, predicted


def confidences_and_hits(logits: Tensor, labels: Tensor, *, quick: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """Confidence of each row, and 1.0 where its class is the label's, else 0.0."""
    if quick and native.usable(logits) and logits.dtype != torch.float64:
        scored = _run(logits, labels, None, _How(quick=True))[0]  # whether it is the label is cheaper than which it is
        return scored.confidence, scored.correct
    confidence, predicted = confidences(logits, quick=quick)
    return confidence, (predicted == labels.cpu().numpy()).astype(np.float64)


def event_probs(logits: Tensor) -> Tensor:
    """P(class 1) of two classes, in float64: a softmax over so few is ten times slower."""
    return torch.sigmoid(event_log_odds(logits))


def top_label_tally(logits: Tensor, labels: Tensor, cuts: np.ndarray) -> np.ndarray:
    """Count, confidence and hits of the predicted class in the bins between cuts, (3, bins), by the quick pass."""
    bins = len(cuts) + 1
    if not native.usable(logits):
        confidence, hits = confidences_and_hits(logits, labels, quick=True)
        index = native.count_below(cuts, confidence)
        return np.stack([np.bincount(index, weights=w, minlength=bins) for w in (np.ones_like(hits), confidence, hits)])
    y = labels.contiguous()

    def part(parts: Iterator[tuple[int, Tensor]]) -> np.ndarray:
        sums = np.zeros((3, bins))
        for at, chunk in parts:
            native.tally_pass(chunk, y[at:], cuts, sums)
        return sums

    return sum(map_threads(logits, part), start=np.zeros((3, bins)))


def score_rows_and_classes(
    logits: Tensor, labels: Tensor, cells: ClassCells, *, fold: bool = False
) -> tuple[RowScores, ClassTally]:
    """Score each row and tally every class."""
    scored, (count, hits, gap) = _run(logits, labels, cells)
    # The passes leave bin 0, where nearly everything lies, to be had by subtraction.
    total = len(logits) if cells.weights is None else cells.weights.sum()
    count[0] = total - count[1:].sum(axis=0)
    confidence = np.maximum(hits - gap.sum(axis=0), 0.0)
    if cells.weights is not None:  # whose sums round: an empty bin must stay empty
        empty = (count[0] < 1e-12 * total) & (hits[0] == 0)
        count[0, empty] = confidence[0, empty] = 0.0
    tally = ClassTally(count.T, confidence.T, hits.T, gap.transpose(0, 2, 1))
    return _with_event(scored, logits, labels, fold), tally


def log_sum_exp(logits: Tensor) -> np.ndarray:
    """ln Σ_k exp z_k of each row, so that a class's log-probability is its logit less this."""
    confidence, predicted = confidences(logits)
    top = logits.gather(1, torch.from_numpy(predicted).to(logits.device)[:, None])[:, 0]
    return as_float64(top) - np.log(confidence)


def class_probs(logits: Tensor) -> Iterator[tuple[int, np.ndarray]]:
    """The probabilities in float64, some classes at a time: the first class's number, and an array (classes, rows)."""
    confidence, predicted = confidences(logits)
    top = logits.gather(1, torch.from_numpy(predicted).to(logits.device)[:, None])[:, 0].double()
    scale = torch.from_numpy(confidence)
    for classes in native.row_chunks(logits.shape[1], len(logits), native.BLOCK):
        shifted = logits[:, classes].double().T - top
        yield classes.start, (shifted.cpu().exp_() * scale).contiguous().numpy()


def _run(
    logits: Tensor, labels: Tensor | None, cells: ClassCells | None, how: _How | None = None
) -> tuple[RowScores, _Sums]:
    scored, sums = RowScores.empty(len(logits)), _Sums.zero(logits.shape[1], cells)
    if cells is not None and cells.group is not None:
        scored.group[:] = cells.group
    one_pass = _native_pass if native.usable(logits) else _torch_pass
    one_pass(logits, labels, cells, how or _How(), scored, sums)
    if labels is not None:
        np.equal(scored.predicted, labels.cpu().numpy(), out=scored.correct)
    return scored, sums


def _native_pass(
    logits: Tensor, labels: Tensor | None, cells: ClassCells | None, how: _How, scored: RowScores, sums: _Sums
) -> None:
    classes = logits.shape[1]
    y = None if labels is None else labels.contiguous()

    results = scored.confidence, scored.predicted, scored.nll, scored.brier, scored.entropy, scored.label_prob
    unused = [sums]  # the first thread adds to what is returned

    def part(parts: Iterator[tuple[int, Tensor]]) -> _Sums:
        try:  # once a thread: with many classes the sums are larger than a chunk
            own = unused.pop()
        except IndexError:
            own = _Sums.zero(classes, cells)
        for at, chunk in parts:
            native.score_pass(
                chunk,
                None if y is None else y[at:],
                [column[at:] for column in results],
                scored.group[at:],
                None if cells is None else cells.cuts,
                own,
                None if cells is None or cells.weights is None else cells.weights[at:],
                hash_groups=cells is not None and cells.group is None,
                quick=how.quick,
                beta=how.beta,
            )
        return own

    # Each thread has sums of its own: with many classes let few threads hold them.
    for own in map_threads(logits, part, max_threads=max(2, _SUMS // max(sums.gap.size, 1))):
        if own is not sums:
            sums.add(own)


def _torch_pass(
    logits: Tensor, labels: Tensor | None, cells: ClassCells | None, how: _How, scored: RowScores, sums: _Sums
) -> None:
    for at in native.row_chunks(len(logits), logits.shape[1], native.CACHE):
        z = how.beta * upcast_half(logits[at])
        top, predicted = z.max(dim=1)
        shifted = (z - top[:, None]).clamp(min=NEVER)
        e = torch.exp(shifted)
        total = as_float64(e.sum(dim=1))
        scored.confidence[at] = 1 / total
        scored.predicted[at] = predicted.cpu().numpy()
        if labels is None:
            continue
        y = labels[at]
        label_shift = as_float64(shifted.gather(1, y[:, None])[:, 0])
        scored.nll[at] = np.log(total) - label_shift
        scored.label_prob[at] = np.exp(label_shift) / total
        scored.brier[at] = as_float64(e.square().sum(dim=1)) / total**2 - 2 * scored.label_prob[at] + 1
        scored.entropy[at] = np.log(total) - as_float64((e * shifted).sum(dim=1)) / total
        if cells is not None:
            if cells.group is None:
                scored.group[at] = hash_groups(z, y, cells.groups)
            probs = e / torch.from_numpy(total).to(e)[:, None]
            weight = np.ones(len(y)) if cells.weights is None else cells.weights[at]
            _torch_classes(probs, y.cpu().numpy(), scored.group[at], weight, cells.cuts, sums)


def _torch_classes(
    probs: Tensor, y: np.ndarray, group: np.ndarray, weight: np.ndarray, cuts: np.ndarray, sums: _Sums
) -> None:
    count, hits, gap = sums
    members = torch.from_numpy((np.arange(len(gap))[:, None] == group) * weight).to(probs)
    gap[:, 0] -= as_float64(members @ probs)
    if len(cuts):
        # Few probabilities of a row can exceed the first cut: everything else stays in bin 0. (The comparison rounds
        # the cut to the type of the probabilities, so ask a little less of it; the search decides in float64.)
        row, k = (i.cpu().numpy() for i in (probs > float(cuts[0]) * (1 - 1e-6)).nonzero(as_tuple=True))
        p = as_float64(probs[row, k])
        b = np.searchsorted(cuts, p, side="left")
        np.add.at(count, (b, k), weight[row])
        np.add.at(gap, (group[row], b, k), -p * weight[row])
        np.add.at(gap[:, 0], (group[row], k), p * weight[row])
    label_bin = np.searchsorted(cuts, as_float64(probs[torch.arange(len(y)), y]), side="left")
    np.add.at(hits, (label_bin, y), weight)
    np.add.at(gap, (group, label_bin, y), weight)
