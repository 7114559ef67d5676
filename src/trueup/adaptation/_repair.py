"""Repair a network for changed inputs with labelled samples."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trueup._core.errors import InputError
from trueup._core.registry import METHODS
from trueup.adaptation.batch_norm import SHIFT_SIGNIFICANCE, input_shift_test, no_batch_norm, no_copy, share_copy
from trueup.adaptation.class_mix import MAX_MISSING, find_class_mix
from trueup.adaptation.composition import Composition, Normalise
from trueup.adaptation.context import MIN_SAMPLES, ForwardResult, RepairContext, RepairOptions, prepare
from trueup.adaptation.forward_selection import (
    FoldState,
    ForwardSelection,
    average_folds,
    fit_to_teacher,
    row_losses,
    select_maps,
    select_orientation,
    start_selection,
)
from trueup.adaptation.input_maps import Orientation
from trueup.adaptation.last_layer import cross_fit_head, find_head, fit_correction
from trueup.adaptation.record import Pipeline, Repaired, assemble, restore_modes
from trueup.adaptation.training import CrossFit, FineTuning, Start
from trueup.calibrators.base import Calibrator
from trueup.clamping.fit import warn_at_a_bound
from trueup.clamping.problem import Loss
from trueup.clamping.subspace_search import STANDARD_ERRORS
from trueup.models._distributed import all_gather_object, raise_on_all_ranks
from trueup.models.batches import UnpackBatch, unpacked

BATCH_NORM_WEIGHTS = (1.0, 0.5)
"""Weights of new batch-norm statistics; the second is tried if the first does not help."""
MIN_LABELS_FOR_ANY_GAIN = 150
"""With fewer labels the cross-validated gain of the whole selection must be significant, too.

Its steps are chosen without the scored samples.
"""
MIN_LABELS_FOR_BATCH_NORM = 500
"""From this number on, new batch-norm statistics need a significant gain; with fewer a test of the inputs suffices."""


def repair(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    normalise: Normalise | None = None,
    method: str = "temperature",
    options: RepairOptions | None = None,
    seed: int = 0,
    progress: bool = True,
    unpack: UnpackBatch | None = None,
) -> Repaired:
    """Repair a frozen network for changed inputs, with a few hundred labelled samples.

    Candidate corrections are an input map, new batch-norm statistics and a corrected last layer. Input maps have few
    parameters (gain and offset, gamma, colours, kernels, uneven light, stripes). Score tests select the families, and a
    natural-gradient search fits them. A correction is kept only if it lowers the loss on held-out samples. If none
    does, the result is temperature scaling. The caller's model does not change. Without labels, use `adapt`.

    Parameters
    ----------
    model
        Network from inputs to logits; it is only read.
    loader
        Batches of the changed inputs with their labels.
    normalise
        Function from pixels in [0, 1] to the network's inputs, or (mean, std), or `nn.Identity()` for a network of
        pixels. None scales inputs by their extremes; gamma maps are then not tried.
    method
        Post-hoc method to try after the temperature, a name in `trueup.METHODS`.
    options
        Further options; None takes the defaults of `RepairOptions`.
    seed
        Seed of every random draw.
    progress
        Whether to show a progress line on a terminal.
    unpack
        Function from a batch to (inputs, labels), for batches of another form.

    Returns
    -------
    Repaired
        The repaired network, called like the model. Its `repair_record` has the diagnosis, the held-out gain and the
        cost.

    Examples
    --------
    >>> generator = torch.Generator().manual_seed(0)
    >>> x = torch.rand(600, 3, generator=generator)
    >>> y = torch.multinomial(torch.softmax(12 * x, dim=1), 1, generator=generator)[:, 0]
    >>> class Home(nn.Module):
    ...     def forward(self, x):
    ...         return 12 * x
    >>> repaired = repair(Home(), [(x * torch.tensor([0.5, 1.0, 1.0]), y)], normalise=nn.Identity())
    >>> repaired.repair_record.causes, len(repaired.repair_record.words) > 0
    (('gain and offset per feature',), True)

    References
    ----------
    Amari (1998), "Natural gradient works efficiently in learning", doi:10.1162/089976698300017746.
    """
    if method not in METHODS:
        raise InputError("method", "be the name of a method", repr(method), "trueup.METHODS lists them")
    options, loader = RepairOptions() if options is None else options, unpacked(loader, unpack=unpack)
    with prepare(model, loader, normalise=normalise, options=options, seed=seed, progress=progress) as context:
        repaired = _repair(context, method)
    return restore_modes(repaired, model)


def _repair(context: RepairContext, method: str) -> Repaired:
    network, labels = context.network, context.network.labels
    if len(labels) < 2:
        raise InputError("loader", "give at least 2 samples with labels", "1")
    classes = network.plain_logits().shape[1]
    missing = classes - len(torch.unique(labels))
    if missing:
        context.notes.append(f"{missing} of the {classes} classes have no sample, so they cannot be corrected")
    reason = _too_little(labels)
    if reason:
        context.notes.append(reason)
        context, method = replace(context, parts=(), families=()), "temperature"
    context = _weigh_classes(context)
    context = replace(context, head=_find_head(context))
    selection, renewable = start_selection(context), _can_renew(context)
    if Orientation.name in context.families:
        context = _choose_orientation(context, selection, renewable)
    start = selection.folds[0].composition
    select_maps(context, selection)
    selection.stopped = reason or selection.stopped
    if renewable:
        _try_batch_norm(context, selection)
    if selection.weight and context.families and network.cost().equivalents <= context.budget:
        _try_taught_map(context, selection, start)
    # A map chosen first may block a better solution, so new batch-norm statistics without the map are also compared.
    for composition in [start, Composition([])] if start.parts else [start]:
        if renewable and selection.folds[0].composition.name != composition.name:
            name = f"{composition.name} + batch_norm" if composition.parts else "batch_norm"
            title, folds = "batch-norm statistics alone", _same_map(selection, composition)
            _try_statistics(context, selection, folds, 1.0, name, title, required=0.0, baseline=0)
    base = selection.steps[selection.current].name
    ridge = _try_head(context, selection)
    tuning = _try_weights(context, selection, base)
    ridge = ridge if tuning is None else None
    if not _holds(selection):
        # The choice among steps can overfit. If the nested choice has no gain, only the temperature is kept.
        selection.stopped = "the corrections did not help samples that had no part in choosing them"
        selection.folds = [FoldState(fold.out, Composition([]), 1.0) for fold in selection.folds]
        first, *others = selection.steps
        selection.steps, selection.current = [first, *(replace(step, kept=False) for step in others)], 0
        selection.weight, ridge, tuning = 0.0, None, None
    composition, weight = average_folds(selection), selection.weight
    before, changed, logits = context.before(composition), dict[str, Tensor](), network.plain_logits()
    if before is not None or weight or ridge is not None or tuning is not None:
        statistics, logits, features = context.forward(composition, weight)
        changed |= statistics
        if ridge is not None and features is not None and context.head is not None:
            head = context.head
            z = logits.double().numpy()
            correction = fit_correction(z, features, labels.numpy(), ridge, weights=context.weights)
            changed[f"{head}.weight"], changed[f"{head}.bias"] = correction.layer(_linear(network.model, head))
        if tuning is not None:
            context.progress("all weights")
            changed |= _fine_tuning(context).fit(Start(before, statistics), tuning.rate, tuning.epochs)
        if ridge is not None or tuning is not None:
            # Fitted layers are overconfident on the samples of the fit, so held-out logits set the temperature.
            logits = torch.from_numpy(selection.steps[selection.current].logits)
    temperature = Loss().temperature(logits, labels)
    warn_at_a_bound(logits, labels, temperature, stacklevel=4)
    after = _try_method(context, selection, method)
    result = Pipeline(before, changed, temperature, weight, ridge, tuning is not None, method, after)
    return assemble(context, selection, result, labelled=True)


def _too_little(labels: Tensor) -> str:
    """Return the reason why these labels can only fit a temperature; empty if there is none."""
    if len(labels) < MIN_SAMPLES:
        return f"{len(labels)} samples are too few to fit more than a temperature; {MIN_SAMPLES} are needed"
    if len(torch.unique(labels)) == 1:
        return "all samples are of one class, so a fit would only learn to predict this class"
    return ""


def _weigh_classes(context: RepairContext) -> RepairContext:
    """Weigh the samples if their class frequencies differ from those that the network assumes."""
    logits, labels = context.network.plain_logits(), context.network.labels
    mix = find_class_mix(logits.double().numpy(), labels.numpy()) if context.parts else None
    if mix is None:
        return context
    differs = f"class frequencies of the samples differ from those that the network assumes (p = {mix.p_value:.2g})"
    if mix.missing <= MAX_MISSING:
        context.notes.append(f"{differs}; samples are weighted to undo the difference")
        return replace(context, weights=mix.weights)
    context.notes.append(f"{differs} and some classes are missing; batch norm and the last layer are left as they are")
    return replace(context, parts=tuple(part for part in context.parts if part == "input"))


def _choose_orientation(context: RepairContext, selection: ForwardSelection, renewable: bool) -> RepairContext:
    """Select an orientation; an interpolated one must also beat new batch-norm statistics without it."""
    spent, original = context.network.cost().equivalents, selection.folds
    select_orientation(context, selection)
    parts = selection.folds[0].composition.parts
    if renewable and any(isinstance(part, Orientation) and not part.is_exact for part in parts):
        pipelines = (_forward_folds(context, folds, 1.0)[1] for folds in (original, selection.folds))
        losses = [(selection.weights * row_losses(logits, context.network.labels)).mean() for logits in pipelines]
        if losses[0] < min(losses[1], selection.steps[-1].losses.mean()):
            selection.steps[-1] = replace(selection.steps[-1], kept=False)
            selection.current, selection.folds = 0, original
    # The input maps get the whole budget.
    families = tuple(name for name in context.families if name != Orientation.name)
    return replace(context, families=families, budget=context.budget + context.network.cost().equivalents - spent)


def _holds(selection: ForwardSelection) -> bool:
    """Check whether the nested choice of steps beats temperature alone.

    The steps were significant already, so any gain suffices, unless there are few samples.
    """
    _, gain, error = selection.nested_gain()
    has_few = len(selection.steps[0].losses) < MIN_LABELS_FOR_ANY_GAIN
    return not selection.current or gain > (STANDARD_ERRORS * error if has_few else 0.0)


def _try_method(context: RepairContext, selection: ForwardSelection, method: str) -> Calibrator | None:
    """Try a post-hoc method after the temperature, on held-out logits."""
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


def _can_renew(context: RepairContext) -> bool:
    """Check whether batch-norm statistics may and can be renewed; a reason against it becomes a note."""
    reason = no_batch_norm(context.network) if "batch_norm" in context.parts else ""
    context.notes.extend([reason] if reason else [])
    return "batch_norm" in context.parts and not reason


def _try_batch_norm(context: RepairContext, selection: ForwardSelection) -> None:
    """Try new batch-norm statistics behind each fold's map; they need no labels, so all samples are used.

    An input shift can also be tested without labels. If the mapped inputs still differ and labels are few, the
    new statistics need only not raise the held-out loss. A gain could not be shown with few labels.
    """
    network, required = context.network, STANDARD_ERRORS
    if len(network.labels) < MIN_LABELS_FOR_BATCH_NORM and context.weights is None:
        context.progress("testing for an input shift")
        before = context.before(average_folds(selection))
        shift = input_shift_test(network, before, augment=context.augment, seed=context.seed)
        required = 0.0 if shift.p_value < SHIFT_SIGNIFICANCE else required
    name = f"{selection.steps[selection.current].name} + batch_norm"
    for weight in BATCH_NORM_WEIGHTS:
        title = f"batch-norm statistics, weight {weight:g}"
        context.progress(title)
        if _try_statistics(context, selection, selection.folds, weight, name, title, required=required):
            return


def _try_taught_map(context: RepairContext, selection: ForwardSelection, start: Composition) -> None:
    """Try an input map fitted to the predictions of the network with new batch-norm statistics.

    Probabilities carry more information than labels, so they can fit a map with many parameters. The statistics are
    then estimated again behind the map.
    """
    labels = context.network.labels
    logits = context.forward(start, 1.0).logits
    temperature = Loss().temperature(logits, labels)
    targets = torch.softmax(logits.double() / temperature, dim=1)
    composition = fit_to_teacher(context, targets, temperature, start)
    if len(composition.theta):
        title = "a map fitted to the predictions with new batch-norm statistics"
        _try_statistics(context, selection, _same_map(selection, composition), 1.0, "taught map + batch_norm", title)


def _same_map(selection: ForwardSelection, composition: Composition) -> list[FoldState]:
    """Return folds with one map that was fitted without labels."""
    return [FoldState(fold.out, composition, 1.0) for fold in selection.folds]


def _try_statistics(
    context: RepairContext,
    selection: ForwardSelection,
    folds: list[FoldState],
    weight: float,
    name: str,
    title: str,
    **rule: Any,
) -> bool:
    """Score maps with new batch-norm statistics of a weight behind them, in place of the current step."""
    (results, logits), size = _forward_folds(context, folds, weight), len(folds[0].composition.theta)
    kept = selection.score_step(name, title, size, logits, context.network.labels, **rule).kept
    if kept:
        selection.folds, selection.results, selection.weight = folds, results, weight
    return kept


def _forward_folds(
    context: RepairContext, folds: Sequence[FoldState], weight: float
) -> tuple[list[ForwardResult], np.ndarray]:
    """Return a forward pass at the map of each fold, and the held-out logits of every sample."""
    results = [context.forward(fold.composition, weight) for fold in folds]
    labels, logits = context.network.labels, np.empty(results[0].logits.shape)
    for fold, result in zip(folds, results, strict=True):
        temperature = Loss().temperature(result.logits[~fold.out], labels[~fold.out])
        logits[fold.out.numpy()] = result.logits[fold.out].double().numpy() / temperature
    return results, logits


def _try_head(context: RepairContext, selection: ForwardSelection) -> float | None:
    head = context.head
    if head is None:
        return None
    labels = context.network.labels
    context.progress("last layer")
    results = selection.results or [context.forward(fold.composition, 0.0) for fold in selection.folds]
    pairs = zip(selection.folds, results, strict=True)
    folds = [(fold.out.numpy(), z.double().numpy(), x) for fold, (_, z, x) in pairs if x is not None]
    fitted = cross_fit_head(folds, labels.numpy(), context.weights)
    losses = {ridge: float((selection.weights * row_losses(z, labels)).mean()) for ridge, z in fitted.items()}
    ridge = min(losses, key=lambda value: (losses[value], -value))
    current, layer = selection.steps[selection.current], _linear(context.network.model, head)
    size = current.size + layer.weight.numel() + layer.out_features
    title = f"last layer corrected, ridge {ridge:g}"
    return ridge if selection.score_step(f"{current.name} + head", title, size, fitted[ridge], labels).kept else None


def _fine_tuning(context: RepairContext) -> FineTuning:
    return FineTuning(context.network, context.augment, context.weights, context.seed)


def _try_weights(context: RepairContext, selection: ForwardSelection, base: str) -> CrossFit | None:
    """Try to fine-tune all weights behind the map and the statistics of each fold, in place of a new last layer."""
    if "weights" not in context.parts:
        return None
    network = context.network
    reason = no_copy(network)
    if reason:
        context.notes.append(f"the weights are left as they are: {reason}")
        return None
    context.progress("all weights, held-out")
    statistics = [result.changed for result in selection.results] or [{} for _ in selection.folds]
    folds = [
        (fold.out, Start(context.before(fold.composition), changed))
        for fold, changed in zip(selection.folds, statistics, strict=True)
    ]
    tuning = _fine_tuning(context).cross_fit(folds)
    size = sum(parameter.numel() for parameter in network.model.parameters())
    title = f"all weights fine-tuned, rate {tuning.rate:g}, {tuning.epochs} epochs"
    step = selection.score_step(f"{base} + weights", title, size, tuning.logits, network.labels)
    return tuning if step.kept else None


def _find_head(context: RepairContext) -> str | None:
    if "head" not in context.parts:
        return None
    network, local, name = context.network, set[str | None](), None
    reason = no_copy(network)
    if not reason:
        with raise_on_all_ranks():
            batch = next(iter(network.inputs), None)
            if batch is not None:
                model = share_copy(network.model, {})
                local.add(find_head(model, lambda: network.with_model(model).call(batch, None)))
        names = set().union(*all_gather_object(local))  # of the ranks that have samples
        name = names.pop() if len(names) == 1 else None
    if name is None:
        reason = reason or "the logits are not the output of one small nn.Linear"
        context.notes.append(f"the last layer is left as it is: {reason}")
    return name


def _linear(model: nn.Module, name: str) -> nn.Linear:
    layer = model.get_submodule(name)
    assert isinstance(layer, nn.Linear)
    return layer
