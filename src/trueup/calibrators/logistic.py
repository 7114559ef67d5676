"""Logistic curves of each class's log-odds: Platt scaling, quadratic scaling and beta calibration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor

from trueup.calibrators.base import Calibrator
from trueup.core import native
from trueup.core.arrays import NEVER, as_weighted, fill_absent, find_absent, upcast_half
from trueup.core.module import softplus
from trueup.core.optimize import Certificate, FitError

C = TypeVar("C", bound=Calibrator)

Curve = tuple[Tensor, Certificate]
"""The parameters (k, classes) of a block of curves, and how their search ended."""

_TOLERANCE = 1e-10
"""By how much of itself a class's mean loss may still fall, as Newton's model says, before the last step is taken."""


class Platt(Calibrator):
    """Fit a logistic curve to each class's log-odds: q_k ∝ σ(A_k s_k + B_k), s_k = z_k − ln Σ_{j≠k} exp z_j.

    With two classes the curves complement each other and q_1 = σ(A s_1 + B). Labels are drawn in to (N₊+1)/(N₊+2) and
    1/(N₋+2), so that separable and missing classes have finite curves. Where every label is right and the curves would
    fit these rows worse than the logits as they are, those stay. Not for many classes with few samples each: the curves
    are fitted apart, and drawn-in labels then flatten them.
    Platt, "Probabilistic outputs for support vector machines" (1999).

    >>> z = torch.tensor([[0.0, 3.0], [0.0, 1.0], [0.0, -1.0], [0.0, -3.0]])
    >>> platt = Platt.fit(z, torch.tensor([1, 0, 1, 0]))
    >>> f"{platt.slope[1]:.4f} {platt.offset[1]:.4f}"
    '0.2057 0.0000'
    """

    keeps_argmax = False
    shift_invariant = True
    sample_invariant = False  # twice the samples, and the labels are drawn in half as far
    differentiable = True

    slope: Tensor
    offset: Tensor

    def __init__(self, slope: Any, offset: Any) -> None:
        super().__init__()
        keep_class_vectors(self, slope=slope, offset=offset)

    def map(self, logits: Tensor) -> Tensor:
        """The classes' curves, normalised."""
        self._check_classes(logits, len(self.slope))
        log_p, log_rest = log_probs_and_rests(logits.double())
        odds = self.slope * fill_absent(log_p - log_rest, find_absent(logits)) + self.offset
        return log_normalise(odds, logits).to(logits.dtype)

    @classmethod
    def fit(
        cls, logits: Any, labels: Any, *, targets: Literal["platt", "plain"] = "platt", weights: Any = None
    ) -> Self:
        """Platt scaling: minimise each class's cross-entropy against the drawn-in labels. `targets="plain"` takes the
        labels as they are, which separable classes have no finite curve for.
        """

        def curve(log_p: Tensor, log_rest: Tensor, wanted: Tensor, w: Tensor | None) -> Curve:
            slope, offset, certificate = fit_logistic([log_p - log_rest], wanted, w)
            return torch.stack([slope[0], offset]), certificate

        def identity(fitted: Self) -> Self:
            return cls(torch.ones_like(fitted.slope), torch.zeros_like(fitted.slope))

        return fit_classes(cls, logits, labels, weights, curve, identity, targets)


class Quadratic(Calibrator):
    """Fit q_k ∝ σ(a_k s_k + c_k s_k² + b_k) to each class's log-odds s_k = ln p_k − ln(1 − p_k).

    With two classes the curves complement each other. The square bends the curve where a network is too sure on one
    side only. Beyond the log-odds of the fit a parabola may turn, so they are kept within the range seen. Labels are
    drawn in as Platt's are. Not for many classes with few samples each.

    >>> z = torch.tensor([[0.0, 3.0], [0.0, 1.0], [0.0, 0.0], [0.0, -1.0], [0.0, -3.0]])
    >>> curve = Quadratic.fit(z, torch.tensor([1, 0, 0, 1, 0]))
    >>> f"{curve.slope[1]:.3f} {curve.square[1]:.3f} {curve.offset[1]:.3f}"
    '0.229 0.053 -0.545'
    """

    keeps_argmax = False
    shift_invariant = True
    sample_invariant = False  # twice the samples, and the labels are drawn in half as far
    differentiable = True

    slope: Tensor
    square: Tensor
    offset: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, slope: Any, square: Any, offset: Any, low: Any, high: Any) -> None:
        super().__init__()
        keep_class_vectors(self, slope=slope, square=square, offset=offset, low=low, high=high)
        if not bool((self.low <= self.high).all()):
            raise ValueError(f"low must be at most high, got {low} and {high}")

    def map(self, logits: Tensor) -> Tensor:
        """The classes' curves, normalised."""
        self._check_classes(logits, len(self.slope))
        log_p, log_rest = log_probs_and_rests(logits.double())
        odds = fill_absent(log_p - log_rest, find_absent(logits))
        odds = torch.minimum(torch.maximum(odds, self.low), self.high)
        return log_normalise(self.slope * odds + self.square * odds.square() + self.offset, logits).to(logits.dtype)

    @classmethod
    def fit(cls, logits: Any, labels: Any, *, weights: Any = None) -> Self:
        """Quadratic scaling: minimise each class's cross-entropy against the drawn-in labels."""

        def curve(log_p: Tensor, log_rest: Tensor, wanted: Tensor, w: Tensor | None) -> Curve:
            odds = log_p - log_rest
            coefficients, offset, certificate = fit_logistic([odds, odds.square()], wanted, w)
            return torch.stack([*coefficients, offset, odds.amin(dim=0), odds.amax(dim=0)]), certificate

        def identity(fitted: Self) -> Self:
            ones, zeros = torch.ones_like(fitted.slope), torch.zeros_like(fitted.slope)
            return cls(ones, zeros, zeros, fitted.low, fitted.high)

        return fit_classes(cls, logits, labels, weights, curve, identity)


class Beta(Calibrator):
    """Fit to each class q_k ∝ σ(a ln p_k − b ln(1 − p_k) + c), a and b not negative, which rises with p_k.

    It is the likelihood ratio of two beta distributions; a = b = 1, c = 0 is the identity, and a = b is Platt's curve.
    Labels are drawn in as Platt's, so that separable and missing classes have finite curves. Not for many classes with
    few samples each, where three numbers a class are too many.
    Kull et al., "Beta calibration" (2017).

    >>> p = torch.linspace(0.05, 0.95, 1000, dtype=torch.float64)
    >>> z = torch.stack([torch.log1p(-p), torch.log(p)], dim=1)
    >>> beta = Beta.fit(z, (torch.arange(1000) * 37 % 100 < 100 * p).long())  # nearly calibrated
    >>> f"{beta.a[1]:.2f} {beta.b[1]:.2f} {beta.c[1]:.2f}"
    '0.93 1.08 -0.10'
    """

    keeps_argmax = False
    shift_invariant = True
    sample_invariant = False  # twice the samples, and the labels are drawn in half as far
    differentiable = True

    a: Tensor
    b: Tensor
    c: Tensor

    def __init__(self, a: Any, b: Any, c: Any) -> None:
        super().__init__()
        keep_class_vectors(self, a=a, b=b, c=c)
        if bool((self.a < 0).any()) or bool((self.b < 0).any()):
            raise ValueError(f"a and b must not be negative, got a = {a} and b = {b}")

    def map(self, logits: Tensor) -> Tensor:
        """The classes' curves, normalised."""
        self._check_classes(logits, len(self.a))
        log_p, log_rest = log_probs_and_rests(logits.double())
        log_p = fill_absent(log_p, find_absent(logits))
        return log_normalise(self.a * log_p - self.b * log_rest + self.c, logits).to(logits.dtype)

    @classmethod
    def fit(
        cls, logits: Any, labels: Any, *, targets: Literal["platt", "plain"] = "platt", weights: Any = None
    ) -> Self:
        """Beta calibration: minimise each class's cross-entropy; a coefficient that comes out negative is dropped, the
        rest refitted. `targets="plain"` takes the labels as they are, which separable classes have no finite curve for.
        """

        def curve(log_p: Tensor, log_rest: Tensor, wanted: Tensor, w: Tensor | None) -> Curve:
            return _rising(log_p, -log_rest, wanted, w)

        def identity(fitted: Self) -> Self:
            ones = torch.ones_like(fitted.a)
            return cls(ones, ones, 0 * ones)

        return fit_classes(cls, logits, labels, weights, curve, identity, targets)


def fit_classes(
    cls: type[C],
    logits: Any,
    labels: Any,
    weights: Any,
    curve: Callable[[Tensor, Tensor, Tensor, Tensor | None], Curve],
    identity: Callable[[C], C],
    targets: str = "platt",
) -> C:
    """One curve a class: `curve` fits those of a block, given ln p, ln(1 − p), targets and weights (n, classes).

    Where every label is right, `identity` of the fitted calibrator is taken if it fits these rows better.
    """
    z, y, w = as_weighted(logits, labels, weights, at_least=1)
    curves = [
        curve(log_p, log_rest, class_targets(y, classes, each, targets), each)
        for classes, log_p, log_rest, each in class_blocks(z, w)
    ]
    parameters, certificates = zip(*curves, strict=True)
    fitted = cls(*torch.cat(parameters, dim=1)).with_certificate(join_certificates(list(certificates)))
    return identity_if_all_right(fitted, identity(fitted), z, y, w)


def log_probs_and_rests(z: Tensor) -> tuple[Tensor, Tensor]:
    """ln p_k and ln(1 − p_k) of each entry, without cancellation."""
    return _columns(z, torch.arange(z.shape[1], device=z.device), *_row_sums(z))


def _row_sums(z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of each row: ln Σ_k exp z_k, the largest class, and ln(1 − p) of that class, which is the others' sum."""
    best = z.argmax(dim=1, keepdim=True)
    others = torch.logsumexp(z.scatter(1, best, -torch.inf), dim=1, keepdim=True)
    return torch.logsumexp(z, dim=1, keepdim=True), best, -softplus(z.gather(1, best) - others)


def _columns(z: Tensor, classes: Tensor, total: Tensor, best: Tensor, rest_of_best: Tensor) -> tuple[Tensor, Tensor]:
    log_p = z - total
    # Any class but the best has p of at most a half. The best's is held off one, or its unused gradient would be NaN.
    rest = torch.log1p(-torch.exp(log_p).clamp(max=0.75))
    return log_p, torch.where(best == classes, rest_of_best, rest)


def log_normalise(odds: Tensor, logits: Tensor) -> Tensor:
    """ln of σ(odds_k) / Σ_j σ(odds_j), from the log-odds that the classes have one by one, of the logits' options."""
    log_q = -softplus(-odds)
    absent = find_absent(logits)
    return torch.log_softmax(log_q if absent is None else log_q.masked_fill(absent, NEVER), dim=1)


def class_blocks(z: Tensor, w: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor | None]]:
    """Blocks of classes, with their columns of ln p and ln(1 − p) in double, and the rows' weights for a fit.

    Where an option is absent the columns have their means, and the weights, then (n, classes), zeros. A class that no
    row has is left in all with nothing to tell.
    """
    n, classes = z.shape
    absent = find_absent(z)
    rows = [_row_sums(upcast_half(z[at]).double()) for at in native.row_chunks(n, classes, native.FIT)]
    sums = [torch.cat(column) for column in zip(*rows, strict=True)]
    every = torch.arange(classes, device=z.device)
    for at in native.row_chunks(classes, n, native.FIT):
        columns = _columns(upcast_half(z[:, at]).double(), every[at], *sums)
        if absent is None:
            yield every[at], *columns, w
            continue
        gone = absent[:, at]
        missing = gone & ~gone.all(dim=0)
        log_p, log_rest = (fill_absent(torch.where(gone & ~missing, 0.0, column).T, missing.T).T for column in columns)
        each = torch.ones(n, dtype=torch.float64, device=z.device) if w is None else w
        yield every[at], log_p, log_rest, each[:, None] * ~missing


def class_targets(y: Tensor, classes: Tensor, w: Tensor | None, targets: str) -> Tensor:
    """The targets of each class, (n, classes): Platt's, or with "plain" 1 for its samples and 0 for the others."""
    if targets not in ("platt", "plain"):
        raise ValueError(f'targets must be "platt" or "plain", got {targets!r}')
    return platt_targets(y, classes, w) if targets == "platt" else (y[:, None] == classes).double()


def platt_targets(y: Tensor, classes: Tensor, w: Tensor | None = None) -> Tensor:
    """Platt's targets of each class, (n, classes): (N₊+1)/(N₊+2) for its samples and 1/(N₋+2) for the others."""
    mine = y[:, None] == classes
    each = None if w is None else w if w.ndim == 2 else w[:, None]
    positive = (mine if each is None else mine * each).sum(dim=0).double()
    total = len(y) if each is None else each.sum(dim=0)
    return torch.where(mine, (positive + 1) / (positive + 2), 1 / (total - positive + 2))


def identity_if_all_right(fitted: C, identity: C, z: Tensor, y: Tensor, w: Tensor | None) -> C:
    """The identity where every label is right and it fits these rows better.

    Nothing then speaks against a network that is surer than labels that are drawn in by one row.
    """
    if not bool((z.argmax(dim=1) == y).all()):
        return fitted
    share = torch.full((len(y),), 1 / len(y), device=z.device) if w is None else w / w.sum()

    def loss(logits: Tensor) -> float:
        return float(share.double() @ torch.nn.functional.cross_entropy(logits.double(), y, reduction="none"))

    return fitted if loss(fitted(z)) <= loss(z) else identity.with_certificate(fitted.certificate)


def fit_logistic(
    features: list[Tensor], targets: Tensor, w: Tensor | None = None, max_iter: int = 100
) -> tuple[Tensor, Tensor, Certificate]:
    """Fit σ(Σ_f w_f x_f + offset) to the targets of each column: weights (features, columns), offsets (columns,).

    The rows' weights `w` are (n,), or (n, columns).

    Newton's steps, each column's own, halved until its loss falls. (L-BFGS over all columns at once ends at the same
    point, but sees one ill-conditioned problem where there are many tiny ones, and takes 7 to 30 times the passes.)
    """
    n, columns = targets.shape
    share = 1 / n if w is None else w / w.sum(dim=0) if w.ndim == 2 else (w / w.sum())[:, None]
    # Features on one scale: the Hessian at the start is then well conditioned. A constant one gets no weight.
    middle = torch.stack([x.mean(dim=0) for x in features]) if features else targets.new_empty(0, columns)
    width = torch.stack([x.std(dim=0, correction=0) for x in features]) if features else middle
    width = torch.where(width > 1e-12 * (1 + middle.abs()), width, torch.inf)
    x = torch.stack([*((f - m) / s for f, m, s in zip(features, middle, width, strict=True)), torch.ones_like(targets)])
    at = torch.zeros(len(x), columns, dtype=targets.dtype, device=targets.device)
    at[-1] = torch.logit((share * targets).sum(dim=0).clamp(1e-12, 1 - 1e-12))
    value = _loss(x, targets, at, share)
    iterations, passes = 0, 1
    for iterations in range(1, max_iter + 1):  # noqa: B007 (the certificate has their number)
        probs = torch.sigmoid((x * at[:, None]).sum(dim=0))
        slope = (x * (share * (probs - targets))).sum(dim=1)
        bend = torch.einsum("fnc,gnc->cfg", x * (share * (probs * (1 - probs))), x)
        # Nearly collinear features leave a direction without curvature: a trace of ridge stops it.
        ridge = 1e-12 * bend.diagonal(dim1=1, dim2=2).mean(dim=1)[:, None, None] + 1e-300
        bend = bend + ridge * torch.eye(len(x), dtype=bend.dtype, device=bend.device)
        step = -torch.linalg.solve(bend, slope.T[..., None])[..., 0].T
        gain = -(step * slope).sum(dim=0)
        passes += 1
        if not bool(torch.isfinite(gain).all()):
            raise FitError("the features leave no finite step: are they of one scale?")
        going = gain > 2 * _TOLERANCE * value.clamp(max=1.0)
        # The last step is taken too: it leaves an error of about its square.
        length = torch.ones_like(value)
        for _ in range(40):
            following = _loss(x, targets, at + length * step, share)
            passes += 1
            worse = ~(following <= value - 1e-4 * length * gain + 1e-13 * value)
            if not bool(worse.any()):
                break
            length = torch.where(worse, length / 2, length)
        at, value = at + torch.where(worse, 0.0, length) * step, torch.where(worse, value, following)
        if not bool((going & ~worse).any()):
            break
    else:
        raise FitError(f"no minimum was found in {max_iter} steps: the loss can still fall by {gain.max() / 2:g}")
    weights = at[:-1] / width
    offset = at[-1] - (weights * middle).sum(dim=0)
    residual = share * (torch.sigmoid((x * at[:, None]).sum(dim=0)) - targets)
    slopes = float(torch.linalg.vector_norm((x * residual).sum(dim=1)))
    return weights, offset, Certificate("converged", slopes, iterations, passes + 1, float(value.sum()))


def join_certificates(certificates: list[Certificate]) -> Certificate:
    """One certificate for blocks of columns: gradients and losses together, the most steps any took."""
    gradient = sum(c.gradient**2 for c in certificates) ** 0.5
    iterations, passes = max(c.iterations for c in certificates), max(c.passes for c in certificates)
    return Certificate("converged", gradient, iterations, passes, sum(c.loss for c in certificates))


def keep_class_vectors(calibrator: Calibrator, **vectors: Any) -> None:
    """Keep vectors of one number a class, checked to be finite and of one length."""
    for name, value in vectors.items():
        calibrator.keep(name, value)
        kept = calibrator.get_buffer(name)
        if kept.ndim != 1 or len(kept) < 2 or not bool(torch.isfinite(kept).all()):
            raise ValueError(f"{name} must be finite, one number for each of at least 2 classes, got {value}")
    shapes = {name: len(calibrator.get_buffer(name)) for name in vectors}
    if len(set(shapes.values())) > 1:
        raise ValueError(f"{' and '.join(shapes)} must have the same classes, got {shapes}")


def _loss(x: Tensor, targets: Tensor, at: Tensor, share: Tensor | float) -> Tensor:
    odds = (x * at[:, None]).sum(dim=0)
    return (share * (torch.nn.functional.softplus(odds) - targets * odds)).sum(dim=0)


def _rising(first: Tensor, second: Tensor, targets: Tensor, w: Tensor | None) -> tuple[Tensor, Certificate]:
    """The best a, b ≥ 0 and c of each column, (3, columns).

    The loss is convex: where the free minimum has a negative coefficient, the constrained one has a zero. So there it
    is the better of the two curves with one coefficient; of one that is negative too, the constant.
    """
    weights, offset, certificate = fit_logistic([first, second], targets, w)
    parameters = torch.cat([weights, offset[None]])
    falling = (weights < 0).any(dim=0).nonzero()[:, 0]
    if not len(falling):
        return parameters, certificate
    x, t = torch.stack([first[:, falling], second[:, falling]]), targets[:, falling]
    w = w if w is None or w.ndim == 1 else w[:, falling]
    share = 1 / len(t) if w is None else w / w.sum(dim=0) if w.ndim == 2 else (w / w.sum())[:, None]
    level = torch.logit((share * t).sum(dim=0))
    least = torch.full((len(falling),), torch.inf, dtype=t.dtype, device=t.device)
    ends = [certificate]
    for only in (0, 1):
        weight, offset, end = fit_logistic([x[only]], t, w)
        rises = weight[0] > 0
        candidate = torch.zeros(3, len(falling), dtype=t.dtype, device=t.device)
        candidate[only] = torch.where(rises, weight[0], 0.0)
        candidate[2] = torch.where(rises, offset, level)
        loss = _beta_loss(candidate, x[0], x[1], t, share)
        parameters[:, falling[loss < least]] = candidate[:, loss < least]
        least = torch.minimum(loss, least)
        ends.append(end)
    gradient, iterations = max(end.gradient for end in ends), max(end.iterations for end in ends)
    loss = _beta_loss(parameters, first, second, targets, share).sum()
    return parameters, Certificate("converged", gradient, iterations, sum(end.passes for end in ends), float(loss))


def _beta_loss(curve: Tensor, first: Tensor, second: Tensor, targets: Tensor, share: Tensor | float) -> Tensor:
    odds = curve[0] * first + curve[1] * second + curve[2]
    return (share * (torch.nn.functional.softplus(odds) - targets * odds)).sum(dim=0)
