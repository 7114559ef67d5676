"""Where δ may start, against enumeration, by hand, and on networks whose entropy gradient is known."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

from trueup.clamping.calibration_set import CalibrationSet
from trueup.clamping.network import Network, check_box
from trueup.clamping.theory import data_driven, entropy_corner, entropy_slope, random, theorem, zero
from trueup_studies.networks import MLP


def network(model, x, box=None, batch=7):
    y = torch.zeros(len(x), dtype=torch.int64)
    loader = list(zip(torch.split(x, batch), torch.split(y, batch), strict=True))
    return Network(model, CalibrationSet.read(loader, device="cpu"), box=box)


def drawn(n=20, m=3, seed=0):
    return torch.rand(n, m, generator=torch.Generator().manual_seed(seed)) * 0.6 + 0.2


def test_zero_and_random_have_the_inputs_shape_and_leave_the_global_generator_alone():
    net = network(nn.Linear(3, 2), drawn())
    state = torch.get_rng_state()
    assert torch.equal(zero(net), torch.zeros(3))
    one, again, other = random(net, seed=1), random(net, seed=1), random(net, seed=2)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    torch.testing.assert_close(random(net, seed=1, scale=0.01), 10 * one)
    assert one.dtype == torch.float32
    with pytest.raises(ValueError, match="scale must not be negative, got -1"):
        random(net, seed=0, scale=-1)


def test_the_random_start_has_its_scale():
    net = network(nn.Flatten(), torch.zeros(2, 100, 100))
    assert float(random(net, seed=0).std()) == pytest.approx(1e-3, rel=0.02)


def test_the_corner_is_the_best_feasible_shift():
    # A linear function over a box is greatest in one of its corners: try them all.
    g = torch.tensor([0.5, -2.0, 0.0, 1.0], dtype=torch.float64)
    smallest, largest = torch.full((4,), 0.25), torch.tensor([0.5, 0.75, 0.5, 1.0])
    fitted = entropy_corner(g, smallest, largest, (torch.zeros(4), torch.ones(4)))
    feasible = [
        torch.tensor(corner, dtype=torch.float64)
        for corner in itertools.product(*zip((-smallest).tolist(), (1 - largest).tolist(), strict=True))
    ]
    assert float(fitted.double() @ g) == max(float(corner @ g) for corner in feasible)
    assert fitted.tolist() == [0.5, -0.25, 0.0, 0.0]


def test_the_slope_of_entropy_is_autograds():
    z = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()
    p = torch.softmax(z / 1.7, dim=1)
    (-(p * p.log()).sum()).backward()
    torch.testing.assert_close(entropy_slope(z.detach(), 1.7), z.grad)


def test_the_theorem_follows_the_gradient_of_total_entropy():
    x, model = drawn(), MLP(4, inputs=3, hidden=(8,), seed=1).eval()
    fitted = theorem(network(model, x, box=(0.0, 1.0)), temperature=1.5)
    shifted = x.clone().requires_grad_()
    p = torch.softmax(model(shifted) / 1.5, dim=1)
    (-(p * p.log()).sum()).backward()
    g = shifted.grad.sum(dim=0)
    expected = torch.where(g < 0, -x.amin(dim=0), 1 - x.amax(dim=0))
    torch.testing.assert_close(fitted.delta, expected)
    assert fitted.gain == pytest.approx(float(expected @ g) / len(x), rel=1e-4)


def test_it_costs_one_forward_and_backward():
    net = network(MLP(4, inputs=3, hidden=(8,)).eval(), drawn(), box=(0.0, 1.0))
    theorem(net)
    assert net.cost()[:2] == (1.0, 1.0)


def test_the_box_may_differ_between_coordinates():
    x, model = drawn(), MLP(4, inputs=3, hidden=(8,), seed=1).eval()
    low, high = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([4.0, 5.0, 6.0])
    delta = theorem(network(model, x, box=(low, high))).delta
    down, up = low - x.amin(dim=0), high - x.amax(dim=0)
    assert all(torch.isclose(d, a) or torch.isclose(d, b) for d, a, b in zip(delta, down, up, strict=True))


def test_inputs_that_use_their_whole_range_leave_no_room_and_a_quantile_makes_some():
    x = drawn(100)
    x[0], x[1] = 0.0, 1.0
    net = network(MLP(4, inputs=3, hidden=(8,), seed=1).eval(), x, box=(0.0, 1.0))
    with pytest.warns(UserWarning, match="gives δ = 0"):
        assert not data_driven(net).any()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Theorem 3.2 predicts")
        delta = data_driven(net, quantile=0.02)
        half = data_driven(net, quantile=0.02, scale=0.5)
    low, high = np.quantile(x.double().numpy(), [0.02, 0.98], axis=0)
    sizes = delta.double().abs().numpy()
    assert all(np.isclose(s, a) or np.isclose(s, b) for s, a, b in zip(sizes, low, 1 - high, strict=True))
    torch.testing.assert_close(half, delta / 2)


def test_an_entropy_that_falls_against_the_prediction_gives_a_warning():
    # Between two classes at x = 0.5 of a narrow bump: to first order entropy rises to the right, past it it falls.
    class Bump(nn.Module):
        def forward(self, x):
            return torch.cat([50 * (x - 0.5) ** 2, torch.zeros_like(x)], dim=1)

    net = network(Bump(), torch.full((4, 1), 0.49), box=(0.0, 1.0))
    with pytest.warns(UserWarning, match="predicts a mean entropy higher by .* fell by"):
        data_driven(net)


def test_images_keep_their_shape():
    x = torch.rand(6, 2, 3, 3, generator=torch.Generator().manual_seed(0)) * 0.5 + 0.25
    net = network(MLP(4, inputs=18, hidden=(8,)).eval(), x, box=(0.0, 1.0))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Theorem 3.2 predicts")
        assert data_driven(net).shape == (2, 3, 3)
        assert data_driven(net, quantile=0.1).shape == (2, 3, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"quantile": 0.5}, r"quantile must lie in \[0, 0.5\), got 0.5"),
        ({"scale": 0.0}, r"scale must lie in \(0, 1\], got 0.0"),
        ({"temperature": -1.0}, "temperature must be positive, got -1.0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        theorem(network(nn.Linear(3, 2), drawn(), box=(0.0, 1.0)), **options)


def test_the_box_must_be_there_and_hold_the_inputs():
    with pytest.raises(ValueError, match="box must be given for the data-driven start"):
        theorem(network(nn.Linear(3, 2), drawn()))
    with pytest.raises(ValueError, match=r"box must hold every input, got inputs in 0.2.* for a box of 0..0.5"):
        check_box(network(nn.Linear(3, 2), drawn(), box=(0.0, 0.5)))
