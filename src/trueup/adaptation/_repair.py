"""Repair a network for changed inputs by labelled samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trueup._core.errors import InputError
from trueup._core.registry import METHODS
from trueup.adaptation.batch_norm import MOVED_SIGNIFICANCE, share_copy, surely_moved
from trueup.adaptation.composition import Composition, Normalise
from trueup.adaptation.context import (
    MIN_SAMPLES,
    RepairContext,
    RepairOptions,
    no_batch_norm,
    no_copy,
    parse_loader,
    prepare,
)
from trueup.adaptation.forward_selection import (
    FoldState,
    ForwardSelection,
    average_folds,
    fit_to_teacher,
    nested_rows,
    select_maps,
)
from trueup.adaptation.last_layer import cross_fit_head, find_head, fit_correction
from trueup.adaptation.record import Repair, Repaired, assemble
from trueup.calibrators.base import Calibrator
from trueup.clamping.fit import warn_at_a_bound
from trueup.clamping.problem import Loss, paired_gain
from trueup.clamping.subspace_search import STANDARD_ERRORS
from trueup.models._distributed import all_gather_object, raise_on_all_ranks
from trueup.models.freezing import copy_modes, unwrap

BATCH_NORM_WEIGHTS = (1.0, 0.5)
"""Weights of new batch-norm statistics; the second is tried where the first does not help."""
MIN_LABELS_FOR_ANY_GAIN = 150
"""With fewer labels the gain must also be certain where other samples choose the steps."""
MIN_LABELS_FOR_BATCH_NORM = 500
"""With so many labels a gain of new batch-norm statistics must be certain; with fewer a test of the inputs will do."""


def repair(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    normalise: Normalise | None = None,
    method: str = "temperature",
    options: RepairOptions | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Repaired:
    """Repair a frozen network for changed inputs: an input map, batch-norm statistics, the last layer, a temperature.

    A few hundred labelled inputs are enough. Families of input maps with few parameters (gain and offset, gamma,
    colours, kernels, uneven light, stripes) are screened by score tests and fitted by natural gradient. Each step must
    lower the loss on samples left out by 1.64 standard errors; without any such step the result is temperature scaling.
    With fewer than 500 labels new batch-norm statistics need only not raise the loss, if a test shows that the inputs
    have moved. The caller's model is left as it was. The result is called the same way; its `repair_record` says what
    was wrong, what was gained on held-out samples, and what it cost.

    `normalise` says how pixels in [0, 1] become the network's inputs: (mean, std), a function, or `nn.Identity()` where
    the network takes pixels. Without it maps act on inputs scaled to [0, 1] by their extremes, and there is no gamma.
    `method` is a post-hoc method to try after the temperature, such as "auto".
    Without labels, use `adapt`.

    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.rand(600, 3, generator=generator)
    >>> y = torch.multinomial(torch.softmax(12 * x, dim=1), 1, generator=generator)[:, 0]
    >>> class Home(nn.Module):
    ...     def forward(self, x):
    ...         return 12 * x
    >>> repaired = repair(Home(), [(x * torch.tensor([0.5, 1.0, 1.0]), y)], normalise=nn.Identity())
    >>> repaired.repair_record.causes, len(repaired.repair_record.words) > 0
    (('gain and offset a feature',), True)
    """
    if method not in METHODS:
        raise InputError("method", "be the name of a method", repr(method), "trueup.METHODS lists them")
    options = RepairOptions() if options is None else options
    batches = parse_loader("loader", loader)
    with prepare(model, batches, normalise=normalise, options=options, seed=seed, progress=progress) as context:
        repaired = _repair(context, method)
    return restore_modes(repaired, model)


def restore_modes(repaired: Repaired, model: nn.Module) -> Repaired:
    """Put the copy inside into the modes of the caller's model, which was frozen while it was made."""
    if repaired.changed:
        copy_modes(unwrap(model, compiled=True), repaired.model)
    repaired.training = repaired.model.training
    return repaired


def _repair(context: RepairContext, method: str) -> Repaired:
    network, labels = context.network, context.network.labels
    if len(labels) < 2:
        raise InputError("loader", "give at least 2 samples with labels", "1")
    classes = network.plain_logits().shape[1]
    missing = classes - len(torch.unique(labels))
    if missing:
        context.notes.append(f"no sample is of {missing} of the {classes} classes, so nothing is known of these")
    reason = _too_little(labels)
    if reason:
        context.notes.append(reason)
        context, method = replace(context, parts=(), families=()), "temperature"
    selection = select_maps(context.search(labels))
    selection.stopped = reason or selection.stopped
    head = _find_head(context)
    states, weight = _try_batch_norm(context, selection, head)
    afford = network.cost().equivalents <= context.budget
    taught = _try_taught_map(context, selection, head) if weight and context.families and afford else None
    states, weight = (states, weight) if taught is None else (taught, 1.0)
    ridge = _try_head(context, selection, head, states)
    if not _holds(selection):
        # Choosing among steps is a fit too. Where it does not help samples that had no say, temperature stays alone.
        selection.stopped = "what seemed to help did not help samples that had no part in choosing it"
        selection.folds = [FoldState(fold.out, Composition([]), 1.0) for fold in selection.folds]
        first, *others = selection.steps
        selection.steps, selection.current = [first, *(replace(step, kept=False) for step in others)], 0
        weight, ridge = 0.0, None
    composition = average_folds(selection)
    before = context.space(composition)
    changed: dict[str, Tensor] = {}
    if before is None and not weight and ridge is None:
        logits = network.plain_logits()
    else:
        statistics, logits, features = context.forward(composition, weight, head)
        changed |= statistics
        if ridge is not None and features is not None and head is not None:
            correction = fit_correction(logits.double().numpy(), features, labels.numpy(), ridge)
            layer = network.model.get_submodule(head)
            assert isinstance(layer, nn.Linear)
            changed[f"{head}.weight"], changed[f"{head}.bias"] = correction.layer(layer)
            # The last layer is overconfident on the samples that it was fitted to: held-out logits set the temperature.
            logits = torch.from_numpy(selection.steps[selection.current].logits)
    temperature = Loss().temperature(logits, labels)
    warn_at_a_bound(logits, labels, temperature, stacklevel=4)
    after = _try_method(context, selection, method)
    result = Repair(before, changed, temperature, weight, ridge, method, after)
    return assemble(context, selection, result, labelled=True)


def _too_little(labels: Tensor) -> str:
    """Why these labels can only fit a temperature, or nothing."""
    if len(labels) < MIN_SAMPLES:
        return f"{len(labels)} samples are too few to judge anything but a temperature by; {MIN_SAMPLES} are needed"
    if len(torch.unique(labels)) == 1:
        return "all samples are of one class, of which nothing can be learnt but always to answer it"
    return ""


def _holds(selection: ForwardSelection) -> bool:
    """Whether what other samples choose is better than temperature alone.

    It is the same evidence once more with less to choose by, so any gain will do, unless samples are few.
    """
    if not selection.current:
        return True
    losses = selection.steps[0].losses
    gain, error = paired_gain(losses, nested_rows(selection.steps)[0])
    return gain > (STANDARD_ERRORS * error if len(losses) < MIN_LABELS_FOR_ANY_GAIN else 0.0)


def _try_method(context: RepairContext, selection: ForwardSelection, method: str) -> Calibrator | None:
    """Try a post-hoc method after the temperature, on the logits of samples left out."""
    if method == "temperature":
        return None
    title = f"{method} after the temperature"
    context.progress(title)
    current, labels = selection.steps[selection.current], context.network.labels
    fit, logits = METHODS[method], np.empty_like(current.logits)
    for fold in selection.folds:
        out = fold.out.numpy()
        logits[out] = fit(current.logits[~out], labels[~fold.out].numpy())(current.logits[out])
    step = selection.score_step(f"{current.name} + {method}", title, current.size, logits, labels)
    return fit(current.logits, labels.numpy()) if step.kept else None


@dataclass(frozen=True)
class _FoldLogits:
    """All samples at the map that was fitted without one fold."""

    out: np.ndarray
    logits: Tensor
    features: np.ndarray | None


def _try_batch_norm(
    context: RepairContext, selection: ForwardSelection, head: str | None
) -> tuple[list[_FoldLogits] | None, float]:
    """Try new batch-norm statistics behind each fold's map; they need no labels, so all samples give them.

    That inputs have moved can be seen without labels as well. Where they still have behind the map, few labels need
    only say that the statistics do no harm: they could hardly show a gain that is there.
    """
    network, labels = context.network, context.network.labels
    if "batch_norm" not in context.parts:
        return None, 0.0
    reason = no_batch_norm(network)
    if reason:
        context.notes.append(reason)
        return None, 0.0
    required = STANDARD_ERRORS
    if len(labels) < MIN_LABELS_FOR_BATCH_NORM:
        context.progress("have the inputs moved?")
        before = context.space(average_folds(selection))
        moved = surely_moved(network, before, augment=context.augment, seed=context.seed)
        required = 0.0 if moved.p_value < MOVED_SIGNIFICANCE else required
    current = selection.steps[selection.current]
    for weight in BATCH_NORM_WEIGHTS:
        title = f"batch-norm statistics, weight {weight:g}"
        context.progress(title)
        states = _fold_logits(context, selection.folds, head, weight)
        logits = _scaled(states, labels)
        name = f"{current.name} + batch_norm"
        if selection.score_step(name, title, current.size, logits, labels, required=required).kept:
            return states, weight
    return None, 0.0


def _try_taught_map(context: RepairContext, selection: ForwardSelection, head: str | None) -> list[_FoldLogits] | None:
    """Where new batch-norm statistics help, the network that has them teaches an input map; no label is used for it.

    Its probabilities say more than labels do, so that a map of many parameters can be fitted to them. The statistics
    are then estimated again behind the map.
    """
    labels = context.network.labels
    logits = context.forward(Composition([]), 1.0, head).logits
    temperature = Loss().temperature(logits, labels)
    targets = torch.softmax(logits.double() / temperature, dim=1)
    composition = fit_to_teacher(context.search(targets, temperature))
    if not len(composition.theta):
        return None
    folds = [FoldState(fold.out, composition, 1.0) for fold in selection.folds]
    states = _fold_logits(context, folds, head, 1.0)
    title = "a map taught by new batch-norm statistics"
    size = len(composition.theta)
    if not selection.score_step("taught map + batch_norm", title, size, _scaled(states, labels), labels).kept:
        return None
    selection.folds = folds
    return states


def _scaled(states: Sequence[_FoldLogits], labels: Tensor) -> np.ndarray:
    """Logits of the samples, each at the map and temperature that were fitted without it."""
    logits = np.empty(states[0].logits.shape)
    for state in states:
        train = torch.from_numpy(~state.out)
        temperature = Loss().temperature(state.logits[train], labels[train])
        logits[state.out] = state.logits.double().numpy()[state.out] / temperature
    return logits


def _fold_logits(
    context: RepairContext, folds: Sequence[FoldState], head: str | None, weight: float
) -> list[_FoldLogits]:
    states: list[_FoldLogits] = []
    for fold in folds:
        if states and (not len(fold.composition.theta) or fold.composition is folds[0].composition):  # folds are alike
            states.append(replace(states[0], out=fold.out.numpy()))
            continue
        result = context.forward(fold.composition, weight, head)
        states.append(_FoldLogits(fold.out.numpy(), result.logits, result.features))
    return states


def _try_head(
    context: RepairContext, selection: ForwardSelection, head: str | None, states: list[_FoldLogits] | None
) -> float | None:
    if head is None:
        return None
    labels = context.network.labels
    context.progress("last layer")
    states = states if states is not None else _fold_logits(context, selection.folds, head, 0.0)
    folds = [(s.out, s.logits.double().numpy(), s.features) for s in states if s.features is not None]
    fitted = cross_fit_head(folds, labels.numpy())
    losses = {ridge: float(Loss().rows(torch.from_numpy(z), labels, 1.0).mean()) for ridge, z in fitted.items()}
    ridge = min(losses, key=lambda value: (losses[value], -value))
    current = selection.steps[selection.current]
    layer = context.network.model.get_submodule(head)
    assert isinstance(layer, nn.Linear)
    size = current.size + layer.weight.numel() + layer.out_features
    title = f"last layer corrected, ridge {ridge:g}"
    return ridge if selection.score_step(f"{current.name} + head", title, size, fitted[ridge], labels).kept else None


def _find_head(context: RepairContext) -> str | None:
    if "head" not in context.parts:
        return None
    network = context.network
    reason = no_copy(network)
    if reason:
        context.notes.append(f"the last layer is left as it is: {reason}")
        return None
    local: set[str | None] = set()
    with raise_on_all_ranks():
        batch = next(iter(network.inputs), None)
        if batch is not None:
            model = share_copy(network.model, {})
            local.add(find_head(model, lambda: network.with_model(model).call(batch, None)))
    names = set().union(*all_gather_object(local))  # of the ranks that have samples
    name = names.pop() if len(names) == 1 else None
    if name is None:
        context.notes.append("the last layer is left as it is: the logits are not the output of one small nn.Linear")
    return name
