import csv
import io

import numpy as np
import pytest
from scipy import stats

from trueup.study import STUDIES, Options
from trueup.study.claims import Claim, by_run, judge_claims, least_on_average, paired, trend
from trueup.study.papers.neural_clamping.clamping_claims import CLAIMS
from trueup.study.published import published_values


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
        ([0.3, 0.1 + 0.2, 0.3], "not distinguishable"),  # nor does the same run repeated
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
    assert ("no interval; 1 run<" in table.html()) == (len(set(np.round(values, 9))) == 1)


def test_ranks_that_agree_in_every_run_are_several_runs():
    """A τ of 1 in each of five networks is no run repeated."""
    [result] = judge_claims([claim([1.0] * 5, discrete=True)], [], Options()).results
    assert (result.runs, result.low, result.verdict) == (5, 1.0, "held")
    ranks = [c for study in STUDIES.values() if study.claims for c in study.claims() if "Kendall" in c.measured]
    assert len(ranks) > 8
    assert all(c.discrete for c in ranks)


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
    rows += [row("nc_code", s, 0.05 + 0.001 * s + 0.0001 * (-1) ** s) for s in range(4)]
    for s in range(4):
        rows.append(row("both", s, 0.03 + 0.002 * s, part="sweep", exponent=1.0, fit_ece=0.01, entropy=0.5))
    results = {r.claim.text: r for r in judge_claims(CLAIMS, rows, Options()).results}
    best = results["lower ECE than the best baseline, all converged"]
    assert best.group == "digits, cnn, Temperature Scaling"
    mean = np.mean([0.04 + 0.001 * s for s in range(4)])
    assert best.mean == pytest.approx(100 * (mean - np.mean([0.03 + 0.002 * s for s in range(4)])) / mean)
    assert best.verdict == "held"
    second = results["lowest or second-lowest SCE: lower than the second-best baseline, all converged"]
    assert second.group == "digits, cnn, Vector Scaling"
    assert second.mean == pytest.approx(100 * (0.06 - np.mean([0.03 + 0.002 * s for s in range(4)])) / 0.06)
    bins = results["lower ECE than the best baseline with 5 to 50 bins too"]
    assert bins.mean == pytest.approx(100 * np.mean([0.01 - 0.001 * s for s in range(4)]))
    code = results["lower ECE than the best baseline, all converged, Neural Clamping by its released code"]
    assert (code.mean, code.verdict) == (pytest.approx(-100 * 0.01 / mean), "did not hold")
    assert results["lower ECE than the uncalibrated network"].mean == pytest.approx(6.7)
    assert results["accuracy is improved"].verdict == "not distinguishable"


def test_what_the_captions_print_is_beside_our_number_of_the_same_network():
    improvements = published_values("neural-clamping", "captions")
    seen = 0
    for result_claim in CLAIMS:
        for value in improvements:
            metric = value.metric.partition("_")[0].upper()
            if result_claim.text.startswith(f"lower {metric} than the best baseline,") and result_claim.printed:
                network = {"ViT-S/16": "timm:vit_small_patch16_224.augreg_in21k_ft_in1k"}.get(value.model, value.model)
                group = f"{value.dataset.lower()}, {network}, Dir-ODIR"
                assert result_claim.printed_for(group) == f"{value.mean:g} %"
                seen += 1
    assert seen == 2 * len(improvements)
    [other] = {
        c.printed_for("digits, cnn, Dir-ODIR")
        for c in CLAIMS
        if c.printed and c.text.startswith("lower ECE than the best baseline,")
    }
    assert other == "31 %, 34 %, 5 %, 11 %, 6 %, 13 % elsewhere"


def test_the_parts_of_a_joint_fit_are_compared():
    eces = {"both": 0.02, "output only": 0.03, "input only": 0.05, "temperature": 0.01, "temperature (focal)": 0.04}
    rows = [
        {"part": "sweep", "data": "digits", "network": "cnn", "how": {}, "method": method, "exponent": 1.0, "seed": s}
        | {
            "ece": ece + ece * 0.01 * s,
            "aece": ece + ece * 0.01 * s,
            "fit_ece": 0.0,
            "entropy": 0.5 + (method == "both") * (0.1 + 0.01 * s),
        }
        for method, ece in eces.items()
        for s in range(3)
    ]
    claims = [c for c in CLAIMS if c.source in ("Table 4", "Theorem 3.2")]
    results = {r.claim.text: r for r in judge_claims(claims, rows, Options()).results}
    assert results["δ and T together have lower AECE than T alone"].mean == pytest.approx(1.01)
    assert results["temperature scaling by focal loss has greater ECE than that by likelihood"].mean == pytest.approx(
        3.03
    )
    assert results["δ raises the entropy at the same T"].mean == pytest.approx(0.11)
    assert {result.verdict for result in results.values()} == {"held"}


def test_the_data_driven_start_is_judged_by_the_four_figures():
    rows = [
        {"part": "starts", "data": "digits", "network": "cnn", "how": {}, "start": start, "seed": s}
        | dict.fromkeys(("entropy", "ece", "aece", "sce"), 0.1 + (start == "random") * 0.01 * (-1) ** s)
        for start in ("random", "data")
        for s in range(4)
    ]
    results = [r for r in judge_claims(CLAIMS, rows, Options()).results if "varies less" in r.claim.text]
    assert [r.claim.text.rpartition(" ")[2] for r in results] == ["entropy", "ECE", "AECE", "SCE"]
    assert [r.mean for r in results] == pytest.approx([0.01, 1.0, 1.0, 1.0])


def test_what_was_not_measured_says_nothing_and_no_change_is_no_trend():
    rows = [{"m": "a", "seed": 0, "auc": float("nan")}, {"m": "a", "seed": 1, "auc": 0.5}, {"m": "a", "seed": 2}]
    assert by_run(rows, lambda row: row["m"], "auc") == {"a": {1: 0.5}}
    assert trend([1, 2, 3], [2, 2, 2]) == 0


@pytest.mark.parametrize("name", ["neural-clamping", "rethinking", "clue"])
def test_every_paper_has_claims_which_say_where_they_stand(name):
    claims = STUDIES[name].claims()
    assert len({(c.source, c.text) for c in claims}) == len(claims) > 10
    assert all(c.source and c.text and c.measured for c in claims)
