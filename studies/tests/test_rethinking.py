import io
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from trueup.calibrators.compose import Refinement
from trueup_studies import STUDIES, Cell, Options, Store, run
from trueup_studies.claims import judge_claims
from trueup_studies.grid import as_json
from trueup_studies.papers.rethinking import rethinking_figures
from trueup_studies.papers.rethinking import rethinking_study as rethinking
from trueup_studies.papers.rethinking.rethinking_presets import (
    CANDIDATES,
    DATA_TITLES,
    PRESETS,
    SWEEP,
    TITLES,
    Growth,
    Plan,
    plans,
)
from trueup_studies.papers.rethinking.rethinking_runs import load_parts, work
from trueup_studies.published import published_values
from trueup_studies.store import validate_rows
from trueup_studies.training.data.class_names import GROUPS
from trueup_studies.training.loop import TrainingError, _Run, train

STUDY = STUDIES["rethinking"]
TINY = Plan(
    "digits",
    "mlp",
    3,
    {"hidden": [16]},
    sizes=(60, 50, 100),
    pooled=True,
    seeds=2,
    candidates={
        "cross_entropy": (0,),
        "cross_entropy_stopped": (0,),
        "label_smoothing": (0.01, 0.09),
        "norm": (0.05,),
        "focal": (1,),
        "inverse_focal": (1,),
        "focal_undetached": (1,),
    },
    negative={"norm": (-0.05,)},
    growth=Growth((30, 60), {"label_smoothing": (0.01, 0.2), "focal": (1,)}, 1),
)
POOLED = {"data": "digits", "sizes": [200, 300, 900], "pooled": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", (TINY,))
        store = Store(tmp_path_factory.mktemp("rethinking") / "results.sqlite")
        options = Options(preset="tiny")
        ran = run(STUDY, store, options=options, progress=False)
        assert ran.failed == {}
        yield options, store.rows(STUDY.cells(options))


def test_a_small_run_ends_in_tables(tiny):
    options, rows = tiny
    # Twelve pairs of loss and coefficient (cross-entropy to the end and stopped, 2 smoothings, a norm, focal 1, 2, 3,
    # inverse focal 1, 2, 3, focal 1 with an undetached weight) twice;
    # then one run each: a smoothing more at the whole size, and three of half the size; a negative norm twice.
    assert len(rows) == 12 * 2 + 1 + 3 + 2
    found = STUDY.tables(rows, options)
    assert set(found) == {"table_1", "table_2", "table_3", "coefficients", "negative"}
    assert [found[name].title[:7] for name in ("table_1", "table_2")] == ["Table 1", "Table 2"]
    refused = found["negative"].groups["digits"]
    assert list(refused) == ["Cross-Entropy", "L1 Norm -0.05"]
    accuracies = [row["accuracy"] for row in rows if row["coefficient"] < 0]
    assert refused["L1 Norm -0.05"]["accuracy"].mean == pytest.approx(100 * np.mean(accuracies))
    assert "no lower bound" in found["negative"].notes[0]
    assert all("has no lower bound" in row["warning"] for row in rows if row["coefficient"] < 0)
    assert not any("has no lower bound" in row["warning"] for row in rows if row["coefficient"] >= 0)
    titles = [TITLES[loss] for loss in TINY.candidates]
    assert list(found["table_1"].groups["digits"]) == titles
    smooth = [row for row in rows if row["loss"] == "label_smoothing" and row["sizes"][0] == 60]
    means = {c: np.mean([r["val_ece"] for r in smooth if r["coefficient"] == c]) for c in (0.01, 0.09)}
    best = min(means, key=means.get)
    entry = found["table_1"].groups["digits"]["Label Smoothing"]["ece"]
    ours = [100 * row["ece"] for row in smooth if row["coefficient"] == best]
    assert (entry.mean, entry.std, entry.count) == (
        pytest.approx(np.mean(ours)),
        pytest.approx(np.std(ours, ddof=1)),
        2,
    )
    assert f"Label Smoothing {best:g}" in found["table_2"].notes[0]
    assert "on validation samples" in found["table_1"].notes[0]
    assert "refinement" not in found["table_1"].notes[0]  # it has no coefficient
    assert list(found["coefficients"].groups["digits"]) == ["Label Smoothing"]
    detached, undetached = (found["table_1"].groups["digits"][titles[i]]["ece"].mean for i in (4, 6))
    assert detached != undetached
    for table in found.values():
        assert table.markdown()
        assert table.latex()
        assert table.csv()


def test_claims_are_judged_from_the_rows(tiny):
    options, rows = tiny
    results = {(r.claim.source, r.claim.text): r for r in judge_claims(STUDY.claims(), rows, options).results}
    chosen = {
        row["seed"]: row for row in rows if row["loss"] == "focal" and row["coefficient"] == 1 and row["sizes"][0] == 60
    }
    plain = {row["seed"]: row for row in rows if row["loss"] == "cross_entropy"}
    result = results["Table 1", "Focal Loss is better calibrated"]
    assert result.mean == pytest.approx(100 * np.mean([plain[s]["ece"] - chosen[s]["ece"] for s in (0, 1)]))
    assert result.runs == 2
    large = results["§3.1", "Focal Loss: a large coefficient lowers accuracy"]
    gap = np.mean([plain[s]["accuracy"] - chosen[s]["accuracy"] for s in (0, 1)])
    assert (large.mean, large.printed) == (pytest.approx(100 * gap), "harmed")


def written(data, values, *, network="resnet32", seeds=3, sizes=45000, **more):
    """Rows of a run of each loss and coefficient with these figures, a little less or more by seed."""
    return [
        {"data": data, "network": network, "sizes": [sizes, None, None], "loss": loss, "coefficient": coefficient}
        | {"seed": seed, "val_accuracy": 0.9, "val_ece": 0.1, "val_ece_temperature": 0.1}
        | {name: value * (0.99 + 0.01 * seed) for name, value in figures.items()}
        | more
        for (loss, coefficient), figures in values.items()
        for seed in range(seeds)
    ]


def judged(rows, options, source):
    claims = [claim for claim in STUDY.claims() if claim.source == source]
    return {result.claim.text: result for result in judge_claims(claims, rows, options).results}


def test_negative_coefficients_destroy_accuracy_if_they_leave_less_than_half():
    """The paper says so of very small ones: what is a little lower does not hold."""
    accuracies = {("cross_entropy", 0): 0.8, ("norm", -0.001): 0.79, ("norm", -0.01): 0.1}
    rows = written(
        "fashion_mnist", {pair: {"accuracy": a} for pair, a in accuracies.items()}, network="cnn", sizes=2000
    )
    told = judged(rows, Options(preset="fashion_mnist"), "§5.2")
    text = "the {} negative coefficient of L1 norm destroys accuracy (leaves less than half)".format
    assert list(told) == [text("mildest"), text("strongest")]
    assert [result.verdict for result in told.values()] == ["did not hold", "held"]
    assert [result.mean for result in told.values()] == pytest.approx([40 - 79, 40 - 10])
    assert {result.printed for result in told.values()} == {"extremely low"}


def test_a_large_coefficient_that_fails_lowers_accuracy():
    """Where the norm learns nothing the tables leave it out, but it has lost its accuracy."""
    text = "L1 Norm: a large coefficient lowers accuracy"
    figures = {("cross_entropy", 0): 0.8, ("norm", 0.05): 0.8, ("norm", 0.1): 0.1}
    rows = written("fashion_mnist", {pair: {"accuracy": a} for pair, a in figures.items()}, network="cnn", sizes=2000)
    for row in rows:
        if row["coefficient"] == 0.1:
            row |= {"val_accuracy": 0.1, "warning": "training failed: the loss is not finite"}
    told = judged(rows, Options(preset="fashion_mnist"), "§3.1")
    assert list(told) == [text]  # there is no focal loss
    assert (told[text].verdict, told[text].mean) == ("held", pytest.approx(70))
    assert not judged([row for row in rows if row["coefficient"] != 0.1], Options(preset="fashion_mnist"), "§3.1")


def test_inverse_focal_has_a_greater_raw_ece_than_focal_in_most_cases():
    text = "Inverse focal loss has a greater raw ECE than focal loss"

    def found(eces, seeds=6):
        values = {pair: {"ece": ece} for pair, ece in zip(SWEEP, eces, strict=True)}
        rows = written("fashion_mnist", values, network="cnn", sizes=2000, seeds=seeds)
        return judged(rows, Options(preset="fashion_mnist"), "Figure 6(c)")[text]

    always = found([0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07])
    assert (always.mean, always.verdict, always.printed) == (0.5, "held", "in most cases")
    assert found([0.01, 0.02, 0.03, 0.04, 0.05, 0.06, 0.07], seeds=5).verdict == "not distinguishable"
    # Focal loss of γ = 3 is above all three, that of γ = 2 above one.
    assert found([0.09, 0.055, 0.03, 0.04, 0.05, 0.06, 0.07]).mean == pytest.approx(5 / 9 - 0.5)
    assert found([0.09, 0.09, 0.09, 0.04, 0.05, 0.06, 0.07]).verdict == "did not hold"


def test_the_best_loss_is_that_of_the_papers_data_set():
    """What figure 6 says of each data set is judged there and nowhere else."""
    for data, loss, words, hb in (
        ("svhn", ("cross_entropy", 0), "CE", "less"),
        ("cifar10", ("inverse_focal", 2), "inverse focal", "less"),
        ("cifar100", ("inverse_focal", 1), "inverse focal", "more"),
        ("newsgroups20", ("focal", 1), "focal γ = 1", None),
    ):
        flat = {pair: {"ece_temperature": 0.03, "ece_histogram": 0.02} for pair in SWEEP}
        flat[loss] = {"ece_temperature": 0.01, "ece_histogram": 0.02}
        network = "text_cnn" if data == "newsgroups20" else "resnet32"
        size = 45000 if data == "cifar10" else None
        rows = written(data, flat, network=network, sizes=size)
        for row in rows:  # the coefficient is chosen on validation samples
            row["val_ece_temperature"] = row["ece_temperature"]
        found = judged(rows, Options(preset="paper"), "Figure 6(e)")
        [keep] = [result for text, result in found.items() if text.endswith("is the paper's")]
        assert f"scaling on {DATA_TITLES[data]} is" in keep.claim.text
        assert (keep.verdict, keep.printed) == ("held", words)
        assert keep.mean == pytest.approx(2.0)
        assert ("Inverse focal loss is more calibratable by temperature scaling" in found) == (words == "inverse focal")
        said = list(judged(rows, Options(preset="paper"), "Figure 6(f)"))
        assert said[:-1] == ([f"Inverse focal loss is {hb} calibratable by histogram binning"] if hb else [])
        assert "no clear trend" in said[-1]


@pytest.mark.parametrize(("data", "network"), [("cifar100", "resnet32"), ("newsgroups20", "text_cnn")])
def test_what_the_paper_excepts_is_judged_as_it_says(data, network):
    """On the texts the norm's optimal ECE does not rise, a large γ̄ costs accuracy, and the norm takes TS better."""
    few = {"accuracy": 0.8, "ece_temperature": 0.03, "ece_histogram": 0.03}
    rows = written(data, dict.fromkeys((*SWEEP, ("norm", 0.01)), few), network=network, sizes=None)
    for row in rows:
        row["optimal_ece"] = [0.05, 0.01, 0.03]
        row["accuracy"] -= 0.01 * (row["loss"] == "inverse_focal") * row["coefficient"] ** 2 * (1 + row["seed"])
    options, texts = Options(preset="paper"), data == "newsgroups20"
    assert ("L1 Norm: the optimal ECE rises in late epochs" in judged(rows, options, "Appendix, figure A")) == (
        not texts
    )
    accuracy = judged(rows, options, "Figure 6(b)")
    keeps = "Inverse focal loss keeps the accuracy of cross-entropy (no more than 0.5 points lower)"
    loses = "Inverse focal loss with large γ̄ lowers accuracy"
    assert list(accuracy) == [loses if texts else keeps]
    if texts:
        assert accuracy[loses].mean == pytest.approx(100 * 0.01 * 9 * np.mean([1, 2, 3]))
    word, printed = ("more", "+0.40") if texts else ("less", "+2.57")
    told = judged(rows, options, "Table 2")
    assert told[f"L1 Norm is {word} calibratable by temperature scaling"].printed == printed
    assert f"L1 Norm is {'less' if texts else 'more'} calibratable by temperature scaling" not in told


def test_no_clear_trend_is_less_than_half_a_tau():
    def found(eces):
        pairs = [pair for pair in SWEEP if pair[0] != "focal"]
        rows = written("fashion_mnist", {pair: {} for pair in pairs}, network="cnn", sizes=2000)
        for row in rows:
            row["ece_histogram"] = eces[row["seed"]][int(row["coefficient"])]
        [result] = judged(rows, Options(preset="fashion_mnist"), "Figure 6(f)").values()
        return result

    rising = found([[1, 2, 3, 4]] * 3)
    assert (rising.mean, rising.verdict) == (pytest.approx(-0.5), "not distinguishable")  # three may agree by chance
    noise = found([[1, 2, 3, 4], [4, 3, 2, 1], [1, 4, 4, 1]])
    assert noise.mean == pytest.approx(0.5 + 2 / 3)  # each of the first two goes against the other


def test_few_samples_are_judged_with_both_repairs():
    rows = written("fashion_mnist", {("cross_entropy", 0): {}, ("focal", 1): {}}, network="cnn", sizes=2000)
    for row in rows:
        error = 0.02 + (row["loss"] == "focal") * 0.01 * (1 + row["seed"])
        sizes = [{"size": n, "ece_temperature": error, "ece_histogram": 2 * error} for n in (50, 500)]
        row["validation_sizes"] = [*sizes, {"size": 500, "ece_temperature": 9, "ece_histogram": 9}]
    told = judged(rows, Options(preset="fashion_mnist"), "Figure 3")
    for repair, mean in (("TS", 2), ("HB", 4)):
        claim = told[f"Focal Loss is less calibratable with few validation samples too ({repair})"]
        assert claim.mean == pytest.approx(mean)


@pytest.mark.parametrize("network", [None, "resnet32", "wrn16x4"])
def test_the_loss_that_the_paper_names_is_printed_beside_every_network(network):
    """It is said of the data set, which small presets have with a network of their own."""
    pairs = {*SWEEP, *(("focal", gamma) for gamma in CANDIDATES["focal"])}
    rows = written("cifar10", {pair: {"ece_temperature": 0.03} for pair in pairs}, sizes=2000)
    options = Options(preset="cifar10", network=network)
    found = judged(rows, options, "Figure 6(e)")
    result = found["the loss of least ECE with temperature scaling on CIFAR-10 is the paper's"]
    assert (result.group, result.printed) == (f"CIFAR-10, {network or 'resnet8'}", "inverse focal")


def test_histogram_binning_needs_more_samples_if_it_gains_more_from_them():
    """It may leave more ECE with few samples and with all: it needs no more of them then."""
    text = "histogram binning needs more validation samples than temperature scaling"

    def found(*histogram):
        rows = written("fashion_mnist", {("cross_entropy", 0): {}}, network="cnn", sizes=2000)
        for row in rows:
            row["validation_sizes"] = [
                {"size": size, "ece_histogram": (1 + 0.1 * row["seed"]) * few, "ece_temperature": 0.01}
                for size, few in histogram
                for _ in range(2)
            ]
        return judged(rows, Options(preset="fashion_mnist"), "Figure 3").get(text)

    more = found((50, 0.05), (500, 0.03), (2000, 0.02))
    assert (more.mean, more.verdict) == (pytest.approx(1.1 * 3), "held")
    assert found((50, 0.05), (2000, 0.05)).verdict == "not distinguishable"
    assert found((50, 0.05)) is None


def test_every_statement_that_is_stored_has_a_claim():
    """Flags of figure 6 and epochs of figure 4 are in the column of the paper."""
    claims = [claim for claim in STUDY.claims() if claim.source in ("Figure 4", "Figure 6(e)")]
    for table, words in (("figure 4", "from epoch {0.mean:g}"), ("figure 6e", "{0.method}")):
        for value in published_values("rethinking", table):
            if "rise" in value.metric or "flag" in value.metric:
                wanted = words.format(value).replace("gamma=", "γ = ")
                said = [claim.printed_for(f"{value.dataset}, {value.model}") for claim in claims]
                assert any(wanted in text for text in said)
    by_text = {c.text: c for c in STUDY.claims()}
    # Both in per cent of the epochs: 55 % less the 10th or the 100th of 200.
    begins = by_text["Label Smoothing: it rises from the first drop of the learning rate on, if not before"]
    assert begins.printed_for("CIFAR-10, resnet32") == "+50.00 (from epoch 10)"
    assert begins.printed_for("CIFAR-100, resnet32") == "+5.00 (from epoch 100)"
    assert by_text["Label Smoothing: the optimal ECE rises in late epochs"].printed == ""  # in points none is printed
    smooth = by_text["Label Smoothing is less calibratable by temperature scaling"]
    assert smooth.printed_for("CIFAR-10, resnet32") == "+1.59"  # 2.54 less 0.95
    assert smooth.printed_for("digits, mlp") == "+0.02 to +2.11 elsewhere"


def test_the_optimal_ece_along_the_epochs():
    rows = []
    for coefficient, end in ((0.01, 0.02), (0.09, 0.04)):
        for seed in range(3):
            curve = [0.05, 0.01, 0.01 if seed < 2 else 0.009, end + 0.001 * seed]
            rows.append({**written("digits", {("label_smoothing", coefficient): {}}, seeds=1, network="mlp")[0],
                         "sizes": [60, 50, 100], "seed": seed, "optimal_ece": curve})  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", (replace(TINY, epochs=4),))
        found = judged(rows, Options(preset="tiny"), "Figure 4")
    assert found["Label Smoothing: the optimal ECE rises in late epochs"].mean == pytest.approx(2.1)
    timely = found["Label Smoothing: it rises from the first drop of the learning rate on, if not before"]
    assert timely.mean == pytest.approx(100 * (0.5 + 0.05 - np.mean([2, 2, 3]) / 4))
    texts = {claim.text for claim in STUDY.claims()}
    assert "Focal Loss: the optimal ECE rises in late epochs" not in texts  # the paper says that it does not
    assert "Focal Loss: a large coefficient keeps the optimal ECE high" in texts


def test_the_worst_and_the_best_coefficient_are_those_of_the_other_seeds(tiny):
    """Else noise alone would make a coefficient that costs nothing look dear."""
    options, rows = tiny
    ece = {("label_smoothing", 0.01): (0.3, 0.1), ("label_smoothing", 0.09): (0.2, 0.5), ("cross_entropy", 0): (0.1, 0)}
    changed = [
        {**row, "ece": ece[row["loss"], row["coefficient"]][row["seed"]]}
        for row in rows
        if (row["loss"], row["coefficient"]) in ece and row["sizes"][0] == 60
    ]
    text = "Label Smoothing: a wrong coefficient costs much raw ECE (more than doubles it)"
    # Seed 0 takes what was worst and best in seed 1, 0.09 and 0.01, and seed 1 the other way round.
    result = judged(changed, options, "Figure 1")[text]
    assert (result.runs, result.mean) == (2, pytest.approx(100 * np.mean([0.2 - 2 * 0.3, 0.1 - 2 * 0.5])))
    one = [row for row in changed if row["coefficient"] != 0.09]
    assert text not in judged(one, options, "Figure 1")  # of one coefficient there is no worst


def test_a_coefficient_that_costs_little_does_not_cost_much():
    """What is dearer in every seed but less than twice as dear is no large increase."""
    values = {("focal", 1): {"ece": 0.02}, ("focal", 3): {"ece": 0.03}}
    rows = written("fashion_mnist", values, network="cnn", sizes=2000)
    [result] = judged(rows, Options(preset="fashion_mnist"), "Figure 1").values()
    assert (result.mean, result.verdict) == (pytest.approx(3 - 2 * 2), "did not hold")


def smoothing_curves(coefficients=(0.01, 0.03, 0.05, 0.07, 0.09), seeds=3):
    """Rows whose optimal ECE rises more, and earlier, with a stronger coefficient."""
    rows = written("digits", {("label_smoothing", c): {} for c in coefficients}, network="mlp", sizes=200, seeds=seeds)
    for row in rows:
        row["ece"] = row["coefficient"] * (1 + row["seed"])
        begins = 10 - int(100 * row["coefficient"])
        row["optimal_ece"] = [abs(e - begins) * row["coefficient"] * (1 + 0.1 * row["seed"]) for e in range(30)]
    return rows


def test_a_stronger_coefficient_rises_earlier():
    claim = judged(smoothing_curves(seeds=6), Options(preset="digits"), "Figure 4")[
        "Label Smoothing: it rises earlier with a stronger coefficient"
    ]
    assert (claim.mean, claim.runs, claim.verdict) == (pytest.approx(1.0), 6, "held")


def test_curves_that_do_not_rise_say_nothing_of_when():
    """A flat curve has its least somewhere, and so has one that falls and then wavers."""
    late, earlier = (
        "Label Smoothing: it rises from the first drop of the learning rate on, if not before",
        "Label Smoothing: it rises earlier with a stronger coefficient",
    )
    options, rng = Options(preset="digits"), np.random.default_rng(0)
    rows = smoothing_curves(seeds=5)
    for row in rows:
        row["optimal_ece"] = [0.02 + 0.1 * (e < 3) + 0.002 * rng.normal() for e in range(60)]
    flat = judged(rows, options, "Figure 4")
    assert flat["Label Smoothing: the optimal ECE rises in late epochs"].verdict == "not distinguishable"
    assert late not in flat
    assert earlier not in flat
    for row in rows:  # from epoch 21 on, a third of the 60, with this coefficient alone
        if row["coefficient"] == 0.09:
            row["optimal_ece"] = [abs(e - 20) * 0.001 * (1 + 0.1 * row["seed"]) for e in range(60)]
    one = judged(rows, options, "Figure 4")
    assert (one[late].mean, earlier in one) == (pytest.approx(100 * (0.55 - 21 / 60)), False)


def test_a_coefficient_that_lacks_a_seed_takes_no_claim_away():
    options = Options(preset="digits")
    rows = smoothing_curves()
    whole, raw = judged(rows, options, "Figure 4"), judged(rows, options, "Figure 1")
    assert (len(whole), len(raw)) == (5, 1)
    lacking = [row for row in rows if (row["coefficient"], row["seed"]) != (0.09, 1)]
    failed = [
        {name: row[name] for name in ("data", "network", "sizes", "loss", "coefficient", "seed")}
        | {"accuracy": 0.1, "val_accuracy": 0.1, "warning": "training failed: the loss is not finite"}
        for row in rows
        if row not in lacking
    ]
    dumb = [{**row, "val_accuracy": 0.1 if row["coefficient"] == 0.09 else 0.9} for row in rows]
    without = [row for row in rows if row["coefficient"] != 0.09]
    for fewer in (lacking, lacking + failed, dumb):  # missing, failed, or learned nothing
        for source in ("Figure 4", "Figure 1"):
            seen, wanted = (judged(r, options, source) for r in (fewer, without))
            assert {text: result[2:] for text, result in seen.items()} == {
                text: result[2:] for text, result in wanted.items()
            }
    two = judged([row for row in rows if row["coefficient"] < 0.05], options, "Figure 4")
    assert set(two) < set(whole)
    assert not any("stronger" in text for text in two)  # two coefficients are no trend


def test_rows_of_failed_trainings_are_no_obstacle(tiny):
    options, rows = tiny
    failed = [
        {**{name: row[name] for name in ("data", "network", "sizes", "loss", "coefficient", "seed")}, "accuracy": 0.1}
        | {"val_accuracy": 0.1, "warning": "training failed: the loss is not finite"}
        if (row["loss"], row["coefficient"], row["seed"]) == ("label_smoothing", 0.09, 1)
        else row
        for row in rows
    ]
    before, after = (judge_claims(STUDY.claims(), r, options).results for r in (rows, failed))
    assert {r.claim.text for r in before} - {r.claim.text for r in after} == {
        "Label Smoothing: a wrong coefficient costs much raw ECE (more than doubles it)"  # one coefficient is left
    }
    assert len(STUDY.figures(failed, options)) == 6


def test_the_best_coefficient_of_a_size_has_learned_in_claim_and_figure():
    """A network of chance accuracy may have the least ECE of all."""
    growth = Growth((50, 100, 200), {"norm": (0.01, 0.05, 0.1)}, 6)
    best = {50: 0.1, 100: 0.05, 200: 0.01}
    rows = [
        {"data": "digits", "network": "mlp", "sizes": [size, 50, 100], "loss": "norm", "coefficient": value}
        | {"seed": seed, "val_accuracy": 0.9, "val_ece": 0.1 if value == best[size] else 0.2}
        for size in growth.sizes
        for value in growth.coefficients["norm"]
        for seed in range(6)
    ]
    for row in rows:
        if row["sizes"][0] == 200 and row["coefficient"] == 0.1:
            row |= {"val_accuracy": 0.1, "val_ece": 0.0}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "tiny", (replace(TINY, sizes=(200, 50, 100), growth=growth),))
        [result] = judged(rows, Options(preset="tiny"), "Figure 1(d)").values()
    assert (result.mean, result.runs, result.verdict) == (pytest.approx(1.0), 6, "held")
    from matplotlib.figure import Figure

    ax = Figure().subplots()
    rethinking_figures._best_by_size(ax, rows, growth, "val_ece")
    norm = next(line for line in ax.lines if line.get_label() == "α")
    assert list(norm.get_ydata()) == list(best.values())


def test_a_training_that_fails_is_a_result_save_for_the_reference(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUEUP_NETWORKS", str(tmp_path))
    monkeypatch.setattr("trueup_studies.trained_networks.LONG", 1)
    settings = {**POOLED, "sizes": [60, 60, 60], "network": "mlp", "options": {"hidden": [8]}, "epochs": 30, "seed": 0}
    settings |= {"how": {"batch": 60, "rate": 1e8}, "loss": "norm"}
    for coefficient in (-10.0, 10.0):
        [row] = work({**settings, "coefficient": coefficient})
        assert row["accuracy"] == pytest.approx(0.1)
        assert rethinking.has_failed(row)
        assert str(tmp_path) not in row["warning"]
    with pytest.raises(TrainingError):
        work({**settings, "loss": "cross_entropy", "coefficient": 0, "how": {"batch": 60, "rate": 1e30}})
    assert not list(tmp_path.glob("*.ckpt"))  # from there it would only fail again


def test_a_coefficient_with_which_training_failed_is_not_chosen(tiny):
    options, rows = tiny
    kept = ("data", "network", "sizes", "loss", "coefficient", "seed")
    worst = {
        "accuracy": 0.1,
        "val_accuracy": 0.1,
        **dict.fromkeys(rethinking.CHOICES, math.inf),
        "warning": "training failed: ",
    }
    wrong = {("label_smoothing", 0.01, 1), ("norm", 0.05, 0), ("norm", 0.05, 1)}
    failed = [
        {**{name: row[name] for name in kept}, **worst}
        if (row["loss"], row["coefficient"], row["seed"]) in wrong
        else row
        for row in rows
    ]
    assert sum(map(rethinking.has_failed, failed)) == 3
    found = STUDY.tables(failed, options)
    assert "Label Smoothing 0.09" in found["table_1"].notes[0]
    assert "L1 Norm" not in found["table_1"].groups["digits"]
    words = "digits: training failed with Label Smoothing 0.01 (1 of 2 runs), L1 Norm 0.05 (2 of 2 runs)."
    assert found["table_2"].notes[-1] == words
    assert len(STUDY.figures(failed, options)) == 6
    assert judge_claims(STUDY.claims(), failed, options).results


def test_a_run_that_was_killed_goes_on(tmp_path, monkeypatch, tiny):
    options, rows = tiny
    cell = STUDY.cells(options)[0]
    monkeypatch.setenv("TRUEUP_NETWORKS", str(tmp_path))
    monkeypatch.setattr("trueup_studies.trained_networks.LONG", 50)
    save, seen = _Run.save_checkpoint, []

    def killed(self, checkpoint, history):
        save(self, checkpoint, history)
        seen.append(len(history.epochs))
        if len(seen) == 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(_Run, "save_checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        work({**cell.settings, **cell.local})
    [row] = validate_rows(cell, work({**cell.settings, **cell.local}))
    assert seen == [1, 2, 3]
    assert as_json({**cell.settings, **row}) == as_json(rows[0])
    assert not list(tmp_path.glob("*.ckpt"))


def test_the_oracle_looks_at_the_test_samples(tiny):
    _, rows = tiny
    swapped = [
        {
            **row,
            "ece": 0.001 if row["coefficient"] == 0.09 else 0.5,
            "val_ece": 0.5 if row["coefficient"] == 0.09 else 0.1,
        }
        for row in rows
    ]
    for oracle, coefficient in ((False, 0.01), (True, 0.09)):
        asked = Options(preset="tiny", oracle=oracle)
        note = STUDY.tables(swapped, asked)["table_1"].notes[0]
        assert f"Label Smoothing {coefficient:g}," in note
        assert ("as in the paper" in note) == oracle


def test_every_figure_can_be_drawn(tiny):
    options, rows = tiny
    found = STUDY.figures(rows, options)
    assert list(found) == [f"figure_{number}_digits" for number in range(1, 7)]
    for figure in found.values():
        figure.set_layout_engine("none")  # it takes most of the time
        figure.savefig(io.BytesIO(), format="png", dpi=30)
    one, two, three, four, five, six = ([ax for ax in f.axes if ax.get_title(loc="left")] for f in found.values())
    assert [len(axes) for axes in (one, two, three, four, five, six)] == [4, 14, 2, 3, 7, 6]
    assert five[1].get_title(loc="left") == "Cross-Entropy, stopped on refinement"
    assert found["figure_3_digits"].get_suptitle() == "Figure 3: digits"
    mean = 100 * np.mean([row["ece"] for row in rows if row["loss"] == "cross_entropy"])
    assert six[2].lines[0].get_ydata()[3] == pytest.approx(mean)
    last = [row["optimal_ece"][-1] for row in rows if (row["loss"], row["coefficient"]) == ("norm", 0.05)]
    assert four[1].lines[1].get_ydata()[-1] == pytest.approx(100 * np.mean(last))
    assert one[3].lines[0].get_xdata().tolist() == [30, 60]


def test_losses_without_a_coefficient_need_no_note_of_it(tiny):
    options, rows = tiny
    found = STUDY.tables([row for row in rows if row["loss"].startswith("cross_entropy")], options)
    for name in ("table_1", "table_2", "table_3"):
        assert len(found[name].groups["digits"]) == 2
        assert not any("Coefficients" in note for note in found[name].notes)


def test_what_is_missing_is_left_out(tiny):
    options, rows = tiny
    fewer = [row for row in rows if row["loss"] not in ("norm", "focal")]
    assert "L1 Norm" not in STUDY.tables(fewer, options)["table_1"].groups["digits"]
    assert len(STUDY.figures(fewer, options)) == 6
    one_size = STUDY.figures([row for row in rows if row["sizes"][0] == 60], options)["figure_1_digits"]
    assert len([ax for ax in one_size.axes if ax.get_title(loc="left")]) == 3
    assert STUDY.tables([], options)["table_1"].groups == {}
    assert STUDY.figures([], options) == {}
    assert "negative" not in STUDY.tables([row for row in rows if row["coefficient"] >= 0], options)


def test_a_page_made_early_says_that_another_coefficient_may_be_chosen(tiny):
    options, rows = tiny
    early = [row for row in rows if (row["loss"], row["coefficient"], row["seed"]) != ("label_smoothing", 0.09, 1)]
    words = "digits: not all coefficients of Label Smoothing were run yet, so others may be chosen in the end."
    assert words in STUDY.tables(early, options)["table_1"].notes
    assert not any("run yet" in note for note in STUDY.tables(rows, options)["table_1"].notes)
    for seen, said in ((early, True), (rows, False)):
        groups = {result.group for result in judge_claims(STUDY.claims(), seen, options).results}
        assert any(group.endswith("not all coefficients run yet") for group in groups) == said


def test_the_best_of_some_rivals_confirms_nothing():
    values = {pair: {"ece_temperature": 0.02 if pair[0] == "inverse_focal" else 0.05} for pair in SWEEP}
    values |= {("focal", gamma): {"ece_temperature": 0.05} for gamma in CANDIDATES["focal"]}
    text = "the loss of least ECE with temperature scaling on CIFAR-10 is the paper's"
    whole = written("cifar10", values, sizes=2000)
    fewer = [row for row in whole if (row["loss"], row["coefficient"]) != ("focal", 2)]
    worse = [{**row, "ece_temperature": 0.12 - row["ece_temperature"]} for row in fewer]
    found = [judged(rows, Options(preset="cifar10"), "Figure 6(e)")[text] for rows in (whole, fewer, worse)]
    assert [result.verdict for result in found] == ["held", "not distinguishable", "did not hold"]
    assert ["of some of the losses" in result.group for result in found] == [False, True, True]


def test_another_network_has_its_own_options():
    [plan] = plans(Options(preset="fashion_mnist", network="resnet8"))
    assert (plan.network, plan.options) == ("resnet8", {})
    [plan] = plans(Options(preset="fashion_mnist", network="cnn"))
    assert plan.options == {"width": 8}
    cells = STUDY.cells(Options(preset="fashion_mnist", network="resnet8", seeds=1, methods=("cross_entropy",)))
    assert {cell.settings["network"] for cell in cells} == {"resnet8"}


def test_a_cell_says_the_same_again_and_its_rows_fit_together(tiny):
    options, rows = tiny
    cell = STUDY.cells(options)[0]
    [row] = validate_rows(cell, work({**cell.settings, **cell.local}))
    assert as_json({**cell.settings, **row}) == as_json(rows[0])  # where NaN equals itself
    assert len(row["optimal_ece"]) == 3
    assert row["optimal_ece"][-1] <= row["ece_temperature"] + 1e-12
    assert row["reliability"]["ece"] == pytest.approx(row["ece"])
    assert row["reliability_temperature"]["ece"] == pytest.approx(row["ece_temperature"])
    assert sum(row["reliability"]["count"]) == 100
    assert sum(sum(band["count"]) for band in row["max_logits"]["bands"]) == 60
    whole = [line for line in row["validation_sizes"] if line["size"] == 50]
    assert [line["ece_temperature"] for line in whole] == pytest.approx([row["ece_temperature"]] * 5)
    assert [line["ece_histogram"] for line in whole] == pytest.approx([row["ece_histogram"]] * 5)


def test_a_stopped_network_is_measured_at_its_own_epoch(monkeypatch, tiny):
    options, rows = tiny
    for row in rows:
        assert row["epoch"] == 3 or row["loss"] == "cross_entropy_stopped"
    cell = next(cell for cell in STUDY.cells(options) if cell.settings["loss"] == "cross_entropy_stopped")
    scores = iter([0.1, 0.3, 0.2])
    monkeypatch.setattr(
        "trueup_studies.training.loop.refinement", lambda logits, labels: Refinement(1.0, 0.0, refinement=next(scores))
    )
    seen = []

    def remember(*args, **how):
        seen.append(train(*args, **how))
        return seen[-1]

    monkeypatch.setattr("trueup_studies.papers.rethinking.rethinking_runs.train", remember)
    [row] = validate_rows(cell, work({**cell.settings, **cell.local}))
    [result] = seen
    assert row["epoch"] == result.epoch == 1
    assert row["train_accuracy"] == result.history.epochs[0].train_accuracy
    assert row["train_accuracy"] != result.history.epochs[2].train_accuracy
    assert len(row["optimal_ece"]) == 3  # the curve is of the whole run
    right = int(result.history.correct[0].sum())
    counts = {band["final"]: sum(band["count"]) for band in row["max_logits"]["bands"]}
    assert counts == {1: right, math.inf: 60 - right}  # learned in the one epoch, or never


def test_the_loss_and_its_coefficient_reach_the_network(tiny):
    _, rows = tiny
    first = [row for row in rows if row["seed"] == 0 and row["sizes"][0] == 60]
    first = [row for row in first if row["loss"] != "cross_entropy_stopped"]  # it may end where the whole run does
    assert len({row["nll"] for row in first}) == len(first)
    grown = [row for row in rows if row["seed"] == 0 and (row["loss"], row["coefficient"]) == ("focal", 1)]
    assert len({row["nll"] for row in grown}) == 2


def content(part):
    return [image.numpy().tobytes() for image, _ in part]


def test_pooled_parts():
    one, two = (load_parts({**POOLED, "seed": seed}) for seed in (0, 1))
    smaller = load_parts({**POOLED, "seed": 0, "sizes": [50, 300, 900]})
    assert content(one.test) == content(two.test)
    assert content(one.train) != content(two.train)
    assert content(smaller.train) == content(one.train)[:50]
    assert content(smaller.val) == content(one.val)
    index = [set(part.indices) for part in (one.train, one.val, one.test)]
    assert len(set.union(*index)) == sum(map(len, index)) == 1400
    with pytest.raises(
        ValueError, match=r"sizes must be at most \[597, 300, 900\] .* of digits, got \[600, 300, 900\]"
    ):
        load_parts({**POOLED, "seed": 0, "sizes": [600, 300, 900]})


def test_parts_of_a_data_set_that_has_its_own():
    one, two = (load_parts({"data": "digits", "sizes": [100, None, 200], "pooled": False, "seed": s}) for s in (0, 1))
    assert (len(one.train), len(one.val), len(one.test)) == (100, 360, 200)
    assert content(one.test) == content(two.test)
    assert content(one.val) != content(two.val)


def test_what_did_not_learn_or_lacks_a_seed_is_not_chosen():
    def row(loss, coefficient, ece, accuracy=0.9):
        return {"loss": loss, "coefficient": coefficient, "val_ece": ece, "val_accuracy": accuracy}

    rows = [row("cross_entropy", 0, 0.05)] * 2
    rows += [row("norm", 0.01, 0.03)] * 2 + [row("norm", 0.1, 0.0, 0.1)] * 2 + [row("norm", 0.05, 0.01)]
    rows += [row("focal", 2, 0.0)] * 2  # is of the sweep, not a candidate
    chosen = rethinking.choose_coefficients(rows, "val_ece")
    assert {loss: alike[0]["coefficient"] for loss, alike in chosen.items()} == {"cross_entropy": 0, "norm": 0.01}


def test_the_default_grid():
    cells = STUDY.cells()
    # At the whole size, 3 of 7 smoothings and all of the other coefficients are there already.
    assert len(cells) == (21 + 4) * 5 + 4 * 17 * 3 - 13 * 3  # four of them negative
    assert {cell.settings["seed"] for cell in STUDY.cells(Options(seeds=2))} == {0, 1}
    few = STUDY.cells(Options(methods=("norm",)))
    assert {cell.settings["loss"] for cell in few} == {"cross_entropy", "norm"}
    with pytest.raises(ValueError, match="methods must be among cross_entropy, .*, got 'x'"):
        STUDY.cells(Options(methods=("x",)))
    with pytest.raises(ValueError, match="preset must be one of digits, .*, got 'x'"):
        STUDY.cells(Options(preset="x"))
    with pytest.raises(ValueError, match="data, without a preset, must be one of digits, .*, got 'x'"):
        STUDY.cells(Options(data="x"))
    with pytest.raises(ValueError, match="data must be one of svhn, cifar10, .* with preset 'paper', got 'digits'"):
        STUDY.cells(Options(data="digits", preset="paper"))


def test_where_the_data_are_makes_no_new_cells(tmp_path):
    here, there = (STUDY.cells(Options(data_dir=str(tmp_path / name)))[0] for name in "ab")
    assert here.key == there.key
    assert here.local["data_dir"] != there.local["data_dir"]


def test_the_coefficients_are_the_papers():
    for loss in ("label_smoothing", "norm", "focal"):
        facts = published_values("rethinking", "coefficients", method=TITLES[loss])
        assert list(CANDIDATES[loss]) == [fact.mean for fact in facts]
    assert {fact.method for fact in published_values("rethinking", "table 1")} < set(TITLES.values())
    sets = {fact.dataset for fact in published_values("rethinking", "table 1")}
    assert sets == {DATA_TITLES[plan.data] for plan in PRESETS["paper"]}


def images(path, classes):
    rng = np.random.default_rng(0)
    draw = partial(rng.integers, 0, 256, dtype=np.uint8)
    labels = {f"{part}_labels": np.arange(n) % classes for part, n in (("train", 60), ("test", 40))}
    np.savez(path, train_images=draw(size=(60, 32, 32, 3)), test_images=draw(size=(40, 32, 32, 3)), **labels)


def posts(folder):
    for part, n in (("train", 3), ("test", 2)):
        for group in GROUPS:
            place = folder / f"20news-bydate-{part}" / group
            place.mkdir(parents=True)
            for i in range(n):
                (place / str(i)).write_text(f"Subject: {group}\n\nsome words on {group} number {i}")


@pytest.mark.parametrize("name", ["svhn", "cifar10", "cifar100", "newsgroups20"])
def test_one_batch_of_the_papers_setting(name, tmp_path):
    if name == "newsgroups20":
        posts(tmp_path)
    else:
        images(tmp_path / f"{name}.npz", 100 if name == "cifar100" else 10)
    options = Options(preset="paper", data=name, data_dir=str(tmp_path))
    cell = next(cell for cell in STUDY.cells(options) if cell.settings["loss"] == "inverse_focal")
    short = Cell(cell.study, cell.version, {**cell.settings, "epochs": 1, "sizes": [50, None, None]}, cell.local)
    [row] = validate_rows(short, work({**short.settings, **short.local}))
    assert len(row["optimal_ece"]) == 1
    assert math.isfinite(row["nll"])
    assert sum(row["reliability"]["count"]) == 40


def test_newsgroups_have_the_papers_coefficients():
    options = Options(preset="newsgroups20")
    [plan] = plans(options)
    assert plan.title == "20Newsgroups"
    cells = [cell.settings for cell in STUDY.cells(options)]
    assert {cell["seed"] for cell in cells} == set(range(6))
    pairs = {(cell["loss"], cell["coefficient"]) for cell in cells}
    assert {("cross_entropy", 0), ("label_smoothing", 0.09), ("norm", 0.01), ("focal", 5)} <= pairs
    assert pairs <= {*SWEEP, *((loss, value) for loss, values in plan.candidates.items() for value in values)}
