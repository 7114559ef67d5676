"""Base of losses: a function of `logits, labels` that returns one value per row, and the Module around it.

A new loss is a formula decorated with `per_sample` or `per_batch`, and a subclass of `Loss` that names it. This module
checks inputs and options, and handles half precision, class weights, ignored labels, additional dimensions and
reductions.
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
"""Function of an option's name and all options, which raises or warns."""


def _option(requirement: str, holds: Callable[[Any], bool]) -> Check:
    def check(name: str, options: Mapping[str, Any]) -> None:
        try:
            valid = holds(options[name])
        except TypeError:  # not a number
            valid = False
        if not valid:
            raise ValueError(f"{name} must {requirement}, got {options[name]!r}")

    return check


def at_least(bound: float) -> Check:
    """Require a finite number of at least `bound`."""
    return _option(f"be a number of at least {bound}", lambda value: bound <= value < math.inf)


def above(bound: float) -> Check:
    """Require a finite number above `bound`."""
    return _option(f"be a number above {bound}", lambda value: bound < value < math.inf)


def whole(bound: int) -> Check:
    """Require an integer of at least `bound`."""
    return _option(f"be a whole number of at least {bound}", lambda value: isinstance(value, int) and value >= bound)


def between(low: float, high: float) -> Check:
    """Require a number in [low, high]."""
    return _option(f"lie in {low}..{high}", lambda value: low <= value <= high)


def per_sample(**checks: Check) -> Callable[[Formula], Formula]:
    """Make a loss from a formula whose value for a row depends on that row only.

    Parameters
    ----------
    **checks
        Name of an option → check of its value.

    Returns
    -------
    Callable
        A decorator of the formula ``(logits, labels, *, …) -> (n,)``.
    """
    return lambda formula: _check_inputs(formula, checks, per_batch=False)


def per_batch(**checks: Check) -> Callable[[Formula], Formula]:
    """Make a loss from a formula whose value for a row depends on the whole batch.

    Parameters
    ----------
    **checks
        Name of an option → check of its value.

    Returns
    -------
    Callable
        A decorator of the formula ``(logits, labels, *, …) -> (n,)``.
    """
    return lambda formula: _check_inputs(formula, checks, per_batch=True)


class Loss(nn.Module):
    """Base of the loss Modules, used like torch's: logits (N, K) or (N, K, d…) and labels (N) or (N, d…).

    Half precision is computed in float32, which is also the type of the loss. All options are attributes, so that a
    schedule can change them between steps. A loss of the batch adds one number, computed from all rows that count, to
    each row's cross-entropy; every row has the same influence on that number, whatever its weight.

    Labels of the same shape as the logits are probabilities of classes (soft targets, such as those of mixup), as in
    torch: a row's loss is then Σ_k t_k w_k L(z, k), and "mean" divides by the number of rows. Losses of the batch need
    one class per row.

    Parameters
    ----------
    *values
        Options of the loss's function in their order, as in ``Focal(2.0)``.
    weight
        Weight of each class, shape (classes,). A row's loss is multiplied by the weight of its label, and "mean"
        divides by the sum of these weights.
    ignore_index
        Label of rows that do not count.
    reduction
        "mean", "sum" or "none".
    **options
        Options of the loss's function, such as ``gamma`` of `focal`.
    """

    per_batch: ClassVar[bool]
    """Whether a row's value depends on the other rows."""
    neutral: ClassVar[Mapping[str, Any] | None]
    """Options with which the loss equals the cross-entropy; None if there are none."""
    function: ClassVar[Callable[..., Tensor]]
    """Function `(logits, labels, *, …) -> (n,)`, the loss of each row."""
    formula: ClassVar[Callable[..., Tensor]]
    """The function without checks of its input."""
    checks: ClassVar[Mapping[str, Check]]
    defaults: ClassVar[Mapping[str, Any]]
    """Option → default."""
    weight: Tensor | None

    def __init_subclass__(
        cls, function: Callable[..., Tensor] | None = None, neutral: Mapping[str, Any] | None = None, **rest: Any
    ) -> None:
        super().__init_subclass__(**rest)
        if function is None:  # a subclass of a specific loss
            return
        options = list(inspect.signature(function).parameters.values())[2:]
        common = list(inspect.signature(Loss.__init__).parameters.values())[2:-1]
        shown = [option.replace(kind=inspect.Parameter.POSITIONAL_OR_KEYWORD) for option in options]
        cls.__signature__ = inspect.Signature([*shown, *common])  # type: ignore[attr-defined]
        cls.function, cls.formula = staticmethod(function), staticmethod(vars(function)["formula"])
        cls.checks, cls.per_batch = vars(function)["checks"], vars(function)["per_batch"]
        cls.defaults, cls.neutral = {option.name: option.default for option in options}, neutral

    def __init__(
        self,
        *values: Any,
        weight: Any = None,
        ignore_index: int = -100,
        reduction: Reduction = "mean",
        **options: Any,
    ) -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f'reduction must be "mean", "sum" or "none", got {reduction!r}')
        named = dict(zip(self.defaults, values, strict=False))
        if len(values) > len(self.defaults) or named.keys() & options.keys():
            raise TypeError(f"{type(self).__name__} takes {', '.join(self.defaults) or 'no option'} once, got {values}")
        options |= named
        if unknown := options.keys() - self.defaults.keys():
            known = ", ".join([*self.defaults, "weight", "ignore_index", "reduction"])
            raise TypeError(f"{type(self).__name__} has no option {', '.join(sorted(unknown))}; it takes: {known}")
        chosen = {**self.defaults, **options}
        for name, check in self.checks.items():
            check(name, chosen)
        for name, value in chosen.items():
            setattr(self, name, value)
        self.reduction = reduction
        self.ignore_index = ignore_index
        self.register_buffer("weight", None if weight is None else _class_weights(weight))

    def values(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each row (n,) from logits (n, K) in float32 or float64 and labels (n,).

        Parameters
        ----------
        logits
            Network outputs in float32 or float64, shape (n, K).
        labels
            True classes, shape (n,).

        Returns
        -------
        Tensor
            The losses, shape (n,).
        """
        return self.formula(logits, labels, **{name: getattr(self, name) for name in self.defaults})

    def weighted(self, logits: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
        """Compute the loss of each row times the weight of its label.

        Parameters
        ----------
        logits
            Network outputs, shape (n, K).
        labels
            True classes, shape (n,).
        weight
            Weight of each class, shape (K,).

        Returns
        -------
        Tensor
            The losses, shape (n,).
        """
        return (
            self.values(logits, labels * weight) if labels.ndim == 2 else self.values(logits, labels) * weight[labels]
        )

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of a batch."""
        z, y = as_rows(logits, labels, soft=not self.per_batch)
        kept = _row_mask(y, z.shape[1], self.ignore_index)
        weight = None if self.weight is None else self.weight.to(z.dtype)
        if weight is not None and len(weight) != z.shape[1]:
            raise ValueError(f"weight must have {z.shape[1]} entries, one per class, got {len(weight)}")
        if kept is not None:
            y = torch.where(kept, y, 0)  # any valid class
        if kept is None:
            values = self._rows(z, y, weight)
        elif self.per_batch:  # ignored rows must not influence the others
            values = z.new_zeros(len(y)).masked_scatter(kept, self._rows(z[kept], y[kept], weight))
        else:
            values = torch.where(kept, self._rows(z, y, weight), 0.0)
        if self.reduction == "none":
            return values.reshape(labels.shape[:1] + labels.shape[2:] if y.ndim == 2 else labels.shape)
        if self.reduction == "sum":
            return values.sum()
        if kept is None and (weight is None or y.ndim == 2):
            return values.mean()
        weights = torch.ones_like(values) if weight is None else weight[y]
        return values.sum() / (weights if kept is None else torch.where(kept, weights, 0.0)).sum()

    def _rows(self, logits: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
        return self.values(logits, labels) if weight is None else self.weighted(logits, labels, weight)

    def extra_repr(self) -> str:
        """List the options, and non-default common parameters."""
        shown = {name: getattr(self, name) for name in self.defaults}
        if self.weight is not None:
            shown["weight"] = f"tensor({len(self.weight)})"
        if self.ignore_index != -100:
            shown["ignore_index"] = self.ignore_index
        return ", ".join(f"{name}={value}" for name, value in {**shown, "reduction": self.reduction}.items())


def as_rows(logits: Tensor, labels: Tensor, *, soft: bool = False) -> tuple[Tensor, Tensor]:
    """Check logits (N, K, …) and labels (N, …) and flatten them, keeping the graph of the network.

    With `soft`, floating-point labels of the logits' shape are probabilities of classes, flattened to (n, K).

    `as_tensors` detaches arrays and reads every value; a training loss must do neither.
    """
    if not isinstance(logits, Tensor) or not isinstance(labels, Tensor):
        raise ValueError(f"logits and labels must be tensors, got {type(logits).__name__}, {type(labels).__name__}")
    if logits.ndim < 2 or logits.shape[1] < 2:
        raise ValueError(f"logits must have shape (N, K) or (N, K, d…) with K at least 2, got {tuple(logits.shape)}")
    if not logits.is_floating_point():
        raise ValueError(f"logits must be floating point, got {logits.dtype}".replace("torch.", ""))
    z = upcast_half(logits)
    z = z.movedim(1, -1).reshape(-1, z.shape[1]) if z.ndim > 2 else z
    if soft and labels.is_floating_point() and labels.shape == logits.shape:
        return z, labels.movedim(1, -1).reshape(z.shape).to(z.dtype)
    expected = (*logits.shape[:1], *logits.shape[2:])
    if tuple(labels.shape) != expected:
        classes_last = logits.ndim > 2 and labels.shape == logits.shape[:-1]
        hint = "; if the classes are last, logits.movedim(-1, 1) makes them second" if classes_last else ""
        shape = tuple(logits.shape)
        raise ValueError(f"labels must have shape {expected} for logits {shape}, got {tuple(labels.shape)}{hint}")
    if labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool:
        raise ValueError(f"labels must be integers, got {labels.dtype}".replace("torch.", ""))
    return z, labels.reshape(-1).to(torch.int64)


def label_total(labels: Tensor) -> Tensor | float:
    """Return the total weight of soft targets of each row (n,); 1 for classes."""
    return labels.sum(dim=1) if labels.ndim == 2 else 1.0


def over_labels(log_probs: Tensor, labels: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply a loss of log-probabilities to the label of each row, or average it over soft targets."""
    if labels.ndim == 2:
        return (labels * loss(log_probs)).sum(dim=1)
    return loss(log_probs.gather(1, labels[:, None]).squeeze(1))


def top_label(log_probs: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the confidence of each row, with its gradient, and whether its prediction is correct."""
    best = log_probs.max(dim=1)
    return best.values.exp(), best.indices == labels


def _check_inputs(formula: Formula, checks: Mapping[str, Check], *, per_batch: bool) -> Formula:
    @functools.wraps(formula)
    def loss(logits: Tensor, labels: Tensor, **options: Any) -> Tensor:
        z, y = as_rows(logits, labels, soft=not per_batch)
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
    """Return which rows count, None if all do; reject labels out of range on the CPU, where checking is fast."""
    if labels.device.type != "cpu" or torch.compiler.is_compiling():
        return None if ignore_index is None or labels.ndim == 2 else labels != ignore_index
    if labels.ndim == 2:
        if len(labels) and not bool(((labels.sum(dim=1) - 1).abs() < 1e-3).all() & (labels >= 0).all()):
            raise ValueError("labels of the logits' shape must be probabilities that sum to 1 in each row")
        return None
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
        raise ValueError(f"weight must be a vector of finite numbers of at least 0, one per class, got {weight}")
    return w
