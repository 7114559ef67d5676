"""Networks with one logit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import trueup
from trueup.models import TwoClasses
from trueup.models.calibrated import input_position


class OneLogit(nn.Module):
    """Log-odds of class 1 from two features, four times too sure."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.shape = shape
        self.scale = nn.Parameter(torch.tensor(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.scale * (x[:, 0] - x[:, 1])).reshape(len(x), *self.shape)


def samples(n: int = 400) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator)
    return x, torch.bernoulli(torch.sigmoid(x[:, 0] - x[:, 1]), generator=generator).long()


@pytest.mark.parametrize("shape", [(), (1,)])
def test_one_logit_is_calibrated_and_repaired_as_two(shape: tuple[int, ...]) -> None:
    x, y = samples()
    network = TwoClasses(OneLogit(shape))
    calibrated = trueup.calibrate(network, [(x, y)], progress=False)
    assert 3 < float(calibrated.after.temperature) < 5
    torch.testing.assert_close(network(x), trueup.convert.from_log_odds(4 * (x[:, 0] - x[:, 1])), check_dtype=False)
    moved = x * torch.tensor([0.2, 1.0])
    repaired = trueup.repair(network, [(moved, y)], progress=False)
    assert repaired.repair_record.parts == ("input",)
    assert trueup.metrics.nll(repaired(moved).detach(), y) < trueup.metrics.nll(calibrated(moved).detach(), y)


def test_pixels_and_other_entries_of_the_output_stay() -> None:
    class Masks(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"logits": x, "mean": x.mean()}

    x = torch.randn(3, 1, 4, 5)
    output = TwoClasses(Masks())(x)
    assert torch.equal(output["logits"], torch.cat([0 * x, x], dim=1))
    assert output["mean"] == x.mean()


def test_more_logits_than_one_are_refused_and_one_is_sent_here() -> None:
    with pytest.raises(ValueError, match=r"must return one logit per sample, got shape \(3, 2\)"):
        TwoClasses(nn.Identity())(torch.zeros(3, 2))
    x, y = samples()
    with pytest.raises(ValueError, match=r"a network with one logit through models\.TwoClasses"):
        trueup.repair(OneLogit((1,)), [(x, y)])


def test_probabilities_in_place_of_a_logit_are_warned_of() -> None:
    x, _ = samples()
    with pytest.warns(UserWarning, match=r"lie in \[0, 1\] like probabilities, but are read as log-odds"):
        TwoClasses(nn.Sequential(OneLogit((1,)), nn.Sigmoid()))(x)


def test_its_arguments_keep_their_names() -> None:
    class Masked(nn.Module):
        def forward(self, ids: Tensor, attention_mask: Tensor) -> Tensor:
            return (ids * attention_mask).sum(dim=1)

    network = TwoClasses(Masked())
    assert input_position(network, (torch.ones(2, 3, dtype=torch.int64), torch.ones(2, 3)), {}) is None
