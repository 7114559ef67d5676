"""Loaders, networks and pixel ranges of many kinds, and the messages of a repair."""

from __future__ import annotations

import threading
from collections import namedtuple
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trueup
from colour_images import images, trained, white_balance
from flat_options import adapt_with as adapt
from flat_options import repair_with as repair
from trueup._core.errors import InputError
from trueup.adaptation import FAMILIES
from trueup.adaptation.composition import Composition, PixelSpace
from trueup.adaptation.input_maps import ChannelAffine, Matrix, PixelOffset

PIXELS: dict[str, Any] = {"normalise": nn.Identity(), "augment": None, "progress": False}
Named = namedtuple("Named", "labels input")


@dataclass
class Unlabelled:
    input: Tensor


@dataclass
class Labelled:
    input: Tensor
    labels: Tensor


def test_reading_a_loader_draws_nothing_from_the_global_generator() -> None:
    x, y = images(60, 2)
    network, state = trained(), torch.get_rng_state()
    repair(network, DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True), parts=(), **PIXELS)
    adapt(network, DataLoader(TensorDataset(x), batch_size=20), parts=(), **PIXELS)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(
    "batch",
    [
        lambda x, y: Unlabelled(x),
        Labelled,
        lambda x, y: Named(y, x),
        lambda x, y: {"input": x, "labels": y},
        lambda x, y: (x,),
        lambda x, y: x.numpy(),
    ],
    ids=["dataclass without labels", "dataclass", "labels first", "mapping", "one alone", "NumPy"],
)
def test_labels_are_left_out_of_any_kind_of_batch(batch: Any) -> None:
    x, y = images(60, 2)
    record = adapt(trained(), [batch(x[:30], y[:30]), batch(x[30:], y[30:])], **PIXELS).repair_record
    plain = adapt(trained(), [x[:30], x[30:]], **PIXELS).repair_record
    assert not record.labelled
    assert record.verdict == plain.verdict


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda x, y: (x, y), r"loader must give batches, got the inputs and the labels; .* is \[\(inputs, labels\)\]"),
        (lambda x, y: [x.numpy(), y.numpy()], r"loader must give batches, got the inputs and the labels"),
        (lambda x, y: x, r"loader must give batches, got Tensor of shape \(60, 3, 8, 8\); .* is \[inputs\]"),
        (lambda x, y: [(x[:1], y[:1])], "loader must give at least 2 samples with labels, got 1"),
        (lambda x, y: [(x, F.one_hot(y, 4))], r"labels must have shape \(n,\), got \(60, 4\); one-hot labels become"),
    ],
)
def test_what_is_no_loader_is_named(loader: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        repair(trained(), loader(*images(60, 2)), **PIXELS)


@pytest.mark.parametrize(
    ("normalise", "message"),
    [
        (lambda x: x**2, "scale and shift each pixel by itself"),
        (lambda x: x - torch.zeros(4, 1, 1), r"take pixels of shape \(n, 3, 8, 8\), got The size of tensor"),
        (lambda x: 0 * x, "scale and shift each pixel by itself"),
        (lambda x: [1], r"take pixels of shape"),
        (nn.Conv2d(3, 3, 3), "scale and shift each pixel by itself"),
        (([float("nan")] * 3, [1.0] * 3), "have a mean and a positive std for 3 channels"),
        (([0.5] * 4, [1.0] * 4), "have a mean and a positive std for 3 channels"),
        (0.5, r"be a function or \(mean, std\), got float"),
        ("imagenet", r"be a function or \(mean, std\), got str"),
    ],
)
def test_a_range_of_pixels_that_is_none_is_refused(normalise: Any, message: str) -> None:
    with pytest.raises(InputError, match=f"normalise must {message}"):
        repair(trained(), [images(60, 2)], normalise=normalise, progress=False)


@pytest.mark.parametrize(
    "normalise",
    [(0.5, 0.25), ([0.5] * 3, [0.25] * 3), (np.full(3, 0.5), 0.25), (torch.full((1, 3, 1, 1), 0.5), [0.25]),
     lambda x: (x - 0.5) / 0.25],
)  # fmt: skip
def test_a_range_of_pixels_may_come_in_many_forms(normalise: Any) -> None:
    x, y = images(200, 2)

    class Normalised(nn.Module):
        def forward(self, z: Tensor) -> Tensor:
            return trained()(0.25 * z + 0.5)

    moved = [((white_balance(x) - 0.5) / 0.25, y)]
    fitted = repair(Normalised(), moved, normalise=normalise, parts=("input",), maps="affine", progress=False)
    plain = repair(trained(), [(white_balance(x), y)], parts=("input",), maps="affine", **PIXELS)
    np.testing.assert_allclose(fitted.before.inner.theta, plain.before.inner.theta, atol=1e-3)
    assert fitted.repair_record.notes == plain.repair_record.notes


def test_inputs_that_can_hardly_be_pixels_are_remarked_on() -> None:
    x, y = images(60, 2)
    for inputs, ends in ((4 * x - 2, "-2 to 2"), (x / 255, "0 to 0.0039")):
        notes = repair(trained(), [(inputs, y)], parts=(), **PIXELS).repair_record.notes
        assert any(f"the pixels range from {ends}, which is unusual" in note for note in notes), notes


def test_maps_that_samples_are_too_few_for_are_named() -> None:
    x, y = images(100, 2)
    fitted = repair(trained(), [(x, y)], maps=("affine", "kernel", "pixel_offset"), parts=("input",), **PIXELS)
    expected = "these maps have too many parameters for 100 samples: kernel (84), pixel_offset (192)"
    assert fitted.repair_record.notes == (expected,)


@pytest.mark.parametrize("parts", [("input",), ("batch_norm",)])
def test_what_comes_back_is_in_the_mode_of_the_network_and_says_so(parts: Any) -> None:
    x, y = images(200, 2)
    network = deepcopy(trained()).train()
    network[4].eval()
    repaired = repair(network, [(x**2, y)], parts=parts, maps="gamma", **PIXELS)
    assert repaired.repair_record.parts == parts
    assert [m.training for m in repaired.model.modules()] == [m.training for m in network.modules()]
    assert repaired.training
    assert any("training mode" in note for note in repaired.repair_record.notes)
    assert trueup.clamp(network, [(x, y)], progress=False).training


def test_a_network_that_cannot_be_copied_is_repaired_before_it() -> None:
    class Locked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.lock = trained(), threading.Lock()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    x, y = images(200, 2)
    record = repair(Locked(), [(white_balance(x), y)], maps="affine", **PIXELS).repair_record
    assert record.parts == ("input",)
    assert sum("cannot be copied (TypeError)" in note for note in record.notes) == 2


def test_parameters_of_inference_mode_are_named_and_left_alone() -> None:
    x, y = images(60, 2)
    with torch.inference_mode():
        network = deepcopy(trained())
    expected = [parameter.requires_grad for parameter in network.parameters()]
    with pytest.raises(InputError, match="model must be made outside of inference mode"):
        repair(network, [(x, y)], **PIXELS)
    assert trueup.collect(network, [(x, y)], progress=False).logits.shape == (60, 4)
    assert [parameter.requires_grad for parameter in network.parameters()] == expected


def test_few_samples_say_nothing_without_labels_nor_choose() -> None:
    x, y = images(60, 2)
    record = adapt(trained(), [x[:49] ** 2], **PIXELS).repair_record
    assert record.parts == ()
    assert "49 inputs are too few to estimate statistics" in record.verdict
    for name, others in (("labelled", (x[:49], y[:49])), ("reference", x[:49])):
        with pytest.raises(InputError, match=f"{name} must have at least 50 samples, got 49"):
            adapt(trained(), [x**2], **{name: [others]}, **PIXELS)
    with pytest.raises(InputError, match="labelled must give batches"):
        adapt(trained(), [x**2], labelled=5, **PIXELS)
    with pytest.raises(InputError, match=r"reference must have inputs of shape \(3, 8, 8\)"):
        adapt(trained(), [x**2], reference=[torch.rand(60, 3, 9, 9)], **PIXELS)


def test_a_temperature_without_a_best_value_is_warned_of() -> None:
    x, y = images(60, 2)
    right = trained()(x).argmax(dim=1) == y
    with pytest.warns(UserWarning, match="temperature has no optimum"):
        repair(trained(), [(x[right], y[right])], parts=(), **PIXELS)


def test_the_verdict_names_all_that_was_done() -> None:
    x, y = images(300, 2)
    swapped = torch.where(y == 0, 1, y)  # no temperature mends that
    last = repair(trained(), [(x, swapped)], parts=(), method="vector", **PIXELS).repair_record
    assert last.verdict.startswith(
        "No: the network itself stays as it is; no input map was requested. But vector after the"
    )
    assert "1 of the 4 classes have no sample, so they cannot be corrected" in last.notes
    head = repair(trained(), [(x, y)], parts=("head",), **PIXELS).repair_record
    assert head.verdict == "No: temperature is enough; no correction lowered the held-out loss."
    lower = adapt(trained(), [x**2], entropy=True, parts=("batch_norm",), **PIXELS).repair_record
    assert (
        "new batch-norm statistics; predictive entropy lowered by the scales of normalisation layers. This"
        in lower.verdict
    )
    assert "assumes that classes are as frequent as in training" in lower.verdict
    few = adapt(trained(), [x], temperature=3.0, labelled=[images(100, 3)], **PIXELS).repair_record
    assert few.temperature != 3.0
    assert few.verdict.startswith("No: the network itself stays as it is; no evidence of an input shift")
    assert "But a temperature fitted to the labelled samples lowered the held-out loss" in few.verdict


def test_signals_and_features_have_no_colours() -> None:
    signal = ChannelAffine((3, 50), torch.tensor([1.0, 0, 0, 0, 0, 0]))
    assert signal.words() == ["channel 0 gain 1.35"]
    assert signal.diagnosis() == "gain and offset per channel"
    assert ChannelAffine((3,)).diagnosis() == "gain and offset per feature"
    assert Matrix((3, 50)).diagnosis() == "linear map of the channels"
    assert Composition([Matrix((6,))]).title == "linear map of the features"
    assert PixelOffset((6,), torch.ones(6)).words() == ["feature offsets up to 0.05"]


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].suits((40,))])
def test_maps_of_features_are_exported(name: str) -> None:
    family = FAMILIES[name]
    theta = 0.3 * torch.randn(family.size((40,)), generator=torch.Generator().manual_seed(0))
    space = PixelSpace(Composition([family((40,), theta)]), torch.full((40,), -1.0), torch.full((40,), 3.0))
    x = torch.rand(5, 40)
    exported = torch.export.export(space, (x,)).module()
    torch.testing.assert_close(exported(x), space(x), atol=1e-6, rtol=1e-6)


def test_without_labels_there_is_no_loss_to_draw(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from trueup.adaptation import report_repair
    from trueup.adaptation.report import save_steps

    repaired = adapt(trained(), [images(60, 2)[0] ** 2], parts=("batch_norm",), **PIXELS)
    with pytest.raises(InputError, match="record must be of a repair with labels"):
        save_steps(repaired.repair_record, tmp_path / "steps.png")
    assert not list(tmp_path.iterdir())
    page = report_repair(repaired).html()
    assert "Steps tried" not in page
    assert "two things are assumed: classes are as frequent as in training" in page


class Views(nn.Module):
    """The trained network with `view` behind its convolutions, which only images in the usual layout can be given."""

    def __init__(self) -> None:
        super().__init__()
        layers = list(deepcopy(trained()))  # type: ignore[call-overload]
        self.layers, self.linear = nn.Sequential(*layers[:6]), layers[-1]

    def forward(self, x: Tensor) -> Tensor:
        h = self.layers(x)
        return self.linear(h.view(len(h), -1).view(len(h), h.shape[1], -1).mean(dim=2))


@pytest.mark.parametrize("labelled", [True, False])
def test_a_network_that_calls_view_is_repaired_as_any_other(labelled: bool) -> None:
    x, y = images(400, 3)
    pair = (white_balance(x), y) if labelled else (white_balance(x),)
    loader = DataLoader(TensorDataset(*pair), batch_size=100)
    fit = repair if labelled else adapt
    views, usual = (fit(network, loader, maps=("colour",), **PIXELS) for network in (Views().eval(), trained()))
    assert views.repair_record.parts == usual.repair_record.parts != ()
    torch.testing.assert_close(views(pair[0]), usual(pair[0]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", [name for name in FAMILIES if FAMILIES[name].suits((3, 8, 8))])
def test_images_that_come_in_the_usual_layout_leave_in_it(name: str) -> None:
    family = FAMILIES[name]((3, 8, 8))
    space = PixelSpace(family.with_theta(torch.full_like(family.theta, 0.1)), torch.tensor(0.0), torch.tensor(1.0))
    assert space(images(4, 3)[0]).is_contiguous()


class Halves(nn.Module):
    """The trained network behind pixels twice as bright."""

    def __init__(self) -> None:
        super().__init__()
        self.network = deepcopy(trained())
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.network(0.5 * x)


class HalvesInPlace(Halves):
    def forward(self, x: Tensor) -> Tensor:
        return self.network(x.mul_(0.5))


@pytest.mark.parametrize("labelled", [True, False])
def test_a_network_that_changes_its_input_is_repaired_as_one_that_does_not(labelled: bool) -> None:
    x, y = images(300, 3)
    bright = 2 * white_balance(x)
    batches = [(bright.clone(), y)] if labelled else [(bright.clone(),)]
    fit = repair if labelled else adapt
    changing, usual = (fit(network, batches, maps=("affine",), **PIXELS) for network in (HalvesInPlace(), Halves()))
    assert torch.equal(batches[0][0], bright)
    assert changing.repair_record.parts == usual.repair_record.parts != ()
    torch.testing.assert_close(changing(bright.clone()), usual(bright), rtol=1e-3, atol=1e-3)


def test_labels_of_one_class_teach_nothing() -> None:
    x, y = images(400, 3)
    repaired = repair(trained(), [(white_balance(x)[y == 1], y[y == 1])], method="auto", **PIXELS)
    assert repaired.repair_record.parts == ()
    assert repaired.repair_record.method == "temperature"
    assert "all samples are of one class" in repaired.repair_record.verdict
