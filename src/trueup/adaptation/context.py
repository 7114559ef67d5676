"""Options, samples and forward passes that all repair steps share."""

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
from trueup.adaptation.batch_norm import Augment, Crop, estimate, share_copy
from trueup.adaptation.class_mix import resample
from trueup.adaptation.composition import Composition, Normalise, PixelSpace, pixel_range, pixel_range_notes
from trueup.adaptation.input_maps import MAP_TYPES, NEEDS_PIXELS, Shape
from trueup.adaptation.last_layer import watch_inputs
from trueup.clamping.calibration_set import CalibrationSet
from trueup.clamping.fit import check_loader, check_model, progress_line
from trueup.clamping.network import Network, NotDifferentiable, to_cpu
from trueup.clamping.problem import parse_seed
from trueup.models._distributed import all_gather_rows
from trueup.models.batches import LABELS, Device, named_batch
from trueup.models.calibrated import device_of
from trueup.models.freezing import frozen, unwrap

Part: TypeAlias = Literal["input", "batch_norm", "head", "weights"]
PARTS: tuple[Part, ...] = ("input", "batch_norm", "head")
"""Parts of a network that are repaired by default, in this order."""
ALL_PARTS: tuple[Part, ...] = (*PARTS, "weights")
MAPS = tuple(name for name in MAP_TYPES if name not in ("channel_gamma", "kernel5", "pixel_offset"))
"""Families that are screened by default."""
MIN_SAMPLES = 50
"""Smallest number of samples: with fewer labels only a temperature is fitted, with fewer inputs nothing changes."""
MAX_BYTES_KEPT = 1 << 32
"""Largest size in bytes of samples in memory."""
N_RESULTS_KEPT = 3
"""Number of cached forward results; several steps need the same one."""


@dataclass(frozen=True)
class RepairOptions:
    """Options of `repair`.

    Parameters
    ----------
    parts
        Parts that may be repaired: "input", "batch_norm", "head", and on request "weights". The last one fine-tunes all
        weights as a last candidate; this costs some hundred forward passes more.
    maps
        Families of input maps to try, names of `FAMILIES`, or "orientation"; None takes the default ones.
    augment
        Augmentation of the inputs while batch-norm statistics are estimated. "crop" shifts images by up to an eighth of
        their side, as training commonly does. Pass a function to use the training's own augmentation.
    budget
        Number of forward passes, besides those that screen orientations, after which no further input map is tried.
        Screening takes about 18, and later steps take at most 45 more.
    device
        Device to run the model on; None keeps the model's device.
    """

    parts: Sequence[Part] | Part = PARTS
    """Parts that may be repaired."""
    maps: Sequence[str] | str | None = None
    """Families of input maps to try."""
    augment: Augment | Literal["crop"] | None = "crop"
    """Augmentation while batch-norm statistics are estimated."""
    budget: float = 55.0
    """Number of forward passes after which no further input map is tried."""
    device: Device | None = None
    """Device to run the model on."""


class ForwardResult(NamedTuple):
    """Outputs of the network for all samples, behind a map, with stored or new batch-norm statistics."""

    changed: dict[str, Tensor]
    """The new statistics."""
    logits: Tensor
    features: np.ndarray | None
    """Inputs of the last layer, if requested."""


@dataclass(frozen=True)
class RepairContext:
    """Samples and options of one repair."""

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
    weights: np.ndarray | None = None
    """Sample weights that undo a difference in class frequencies; None for equal weights."""
    head: str | None = None
    """Name of the last layer; None if it stays."""
    notes: list[str] = field(default_factory=list)
    _results: dict[tuple[str, bytes, float], ForwardResult] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def space(self, composition: Composition) -> PixelSpace:
        """Return a map before the network."""
        return PixelSpace(composition, self.low, self.high)

    def before(self, composition: Composition) -> PixelSpace | None:
        """Return a map before the network; None for the identity."""
        return self.space(composition) if composition.parts else None

    def estimate(self, composition: Composition, weight: float = 1.0) -> dict[str, Tensor]:
        """Estimate batch-norm statistics behind a map."""
        numbers = None if self.weights is None else resample(self.weights)
        before = self.before(composition)
        return estimate(self.network, before, weight, augment=self.augment, seed=self.seed, numbers=numbers)

    def forward(self, composition: Composition, weight: float) -> ForwardResult:
        """Run the network behind a map, with statistics of this weight; return logits and the last layer's inputs."""
        key = composition.name, composition.theta.cpu().numpy().tobytes(), weight
        if key not in self._results:
            changed = self.estimate(composition, weight) if weight else {}
            while len(self._results) >= N_RESULTS_KEPT:
                del self._results[next(iter(self._results))]
            self._results[key] = forward(self.network, self.before(composition), changed, self.head)
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
    """Read the samples and freeze the model; restore the model on exit."""
    loader = parse_loader("loader", loader)
    model, seed, parts = check_model(model), parse_seed(seed), _parse_parts(options.parts)
    require_positive("budget", options.budget)
    inner = unwrap(model, compiled=True)
    training = any(module.training for module in inner.modules() if isinstance(module, _BatchNorm | _DropoutNd))
    target = device_of(inner) if options.device is None else torch.device(options.device)
    with torch.inference_mode(False), frozen(inner), progress_line(progress, "repairing") as show:
        samples = Network(inner, CalibrationSet.read(loader, device=target, limit=MAX_BYTES_KEPT, model=inner))
        samples.check_inputs("loader")
        low, high = pixel_range(samples, normalise)
        known = normalise is not None or samples.has_bytes
        families = _parse_maps(options.maps, samples.shape, known=known) if "input" in parts else ()
        obstacle = samples.why_not_differentiable() if families else ""
        if obstacle and parts == ("input",):
            raise NotDifferentiable(obstacle)
        families = () if obstacle else families
        augment = _parse_augment(options.augment, samples.shape, low)
        context = RepairContext(model, samples, parts, low, high, families, augment, seed, options.budget, show)
        if normalise is not None:
            context.notes.extend(pixel_range_notes(samples, low, high))
        context.notes.extend(_untestable_note(families, samples))
        if obstacle:
            context.notes.append(f"no input map was tried: the network gives no gradient by its input, but {obstacle}")
        if training:
            context.notes.append("the network is in training mode, and so is the result: call eval() before using it")
        yield context


def forward(
    network: Network, before: nn.Module | None, changed: dict[str, Tensor], head: str | None = None
) -> ForwardResult:
    """Run all samples through the network with changed tensors; return logits and the last layer's inputs."""
    model = share_copy(network.model, changed) if changed or head else network.model
    network, rows = network.with_model(model), list[Tensor]()
    layers = {} if head is None else {head: model.get_submodule(head)}
    with watch_inputs(layers, lambda _, __, x: rows.append(to_cpu(x))):
        logits = network.logits(network.laid_out(before))
    if head is None:
        return ForwardResult(changed, logits, None)
    features = torch.cat(rows) if rows else torch.empty(0, 0)  # a rank without samples
    return ForwardResult(changed, logits, all_gather_rows(features).double().numpy())


def other_samples(name: str, loader: Iterable[Any] | None, samples: Network) -> Network | None:
    """Read further samples for the same network."""
    if loader is None:
        return None
    model, device = samples.model, samples.device
    others = Network(model, CalibrationSet.read(loader, device=device, limit=MAX_BYTES_KEPT, model=model))
    if others.shape != samples.shape:
        raise InputError(name, f"have inputs of shape {samples.shape}, like the loader", f"{others.shape}")
    others.check_inputs(name)
    if len(others.labels) < MIN_SAMPLES:
        raise InputError(name, f"have at least {MIN_SAMPLES} samples", f"{len(others.labels)}")
    return others


def parse_loader(name: str, loader: Any) -> Iterable[Any]:
    """Check that a loader gives batches; the arrays themselves would be read as one batch per row."""
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
    """Batches of a loader with the label 0 instead of their own, for readers of labelled batches."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader

    def __iter__(self) -> Iterator[Any]:
        """Iterate over the batches."""
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
    """Return the length of the first array, also inside mappings and sequences."""
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
    names = tuple(parts) if isinstance(parts, Iterable) and not isinstance(parts, str) else (parts,)
    for part in names:
        if part not in ALL_PARTS:
            raise InputError("parts", f"be some of {', '.join(ALL_PARTS)}", repr(part))
    return tuple(part for part in ALL_PARTS if part in names)


def _parse_maps(maps: Sequence[str] | str | None, shape: Shape, *, known: bool) -> tuple[str, ...]:
    if maps is None:
        return tuple(name for name in MAPS if MAP_TYPES[name].suits(shape) and (known or name not in NEEDS_PIXELS))
    names = (maps,) if isinstance(maps, str) else tuple(maps)
    for name in names:
        if name not in MAP_TYPES:
            raise InputError("maps", f"be some of {', '.join(MAP_TYPES)}", repr(name))
        if not MAP_TYPES[name].suits(shape):
            raise InputError("maps", f"suit inputs of shape {shape}", repr(name))
        if name in NEEDS_PIXELS and not known:
            raise InputError("maps", "have no gamma without a known pixel range", repr(name), "pass normalise")
    return tuple(name for name in MAP_TYPES if name in names)


def _untestable_note(families: Sequence[str], network: Network) -> list[str]:
    """Return a note on families with too many parameters for a score test on these samples."""
    sizes = {name: MAP_TYPES[name].size(network.shape) for name in families}
    large = [f"{name} ({size})" for name, size in sizes.items() if len(network.labels) <= 2 * size]
    if not large or len(network.labels) < MIN_SAMPLES:
        return []
    return [f"these maps have too many parameters for {len(network.labels)} samples: {', '.join(large)}"]
