"""Bias of a language model towards some answers before it reads the question, estimated without labels."""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup._core.arrays import as_logits, count_options, find_absent, match_kind, to_array
from trueup._core.errors import InputError
from trueup._core.namespace import NUMPY
from trueup._core.types import ArrayLike, ArrayT
from trueup.calibrators.linear import Vector

_MIN_PRIOR = 1e-12
"""Smallest prior probability of an answer; otherwise an answer that never occurs would always be given."""


def contextual_bias(logits: ArrayLike) -> Vector:
    """Estimate contextual calibration: divide by the mean probabilities p̄ of content-free prompts, q ∝ p/p̄.

    An unlabelled batch of real questions also works if its answers are about equally frequent (batch calibration). Each
    answer's probability is averaged relative to 1/K over the prompts that offer it.

    Parameters
    ----------
    logits
        Answers of the model to m prompts whose question is empty or "N/A", shape (m, classes).

    Returns
    -------
    Vector
        A calibrator that adds −ln p̄, centred, to the logits.

    Examples
    --------
    >>> empty = np.log([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1]])
    >>> unbiased = contextual_bias(empty)
    >>> NUMPY.softmax(unbiased(np.log([[0.6, 0.3, 0.1]]))).round(3)
    array([[0.333, 0.333, 0.333]])

    References
    ----------
    Zhao et al., "Calibrate before use" (2021), arXiv:2102.09690. Zhou et al., "Batch calibration" (2024),
    arXiv:2309.17249.
    """
    z = as_logits(logits).astype(np.float64)
    if not len(z):
        raise InputError("logits", "have rows", "none")
    # Multiplied by K, rows with different numbers K of options can be averaged.
    lift = NUMPY.softmax(z) * count_options(z)
    absent = find_absent(z)
    rows = np.full(z.shape[1], len(z)) if absent is None else (~absent).sum(axis=0)
    return _divide_by(np.where(rows > 0, lift.sum(axis=0) / rows.clip(1), 1.0))


def position_bias(logits: ArrayLike, orders: ArrayLike | None = None) -> Vector:
    """Estimate position bias by permutation: divide by the model's mean probability of each position.

    Every option must appear in every position equally often. Then the content cancels in the mean of the
    log-probabilities. The prior of the positions in a question is softmax(mean_r ln p_r), and b = −ln of its mean over
    the questions. The calibrator applies to later questions asked in a single order.

    Parameters
    ----------
    logits
        Answers to the same questions with their options in several orders, shape (questions, orders, options).
    orders
        Number of the option in each position, shape (orders, options) or (questions, orders, options). By default
        cyclic shifts: in order r, position i has option (i + r) mod K.

    Returns
    -------
    Vector
        A calibrator that adds b to the logits.

    Examples
    --------
    >>> content, position = np.array([2.0, 0.0, 1.0]), np.array([0.5, 0.0, -0.5])
    >>> shifts = np.array([[[content[(i + r) % 3] + position[i] for i in range(3)] for r in range(3)]])
    >>> position_bias(shifts).bias.round(4)
    array([-0.5,  0. ,  0.5])

    References
    ----------
    Zheng et al., "Large language models are not robust multiple choice selectors" (2024), arXiv:2309.03882.
    """
    z, _ = _check_orders(logits, orders)
    return _divide_by(NUMPY.softmax(NUMPY.log_softmax(z, axis=2).mean(axis=1)).mean(axis=0))


def average_orders(logits: ArrayT, orders: ArrayLike | None = None) -> ArrayT:
    """Average the log-probabilities of each option over the orders in which it was shown.

    It needs one answer per order, and no fit.

    Parameters
    ----------
    logits
        Answers to the same questions with their options in several orders, shape (questions, orders, options).
    orders
        Number of the option in each position, as in `position_bias`.

    Returns
    -------
    array
        Log-probabilities of the options, shape (questions, options).

    Examples
    --------
    >>> content, position = np.array([2.0, 0.0, 1.0]), np.array([0.5, 0.0, -0.5])
    >>> shifts = np.array([[[content[(i + r) % 3] + position[i] for i in range(3)] for r in range(3)]])
    >>> average_orders(shifts).argmax(axis=1), (average_orders(shifts)[0] - average_orders(shifts)[0, 1]).round(4)
    (array([0]), array([2., 0., 1.]))
    """
    z, order = _check_orders(logits, orders)
    by_option = np.zeros_like(z)
    np.put_along_axis(by_option, order, NUMPY.log_softmax(z, axis=2), axis=2)
    out = NUMPY.log_softmax(by_option.mean(axis=1))
    kind = to_array(logits, "logits").dtype
    return match_kind(out if kind == np.float64 else out.astype(np.float32), logits)


def _divide_by(prior: np.ndarray) -> Vector:
    bias = -np.log(prior.clip(_MIN_PRIOR))
    return Vector(np.ones_like(bias), bias - bias.mean())


def _check_orders(logits: Any, orders: ArrayLike | None) -> tuple[np.ndarray, np.ndarray]:
    """Return logits in float64 and the option in each position, both (questions, orders, options)."""
    stacked = to_array(logits, "logits")
    if stacked.ndim != 3:
        raise InputError("logits", "have shape (questions, orders, options)", str(tuple(stacked.shape)))
    questions, number, options = stacked.shape
    z = as_logits(stacked.reshape(questions * number, options)).astype(np.float64)
    if not len(z):
        raise InputError("logits", "have rows", "none")
    if find_absent(z) is not None:
        raise InputError("logits", "have the same options in all questions", "-inf, an absent option")
    if orders is None:
        if number != options:
            raise InputError("logits", "have as many orders as options without orders=", f"{number} and {options}")
        order = (np.arange(options) + np.arange(number)[:, None]) % options
    else:
        order = np.asarray(orders)
    try:
        order = np.broadcast_to(order, stacked.shape)
    except ValueError:
        expected = f"have shape {(number, options)} or {tuple(stacked.shape)}"
        raise InputError("orders", expected, str(order.shape)) from None
    counts = np.stack([(order == option).sum(axis=1) for option in range(options)], axis=2)
    if order.dtype.kind not in "iu" or not (counts * options == number).all():
        raise InputError("orders", "put every option in every position equally often", "others", "use cyclic shifts")
    return z.reshape(questions, number, options), np.array(order, dtype=np.int64)
