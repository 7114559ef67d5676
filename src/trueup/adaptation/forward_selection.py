"""Forward selection of input maps: score tests propose a family, samples left out keep or refuse it.

A step extends the map by the family whose score test promises most. It is fitted with each fold left out in turn, and
kept only if the paired gain on the samples left out exceeds 1.64 standard errors half way to the fit. Half the way has
three quarters of the gain of a step in the right direction, at half of its noise, so that few labels can show it. If it
is kept, the whole way is taken if it is better still and its own gain is as certain; a useless step that passes by
chance then does a quarter of the harm. The gradients of samples left out, at the map that was kept, choose the next
family. The first step is temperature alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trueup._core.splits import fold_mask
from trueup.adaptation.composition import Composition, PixelSpace
from trueup.adaptation.input_maps import CONTAINS, FAMILIES
from trueup.adaptation.natural_gradient import (
    MapFit,
    SampleGradients,
    SearchSchedule,
    fisher_gradients,
    logits_through,
    natural_gradient,
    teacher_gradients,
)
from trueup.clamping.linearized import N_RESAMPLES
from trueup.clamping.network import Network
from trueup.clamping.problem import Loss, paired_gain, sample_order
from trueup.clamping.subspace_search import STANDARD_ERRORS

N_FOLDS = 3
SIGNIFICANCE, TEACHER_SIGNIFICANCE = 0.25, 0.05
"""Families are tried if the p-value of a score test times the number of tests is smaller: with Bonferroni's correction
few false alarms come through, and samples left out decide. A teacher's probabilities have less noise than labels."""
FIRST_STEPS, LATER_STEPS, TEACHER_STEPS = 11, 8, 9
"""Mini-batches of a search: from the identity, from a poorer map, and for a teacher's probabilities on all samples."""
BATCHES_PER_EPOCH = 5
MIN_BATCH, MAX_BATCH = 64, 256
"""Smaller batches have too much noise: a step costs r/2b in the loss, which one step over all samples keeps in part."""
SMALL_SAMPLE_STEPS = 8
"""Mini-batches where the smallest batch is more than a fifth of the samples: few samples then cost no more passes."""
STEP_SHARE = 0.5
"""Share of the way from a map to the fit with more families, at which it is decided whether they help."""
N_GROUPS = 100
"""Number of leave-one-group-out groups. They are small: where few samples have most of a gain, leaving out a tenth
would take the evidence away from just those that gain."""
MAX_FAILURES = 2
"""Steps in a row that do not help before the selection ends."""
MIN_HELD_OUT_TO_STOP = 150
"""Samples left out that suffice to refuse a step before the other folds are fitted."""
COMPARABLE_GAIN = 0.9
"""Share of the largest expected gain; of families that reach it, the smallest is tried."""
MIN_EXTRA_GAIN = 0.3
"""Share of a family's expected gain that another one must add for both to be tried as one step."""
MAX_FAMILIES_PER_STEP = 3
BATCH_NORM_FAMILIES = ("offset", "affine")
"""Families most of which new batch-norm statistics do by themselves."""
_AT_ONCE = 100


@dataclass(frozen=True)
class SelectionStep:
    """One step of the selection, scored on samples left out of its fit."""

    name: str
    title: str
    size: int
    """Parameters besides the temperature."""
    parent: int
    """The number of the step that it was compared with."""
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
    required: float = STANDARD_ERRORS
    """Standard errors that the gain had to exceed."""
    baseline: int | None = None
    """An earlier step over which the gain must be certain as well."""

    def helps(self, steps: Sequence[SelectionStep], rows: np.ndarray | slice = slice(None), share: float = 1.0) -> bool:
        """Whether some of the samples, a share of all, show the required gains.

        A share s of the samples shows √s of the standard errors that all of them show, and so many are required of it.
        """
        asked = [(self.parent, self.required), *([] if self.baseline is None else [(self.baseline, STANDARD_ERRORS)])]
        for number, required in asked:
            gain, error = paired_gain(steps[number].losses[rows], self.losses[rows])
            if not gain > required * math.sqrt(share) * error:
                return False
        return True


@dataclass(frozen=True)
class FoldState:
    """A map that was fitted without one fold."""

    out: Tensor
    """Mask of the samples left out."""
    composition: Composition
    temperature: float

    def interpolate(self, end: FoldState, share: float) -> FoldState:
        """A share of the way from this map, brought to the same families, to another."""
        theta = torch.lerp(self.composition.theta.to(end.composition.theta), end.composition.theta, share)
        temperature = self.temperature ** (1 - share) * end.temperature**share
        return FoldState(self.out, end.composition.with_theta(theta), temperature)


@dataclass
class ForwardSelection:
    """The steps so far, and the maps of the step that is kept."""

    steps: list[SelectionStep]
    current: int
    """The number of the step that is kept."""
    folds: list[FoldState]
    p_values: dict[str, float]
    """Of each family, at the identity."""
    stopped: str
    """Why it ended."""

    def score_step(
        self,
        name: str,
        title: str,
        size: int,
        logits: np.ndarray,
        targets: Tensor,
        *,
        p_value: float | None = None,
        required: float = STANDARD_ERRORS,
        baseline: int | None = None,
    ) -> SelectionStep:
        """Add a step; it becomes the current one if its paired gain exceeds the required standard errors."""
        losses = row_losses(logits, targets)
        gain, error = paired_gain(self.steps[self.current].losses, losses)
        step = SelectionStep(
            name, title, size, self.current, logits, losses, gain, error, False, p_value, required, baseline
        )
        step = replace(step, kept=step.helps(self.steps))
        self.steps.append(step)
        self.current = len(self.steps) - 1 if step.kept else self.current
        return step


@dataclass(frozen=True)
class MapSearch:
    """What a search for an input map needs to know."""

    network: Network
    targets: Tensor
    """Labels (n,), or probabilities (n, classes) of a teacher."""
    low: Tensor
    high: Tensor
    families: Sequence[str]
    seed: int
    budget: float
    """Forward-equivalents that may have been spent when a step begins."""
    progress: Callable[[str], None]
    temperature: float | None = None
    """At which the search starts, and which temperature alone has; None fits it to the labels."""

    def temperature_of(self, logits: Tensor, rows: Tensor) -> float:
        """The temperature of some samples' logits."""
        return Loss().temperature(logits[rows], self.targets[rows]) if self.temperature is None else self.temperature

    def space(self, composition: Composition) -> PixelSpace:
        """The map in front of the network."""
        return PixelSpace(composition, self.low, self.high)

    def fit(self, composition: Composition, index: Tensor, temperature: float, steps: int, seed: int) -> MapFit:
        """Fit a map to some samples, from where it is."""
        batch_size = min(max(math.ceil(len(self.targets) / BATCHES_PER_EPOCH), MIN_BATCH), MAX_BATCH)
        steps = steps if batch_size > MIN_BATCH else min(steps, SMALL_SAMPLE_STEPS)
        schedule = SearchSchedule(steps, min(batch_size, len(index)), seed)
        return natural_gradient(self.network, self.space(composition), self.targets, index, temperature, schedule)

    def extended(self, composition: Composition, names: Sequence[str]) -> Composition:
        """The map with more families at the identity, for their gradients alone."""
        return Composition([*composition.parts, *(FAMILIES[name](self.network.shape) for name in names)])


def select_maps(search: MapSearch) -> ForwardSelection:
    """Screen, extend and score, until no family promises a gain or two steps in a row gave none."""
    network, targets = search.network, search.targets
    plain = network.plain_logits()
    order = sample_order(network, Loss())
    folds, scaled = [], torch.zeros_like(plain, dtype=torch.float64)
    for k in range(N_FOLDS):
        out = fold_mask(order, k, N_FOLDS)
        folds.append(FoldState(out, Composition([]), search.temperature_of(plain, ~out)))
        scaled[out] = plain[out].double() / folds[-1].temperature
    losses = row_losses(scaled.numpy(), targets)
    first = SelectionStep("temperature", "temperature alone", 0, 0, scaled.numpy(), losses)
    selection = ForwardSelection([first], 0, folds, {}, "no map was asked for")
    if not search.families:
        return selection
    search.progress("screening families of input maps")
    everything = search.extended(Composition([]), search.families)
    temperature = search.temperature_of(plain, torch.ones(len(targets), dtype=torch.bool))
    gradients = fisher_gradients(network, search.space(everything), targets, temperature, seed=search.seed)
    scores = _label_scores(*gradients, everything, search.families)
    selection.p_values = {name: _p_value(scores[name], search.seed) for name in search.families}
    p_values, refused, failures = dict(selection.p_values), set[str](), 0
    while True:
        families = _choose(scores, p_values, refused, search.seed, SIGNIFICANCE)
        if not families:
            tried = len(selection.steps) > 1
            selection.stopped = "no other family has signal" if tried else "no family of maps has signal"
            return selection
        if network.cost().equivalents > search.budget:
            selection.stopped = "the budget of passes was spent"
            return selection
        search.progress(f"input map: {' + '.join(families)}")
        kept = _try_families(search, selection, families, p_values[families[0]])
        if kept is None:
            refused.add(families[-1])  # of two the first may yet do alone
            failures += 1
            if failures == MAX_FAILURES:
                selection.stopped = "two richer maps in a row did not help"
                return selection
            continue
        selection.folds, failures = kept, 0
        candidates = _candidates(search.families, kept[0].composition, refused)
        scores = _held_out_scores(search, kept, candidates)
        p_values = {name: _p_value(scores[name], search.seed) for name in candidates}


def _try_families(
    search: MapSearch, selection: ForwardSelection, families: Sequence[str], p_value: float
) -> list[FoldState] | None:
    """Fit the map with more families, each fold left out in turn; score it half way, and if that helps the whole way.

    One test decides, so that a useless step is kept no more often than its level says.
    """
    start, targets = selection.current, search.targets
    current = selection.steps[start]
    halves, ends, logits = list[FoldState](), list[FoldState](), current.logits.copy()
    for number, fold in enumerate(selection.folds):
        before, end = _fit_fold(search, fold, families, number)
        ends.append(end)
        halves.append(before.interpolate(end, STEP_SHARE))
        held, losses = _score_fold(search, halves[-1], logits)
        # What does not help many samples left out is hardly kept by all; up to two thirds of its cost are saved.
        if held.sum() >= MIN_HELD_OUT_TO_STOP and losses.mean() >= current.losses[held].mean():
            break
    composition = ends[0].composition
    name, title, size = composition.name, composition.title, len(composition.theta)
    half = selection.score_step(name, f"half way: {title}", size, logits, targets, p_value=p_value)
    if len(halves) < len(selection.folds):
        selection.steps[-1], selection.current = replace(half, kept=False), start
    if not selection.steps[-1].kept:
        return None
    logits = half.logits.copy()
    for end in ends:
        _score_fold(search, end, logits)
    whole = selection.score_step(name, title, size, logits, targets, p_value=p_value, required=0.0, baseline=start)
    return ends if whole.kept else halves


def _score_fold(search: MapSearch, state: FoldState, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Write the logits of the samples left out of a fit into their rows; their mask and their losses."""
    held = state.out.numpy()
    z = logits_through(search.network, search.space(state.composition), state.out.nonzero()[:, 0])
    logits[held] = z.double().numpy() / state.temperature
    return held, row_losses(logits[held], search.targets[state.out])


def _held_out_scores(search: MapSearch, folds: Sequence[FoldState], candidates: Sequence[str]) -> dict[str, Scores]:
    """Scores of families at the map of each fold, of the samples left out of its fit."""
    parts: list[dict[str, Scores]] = []
    for fold in folds:
        extended = search.extended(fold.composition, candidates)
        index = fold.out.nonzero()[:, 0]
        gradients = fisher_gradients(
            search.network, search.space(extended), search.targets, fold.temperature, index, seed=search.seed
        )
        fitted = [part.name for part in fold.composition.parts]
        parts.append(_label_scores(*gradients, extended, candidates, fitted))
    # In any order: only sums over samples are asked of them.
    return {
        name: Scores(*(np.concatenate(rows) for rows in zip(*(scores[name] for scores in parts), strict=True)))
        for name in candidates
    }


def row_losses(logits: np.ndarray, targets: Tensor) -> np.ndarray:
    """The cross-entropy of each row, of labels or of probabilities."""
    if targets.ndim == 1:
        return Loss().rows(torch.from_numpy(logits), targets, 1.0).numpy()
    terms = targets.double() * torch.log_softmax(torch.from_numpy(logits), dim=1)
    return -torch.where(targets > 0, terms, 0.0).sum(dim=1).numpy()  # a masked class has no part in it


def nested_rows(steps: Sequence[SelectionStep], groups: int = N_GROUPS) -> tuple[np.ndarray, np.ndarray]:
    """Losses and logits of each sample at the step that the other groups of samples choose."""
    losses, logits = steps[0].losses.copy(), steps[0].logits.copy()
    for group in range(groups):
        out, current = np.arange(len(losses)) % groups == group, 0
        for number, step in enumerate(steps[1:], start=1):
            if step.parent == current and step.helps(steps, ~out, 1 - out.mean()):
                current = number
        losses[out], logits[out] = steps[current].losses[out], steps[current].logits[out]
    return losses, logits


def average_folds(selection: ForwardSelection) -> Composition:
    """The mean of the maps of the folds: to first order the fit to all samples, with less noise.

    Each sample is in all fits but one, so that the mean of their influences is that of the whole.
    """
    composition = selection.folds[0].composition
    if not len(composition.theta):
        return composition
    return composition.with_theta(torch.stack([state.composition.theta for state in selection.folds]).mean(dim=0))


def fit_to_teacher(search: MapSearch, start: Composition | None = None) -> Composition:
    """A map that brings the network near to a teacher's probabilities; from `start`, its families alone.

    Families are selected as with labels, but on one split: a third of the samples scores each step by the cross-entropy
    to the teacher. At the end the map is fitted to all samples, and left as it was where that brings them no nearer.
    """
    network, targets = search.network, search.targets
    everything = torch.ones(len(targets), dtype=torch.bool)
    temperature = search.temperature_of(network.plain_logits(), everything)
    state = FoldState(~everything, Composition([]) if start is None else start, temperature)
    if start is None:
        state = _select_for_teacher(search, state)
    if not len(state.composition.theta):
        return state.composition
    search.progress("input map by the teacher's answers")
    index = torch.arange(len(targets))
    fit = search.fit(state.composition, index, state.temperature, TEACHER_STEPS, search.seed)
    fitted = state.composition.with_theta(fit.theta)

    def distance(composition: Composition, at: float) -> float:
        logits = logits_through(network, search.space(composition)).double().numpy() / at
        return float(row_losses(logits, targets).mean())

    nearer = distance(fitted, fit.temperature) < distance(state.composition, state.temperature)
    return fitted if nearer else state.composition


def _select_for_teacher(search: MapSearch, state: FoldState) -> FoldState:
    """Extend the map as long as a third of the samples, left out, come nearer to the teacher.

    The teacher's batch norm takes gains and offsets of channels away by itself. A map that does the same again brings
    the network near to the teacher's mistakes and no further; what is left without them is what only a map can do.
    """
    network, targets = search.network, search.targets
    renewed = [name for name in search.families if name in BATCH_NORM_FAMILIES]
    families = [name for name in search.families if name not in BATCH_NORM_FAMILIES]
    search.progress("screening families against the teacher")
    everything = search.extended(Composition([]), search.families)

    def gradients_at(composition: Composition, temperature: float) -> tuple[SampleGradients, SampleGradients]:
        return teacher_gradients(network, search.space(composition), targets, temperature, seed=search.seed)

    scores = _teacher_scores(*gradients_at(everything, state.temperature), everything, families, renewed)
    state = replace(state, out=fold_mask(sample_order(network, Loss()), 0, N_FOLDS))
    plain = network.plain_logits()[state.out].double().numpy() / state.temperature
    losses = row_losses(plain, targets[state.out])
    while True:
        p_values = {name: _p_value(scores[name], search.seed) for name in scores}
        chosen = _choose(scores, p_values, set(), search.seed, TEACHER_SIGNIFICANCE)
        if not chosen or network.cost().equivalents > search.budget:
            return state
        search.progress(f"input map: {' + '.join(chosen)}")
        _, trial = _fit_fold(search, state, chosen, 0)
        candidates = _candidates(families, trial.composition, set())
        extended = search.extended(trial.composition, [*candidates, *renewed])
        gradients = gradients_at(extended, trial.temperature)
        nearer = row_losses(gradients[0].logits[state.out].double().numpy() / trial.temperature, targets[state.out])
        gain, error = paired_gain(losses, nearer)
        if gain <= STANDARD_ERRORS * error:
            return state
        state, losses = trial, nearer
        fitted = [part.name for part in trial.composition.parts]
        scores = _teacher_scores(*gradients, extended, candidates, [*fitted, *renewed])


def _fit_fold(search: MapSearch, fold: FoldState, families: Sequence[str], number: int) -> tuple[FoldState, FoldState]:
    """The state with more families before and after their fit."""
    start = fold.composition
    for family in families:
        start = start.extend(family, search.network.shape)
    steps = LATER_STEPS if len(fold.composition.theta) else FIRST_STEPS
    index = (~fold.out).nonzero()[:, 0]
    fit = search.fit(start, index, fold.temperature, steps, search.seed + number)
    before = FoldState(fold.out, start, fold.temperature)
    return before, FoldState(fold.out, start.with_theta(fit.theta), fit.temperature)


def _candidates(families: Sequence[str], composition: Composition, refused: set[str]) -> list[str]:
    have = {part.name for part in composition.parts}
    contained = {inner for name in have for inner in CONTAINS.get(name, ())}
    return [name for name in families if name not in have | contained | refused]


class Scores(NamedTuple):
    """Per-sample gradients by a family's coordinates, without what T and the families of the map explain."""

    slope: np.ndarray
    """Whose mean is the slope of the loss, (n, r)."""
    curvature: np.ndarray
    """Whose second moment is its curvature, (m, r)."""
    null: np.ndarray
    """Gradients for simulating the null distribution by sign flips, (l, r)."""

    def without(self, known: Scores) -> Scores:
        """What is left of the slope where the known coordinates are at their best."""
        if len(self.curvature) <= 2 * known.curvature.shape[1]:
            known = Scores(*(rows[:, :1] for rows in known))
        explained = np.linalg.lstsq(known.curvature, self.curvature, rcond=None)[0]
        return Scores(*(rows - other @ explained for rows, other in zip(self, known, strict=True)))


def _label_scores(
    labels: SampleGradients,
    fisher: SampleGradients,
    composition: Composition,
    names: Sequence[str],
    fitted: Sequence[str] = (),
) -> dict[str, Scores]:
    """Scores by labels: null distribution and curvature average the observed and the expected Fisher information.

    The first alone is blind to mistakes that did not happen, the second trusts the predictions.
    """
    both = SampleGradients(
        labels.logits,
        np.concatenate([labels.theta, fisher.theta]),
        np.concatenate([labels.log_temperature, fisher.log_temperature]),
    )
    return _columns((labels, both, both), composition, names, fitted)


def _teacher_scores(
    gradients: SampleGradients,
    drawn: SampleGradients,
    composition: Composition,
    names: Sequence[str],
    fitted: Sequence[str] = (),
) -> dict[str, Scores]:
    """Scores by a teacher's probabilities; labels drawn from them give the curvature."""
    return _columns((gradients, drawn, gradients), composition, names, fitted)


def _columns(
    gradients: Sequence[SampleGradients], composition: Composition, names: Sequence[str], fitted: Sequence[str]
) -> dict[str, Scores]:
    ends = np.cumsum([0, *composition.sizes])
    columns = {
        part.name: Scores(*(rows.theta[:, a:b] for rows in gradients))
        for part, a, b in zip(composition.parts, ends, ends[1:], strict=False)
    }
    temperature = Scores(*(rows.log_temperature[:, None] for rows in gradients))
    nuisance = _stack([temperature, *(columns[name] for name in fitted)])
    return {name: columns[name].without(nuisance) for name in names}


def _stack(scores: Sequence[Scores]) -> Scores:
    return Scores(*(np.column_stack(parts) for parts in zip(*scores, strict=True)))


def _p_value(scores: Scores, seed: int) -> float:
    n, r = scores.slope.shape
    return score_test(scores.slope, scores.null, seed=seed) if n > 2 * r else 1.0


def score_test(slope: np.ndarray, null: np.ndarray, *, seed: int = 0, n_resamples: int = N_RESAMPLES) -> float:
    """The p-value of the hypothesis that per-sample gradients (n, r) have mean zero.

    The statistic is n·ḡᵀM⁻¹ḡ, M the second moment of the rows of `null` (m, r), gradients as the hypothesis has them.
    Its distribution is resampled by giving these random signs, which leaves M as it is. With `null` the gradients
    themselves it is a sign test, exact where they are symmetric about zero.

    >>> noise = np.random.default_rng(0).standard_t(3, size=(500, 4))
    >>> print(f"{score_test(noise, noise):.4f} {score_test(noise + [0.3, 0, 0, 0], noise):.4f}")
    0.9245 0.0010
    """
    n, m = len(slope), len(null)
    spread = np.sqrt((null**2).mean(axis=0))
    spread = np.where(spread > 0, spread, 1.0)
    slope, null = slope / spread, null / spread
    inverse = np.linalg.pinv(null.T @ null / m, rcond=1e-10, hermitian=True)
    mean = slope.mean(axis=0)
    observed = n * float(mean @ inverse @ mean)
    rng, at_least = np.random.default_rng(seed), 0
    for start in range(0, n_resamples, _AT_ONCE):
        signs = rng.integers(0, 2, size=(min(_AT_ONCE, n_resamples - start), m)) * 2.0 - 1.0
        drawn = signs @ null / math.sqrt(m)
        at_least += int((np.einsum("ij,jk,ik->i", drawn, inverse, drawn) >= observed * (1 - 1e-9)).sum())
    return (1 + at_least) / (1 + n_resamples)


def _expected_gain(scores: Scores) -> float:
    """The gain on new samples by a quadratic model: (S − 2r)/2n, S the score statistic.

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
    """The family of largest expected gain, and others that add enough to it; or none."""
    able = [name for name, p in p_values.items() if p * len(p_values) < level and name not in refused]
    gains = {name: gain for name in able if (gain := _expected_gain(scores[name])) > 0}
    if not gains:
        return ()
    enough = COMPARABLE_GAIN * max(gains.values())
    chosen = [min((name for name in gains if gains[name] >= enough), key=lambda name: scores[name].slope.shape[1])]
    while len(chosen) < MAX_FAMILIES_PER_STEP:
        known = _stack([scores[name] for name in chosen])
        rest = {
            name: scores[name].without(known)
            for name in gains
            if not any(name in (other, *CONTAINS.get(other, ())) or other in CONTAINS.get(name, ()) for other in chosen)
        }
        extra = {name: gain for name, left in rest.items() if (gain := _expected_gain(left)) > 0}
        if not extra:
            break
        best = max(extra, key=lambda name: extra[name])
        significant = _p_value(rest[best], seed) * len(p_values) < level
        if extra[best] < MIN_EXTRA_GAIN * gains[chosen[0]] or not significant:
            break
        chosen.append(best)
    return tuple(chosen)
