"""What a repair works on: its options, the samples, and forward passes of the network behind a map."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from trueup._core.errors import InputError
from trueup.adaptation.batch_norm import Augment, Crop, batch_norms, estimate, share_copy
from trueup.adaptation.composition import Composition, Normalise, PixelSpace, outside_remark, pixel_range
from trueup.adaptation.forward_selection import MapSearch
from trueup.adaptation.input_maps import FAMILIES, NEEDS_PIXELS, Shape
from trueup.adaptation.last_layer import watch_inputs
from trueup.clamping.calibration_set import CalibrationSet
from trueup.clamping.fit import check_loader, check_model, progress_line
from trueup.clamping.network import Network, NotDifferentiable
from trueup.clamping.problem import parse_seed
from trueup.models._distributed import all_gather_object, all_gather_rows, raise_on_all_ranks
from trueup.models._tensors import upcast_half
from trueup.models.batches import LABELS, Batch, Device, named_batch
from trueup.models.calibrated import device_of
from trueup.models.freezing import frozen, unwrap

Part: TypeAlias = Literal["input", "batch_norm", "head"]
PARTS: tuple[Part, ...] = ("input", "batch_norm", "head")
"""What may be repaired, in this order."""
MAPS = (
    "shrinkage", "gamma", "offset", "affine", "colour", "low_rank", "grey_kernel", "kernel", "radial_gain",
    "smooth_gain", "smooth_offset", "row_offset", "column_offset",
)  # fmt: skip
"""Families that are screened unless others are named."""
MIN_SAMPLES = 50
"""With fewer labels only a temperature is fitted; with fewer unlabelled inputs nothing is done."""
MAX_BYTES_KEPT = 1 << 32
"""Bytes of samples that are kept in memory."""
MASKED_LOGIT = -1e4
"""Logits below it are those of masked classes."""
N_RESULTS_KEPT = 3
"""Forward results that are kept, since several parts ask for the same."""


@dataclass(frozen=True)
class RepairOptions:
    """What may be repaired, and how much may be tried."""

    parts: Sequence[Part] | Part = PARTS
    """Parts that may be repaired: "input", "batch_norm", "head"."""
    maps: Sequence[str] | str | None = None
    """Families of input maps to try, names of `FAMILIES`; None takes the usual ones."""
    augment: Augment | Literal["crop"] | None = "crop"
    """Applied to inputs while batch-norm statistics are estimated. "crop" shifts images by up to an eighth of their
    side, as training commonly does; a function is the training's own."""
    budget: float = 70.0
    """No further input map is begun after so many forward passes; what follows takes at most 45 more."""
    device: Device | None = None
    """Where the model runs; None leaves it where it is."""


class ForwardResult(NamedTuple):
    """Outputs of a network for all samples, behind a map, with new batch-norm statistics or the stored ones."""

    changed: dict[str, Tensor]
    """The new statistics."""
    logits: Tensor
    features: np.ndarray | None
    """Inputs of the last layer, if they were asked for."""


@dataclass(frozen=True)
class RepairContext:
    """The samples, what may be repaired, and how."""

    model: nn.Module
    """The caller's model."""
    network: Network
    parts: tuple[str, ...]
    low: Tensor
    high: Tensor
    families: tuple[str, ...]
    augment: Augment | None
    seed: int
    budget: float
    progress: Callable[[str], None]
    notes: list[str] = field(default_factory=list)
    _results: dict[tuple[str, bytes, float, str | None], ForwardResult] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def search(self, targets: Tensor, temperature: float | None = None) -> MapSearch:
        """A search for a map by these targets."""
        return MapSearch(
            self.network, targets, self.low, self.high, self.families, self.seed, self.budget, self.progress,
            temperature,
        )  # fmt: skip

    def space(self, composition: Composition) -> PixelSpace | None:
        """A map before the network, if it is one."""
        return PixelSpace(composition, self.low, self.high) if len(composition.theta) else None

    def estimate(self, composition: Composition, weight: float = 1.0) -> dict[str, Tensor]:
        """New batch-norm statistics behind a map."""
        return estimate(self.network, self.space(composition), weight, augment=self.augment, seed=self.seed)

    def forward(self, composition: Composition, weight: float, head: str | None) -> ForwardResult:
        """Logits behind a map and statistics renewed by this weight, and what goes into the last layer."""
        key = composition.name, composition.theta.cpu().numpy().tobytes(), weight, head
        if key not in self._results:
            changed = self.estimate(composition, weight) if weight else {}
            while len(self._results) >= N_RESULTS_KEPT:
                del self._results[next(iter(self._results))]
            result = forward(self.network, self.space(composition), changed, head)
            self._results[key] = ForwardResult(changed, *result)
        return self._results[key]


@contextmanager
def prepare(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    normalise: Normalise | None,
    options: RepairOptions,
    seed: int,
    progress: bool,
) -> Iterator[RepairContext]:
    """Read the samples and hold the model frozen; on leaving it is as it was."""
    model, seed, parts = check_model(model), parse_seed(seed), _parse_parts(options.parts)
    require_positive("budget", options.budget)
    inner = unwrap(model, compiled=True)
    training = any(module.training for module in inner.modules() if isinstance(module, _BatchNorm | _DropoutNd))
    target = device_of(inner) if options.device is None else torch.device(options.device)
    with torch.inference_mode(False), frozen(inner), progress_line(progress, "repairing") as show:
        samples = Network(inner, CalibrationSet.read(loader, device=target, limit=MAX_BYTES_KEPT))
        samples.check_inputs("loader")
        low, high = pixel_range(samples, normalise)
        families = _parse_maps(options.maps, samples.shape, known=normalise is not None) if "input" in parts else ()
        obstacle = samples.why_not_differentiable() if families else ""
        if obstacle and parts == ("input",):
            raise NotDifferentiable(obstacle)
        families = () if obstacle else families
        augment = _parse_augment(options.augment, samples.shape, low)
        context = RepairContext(model, samples, parts, low, high, families, augment, seed, options.budget, show)
        if normalise is not None:
            context.notes.extend(outside_remark(samples, low, high))
        context.notes.extend(_untested(families, samples))
        if obstacle:
            context.notes.append(f"the input is left as it is: no gradients by it can be had, but {obstacle}")
        if training:
            context.notes.append(
                "the network came in training mode, and what comes back is in it too: call eval() first"
            )
        yield context


def forward(
    network: Network, before: nn.Module | None, changed: Mapping[str, Tensor], head: str | None = None
) -> tuple[Tensor, np.ndarray | None]:
    """Logits of all samples, and what goes into the last layer."""
    model = share_copy(network.model, changed) if changed or head else network.model
    network = network.with_model(model)
    if head is None:
        return network.logits(network.laid_out(before)), None
    layer = model.get_submodule(head)
    assert isinstance(layer, nn.Linear)
    seen: list[Tensor] = []
    with watch_inputs({head: layer}, lambda _, __, x: seen.append(upcast_half(x).to("cpu", copy=True))):
        logits = network.logits(network.laid_out(before))
    features = torch.cat(seen) if seen else torch.empty(0, layer.in_features)
    return logits, all_gather_rows(features).double().numpy()


def other_samples(name: str, loader: Iterable[Any] | None, samples: Network) -> Network | None:
    """More samples of the same network."""
    if loader is None:
        return None
    others = Network(samples.model, CalibrationSet.read(loader, device=samples.device, limit=MAX_BYTES_KEPT))
    if others.shape != samples.shape:
        raise InputError(name, f"have inputs of shape {samples.shape}, as the loader has", f"{others.shape}")
    others.check_inputs(name)
    if len(others.labels) < MIN_SAMPLES:
        raise InputError(name, f"have at least {MIN_SAMPLES} samples", f"{len(others.labels)}")
    return others


def parse_loader(name: str, loader: Any) -> Iterable[Any]:
    """A loader, and not the samples themselves, whose rows would be taken for batches."""
    pair = isinstance(loader, tuple | list) and len(loader) == 2 and all(hasattr(part, "ndim") for part in loader)
    if pair and loader[0].ndim > loader[1].ndim == 1 and len(loader[0]) == len(loader[1]):
        hint = "a loader of one batch is [(inputs, labels)]"
        raise InputError(name, "give batches", "the inputs and the labels", hint)
    if isinstance(loader, Tensor | np.ndarray):
        got = f"{type(loader).__name__} of shape {tuple(loader.shape)}"
        raise InputError(name, "give batches", got, "a loader of one batch is [inputs]")
    try:
        return check_loader(loader)
    except InputError as error:
        raise error.replace(argument=name) from None


class Unlabelled:
    """Batches of a loader with the label 0 instead of their own, for what reads batches with labels."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            named = named_batch(batch)
            if named is not None:
                inputs: Any = {name: value for name, value in named.items() if name not in LABELS}
                yield {**inputs, "labels": torch.zeros(_n_rows(inputs.values()), dtype=torch.int64)}
                continue
            values = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
            values = values[:-1] if len(values) > 1 else values
            yield (*values, torch.zeros(_n_rows(values), dtype=torch.int64))


def _n_rows(values: Iterable[Any]) -> int:
    """Of the first array, or of the first inside of mappings and the like where there is no other."""
    inside: list[Any] = []
    for value in values:
        if isinstance(value, Tensor | np.ndarray) and value.ndim:
            return len(value)
        if isinstance(value, Mapping | tuple | list):
            inside += value.values() if isinstance(value, Mapping) else value
    return _n_rows(inside) if inside else 0


def require_positive(name: str, value: Any, *, finite: bool = False) -> float:
    """Check a positive number."""
    if not isinstance(value, int | float) or not value > 0 or (finite and value == float("inf")):
        raise InputError(name, "be a positive number", repr(value))
    return float(value)


def _parse_augment(augment: Any, shape: Shape, low: Tensor) -> Augment | None:
    if augment is None or callable(augment):
        return augment
    if augment != "crop":
        raise InputError("augment", 'be "crop", None or a function of a batch of inputs', repr(augment))
    return Crop(low) if len(shape) == 3 else None


def _parse_parts(parts: Any) -> tuple[str, ...]:
    names = (parts,) if isinstance(parts, str) else tuple(parts) if isinstance(parts, Iterable) else (parts,)
    for part in names:
        if part not in PARTS:
            raise InputError("parts", f"be some of {', '.join(PARTS)}", repr(part))
    return tuple(part for part in PARTS if part in names)


def _parse_maps(maps: Sequence[str] | str | None, shape: Shape, *, known: bool) -> tuple[str, ...]:
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
    suited = [name for name in FAMILIES if name in names and FAMILIES[name].suits(shape)]
    return tuple(name for name in suited if known or name not in NEEDS_PIXELS)


def _untested(families: Sequence[str], network: Network) -> list[str]:
    """A note on families of which a score test of so few samples says nothing."""
    sizes = {name: FAMILIES[name].size(network.shape) for name in families}
    large = [f"{name} ({size})" for name, size in sizes.items() if len(network.labels) <= 2 * size]
    if not large or len(network.labels) < MIN_SAMPLES:
        return []
    return [f"samples are too few to ask for maps of half as many parameters or more: {', '.join(large)}"]


def no_batch_norm(network: Network) -> str:
    """Why batch norm cannot be repaired, or nothing."""
    if not batch_norms(network.model):
        return "batch norm is left as it is: the network has no layers of nn.BatchNorm with running statistics"
    reason = no_copy(network)
    return f"batch norm is left as it is: {reason}" if reason else ""


def no_copy(network: Network) -> str:
    """Why the network cannot be copied, or nothing; the same on all ranks."""
    with raise_on_all_ranks():
        batch = next(iter(network.inputs), None)
        if batch is not None:
            batch = network.inputs.rows(batch, torch.arange(min(8, len(batch.labels))))
            network.call(batch, None)  # of which something may be left in the copy
        try:
            copied = share_copy(network.model, {})
        except Exception as error:
            reason = f"the network cannot be copied ({type(error).__name__})"
        else:
            reason = "" if batch is None or _same(network, copied, batch) else "its copy computes something else"
    return next(filter(None, all_gather_object(reason)), "")


@torch.no_grad()
def _same(network: Network, copied: nn.Module, batch: Batch) -> bool:
    """Whether a copy gives the same logits, unlike one whose hooks write into the network that it is a copy of."""
    turned = network.inputs.rows(batch, torch.arange(len(batch.labels)).flip(0))
    try:
        other = network.with_model(copied).call(turned, None)
    except Exception:  # which the network itself does not raise
        return False
    first, second = network.call(turned, None), network.call(turned, None)
    if not torch.equal(first, second):  # outputs are drawn at random
        return True
    scale = float(torch.where(first > MASKED_LOGIT, first, 0.0).abs().max())
    return torch.allclose(other, first, rtol=1e-3, atol=1e-3 * scale)
