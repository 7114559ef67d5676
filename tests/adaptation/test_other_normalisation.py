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
from trueup.adaptation.batch_norm import share_copy
from trueup.clamping.calibration_set import CalibrationSet
from trueup.clamping.network import Network


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


def probabilities(network: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.softmax(network(x).double(), dim=1)


def divergence(p: Tensor, q: Tensor) -> float:
    """Kullback–Leibler divergence of one mean prediction from another."""
    first, second = p.mean(dim=0), q.mean(dim=0)
    return float((first * (first / second).log()).sum())


@pytest.mark.parametrize("kind", ["group", "layer"])
def test_scales_and_offsets_restore_the_class_frequencies_of_the_reference(kind: str, tmp_path: Path) -> None:
    x, home = images(400, 9)[0], images(400, 10)[0]
    repaired = adapted(white_balance(x), kind, entropy=True, reference=[home])
    record = repaired.repair_record
    assert record.parts == ("normalisation",)
    assert set(repaired.changed) == {"1.weight", "1.bias", "5.weight", "5.bias"}
    assert record.shift_p_value is not None
    assert record.shift_p_value < 0.01
    assert record.verdict.startswith("Repaired without labels: predictive entropy lowered by the scales of")
    before, after = (probabilities(net, white_balance(x)) for net in (trained(kind), repaired))
    at_home = probabilities(trained(kind), home)
    assert divergence(after, at_home) < divergence(before, at_home)
    trueup.save(repaired, tmp_path / "adapted.safetensors")
    assert torch.equal(trueup.load(tmp_path / "adapted.safetensors", model=trained(kind))(x), repaired(x))


def test_inputs_like_the_reference_change_nothing() -> None:
    repaired = adapted(images(400, 9)[0], entropy=True, reference=[images(400, 10)[0]])
    assert repaired.model is trained("group")
    assert repaired.repair_record.parts == ()
    assert "no evidence of an input shift: inputs of the normalisation layers" in repaired.repair_record.verdict


def test_other_class_frequencies_alone_change_nothing() -> None:
    x, y = images(1200, 9)
    rare = torch.cat([(y < 2).nonzero()[:, 0], (y >= 2).nonzero()[:60, 0]])
    repaired = adapted(x[rare], entropy=True, reference=[images(400, 10)[0]])
    assert repaired.repair_record.parts == ()
    assert "no evidence of an input shift" in repaired.repair_record.verdict
    record = adapted(white_balance(x[rare]), entropy=True, reference=[images(400, 10)[0]]).repair_record
    assert record.shift_p_value is not None
    assert record.shift_p_value < 0.01


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


def test_only_reliable_samples_lower_the_entropy(monkeypatch: pytest.MonkeyPatch) -> None:
    from trueup.adaptation import training

    x, y = images(400, 9)
    samples = Network(trained("group"), CalibrationSet.read([(white_balance(x), y)], device="cpu"))
    entropies = []
    for share in (0.0, 1.0):  # no sample is reliable, or all are
        monkeypatch.setattr(training, "MAX_ENTROPY", share)
        lower = training.lower_entropy(samples, training.Start(None, {}), temperature=1.0, home=None, seed=0)
        p = probabilities(share_copy(samples.model, lower.tensors), white_balance(x))
        entropies.append(float(torch.special.entr(p).sum(dim=1).mean()))
    assert entropies[1] < entropies[0] - 0.01
