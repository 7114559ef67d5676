"""Biases of a prompt: against simulated truths, and the promises of the calibrators that come out."""

import numpy as np
import pytest
from scipy.special import softmax

import trueup
from trueup._core.errors import InputError
from trueup.calibrators import average_orders, contextual_bias, position_bias

PLACE = np.array([0.8, 0.1, -0.2, -0.7])


def biased(n=4000, seed=0):
    """Calibrated answers to four options, and the same with a preference for the first places."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, 4)) * 1.5
    return z, z + PLACE, (z + rng.gumbel(size=z.shape)).argmax(axis=1)


def in_all_shifts(content):
    """Logits of every cyclic shift of the options, (questions, 4, 4), with the preference for places."""
    shifts = (np.arange(4) + np.arange(4)[:, None]) % 4
    return content[:, shifts] + PLACE


def test_empty_prompts_show_the_bias():
    honest, logits, labels = biased()
    empty = np.log(np.random.default_rng(1).dirichlet(40 * np.exp(PLACE) / np.exp(PLACE).sum(), size=200))
    calibrator = contextual_bias(empty)
    assert np.allclose(calibrator.bias, PLACE.mean() - PLACE, atol=0.1)
    after = trueup.metrics.nll(calibrator(logits), labels)
    assert after < trueup.metrics.nll(logits, labels) - 0.05
    assert after == pytest.approx(trueup.metrics.nll(honest, labels), abs=0.01)


def test_a_batch_of_questions_serves_as_well():
    honest, logits, labels = biased()
    after = trueup.metrics.nll(contextual_bias(logits)(logits), labels)
    assert after == pytest.approx(trueup.metrics.nll(honest, labels), abs=0.02)


def test_absent_options_have_no_part_in_the_prior():
    few = np.log([[0.7, 0.3, 0.0001]])
    few[0, 2] = -np.inf
    calibrator = contextual_bias(np.concatenate([few, few]))
    out = calibrator(few)
    assert np.isneginf(out[0, 2])
    assert out[0, 0] == pytest.approx(out[0, 1])


def test_permutations_show_the_preference_for_places():
    honest, logits, labels = biased(500)
    calibrator = position_bias(in_all_shifts(honest))
    assert np.allclose(calibrator.bias, PLACE.mean() - PLACE, atol=1e-9)
    assert np.allclose(softmax(calibrator(logits), axis=1), softmax(honest, axis=1))
    assert trueup.metrics.nll(average_orders(in_all_shifts(honest)), labels) == pytest.approx(
        trueup.metrics.nll(honest, labels)
    )


def test_orders_may_be_given_and_must_be_balanced():
    honest, *_ = biased(50)
    shifts = (np.arange(4) + np.arange(4)[:, None]) % 4
    logits = in_all_shifts(honest)[:, ::-1]
    reversed_orders = position_bias(logits, shifts[::-1])
    assert np.allclose(reversed_orders.bias, position_bias(in_all_shifts(honest)).bias)
    per_question = np.broadcast_to(shifts[::-1], logits.shape)
    assert np.allclose(position_bias(logits, per_question).bias, reversed_orders.bias)
    assert average_orders(logits.astype(np.float32), shifts[::-1]).dtype == np.float32
    with pytest.raises(InputError, match="every option in every position equally often"):
        position_bias(logits[:, :2], shifts[:2])
    with pytest.raises(InputError, match="as many orders as options"):
        position_bias(logits[:, :2])
    with pytest.raises(InputError, match="shape"):
        position_bias(honest)
    with pytest.raises(InputError, match="same options"):
        position_bias(np.where(np.arange(4) == 3, -np.inf, logits))


def test_it_is_saved_like_others(tmp_path):
    calibrator = trueup.calibrators.contextual_bias(np.log([[0.7, 0.2, 0.1]]))
    trueup.save(calibrator, tmp_path / "bias.safetensors")
    again = trueup.load(tmp_path / "bias.safetensors")
    assert np.array_equal(again([[1.0, 2.0, 3.0]]), calibrator([[1.0, 2.0, 3.0]]))
