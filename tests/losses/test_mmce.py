"""MMCE as a loss: against the metric, its gradient through the confidence, and degenerate batches."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from trueup import metrics
from trueup.losses import MMCE, MMCEWeighted, cross_entropy, mmce, mmce_weighted
from trueup.losses._batch import laplacian_form

rng = torch.Generator().manual_seed(0)
Z = torch.randn(200, 5, generator=rng, dtype=torch.float64) * 2
Y = torch.where(torch.rand(200, generator=rng) < 0.6, Z.argmax(dim=1), torch.randint(5, (200,), generator=rng))


def penalty(function, logits, labels, **options):
    return float((function(logits, labels, strength=1.0, **options) - cross_entropy(logits, labels)).mean())


@pytest.mark.parametrize("bandwidth", [0.01, 0.4, 10.0])
def test_penalty_is_the_metric(bandwidth):
    assert penalty(mmce, Z, Y, bandwidth=bandwidth) == pytest.approx(metrics.mmce(Z, Y, bandwidth=bandwidth), rel=1e-6)


def test_a_single_row_by_hand():
    """One right row of confidence ¾: |a − c| = ¼."""
    z = torch.tensor([[3.0, 1.0]], dtype=torch.float64).log()
    assert penalty(mmce, z, torch.tensor([0])) == pytest.approx(0.25, abs=1e-8)
    assert penalty(mmce, z, torch.tensor([1])) == pytest.approx(0.75, abs=1e-8)


def test_two_rows_by_hand():
    """A right one of confidence .6, a wrong one of .8: .4² + .8² − 2·.4·.8·exp(−.2/.4); a fourth of it unweighted."""
    z = torch.tensor([[0.6, 0.4], [0.8, 0.2]], dtype=torch.float64).log()
    y = torch.tensor([0, 1])
    total = 0.4**2 + 0.8**2 - 2 * 0.4 * 0.8 * math.exp(-0.5)
    assert penalty(mmce_weighted, z, y) == pytest.approx(math.sqrt(total), rel=1e-6)
    assert penalty(mmce, z, y) == pytest.approx(math.sqrt(total / 4), rel=1e-6)


@pytest.mark.parametrize("right", [True, False])
def test_weighted_is_nothing_where_all_are_alike(right):
    y = Z.argmax(dim=1) if right else Z.argmin(dim=1)
    assert penalty(mmce_weighted, Z, y) == 0
    assert penalty(mmce, Z, y) > 0.05


def test_gradient_is_that_of_all_pairs():
    one, other = Z.clone().requires_grad_(), Z.clone().requires_grad_()
    (mmce(one, Y, strength=1.0) - cross_entropy(one, Y)).mean().backward()
    confidence = torch.softmax(other, dim=1).amax(dim=1)
    residual = (Z.argmax(dim=1) == Y).double() - confidence
    kernel = torch.exp(-(confidence[:, None] - confidence).abs() / 0.4)
    (residual @ kernel @ residual / 200**2).sqrt().backward()
    torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-10)


@pytest.mark.parametrize("kind", [MMCE, MMCEWeighted])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tied_and_perfect_batches_are_finite(kind, dtype):
    for z in (torch.zeros(64, 4), 50 * torch.eye(4).repeat(16, 1)):
        z = z.to(dtype).requires_grad_()
        for y in (torch.arange(64) % 4, torch.zeros(64, dtype=torch.int64)):
            loss = kind()(z, y)
            loss.backward()
            assert loss.isfinite()
            assert z.grad.isfinite().all()


@given(
    st.lists(st.tuples(st.floats(0, 1), st.floats(-1, 1)), min_size=1, max_size=20), st.sampled_from([0.01, 0.4, 5.0])
)
def test_the_running_sum_serves_all_pairs(points, bandwidth):
    points = sorted(points)
    x, v = (torch.tensor(side, dtype=torch.float64) for side in zip(*points, strict=True))
    expected = sum(a * b * math.exp(-abs(p - q) / bandwidth) for p, a in points for q, b in points)
    assert float(laplacian_form(x, v, bandwidth)) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_single_precision_keeps_up_with_double():
    single = penalty(mmce, Z.float(), Y, bandwidth=0.01)
    assert single == pytest.approx(penalty(mmce, Z, Y, bandwidth=0.01), rel=1e-4)


def test_a_large_batch_takes_no_square_of_memory():
    z = torch.randn(200_000, 2, generator=torch.Generator().manual_seed(0))
    y = torch.zeros(200_000, dtype=torch.int64)
    confidence, correct = reference.top_label(z[:100].double().numpy(), y[:100].numpy())
    small = math.sqrt(reference.mmce_squared(confidence, correct, 0.4))
    assert penalty(mmce, z[:100], y[:100]) == pytest.approx(small, rel=1e-3)
    assert penalty(mmce, z, y) == pytest.approx(metrics.mmce(z, y, top_label=True), rel=1e-3)
