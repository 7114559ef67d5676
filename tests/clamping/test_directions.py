"""The directions in which δ may go."""

import numpy as np
import pytest
import torch
from scipy.fft import idctn
from torch import nn

from trueup.clamping.calibration_set import CalibrationSet
from trueup.clamping.input_parameters import cosines, directions, principal
from trueup.clamping.network import Network
from trueup.clamping.theory import entropy_gradient
from trueup_studies.networks import MLP


def network_of(x, model):
    return Network(model, CalibrationSet.read([(x, torch.zeros(len(x), dtype=torch.int64))], device="cpu"))


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_cosines_are_the_discrete_cosine_transform():
    fitted = cosines((2, 6, 5), 2)
    for number, (a, b, channel) in enumerate((a, b, c) for a in range(2) for b in range(2) for c in range(2)):
        one = np.zeros((6, 5))
        one[a, b] = 1.0
        np.testing.assert_allclose(fitted[number, channel].numpy(), idctn(one, norm="ortho"), atol=1e-12)
        assert not fitted[number, 1 - channel].any()


def test_the_entropy_gradient_is_autograds():
    x = drawn(7, 3)
    model = MLP(4, inputs=3, hidden=(9,)).double()
    network = network_of(x, model)
    local = x.clone().requires_grad_()
    p = torch.softmax(model(local) / 2.0, dim=1)
    (expected,) = torch.autograd.grad(-(p * p.log()).sum(), local)
    torch.testing.assert_close(entropy_gradient(network, temperature=2.0), expected.sum(dim=0))
    assert (network.cost().forwards, network.cost().backwards) == (1.0, 1.0)
    torch.testing.assert_close(network.plain_logits(), model(x).detach())


def test_principal_directions_are_those_of_the_covariance():
    sizes = torch.tensor([9.0, 7.0, 5.0, 4.0] + [1.0] * 26, dtype=torch.float64)
    x = drawn(200, 30) * sizes + 1.0
    fitted = principal(network_of(x, nn.Linear(30, 2).double()), 4)
    torch.testing.assert_close(fitted[0], x.mean(dim=0))
    _, _, expected = torch.linalg.svd(x - x.mean(dim=0))
    # Both span the same space: all angles between them are zero.
    torch.testing.assert_close(
        torch.linalg.svdvals(fitted[1:] @ expected[:4].T), torch.ones(4, dtype=torch.float64), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize(
    ("shape", "frequencies", "number"),
    [
        ((3, 8, 8), 2, 13),
        ((3, 8, 8), 1, 4),
        ((1, 8, 8), 2, 5),
        ((1, 8, 8), 4, 17),
        ((8, 4, 4), 2, 9),
        ((20, 4, 4), 2, 10),
        ((5,), 2, 5),
        ((40,), 2, 10),
        ((6, 10), 2, 10),
    ],
)
def test_every_shape_has_an_orthonormal_basis(shape, frequencies, number):
    x = drawn(50, *shape)
    size = int(np.prod(shape))
    network = network_of(x, nn.Sequential(nn.Flatten(), nn.Linear(size, 3)).double())
    fitted = directions(network, drawn(*shape, seed=1), frequencies=frequencies)
    assert fitted.shape == (number, *shape)
    flat = fitted.reshape(number, -1)
    torch.testing.assert_close(flat @ flat.T, torch.eye(number, dtype=torch.float64), atol=1e-12, rtol=0)


def test_a_gradient_of_zero_adds_nothing():
    network = network_of(drawn(9, 3, 8, 8), nn.Sequential(nn.Flatten(), nn.Linear(192, 3)).double())
    assert len(directions(network, torch.zeros(3, 8, 8))) == 12
