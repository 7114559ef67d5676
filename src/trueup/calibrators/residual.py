"""A small network on top of another calibrator, which corrects what no fixed shape of map can."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trueup.calibrators.base import Calibrator
from trueup.core.arrays import NEVER, as_weighted, given, take_weighted, upcast_half
from trueup.core.native import one_thread
from trueup.core.splits import k_fold, stratified_folds
from trueup.registry import METHODS

_HIDDEN = 32
_LARGEST = 6
"""So many of a row's largest log-probabilities are features of their own."""
_MANY_CLASSES = 50
"""Up to so many classes, each one's log-probability is a feature too."""
_LEAST_FEATURE, _LEAST_LOGIT = -20.0, -80.0
"""Log-probabilities count down to here: what lies below means "never" just the same, and would rule the fit."""
_FEW_ROWS = 500
_MAX_NUMBERS = 1 << 23
"""Where the folds have more numbers than this together, every so many-th row is trained on."""
_BATCH, _MAX_STEPS = 256, 40  # rows of a step, unless an epoch would then have more steps than this
_MIN_GAIN = 1e-5  # in held-out loss per row, for an epoch to count as better

Folds = Sequence[tuple[Tensor, Tensor]]
"""Masks of the training and the held-out rows of each fold."""


class Residual(Calibrator):
    """Correct a base map b = ln p by small networks: q = softmax(e^{s(h)} b + R h), h = SiLU(A f), 32 units.

    The features f are the base's log-probabilities (up to 50 classes), its six largest and its entropy. One network is
    trained on each of five folds, from s = R = 0, which is the base; they stop together when the held-out rows no
    longer gain, and their probabilities are averaged. So it is the base where there is nothing to correct. For naive
    Bayes, forests and other scores whose faults follow no simple curve; images gain little. Not for a few hundred rows,
    of which it makes the base map alone.

    >>> from trueup.calibrators.temperature import Temperature
    >>> untrained = torch.zeros(1, 4, 6), torch.zeros(1, 3, 4)
    >>> Residual(Temperature(2.0), *untrained)(torch.tensor([[4.0, 0.0]]))
    tensor([[-0.1269, -2.1269]])
    """

    keeps_argmax = False
    sample_invariant = False  # copies of a row are spread over the folds
    differentiable = True

    first: Tensor
    last: Tensor

    def __init__(self, base: Calibrator, first: Any, last: Any) -> None:
        super().__init__()
        self.base = base
        self.keep("first", first)
        self.keep("last", last)
        shapes = tuple(self.first.shape), tuple(self.last.shape)
        if self.first.ndim != 3 or self.last.ndim != 3 or self.first.shape[:2] != self.last.shape[::2]:
            raise ValueError(f"first must be (networks, units, f + 1), last (networks, K + 1, units), got {shapes}")
        if self.first.shape[2] != _count_features(self.last.shape[1] - 1) + 1:
            wanted = _count_features(self.last.shape[1] - 1)
            raise ValueError(f"first must have {wanted} features and a bias for these classes, got {shapes}")

    @property
    def shift_invariant(self) -> bool:  # type: ignore[override]
        """As the base is."""
        return bool(self.base.shift_invariant)

    def map(self, logits: Tensor) -> Tensor:
        """The mean of the networks' probabilities, as log-probabilities."""
        self._check_classes(logits, self.last.shape[1] - 1)
        log_p = torch.log_softmax(self.base(logits).double(), dim=1)
        features = _features(log_p)
        log_q = [_correct(log_p, features, *layers) for layers in zip(self.first, self.last, strict=True)]
        return (torch.logsumexp(torch.stack(log_q), dim=0) - math.log(len(log_q))).to(logits.dtype)

    def config(self) -> dict[str, Any]:
        """The base and the networks."""
        return {"base": self.base, "first": self.first, "last": self.last}

    @classmethod
    def fit(
        cls,
        logits: Any,
        labels: Any,
        *,
        base: Callable[..., Calibrator] | str = "diagonal_sms",
        folds: int = 5,
        epochs: int = 60,
        patience: int = 5,
        seed: int = 0,
        weights: Any = None,
    ) -> Calibrator:
        """Residual network: fit the base, and train a network on each fold to correct it (the base, under 500 rows)."""
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        method = METHODS[base] if isinstance(base, str) else base
        if len(z) < max(_FEW_ROWS, 2 * folds):
            return method(z, y, **given(w))
        z, y, w = take_weighted(z, y, w, _fixed_order(z, y))
        parts = k_fold(z, y, folds)
        models = fit_folds(z, y, parts, w=w, base=method, epochs=epochs, patience=patience, seed=seed)
        return average_folds(models, method(z, y, **given(w)))


def fit_folds(
    z: Tensor,
    y: Tensor,
    folds: Folds,
    *,
    w: Tensor | None = None,
    base: Callable[..., Calibrator] | None = None,
    bases: Sequence[Calibrator] | None = None,
    epochs: int = 60,
    patience: int = 5,
    seed: int = 0,
) -> list[Calibrator]:
    """A corrected base map of each fold, none of which saw its held-out rows: their predictions there are honest.

    `bases` are base maps already fitted to the folds' training rows. All networks train side by side and stop after the
    same number of epochs, that of the least held-out loss over all folds; with none, they are the bases.
    """
    if bases is None:
        method = base or METHODS["diagonal_sms"]
        parts = [take_weighted(z, y, w, train) for train, _ in folds]
        bases = [method(*pair, **given(share)) for *pair, share in parts]
    order = _fixed_order(z, y)
    classes = z.shape[1]
    numbers = len(folds) * z.numel() // classes * (_count_features(classes) + classes)
    every = -(-numbers // _MAX_NUMBERS)
    rows = [[order[mask[order]][::every] for mask in masks] for masks in folds]
    with one_thread(numbers // every):
        layers = _train(z, y, w, bases, rows, epochs=epochs, patience=patience, seed=seed)
    if layers is None:
        return list(bases)
    return [Residual(start, a[None], r[None]) for start, a, r in zip(bases, *layers, strict=True)]


def average_folds(models: Sequence[Calibrator], base: Calibrator) -> Calibrator:
    """The networks of all folds on one base map, fitted to all rows; the base itself where nothing was corrected."""
    trained = [model for model in models if isinstance(model, Residual)]
    if not trained:
        return base
    return Residual(base, *(torch.cat([getattr(model, name) for model in trained]) for name in ("first", "last")))


def _fixed_order(z: Tensor, y: Tensor) -> Tensor:
    """An order of the rows that follows from what they hold."""
    return torch.from_numpy(stratified_folds(z, y, len(z))).argsort().to(z.device)


def _count_features(classes: int) -> int:
    return (classes if classes <= _MANY_CLASSES else 0) + min(_LARGEST, classes) + 1


def _features(log_p: Tensor) -> Tensor:
    clamped = log_p.clamp(min=_LEAST_FEATURE)
    largest = clamped.topk(min(_LARGEST, log_p.shape[1]), dim=1).values
    entropy = -(log_p.exp() * clamped).sum(dim=1, keepdim=True)
    each = [clamped] if log_p.shape[1] <= _MANY_CLASSES else []
    return torch.cat([*each, largest, entropy], dim=1)


def _correct(log_p: Tensor, features: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """Log-probabilities of one network on (n, …), or of several on (networks, n, …)."""
    hidden = features @ first[..., :-1].mT + first[..., None, :, -1]
    out = (hidden * torch.sigmoid(hidden)) @ last.mT
    scale = torch.exp(out[..., :1].clamp(-3.0, 3.0))
    corrected = scale * log_p.clamp(min=_LEAST_LOGIT) + out[..., 1:]
    return torch.log_softmax(corrected.masked_fill(log_p == -torch.inf, NEVER), dim=-1)


class _Adam:
    """Adam on one tensor. (`torch.optim` would take longer to import than all networks to train.)"""

    def __init__(self, parameter: Tensor, lr: float = 1e-2) -> None:
        self.parameter, self.lr, self.steps = parameter, lr, 0
        self.mean, self.square = torch.zeros_like(parameter), torch.zeros_like(parameter)

    def step(self, gradient: Tensor) -> None:
        """Kingma & Ba (2015), with their settings."""
        self.steps += 1
        self.mean.lerp_(gradient, 0.1)
        self.square.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
        width = (self.square / (1 - 0.999**self.steps)).sqrt_().add_(1e-8)
        self.parameter.addcdiv_(self.mean, width, value=-self.lr / (1 - 0.9**self.steps))


@torch.no_grad()
def _train(
    z: Tensor,
    y: Tensor,
    w: Tensor | None,
    bases: Sequence[Calibrator],
    rows: Sequence[Sequence[Tensor]],
    *,
    epochs: int,
    patience: int,
    seed: int,
) -> tuple[Tensor, Tensor] | None:
    """The layers of all folds' networks at the epoch of least held-out loss; None where that is the start."""
    generator = torch.Generator().manual_seed(seed)
    size = min(len(train) for train, _ in rows)
    each = torch.ones(len(z), 1, device=z.device) if w is None else (w / w.mean()).float()[:, None]
    base, x, wanted, shares, middles, widths, held_out = [], [], [], [], [], [], []
    for start, (train, held) in zip(bases, rows, strict=True):
        log_p = torch.log_softmax(upcast_half(start(z[torch.cat([train, held])])).double(), dim=1)
        f = _features(log_p)
        middle, width = f[: len(train)].mean(dim=0), f[: len(train)].std(dim=0, correction=0)
        width = torch.where(width > 1e-6, width, 1.0)
        scaled, log_p = ((f - middle) / width).float(), log_p.float()
        # Copies of rows make folds differ by a few; each epoch leaves out as many, at random.
        base.append(log_p[: len(train)])
        x.append(scaled[: len(train)])
        wanted.append(y[train, None])
        shares.append(each[train])
        held_out.append((log_p[len(train) :], scaled[len(train) :], y[held, None], each[held]))
        middles.append(middle)
        widths.append(width)
    classes, units = z.shape[1], x[0].shape[1]
    draw = torch.rand(len(rows), _HIDDEN, units + 1, generator=generator)
    first = ((2 * draw - 1) / math.sqrt(units)).to(z.device).requires_grad_()
    last = torch.zeros(len(rows), classes + 1, _HIDDEN, device=z.device, requires_grad=True)
    layers = first, last
    adam = [_Adam(layer) for layer in layers]

    def loss() -> float:
        sums = [
            -(share * _correct(b, f, a, r).gather(1, label)).double().sum()
            for (b, f, label, share), a, r in zip(held_out, first, last, strict=True)
        ]
        return float(sum(sums)) / sum(float(share.double().sum()) for *_, share in held_out)

    batch = max(_BATCH, -(-size // _MAX_STEPS))
    best, best_epoch, kept = loss(), 0, None
    for epoch in range(1, epochs + 1):
        orders = [torch.randperm(len(train), generator=generator)[:size].to(z.device) for train, _ in rows]
        shuffled = (
            torch.stack([p[at] for p, at in zip(parts, orders, strict=True)]) for parts in (base, x, wanted, shares)
        )
        for b, f, label, share in zip(*(torch.split(part, batch, dim=1) for part in shuffled), strict=True):
            with torch.enable_grad():
                nll = -(share * _correct(b, f, first, last).gather(2, label)).mean(dim=(1, 2)).sum()
            for state, gradient in zip(adam, torch.autograd.grad(nll, layers), strict=True):
                state.step(gradient)
        now = loss()
        if now < best - _MIN_GAIN:
            best, best_epoch, kept = now, epoch, (first.detach().clone(), last.detach().clone())
        elif epoch >= best_epoch + patience:
            break
    if kept is None:
        return None
    # The z-scores are folded into the first layer.
    weight = kept[0][..., :-1].double() / torch.stack(widths)[:, None]
    bias = kept[0][..., -1].double() - (weight @ torch.stack(middles)[..., None])[..., 0]
    return torch.cat([weight, bias[..., None]], dim=2), kept[1].double()
