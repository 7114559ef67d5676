"""Fewer rows than classes: the search in the span of the rows ends where that over all matrices does."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import softmax

from trueup import METHODS
from trueup.calibrators.likelihood import Penalty, Problem, RowSpanProblem, matrix_problem


def few(n, classes, seed=0, *, absent=False, sample_weight=False):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, classes)) * 2
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    if absent:
        gone = rng.random(z.shape) < 0.2
        gone[np.arange(n), y] = False
        z[gone] = -np.inf
    w = rng.random(n) + 0.5 if sample_weight else None
    return z, y, w


@given(
    st.integers(3, 7),
    st.sampled_from([(0.03, 0.03, 0.03, 0.0), (0.02, 1e-3, 0.1, 0.0), (0.3, 0.1, 0.1, 1.0)]),
    st.sampled_from(["logits", "log_probs"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 100),
)
@settings(max_examples=12)
def test_it_is_the_minimum_over_all_matrices(n, strengths, on, absent, sample_weight, seed):
    z, y, w = few(n, 16, seed, absent=absent, sample_weight=sample_weight)
    penalty = Penalty(*strengths)
    whole = Problem(z, y, penalty, on=on, scale=0.7, w=w)
    small = matrix_problem(z, y, penalty, on=on, scale=0.7, w=w)
    assert isinstance(small, RowSpanProblem)
    weight, bias, certificate = whole.solve(0.5, tolerance=1e-9)
    found, found_bias, found_certificate = small.solve(0.5, tolerance=1e-9)
    assert found_certificate.loss == pytest.approx(certificate.loss, abs=1e-8)
    assert found == pytest.approx(weight, abs=2e-3)
    assert found_bias == pytest.approx(bias, abs=2e-3)


def test_its_gradient_is_that_of_its_value():
    z, y, w = few(5, 12, sample_weight=True)
    small = matrix_problem(z, y, Penalty(0.1, 0.2, 0.3, 1.0), on="log_probs", w=w)
    objective = small.penalise(small.likelihood(), small.total)
    rng = np.random.default_rng(1)
    x = small.start_point(0.8) + rng.normal(size=len(small.start_point(0.8)))
    gradient = objective(x)[1]
    for _ in range(5):
        direction = rng.normal(size=len(x))
        slope = (objective(x + 1e-6 * direction)[0] - objective(x - 1e-6 * direction)[0]) / 2e-6
        assert gradient @ direction == pytest.approx(slope, rel=1e-6)


def test_many_rows_or_no_penalty_keep_the_whole_matrix():
    z, y, _ = few(8, 15)
    assert type(matrix_problem(z, y, Penalty(0.1, 0.1, 0.1))) is Problem
    assert type(matrix_problem(z[:5], y[:5], Penalty(0.0, 0.1, 0.1))) is Problem


@pytest.mark.parametrize("name", ["sms", "sms_cv"])
def test_methods_are_the_same_as_with_the_whole_matrix(name, monkeypatch):
    z, y, _ = few(30, 70)
    small = METHODS[name](z, y)
    monkeypatch.setattr("trueup.calibrators.linear.matrix_problem", Problem)
    whole = METHODS[name](z, y)
    new = few(50, 70, seed=1)[0]
    assert softmax(small(new), axis=1) == pytest.approx(softmax(whole(new), axis=1), abs=1e-4)


@pytest.mark.parametrize("name", ["matrix", "ms_odir", "dirichlet", "dirichlet_odir"])
def test_a_free_matrix_is_not_fitted_to_fewer_rows_than_classes(name):
    z, y, _ = few(39, 40)
    with pytest.raises(ValueError, match="40 × 40 weights needs at least 40 rows, one per class, got 39"):
        METHODS[name](z, y)
