"""A frozen network over a calibration set: its logits behind an input map, and gradients by the map."""

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
"""Function from logits and labels to dL/dz, for a loss that is a sum over rows."""
_MAX_VALUES = 1 << 26  # number of input values in memory while quantiles are computed
_BOX_TOLERANCE = 1e-3  # share of the box's width that rounding may exceed
_REQUIREMENT = "the model must be differentiable by its input, since every recipe uses gradients"
_ALTERNATIVE = "temperature scaling needs no gradients: trueup.calibrate(model, loader)"


class NotDifferentiable(ValueError):
    """The network gives no gradients by its input."""

    def __init__(self, got: str) -> None:
        super().__init__(f"{_REQUIREMENT}, got {got}; {_ALTERNATIVE}")
        self.got = got


class _InputCaptured(Exception):
    """Ends a call of the model once its input is known."""

    def __init__(self, point: Tensor) -> None:
        self.point = point


class _CaptureInput(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise _InputCaptured(x)


class _LaidOut(nn.Module):
    """Maps applied in turn, with a copy of the result in the given memory layout."""

    def __init__(self, maps: Sequence[Callable[[Tensor], Tensor]], layout: torch.memory_format) -> None:
        super().__init__()
        self.maps = maps
        self.layout = layout

    def forward(self, x: Tensor) -> Tensor:
        for change in self.maps:
            x = change(x)
        return x.clone(memory_format=self.layout) if x.ndim == 4 else x.clone()


class Cost(NamedTuple):
    """Cost of passes through a network."""

    forwards: float
    """Forward passes over all samples."""
    backwards: float
    """Backward passes to the input."""
    backward: float
    """Cost of a backward pass in forward passes, as measured; 1.5 if none was timed.

    It is limited to the range of the arithmetic, one to two, since the clock also measures overheads.
    """

    @property
    def equivalents(self) -> float:
        """Cost of all passes in units of a forward pass."""
        return self.forwards + self.backward * self.backwards


class Network:
    """A model that is called many times on the same samples, with a count of the passes.

    The caller must freeze the model with `frozen(model)`. One pass is a pass over the samples of all ranks. Sums over
    samples are over all ranks.

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
        """Labels of all ranks, on the CPU."""
        if not len(self.labels):
            raise ValueError("loader must give at least one sample, got none; an iterator can be read only once")
        self._n = len(self.labels)
        self._passes = np.zeros((3, 2))  # rows, seconds and timed rows of forward and of backward passes
        self._plain: Tensor | None = None
        self._layout = torch.channels_last
        self._finite = finite  # whether masked classes, with infinite logits, are rejected
        with raise_on_all_ranks():
            local = self._one_point()
        kinds = [kind for kind in all_gather_object(local) if kind is not None]
        self.shape, dtype, _ = kinds[0]
        """Shape of δ: that of one input, or of one token's embedding."""
        self.has_bytes = not dtype.is_floating_point
        """Whether the inputs are images of bytes, from 0 to 255."""
        self.dtype = torch.get_default_dtype() if self.has_bytes else dtype
        self._refuse_masks(any(masked for _, _, masked in kinds))

    @property
    def device(self) -> Device:
        """Device of the samples."""
        return self.inputs.device

    def cost(self) -> Cost:
        """Return the cost of the passes so far, summed over ranks."""
        rows, seconds, timed = all_reduce_sum(torch.from_numpy(self._passes)).tolist()
        forward, backward = (s / r if r else 0.0 for s, r in zip(seconds, timed, strict=True))
        ratio = min(max(backward / forward, 1.0), 2.0) if forward and backward else 1.5
        return Cost(rows[0] / self._n, rows[1] / self._n, ratio)

    def subset(self, inputs: CalibrationSet) -> Network:
        """Return the same network over some of the samples; both share one count of passes."""
        network = self.with_model(self.model)
        network.inputs, network.labels = inputs, all_gather_rows(inputs.labels)
        return network

    def with_model(self, model: nn.Module) -> Network:
        """Return another network over the same samples; both share one count of passes."""
        network = copy(self)
        network.model, network._plain = model, None
        return network

    def count(self, *, forward: int = 0, backward: int = 0) -> None:
        """Count rows that went through the network outside the passes below."""
        self._passes[0] += forward, backward

    def mapping(self, delta: Tensor, scale: Tensor | None = None) -> Shift:
        """Return the map with this shift and scale, clipped to the network's box."""
        return Shift(delta, self.box) if scale is None else Affine(delta, scale, self.box)

    def laid_out(self, *maps: Callable[[Tensor], Tensor] | None) -> nn.Module:
        """Return maps applied in turn, with images in channels-last layout, which is faster for convolutions on CPUs.

        Networks that call `view` after a convolution do not support it, and get the usual layout.
        """
        return _LaidOut([change for change in maps if change is not None], self._layout)

    def logits(self, before: nn.Module | None = None, *, inputs: CalibrationSet | None = None) -> Tensor:
        """Run all samples through the map and the network once; return logits (total, classes)."""
        parts = []
        with raise_on_all_ranks(), torch.no_grad():
            for batch in self.inputs if inputs is None else inputs:
                with self._clock(0, batch):
                    z = self.call(batch, before)
                parts.append(to_cpu(z))
        return self._gathered(parts)

    def plain_logits(self) -> Tensor:
        """Return the logits of the original inputs, from one pass whose result is kept."""
        if self._plain is None:
            self._plain = as_tensors(self.logits(), self.labels)[0]
        return self._plain

    def input_gradient(self, slope: Slope) -> Tensor:
        """Run the original inputs forward and backward once; return Σ_i dL_i/dx in float64, of the shape of δ."""
        delta = torch.zeros(self.shape, dtype=self.dtype, device=self.device, requires_grad=True)
        z, (gradient,) = self.forward_backward(Shift(delta), [delta], slope)
        self._plain = as_tensors(z, self.labels)[0]
        return gradient

    def forward_backward(
        self, before: nn.Module, parameters: Sequence[Tensor], slope: Slope, *, inputs: CalibrationSet | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """Run all samples forward and backward once; return logits and Σ_i dL_i/dparameter in float64.

        The map `before` depends on the parameters, which require gradients.
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
        """Return the logits of one batch with their graph; the caller must count a backward pass."""
        self.count(forward=len(batch.labels))
        return require_graph(self.call(batch, before))

    def points(self, inputs: Iterable[Batch] | None = None) -> Iterator[Tensor]:
        """Yield the inputs of the map batch by batch: inputs of the network, or embeddings of tokens."""
        capturing = Calibrated(self.model, before=_CaptureInput())
        with torch.no_grad():
            for batch in self.inputs if inputs is None else inputs:
                try:
                    capturing(*batch.args, **batch.kwargs)
                except _InputCaptured as captured:
                    yield captured.point.detach()

    def _refuse_masks(self, masked: bool) -> None:
        if masked and self._finite:
            raise InputError("logits", "be finite", "masked classes", f"trueup.repair accepts them; {_ALTERNATIVE}")

    def _one_point(self) -> tuple[tuple[int, ...], torch.dtype, bool] | None:
        for batch in self.inputs:
            tokens = input_position(self.model, batch.args, batch.kwargs) is None
            if tokens:
                _check_tokens(self.model, batch)
            try:
                logits = self._first_call(batch)
            except RuntimeError as error:
                if not any(tensor.dtype == torch.uint8 for _, tensor in tensors_in((batch.args, batch.kwargs))):
                    raise
                raise ValueError(f"images must be floating-point numbers for this model, got uint8: {error}") from error
            (point,) = self.points([batch])
            if n_bad := int((~torch.isfinite(point)).reshape(len(point), point[:1].numel()).any(dim=1).sum()):
                raise InputError("inputs", "be finite", f"NaN or infinity in {n_bad} of the first {len(point)}")
            z = as_tensors(logits, batch.labels)[0]
            shape = tuple(point.shape[-1:] if tokens else point.shape[1:])
            if not shape or 0 in shape:
                expected = "the model's input must have shape (n, features) or (n, channels, …)"
                raise ValueError(f"{expected}, got {tuple(point.shape)}")
            return shape, upcast_half(point[:0]).dtype, bool(torch.isinf(z).any())
        return None

    def why_not_differentiable(self) -> str:
        """Return the obstacle to gradients by the input, tried on two rows; empty if there is none."""
        got = ""
        with raise_on_all_ranks():
            batch = next(iter(self.inputs), None)
            if batch is not None:
                delta = torch.zeros(self.shape, dtype=self.dtype, device=self.device, requires_grad=True)
                try:
                    with torch.enable_grad():
                        two_rows = self.inputs.rows(batch, torch.arange(min(2, len(batch.labels))))
                        z = require_graph(self.call(two_rows, Shift(delta)))
                        gradients_of(z, [delta], torch.ones_like(z))
                except NotDifferentiable as error:
                    got = error.got
                except RuntimeError as error:
                    got = f"{error}".partition("\n")[0]
        return next(filter(None, all_gather_object(got)), "")

    def check_inputs(self, name: str) -> None:
        """Reject inputs of several shapes, or that are not finite; `name` is the loader's argument name."""
        shapes, n_infinite = set(), 0
        with raise_on_all_ranks():
            for points in self.points():
                shapes.add(tuple(points.shape[-len(self.shape) :]))
                n_infinite += int((~torch.isfinite(points)).any(dim=tuple(range(1, points.ndim))).sum())
        for rank_shapes, rank_infinite in all_gather_object((shapes, n_infinite)):
            if rank_shapes - {self.shape}:
                listed = " and ".join(map(str, sorted(rank_shapes | {self.shape})))
                raise InputError(name, "give inputs of one shape", listed)
            if rank_infinite:
                raise InputError(name, "give inputs that are finite", f"NaN or infinity in {rank_infinite} of them")

    def _first_call(self, batch: Batch) -> Tensor:
        try:
            return self.call(batch, self.laid_out())
        except Exception:  # errors with other causes than the layout are raised again
            self._layout = torch.contiguous_format
            return self.call(batch, None)

    def call(self, batch: Batch, before: nn.Module | None) -> Tensor:
        """Return the logits of one batch, one row per sample, without counting."""
        batch = self.inputs.copied(batch)  # a network may change its inputs in place, and they are used again
        z = logits_of(Calibrated(self.model, before=before)(*batch.args, **batch.kwargs))
        if z.shape[:1] != batch.labels.shape:
            raise ValueError(
                f"the model must give one row of logits per sample, got shape {tuple(z.shape)} for {len(batch.labels)} "
                "samples; arguments with another number of rows than labels are shared by all samples"
            )
        return z

    @contextmanager
    def _clock(self, kind: int, batch: Batch) -> Iterator[None]:
        start = _now(self.device)
        yield
        n = len(batch.labels)
        self._passes[:, kind] += n, _now(self.device) - start, n


def _check_tokens(model: nn.Module, batch: Batch) -> None:
    """Reject integer inputs that are not tokens, with advice."""
    tensors = [tensor for _, tensor in tensors_in((batch.args, batch.kwargs))]
    try:
        embedding_of(model)
        whole = [tensor for tensor in tensors if not tensor.dtype.is_floating_point and tensor.dtype != torch.bool]
        if all(tensor.dtype == torch.uint8 and tensor.ndim > 2 for tensor in whole):
            raise ValueError("the model's inputs are images of whole numbers")
    except ValueError as error:
        dtypes = {f"{tensor.dtype}".replace("torch.", "") for tensor in tensors}
        expected = "images must be floating-point numbers"
        raise ValueError(f"{error}; {expected}, got {', '.join(sorted(dtypes))}") from None


def to_cpu(z: Tensor) -> Tensor:
    """Copy a tensor to the CPU, with half precision converted to float32."""
    return upcast_half(z.detach()).to("cpu", copy=True)


def _now(device: Device) -> float:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)
    return perf_counter()


def require_graph(logits: Tensor) -> Tensor:
    """Return the logits if they have a graph; otherwise raise an error."""
    if not logits.requires_grad:
        raise NotDifferentiable("logits without a graph, as from no_grad, inference_mode or NumPy inside the model")
    return logits


def gradients_of(
    value: Tensor, parameters: Sequence[Tensor], cotangent: Tensor | None = None, *, retain_graph: bool = False
) -> tuple[Tensor, ...]:
    """Compute gradients by parameters of the input map; the value must depend on each of them."""
    try:
        gradients = torch.autograd.grad(value, parameters, cotangent, retain_graph=retain_graph, allow_unused=True)
    except RuntimeError as error:  # this includes NotImplementedError
        if not isinstance(error, NotImplementedError) and "is not implemented" not in str(error):
            raise
        raise NotDifferentiable(f"{error}") from error
    if any(gradient is None for gradient in gradients):
        raise NotDifferentiable("logits that do not depend on it")
    return gradients


def check_box(network: Network) -> None:
    """Reject a box that does not contain every input: the identity map must be possible."""
    if network.box is None:
        return
    low, high = box_ends(network)
    smallest, largest = extent(network, 0.0)
    slack = _BOX_TOLERANCE * (high - low)
    if bool(((smallest < low - slack) | (largest > high + slack)).any()):
        raise ValueError(
            f"box must hold every input, got inputs in {float(smallest.min()):.4g}..{float(largest.max()):.4g} "
            f"for a box of {float(low.min()):.4g}..{float(high.max()):.4g}; it is in the space of the network's input"
        )


def box_ends(network: Network) -> tuple[Tensor, Tensor]:
    """Return the two ends of the network's box, each of the shape of δ."""
    if not isinstance(network.box, tuple | list) or len(network.box) != 2:
        raise ValueError(f"box must be a pair (low, high), got {network.box!r}")
    ends = []
    for end in network.box:
        try:
            ends.append(torch.as_tensor(end, dtype=torch.float64).cpu().expand(network.shape))
        except (TypeError, ValueError, RuntimeError):
            got = f"shape {tuple(end.shape)}" if hasattr(end, "shape") else repr(end)
            expected = f"have ends that are numbers or broadcast to one input {network.shape}"
            raise ValueError(f"box must {expected}, got {got}") from None
    low, high = ends
    if not bool((low <= high).all()):  # NaN fails this comparison, too
        got = f"{float(low.max()):.4g} and {float(high.min()):.4g}"
        raise ValueError(f"box must have its lower end below its upper one, got {got}")
    return low, high


def extent(network: Network, quantile: float) -> tuple[Tensor, Tensor]:
    """Return the minimum and maximum of each coordinate, or its quantiles, over all samples of all ranks."""
    size = math.prod(network.shape)
    # Quantiles need all values of a coordinate at once, so large sets are read a few coordinates at a time.
    step = max(1, _MAX_VALUES // len(network.labels)) if quantile else size
    ends = []
    for start in range(0, size, step):
        parts = [points.reshape(-1, size)[:, start : start + step].cpu() for points in network.points()]
        if not quantile:
            parts = [end for part in parts for end in (part.amin(dim=0)[None], part.amax(dim=0)[None])]
        columns = all_gather_rows(torch.cat(parts) if parts else torch.empty(0, min(step, size - start)))
        # The 0 and 1 quantiles are minimum and maximum.
        ends.append(np.quantile(columns.double().numpy(), [quantile, 1 - quantile], axis=0))
    least, most = (torch.from_numpy(end).reshape(network.shape) for end in np.concatenate(ends, axis=1))
    return least, most
