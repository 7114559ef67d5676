"""The ladder of input maps: which family has signal, and is it worth its parameters on samples left out.

A rung extends the map by the family whose score test promises most; it is fitted with each fold left out in turn, and
kept only if the paired gain on the samples left out exceeds 1.64 standard errors half way to the fit. Half the way is
three quarters of what a step in the right direction gains, at half of its noise: with few labels it can be told from
nothing where the whole cannot. Where it is kept, the whole way is taken if it is better still and its own gain is as
certain; a useless rung that chance lets through then does a quarter of the harm. The gradients of samples left out, at
the map that was kept, choose the next family. Temperature alone is the lowest rung.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trueup.clamping.linearized import N_RESAMPLES
from trueup.clamping.natural_gradient import (
    MapFit,
    SampleGradients,
    fisher_gradients,
    logits_through,
    natural_gradient,
    teacher_gradients,
)
from trueup.clamping.network import Network
from trueup.clamping.problem import Loss, sample_order
from trueup.clamping.repair_maps import CONTAINS, FAMILIES, Composition, PixelSpace
from trueup.clamping.subspace_search import STANDARD_ERRORS
from trueup.core.splits import fold_mask

FOLDS = 3
SIGNIFICANCE, TAUGHT_SIGNIFICANCE = 0.25, 0.05
"""Families are tried if the p-value of a score test times the number of tests is smaller, so that all of them together
raise no more false alarms than that, and far fewer, since families overlap; samples left out have the last word. A
teacher's answers are many numbers a sample: what is there shows in them."""
STEPS, MORE_STEPS = 11, 8
"""Mini-batches of the search: from the identity, and from a poorer map."""
TAUGHT_STEPS = 9
"""Of a search for a teacher's answers on all samples."""
BATCHES = 5
"""Mini-batches into which the samples go."""
SMALLEST_BATCH, LARGEST_BATCH = 64, 256
"""Steps of fewer samples wander: the noise of a step costs r/2b in the loss, which one last step over all samples does
not wholly take back."""
FEWER_STEPS = 8
"""Where the smallest batch is more than a fifth of the samples, so that few samples cost no more passes."""
HALF = 0.5
"""Of the way from a map to the fit with more families, at which it is decided whether they help."""
GROUPS = 100
"""Of samples for each of which the others choose. They are small: where few samples bear most of a gain, taking a tenth
away would take the evidence with it from just those who gain."""
FAILURES = 2
"""Rungs in a row that do not help before the ladder ends."""
MANY = 150
"""Samples left out that suffice to refuse a rung before the other folds are fitted."""
COMPARABLE = 0.9
"""Of the largest promise; of families that promise about as much, the smallest is tried."""
BESIDE = 0.3
"""Of a family's promise; what another one promises beside it must be more for both to be tried as one rung."""
RENEWED = ("offset", "affine")
"""Families of which new batch-norm statistics do most by themselves."""
TOGETHER = 3
"""Families at most that are tried as one rung."""
_AT_ONCE = 100


@dataclass(frozen=True)
class Rung:
    """One step of the ladder, judged on samples left out of its fit."""

    name: str
    title: str
    size: int
    """Parameters beside the temperature."""
    parent: int
    """The number of the rung that it was compared with."""
    logits: np.ndarray = field(repr=False)
    """Of each sample, calibrated, from the fit that left it out, (n, classes)."""
    losses: np.ndarray = field(repr=False)
    """(n,)."""
    gain: float = 0.0
    """By how much the mean loss is below the parent's."""
    error: float = 0.0
    """Standard error of that."""
    kept: bool = True
    p_value: float | None = None
    """Of the score test by which the family was chosen."""
    wanted: float = STANDARD_ERRORS
    """Standard errors that the gain had to exceed."""
    since: int | None = None
    """A rung before the parent over which the gain must be certain as well, be it over the parent or not."""

    def helps(self, rungs: Sequence[Rung], rows: np.ndarray | slice = slice(None), share: float = 1.0) -> bool:
        """Whether some of the samples, a share of all, show the gains that are wanted.

        A share s of the samples shows √s of the standard errors that all of them show, and so many are asked of it.
        """
        asked = [(self.parent, self.wanted), *([] if self.since is None else [(self.since, STANDARD_ERRORS)])]
        for number, wanted in asked:
            gain, error = paired_gain(rungs[number].losses[rows], self.losses[rows])
            if not gain > wanted * math.sqrt(share) * error:
                return False
        return True


@dataclass(frozen=True)
class FoldState:
    """A map that was fitted without one fold."""

    out: Tensor
    """Mask of the samples left out."""
    composition: Composition
    temperature: float

    def part_way(self, end: FoldState, share: float) -> FoldState:
        """From here, brought to the same families, so far towards the end."""
        theta = torch.lerp(self.composition.theta.to(end.composition.theta), end.composition.theta, share)
        temperature = self.temperature ** (1 - share) * end.temperature**share
        return FoldState(self.out, end.composition.with_theta(theta), temperature)


@dataclass
class Ladder:
    """Where a climb has come to."""

    rungs: list[Rung]
    current: int
    folds: list[FoldState]
    p_values: dict[str, float]
    """Of each family, at the identity."""
    stopped: str


@dataclass(frozen=True)
class Climb:
    """What a ladder needs to know."""

    network: Network
    targets: Tensor
    """Labels (n,), or probabilities (n, classes) to come near to."""
    low: Tensor
    high: Tensor
    families: Sequence[str]
    seed: int
    budget: float
    """Forward-equivalents that may have been spent when a rung begins."""
    progress: Callable[[str], None]
    temperature: float | None = None
    """At which the search starts, and which temperature alone has; None fits it to the labels."""

    def temperature_of(self, logits: Tensor, rows: Tensor) -> float:
        """The temperature of some samples' logits."""
        return Loss().temperature(logits[rows], self.targets[rows]) if self.temperature is None else self.temperature

    def space(self, composition: Composition) -> PixelSpace:
        """The map in front of the network."""
        return PixelSpace(composition, self.low, self.high)

    @property
    def batch_size(self) -> int:
        """Of the search."""
        return min(max(math.ceil(len(self.targets) / BATCHES), SMALLEST_BATCH), LARGEST_BATCH)

    def search(self, composition: Composition, index: Tensor, temperature: float, steps: int, seed: int) -> MapFit:
        """Fit a map to some samples, from where it is."""
        steps = steps if self.batch_size > SMALLEST_BATCH else min(steps, FEWER_STEPS)
        return natural_gradient(
            self.network,
            self.space(composition),
            self.targets,
            index,
            temperature=temperature,
            steps=steps,
            batch_size=min(self.batch_size, len(index)),
            seed=seed,
        )


def climb(problem: Climb) -> Ladder:
    """Screen, extend, judge, until nothing promises a gain or two rungs in a row gave none."""
    network, targets = problem.network, problem.targets
    n = len(targets)
    plain = network.plain_logits()
    order = sample_order(network, Loss())
    folds = []
    scaled = torch.zeros_like(plain, dtype=torch.float64)
    for k in range(FOLDS):
        out = fold_mask(order, k, FOLDS)
        folds.append(FoldState(out, Composition([]), problem.temperature_of(plain, ~out)))
        scaled[out] = plain[out].double() / folds[-1].temperature
    rung = Rung("temperature", "temperature alone", 0, 0, scaled.numpy(), row_losses(scaled.numpy(), targets))
    ladder = Ladder([rung], 0, folds, {}, "")
    if not problem.families:
        ladder.stopped = "no map was asked for"
        return ladder
    problem.progress("screening families of input maps")
    everything = Composition([FAMILIES[name](network.shape) for name in problem.families])
    temperature = problem.temperature_of(plain, torch.ones(n, dtype=torch.bool))
    gradients = fisher_gradients(network, problem.space(everything), targets, temperature, seed=problem.seed)
    scores = _label_scores(*gradients, everything, problem.families)
    ladder.p_values = {name: _p_value(scores[name], problem.seed) for name in problem.families}
    p_values, refused, failures = dict(ladder.p_values), set[str](), 0
    while True:
        families = _choose(scores, p_values, refused, problem.seed, SIGNIFICANCE)
        if not families:
            ladder.stopped = "no other family has signal" if len(ladder.rungs) > 1 else "no family of maps has signal"
            return ladder
        if network.cost().equivalents > problem.budget:
            ladder.stopped = "the budget of passes was spent"
            return ladder
        problem.progress(f"input map: {' + '.join(families)}")
        kept = _try_families(problem, ladder, families, p_values[families[0]])
        if kept is None:
            refused.add(families[-1])  # of two the first may yet do alone
            failures += 1
            if failures == FAILURES:
                ladder.stopped = "two richer maps in a row did not help"
                return ladder
            continue
        ladder.folds, failures = kept, 0
        candidates = _candidates(problem.families, kept[0].composition, refused)
        scores = _held_out_scores(problem, kept, candidates)
        p_values = {name: _p_value(scores[name], problem.seed) for name in candidates}


def _try_families(problem: Climb, ladder: Ladder, families: Sequence[str], p_value: float) -> list[FoldState] | None:
    """Fit the map with more families, each fold left out in turn; judge it half way, and if that helps the whole way.

    One test decides, so that a useless rung is kept no more often than its level says.
    """
    start, current = ladder.current, ladder.rungs[ladder.current]
    halves, ends, logits = list[FoldState](), list[FoldState](), current.logits.copy()
    for number, fold in enumerate(ladder.folds):
        before, end = _fit_fold(problem, fold, families, number)
        ends.append(end)
        halves.append(before.part_way(end, HALF))
        held, losses = _judge_fold(problem, halves[-1], logits)
        # What does not help many samples left out is hardly kept by all; up to two thirds of its cost are saved.
        if held.sum() >= MANY and losses.mean() >= current.losses[held].mean():
            break
    composition = ends[0].composition
    name, title, size = composition.name, composition.title, len(composition.theta)
    rung = judge(
        ladder.rungs, ladder.current, name, f"half way: {title}", size, logits, problem.targets, p_value=p_value
    )
    ladder.rungs.append(rung if len(halves) == len(ladder.folds) else replace(rung, kept=False))
    if not ladder.rungs[-1].kept:
        return None
    ladder.current = len(ladder.rungs) - 1
    logits = rung.logits.copy()
    for end in ends:
        _judge_fold(problem, end, logits)
    whole = judge(
        ladder.rungs, ladder.current, name, title, size, logits, problem.targets, p_value=p_value, wanted=0.0,
        since=start,
    )  # fmt: skip
    ladder.rungs.append(whole)
    if not whole.kept:
        return halves
    ladder.current = len(ladder.rungs) - 1
    return ends


def _judge_fold(problem: Climb, state: FoldState, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Write the logits of the samples left out of a fit into their rows; their mask and their losses."""
    held = state.out.numpy()
    z = logits_through(problem.network, problem.space(state.composition), state.out.nonzero()[:, 0])
    logits[held] = z.double().numpy() / state.temperature
    return held, row_losses(logits[held], problem.targets[state.out])


def _held_out_scores(problem: Climb, folds: Sequence[FoldState], candidates: Sequence[str]) -> dict[str, Scores]:
    """Scores of families at the map of each fold, of the samples left out of its fit."""
    parts: list[dict[str, Scores]] = []
    for fold in folds:
        extended = _extended(fold.composition, candidates, problem.network.shape)
        index = fold.out.nonzero()[:, 0]
        gradients = fisher_gradients(
            problem.network, problem.space(extended), problem.targets, fold.temperature, index, seed=problem.seed
        )
        known = [part.name for part in fold.composition.parts]
        parts.append(_label_scores(*gradients, extended, candidates, known))
    return {name: _joined(parts, name) for name in candidates}


def judge(
    rungs: Sequence[Rung],
    parent: int,
    name: str,
    title: str,
    size: int,
    logits: np.ndarray,
    targets: Tensor,
    *,
    p_value: float | None = None,
    wanted: float = STANDARD_ERRORS,
    since: int | None = None,
) -> Rung:
    """A rung beside the one it would replace: kept if the paired gain exceeds so many standard errors."""
    losses = row_losses(logits, targets)
    gain, error = paired_gain(rungs[parent].losses, losses)
    rung = Rung(name, title, size, parent, logits, losses, gain, error, False, p_value, wanted, since)
    return replace(rung, kept=rung.helps(rungs))


def paired_gain(before: np.ndarray, after: np.ndarray) -> tuple[float, float]:
    """By how much the mean loss fell, and the standard error of that."""
    gains = before - after
    return float(gains.mean()), float(gains.std(ddof=1)) / math.sqrt(len(gains))


def row_losses(logits: np.ndarray, targets: Tensor) -> np.ndarray:
    """The cross-entropy of each row, of labels or of probabilities."""
    if targets.ndim == 1:
        return Loss().rows(torch.from_numpy(logits), targets, 1.0).numpy()
    terms = targets.double() * torch.log_softmax(torch.from_numpy(logits), dim=1)
    return -torch.where(targets > 0, terms, 0.0).sum(dim=1).numpy()  # a masked class has no part in it


def nested_rows(rungs: Sequence[Rung], groups: int = GROUPS) -> tuple[np.ndarray, np.ndarray]:
    """Losses and logits of each sample at the rung that other samples choose, so that those who chose do not judge."""
    losses, logits = rungs[0].losses.copy(), rungs[0].logits.copy()
    for group in range(groups):
        out, current = np.arange(len(losses)) % groups == group, 0
        for number, rung in enumerate(rungs[1:], start=1):
            if rung.parent != current:
                continue
            current = number if rung.helps(rungs, ~out, 1 - out.mean()) else current
        losses[out], logits[out] = rungs[current].losses[out], rungs[current].logits[out]
    return losses, logits


def average_folds(ladder: Ladder) -> Composition:
    """The mean of the maps that the folds found: to first order the fit to all samples, and without its last noise.

    Each sample is in all fits but one, so that the mean of their influences is what the whole has.
    """
    composition = ladder.folds[0].composition
    if not len(composition.theta):
        return composition
    return composition.with_theta(torch.stack([state.composition.theta for state in ladder.folds]).mean(dim=0))


def fit_to_teacher(problem: Climb, start: Composition | None = None) -> Composition:
    """A map that brings the network near to a teacher's answers; from `start`, its families alone.

    The answers are probabilities. The map is climbed to as with labels, but on one split: a third of the samples judges
    each rung by the cross-entropy to the answers. At the end it is fitted to all samples, and left as it was where that
    brings them no nearer.
    """
    network, targets = problem.network, problem.targets
    temperature = problem.temperature_of(network.plain_logits(), torch.ones(len(targets), dtype=torch.bool))
    state = FoldState(torch.zeros(len(targets), dtype=torch.bool), Composition([]) if start is None else start, 1.0)
    state = replace(state, temperature=temperature)
    if start is None:
        state = _climb_to_teacher(problem, state)
    if not len(state.composition.theta):
        return state.composition
    problem.progress("input map by the teacher's answers")
    everything = torch.arange(len(targets))
    fit = problem.search(state.composition, everything, state.temperature, TAUGHT_STEPS, problem.seed)
    found = state.composition.with_theta(fit.theta)

    def far(composition: Composition, at: float) -> float:
        logits = logits_through(network, problem.space(composition)).double().numpy() / at
        return float(row_losses(logits, targets).mean())

    nearer = far(found, fit.temperature) < far(state.composition, state.temperature)
    return found if nearer else state.composition


def _climb_to_teacher(problem: Climb, state: FoldState) -> FoldState:
    """Extend the map as long as a third of the samples, left out, come nearer to the teacher.

    The teacher's batch norm takes gains and offsets of channels away by itself. A map that does the same again brings
    the network near to the teacher's mistakes and no further; what is left without them is what only a map can do.
    """
    network, targets = problem.network, problem.targets
    renewed = [name for name in problem.families if name in RENEWED]
    families = [name for name in problem.families if name not in RENEWED]
    problem.progress("screening families against the teacher")
    everything = _extended(Composition([]), problem.families, network.shape)

    def gradients_at(composition: Composition, temperature: float) -> tuple[SampleGradients, SampleGradients]:
        return teacher_gradients(network, problem.space(composition), targets, temperature, seed=problem.seed)

    scores = _teacher_scores(*gradients_at(everything, state.temperature), everything, families, renewed)
    state = replace(state, out=fold_mask(sample_order(network, Loss()), 0, FOLDS))
    plain = network.plain_logits()[state.out].double().numpy() / state.temperature
    losses = row_losses(plain, targets[state.out])
    while True:
        p_values = {name: _p_value(scores[name], problem.seed) for name in scores}
        chosen = _choose(scores, p_values, set(), problem.seed, TAUGHT_SIGNIFICANCE)
        if not chosen or network.cost().equivalents > problem.budget:
            return state
        problem.progress(f"input map: {' + '.join(chosen)}")
        _, trial = _fit_fold(problem, state, chosen, 0)
        candidates = _candidates(families, trial.composition, set())
        extended = _extended(trial.composition, [*candidates, *renewed], network.shape)
        judged = gradients_at(extended, trial.temperature)
        nearer = row_losses(judged[0].logits[state.out].double().numpy() / trial.temperature, targets[state.out])
        gain, error = paired_gain(losses, nearer)
        if gain <= STANDARD_ERRORS * error:
            return state
        state, losses = trial, nearer
        known = [part.name for part in trial.composition.parts]
        scores = _teacher_scores(*judged, extended, candidates, [*known, *renewed])


def _fit_fold(problem: Climb, fold: FoldState, families: Sequence[str], number: int) -> tuple[FoldState, FoldState]:
    """The state with more families before and after their fit."""
    start = fold.composition
    for family in families:
        start = start.extend(family, problem.network.shape)
    steps = MORE_STEPS if len(fold.composition.theta) else STEPS
    index = (~fold.out).nonzero()[:, 0]
    fit = problem.search(start, index, fold.temperature, steps, problem.seed + number)
    before = FoldState(fold.out, start, fold.temperature)
    return before, FoldState(fold.out, start.with_theta(fit.theta), fit.temperature)


def _candidates(families: Sequence[str], composition: Composition, refused: set[str]) -> list[str]:
    have = {part.name for part in composition.parts}
    contained = {inner for name in have for inner in CONTAINS.get(name, ())}
    return [name for name in families if name not in have | contained | refused]


def _extended(composition: Composition, names: Sequence[str], shape: tuple[int, ...]) -> Composition:
    """With more families at the identity, for their gradients alone."""
    return Composition([*composition.parts, *(FAMILIES[name](shape) for name in names)])


class Scores(NamedTuple):
    """Per-sample gradients by a family's coordinates, what T and the families of the map explain taken out."""

    slope: np.ndarray
    """Whose mean is the slope of the loss, (n, r)."""
    curvature: np.ndarray
    """Whose second moment is its curvature, (m, r)."""
    chance: np.ndarray
    """Such as give the slope where there is none, with random signs, (l, r)."""

    def without(self, known: Scores) -> Scores:
        """What is left of the slope where the known coordinates are at their best."""
        if len(self.curvature) <= 2 * known.curvature.shape[1]:
            known = Scores(*(rows[:, :1] for rows in known))
        explained = np.linalg.lstsq(known.curvature, self.curvature, rcond=None)[0]
        return Scores(*(own - other @ explained for own, other in zip(self, known, strict=True)))


def _label_scores(
    labels: SampleGradients,
    fisher: SampleGradients,
    composition: Composition,
    names: Sequence[str],
    known: Sequence[str] = (),
) -> dict[str, Scores]:
    """Scores by labels: chance and curvature are the mean of what labels show and of what the answers expect of them.

    The first alone is blind to mistakes that did not happen, the second trusts the answers.
    """
    both = SampleGradients(
        labels.logits,
        np.concatenate([labels.theta, fisher.theta]),
        np.concatenate([labels.log_temperature, fisher.log_temperature]),
    )
    return _columns((labels, both, both), composition, names, known)


def _teacher_scores(
    answers: SampleGradients,
    drawn: SampleGradients,
    composition: Composition,
    names: Sequence[str],
    known: Sequence[str] = (),
) -> dict[str, Scores]:
    """Scores by a teacher's answers, which have no noise but that of the samples, and say nothing of the curvature."""
    return _columns((answers, drawn, answers), composition, names, known)


def _columns(
    gradients: Sequence[SampleGradients], composition: Composition, names: Sequence[str], known: Sequence[str]
) -> dict[str, Scores]:
    ends = np.cumsum([0, *composition.sizes])
    columns = {
        part.name: Scores(*(rows.theta[:, a:b] for rows in gradients))
        for part, a, b in zip(composition.parts, ends, ends[1:], strict=False)
    }
    temperature = Scores(*(rows.log_temperature[:, None] for rows in gradients))
    nuisance = _beside([temperature, *(columns[name] for name in known)])
    return {name: columns[name].without(nuisance) for name in names}


def _beside(scores: Sequence[Scores]) -> Scores:
    return Scores(*(np.column_stack(parts) for parts in zip(*scores, strict=True)))


def _joined(parts: Sequence[dict[str, Scores]], name: str) -> Scores:
    """Of all folds, in any order: only sums over samples are asked of them."""
    return Scores(*(np.concatenate(rows) for rows in zip(*(scores[name] for scores in parts), strict=True)))


def _p_value(scores: Scores, seed: int) -> float:
    n, r = scores.slope.shape
    return score_test(scores.slope, scores.chance, seed=seed) if n > 2 * r else 1.0


def score_test(slope: np.ndarray, chance: np.ndarray, *, seed: int = 0, n_resamples: int = N_RESAMPLES) -> float:
    """The p-value of the hypothesis that per-sample gradients (n, r) have mean zero.

    The statistic is n·ḡᵀM⁻¹ḡ, M the second moment of the rows of `chance` (m, r), gradients such as chance gives; its
    law is resampled by giving these random signs, which leaves M as it is. With `chance` the gradients themselves it is
    a test of signs, exact where they are symmetric about zero.

    >>> noise = np.random.default_rng(0).standard_t(3, size=(500, 4))
    >>> print(f"{score_test(noise, noise):.4f} {score_test(noise + [0.3, 0, 0, 0], noise):.4f}")
    0.9245 0.0010
    """
    n, m = len(slope), len(chance)
    spread = np.sqrt((chance**2).mean(axis=0))
    spread = np.where(spread > 0, spread, 1.0)
    slope, chance = slope / spread, chance / spread
    inverse = np.linalg.pinv(chance.T @ chance / m, rcond=1e-10, hermitian=True)
    mean = slope.mean(axis=0)
    observed = n * float(mean @ inverse @ mean)
    rng, at_least = np.random.default_rng(seed), 0
    for start in range(0, n_resamples, _AT_ONCE):
        signs = rng.integers(0, 2, size=(min(_AT_ONCE, n_resamples - start), m)) * 2.0 - 1.0
        drawn = signs @ chance / math.sqrt(m)
        at_least += int((np.einsum("ij,jk,ik->i", drawn, inverse, drawn) >= observed * (1 - 1e-9)).sum())
    return (1 + at_least) / (1 + n_resamples)


def _promise(scores: Scores) -> float:
    """The gain on new samples that a quadratic model promises: (S − 2r)/2n, S the score statistic.

    In the samples themselves it would be S/2n; fitting r parameters costs r/n of that elsewhere.
    """
    n, r = scores.slope.shape
    mean = scores.slope.mean(axis=0)
    curvature = scores.curvature.T @ scores.curvature / len(scores.curvature)
    inverse = np.linalg.pinv(curvature, rcond=1e-8, hermitian=True)
    return (n * float(mean @ inverse @ mean) - 2 * r) / (2 * n)


def _choose(
    scores: dict[str, Scores], p_values: dict[str, float], refused: set[str], seed: int, level: float
) -> tuple[str, ...]:
    """The family that promises most, and others that promise enough of what those before them cannot do; or none."""
    able = [name for name, p in p_values.items() if p * len(p_values) < level and name not in refused]
    promises = {name: promise for name in able if (promise := _promise(scores[name])) > 0}
    if not promises:
        return ()
    enough = COMPARABLE * max(promises.values())
    chosen = [
        min((name for name in promises if promises[name] >= enough), key=lambda name: scores[name].slope.shape[1])
    ]
    while len(chosen) < TOGETHER:
        known = _beside([scores[name] for name in chosen])
        beside = {
            name: scores[name].without(known)
            for name in promises
            if not any(name in (other, *CONTAINS.get(other, ())) or other in CONTAINS.get(name, ()) for other in chosen)
        }
        promised = {name: promise for name, rest in beside.items() if (promise := _promise(rest)) > 0}
        if not promised:
            break
        best = max(promised, key=lambda name: promised[name])
        if promised[best] < BESIDE * promises[chosen[0]]:
            break
        if _p_value(beside[best], seed) * len(p_values) >= level:
            break
        chosen.append(best)
    return tuple(chosen)
