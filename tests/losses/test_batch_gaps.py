"""Losses that look at the whole batch: AvUC, DCA and the soft-binned error."""

import math

import numpy as np
import pytest
import torch

from trueup import metrics
from trueup.losses import AvUC, SoftBinnedECE, avuc, cross_entropy, dca, entropy_threshold, soft_binned_ece
from trueup.losses._batch import soft_binned_error

rng = torch.Generator().manual_seed(0)
Z = torch.randn(400, 5, generator=rng, dtype=torch.float64) * 3
Y = torch.where(torch.rand(400, generator=rng) < 0.6, Z.argmax(dim=1), torch.randint(5, (400,), generator=rng))


def penalty(function, logits, labels, **options):
    return float((function(logits, labels, strength=1.0, **options) - cross_entropy(logits, labels)).mean())


def test_avuc_is_least_where_certainty_and_correctness_go_together():
    """Two rows right and sure, two wrong and unsure: nothing is misplaced; then the labels are exchanged."""
    z = torch.tensor([[20.0, 0.0, 0.0]] * 2 + [[0.1, 0.0, 0.0]] * 2, dtype=torch.float64)
    assert penalty(avuc, z, torch.tensor([0, 0, 1, 2])) == pytest.approx(0, abs=1e-9)
    assert penalty(avuc, z, torch.tensor([1, 2, 0, 0])) == pytest.approx(-math.log(1e-10), rel=1e-6)


@pytest.mark.parametrize("threshold", [0.0, 1.0, 5.0])
def test_avuc_is_finite_with_all_rows_in_one_place(threshold):
    for y in (Z.argmax(dim=1), Z.argmin(dim=1)):
        z = Z.clone().requires_grad_()
        loss = AvUC(threshold=threshold)(z, y)
        loss.backward()
        assert loss.isfinite()
        assert z.grad.isfinite().all()


def test_avuc_threshold_beyond_every_entropy_sees_accuracy_alone():
    right = Z.argmax(dim=1)
    assert penalty(avuc, Z, right, threshold=2.0) == pytest.approx(0, abs=1e-9)


def test_entropy_threshold_is_halfway():
    entropy = -(torch.softmax(Z, 1) * torch.log_softmax(Z, 1)).sum(1)
    right = Z.argmax(1) == Y
    expected = (float(entropy[right].mean()) + float(entropy[~right].mean())) / 2
    assert entropy_threshold(Z, Y) == pytest.approx(expected)
    assert entropy_threshold(Z.numpy(), Y.numpy()) == pytest.approx(expected)
    assert math.isnan(entropy_threshold(Z, Z.argmax(dim=1)))


def test_dca_is_the_gap_of_averages():
    confidence = torch.softmax(Z, dim=1).amax(dim=1)
    expected = abs(metrics.accuracy(Z, Y) - float(confidence.mean()))
    assert penalty(dca, Z, Y) == pytest.approx(expected)
    assert penalty(dca, Z, Y) == pytest.approx(metrics.ece(Z, Y, bins=1))


def test_dca_pushes_confidence_towards_accuracy():
    for y, sign in ((Z.argmin(dim=1), 1), (Z.argmax(dim=1), -1)):
        z = Z.clone().requires_grad_()
        (dca(z, y) - cross_entropy(z, y)).sum().backward()
        top = z.grad.gather(1, Z.argmax(dim=1, keepdim=True)).squeeze(1)
        assert (top * sign >= 0).all()
        assert (top * sign > 0).any()


@pytest.mark.parametrize(("order", "metric"), [(1.0, metrics.ece), (2.0, metrics.rmsce)])
def test_soft_bins_harden_as_the_temperature_falls(order, metric):
    hard = metric(Z, Y, bins=15)
    soft = [abs(penalty(soft_binned_ece, Z, Y, temperature=t, order=order) - hard) for t in (1e-2, 1e-5, 1e-9)]
    assert soft[2] < 1e-9
    assert soft[0] > 1e-3


def test_one_soft_bin_is_the_gap_of_averages():
    for order in (1.0, 2.0, 3.0):
        assert penalty(soft_binned_ece, Z, Y, bins=1, order=order) == pytest.approx(penalty(dca, Z, Y))


def test_soft_error_by_hand():
    """Rows of confidence ¼ and ¾, in bins around ¼ and ¾, share e⁰ : e^(−¼/τ) = 2 : 1 at τ = ¼/ln 2."""
    confidence, correct = torch.tensor([0.25, 0.75], dtype=torch.float64), torch.tensor([True, False])
    # Each bin counts 1; the first has accuracy ⅔ and confidence 5/12, the second ⅓ and 7/12: gaps of ¼.
    result = soft_binned_error(confidence, correct, 2, 0.25 / math.log(2), 1.0)
    assert float(result) == pytest.approx(0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-8, 1e-2, 10.0])
@pytest.mark.parametrize("order", [1.0, 2.0, 8.0])
def test_soft_bins_are_finite_when_empty_or_perfect(dtype, temperature, order):
    right = (1e4 * torch.eye(4), torch.arange(4))
    tied = (torch.zeros(8, 4), torch.arange(8) % 4)
    for logits, labels in (right, tied, (Z[:20], Y[:20])):
        z = logits.to(dtype, copy=True).requires_grad_()
        loss = SoftBinnedECE(temperature=temperature, order=order)(z, labels)
        loss.backward()
        assert loss.isfinite()
        assert z.grad.isfinite().all()
    assert penalty(soft_binned_ece, *right, temperature=temperature, order=2.0) == pytest.approx(0, abs=1e-6)


def test_largest_share_at_the_default():
    """Why the default differs from the ECE: a row at a bin's middle gives it less than two fifths."""
    middles = (np.arange(15) + 0.5) / 15
    share = np.exp(-((middles[7] - middles) ** 2) / 0.01)
    assert share.max() / share.sum() == pytest.approx(0.38, abs=0.005)
