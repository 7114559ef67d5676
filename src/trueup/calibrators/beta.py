"""Beta calibration, for two classes and one against the rest."""

from __future__ import annotations

from typing import Any, Literal, Self

import torch
from torch import Tensor

from trueup.calibrators.base import Calibrator
from trueup.calibrators.platt import (
    Curve,
    fit_classes,
    fit_logistic,
    keep_class_vectors,
    log_normalise,
    log_probs_and_rests,
)
from trueup.core.arrays import fill_absent, find_absent
from trueup.core.optimize import Certificate


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
        loss = _loss(candidate, x[0], x[1], t, share)
        parameters[:, falling[loss < least]] = candidate[:, loss < least]
        least = torch.minimum(loss, least)
        ends.append(end)
    gradient, iterations = max(end.gradient for end in ends), max(end.iterations for end in ends)
    loss = _loss(parameters, first, second, targets, share).sum()
    return parameters, Certificate("converged", gradient, iterations, sum(end.passes for end in ends), float(loss))


def _loss(curve: Tensor, first: Tensor, second: Tensor, targets: Tensor, share: Tensor | float) -> Tensor:
    odds = curve[0] * first + curve[1] * second + curve[2]
    return (share * (torch.nn.functional.softplus(odds) - targets * odds)).sum(dim=0)
