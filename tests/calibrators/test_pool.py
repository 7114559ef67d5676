"""The pool of candidates, and the automatic choice that makes it."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference import brier_of_mixture, em_weights, nll_of_mixture
from strategies import calibrated
from trueup import METHODS, load, metrics, save
from trueup.calibrators import Identity, Mixture, Temperature, UniformMixture
from trueup.calibrators import auto as auto_module
from trueup.calibrators.auto import CANDIDATES, auto
from trueup.calibrators.pool import HeldOut, brier_weights, likelihood_weights

seeds = st.integers(0, 10**6)
PARTS = [Temperature(0.5), Temperature(2.0)]


def _probs(seed, parts=3, n=40, classes=3):
    rng = np.random.default_rng(seed)
    probs = rng.dirichlet(np.ones(classes), size=(parts, n))
    return probs, rng.integers(0, classes, n), rng


@given(seed=seeds)
def test_likelihood_weights_are_those_of_em(seed):
    probs, labels, rng = _probs(seed)
    prior = 1 + rng.integers(0, 3, 3) * rng.random(3)
    found = likelihood_weights(probs[:, np.arange(40), labels].T, prior)
    assert np.allclose(found, em_weights(probs, labels, prior), atol=2e-4)


def test_parts_that_say_the_same_share_their_weight():
    column = np.random.default_rng(0).random((50, 1))
    assert likelihood_weights(np.hstack([column, column, column / 2]), np.ones(3)).round(3).tolist() == [0.5, 0.5, 0.0]


@given(seed=seeds)
def test_brier_weights_cannot_be_bettered(seed):
    probs, labels, rng = _probs(seed)
    found = brier_weights(probs, labels)
    assert found.min() >= 0
    assert found.sum() == pytest.approx(1)
    least = brier_of_mixture(probs, labels, found)
    for other in (*np.eye(3), *rng.dirichlet(np.ones(3), size=5)):
        assert brier_of_mixture(probs, labels, found + 0.1 * (other - found)) >= least - 1e-9


@pytest.mark.parametrize("score", ["nll", "brier"])
def test_losses_of_a_mixture_come_from_weights_that_saw_other_folds(score):
    probs, labels, _ = _probs(3)
    held_out = HeldOut(labels, np.arange(40) % 4, 3, score)
    for k, name in enumerate("abc"):
        held_out.add(name, np.arange(40) < 40, np.log(probs[k]))
    found = held_out.mixture_losses("abc", np.ones(3))
    slow = nll_of_mixture if score == "nll" else brier_of_mixture
    for k in range(4):
        rows = np.arange(40) % 4 == k
        weights = held_out.weights("abc", np.ones(3), ~rows)
        assert found[rows].mean() == pytest.approx(slow(probs[:, rows], labels[rows], weights), rel=1e-5)


def test_mixture_is_what_its_formula_says():
    z = np.array([[2.0, 0.0, -1.0]])
    first, second = (np.exp(z / t) / np.exp(z / t).sum() for t in (0.5, 2.0))
    pooled = (0.3 * first + 0.7 * second) ** (1 / 0.8)
    expected = 0.9 * pooled / pooled.sum() + 0.1 / 3
    assert np.allclose(np.exp(Mixture(PARTS, [0.3, 0.7], 0.8, 0.1)(z)), expected, rtol=1e-12)


def test_mixture_refuses_what_is_none():
    for arguments, message in (
        ((PARTS, [0.5, 0.6]), "weights must be 2 positive numbers of sum 1"),
        ((PARTS, [0.0, 1.0]), "weights must be 2 positive"),
        ((PARTS, [0.5, 0.5], 0.0), "temperature must be one positive number"),
        ((PARTS, [0.5, 0.5], 1.0, 1.0), r"share must be one number in \[0, 1\)"),
    ):
        with pytest.raises(ValueError, match=message):
            Mixture(*arguments)


def test_uniform_share_is_taken_where_sure_errors_rule():
    z, y = calibrated(1000, 3)
    assert float(UniformMixture.fit(z, y).share) == 0  # the noise of a thousand rows asks for 0.01
    wrong = np.random.default_rng(0).random(1000) < 0.02
    sure = np.where(wrong[:, None], 60.0 * np.eye(3)[(y + 1) % 3], z)
    assert float(UniformMixture.fit(sure, y).share) > 0
    with pytest.raises(ValueError, match="share must be one number"):
        UniformMixture(1.0)


@pytest.fixture(scope="module")
def bent():
    """Scores whose fault has no simple curve, of three classes, in two halves."""
    z, y = calibrated(1600, 3, scale=2.0)
    z = np.concatenate([2 * z[:, :1], np.tanh(z[:, 1:])], axis=1)
    return (z[:800], y[:800]), (z[800:], y[800:])


@pytest.fixture(scope="module")
def pooled(bent):
    return auto(*bent[0])


def test_auto_is_better_than_temperature_and_says_what_it_is(bent, pooled):
    (z, y), test = bent
    choice = pooled.choice
    assert choice.chosen in ("mixture", *choice.weights)
    assert sum(choice.weights.values()) == pytest.approx(1)
    assert set(choice.weights) <= set(choice.scores) - set(choice.reasons)
    assert set(CANDIDATES["up to 30 classes"]) <= set(choice.scores)
    assert set(choice.errors) == set(choice.scores) - set(choice.reasons)
    assert choice.detectable > 0
    assert choice.loss < choice.scores["temperature"]
    assert metrics.nll(pooled(test[0]), test[1]) < metrics.nll(METHODS["temperature"](z, y)(test[0]), test[1]) - 0.01


def test_the_order_of_rows_does_not_matter(bent, pooled):
    (z, y), test = bent
    order = np.random.default_rng(0).permutation(len(y))
    assert np.allclose(auto(z[order], y[order])(test[0]), pooled(test[0]), atol=1e-3)


def test_a_pool_is_copied_and_saved_whole(bent, pooled, tmp_path):
    z = bent[1][0]
    save(pooled, tmp_path / "pool.safetensors")
    for other in (
        copy.deepcopy(pooled),
        pickle.loads(pickle.dumps(pooled)),
        load(tmp_path / "pool.safetensors"),
    ):
        assert np.array_equal(other(z), pooled(z))


def test_calibrated_data_stay_as_they_are_and_the_record_says_what_could_be_seen():
    found = auto(*calibrated(1000, 3))
    assert isinstance(found, Identity)
    assert found.choice.chosen == "identity"
    assert 0 < found.choice.detectable < 0.1


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_argmax_is_kept_where_asked(bent, dtype):
    (z, y), (new, _) = bent
    found = auto(z.astype(dtype), y, keep_argmax=True)
    near = np.array([[1e-9, 0.0, 0.0], [0.0, 1e-9, 0.0], [0.0, 0.0, 1e-9], [50.0, 50.0 + 2e-5, -50.0]])
    assert found.keeps_argmax
    for logits in (new.astype(dtype), (new * 100).astype(dtype), near.astype(dtype)):
        assert np.array_equal(found(logits).argmax(axis=1), logits.argmax(axis=1))


def test_weights_by_brier_score(bent):
    (z, y), test = bent
    found = auto(z, y, score="brier")
    assert metrics.brier(found(test[0]), test[1]) < metrics.brier(*test)
    assert found.choice.loss < found.choice.scores["temperature"]
    with pytest.raises(ValueError, match='score must be "nll" or "brier", got \'ece\''):
        auto(z, y, score="ece")


def test_a_class_without_rows_keeps_its_odds():
    z, y = calibrated(900, 3, temperature=2.0)
    with pytest.warns(UserWarning, match=r"no row has class 2, but the logits predict \d+ of \d+ rows"):
        found = auto(z[y < 2], y[y < 2])
    assert set(found.choice.scores) == set(CANDIDATES["the same for all classes"])
    turned = found(z[:, ::-1].copy())[:, ::-1]
    assert np.allclose(turned, found(z), atol=1e-9)  # all classes are treated alike


def test_a_class_that_may_be_absent_by_chance_has_more_candidates():
    z, y = calibrated(900, 3, temperature=2.0)
    z[:, 2] -= 12.0  # the logits expect hardly any row of class 2
    found = auto(z[y < 2], y[y < 2])
    assert {name.removeprefix("mixed_") for name in found.choice.scores} == set(CANDIDATES["a class without rows"])
    assert {"svs", "sms", "diagonal_sms", "bayesian_temperature"} <= set(CANDIDATES["a class without rows"])


def test_from_200_rows_on_the_prior_is_halved(monkeypatch):
    priors = []
    monkeypatch.setattr(
        "trueup.calibrators.auto._Trial.conclude", lambda self: priors.append(self.cautious["bayesian_temperature"])
    )
    z, y = calibrated(200, 3, temperature=2.0)
    auto(z, y, progress=False)
    auto(z[1:], y[1:], progress=False)
    assert priors == [1.5, 3.0]


def test_rows_that_are_all_right_do_not_make_it_infinitely_sure():
    z, _ = calibrated(60, 3)
    found = auto(z, z.argmax(axis=1))
    assert set(found.choice.weights) <= {"identity", "bayesian_temperature"}
    assert 1e-4 < metrics.nll(found(z), z.argmax(axis=1)) < metrics.nll(z, z.argmax(axis=1))
    with pytest.warns(UserWarning, match="bound"):
        assert float(METHODS["temperature"](z, z.argmax(axis=1)).temperature) < 1e-3
    sure = METHODS["svs"](z, z.argmax(axis=1))(-z)  # what it would say of a row that it has never seen
    assert metrics.nll(sure, z.argmax(axis=1)) < 100


def test_few_rows_have_few_candidates():
    z, y = calibrated(200, 3, temperature=2.0)
    assert set(CANDIDATES["few rows"]) <= set(auto(z, y).choice.scores)
    rare = np.zeros(1000, int)
    rare[:3] = 1
    scores = np.random.default_rng(0).normal(size=(1000, 2))
    assert {name.removeprefix("mixed_") for name in auto(scores, rare).choice.scores} == set(
        CANDIDATES["few rows, two classes"]
    )


def test_few_rows_lean_on_temperature_scaling_where_nothing_else_is_shown():
    z, y = calibrated(200, 4, temperature=1.7)
    found = auto(z, y)
    assert found.choice.weights["bayesian_temperature"] > 0.3
    assert found.choice.loss < found.choice.scores["identity"]
    # Two classes are told apart by a score that no temperature can use: it is least in the middle.
    x = np.random.default_rng(1).normal(size=150)
    bent = auto(np.stack([0 * x, x], axis=1), (np.abs(x) > 0.6).astype(int))
    assert bent.choice.weights.get("bayesian_temperature", 0.0) < 0.2
    assert bent.choice.loss < bent.choice.scores["bayesian_temperature"] - 0.05


def test_few_rows_lean_on_temperature_scaling_where_the_argmax_is_kept_too():
    z, y = calibrated(200, 4, temperature=1.7)
    assert auto(z, y, keep_argmax=True).choice.weights["temperature"] > 0.3


def test_steps_are_not_taken_for_rows_that_are_nearly_all_right():
    """They are ahead in every row, by little, until they meet the first that is wrong."""
    rng = np.random.default_rng(4)
    y = np.arange(45) % 3
    z = np.eye(3)[y] * 3 + rng.normal(size=(45, 3))
    assert (z.argmax(axis=1) != y).sum() == 1
    weights = auto(z, y).choice.weights
    assert weights.get("isotonic_ovr", 0.0) + weights.get("venn_abers", 0.0) < 0.1


def test_a_class_of_few_rows_leaves_out_what_many_classes_cannot_bear():
    z, y = calibrated(120, 40, temperature=2.0)
    y[:40] = np.arange(40)
    assert {name.removeprefix("mixed_") for name in auto(z, y).choice.scores} == set(
        CANDIDATES["few rows, many classes"]
    )


def test_steps_win_where_confidences_are_few_and_uneven():
    """Stated confidences: few values, which are right as often as no smooth curve would say."""
    rng = np.random.default_rng(0)
    stated = rng.choice([0.5, 0.8, 0.9, 0.95, 0.99], size=6000)
    right = np.select([stated == 0.5, stated == 0.8, stated == 0.9, stated == 0.95], [0.1, 0.6, 0.61, 0.62], 0.9)
    z, y = np.log(np.stack([1 - stated, stated], axis=1)), (rng.random(6000) < right).astype(int)
    entropy = -(right * np.log(right) + (1 - right) * np.log(1 - right)).mean()
    found = auto(z[:3000], y[:3000])
    assert metrics.nll(found(z), (rng.random(6000) < right).astype(int)) < entropy + 0.01


def test_a_candidate_that_cannot_be_fitted_is_passed_over(monkeypatch):
    def broken(logits, labels):
        raise ValueError("no such luck")

    monkeypatch.setattr(auto_module, "METHODS", {**METHODS, "svs": broken})
    found = auto(*calibrated(200, 3, temperature=2.0))
    assert found.choice.reasons == {"svs": "no such luck"}
    assert found.choice.scores["svs"] == np.inf


def test_a_row_of_weight_three_is_three_rows():
    (probs, labels, _), prior = _probs(3), np.array([1.0, 2.0, 1.5])
    rows = np.arange(40) % 4  # one in four has no weight at all
    copies = np.repeat(np.arange(40), rows)
    of_label = probs[:, np.arange(40), labels].T
    twice = likelihood_weights(of_label[copies], prior), brier_weights(probs[:, copies], labels[copies])
    weighted = likelihood_weights(of_label, prior, rows.astype(float)), brier_weights(probs, labels, rows.astype(float))
    np.testing.assert_allclose(weighted, twice, atol=1e-6)


def test_rows_of_the_prior_are_rows_that_a_part_alone_explains():
    probs, labels, _ = _probs(5)
    parts, _, classes = probs.shape
    rows = np.zeros((parts, 3, classes))
    rows[:, :, 1] = 1.0
    rows[1, :, :2] = 1.0, 0.0
    more = brier_weights(np.concatenate([probs, rows], axis=1), np.append(labels, [0, 0, 0]))
    prior = np.ones(parts)
    prior[1] += 3
    np.testing.assert_allclose(brier_weights(probs, labels, prior=prior), more, atol=1e-6)


def test_a_candidate_whose_share_vanishes_beside_the_kept_ones_is_left_out(monkeypatch):
    z, y = calibrated(600, 3, temperature=2.0)
    weights = HeldOut.weights

    def without_the_last(self, names, *rest):
        found = weights(self, names, *rest)
        if len(names) == 2:
            found = np.array([1.0, 0.0])
        return found

    monkeypatch.setattr(HeldOut, "weights", without_the_last)
    monkeypatch.setattr(
        "trueup.calibrators.auto._Trial._names_with_weight", lambda self, class_names, *rest: ["temperature", "svs"]
    )
    choice = auto(z, y).choice
    assert choice.weights == {"temperature": 1.0}
    assert choice.chosen == "temperature"
