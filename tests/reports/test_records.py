import math
import time
from dataclasses import fields

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import reference
from optional import torch
from strategies import calibrated, pairs
from trueup import metrics
from trueup.calibrators import Temperature
from trueup.metrics import compare
from trueup.reports import (
    chart,
    class_errors,
    comparison,
    confidence_histogram,
    draw,
    reliability,
    report,
    risk_coverage,
    summary,
    temperature_sweep,
)
from trueup.reports.figures import sections

NOTHING = np.zeros((0, 3)), np.zeros(0, dtype=np.int64)


def same(one, other):
    for field in fields(one):
        a, b = getattr(one, field.name), getattr(other, field.name)
        np.testing.assert_equal(a, b, err_msg=field.name)


@given(pairs(), st.integers(1, 20))
def test_reliability_is_that_of_the_loop(pair, bins):
    logits, labels = pair
    record = reliability(logits, labels, bins=bins, n_resamples=20)
    confidence, correct = reference.scores_and_outcomes(logits, labels)
    index = np.array([reference.equal_width_index(reference.snap(c, bins), bins) for c in confidence])
    for b in range(bins):
        inside = index == b
        assert record.count[b] == inside.sum()
        if not inside.any():
            assert np.isnan([record.confidence[b], record.accuracy[b], record.low[b], record.high[b]]).all()
            continue
        assert record.confidence[b] == pytest.approx(confidence[inside].mean(), rel=1e-9)
        assert record.accuracy[b] == pytest.approx(correct[inside].mean(), rel=1e-9)
        assert 0 <= record.low[b] <= record.high[b] <= 1
    assert record.ece == pytest.approx(reference.binned_errors(index, confidence, correct)["ece"], abs=1e-9)
    assert record.rows == len(labels)
    np.testing.assert_array_equal(record.edges, np.arange(bins + 1) / bins)


@pytest.mark.parametrize("rows", [12, 60, 600])
@pytest.mark.parametrize("level", [0.95, 0.8])
def test_the_band_has_the_quantiles_of_independent_hits(rows, level):
    logits, labels = calibrated(rows, 3, scale=1.5, seed=rows)
    record = reliability(logits, labels, bins=6, level=level, n_resamples=5000, seed=1)
    confidence, _ = reference.scores_and_outcomes(logits, labels)
    tail, filled = (1 - level) / 2, 0
    for b in np.flatnonzero(record.count):
        inside = confidence[(confidence > b / 6) & (confidence <= (b + 1) / 6)]
        below = np.cumsum(reference.chances_of_hits(inside))

        def quantile(share, below=below):
            return np.searchsorted(below, share) / (len(below) - 1)

        slack = 5 * math.sqrt(tail / 5000)  # five standard errors of a share of 5000 draws
        assert quantile(max(tail - slack, 0)) <= record.low[b] <= quantile(tail + slack)
        assert quantile(1 - tail - slack) <= record.high[b] <= quantile(min(1 - tail + slack, 1 - 1e-9))
        filled += 1
    assert filled >= 3


def test_a_bin_of_one_row_says_next_to_nothing():
    record = reliability(np.log([[0.7, 0.3]]), [1], top_label=True)
    assert (record.low[10], record.high[10], record.accuracy[10]) == (0, 1, 0)


def test_a_calibrated_network_lies_in_its_band_and_an_overconfident_one_below():
    logits, labels = calibrated(20_000, 5)
    honest, boastful = reliability(logits, labels), reliability(2 * logits, labels)
    inside = (honest.low <= honest.accuracy) & (honest.accuracy <= honest.high)
    assert inside[honest.count > 0].mean() >= 0.8
    crowded = boastful.count > 200
    assert crowded.sum() >= 5
    assert (boastful.accuracy < boastful.low)[crowded].all()


def test_the_seed_decides_the_band():
    pair = calibrated(300, 4)
    same(reliability(*pair), reliability(*pair))
    assert not np.array_equal(reliability(*pair).low, reliability(*pair, seed=1).low, equal_nan=True)


def test_fifty_thousand_rows_are_quick():
    logits, labels = calibrated(50_000, 10)
    logits = logits.astype(np.float32)
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        reliability(logits, labels)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.2


@given(pairs(), st.integers(1, 20))
def test_right_and_wrong_add_up(pair, bins):
    logits, labels = pair
    record = confidence_histogram(logits, labels, bins=bins)
    confidence, correct = reference.scores_and_outcomes(logits, labels)
    index = [reference.equal_width_index(reference.snap(c, bins), bins) for c in confidence]
    for b in range(bins):
        hits = [a for i, a in zip(index, correct, strict=True) if i == b]
        assert (record.right[b], record.wrong[b]) == (sum(hits), len(hits) - sum(hits))
    assert record.mean == pytest.approx(confidence.mean(), rel=1e-6)
    assert record.accuracy == correct.mean()


@given(pairs(max_rows=6, tied=False), st.integers(2, 9))
def test_risk_is_that_of_every_order(pair, points):
    logits, labels = pair
    record = risk_coverage(logits, labels, points=points)
    confidence, correct = reference.top_label(logits, labels)
    assume(confidence.max() < 1 - 1e-9)  # beyond, rounding decides what is tied
    risk, best = reference.risks(confidence, 1 - correct), reference.risks(correct, 1 - correct)
    n = len(correct)
    assert len(record.coverage) == min(points, n)
    kept = np.round(record.coverage * n).astype(int) - 1
    assert kept[-1] == n - 1
    np.testing.assert_allclose(record.risk, risk[kept], atol=1e-12)
    np.testing.assert_allclose(record.best, best[kept], atol=1e-12)
    assert (record.aurc, record.best_aurc) == pytest.approx((risk.mean(), best.mean()), abs=1e-12)


def test_the_area_is_the_metric_however_few_points_are_kept():
    pair = calibrated(1000, 4)
    record = risk_coverage(*pair, points=7)
    assert len(record.risk) == 7
    assert record.aurc == metrics.aurc(*pair)
    assert record.aurc - record.best_aurc == pytest.approx(metrics.eaurc(*pair), abs=1e-12)


@given(pairs(), st.integers(1, 20))
def test_class_errors_are_those_of_the_loop(pair, bins):
    record = class_errors(*pair, bins=bins)
    expected = np.array(reference.class_calibration_errors(*pair, bins))
    np.testing.assert_allclose(
        np.stack([record.error, record.probability, record.frequency], axis=1), expected, atol=1e-9
    )
    assert record.error.mean() == pytest.approx(metrics.sce(*pair, bins=bins), abs=1e-9)
    assert record.class_names == tuple(str(k) for k in range(pair[0].shape[1]))


@given(pairs(tied=False), st.lists(st.floats(0.2, 5), min_size=1, max_size=4))
def test_a_sweep_is_temperature_scaling_again_and_again(pair, temperatures):
    logits, labels = pair
    record = temperature_sweep(logits, labels, temperatures=temperatures, bins=7)
    scaled = [(logits / t, labels) for t in temperatures]
    np.testing.assert_allclose(record.nll, [metrics.nll(*each) for each in scaled], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(record.ece, [metrics.ece(*each, bins=7) for each in scaled], atol=1e-5)
    assert record.best_ece == temperatures[int(np.argmin(record.ece))]


def test_a_sweep_reaches_around_one_and_the_best():
    for scale in (0.1, 1.0, 8.0):
        logits, labels = calibrated(2000, 4)
        record = temperature_sweep(scale * logits, labels)
        best = float(Temperature.fit(scale * logits, labels).temperature)
        assert record.best_nll == pytest.approx(best, rel=1e-6)
        assert record.temperatures[0] == pytest.approx(min(1, best) / 3)
        assert record.temperatures[-1] == pytest.approx(max(1, best) * 3)
        assert record.nll.argmin() == np.abs(np.log(record.temperatures / best)).argmin()


def test_a_comparison_is_a_column_of_the_table():
    logits, labels = calibrated(400, 3, temperature=2.0)
    scores = compare(raw=(logits, labels), cooler=(logits / 2, labels), hotter=(2 * logits, labels))
    record = comparison(scores, "nll")
    assert record.methods == ("raw", "cooler", "hotter")
    for k, name in enumerate(record.methods):
        result = scores[name, "nll"]
        assert (record.value[k], record.low[k], record.high[k]) == (result.value, result.low, result.high)
    assert np.isnan([record.change[0], record.change_low[0], record.change_high[0]]).all()
    change = scores.changes["hotter"]["nll"]
    assert (record.change[2], record.change_low[2], record.change_high[2]) == (change.value, change.low, change.high)
    assert record.change_high[1] < 0 < record.change_low[2]


def test_one_method_compares_with_nothing():
    record = comparison(compare(raw=calibrated(50, 3)))
    assert record.methods == ("raw",)
    assert np.isnan(record.change).all()


def test_nothing_gives_nan():
    result = reliability(*NOTHING), confidence_histogram(*NOTHING), risk_coverage(*NOTHING), class_errors(*NOTHING)
    assert math.isnan(result[0].ece)
    assert (result[0].rows, result[0].count.sum()) == (0, 0)
    assert np.isnan(result[0].low).all()
    assert math.isnan(result[1].mean)
    assert math.isnan(result[1].accuracy)
    assert len(result[2].risk) == 0
    assert math.isnan(result[2].aurc)
    assert np.isnan([result[3].error, result[3].probability, result[3].frequency]).all()


@pytest.mark.parametrize("make", [reliability, confidence_histogram, risk_coverage, class_errors, temperature_sweep])
def test_torch_and_lists_and_halves_are_welcome(make):
    logits, labels = calibrated(30, 3)
    logits = logits.astype(np.float32)
    same(make(logits, labels), make(torch.from_numpy(logits), torch.from_numpy(labels)))
    make(torch.from_numpy(logits).half(), labels.tolist())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda z, y: reliability(z, y, level=1.5), "level must lie between 0 and 1, got 1.5"),
        (lambda z, y: reliability(z, y, n_resamples=0), "n_resamples must be a whole number of at least 1, got 0"),
        (lambda z, y: reliability(z, y, bins=0), "bins must be a whole number of at least 1, got 0"),
        (
            lambda z, y: confidence_histogram(z, y[:-1]),
            "labels must have 30 entries, one for each row of logits, got 29",
        ),
        (lambda z, y: risk_coverage(z, y, points=1), "points must be at least 2, got 1"),
        (lambda z, y: class_errors(z, y, class_names=["a"]), "class_names must have 3 entries, one per class, got 1"),
        (lambda z, y: temperature_sweep(z, y, temperatures=[1, 0]), "temperatures must be a list of positive numbers"),
        (lambda z, y: temperature_sweep(z[:0], y[:0]), "logits must have at least 1 rows, got 0"),
        (lambda z, y: comparison(compare(raw=(z, y)), "speed"), "metric must be one of accuracy, .* got 'speed'"),
    ],
)
def test_what_is_wrong_is_said(call, said):
    with pytest.raises(ValueError, match=said):
        call(*calibrated(30, 3))


def test_a_real_network_is_overconfident(data):
    with np.load(data / "logits" / "cifar10_densenet40.npz") as file:
        logits, labels = file["test_logits"], file["test_labels"]
    record = reliability(logits, labels)
    assert record.ece == pytest.approx(metrics.ece(logits, labels), abs=1e-6)
    crowded = record.count > 100
    assert (record.accuracy < record.low)[crowded].all()
    sweep = temperature_sweep(logits, labels)
    assert sweep.best_nll > 2
    assert sweep.ece.min() < 0.2 * record.ece


def test_the_sweep_tells_the_tables_numbers_at_a_temperature_of_one():
    rng = np.random.default_rng(3)
    z = rng.normal(size=(400, 5)) * 4
    y = (z / 3 + rng.gumbel(size=z.shape)).argmax(axis=1)
    record = temperature_sweep(z, y, temperatures=[0.7, 1.3, 3.0], fitted=2.5)
    assert record.at_one == pytest.approx((metrics.nll(z, y), metrics.ece(z, y)), abs=1e-9)
    words = summary(record)
    assert f"they are {metrics.nll(z, y):.4f} and {metrics.ece(z, y):.4f}" in words
    assert "is 2.50 (dashed" in words


def test_bins_outside_the_band_are_marked_and_every_bin_shows_its_rows():
    rng = np.random.default_rng(3)
    z = rng.normal(size=(400, 5)) * 4
    record = reliability(z, (z / 3 + rng.gumbel(size=z.shape)).argmax(axis=1))
    assert record.outside.any()
    full = record.count > 0
    marks = chart(record).plot.marks
    dots = next(mark for mark in marks if mark.name == "outside the band")
    assert dots.marker == "diamond"
    np.testing.assert_array_equal(dots.x, record.confidence[record.outside])
    strip = next(mark for mark in marks if getattr(mark, "labels", ()))
    assert strip.hover == [f"{rows:,.0f} rows" for rows in record.count[full]]
    assert "outside the band" in [text.get_text() for text in draw(record).get_legend().get_texts()]


def test_classes_stand_in_one_order_before_and_after():
    rng = np.random.default_rng(3)
    z = rng.normal(size=(400, 5)) * 4
    y = (z / 3 + rng.gumbel(size=z.shape)).argmax(axis=1)
    result = sections(report((z, y), methods=["vector"], progress=False).audit, None)
    section = next(section for section in result if section.name == "classes")
    names = [chart(panel.record, **panel.options).plot.y.rows for panel in section.panels]
    assert len(names) == 2
    assert names[0] == names[1]


def concentrated(kind):
    """Draw a file whose predictions share a bin: rare events with reversed risks, or confidences of .935 to .999."""
    rng = np.random.default_rng(0)
    p = rng.uniform(0.001, 0.06, 20_000) if kind == "rare" else 1 - rng.uniform(0.001, 0.065, 20_000)
    y = (rng.random(20_000) < p).astype(int)
    shown = 0.061 - p if kind == "rare" else 1.934 - p
    return np.stack([np.log1p(-shown), np.log(shown)], axis=1), y


@pytest.mark.parametrize("kind", ["rare", "sure"])
def test_concentrated_predictions_are_drawn_over_their_range(kind):
    z, y = concentrated(kind)
    record = reliability(z, y)
    assert record.is_logit
    assert len(record.count) == 15
    assert record.count.min() > 0.8 * record.count.max()
    assert record.outside.sum() >= 8  # equal-width bins show one bin, inside the band
    assert reliability(z, y, quantiles=False).outside.sum() == 0
    assert "adaptive ECE" in summary(record)
    ax = draw(record)
    assert [label.get_text() for label in ax.get_xticklabels()] == [label.get_text() for label in ax.get_yticklabels()]
    assert all("%" in label.get_text() for label in ax.get_xticklabels())
    drawn = chart(record).plot
    assert drawn.x.tick_labels == drawn.y.tick_labels
    assert len(drawn.x.tick_labels) >= 3


@pytest.mark.parametrize("kind", ["rare", "sure"])
def test_a_histogram_of_concentrated_predictions_is_drawn_over_their_range(kind):
    z, y = concentrated(kind)
    record = confidence_histogram(z, y)
    total = record.right + record.wrong
    assert total.sum() == len(y)
    assert record.right.sum() == y.sum()
    assert (total > 0.02 * len(y)).sum() >= 10  # equal-width bins fill two
    low, high = chart(record).plot.x.range
    assert (0 <= low < high <= 0.1) if kind == "rare" else (0.9 <= low < high <= 1)
    probs = np.exp(z[:, 1]) / np.exp(z).sum(axis=1)
    inside = (probs > record.edges[5]) & (probs <= record.edges[6])
    assert total[5] == pytest.approx(inside.sum(), abs=1)


def test_a_narrow_range_in_the_middle_has_a_linear_axis():
    rng = np.random.default_rng(0)
    p = rng.uniform(0.47, 0.53, 5000)
    record = reliability(np.stack([np.log1p(-p), np.log(p)], axis=1), (rng.random(5000) < p).astype(int))
    assert record.quantiles
    assert not record.is_logit
    low, high = draw(record).get_xlim()
    assert 0.3 < low < 0.47
    assert 0.53 < high < 0.7


def test_spread_predictions_keep_bins_of_equal_width():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(5000, 3)) * 3
    assert not reliability(z, (z + rng.gumbel(size=z.shape)).argmax(axis=1)).quantiles
