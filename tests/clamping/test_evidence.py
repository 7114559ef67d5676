"""The tests of the mean input gradient: their level, their power, and their way with odd data."""

import numpy as np
import pytest

from trueup.adaptation.forward_selection import score_test
from trueup.clamping.linearized import gradient_test


def test_noise_is_rarely_taken_for_a_signal():
    rng = np.random.default_rng(0)
    # Heavy tails, skew and correlation, as gradients have them.
    mix = rng.normal(size=(5, 5))
    fitted = np.array(
        [
            gradient_test(((rng.exponential(size=(300, 5)) - 1) * rng.standard_t(4, (300, 1))) @ mix.T, n_resamples=200)
            for _ in range(200)
        ]
    )
    assert (fitted < 0.05).mean() <= 0.09
    assert 0.35 < fitted.mean() < 0.65


def test_a_signal_is_found_in_any_direction_and_scale():
    rng = np.random.default_rng(1)
    noise = rng.normal(size=(400, 4)) * [1, 1e-3, 1e3, 1]
    for j in range(4):
        moved = noise.copy()
        moved[:, j] += 0.4 * noise[:, j].std()
        assert gradient_test(moved) < 0.005
    assert gradient_test(noise) > 0.05


def test_it_agrees_with_hotelling_for_normal_data():
    from scipy.stats import f

    rng = np.random.default_rng(2)
    for shift in (0.0, 0.03, 0.08):
        x = rng.normal(size=(500, 6)) + shift
        mean, covariance = x.mean(axis=0), np.cov(x.T)
        statistic = 500 * mean @ np.linalg.solve(covariance, mean)
        expected = f.sf(statistic * (500 - 6) / (6 * 499), 6, 494)
        assert gradient_test(x, n_resamples=5000) == pytest.approx(expected, abs=0.03)


def test_what_a_nuisance_explains_does_not_count():
    rng = np.random.default_rng(3)
    nuisance = rng.normal(size=600)
    nuisance -= nuisance.mean()  # the temperature is at its optimum
    scores = rng.normal(size=(600, 1)) * 0.05 + 0.01 + nuisance[:, None]
    assert gradient_test(scores) > 0.05
    assert gradient_test(scores, nuisance) < 0.005


def test_too_little_to_say_anything():
    rng = np.random.default_rng(4)
    assert gradient_test(rng.normal(size=(3, 4)) + 9) == 1.0
    assert gradient_test(np.zeros((50, 4))) == 1.0
    x = rng.normal(size=(50, 2))
    assert gradient_test(x, seed=1) == gradient_test(x, seed=1)


def test_mistakes_that_did_not_happen_count_as_chance():
    """Answers are mostly sure and right: the gradients' own signs call that a signal, those of the answers do not."""
    rng = np.random.default_rng(5)
    local, with_fisher = [], []
    for _ in range(150):
        x, p = rng.normal(size=(100, 6)) + 1, np.minimum(1, 0.02 * rng.exponential(size=100) ** 2)
        slope = (p - (rng.random(100) < p))[:, None] * x
        fisher = (np.sqrt(p * (1 - p)) * rng.normal(size=100))[:, None] * x
        local.append(score_test(slope, slope, n_resamples=400))
        with_fisher.append(score_test(slope, np.concatenate([slope, fisher]), n_resamples=400))
    assert (np.array(local) < 0.05).mean() > 0.15
    assert (np.array(with_fisher) < 0.05).mean() <= 0.09


def test_signs_are_an_exact_test_of_symmetric_gradients_however_many():
    rng = np.random.default_rng(6)
    fitted = [score_test(x, x, n_resamples=200) for x in rng.standard_t(2, size=(200, 60, 25))]
    assert 0.01 <= (np.array(fitted) < 0.05).mean() <= 0.09
    assert score_test(x := rng.normal(size=(400, 4)) * [1, 1e-3, 1e3, 1] + [0, 3e-4, 0, 0], x) < 0.005
    assert score_test(np.zeros((50, 4)), np.zeros((50, 4))) == 1.0
