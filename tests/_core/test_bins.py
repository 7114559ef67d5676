import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optional import torch
from reference import (
    binned_errors,
    equal_mass_index,
    equal_width_index,
    scores_and_outcomes,
    top_label_errors,
)
from reference import (
    sce as slow_sce,
)
from strategies import pairs
from trueup import from_probs
from trueup._core.bins import BINNED_ERRORS, bin_index, equal_mass, equal_mass_chunks, equal_width, folded_mean
from trueup.metrics import Bins

scores = st.lists(
    st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1 / 15, 0.2, 0.6, 14 / 15, 1.0])), min_size=1, max_size=60
)


@pytest.mark.parametrize("bins", [1, 2, 3, 7, 10, 15, 49, 100])
@pytest.mark.parametrize("closed", ["right", "left"])
def test_every_edge_and_its_neighbours_fall_where_the_rule_says(bins, closed):
    edges = equal_width(bins)
    near = np.unique(np.clip(np.concatenate([edges, np.nextafter(edges, 0), np.nextafter(edges, 1)]), 0, 1))
    assert bin_index(near, edges, closed=closed).tolist() == [equal_width_index(c, bins, closed) for c in near]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("closed", ["right", "left"])
@pytest.mark.parametrize("bins", [10, 15, 20])
def test_probabilities_on_an_edge_stay_there_on_their_way_through_logits(dtype, closed, bins):
    p = np.arange(1, bins) / bins  # column 0 lies on the edges; column 1 only up to rounding
    labels = np.zeros(len(p), int)
    logits = from_probs(np.stack([p, 1 - p], axis=1).astype(dtype))
    index = np.array([equal_width_index(c, bins, closed) for c in p])
    predicted = p > 0.5
    for z in (logits, torch.tensor(logits)):
        tally = Bins.of(z[predicted], labels[predicted], bins=bins, closed=closed, top_label=True)
        assert tally.count.tolist() == np.bincount(index[predicted], minlength=bins).tolist()
        tally = Bins.of(np.asarray(z)[:, ::-1], labels, bins=bins, closed=closed)  # class 1 is on the edges
        assert tally.count.tolist() == np.bincount(index, minlength=bins).tolist()
        tally = Bins.of(z, labels, bins=bins, closed=closed, classwise=True)
        assert tally.count[0].tolist() == np.bincount(index, minlength=bins).tolist()


@given(scores, st.integers(1, 20))
def test_equal_mass_is_chunks_that_keep_equal_values_together(values, bins):
    c = np.array(values)
    edges = equal_mass(c, bins)
    index = bin_index(c, edges)
    slow = equal_mass_index(c, bins)
    # The same partition, whatever the bins are called.
    assert (
        len(set(zip(index.tolist(), slow.tolist(), strict=True))) == len(set(index.tolist())) == len(set(slow.tolist()))
    )
    assert len(edges) - 1 <= bins
    assert (np.diff(edges) > 0).all()


def test_equal_mass_special_cases():
    assert equal_mass(np.full(9, 0.3), 5).tolist() == [0, 1]
    assert equal_mass(np.array([]), 5).tolist() == [0, 1]
    assert len(equal_mass(np.array([0.1, 0.5, 0.9]), 15)) == 4
    distinct = np.random.default_rng(0).random(1001)
    sizes = np.bincount(bin_index(distinct, equal_mass(distinct, 15)))
    assert sizes.max() - sizes.min() <= 1


@given(st.integers(0, 200), st.integers(1, 20))
def test_chunks_differ_by_one_row_and_neither_scale_nor_copies_matter(n, bins):
    below = np.arange(float(n))
    chunk = equal_mass_chunks(below, n or 1.0, bins)
    assert chunk.tolist() == [r * bins // n for r in range(n)]
    size = np.bincount(chunk, minlength=bins)
    assert not n or size.max() - size.min() <= 1
    assert np.array_equal(equal_mass_chunks(0.3 * below, 0.3 * n or 1.0, bins), chunk)


@given(pairs(), st.sampled_from([1, 5, 15]), st.sampled_from(["right", "left"]))
def test_errors_equal_the_slow_loop(pair, bins, closed):
    tally = Bins.of(*pair, bins=bins, closed=closed)
    slow = top_label_errors(*pair, bins=bins, closed=closed)
    assert {name: tally.error(name) for name in BINNED_ERRORS} == pytest.approx(slow, abs=1e-12)


@given(pairs(max_rows=15), st.sampled_from([1, 5, 15]))
def test_class_wise_equals_the_slow_loop(pair, bins):
    assert Bins.of(*pair, bins=bins, classwise=True).ece() == pytest.approx(slow_sce(*pair, bins=bins), abs=1e-12)


@given(pairs(min_rows=3), st.data())
def test_parts_add_up_to_the_whole_in_any_order(pair, draw):
    logits, labels = pair
    cut = sorted(draw.draw(st.lists(st.integers(0, len(labels)), min_size=2, max_size=2)))
    parts = [slice(0, cut[0]), slice(cut[0], cut[1]), slice(cut[1], None)]
    for classwise in (False, True):
        a, b, c = (Bins.of(logits[p], labels[p], classwise=classwise) for p in parts)
        whole = Bins.of(logits, labels, classwise=classwise)
        for total in ((a + b) + c, a + (b + c), c + a + b):
            for name in ("count", "confidence", "hits"):
                assert np.allclose(getattr(total, name), getattr(whole, name), atol=1e-12)


def test_tallies_of_other_bins_do_not_add():
    z, y = np.zeros((3, 4)), np.zeros(3, int)
    with pytest.raises(ValueError, match="tallies must have the same bins to be added"):
        Bins.of(z, y) + Bins.of(z, y, bins=10)
    with pytest.raises(ValueError, match="left-closed"):
        Bins.of(z, y) + Bins.of(z, y, closed="left")


@given(pairs())
def test_inequalities_between_errors(pair):
    c, a = scores_and_outcomes(*pair)
    tally = Bins.of(*pair)
    assert tally.ece() <= tally.error("rmsce") + 1e-12
    assert tally.error("rmsce") <= tally.error("mce") + 1e-12
    assert tally.ece() >= abs(a.mean() - c.mean()) - 1e-12
    assert Bins.of(*pair, bins=1).ece() == pytest.approx(abs(a.mean() - c.mean()), abs=1e-12)
    assert tally.error("overconfidence") + tally.error("underconfidence") == pytest.approx(tally.ece(), abs=1e-12)
    # Refining nested bins never lowers the error.
    assert Bins.of(*pair, bins=5).ece() <= tally.ece() + 1e-12 <= Bins.of(*pair, bins=45).ece() + 2e-12


@given(scores, st.randoms(use_true_random=False))
def test_scores_given_directly(values, random):
    hits = [random.randint(0, 1) for _ in values]
    index = np.array([equal_width_index(c, 15) for c in values])
    slow = binned_errors(index, np.array(values), np.array(hits))
    tally = Bins.of_scores(values, hits)
    assert {name: tally.error(name) for name in BINNED_ERRORS} == pytest.approx(slow, abs=1e-12)


def test_a_case_by_hand():
    # In 5 bins: (.2, .4] holds .3, (.4, .6] .55, (.6, .8] .65, and (.8, 1] both .95 and .92.
    tally = Bins.of_scores([0.95, 0.92, 0.55, 0.65, 0.3], [1, 0, 1, 1, 0], bins=5)
    assert tally.count.tolist() == [0, 1, 1, 1, 2]
    assert tally.gap[1:] == pytest.approx([-0.3, 0.45, 0.35, -0.435])
    assert np.isnan(tally.gap[0])
    assert np.isnan(tally.accuracy[0])
    assert tally.mean_confidence[4] == pytest.approx(0.935)
    assert tally.ece() == pytest.approx((0.3 + 0.45 + 0.35 + 2 * 0.435) / 5)
    assert tally.error("mce") == pytest.approx(0.45)
    assert tally.error("average_ce") == pytest.approx((0.3 + 0.45 + 0.35 + 0.435) / 4)
    assert tally.error("overconfidence") == pytest.approx((0.3 + 0.87) / 5)


def test_nothing_gives_nan():
    tally = Bins.of(np.zeros((0, 3)), np.zeros(0, int))
    assert all(np.isnan(tally.error(name)) for name in BINNED_ERRORS)


@pytest.mark.parametrize("bins", [0, -1, 2.5])
def test_bad_numbers_of_bins(bins):
    with pytest.raises(ValueError, match="bins must be a whole number"):
        Bins.of(np.zeros((1, 2)), [0], bins=bins)


def test_bad_scores_hits_and_edges():
    with pytest.raises(ValueError, match=r"scores must lie in \[0, 1\], got 0.5..1.5"):
        Bins.of_scores([0.5, 1.5], [0, 1])
    with pytest.raises(ValueError, match="hits must be 0 or 1"):
        Bins.of_scores([0.5], [2])
    with pytest.raises(ValueError, match="edges that rise from 0 to 1"):
        Bins.of_scores([0.5], [1], bins=np.array([0.0, 0.7, 0.3, 1.0]))
    with pytest.raises(ValueError, match='closed must be "right" or "left"'):
        Bins.of_scores([0.5], [1], closed="both")
    assert Bins.of_scores([1 + 5e-7, -5e-7], [1, 0]).count[[0, -1]].tolist() == [1, 1]


def test_folded_mean_is_the_mean_of_an_absolute_normal():
    mean, sigma = np.array([0.0, 1.0, -2.0, 3.0]), np.array([1.0, 0.5, 1.0, 0.0])
    draws = mean + sigma * np.random.default_rng(0).normal(size=(400_000, 4))
    assert folded_mean(mean, sigma) == pytest.approx(np.abs(draws).mean(axis=0), abs=5e-3)


@pytest.mark.parametrize("bins", [15.0, None, True, "15"])
def test_a_number_of_bins_is_a_whole_number(bins):
    for call in (lambda: equal_width(bins), lambda: equal_mass(np.array([0.5]), bins)):
        with pytest.raises(ValueError, match="bins must be a whole number of at least 1, got"):
            call()
