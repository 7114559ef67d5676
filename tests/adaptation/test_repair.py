"""Repair of a small network on small colour images."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import trueup
from colour_images import images, trained, white_balance
from flat_options import adapt_with
from flat_options import repair_with as repair
from trueup._core.errors import InputError
from trueup.adaptation import FAMILIES, Repaired
from trueup.adaptation.batch_norm import Crop, batch_norms, estimate, share_copy, shift_test
from trueup.adaptation.class_mix import find_class_mix
from trueup.adaptation.composition import Composition, PixelSpace
from trueup.adaptation.forward_selection import (
    FoldState,
    ForwardSelection,
    Scores,
    SelectionStep,
    _outstanding,
    average_folds,
    nested_losses,
)
from trueup.adaptation.last_layer import fit_correction
from trueup.adaptation.natural_gradient import fisher_gradients, sample_gradients
from trueup.adaptation.record import _verdict
from trueup.calibrators import Temperature
from trueup.clamping.calibration_set import CalibrationSet
from trueup.clamping.network import Network
from trueup.models import frozen


def loader(x: Tensor, y: Tensor) -> list[tuple[Tensor, Tensor]]:
    return list(zip(x.split(90), y.split(90), strict=True))


def fit(x: Tensor, y: Tensor, **options: Any) -> Repaired:
    return repair(trained(), loader(x, y), normalise=nn.Identity(), augment=None, **options)


def nll(network: nn.Module, x: Tensor, y: Tensor) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(network(x), y))


@pytest.fixture(scope="module")
def balanced() -> Repaired:
    """Repaired after another white balance."""
    x, y = images(300, 2)
    return fit(white_balance(x), y, parts=("input", "head"), maps=("affine", "gamma"))


def test_white_balance_is_found_and_undone(balanced: Repaired) -> None:
    record = balanced.repair_record
    assert record.causes == ("white balance",)
    assert "input" in record.parts
    assert record.verdict.startswith("Yes: red gain 1.")
    x, y = images(1500, 3)
    home = trueup.METHODS["temperature"](trained()(x).detach(), y)
    clean = float(F.cross_entropy(home(trained()(x).detach()), y))
    shifted = trained()(white_balance(x)).detach()
    lost = float(F.cross_entropy(trueup.METHODS["temperature"](shifted, y)(shifted), y)) - clean
    assert nll(balanced, white_balance(x), y) - clean < 0.2 * lost
    assert record.gain > 1.64 * record.error
    assert record.equivalents < 120


def test_the_steps_tell_what_was_tried(balanced: Repaired) -> None:
    first, *others = balanced.repair_record.steps
    assert first.name == "temperature"
    assert first.loss == pytest.approx(balanced.repair_record.baseline)
    for step in others:
        assert step.kept == (step.gain > step.required_errors * step.error)
        # Only the choice between half step and full step may use the mean.
        required = step.required_errors
        assert required == 1.64 or (required == 0 and not step.title.startswith("half step"))
    assert balanced.repair_record.p_values.keys() == {"affine", "gamma"}


def test_batch_norm_alone_replaces_a_map_that_fits_worse() -> None:
    x, y = images(400, 2)
    options = {"normalise": nn.Identity(), "augment": None, "maps": ("gamma",)}
    record = repair(trained(), loader(white_balance(x), y), **options).repair_record
    kept = [step.name for step in record.steps if step.kept]
    assert "gamma + batch_norm" in kept
    assert "batch_norm" in kept
    assert record.parts == ("batch_norm", "head")


@pytest.mark.parametrize("shares", [[1, 1, 0.15, 0.15], [1, 0.3, 0.1, 1]])
def test_other_class_frequencies_are_not_learnt(shares: list[float]) -> None:
    x, y = images(1200, 2)
    kept = torch.rand(len(y), generator=torch.Generator().manual_seed(0)) < torch.tensor(shares)[y]
    x, y = x[kept][:300], y[kept][:300]
    fitted = fit(x, y)
    xt, yt = images(1500, 3)
    alone = trueup.METHODS["temperature"](trained()(x).detach(), y)
    assert nll(fitted, xt, yt) < float(F.cross_entropy(alone(trained()(xt).detach()), yt)) + 0.005
    assert any("samples are weighted to undo the difference" in note for note in fitted.repair_record.notes)


def test_a_missing_class_leaves_batch_norm_and_the_last_layer_unchanged() -> None:
    x, y = images(500, 2)
    record = fit(white_balance(x[y > 0]), y[y > 0]).repair_record
    assert record.parts in ((), ("input",))
    assert any("some classes are missing" in note for note in record.notes)


def test_equal_class_frequencies_need_no_weights() -> None:
    x, y = images(1200, 2)
    assert find_class_mix(trained()(x).detach().double().numpy(), y.numpy()) is None
    # A network that assumes these frequencies needs none either.
    rare = torch.rand(len(y), generator=torch.Generator().manual_seed(0)) < torch.tensor([1, 1, 0.15, 0.15])[y]
    biased = trained()(x[rare]).detach() + torch.tensor([1, 1, 0.15, 0.15]).log()
    assert find_class_mix(biased.double().numpy(), y[rare].numpy()) is None


class Halves(nn.Module):
    """The trained network on images of twice the side, which orientations need."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = deepcopy(trained())

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.inner(F.avg_pool2d(x, 2))
        return logits


def large(n: int, seed: int) -> tuple[Tensor, Tensor]:
    x, y = images(n, seed)
    return F.interpolate(x, scale_factor=2), y


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        (lambda x: x.flip(2), "flip upside down"),
        (lambda x: x.flip(1), "channels in the order blue, green, red"),
        (lambda x: 1 - x, "inverted brightness"),
    ],
    ids=["upside down", "BGR", "inverted"],
)
def test_an_orientation_is_undone_saved_and_cheap(change: Any, phrase: str, tmp_path: Path) -> None:
    x, y = large(300, 2)
    network = Halves().eval()
    repaired = repair(network, loader(change(x), y), normalise=nn.Identity(), augment=None)
    assert phrase in repaired.repair_record.words
    assert repaired.repair_record.equivalents < 120
    xt, yt = large(1500, 3)
    clean = trueup.METHODS["temperature"](network(xt).detach(), yt)(network(xt).detach())
    assert nll(repaired, change(xt), yt) < 1.15 * float(F.cross_entropy(clean, yt))
    trueup.save(repaired, tmp_path / "map.safetensors")
    torch.testing.assert_close(trueup.load(tmp_path / "map.safetensors", model=network)(xt), repaired(xt))


def test_images_the_right_way_up_keep_their_orientation() -> None:
    for seed in range(4, 8):
        x, y = large(300, seed)
        record = repair(Halves().eval(), loader(x, y), normalise=nn.Identity(), augment=None, maps="orientation")
        assert record.repair_record.words == ()


def test_home_data_is_left_to_temperature() -> None:
    x, y = images(300, 5)
    repaired = fit(x, y)
    assert repaired.repair_record.parts == ()
    assert repaired.repair_record.verdict.startswith("No: temperature is enough")
    alone = trueup.METHODS["temperature"](trained()(x).detach(), y)
    torch.testing.assert_close(repaired(x), alone(trained()(x)), rtol=1e-5, atol=1e-5)
    assert repaired.model is trained()


@pytest.mark.parametrize("fails", [False, True])
def test_the_callers_network_is_bit_identical_afterwards(fails: bool) -> None:
    network = deepcopy(trained()).train()
    network[0].weight.requires_grad = False
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    random, (x, y) = torch.get_rng_state(), images(120, 6)

    def broken() -> Iterator[tuple[Tensor, Tensor]]:
        yield x[:60], y[:60]
        raise OSError("the disk is gone")

    if fails:
        with pytest.raises(OSError, match="gone"):
            repair(network, broken())
        calls = iter(range(10**6))

        def fail(*_: Any) -> None:
            if next(calls) > 8:  # in a later pass
                raise ZeroDivisionError

        handle = network[3].register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError):
            repair(network, loader(white_balance(x), y), normalise=nn.Identity())
        handle.remove()
    else:
        repaired = repair(network, loader(white_balance(x), y), normalise=nn.Identity(), maps="affine")
        assert isinstance(repaired, Repaired)
    assert all(torch.equal(state[name], tensor) for name, tensor in network.state_dict().items())
    assert network.training
    assert not network[0].weight.requires_grad
    assert network[1].weight.requires_grad
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in network.modules())
    assert torch.equal(random, torch.get_rng_state())


def test_batch_norm_statistics_are_those_of_the_inputs() -> None:
    x, y = images(200, 7)
    samples = Network(trained(), CalibrationSet.read(loader(x + 0.3, y), device="cpu"))
    fitted = estimate(samples, None, 1.0)
    copied = deepcopy(trained())
    for layer in batch_norms(copied).values():
        layer.momentum = 1.0
    with torch.no_grad():
        copied.train()(x + 0.3)  # torch's own statistics of the whole batch
    for name, tensor in fitted.items():
        wanted = copied.state_dict()[name]
        count = 200 * (64 if name.startswith("1.") else 16)  # torch's variance is that of a sample
        wanted = wanted * (count - 1) / count if name.endswith("var") else wanted
        torch.testing.assert_close(tensor, wanted, rtol=1e-3, atol=1e-4)
    untouched = estimate(samples, None, 0.0)
    assert all(torch.equal(tensor, trained().state_dict()[name]) for name, tensor in untouched.items())


def test_few_labels_need_only_say_that_statistics_do_not_harm_where_inputs_have_moved() -> None:
    x, y = images(600, 8)
    few, many = slice(0, 200), slice(None)
    for pixels, rows, required in ((x + 0.3, few, 0.0), (x + 0.3, many, 1.64), (x, few, 1.64)):
        step = fit(pixels[rows], y[rows], parts=("batch_norm",)).repair_record.steps[1]
        assert (step.name, step.required_errors) == ("temperature + batch_norm", required)


def test_a_copy_shares_all_but_what_changed() -> None:
    other = share_copy(trained(), {"8.weight": torch.zeros(4, 16)})
    mine, theirs = dict(other.named_parameters()), dict(trained().named_parameters())
    assert [name for name in mine if mine[name] is not theirs[name]] == ["8.weight"]
    assert all(a is b for a, b in zip(other.buffers(), trained().buffers(), strict=True))


def test_the_last_layer_is_the_correction_of_its_logits() -> None:
    x, y = images(200, 8)
    with torch.no_grad():
        features = trained()[:8](x)
        logits = trained()(x)
    fitted = fit_correction(logits.double().numpy(), features.double().numpy(), y.numpy(), 0.1)
    weight, bias = fitted.layer(trained()[8])
    expected = fitted.logits(logits.double().numpy(), features.double().numpy())
    np.testing.assert_allclose(F.linear(features, weight, bias).numpy(), expected, atol=1e-4)
    before = float(F.cross_entropy(logits, y))
    assert float(F.cross_entropy(torch.from_numpy(expected), y)) < before


def test_a_unit_that_is_hardly_ever_active_gets_no_huge_weight() -> None:
    rng = np.random.default_rng(0)
    y = rng.integers(0, 3, 300)
    features = rng.normal(size=(300, 5)) + 0.5 * np.eye(3, 5)[y]
    features[:, 4] = 0.0
    features[7, 4] = 1e-4
    fitted = fit_correction(np.zeros((300, 3)), features, y, 0.01)
    weight, _ = fitted.layer(nn.Linear(5, 3))
    assert float(weight.abs().max()) < 10
    features[:, 4] = 0.0
    weight, _ = fit_correction(np.zeros((300, 3)), features, y, 0.01).layer(nn.Linear(5, 3))
    assert torch.isfinite(weight).all()


def test_statistics_that_several_parts_ask_for_are_estimated_once() -> None:
    x, y = images(600, 8)
    record = fit(x + 0.3, y, maps=()).repair_record
    assert record.parts[0] == "batch_norm"
    assert record.forwards == 3  # as it is, for the statistics, and with them


def test_a_step_must_gain_1_64_standard_errors_and_choosing_is_not_judged_on_those_who_chose() -> None:
    rng = np.random.default_rng(0)
    labels = torch.zeros(90, dtype=torch.int64)
    plain = np.zeros((90, 2))
    better = plain + np.column_stack([rng.normal(0.2, 0.3, 90), np.zeros(90)])
    noise = plain + np.column_stack([rng.normal(0.0, 0.3, 90), np.zeros(90)])
    start = SelectionStep("temperature", "", 0, 0, plain, np.full(90, np.log(2)))

    def score(name: str, logits: np.ndarray) -> SelectionStep:
        return ForwardSelection([start], 0, [], {}, "").score_step(name, "", 1, logits, labels)

    kept, refused = score("better", better), score("noise", noise)
    assert (kept.kept, refused.kept) == (True, False)
    losses = nested_losses([start, refused, kept], 3)
    assert losses.mean() < start.losses.mean()
    # A step that is good in one group alone is chosen by that group for the others only, and refused by them for it.
    first = np.arange(90)[:, None] % 3 == 0
    lucky = np.where(first, better + np.array([2.0, 0.0]), noise - np.array([0.4, 0.0]))
    losses = nested_losses([start, score("lucky", lucky)], 3)
    assert (losses[first[:, 0]] == start.losses[first[:, 0]]).all()


def test_the_whole_way_must_be_certain_over_where_it_began_and_better_than_half() -> None:
    rng = np.random.default_rng(0)
    noise, flat = np.repeat(rng.normal(size=300), 3), np.zeros((900, 2))  # the same in each of three groups
    noise = (noise - noise.mean()) / noise.std(ddof=1)  # the mean of 900 has a standard error of 1/30
    start = SelectionStep("start", "", 0, 0, flat, np.zeros(900))
    half = SelectionStep("half", "", 1, 0, flat, -0.08 - noise)
    whole = SelectionStep("whole", "", 1, 1, flat, -0.1 - 2 * noise, required=0.0)
    certain = replace(whole, losses=-0.3 - 2 * noise, baseline=0)
    worse = replace(certain, losses=half.losses + 0.01)
    assert whole.helps([start, half]), "a little better than half is enough where nothing else is asked"
    assert not replace(whole, baseline=0).helps([start, half]), "0.1 is 1.5 standard errors"
    assert certain.helps([start, half])
    assert not worse.helps([start, half])
    np.testing.assert_array_equal(nested_losses([start, half, replace(whole, baseline=0)], 3), half.losses)
    np.testing.assert_array_equal(nested_losses([start, half, certain], 3), certain.losses)


def test_random_gradients_have_the_fisher_information_of_the_answers() -> None:
    x, y = images(60, 7)
    with frozen(trained()):
        network = Network(trained(), CalibrationSet.read(loader(x, y), device="cpu"))
        space = PixelSpace(Composition([FAMILIES["affine"]((3, 8, 8))]), torch.tensor(0.0), torch.tensor(1.0))
        seen = []
        for seed in range(60):
            gradients, fisher = fisher_gradients(network, space, y, 1.7, seed=seed)
            seen.append(np.column_stack([fisher.theta, fisher.log_temperature]))
        plain = sample_gradients(network, space, y, 1.7)
    for one, other in zip(gradients, plain, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    # Slowly: the gradients by every label, weighted by its probability.
    p, wanted = torch.softmax(plain.logits.double() / 1.7, dim=1).numpy(), 0.0
    for label in range(4):
        with frozen(trained()):
            of_label = sample_gradients(network, space, torch.full_like(y, label), 1.7)
        rows = np.column_stack([of_label.theta, of_label.log_temperature])
        wanted += np.einsum("n,ni,nj->ij", p[:, label], rows, rows)
    fitted = np.mean([rows.T @ rows for rows in seen], axis=0)
    assert np.abs(np.mean(seen, axis=0).sum(axis=0) / np.sqrt(np.diag(wanted) / 60)).max() < 4
    scale = np.sqrt(np.outer(np.diag(wanted), np.diag(wanted)))
    np.testing.assert_allclose(fitted / scale, wanted / scale, atol=0.12)
    # A sample has the same one in any company.
    some = torch.tensor([3, 40, 59])
    with frozen(trained()):
        alone = fisher_gradients(network, space, y, 1.7, some, seed=59)[1]
    np.testing.assert_allclose(alone.theta, seen[-1][some.numpy(), :-1], rtol=1e-4, atol=1e-6)


def test_half_way_lies_between_two_maps_and_their_temperatures() -> None:
    family, out = FAMILIES["gamma"], torch.zeros(3, dtype=torch.bool)
    start = FoldState(out, Composition([family((3, 8, 8))]), 1.0)
    end = FoldState(out, Composition([family((3, 8, 8), torch.tensor([0.8]))]), 4.0)
    half = start.interpolate(end, 0.5)
    assert float(half.composition.theta) == pytest.approx(0.4)
    assert half.temperature == pytest.approx(2.0)
    selection = ForwardSelection([], 0, [start, end], {}, "")
    assert float(average_folds(selection).theta) == pytest.approx(0.4)


def test_without_labels_home_data_is_left_alone_and_moved_data_gains() -> None:
    x, y = images(300, 9)
    same = adapt_with(trained(), [x], augment=None, normalise=nn.Identity())
    assert same.repair_record.parts == ()
    assert "no evidence of an input shift" in same.repair_record.verdict
    torch.testing.assert_close(same(x), trained()(x))
    dark = adapt_with(trained(), loader(x**2, y), augment=None, normalise=nn.Identity(), maps=("gamma",))
    assert not dark.repair_record.labelled
    assert "batch_norm" in dark.repair_record.parts
    xt, yt = images(1500, 10)
    assert nll(dark, xt**2, yt) < 0.9 * nll(trained(), xt**2, yt)


def test_home_data_is_left_alone_if_training_had_no_crops() -> None:
    x, _ = images(300, 9)
    cropped = adapt_with(trained(), [x], normalise=nn.Identity(), maps=())
    assert shift_test(samples(x), augment=Crop(torch.zeros(1, 1, 1))).p_value < 0.01
    assert cropped.repair_record.parts == ()

    class Shift(dict[str, int]):  # which has no hash
        def __call__(self, batch: Tensor) -> Tensor:
            return batch.roll(1, dims=3)

    shifted = adapt_with(trained(), [x], normalise=nn.Identity(), maps=(), augment=Shift())
    assert shifted.repair_record.shift_p_value is not None


def samples(x: Tensor) -> Network:
    return Network(trained(), CalibrationSet.read([(x, torch.zeros(len(x), dtype=torch.int64))], device="cpu"))


def test_networks_without_batch_norm_or_linear_head_skip_those_parts() -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 6 * x

    generator = torch.Generator().manual_seed(0)
    x = torch.rand(120, 3, generator=generator)
    y = torch.multinomial(torch.softmax(6 * x, dim=1), 1, generator=generator)[:, 0]
    notes = repair(Plain(), [(x, y)]).repair_record.notes
    assert any("no layers of nn.BatchNorm with running statistics" in note for note in notes)
    assert any("not the output of one small nn.Linear" in note for note in notes)
    few = repair(Plain(), [(x[:20], y[:20])]).repair_record
    assert few.parts == ()
    assert "20 samples are too few" in few.notes[0]
    assert few.verdict.startswith("No: temperature alone; 20 samples are too few")


def test_a_file_holds_what_changed_and_no_more(balanced: Repaired, tmp_path: Path) -> None:
    x, y = images(200, 11)
    moved = fit(x**0.4, y, parts=("batch_norm", "head"))
    for number, repaired in enumerate((balanced, moved)):
        path = tmp_path / f"{number}.safetensors"
        trueup.save(repaired, path)
        again = trueup.load(path, model=trained())
        assert torch.equal(again(x), repaired(x))
        assert again.repair_record == repaired.repair_record
        assert path.stat().st_size < 20_000
    with pytest.raises(ValueError, match="must be the one that was repaired"):
        trueup.load(path, model=nn.Linear(2, 2))
    other = deepcopy(trained())
    with torch.no_grad():
        other[3].weight.mul_(-1)
    with pytest.raises(ValueError, match="must be the one that was repaired, got one of the same shapes but other"):
        trueup.load(path, model=other)
    assert torch.isfinite(trueup.load(path, model=deepcopy(trained()).half())(x.half())).all()
    with pytest.raises(ValueError, match="hold a clamped network, got a repaired network; load.path, model=network."):
        trueup.io.load_artifact(path, "clamped", model=trained())


def test_a_file_goes_around_a_network_with_a_layer_of_two_names_or_out_of_its_wrapper(tmp_path: Path) -> None:
    x, y = images(200, 11)
    norm = nn.BatchNorm2d(3).eval()
    twice = nn.Sequential(norm, norm, deepcopy(trained()))
    for given, plain in ((twice, twice), (nn.DataParallel(trained()), trained())):
        repaired = repair(given, loader(x**0.4, y), normalise=nn.Identity(), augment=None, parts=("batch_norm",))
        assert repaired.changed
        trueup.save(repaired, tmp_path / "one.safetensors")
        again = trueup.load(tmp_path / "one.safetensors", model=plain)
        torch.testing.assert_close(again(x), repaired(x))


def test_every_kind_of_map_agrees_in_torch_export_and_onnx() -> None:
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name, reason=f"{name} is not installed: trueup[onnx]")
    from trueup.integrations.onnx import check_export

    names = ("shrinkage", "gamma", "colour", "grey_kernel", "radial_gain", "smooth_offset", "row_offset")
    shape, generator = (3, 8, 8), torch.Generator().manual_seed(0)
    parts = [FAMILIES[n](shape, 0.3 * torch.randn(FAMILIES[n].size(shape), generator=generator)) for n in names]
    space = PixelSpace(Composition(parts), torch.full((3, 1, 1), -0.1), torch.full((3, 1, 1), 1.2))
    differences = check_export(Repaired(trained(), before=space, after=Temperature(1.7)), images(9, 12)[0])
    assert differences
    for exporter, difference in differences.items():
        assert isinstance(difference, float), f"{exporter}: {difference}"
        assert difference <= 1e-4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": ("input", "wheels")}, "parts must be some of input, batch_norm, head, weights, got 'wheels'"),
        ({"maps": ("gamma",)}, "maps must have no gamma without a known pixel range, got 'gamma'; pass norm"),
        ({"maps": ("fish",)}, "maps must be some of"),
        ({"augment": "flip"}, 'augment must be "crop", None or a function'),
        ({"normalise": ((0.5,), (0.0,))}, "normalise must have a mean and a positive std"),
        ({"budget": -1.0}, "budget must be a positive number"),
        ({"method": "magic"}, "method must be the name of a method"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], message: str) -> None:
    x, y = images(60, 13)
    with pytest.raises(InputError) as error:
        repair(trained(), [(x, y)], **options)
    assert str(error.value).startswith(message)


def test_the_steps_and_the_inputs_are_drawn(balanced: Repaired) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from trueup.adaptation.report import draw_inputs, draw_steps

    ax = draw_steps(balanced.repair_record)
    assert len(ax.get_yticklabels()) == len(balanced.repair_record.steps)
    assert ax.get_yticklabels()[0].get_text() == "temperature alone"
    x, _ = images(4, 14)
    shown = [picture.get_images()[0].get_array() for picture in draw_inputs(balanced, white_balance(x)).axes]
    assert len(shown) == 8
    torch.testing.assert_close(torch.tensor(np.asarray(shown[0])), white_balance(x)[0].movedim(0, -1))
    clean = x[0].movedim(0, -1).numpy()
    assert np.abs(shown[4] - clean).mean() < 0.5 * np.abs(shown[0] - clean).mean()  # the map undoes what was done


def test_the_verdict_is_as_certain_as_the_gain() -> None:
    selection = ForwardSelection([SelectionStep("temperature", "", 0, 0, np.zeros((2, 2)), np.zeros(2))], 0, [], {}, "")
    certain, likely, doubtful = (
        _verdict(selection, ["red gain 1.20"], [], (0.5, 0.1, error), labelled=True) for error in (0.05, 0.07, 0.11)
    )
    assert certain.startswith("Yes: red gain 1.20 lowered the held-out loss from 0.5000 to 0.4000")
    assert likely == certain.replace("Yes", "Probably").replace("0.0500)", "0.0700)")
    assert doubtful == certain.replace("Yes", "Perhaps").replace("0.0500)", "0.1100)")


def test_a_cause_is_named_only_if_its_family_stands_out() -> None:
    x, y = images(400, 2)
    families = ("affine", "gamma", "shrinkage", "grey_kernel", "smooth_gain")
    shown = fit(white_balance(x), y, parts=("input",), maps=families).repair_record
    assert shown.causes == ("white balance",)
    assert not any("the maps do not name" in note for note in shown.notes)
    # A smoothing kernel and a shrinkage both undo a part of salt and pepper, so neither is a name for it.
    drawn = torch.rand(len(x), 1, 8, 8, generator=torch.Generator().manual_seed(7))
    noisy = torch.where(drawn < 0.06, 0.0, torch.where(drawn > 0.94, 1.0, x))
    record = fit(noisy, y, parts=("input",)).repair_record
    assert record.parts == ("input",)
    assert record.causes in ((), ("noise",))
    unnamed = any("in a way that the maps do not name; the fitted map is" in note for note in record.notes)
    assert unnamed == (record.causes == ())


def test_a_family_with_a_close_rival_does_not_stand_out() -> None:
    rng = np.random.default_rng(0)
    noise = rng.normal(size=(400, 2))
    strong, weak, close = (noise + np.array([shift, 0.0]) for shift in (0.5, 0.1, 0.45))

    def outstanding(**families: np.ndarray) -> set[str]:
        scores = {name: Scores(rows, rows, rows) for name, rows in families.items()}
        return _outstanding(scores, {name: score.p_value(0) for name, score in scores.items()})

    assert outstanding(gamma=strong, geometry=weak) == {"gamma"}
    assert outstanding(gamma=strong, geometry=close) == set()
    assert outstanding(offset=strong, affine=close) == {"offset", "affine"}, "one contains the other"
