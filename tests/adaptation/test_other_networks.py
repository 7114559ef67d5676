"""Networks of many kinds: repaired as any other, or left as they are with a note."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import trueup
from colour_images import CLASSES, images, trained, white_balance
from flat_options import adapt_with, repair_with
from trueup._core.errors import InputError
from trueup.adaptation import RepairOptions
from trueup.adaptation.batch_norm import estimate
from trueup.adaptation.last_layer import find_head
from trueup.clamping.calibration_set import CalibrationSet
from trueup.clamping.network import Network
from trueup.models import evaluate_loader

PIXELS: dict[str, Any] = {"normalise": nn.Identity(), "augment": None, "progress": False}


def loader(*tensors: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=100)


def moved(n: int = 400) -> tuple[Tensor, Tensor]:
    x, y = images(n, 3)
    return white_balance(x), y


class Trained(nn.Module):
    """The trained network in two parts, for others to change."""

    def __init__(self) -> None:
        super().__init__()
        layers = list(deepcopy(trained()))  # type: ignore[call-overload]
        self.first, self.norm, self.rest = nn.Sequential(*layers[:4]), layers[4], nn.Sequential(*layers[5:-1])
        self.head = layers[-1]
        self.eval()

    def features(self, x: Tensor) -> Tensor:
        h: Tensor = self.rest(self.norm(self.first(x)))
        return h

    def forward(self, x: Tensor) -> Any:
        return self.head(self.features(x))


@pytest.mark.parametrize("labelled", [True, False])
def test_a_compiled_network_is_repaired_as_itself(labelled: bool, tmp_path: Path) -> None:
    x, y = moved()
    batches = loader(x, y) if labelled else loader(x)
    compiled = torch.compile(Trained(), backend="eager")
    compiled(x)  # what it runs is settled before hooks are there
    fit = repair_with if labelled else adapt_with
    ours, usual = (fit(network, batches, maps=("affine",), **PIXELS) for network in (compiled, Trained()))
    assert ours.repair_record.parts == usual.repair_record.parts != ()
    trueup.save(ours, tmp_path / "repaired.safetensors")
    loaded = trueup.load(tmp_path / "repaired.safetensors", model=Trained())
    torch.testing.assert_close(loaded(x), usual(x), rtol=1e-3, atol=1e-3)


class ScaledInPlace(Trained):
    def forward(self, x: Tensor) -> Tensor:
        z = super().forward(x)
        z *= 20
        return z


class Hooked(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.head.register_forward_hook(lambda module, inputs, output: 20 * output)


class TwoViews(Trained):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return super().forward(x), super().forward(x.flip(3))


def weight_norm() -> Trained:
    network = Trained()
    with pytest.warns(FutureWarning):
        network.head = nn.utils.weight_norm(network.head)
    return network


@pytest.mark.parametrize("make", [ScaledInPlace, Hooked, TwoViews, weight_norm])
def test_a_last_layer_that_is_not_all_of_it_is_left_alone(make: Any) -> None:
    x, y = moved()
    network = make()
    repaired = repair_with(network, loader(x, y), parts=("head",), **PIXELS)
    assert repaired.repair_record.parts == ()
    assert "the logits are not the output of one small nn.Linear" in repaired.repair_record.notes[0]
    repaired(x)


class ByName(Trained):
    def forward(self, x: Tensor) -> Tensor:
        h = self.rest(self.norm(input=self.first(x)))
        z: Tensor = self.head(input=h)
        return z


class Caches(Trained):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = {"features": self.features(x)}
        z: Tensor = self.head(self.kept["features"])
        return z


@pytest.mark.parametrize("make", [ByName, Caches])
@pytest.mark.parametrize("labelled", [True, False])
def test_ways_of_calling_layers_make_no_difference(make: Any, labelled: bool) -> None:
    x, y = moved()
    batches = loader(x, y) if labelled else loader(x)
    fit = repair_with if labelled else adapt_with
    ours, usual = (fit(network, batches, maps=("offset",), **PIXELS) for network in (make(), Trained()))
    assert ours.repair_record.parts == usual.repair_record.parts != ()
    torch.testing.assert_close(ours(x), usual(x), rtol=1e-3, atol=1e-3)
    assert find_head(ByName(), lambda: ByName()(x)) is None  # another one's layers are not this one's
    network = ByName()
    assert find_head(network, lambda: network(x)) == "head"


def test_batch_norm_that_is_never_called_keeps_its_statistics() -> None:
    network = Trained()
    network.other = nn.BatchNorm2d(16)
    x, y = moved()
    repaired = repair_with(network, loader(x, y), parts=("batch_norm",), **PIXELS)
    assert repaired.repair_record.parts == ("batch_norm",)
    assert "other.running_var" not in repaired.changed
    assert torch.equal(repaired.model.other.running_var, torch.ones(16))  # type: ignore[union-attr, arg-type]


class ByHand(Trained):
    def features(self, x: Tensor) -> Tensor:
        norms = {0: self.first[1], 1: self.norm}
        h = self.first[0](x)
        h = self.first[3](torch.relu(F.batch_norm(h, norms[0].running_mean, norms[0].running_var)))
        out: Tensor = self.rest(F.batch_norm(h, norms[1].running_mean, norms[1].running_var))
        return out


def test_batch_norm_out_of_sight_says_nothing_of_the_inputs() -> None:
    x, _ = moved()
    repaired = adapt_with(ByHand(), loader(x), **PIXELS)
    assert repaired.repair_record.parts == ()
    assert "no batch-norm layer takes one row per sample" in repaired.repair_record.verdict


class WritesIntoItself(Trained):
    def __init__(self) -> None:
        super().__init__()
        self.seen: Tensor | None = None
        self.rest.register_forward_hook(lambda module, inputs, output: setattr(self, "seen", output))

    def forward(self, x: Tensor) -> Tensor:
        self.features(x)
        z: Tensor = self.head(self.seen)
        return z


@pytest.mark.parametrize("labelled", [True, False])
def test_a_network_whose_copy_is_another_is_not_copied(labelled: bool) -> None:
    x, y = moved()
    batches = loader(x, y) if labelled else loader(x)
    fit = repair_with if labelled else adapt_with
    repaired = fit(WritesIntoItself(), batches, maps=("offset",), **PIXELS)
    assert any("its copy" in note or "cannot be copied" in note for note in repaired.repair_record.notes)
    assert not {"batch_norm", "head"} & set(repaired.repair_record.parts)
    assert not torch.equal(repaired(x[:50]), repaired(x[50:100]))


class Probe(Trained):
    def features(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return super().features(x)


def test_without_gradients_by_the_input_the_other_parts_are_repaired() -> None:
    x, y = moved()
    repaired = repair_with(Probe(), loader(x, y), **PIXELS)
    assert "batch_norm" in repaired.repair_record.parts
    assert any("no input map was tried" in note for note in repaired.repair_record.notes)
    with pytest.raises(ValueError, match="must be differentiable by its input"):
        repair_with(Probe(), loader(x, y), parts=("input",), **PIXELS)


@pytest.mark.filterwarnings("ignore:.* logits are -1e")
@pytest.mark.parametrize("mask", [-torch.inf, -1e9])
def test_masked_classes_are_repaired_and_clamp_refuses_them(mask: float) -> None:
    class Masked(Trained):
        def forward(self, x: Tensor) -> Tensor:
            return F.pad(super().forward(x), (0, 1), value=mask)

    x, y = moved()
    repaired = repair_with(Masked(), loader(x, y), maps=("affine",), **PIXELS)
    assert "input" in repaired.repair_record.parts
    assert torch.isfinite(repaired(x)[:, :CLASSES]).all()
    with pytest.raises(InputError, match="masked classes"):
        trueup.clamp(Masked(), loader(x, y), progress=False)


def test_masked_classes_make_no_difference_without_labels() -> None:
    class Masked(Trained):
        def forward(self, x: Tensor) -> Tensor:
            return F.pad(super().forward(x), (0, 1), value=-torch.inf)

    x, _ = images(400, 13)
    stripes = x + 0.3 * torch.randn(8, generator=torch.Generator().manual_seed(2))
    options: dict[str, Any] = {**PIXELS, "maps": ("column_offset",), "entropy": True}
    ours, usual = (adapt_with(network, loader(stripes), **options) for network in (Masked(), Trained()))
    assert ours.repair_record.words == usual.repair_record.words != ()
    assert ours.repair_record.verdict == usual.repair_record.verdict


def test_every_input_is_copied_before_a_network_may_change_it() -> None:
    class Changes(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a + b.mul_(0.5)

    a, b = torch.rand(2, 60, 3, generator=torch.Generator().manual_seed(0))
    samples = Network(Changes(), CalibrationSet.read([(a, b, torch.arange(60) % 3)], device="cpu"))
    torch.testing.assert_close(samples.logits(), a + 0.5 * b)
    torch.testing.assert_close(samples.logits(), a + 0.5 * b)


def test_rows_are_those_of_the_inputs_beside_a_state() -> None:
    class Recurrent(Trained):
        def forward(self, state: tuple[Tensor, ...], image: Tensor) -> Tensor:
            return super().forward(image)

    x, _ = moved()
    state = (torch.zeros(2, len(x), 3),)
    repaired = adapt_with(Recurrent(), [{"state": state, "image": x}], **PIXELS)
    assert repaired.repair_record.samples == len(x)


@pytest.mark.parametrize("where", ["loader", "reference"])
def test_one_input_that_is_not_finite_is_refused_without_labels_too(where: str) -> None:
    x, _ = moved()
    broken = x.clone()
    broken[-1, 0, 0, 0] = torch.nan
    batches = {"loader": x, "reference": x, where: broken}
    with pytest.raises(InputError, match=f"{where} must give inputs that are finite, got NaN or infinity in 1 of them"):
        adapt_with(Trained(), loader(batches["loader"]), reference=loader(batches["reference"]), **PIXELS)


def test_images_of_two_sizes_are_refused() -> None:
    x, y = moved()
    with pytest.raises(InputError, match=r"inputs of one shape, got \(3, 6, 8\) and \(3, 8, 8\)"):
        repair_with(Trained(), [(x, y), (x[:, :, 1:7], y)], **PIXELS)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_in_half_precision_are_those_of_the_same_numbers(dtype: torch.dtype) -> None:
    x = 100 + torch.randn(300, 2, 32, 32, generator=torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.BatchNorm2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()).eval().to(dtype)
    samples = Network(network, CalibrationSet.read([(x.to(dtype), torch.arange(300) % 2)], device="cpu"))
    fitted = estimate(samples, None, 1.0)
    expected = x.to(dtype).double().var(dim=(0, 2, 3), correction=0)
    torch.testing.assert_close(fitted["0.running_var"].double(), expected, rtol=1e-2, atol=0)


def test_large_images_go_through_in_small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trueup.adaptation.batch_norm.CHUNK_NUMBERS", 100 * 192)
    sizes = []
    network = Trained()
    network.first.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    x, y = moved()
    samples = Network(network, CalibrationSet.read(loader(x, y), device="cpu"))
    sizes.clear()
    estimate(samples, None, 1.0)
    assert sizes == [100] * 4


def test_samples_that_are_not_kept_are_read_once_and_in_their_own_batches() -> None:
    x, y = moved()
    sizes: list[int] = []
    network = Trained()
    network.first.register_forward_pre_hook(lambda module, inputs: sizes.append(len(inputs[0])))
    kept, streamed = (
        Network(network, CalibrationSet.read(loader(x, y), device="cpu", limit=limit)) for limit in (1 << 30, 1)
    )
    assert (kept.inputs.kept, streamed.inputs.kept) == (True, False)
    sizes.clear()
    fitted = estimate(streamed, None, 1.0)
    assert sizes == [100] * 4
    wanted = estimate(kept, None, 1.0)
    torch.testing.assert_close(fitted["first.1.running_mean"], wanted["first.1.running_mean"])


def test_inputs_inside_of_a_mapping_need_no_labels() -> None:
    class Named(Trained):
        def forward(self, batch: dict[str, Tensor]) -> Tensor:
            return super().forward(batch["image"])

    x, y = moved()
    for batches in ([({"image": x}, y)], [({"image": x},)]):
        repaired = adapt_with(Named(), batches, **PIXELS)
        assert "batch_norm" in repaired.repair_record.parts


def test_another_default_type_makes_no_difference() -> None:
    x, y = moved()
    options: dict[str, Any] = {**PIXELS, "parts": ("input",), "maps": ("affine",)}
    usual = repair_with(Trained(), loader(x, y), **options)
    network = Trained()
    torch.set_default_dtype(torch.float64)
    try:
        ours = repair_with(network, loader(x, y), **options)
    finally:
        torch.set_default_dtype(torch.float32)
    assert ours.repair_record.words == usual.repair_record.words != ()


class OfBytes(Trained):
    """It normalises images of bytes itself."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float() / 255)


def test_images_of_bytes_are_repaired_as_their_pixels() -> None:
    x, y = moved()
    x = (255 * x).byte()
    options: dict[str, Any] = {"augment": None, "parts": ("input",), "maps": ("gamma", "affine")}
    pixels = repair_with(Trained(), [(x / 255, y)], normalise=nn.Identity(), **options)
    inside = repair_with(OfBytes(), [(x, y)], **options)
    assert inside.repair_record.words == pixels.repair_record.words != ()
    torch.testing.assert_close(inside(x), pixels(x / 255), rtol=1e-3, atol=1e-3)
    clamped = trueup.clamp(OfBytes(), [(x, y)], progress=False)
    assert clamped.fit_record.forwards > 0
    assert clamped(x).shape == (len(x), CLASSES)


def test_images_of_integers_are_no_tokens() -> None:
    class Positions(OfBytes):
        def __init__(self) -> None:
            super().__init__()
            self.positions = nn.Embedding(4, 4)

    x, y = moved()
    for call in (repair_with, trueup.clamp):
        with pytest.raises(ValueError, match="images must be floating-point numbers, got uint8"):
            call(Positions(), loader((255 * x).byte(), y), progress=False)


def test_a_pixel_without_a_number_is_an_error_about_inputs() -> None:
    x, y = moved()
    x[3, 0, 0, 0] = float("nan")
    for call in (repair_with, trueup.clamp):
        with pytest.raises(InputError, match="inputs must be finite, got NaN or infinity in 1 of the first"):
            call(Trained(), loader(x, y), progress=False)


@pytest.mark.parametrize("name", ["image", "pixel_values", "inputs", "features"])
def test_usual_names_reach_a_network_with_one_argument(name: str) -> None:
    class Single(Trained):
        def forward(self, features: Tensor) -> Tensor:
            return super().forward(features)

    x, y = moved()
    named = [{name: x, "label": y, "id": torch.arange(len(y))}]
    options: dict[str, Any] = {**PIXELS, "parts": ("input",), "maps": ("affine",)}
    expected, fitted = (repair_with(Single(), batches, **options) for batches in ([(x, y)], named))
    assert fitted.repair_record.words == expected.repair_record.words != ()
    torch.testing.assert_close(trueup.collect(Single(), named, progress=False).logits, Single()(x).detach())
    assert len(trueup.clamp(Single(), named, progress=False)(x)) == len(x)


def test_bytes_beside_tokens_are_taken() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(5, CLASSES)

        def forward(self, ids: Tensor, image: Tensor) -> Tensor:
            h: Tensor = self.words(ids).sum(dim=1) + image.float().mean(dim=(1, 2, 3))[:, None]
            return h

    ids, y = torch.arange(120).reshape(60, 2) % 5, torch.arange(60) % CLASSES
    samples = CalibrationSet.read([(ids, torch.zeros(60, 3, 4, 4, dtype=torch.uint8), y)], device="cpu")
    assert Network(Both(), samples).shape == (CLASSES,)


def test_lazy_layers_are_named_and_frozen_scripts_are_read() -> None:
    x, y = moved()
    lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(CLASSES))
    with pytest.raises(ValueError, match=r"got lazy 1\.weight, 1\.bias; call it once on a batch before"):
        repair_with(lazy, loader(x, y), **PIXELS)
    with pytest.warns(DeprecationWarning, match=r"torch\.jit"):
        script = torch.jit.freeze(torch.jit.script(deepcopy(trained())))
    torch.testing.assert_close(trueup.collect(script, loader(x, y), progress=False).logits, trained()(x).detach())


def test_batches_of_any_form_are_unpacked() -> None:
    x, y = moved()
    batches = [{"first": {"pixels": x, "truth": y}}]

    def unpack(batch: Any) -> tuple[Tensor, Tensor]:
        return batch["first"]["pixels"], batch["first"]["truth"]

    model, options = trained(), RepairOptions(parts=("input",), maps=("affine",))
    usual = trueup.repair(model, [(x, y)], normalise=nn.Identity(), options=options, progress=False)
    fitted = trueup.repair(
        model, iter(batches), normalise=nn.Identity(), options=options, progress=False, unpack=unpack
    )
    assert fitted.repair_record.words == usual.repair_record.words != ()
    torch.testing.assert_close(trueup.collect(model, batches, progress=False, unpack=unpack).logits, model(x).detach())
    calibrated = trueup.calibrate(model, batches, progress=False, unpack=unpack)
    assert calibrated.after.temperature == trueup.calibrate(model, [(x, y)], progress=False).after.temperature
    assert len(trueup.clamp(model, batches, progress=False, unpack=unpack)(x)) == len(x)
    assert trueup.adapt(model, batches, progress=False, unpack=unpack).repair_record.samples == len(x)
    assert evaluate_loader(model, batches, progress=False, unpack=unpack)["accuracy"].value > 0
    with pytest.raises(ValueError, match="pass unpack=lambda batch"):
        trueup.collect(model, batches, progress=False)
    with pytest.raises(TypeError, match="unpak"):
        trueup.clamp(model, batches, unpak=unpack)  # type: ignore[call-arg]
