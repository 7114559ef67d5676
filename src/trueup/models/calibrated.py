"""Networks with a calibrator: logits over a loader, and a calibrated network with the model's own signature."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from types import CodeType
from typing import Any, Literal, TypedDict, Unpack, cast, overload

import torch
from torch import Tensor, nn

from trueup._core.errors import InputError
from trueup._core.progress import track
from trueup._core.registry import METHODS
from trueup.calibrators.base import Calibrator
from trueup.calibrators.compose import accepts_option
from trueup.convert import ClassAxis, classes_last, flatten
from trueup.io.predictions import Predictions, PredictionTable
from trueup.models._distributed import all_gather_object, all_gather_rows, raise_on_all_ranks, rank, world_size
from trueup.models._tensors import as_tensors, upcast_half
from trueup.models._value_module import as_module
from trueup.models.batches import (
    Device,
    UnpackBatch,
    batches,
    errors_name_batch,
    logits_of,
    replace_at,
    tensors_in,
    unpacked,
    with_logits,
)
from trueup.models.freezing import frozen, unwrap


def outputs(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    class_axis: ClassAxis = None,
    device: Device | None = None,
    progress: bool = True,
    unpack: UnpackBatch | None = None,
) -> Iterator[Predictions]:
    """Yield the logits and labels of a model batch by batch; the model does not change.

    They are on the CPU, in float32 if the model computes in half precision. A tally that sums up batch by batch, such
    as `metrics.SegmentationTally`, never holds the whole set in memory.

    Parameters
    ----------
    model
        The network.
    loader
        Batches with labels; see `collect`.
    class_axis
        Position of the classes: "first" for outputs (n, K, …), "last" for (n, …, K), None for (n, K).
    device
        Device of the inputs; by default that of the model.
    progress
        Whether to show progress.
    unpack
        Function from a batch to (inputs, labels), for batches of another form.

    Yields
    ------
    Predictions
        Logits and labels of a batch; labels are (n, …) with a `class_axis`.

    Examples
    --------
    >>> x, y = torch.zeros(2, 3, 4, 4), torch.zeros(2, 4, 4, dtype=torch.int64)
    >>> [batch.logits.shape for batch in outputs(nn.Identity(), [(x, y)], class_axis="first")]
    [torch.Size([2, 3, 4, 4])]
    """
    model = unwrap(model)
    device = device_of(model) if device is None else device
    with frozen(model), torch.no_grad():  # not inference mode, since cached tensors must stay trainable
        steps = track(loader, label="collecting logits", enabled=progress and rank() == 0)
        parsed = batches(unpacked(steps, unpack=unpack), device=device, any_shape=class_axis is not None, model=model)
        for number, (args, kwargs, y) in enumerate(parsed):
            output = model(*args, **kwargs)
            with errors_name_batch(number):
                # A copy, since a model or a loader may reuse the memory for the next batch.
                z = upcast_half(logits_of(output)).to("cpu", copy=True)
            yield Predictions(z, y.to("cpu", copy=True))


class _CollectOptions(TypedDict, total=False):
    ignore_index: int
    shifted: bool
    device: Device | None
    progress: bool
    unpack: UnpackBatch | None


@overload
def collect(
    model: nn.Module, loader: Iterable[Any], *, class_axis: None = None, **options: Unpack[_CollectOptions]
) -> Predictions: ...


@overload
def collect(
    model: nn.Module, loader: Iterable[Any], *, class_axis: Literal["first", "last"], **options: Unpack[_CollectOptions]
) -> PredictionTable: ...


def collect(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    class_axis: ClassAxis = None,
    ignore_index: int = -100,
    shifted: bool = False,
    device: Device | None = None,
    progress: bool = True,
    unpack: UnpackBatch | None = None,
) -> Predictions | PredictionTable:
    """Collect the logits of a model on every batch of a loader; the model does not change.

    The result is on the CPU, in float32 if the model computes in half precision. In a `torch.distributed` group each
    rank passes its share of the data and gets the whole, in the order of the ranks.

    Parameters
    ----------
    model
        The network.
    loader
        Batches with labels: tuples or lists that end in the labels, or mappings or dataclasses with a field `labels`.
    class_axis
        Position of the classes: "first" for outputs (n, K, …), "last" for (n, …, K), None for (n, K).
    ignore_index
        Label of tokens or pixels that are left out.
    shifted
        Whether the logits (n, length, K) of a causal language model are for the next token, so that labels move by one.
    device
        Device of the inputs; by default that of the model.
    progress
        Whether to show progress.
    unpack
        Function from a batch to (inputs, labels), for batches of another form.

    Returns
    -------
    Predictions or PredictionTable
        Unpacks as (logits, labels). With a `class_axis`, tokens or pixels are rows, and `clusters` has the text or
        image of each row, so that ``evaluate(*table, **table.options())`` has intervals by image.

    Examples
    --------
    >>> x, y = torch.eye(3), torch.tensor([0, 1, 1])
    >>> collect(nn.Identity(), [(x[:2], y[:2]), (x[2:], y[2:])])
    Predictions(3 rows, 3 classes, torch float32)
    >>> x, y = torch.zeros(2, 3, 1, 2), torch.tensor([[[0, 1]], [[2, -100]]])
    >>> table = collect(nn.Identity(), [(x, y)], class_axis="first")
    >>> table.labels, table.clusters
    (tensor([0, 1, 2]), array([0, 0, 1]))
    """
    logits: list[Tensor] = []
    labels: list[Tensor] = []
    samples: list[Tensor] = []
    seen = 0
    if shifted and class_axis != "last":
        raise InputError("shifted", 'come with class_axis="last", logits (n, length, K)', f"class_axis={class_axis!r}")
    with raise_on_all_ranks():
        batch = outputs(model, loader, class_axis=class_axis, device=device, progress=progress, unpack=unpack)
        for number, (z, y) in enumerate(batch):
            with errors_name_batch(number):
                if class_axis is not None:
                    n = len(y)
                    z, y = (z[:, :-1], y[:, 1:]) if shifted else (z, y)
                    z, y, sample = flatten(z, y, class_axis=class_axis, ignore_index=ignore_index, clusters=True)
                    samples.append(torch.from_numpy(sample + seen))
                    seen += n
                z, y = as_tensors(z, y)
                if logits and z.shape[1] != logits[0].shape[1]:
                    raise ValueError(f"logits must have {logits[0].shape[1]} classes as before, got {z.shape[1]}")
            logits.append(z)
            labels.append(y)
    none = torch.empty(0, dtype=torch.int64)
    whole = all_gather_rows(torch.cat(logits) if logits else torch.empty(0, 0))
    if not whole.shape[1]:
        raise ValueError("loader must give at least one batch, got none; an iterator can be read only once")
    pair = Predictions(whole, all_gather_rows(torch.cat(labels) if labels else none))
    if class_axis is None:
        return pair
    before = (
        sum(all_gather_object(seen)[: rank()]) if world_size() > 1 else 0
    )  # images of different ranks are different
    of_row = all_gather_rows(torch.cat(samples) + before if samples else none)
    return PredictionTable(*pair, clusters=of_row.numpy(), cluster_name="sample")


class ModelSignature:
    """Binds `forward` like a method, with the signature of the instance's model.

    Exporters and trainers read that signature.
    """

    def __init__(self, function: Callable[..., Any], instance: nn.Module | None = None) -> None:
        self.function, self.instance, self.__doc__ = function, instance, function.__doc__

    def __get__(self, instance: nn.Module | None, owner: type | None = None) -> Callable[..., Any]:
        return self.function if instance is None else ModelSignature(self.function, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with the instance."""
        return self.function(self.instance, *args, **kwargs)

    @property
    def __signature__(self) -> inspect.Signature:
        return inspect.signature(cast(Any, self.instance).model.forward)

    @property
    def __code__(self) -> CodeType:  # read by torch.export
        return self.function.__code__


class ModelWrapper(nn.Module):
    """A module around a model, with the model's other attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            model = self.__dict__.get("_modules", {}).get("model")  # missing while it is copied or unpickled
            if model is None or name.startswith("__"):
                raise
        return getattr(model, name)


class Calibrated(ModelWrapper):
    """A network with an input map and a calibrator, after(model(before(x))), with the model's own signature.

    The model is shared, not copied; the caller controls its mode and gradients. The model's other attributes, such as
    `config`, are available. Methods that call the model, such as `generate`, see the calibrated logits.

    Parameters
    ----------
    model
        The network.
    before
        Map of the first floating-point tensor among the inputs; for tokens, of the output of the input embedding.
    after
        Calibrator of the logits, wherever they are in the model's output; the rest of the output does not change.
    class_axis
        Position of the classes in logits with more than two dimensions: "first" for (n, K, …), "last" for (n, …, K).

    Examples
    --------
    >>> from trueup.calibrators.temperature import Temperature
    >>> Calibrated(nn.Identity(), after=Temperature(2.0))(torch.tensor([[4.0, 1.0]]))
    tensor([[2.0000, 0.5000]])
    """

    def __init__(
        self,
        model: nn.Module,
        before: nn.Module | None = None,
        after: Calibrator | nn.Module | None = None,
        *,
        class_axis: ClassAxis = None,
    ) -> None:
        super().__init__()
        if class_axis not in (None, "first", "last"):
            raise InputError("class_axis", 'be "first" (n, K, …) or "last" (n, …, K)', repr(class_axis))
        if isinstance(before, Calibrator):
            got = f"the calibrator {type(before).__name__}"
            raise InputError("before", "map the network's input", got, "a calibrator of the logits is after=")
        for name, module in (("model", model), ("before", before), ("after", after)):
            known = isinstance(module, (nn.Module, Calibrator) if name == "after" else nn.Module)
            if not known and (module is not None or name == "model"):
                got = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
                raise InputError(name, "be an nn.Module", got)
        self.model = model
        self.before = before
        is_ready = after is None or isinstance(after, nn.Module)
        self.calibrator = after if is_ready else as_module(after).to(device_of(model))
        self.class_axis = class_axis
        self.training = getattr(model, "training", False)  # frozen scripts have no mode

    @property
    def after(self) -> Any:
        """The calibrator or module after the model; its parameters are in the state dict under `calibrator`."""
        return getattr(self.calibrator, "wrapped", self.calibrator)

    @ModelSignature
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model on the mapped inputs, and calibrate the logits of its output."""
        call = self.model if self.before is None else self._call_with_map
        return self._replace_logits(call(*args, **kwargs))

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        if name == "save_pretrained":  # the network's own method would omit the calibrator
            from trueup.models.pretrained import save_pretrained

            return functools.partial(save_pretrained, self)
        if name == "push_to_hub":
            raise AttributeError(
                "a calibrated network has no push_to_hub, which would omit the calibrator; "
                "save_pretrained(folder) writes both"
            )
        if not inspect.ismethod(value) or value.__self__ is not self.model:
            return value

        @functools.wraps(value)
        def method(*args: Any, **kwargs: Any) -> Any:
            with self._on_model():
                return value(*args, **kwargs)

        return method

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(self.model)})  # type: ignore[no-untyped-call]

    def _replace_logits(self, output: Any) -> Any:
        """Calibrate the logits of an output; each token or pixel is a row."""
        if self.calibrator is None:
            return output
        logits = logits_of(output)
        if logits.ndim == 2:
            return with_logits(output, self.calibrator(logits).to(logits.dtype))
        rows = classes_last(logits, self.class_axis)
        calibrated = self.calibrator(rows.reshape(-1, rows.shape[-1])).reshape(rows.shape)
        calibrated = calibrated.movedim(-1, 1) if self.class_axis == "first" else calibrated
        return with_logits(output, calibrated.to(logits.dtype))

    @contextmanager
    def _on_model(self) -> Iterator[None]:
        """Make this thread's calls of the model behave like calls of this module, for methods that call the model."""
        caller = get_ident()
        with ExitStack() as stack:

            def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
                if get_ident() != caller or self.before is None:
                    return None
                position = input_position(module, args, kwargs)
                if position is not None:
                    return replace_at((args, kwargs), position, self._map_input)
                call.enter_context(self._embedding_mapped([]))
                return None

            def after(module: nn.Module, args: Any, output: Any) -> Any:
                if get_ident() != caller:
                    return None
                call.close()
                return self._replace_logits(output)

            call = stack.enter_context(ExitStack())  # for one call of the model
            if self.before is not None:
                handle = self.model.register_forward_pre_hook(before, with_kwargs=True)
                stack.callback(handle.remove)
            stack.callback(self.model.register_forward_hook(after).remove)
            yield

    def _call_with_map(self, *args: Any, **kwargs: Any) -> Any:
        position = input_position(self.model, args, kwargs)
        if position is not None:
            args, kwargs = replace_at((args, kwargs), position, self._map_input)
            return self.model(*args, **kwargs)
        calls: list[nn.Module] = []
        with self._embedding_mapped(calls):
            output = self.model(*args, **kwargs)
        if not calls:
            raise ValueError("before acts on the output of the model's input embedding, but the model never called it")
        return output

    @contextmanager
    def _embedding_mapped(self, calls: list[nn.Module]) -> Iterator[None]:
        """Apply `before` to the output of the input embedding, in this thread; `calls` records it."""
        caller = get_ident()

        def mapped(module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
            if get_ident() != caller:  # another thread uses the same model
                return None
            calls.append(module)
            return self._map_input(output)

        handle = embedding_of(self.model).register_forward_hook(mapped)
        try:
            yield
        finally:
            handle.remove()

    def _map_input(self, point: Tensor) -> Tensor:
        mapped: Tensor = cast(nn.Module, self.before)(point)
        return mapped.to(point.dtype) if point.is_floating_point() else mapped


def calibrate(
    model: nn.Module,
    loader: Iterable[Any],
    method: str | Callable[..., Calibrator] = "temperature",
    *,
    class_axis: ClassAxis = None,
    ignore_index: int = -100,
    shifted: bool = False,
    device: Device | None = None,
    progress: bool = True,
    **options: Any,
) -> Calibrated:
    """Fit a calibrator to the logits of a model over a loader, and put it after the model.

    With a `class_axis`, methods that use cross-validation keep the rows of one text or image in the same fold.

    Parameters
    ----------
    model
        The network.
    loader
        Batches with labels; see `collect`.
    method
        Name in `trueup.METHODS`, or a function of logits and labels.
    class_axis
        Position of the classes: "first" for outputs (n, K, …), "last" for (n, …, K), None for (n, K).
    ignore_index
        Label of tokens or pixels that are left out.
    shifted
        Whether the logits (n, length, K) of a causal language model are for the next token, so that labels move by one.
    device
        Device of the inputs; by default that of the model.
    progress
        Whether to show progress.
    **options
        Options of the method, and `unpack` as in `collect`.

    Returns
    -------
    Calibrated
        The network with the calibrator.

    Examples
    --------
    >>> x, y = torch.tensor([[4.0, 0.0], [4.0, 0.0], [0.0, 4.0], [4.0, 0.0]]), torch.tensor([0, 0, 1, 1])
    >>> calibrate(nn.Identity(), [(x, y)]).after
    Temperature(temperature=3.64096)
    """
    fit = METHODS[method] if isinstance(method, str) else method
    loader = unpacked(loader, unpack=options.pop("unpack", None))
    rows: dict[str, Any] = {"class_axis": class_axis, "ignore_index": ignore_index, "shifted": shifted}
    if shifted or class_axis is not None:
        table: Any = collect(model, loader, device=device, progress=progress, **rows)
    else:
        table = collect(model, loader, device=device, progress=progress)
    if class_axis is not None and accepts_option(fit, "clusters"):
        options |= table.options()
    return Calibrated(model, after=fit(*table, **options), class_axis=class_axis)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of a model's first parameter, or else of its first buffer, or else the CPU.

    >>> device_of(nn.Linear(2, 2))
    device(type='cpu')
    """
    return next((t.device for tensors in (model.parameters(), model.buffers()) for t in tensors), torch.device("cpu"))


def input_position(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """Find the path in `(args, kwargs)` of the tensor for `before`; None for tokens.

    It is the first floating-point tensor, positional arguments first. With integer inputs, masks do not count.

    >>> input_position(nn.Identity(), ("text", torch.ones(1)), {})
    (0, 1)
    >>> input_position(nn.Embedding(9, 4), (torch.tensor([3]),), {"attention_mask": torch.ones(1)})
    """
    tensors = list(tensors_in((args, kwargs)))
    positions = [position for position, tensor in tensors if tensor.is_floating_point()]
    if not positions and not any(isinstance(module, nn.Embedding) for module in model.modules()):
        # Bytes of more than two dimensions are images; the map gives floating-point numbers from 0 to 255.
        positions = [position for position, tensor in tensors if tensor.dtype == torch.uint8 and tensor.ndim > 2]
        if positions:
            return positions[0]
    tokens = any(not tensor.dtype.is_floating_point and tensor.dtype != torch.bool for _, tensor in tensors)
    if tokens:
        positions = [position for position in positions if not _is_mask(model, position)]
    if positions:
        return positions[0]
    if tokens:
        return None
    kinds = [*(type(value).__name__ for value in args), *(f"{k}={type(v).__name__}" for k, v in kwargs.items())]
    raise ValueError(
        f"the model's inputs must contain floating-point tensors for `before`, got {', '.join(kinds) or 'nothing'}"
    )


def _is_mask(model: nn.Module, position: tuple[Any, ...]) -> bool:
    names = [key for key in position if isinstance(key, str)]
    if position[0] == 0:
        parameters = list(inspect.signature(model.forward).parameters)
        names += parameters[position[1] : position[1] + 1]
    return any(name.removesuffix("s").endswith("mask") for name in names)


def embedding_of(model: nn.Module) -> nn.Module:
    """Find the input embedding of a model: the result of `get_input_embeddings()`, else the only `nn.Embedding`.

    >>> embedding_of(nn.Sequential(nn.Embedding(100, 8), nn.Flatten(), nn.Linear(32, 2)))
    Embedding(100, 8)
    """
    for module in model.modules():
        named = getattr(module, "get_input_embeddings", None)
        try:
            embedding = named() if callable(named) else None
        except NotImplementedError:  # an abstract base class
            continue
        if isinstance(embedding, nn.Module):
            return embedding
    embeddings = {name: module for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    if len(embeddings) != 1:
        got = f"{len(embeddings)} of them: {', '.join(embeddings)}" if embeddings else "none"
        raise ValueError(
            "the model's inputs are integers, so the map acts on the output of its input embedding: model must "
            f"have one nn.Embedding, got {got}; add a method get_input_embeddings() that returns the right one"
        )
    return next(iter(embeddings.values()))
