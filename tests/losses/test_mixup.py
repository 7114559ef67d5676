"""Mixup: the mixture, its loss, and its randomness."""

import numpy as np
import pytest
import torch
from torch import nn

from trueup.losses import MMCE, Focal, mixup

X = torch.arange(24.0).reshape(6, 2, 2)
Y = torch.tensor([0, 1, 2, 0, 1, 2])
LOGITS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_inputs_and_labels_are_mixed_alike():
    x = torch.arange(6.0)[:, None]
    mixed = mixup(x, torch.arange(6), alpha=0.4, seed=1)
    assert sorted(mixed.partners.tolist()) == list(range(6))
    torch.testing.assert_close(
        mixed.inputs[:, 0], mixed.share * mixed.labels.float() + (1 - mixed.share) * mixed.partners.float()
    )
    assert 0 < mixed.share < 1
    assert torch.equal(mixed.labels, torch.arange(6))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_loss_is_the_cross_entropy_to_the_mixed_label(reduction):
    mixed = mixup(X, Y, alpha=1.0, seed=3)
    one_hot = nn.functional.one_hot
    soft = mixed.share * one_hot(Y, 3) + (1 - mixed.share) * one_hot(mixed.partners, 3)
    expected = nn.CrossEntropyLoss(reduction=reduction)(LOGITS, soft.double())
    torch.testing.assert_close(mixed.loss(nn.CrossEntropyLoss(reduction=reduction), LOGITS), expected)


@pytest.mark.parametrize("loss", [Focal(), MMCE()])
def test_loss_takes_any_loss(loss):
    mixed = mixup(X, Y, alpha=1.0, seed=3)
    expected = mixed.share * loss(LOGITS, Y) + (1 - mixed.share) * loss(LOGITS, mixed.partners)
    torch.testing.assert_close(mixed.loss(loss, LOGITS), expected)


def test_zero_is_off():
    mixed = mixup(X, Y, alpha=0.0, seed=0)
    assert mixed.inputs is X
    assert mixed.share == 1
    assert mixed.loss(Focal(), LOGITS) == Focal()(LOGITS, Y)


def test_randomness_is_the_seed_alone():
    state = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first, again, other = (mixup(X, Y, seed=(0, 1, step)) for step in (5, 5, 6))
    assert torch.equal(first.inputs, again.inputs)
    assert first.share != other.share
    rng = np.random.default_rng(0)
    one, two = mixup(X, Y, seed=rng), mixup(X, Y, seed=rng)
    assert one.share != two.share
    assert torch.equal(torch.get_rng_state(), state[0])
    assert (np.random.get_state()[1] == state[1]).all()  # noqa: NPY002


def test_share_is_beta():
    rng = np.random.default_rng(0)
    shares = np.array([mixup(X, Y, alpha=0.4, seed=rng).share for _ in range(4000)])
    assert shares.mean() == pytest.approx(0.5, abs=0.03)
    assert shares.var() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), abs=0.01)


def test_labels_of_pixels_and_half_precision():
    labels = torch.arange(24).reshape(6, 2, 2) % 3
    mixed = mixup(X.bfloat16(), labels, seed=0)
    assert mixed.inputs.dtype == torch.bfloat16
    assert mixed.partners.shape == labels.shape


@pytest.mark.parametrize(
    ("inputs", "labels", "alpha", "message"),
    [
        (X.long(), Y, 0.2, "inputs must be floating point, got int64"),
        (X, Y[:3], 0.2, r"labels must be as many as the 6 inputs, got shape \(3,\)"),
        (X, Y, -1.0, "alpha must be a number of at least 0, got -1.0"),
        (X, Y, float("nan"), "alpha must be a number of at least 0, got nan"),
    ],
)
def test_bad_inputs_are_named(inputs, labels, alpha, message):
    with pytest.raises(ValueError, match=message):
        mixup(inputs, labels, alpha=alpha, seed=0)
