"""Repair without labels: when it acts, what a few labels choose, and what it refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trueup
from colour_images import images, trained
from flat_options import adapt_with as adapt
from flat_options import repair_with as repair
from trueup._core.errors import InputError
from trueup.adaptation.batch_norm import estimate, sample_statistics, shift_test
from trueup.adaptation.training import Start, lower_entropy
from trueup.clamping.calibration_set import CalibrationSet
from trueup.clamping.network import Network


def samples(x: Tensor, model: nn.Module | None = None) -> Network:
    y = torch.zeros(len(x), dtype=torch.int64)
    return Network(trained() if model is None else model, CalibrationSet.read([(x, y)], device="cpu"))


def nll(network: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(network(x), y))


@torch.no_grad()
def test_statistics_of_samples_are_those_of_each_one_alone() -> None:
    x, _ = images(7, 3)
    rows, names = sample_statistics(samples(x))
    assert names == ("1", "4")
    for i in range(7):
        first = trained()[0](x[i : i + 1])
        second = trained()[:4](x[i : i + 1])
        expected = torch.cat([f(h) for h in (first, second) for f in (_mean, _mean_square)])
        np.testing.assert_allclose(rows[i], expected.numpy(), rtol=1e-4, atol=1e-5)


def _mean(h: Tensor) -> Tensor:
    return h[0].mean(dim=(1, 2))


def _mean_square(h: Tensor) -> Tensor:
    return h[0].square().mean(dim=(1, 2))


@torch.no_grad()
def test_the_two_sample_test_holds_its_level_and_sees_small_shifts() -> None:
    x, _ = images(6000, 20)
    pairs = [(x[k : k + 100], x[k + 100 : k + 200]) for k in range(0, 6000, 200)]
    p_values = np.array([shift_test(samples(a), reference=samples(b)).p_value for a, b in pairs])
    # Thirty draws under the hypothesis: each decile is met about three times.
    assert (p_values < 0.1).sum() <= 8
    assert 0.3 < p_values.mean() < 0.7
    assert shift_test(samples(x[:200] + 0.03), reference=samples(x[200:400])).p_value < 0.01
    stored = shift_test(samples(x[:300]))
    assert stored.p_value > 0.01
    assert stored.n_reference == pytest.approx(760)
    assert shift_test(samples(x[:300] + 0.04)).p_value < 0.01


@torch.no_grad()
def test_layers_that_do_not_see_samples_one_by_one_are_left_out() -> None:
    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.by_pixel, self.pooled = nn.BatchNorm1d(3), nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            flat = self.by_pixel(x.movedim(1, -1).reshape(-1, 3))  # 64 rows a sample
            return self.pooled(flat.reshape(len(x), -1, 3).mean(dim=1)[:1]).expand(len(x), 3) + 0 * x.sum()

    x, _ = images(6, 4)
    rows, names = sample_statistics(samples(x, Flat().eval()))
    assert names == ("by_pixel",)
    np.testing.assert_allclose(rows[:, :3], x.mean(dim=(2, 3)).numpy(), atol=1e-5)


def test_a_few_labels_choose_among_what_was_made_without_labels() -> None:
    x, _ = images(300, 9)
    few, y = images(200, 21)
    options = {"augment": None, "normalise": nn.Identity(), "maps": ("gamma",), "progress": False}
    dark = adapt(trained(), [x**2], labelled=[(few**2, y)], **options)
    record = dark.repair_record
    assert record.labelled
    assert record.shift_p_value is not None
    assert record.shift_p_value < 0.01
    assert [step.name for step in record.steps][:2] == ["network", "batch_norm"]
    assert "batch_norm" in record.parts
    assert record.gain > 0
    xt, yt = images(1500, 10)
    assert nll(dark, xt**2, yt) < 0.9 * nll(trained(), xt**2, yt)
    # Labels that say that nothing is wrong are believed: the classes' names went round.
    with pytest.warns(UserWarning, match="temperature has no optimum"):
        wrong = adapt(trained(), [x**2], labelled=[(few**2, (y + 1) % 4)], **options)
    assert "batch_norm" not in wrong.repair_record.parts or wrong.repair_record.gain > 0


def test_a_map_that_raises_the_entropy_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = images(400, 9)
    options = {"augment": None, "normalise": nn.Identity(), "maps": ("gamma",), "progress": False}
    taught = adapt(trained(), [x**2], **options).repair_record
    assert taught.parts == ("input", "batch_norm")
    from trueup.adaptation import _adapt

    fit_to_teacher = _adapt.fit_to_teacher
    # A teacher that goes the wrong way, and far: what is dark becomes black.
    monkeypatch.setattr(
        _adapt, "fit_to_teacher",
        lambda *given: (fitted := fit_to_teacher(*given)).with_theta(torch.full_like(fitted.theta, 3.0)),
    )  # fmt: skip
    wrong = adapt(trained(), [x**2], **options)
    assert wrong.repair_record.parts == ("batch_norm",)
    assert any("does not lower the predictive entropy" in note for note in wrong.repair_record.notes)
    plain = adapt(trained(), [x**2], **{**options, "parts": ("batch_norm",)})
    with torch.no_grad():
        assert wrong(x**2).equal(plain(x**2))


def test_entropy_is_lowered_and_a_collapse_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x, _ = images(300, 9)
    network = samples(x**2)
    changed = estimate(network, None, 1.0)

    def entropy(tensors: dict[str, Tensor]) -> float:
        with torch.no_grad():
            z = torch.func.functional_call(trained(), tensors, (x**2,))
        return float(-(torch.softmax(z, 1) * torch.log_softmax(z, 1)).sum(dim=1).mean())

    from trueup.adaptation import training as module

    lower = lower_entropy(network, Start(None, changed), temperature=1.0, home=None, seed=0)
    assert not lower.refused
    assert entropy({**changed, **lower.tensors}) < entropy(changed)
    monkeypatch.setattr(module, "ENTROPY_RATE", 0.5)  # one class for all within a few steps
    collapsed = lower_entropy(network, Start(None, changed), temperature=1.0, home=None, seed=0)
    assert not collapsed.tensors
    assert "collapse" in collapsed.refused
    options = {"augment": None, "normalise": nn.Identity(), "parts": ("batch_norm",), "progress": False}
    refused = adapt(trained(), [x**2], entropy=True, **options)
    assert any("entropy was not lowered" in note for note in refused.repair_record.notes)
    assert not any(name.endswith("weight") for name in refused.changed)


def test_without_labels_nothing_can_be_asked_of_them() -> None:
    x, y = images(60, 13)
    with pytest.raises(ValueError, match="a loader of one batch is"):
        repair(trained(), [x])
    with pytest.raises(InputError, match="temperature must be a positive number"):
        adapt(trained(), [x], temperature=-1.0)
    with pytest.raises(InputError, match="method must be the name of a method"):
        repair(trained(), [(x, y)], method="magic")


def test_another_method_may_come_last_and_is_in_the_file(tmp_path) -> None:  # type: ignore[no-untyped-def]
    x = torch.rand(300, 3, generator=torch.Generator().manual_seed(0))
    y = torch.where(x[:, 0] > 0.5, 0, torch.where(x[:, 1] > x[:, 2], 1, 2))
    # The last class is called too rarely, which no temperature mends.
    network = nn.Linear(3, 3)
    with torch.no_grad():
        network.weight.copy_(6 * torch.eye(3))
        network.bias.copy_(torch.tensor([0.0, 0.0, -3.0]))
    repaired = repair(network, [(x, y)], parts=(), method="vector", progress=False)
    assert repaired.repair_record.method == "vector"
    assert repaired.repair_record.steps[-1].kept
    path = tmp_path / "repaired.safetensors"
    trueup.save(repaired, path)
    again = trueup.load(path, model=network)
    assert torch.equal(again(x), repaired(x))
    assert again.repair_record == repaired.repair_record
    home = repair(network, [(x, torch.multinomial(torch.softmax(network(x), 1), 1)[:, 0])], parts=(), method="vector")
    assert home.repair_record.method == "temperature"


def test_tokens_have_an_offset_of_their_embedding() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 20, (300, 5))

    class Text(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(20, 4)
            self.out = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.embedding(x).mean(dim=1))

    network = Text().eval()
    with torch.no_grad():
        network.out.weight.mul_(6)
        home = network(tokens)
        y = torch.multinomial(torch.softmax(home, dim=1), 1)[:, 0]
        network.embedding.weight.add_(torch.tensor([0.8, 0.0, -0.8, 0.0]))  # the table moved
    repaired = repair(network, [(tokens, y)], parts=("input",), maps=("offset",), progress=False)
    assert repaired.repair_record.parts == ("input",)
    alone = trueup.METHODS["temperature"](network(tokens).detach(), y)
    assert nll(repaired, tokens, y) < float(F.cross_entropy(alone(network(tokens).detach()), y)) - 0.05
