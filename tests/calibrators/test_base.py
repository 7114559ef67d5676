import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optional import torch
from trueup import METHODS
from trueup._core.namespace import namespace_of
from trueup.calibrators import TopLabel
from trueup.calibrators.base import TIE_MARGIN, set_top_confidence

TORCH = namespace_of(torch.empty(0))


class Fixed(TopLabel):
    """Gives every row the same confidence."""

    sample_invariant = True
    differentiable = False

    def __init__(self, value):
        self.value = value

    def map_confidence(self, xp, confidence):
        return xp.full_like(confidence, self.value)


@given(st.integers(0, 2**32 - 1), st.floats(0, 1), st.sampled_from([1.0, 10.0, 500.0]), st.booleans())
def test_the_confidence_is_on_the_predicted_class_which_stays_on_top(seed, confidence, scale, double):
    rng = np.random.default_rng(seed)
    classes = int(rng.integers(2, 12))
    z = torch.tensor(rng.normal(size=(6, classes)) * scale, dtype=torch.float64 if double else torch.float32)
    log_p = set_top_confidence(TORCH, z, torch.full((6,), confidence, dtype=z.dtype))
    p = torch.exp(log_p.double())
    best = z.argmax(dim=1)
    assert torch.equal(log_p.argmax(dim=1), best)
    assert torch.isfinite(log_p).all()
    assert p.sum(dim=1).numpy() == pytest.approx(np.ones(6), abs=1e-5)
    expected = max(confidence, (1 + TIE_MARGIN) / classes)
    assert p.gather(1, best[:, None])[:, 0].numpy() == pytest.approx(np.full(6, expected), abs=1e-5)


def test_the_rest_is_shared_in_proportion_under_the_cap():
    z = torch.log(torch.tensor([[0.5, 0.3, 0.15, 0.05]], dtype=torch.float64))
    assert torch.exp(set_top_confidence(TORCH, z, torch.tensor([0.8]))).numpy() == pytest.approx(
        np.array([[0.8, 0.12, 0.06, 0.02]])
    )
    # At .4 the second would get .36: all fit. At .3 it would get .42: it is capped at .3, and .4 is shared 3 to 1.
    assert torch.exp(set_top_confidence(TORCH, z, torch.tensor([0.4]))).numpy() == pytest.approx(
        np.array([[0.4, 0.36, 0.18, 0.06]])
    )
    capped = torch.exp(set_top_confidence(TORCH, z, torch.tensor([0.3]))).numpy()
    assert capped == pytest.approx(np.array([[0.3, 0.3, 0.3, 0.1]]), abs=1e-4)


def test_vanished_classes_can_take_what_others_may_not():
    z = torch.tensor([[0.0, -1.0, -5000.0, -5000.0]], dtype=torch.float32)
    p = torch.exp(set_top_confidence(TORCH, z, torch.tensor([0.3])))
    assert p.sum().item() == pytest.approx(1, abs=1e-5)
    assert p[0, 0].item() == pytest.approx(0.3, abs=1e-5)


def test_the_raw_confidence_stays_available_and_rows_raised_are_counted():
    low = Fixed(0.1)
    z = np.random.default_rng(0).normal(size=(7, 4))
    assert low.confidence(z) == pytest.approx(np.full(7, 0.1))
    assert low.count_clipped(z) == 7
    assert Fixed(0.5).count_clipped(z) == 0
    assert np.exp(low(z)).max(axis=1) == pytest.approx(np.full(7, (1 + TIE_MARGIN) / 4))


def test_a_calibrator_shows_its_parameters():
    assert repr(Fixed(0.25)) == "Fixed(value=0.25)"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    "method", ["temperature", "vector", "matrix", "dirichlet_odir", "sms", "platt", "isotonic_ovr"]
)
def test_the_largest_numbers_of_a_type_saturate(method, dtype):
    rng = np.random.default_rng(0)
    z = rng.normal(size=(200, 3))
    calibrator = METHODS[method](z / 10, (z + rng.gumbel(size=z.shape)).argmax(axis=1))  # makes small logits large
    largest = torch.finfo(dtype).max
    # (The least number of a type beside small ones is padding, an absent option.)
    rows = torch.tensor([[1, 0, 0], [-0.9, 0, 0], [1, 1, 1], [1, -1, 0], [1, 0.5, 0]], dtype=dtype) * largest
    mapped = calibrator(rows)
    assert mapped.dtype == dtype
    assert torch.isfinite(mapped).all()
    assert torch.equal(calibrator(torch.cat([torch.ones(1, 3, dtype=dtype), rows]))[1:], mapped)
    if calibrator.keeps_argmax:
        assert torch.equal(mapped.argmax(dim=1), rows.argmax(dim=1))


def test_a_map_can_be_vectorised():
    calibrator = METHODS["temperature"].__self__(0.5)
    z = torch.randn(4, 5, 3)
    assert torch.equal(torch.vmap(calibrator)(z), torch.stack([calibrator(part) for part in z]))
