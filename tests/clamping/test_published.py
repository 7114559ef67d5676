"""The published recipes against a loop by hand, their reproducibility, and what they do when they fail."""

import os
import subprocess
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn

import reference
from flat_options import clamp_with as clamp
from trueup._core.optimize import FitError
from trueup.clamping.published_recipes import augment_images, code, focal_losses, paper
from trueup_studies.networks import MLP


def sample(n=60, m=3, classes=4, dtype=torch.float64):
    """A linear network that is too sure, with inputs that are off by a constant."""
    rng = np.random.default_rng(0)
    model = nn.Linear(m, classes).to(dtype)
    weight, bias = rng.normal(size=(classes, m)) * 2, rng.normal(size=classes)
    model.load_state_dict({"weight": torch.from_numpy(weight), "bias": torch.from_numpy(bias)})
    x = rng.normal(size=(n, m))
    y = (0.5 * (x @ weight.T + bias) + rng.gumbel(size=(n, classes))).argmax(axis=1)
    return model, torch.from_numpy(x + 0.5).to(dtype), torch.from_numpy(y)


def loader(x, y, size=25):
    return list(zip(torch.split(x, size), torch.split(y, size), strict=True))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("recipe", "norm"), [(paper, "l2sq"), (code, "l2")])
def test_the_steps_are_those_by_hand(recipe, norm, gamma):
    model, x, y = sample()
    start = torch.tensor([0.1, -0.2, 0.3], dtype=torch.float64)
    momentum = 0.0 if recipe is paper else 0.9
    fitted = clamp(
        model,
        loader(x, y),
        recipe=partial(recipe, epochs=3, batch_size=16, lr=0.05),
        loss="focal",
        gamma=gamma,
        penalty=0.03,
        start=lambda network: start,
        seed=7,
        progress=False,
    )
    generator = torch.Generator().manual_seed(7)
    delta, temperature = reference.descent(
        *(p.detach().numpy() for p in model.parameters()),
        x.numpy(),
        y.numpy(),
        [torch.randperm(len(x), generator=generator).numpy() for _ in range(3)],
        delta=start.numpy(),
        gamma=gamma,
        penalty=0.03,
        norm=norm,
        lr=0.05,
        momentum=momentum,
        batch=16,
    )
    np.testing.assert_allclose(fitted.before.delta.numpy(), delta, atol=1e-10)
    assert fitted.fit_record.temperature == pytest.approx(temperature, abs=1e-10)
    assert fitted.fit_record.norm == norm
    assert (fitted.fit_record.forwards, fitted.fit_record.backwards) == (pytest.approx(4, abs=1), 3.0)


@pytest.mark.parametrize("recipe", [paper, code])
def test_large_inputs_go_through_several_graphs_to_the_same_steps(recipe, monkeypatch):
    model, x, y = sample(n=64)
    sizes = []
    model.register_forward_hook(lambda module, given, out: sizes.append(len(out)) if out.requires_grad else None)
    fits = []
    for rows, seen in ((16, {16}), (5, {5, 4, 2})):
        monkeypatch.setattr("trueup.clamping.calibration_set.GRAPH_VALUES", rows * x.shape[1])
        sizes.clear()
        recipe_of = partial(recipe, epochs=2, batch_size=16)
        fits.append(clamp(model, loader(x, y), recipe=recipe_of, penalty=0.02, progress=False))
        assert set(sizes) == seen
    whole, parts = fits
    np.testing.assert_allclose(parts.before.delta.numpy(), whole.before.delta.numpy(), atol=1e-12)
    assert parts.fit_record.temperature == pytest.approx(whole.fit_record.temperature, abs=1e-12)
    assert parts.fit_record.backwards == whole.fit_record.backwards == 2.0


def test_a_sum_is_the_mean_with_a_rate_times_the_batch():
    model, x, y = sample(n=64)
    options = {"penalty": 0.02, "start": "random", "progress": False}
    by_sum, by_mean = (
        clamp(model, loader(x, y), recipe=partial(paper, epochs=2, batch_size=16, reduction=r, lr=rate), **options)
        for r, rate in (("sum", 0.001), ("mean", 0.016))
    )
    torch.testing.assert_close(by_sum.before.delta, by_mean.before.delta)
    assert by_sum.fit_record.temperature == pytest.approx(by_mean.fit_record.temperature, abs=1e-12)


@pytest.mark.parametrize("recipe", [paper, code])
def test_a_seed_gives_the_same_bits_and_another_gives_others(recipe):
    model, x = MLP(4, inputs=3, hidden=(8,)), sample(dtype=torch.float32)[1]
    y = torch.where(torch.arange(len(x)) % 5 == 0, 0, model(x).argmax(dim=1))
    short = partial(recipe, epochs=2, batch_size=8)
    fits = [clamp(model, loader(x, y), recipe=short, start="random", seed=s, progress=False) for s in (3, 3, 4)]
    one, again, other = (f.before.delta for f in fits)
    assert torch.equal(one, again)
    assert fits[0].fit_record.temperature == fits[1].fit_record.temperature
    assert not torch.equal(one, other)


def test_the_recipes_are_known_by_name_and_by_their_own_settings():
    model, x, y = sample()
    by_paper, by_code = (
        clamp(model, loader(x, y), recipe=name, progress=False).fit_record for name in ("paper", "code")
    )
    start = torch.nn.functional.cross_entropy(model(x), y).item()
    assert by_paper.penalty == pytest.approx(0.1 * start, rel=1e-2)  # at a start whose δ is not quite zero
    assert (by_paper.norm, by_paper.recipe) == ("l2sq", "paper")
    assert (by_code.penalty, by_code.norm, by_code.recipe) == (0.01, "l2", "code")
    assert by_code.backwards == by_paper.backwards == 100


def test_the_second_rule_makes_the_penalty_a_tenth_of_the_loss():
    model, x, y = sample()
    start = torch.full((3,), 0.5, dtype=torch.float64)
    fit = partial(clamp, model, loader(x, y), recipe=partial(paper, epochs=1), penalty="R2", progress=False)
    loss = torch.nn.functional.cross_entropy(model(x + start), y).item()
    assert fit(start=lambda network: start).fit_record.penalty == pytest.approx(0.1 * loss / 0.75)
    with pytest.raises(ValueError, match='penalty="R2" .* start must not be zero'):
        fit(start="zero")


@pytest.mark.filterwarnings("ignore:temperature has no optimum")
@pytest.mark.parametrize("recipe", [paper, code])
def test_a_penalty_too_steep_for_the_rate_is_told_of_or_ends_in_an_error(recipe):
    model, x, y = sample()
    model.train()
    state, random = {name: value.clone() for name, value in model.state_dict().items()}, torch.get_rng_state()
    # λ‖δ‖² is a tenth of the loss at a δ near zero: λ is huge, and each step goes further beyond zero than the last.
    fit = partial(clamp, model, loader(x, y), penalty="R2", progress=False)
    with pytest.warns(UserWarning, match=r"overshot: the penalty of δ went from .* too long for λ = \d"):
        fitted = fit(recipe=partial(recipe, epochs=2, batch_size=60))
    assert fitted.fit_record.objective > 10 * fitted.fit_record.baseline
    if recipe is paper:
        with pytest.raises(FitError, match=r"the descent diverged in epoch \d+: .*; .* a λ below \d"):
            fit(recipe=paper)
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_it_descends_and_reports_its_objective():
    model, x, y = sample(n=300)
    fitted = clamp(model, loader(x, y), recipe=partial(code, batch_size=50, lr=0.05), start="random", progress=False)
    record = fitted.fit_record
    assert record.objective < record.baseline
    q = torch.log_softmax(fitted(x), dim=1)
    mean = -q.gather(1, y[:, None]).mean().item()
    assert record.objective == pytest.approx(mean + 0.01 * fitted.before.delta.norm().item(), abs=1e-9)


def test_an_affine_map_scales_too():
    model, x, y = sample(n=300)
    stretched = loader(1.6 * x, y)
    shift, affine = (
        clamp(
            model, stretched, recipe=partial(paper, lr=0.3, batch_size=100), penalty=1e-4, input_map=m, progress=False
        )
        for m in ("shift", "affine")
    )
    assert affine.fit_record.objective < shift.fit_record.objective
    assert affine.before.scale.shape == (3,)
    assert not affine.before.scale.requires_grad
    assert float(affine.before.scale.mean()) < 0.95


def test_a_box_clips():
    model, x, y = sample()
    x = x.clamp(-1, 1)
    fitted = clamp(
        model, loader(x, y), recipe=partial(paper, epochs=2, lr=0.5), penalty=0.0, box=(-1.0, 1.0), progress=False
    )
    assert float((x + fitted.before.delta).abs().max()) > 1.0
    assert float(fitted.before(x).abs().max()) == 1.0


def test_a_negative_temperature_is_an_error_and_the_model_stays():
    model, x, y = sample()
    model.train()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    sure = model(x).argmax(dim=1)  # a network that is always right wants a T of zero
    with pytest.raises(FitError, match=r"T became negative in epoch 1: T = -.*; this recipe has no guard"):
        clamp(model, loader(x, sure), recipe=partial(paper, lr=50.0), progress=False)
    with pytest.raises(FitError, match=r"the descent diverged in epoch .*, ‖δ‖ = inf"):
        clamp(model, loader(x, y), recipe=partial(paper, lr=50.0), penalty=1.0, start="random", progress=False)
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random)


def test_the_codes_clamp_takes_the_gradient_of_certain_rows():
    logits = torch.tensor([[20.0, 0.0], [1.0, 0.0]], requires_grad=True)
    labels = torch.tensor([1, 0])
    (kept,) = torch.autograd.grad(focal_losses(logits, labels, 1.0, 0.0).sum(), logits)
    (clamped,) = torch.autograd.grad(focal_losses(logits, labels, 1.0, 1e-7).sum(), logits)
    assert kept[0].abs().sum() > 1
    assert clamped[0].abs().sum() == 0
    torch.testing.assert_close(clamped[1], kept[1], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("gamma", [0.05, 0.5, 1.0])
def test_a_row_that_is_certain_has_a_gradient_that_is_a_number(gamma):
    logits = torch.tensor([[200.0, 0.0]], requires_grad=True)
    (gradient,) = torch.autograd.grad(focal_losses(logits, torch.tensor([0]), gamma, 0.0).sum(), logits)
    assert torch.isfinite(gradient).all()


def test_augmentation_crops_flips_and_cuts():
    images = torch.arange(1.0, 2 * 3 * 4 * 5 + 1).reshape(2, 3, 4, 5)
    still = torch.tensor([[0.5, 0.5, 0.0, 0.0, 0.0]] * 2)
    assert torch.equal(augment_images(images, still, 0, padding=1), images)
    flip = torch.tensor([[0.5, 0.5, 0.9, 0.0, 0.0], [0.5, 0.5, 0.1, 0.0, 0.0]])
    assert torch.equal(augment_images(images, flip, 0, padding=1), torch.stack([images[0].flip(2), images[1]]))
    down = augment_images(images, torch.tensor([[0.99, 0.5, 0.0, 0.0, 0.0]] * 2), 0, padding=1)
    assert torch.equal(down[:, :, :3], images[:, :, 1:])
    assert not down[:, :, 3].any()
    cut = augment_images(images, torch.tensor([[0.5, 0.5, 0.0, 0.5, 0.4]] * 2), 2, padding=1)
    assert (cut == 0).sum() == 2 * 3 * 4
    assert not cut[:, :, 1:3, 1:3].any()


def test_augmented_descent_is_reproducible_and_differs():
    x = torch.rand(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    y = torch.arange(30) % 4
    model = MLP(4, inputs=64, hidden=(8,))
    fit = partial(clamp, model, loader(x, y), start="random", progress=False)
    one, again = (fit(recipe=partial(code, epochs=2, augment=True)) for _ in range(2))
    plain = fit(recipe=partial(code, epochs=2))
    assert torch.equal(one.before.delta, again.before.delta)
    assert not torch.equal(one.before.delta, plain.before.delta)
    with pytest.raises(ValueError, match=r"augment=True needs images \(n, C, H, W\)"):
        clamp(sample()[0], loader(*sample()[1:]), recipe=partial(code, augment=True), progress=False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 0}, "epochs must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"lr": 0.0}, "lr must be positive"),
        ({"momentum": 1.0}, r"momentum in \[0, 1\), got lr 0.001, momentum 1.0"),
        ({"reduction": "none"}, "reduction must be"),
    ],
)
def test_bad_options_are_named(options, message):
    model, x, y = sample()
    with pytest.raises(ValueError, match=message):
        clamp(model, loader(x, y), recipe=partial(paper, **options), progress=False)


def descended(x, y):
    fitted = clamp(
        sample()[0],
        loader(x, y),
        recipe=partial(paper, epochs=2, batch_size=16, lr=0.05),
        start="random",
        progress=False,
    )
    return fitted.before.delta, fitted.fit_record.temperature


def test_two_ranks_make_the_steps_of_one(tmp_path):
    path = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ranks = [subprocess.Popen([sys.executable, __file__, str(number), str(tmp_path)], env=path) for number in (0, 1)]
    assert [process.wait(timeout=600) for process in ranks] == [0, 0]
    (delta, temperature), other = (torch.load(tmp_path / f"{number}.pt") for number in (0, 1))
    assert torch.equal(delta, other[0])
    assert temperature == other[1]
    alone = descended(*sample()[1:])
    torch.testing.assert_close(delta, alone[0], rtol=1e-8, atol=1e-10)
    assert temperature == pytest.approx(alone[1], abs=1e-8)


if __name__ == "__main__":
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=number, world_size=2, timeout=timedelta(seconds=600)
    )
    _, x, y = sample()
    torch.save(descended(*((x[:37], y[:37]) if number == 0 else (x[37:], y[37:]))), folder / f"{number}.pt")
    dist.barrier()
    os._exit(0)  # an ordinary end may abort in a thread of gloo's that is still there
