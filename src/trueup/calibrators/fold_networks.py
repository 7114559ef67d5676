"""Small networks trained on folds: a correction of another map, and a map that keeps the order of the logits."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from trueup.calibrators.base import Calibrator
from trueup.calibrators.diagonal import centre_rows
from trueup.calibrators.temperature import Temperature
from trueup.core.arrays import NEVER, as_weighted, find_absent, given, take_weighted, upcast_half
from trueup.core.module import softplus
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
_LEAST_SLOPE = 1e-3
"""As a part of 1/T: rounding then never makes equal what was in order."""
_NEUTRAL = math.log(math.expm1(1 - _LEAST_SLOPE))
"""Where a slope is 1/T: _LEAST_SLOPE + softplus(_NEUTRAL) = 1."""
_FEW_ROWS = 500
_MAX_NUMBERS = 1 << 23
"""Where the folds have more numbers than this together, every so many-th row is trained on."""
_BATCH, _MAX_STEPS = 256, 40  # rows of a step, unless an epoch would then have more steps than this
_MIN_GAIN = 1e-5  # in held-out loss per row, for an epoch to count as better

Folds = Sequence[tuple[Tensor, Tensor]]
"""Masks of the training and the held-out rows of each fold."""


class FoldNetworks(Calibrator):
    """A base map and one network for each fold that corrects it; what the networks say is averaged.

    The networks train side by side, from the base map, and stop together when the held-out rows no longer gain.
    """

    sample_invariant = False  # copies of a row are spread over the folds
    differentiable = True

    @classmethod
    @abstractmethod
    def on(cls, base: Calibrator, layers: Sequence[Tensor]) -> Calibrator:
        """The networks of these layers, each (networks, outputs, inputs), on a base map."""

    @property
    @abstractmethod
    def layers(self) -> tuple[Tensor, ...]:
        """Of all networks, each (networks, outputs, inputs)."""

    @classmethod
    @abstractmethod
    def _examples(cls, base: Calibrator, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the base says (n, K), the features (n, f), and the labels (n, 1)."""

    @classmethod
    @abstractmethod
    def _start(cls, networks: int, features: int, classes: int, generator: torch.Generator) -> list[Tensor]:
        """Layers with which every network is its base map."""

    @staticmethod
    @abstractmethod
    def _correct(base: Tensor, features: Tensor, *layers: Tensor) -> Tensor:
        """Log-probabilities of one network on (n, …), or of several on (networks, n, …)."""


class Residual(FoldNetworks):
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
        log_q = [self._correct(log_p, features, *layers) for layers in zip(*self.layers, strict=True)]
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
        return _fit(cls, method, z, y, w, folds, epochs=epochs, patience=patience, seed=seed)

    @classmethod
    def on(cls, base: Calibrator, layers: Sequence[Tensor]) -> Calibrator:
        """The networks of these layers on a base map."""
        return cls(base, *layers)

    @property
    def layers(self) -> tuple[Tensor, ...]:
        """Of all networks."""
        return self.first, self.last

    @classmethod
    def _examples(cls, base: Calibrator, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        log_p = torch.log_softmax(upcast_half(base(z)).double(), dim=1)
        return log_p, _features(log_p), y[:, None]

    @classmethod
    def _start(cls, networks: int, features: int, classes: int, generator: torch.Generator) -> list[Tensor]:
        return [_uniform(networks, _HIDDEN, features, generator), _zeros(networks, classes + 1, _HIDDEN)]

    @staticmethod
    def _correct(base: Tensor, features: Tensor, *layers: Tensor) -> Tensor:
        first, last = layers
        hidden = _affine(features, first)
        out = (hidden * torch.sigmoid(hidden)) @ last.mT
        scale = torch.exp(out[..., :1].clamp(-3.0, 3.0))
        corrected = scale * base.clamp(min=_LEAST_LOGIT) + out[..., 1:]
        return torch.log_softmax(corrected.masked_fill(base == -torch.inf, NEVER), dim=-1)


class OrderInvariant(FoldNetworks):
    """Stretch the gaps between sorted logits y₁ ≥ … ≥ y_K by networks: o_j − o_{j+1} = v_j (y_j − y_{j+1}), v > 0.

    v = softplus(m(y))/T, m a network with two hidden layers that sees the sorted logits less their mean, so that
    classes are treated alike. One network is trained on each of five folds, from temperature scaling, v = 1/T; they
    stop together when the held-out rows no longer gain, and their slopes are averaged. So it is temperature scaling
    where there is nothing to correct. Not for a few hundred rows, of which it makes temperature scaling alone.
    Rahimi et al., "Intra order-preserving functions for calibration of multi-class neural networks" (2020), who train
    one network of 100 and 100 units.

    >>> untrained = torch.zeros(1, 5, 4), torch.zeros(1, 5, 6), torch.zeros(1, 2, 6)
    >>> OrderInvariant(2.0, *untrained)(torch.tensor([[3.0, 1.0, 2.0]]))
    tensor([[ 0.0000, -1.0000, -0.5000]])
    """

    keeps_argmax = True
    shift_invariant = True

    temperature: Tensor
    first: Tensor
    second: Tensor
    third: Tensor

    def __init__(self, temperature: Tensor | float, first: Any, second: Any, third: Any) -> None:
        super().__init__()
        self.keep("temperature", temperature)
        for name, value in (("first", first), ("second", second), ("third", third)):
            layer = torch.as_tensor(value)
            self.keep(name, layer[None] if layer.ndim == 2 else layer)  # of one network, as files may have it
        if not (self.temperature.ndim == 0 and self.temperature > 0 and torch.isfinite(self.temperature)):
            raise ValueError(f"temperature must be one positive number, got {temperature}")
        sizes = [tuple(layer.shape) for layer in self.layers]
        if any(len(size) != 3 for size in sizes) or not (
            sizes[0][0] == sizes[1][0] == sizes[2][0]
            and sizes[0][1] + 1 == sizes[1][2]
            and sizes[1][1] + 1 == sizes[2][2]
            and sizes[2][1] + 2 == sizes[0][2]
        ):
            shapes = ", ".join(map(str, sizes))
            raise ValueError(f"layers must be (m, h, K + 1), (m, g, h + 1) and (m, K − 1, g + 1), got {shapes}")

    def map(self, logits: Tensor) -> Tensor:
        """Stretch the gaps; the largest logit becomes 0."""
        self._check_classes(logits, self.first.shape[2] - 1)
        z = logits.double()
        ordered, order = z.sort(dim=1, descending=True)
        slopes = _slopes(centre_rows(ordered), *self.layers).mean(dim=0) / self.temperature
        return torch.zeros_like(z).scatter(1, order, _stretch_gaps(ordered, slopes)).to(logits.dtype)

    @classmethod
    def fit(
        cls,
        logits: Any,
        labels: Any,
        *,
        folds: int = 5,
        epochs: int = 60,
        patience: int = 5,
        seed: int = 0,
        weights: Any = None,
    ) -> Calibrator:
        """Order-invariant network: train a network on each fold, from temperature scaling (which few rows keep)."""
        z, y, w = as_weighted(logits, labels, weights, at_least=1)
        z, rank = _sort(z, y)  # so that folds, too, treat classes alike
        return _fit(cls, Temperature.fit, z, rank[:, 0], w, folds, epochs=epochs, patience=patience, seed=seed)

    @classmethod
    def on(cls, base: Calibrator, layers: Sequence[Tensor]) -> Calibrator:
        """The networks of these layers on temperature scaling."""
        assert isinstance(base, Temperature)
        return cls(base.temperature, *layers)

    @property
    def layers(self) -> tuple[Tensor, ...]:
        """Of all networks."""
        return self.first, self.second, self.third

    @classmethod
    def _examples(cls, base: Calibrator, z: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ordered, rank = _sort(upcast_half(z).double(), y)
        return (ordered - ordered[:, :1]) / base.get_buffer("temperature"), centre_rows(ordered), rank

    @classmethod
    def _start(cls, networks: int, features: int, classes: int, generator: torch.Generator) -> list[Tensor]:
        inner = [_uniform(networks, _HIDDEN, inputs, generator) for inputs in (features, _HIDDEN)]
        return [*inner, _zeros(networks, classes - 1, _HIDDEN + 1)]

    @staticmethod
    def _correct(base: Tensor, features: Tensor, *layers: Tensor) -> Tensor:
        stretched = _stretch_gaps(base, _slopes(features, *layers))
        return torch.log_softmax(stretched.masked_fill(base == -torch.inf, NEVER), dim=-1)


def _sort(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Logits from the largest down, and where among them the label is, (n, 1)."""
    ordered, order = z.sort(dim=1, descending=True)
    return ordered, (order == y[:, None]).int().argmax(dim=1, keepdim=True)


def _slopes(features: Tensor, *layers: Tensor) -> Tensor:
    """Of the gaps between sorted logits, as parts of 1/T."""
    x = features
    for layer in layers[:-1]:
        x = torch.relu(_affine(x, layer))
    return _LEAST_SLOPE + softplus(_affine(x, layers[-1]) + _NEUTRAL)


def _stretch_gaps(ordered: Tensor, slopes: Tensor) -> Tensor:
    """Sorted logits with stretched gaps, from 0 down."""
    # From the top down: near the predicted class, where it matters, nothing is lost by cancellation.
    gaps = ordered[..., :-1] - ordered[..., 1:]
    if (absent := find_absent(ordered)) is not None:
        gaps = gaps.masked_fill(absent[..., 1:], 0.0)
    return torch.cat([torch.zeros_like(ordered[..., :1]), -(slopes * gaps).cumsum(dim=-1)], dim=-1)


def _affine(x: Tensor, layer: Tensor) -> Tensor:
    return x @ layer[..., :-1].mT + layer[..., None, :, -1]


def _uniform(networks: int, outputs: int, inputs: int, generator: torch.Generator) -> Tensor:
    return (2 * torch.rand(networks, outputs, inputs + 1, generator=generator, dtype=torch.float32) - 1) / math.sqrt(
        inputs
    )


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float32)  # whatever torch's default is


def _fit(
    kind: type[FoldNetworks],
    method: Callable[..., Calibrator],
    z: Tensor,
    y: Tensor,
    w: Tensor | None,
    folds: int,
    **training: int,
) -> Calibrator:
    """The networks of all folds on the base map of all rows; of few rows, the base map."""
    if len(z) < max(_FEW_ROWS, 2 * folds):
        return method(z, y, **given(w))
    z, y, w = take_weighted(z, y, w, _fixed_order(z, y))
    parts = k_fold(z, y, folds)
    taken = [take_weighted(z, y, w, train) for train, _ in parts]
    bases = [method(*pair, **given(share)) for *pair, share in taken]
    return average_folds(fit_folds(kind, z, y, parts, bases, w=w, **training), method(z, y, **given(w)))


def fit_folds(
    kind: type[FoldNetworks],
    z: Tensor,
    y: Tensor,
    folds: Folds,
    bases: Sequence[Calibrator],
    *,
    w: Tensor | None = None,
    epochs: int = 60,
    patience: int = 5,
    seed: int = 0,
) -> list[Calibrator]:
    """A corrected base map of each fold, none of which saw its held-out rows: their predictions there are honest.

    `bases` are base maps fitted to the folds' training rows. All networks stop after the same number of epochs, that of
    the least held-out loss over all folds; with none, they are the bases.
    """
    order = _fixed_order(z, y)
    _, features, _ = kind._examples(bases[0], z[:1], y[:1])
    numbers = len(folds) * len(z) * (features.shape[1] + z.shape[1])
    every = -(-numbers // _MAX_NUMBERS)
    rows = [[order[mask[order]][::every] for mask in masks] for masks in folds]
    with one_thread(numbers // every):
        layers = _train(kind, z, y, w, bases, rows, epochs=epochs, patience=patience, seed=seed)
    if layers is None:
        return list(bases)
    return [kind.on(base, [layer[k : k + 1] for layer in layers]) for k, base in enumerate(bases)]


def average_folds(models: Sequence[Calibrator], base: Calibrator) -> Calibrator:
    """The networks of all folds on one base map, fitted to all rows; the base itself where nothing was corrected."""
    trained = [model for model in models if isinstance(model, FoldNetworks)]
    if not trained:
        return base
    return trained[0].on(base, [torch.cat(layers) for layers in zip(*(model.layers for model in trained), strict=True)])


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
    kind: type[FoldNetworks],
    z: Tensor,
    y: Tensor,
    w: Tensor | None,
    bases: Sequence[Calibrator],
    rows: Sequence[Sequence[Tensor]],
    *,
    epochs: int,
    patience: int,
    seed: int,
) -> list[Tensor] | None:
    """The layers of all folds' networks at the epoch of least held-out loss; None where that is the start."""
    generator = torch.Generator().manual_seed(seed)
    size = min(len(train) for train, _ in rows)
    each = torch.ones(len(z), 1, device=z.device, dtype=torch.float32) if w is None else (w / w.mean()).float()[:, None]
    learnt, held_out, middles, widths = [], [], [], []
    for start, (train, held) in zip(bases, rows, strict=True):
        both = torch.cat([train, held])
        base, f, label = kind._examples(start, z[both], y[both])
        middle, width = f[: len(train)].mean(dim=0), f[: len(train)].std(dim=0, correction=0)
        width = torch.where(width > 1e-6, width, 1.0)
        examples = base.float(), ((f - middle) / width).float(), label, each[both]
        learnt.append([part[: len(train)] for part in examples])
        held_out.append([part[len(train) :] for part in examples])
        middles.append(middle)
        widths.append(width)
    layers = kind._start(len(rows), len(middles[0]), z.shape[1], generator)
    layers = [layer.to(z.device).requires_grad_() for layer in layers]
    adam = [_Adam(layer) for layer in layers]

    def loss() -> float:
        sums = [
            -(share * kind._correct(b, f, *network).gather(1, label)).double().sum()
            for (b, f, label, share), *network in zip(held_out, *layers, strict=True)
        ]
        return float(sum(sums)) / sum(float(share.double().sum()) for *_, share in held_out)

    batch = max(_BATCH, -(-size // _MAX_STEPS))
    best, best_epoch, kept = loss(), 0, None
    for epoch in range(1, epochs + 1):
        # Copies of rows make folds differ by a few; each epoch leaves out as many, at random.
        orders = [torch.randperm(len(train), generator=generator)[:size].to(z.device) for train, _ in rows]
        shuffled = (
            torch.stack([p[at] for p, at in zip(parts, orders, strict=True)]) for parts in zip(*learnt, strict=True)
        )
        for b, f, label, share in zip(*(torch.split(part, batch, dim=1) for part in shuffled), strict=True):
            with torch.enable_grad():
                nll = -(share * kind._correct(b, f, *layers).gather(2, label)).mean(dim=(1, 2)).sum()
            for state, gradient in zip(adam, torch.autograd.grad(nll, layers), strict=True):
                state.step(gradient)
        now = loss()
        if now < best - _MIN_GAIN:
            best, best_epoch, kept = now, epoch, [layer.detach().double() for layer in layers]
        elif epoch >= best_epoch + patience:
            break
    if kept is None:
        return None
    # The z-scores are folded into the first layer.
    weight = kept[0][..., :-1] / torch.stack(widths)[:, None]
    bias = kept[0][..., -1] - (weight @ torch.stack(middles)[..., None])[..., 0]
    return [torch.cat([weight, bias[..., None]], dim=2), *kept[1:]]
