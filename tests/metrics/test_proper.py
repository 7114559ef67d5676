import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import brier_score_loss, log_loss, top_k_accuracy_score

from reference import softmax, top_label
from strategies import pairs
from trueup import metrics
from trueup.convert import from_log_odds


@given(pairs())
def test_scikit_learn_agrees_on_likelihood(pair):
    logits, labels = pair
    probs = softmax(logits)
    if probs[np.arange(len(labels)), labels].min() < 1e-15:
        return  # scikit-learn clips what we do not
    assert metrics.nll(*pair) == pytest.approx(
        log_loss(labels, probs, labels=range(probs.shape[1])), rel=1e-9, abs=1e-12
    )


@given(pairs(max_classes=2))
def test_scikit_learns_binary_brier_is_half_of_ours(pair):
    logits, labels = pair
    if logits.shape[1] != 2 or len(set(labels)) < 2:
        return
    half = brier_score_loss(labels, softmax(logits)[:, 1])
    assert metrics.brier(*pair) == pytest.approx(2 * half, abs=1e-12)


def test_likelihood_is_never_clipped():
    assert metrics.nll(from_log_odds(np.array([2000.0])), [0]) == pytest.approx(2000)


@given(pairs())
def test_soft_labels_that_are_one_hot_change_nothing(pair):
    logits, labels = pair
    onehot = np.eye(logits.shape[1])[labels]
    assert metrics.nll(logits, onehot) == pytest.approx(metrics.nll(*pair), abs=1e-11)
    assert metrics.brier(logits, onehot) == pytest.approx(metrics.brier(*pair), abs=1e-12)


def test_soft_labels_by_hand():
    z = np.log(np.array([[0.8, 0.2]]))
    soft = np.array([[0.5, 0.5]])
    assert metrics.nll(z, soft) == pytest.approx(-0.5 * np.log(0.8) - 0.5 * np.log(0.2))
    assert metrics.brier(z, soft) == pytest.approx(0.3**2 + 0.3**2)


@given(pairs(min_rows=2, max_classes=6, tied=False), st.integers(1, 2))
def test_top_k(pair, k):
    logits, labels = pair
    slow = np.mean([y in np.argsort(-z, kind="stable")[:k] for z, y in zip(logits, labels, strict=True)])
    assert metrics.top_k(*pair, k=k) == pytest.approx(slow)
    assert metrics.top_k(*pair, k=1) == metrics.accuracy(*pair)
    assert metrics.top_k(*pair, k=logits.shape[1]) == 1
    if logits.shape[1] > 2:
        assert metrics.top_k(*pair, k=k) == pytest.approx(
            top_k_accuracy_score(labels, logits, k=k, labels=range(logits.shape[1]))
        )


def test_top_k_breaks_ties_for_the_lower_class():
    z = np.zeros((3, 3))
    assert metrics.top_k(z, [0, 1, 2], k=2) == pytest.approx(2 / 3)
    with pytest.raises(ValueError, match="k must lie in 1..3, got 4"):
        metrics.top_k(z, [0, 1, 2], k=4)


def test_entropy_needs_no_labels():
    z = np.log(np.array([[0.5, 0.25, 0.25]]))
    assert metrics.entropy(z) == pytest.approx(1.5 * np.log(2))
    assert metrics.normalised_entropy(z, [0]) == pytest.approx(1.5 * np.log(2) / np.log(3))


@given(pairs())
def test_top_label_brier(pair):
    c, a = top_label(*pair)
    assert metrics.top_label_brier(*pair) == pytest.approx(((c - a) ** 2).mean(), abs=1e-12)


@given(pairs(), st.integers(1, 20), st.booleans())
def test_the_decomposition_adds_up_to_the_score(pair, bins, top):
    parts = metrics.brier_decomposition(*pair, bins=bins, top_label=top)
    assert parts.score == pytest.approx(metrics.top_label_brier(*pair) if top else metrics.brier(*pair), abs=1e-12)
    total = parts.reliability - parts.resolution + parts.uncertainty + parts.within_variance - parts.within_covariance
    assert total == pytest.approx(parts.score, abs=1e-12)
    assert min(parts.reliability, parts.resolution, parts.uncertainty, parts.within_variance) >= 0


def test_decomposition_by_hand():
    # Two forecasts of .8 (one comes true), two of .2 (none does): base ¼, frequencies ½ and 0.
    p = np.array([0.8, 0.8, 0.2, 0.2])
    parts = metrics.brier_decomposition(from_log_odds(np.log(p / (1 - p))), [1, 0, 0, 0], bins=5)
    assert parts.reliability == pytest.approx(2 * (0.3**2 + 0.2**2) / 2)
    assert parts.resolution == pytest.approx(2 * (0.25**2 + 0.25**2) / 2)
    assert parts.uncertainty == pytest.approx(2 * 0.25 * 0.75)
    assert parts.within_variance == pytest.approx(0, abs=1e-15)


def test_top_k_of_many_rows():
    rng = np.random.default_rng(0)
    logits, labels = rng.integers(0, 9, (7000, 100)) * 1.0, rng.integers(0, 100, 7000)
    first = np.argsort(-logits, axis=1, kind="stable")[:, :7]
    assert metrics.top_k(logits, labels, k=7) == (first == labels[:, None]).any(axis=1).mean()
    assert np.isnan(metrics.top_k(logits[:0], labels[:0]))
