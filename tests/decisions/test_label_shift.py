"""Label shift: frequencies found again, intervals that cover, and probabilities corrected."""

import json

import numpy as np
import pytest

from optional import torch
from trueup import load, save
from trueup._core.errors import InputError
from trueup.decisions import estimate_prior, shift_prior
from trueup.decisions.label_shift import em_prior, softmax


def draw(n, seed, prior):
    rng = np.random.default_rng(seed)
    y = rng.choice(len(prior), size=n, p=prior)
    return 3 * (1.5 * np.eye(len(prior))[y] + rng.normal(size=(n, len(prior)))), y


OLD, NEW = np.full(4, 0.25), np.array([0.55, 0.3, 0.1, 0.05])


@pytest.mark.parametrize("method", ["em", "bbse"])
def test_intervals_cover_the_new_frequencies(method):
    inside, off = [], []
    for seed in range(12):
        result = estimate_prior(
            draw(1500, 100 + seed, NEW)[0], val=draw(1500, seed, OLD), method=method, n_resamples=60
        )
        inside.append((result.low <= NEW) & (result.high >= NEW))
        off.append(result.prior - NEW)
        assert result.prior.sum() == pytest.approx(1)
        assert result.moved
    assert np.mean(inside) > 0.85
    assert np.abs(np.mean(off, axis=0)).max() < 0.02


def test_correction_gains_accuracy_and_does_no_harm_without_shift():
    val, shifted, same = draw(3000, 0, OLD), draw(4000, 1, NEW), draw(4000, 2, OLD)
    gain = {}
    for name, (z, y) in {"shifted": shifted, "same": same}.items():
        result = estimate_prior(z, val=val, n_resamples=20)
        gain[name] = (result.calibrator(z).argmax(axis=1) == y).mean() - (z.argmax(axis=1) == y).mean()
    assert gain["shifted"] > 0.03
    assert gain["same"] > -0.01


def test_the_test_of_a_move_keeps_its_level():
    p_values = [
        estimate_prior(draw(400, 500 + k, OLD)[0], val=draw(400, k, OLD), n_resamples=1).p_value for k in range(60)
    ]
    assert np.mean(np.array(p_values) < 0.05) <= 0.15
    assert np.mean(np.array(p_values) < 0.5) > 0.25


def test_em_finds_the_maximum():
    rng = np.random.default_rng(0)
    p = rng.dirichlet(np.ones(3), size=300)
    old = np.array([0.2, 0.3, 0.5])
    result = em_prior(p, old)

    def likelihood(prior):
        return np.log(p @ (prior / old)).mean()

    slow = old
    for _ in range(5000):
        w = p * (slow / old)
        slow = (w / w.sum(axis=1, keepdims=True)).mean(axis=0)
    assert likelihood(result) >= likelihood(slow) - 1e-10
    assert np.abs(result - slow).max() < 1e-3


@pytest.mark.parametrize("classes", [2, 10, 70])
def test_frequencies_near_zero_are_exact_too(classes):
    # A weak network: EM takes thousands of steps to bring a frequency down to 0.
    rng = np.random.default_rng(classes)
    y = rng.choice(classes, size=500, p=rng.dirichlet(np.full(classes, 2.0)))
    p = softmax(0.3 * np.eye(classes)[y] + 0.5 * rng.normal(size=(500, classes)))
    weight = rng.multinomial(500, np.full(500, 1 / 500)).astype(float)
    old = np.full(classes, 1 / classes)
    prior = em_prior(p, old, sample_weight=weight)
    gradient = (p / old).T @ (weight / weight.sum() / ((p / old) @ prior))
    assert prior.sum() == pytest.approx(1)
    assert gradient.max() < 1 + 1e-6
    assert np.abs((gradient - 1) * prior).max() < 1e-8


def test_calibrated_rows_need_only_the_old_frequencies():
    rng = np.random.default_rng(0)
    y = rng.choice(2, size=4000, p=[0.8, 0.2])
    x = rng.normal(size=4000) + 2 * y
    z = np.stack([np.zeros(4000), 2 * x - 2], axis=1)  # exact where both are as frequent
    result = estimate_prior(z, old=[0.5, 0.5], n_resamples=50)
    assert result.low[1] < 0.2 < result.high[1]
    assert np.isnan(result.p_value)
    json.dumps(result.to_dict(), allow_nan=False)
    assert "only the class frequencies" in str(result)


def test_a_shift_is_a_calibrator_in_a_file(tmp_path):
    shift = shift_prior(new=NEW, old=OLD)
    z = torch.zeros(1, 4)
    assert np.allclose(torch.softmax(shift(z), dim=1).numpy(), NEW)
    save(shift, tmp_path / "shift.safetensors", n_classes=4)
    assert torch.equal(load(tmp_path / "shift.safetensors")(z), shift(z))
    back = shift_prior(new=OLD, old=NEW)(shift(z))
    assert torch.allclose(torch.softmax(back, dim=1), torch.full((1, 4), 0.25))


def test_bad_input():
    z, y = draw(50, 0, OLD)
    for options, words in (
        ({}, "give either val"),
        ({"val": (z, y), "old": OLD}, "give either val"),
        ({"val": (z[:, :3], y % 3)}, "val must have the 4 classes"),
        ({"old": OLD, "method": "bbse"}, "bbse needs val"),
        ({"old": [0.5, 0.6, 0.1, 0.1]}, "old must be the frequencies"),
        ({"val": (z, y), "method": "mle"}, "method must be em or bbse"),
    ):
        with pytest.raises(ValueError, match=words):
            estimate_prior(z, **options)
    with pytest.raises(InputError, match="old must be positive"):
        shift_prior(new=[0.5, 0.5], old=[1.0, 0.0])


def test_a_class_without_labelled_rows_is_said_to_be_a_guess():
    z = np.random.default_rng(0).normal(size=(200, 3))
    assert "No labelled row has class 2" in str(estimate_prior(z, val=(z, np.arange(200) % 2), n_resamples=5))
