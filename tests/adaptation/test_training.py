"""Fine-tuning of all weights as a part of a repair."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trueup
from colour_images import images, trained
from flat_options import repair_with as repair
from trueup.adaptation import Repaired
from trueup.adaptation.context import PARTS
from trueup.adaptation.training import affine_names

OPTIONS = {"normalise": nn.Identity(), "augment": None}


def shuffled(x: Tensor) -> Tensor:
    """Move every pixel to another place, which no family of maps undoes."""
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    return x.flatten(2)[:, :, order].reshape(x.shape)


def nll(network: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(network(x), y))


@pytest.fixture(scope="module")
def fine_tuned() -> Repaired:
    x, y = images(600, 2)
    return repair(trained(), [(shuffled(x), y)], parts=("batch_norm", "weights"), **OPTIONS)


def test_all_weights_are_fine_tuned_if_that_lowers_the_held_out_loss(fine_tuned: Repaired) -> None:
    record = fine_tuned.repair_record
    assert "weights" in record.parts
    assert record.ridge is None
    assert record.gain > 1.64 * record.error
    assert "all weights fine-tuned" in record.verdict
    assert record.steps[-1].name.endswith("+ weights")
    xt, yt = images(1500, 3)
    x, y = images(600, 2)
    others = repair(trained(), [(shuffled(x), y)], parts=("batch_norm",), **OPTIONS)
    assert "weights" not in others.repair_record.parts
    assert nll(fine_tuned, shuffled(xt), yt) < nll(others, shuffled(xt), yt)


def test_the_network_stays_and_the_file_holds_the_new_weights(fine_tuned: Repaired, tmp_path: Path) -> None:
    names = {name for name, _ in trained().named_parameters()}
    assert names <= set(fine_tuned.changed)
    assert not any(torch.equal(fine_tuned.changed[name], trained().get_parameter(name)) for name in names)
    x, _ = images(50, 4)
    trueup.save(fine_tuned, tmp_path / "tuned.safetensors")
    again = trueup.load(tmp_path / "tuned.safetensors", model=trained())
    torch.testing.assert_close(again(x), fine_tuned(x))
    assert again.repair_record == fine_tuned.repair_record


def test_without_a_shift_the_weights_stay() -> None:
    x, y = images(300, 5)
    repaired = repair(trained(), [(x, y)], parts=(*PARTS, "weights"), maps=(), **OPTIONS)
    assert repaired.repair_record.parts == ()
    assert repaired.model is trained()


def test_weights_with_two_names_stay_one() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3, bias=False)
            self.second = nn.Linear(3, 3, bias=False)
            self.second.weight = self.first.weight
            self.unused = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.second(self.first(x).relu())

    torch.manual_seed(0)
    network = Tied().eval()
    x = torch.rand(300, 3, generator=torch.Generator().manual_seed(1))
    repaired = repair(network, [(x, x.argmax(dim=1))], parts=("weights",))
    assert repaired.repair_record.parts == ("weights",)
    assert torch.equal(repaired.changed["first.weight"], repaired.changed["second.weight"])
    assert torch.equal(repaired.changed["unused"], torch.zeros(2))
    assert nll(repaired, x, x.argmax(dim=1)) < nll(network, x, x.argmax(dim=1))


def test_scales_and_offsets_are_those_of_batch_norm_or_else_of_other_normalisation() -> None:
    others = nn.Sequential(nn.GroupNorm(2, 4), nn.LayerNorm(4), nn.LayerNorm(4, bias=False))
    assert affine_names(others) == ["0.weight", "0.bias", "1.weight", "1.bias", "2.weight"]
    assert affine_names(nn.Sequential(nn.BatchNorm1d(4), others)) == ["0.weight", "0.bias"]
