"""The choice of a linear map's penalty by cross-validated likelihood."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from torch import Tensor

from trueup.calibrators.likelihood import Penalty, Problem
from trueup.calibrators.temperature_search import near_inverse_temperature
from trueup.core.native import one_thread
from trueup.core.optimize import Certificate
from trueup.core.splits import k_fold

PENALTIES = tuple(10.0**power for power in range(-2, 5))
"""Seven coefficients from 1e-2 to 1e4, as the literature searches."""


def regularised(
    z: Tensor,
    y: Tensor,
    *,
    on: Literal["logits", "log_probs"] = "logits",
    l2: bool = False,
    penalty: float | None = None,
    penalties: Sequence[float] = PENALTIES,
    bias_penalties: Sequence[float] | None = None,
    normalise: bool = True,
    folds: int = 5,
) -> tuple[Tensor, Tensor, Certificate]:
    """Fit with the penalty given, or that of least cross-validated loss; `bias_penalties` makes it a full grid."""
    classes = z.shape[1]
    start = near_inverse_temperature(z, y)

    def made(strength: float, mu: float | None) -> Penalty:
        if l2:
            return Penalty.l2(strength, classes, normalise=normalise)
        return Penalty.odir(strength, classes, bias=mu, normalise=normalise)

    whole = Problem(z, y, made(penalty if penalty is not None else 1.0, None), on=on)
    if penalty is not None:
        return whole.solve(start)
    offsets: Sequence[float | None] = bias_penalties or [None]
    paths = [[made(strength, mu) for strength in sorted(penalties, reverse=True)] for mu in offsets]
    best, x = min((best_of(path, whole, start, folds) for path in paths), key=lambda found: found[0])[1:]
    return replace(whole, penalty=best).solve(x)


def best_of(
    path: Sequence[Penalty], whole: Problem, start: float, folds: int
) -> tuple[float, Penalty, float | np.ndarray]:
    """The penalty of least cross-validated loss, that loss, and about where its minimum is.

    Each penalty starts where the one before ended. The path is left once two penalties in a row did worse than the best
    in every fold: with less and less of a penalty the fit to few rows only gets wilder.
    """
    # Folds by content, so that the order of the rows does not matter.
    parts = [(whole.rows(train), whole.rows(test)) for train, test in k_fold(whole.z, whole.y, folds)]
    n = len(whole.z)
    share = np.array([len(test.z) for _, test in parts]) / n
    found = [whole.point(start)] * len(parts)
    best: tuple[float, Penalty, float | np.ndarray] = (np.inf, path[0], start)
    least, worse = np.full(len(parts), np.inf), 0
    # What is made of the rows is the same for every penalty.
    learnt, asked = ([half.likelihood(quick=True) for half in halves] for halves in zip(*parts, strict=True))
    with one_thread(whole.z.numel()):
        blocks = whole.blocks(start)
    for penalty in path:
        found = [
            replace(train, penalty=penalty).solve_roughly(x, blocks, likelihood)
            for (train, _), x, likelihood in zip(parts, found, learnt, strict=True)
        ]
        with one_thread(whole.z.numel()):
            sums = [likelihood(x)[0] for likelihood, x in zip(asked, found, strict=True)]
        losses = np.array(sums) / (share * n)
        if losses @ share < best[0]:
            best, least = (float(losses @ share), penalty, sum(found) / len(found)), losses
        worse = worse + 1 if (losses > least).all() else 0
        if worse == 2:
            break
    return best
