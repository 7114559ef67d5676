"""Adaptation without labels of networks that have layer norm or group norm instead of batch norm."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import trueup
from colour_images import images, white_balance
from flat_options import adapt_with
from trueup.adaptation import Repaired


@cache
@torch.enable_grad()
def trained(kind: str) -> nn.Module:
    """A network with group norm or layer norm, trained for a second."""
    torch.manual_seed(0)
    norm: nn.Module = nn.GroupNorm(3, 12) if kind == "group" else nn.LayerNorm([12, 4, 4])
    net = nn.Sequential(
        nn.Conv2d(3, 12, 3, padding=1, stride=2), norm, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.LayerNorm(12), nn.Linear(12, 4),
    )  # fmt: skip
    x, y = images(3000, 1)
    optimiser = torch.optim.Adam(net.parameters(), lr=0.01)
    for epoch in range(8):
        for batch in torch.randperm(len(x), generator=torch.Generator().manual_seed(epoch)).split(100):
            optimiser.zero_grad()
            nn.functional.cross_entropy(net(x[batch]), y[batch]).backward()
            optimiser.step()
    return net.eval()


def adapted(x: Tensor, kind: str = "group", **options: Any) -> Repaired:
    return adapt_with(trained(kind), [x], normalise=nn.Identity(), augment=None, **options)


def entropy(network: nn.Module, x: Tensor) -> float:
    with torch.no_grad():
        log_p = torch.log_softmax(network(x), dim=1)
    return float(-(log_p.exp() * log_p).sum(dim=1).mean())


@pytest.mark.parametrize("kind", ["group", "layer"])
def test_scales_and_offsets_lower_the_entropy_of_changed_inputs(kind: str, tmp_path: Path) -> None:
    x, home = images(400, 9)[0], images(400, 10)[0]
    repaired = adapted(white_balance(x), kind, entropy=True, reference=[home])
    record = repaired.repair_record
    assert record.parts == ("normalisation",)
    assert set(repaired.changed) == {"1.weight", "1.bias", "5.weight", "5.bias"}
    assert record.shift_p_value is not None
    assert record.shift_p_value < 0.01
    assert record.verdict.startswith("Repaired without labels: predictive entropy lowered by the scales of")
    assert entropy(repaired, white_balance(x)) < entropy(trained(kind), white_balance(x))
    trueup.save(repaired, tmp_path / "adapted.safetensors")
    assert torch.equal(trueup.load(tmp_path / "adapted.safetensors", model=trained(kind))(x), repaired(x))


def test_inputs_like_the_reference_change_nothing() -> None:
    repaired = adapted(images(400, 9)[0], entropy=True, reference=[images(400, 10)[0]])
    assert repaired.model is trained("group")
    assert repaired.repair_record.parts == ()
    assert "no evidence of an input shift: inputs of the normalisation layers" in repaired.repair_record.verdict


def test_it_must_be_requested_and_needs_a_reference() -> None:
    x = white_balance(images(200, 9)[0])
    assert "AdaptOptions(entropy=True)" in adapted(x).repair_record.verdict
    assert "needs `reference` inputs" in adapted(x, entropy=True).repair_record.verdict


def test_a_collapse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from trueup.adaptation import training

    monkeypatch.setattr(training, "ENTROPY_RATE", 2.0)
    x, home = images(400, 9)[0], images(400, 10)[0]
    repaired = adapted(white_balance(x), entropy=True, reference=[home])
    assert repaired.repair_record.parts == ()
    assert any("predictions would collapse" in note for note in repaired.repair_record.notes)
    assert repaired.repair_record.verdict.startswith("No: ")


def test_unreliable_samples_take_no_part() -> None:
    x, home = images(400, 9)[0], images(400, 10)[0]
    # At this temperature every prediction is close to uniform.
    repaired = adapted(white_balance(x), entropy=True, reference=[home], temperature=1000.0)
    assert all(torch.equal(tensor, trained("group").state_dict()[name]) for name, tensor in repaired.changed.items())
