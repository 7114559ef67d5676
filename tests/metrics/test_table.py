import inspect
import json
import math

import numpy as np
import pytest

from optional import torch
from strategies import calibrated
from trueup import METRICS, Predictions, compare, evaluate
from trueup.metrics import evaluate_shards
from trueup.metrics.resampling import Resampling
from trueup.metrics.table import DEFAULT

PAIR = calibrated(2000, 4, temperature=2.0)
LOGITS, LABELS = PAIR


def test_values_are_those_of_the_metrics():
    scores = evaluate(
        *PAIR, metrics=[name for name in DEFAULT if name != "confidence"] + ["smooth_ece", "top_label_brier"]
    )
    for metric in scores.metrics:
        assert scores[metric].value == pytest.approx(METRICS[metric](*PAIR), abs=1e-12), metric
    assert math.isnan(scores["smooth_ece"].low)


def test_all_tables_have_the_same_defaults():
    def defaults(function):
        return {
            name: p.default for name, p in inspect.signature(function).parameters.items() if p.default is not p.empty
        }

    ours = defaults(evaluate)
    for column in ("sample_weight", "groups", "clusters", "class_names"):  # of shards they are columns of the files
        del ours[column]
    assert 1000 in ours.values()  # resamples
    assert ours.items() <= defaults(compare).items()
    assert ours.items() <= (defaults(evaluate_shards) | defaults(Resampling)).items()


def test_numpy_torch_and_predictions_agree():
    numpy, torch_ = evaluate(*PAIR), evaluate(torch.tensor(LOGITS), torch.tensor(LABELS))
    assert numpy.to_dict() == torch_.to_dict() == evaluate(*Predictions(*PAIR)).to_dict()


def test_it_prints_an_aligned_table_and_a_verdict():
    text = str(evaluate(*PAIR))
    assert text.startswith("2,000 rows, 4 classes, 15 bins\n")
    table = text.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in table[1:]] == list(DEFAULT)
    assert len({len(line) for line in table}) == 1
    assert "It is miscalibrated and overconfident" in text
    assert "right" in text
    assert repr(evaluate(*PAIR)) == text


@pytest.mark.parametrize(
    ("temperature", "words"), [(1.0, "No clear evidence of miscalibration"), (0.5, "miscalibrated and underconfident")]
)
def test_other_verdicts(temperature, words):
    assert words in evaluate(*calibrated(2000, 4, temperature=temperature)).verdict()


def test_two_methods_side_by_side():
    scores = compare(raw=PAIR, temperature=(LOGITS / 2, LABELS))
    change = scores.changes["temperature"]
    assert change["ece"].value == pytest.approx(scores["temperature", "ece"].value - scores["raw", "ece"].value)
    assert change["ece"].high < 0
    assert change["nll"].high < 0
    assert change["accuracy"].value == change["accuracy"].low == change["accuracy"].high == 0
    header = str(scores).split("\n\n")[1].splitlines()[0].split()
    assert header[:4] == ["metric", "raw", "temperature", "change"]
    with pytest.raises(KeyError, match="there are several methods"):
        scores["ece"]


def test_many_methods_are_rows_with_marks():
    scores = compare({"raw": PAIR, "one": (LOGITS / 2, LABELS), "same": PAIR, "bins": (LOGITS / 3, LABELS)})
    table = str(scores).split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in table] == ["method", "raw", "one", "same", "bins"]
    assert "*" not in table[1]
    assert "*" in table[2]
    assert "*" not in table[3]
    assert "excludes 0" in str(scores)


def test_dict_json_pandas_html():
    scores = compare(raw=PAIR, half=(LOGITS / 2, LABELS), metrics=("ece", "smooth_ece"))
    plain = json.loads(scores.to_json())
    assert plain == scores.to_dict()
    assert plain["schema"] == 1
    assert plain["methods"]["half"]["metrics"]["smooth_ece"]["low"] is None
    assert plain["methods"]["raw"]["change"] == {}
    assert plain["methods"]["half"]["change"]["ece"]["value"] == scores.changes["half"]["ece"].value
    frame = scores.to_pandas()
    assert frame.shape == (4, 8)
    assert frame.set_index(["method", "metric"]).loc[("half", "ece"), "value"] == scores["half", "ece"].value
    page = compare({"<b>": PAIR})._repr_html_()
    assert "<table>" in page
    assert page.count("<tr>") == len(DEFAULT) + 1
    assert "<b>" not in compare({"<b>": PAIR, "x": PAIR})._repr_html_()


def test_no_rows():
    scores = evaluate(np.zeros((0, 3)), np.zeros(0, int))
    assert all(math.isnan(i.value) for i in scores.values["network"].values())
    assert "There are no rows" in str(scores)
    assert json.loads(scores.to_json())["methods"]["network"]["metrics"]["ece"]["value"] is None


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("compare needs at least one method", compare),
        ("raw must be a pair (logits, labels), got int", lambda: compare(raw=3)),
        ("raw: labels must lie in 0..3, got 0..7", lambda: compare(raw=(LOGITS, np.where(LABELS == 3, 7, LABELS)))),
        ("b must have the 2000 rows that a has, got 10", lambda: compare(a=PAIR, b=(LOGITS[:10], LABELS[:10]))),
        ("b must have the labels of a", lambda: compare(a=PAIR, b=(LOGITS, np.roll(LABELS, 1)))),
        ("metrics must be names of METRICS, got 'beauty'", lambda: evaluate(*PAIR, metrics=["beauty"])),
        ("bins must be a whole number", lambda: evaluate(*PAIR, bins=0)),
        ("bins must be a whole number of at least 1, got 15.0", lambda: evaluate(*PAIR, bins=15.0)),
        ("bins must be a whole number of at least 1, got None", lambda: evaluate(*PAIR, bins=None)),
        ("n_resamples must be a whole number of at least 1, got 0", lambda: evaluate(*PAIR, n_resamples=0)),
        ("n_resamples must be a whole number of at least 1, got 2.5", lambda: evaluate(*PAIR, n_resamples=2.5)),
        ("metrics must be a sequence of names, such as ('ece',), got 'ece'", lambda: evaluate(*PAIR, metrics="ece")),
        (
            "b must have the 4 classes that a has, got 6",
            lambda: compare(a=PAIR, b=(np.pad(LOGITS, [(0, 0), (0, 2)]), LABELS)),
        ),
        ("level must lie between 0 and 1", lambda: evaluate(*PAIR, level=2)),
    ],
)
def test_refusals(message, call):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)


def test_the_input_is_untouched():
    before = LOGITS.copy(), LABELS.copy()
    evaluate(*PAIR)
    assert np.array_equal(before[0], LOGITS)
    assert np.array_equal(before[1], LABELS)


@pytest.mark.parametrize(("right", "side"), [(0.1, "overconfident"), (0.8, "underconfident")])
def test_the_verdict_leans_the_right_way_below_one_half(right, side):
    logits = np.log(np.full((1000, 3), [0.4, 0.3, 0.3]))
    labels = (np.arange(1000) >= 1000 * right).astype(int)
    assert f"and {side}" in evaluate(logits, labels).verdict()


def test_the_verdict_leans_where_every_confidence_is_one():
    assert "and overconfident" in evaluate(np.eye(3)[[0] * 50] * 1e4, np.arange(50) % 2).verdict()


def test_levels_are_printed_as_they_are():
    text = str(evaluate(*PAIR, metrics=("ece",), level=0.995))
    assert "99.5 % interval" in text


def test_no_interval_reaches_below_zero():
    scores = evaluate([[1.0, 2.0], [3.0, 4.0]], [0, 1], top_label=True)
    assert all(result.low >= 0 for result in scores.values["network"].values())


def test_too_few_resamples_judge_nothing():
    assert "needs at least 19 resamples, got 18" in evaluate(*PAIR, n_resamples=18).verdict()
    assert "miscalibrated" in evaluate(*PAIR, n_resamples=19).verdict()
