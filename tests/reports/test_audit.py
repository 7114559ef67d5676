"""The audit: the choice is by cross-validation alone, failures are kept, and the words fit the numbers."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

from optional import torch
from trueup import METHODS, Predictions, compare, load
from trueup._core import arrays
from trueup.calibrators import choose, cross_fit
from trueup.convert import as_event
from trueup.metrics.intervals import Interval
from trueup.reports import Audit, Report, method_title, report
from trueup.reports.audit import DEFAULT, FAST, RAW, SLOW, methods_for


def drawn(n=1000, classes=4, sharper=3.0, seed=0):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, classes))
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    return Predictions((sharper * z).astype(np.float32), y)


@pytest.mark.parametrize("n_folds", [1, 0, 2.5, True])
def test_folds_are_two_or_more(n_folds):
    with pytest.raises(ValueError, match=f"^n_folds must be a whole number of at least 2, got {n_folds}$"):
        report(drawn(100), methods=["temperature"], n_folds=n_folds)


@pytest.fixture(scope="module")
def result():
    return report(drawn(), drawn(seed=1), methods=["temperature", "svs", "histogram"], progress=False).audit


def test_choice_is_that_of_choose(result):
    fitted = choose(["identity", "temperature", "svs", "histogram"])(*drawn())
    assert result.chosen == fitted.choice.chosen == "temperature"
    for name, mean in fitted.choice.scores.items():
        assert result.losses[RAW if name == "identity" else name][0] == pytest.approx(mean, abs=1e-9)


def test_scores_are_those_of_the_calibrators_on_the_test_rows(result):
    test = drawn(seed=1)
    after = {name: Predictions(METHODS[name](*drawn())(test.logits), test.labels) for name in result.calibrators}
    expected = compare({RAW: test, **after})
    assert result.scores.methods == (RAW, "temperature", "svs", "histogram")
    for name in expected.methods:
        assert result.scores[name, "ece"].value == pytest.approx(expected[name, "ece"].value, abs=1e-6)
        np.testing.assert_allclose(result.pairs[name][0], {RAW: test, **after}[name].logits, atol=1e-5)
    assert result.pairs["svs"][0].dtype == np.float32
    assert not result.cross_fitted
    assert result.calibration_rows == 1000


def test_the_test_rows_have_no_part_in_the_choice():
    val = drawn()
    # Test rows on which no temperature but 1 would do.
    other = report(val, drawn(seed=1, sharper=1.0), methods=["temperature"], progress=False).audit
    assert other.chosen == "temperature"


def test_one_file_is_cross_fitted():
    pair = drawn()
    result = report(pair, methods=["vector"], progress=False, n_folds=4).audit
    held_out = cross_fit("vector", n_folds=4)(*pair)
    np.testing.assert_allclose(result.pairs["vector"][0], held_out, atol=1e-6)
    # The calibrator delivered has seen all rows.
    np.testing.assert_allclose(
        result.calibrators["vector"](pair.logits), METHODS["vector"](*pair)(pair.logits), atol=1e-6
    )
    assert result.cross_fitted
    assert result.n_folds == 4


def test_calibrated_network_is_left_alone():
    result = report(drawn(sharper=1.0), drawn(sharper=1.0, seed=1), methods=["temperature"], progress=False).audit
    assert result.chosen == RAW
    assert "No miscalibration of this network is statistically significant" in result.verdict()


def test_a_failing_method_is_recorded_and_the_rest_go_on():
    def broken(logits, labels):
        raise RuntimeError("no\nluck")

    def needy(logits, labels):
        raise ValueError("needs 10,000 rows, got 1000")

    def lost(logits, labels):
        return lambda z: z * float("nan")

    methods = {"broken": broken, "needy": needy, "lost": lost, "temperature": METHODS["temperature"]}
    result = report(drawn(), drawn(seed=1), methods=methods, progress=False).audit
    assert dict(result.failures) == {
        "broken": "RuntimeError: no luck",
        "needy": "needs 10,000 rows, got 1000",
        "lost": result.failures["lost"],
    }
    assert "must be finite" in result.failures["lost"]
    assert result.scores.methods == (RAW, "temperature")
    assert set(result.losses) == {RAW, "temperature"}
    assert set(result.seconds) == set(methods)


def test_nothing_that_can_be_fitted_leaves_the_network():
    def broken(logits, labels):
        raise ValueError("no")

    result = report(drawn(), drawn(seed=1), methods={"broken": broken}, progress=False).audit
    assert result.chosen == RAW
    assert "No method could be tried" in result.verdict()


def test_interruption_passes_through():
    def interrupted(logits, labels):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        report(drawn(), methods={"interrupted": interrupted}, progress=False)


def test_warnings_are_kept_once_and_not_shown():
    def noisy(logits, labels):
        warnings.warn("stopped at its\n bound", stacklevel=2)
        return METHODS["temperature"](logits, labels)

    with warnings.catch_warnings(record=True) as outside:
        warnings.simplefilter("always")
        result = report(drawn(), methods={"noisy": noisy}, progress=False).audit
    assert result.warnings["noisy"] == ("stopped at its bound",)
    assert not outside


def test_steps_are_told_before_each_fit():
    seen = []
    methods = ["temperature", "histogram"]
    report(drawn(), methods=methods, on_step=lambda *step: seen.append(step), progress=False)
    assert seen == [("temperature", 0, 2), ("histogram", 1, 2)]


def test_extra_predictions_stand_in_the_table_but_are_not_chosen():
    val, test = drawn(), drawn(seed=1)
    perfect = Predictions(test.logits / 3, test.labels)
    result = report(val, test, methods=["histogram"], extra={"clamping": perfect}, progress=False).audit
    assert result.scores.methods == (RAW, "histogram", "clamping")
    assert result.chosen in (RAW, "histogram")
    assert "clamping" not in result.losses
    with pytest.raises(ValueError, match="the names of extra must differ from those of the methods, got 'histogram'"):
        report(val, test, methods=["histogram"], extra={"histogram": perfect}, progress=False)


def test_torch_and_half_precision():
    z, y = drawn(n=300)
    expected = report((z, y), methods=["temperature"], progress=False).audit
    result = report((torch.from_numpy(z), torch.from_numpy(y)), methods=["temperature"], progress=False).audit
    assert result.losses == expected.losses
    half = report((torch.from_numpy(z).bfloat16(), torch.from_numpy(y)), methods=["temperature"], progress=False).audit
    assert half.losses["temperature"][0] == pytest.approx(expected.losses["temperature"][0], abs=0.01)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"methods": "temperature"}, "methods must be several names"),
        ({"methods": ["temprature"]}, "methods must be names of METHODS, got 'temprature'"),
        ({"test": (np.zeros((5, 3)), np.zeros(5, int))}, "test must have the 4 classes"),
        ({"test": (np.zeros((0, 4)), np.zeros(0, int))}, "at least 1 rows"),
    ],
)
def test_what_is_wrong_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        report(drawn(), progress=False, **options)


def test_too_few_rows():
    with pytest.raises(ValueError, match="at least 10 rows, got 9"):
        report(drawn(n=9), progress=False)


def test_methods_by_size_and_their_names():
    assert methods_for(5000, 100) == DEFAULT
    assert methods_for(5000, 10) == DEFAULT + SLOW
    assert methods_for(50_000, 1000) == methods_for(1000, 1000) == methods_for(500_000, 10) == FAST
    assert set(FAST) <= set(DEFAULT)
    assert {*DEFAULT, *FAST, *SLOW} <= set(METHODS)
    assert method_title("<my>") == "<my>"


def test_identity_and_raw_are_not_fitted_twice():
    result = report(drawn(), methods=["identity", "raw", "temperature", "temperature"], progress=False).audit
    assert result.scores.methods == (RAW, "temperature")


def test_to_dict_is_plain_and_whole(result):
    plain = result.to_dict()
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain
    assert plain["schema"] == 1
    assert set(plain) == {
        "schema", "verdict", "chosen", "titles", "losses", "seconds", "failures", "warnings", "calibration_rows",
        "cross_fitted", "n_folds", "bins", "seed", "scores",
    }  # fmt: skip


@cache
def some_scores():
    return compare({RAW: drawn(n=50), "temperature": drawn(n=50)})


def told(said, right, before, after, *, chosen="temperature", p=(0.001, 0.9), high=-0.01, rows=2000, changes=None):
    """The verdict of an audit with these numbers."""
    values = {
        RAW: {"confidence": said, "accuracy": right, "ece": before, "nll": 0.5},
        "temperature": {"confidence": right, "accuracy": right, "ece": after, "nll": 0.4},
    }
    intervals = {name: {m: Interval(v, v, v) for m, v in each.items()} for name, each in values.items()}
    highs = changes or {"ece": high, "nll": high}
    change = {name: Interval(-0.1, -0.2, each) for name, each in highs.items()}
    base = some_scores()
    tests = dict(
        zip(
            values,
            (
                replace(
                    base.tests[RAW],
                    p_value=each,
                    independent_rows=float(rows),
                    overconfidence_z=100 * (said - right),
                    slope=0.5,
                    slope_error=0.1,
                )
                for each in p
            ),
            strict=True,
        )
    )
    scores = replace(base, rows=rows, values=intervals, tests=tests, changes={"temperature": change})
    return Audit.verdict(SimpleNamespace(scores=scores, chosen=chosen, calibrators={"temperature": None}))


def test_verdicts():
    assert told(0.971, 0.922, 0.046, 0.009) == (
        "This network is overconfident: its mean confidence is 97.1 %, its accuracy 92.2 %. Temperature scaling "
        "calibrates it: the calibration error (ECE) falls from 0.0460 to 0.0090, where 0.1280 is expected by "
        "chance (p ≤ 0.9)."
    )
    assert told(0.9, 0.95, 0.05, 0.009).startswith("This network is underconfident: its mean confidence is 90.0 %")
    assert "removes most of this" in told(0.971, 0.922, 0.046, 0.012, p=(0.001, 0.001))
    assert "removes part of this" in told(0.971, 0.922, 0.046, 0.035, p=(0.001, 0.001))
    assert "calibrates it: the log-loss falls from 0.5000 to 0.4000 (p ≤ 0.9)." in told(
        0.971, 0.922, 0.001, 0.001, changes={"ece": 0.01, "nll": -0.01}
    )
    assert "is not statistically significant: 0.0460 before, 0.0450 after" in told(
        0.971, 0.922, 0.046, 0.045, high=0.01
    )
    assert "The one method tried is not shown to help" in told(0.971, 0.922, 0.046, 0.045, chosen=RAW)
    assert told(0.921, 0.919, 0.01, 0.01, chosen=RAW, p=(0.4, 0.4)) == (
        "No miscalibration of this network is statistically significant: its mean confidence is 92.1 %, its accuracy "
        "91.9 %. The data do not show that calibration is needed."
    )
    assert "91.9 %. 50 rows are too few to tell. The data do not show" in told(
        0.921, 0.919, 0.01, 0.01, chosen=RAW, p=(0.4, 0.4), rows=50
    )
    assert "still lowers its log-loss from 0.5000 to 0.4000" in told(0.921, 0.919, 0.01, 0.01, p=(0.4, 0.4))
    assert "No method improves it significantly" in told(0.921, 0.919, 0.01, 0.01, p=(0.4, 0.4), high=0.1)
    assert "miscalibrated: right on average, but its confidences are too extreme (its mean" in told(
        0.921, 0.919, 0.04, 0.01
    )
    assert "its mean confidence is 99.70 %, its accuracy 97.0 %" in told(0.997, 0.97, 0.027, 0.01)


TITLES = {
    RAW: "No calibration",
    "identity": "No calibration",
    "temperature": "Temperature scaling",
    "temperature_ece": "Temperature scaling (least ECE)",
    "temperature_ece_wide": "Temperature scaling (least ECE, wide search)",
    "temperature_focal": "Temperature scaling (focal loss)",
    "temperature_brier": "Temperature scaling (Brier score)",
    "vector": "Vector scaling",
    "matrix": "Matrix scaling",
    "ms_odir": "Matrix scaling, ODIR",
    "dirichlet": "Dirichlet calibration",
    "dirichlet_odir": "Dirichlet calibration, ODIR",
    "svs": "Structured vector scaling",
    "sms": "Structured matrix scaling",
    "ets": "Ensemble temperature scaling",
    "isotonic_ovr": "Isotonic regression, one against the rest",
    "imax_shared": "I-Max binning, classes shared",
    "diagonal_sms": "Diagonal map, then structured matrix scaling",
    "auto": "Automatic choice",
    "clamping": "Neural Clamping",
}


def test_titles_are_those_that_textbooks_have():
    assert {name: method_title(name) for name in TITLES} == TITLES


@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_a_title(name):
    title = METHODS.title(name)
    assert method_title(name) == title
    assert title != name
    assert title[0].isupper()
    assert len(title) < 50
    assert "." not in title


def test_real_network(data):
    file = data / "logits" / "cifar10_resnet32.npz"
    pairs = (load(file, split=name) for name in ("val", "test"))
    result = report(*pairs, methods=["temperature", "svs"], progress=False).audit
    assert result.chosen != RAW
    assert result.scores[result.chosen, "ece"].value < 0.02 < result.scores[RAW, "ece"].value


@pytest.mark.parametrize("whole", [True, False])
def test_every_pair_is_checked_once(monkeypatch, whole):
    """Those of calibration and test, and for each method its held-out predictions and those of the test rows."""
    scans = []
    check = arrays.native.all_within
    monkeypatch.setattr(arrays.native, "all_within", lambda x, *rest: scans.append(tuple(x.shape)) or check(x, *rest))
    methods = ["temperature", "vector", "histogram", "isotonic", "spline"]
    result = report(drawn(300), drawn(200, seed=1), methods=methods, progress=False).audit
    if whole:
        Report(result).html()
    assert sorted(scans) == sorted([(300, 4), (200, 4)] * (1 + len(methods)))
    assert isinstance(result.pairs[RAW][0], np.ndarray)


def test_labels_that_are_changed_later_do_no_harm():
    test = drawn(seed=1)
    result = report(drawn(), test, methods=["temperature"], progress=False).audit
    before = test.labels.copy()
    test.labels[:] = 10**9
    np.testing.assert_array_equal(result.pairs["temperature"][1], before)


def test_an_event_of_several_classes_is_audited_by_its_probability():
    val, test = drawn(), drawn(seed=1)
    named = ["ant", "bee", "cat", "dog"]
    result = report(val, test, methods=["platt"], event="cat", class_names=named, progress=False).audit
    plain = report(as_event(*val, 2), as_event(*test, 2), methods=["platt"], progress=False).audit
    assert result.losses == plain.losses
    assert result.scores.caption().endswith("the event is cat, 15 bins")
    assert "mean predicted probability of cat is" in result.verdict()
    assert result.scores[RAW, "observed"].value == pytest.approx((test.labels == 2).mean())
    assert {"event_brier", "miscalibration", "discrimination", "auroc", "calibration_slope"} <= set(
        result.scores.metrics
    )
    with pytest.raises(ValueError, match=r"event must be a class, 0\.\.3: ant, bee, cat, dog, got 'cow'"):
        report(val, test, event="cow", class_names=named, progress=False)
    with pytest.raises(ValueError, match=r"event must be a class, 0\.\.3, got 'cat'; class_names= names the classes"):
        report(val, test, event="cat", progress=False)


def test_the_page_of_an_event_does_not_speak_of_confidence_and_accuracy():
    val = as_event(*drawn(), 1)
    text = Report(report(val, methods=["platt"], progress=False).audit).html()
    text = text[text.index("<main>") : text.index("</main>")]
    assert "Miscalibration" in text
    assert not re.search(r"[Cc]onfiden(ce|t)\b(?! interval)|[Aa]ccuracy", re.sub(r"<[^>]*>", " ", text))
