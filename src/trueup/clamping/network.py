"""A frozen network over a calibration set: its logits at a map of the input, and gradients pulled back to the map."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trueup._core.errors import InputError
from trueup.clamping.calibration_set import CalibrationSet
from trueup.clamping.maps import Affine, Box, Shift
from trueup.models._distributed import all_gather_object, all_gather_rows, all_reduce_sum, raise_on_all_ranks
from trueup.models._tensors import as_tensors, upcast_half
from trueup.models.batches import Batch, Device, logits_of, tensors_in
from trueup.models.calibrated import Calibrated, embedding_of, input_position

Slope = Callable[[Tensor, Tensor], Tensor]
"""dL/dz of a loss that is a sum over the rows, given logits and labels."""
_NUMBERS = 1 << 26  # read at a time where quantiles are asked for
_OUTSIDE = 1e-3  # what rounding may put outside the box, as a share of its width
_WANTED = "the model must be differentiable by its input, for every recipe follows gradients"
_INSTEAD = "temperature alone needs none: trueup.calibrate(model, loader)"


class NotDifferentiable(ValueError):
    """Gradients by the input cannot be had."""

    def __init__(self, got: str) -> None:
        super().__init__(f"{_WANTED}, got {got}; {_INSTEAD}")
        self.got = got


class _InputCaptured(Exception):
    """Ends a call of the model once its input is known."""

    def __init__(self, point: Tensor) -> None:
        self.point = point


class _CaptureInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise _InputCaptured(x)


class _LaidOut(nn.Module):
    """Maps one after the other, whose images then lie in memory as they are wanted; a new tensor in any case."""

    def __init__(self, maps: Sequence[Callable[[Tensor], Tensor]], layout: torch.memory_format) -> None:
        super().__init__()
        self.maps = maps
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        for change in self.maps:
            x = change(x)
        return x.clone(memory_format=self.layout) if x.ndim == 4 else x.clone()


class Cost(NamedTuple):
    """What passes over a network have cost."""

    forwards: float
    """Forward passes over all samples."""
    backwards: float
    """Backward passes to the input."""
    backward: float
    """What one of these took, in forward passes: as measured, or 1.5 where none was timed.

    It is kept between one and two, within which the arithmetic lies: for tiny networks the clock shows overheads.
    """

    @property
    def equivalents(self) -> float:
        """All passes, counted in forward passes."""
        return self.forwards + self.backward * self.backwards


class Network:
    """A model to be called many times on the same samples, and what that has cost.

    It is for use inside `frozen(model)`, which it leaves to the caller. Passes are counted in units of the whole set;
    all ranks' samples are seen by each of them, and sums over samples are over all ranks'.

    >>> from trueup.clamping.calibration_set import CalibrationSet
    >>> inputs = CalibrationSet.read([(torch.eye(3), torch.tensor([0, 1, 1]))], device="cpu")
    >>> network = Network(nn.Identity(), inputs)
    >>> network.logits(Shift(torch.tensor([0.5, 0.0, 0.0])))[0]
    tensor([1.5000, 0.0000, 0.0000])
    >>> network.cost().forwards
    1.0
    """

    def __init__(
        self, model: nn.Module, inputs: CalibrationSet, *, box: Box | None = None, finite: bool = False
    ) -> None:
        self.model = model
        self.inputs = inputs
        self.box = box
        self.labels = all_gather_rows(inputs.labels)
        """Of all ranks, on the CPU."""
        if not len(self.labels):
            raise ValueError("loader must give at least one sample, got none; an iterator can be read only once")
        self._n = len(self.labels)
        self._passes = np.zeros((3, 2))  # rows, seconds and timed rows of forward and of backward passes
        self._plain: Tensor | None = None
        self._layout = torch.channels_last
        self._finite = finite  # whether masked classes, whose logits are not, are refused
        with raise_on_all_ranks():
            local = self._one_point()
        kinds = [kind for kind in all_gather_object(local) if kind is not None]
        self.shape, self.dtype, _ = kinds[0]
        """Of δ: of one input, or of one position's embedding."""
        self._refuse_masks(any(masked for _, _, masked in kinds))

    @property
    def device(self) -> Device:
        """Where the samples are."""
        return self.inputs.device

    def cost(self) -> Cost:
        """What the passes so far have cost: of all ranks together, so that every rank says the same."""
        rows, seconds, timed = all_reduce_sum(torch.from_numpy(self._passes)).tolist()
        forward, backward = (s / r if r else 0.0 for s, r in zip(seconds, timed, strict=True))
        ratio = min(max(backward / forward, 1.0), 2.0) if forward and backward else 1.5
        return Cost(rows[0] / self._n, rows[1] / self._n, ratio)

    def subset(self, inputs: CalibrationSet) -> Network:
        """The same network over some of the samples; what it costs is added to this one's, in whole passes."""
        network = self.with_model(self.model)
        network.inputs, network.labels = inputs, all_gather_rows(inputs.labels)
        return network

    def with_model(self, model: nn.Module) -> Network:
        """Another network over the same samples; what it costs is added to this one's."""
        network = copy(self)
        network.model, network._plain = model, None
        return network

    def count(self, *, forward: int = 0, backward: int = 0) -> None:
        """Note rows that went through the network outside of the passes below."""
        self._passes[0] += forward, backward

    def mapping(self, delta: Tensor, scale: Tensor | None = None) -> Shift:
        """The map with this shift, and scale, into the network's box."""
        return Shift(delta, self.box) if scale is None else Affine(delta, scale, self.box)

    def laid_out(self, *maps: Callable[[Tensor], Tensor] | None) -> nn.Module:
        """Maps one after the other, and then images in the layout in memory that convolutions on CPUs take faster.

        Not every network takes it: `view` after a convolution does not, and gets images as usual.
        """
        return _LaidOut([change for change in maps if change is not None], self._layout)

    def logits(self, before: nn.Module | None = None, *, inputs: CalibrationSet | None = None) -> Tensor:
        """Run all samples through the map and the network once: (total, classes), in the order of the ranks."""
        parts = []
        with raise_on_all_ranks(), torch.no_grad():
            for batch in self.inputs if inputs is None else inputs:
                with self._clock(0, batch):
                    z = self.call(batch, before)
                parts.append(to_cpu(z))
        return self._gathered(parts)

    def plain_logits(self) -> Tensor:
        """The logits of the inputs as they are; the pass is made once."""
        if self._plain is None:
            self._plain = as_tensors(self.logits(), self.labels)[0]
        return self._plain

    def input_gradient(self, slope: Slope) -> Tensor:
        """Run the inputs as they are forward and backward once: Σ_i dL_i/dx, in float64, of the shape of δ."""
        delta = torch.zeros(self.shape, dtype=self.dtype, device=self.device, requires_grad=True)
        z, (gradient,) = self.forward_backward(Shift(delta), [delta], slope)
        self._plain = as_tensors(z, self.labels)[0]
        return gradient

    def forward_backward(
        self, before: nn.Module, parameters: Sequence[Tensor], slope: Slope, *, inputs: CalibrationSet | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all samples forward and backward once: logits, and Σ_i dL_i/dparameter in float64.

        `before` depends on the parameters, which require gradients.
        """
        parts = []
        sums = [torch.zeros(p.shape, dtype=torch.float64, device=p.device) for p in parameters]
        with raise_on_all_ranks(), torch.enable_grad():
            for batch in self.inputs if inputs is None else inputs:
                with self._clock(0, batch):
                    z = require_graph(self.call(batch, before))
                cotangent = slope(upcast_half(z.detach()).double(), batch.labels).to(z.dtype)
                with self._clock(1, batch):
                    gradients = gradients_of(z, parameters, cotangent)
                for total, gradient in zip(sums, gradients, strict=True):
                    total += gradient
                parts.append(to_cpu(z))
        return self._gathered(parts), [all_reduce_sum(total) for total in sums]

    def _gathered(self, parts: Sequence[Tensor]) -> Tensor:
        logits = all_gather_rows(torch.cat(list(parts)) if parts else torch.empty(0, 0))
        self._refuse_masks(self._finite and bool(torch.isinf(logits).any()))
        return logits

    def batch_logits(self, batch: Batch, before: nn.Module | None = None) -> Tensor:
        """The logits of one batch, with their graph; counted, while its backward is left to `count`."""
        self.count(forward=len(batch.labels))
        return require_graph(self.call(batch, before))

    def points(self, inputs: Iterable[Batch] | None = None) -> Iterator[Tensor]:
        """What the map acts on, batch by batch: the inputs, or the embeddings of tokens."""
        capturing = Calibrated(self.model, before=_CaptureInput())
        with torch.no_grad():
            for batch in self.inputs if inputs is None else inputs:
                try:
                    capturing(*batch.args, **batch.kwargs)
                except _InputCaptured as captured:
                    yield captured.point.detach()

    def _refuse_masks(self, masked: bool) -> None:
        if masked and self._finite:
            raise InputError("logits", "be finite", "masked classes", f"trueup.repair takes them; {_INSTEAD}")

    def _one_point(self) -> tuple[tuple[int, ...], torch.dtype, bool] | None:
        for batch in self.inputs:
            tokens = input_position(self.model, batch.args, batch.kwargs) is None
            if tokens:
                _check_tokens(self.model, batch)
            z = as_tensors(self._first_call(batch), batch.labels)[0]
            (point,) = self.points([batch])
            shape = tuple(point.shape[-1:] if tokens else point.shape[1:])
            if not shape or 0 in shape:
                wanted = "the model's input must have numbers for each sample, (n, features) or (n, channels, …)"
                raise ValueError(f"{wanted}, got shape {tuple(point.shape)}")
            return shape, upcast_half(point[:0]).dtype, bool(torch.isinf(z).any())
        return None

    def why_not_differentiable(self) -> str:
        """What comes instead of gradients by the input, tried on a few rows; or nothing. All ranks say the same."""
        got = ""
        with raise_on_all_ranks():
            batch = next(iter(self.inputs), None)
            if batch is not None:
                delta = torch.zeros(self.shape, dtype=self.dtype, device=self.device, requires_grad=True)
                try:
                    with torch.enable_grad():
                        few = self.inputs.rows(batch, torch.arange(min(2, len(batch.labels))))
                        z = require_graph(self.call(few, Shift(delta)))
                        gradients_of(z, [delta], torch.ones_like(z))
                except NotDifferentiable as error:
                    got = error.got
                except RuntimeError as error:
                    got = f"{error}".partition("\n")[0]
        return next(filter(None, all_gather_object(got)), "")

    def check_inputs(self, name: str) -> None:
        """Refuse inputs of several shapes, or that are not finite, by the name of their loader."""
        shapes, wrong = set(), 0
        with raise_on_all_ranks():
            for points in self.points():
                shapes.add(tuple(points.shape[-len(self.shape) :]))
                wrong += int((~torch.isfinite(points)).any(dim=tuple(range(1, points.ndim))).sum())
        for found, bad in all_gather_object((shapes, wrong)):
            if found - {self.shape}:
                listed = " and ".join(map(str, sorted(found | {self.shape})))
                raise InputError(name, "give inputs of one shape", listed)
            if bad:
                raise InputError(name, "give inputs that are finite", f"NaN or infinity in {bad} of them")

    def _first_call(self, batch: Batch) -> Tensor:
        try:
            return self.call(batch, self.laid_out())
        except Exception:  # of whatever kind: what is wrong besides the layout comes up again
            self._layout = torch.contiguous_format
            return self.call(batch, None)

    def call(self, batch: Batch, before: nn.Module | None) -> Tensor:
        """The logits of one batch, one row a sample; not counted."""
        batch = self.inputs.copied(batch)  # the samples are read many times, and a network may change its inputs
        z = logits_of(Calibrated(self.model, before=before)(*batch.args, **batch.kwargs))
        if z.shape[:1] != batch.labels.shape:
            raise ValueError(
                f"the model must give one row of logits a sample, got shape {tuple(z.shape)} for {len(batch.labels)} "
                "samples; of its arguments only those with as many rows as labels, in every batch, go with the samples"
            )
        return z

    @contextmanager
    def _clock(self, kind: int, batch: Batch) -> Iterator[None]:
        start = _now(self.device)
        yield
        n = len(batch.labels)
        self._passes[:, kind] += n, _now(self.device) - start, n


def _check_tokens(model: nn.Module, batch: Batch) -> None:
    """Say of integers that are no tokens what to do."""
    tensors = [tensor for _, tensor in tensors_in((batch.args, batch.kwargs))]
    try:
        embedding_of(model)
        whole = [tensor for tensor in tensors if not tensor.dtype.is_floating_point and tensor.dtype != torch.bool]
        if all(tensor.dtype == torch.uint8 and tensor.ndim > 2 for tensor in whole):
            raise ValueError("the model's inputs are images of whole numbers")
    except ValueError as error:
        given = {f"{tensor.dtype}".replace("torch.", "") for tensor in tensors}
        wanted = "images must come as floating-point numbers"
        raise ValueError(f"{error}; {wanted}, got {', '.join(sorted(given))}") from None


def to_cpu(z: Tensor) -> Tensor:
    """A copy of a tensor on the CPU, in float32 where it is of half precision."""
    return upcast_half(z.detach()).to("cpu", copy=True)


def _now(device: Device) -> float:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def require_graph(logits: Tensor) -> Tensor:
    """The same logits, if gradients can be pulled back from them."""
    if not logits.requires_grad:
        raise NotDifferentiable("logits cut off from it, as by no_grad, inference_mode or NumPy inside of the model")
    return logits


def gradients_of(
    value: Tensor, parameters: Sequence[Tensor], cotangent: Tensor | None = None, *, retain_graph: bool = False
) -> tuple[Tensor, ...]:
    """The gradients by parameters of the map before the network, on each of which the value must depend."""
    try:
        gradients = torch.autograd.grad(value, parameters, cotangent, retain_graph=retain_graph, allow_unused=True)
    except RuntimeError as error:  # of which NotImplementedError is one
        if not isinstance(error, NotImplementedError) and "is not implemented" not in str(error):
            raise
        raise NotDifferentiable(f"{error}") from error
    if any(gradient is None for gradient in gradients):
        raise NotDifferentiable("logits that do not depend on it")
    return gradients


def check_box(network: Network) -> None:
    """Refuse a box that some input is not in: the network as it is would not be among the maps that are tried."""
    if network.box is None:
        return
    low, high = box_ends(network)
    smallest, largest = extent(network, 0.0)
    slack = _OUTSIDE * (high - low)
    if bool(((smallest < low - slack) | (largest > high + slack)).any()):
        raise ValueError(
            f"box must hold every input, got inputs in {float(smallest.min()):.4g}..{float(largest.max()):.4g} "
            f"for a box of {float(low.min()):.4g}..{float(high.max()):.4g}; it is in the space of the network's input"
        )


def box_ends(network: Network) -> tuple[Tensor, Tensor]:
    """The two ends of the network's box, each of the shape of δ."""
    if not isinstance(network.box, tuple | list) or len(network.box) != 2:
        raise ValueError(f"box must be a pair (low, high), got {network.box!r}")
    ends = []
    for end in network.box:
        try:
            ends.append(torch.as_tensor(end, dtype=torch.float64).cpu().expand(network.shape))
        except (TypeError, ValueError, RuntimeError):
            got = f"shape {tuple(end.shape)}" if hasattr(end, "shape") else repr(end)
            wanted = f"have ends that are numbers or broadcast to one input {network.shape}"
            raise ValueError(f"box must {wanted}, got {got}") from None
    low, high = ends
    if not bool((low <= high).all()):  # which NaN is not
        got = f"{float(low.max()):.4g} and {float(high.min()):.4g}"
        raise ValueError(f"box must have its lower end below its upper one, got {got}")
    return low, high


def extent(network: Network, quantile: float) -> tuple[Tensor, Tensor]:
    """The least and greatest value of each coordinate, or its quantiles, over all samples of all ranks."""
    size = math.prod(network.shape)
    # Quantiles need a coordinate's values all at once: a few coordinates at a time where they are many.
    step = max(1, _NUMBERS // len(network.labels)) if quantile else size
    ends = []
    for start in range(0, size, step):
        parts = [points.reshape(-1, size)[:, start : start + step].cpu() for points in network.points()]
        if not quantile:
            parts = [end for part in parts for end in (part.amin(dim=0)[None], part.amax(dim=0)[None])]
        columns = all_gather_rows(torch.cat(parts) if parts else torch.empty(0, min(step, size - start)))
        # The 0 and 1 quantiles are the least and the greatest.
        ends.append(np.quantile(columns.double().numpy(), [quantile, 1 - quantile], axis=0))
    least, most = (torch.from_numpy(end).reshape(network.shape) for end in np.concatenate(ends, axis=1))
    return least, most
