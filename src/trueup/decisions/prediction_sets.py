"""Prediction sets: the classes that may be true, which hold the truth with a stated probability (split conformal).

A score says how strange a class would be for a row; the quantile of the scores of the true classes of n calibration
rows, taken at ⌈(n+1)(1−α)⌉, is the limit. If new rows are exchangeable with those, the set of all classes within the
limit holds the truth with probability at least 1 − α, whatever the network. Temperature scaling tends to enlarge APS
sets: it keeps the order of the classes within a row but changes how rows compare with each other.
"""

from __future__ import annotations

import math
import os
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from trueup.core import native
from trueup.core.arrays import (
    as_logits,
    as_tensors,
    as_vector,
    check_share,
    find_absent,
    match_kind,
    take_rows,
    upcast_half,
)
from trueup.core.clusters import as_clusters
from trueup.core.errors import InputError
from trueup.core.formatting import format_interval, format_number, format_percent, text_table
from trueup.core.module import ParametricModule
from trueup.core.splits import row_uniform, stratified_folds
from trueup.decisions.thresholds import as_groups
from trueup.io.artifacts import open_artifact, pack, require_safetensors_suffix, unpack, versions, write_artifact
from trueup.metrics.intervals import binomial_bounds

Score = Literal["lac", "aps", "raps"]
SCORES = ("lac", "aps", "raps")
PENALTIES = (0.001, 0.01, 0.1, 0.2, 0.5)
"""Of RAPS, among which the smallest sets decide."""
_ROUNDING = 1e-12  # of itself: sums of the same probabilities in another order
_FEW = 64  # the largest probabilities of a row, which nearly always hold its set


def conformal_quantile(scores: Any, alpha: float) -> float:
    """The ⌈(n+1)(1−α)⌉-th smallest of n scores; infinite where n is too small for that.

    >>> conformal_quantile([0.3, 0.1, 0.2, 0.4], 0.4), conformal_quantile([0.3, 0.1], 0.1)
    (0.3, inf)
    """
    s = np.sort(as_vector(scores, "scores").numpy())
    rank = math.ceil((len(s) + 1) * (1 - alpha) - 1e-9)
    return float(s[rank - 1]) if rank <= len(s) else math.inf


class PredictionSets(ParametricModule):
    """A rule from logits to sets of classes, (n, classes) of booleans: those whose score is within a limit.

    "lac": 1 − p_k, the smallest sets on average; "aps": the mass of all classes at least as probable as k, less U·p_k
    if randomised, sets that grow with the difficulty of a row; "raps": + λ·max(0, rank − k_reg), which trims long
    tails. Equally probable classes enter together. A set may be empty.
    Scores and limits are kept less 1, −p_k and minus the mass of the less probable classes, since near 1 they would
    lose the digits that tell a sure row from a very sure one.
    Sadinle et al. (2019); Romano et al. (2020); Angelopoulos et al. (2021).

    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(4000, 5)) * 2
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> rule = PredictionSets.fit(z[:2000], y[:2000], score="aps", alpha=0.1)
    >>> evaluate_sets(rule(z[2000:]), y[2000:]).coverage.value > 0.88
    True
    """

    quantile: Tensor

    def __init__(
        self,
        score: Score,
        quantile: Any,
        alpha: float,
        penalty: float = 0.0,
        rank: int = 0,
        randomised: bool = False,
        seed: int = 0,
        groups: Sequence[Hashable] | None = None,
        scores: Any = None,
        weights: Any = None,
    ) -> None:
        super().__init__()
        if score not in SCORES:
            raise InputError("score", "be lac, aps or raps", repr(score))
        self.score, self.alpha, self.penalty, self.rank = score, check_share(alpha, "alpha"), float(penalty), int(rank)
        self.randomised, self.seed = bool(randomised), int(seed)
        self.groups = None if groups is None else list(groups)
        self.keep("quantile", quantile)
        self.scores: Tensor | None
        self.weights: Tensor | None
        for name, value in (("scores", scores), ("weights", weights)):
            if value is None:
                self.register_buffer(name, None)
            else:
                self.keep(name, value)

    @classmethod
    def fit(
        cls,
        logits: Any,
        labels: Any,
        *,
        score: Score = "aps",
        alpha: float = 0.1,
        by_class: bool = False,
        groups: Any = None,
        weights: Any = None,
        clusters: Any = None,
        randomised: bool = True,
        penalty: float | None = None,
        rank: int | None = None,
        seed: int = 0,
    ) -> Self:
        """The limit from calibration rows that the network, and any calibrator before, has not seen.

        `by_class` takes a limit for each class, so that each is covered; one with fewer than 1/α − 1 rows is in every
        set. `groups` (n,) does so for groups. `weights` (n,), ratios of the new population's density to that of the
        rows, cover under a shift of the inputs; then the new rows need their weights too. RAPS without a `penalty`
        chooses it and the rank on a fifth of the rows, which then do not calibrate. Of `clusters` (n,), rows that are
        correlated such as the visits of a patient, one row each is used, drawn by the seed: the promise is about such a
        row of a new cluster. The U of a row follows from its logits and the seed, so that its set is the same wherever
        it stands; without it (`randomised=False`) the sets of a sharp network are empty or large. For export say
        `randomised=False`, or give `uniform`.
        """
        z, y = as_tensors(logits, labels, at_least=1)
        if sum((by_class, groups is not None, weights is not None)) > 1:
            raise ValueError("give one of by_class, groups and weights")
        given = None if groups is None else as_groups(groups, len(z), complete=True)
        weight = None if weights is None else as_vector(weights, "weights", length=len(z)).numpy()
        if weight is not None and (weight.min() < 0 or weight.max() == 0):
            raise InputError("weights", "be non-negative and not all zero", f"{weight.min():g}..{weight.max():g}")
        together = as_clusters(clusters, len(z))
        if together is not None:
            kept = together.one_row_each(seed)
            z, y = take_rows(z, y, torch.from_numpy(kept).to(z.device))
            given, weight = (None if part is None else part[kept] for part in (given, weight))
        options: dict[str, Any] = {"alpha": alpha, "randomised": randomised, "seed": seed}
        if score == "raps" and (penalty is None or rank is None):
            if len(z) < 10:
                raise InputError("logits", "have at least 10 rows to choose the penalty of raps", str(len(z)))
            fold = stratified_folds(z, y, 5)
            tune = torch.from_numpy(fold == 0).to(z.device)
            penalty, rank = _tune(*take_rows(z, y, tune), penalty, rank, options)
            z, y = take_rows(z, y, ~tune)
            given = None if given is None else given[fold != 0]
            weight = None if weight is None else weight[fold != 0]
        if score == "raps":
            options |= {"penalty": penalty, "rank": rank}
        rule = cls(score, math.inf, **options)
        own = rule.label_scores(z, y)
        true = y.cpu().numpy()
        if by_class:
            return cls(score, [conformal_quantile(own[true == k], alpha) for k in range(z.shape[1])], **options)
        if given is not None:
            members = sorted(set(given.tolist()), key=str)
            return cls(score, [conformal_quantile(own[given == g], alpha) for g in members], **options, groups=members)
        if weight is not None:
            order = np.argsort(own, kind="stable")
            return cls(score, math.nan, **options, scores=own[order], weights=weight[order])
        return cls(score, conformal_quantile(own, alpha), **options)

    def __call__(self, logits: Any, *, groups: Any = None, weights: Any = None, uniform: Any = None) -> Any:
        """The sets of rows (n, classes), of any kind of array, as booleans of its shape."""
        if isinstance(logits, Tensor):
            return super().__call__(logits, groups=groups, weights=weights, uniform=uniform)
        return match_kind(super().__call__(as_logits(logits), groups=groups, weights=weights, uniform=uniform), logits)

    def forward(self, logits: Tensor, groups: Any = None, weights: Any = None, uniform: Any = None) -> Tensor:
        """The sets of a tensor of logits; `uniform` (n,) replaces the numbers that follow from each row.

        No set has an option that its row does not have, a logit of −∞.
        """
        sets, absent = self._sets(logits, groups, weights, uniform), find_absent(logits)
        return sets if absent is None else sets & ~absent

    def _sets(self, logits: Tensor, groups: Any, weights: Any, uniform: Any) -> Tensor:
        limit = self._limits(logits.shape[0], groups, weights, logits.device)
        if self.quantile.ndim == 1 and self.groups is None:
            if logits.shape[1] != len(self.quantile):
                raise InputError("logits", f"have the {len(self.quantile)} classes of the rule", str(logits.shape[1]))
            return self.all_scores(logits, uniform=uniform) <= _widen(self.quantile)
        if torch.compiler.is_compiling():
            return self.all_scores(logits, uniform=uniform) <= _widen(limit)[:, None]
        u = None if self.score == "lac" else self._uniform(logits, uniform)
        sets = torch.empty(logits.shape, dtype=torch.bool, device=logits.device)
        for at in native.row_chunks(len(logits), logits.shape[1], native.CACHE):
            p = torch.softmax(upcast_half(logits[at]), dim=1)
            q = limit[at]
            if u is None:
                torch.ge(p, (-q[:, None]).to(p.dtype), out=sets[at])
                continue
            first_out = self._first_excluded(*(part.cpu().numpy() for part in (p, u[at], _widen(q))))
            torch.gt(p, torch.from_numpy(first_out).to(p.device)[:, None], out=sets[at])
        return sets

    def label_scores(self, logits: Any, labels: Any, *, uniform: Any = None) -> np.ndarray:
        """The score of each row's own label, less 1, (n,), in float64."""
        z, y = as_tensors(logits, labels)
        u = self._uniform(z, uniform)
        parts = []
        for at in native.row_chunks(len(z), z.shape[1], native.CACHE):
            p = torch.softmax(upcast_half(z[at]), dim=1)
            own = p.gather(1, y[at, None])
            if self.score == "lac":
                parts.append(-own[:, 0].double())
                continue
            below = p < own
            score = -(p * below).sum(dim=1, dtype=torch.float64) - u[at] * own[:, 0]
            if self.penalty:
                score = score + self.penalty * (p.shape[1] - below.sum(dim=1) - self.rank).clamp(min=0).double()
            parts.append(score)
        return torch.cat(parts).cpu().numpy()

    def all_scores(self, logits: Tensor, *, uniform: Any = None) -> Tensor:
        """The score of every class, less 1, (n, classes), in float64."""
        p = torch.softmax(upcast_half(logits), dim=1)
        if self.score == "lac":
            return -p.double()
        ordered, index = p.sort(dim=1, descending=True)
        # Equal probabilities are a run: they share the mass of the runs after it, and the rank of its end.
        begins = torch.cat([torch.ones_like(ordered[:, :1]), (ordered[:, 1:] != ordered[:, :-1]).to(p.dtype)], dim=1)
        run = begins.to(torch.int64).cumsum(dim=1) - 1
        nothing = torch.zeros_like(ordered, dtype=torch.float64)
        tail = nothing.scatter_add(1, run, ordered.double()).flip(1).cumsum(dim=1).flip(1)
        after = torch.cat([tail[:, 1:], torch.zeros_like(tail[:, :1])], dim=1).gather(1, run)
        last = nothing.scatter_add(1, run, torch.ones_like(nothing)).cumsum(dim=1).gather(1, run)
        score = -after - self._uniform(logits, uniform)[:, None] * ordered
        if self.penalty:
            score = score + self.penalty * (last - self.rank).clamp(min=0)
        return torch.empty_like(score).scatter(1, index, score)

    def _first_excluded(self, p: np.ndarray, u: np.ndarray, limit: np.ndarray) -> np.ndarray:
        """The largest probability of each row that is not in its set: scores grow as probabilities fall.

        Only the largest few are sorted, and more where they all are in the set. Sums run from the small end.
        """
        classes = p.shape[1]
        out = np.full(len(p), -1.0, p.dtype)
        rows = np.arange(len(p))
        width = min(_FEW, classes)
        while len(rows):
            part = p if len(rows) == len(p) else p[rows]
            low, top = np.zeros((len(rows), 1)), part
            if width < classes:
                part = np.partition(part, classes - width, axis=1)
                low = part[:, : classes - width].sum(axis=1, dtype=np.float64, keepdims=True)
                top = part[:, classes - width :]
            top = np.sort(top, axis=1)
            mass = np.concatenate([low, top[:, :-1]], axis=1, dtype=np.float64).cumsum(axis=1)
            score = -(mass + u[rows, None] * top)
            if self.penalty:
                score += self.penalty * np.maximum(np.arange(width, 0, -1) - self.rank, 0)
            outside = (score > limit[rows, None]).sum(axis=1)
            found = np.flatnonzero(outside)
            out[rows[found]] = top[found, outside[found] - 1]
            rows = rows[outside == 0] if width < classes else rows[:0]
            width = min(8 * width, classes)
        return out

    def _uniform(self, logits: Tensor, uniform: Any) -> Tensor:
        if uniform is not None:
            return torch.as_tensor(uniform, dtype=torch.float64, device=logits.device)
        if not self.randomised or self.score == "lac":
            return torch.zeros(logits.shape[0], dtype=torch.float64, device=logits.device)
        if torch.compiler.is_compiling():
            raise ValueError("randomised sets need uniform to be exported; fit with randomised=False, or give it")
        return torch.from_numpy(row_uniform(logits, self.seed)).to(logits.device)

    def _limits(self, n: int, groups: Any, weights: Any, device: torch.device) -> Tensor:
        """The limit of each row."""
        if self.groups is not None:
            if groups is None:
                raise ValueError("groups must be given: each group has a limit of its own")
            place = {group: k for k, group in enumerate(self.groups)}
            limits = np.append(self.quantile.cpu().numpy(), math.inf)  # all classes, for a group that was never seen
            return torch.from_numpy(limits[[place.get(g, -1) for g in as_groups(groups, n).tolist()]]).to(device)
        if self.scores is not None and self.weights is not None:
            if weights is None:
                raise ValueError("weights must be given: the limit of a row depends on its own")
            own = as_vector(weights, "weights", length=n).numpy()
            if n and own.min() < 0:
                raise InputError("weights", "be non-negative", f"{own.min():g}")
            mass = np.cumsum(self.weights.cpu().numpy())
            at = np.searchsorted(mass, (1 - self.alpha) * (mass[-1] + own) * (1 - 1e-12), side="left")
            return torch.from_numpy(np.append(self.scores.cpu().numpy(), math.inf)[at]).to(device)
        return self.quantile.to(device).expand(n) if self.quantile.ndim == 0 else self.quantile


def _widen(limit: Tensor) -> Tensor:
    """A limit that rounding cannot turn round."""
    return limit + _ROUNDING * limit.abs()


def _tune(z: Tensor, y: Tensor, penalty: float | None, rank: int | None, options: dict[str, Any]) -> tuple[float, int]:
    """The rank that covers, and of the penalties that of the smallest sets."""
    alpha = options["alpha"]
    if rank is None:
        p = torch.softmax(upcast_half(z), dim=1)
        ranks = (p >= p.gather(1, y[:, None])).sum(dim=1).double()
        found = conformal_quantile(ranks, alpha)
        rank = int(min(found, z.shape[1]))
    if penalty is not None:
        return penalty, rank
    sizes = {}
    for one in PENALTIES:
        rule = PredictionSets("raps", math.inf, **options, penalty=one, rank=rank)
        limited = PredictionSets(
            "raps", conformal_quantile(rule.label_scores(z, y), alpha), **options, penalty=one, rank=rank
        )
        sizes[one] = float(limited(z).sum(dim=1).double().mean())
    return min(PENALTIES, key=lambda one: sizes[one]), rank


@dataclass(frozen=True)
class Coverage:
    """How often sets hold the truth, with an exact interval."""

    value: float
    low: float
    high: float
    rows: int


@dataclass(frozen=True, eq=False)
class SetScores:
    """How prediction sets do on labelled rows."""

    coverage: Coverage
    size: float
    """The mean number of classes in a set."""
    empty: float
    """The share of empty sets."""
    by_size: dict[str, Coverage]
    """Coverage of the sets of each size: a rule that adapts covers alike in all."""
    by_class: tuple[Coverage, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON; what is not defined is None."""

        def plain(one: Coverage) -> dict[str, Any]:
            return {name: None if isinstance(x, float) and math.isnan(x) else x for name, x in vars(one).items()}

        return {
            "schema": 1,
            "coverage": plain(self.coverage),
            "size": None if math.isnan(self.size) else self.size,
            "empty": None if math.isnan(self.empty) else self.empty,
            "by_size": {name: plain(one) for name, one in self.by_size.items()},
            "by_class": [plain(one) for one in self.by_class],
        }

    def __str__(self) -> str:
        c = self.coverage
        lines = [
            f"The sets hold the truth in {format_percent(c.value, 1)} of {c.rows:,} rows "
            f"(95 % interval {format_percent(c.low, 1)} to {format_percent(c.high, 1)}) "
            f"and have {self.size:.2f} classes on average; {format_percent(self.empty, 1)} are empty.",
            "",
            text_table(
                [["set size", "rows", "coverage", "95 % interval"]]
                + [
                    [name, f"{one.rows:,}", format_number(one.value), format_interval(one.low, one.high)]
                    for name, one in self.by_size.items()
                ]
            ),
        ]
        seen = [(one.value, k) for k, one in enumerate(self.by_class) if one.rows]
        if seen:
            worst = min(seen)
            lines += ["", f"The class covered least is {worst[1]}: {format_percent(worst[0], 1)}."]
        return "\n".join(lines)


def evaluate_sets(sets: Any, labels: Any) -> SetScores:
    """Coverage, size and coverage by size and class of prediction sets (n, classes) of booleans.

    >>> print(evaluate_sets([[True, False], [True, True], [False, True]], [0, 1, 0]))
    The sets hold the truth in 66.7 % of 3 rows (95 % interval 9.4 % to 99.2 %) and have 1.33 classes on average; 0.0 %
    are empty.
    <BLANKLINE>
    set size  rows  coverage     95 % interval
    1            2    0.5000  [0.0126, 0.9874]
    2            1    1.0000  [0.0250, 1.0000]
    <BLANKLINE>
    The class covered least is 0: 50.0 %.
    """
    chosen = np.asarray(sets.cpu() if isinstance(sets, Tensor) else sets)
    if chosen.ndim != 2 or chosen.dtype != bool:
        raise InputError("sets", "be booleans of shape (n, classes)", f"{chosen.dtype} of shape {chosen.shape}")
    true = as_tensors(np.zeros(chosen.shape), labels, at_least=1)[1].numpy()
    held = chosen[np.arange(len(true)), true]
    size = chosen.sum(axis=1)
    bands = _size_bands(chosen.shape[1])
    by_size = {name: _coverage(held[(size >= low) & (size <= high)]) for name, low, high in bands}
    return SetScores(
        _coverage(held),
        float(size.mean()),
        float((size == 0).mean()),
        {name: one for name, one in by_size.items() if one.rows},
        tuple(_coverage(held[true == k]) for k in range(chosen.shape[1])),
    )


def _coverage(held: np.ndarray) -> Coverage:
    n, hits = len(held), float(held.sum())
    if not n:
        return Coverage(math.nan, math.nan, math.nan, 0)
    low, high = binomial_bounds(np.array(hits), np.array(float(n)), 0.025)
    return Coverage(hits / n, float(low), float(high), n)


def _size_bands(classes: int) -> list[tuple[str, int, int]]:
    ends = [0, 1, 2, 3, 5, 10, 30, 100, 300, 1000]
    ends = [*[end for end in ends if end < classes], classes]
    bands = [("0", 0, 0)]
    for low, high in pairwise(ends):
        bands.append((f"{high}" if high == low + 1 else f"{low + 1}–{high}", low + 1, high))
    return bands


def save_prediction_sets(rule: PredictionSets, path: str | os.PathLike[str], *, summary: Any = None) -> None:
    """Write a rule to a `.safetensors` file that is either complete or not there; `summary` is a note, plain data.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save_prediction_sets(PredictionSets("lac", -0.3, 0.1), f"{folder}/sets.safetensors")
    ...     load_prediction_sets(f"{folder}/sets.safetensors").quantile.item()
    -0.3
    """
    require_safetensors_suffix(path)
    if type(rule) is not PredictionSets:
        raise InputError("rule", "be a PredictionSets", type(rule).__name__)
    tensors: dict[str, Tensor] = {}
    content = {"prediction_sets": pack(rule.config(), "rule", tensors), "versions": versions(), "summary": summary}
    write_artifact(path, "prediction_sets", content, tensors)


def load_prediction_sets(path: str | os.PathLike[str]) -> PredictionSets:
    """Read a rule that `save_prediction_sets` wrote; of anything else one sentence says what is wrong."""
    with open_artifact(path, "prediction_sets", {"prediction_sets", "versions", "summary"}) as artifact:
        config = unpack(artifact.content["prediction_sets"], artifact.tensors())
        try:
            return PredictionSets(**config)
        except TypeError as error:
            raise ValueError(f"PredictionSets does not take the parameters of the file: {error}") from None
