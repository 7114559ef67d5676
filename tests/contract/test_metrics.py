"""Laws that every metric obeys, run over METRICS."""

import inspect
import math

import numpy as np
import pytest

from optional import torch
from strategies import calibrated
from trueup import METRICS

LOGITS, LABELS = calibrated(300, 4, temperature=1.7, scale=1.5)
ORDERED = {"skce_linear"}  # pairs neighbours: by definition it depends on the rows' order
SLOPPY = {"debiased_l1", "aece", "ece_sweep", "piece"}  # a row may change its bin when the last digits change
OUTSIDE_ONE = {"nll": math.inf, "entropy": math.log(4), "brier": 2.0, "observed_expected": math.inf}
SIGNED = {"debiased_l1": -0.1, "skce": -0.1, "skce_linear": -0.1}
SIGNED |= {"calibration_intercept": -math.inf, "calibration_in_the_large": -math.inf}
REGRESSIONS = {"calibration_intercept", "calibration_slope", "calibration_in_the_large"}  # not of certainty alone

names = pytest.mark.parametrize("name", METRICS)


def options(name):
    return {"k": 2} if name == "top_k" else {}


def value(name, logits=LOGITS, labels=LABELS):
    return METRICS[name](logits, labels, **options(name))


@names
def test_it_is_a_float_in_range(name):
    found = value(name)
    assert type(found) is float
    assert math.isfinite(found)
    assert SIGNED.get(name, 0.0) <= found <= OUTSIDE_ONE.get(name, 1.0)


@names
def test_signature_takes_the_pair_and_then_keywords(name):
    first, second, *others = inspect.signature(METRICS[name]).parameters.values()
    assert (first.name, second.name) == ("logits", "labels")
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in others)
    assert METRICS[name].__doc__
    assert ">>>" in METRICS[name].__doc__


@names
def test_order_of_rows_does_not_matter(name):
    if name in ORDERED:
        pytest.skip("depends on the order of rows by definition")
    order = np.random.default_rng(0).permutation(len(LABELS))
    assert value(name, LOGITS[order], LABELS[order]) == pytest.approx(value(name), rel=1e-9, abs=1e-12)


@names
def test_names_of_classes_do_not_matter(name):
    order = np.random.default_rng(1).permutation(4)
    renamed = np.argsort(order)[LABELS]
    assert value(name, LOGITS[:, order], renamed) == pytest.approx(value(name), rel=1e-7, abs=1e-9)


@names
def test_a_constant_added_to_a_row_does_not_matter(name):
    if name == "piece":
        pytest.skip("its features are the logits themselves here")
    shift = np.random.default_rng(2).normal(size=(len(LABELS), 1)) * 10
    assert value(name, LOGITS + shift) == pytest.approx(value(name), rel=1e-6, abs=1e-8)


@names
def test_numpy_torch_and_lists_agree(name):
    expected = value(name)
    assert value(name, torch.tensor(LOGITS), torch.tensor(LABELS)) == expected
    assert value(name, LOGITS.tolist(), LABELS.tolist()) == expected
    assert value(name, np.asfortranarray(LOGITS), LABELS.astype(np.uint8)) == pytest.approx(expected, rel=1e-9)


@names
def test_single_precision_is_close(name):
    assert value(name, LOGITS.astype(np.float32)) == pytest.approx(value(name), abs=2e-2 if name in SLOPPY else 1e-5)


@names
def test_half_precision_equals_single(name):
    for dtype in (torch.float16, torch.bfloat16):
        half = torch.tensor(LOGITS).to(dtype)
        assert value(name, half) == pytest.approx(value(name, half.float()), rel=1e-12, abs=1e-14)


@names
def test_nothing_gives_nan(name):
    assert math.isnan(value(name, np.zeros((0, 4)), np.zeros(0, int)))


@names
def test_extreme_scales_stay_finite(name):
    for scale in (0.02,) if name in REGRESSIONS else (0.02, 1e4):
        assert math.isfinite(value(name, LOGITS * scale))


@names
def test_all_right_all_wrong_and_a_missing_class(name):
    right = LOGITS.argmax(axis=1)
    wrong = LOGITS.argmin(axis=1)
    single = {
        "misclassification_auroc",
        "auroc",
        "misclassification_aupr",
        "misclassification_fpr95",
        *REGRESSIONS,
    }  # undefined where all are right, or all wrong
    for labels in (right, wrong):
        found = value(name, labels=labels)
        assert math.isnan(found) or math.isfinite(found)
        assert not math.isnan(found) or name in single
    assert math.isfinite(value(name, labels=np.minimum(LABELS, 2)))


@names
def test_the_input_is_untouched(name):
    logits, labels = LOGITS.copy(), LABELS.copy()
    value(name, logits, labels)
    assert np.array_equal(logits, LOGITS)
    assert np.array_equal(labels, LABELS)


@names
def test_bad_input_is_named(name):
    """Once for each argument; all that may be wrong with them is tested with `core.arrays`."""
    with pytest.raises(ValueError, match="logits must be finite"):
        value(name, np.where(LOGITS > 3, np.nan, LOGITS))
    if name not in ("entropy", "normalised_entropy"):  # which do not use the labels
        with pytest.raises(ValueError, match="labels must lie in 0..3"):
            value(name, labels=LABELS + 1)
