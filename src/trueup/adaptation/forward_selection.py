"""Forward selection of input maps: score tests propose a family, and held-out samples decide.

A step extends the map by the family with the largest expected gain. The extended map is fitted with each fold left out
in turn. The step is tested halfway to the fit: the paired gain on held-out samples must exceed 1.64 standard errors.
A half step in the right direction has three quarters of the gain at half the noise. So a small sample can show it. If a
half step is kept, the full step replaces it if it is better and its own gain is significant. A useless step that passes
by chance then does a quarter of the harm. The held-out gradients at the kept map choose the next family. The first step
is temperature alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import torch
from scipy.stats import norm
from torch import Tensor

from trueup._core.splits import fold_mask
from trueup.adaptation.composition import Composition
from trueup.adaptation.context import ForwardResult, RepairContext
from trueup.adaptation.input_maps import CONTAINS, FAMILIES, Orientation, orientations
from trueup.adaptation.natural_gradient import SampleGradients, fisher_gradients, logits_through, natural_gradient
from trueup.clamping.linearized import score_test
from trueup.clamping.problem import Loss, paired_gain, sample_order
from trueup.clamping.subspace_search import STANDARD_ERRORS

N_FOLDS = 3
SIGNIFICANCE, TEACHER_SIGNIFICANCE = 0.25, 0.05
"""Levels of the score tests after Bonferroni's correction, for labels and for a teacher's probabilities. The first is
loose, since held-out samples decide. Probabilities have less noise than labels."""
FIRST_STEPS, LATER_STEPS, TEACHER_STEPS = 11, 8, 9
"""Numbers of mini-batches of a search: from the identity, from a smaller map, and for a teacher on all samples."""
BATCHES_PER_EPOCH = 5
MIN_BATCH, MAX_BATCH = 64, 256
"""Bounds of the batch size b. Small batches are noisy: a step with r parameters costs about r/2b in the loss."""
SMALL_SAMPLE_STEPS = 8
"""Number of mini-batches if the smallest batch exceeds a fifth of the samples; it limits the number of passes."""
STEP_SHARE = 0.5
"""Share of the full step at which the extended map is tested."""
N_GROUPS = 100
"""Number of leave-one-group-out groups. They are small on purpose. Sometimes few samples carry most of a gain, and
leaving out a tenth of the samples would remove the evidence."""
MAX_FAILURES = 2
"""Number of useless steps in a row that ends the selection."""
MIN_HELD_OUT_TO_STOP = 150
"""Number of held-out samples that suffices to refuse a step after the first fold."""
COMPARABLE_GAIN = 0.9
"""Share of the largest expected gain; the smallest family that reaches it is tried."""
MIN_EXTRA_GAIN = 0.3
"""Share of the first family's expected gain that another family must add to join the same step."""
MAX_FAMILIES_PER_STEP = 3
OUTSTANDING_LEVEL = 0.05
"""Level, after Bonferroni's correction, of the score test of a family that names a cause."""
INCLUDE_CONSTANTS = ("smooth_gain", "smooth_offset")
"""Families that are no rivals of maps of each channel, since a smooth field includes a constant."""
MAX_RIVAL_GAIN = 0.6
"""Largest expected gain of a rival, as a share of the family's, for which the family still names a cause."""
ORIENTATION_SAMPLES = (80, 400)
"""Largest numbers of samples on which all orientations and the best ones are tried."""
N_FINALISTS = 3
ORIENTATION_SIGNIFICANCE = 0.05
"""Level of the test of the best orientation, before correction for the number tried."""
BATCH_NORM_FAMILIES = ("offset", "affine")
"""Families whose effect new batch-norm statistics mostly have already."""


@dataclass(frozen=True)
class SelectionStep:
    """One step of the selection, scored on held-out samples."""

    name: str
    title: str
    size: int
    """Number of parameters besides the temperature."""
    parent: int
    """Number of the step it is compared with."""
    logits: np.ndarray = field(repr=False)
    """Calibrated held-out logits of the samples, (n, classes)."""
    losses: np.ndarray = field(repr=False)
    """Held-out losses, (n,)."""
    gain: float = 0.0
    """Decrease of the mean loss from the parent."""
    error: float = 0.0
    """Standard error of the gain."""
    kept: bool = True
    p_value: float | None = None
    """p-value of the score test that chose the family."""
    required: float = STANDARD_ERRORS
    """Standard errors that the gain had to exceed."""
    baseline: int | None = None
    """Earlier step over which the gain must be significant, too."""

    def helps(self, steps: Sequence[SelectionStep], rows: np.ndarray | slice = slice(None), share: float = 1.0) -> bool:
        """Check whether a subset with this share of the samples shows the required gains.

        On a share s of the samples a gain has √s of its standard errors, so the requirement shrinks by √s.
        """
        required_gains = [(self.parent, self.required)]
        if self.baseline is not None:
            required_gains.append((self.baseline, STANDARD_ERRORS))
        for number, required in required_gains:
            gain, error = paired_gain(steps[number].losses[rows], self.losses[rows])
            if not gain > required * math.sqrt(share) * error:
                return False
        return True


@dataclass(frozen=True)
class FoldState:
    """A map that was fitted without one fold."""

    out: Tensor
    """Mask of the held-out samples."""
    composition: Composition
    temperature: float

    def interpolate(self, end: FoldState, share: float) -> FoldState:
        """Interpolate between this map, extended to the other's families, and the other."""
        theta = torch.lerp(self.composition.theta.to(end.composition.theta), end.composition.theta, share)
        temperature = self.temperature ** (1 - share) * end.temperature**share
        return FoldState(self.out, end.composition.with_theta(theta), temperature)


@dataclass
class ForwardSelection:
    """The steps so far, and the maps of the current step."""

    steps: list[SelectionStep]
    current: int
    """Number of the current step, the last one that was kept."""
    folds: list[FoldState]
    p_values: dict[str, float]
    """p-value of each family's score test at the identity."""
    stopped: str
    """Reason why the selection ended."""
    weights: np.ndarray | float = 1.0
    """Weights of the samples in all losses."""
    outstanding: set[str] = field(default_factory=set)
    """Families whose score test stood out from those of all rivals."""
    results: list[ForwardResult] = field(default_factory=list)
    """Outputs with new batch-norm statistics behind the map of each fold; empty if the stored ones stay."""
    weight: float = 0.0
    """Weight of the new batch-norm statistics."""

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
        """Add a step, and make it the current one if its paired gain exceeds the required standard errors."""
        losses = self.weights * row_losses(logits, targets)
        gain, error = paired_gain(self.steps[self.current].losses, losses)
        step = SelectionStep(
            name, title, size, self.current, logits, losses, gain, error, False, p_value, required, baseline
        )
        step = replace(step, kept=step.helps(self.steps))
        self.steps.append(step)
        self.current = len(self.steps) - 1 if step.kept else self.current
        return step

    def nested_gain(self) -> tuple[np.ndarray, float, float]:
        """Return losses at steps that were chosen without the scored samples, their gain, and its standard error."""
        losses = nested_losses(self.steps) if self.current else self.steps[0].losses
        return losses, *paired_gain(self.steps[0].losses, losses)


def start_selection(context: RepairContext) -> ForwardSelection:
    """Return a selection with its first step, temperature alone."""
    network, labels = context.network, context.network.labels
    plain, order = network.plain_logits(), sample_order(network, Loss())
    folds, logits = [], np.zeros(plain.shape)
    for k in range(N_FOLDS):
        out = fold_mask(order, k, N_FOLDS)
        folds.append(FoldState(out, Composition([]), Loss().temperature(plain[~out], labels[~out])))
        logits[out.numpy()] = plain[out].double().numpy() / folds[-1].temperature
    weights = 1.0 if context.weights is None else context.weights
    first = SelectionStep("temperature", "temperature alone", 0, 0, logits, weights * row_losses(logits, labels))
    return ForwardSelection([first], 0, folds, {}, "no input map was requested", weights)


def select_orientation(context: RepairContext, selection: ForwardSelection) -> None:
    """Try fixed orientations by forward passes: all on few samples, then the best ones on more.

    The best one must be significant after Bonferroni's correction for the number tried.
    """
    network, labels, candidates = context.network, context.network.labels, orientations(context.network.shape)
    context.progress("screening orientations")
    order = sample_order(network, Loss())

    def losses(orientation: Orientation | None, n: int) -> np.ndarray:
        index = order[torch.arange(n) * len(order) // n].sort().values
        before = None if orientation is None else context.space(Composition([orientation]))
        z = network.plain_logits()[index] if before is None else logits_through(network, before, index)
        weights = selection.weights[index.numpy()] if isinstance(selection.weights, np.ndarray) else 1.0
        return weights * Loss().rows(z, labels[index], Loss().temperature(z, labels[index])).numpy()

    n_first, n_second = (min(len(labels), n) for n in ORIENTATION_SAMPLES)
    means = [float(losses(candidate, n_first).mean()) for candidate in candidates]
    finalists = [candidates[i] for i in np.argsort(means)[:N_FINALISTS]]
    best = min(finalists, key=lambda candidate: float(losses(candidate, n_second).mean()))
    gain, error = paired_gain(losses(None, n_second), losses(best, n_second))
    required = float(norm.isf(ORIENTATION_SIGNIFICANCE / len(candidates)))
    selection.stopped = "no orientation has signal"
    if gain > required * error:
        _start_at(context, selection, Composition([best]))


def _start_at(context: RepairContext, selection: ForwardSelection, composition: Composition) -> None:
    """Score a map without fitted parameters by its own temperatures, and continue from it if it is kept."""
    labels, z = context.network.labels, logits_through(context.network, context.space(composition))
    folds, logits = [], np.zeros(z.shape)
    for fold in selection.folds:
        folds.append(FoldState(fold.out, composition, Loss().temperature(z[~fold.out], labels[~fold.out])))
        logits[fold.out.numpy()] = z[fold.out].double().numpy() / folds[-1].temperature
    if selection.score_step(composition.name, ", ".join(composition.words()), 0, logits, labels).kept:
        selection.folds = folds


def select_maps(context: RepairContext, selection: ForwardSelection) -> None:
    """Select families by labels, until no candidate has signal or two steps in a row fail."""
    network, labels, start = context.network, context.network.labels, selection.folds[0].composition
    if not context.families:
        return
    context.progress("screening families of input maps")
    everything = torch.ones(len(labels), dtype=torch.bool)
    identity = FoldState(everything, start, Loss().temperature(network.plain_logits(), labels))
    states = selection.folds if start.parts else [identity]
    candidates, refused, failures = list(context.families), set[str](), 0
    scores = _held_out_scores(context, states, candidates)
    p_values = selection.p_values = {name: scores[name].p_value(context.seed) for name in candidates}
    selection.outstanding = _outstanding(scores, p_values)
    while failures < MAX_FAILURES:
        families = _choose(scores, p_values, refused, context.seed, SIGNIFICANCE)
        if not families or network.cost().equivalents > context.budget:
            no_signal = "no other family has signal" if len(selection.steps) > 1 else "no family of maps has signal"
            selection.stopped = "the budget of forward passes was used up" if families else no_signal
            return
        context.progress(f"input map: {' + '.join(families)}")
        kept = _try_families(context, selection, families, p_values[families[0]])
        if kept is None:
            refused.add(families[-1])  # the first family may still help without the last one
            failures += 1
            continue
        selection.folds, failures = kept, 0
        candidates = _candidates(context.families, kept[0].composition, refused)
        scores = _held_out_scores(context, kept, candidates)
        p_values = {name: scores[name].p_value(context.seed) for name in candidates}
        selection.outstanding |= _outstanding(scores, p_values)
    selection.stopped = "two richer maps in a row did not help"


def _try_families(
    context: RepairContext, selection: ForwardSelection, families: Sequence[str], p_value: float
) -> list[FoldState] | None:
    """Fit the extended map with each fold left out in turn, test the half step, and if it helps the full step.

    Only the half step's test decides, so a useless step is kept at the rate of one test.
    """
    start, labels = selection.current, context.network.labels
    current = selection.steps[start]
    halves, ends, logits = list[FoldState](), list[FoldState](), current.logits.copy()
    for number, fold in enumerate(selection.folds):
        before, end = _fit_fold(context, labels, fold, families, context.seed + number)
        ends.append(end)
        halves.append(before.interpolate(end, STEP_SHARE))
        held, losses = _score_fold(context, halves[-1], logits)
        losses = losses if context.weights is None else context.weights[held] * losses
        # If many held-out samples show no gain, the other folds will hardly; stopping saves up to two thirds.
        if held.sum() >= MIN_HELD_OUT_TO_STOP and losses.mean() >= current.losses[held].mean():
            break
    composition = ends[0].composition
    name, title, size = composition.name, composition.title, len(composition.theta)
    half = selection.score_step(name, f"half step: {title}", size, logits, labels, p_value=p_value)
    if len(halves) < len(selection.folds):
        selection.steps[-1], selection.current = replace(half, kept=False), start
    if not selection.steps[-1].kept:
        return None
    logits = half.logits.copy()
    for end in ends:
        _score_fold(context, end, logits)
    full = selection.score_step(name, title, size, logits, labels, p_value=p_value, required=0.0, baseline=start)
    return ends if full.kept else halves


def _score_fold(context: RepairContext, state: FoldState, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Write a fit's held-out logits into their rows; return the mask of these rows and their losses."""
    held = state.out.numpy()
    z = logits_through(context.network, context.space(state.composition), state.out.nonzero()[:, 0])
    logits[held] = z.double().numpy() / state.temperature
    return held, row_losses(logits[held], context.network.labels[state.out])


def _held_out_scores(
    context: RepairContext, states: Sequence[FoldState], candidates: Sequence[str]
) -> dict[str, Scores]:
    """Compute the candidates' scores by labels, on held-out samples at the map of each fold.

    Null distribution and curvature average the observed and the expected Fisher information. The observed one misses
    rare mistakes, and the expected one trusts the predictions.
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
    # The order does not matter, since only sums over samples are used.
    return {
        name: Scores(*(np.concatenate(rows) for rows in zip(*(scores[name] for scores in parts), strict=True)))
        for name in candidates
    }


def row_losses(logits: np.ndarray, targets: Tensor) -> np.ndarray:
    """Compute the cross-entropy of each row to labels or probabilities."""
    if targets.ndim == 1:
        return Loss().rows(torch.from_numpy(logits), targets, 1.0).numpy()
    terms = targets.double() * torch.log_softmax(torch.from_numpy(logits), dim=1)
    return -torch.where(targets > 0, terms, 0.0).sum(dim=1).numpy()  # masked classes do not count


def nested_losses(steps: Sequence[SelectionStep], groups: int = N_GROUPS) -> np.ndarray:
    """Compute each sample's loss at the step that the other groups choose."""
    losses = steps[0].losses.copy()
    for group in range(groups):
        out, current = np.arange(len(losses)) % groups == group, 0
        for number, step in enumerate(steps[1:], start=1):
            if step.parent == current and step.helps(steps, ~out, 1 - out.mean()):
                current = number
        losses[out] = steps[current].losses[out]
    return losses


def average_folds(selection: ForwardSelection) -> Composition:
    """Average the maps of the folds: to first order the fit to all samples, with less noise."""
    composition = selection.folds[0].composition
    if not len(composition.theta):
        return composition
    return composition.with_theta(torch.stack([state.composition.theta for state in selection.folds]).mean(dim=0))


def fit_to_teacher(context: RepairContext, targets: Tensor, temperature: float, start: Composition) -> Composition:
    """Fit a map that brings the network's predictions close to a teacher's probabilities.

    If the map `start` has parameters, only these are fitted. Otherwise families are selected as with labels, but on one
    split: a third of the samples scores each step by the cross-entropy to the teacher. Finally the map is fitted to all
    samples. The final fit is used only if it lowers the cross-entropy.
    """
    network = context.network
    out = fold_mask(sample_order(network, Loss()), 0, N_FOLDS)
    state = FoldState(out, start, temperature)
    if not len(start.theta):
        state = _select_for_teacher(context, targets, state)
    if not len(state.composition.theta):
        return state.composition
    context.progress("input map by the teacher's predictions")
    fitted = _fit_map(context, targets, state, torch.arange(len(targets)), TEACHER_STEPS, context.seed)

    def loss(state: FoldState) -> float:
        logits = logits_through(network, context.space(state.composition)).double().numpy() / state.temperature
        return float(row_losses(logits, targets).mean())

    return min(state, fitted, key=loss).composition


def _select_for_teacher(context: RepairContext, targets: Tensor, state: FoldState) -> FoldState:
    """Extend the map as long as a held-out third of the samples comes closer to the teacher.

    The teacher's batch norm already corrects gains and offsets of channels. A map of these families would only copy the
    teacher's mistakes. So they are nuisance parameters of the score tests, and only other families are tried.
    """
    network, out = context.network, state.out
    renewed = [name for name in context.families if name in BATCH_NORM_FAMILIES]
    families = [name for name in context.families if name not in BATCH_NORM_FAMILIES]

    def scores_at(state: FoldState) -> tuple[Tensor, dict[str, Scores]]:
        """Return logits of all samples and the candidates' scores; labels drawn from the teacher give the curvature."""
        candidates = _candidates(families, state.composition, set())
        extended = _add_identities(context, state.composition, [*candidates, *renewed])
        gradients, drawn = fisher_gradients(
            network, context.space(extended), targets, state.temperature, seed=context.seed
        )
        fitted = [part.name for part in state.composition.parts]
        return gradients.logits, _scores((gradients, drawn, gradients), extended, candidates, [*fitted, *renewed])

    context.progress("screening families against the teacher")
    logits, scores = scores_at(state)
    losses = row_losses(logits[out].double().numpy() / state.temperature, targets[out])
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
    """Extend a fold's map by families; return it before and after the fit."""
    composition = fold.composition
    for family in families:
        composition = composition.extend(family, context.network.shape)
    before = replace(fold, composition=composition)
    n_steps = LATER_STEPS if len(fold.composition.theta) else FIRST_STEPS
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
    """Add families at the identity, for their gradients only."""
    return Composition([*composition.parts, *(FAMILIES[name](context.network.shape) for name in names)])


class Scores(NamedTuple):
    """Per-sample gradients by a family's coordinates, with nuisance parameters projected out."""

    slope: np.ndarray
    """Gradients whose mean is the slope of the loss, (n, r)."""
    curvature: np.ndarray
    """Gradients whose second moment is the curvature of the loss, (m, r)."""
    null: np.ndarray
    """Gradients for simulating the null distribution by sign flips, (l, r)."""

    def without(self, nuisance: Sequence[Scores]) -> Scores:
        """Project out the nuisance coordinates."""
        known = [np.column_stack(parts) for parts in zip(*nuisance, strict=True)]
        if len(self.curvature) <= 2 * known[1].shape[1]:
            known = [rows[:, :1] for rows in known]
        explained = np.linalg.lstsq(known[1], self.curvature, rcond=None)[0]
        return Scores(*(rows - other @ explained for rows, other in zip(self, known, strict=True)))

    def p_value(self, seed: int) -> float:
        """Return the p-value of the score test; 1 if there are too few samples for it."""
        n, r = self.slope.shape
        return score_test(self.slope, self.null, seed=seed) if n > 2 * r else 1.0


def _scores(
    gradients: Sequence[SampleGradients], composition: Composition, names: Sequence[str], fitted: Sequence[str]
) -> dict[str, Scores]:
    """Compute scores of families from gradients for the slope, the curvature and the null distribution."""
    ends = np.cumsum([0, *composition.sizes])
    columns = {
        part.name: Scores(*(rows.theta[:, a:b] for rows in gradients))
        for part, a, b in zip(composition.parts, ends, ends[1:], strict=False)
    }
    temperature = Scores(*(rows.log_temperature[:, None] for rows in gradients))
    return {name: columns[name].without([temperature, *(columns[other] for other in fitted)]) for name in names}


def _expected_gain(scores: Scores) -> float:
    """Estimate the gain on new samples by a quadratic model: (S − 2r)/2n, with S the score statistic.

    The gain on the fitted samples is S/2n. Fitting r parameters costs r/n on new ones.
    """
    n, r = scores.slope.shape
    mean = scores.slope.mean(axis=0)
    curvature = scores.curvature.T @ scores.curvature / len(scores.curvature)
    inverse = np.linalg.pinv(curvature, rcond=1e-8, hermitian=True)
    return (n * float(mean @ inverse @ mean) - 2 * r) / (2 * n)


def _choose(
    scores: dict[str, Scores], p_values: dict[str, float], refused: set[str], seed: int, level: float
) -> tuple[str, ...]:
    """Choose the family with the largest expected gain, and others that add enough to it; or none."""
    significant = [name for name, p in p_values.items() if p * len(p_values) < level and name not in refused]
    gains = {name: gain for name in significant if (gain := _expected_gain(scores[name])) > 0}
    if not gains:
        return ()
    smallest_gain = COMPARABLE_GAIN * max(gains.values())
    comparable = [name for name in gains if gains[name] >= smallest_gain]
    chosen = [min(comparable, key=lambda name: scores[name].slope.shape[1])]
    while len(chosen) < MAX_FAMILIES_PER_STEP:
        rest = {
            name: scores[name].without([scores[other] for other in chosen])
            for name in gains
            if not any(_related(name, other) for other in chosen)
        }
        extra = {name: gain for name, left in rest.items() if (gain := _expected_gain(left)) > 0}
        best = max(extra, key=lambda name: extra[name], default=None)
        if best is None or extra[best] < MIN_EXTRA_GAIN * gains[chosen[0]]:
            break
        if rest[best].p_value(seed) * len(p_values) >= level:
            break
        chosen.append(best)
    return tuple(chosen)


def _related(name: str, other: str) -> bool:
    """Check whether two families are the same, or one contains the other."""
    return name == other or name in CONTAINS.get(other, ()) or other in CONTAINS.get(name, ())


def _outstanding(scores: dict[str, Scores], p_values: dict[str, float]) -> set[str]:
    """Return the families that are significant and whose rivals have a much smaller expected gain.

    Under a strong shift many families are significant, since each one undoes a part of it. Only a family that promises
    much more than all unrelated ones tells what happened to the inputs.
    """
    gains = {name: _expected_gain(scores[name]) for name in scores}

    def is_rival(other: str, name: str) -> bool:
        includes = other in INCLUDE_CONSTANTS and name in ("offset", "affine", "colour")
        return not includes and not _related(other, name) and gains[other] >= MAX_RIVAL_GAIN * gains[name]

    return {
        name
        for name, gain in gains.items()
        if gain > 0
        and p_values[name] * len(p_values) < OUTSTANDING_LEVEL
        and not any(is_rival(other, name) for other in gains)
    }
