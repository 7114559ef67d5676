"""What a language model prefers before it has read the question: a bias for each answer, found without labels."""

from __future__ import annotations

from typing import Any

import numpy as np

from trueup._core.arrays import as_logits, count_options, find_absent, match_kind, to_array
from trueup._core.errors import InputError
from trueup._core.namespace import NUMPY
from trueup._core.types import ArrayLike
from trueup.calibrators.linear import Vector

_LEAST = 1e-12
"""The least prior probability of an answer: what is never given would else be given always."""


def contextual_bias(logits: ArrayLike) -> Vector:
    """Contextual calibration: divide by the mean probabilities p̄ of prompts without content, q ∝ p/p̄.

    `logits` (m, classes) are the model's answers where the question is empty, "N/A" or such, so that it tells what the
    prompt itself makes likely. An unlabelled batch of real questions serves too if its answers are about equally
    frequent (batch calibration). What comes back is a calibrator that adds −ln p̄ to the logits, centred. An answer that
    a prompt does not have is left out of its mean; each is taken beside what would be likely by chance.
    Zhao et al., "Calibrate before use" (2021); Zhou et al., "Batch calibration" (2024).

    >>> empty = np.log([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1]])
    >>> unbiased = contextual_bias(empty)
    >>> NUMPY.softmax(unbiased(np.log([[0.6, 0.3, 0.1]]))).round(3)
    array([[0.333, 0.333, 0.333]])
    """
    z = as_logits(logits).astype(np.float64)
    if not len(z):
        raise InputError("logits", "have rows", "none")
    # Of K options each has 1/K by chance: times K, rows of different numbers of options can be averaged.
    lift = NUMPY.softmax(z) * count_options(z)
    absent = find_absent(z)
    rows = np.full(z.shape[1], len(z)) if absent is None else (~absent).sum(axis=0)
    return _divide_by(np.where(rows > 0, lift.sum(axis=0) / rows.clip(1), 1.0))


def position_bias(logits: ArrayLike, orders: Any = None) -> Vector:
    """Position bias by permutation: divide by what the model gives to each place whatever stands there.

    `logits` (questions, orders, options) are answers to the same questions with their options in several orders;
    `orders` (orders, options), or (questions, orders, options), has the number of the option that stands in each place.
    Without it they are cyclic shifts: in order r, place i has option (i + r) mod K. Every option must stand in every
    place equally often. Then the content cancels in the mean of the log-probabilities, and the prior of the places in a
    question is softmax(mean_r ln p_r); b = −ln of its mean over the questions. The calibrator serves later questions in
    one order each.
    Zheng et al., "Large language models are not robust multiple choice selectors" (2024).

    >>> content, place = np.array([2.0, 0.0, 1.0]), np.array([0.5, 0.0, -0.5])
    >>> shifts = np.array([[[content[(i + r) % 3] + place[i] for i in range(3)] for r in range(3)]])
    >>> position_bias(shifts).bias.round(4)
    array([-0.5,  0. ,  0.5])
    """
    z, _ = _check_orders(logits, orders)
    return _divide_by(NUMPY.softmax(NUMPY.log_softmax(z, axis=2).mean(axis=1)).mean(axis=0))


def average_orders(logits: ArrayLike, orders: Any = None) -> Any:
    """Log-probabilities of the options themselves, (questions, options): means over the orders that they stood in.

    Logits and orders are those of `position_bias`. It costs as many answers as there are orders, and needs no fit.

    >>> content, place = np.array([2.0, 0.0, 1.0]), np.array([0.5, 0.0, -0.5])
    >>> shifts = np.array([[[content[(i + r) % 3] + place[i] for i in range(3)] for r in range(3)]])
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
    bias = -np.log(prior.clip(_LEAST))
    return Vector(np.ones_like(bias), bias - bias.mean())


def _check_orders(logits: ArrayLike, orders: Any) -> tuple[np.ndarray, np.ndarray]:
    """Logits in double, and the option in each place, both (questions, orders, options)."""
    whole = to_array(logits, "logits")
    if whole.ndim != 3:
        raise InputError("logits", "have shape (questions, orders, options)", str(tuple(whole.shape)))
    questions, number, options = whole.shape
    z = as_logits(whole.reshape(questions * number, options), doubt=False).astype(np.float64)
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
        order = np.broadcast_to(order, whole.shape)
    except ValueError:
        wanted = f"have shape {(number, options)} or {tuple(whole.shape)}"
        raise InputError("orders", wanted, str(order.shape)) from None
    stands = np.stack([(order == option).sum(axis=1) for option in range(options)], axis=2)
    if order.dtype.kind not in "iu" or not (stands * options == number).all():
        raise InputError("orders", "put every option in every place equally often", "others", "cyclic shifts do")
    return z.reshape(questions, number, options), np.array(order, dtype=np.int64)
