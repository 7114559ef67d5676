"""Plans: what is said to be seen is seen, and rows grow as they should."""

import json
import math

import numpy as np
import pytest

from trueup.decisions import Comparison, Detection, Promise, plan
from trueup.metrics import consistency, detectable_error


def draw(n, seed, scale=2.0):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, 3)) * scale
    return z, (z + rng.gumbel(size=z.shape)).argmax(axis=1)


def test_the_stated_error_is_detected_with_the_stated_power():
    z, y = draw(4000, 0)
    result = detectable_error(z, y, rows=800)
    p = np.exp(z - z.max(axis=1, keepdims=True))
    c = (p / p.sum(axis=1, keepdims=True)).max(axis=1)
    odds = np.log(c / (1 - c))
    slopes = np.linspace(0.1, 1, 400)
    gaps = np.array([np.abs(1 / (1 + np.exp(-s * odds)) - c).mean() for s in slopes])
    slope = slopes[np.argmin(np.abs(gaps - result.overconfident))]
    rng = np.random.default_rng(1)
    seen = 0
    for trial in range(150):
        at = rng.integers(0, 4000, 800)
        right = rng.random(800) < 1 / (1 + np.exp(-slope * odds[at]))
        labels = (z[at].argmax(axis=1) + ~right) % 3
        seen += consistency(z[at], labels, n_resamples=200, seed=trial).p_value <= 0.05
    assert 0.68 < seen / 150 < 0.92


def test_more_rows_see_less():
    z, y = draw(1000, 1)
    errors = [detectable_error(z, y, rows=n).error for n in (300, 1200, 4800)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[0] / errors[2] == pytest.approx(4, rel=0.35)
    nothing = detectable_error(z, y, rows=2)
    assert math.isnan(nothing.error)


def test_every_question_has_its_rows():
    z, y = draw(1500, 2)
    asked = {"detection": Detection(rows=500, error=0.02), "promise": Promise(0.2, coverage=0.3)}
    result = plan(z, y, precision=0.01, comparison=Comparison(2 * z), **asked)
    assert result.detectable.rows == 500
    assert detectable_error(z, y, rows=result.rows_to_detect).error == pytest.approx(0.02, rel=0.2)
    assert result.rows_for_comparison < 1500  # twice too sure is plain to see
    assert result.rows_for_promise > 30
    text = str(result)
    assert "With 500 rows a calibration error below" in text
    assert text.count("you need about") == 4
    json.dumps(result.to_dict(), allow_nan=False)
    hopeless = plan(z, y, promise=Promise(0.001, coverage=1.0 - 1e-9))
    assert hopeless.rows_for_promise is None
    assert "no number of rows is enough to promise" in str(hopeless)


def test_bad_input():
    z, y = draw(50, 0)
    for options, words in (
        ({"detection": Detection(rows=0)}, "rows must be a positive"),
        ({"detection": Detection(error=2.0)}, "error must lie"),
        ({"precision": 2.0}, "precision must lie"),
    ):
        with pytest.raises(ValueError, match=words):
            plan(z, y, **options)


def test_questions_that_lack_a_part_are_errors():
    z, y = np.random.default_rng(0).normal(size=(60, 3)), np.arange(60) % 3
    for bad, words in (({"level": 0}, "level must lie"), ({"coverage": 2}, "coverage must lie")):
        with pytest.raises(ValueError, match=words):
            Promise(0.1, **bad)
    with pytest.raises(ValueError, match="difference must be positive"):
        Comparison(z, -0.1)
    assert plan(z, y, detection=Detection(rows=np.int64(100))).to_dict()["detectable"]["rows"] == 100
