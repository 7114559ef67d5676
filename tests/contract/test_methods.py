"""Laws that every calibrator obeys, run over METHODS."""

import copy
import pickle
import re
import warnings

import numpy as np
import pytest
import torch

from strategies import calibrated
from trueup import METHODS, metrics
from trueup._core.values import parameters
from trueup.calibrators import Calibrator
from trueup.models import as_module

LOGITS, LABELS = calibrated(400, 4, temperature=2.0, scale=2.0)
NEW = calibrated(60, 4, seed=1)[0] * 2
BY_NUMBER = {"dirichlet", "dirichlet_odir", "svs", "sms", "sms_cv", "low_rank", "diagonal_sms"}
"""Repeating rows changes these fits, the order of rows does not."""
SLOW = {"auto", "temperature_ece"}
names = pytest.mark.parametrize("name", METHODS)
_fitted, _inputs = {}, {}


def fit(name, logits=LOGITS, labels=LABELS, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return METHODS[name](logits, labels, **options)


def fitted(name):
    """The calibrator of all data, fitted once; `_inputs` keeps the arrays that it was given."""
    if name not in _fitted:
        _inputs[name] = LOGITS.copy(), LABELS.copy()
        _fitted[name] = fit(name, *_inputs[name])
    return _fitted[name]


def probs(logits):
    return torch.softmax(torch.as_tensor(logits).double(), dim=1).numpy()


@names
def test_rows_are_finite_and_kinds_are_kept(name):
    calibrator = fitted(name)
    assert isinstance(calibrator, Calibrator)
    for dtype in (np.float32, np.float64):
        out = calibrator(NEW.astype(dtype))
        assert isinstance(out, np.ndarray)
        assert out.dtype == dtype
        assert out.shape == NEW.shape
        assert np.isfinite(out).all()
        tensor = calibrator(torch.tensor(NEW.astype(dtype)))
        assert np.allclose(tensor.numpy(), out, rtol=0, atol=1e-12 if dtype == np.float64 else 2e-6)
    assert np.allclose(probs(calibrator(NEW.astype(np.float32))), probs(calibrator(NEW)), atol=2e-5)


@names
def test_half_precision_is_computed_in_single(name):
    for dtype in (torch.float16, torch.bfloat16):
        half = torch.tensor(NEW).to(dtype)
        out = fitted(name)(half)
        assert out.dtype == dtype
        assert torch.equal(out, fitted(name)(half.float()).to(dtype))


@names
def test_argmax_is_kept_where_it_is_said_to_be(name):
    calibrator = fitted(name)
    if calibrator.keeps_argmax:
        for logits in (NEW, LOGITS, NEW * 30, NEW * 0.01, NEW[:, ::-1].copy()):
            assert np.array_equal(calibrator(logits).argmax(axis=1), logits.argmax(axis=1))


@names
def test_shifts_change_nothing_where_it_is_said_so(name):
    calibrator = fitted(name)
    if calibrator.shift_invariant:
        shift = np.random.default_rng(0).normal(size=(len(NEW), 1)) * 20
        assert np.allclose(probs(calibrator(NEW + shift)), probs(calibrator(NEW)), atol=1e-8)


@names
def test_order_and_copies_of_samples_change_nothing_where_it_is_said_so(name):
    calibrator = fitted(name)
    if not calibrator.sample_invariant and name not in BY_NUMBER:
        pytest.skip("said to depend on order or number of samples")
    order = np.random.default_rng(0).permutation(len(LABELS))
    shuffled = fit(name, LOGITS[order], LABELS[order])
    assert np.allclose(probs(shuffled(NEW)), probs(calibrator(NEW)), atol=1e-5)


WEIGHTS = np.random.default_rng(5).integers(0, 4, 200).astype(float)
FLAT = {"dirichlet": 1e-4, "dirichlet_odir": 1e-4, "matrix": 1e-4, "ms_odir": 1e-4, "smoothing_spline": 1e-5}
"""What is minimised agrees to 1e-9; along nearly flat directions probabilities then agree to so much."""
_weighted = {}


def weighted(name):
    if name not in _weighted:
        _weighted[name] = fit(name, LOGITS[:200], LABELS[:200], sample_weight=WEIGHTS)
    return _weighted[name]


@names
def test_a_common_factor_of_the_weights_changes_nothing(name):
    scaled = fit(name, LOGITS[:200], LABELS[:200], sample_weight=WEIGHTS * 0.37)
    assert np.allclose(probs(scaled(NEW)), probs(weighted(name)(NEW)), atol=FLAT.get(name, 1e-6))
    equal = fit(name, LOGITS[:200], LABELS[:200], sample_weight=np.full(200, 2.5))
    plain = fit(name, LOGITS[:200], LABELS[:200])
    assert np.array_equal(equal(NEW), plain(NEW))


@names
def test_rows_of_no_weight_change_nothing(name):
    kept = WEIGHTS > 0
    without = fit(name, LOGITS[:200][kept], LABELS[:200][kept], sample_weight=WEIGHTS[kept])
    assert np.array_equal(without(NEW), weighted(name)(NEW))


@names
def test_whole_weights_are_copies_where_it_is_said_so(name):
    if not weighted(name).sample_invariant or name in ("ms_odir", "auto"):
        pytest.skip("said to depend on order or number of samples, or choosing on folds")
    copies = np.repeat(np.arange(200), WEIGHTS.astype(int))
    copied = fit(name, LOGITS[copies], LABELS[copies])
    assert np.allclose(probs(copied(NEW)), probs(weighted(name)(NEW)), atol=FLAT.get(name, 1e-6))


@names
def test_weights_move_the_fit(name):
    """Rows on which the prediction is wrong weigh more: less confidence is left."""
    wrong = LOGITS.argmax(axis=1) != LABELS
    heavy = fit(name, sample_weight=np.where(wrong, 5.0, 1.0))
    before, after = (probs(c(NEW)).max(axis=1).mean() for c in (fitted(name), heavy))
    assert after < before - 0.02 or name == "identity"


@names
def test_bad_weights_are_named(name):
    ones = np.ones(len(LABELS))
    for weights, message in (
        (-ones, "sample_weight must not be negative, got -1 in row 0"),
        (np.where(LABELS == 1, np.nan, ones), "sample_weight must be finite"),
        (0 * ones, "sample_weight must not all be zero, got 400 zeros"),
        (ones[1:], "sample_weight must have 400 entries, one per row, got 399"),
    ):
        with pytest.raises(ValueError, match=message):
            METHODS[name](LOGITS, LABELS, sample_weight=weights)


@names
def test_classes_may_be_renamed(name):
    order = np.random.default_rng(1).permutation(4)
    renamed = fit(name, LOGITS[:, order], np.argsort(order)[LABELS])
    assert np.allclose(probs(renamed(NEW[:, order])), probs(fitted(name)(NEW))[:, order], atol=2e-5)


@names
def test_overconfidence_is_repaired(name):
    before = metrics.nll(LOGITS, LABELS)
    after = metrics.nll(fitted(name)(LOGITS), LABELS)
    assert after < before or name == "identity"


@names
def test_config_pickle_and_copy(name):
    calibrator = fitted(name)
    expected = calibrator(NEW)
    for other in (
        type(calibrator)(**calibrator.config()),
        pickle.loads(pickle.dumps(calibrator)),
        copy.deepcopy(calibrator),
    ):
        assert np.array_equal(other(NEW), expected)
    again = type(calibrator)(**calibrator.config()).config()
    assert list(again) == list(calibrator.config())


@names
def test_a_calibrator_is_frozen(name):
    calibrator = fitted(name)
    for attribute in (*calibrator.config(), "certificate", "anything"):
        with pytest.raises(AttributeError, match="is frozen"):
            setattr(calibrator, attribute, 1.0)
    for other in (calibrator, pickle.loads(pickle.dumps(calibrator))):
        for parameter in parameters(other).values():
            assert isinstance(parameter, float) or not parameter.flags.writeable


@names
def test_the_module_of_a_calibrator_has_its_parameters_as_buffers(name):
    calibrator, module = fitted(name), as_module(fitted(name))
    assert set(module.state_dict()) == set(parameters(calibrator))
    assert np.allclose(module(torch.tensor(NEW)).numpy(), calibrator(NEW), rtol=0, atol=1e-12)
    assert as_module(module) is module


@names
def test_every_kind_of_array_is_mapped_by_the_same_lines(name):
    strict = pytest.importorskip("array_api_strict")
    calibrator = fitted(name)
    expected = calibrator(NEW)
    out = calibrator(strict.asarray(NEW))
    assert type(out) is type(strict.asarray(NEW))
    assert np.allclose(np.asarray(out), expected, rtol=0, atol=1e-12)


@names
def test_jax_arrays_and_their_gradients(name):
    jax = pytest.importorskip("jax")
    calibrator = fitted(name)
    z = jax.numpy.asarray(NEW[:6], dtype=jax.numpy.float32)
    out = calibrator(z)
    assert isinstance(out, jax.Array)
    assert out.dtype == z.dtype
    assert np.allclose(probs(np.array(out)), probs(calibrator(NEW[:6])), atol=3e-4)
    if calibrator.differentiable:
        tensor = torch.tensor(NEW[:6], dtype=torch.float32, requires_grad=True)
        (calibrator(tensor) ** 2).sum().backward()
        slope = jax.grad(lambda x: (calibrator(x) ** 2).sum())(z)
        assert np.allclose(np.array(slope), tensor.grad.numpy(), rtol=2e-2, atol=2e-2)


@names
def test_nothing_of_a_calibrator_is_trained(name):
    assert list(as_module(fitted(name)).parameters()) == []
    assert not fitted(name)(torch.tensor(NEW)).requires_grad


@names
def test_gradients_flow_where_it_is_said_so(name):
    calibrator = fitted(name)
    if calibrator.differentiable:
        z = torch.tensor(NEW, requires_grad=True)
        calibrator(z).square().sum().backward()
        assert torch.isfinite(z.grad).all()
        assert z.grad.abs().sum() > 0


@names
@pytest.mark.parametrize("scale", [0.02, 500.0])
def test_scales_of_logits(name, scale):
    if name in SLOW and scale < 1:
        pytest.skip("slow: one scale is enough")
    calibrator = fit(name, LOGITS[:200] * scale, LABELS[:200])
    assert np.isfinite(calibrator(NEW * scale)).all()


@names
def test_enormous_logits_after_the_fit(name):
    out = fitted(name)(np.array([[1e4, -1e4, 0.0, 5.0], [1e4 + 1, 1e4, 1e4, 1e4], [0.0, 0.0, 0.0, 0.0]]))
    assert np.isfinite(out).all()


@names
def test_two_classes_and_a_missing_class(name):
    two = calibrated(100, 2, temperature=2.0)
    assert np.isfinite(fit(name, *two)(two[0])).all()
    assert np.isfinite(fit(name, LOGITS[:100], np.minimum(LABELS[:100], 2))(NEW)).all()


@names
@pytest.mark.parametrize("n", [1, 12])
def test_tiny_sets_work_or_name_the_number_needed(name, n):
    message = ""
    try:
        calibrator = fit(name, LOGITS[:n], LABELS[:n])
    except ValueError as error:
        message = str(error)
    if message:
        assert re.search(r"at least \d+|needs \d+", message), message
    else:
        assert np.isfinite(calibrator(NEW)).all()


@names
def test_frames_and_series_of_pandas_may_have_any_index(name):
    pd = pytest.importorskip("pandas")
    rows = slice(0, 120)
    index = np.random.default_rng(0).permutation(120) + 1000
    frame, labels = pd.DataFrame(LOGITS[rows], index=index), pd.Series(LABELS[rows], index=index)
    weights = pd.Series(WEIGHTS[rows], index=index)
    from_pandas = fit(name, frame, labels, sample_weight=weights)
    from_numpy = fit(name, LOGITS[rows], LABELS[rows], sample_weight=WEIGHTS[rows])
    assert np.array_equal(from_pandas(NEW), from_numpy(NEW))


@names
def test_the_input_is_untouched(name):
    new = NEW.copy()
    fitted(name)(new)
    logits, labels = _inputs[name]
    assert np.array_equal(logits, LOGITS)
    assert np.array_equal(labels, LABELS)
    assert np.array_equal(new, NEW)


@names
def test_bad_input_is_named(name):
    """Once for each argument; all that may be wrong with them is tested with `core.arrays`."""
    for logits, labels, message in (
        (np.where(LOGITS > 3, np.nan, LOGITS), LABELS, "logits must be finite"),
        (LOGITS, LABELS + 1, "labels must lie in 0..3"),
        (LOGITS[:0], LABELS[:0], "logits must have at least"),
    ):
        with pytest.raises(ValueError, match=message):
            METHODS[name](logits, labels)


@names
def test_bad_shapes_are_named_when_it_is_used(name):
    with pytest.raises(ValueError, match="logits must have shape"):
        fitted(name)(torch.zeros(3))


@names
def test_docstrings_say_when_not_to_use_it(name):
    if name in ("auto", "temperature_histogram", "diagonal_sms"):
        return
    text = getattr(METHODS[name], "__self__", METHODS[name]).__doc__
    assert "Not for" in text
    assert ">>>" in text
