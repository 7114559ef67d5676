"""Why this method: the record says what the choice weighed, in numbers and in words that are true of it."""

import numpy as np
import pytest

from strategies import calibrated
from trueup import METHODS, metrics
from trueup.calibrators import choose
from trueup.calibrators.auto import CANDIDATES
from trueup.calibrators.compose import DETECTED, Choice
from trueup.reports import Report, chart, method_choice, numbers, report, summary
from trueup.reports.figures.method_choice import candidate_title, choice_panels, more_rows, why

MIXED = Choice(
    "mixture",
    {"identity": 0.9, "temperature": 0.6, "svs": 0.55, "sms": float("inf")},
    {"sms": "dropped after two folds"},
    errors={"identity": 0.05, "temperature": 0.01, "svs": 0.02},
    weights={"temperature": 0.25, "svs": 0.75},
    loss=0.54,
    detectable=0.123,
)


def test_candidates_stand_by_their_loss_and_those_without_one_apart():
    record = method_choice(MIXED)
    assert record.methods == ("svs", "temperature", "identity")
    np.testing.assert_array_equal(record.loss, [0.55, 0.6, 0.9])
    np.testing.assert_array_equal(record.weight, [0.75, 0.25, 0])
    assert record.dropped == (("sms", "dropped after two folds"),)
    head, rows = numbers(record)
    assert len(head) == len(rows[0]) == 4
    assert rows[0] == ["Structured vector scaling", "0.5500", "+0.0100 ± 0.0200", "75.0 %"]
    assert rows[-1][2] == "dropped after two folds"


def test_a_candidate_far_behind_is_told_at_the_edge():
    scores = {"a": 0.5, "b": 0.51, "c": 0.52, "identity": 3.0}
    far = Choice("a", scores, {}, dict.fromkeys(scores, 0.01), {"a": 1.0}, 0.5, 0.02)
    drawn = chart(method_choice(far)).to_dict()
    assert drawn["x"]["range"][1] < 1
    assert "+2.5000 →" in [mark.get("text") for mark in drawn["marks"]]


def test_words_of_a_mixture_of_one_method_and_of_none():
    words = summary(method_choice(MIXED))
    assert "A mixture was chosen: structured vector scaling 75 %; temperature scaling 25 %." in words
    assert "Its log-loss on held-out rows is 0.5400, 0.9000 without calibration." in words
    assert "a log-loss gain below 0.1230 would probably go unnoticed" in words
    alone = " ".join(why(method_choice(MIXED._replace(chosen="svs", weights={"svs": 1.0}, loss=0.55))))
    assert alone.startswith("Structured vector scaling was chosen alone. Its log-loss on held-out rows is 0.5500")
    assert "cannot distinguish the two" not in words
    assert "cannot distinguish the two" in summary(method_choice(MIXED._replace(loss=0.95)))
    none = " ".join(why(method_choice(MIXED._replace(chosen="identity", weights={"identity": 1.0}, loss=0.9))))
    assert none.startswith("No calibration was chosen: its log-loss on held-out rows is 0.9000; the best method, str")
    assert more_rows(method_choice(MIXED._replace(detectable=0.0))) == ""


@pytest.mark.parametrize("classes", [2, 4])
def test_methods_left_out_for_want_of_rows_are_named(classes):
    z, y = calibrated(200, classes, temperature=2.0)
    few = METHODS["auto"](z, y, progress=False).choice
    record = method_choice(few, n_classes=classes)
    assert set(record.too_few_rows) & set(few.scores) == set()
    assert set(record.too_few_rows) <= set(CANDIDATES["two classes" if classes == 2 else "up to 30 classes"])
    assert "With 500 rows" in summary(record)
    assert "With 500 rows" not in summary(method_choice(few))


def test_every_candidate_has_a_title_of_its_own():
    names = {name for candidates in CANDIDATES.values() for name in candidates}
    titles = {name: candidate_title(name) for name in names}
    assert len(set(titles.values())) == len(names)
    assert not [name for name, title in titles.items() if title == name or "_" in title]


def test_a_choice_carries_errors_and_what_could_have_been_seen():
    z, y = calibrated(400, 3, temperature=2.0)
    choice = choose(["identity", "temperature"])(z, y).choice
    assert choice.chosen == "temperature"
    assert choice.weights == {"temperature": 1.0}
    assert choice.errors["temperature"] == 0
    assert choice.loss == choice.scores["temperature"]
    assert choice.detectable == pytest.approx(DETECTED * choice.errors["identity"])
    assert choice.scores["identity"] == pytest.approx(metrics.nll(z, y), rel=1e-6)


def test_the_page_has_the_pool_where_it_was_tried():
    pair = calibrated(120, 3, temperature=2.0)
    result = report(pair, methods=["temperature", "auto"], progress=False).audit
    assert [panel.name for panel in choice_panels(result)] == ["choice-chart", "pool-chart"]
    page = Report(result).html()
    assert "Why this method?" in page
    assert "The mixture of the automatic choice" in page
    alone = report(pair, methods=["temperature"], progress=False).audit
    assert [panel.name for panel in choice_panels(alone)] == ["choice-chart"]
    assert alone.choice.chosen == alone.chosen
