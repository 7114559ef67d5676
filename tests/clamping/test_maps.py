"""The maps of the input: what they compute, what they refuse, and that a network with one exports."""

import copy

import pytest
import torch
from torch import nn

from trueup.clamping import Affine, Shift
from trueup.clamping.maps import scale_shape
from trueup.models import Calibrated


def test_a_shift_adds_to_every_sample_and_position():
    delta = torch.tensor([1.0, -2.0])
    x = torch.arange(12.0).reshape(2, 3, 2)
    assert torch.equal(Shift(delta)(x), x + delta)
    assert torch.equal(Shift(delta)(x[:, 0]), x[:, 0] + delta)


def test_an_affine_map_scales_channels():
    delta, scale = torch.zeros(3, 2, 2), torch.tensor([1.0, 2.0, 0.5]).reshape(3, 1, 1)
    x = torch.ones(4, 3, 2, 2)
    assert Affine(delta + 1, scale)(x)[0, :, 0, 0].tolist() == [2.0, 3.0, 1.5]
    assert scale_shape((3, 8, 8)) == (3, 1, 1)
    assert scale_shape((7,)) == (7,)


@pytest.mark.parametrize("ends", [(-1.0, 1.0), (torch.full((2, 1), -1.0), torch.ones(2, 1))])
def test_a_box_holds_what_leaves_it(ends):
    x = torch.linspace(-3, 3, 12).reshape(2, 2, 3)
    fitted = Shift(torch.full((2, 3), 0.5), ends)(x)
    assert torch.equal(fitted, (x + 0.5).clamp(-1, 1))
    assert torch.equal(Affine(torch.full((2, 3), 0.5), torch.full((2, 1), 2.0), ends)(x), (2 * x + 0.5).clamp(-1, 1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_network_gets_its_own_type(dtype):
    seen = []

    class Model(nn.Module):
        def forward(self, x):
            seen.append(x.dtype)
            return x

    Calibrated(Model(), before=Shift(torch.ones(2)))(torch.zeros(3, 2, dtype=dtype))
    assert seen == [dtype]


def test_gradients_reach_the_shift_that_was_given():
    delta, scale = torch.zeros(2, requires_grad=True), torch.ones(2, requires_grad=True)
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    by_delta, by_scale = torch.autograd.grad(Affine(delta, scale)(x).sum(), [delta, scale])
    assert (by_delta.tolist(), by_scale.tolist()) == ([2.0, 2.0], [4.0, 6.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Shift([1.0]), "delta must be a tensor of floating point, got list"),
        (lambda: Shift(torch.ones(2, dtype=torch.int64)), "delta must be a tensor of floating point, got int64"),
        (lambda: Shift(torch.ones(2), (1, 0)), "box must have its lower end below its upper one"),
        (lambda: Shift(torch.ones(2), (torch.zeros(3), 1)), r"box must broadcast to delta \(2,\), got \(3,\)"),
        (lambda: Affine(torch.ones(2), torch.ones(3)), r"scale must broadcast to delta \(2,\), got \(3,\)"),
        (lambda: Affine(torch.ones(2), 2.0), "scale must be a tensor of floating point, got float"),
        (lambda: Shift(torch.ones(3, 2))(torch.ones(4, 2)), r"inputs must have shape \(n, …, 3, 2\), got \(4, 2\)"),
        (lambda: Shift(torch.ones(2))(torch.ones(2)), r"inputs must have shape \(n, …, 2\), got \(2,\)"),
    ],
)
def test_what_does_not_fit_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    "before",
    [
        Shift(torch.randn(3, generator=torch.Generator().manual_seed(0))),
        Affine(torch.ones(3), torch.full((3,), 2.0), box=(-1, torch.ones(3))),
    ],
)
def test_config_and_copies_make_the_same_map(before):
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(1))
    for other in (type(before)(**before.config()), copy.deepcopy(before)):
        assert torch.equal(other(x), before(x))
    assert "norm=" in repr(before)


def test_a_network_with_a_map_exports():
    model = Calibrated(nn.Linear(3, 2), before=Affine(torch.ones(3), torch.full((3,), 2.0), box=(0, 1))).eval()
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(1))
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))
