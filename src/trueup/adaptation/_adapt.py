"""Adapt a network to changed inputs without labels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from trueup.adaptation.batch_norm import (
    SHIFT_SIGNIFICANCE,
    ShiftTest,
    batch_norms,
    input_shift_test,
    no_batch_norm,
    no_copy,
)
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
from trueup.adaptation.input_maps import FAMILIES
from trueup.adaptation.record import LOWER_ENTROPY, Pipeline, Repaired, assemble, restore_modes
from trueup.adaptation.training import MIN_SHARE, Start, affine_names, lower_entropy, mean_prediction
from trueup.clamping.fit import warn_at_a_bound
from trueup.clamping.network import Network
from trueup.clamping.problem import Loss, paired_gain
from trueup.clamping.subspace_search import STANDARD_ERRORS
from trueup.decisions.label_shift import em_prior
from trueup.models._tensors import as_tensors
from trueup.models.batches import Reading, unpacked

N_TEACHER_ROUNDS = 2
"""Rounds of self-training. The first teacher has new batch-norm statistics; the second is the first round's result."""


@dataclass(frozen=True)
class AdaptOptions(RepairOptions):
    """Options of `adapt`: those of `repair`, and two more.

    Parameters
    ----------
    parts
        Parts that may change: "input" and "batch_norm". Without labels the last layer stays.
    maps
        Families of input maps to try, names of `FAMILIES`; None takes the default ones.
    augment
        Augmentation of the inputs while batch-norm statistics are estimated; see `RepairOptions`.
    budget
        Number of forward passes after which no further input map is tried.
    device
        Device to run the model on; None keeps the model's device.
    temperature
        Temperature that was fitted before the inputs changed.
    entropy
        Whether to try lowering the predictive entropy through the scales and offsets of batch norm. Without batch norm
        those of the other normalisation layers are tried; the test for an input shift then needs `reference`.
    """

    temperature: float = 1.0
    """Temperature that was fitted before the inputs changed."""
    entropy: bool = False
    """Whether to try lowering the predictive entropy through scales and offsets of normalisation layers."""


class _Candidate(NamedTuple):
    """A pipeline that was made without labels."""

    name: str
    title: str
    repair: Pipeline


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
    **reading: Unpack[Reading],
) -> Repaired:
    """Adapt a frozen network to changed inputs without labels.

    A two-sample test compares the inputs of the batch-norm layers with those before the change. The network stays as it
    is unless the test shows a difference. Otherwise batch-norm statistics are renewed. An input map is then fitted to
    the predictions of the network with the new statistics, and kept if it lowers the predictive entropy. A network
    without batch norm needs `reference` and `AdaptOptions(entropy=True)`. The caller's model does not change.

    Parameters
    ----------
    model
        Network from inputs to logits; it is only read.
    loader
        Batches of the changed inputs. Labels in them are ignored.
    normalise
        Function from pixels in [0, 1] to the network's inputs, or (mean, std); see `repair`.
    reference
        Unlabelled inputs from before the change. The test then compares with them, not with the stored statistics. They
        are weighted to the estimated class frequencies of the new inputs, so other frequencies alone are no shift.
    labelled
        A few labelled batches of the changed inputs. They choose among the candidate corrections.
    options
        Further options; None takes the defaults of `AdaptOptions`.
    seed
        Seed of every random draw.
    progress
        Whether to show a progress line on a terminal.
    **reading
        `unpack`, a function from a batch to (inputs, labels), for batches of another form.

    Returns
    -------
    Repaired
        The adapted network. Its `repair_record` says what was changed and why.

    Examples
    --------
    >>> x = torch.rand(100, 3, generator=torch.Generator().manual_seed(0))
    >>> adapt(nn.Linear(3, 2), [x]).repair_record.notes
    ('batch norm is left as it is: the network has no layers of nn.BatchNorm with running statistics',)

    References
    ----------
    Schneider et al. (2020), "Improving robustness against common corruptions by covariate shift adaptation",
    arXiv:2006.16971.
    """
    options = AdaptOptions() if options is None else options
    temperature = require_positive("temperature", options.temperature, finite=True)
    batches = Unlabelled(unpacked(parse_loader("loader", loader), **reading))
    home = None if reference is None else Unlabelled(unpacked(parse_loader("reference", reference), **reading))
    labelled_loader = None if labelled is None else unpacked(parse_loader("labelled", labelled), **reading)
    with prepare(model, batches, normalise=normalise, options=options, seed=seed, progress=progress) as context:
        # Without labels there is no loss by which to choose an orientation.
        families = tuple(name for name in context.families if name in FAMILIES)
        context = replace(context, families=families)
        home_samples = other_samples("reference", home, context.network)
        labelled_samples = other_samples("labelled", labelled_loader, context.network)
        candidates, stopped, shift = _make_candidates(context, temperature, home_samples, entropy=options.entropy)
        rows = np.zeros((len(context.network.labels), 1))
        first = SelectionStep("network", "the network as it is", 0, 0, rows, rows[:, 0])
        selection, chosen = ForwardSelection([first], 0, [], {}, stopped), candidates[-1].repair
        if labelled_samples is not None:
            selection, chosen = _choose_by_labels(context, candidates, temperature, labelled_samples, stopped)
        p_value = None if shift is None else shift.p_value
        repaired = assemble(context, selection, chosen, labelled=labelled_samples is not None, shift_p_value=p_value)
    return restore_modes(repaired, model)


def _make_candidates(
    context: RepairContext, temperature: float, reference: Network | None, *, entropy: bool
) -> tuple[list[_Candidate], str, ShiftTest | None]:
    """Return the candidate pipelines, the reason why there are no others, and the test of the inputs."""
    network = context.network
    candidates = [_Candidate("network", "the network as it is", Pipeline(temperature=temperature))]
    reason, has_batch_norm = no_batch_norm(network), bool(batch_norms(network.model))
    if reason or "batch_norm" not in context.parts:
        context.notes.append(reason or "batch_norm is not among the parts")
    if (has_batch_norm and reason) or "batch_norm" not in context.parts:
        return candidates, "adaptation without labels needs new batch-norm statistics", None
    if not has_batch_norm and (obstacle := _no_other_normalisation(network, reference, entropy=entropy)):
        return candidates, obstacle, None
    n = len(network.labels)
    if n < MIN_SAMPLES:
        return candidates, f"{n} inputs are too few to estimate statistics; {MIN_SAMPLES} are needed", None
    context.progress("testing for an input shift")
    weights = None if reference is None else _reference_weights(network, reference, temperature)
    shift = input_shift_test(network, augment=context.augment, seed=context.seed, reference=reference, weights=weights)
    kind = "batch-norm statistics" if has_batch_norm else "inputs of the normalisation layers"
    home = (
        f"the stored ones, counted as those of {shift.n_reference:.0f} inputs"
        if reference is None
        else f"those of {len(reference.labels)} reference inputs"
    )
    if not shift.n_reference:
        return candidates, "no batch-norm layer takes one row per sample, so an input shift cannot be tested", shift
    if shift.p_value >= SHIFT_SIGNIFICANCE:
        same = (
            f"no evidence of an input shift: {kind} differ no more than chance would explain "
            f"from {home} (p = {shift.p_value:.2g})"
        )
        return candidates, same, shift
    assumed = "the network with new batch-norm statistics" if has_batch_norm else "a confident prediction"
    context.notes.append(
        f"{kind} differ from {home}, by {shift.distance:.2f} standard deviations of one input's "
        f"(p = {shift.p_value:.2g}); without labels two things are assumed: classes are as frequent as in training, "
        f"and {assumed} is right more often than not"
    )
    if not has_batch_norm:
        return candidates + _with_lower_entropy(context, candidates[0], reference), "", shift
    candidates += _self_train(context, temperature)
    return candidates + (_with_lower_entropy(context, candidates[-1], reference) if entropy else []), "", shift


def _reference_weights(network: Network, reference: Network, temperature: float) -> np.ndarray:
    """Weigh reference samples as if they had the class frequencies of the new ones, if only these differ.

    With p(x|k) unchanged, p_new(x) = p(x) Σ_k p(k|x) π_k/π⁰_k. The mean prediction is π⁰, and EM estimates π.
    """
    p, new = (
        torch.softmax(samples.plain_logits().double() / temperature, dim=1).numpy() for samples in (reference, network)
    )
    old = np.maximum(p.mean(axis=0), MIN_SHARE)
    return p @ (em_prior(new, old / old.sum()) / old)


def _no_other_normalisation(network: Network, reference: Network | None, *, entropy: bool) -> str:
    """Return the reason why layer norm and its kin are left as they are; empty if they can be adapted."""
    if not affine_names(network.model):
        return "adaptation without labels needs new batch-norm statistics"
    if not entropy:
        return "without batch norm only the entropy can be lowered, on request: AdaptOptions(entropy=True)"
    reason = no_copy(network)
    if reason:
        return reason
    return "" if reference is not None else "without batch norm the test for an input shift needs `reference` inputs"


def _with_lower_entropy(context: RepairContext, candidate: _Candidate, reference: Network | None) -> list[_Candidate]:
    """Lower the predictive entropy of a candidate; a refusal becomes a note."""
    context.progress("predictive entropy")
    name, _, repair = candidate
    start = Start(repair.before, repair.changed)
    temperature = repair.temperature
    home = None if reference is None else mean_prediction(reference.plain_logits(), temperature)
    lower = lower_entropy(context.network, start, temperature=temperature, home=home, seed=context.seed)
    if lower.refused:
        context.notes.append(f"entropy was not lowered: {lower.refused}")
        return []
    also = (LOWER_ENTROPY,) if repair.changed else ()  # otherwise it is the only change, and a part of its own
    changed = {**repair.changed, **lower.tensors}
    repair = replace(repair, changed=changed, temperature=lower.temperature, also=also)
    return [_Candidate(f"{name} + entropy", LOWER_ENTROPY, repair)]


def _self_train(context: RepairContext, temperature: float) -> list[_Candidate]:
    """Return candidates: new batch-norm statistics, and a map fitted to their predictions.

    The teacher may be wrong. The entropy of calibrated predictions is their expected loss. So a map is dropped unless
    it lowers the first teacher's entropy significantly.
    """
    network = context.network
    changed = context.estimate(Composition([]))
    renewed = Pipeline(None, changed, temperature, 1.0)
    candidates = [_Candidate("batch_norm", "new batch-norm statistics", renewed)]
    composition, entropies = Composition([]), []
    for number in range(N_TEACHER_ROUNDS + 1 if context.families else 0):
        context.progress("teacher")
        logits = forward(network, context.before(composition), changed).logits.double() / temperature
        targets = torch.softmax(logits, dim=1)
        entropies.append(row_losses(logits.numpy(), targets))
        if number == N_TEACHER_ROUNDS:
            break
        composition = fit_to_teacher(context, targets, temperature, composition)
        if not composition.parts:
            break
        changed = context.estimate(composition)
    if composition.parts:
        gain, error = paired_gain(entropies[0], entropies[-1])
        if gain > STANDARD_ERRORS * error:
            title = "a map fitted to the predictions with new batch-norm statistics"
            taught = Pipeline(context.space(composition), changed, temperature, 1.0)
            candidates.append(_Candidate("taught map + batch_norm", title, taught))
        else:
            context.notes.append(
                "the input map fitted to the predictions with new batch-norm statistics was left out: it does not "
                f"lower the predictive entropy ({entropies[0].mean():.3f} before, {entropies[-1].mean():.3f} after)"
            )
    return candidates


def _choose_by_labels(
    context: RepairContext, candidates: list[_Candidate], temperature: float, labelled: Network, stopped: str
) -> tuple[ForwardSelection, Pipeline]:
    """Select among the candidates by a few labels. No candidate was fitted to them, so all of them score it."""
    labels, reason = labelled.labels, stopped or "no candidate lowers the loss on the labelled samples"
    selection, chosen, best = ForwardSelection([], 0, [], {}, reason), candidates[0].repair, Tensor()
    for number, (name, title, repair) in enumerate(candidates):
        context.progress(f"labelled samples: {title}")
        z = as_tensors(forward(labelled, repair.before, repair.changed).logits, labels)[0]
        logits = z.double().numpy() / repair.temperature
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
    context.notes.append(f"{len(labels)} labelled samples chose among the corrections made without labels")
    context.network.count(forward=round(labelled.cost().forwards * labelled.inputs.n))
    return selection, chosen
