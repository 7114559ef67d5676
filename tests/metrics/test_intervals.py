from functools import cache

import numpy as np
import pytest

from reference import equal_mass_index, scores_and_outcomes
from strategies import calibrated
from trueup import metrics
from trueup._core.bins import equal_width
from trueup._core.tally import TABLE_METRICS
from trueup.metrics import Bins, Tally
from trueup.metrics.intervals import Interval, ScoredRows, differences, intervals
from trueup.metrics.resampling import BootstrapBins, Classwise, Resampling, solve


@cache
def true_ece(temperature, classes=5, scale=2.0, n=400_000):
    """The binned error of the distribution itself, which a sample only estimates; and the class-wise one."""
    z = np.random.default_rng(99).normal(size=(n, classes)) * scale
    stated, true = (np.exp(v - v.max(axis=1, keepdims=True)) for v in (z, z / temperature))
    stated, true = stated / stated.sum(axis=1, keepdims=True), true / true.sum(axis=1, keepdims=True)
    best = stated.argmax(axis=1)[:, None]
    top = Bins.from_scores(stated.max(axis=1), np.take_along_axis(true, best, 1)[:, 0], equal_width(15)).ece()
    each = [Bins.from_scores(stated[:, k], true[:, k], equal_width(15)).ece() for k in range(classes)]
    return top, float(np.mean(each))


@pytest.mark.parametrize(("temperature", "n"), [(1.0, 300), (1.1, 2000), (1.5, 2000)])
def test_intervals_of_calibration_errors_cover_the_truth(temperature, n):
    ece, sce = true_ece(temperature)
    covered = {"ece": 0, "sce": 0}
    for seed in range(100):
        tally = Tally.of(*calibrated(n, 5, temperature=temperature, seed=seed))
        for name, result in intervals(tally, ("ece", "sce"), Resampling(n_resamples=200, seed=seed)).items():
            covered[name] += result.low <= {"ece": ece, "sce": sce}[name] <= result.high
    assert covered["ece"] >= 88  # 95 expected; 88 is three standard deviations below
    assert covered["sce"] >= 88


def test_intervals_of_means_are_those_of_the_bootstrap():
    logits, labels = calibrated(400, 4, temperature=2)
    scored = ScoredRows.of(logits, labels)
    result = intervals(scored.tally)
    rng = np.random.default_rng(0)
    index = rng.integers(0, 400, size=(4000, 400))
    columns = {"accuracy": "correct"}
    for name in ("accuracy", "confidence", "nll", "brier", "entropy"):
        replicas = getattr(scored.rows, columns.get(name, name))[index].mean(axis=1)
        low, high = np.quantile(replicas, [0.025, 0.975])
        width = high - low
        assert result[name].low == pytest.approx(low, abs=0.1 * width)
        assert result[name].high == pytest.approx(high, abs=0.1 * width)


@pytest.mark.parametrize("adaptive", [False, True])
def test_noise_on_cells_is_the_noise_of_resampled_rows(adaptive):
    logits, labels = calibrated(1500, 4, temperature=1.5)
    c, a = scores_and_outcomes(logits, labels)
    grid = Tally.of(logits, labels).grid
    noisy = BootstrapBins.of_grid(grid, adaptive, Resampling(n_resamples=4000))
    index = equal_mass_index(c, 15) if adaptive else np.ceil(c * 15).astype(int) - 1
    rng = np.random.default_rng(1)
    sums = np.stack(
        [np.bincount(index[i], weights=(a - c)[i], minlength=15) for i in rng.integers(0, 1500, size=(2000, 1500))]
    )
    calibrated_rows = np.sqrt(np.bincount(index, c * (1 - c), minlength=15))  # the noise is never less than theirs
    expected = np.maximum(sums.std(axis=0), calibrated_rows)
    full = sums.std(axis=0) > 0.5
    assert noisy.noise.std(axis=0)[full] == pytest.approx(expected[full], rel=0.12)
    assert np.abs(noisy.noise.mean(axis=0)).max() < 0.5
    assert noisy.observed("ece") == pytest.approx(grid.aece() if adaptive else metrics.ece(logits, labels))


def test_low_end_is_zero_exactly_when_the_test_does_not_reject():
    for seed in range(6):
        for temperature in (1.0, 1.05, 1.5):
            pair = calibrated(1000, 4, temperature=temperature, seed=seed)
            p = metrics.consistency(*pair).p_value
            low = metrics.bootstrap(*pair).low
            if p < 0.01:
                assert low > 0
            if p > 0.05:
                assert low == 0


def test_p_values_are_uniform_under_calibration_and_small_without():
    p = np.sort([metrics.consistency(*calibrated(500, 4, seed=s), n_resamples=199, seed=s).p_value for s in range(200)])
    distance = np.abs(p - (np.arange(200) + 0.5) / 200).max()
    assert distance < 1.63 / np.sqrt(200)  # Kolmogorov–Smirnov at 1 %
    assert metrics.consistency(*calibrated(2000, 4, temperature=1.5)).p_value == pytest.approx(1 / 1001)


@pytest.mark.parametrize("metric", ["ece", "mce", "rmsce", "aece"])
def test_bands_hold_the_accuracy_of_a_calibrated_network(metric):
    inside = total = 0
    for seed in range(20):
        logits, labels = calibrated(2000, 4, seed=seed)
        result = metrics.consistency(logits, labels, metric=metric, seed=seed)
        scored = ScoredRows.of(logits, labels)
        index, edges = scored.bin_of_row(adaptive=metric == "aece")
        accuracy = Bins.from_indices(index, scored.rows.confidence, scored.rows.correct, edges).accuracy
        low, high = result.low[: len(accuracy)], result.high[: len(accuracy)]
        full = ~np.isnan(accuracy) & ~np.isnan(low)
        inside += ((low <= accuracy + 0.01) & (accuracy - 0.01 <= high))[full].sum()
        total += full.sum()
        assert result.excess == pytest.approx(result.statistic - result.expected)
    assert inside / total > 0.9


def test_expected_is_the_mean_of_calibrated_networks():
    means = [metrics.ece(*calibrated(800, 4, seed=s)) for s in range(100)]
    assert metrics.consistency(*calibrated(800, 4)).expected == pytest.approx(np.mean(means), rel=0.1)


def test_spiegelhalter_is_standard_normal_under_calibration():
    z = [metrics.spiegelhalter(*calibrated(500, 4, seed=s)).z for s in range(300)]
    assert abs(np.mean(z)) < 4 / np.sqrt(300)
    assert np.std(z) == pytest.approx(1, abs=0.15)
    result = metrics.spiegelhalter(*calibrated(2000, 4, temperature=1.5))
    assert result.z > 3
    assert result.p_value < 0.01
    assert metrics.spiegelhalter(*calibrated(2000, 4, temperature=0.7)).z < -3


def test_spiegelhalter_by_hand():
    logits, labels = calibrated(50, 3)
    c, a = scores_and_outcomes(logits, labels)
    expected = ((a - c) * (1 - 2 * c)).sum() / np.sqrt(((1 - 2 * c) ** 2 * c * (1 - c)).sum())
    assert metrics.spiegelhalter(logits, labels).z == pytest.approx(expected)


class TestPaired:
    def test_the_true_difference_is_covered(self):
        truth = true_ece(1.0)[0] - true_ece(1.6)[0]
        covered = dict.fromkeys(("ece", "sce", "nll"), 0)
        sce_truth = true_ece(1.0)[1] - true_ece(1.6)[1]
        for seed in range(60):
            logits, labels = calibrated(1500, 5, temperature=1.6, seed=seed)
            one = ScoredRows.of(logits, labels)
            two = ScoredRows.of(logits / 1.6, labels, paired_with=one)
            result = differences(one, two, ("ece", "sce", "nll"), Resampling(n_resamples=200, seed=seed))
            # The second network's logits are the first's at scale 2/1.6, so its own binned truth is zero.
            covered["ece"] += result["ece"].low <= truth <= result["ece"].high
            covered["sce"] += result["sce"].low <= sce_truth <= result["sce"].high
            covered["nll"] += result["nll"].high < 0
        assert covered["ece"] >= 50
        assert covered["sce"] >= 48
        assert covered["nll"] >= 55

    def test_pairing_is_narrower_than_two_samples(self):
        logits, labels = calibrated(2000, 5, temperature=1.6)
        paired = metrics.paired_bootstrap((logits, labels), (logits / 1.2, labels))
        alone = metrics.bootstrap(logits, labels)
        assert paired.high - paired.low < alone.high - alone.low

    def test_a_method_does_not_differ_from_itself(self):
        pair = calibrated(500, 4)
        for metric in TABLE_METRICS:
            result = metrics.paired_bootstrap(pair, pair, metric=metric)
            assert result.value == result.low == result.high == pytest.approx(0, abs=1e-12), metric

    def test_rows_must_be_the_same(self):
        with pytest.raises(ValueError, match=r"the same \(rows, classes, bins\), got \(50, 3, 15\) and \(40, 3, 15\)"):
            metrics.paired_bootstrap(calibrated(50, 3), calibrated(40, 3))

    def test_classes_must_be_the_same(self):
        logits, labels = calibrated(50, 3)
        wider = np.pad(logits, [(0, 0), (0, 2)])
        with pytest.raises(ValueError, match=r"got \(50, 3, 15\) and \(50, 5, 15\)"):
            metrics.paired_bootstrap((logits, labels), (wider, labels))


def test_seeds_decide_and_the_global_generator_is_left_alone():
    pair = calibrated(500, 4)
    np.random.seed(0)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    first, same, other = (metrics.bootstrap(*pair, seed=seed) for seed in (1, 1, 2))
    assert first == same
    assert first != other
    assert np.array_equal(before, np.random.get_state()[1])  # noqa: NPY002


@pytest.mark.parametrize("metric", TABLE_METRICS)
@pytest.mark.parametrize("n", [0, 1, 2, 10])
def test_tiny_sets(metric, n):
    logits, labels = calibrated(10, 3)
    result = metrics.bootstrap(logits[:n], labels[:n], metric=metric)
    assert isinstance(result, Interval)
    if n == 0:
        assert np.isnan([result.value, result.low, result.high]).all()
    if n == 10:
        assert result.low <= result.high


def test_refusals():
    pair = calibrated(20, 3)
    with pytest.raises(ValueError, match="level must lie between 0 and 1, got 95"):
        metrics.bootstrap(*pair, level=95)
    with pytest.raises(ValueError, match="metric must be one of ece, .* got 'nll'"):
        metrics.consistency(*pair, metric="nll")
    with pytest.raises(ValueError, match="metric must be one of accuracy"):
        metrics.bootstrap(*pair, metric="beauty")


def test_no_error_at_all_still_has_an_upper_end():
    # Everything right with certainty: no gap, no noise.
    z = np.array([[800.0, 0.0]] * 20)
    result = metrics.bootstrap(z, np.zeros(20, int))
    assert (result.value, result.low, result.high) == (0, 0, 0)
    # All bins underconfident: overconfidence is 0 as observed, but noise could have hidden some.
    logits = np.log(np.tile([[0.6, 0.4]], (30, 1)))
    labels = np.array([0] * 20 + [1] * 10)
    result = metrics.bootstrap(logits, labels, metric="overconfidence", top_label=True)
    assert result.value == result.low == 0
    assert result.high > 0


def test_class_wise_noise_matches_simulation():
    biases = []
    for seed in range(30):
        tally = Tally.of(*calibrated(1000, 5, seed=seed))
        biases.append((tally.value("sce"), Classwise.of(tally).expected(0.0)))
    seen, expected = np.mean(biases, axis=0)  # calibrated: all that is seen is bias
    assert expected == pytest.approx(seen, rel=0.1)


def test_solve():
    assert solve(lambda t: t**2, 0.25) == pytest.approx(0.5, abs=1e-6)
    assert solve(lambda t: t + 5, 3.0) == 0
    assert solve(lambda t: t, 3.0) == 1
    flat = lambda t: min(max(t, 0.2), 0.6)  # noqa: E731
    assert solve(flat, 0.6) == pytest.approx(0.6, abs=1e-6)
    assert solve(flat, 0.2, find_last=True) == pytest.approx(0.2, abs=1e-6)


def test_repeated_rows_do_not_blow_up_the_class_wise_interval():
    rng = np.random.default_rng(3)
    logits = np.log(np.full((2000, 3), [0.4, 0.3, 0.3]))
    labels = rng.choice(3, size=2000, p=[0.1, 0.6, 0.3])
    result = metrics.bootstrap(logits, labels, metric="sce")
    assert result.low < 0.2 < result.high
    assert result.high - result.low < 0.05
    other = np.log(np.full((2000, 3), [0.1, 0.6, 0.3]))
    change = metrics.paired_bootstrap((logits, labels), (other, labels), metric="sce")
    assert change.low < -0.2 < change.high < -0.1


@pytest.mark.parametrize("number", [0, -1, 2.5, True])
def test_resamples_must_be_a_positive_whole_number(number):
    pair = calibrated(50, 3)
    for call in (
        lambda: metrics.bootstrap(*pair, n_resamples=number),
        lambda: metrics.paired_bootstrap(pair, pair, n_resamples=number),
        lambda: metrics.consistency(*pair, n_resamples=number),
    ):
        with pytest.raises(ValueError, match=f"must be a whole number of at least 1, got {number}"):
            call()


def test_spiegelhalter_of_rounded_halves_is_undefined():
    others = np.random.default_rng(0).dirichlet(np.ones(5), size=50) / 2
    logits = np.log(np.hstack([np.full((50, 1), 0.5), others]))
    assert np.isnan(metrics.spiegelhalter(logits, np.arange(50) % 2).z)


def test_low_ends_keep_the_order_of_the_errors():
    result = intervals(Tally.of(*calibrated(3000, 10, temperature=2)), ("ece", "rmsce", "mce"))
    assert 0 < result["ece"].low <= result["rmsce"].low <= result["mce"].low + 1e-12
    crowded = metrics.bootstrap(*calibrated(300, 4), metric="mce", bins=1000)
    assert crowded.high >= crowded.low
    assert crowded.high > 0
