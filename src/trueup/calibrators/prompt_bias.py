"""What a language model prefers before it has read the question: a bias for each answer, found without labels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trueup.calibrators.linear import Vector
from trueup.core.arrays import as_logits, count_options, find_absent, match_kind, upcast_half
from trueup.core.errors import InputError

_LEAST = 1e-12
"""The least prior probability of an answer: what is never given would else be given always."""


def contextual_bias(logits: Any) -> Vector:
    """Contextual calibration: divide by the mean probabilities p̄ of prompts without content, q ∝ p/p̄.

    `logits` (m, classes) are the model's answers where the question is empty, "N/A" or such, so that it tells what the
    prompt itself makes likely. An unlabelled batch of real questions serves too if its answers are about equally
    frequent (batch calibration). What comes back is a calibrator that adds −ln p̄ to the logits, centred. An answer that
    a prompt does not have is left out of its mean; each is taken beside what would be likely by chance.
    Zhao et al., "Calibrate before use" (2021); Zhou et al., "Batch calibration" (2024).

    >>> empty = np.log([[0.7, 0.2, 0.1], [0.5, 0.4, 0.1]])
    >>> unbiased = contextual_bias(empty)
    >>> torch.softmax(unbiased(torch.tensor([[0.6, 0.3, 0.1]]).log()), dim=1).numpy().round(3)
    array([[0.333, 0.333, 0.333]], dtype=float32)
    """
    z = upcast_half(as_logits(logits)).double()
    if not len(z):
        raise InputError("logits", "have rows", "none")
    # Of K options each has 1/K by chance: times K, rows of different numbers of options can be averaged.
    lift = torch.softmax(z, dim=1) * count_options(z)
    absent = find_absent(z)
    rows = torch.full((z.shape[1],), float(len(z))) if absent is None else (~absent).sum(dim=0)
    prior = torch.where(rows > 0, lift.sum(dim=0).cpu() / rows.cpu().clamp(min=1), 1.0)
    return _divide_by(prior)


def position_bias(logits: Any, orders: Any = None) -> Vector:
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
    >>> position_bias(shifts).bias.numpy().round(4)
    array([-0.5,  0. ,  0.5])
    """
    z, _ = _check_orders(logits, orders)
    prior = torch.softmax(torch.log_softmax(z, dim=2).mean(dim=1), dim=1).mean(dim=0)
    return _divide_by(prior)


def average_orders(logits: Any, orders: Any = None) -> Any:
    """Log-probabilities of the options themselves, (questions, options): means over the orders that they stood in.

    Logits and orders are those of `position_bias`. It costs as many answers as there are orders, and needs no fit.

    >>> content, place = np.array([2.0, 0.0, 1.0]), np.array([0.5, 0.0, -0.5])
    >>> shifts = np.array([[[content[(i + r) % 3] + place[i] for i in range(3)] for r in range(3)]])
    >>> average_orders(shifts).argmax(axis=1), (average_orders(shifts)[0] - average_orders(shifts)[0, 1]).round(4)
    (array([0]), array([2., 0., 1.]))
    """
    z, order = _check_orders(logits, orders)
    by_option = torch.zeros_like(z).scatter(2, order, torch.log_softmax(z, dim=2))
    out = torch.log_softmax(by_option.mean(dim=1), dim=1)
    kind = logits.dtype if isinstance(logits, Tensor) else np.asarray(logits).dtype
    return match_kind(out if kind in (np.float64, torch.float64) else out.float(), logits)


def _divide_by(prior: Tensor) -> Vector:
    bias = -torch.log(prior.clamp(min=_LEAST))
    return Vector(torch.ones_like(bias), bias - bias.mean())


def _check_orders(logits: Any, orders: Any) -> tuple[Tensor, Tensor]:
    """Logits in double, and the option in each place, both (questions, orders, options)."""
    whole = logits if isinstance(logits, Tensor) else np.asarray(logits)
    if whole.ndim != 3:
        raise InputError("logits", "have shape (questions, orders, options)", str(tuple(whole.shape)))
    questions, number, options = whole.shape
    z = upcast_half(as_logits(whole.reshape(questions * number, options), doubt=False)).double().cpu()
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
    return z.reshape(questions, number, options), torch.from_numpy(np.array(order, dtype=np.int64))
