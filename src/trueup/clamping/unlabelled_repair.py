"""Repair without labels: a teacher with new batch-norm statistics, and a map that brings the network near to it."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trueup.clamping.batch_norm import MovedTest, estimate, surely_moved
from trueup.clamping.entropy import lower_entropy
from trueup.clamping.fit import warn_at_a_bound
from trueup.clamping.ladder import FOLDS, FoldState, Ladder, Rung, fit_to_teacher, judge, paired_gain, row_losses
from trueup.clamping.network import Network
from trueup.clamping.problem import Loss
from trueup.clamping.repair_job import FEWEST, Job, Repaired, assemble, forward, no_batch_norm
from trueup.clamping.repair_maps import Composition, PixelSpace
from trueup.clamping.subspace_search import STANDARD_ERRORS
from trueup.core.arrays import as_tensors

MOVED = 0.01
"""Nothing is done unless the test whether inputs have moved has a smaller p-value."""
ROUNDS = 2
"""How often a teacher teaches; from the second time on the teacher is what the last round made."""


class _Candidate(NamedTuple):
    """Something that was made without labels."""

    name: str
    title: str
    before: PixelSpace | None
    changed: dict[str, Tensor]
    weight: float
    also: tuple[str, ...] = ()
    """What was done beside the map and the statistics."""


def repair_without_labels(
    job: Job,
    model: nn.Module,
    temperature: float,
    *,
    reference: Network | None = None,
    labelled: Network | None = None,
    entropy: bool = False,
) -> Repaired:
    """Do nothing unless inputs have moved; then what a teacher teaches, or what a few labels choose of it."""
    network = job.network
    reason = no_batch_norm(network)
    candidates = [_Candidate("network", "the network as it is", None, {}, 0.0)]
    stopped, moved = "", None
    if reason or "batch_norm" not in job.parts:
        stopped = "without labels nothing but new batch-norm statistics can teach"
        job.notes.append(reason or "batch_norm is not among the parts")
    elif len(network.labels) < FEWEST:
        stopped = f"{len(network.labels)} inputs are too few to take statistics of; {FEWEST} are needed"
    else:
        job.progress("have the inputs moved?")
        moved = surely_moved(network, augment=job.augment, seed=job.seed, reference=reference)
        home = (
            f"those of {moved.against:.0f} inputs of home"
            if reference is not None
            else f"the stored ones, which are taken to be those of {moved.against:.0f} inputs"
        )
        if not moved.against:
            stopped = "no layer of batch norm was seen to take rows of samples, which would say whether they have moved"
        elif moved.p_value >= MOVED:
            stopped = (
                "nothing says that the inputs have moved: statistics of batch norm differ no more than chance would "
                f"have it from {home} (p = {moved.p_value:.2g})"
            )
        else:
            job.notes.append(_assumption(moved, home))
            candidates += _teach(job, temperature, entropy=entropy)
    if labelled is not None:
        return _choose_by_labels(job, model, candidates, temperature, labelled, stopped, moved)
    rows = np.zeros((len(network.labels), 1))
    ladder = Ladder([Rung("network", "the network as it is", 0, 0, rows, rows[:, 0])], 0, [], {}, stopped)
    last = candidates[-1]
    return assemble(
        job, model, ladder, last.before, last.changed, temperature, last.weight, None, labelled=False,
        moved=None if moved is None else moved.p_value, also=last.also,
    )  # fmt: skip


def _teach(job: Job, temperature: float, *, entropy: bool) -> list[_Candidate]:
    """New batch-norm statistics, a map taught by them with statistics behind it, and that with lower entropy.

    A teacher may be wrong. Where confidence is honest, entropy is the loss to be expected, so that a map is left out
    unless answers behind it are surer than the first teacher's, by more than chance.
    """
    network = job.network
    changed = estimate(network, None, 1.0, augment=job.augment, seed=job.seed)
    found = [_Candidate("batch_norm", "new batch-norm statistics", None, changed, 1.0)]
    composition, unsure = Composition([]), []
    for number in range(ROUNDS + 1 if job.families else 0):
        job.progress("teacher")
        answers = forward(job, job.space(composition), changed, None)[0].double() / temperature
        targets = torch.softmax(answers, dim=1)
        unsure.append(row_losses(answers.numpy(), targets))  # each row's entropy
        if number == ROUNDS:
            break
        composition = fit_to_teacher(job.climb(targets, temperature), composition if number else None)
        if not len(composition.theta):
            break
        changed = estimate(network, job.space(composition), 1.0, augment=job.augment, seed=job.seed)
    if len(composition.theta):
        gain, error = paired_gain(unsure[0], unsure[-1])
        if gain > STANDARD_ERRORS * error:
            title = "a map taught by new batch-norm statistics"
            found.append(_Candidate("taught map + batch_norm", title, job.space(composition), changed, 1.0))
        else:
            changed = found[0].changed
            job.notes.append(
                "the map that new batch-norm statistics taught was left out: answers behind it are not surer (entropy "
                f"{unsure[0].mean():.3f} before, {unsure[-1].mean():.3f} after)"
            )
    if entropy:
        job.progress("entropy of the answers")
        before = found[-1].before
        lower = lower_entropy(network, before, changed, temperature=temperature, seed=job.seed)
        if lower.refused:
            job.notes.append(f"entropy was not lowered: {lower.refused}")
        else:
            name, title = f"{found[-1].name} + entropy", "entropy of the answers lowered by batch norm's scales"
            found.append(_Candidate(name, title, before, {**changed, **lower.tensors}, 1.0, (title,)))
    return found


def _choose_by_labels(
    job: Job,
    model: nn.Module,
    candidates: list[_Candidate],
    temperature: float,
    labelled: Network,
    stopped: str,
    moved: MovedTest | None,
) -> Repaired:
    """Climb the candidates with a few labels: none of them was fitted to these, so that all of them judge."""
    labels = labelled.labels
    given = replace(job, network=labelled)
    folds = [FoldState(torch.arange(len(labels)) % FOLDS == k, Composition([]), temperature) for k in range(FOLDS)]
    ladder = Ladder([], 0, folds, {}, stopped or "no part of what was taught helps on the labelled samples")
    chosen = candidates[0]
    plain: list[Tensor] = []
    for candidate in candidates:
        job.progress(f"labelled samples: {candidate.title}")
        z = as_tensors(forward(given, candidate.before, candidate.changed, None)[0], labels)[0]
        logits = z.double().numpy() / temperature
        size = 0 if candidate.before is None else len(candidate.before.inner.theta)
        if not ladder.rungs:
            rung = Rung(candidate.name, candidate.title, 0, 0, logits, row_losses(logits, labels))
        else:
            rung = judge(ladder.rungs, ladder.current, candidate.name, candidate.title, size, logits, labels)
        ladder.rungs.append(rung)
        if rung.kept:
            ladder.current, chosen, plain = len(ladder.rungs) - 1, candidate, [z]
    (z,) = plain
    logits = np.empty(z.shape)
    for fold in folds:
        own = Loss().temperature(z[~fold.out], labels[~fold.out])
        logits[fold.out.numpy()] = z[fold.out].double().numpy() / own
    current = ladder.rungs[ladder.current]
    rung = judge(
        ladder.rungs, ladder.current, f"{current.name} + temperature", "temperature fitted to the labels",
        current.size, logits, labels,
    )  # fmt: skip
    ladder.rungs.append(rung)
    also = list(chosen.also)
    if rung.kept:
        ladder.current, temperature = len(ladder.rungs) - 1, Loss().temperature(z, labels)
        warn_at_a_bound(z, labels, temperature, stacklevel=5)
        also.append("a temperature fitted to the labelled samples")
    job.notes.append(f"{len(labels)} labelled samples chose among what was made without labels")
    network = job.network
    network.count(forward=round(labelled.cost().forwards * labelled.inputs.n))
    return assemble(
        job, model, ladder, chosen.before, chosen.changed, temperature, chosen.weight, None, labelled=True,
        moved=None if moved is None else moved.p_value, also=also,
    )  # fmt: skip


def _assumption(moved: MovedTest, home: str) -> str:
    return (
        "without labels it is assumed that the classes are about as frequent as they were in training, and that the "
        "network with new batch-norm statistics is right more often than not; statistics of batch norm differ from "
        f"{home}, by {moved.distance:.2f} standard deviations of one input's (p = {moved.p_value:.2g})"
    )
