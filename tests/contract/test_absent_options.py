"""Laws of options that a row does not have, whose logits are −∞, over METHODS and METRICS."""

import math
import warnings
from functools import cache

import numpy as np
import pytest

from optional import torch
from reference import masked_nll_temperature
from trueup import METHODS, METRICS, compare, evaluate
from trueup._core import native
from trueup._core.arrays import as_arrays, as_logits
from trueup._core.errors import InputError, PaddedOptions

TRUTH = 1.65
BY_CLASSES = {"ms_odir", "dirichlet", "dirichlet_odir", "svs", "sms", "sms_cv", "low_rank", "residual", "diagonal_sms"}
"""Their penalties count the classes."""
BY_FOLDS = {"auto", "smoothing_spline", "venn_abers_cross", "bin_mean_shift"}
"""Their folds follow from a hash of whole rows; in the last, rounding moves a row over the edge of a cell."""
names = pytest.mark.parametrize("name", METHODS)


@cache
def sample(n=600, seed=0):
    """Multiple choice with two to five options, too sure by the temperature `TRUTH`."""
    rng = np.random.default_rng(seed)
    absent = np.arange(5) >= rng.integers(2, 6, size=(n, 1))
    absent = rng.permuted(absent, axis=1)
    z = np.where(absent, -np.inf, 2 * rng.normal(size=(n, 5)))
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    return z * TRUTH, y


def fit(name, logits, labels):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return METHODS[name](logits, labels)


@cache
def fitted(name):
    return fit(name, *sample())


def probs(logits):
    return torch.softmax(torch.as_tensor(logits).double(), dim=1).numpy()


def widened(logits):
    """The same rows with an option that none of them has."""
    return np.concatenate([logits, np.full((len(logits), 1), -np.inf)], axis=1)


@names
def test_absent_stays_absent_and_the_rest_is_a_distribution(name):
    new, _ = sample(60, seed=1)
    absent = np.isneginf(new)
    for dtype in (np.float16, np.float32, np.float64):
        out = fitted(name)(new.astype(dtype))
        assert np.array_equal(np.isneginf(out), absent)
        assert np.isfinite(out[~absent]).all()
        assert (probs(out)[absent] == 0).all()
    tensor = fitted(name)(torch.tensor(new))
    np.testing.assert_allclose(
        tensor.numpy(), fitted(name)(new), rtol=0, atol=1e-6 if name == "density_ratio" else 1e-12
    )
    full = np.where(absent, 0.5, new)
    assert np.isfinite(fitted(name)(full)).all()


@names
def test_rows_with_every_option_are_mapped_alike_beside_others(name):
    new, _ = sample(60, seed=1)
    new = np.where(np.isneginf(new), 0.5, new)
    mixed = new.copy()
    mixed[0, 4] = -np.inf
    assert np.allclose(fitted(name)(mixed)[1:], fitted(name)(new)[1:], atol=1e-9)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in BY_CLASSES | BY_FOLDS])
def test_an_option_that_no_row_has_changes_nothing(name):
    logits, labels = sample()
    new, _ = sample(60, seed=1)
    other = fit(name, widened(logits), labels)
    assert np.allclose(probs(other(widened(new)))[:, :5], probs(fitted(name)(new)), atol=1e-5)


@pytest.mark.parametrize("name", sorted(BY_CLASSES - {"dirichlet"}))
def test_an_option_that_no_row_has_changes_little_where_penalties_count_classes(name):
    logits, labels = sample()
    new, _ = sample(60, seed=1)
    other = fit(name, widened(logits), labels)
    assert np.allclose(probs(other(widened(new)))[:, :5], probs(fitted(name)(new)), atol=0.05)


@pytest.mark.parametrize("name", [name for name in METHODS if name != "auto"])
def test_gradients_are_finite(name):
    if not fitted(name).differentiable:
        pytest.skip("has no useful gradient")
    new, _ = sample(20, seed=1)
    z = torch.tensor(new, requires_grad=True)
    out = torch.log_softmax(fitted(name)(z), dim=1)
    out[~torch.isneginf(out)].sum().backward()
    assert bool(torch.isfinite(z.grad).all())


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("compiled", [True, False])
def test_a_metric_is_that_of_a_probability_of_zero(name, compiled, monkeypatch):
    if name in ("piece", "normalised_entropy"):
        pytest.skip("asks what the logits of the row are, or how many")
    if not compiled:
        monkeypatch.setattr(native, "compiled", None)
    logits, labels = sample(200)
    for dtype in (np.float32, np.float64):
        z = logits.astype(dtype)
        wanted = METRICS[name](np.where(np.isneginf(z), dtype(-830), z), labels)
        assert METRICS[name](z, labels) == pytest.approx(wanted, rel=1e-9, nan_ok=True)


def test_normalised_entropy_is_one_where_all_options_of_a_row_are_alike():
    z = np.array([[0.0, 0.0, -np.inf], [1.0, 1.0, 1.0]])
    assert METRICS["normalised_entropy"](z) == pytest.approx(1.0)
    assert math.isfinite(METRICS["piece"](*sample(200)))


def test_tables_and_their_changes():
    logits, labels = sample()
    table = evaluate(logits, labels)
    assert table["nll"].value == pytest.approx(METRICS["nll"](logits, labels))
    after = fitted("temperature")(logits)
    changes = compare(raw=(logits, labels), temperature=(after, labels)).changes["temperature"]
    assert changes["nll"].high < 0


PADDING = [-50.0, -100.0, -999.0, -9999.0, -1e4, -65504.0, -1e5, -1e7, -1e9, -1e30, -3e9, -123456.7, -1e308]


@pytest.mark.parametrize("padding", PADDING)
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_the_temperature_is_right_whatever_the_padding(padding, dtype):
    logits, labels = sample(2000)
    z = np.where(np.isneginf(logits), max(padding, float(np.finfo(dtype).min)), logits).astype(dtype)
    exact = float(fit("temperature", logits, labels).temperature)
    assert float(fit("temperature", z, labels).temperature) == pytest.approx(exact, rel=1e-3)


@pytest.mark.parametrize("padding", [-100.0, -65504.0, -3e9])
@pytest.mark.parametrize("name", ["temperature_brier", "temperature_focal", "ets"])
def test_so_is_that_of_other_losses(name, padding):
    logits, labels = sample(2000)
    z = np.where(np.isneginf(logits), padding, logits)
    assert float(fit(name, z, labels).temperature) == pytest.approx(
        float(fit(name, logits, labels).temperature), rel=1e-3
    )


def test_the_temperature_equals_a_slow_search_over_the_options():
    logits, labels = sample()
    assert float(fitted("temperature").temperature) == pytest.approx(masked_nll_temperature(logits, labels), rel=1e-4)
    assert float(fit("temperature", *sample(20000)).temperature) == pytest.approx(TRUTH, rel=0.01)


@pytest.mark.parametrize("name", ["isotonic_ovr", "histogram_ovr", "matrix", "venn_abers"])
def test_padding_is_read_as_absent(name):
    logits, labels = sample()
    padded = np.where(np.isneginf(logits), -1e9, logits)
    with pytest.warns(PaddedOptions, match="absent options, as -inf is"):
        calibrator = METHODS[name](padded, labels)
    with pytest.warns(PaddedOptions):
        out = calibrator(padded)
    assert np.allclose(probs(out), probs(fitted(name)(logits)))
    assert np.allclose(calibrator(torch.tensor(padded)).numpy(), out, rtol=1e-9, atol=1e-9)


def test_large_numbers_of_honest_rows_are_no_padding():
    for row in ([1e4, -1e4, 0.0], [0.0, -1e4, -1e4], [-5000.0, -5001.0, -1e4], [3.0, 2.0, -12345.6], [3.0, -9e9, -1e9]):
        assert np.isfinite(as_logits([row])).all()


def test_rows_and_labels_without_an_option_are_refused_by_number():
    inf = np.inf
    with pytest.raises(InputError, match=r"at least 2 options in each row, got 1 in row 1"):
        as_logits([[1.0, 2.0, -inf], [1.0, -inf, -inf]])
    with pytest.raises(InputError, match=r"got 0 in row 0"):
        as_logits([[-inf, -inf]])
    with pytest.raises(InputError, match=r"at least 2 options in each row, got 1 in row 0"):
        as_logits([[1.0, -inf]])
    with pytest.raises(InputError, match=r"got 2 in row 1, where that option is absent \(-inf\), and 1 such in all"):
        as_arrays([[1.0, 2.0, 3.0], [1.0, 2.0, -inf]], [2, 2])
    with pytest.raises(InputError, match="an absent one in row 0"):
        METRICS["nll"]([[1.0, 2.0, -inf]], [[0.5, 0.25, 0.25]])
    with pytest.raises(InputError, match=r"got 2 in row 0, where that option is absent"), pytest.warns(PaddedOptions):
        as_arrays([[1.0, 2.0, -1e9]], [2])
    for bad in (np.nan, np.inf):
        with pytest.raises(InputError, match="finite"):
            as_logits([[1.0, 2.0, -inf], [1.0, 2.0, bad]])
    z, y = as_arrays([[1.0, 2.0, 3.0]], [2])
    with pytest.raises(InputError, match="row 0"):  # labels that were checked beside other logits
        as_arrays(torch.tensor([[1.0, 2.0, -inf]]), y)
    assert as_arrays(z, y)[0] is z
