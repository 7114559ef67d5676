"""Passes over a frozen network: logits, gradients pulled back, and what they cost."""

import pytest
import torch
from torch import nn

from trueup.clamping import Affine, Shift
from trueup.clamping.calibration_set import CalibrationSet
from trueup.clamping.network import Network
from trueup_studies.networks import MLP


def images(n=9):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 1, 8, 8, generator=generator).double(), torch.randint(0, 3, (n,), generator=generator)


def network_of(model, *batches, **options):
    return Network(model, CalibrationSet.read(list(batches), device="cpu"), **options)


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 3)
        for number, p in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(number)
            p.data = torch.randn(p.shape, generator=generator).double()

    def forward(self, tokens, mask):
        return {"logits": self.head((torch.tanh(self.embedding(tokens)) * mask[..., None]).sum(dim=1))}


def test_logits_are_the_models_in_order():
    x, y = images()
    model = MLP(3, inputs=64, hidden=(8,)).double().eval()
    network = network_of(model, (x[:4], y[:4]), (x[4:], y[4:]))
    delta = torch.full((1, 8, 8), 0.3, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(network.logits(), model(x))
        torch.testing.assert_close(network.logits(Shift(delta)), model(x + delta))
        part = network.inputs.subset(torch.tensor([1, 5, 6]))
        torch.testing.assert_close(network.logits(inputs=part), model(x[[1, 5, 6]]))
    assert network.cost().forwards == pytest.approx(2 + 3 / 9)
    assert network.plain_logits() is network.plain_logits()
    assert network.cost().forwards == pytest.approx(3 + 3 / 9)
    assert network.cost().backwards == 0
    assert network.shape == (1, 8, 8)


def test_gradients_are_autograds_of_the_whole():
    x, y = images()
    model = MLP(3, inputs=64, hidden=(8,)).double().eval()
    network = network_of(model, (x[:4], y[:4]), (x[4:], y[4:]))
    delta = torch.full((1, 8, 8), 0.1, dtype=torch.float64, requires_grad=True)
    scale = torch.full((1, 1, 1), 1.5, dtype=torch.float64, requires_grad=True)

    def slope(z, labels):
        return torch.softmax(z, dim=1) - nn.functional.one_hot(labels, 3)

    z, fitted = network.forward_backward(network.mapping(delta, scale), [delta, scale], slope)
    whole = nn.functional.cross_entropy(model(x * scale + delta), y, reduction="sum")
    for mine, autograds in zip(fitted, torch.autograd.grad(whole, [delta, scale]), strict=True):
        torch.testing.assert_close(mine, autograds)
    torch.testing.assert_close(z, model(x * scale + delta).detach())
    assert (network.cost().forwards, network.cost().backwards) == (1.0, 1.0)
    assert 2.0 <= network.cost().equivalents <= 3.0

    local = x.clone().requires_grad_()
    loss = nn.functional.cross_entropy(model(local), y, reduction="sum")
    torch.testing.assert_close(network.input_gradient(slope), torch.autograd.grad(loss, local)[0].sum(dim=0))
    torch.testing.assert_close(network.plain_logits(), model(x).detach())


def test_tokens_share_one_vector():
    generator = torch.Generator().manual_seed(0)
    tokens, y = torch.randint(0, 10, (6, 5), generator=generator), torch.randint(0, 3, (6,), generator=generator)
    mask = torch.ones(6, 5, dtype=torch.float64)
    model = Tokens().eval()
    network = network_of(model, {"tokens": tokens, "mask": mask, "label": y})
    assert network.shape == (4,)
    (points,) = network.points()
    torch.testing.assert_close(points, model.embedding(tokens).detach())
    delta = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    _, (gradient,) = network.forward_backward(Shift(delta), [delta], lambda z, labels: torch.ones_like(z))
    embedded = model.embedding(tokens).detach().requires_grad_()
    total = model.head((torch.tanh(embedded) * mask[..., None]).sum(dim=1)).sum()
    expected = torch.autograd.grad(total, embedded)[0].sum(dim=1)
    torch.testing.assert_close(gradient, expected.sum(dim=0))
    assert not model.embedding._forward_hooks


def test_a_part_of_it_adds_to_the_same_account():
    x, y = images()
    network = network_of(MLP(3, inputs=64, hidden=(8,)).double().eval(), (x, y))
    part = network.subset(network.inputs.subset(torch.arange(3)))
    part.logits()
    assert len(part.plain_logits()) == len(part.labels) == 3
    assert network.cost().forwards == part.cost().forwards == pytest.approx(2 / 3)


def test_the_box_is_in_every_map():
    x, y = images()
    network = network_of(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)).double(), (x, y), box=(-1, 1))
    delta = torch.zeros(1, 8, 8, dtype=torch.float64)
    assert network.mapping(delta)(100 * x).abs().max() == 1
    assert isinstance(network.mapping(delta, torch.ones(1, 1, 1, dtype=torch.float64)), Affine)


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        ([], "loader must give at least one sample, got none"),
        ([(torch.ones(2, 3), torch.tensor([0, 7]))], r"labels must lie in 0\.\.1, got 0\.\.7"),
        (
            [(torch.tensor([[torch.nan] * 3, [1.0, torch.inf, 1.0], [1.0] * 3]), torch.tensor([0, 1, 0]))],
            "inputs must be finite, got NaN or infinity in 2 of the first 3",
        ),
    ],
)
def test_what_cannot_be_fitted_is_refused(batches, message):
    with pytest.raises(ValueError, match=message):
        network_of(nn.Linear(3, 2), *batches)


def test_a_network_that_gives_nan_for_finite_inputs_is_refused():
    model = nn.Linear(3, 2)
    nn.init.constant_(model.bias, torch.nan)
    with pytest.raises(ValueError, match="logits must be finite, got nan"):
        network_of(model, (torch.ones(2, 3), torch.tensor([0, 1])))
