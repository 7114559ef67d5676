"""The t-tests against SciPy; ranks are tested with the study that uses them."""

import math

import numpy as np
import pytest
from scipy import stats

from trueup_studies.statistics import paired_interval, paired_t_test, t_test


def test_p_values_are_those_of_scipy():
    rng = np.random.default_rng(0)
    for n in (2, 3, 5):
        ours, theirs = rng.normal(0.05, 0.01, n), rng.normal(0.08, 0.01, 4)
        assert t_test(ours, theirs) == pytest.approx(stats.ttest_ind(ours, theirs).pvalue, rel=1e-9)
        assert paired_t_test(ours) == pytest.approx(stats.ttest_1samp(ours, 0).pvalue, rel=1e-9)


def test_constants_and_single_values_have_a_p_value_or_none():
    same, other = np.array([0.1, 0.1]), np.array([0.2, 0.2])
    assert (t_test(same, same), paired_t_test(same - same)) == (1.0, 1.0)
    assert math.isnan(t_test(same, other))  # what draws nothing is not tested by repeating it
    assert math.isnan(paired_t_test(same))
    assert math.isnan(t_test(same, other[:1]))
    assert math.isnan(paired_t_test(same[:1]))


def test_intervals_of_splits_that_share_samples_cover_the_truth():
    """Halves of the same 200 samples, split anew five times: without the ratio far too narrow."""
    rng, runs, truth = np.random.default_rng(0), 5, 0.0
    covered = {0.0: 0, 1.0: 0}
    for _ in range(1000):
        pool = rng.normal(truth, 1, size=200)
        means = np.array([rng.permutation(pool)[:100].mean() for _ in range(runs)])
        for ratio in covered:
            low, high = paired_interval(means, resplit_ratio=ratio)
            covered[ratio] += low <= truth <= high
            assert (paired_t_test(means, resplit_ratio=ratio) < 0.05) == (not low <= 0 <= high)
    assert covered[0.0] < 800
    assert 930 <= covered[1.0] <= 970
