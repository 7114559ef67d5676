"""Small networks trained on folds: a correction of another map, and a map that keeps the order of the logits."""

from __future__ import annotations

import itertools
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import numpy as np

from trueup._core.arrays import MASKED_LOGIT, as_arrays, as_weighted, find_absent, take_weighted, weight_kwargs
from trueup._core.namespace import NUMPY, Namespace
from trueup._core.registry import METHODS
from trueup._core.splits import stratified_folds
from trueup._core.types import Array, ArrayLike, WeightsLike
from trueup.calibrators.base import Calibrator, if_all_parts
from trueup.calibrators.compose import Fit
from trueup.calibrators.diagonal import centre_rows
from trueup.calibrators.folds import k_fold
from trueup.calibrators.temperature import Temperature

_HIDDEN = 32  # units of a hidden layer.
_TOP = 6  # number of a row's largest log-probabilities that are features.
_MANY_CLASSES = 50  # up to this number of classes, every class's log-probability is a feature too.
_MIN_FEATURE, _MIN_LOGIT = -20.0, -80.0
"""Log-probabilities are clipped here; lower ones carry no further information and would dominate the fit."""
_MIN_SLOPE = 1e-3  # smallest slope as a fraction of 1/T, so that rounding never makes ordered logits equal.
_NEUTRAL = math.log(math.expm1(1 - _MIN_SLOPE))
"""Input of softplus at which a slope is 1/T: _MIN_SLOPE + softplus(_NEUTRAL) = 1."""
_FEW_ROWS = 500  # with fewer rows no network is trained.
_MAX_NUMBERS = 1 << 23  # beyond this number of training values in all folds, only every k-th row is used.
_MAX_EPOCHS = 1000  # training stops earlier, when the held-out loss no longer improves.
_BATCH, _MAX_STEPS = 256, 40  # rows per step, and the largest number of steps per epoch.
_MIN_GAIN = 1e-5  # smallest decrease of the mean held-out loss that counts as an improvement.

Layers: TypeAlias = Sequence[np.ndarray]
Folds: TypeAlias = Sequence[tuple[np.ndarray, np.ndarray]]
"""Masks of the training and the held-out rows of each fold."""


@dataclass(frozen=True)
class Training:
    """Length of the training, and its seed."""

    epochs: int = _MAX_EPOCHS
    patience: int = 5
    """Epochs without improvement after which training stops."""
    seed: int = 0


_DEFAULT_TRAINING = Training()


class FoldNetworks(Calibrator):
    """A base map, and one network per fold that corrects it; the networks' outputs are averaged.

    The networks train in parallel from the base map, and stop together when the held-out loss no longer improves.
    """

    # Not sample-invariant: the networks are trained on folds.

    _layer_names: ClassVar[tuple[str, ...]]

    @property
    def layers(self) -> tuple[Any, ...]:
        """Return the layers of all networks, each (networks, outputs, inputs)."""
        return tuple(getattr(self, name) for name in self._layer_names)

    @classmethod
    def with_layers(cls, base_map: Calibrator, layers: Sequence[np.ndarray]) -> Calibrator:
        """Return the networks with these layers on a base map."""
        return cls(base_map, *layers)  # type: ignore[call-arg]

    @classmethod
    def _fit(
        cls, method: Fit, z: np.ndarray, y: np.ndarray, w: np.ndarray | None, n_folds: int, training: Training
    ) -> Calibrator:
        """Return the networks of all folds on the base map of all rows; with few rows, the base map."""
        if len(z) < max(_FEW_ROWS, 2 * n_folds):
            return method(z, y, **weight_kwargs(w))
        z, y, w = take_weighted(z, y, w, _fixed_order(z, y))
        parts = k_fold(z, y, n_folds)
        taken = [take_weighted(z, y, w, train) for train, _ in parts]
        bases = [method(*pair, **weight_kwargs(share)) for *pair, share in taken]
        return average_folds(
            fit_folds(cls, z, y, parts, bases, w=w, training=training), method(z, y, **weight_kwargs(w))
        )

    @classmethod
    @abstractmethod
    def _examples(cls, base: Calibrator, z: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return the base's outputs (n, K), the features (n, f), and the labels (n,)."""

    @staticmethod
    @abstractmethod
    def _shapes(features: int, classes: int) -> list[tuple[int, int]]:
        """Return the shape (outputs, inputs) of each layer; zeros in the final layer give the base map."""

    @staticmethod
    @abstractmethod
    def _forward(rows: _Examples, layers: Layers) -> tuple[np.ndarray, Layers]:
        """Return logits (…, classes, n) of one or several networks, and intermediate values for `_backward`."""

    @staticmethod
    @abstractmethod
    def _backward(rows: _Examples, layers: Layers, kept: Layers, slope: np.ndarray, gradients: Layers) -> None:
        """Write the loss's derivatives with respect to the layers, from those with respect to the logits."""


class Residual(FoldNetworks):
    """Correct a base map b = ln p by small networks: q = softmax(e^{s(h)} b + R h), h = SiLU(A f), 32 units.

    The features f are the base's log-probabilities (up to 50 classes), its six largest and its entropy. One network is
    trained on each of five folds, starting at s = R = 0, which is the base. All stop together when the held-out loss no
    longer improves, and their probabilities are averaged. So the result is the base where there is nothing to correct.
    Use it for naive Bayes, forests and other scores whose errors follow no simple curve; image classifiers gain little.
    Not for a few hundred rows, where it is the base map.

    Parameters
    ----------
    base
        The base map.
    first
        A of each network, with a bias column, shape (networks, units, features + 1).
    output
        s and R of each network, shape (networks, classes + 1, units).

    Examples
    --------
    >>> from trueup.calibrators.temperature import Temperature
    >>> untrained = np.zeros((1, 4, 6)), np.zeros((1, 3, 4))
    >>> Residual(Temperature(2.0), *untrained)(np.array([[4.0, 0.0]])).round(4)
    array([[-0.1269, -2.1269]])
    """

    shift_invariant = if_all_parts("shift_invariant")
    _layer_names = ("first", "output")

    first: np.ndarray
    output: np.ndarray

    def __init__(self, base: Calibrator, first: ArrayLike, output: ArrayLike) -> None:
        self.base = base
        self.set_parameters(first=first, output=output)
        shapes = self.first.shape, self.output.shape
        if self.first.ndim != 3 or self.output.ndim != 3 or self.first.shape[:2] != self.output.shape[::2]:
            raise ValueError(f"first must be (networks, units, f + 1), output (networks, K + 1, units), got {shapes}")
        if self.first.shape[2] != _count_features(self.output.shape[1] - 1) + 1:
            expected = _count_features(self.output.shape[1] - 1)
            raise ValueError(f"first must have {expected} features and a bias for these classes, got {shapes}")

    def map(self, xp: Namespace, z: Array) -> Array:
        """Return the mean of the networks' probabilities, as log-probabilities."""
        self._check_classes(z, self.output.shape[1] - 1)
        log_p = xp.log_softmax(xp.double(self.base.forward(xp, z)))
        features, networks = _features(xp, log_p), self.first.shape[0]
        log_q = xp.stack([self._correct(xp, log_p, features, k) for k in range(networks)])
        return xp.astype(xp.logsumexp(log_q, axis=0) - math.log(networks), z.dtype)

    @classmethod
    def fit(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        base: Fit | str = "diagonal_sms",
        n_folds: int = 5,
        epochs: int = _MAX_EPOCHS,
        patience: int = 5,
        seed: int = 0,
        sample_weight: WeightsLike = None,
    ) -> Calibrator:
        """Fit the base, and train a network on each fold to correct it; with fewer than 500 rows, return the base.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        base
            A method or its name.
        n_folds
            Number of folds.
        epochs
            Largest number of passes over the training rows.
        patience
            Epochs without improvement after which training stops.
        seed
            Seed of the initial weights and the order of the rows.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Calibrator
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        method = METHODS[base] if isinstance(base, str) else base
        return cls._fit(method, z, y, w, n_folds, Training(epochs, patience, seed))

    @classmethod
    def _examples(cls, base: Calibrator, z: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        log_p = NUMPY.log_softmax(base(z).astype(np.float64))
        return np.where(log_p == -np.inf, -np.inf, np.maximum(log_p, _MIN_LOGIT)), _features(NUMPY, log_p), y

    @staticmethod
    def _shapes(features: int, classes: int) -> list[tuple[int, int]]:
        return [(_HIDDEN, features + 1), (classes + 1, _HIDDEN)]

    @staticmethod
    def _forward(rows: _Examples, layers: Layers) -> tuple[np.ndarray, Layers]:
        first, output_layer = layers
        hidden = first @ rows.features
        gate = np.exp(-hidden)
        gate += 1
        np.reciprocal(gate, out=gate)
        hidden *= gate
        out = output_layer @ hidden
        free, scale = np.abs(out[..., :1, :]) <= 3.0, np.exp(np.clip(out[..., :1, :], -3.0, 3.0))
        logits = scale * rows.base
        logits += out[..., 1:, :]
        return logits, (hidden, gate, scale * free, out)

    @staticmethod
    def _backward(rows: _Examples, layers: Layers, kept: Layers, slope: np.ndarray, gradients: Layers) -> None:
        hidden, gate, scale, out = kept
        out[..., 1:, :] = slope
        out[..., :1, :] = (slope * rows.base).sum(axis=-2, keepdims=True) * scale
        np.matmul(out, hidden.mT, out=gradients[1])
        by_hidden = layers[1].mT @ out
        hidden -= hidden * gate  # the derivative of SiLU is g + a(1 − g), a its value and g the sigmoid
        hidden += gate
        by_hidden *= hidden
        np.matmul(by_hidden, rows.features.mT, out=gradients[0])

    def _correct(self, xp: Namespace, base: Array, features: Array, network: int) -> Array:
        """Return the log-probabilities of one network."""
        hidden = _affine(features, self.first[network, ...])
        out = (hidden * xp.sigmoid(hidden)) @ self.output[network, ...].T
        scale = xp.exp(xp.clip(out[:, :1], -3.0, 3.0))
        corrected = scale * xp.clip(base, min=_MIN_LOGIT) + out[:, 1:]
        return xp.log_softmax(xp.where(base == -math.inf, MASKED_LOGIT, corrected))


class OrderInvariant(FoldNetworks):
    """Stretch the gaps between sorted logits y₁ ≥ … ≥ y_K by networks: o_j − o_{j+1} = v_j (y_j − y_{j+1}), v > 0.

    v = softplus(m(y))/T, where m is a network with two hidden layers. Its inputs are the sorted, centred logits, so all
    classes are treated alike. One network is trained on each of five folds, starting at temperature scaling, v = 1/T.
    All stop together when the held-out loss no longer improves, and their slopes are averaged. So the result is
    temperature scaling where there is nothing to correct. (The paper trains a single network with 100 and 100 units.)
    Not for a few hundred rows, where it is temperature scaling.

    Parameters
    ----------
    temperature
        The T > 0.
    first
        First layer of each network, with a bias column, shape (networks, units, classes + 1).
    second
        Second layer, shape (networks, units, units + 1).
    third
        Third layer, shape (networks, classes − 1, units + 1).

    Examples
    --------
    >>> untrained = np.zeros((1, 5, 4)), np.zeros((1, 5, 6)), np.zeros((1, 2, 6))
    >>> OrderInvariant(2.0, *untrained)(np.array([[3.0, 1.0, 2.0]]))
    array([[ 0. , -1. , -0.5]])

    References
    ----------
    Rahimi et al., "Intra order-preserving functions for calibration of multi-class neural networks" (2020),
    arXiv:2003.06820.
    """

    keeps_argmax = True
    _layer_names = ("first", "second", "third")

    temperature: float
    first: np.ndarray
    second: np.ndarray
    third: np.ndarray

    def __init__(self, temperature: float, first: ArrayLike, second: ArrayLike, third: ArrayLike) -> None:
        # Older files store one network.
        layers = (layer[None] if layer.ndim == 2 else layer for layer in map(np.asarray, (first, second, third)))
        self.set_parameters(temperature=temperature, **dict(zip(self._layer_names, layers, strict=True)))
        if np.ndim(self.temperature) or not 0 < self.temperature < math.inf:
            raise ValueError(f"temperature must be one positive number, got {temperature}")
        sizes = [layer.shape for layer in self.layers]
        if any(len(size) != 3 for size in sizes) or not (
            sizes[0][0] == sizes[1][0] == sizes[2][0]
            and sizes[0][1] + 1 == sizes[1][2]
            and sizes[1][1] + 1 == sizes[2][2]
            and sizes[2][1] + 2 == sizes[0][2]
        ):
            shapes = ", ".join(map(str, sizes))
            raise ValueError(f"layers must be (m, h, K + 1), (m, g, h + 1) and (m, K − 1, g + 1), got {shapes}")

    def map(self, xp: Namespace, z: Array) -> Array:
        """Stretch the gaps; the largest logit becomes 0."""
        self._check_classes(z, self.first.shape[2] - 1)
        ordered, order = xp.top_k(xp.double(z), z.shape[1])
        x, (*inner, output_layer) = centre_rows(xp, ordered), self.layers
        for layer in inner:
            x = xp.clip(_affine(x, layer), min=0.0)
        slopes = _MIN_SLOPE + xp.softplus(_affine(x, output_layer) + _NEUTRAL)
        # Sum from the top down, so that nothing cancels near the predicted class.
        gaps = ordered[:, :-1] - ordered[:, 1:]
        if (absent := xp.find_absent(ordered)) is not None:
            gaps = xp.where(absent[:, 1:], 0.0, gaps)
        below = xp.cumulative_sum(xp.mean(slopes, axis=0) / self.temperature * gaps, axis=1)
        stretched = xp.concat([xp.zeros_like(ordered[:, :1]), -below], axis=1)
        return xp.astype(xp.restore_order(stretched, order), z.dtype)

    @classmethod
    def fit(
        cls,
        logits: ArrayLike,
        labels: ArrayLike,
        *,
        n_folds: int = 5,
        epochs: int = _MAX_EPOCHS,
        patience: int = 5,
        seed: int = 0,
        sample_weight: WeightsLike = None,
    ) -> Calibrator:
        """Train a network on each fold, starting at temperature scaling; with fewer than 500 rows, return the latter.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        n_folds
            Number of folds.
        epochs
            Largest number of passes over the training rows.
        patience
            Epochs without improvement after which training stops.
        seed
            Seed of the initial weights and the order of the rows.
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Calibrator
            The fitted calibrator.
        """
        z, y, w = as_weighted(logits, labels, sample_weight, min_rows=1)
        z, rank = _sort(z, y)  # so that the folds treat classes alike too
        return cls._fit(Temperature.fit, z, rank, w, n_folds, Training(epochs, patience, seed))

    @classmethod
    def with_layers(cls, base: Calibrator, layers: Sequence[np.ndarray]) -> Calibrator:
        """Return the networks with these layers on temperature scaling."""
        assert isinstance(base, Temperature)
        return cls(base.temperature, *layers)

    @classmethod
    def _examples(cls, base: Calibrator, z: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        assert isinstance(base, Temperature)
        ordered, rank = _sort(z.astype(np.float64), y)
        return (ordered - ordered[:, :1]) / base.temperature, centre_rows(NUMPY, ordered), rank

    @staticmethod
    def _shapes(features: int, classes: int) -> list[tuple[int, int]]:
        return [(_HIDDEN, features + 1), (_HIDDEN, _HIDDEN + 1), (classes - 1, _HIDDEN + 1)]

    @staticmethod
    def _forward(rows: _Examples, layers: Layers) -> tuple[np.ndarray, Layers]:
        inner = [rows.features]
        for layer in layers[:-1]:
            values = np.ones((*inner[-1].shape[:-2], _HIDDEN + 1, inner[-1].shape[-1]), inner[-1].dtype)
            np.matmul(layer, inner[-1], out=values[..., :-1, :])
            inner.append(np.maximum(values, 0.0, out=values))
        linear = layers[-1] @ inner[-1]
        linear += np.float32(_NEUTRAL)
        small = np.exp(-np.abs(linear))
        slopes = np.log1p(small)
        slopes += np.maximum(linear, 0.0)
        slopes += np.float32(_MIN_SLOPE)
        gaps = rows.base[..., 1:, :] - rows.base[..., :-1, :]
        logits = np.zeros_like(rows.base)
        np.cumsum(slopes * gaps, axis=-2, out=logits[..., 1:, :])
        gaps *= np.where(linear > 0, 1.0, small) / (1 + small)  # times the derivative of softplus
        return logits, (*inner, gaps)

    @staticmethod
    def _backward(rows: _Examples, layers: Layers, kept: Layers, slope: np.ndarray, gradients: Layers) -> None:
        *inner, gaps = kept
        following = gaps * slope[..., :0:-1, :].cumsum(axis=-2)[..., ::-1, :]
        for k in reversed(range(len(layers))):
            np.matmul(following, inner[k].mT, out=gradients[k])
            if k:
                following = layers[k][..., :-1].mT @ following
                following *= inner[k][..., :-1, :] > 0


def _sort(z: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return logits in descending order, and the rank of the label among them, (n,)."""
    order = np.argsort(-z, axis=1, kind="stable")
    return np.take_along_axis(z, order, axis=1), (order == y[:, None]).argmax(axis=1)


def _affine(x: Any, layer: Any) -> Any:
    return x @ layer[..., :-1].mT + layer[..., None, :, -1]


def fit_folds(
    kind: type[FoldNetworks],
    z: np.ndarray,
    y: np.ndarray,
    folds: Folds,
    bases: Sequence[Calibrator],
    *,
    w: np.ndarray | None = None,
    training: Training = _DEFAULT_TRAINING,
) -> list[Calibrator]:
    """Return a corrected base map for each fold, trained without the fold's held-out rows.

    `bases` are base maps fitted to the folds' training rows. All networks stop after the same number of epochs, the one
    with the smallest held-out loss over all folds; if that is zero, the bases are returned.
    """
    z, y = as_arrays(z, y)
    order = _fixed_order(z, y)
    _, features, _ = kind._examples(bases[0], z[:1], y[:1])
    numbers = len(folds) * len(z) * (features.shape[1] + z.shape[1])
    every = -(-numbers // _MAX_NUMBERS)
    rows = [[order[np.asarray(mask)[order]][::every] for mask in masks] for masks in folds]
    layers = _train(kind, z, y, w, bases, rows, training)
    if layers is None:
        return list(bases)
    return [kind.with_layers(base, [layer[k : k + 1] for layer in layers]) for k, base in enumerate(bases)]


def average_folds(models: Sequence[Calibrator], base: Calibrator) -> Calibrator:
    """Return the networks of all folds on one base map fitted to all rows, or the base if nothing was corrected."""
    trained = [model for model in models if isinstance(model, FoldNetworks)]
    if not trained:
        return base
    layers = zip(*(model.layers for model in trained), strict=True)
    return trained[0].with_layers(base, [np.concatenate(layer) for layer in layers])


def _fixed_order(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Return an order of the rows that depends on their content only."""
    return np.argsort(stratified_folds(z, y, len(z)))


def _count_features(classes: int) -> int:
    return (classes if classes <= _MANY_CLASSES else 0) + min(_TOP, classes) + 1


def _features(xp: Namespace, log_p: Array) -> Array:
    clamped = xp.clip(log_p, min=_MIN_FEATURE)
    largest, _ = xp.top_k(clamped, min(_TOP, log_p.shape[1]))
    entropy = -xp.sum(xp.exp(log_p) * clamped, axis=1, keepdims=True)
    each = [clamped] if log_p.shape[1] <= _MANY_CLASSES else []
    return xp.concat([*each, largest, entropy], axis=1)


def _adam_step(step: int, parameters: np.ndarray, gradient: np.ndarray, mean: np.ndarray, square: np.ndarray) -> None:
    """Apply one step of Adam in place (Kingma & Ba, 2015, with their settings), with a learning rate of 0.01."""
    mean += np.float32(0.1) * (gradient - mean)
    square *= np.float32(0.999)
    square += np.float32(0.001) * gradient**2
    width = np.sqrt(square / np.float32(1 - 0.999**step)) + np.float32(1e-8)
    parameters -= np.float32(1e-2 / (1 - 0.9**step)) * mean / width


class _Examples(NamedTuple):
    """Training rows as columns in float32, of one fold (…, n) or of several with equally many rows (folds, …, n)."""

    base: np.ndarray
    """The base map's logits, (classes, n); an absent option has the minimum of its row."""
    features: np.ndarray
    """Standardised features and a constant 1, (features + 1, n)."""
    label: np.ndarray
    weight: np.ndarray
    absent: np.ndarray | None
    """`MASKED_LOGIT` where an option is absent, 0 elsewhere, (classes, n); None if no option is absent."""

    def take(self, columns: Any) -> _Examples:
        """Return some of the rows."""
        return _Examples._make(None if part is None else part[..., columns] for part in self)


def _stack(folds: Sequence[_Examples]) -> _Examples:
    return _Examples._make(None if parts[0] is None else np.stack(parts) for parts in zip(*folds, strict=True))


def _exponentials(rows: _Examples, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return logits minus the largest, and their exponentials."""
    if rows.absent is not None:
        logits += rows.absent
    logits -= logits.max(axis=-2, keepdims=True)
    return logits, np.exp(logits)


def _loss(kind: type[FoldNetworks], rows: _Examples, network: Layers) -> float:
    """Return the weighted sum of one network's losses."""
    logits, exponentials = _exponentials(rows, kind._forward(rows, network)[0])
    losses = np.log(exponentials.sum(axis=0)) - logits[rows.label, np.arange(len(rows.label))]
    return float(rows.weight.astype(np.float64) @ losses)


def _gradients(kind: type[FoldNetworks], rows: _Examples, layers: Layers, gradients: Layers) -> None:
    """Write the derivatives of the sum of all networks' mean losses with respect to their layers."""
    logits, kept = kind._forward(rows, layers)
    slope = _exponentials(rows, logits)[1]
    slope /= slope.sum(axis=-2, keepdims=True)
    network, row = np.ogrid[: len(slope), : slope.shape[-1]]
    slope[network, rows.label, row] -= 1
    slope *= (rows.weight / np.float32(slope.shape[-1]))[:, None]
    kind._backward(rows, layers, kept, slope, gradients)


def _train(
    kind: type[FoldNetworks],
    z: np.ndarray,
    y: np.ndarray,
    w: np.ndarray | None,
    bases: Sequence[Calibrator],
    rows: Sequence[Sequence[np.ndarray]],
    training: Training,
) -> list[np.ndarray] | None:
    """Return the layers of all networks at the epoch with the smallest held-out loss; None if that is the start."""
    random = np.random.RandomState(training.seed)
    size = min(len(train) for train, _ in rows)
    row_weights = np.ones(len(z)) if w is None else np.asarray(w / w.mean())
    has_absent = find_absent(z) is not None
    training_rows, held_out, means, widths = [], [], [], []
    for start, (train, held) in zip(bases, rows, strict=True):
        both = np.concatenate([train, held])
        base, f, label = kind._examples(start, z[both], y[both])
        feature_mean, width = f[: len(train)].mean(axis=0), f[: len(train)].std(axis=0)
        width = np.where(width > 1e-6, width, 1.0)
        absent = np.isneginf(base)
        examples = _Examples(
            np.where(absent, np.where(absent, np.inf, base).min(axis=1, keepdims=True), base).T.astype(np.float32),
            np.append((f - feature_mean) / width, np.ones((len(f), 1)), axis=1).T.astype(np.float32),
            label,
            row_weights[both].astype(np.float32),
            np.where(absent, MASKED_LOGIT, 0.0).T.astype(np.float32) if has_absent else None,
        )
        training_rows.append(examples.take(slice(len(train))))
        held_out.append(examples.take(slice(len(train), None)))
        means.append(feature_mean)
        widths.append(width)
    *inner, output_shape = ((len(rows), *shape) for shape in kind._shapes(len(means[0]), z.shape[1]))
    starts = [*(_uniform(random, shape) for shape in inner), np.zeros(output_shape, np.float32)]
    parameters = np.concatenate([start.ravel() for start in starts])
    gradient, mean, square = (np.zeros_like(parameters) for _ in range(3))
    steps = itertools.count(1)
    ends = np.cumsum([start.size for start in starts])
    layers, gradients = (
        [part.reshape(start.shape) for part, start in zip(np.split(vector, ends[:-1]), starts, strict=True)]
        for vector in (parameters, gradient)
    )

    mass = sum(float(fold.weight.sum(dtype=np.float64)) for fold in held_out)

    def loss() -> float:
        return sum(_loss(kind, fold, network) for fold, *network in zip(held_out, *layers, strict=True)) / mass

    batch = max(_BATCH, -(-size // _MAX_STEPS))
    best, best_epoch, kept = loss(), 0, None
    for epoch in range(1, training.epochs + 1):
        # Folds may differ by a few rows; each epoch leaves out the excess at random.
        orders = [_shuffle(random, len(fold.label))[:size] for fold in training_rows]
        for first in range(0, size, batch):
            columns = slice(first, first + batch)
            part = _stack([fold.take(order[columns]) for fold, order in zip(training_rows, orders, strict=True)])
            _gradients(kind, part, layers, gradients)
            _adam_step(next(steps), parameters, gradient, mean, square)
        current = loss()
        if current < best - _MIN_GAIN:
            best, best_epoch, kept = current, epoch, [layer.astype(np.float64) for layer in layers]
        elif epoch >= best_epoch + training.patience:
            break
    if kept is None:
        return None
    # Merge the standardisation of the features into the first layer.
    weight = kept[0][..., :-1] / np.stack(widths)[:, None]
    bias = kept[0][..., -1] - (weight @ np.stack(means)[..., None])[..., 0]
    return [np.concatenate([weight, bias[..., None]], axis=2), *kept[1:]]


def _uniform(random: np.random.RandomState, shape: tuple[int, ...]) -> np.ndarray:
    """Draw a layer's initial weights, with as many random bits as float32 holds."""
    draws = random.randint(1 << 32, size=shape, dtype=np.uint32) & np.uint32((1 << 24) - 1)
    return (draws * np.float32(2.0**-23) - 1) / np.float32(math.sqrt(shape[-1] - 1))


def _shuffle(random: np.random.RandomState, n: int) -> np.ndarray:
    """Return a random order of n rows (Fisher & Yates) that is the same in every version of NumPy."""
    order = list(range(n))
    remaining = np.arange(n, 1, -1)
    draws = random.randint(1 << 32, size=n - 1, dtype=np.uint32)
    for i, j in enumerate((np.arange(n - 1) + draws % remaining).tolist()):
        order[i], order[j] = order[j], order[i]
    return np.array(order)
