"""What a loss is: a function of `logits, labels` with a value for each row, and the Module around it.

A new loss is a formula under `per_sample` or `per_batch` and a `Loss` that names it. Checks of input and options,
half precision, class weights, ignored labels, further dimensions and reductions are here.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from trueup.models._tensors import upcast_half

Reduction: TypeAlias = Literal["mean", "sum", "none"]
Formula = TypeVar("Formula", bound=Callable[..., Tensor])
Check: TypeAlias = Callable[[str, Mapping[str, Any]], None]
"""Takes an option's name and all the options, and raises or warns."""


def _option(requirement: str, holds: Callable[[Any], bool]) -> Check:
    def check(name: str, options: Mapping[str, Any]) -> None:
        try:
            valid = holds(options[name])
        except TypeError:  # a text, or nothing
            valid = False
        if not valid:
            raise ValueError(f"{name} must {requirement}, got {options[name]!r}")

    return check


def at_least(bound: float) -> Check:
    """The option is a finite number of at least this."""
    return _option(f"be a number of at least {bound}", lambda value: bound <= value < math.inf)


def above(bound: float) -> Check:
    """The option is a finite number above this."""
    return _option(f"be a number above {bound}", lambda value: bound < value < math.inf)


def whole(bound: int) -> Check:
    """The option is a whole number of at least this."""
    return _option(f"be a whole number of at least {bound}", lambda value: isinstance(value, int) and value >= bound)


def between(low: float, high: float) -> Check:
    """The option is a number from low to high, both included."""
    return _option(f"lie in {low}..{high}", lambda value: low <= value <= high)


def per_sample(**checks: Check) -> Callable[[Formula], Formula]:
    """Make a loss of a formula whose value for a row depends on that row alone; options are checked by name."""
    return lambda formula: _check_inputs(formula, checks, per_batch=False)


def per_batch(**checks: Check) -> Callable[[Formula], Formula]:
    """Make a loss of a formula whose value for a row depends on the other rows too; options are checked by name."""
    return lambda formula: _check_inputs(formula, checks, per_batch=True)


class Loss(nn.Module):
    """A loss as torch's own are: logits (N, K) or (N, K, d…) and labels (N) or (N, d…).

    `weight` multiplies a row's loss by the weight of its label, and "mean" divides by the sum of these weights; rows
    labelled `ignore_index` count for nothing. Half precision is computed, and the loss given, in float32. The further
    keywords are those of the function; they are attributes, so that a schedule may change them between steps.

    A loss of the batch adds one number, found from all rows that count, to each row's cross-entropy. So its "mean" is
    the mean cross-entropy plus that number, in which every row counts alike, whatever its weight.
    """

    per_batch: ClassVar[bool]
    """A row's value depends on the other rows."""
    neutral: ClassVar[Mapping[str, Any] | None]
    """The options with which the loss is the cross-entropy; None if there are none."""
    function: ClassVar[Callable[..., Tensor]]
    """The loss of each row, `(logits, labels, *, …) -> (n,)`."""
    formula: ClassVar[Callable[..., Tensor]]
    """The same without its checks of the input."""
    checks: ClassVar[Mapping[str, Check]]
    defaults: ClassVar[Mapping[str, Any]]
    """The options and what they are unless given."""
    weight: Tensor | None

    def __init_subclass__(
        cls, function: Callable[..., Tensor] | None = None, neutral: Mapping[str, Any] | None = None, **rest: Any
    ) -> None:
        super().__init_subclass__(**rest)
        if function is None:  # a subclass of a particular loss
            return
        options = list(inspect.signature(function).parameters.values())[2:]
        common = list(inspect.signature(Loss.__init__).parameters.values())[1:-1]
        cls.__signature__ = inspect.Signature([*options, *common])  # type: ignore[attr-defined]
        cls.function, cls.formula = staticmethod(function), staticmethod(vars(function)["formula"])
        cls.checks, cls.per_batch = vars(function)["checks"], vars(function)["per_batch"]
        cls.defaults, cls.neutral = {option.name: option.default for option in options}, neutral

    def __init__(
        self, *, weight: Any = None, ignore_index: int = -100, reduction: Reduction = "mean", **options: Any
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')
        if unknown := options.keys() - self.defaults.keys():
            takes = ", ".join([*self.defaults, "weight", "ignore_index", "reduction"])
            raise TypeError(f"{type(self).__name__} has no option {', '.join(sorted(unknown))}; it takes: {takes}")
        chosen = {**self.defaults, **options}
        for name, check in self.checks.items():
            check(name, chosen)
        for name, value in chosen.items():
            setattr(self, name, value)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.register_buffer("weight", None if weight is None else _class_weights(weight))

    def values(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of each row (n,), from logits (n, K) in float32 or float64 and labels (n,)."""
        return self.formula(logits, labels, **{name: getattr(self, name) for name in self.defaults})

    def weighted(self, logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        """The loss of each row times the weight of its label."""
        return self.values(logits, labels) * weight[labels]

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """The loss of a batch."""
        z, y = as_rows(logits, labels)
        kept = _row_mask(y, z.shape[1], self.ignore_index)
        weight = None if self.weight is None else self.weight.to(z.dtype)
        if weight is not None and len(weight) != z.shape[1]:
            raise ValueError(f"weight must have {z.shape[1]} entries, one a class, got {len(weight)}")
        if kept is not None:
            y = torch.where(kept, y, 0)  # some class, to have one
        if kept is None:
            values = self._rows(z, y, weight)
        elif self.per_batch:  # the other rows must not see the ignored ones
            values = z.new_zeros(len(y)).masked_scatter(kept, self._rows(z[kept], y[kept], weight))
        else:
            values = torch.where(kept, self._rows(z, y, weight), 0.0)
        if self.reduction == "none":
            return values.reshape(labels.shape)
        if self.reduction == "sum":
            return values.sum()
        if kept is None and weight is None:
            return values.mean()
        weights = torch.ones_like(values) if weight is None else weight[y]
        return values.sum() / (weights if kept is None else torch.where(kept, weights, 0.0)).sum()

    def _rows(self, logits: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
        return self.values(logits, labels) if weight is None else self.weighted(logits, labels, weight)

    def extra_repr(self) -> str:
        """The options, and what differs from the common defaults."""
        shown = {name: getattr(self, name) for name in self.defaults}
        if self.weight is not None:
            shown["weight"] = f"tensor({len(self.weight)})"
        if self.ignore_index != -100:
            shown["ignore_index"] = self.ignore_index
        return ", ".join(f"{name}={value}" for name, value in {**shown, "reduction": self.reduction}.items())


def as_rows(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Check logits (N, K, …) and labels (N, …) and flatten them, on the graph of the network they came from.

    `as_tensors` cuts arrays off from the graph and looks at every value; a loss in training must do neither.
    """
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
        raise ValueError(f"logits and labels must be tensors, got {type(logits).__name__}, {type(labels).__name__}")
    if logits.ndim < 2 or logits.shape[1] < 2:
        raise ValueError(f"logits must have shape (N, K) or (N, K, d…) with K at least 2, got {tuple(logits.shape)}")
    if not logits.is_floating_point():
        raise ValueError(f"logits must be floating point, got {logits.dtype}".replace("torch.", ""))
    wanted = (*logits.shape[:1], *logits.shape[2:])
    if tuple(labels.shape) != wanted:
        last = logits.ndim > 2 and labels.shape == logits.shape[:-1]
        hint = "; where the classes are last, logits.movedim(-1, 1) puts them second" if last else ""
        shape = tuple(logits.shape)
        raise ValueError(f"labels must have shape {wanted} for logits {shape}, got {tuple(labels.shape)}{hint}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers, got {labels.dtype}".replace("torch.", ""))
    z = upcast_half(logits)
    z = z.movedim(1, -1).reshape(-1, z.shape[1]) if z.ndim > 2 else z
    return z, labels.reshape(-1).to(torch.int64)


def top_label(log_probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The confidence of each row, through which a gradient flows, and whether its prediction is right."""
    best = log_probs.max(dim=1)
    return best.values.exp(), best.indices == labels


def _check_inputs(formula: Formula, checks: Mapping[str, Check], *, per_batch: bool) -> Formula:
    @functools.wraps(formula)
    def loss(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        z, y = as_rows(logits, labels)
        if logits.ndim != 2:
            raise ValueError(f"logits must have shape (n, K), got {tuple(logits.shape)}; the Module takes more")
        _row_mask(y, z.shape[1], None)
        chosen = {**defaults, **options}
        for name, check in checks.items():
            check(name, chosen)
        return formula(z, y, **options)

    defaults = {p.name: p.default for p in list(inspect.signature(formula).parameters.values())[2:]}
    vars(loss).update(formula=formula, checks=dict(checks), per_batch=per_batch)
    return cast(Formula, loss)


def _row_mask(labels: Tensor, classes: int, ignore_index: int | None) -> Tensor | None:
    """Which rows count, None if all do. Labels out of range are refused where looking at them costs no wait."""
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        return None if ignore_index is None else labels != ignore_index
    if not len(labels):
        return None
    low, high = (int(end) for end in torch.aminmax(labels))
    if ignore_index is not None and low <= ignore_index <= high:
        kept = labels != ignore_index
        seen = labels[kept]
        if len(seen) < len(labels):
            _row_mask(seen, classes, ignore_index)
            return kept
    if low < 0 or high >= classes:
        but = "" if ignore_index is None else f" or be ignore_index {ignore_index}"
        raise ValueError(f"labels must lie in 0..{classes - 1}{but}, got {low}..{high}")
    return None


def _class_weights(weight: Any) -> Tensor:
    w = torch.as_tensor(weight).detach().clone()
    w = w if w.is_floating_point() else w.float()
    if w.ndim != 1 or not bool(((w >= 0) & torch.isfinite(w)).all()):
        raise ValueError(f"weight must be a vector of finite numbers of at least 0, one a class, got {weight}")
    return w
