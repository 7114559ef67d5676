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
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trueup._core.splits import fold_mask
from trueup.adaptation.composition import Composition
from trueup.adaptation.context import RepairContext
from trueup.adaptation.input_maps import CONTAINS, FAMILIES
from trueup.adaptation.natural_gradient import SampleGradients, fisher_gradients, logits_through, natural_gradient
from trueup.clamping.linearized import score_test
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

    def nested_gain(self) -> tuple[np.ndarray, float, float]:
        """Losses where the steps are chosen without the samples that they are scored on; their gain; its error."""
        losses = nested_losses(self.steps) if self.current else self.steps[0].losses
        return losses, *paired_gain(self.steps[0].losses, losses)


def select_maps(context: RepairContext) -> ForwardSelection:
    """Forward selection of families by labels, until no candidate has signal or two steps in a row were refused."""
    network, labels = context.network, context.network.labels
    plain, order = network.plain_logits(), sample_order(network, Loss())
    folds, logits = [], np.zeros(plain.shape)
    for k in range(N_FOLDS):
        out = fold_mask(order, k, N_FOLDS)
        folds.append(FoldState(out, Composition([]), Loss().temperature(plain[~out], labels[~out])))
        logits[out.numpy()] = plain[out].double().numpy() / folds[-1].temperature
    first = SelectionStep("temperature", "temperature alone", 0, 0, logits, row_losses(logits, labels))
    selection = ForwardSelection([first], 0, folds, {}, "no map was asked for")
    if not context.families:
        return selection
    context.progress("screening families of input maps")
    everything = torch.ones(len(labels), dtype=torch.bool)
    identity = FoldState(everything, Composition([]), Loss().temperature(plain, labels))
    candidates, states, refused, failures = list(context.families), [identity], set[str](), 0
    scores = _held_out_scores(context, states, candidates)
    p_values = selection.p_values = {name: scores[name].p_value(context.seed) for name in candidates}
    while failures < MAX_FAILURES:
        families = _choose(scores, p_values, refused, context.seed, SIGNIFICANCE)
        if not families or network.cost().equivalents > context.budget:
            no_signal = "no other family has signal" if len(selection.steps) > 1 else "no family of maps has signal"
            selection.stopped = "the budget of passes was spent" if families else no_signal
            return selection
        context.progress(f"input map: {' + '.join(families)}")
        kept = _try_families(context, selection, families, p_values[families[0]])
        if kept is None:
            refused.add(families[-1])  # of two the first may yet do alone
            failures += 1
            continue
        selection.folds, failures = kept, 0
        candidates = _candidates(context.families, kept[0].composition, refused)
        scores = _held_out_scores(context, kept, candidates)
        p_values = {name: scores[name].p_value(context.seed) for name in candidates}
    selection.stopped = "two richer maps in a row did not help"
    return selection


def _try_families(
    context: RepairContext, selection: ForwardSelection, families: Sequence[str], p_value: float
) -> list[FoldState] | None:
    """Fit the map with more families, each fold left out in turn; score it half way, and if that helps the whole way.

    One test decides, so that a useless step is kept no more often than its level says.
    """
    start, labels = selection.current, context.network.labels
    current = selection.steps[start]
    halves, ends, logits = list[FoldState](), list[FoldState](), current.logits.copy()
    for number, fold in enumerate(selection.folds):
        before, end = _fit_fold(context, labels, fold, families, context.seed + number)
        ends.append(end)
        halves.append(before.interpolate(end, STEP_SHARE))
        held, losses = _score_fold(context, halves[-1], logits)
        # What does not help many samples left out is hardly kept by all; up to two thirds of its cost are saved.
        if held.sum() >= MIN_HELD_OUT_TO_STOP and losses.mean() >= current.losses[held].mean():
            break
    composition = ends[0].composition
    name, title, size = composition.name, composition.title, len(composition.theta)
    half = selection.score_step(name, f"half way: {title}", size, logits, labels, p_value=p_value)
    if len(halves) < len(selection.folds):
        selection.steps[-1], selection.current = replace(half, kept=False), start
    if not selection.steps[-1].kept:
        return None
    logits = half.logits.copy()
    for end in ends:
        _score_fold(context, end, logits)
    whole = selection.score_step(name, title, size, logits, labels, p_value=p_value, required=0.0, baseline=start)
    return ends if whole.kept else halves


def _score_fold(context: RepairContext, state: FoldState, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Write the logits of the samples left out of a fit into their rows; their mask and their losses."""
    held = state.out.numpy()
    z = logits_through(context.network, context.space(state.composition), state.out.nonzero()[:, 0])
    logits[held] = z.double().numpy() / state.temperature
    return held, row_losses(logits[held], context.network.labels[state.out])


def _held_out_scores(
    context: RepairContext, states: Sequence[FoldState], candidates: Sequence[str]
) -> dict[str, Scores]:
    """Scores of candidates by labels, at the map of each fold, of the samples left out of its fit.

    Null distribution and curvature average the observed and the expected Fisher information. The first alone is blind
    to mistakes that did not happen, the second trusts the predictions.
    """
    network, parts = context.network, list[dict[str, Scores]]()
    for state in states:
        extended = _add_identities(context, state.composition, candidates)
        index = None if state.out.all() else state.out.nonzero()[:, 0]
        observed, expected = fisher_gradients(
            network, context.space(extended), network.labels, state.temperature, index, seed=context.seed
        )
        fisher = [np.concatenate(rows) for rows in zip(observed[1:], expected[1:], strict=True)]
        both = SampleGradients(observed.logits, *fisher)
        fitted = [part.name for part in state.composition.parts]
        parts.append(_scores((observed, both, both), extended, candidates, fitted))
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


def nested_losses(steps: Sequence[SelectionStep], groups: int = N_GROUPS) -> np.ndarray:
    """Losses of each sample at the step that the other groups of samples choose."""
    losses = steps[0].losses.copy()
    for group in range(groups):
        out, current = np.arange(len(losses)) % groups == group, 0
        for number, step in enumerate(steps[1:], start=1):
            if step.parent == current and step.helps(steps, ~out, 1 - out.mean()):
                current = number
        losses[out] = steps[current].losses[out]
    return losses


def average_folds(selection: ForwardSelection) -> Composition:
    """The mean of the maps of the folds: to first order the fit to all samples, with less noise.

    Each sample is in all fits but one, so that the mean of their influences is that of the whole.
    """
    composition = selection.folds[0].composition
    if not len(composition.theta):
        return composition
    return composition.with_theta(torch.stack([state.composition.theta for state in selection.folds]).mean(dim=0))


def fit_to_teacher(
    context: RepairContext, targets: Tensor, temperature: float, start: Composition | None = None
) -> Composition:
    """A map that brings the network near to a teacher's probabilities; from `start`, its families alone.

    Families are selected as with labels, but on one split: a third of the samples scores each step by the cross-entropy
    to the teacher. At the end the map is fitted to all samples, and left as it was where that brings them no nearer.
    """
    network = context.network
    out = fold_mask(sample_order(network, Loss()), 0, N_FOLDS)
    state = FoldState(out, Composition([]) if start is None else start, temperature)
    if start is None:
        state = _select_for_teacher(context, targets, state)
    if not len(state.composition.theta):
        return state.composition
    context.progress("input map by the teacher's answers")
    fitted = _fit_map(context, targets, state, torch.arange(len(targets)), TEACHER_STEPS, context.seed)

    def loss(state: FoldState) -> float:
        logits = logits_through(network, context.space(state.composition)).double().numpy() / state.temperature
        return float(row_losses(logits, targets).mean())

    return min(state, fitted, key=loss).composition


def _select_for_teacher(context: RepairContext, targets: Tensor, state: FoldState) -> FoldState:
    """Extend the map as long as a third of the samples, left out, come nearer to the teacher.

    The teacher's batch norm takes gains and offsets of channels away by itself. A map that does the same again brings
    the network near to the teacher's mistakes and no further; what is left without them is what only a map can do.
    """
    network, out = context.network, state.out
    renewed = [name for name in context.families if name in BATCH_NORM_FAMILIES]
    families = [name for name in context.families if name not in BATCH_NORM_FAMILIES]

    def scores_at(state: FoldState) -> tuple[Tensor, dict[str, Scores]]:
        """Logits of all samples, and scores of candidates; labels drawn from the teacher give the curvature."""
        candidates = _candidates(families, state.composition, set())
        extended = _add_identities(context, state.composition, [*candidates, *renewed])
        gradients, drawn = fisher_gradients(
            network, context.space(extended), targets, state.temperature, seed=context.seed
        )
        fitted = [part.name for part in state.composition.parts]
        return gradients.logits, _scores((gradients, drawn, gradients), extended, candidates, [*fitted, *renewed])

    context.progress("screening families against the teacher")
    _, scores = scores_at(state)
    losses = row_losses(network.plain_logits()[out].double().numpy() / state.temperature, targets[out])
    while True:
        p_values = {name: scores[name].p_value(context.seed) for name in scores}
        chosen = _choose(scores, p_values, set(), context.seed, TEACHER_SIGNIFICANCE)
        if not chosen or network.cost().equivalents > context.budget:
            return state
        context.progress(f"input map: {' + '.join(chosen)}")
        _, trial = _fit_fold(context, targets, state, chosen, context.seed)
        logits, scores = scores_at(trial)
        trial_losses = row_losses(logits[out].double().numpy() / trial.temperature, targets[out])
        gain, error = paired_gain(losses, trial_losses)
        if gain <= STANDARD_ERRORS * error:
            return state
        state, losses = trial, trial_losses


def _fit_fold(
    context: RepairContext, targets: Tensor, fold: FoldState, families: Sequence[str], seed: int
) -> tuple[FoldState, FoldState]:
    """The state with more families before and after their fit."""
    composition = fold.composition
    for family in families:
        composition = composition.extend(family, context.network.shape)
    before = replace(fold, composition=composition)
    n_steps = LATER_STEPS if fold.composition.parts else FIRST_STEPS
    return before, _fit_map(context, targets, before, (~fold.out).nonzero()[:, 0], n_steps, seed)


def _fit_map(
    context: RepairContext, targets: Tensor, start: FoldState, index: Tensor, n_steps: int, seed: int
) -> FoldState:
    """Fit a map and its temperature to some samples."""
    batch_size = min(max(math.ceil(len(targets) / BATCHES_PER_EPOCH), MIN_BATCH), MAX_BATCH)
    n_steps = n_steps if batch_size > MIN_BATCH else min(n_steps, SMALL_SAMPLE_STEPS)
    space, batch_size = context.space(start.composition), min(batch_size, len(index))
    theta, temperature = natural_gradient(
        context.network, space, targets, index, start.temperature, n_steps, batch_size, seed
    )
    return FoldState(start.out, start.composition.with_theta(theta), temperature)


def _candidates(families: Sequence[str], composition: Composition, refused: set[str]) -> list[str]:
    selected = {part.name for part in composition.parts}
    contained = {inner for name in selected for inner in CONTAINS.get(name, ())}
    return [name for name in families if name not in selected | contained | refused]


def _add_identities(context: RepairContext, composition: Composition, names: Sequence[str]) -> Composition:
    """The map with more families at the identity, for their gradients alone."""
    return Composition([*composition.parts, *(FAMILIES[name](context.network.shape) for name in names)])


class Scores(NamedTuple):
    """Per-sample gradients by a family's coordinates, without what T and the families of the map explain."""

    slope: np.ndarray
    """Whose mean is the slope of the loss, (n, r)."""
    curvature: np.ndarray
    """Whose second moment is its curvature, (m, r)."""
    null: np.ndarray
    """Gradients for simulating the null distribution by sign flips, (l, r)."""

    def without(self, nuisance: Sequence[Scores]) -> Scores:
        """What is left of the slope where the nuisance coordinates are at their best."""
        known = [np.column_stack(parts) for parts in zip(*nuisance, strict=True)]
        if len(self.curvature) <= 2 * known[1].shape[1]:
            known = [rows[:, :1] for rows in known]
        explained = np.linalg.lstsq(known[1], self.curvature, rcond=None)[0]
        return Scores(*(rows - other @ explained for rows, other in zip(self, known, strict=True)))

    def p_value(self, seed: int) -> float:
        """Of the score test; 1 where the samples are too few for it."""
        n, r = self.slope.shape
        return score_test(self.slope, self.null, seed=seed) if n > 2 * r else 1.0


def _scores(
    gradients: Sequence[SampleGradients], composition: Composition, names: Sequence[str], fitted: Sequence[str]
) -> dict[str, Scores]:
    """Scores of families, from gradients for the slope, the curvature and the null distribution."""
    ends = np.cumsum([0, *composition.sizes])
    columns = {
        part.name: Scores(*(rows.theta[:, a:b] for rows in gradients))
        for part, a, b in zip(composition.parts, ends, ends[1:], strict=False)
    }
    temperature = Scores(*(rows.log_temperature[:, None] for rows in gradients))
    return {name: columns[name].without([temperature, *(columns[other] for other in fitted)]) for name in names}


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
        rest = {
            name: scores[name].without([scores[other] for other in chosen])
            for name in gains
            if not any(name in (other, *CONTAINS.get(other, ())) or other in CONTAINS.get(name, ()) for other in chosen)
        }
        extra = {name: gain for name, left in rest.items() if (gain := _expected_gain(left)) > 0}
        best = max(extra, key=lambda name: extra[name], default=None)
        if best is None or extra[best] < MIN_EXTRA_GAIN * gains[chosen[0]]:
            break
        if rest[best].p_value(seed) * len(p_values) >= level:
            break
        chosen.append(best)
    return tuple(chosen)
