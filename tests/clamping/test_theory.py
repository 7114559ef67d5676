"""Lemma 3.1 against loops, by hand, and at fitted temperatures."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from strategies import calibrated, pairs
from trueup.calibrators import Temperature
from trueup.clamping.theory import lemma_residual
from trueup.losses._focal import focal_weight


@given(pairs(), st.sampled_from([0.3, 1.0, 2.5]), st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_the_residual_equals_the_loop(pair, temperature, gamma):
    logits, labels = pair
    fitted = lemma_residual(logits, labels, temperature=temperature, gamma=gamma)
    total, relative = reference.lemma_residual(logits, labels, temperature, gamma)
    scale = np.abs(logits).sum() + 1
    assert fitted.total == pytest.approx(total, abs=1e-9 * scale)
    if relative is not None:
        assert fitted.relative == pytest.approx(relative, rel=1e-6, abs=1e-7)


def test_two_rows_by_hand():
    # Both rows have q = (3/4, 1/4); z_y − zᵀq is ln 3 / 4 where the label is 0 and −3 ln 3 / 4 where it is 1.
    logits = [[math.log(3), 0.0], [math.log(3), 0.0]]
    fitted = lemma_residual(logits, [0, 1])
    assert fitted.total == pytest.approx(-math.log(3) / 2)
    deviation = math.log(3) * math.sqrt(3) / 4
    assert fitted.relative == pytest.approx(math.log(3) / 2 / (2 * deviation))


def test_it_vanishes_at_the_likelihoods_temperature_and_only_there():
    logits, labels = calibrated(2000, 5, temperature=1.8)
    best = float(Temperature.fit(logits, labels).temperature)
    assert lemma_residual(logits, labels, temperature=best).relative < 1e-7
    assert lemma_residual(logits, labels, temperature=1.1 * best).relative > 1e-2


def test_the_focal_temperature_satisfies_the_weighted_identity_and_not_the_plain_one():
    logits, labels = calibrated(2000, 5, temperature=1.8)
    best = float(Temperature.fit_focal(logits, labels, gamma=1.0).temperature)
    assert lemma_residual(logits, labels, temperature=best, gamma=1.0).relative < 1e-5
    assert lemma_residual(logits, labels, temperature=best).relative > 1e-2


@pytest.mark.parametrize("gamma", [0.0, 0.05, 0.5, 1.0, 3.0])
def test_the_focal_weight_is_that_of_autograd(gamma):
    logits = torch.tensor([[0.3, -1.0, 2.0], [8.0, 0.0, 1.0]], dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([1, 0])
    log_p = torch.log_softmax(logits, dim=1).gather(1, labels[:, None])[:, 0]
    (-((1 - log_p.exp()) ** gamma) * log_p).sum().backward()
    off = torch.softmax(logits.detach(), dim=1) - torch.nn.functional.one_hot(labels, 3)
    torch.testing.assert_close(logits.grad, focal_weight(log_p.detach(), gamma)[0][:, None] * off)


def test_a_certain_row_has_no_focal_weight():
    certain = torch.zeros(1, dtype=torch.float64)
    assert float(focal_weight(certain, 0.5)[0]) == 0
    assert float(focal_weight(certain, 0.0)[0]) == 1
    assert lemma_residual([[1e4, -1e4]], [0], gamma=0.5) == (0.0, 0.0)


def test_float32_half_and_numpy_agree():
    logits, labels = calibrated(200, 4)
    whole = lemma_residual(logits.astype(np.float32), labels)
    assert lemma_residual(torch.from_numpy(logits).float(), torch.from_numpy(labels)) == whole
    half = torch.from_numpy(logits).half()
    assert lemma_residual(half, labels) == lemma_residual(half.float(), labels)


def test_no_rows_give_nan_and_bad_options_are_named():
    assert all(math.isnan(x) for x in lemma_residual(np.zeros((0, 3)), np.zeros(0, np.int64)))
    with pytest.raises(ValueError, match="temperature must be positive, got 0"):
        lemma_residual([[0.0, 1.0]], [0], temperature=0)
    with pytest.raises(ValueError, match="gamma must not be negative, got -1"):
        lemma_residual([[0.0, 1.0]], [0], gamma=-1)
