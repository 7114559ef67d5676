"""The probability of an event: what folding hides, the metrics against slow loops and peers' definitions, and doors."""

import csv
import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

import reference
from strategies import calibrated, pairs
from trueup import Monitor, compare, evaluate, from_probs, metrics
from trueup._core import native
from trueup.convert import as_event, from_log_odds
from trueup.metrics import Tally
from trueup.metrics.events import EVENT_METRICS, Points, event_values
from trueup.metrics.hypothesis_tests import brownian_range_tail


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def risk_score(n=20_000, seed=0):
    """A doctor's score: mean 22.0 %, prevalence 14 %, calibration slope 0.76."""
    rng = np.random.default_rng(seed)
    x = rng.normal(-1.55, 1.0, n)
    return from_probs(sigmoid(x)), (rng.random(n) < sigmoid(0.76 * x - 0.83)).astype(int)


def detector(n=20_000, seed=0):
    """A detector's scores: mean 0.28, precision 0.21."""
    rng = np.random.default_rng(seed)
    p = rng.beta(0.9, 2.3, n)
    return p, (rng.random(n) < np.clip(p * 0.75, 0, 1)).astype(int)


class TestWhatFoldingHides:
    def test_a_risk_score_that_overestimates_is_never_called_underconfident(self):
        logits, labels = risk_score()
        scores = evaluate(logits, labels)
        assert scores["predicted"].value == pytest.approx(0.22, abs=0.01)
        assert scores["observed"].value == pytest.approx(0.141, abs=0.01)
        assert scores["calibration_slope"].value == pytest.approx(0.76, abs=0.05)
        verdict = scores.verdict()
        assert "it overestimates the probability (calibration slope 0.7" in verdict
        assert "too extreme" in verdict
        assert "confident" not in verdict
        assert scores["ece"].value > 0.06
        folded = evaluate(logits, labels, top_label=True)
        assert folded["ece"].value < 0.7 * scores["ece"].value
        assert "underconfident" in folded.verdict()

    def test_a_detector_is_seen_to_be_miscalibrated(self):
        p, happened = detector()
        logits = from_probs(p)
        scores = evaluate(logits, happened)
        index = np.minimum((np.ceil(p * 15) - 1).astype(int), 14)
        by_hand = sum(abs((happened - p)[index == b].sum()) for b in range(15)) / len(p)
        assert scores["ece"].value == pytest.approx(by_hand, abs=1e-9)
        assert by_hand > 3 * metrics.ece(logits, happened, top_label=True) > 0
        assert "overestimates" in scores.verdict()

    def test_the_other_class_as_event_is_underestimated(self):
        logits, labels = risk_score()
        assert "it underestimates the probability" in evaluate(logits, labels, event=0).verdict()

    def test_a_slope_alone_is_named(self):
        x = np.random.default_rng(1).normal(size=20_000) * 1.5
        happened = (np.random.default_rng(2).random(20_000) < sigmoid(x / 2)).astype(int)
        assert "right on average, but its predictions are too extreme" in evaluate(from_log_odds(x), happened).verdict()
        assert "not extreme enough" in evaluate(from_log_odds(x / 4), happened).verdict()

    def test_stated_confidences_below_one_half_are_not_turned_over(self):
        rng = np.random.default_rng(0)
        stated = rng.choice([0.05, 0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.98, 0.99], 5000)
        right = (rng.random(5000) < 0.6 * stated).astype(int)
        scores = evaluate(from_probs(stated), right)
        assert scores["predicted"].value == pytest.approx(stated.mean(), abs=1e-12)
        assert scores["observed"].value == right.mean()

    def test_a_class_of_several_as_event(self):
        logits, labels = calibrated(3000, 4)
        scores = evaluate(logits, labels, event=2)
        assert scores.is_event
        assert scores["predicted"].value == pytest.approx(reference.softmax(logits)[:, 2].mean(), abs=1e-12)
        assert scores["observed"].value == pytest.approx((labels == 2).mean(), abs=1e-12)
        for wrong in (4, -1, True, "2", 1.0):
            with pytest.raises(ValueError, match=r"event must be a class, 0\.\.3, got"):
                evaluate(logits, labels, event=wrong)

    def test_the_event_pair_keeps_the_last_digits(self):
        logits = np.array([[0.0, -800.0, -900.0], [-50.0, 0.0, -60.0]])
        z, y = as_event(logits, [0, 1], 0)
        assert y.tolist() == [1, 0]
        assert z[0] == pytest.approx([-800, 0], rel=1e-12)
        assert z[1, 1] == pytest.approx(-50, rel=1e-12)
        assert as_event(logits[:, :2], [0, 1], 0)[0].tolist() == logits[:, 1::-1].tolist()
        same = as_event(logits[:, :2], [0, 1], 1)
        assert same[0].tolist() == logits[:, :2].tolist()
        assert same[1].tolist() == [0, 1]


class TestMonitor:
    def test_the_direction_is_that_at_the_observed_mean(self):
        rng = np.random.default_rng(0)
        logits = 1.6 * rng.normal(size=(4000, 200))
        probs = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        top = probs.max(axis=1)
        assert top.mean() < 0.3
        right = rng.random(4000) < top / 4
        labels = np.where(right, probs.argmax(axis=1), probs.argmin(axis=1))
        alarm = Monitor(200).update(logits, labels).alarm
        assert alarm is not None
        assert "Overconfident" in alarm.reason or "is right less often" in alarm.reason

    def test_an_event_is_watched_by_its_probability(self):
        logits, labels = risk_score(5000)
        status = Monitor(2).update(logits, labels)
        assert status.event
        assert status.confidence == pytest.approx(0.22, abs=0.02)
        assert status.accuracy == pytest.approx(labels.mean(), abs=1e-12)
        assert "Probabilities too high" in status.alarm.reason
        folded = Monitor(2, top_label=True).update(logits, labels)
        assert folded.accuracy == pytest.approx(metrics.accuracy(logits, labels), abs=1e-12)


class TestDoors:
    def test_confidences_are_the_probability_of_class_one(self):
        assert np.exp(from_probs(np.array([0.3])))[0] == pytest.approx([0.7, 0.3])
        with pytest.warns(UserWarning, match="2 of 3 confidences are exactly 0 or 1; they were moved by 0.0001"):
            ends = np.exp(from_probs(np.array([0.0, 0.2, 1.0])))
        assert ends[0, 1] == pytest.approx(1e-4)
        assert ends[2, 1] == pytest.approx(1.0)
        with pytest.warns(UserWarning, match="moved by 5e-06"):  # so that the order stays
            close = from_probs(np.array([0.99999, 1.0]))
        assert close[1, 0] < close[0, 0]

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            ([20.0, 90.0], "divide per cent by 100"),
            ([-3.0, 0.2], "log-odds go through from_log_odds"),
            ([0.2, math.nan], "must be finite"),
            ([[[0.2, 0.8]]], "must have shape"),
        ],
    )
    def test_numbers_that_are_no_confidences(self, bad, message):
        with pytest.raises(ValueError, match=message):
            from_probs(np.array(bad))

    def test_the_error_names_the_function_to_use(self):
        with pytest.raises(ValueError, match="from_probs"):
            evaluate(np.array([0.9, 0.3]), [1, 0])

    def test_rounded_probabilities_come_in(self):
        p = np.array([[0.333, 0.333, 0.333], [0.5, 0.25, 0.251]])
        with pytest.raises(ValueError, match="renormalise=True"):
            from_probs(p)
        assert np.exp(from_probs(p, renormalise=True)).sum(axis=1) == pytest.approx([1, 1], abs=1e-12)
        with pytest.raises(ValueError, match="must sum to 1"):
            from_probs(p / 2, renormalise=True)

    def test_log_odds_that_look_like_probabilities_warn(self):
        with pytest.warns(UserWarning, match="from_probs") as caught:
            from_log_odds(reference.softmax(calibrated(50, 3)[0])[:, 0])
        assert caught[0].filename == __file__

    def test_one_hot_rows_and_few_log_odds_are_accepted(self):
        metrics.accuracy(np.eye(3), [0, 1, 2])
        from_log_odds(np.array([0.2, 0.7]))


@given(pairs(max_rows=30))
@settings(max_examples=50)
def test_corp_equals_the_slow_loop_and_has_no_negative_part(pair):
    p, y = reference.scores_and_outcomes(*pair)
    parts = metrics.corp(*pair)
    slow = reference.corp(p, y)
    assert parts == pytest.approx(slow, abs=1e-9)
    assert parts.miscalibration >= -1e-12
    assert parts.discrimination >= -1e-12
    assert parts.miscalibration - parts.discrimination + parts.uncertainty == pytest.approx(parts.score, abs=1e-12)


def test_corp_by_hand():
    # Sorted: 0.1 no, 0.3 yes, 0.4 no, 0.8 yes; 0.3 and 0.4 are pooled to ½. S(p) = (.01 + .49 + .16 + .04)/4 = .175,
    # S(p̂) = (0 + .25 + .25 + 0)/4 = .125, S(ȳ) = .25.
    parts = metrics.corp(from_probs(np.array([0.4, 0.1, 0.8, 0.3])), [0, 0, 1, 1])
    assert parts == pytest.approx((0.175, 0.05, 0.125, 0.25))


@given(st.integers(0, 10**6), st.integers(30, 200), st.booleans())
@settings(max_examples=15)
def test_slope_and_intercept_equal_a_general_minimiser(seed, n, weighted):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n) * 2
    y = (rng.random(n) < sigmoid(0.5 * x - 0.3)).astype(int)
    if y.min() == y.max():
        return
    w = rng.random(n) + 0.1 if weighted else np.ones(n)

    def loss(at):
        odds = at[0] + at[1] * x
        return (w * (np.logaddexp(0, odds) - y * odds)).sum() / w.sum()

    best = minimize(loss, [0.0, 0.5], method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-15, "maxiter": 4000}).x
    options = {"sample_weight": w} if weighted else {}
    z = from_log_odds(x)
    result = metrics.calibration_intercept(z, y, **options), metrics.calibration_slope(z, y, **options)
    assert result == pytest.approx(tuple(best), abs=1e-6)
    shift = metrics.calibration_in_the_large(z, y, **options)
    assert w @ sigmoid(x + shift) == pytest.approx(w @ y, rel=1e-9)


def test_slope_is_undefined_without_a_maximum():
    z = from_log_odds(np.array([-1.0, 0.5, 2.0]))
    for labels in ([0, 0, 0], [1, 1, 1], [0, 0, 1]):  # never, always, separated
        assert math.isnan(metrics.calibration_slope(z, labels))
    assert math.isnan(metrics.calibration_slope(np.zeros((4, 2)), [0, 1, 0, 1]))


def test_the_wald_interval_covers():
    covered = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=400) * 1.5
        y = (rng.random(400) < sigmoid(0.8 * x + 0.2)).astype(int)
        result = evaluate(from_log_odds(x), y, metrics=["calibration_slope"], n_resamples=1)["calibration_slope"]
        covered += result.low <= 0.8 <= result.high
    assert 88 <= covered <= 100


@given(pairs(max_rows=40))
@settings(max_examples=40)
def test_auroc_kuiper_and_percentiles_equal_slow_loops(pair):
    p, y = reference.scores_and_outcomes(*pair)
    ordered = np.sort(p)
    assume(all(reference.is_tied(a, b) or b - a > 1e-9 * b for a, b in itertools.pairwise(ordered)))
    ranks = [sum(not reference.is_tied(v, w) and v > w for w in p) for v in p]
    assert metrics.auroc(*pair) == pytest.approx(reference.roc_area(ranks, y), nan_ok=True, abs=1e-12)
    gaps = [0.0, *(sum((y - p)[p <= t * (1 + 1e-15) + 1e-18]) / len(p) for t in p)]
    assert metrics.kuiper(*pair) == pytest.approx(max(gaps) - min(gaps), abs=1e-9)
    assert metrics.event_brier(*pair) == pytest.approx(np.mean((p - y) ** 2), abs=1e-12)


@pytest.mark.parametrize("n", [12, 41, 120])
def test_the_smooth_errors_equal_the_slow_loop(n):
    rng = np.random.default_rng(n)
    p = rng.permutation(np.linspace(0.05, 0.95, n) + rng.uniform(-0.01, 0.01, n) / n)
    y = (rng.random(n) < p**2).astype(int)
    pair = from_probs(p), y
    error = np.sort(np.abs(p - reference.loess(p, y)))
    assert metrics.ici(*pair) == pytest.approx(error.mean(), abs=1e-8)
    assert metrics.e50(*pair) == pytest.approx(error[math.ceil(0.5 * n) - 1], abs=1e-8)
    assert metrics.e90(*pair) == pytest.approx(error[math.ceil(0.9 * n - 1e-9) - 1], abs=1e-8)


def test_the_smooth_curve_may_fall():
    """Reversed predictions: the mean error is that of the true line, which an increasing curve would miss."""
    rng = np.random.default_rng(1)
    p = rng.uniform(0.001, 0.06, 20000)
    y = (rng.random(20000) < p).astype(int)
    scores = evaluate(from_probs(0.061 - p), y, metrics=["ici", "miscalibration"])
    assert scores["ici"].low < np.mean(np.abs(2 * p - 0.061)) < scores["ici"].high
    interval = scores["miscalibration"]
    assert interval.low < interval.value < interval.high
    assert interval.high - interval.low > 1e-4


def test_a_few_distinct_scores_are_smoothed_without_a_singular_fit():
    for values in ([0.3], [0.3, 0.6], [0.1, 0.3, 0.5, 0.9]):
        p = np.repeat(values, 50)
        y = np.tile([0, 1], 25 * len(values))
        assert metrics.ici(from_probs(p), y) == pytest.approx(np.abs(p - 0.5).mean(), abs=1e-9)


def test_equal_methods_do_not_differ_by_rounding():
    rng = np.random.default_rng(5)
    p = rng.uniform(0.01, 0.99, 997)
    y = (rng.random(997) < p).astype(int)
    change = compare(one=(from_probs(p), y), other=(from_probs(p**1.3), y)).changes["other"]["uncertainty"]
    assert (change.value, change.low, change.high) == (0.0, 0.0, 0.0)


def test_the_range_of_brownian_motion():
    steps = np.random.default_rng(0).normal(size=(4000, 1000)) / math.sqrt(1000)
    walk = np.cumsum(steps, axis=1)
    spread = np.maximum(walk.max(axis=1), 0) - np.minimum(walk.min(axis=1), 0)
    for r in (1.2, 1.6, 2.0, 2.5):
        assert (spread > r - 0.03).mean() >= brownian_range_tail(r) - 0.03  # a walk of steps reaches less far
        assert (spread > r).mean() <= brownian_range_tail(r) + 0.03


def test_tests_of_calibration_hold_their_level_and_detect_miscalibration():
    false = {"kuiper_test": 0, "hosmer_lemeshow": 0}
    for seed in range(200):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=300)
        y = (rng.random(300) < sigmoid(x)).astype(int)
        for name in false:
            false[name] += getattr(metrics, name)(from_log_odds(x), y).p_value <= 0.05
    assert all(count <= 20 for count in false.values()), false
    logits, labels = risk_score(2000)
    assert metrics.kuiper_test(logits, labels).p_value < 1e-4
    assert metrics.hosmer_lemeshow(logits, labels).p_value < 1e-4


@pytest.mark.parametrize("name", ["kuiper_test", "hosmer_lemeshow"])
def test_a_certain_event_that_does_not_happen_is_miscalibrated(name):
    certain, labels = from_log_odds(np.full(100, 1000.0)), np.arange(100) % 2
    result = getattr(metrics, name)(certain, labels)
    assert (result.statistic, result.p_value) == (np.inf, 0.0)
    some = from_log_odds(np.where(np.arange(100) < 50, 1000.0, 0.3))
    assert getattr(metrics, name)(some, labels).p_value < 1e-3
    assert not getattr(metrics, name)(certain, np.ones(100, int)).p_value < 1


def test_many_clusters_are_processed_in_chunks(monkeypatch):
    rng = np.random.default_rng(1)
    x, clusters = rng.normal(size=400), rng.permutation(np.arange(400) // 4)
    logits, labels = from_log_odds(x), (rng.random(400) < sigmoid(x)).astype(int)
    whole = metrics.kuiper_test(logits, labels, clusters=clusters)
    monkeypatch.setattr(native, "LARGE_CHUNK", 7 * 1400)
    parts = metrics.kuiper_test(logits, labels, clusters=clusters)
    assert parts.statistic == whole.statistic
    assert 0.1 < whole.p_value < 0.99
    assert parts.p_value == pytest.approx(whole.p_value, abs=0.07)


def test_a_tally_gives_nearly_the_values_of_the_rows():
    logits, labels = risk_score(5000)
    exact = event_values(Points.of(logits, labels), EVENT_METRICS)
    grid = event_values(Points.of_grid(Tally.of(logits, labels).grid), EVENT_METRICS)
    for name in EVENT_METRICS:
        assert grid[name] == pytest.approx(exact[name], abs=2e-3), name


def test_paired_differences_of_event_metrics():
    logits, labels = risk_score(4000)
    change = compare(raw=(logits, labels), softer=(0.76 * logits, labels), n_resamples=200).changes["softer"]
    assert change["calibration_slope"].low > 0.1
    assert change["auroc"].low == pytest.approx(0, abs=1e-9)
    assert change["discrimination"].high == pytest.approx(0, abs=1e-9)
    assert change["miscalibration"].low <= change["miscalibration"].value <= change["miscalibration"].high


def test_intervals_of_miscalibration_and_ici_cover_calibration_and_its_absence():
    covered = {(slope, name): 0 for slope in (1.0, 0.5) for name in ("miscalibration", "ici")}
    truth = {}
    rng = np.random.default_rng(99)
    x = rng.normal(size=400_000) * 1.5
    for slope in (1.0, 0.5):
        p, q = sigmoid(x), sigmoid(slope * x)
        truth[slope, "miscalibration"], truth[slope, "ici"] = np.mean((p - q) ** 2), np.mean(np.abs(p - q))
    for seed in range(40):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=1000) * 1.5
        for slope in (1.0, 0.5):
            y = (rng.random(1000) < sigmoid(slope * x)).astype(int)
            result = evaluate(from_log_odds(x), y, metrics=["miscalibration", "ici"], n_resamples=160)
            for name in ("miscalibration", "ici"):
                covered[slope, name] += result[name].low - 1e-9 <= truth[slope, name] <= result[name].high + 1e-9
    assert all(count >= 34 for count in covered.values()), covered


@pytest.mark.parametrize(
    ("model", "mean_stated", "right", "values"),
    [("gpt-4.1-mini", 0.9283, 0.7601, 15), ("Qwen3-14B", 0.8963, 0.6301, 17), ("gemini-2.0-flash", 0.959, 0.784, 19)],
)
def test_stated_confidences_of_language_models(data, model, mean_stated, right, values):
    """Confidences of exactly 1 are moved by half of the resolution, 0.005, unless a floor says otherwise."""
    with (data / "llm" / f"mmlu_pro_{model}.csv").open(encoding="utf-8") as file:
        rows = [(row["stated_confidence"], row["correct"]) for row in csv.DictReader(file) if row["stated_confidence"]]
    stated, correct = np.array(rows, dtype=float).T
    assert len(np.unique(stated)) == values
    scores = evaluate(from_probs(stated, floor=1e-9), correct.astype(int), metrics=["predicted", "observed"])
    assert scores["predicted"].value == pytest.approx(mean_stated, abs=5e-5)
    assert scores["observed"].value == pytest.approx(right, abs=5e-5)
    assert "overestimates" in scores.verdict()


def test_methods_that_predict_different_classes_are_resampled_with_their_own_outcomes():
    rng = np.random.default_rng(3)
    z = rng.normal(size=(800, 4)) * 2
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    other = z + rng.normal(size=z.shape) * 1.5
    change = compare(a=(z, y), b=(other, y), metrics=["auroc"]).changes["b"]["auroc"]
    draws = []
    for _ in range(300):
        rows = rng.integers(len(y), size=len(y))
        draws.append(metrics.auroc(other[rows], y[rows]) - metrics.auroc(z[rows], y[rows]))
    low, high = 2 * change.value - np.quantile(draws, [0.975, 0.025])
    assert change.low == pytest.approx(low, abs=0.01)
    assert change.high == pytest.approx(high, abs=0.01)
