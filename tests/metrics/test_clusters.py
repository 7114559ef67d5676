"""Rows that come in clusters: intervals and tests by cluster."""

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

import trueup
from strategies import calibrated, images
from trueup import metrics
from trueup._core.clusters import MAX_BLOCKS, as_clusters, degrees_of_freedom
from trueup._core.errors import InputError
from trueup.metrics import Tally
from trueup.metrics.groups import evaluate_groups
from trueup.metrics.hypothesis_tests import consistency_of_tally
from trueup.metrics.intervals import ScoredRows, intervals
from trueup.metrics.resampling import Resampling


def test_the_interval_of_a_mean_is_students_over_the_images():
    z, y, image = images(20, 100, seed=3)
    scores = trueup.evaluate(z, y, clusters={"image": image}, metrics=("nll", "brier", "confidence"))
    rows = ScoredRows.of(z, y).rows
    for name in ("brier", "confidence"):
        means = getattr(rows, name).reshape(20, 100).mean(axis=1)
        low, high = stats.t.interval(0.95, 19, means.mean(), stats.sem(means))
        assert (scores[name].low, scores[name].high) == pytest.approx((low, high))
    means = rows.nll.reshape(20, 100).mean(axis=1)  # on a log scale, where the error of a mean is relative to it
    low, high = np.exp(stats.t.interval(0.95, 19, np.log(means.mean()), stats.sem(means) / means.mean()))
    assert (scores["nll"].low, scores["nll"].high) == pytest.approx((low, high))
    assert scores.caption() == "2,000 rows, 4 classes, 15 bins, 20 clusters (image): intervals by image"
    assert scores.to_dict()["clusters"] == 20


def test_the_interval_by_image_is_many_times_wider_than_by_row():
    z, y, image = images(20, 400, common=0.6, seed=1)
    by_row, by_image = trueup.evaluate(z, y), trueup.evaluate(z, y, clusters=image)
    for name in ("accuracy", "nll", "brier"):
        assert by_image[name].value == by_row[name].value
        width, narrow = (scores[name].high - scores[name].low for scores in (by_image, by_row))
        assert width > 3 * narrow


@pytest.mark.parametrize("alike", [False, True])
def test_unequal_clusters_and_weights_have_the_jackknife(alike):
    rng = np.random.default_rng(0)
    z, y = calibrated(60, 3)
    cluster, w = rng.integers(0, 7, 60), rng.uniform(0.5, 2, 60)
    if alike:  # some clusters have more of the large losses
        cluster[np.argsort(ScoredRows.of(z, y).rows.nll + rng.normal(size=60))] = np.sort(cluster)
    df = degrees_of_freedom(np.bincount(cluster, w))
    assert 1 < df < 6
    scores, plain = (
        trueup.evaluate(z, y, sample_weight=w, clusters=c, metrics=("nll", "brier")) for c in (cluster, None)
    )
    for name in ("nll", "brier"):
        loss = getattr(ScoredRows.of(z, y).rows, name)
        mean = np.average(loss, weights=w)
        without = [np.average(loss[cluster != g], weights=w[cluster != g]) for g in range(7)]
        error = np.sqrt(6 / 7 * np.sum((without - mean) ** 2))
        if name == "nll":  # log-normal
            independent, width = (mean * np.log(each[name].high / each[name].low) / 2 for each in (plain, scores))
        else:
            independent, width = ((each[name].high - each[name].low) / 2 for each in (plain, scores))
        assert (error > 1.01 * independent / 1.959964) == alike
        error = max(error, independent / 1.959964)  # never less than that of independent rows
        assert width == pytest.approx(stats.t.ppf(0.975, df) * error, rel=1e-5)


@pytest.mark.parametrize("classes", [2, 4])
def test_repeated_pixels_do_not_narrow_the_interval(classes):
    z, y, image = images(12, 30, classes=classes, seed=2)
    once = trueup.evaluate(z, y, clusters=image, n_resamples=200)
    twice = trueup.evaluate(*(np.repeat(x, 2, axis=0) for x in (z, y)), clusters=np.repeat(image, 2), n_resamples=200)
    for name in once.metrics:
        assert (twice[name].low, twice[name].high) == pytest.approx((once[name].low, once[name].high), abs=2e-3)
    assert twice.tests["network"].p_value == once.tests["network"].p_value


def test_clusters_of_one_row_are_independent_rows():
    z, y = calibrated(1000, 4, temperature=1.5)
    plain, each = trueup.evaluate(z, y), trueup.evaluate(z, y, clusters=np.arange(1000))
    for name in plain.metrics:
        if name != "mce":  # one bin with few rows decides it
            width = plain[name].high - plain[name].low
            assert each[name].low == pytest.approx(plain[name].low, abs=0.25 * width)
            assert each[name].high == pytest.approx(plain[name].high, abs=0.25 * width)


def test_neither_order_nor_names_matter():
    z, y, image = images(10, 20, seed=5)
    order = np.random.default_rng(0).permutation(len(y))
    names = np.array([f"scan {k}" for k in range(10)])[image]
    first = trueup.evaluate(z, y, clusters=image, n_resamples=100)
    second = trueup.evaluate(z[order], y[order], clusters=list(names[order]), n_resamples=100)
    for name in first.metrics:
        assert (second[name].low, second[name].high) == pytest.approx((first[name].low, first[name].high), abs=1e-9)


def test_tallies_add_up_when_a_cluster_spans_chunks():
    z, y, image = images(40, 25, seed=6)
    whole = Tally.of(z, y, clusters=image)
    parts = [slice(0, 333), slice(333, 340), slice(340, None)]
    merged = sum(
        (Tally.of(z[p], y[p], clusters=image[p]) for p in parts[1:]),
        Tally.of(z[parts[0]], y[parts[0]], clusters=image[parts[0]]),
    )
    for field in ("weight", "means", "count", "gap"):
        assert getattr(merged.clusters, field) == pytest.approx(getattr(whole.clusters, field), abs=1e-9)
    assert merged.gap == pytest.approx(whole.gap)
    streamed, scored = intervals(merged), ScoredRows.of(z, y, clusters=image)
    exact = intervals(scored.tally, scored=scored)
    assert np.isnan(streamed["aece"].low)
    for name in ("accuracy", "nll", "ece"):  # two of forty may share a block
        assert streamed[name].low == pytest.approx(exact[name].low, abs=0.3 * (exact[name].high - exact[name].low))
    with pytest.raises(ValueError, match="both have clusters or neither"):
        Tally.of(z, y) + whole


def test_very_many_clusters_share_blocks():
    z, y = calibrated(4000, 3)
    result = as_clusters(np.arange(4000) // 2, 4000)
    assert result.block.max() + 1 == MAX_BLOCKS
    assert all(len(set(result.block[result.code == k].tolist())) == 1 for k in range(0, 2000, 97))
    plain, by_two = (trueup.evaluate(z, y, clusters=c)["nll"] for c in (None, result))
    assert by_two.high - by_two.low == pytest.approx(plain.high - plain.low, rel=0.15)


def test_calibrated_images_are_not_rejected_as_their_pixels_are():
    rejected = dict.fromkeys(("row", "image", "z", "kuiper"), 0)
    for seed in range(25):
        z, y, image = images(20, 60, common=0.5, classes=2, seed=seed)
        rejected["row"] += metrics.consistency(z, y, n_resamples=99).p_value <= 0.05
        rejected["image"] += metrics.consistency(z, y, clusters=image, n_resamples=99).p_value <= 0.05
        rejected["z"] += metrics.spiegelhalter(z, y, clusters=image).p_value <= 0.05
        rejected["kuiper"] += metrics.kuiper_test(z, y, clusters=image, n_resamples=99).p_value <= 0.05
    assert rejected["row"] >= 15
    assert rejected["image"] <= 5
    assert rejected["z"] <= 5
    assert rejected["kuiper"] <= 5


def test_an_error_in_every_image_is_detected():
    z, y, image = images(20, 200, sharpness=4.0, classes=2, seed=1)
    assert metrics.consistency(z, y, clusters=image).p_value < 0.01
    assert metrics.kuiper_test(z, y, clusters=image).p_value < 0.05
    assert trueup.evaluate(z, y, clusters=image)["ece"].low > 0


def test_spiegelhalters_test_is_students_of_the_images():
    z, y, image = images(15, 50, seed=4)
    rows = ScoredRows.of(z, y).rows
    each = np.bincount(image, (rows.outcome - rows.score) * (1 - 2 * rows.score))
    assert metrics.spiegelhalter(z, y, clusters=image).p_value == pytest.approx(stats.ttest_1samp(each, 0).pvalue)


def test_differences_are_paired_and_by_cluster():
    z, y, image = images(20, 50, classes=2, seed=8)
    scores = trueup.compare({"raw": (z, y), "flat": (z / 3, y)}, clusters=image)
    losses = [ScoredRows.of(logits, y).rows.nll.reshape(20, 50).mean(axis=1) for logits in (z, z / 3)]
    change = losses[1] - losses[0]
    low, high = stats.t.interval(0.95, 19, change.mean(), stats.sem(change))
    result = scores.changes["flat"]["nll"]
    assert (result.low, result.high) == pytest.approx((low, high))
    for name in scores.metrics:
        assert scores.changes["flat"][name].low <= scores.changes["flat"][name].value + 0.02
    same = trueup.compare({"raw": (z, y), "same": (z, y)}, clusters=image).changes["same"]
    assert all(abs(same[name].high - same[name].low) < 1e-9 for name in ("nll", "ece", "auroc"))


def test_a_group_of_one_cluster_counts_as_one_row():
    rng = np.random.default_rng(0)
    p = rng.uniform(0.3, 0.7, 400)
    site, patient = np.repeat(["A", "B"], 200), np.concatenate([np.zeros(200), 1 + np.arange(200) // 10])
    y = rng.random(400) < p + 0.2 * (site == "A")
    plain, clustered = (evaluate_groups(p, y, site, clusters=c) for c in (None, patient))
    assert plain["A"].stands_out
    assert not clustered["A"].stands_out
    widths = [table["B"].difference.high - table["B"].difference.low for table in (plain, clustered)]
    assert widths[1] > widths[0]
    assert clustered["B"].difference.value == plain["B"].difference.value


@pytest.mark.parametrize(
    ("clusters", "message"),
    [
        (["a"] * 12, "clusters must be at least 2, got 1: all rows are of 'a'; intervals need several clusters"),
        ([1, 2], "clusters must have 12 entries, one for each row, got 2"),
        ("patient", "clusters must have one value for each row, got the single value 'patient'"),
        ([1.0] * 11 + [float("nan")], "clusters must have a value in every row, got nan in row 11"),
        ([[1]] * 12, "clusters must be numbers, text or other hashable values, got list"),
        (np.zeros((12, 2)), "clusters must have one value for each row, got shape (12, 2)"),
        ({"a": [1] * 12, "b": [1] * 12}, "clusters must be one column, got 2 columns"),
    ],
)
def test_bad_input_is_named_in_the_error(clusters, message):
    z, y = calibrated(12, 3)
    with pytest.raises(InputError) as error:
        trueup.evaluate(z, y, clusters=clusters)
    assert message in str(error.value)


def test_a_cluster_without_weight_does_not_count():
    z, y, image = images(5, 20, seed=1)
    with pytest.raises(InputError, match="at least 2"):
        trueup.evaluate(z, y, clusters=image, sample_weight=image == 2)
    three = trueup.evaluate(z, y, clusters=image, sample_weight=image < 3, metrics=("nll",))["nll"]
    alone = trueup.evaluate(z[image < 3], y[image < 3], clusters=image[image < 3], metrics=("nll",))["nll"]
    assert (three.low, three.high) == pytest.approx((alone.low, alone.high))


def test_the_adaptive_test_with_clusters_needs_the_rows():
    z, y, image = images(30, 20)
    assert 0 < metrics.consistency(z, y, metric="aece", clusters=image).p_value <= 1
    with pytest.raises(InputError, match="metric must be one of ece"):
        consistency_of_tally(metrics.Tally.of(z, y, clusters=image), Resampling(), metric="aece")


def test_simulations_run(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import clusters

    result = clusters.simulate(clusters.WORLDS[1], sets=12, pixels=32, population=500)
    assert result.by_cluster["accuracy"] >= 8 / 12  # eleven expected
    assert result.by_row["accuracy"] < result.by_cluster["accuracy"]
    assert result.by_cluster["ece"] >= 8 / 12
    assert result.rejected > 0.5
    sys.modules.pop("clusters")


def test_few_clusters_with_many_rows_are_too_few():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(40, 3)) * 2
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    rows = [np.repeat(x, 10, axis=0) for x in (z, y, np.arange(40))]
    scores = trueup.evaluate(rows[0], rows[1], clusters={"image": rows[2]})
    assert "400 rows in 40 clusters (image) carry as much information as about " in scores.verdict()
    assert "too few to tell whether it is calibrated (5 tests by image, corrected p = " in scores.verdict()
    apart = trueup.evaluate(np.tile(z, (10, 1)), np.tile(y, 10), clusters=np.arange(400))
    assert apart.too_few_rows() == ""
