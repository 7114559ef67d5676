import csv
import io

import numpy as np
import pytest
from scipy import stats

from trueup.study import STUDIES, Options
from trueup.study.claims import Claim, judge_claims, least_on_average, paired
from trueup.study.papers.neural_clamping.clamping_claims import CLAIMS


def claim(values, **options):
    return Claim("Table 1", "a beats b", "difference", lambda rows, o: {"digits, cnn": values}, **options)


def test_the_interval_is_students():
    values = np.random.default_rng(0).normal(0.3, 1, size=7)
    [result] = judge_claims([claim(values)], [], Options()).results
    low, high = stats.t.interval(0.95, 6, values.mean(), stats.sem(values))
    assert (result.low, result.high) == pytest.approx((low, high), rel=1e-9)


@pytest.mark.parametrize(
    ("values", "verdict"),
    [
        ([1.0, 1.1, 0.9], "held"),
        ([-1.0, -1.1, -0.9], "did not hold"),
        ([1.0, -1.1, 0.4], "not distinguishable"),
        ([5.0], "not distinguishable"),  # one run proves nothing
    ],
)
def test_verdicts(values, verdict):
    table = judge_claims([claim(values)], [], Options())
    assert table.results[0].verdict == verdict
    [line] = csv.DictReader(io.StringIO(table.csv()))
    assert line["verdict"] == verdict
    assert float(line["mean"]) == pytest.approx(np.mean(values))
    for text in (table.markdown(), table.html(), table.latex()):
        assert verdict in text
        assert "a beats b" in text
    assert ("class=warn>did not hold<" in table.html()) == (verdict == "did not hold")
    assert ("no interval; 1 run<" in table.html()) == (len(values) == 1)


def test_a_claim_without_rows_is_not_judged():
    assert judge_claims([claim([])], [], Options()).results == ()


def test_the_best_baseline_lacks_no_run():
    values = {"a": {0: 0.1}, "b": {0: 0.3, 1: 0.3}, "c": {0: 0.4, 1: 0.1}}
    assert least_on_average(values, ["a", "b", "c"]) == "c"
    assert paired(values["c"], values["b"]) == pytest.approx([0.1, -0.2])


def test_neural_clamping_is_judged_against_the_best_baseline():
    def row(method, seed, ece, **more):
        base = {
            "part": "method",
            "data": "digits",
            "network": "cnn",
            "how": {},
            "method": method,
            "seed": seed,
            "ece": ece,
        }
        return {
            **base,
            "aece": ece,
            "sce": ece,
            "accuracy": 0.9,
            **{f"ece_{b}": ece for b in (5, 10, 15, 20, 25, 30, 50)},
            **more,
        }

    rows = [row("uncalibrated", s, 0.10) for s in range(4)]
    rows += [row("temperature", s, 0.04 + 0.001 * s) for s in range(4)]
    rows += [row("vector", s, 0.06) for s in range(4)]
    rows += [row("nc_code", s, 0.05 + 0.001 * s) for s in range(4)]
    for s in range(4):
        rows.append(row("both", s, 0.03 + 0.002 * s, part="sweep", exponent=1.0, fit_ece=0.01, entropy=0.5))
    results = {r.claim.text: r for r in judge_claims(CLAIMS, rows, Options()).results}
    best = results["lower ECE than the best baseline, all converged"]
    assert best.group == "digits, cnn, temperature"
    assert best.mean == pytest.approx(100 * np.mean([0.01 - 0.001 * s for s in range(4)]))
    assert best.verdict == "held"
    code = results["lower ECE than the best baseline, all converged, Neural Clamping by its released code"]
    assert (code.mean, code.verdict) == (pytest.approx(-1), "did not hold")
    assert results["lower ECE than the uncalibrated network"].mean == pytest.approx(6.7)
    assert results["accuracy is improved"].verdict == "not distinguishable"


@pytest.mark.parametrize("name", ["neural-clamping", "rethinking", "clue"])
def test_every_paper_has_claims_which_say_where_they_stand(name):
    claims = STUDIES[name].claims()
    assert len({(c.source, c.text) for c in claims}) == len(claims) > 10
    assert all(c.source and c.text and c.measured for c in claims)
