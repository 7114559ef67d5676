"""Adapt a network to changed inputs without labels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trueup.adaptation.batch_norm import MOVED_SIGNIFICANCE, MovedTest, input_shift_test, lower_entropy, no_batch_norm
from trueup.adaptation.composition import Composition, Normalise
from trueup.adaptation.context import (
    MIN_SAMPLES,
    RepairContext,
    RepairOptions,
    Unlabelled,
    forward,
    other_samples,
    parse_loader,
    prepare,
    require_positive,
)
from trueup.adaptation.forward_selection import N_FOLDS, ForwardSelection, SelectionStep, fit_to_teacher, row_losses
from trueup.adaptation.record import Repair, Repaired, assemble, restore_modes
from trueup.clamping.fit import warn_at_a_bound
from trueup.clamping.network import Network
from trueup.clamping.problem import Loss, paired_gain
from trueup.clamping.subspace_search import STANDARD_ERRORS
from trueup.models._tensors import as_tensors

N_TEACHER_ROUNDS = 2
"""How often a teacher teaches; from the second time on the teacher is the result of the round before."""


@dataclass(frozen=True)
class AdaptOptions(RepairOptions):
    """Options of `adapt`: those of `repair`, and what stands in for labels."""

    temperature: float = 1.0
    """The temperature that was fitted before the inputs changed."""
    entropy: bool = False
    """Whether to lower the entropy of the predictions by batch norm's scales as a further step."""


class _Candidate(NamedTuple):
    """A repair that was made without labels."""

    name: str
    title: str
    repair: Repair


def adapt(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    normalise: Normalise | None = None,
    reference: Iterable[Any] | None = None,
    labelled: Iterable[Any] | None = None,
    options: AdaptOptions | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Repaired:
    """Adapt a frozen network to changed inputs without labels.

    Nothing is done unless a test of batch norm's inputs shows that they have moved. Then the network with renewed
    batch-norm statistics teaches an input map, which is kept if it lowers the predictive entropy. Labels in the loader
    are ignored. The caller's model is left as it was; the `repair_record` of the result says what was done.

    The test compares with the stored statistics, or better with those of `reference`, unlabelled inputs from before the
    change. `labelled` are a few labelled samples that choose among the candidates. `normalise` is as in `repair`.

    >>> x = torch.rand(100, 3, generator=torch.Generator().manual_seed(0))
    >>> adapt(nn.Linear(3, 2), [x]).repair_record.notes
    ('batch norm is left as it is: the network has no layers of nn.BatchNorm with running statistics',)
    """
    options = AdaptOptions() if options is None else options
    temperature = require_positive("temperature", options.temperature, finite=True)
    batches = Unlabelled(parse_loader("loader", loader))
    home = None if reference is None else Unlabelled(parse_loader("reference", reference))
    few = None if labelled is None else parse_loader("labelled", labelled)
    with prepare(model, batches, normalise=normalise, options=options, seed=seed, progress=progress) as context:
        home_samples = other_samples("reference", home, context.network)
        labelled_samples = other_samples("labelled", few, context.network)
        candidates, stopped, moved = _make_candidates(context, temperature, home_samples, entropy=options.entropy)
        rows = np.zeros((len(context.network.labels), 1))
        first = SelectionStep("network", "the network as it is", 0, 0, rows, rows[:, 0])
        selection, chosen = ForwardSelection([first], 0, [], {}, stopped), candidates[-1].repair
        if labelled_samples is not None:
            selection, chosen = _choose_by_labels(context, candidates, temperature, labelled_samples, stopped)
        p_value = None if moved is None else moved.p_value
        repaired = assemble(context, selection, chosen, labelled=labelled_samples is not None, moved=p_value)
    return restore_modes(repaired, model)


def _make_candidates(
    context: RepairContext, temperature: float, reference: Network | None, *, entropy: bool
) -> tuple[list[_Candidate], str, MovedTest | None]:
    """The network as it is, and if inputs have moved what a teacher makes of it; why there is no more; the test."""
    network = context.network
    candidates = [_Candidate("network", "the network as it is", Repair(temperature=temperature))]
    reason = no_batch_norm(network)
    if reason or "batch_norm" not in context.parts:
        context.notes.append(reason or "batch_norm is not among the parts")
        return candidates, "without labels nothing but new batch-norm statistics can teach", None
    n = len(network.labels)
    if n < MIN_SAMPLES:
        return candidates, f"{n} inputs are too few to take statistics of; {MIN_SAMPLES} are needed", None
    context.progress("have the inputs moved?")
    moved = input_shift_test(network, augment=context.augment, seed=context.seed, reference=reference)
    home = f"those of {moved.against:.0f} inputs"
    home = f"{home} of home" if reference is not None else f"the stored ones, which are taken to be {home}"
    if not moved.against:
        unseen = "no layer of batch norm was seen to take rows of samples, which would say whether they have moved"
        return candidates, unseen, moved
    if moved.p_value >= MOVED_SIGNIFICANCE:
        same = (
            "nothing says that the inputs have moved: statistics of batch norm differ no more than chance would "
            f"have it from {home} (p = {moved.p_value:.2g})"
        )
        return candidates, same, moved
    context.notes.append(
        "without labels it is assumed that the classes are about as frequent as they were in training, and that the "
        "network with new batch-norm statistics is right more often than not; statistics of batch norm differ from "
        f"{home}, by {moved.distance:.2f} standard deviations of one input's (p = {moved.p_value:.2g})"
    )
    return candidates + _teach(context, temperature, entropy=entropy), "", moved


def _teach(context: RepairContext, temperature: float, *, entropy: bool) -> list[_Candidate]:
    """New batch-norm statistics, a map taught by them with statistics behind it, and that with lower entropy.

    A teacher may be wrong. For calibrated predictions entropy is the expected loss, so a map is left out unless it
    lowers the first teacher's entropy by more than chance.
    """
    network = context.network
    changed = context.estimate(Composition([]))
    renewed = Repair(None, changed, temperature, 1.0)
    candidates = [_Candidate("batch_norm", "new batch-norm statistics", renewed)]
    composition, entropies = Composition([]), []
    for number in range(N_TEACHER_ROUNDS + 1 if context.families else 0):
        context.progress("teacher")
        logits = forward(network, context.before(composition), changed).logits.double() / temperature
        targets = torch.softmax(logits, dim=1)
        entropies.append(row_losses(logits.numpy(), targets))
        if number == N_TEACHER_ROUNDS:
            break
        composition = fit_to_teacher(context, targets, temperature, composition if number else None)
        if not composition.parts:
            break
        changed = context.estimate(composition)
    if composition.parts:
        gain, error = paired_gain(entropies[0], entropies[-1])
        if gain > STANDARD_ERRORS * error:
            title = "a map taught by new batch-norm statistics"
            taught = Repair(context.space(composition), changed, temperature, 1.0)
            candidates.append(_Candidate("taught map + batch_norm", title, taught))
        else:
            context.notes.append(
                "the map that new batch-norm statistics taught was left out: answers behind it are not surer (entropy "
                f"{entropies[0].mean():.3f} before, {entropies[-1].mean():.3f} after)"
            )
    if entropy:
        context.progress("entropy of the answers")
        name, _, repair = candidates[-1]
        lower = lower_entropy(network, repair.before, repair.changed, temperature=temperature, seed=context.seed)
        if lower.refused:
            context.notes.append(f"entropy was not lowered: {lower.refused}")
        else:
            title = "entropy of the answers lowered by batch norm's scales"
            repair = replace(repair, changed={**repair.changed, **lower.tensors}, also=(title,))
            candidates.append(_Candidate(f"{name} + entropy", title, repair))
    return candidates


def _choose_by_labels(
    context: RepairContext, candidates: list[_Candidate], temperature: float, labelled: Network, stopped: str
) -> tuple[ForwardSelection, Repair]:
    """Forward selection among the candidates by a few labels: none was fitted to them, so all of them score it."""
    labels, reason = labelled.labels, stopped or "no part of what was taught helps on the labelled samples"
    selection, chosen, best = ForwardSelection([], 0, [], {}, reason), candidates[0].repair, Tensor()
    for number, (name, title, repair) in enumerate(candidates):
        context.progress(f"labelled samples: {title}")
        z = as_tensors(forward(labelled, repair.before, repair.changed).logits, labels)[0]
        logits = z.double().numpy() / temperature
        size = 0 if repair.before is None else len(repair.before.inner.theta)
        if not number:
            selection.steps.append(SelectionStep(name, title, 0, 0, logits, row_losses(logits, labels)))
        if not number or selection.score_step(name, title, size, logits, labels).kept:
            chosen, best = repair, z
    logits = np.empty(best.shape)
    for fold in range(N_FOLDS):
        out = torch.arange(len(labels)) % N_FOLDS == fold
        logits[out.numpy()] = best[out].double().numpy() / Loss().temperature(best[~out], labels[~out])
    current = selection.steps[selection.current]
    name, title = f"{current.name} + temperature", "temperature fitted to the labels"
    if selection.score_step(name, title, current.size, logits, labels).kept:
        temperature = Loss().temperature(best, labels)
        warn_at_a_bound(best, labels, temperature, stacklevel=4)
        also = (*chosen.also, "a temperature fitted to the labelled samples")
        chosen = replace(chosen, temperature=temperature, also=also)
    context.notes.append(f"{len(labels)} labelled samples chose among what was made without labels")
    context.network.count(forward=round(labelled.cost().forwards * labelled.inputs.n))
    return selection, chosen
