import csv
import io
from itertools import permutations

import numpy as np
import pytest
from scipy import stats

from trueup_studies import STUDIES, Options
from trueup_studies.claims import (
    Claim,
    Incomplete,
    by_run,
    judge_claims,
    least_on_average,
    paired,
    published_key,
    trend,
    trends,
    with_common_runs,
)
from trueup_studies.papers.neural_clamping.clamping_claims import BASELINES, CLAIMS
from trueup_studies.papers.neural_clamping.clamping_presets import GAMMAS
from trueup_studies.published import published_values


def claim(values, **options):
    return Claim("Table 1", "a beats b", "difference", lambda rows, o: {"digits, cnn": values}, **options)


def test_the_interval_is_students():
    values = np.random.default_rng(0).normal(0.3, 1, size=7)
    [result] = judge_claims([claim(values)], [], Options()).results
    low, high = stats.t.interval(0.95, 6, values.mean(), stats.sem(values))
    assert (result.low, result.high) == pytest.approx((low, high), rel=1e-9)


def test_runs_that_split_the_same_samples_anew_have_wider_intervals():
    values = [0.8, 1.0, 1.2]
    widths = []
    for options, ratios in (({}, {}), ({}, {"digits": 1.0}), ({"one_split": True}, {"digits": 1.0}), ({}, {"iris": 1})):
        [result] = judge_claims([claim(values, **options)], [], Options(), resplit_ratio=ratios).results
        widths.append(result.high - result.low)
    assert widths[1:] == pytest.approx([2 * widths[0], widths[0], widths[0]])  # √(1/3 + 1) over √(1/3)


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
    runs = "1 run" if len(values) == 1 else f"{len(values)} runs"
    assert (f"no interval; {runs}<" in table.html()) == (len(set(np.round(values, 9))) == 1)


def test_ranks_that_agree_in_every_run_are_several_runs():
    """A τ of 1 in each of six networks is no run repeated, and in each of five it may be chance."""
    for runs, verdict in ((2, "not distinguishable"), (5, "not distinguishable"), (6, "held")):
        assert 2 * stats.binom.sf(runs - 1, runs, 0.5) == pytest.approx(2 * 0.5**runs)
        for sign, word in ((1, verdict), (-1, verdict.replace("held", "did not hold"))):
            [result] = judge_claims([claim([sign * 1.0] * runs, discrete=True)], [], Options()).results
            assert (result.runs, result.verdict) == (runs, word)
            assert np.isnan(result.low)
            assert "no interval" in judge_claims([result.claim], [], Options()).html()
            [result] = judge_claims(
                [claim([*[sign * 1.0] * (runs - 1), sign * 0.9], discrete=True)], [], Options()
            ).results
            assert (result.runs, result.verdict) == (runs, word), "less agreement proves no more"
    [result] = judge_claims([claim([1.0] * 6, discrete=True)], [], Options(), resplit_ratio={"digits": 0.5}).results
    assert result.verdict == "not distinguishable", "splits that share samples are no six signs"
    ranks = [c for study in STUDIES.values() if study.claims for c in study.claims() if "Kendall" in c.measured]
    assert len(ranks) > 8
    assert all(c.discrete for c in ranks)


@pytest.mark.parametrize("dependent", [False, True])
def test_ranks_are_tested_by_all_permutations_of_each_run(dependent):
    """The p-value is that of the slow loop over every order of the values of both runs."""
    orders, signs = list(permutations(range(4))), np.sign(np.arange(4)[:, None] - np.arange(4))
    scores = np.array([(signs * np.sign(np.subtract.outer(o, o))).sum() / 2 for o in orders])
    for first, second in ((0, 0), (0, 5), (7, 23), (23, 23)):
        found = trends((range(4), orders[i]) for i in (first, second))
        assert list(found) == pytest.approx([stats.kendalltau(range(4), orders[i]).statistic for i in (first, second)])
        if dependent:
            tails = [np.mean([(side * scores >= side * scores[i]).mean() for i in (first, second)]) for side in (1, -1)]
            expected = 4 * min(tails)
        else:
            sums, ours = np.add.outer(scores, scores), scores[first] + scores[second]
            expected = 2 * min((sums >= ours).mean(), (sums <= ours).mean())
        assert found.p_value(dependent=dependent) == pytest.approx(min(1, expected))


def test_a_rank_over_many_values_needs_few_runs():
    for n, runs, ratio, verdict in (
        (21, 1, 0.5, "held"),
        (3, 1, 0.0, "not distinguishable"),
        (3, 6, 0.0, "held"),
        (3, 6, 0.5, "not distinguishable"),  # splits that share samples are no six runs
    ):
        values = trends([(range(n), range(n))] * runs)
        [result] = judge_claims([claim(values, discrete=True)], [], Options(), resplit_ratio={"digits": ratio}).results
        assert result.verdict == verdict, (n, runs)
    tied = trends([([1, 2, 3, 4, 5, 6], [0, 0, 0, 0, 0, 0])])
    assert (list(tied), tied.p_value()) == ([0.0], 1.0)


def test_main_claims_of_one_data_set_are_corrected_for_their_number():
    values = [1.0, 1.3, 0.8, 0.7, 1.6]
    alone, *_ = judge_claims([claim(values, main=True)], [], Options()).results
    assert alone.p == pytest.approx(stats.ttest_1samp(values, 0).pvalue)
    noise = [claim([1.0, -1.1, 0.4], main=True)] * 12
    first, *others = judge_claims([claim(values, main=True), *noise], [], Options()).results
    assert first.p == pytest.approx(13 * alone.p)
    assert (alone.verdict, first.verdict) == ("held", "held" if 13 * alone.p < 0.05 else "not distinguishable")
    assert all(other.p == 1 for other in others)
    unmarked, *_ = judge_claims([claim(values), *noise], [], Options()).results
    assert unmarked.p == alone.p
    elsewhere = Claim("Table 1", "c beats d", "difference", lambda rows, o: {"iris, cnn": values}, main=True)
    assert judge_claims([elsewhere, *noise], [], Options()).results[0].p == alone.p


def test_a_count_needs_one_run():
    for value, verdict in ((0.26, "held"), (-0.26, "did not hold"), (0.0, "not distinguishable")):
        for runs in (1, 3):
            [result] = judge_claims([claim([value] * runs, exact=True)], [], Options()).results
            assert (result.runs, result.verdict) == (runs, verdict)


def test_a_claim_without_rows_is_not_judged():
    assert judge_claims([claim([])], [], Options()).results == ()


def test_the_best_is_chosen_on_runs_that_all_have():
    values = {"a": {0: 0.1}, "b": {0: 0.3, 1: 0.3}, "c": {0: 0.4, 1: 0.1}, "d": {}}
    assert least_on_average(with_common_runs(values, ["a", "b", "c", "d"]), ["a", "b", "c", "d"]) == "a"
    assert least_on_average(with_common_runs(values, ["b", "c"]), ["b", "c"]) == "c"
    assert with_common_runs({"a": {0: 0.1}, "b": {1: 0.1}}, ["a", "b"]) == {}
    assert paired(values["c"], values["b"]) == pytest.approx([0.1, -0.2])


def test_what_is_said_of_all_is_not_confirmed_by_some():
    for sign, verdict in ((1, "not distinguishable"), (-1, "did not hold")):
        [result] = judge_claims([claim(Incomplete(sign * v for v in (1.0, 1.1, 0.9)))], [], Options()).results
        assert result.verdict == verdict


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
    rows += [row(method, s, 0.06) for s in range(4) for method in ("vector", "ms_odir", "dirichlet_odir")]
    rows += [row(method, s, 0.07) for s in range(4) for method in ("matrix", "temperature_ece")]
    rows += [row("nc_code", s, 0.05 + 0.001 * s + 0.0001 * (-1) ** s) for s in range(4)]
    for s in range(4):
        for gamma in GAMMAS:
            ece = 0.03 + 0.002 * s if gamma == 1 else 0.5
            rows.append(row("both", s, ece, part="sweep", exponent=gamma, fit_ece=ece, entropy=0.5))
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
    texts = [
        "lower ECE than the best baseline, all converged",
        "lower ECE than the best baseline with 5 to 50 bins too",
    ]
    for lost, runs in (({(name, s) for s in range(4) for name in ("vector", "matrix")}, 4), ({("vector", 3)}, 3)):
        fewer = [row for row in rows if (row["method"], row["seed"]) not in lost]
        for text in texts:
            [found] = [r for r in judge_claims(CLAIMS, fewer, Options()).results if r.claim.text == text]
            assert found.runs == runs
            assert found.verdict == ("held" if runs == 3 else "not distinguishable")
            assert found.group.endswith("of 4 of 6 baselines") == (runs == 4)
    early = [row for row in rows if row.get("exponent") != 0.5 or row["seed"]]
    found = {r.claim.text: r for r in judge_claims(CLAIMS, early, Options()).results}
    assert found["lower ECE than the uncalibrated network"].runs == 3, "a run without all γ has none chosen"
    assert found["ECE is least at a γ inside"].runs == 3
    early = [row for row in rows if row.get("exponent", 0) <= 0.5]
    found = {r.claim.text for r in judge_claims(CLAIMS, early, Options()).results}
    assert not any("inside" in text or "second-lowest" in text or "rises with γ" in text for text in found)


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
        {"part": "sweep", "data": "digits", "network": "cnn", "how": {}, "method": method, "exponent": gamma, "seed": s}
        | {
            "ece": ece + ece * 0.01 * s,
            "aece": ece + ece * 0.01 * s,
            "fit_ece": 0.0,
            "entropy": 0.5 + (method == "both") * (0.1 + 0.01 * s),
        }
        for method, ece in eces.items()
        for s in range(3)
        for gamma in GAMMAS
    ]
    claims = [c for c in CLAIMS if c.source == "Table 4"]
    results = {r.claim.text: r for r in judge_claims(claims, rows, Options()).results}
    assert results["δ and T together have lower AECE than T alone"].mean == pytest.approx(1.01)
    assert results["temperature scaling by focal loss has greater ECE than that by likelihood"].mean == pytest.approx(
        3.03
    )
    raised = results["the fitted δ raises the entropy at the same T"]
    assert raised.mean == pytest.approx(0.11)
    # 0.9707 less 0.9648 nats, 1.35 less 1.01 points: the unit of ours.
    assert raised.claim.printed_for("cifar100, resnet110") == "+0.0059"
    together = results["δ and T together have lower AECE than T alone"].claim
    assert together.printed_for("CIFAR-100, resnet110") == "+0.34"
    assert together.printed_for("digits, cnn") == "+0.34 elsewhere"
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


@pytest.mark.parametrize(("shift", "verdict"), [(0.001, "held"), (0.03, "did not hold")])
def test_starts_are_similar_within_a_tenth(shift, verdict):
    rows = [
        {"part": "starts", "data": "digits", "network": "cnn", "how": {}, "start": start, "seed": s}
        | dict.fromkeys(("entropy", "ece", "aece", "sce"), 0.1 + (start == "random") * (shift + 0.0001 * s))
        for start in ("random", "data")
        for s in range(5)
    ]
    results = [r for r in judge_claims(CLAIMS, rows, Options()).results if "similar" in r.claim.text]
    assert [r.verdict for r in results] == [verdict] * 4
    gap = shift + 0.0002
    assert results[1].mean == pytest.approx(10 - 100 * gap / (0.1 + gap / 2))


@pytest.mark.parametrize(
    ("data", "network", "claimed"),
    [
        ("bloodmnist", "timm:resnet50", {"lower AECE"}),
        ("cifar100", "resnet110", {"lower AECE", "lowest or second-lowest SCE"}),
        ("cifar100", "wrn40x10", {"lowest or second-lowest AECE", "lowest or second-lowest SCE"}),
        ("digits", "cnn", {"lower AECE", "lowest or second-lowest SCE"}),
    ],
)
def test_each_network_of_the_paper_is_judged_by_what_it_says_of_it(data, network, claimed):
    base = {"data": data, "network": network, "how": {}, "accuracy": 0.9, "fit_ece": 0.1, "entropy": 0.5}
    rows = []
    for seed in range(3):
        figures = {"seed": seed, **{f"ece_{b}": 0.1 for b in (5, 10, 15, 20, 25, 30, 50)}}
        second = dict.fromkeys(BASELINES[1:], 0.06 + 0.001 * seed)
        for method, error in {"temperature": 0.04, **second}.items():
            rows.append(
                {**base, **figures, "part": "method", "method": method, "ece": 0.1, "aece": error, "sce": error}
            )
        for exponent, error in {**dict.fromkeys(GAMMAS, 0.07), 0.0: 0.05}.items():
            swept = {"part": "sweep", "method": "both", "exponent": exponent, "ece": 0.1, "aece": error, "sce": error}
            rows.append({**base, **figures, **swept})
    found = {r.claim.text: r for r in judge_claims(CLAIMS, rows, Options()).results if "all converged" in r.claim.text}
    errors = {text for text in found if "SCE" in text or "AECE" in text}
    assert {text.split(" than ")[0].split(":")[0] for text in errors} == claimed
    for text in (text for text in errors if "SCE" in text):  # of the two losses the paper marks the better
        assert (found[text].verdict, found[text].mean) == ("held", pytest.approx(100 * 0.011 / 0.061))


def test_what_a_paper_does_not_say_is_not_laid_to_it():
    sources = {c.text: c.source for name in ("neural-clamping", "clue") for c in STUDIES[name].claims()}
    assert sources["λ chosen by calibration ECE too has lower ECE than λ by the rule"] == "Beyond the paper"
    assert sources["lower ECE than focal loss"] == "Abstract"
    others = ("NLL", "after temperature", "cover", "out-of-distribution")
    assert all(", read as " in source for text, source in sources.items() if "Abstract" in source
               and any(word in text for word in others))  # fmt: skip


def test_what_was_not_measured_says_nothing_and_no_change_is_no_trend():
    rows = [{"m": "a", "seed": 0, "auc": float("nan")}, {"m": "a", "seed": 1, "auc": 0.5}, {"m": "a", "seed": 2}]
    assert by_run(rows, "auc", "m") == {"a": {1: 0.5}}
    assert trend([1, 2, 3], [2, 2, 2]) == 0


@pytest.mark.parametrize("name", ["neural-clamping", "rethinking", "clue"])
def test_every_paper_has_claims_which_say_where_they_stand(name):
    claims = STUDIES[name].claims()
    assert len({(c.source, c.text) for c in claims}) == len(claims) > 10
    assert all(c.source and c.text and c.measured for c in claims)


def gaps(table, metric, title):
    """What a loss has more than cross-entropy in a table of the paper, by data set and network."""
    ours, theirs = (
        {
            published_key(v.dataset, v.model): v.mean
            for v in published_values("rethinking", table, metric=metric, method=m)
        }
        for m in (title, "Cross-Entropy")
    )
    return {key: ours[key] - theirs[key] for key in ours}


@pytest.mark.parametrize("title", ["Label Smoothing", "L1 Norm", "Focal Loss"])
def test_what_the_tables_of_losses_print_is_beside_our_number(title):
    texts = {
        f"{title} is better calibrated": ("table 1", "ece_pct", -1),
        f"{title} is less calibratable by temperature scaling": ("table 2", "ece_pct_after_ts", 1),
        f"{title} is less calibratable by histogram binning": ("table 2", "ece_pct_after_hb", 1),
        f"{title} is more calibratable by histogram binning": ("table 2", "ece_pct_after_hb", -1),
    }
    found = [c for c in STUDIES["rethinking"].claims() if c.text in texts]
    assert len(found) >= 3
    for claim in found:
        table, metric, sign = texts[claim.text]
        of_paper = {key: sign * gap for key, gap in gaps(table, metric, title).items()}
        ends = f"{min(of_paper.values()):+.2f} to {max(of_paper.values()):+.2f} elsewhere"
        assert claim.printed == {**{key: f"{gap:+.2f}" for key, gap in of_paper.items()}, "": ends}
        if table == "table 2":  # a claim is of the data sets for which the paper's table speaks
            assert {key for key in of_paper if claim.covers(key)} == {key for key, gap in of_paper.items() if gap > 0}
