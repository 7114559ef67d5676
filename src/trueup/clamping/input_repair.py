"""One call from a network that met a new camera to the same network with a repaired input."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from trueup.calibrators.base import Calibrator
from trueup.clamping.batch_norm import Augment, Crop, share_copy, surely_moved
from trueup.clamping.calibration_set import CalibrationSet
from trueup.clamping.fit import check_model, parse_seed, progress_line, warn_at_a_bound
from trueup.clamping.head import cross_fit_head, find_head, fit_correction
from trueup.clamping.input_map import Shape
from trueup.clamping.ladder import (
    FoldState,
    Ladder,
    average_folds,
    climb,
    fit_to_teacher,
    judge,
    nested_rows,
    paired_gain,
)
from trueup.clamping.network import Network, NotDifferentiable
from trueup.clamping.pixel_range import Normalise, outside_remark, pixel_range
from trueup.clamping.problem import Loss
from trueup.clamping.repair_job import (
    FEWEST,
    Job,
    Repaired,
    RepairRecord,
    RungRecord,
    assemble,
    no_batch_norm,
    no_copy,
)
from trueup.clamping.repair_loaders import labelled_batches, parse_loader, without_labels
from trueup.clamping.repair_maps import FAMILIES, NEEDS_PIXELS, Composition
from trueup.clamping.subspace_search import STANDARD_ERRORS
from trueup.clamping.unlabelled_repair import MOVED, repair_without_labels
from trueup.core.distributed import all_gather_object, raise_on_all_ranks
from trueup.core.errors import InputError
from trueup.models.batches import Device
from trueup.models.calibrated import device_of
from trueup.models.freezing import copy_modes, frozen, unwrap
from trueup.registry import METHODS

__all__ = ["PARTS", "Part", "RepairRecord", "Repaired", "RungRecord", "repair"]

Part: TypeAlias = Literal["input", "batch_norm", "head"]
PARTS: tuple[Part, ...] = ("input", "batch_norm", "head")
"""What may be repaired, in the order in which it is."""
MAPS = (
    "shrinkage", "gamma", "offset", "affine", "colour", "low_rank", "grey_kernel", "kernel", "radial_gain",
    "smooth_gain", "smooth_offset", "row_offset", "column_offset",
)  # fmt: skip
"""Families that are screened unless others are named."""
WEIGHTS = (1.0, 0.5)
"""Of new batch-norm statistics beside the old ones; the second is tried where the first does not help."""
BUDGET = 70.0
"""No further input map is begun once so many forward passes are spent; what follows takes at most 45 more."""
FEW = 150
"""Samples with labels below which the gain must also be certain where choosing is left to other samples."""
MANY = 500
"""Samples with labels that show a gain worth having by themselves."""
MEMORY = 1 << 32
"""Bytes of samples that are kept."""


def repair(
    network: nn.Module,
    loader: Iterable[Any],
    *,
    parts: Sequence[Part] = PARTS,
    normalise: Normalise | None = None,
    maps: Sequence[str] | None = None,
    augment: Augment | Literal["crop"] | None = "crop",
    labels: Literal["loader"] | None = "loader",
    temperature: float = 1.0,
    reference: Iterable[Any] | None = None,
    labelled: Iterable[Any] | None = None,
    entropy: bool = False,
    last: str = "temperature",
    budget: float = BUDGET,
    seed: int = 0,
    device: Device | None = None,
    progress: bool = True,
) -> Repaired:
    """Repair a frozen network under a new camera: an input map, batch-norm statistics, the last layer, a temperature.

    A few hundred labelled inputs of the new place are enough. Families of input maps with few parameters (gain and
    offset, gamma, colours, kernels, uneven light, stripes) are screened by score tests and fitted by natural gradient;
    each step must lower the loss on samples left out by 1.64 standard errors, so that what comes back is temperature
    scaling where nothing else is certain to help. With fewer than 500 labels new batch-norm statistics need only not
    raise it, where the inputs are seen to have moved. The caller's network is left as it was; what comes back is called
    the same way, and its `repair_record` says what was wrong, what it gained on held-out samples, and what it cost.

    `parts` are those that may be repaired, `maps` the families of input maps that are tried, by the names of
    `trueup.clamping.FAMILIES`, and no further map is begun once `budget` forward passes over the samples are spent.

    `normalise` says how pixels in [0, 1] become the network's inputs, (mean, std) or a function; `nn.Identity()` where
    the network takes pixels. Without it maps act on inputs scaled to [0, 1] by their extremes, and there is no gamma.
    `augment` is applied to inputs while batch-norm statistics are estimated: "crop" shifts images by up to an eighth of
    their side as training commonly does, None is none, a function is the training's own.
    Batches without labels, or `labels=None`: the network with renewed batch-norm statistics teaches an input map, if
    the inputs have moved; it is kept if answers behind it are surer. `temperature` is then the one fitted at home.
    Whether inputs have moved is asked of the statistics of batch norm, against the stored ones, or better against
    those of `reference`, unlabelled inputs of home. `labelled` are a few labelled samples that choose among what was
    made without labels, and `entropy` lowers the entropy of the answers by batch norm's scales as a further step.
    `last` is the method that comes last, such as "auto": it is kept beside the temperature only if samples left out
    say so.

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
    model, loader, seed = check_model(network), parse_loader("loader", loader), parse_seed(seed)
    chosen = _parse_parts(parts)
    for name, value in (("temperature", temperature), ("budget", budget)):
        if not (isinstance(value, int | float) and value > 0) or (name == "temperature" and math.isinf(value)):
            raise InputError(name, "be a positive number", repr(value))
    if labels not in ("loader", None):
        raise InputError("labels", 'be "loader" or None', repr(labels), "labels come with the batches of the loader")
    if last not in METHODS:
        raise InputError("last", "be the name of a method", repr(last), "trueup.METHODS lists them")
    inner = unwrap(model, compiled=True)
    training = any(module.training for module in inner.modules() if isinstance(module, _BatchNorm | _DropoutNd))
    target = device_of(inner) if device is None else torch.device(device)
    with torch.inference_mode(False), frozen(inner), progress_line(progress, "repairing") as show:
        # A loader may draw from the global generator as soon as it is read, so nothing is read before this.
        batches, with_labels = labelled_batches(loader, labels)
        home = None if temperature == 1 else temperature
        asked = {"reference": reference, "labelled": labelled, "entropy": entropy or None, "temperature": home}
        for name, given in asked.items():
            if with_labels and given is not None:
                hint = "labels=None leaves the labels of the loader alone"
                got = f"{given}" if isinstance(given, int | float) else type(given).__name__
                raise InputError(name, "be left out where the samples have labels", got, hint)
        if last != "temperature" and not with_labels:
            raise InputError("last", 'be "temperature" where the samples have no labels', repr(last))
        samples = Network(inner, CalibrationSet.read(batches, device=target, limit=MEMORY))
        samples.check_inputs("loader")
        low, high = pixel_range(samples, normalise)
        families = _parse_maps(maps, samples.shape, known=normalise is not None) if "input" in chosen else ()
        obstacle = samples.why_not_differentiable() if families else ""
        if obstacle:
            if chosen == ("input",):
                raise NotDifferentiable(obstacle)
            families = ()
        augmentation = _augmentation(augment, samples.shape, low)
        job = Job(samples, chosen, low, high, families, augmentation, seed, budget, show, last)
        if normalise is not None:
            job.notes.extend(outside_remark(samples, low, high))
        job.notes.extend(_untested(families, samples))
        if obstacle:
            job.notes.append(f"the input is left as it is: no gradients by it can be had, but {obstacle}")
        if training:
            job.notes.append("the network came in training mode, and what comes back is in it too: call eval() first")
        if with_labels:
            repaired = _with_labels(job, model)
        else:
            others = None if reference is None else without_labels(parse_loader("reference", reference))
            few = None if labelled is None else parse_loader("labelled", labelled)
            repaired = repair_without_labels(
                job, model, float(temperature), reference=_others("reference", others, samples),
                labelled=_others("labelled", few, samples), entropy=entropy,
            )  # fmt: skip
    if repaired.changed:
        copy_modes(inner, repaired.model)
    repaired.training = repaired.model.training
    return repaired


@dataclass(frozen=True)
class _FoldLogits:
    """All samples at the map that was fitted without one fold."""

    out: np.ndarray
    logits: Tensor
    features: np.ndarray | None


def _with_labels(job: Job, model: nn.Module) -> Repaired:
    network, labels = job.network, job.network.labels
    if len(labels) < 2:
        raise InputError("loader", "give at least 2 samples with labels", "1")
    missing = network.plain_logits().shape[1] - len(torch.unique(labels))
    if missing:
        job.notes.append(
            f"no sample is of {missing} of the {network.plain_logits().shape[1]} classes, so nothing is known of these"
        )
    reason = _too_little(labels)
    if reason:
        job.notes.append(reason)
        job = replace(job, parts=(), families=(), last="temperature")
    ladder = climb(job.climb(labels))
    ladder.stopped = reason or ladder.stopped
    head = _head_name(job)
    states, weight = _batch_norm_rungs(job, ladder, head)
    afford = job.network.cost().equivalents <= job.budget
    taught = _taught_rung(job, ladder, head) if weight and job.families and afford else None
    states, weight = (states, weight) if taught is None else (taught, 1.0)
    ridge = _head_rung(job, ladder, head, states)
    if not _holds(ladder):
        # Choosing among rungs is a fit too. Where it does not help samples that had no say, temperature stays alone.
        ladder.stopped = "what seemed to help did not help samples that had no part in choosing it"
        identity = [FoldState(fold.out, Composition([]), 1.0) for fold in ladder.folds]
        first, *others = ladder.rungs
        ladder.rungs, ladder.current, ladder.folds = [first, *(replace(r, kept=False) for r in others)], 0, identity
        weight, ridge, taught = 0.0, None, None
    composition = average_folds(ladder)
    before = job.space(composition)
    changed: dict[str, Tensor] = {}
    if before is None and not weight and ridge is None:
        logits = network.plain_logits()
        temperature = Loss().temperature(logits, labels)
    else:
        statistics, logits, features = job.answers(composition, weight, head)
        changed |= statistics
        temperature = Loss().temperature(logits, labels)
        if ridge is not None and features is not None and head is not None:
            z, y = logits.double().numpy(), labels.numpy()
            correction = fit_correction(z, features, y, ridge)
            layer = network.model.get_submodule(head)
            assert isinstance(layer, nn.Linear)
            changed[f"{head}.weight"], changed[f"{head}.bias"] = correction.layer(layer)
            # The last layer is sure of itself on the samples that it was fitted to; those left out say how much too.
            logits = torch.from_numpy(ladder.rungs[ladder.current].logits)
            temperature = Loss().temperature(logits, labels)
    warn_at_a_bound(logits, labels, temperature, stacklevel=4)
    after = _last_rung(job, ladder)
    return assemble(job, model, ladder, before, changed, temperature, weight, ridge, labelled=True, last=after)


def _too_little(labels: Tensor) -> str:
    """Why these labels can judge nothing but a temperature, or nothing."""
    if len(labels) < FEWEST:
        return f"{len(labels)} samples are too few to judge anything but a temperature by; {FEWEST} are needed"
    if len(torch.unique(labels)) == 1:
        return "all samples are of one class, of which nothing can be learnt but always to answer it"
    return ""


def _holds(ladder: Ladder) -> bool:
    """Whether what the other folds choose is better than temperature for the samples of each fold.

    It is the same evidence once more with less to choose by, so that any gain will do, unless samples are few.
    """
    if not ladder.current:
        return True
    gain, error = paired_gain(ladder.rungs[0].losses, nested_rows(ladder.rungs)[0])
    return gain > (STANDARD_ERRORS * error if len(ladder.rungs[0].losses) < FEW else 0.0)


def _last_rung(job: Job, ladder: Ladder) -> Calibrator | None:
    """Try another method after the temperature, on the logits of samples left out."""
    if job.last == "temperature":
        return None
    job.progress(f"{job.last} after the temperature")
    current, labels = ladder.rungs[ladder.current], job.network.labels
    fit, logits = METHODS[job.last], np.empty_like(current.logits)
    for fold in ladder.folds:
        out = fold.out.numpy()
        logits[out] = fit(current.logits[~out], labels[~fold.out].numpy())(current.logits[out])
    name, title = f"{current.name} + {job.last}", f"{job.last} after the temperature"
    rung = judge(ladder.rungs, ladder.current, name, title, current.size, logits, labels)
    ladder.rungs.append(rung)
    if not rung.kept:
        return None
    ladder.current = len(ladder.rungs) - 1
    return fit(current.logits, labels.numpy())


def _batch_norm_rungs(job: Job, ladder: Ladder, head: str | None) -> tuple[list[_FoldLogits] | None, float]:
    """Try new batch-norm statistics behind each fold's map; they need no labels, so all samples give them.

    That inputs have moved can be seen without labels as well. Where they still have behind the map, few labels need
    only say that the statistics do not harm: they could hardly show a gain that is there.
    """
    network, labels = job.network, job.network.labels
    if "batch_norm" not in job.parts:
        return None, 0.0
    reason = no_batch_norm(network)
    if reason:
        job.notes.append(reason)
        return None, 0.0
    wanted = STANDARD_ERRORS
    if len(labels) < MANY:
        job.progress("have the inputs moved?")
        moved = surely_moved(network, job.space(average_folds(ladder)), augment=job.augment, seed=job.seed)
        wanted = 0.0 if moved.p_value < MOVED else wanted
    for weight in WEIGHTS:
        job.progress(f"batch-norm statistics, weight {weight:g}")
        states = _fold_logits(job, ladder.folds, head, weight)
        logits = _scaled(states, labels)
        name = f"{ladder.rungs[ladder.current].name} + batch_norm"
        title = f"batch-norm statistics, weight {weight:g}"
        size = ladder.rungs[ladder.current].size
        rung = judge(ladder.rungs, ladder.current, name, title, size, logits, labels, wanted=wanted)
        ladder.rungs.append(rung)
        if rung.kept:
            ladder.current = len(ladder.rungs) - 1
            return states, weight
    return None, 0.0


def _taught_rung(job: Job, ladder: Ladder, head: str | None) -> list[_FoldLogits] | None:
    """Where new batch-norm statistics help, the network that has them teaches an input map; no label is used for it.

    Its answers say more than labels do, so that a map of many parameters can be had of them. The statistics are then
    estimated again behind the map.
    """
    labels = job.network.labels
    answers = job.answers(Composition([]), 1.0, head).logits
    temperature = Loss().temperature(answers, labels)
    targets = torch.softmax(answers.double() / temperature, dim=1)
    composition = fit_to_teacher(job.climb(targets, temperature))
    if not len(composition.theta):
        return None
    folds = [FoldState(fold.out, composition, 1.0) for fold in ladder.folds]
    states = _fold_logits(job, folds, head, 1.0)
    rung = judge(
        ladder.rungs, ladder.current, "taught map + batch_norm", "a map taught by new batch-norm statistics",
        len(composition.theta), _scaled(states, labels), labels,
    )  # fmt: skip
    ladder.rungs.append(rung)
    if not rung.kept:
        return None
    ladder.current, ladder.folds = len(ladder.rungs) - 1, folds
    return states


def _scaled(states: Sequence[_FoldLogits], labels: Tensor) -> np.ndarray:
    """Logits of the samples, each at the map and temperature that were fitted without it."""
    logits = np.empty(states[0].logits.shape)
    for state in states:
        train = torch.from_numpy(~state.out)
        temperature = Loss().temperature(state.logits[train], labels[train])
        logits[state.out] = state.logits.double().numpy()[state.out] / temperature
    return logits


def _fold_logits(job: Job, folds: Sequence[FoldState], head: str | None, weight: float) -> list[_FoldLogits]:
    states: list[_FoldLogits] = []
    for fold in folds:
        if states and (not len(fold.composition.theta) or fold.composition is folds[0].composition):  # folds are alike
            states.append(replace(states[0], out=fold.out.numpy()))
            continue
        answers = job.answers(fold.composition, weight, head)
        states.append(_FoldLogits(fold.out.numpy(), answers.logits, answers.features))
    return states


def _head_rung(job: Job, ladder: Ladder, head: str | None, states: list[_FoldLogits] | None) -> float | None:
    if head is None:
        return None
    labels = job.network.labels
    job.progress("last layer")
    states = states if states is not None else _fold_logits(job, ladder.folds, head, 0.0)
    folds = [(s.out, s.logits.double().numpy(), s.features) for s in states if s.features is not None]
    fitted = cross_fit_head(folds, labels.numpy())
    losses = {ridge: float(Loss().rows(torch.from_numpy(z), labels, 1.0).mean()) for ridge, z in fitted.items()}
    ridge = min(losses, key=lambda value: (losses[value], -value))
    current = ladder.rungs[ladder.current]
    layer = job.network.model.get_submodule(head)
    assert isinstance(layer, nn.Linear)
    size = current.size + layer.weight.numel() + layer.out_features
    rung = judge(
        ladder.rungs, ladder.current, f"{current.name} + head", f"last layer corrected, ridge {ridge:g}", size,
        fitted[ridge], labels,
    )  # fmt: skip
    ladder.rungs.append(rung)
    if not rung.kept:
        return None
    ladder.current = len(ladder.rungs) - 1
    return ridge


def _head_name(job: Job) -> str | None:
    if "head" not in job.parts:
        return None
    network = job.network
    reason = no_copy(network)
    if reason:
        job.notes.append(f"the last layer is left as it is: {reason}")
        return None
    found: set[str | None] = set()
    with raise_on_all_ranks():
        batch = next(iter(network.inputs), None)
        if batch is not None:
            model = share_copy(network.model, {})
            found.add(find_head(model, lambda: network.with_model(model).call(batch, None)))
    names = set().union(*all_gather_object(found))  # of the ranks that have samples
    name = names.pop() if len(names) == 1 else None
    if name is None:
        job.notes.append("the last layer is left as it is: the logits are not the output of one small nn.Linear")
    return name


def _augmentation(augment: Any, shape: Shape, low: Tensor) -> Augment | None:
    if augment is None or callable(augment):
        return augment
    if augment != "crop":
        raise InputError("augment", 'be "crop", None or a function of a batch of inputs', repr(augment))
    return Crop(low) if len(shape) == 3 else None


def _parse_parts(parts: Any) -> tuple[str, ...]:
    given = (parts,) if isinstance(parts, str) else tuple(parts) if isinstance(parts, Iterable) else (parts,)
    for part in given:
        if part not in PARTS:
            raise InputError("parts", f"be some of {', '.join(PARTS)}", repr(part))
    return tuple(part for part in PARTS if part in given)


def _parse_maps(maps: Sequence[str] | None, shape: Shape, *, known: bool) -> tuple[str, ...]:
    names = MAPS if maps is None else ((maps,) if isinstance(maps, str) else tuple(maps))
    for name in names:
        if name not in FAMILIES:
            raise InputError("maps", f"be some of {', '.join(FAMILIES)}", repr(name))
        if maps is not None and not FAMILIES[name].suits(shape):
            raise InputError("maps", f"suit inputs of shape {shape}", repr(name))
        if maps is not None and name in NEEDS_PIXELS and not known:
            raise InputError(
                "maps", "be without gamma where the pixels' range is unknown", repr(name), "give normalise"
            )
    return tuple(
        name
        for name in FAMILIES
        if name in names and FAMILIES[name].suits(shape) and (known or name not in NEEDS_PIXELS)
    )


def _untested(families: Sequence[str], network: Network) -> list[str]:
    """A remark on families of which a score test of so few samples says nothing."""
    sizes = {name: FAMILIES[name].size(network.shape) for name in families}
    large = [f"{name} ({size})" for name, size in sizes.items() if len(network.labels) <= 2 * size]
    if not large or len(network.labels) < FEWEST:
        return []
    return [f"samples are too few to ask for maps of half as many parameters or more: {', '.join(large)}"]


def _others(name: str, loader: Iterable[Any] | None, samples: Network) -> Network | None:
    """More samples of the same network."""
    if loader is None:
        return None
    others = Network(samples.model, CalibrationSet.read(loader, device=samples.device, limit=MEMORY))
    if others.shape != samples.shape:
        raise InputError(name, f"have inputs of shape {samples.shape}, as the loader has", f"{others.shape}")
    others.check_inputs(name)
    if len(others.labels) < FEWEST:
        raise InputError(name, f"have at least {FEWEST} samples", f"{len(others.labels)}")
    return others
