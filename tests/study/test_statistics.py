"""The t-tests against SciPy; ranks are tested with the study that uses them."""

import math

import numpy as np
import pytest
from scipy import stats

from trueup.study.statistics import paired_t_test, t_test


def test_p_values_are_those_of_scipy():
    rng = np.random.default_rng(0)
    for n in (2, 3, 5):
        ours, theirs = rng.normal(0.05, 0.01, n), rng.normal(0.08, 0.01, 4)
        assert t_test(ours, theirs) == pytest.approx(stats.ttest_ind(ours, theirs).pvalue, rel=1e-9)
        assert paired_t_test(ours) == pytest.approx(stats.ttest_1samp(ours, 0).pvalue, rel=1e-9)


def test_constants_and_single_values_have_a_p_value_or_none():
    same, other = np.array([0.1, 0.1]), np.array([0.2, 0.2])
    assert (t_test(same, other), t_test(same, same)) == (0.0, 1.0)
    assert (paired_t_test(same), paired_t_test(same - same)) == (0.0, 1.0)
    assert math.isnan(t_test(same, other[:1]))
    assert math.isnan(paired_t_test(same[:1]))
