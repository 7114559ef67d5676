import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optional import torch
from strategies import images
from trueup import METHODS
from trueup._core.clusters import Clusters
from trueup._core.splits import (
    cluster_folds,
    fold_mask,
    hash_groups,
    k_fold,
    random_groups,
    random_order,
    split_by_sizes,
    split_indices,
    stratified_folds,
)
from trueup.calibrators import Identity, choose, cross_fit
from trueup.calibrators.compose import standard_error


def _pair(n=1000, classes=5):
    z = torch.randn(n, classes, generator=torch.Generator().manual_seed(3))
    return z, torch.arange(n) % classes


discrete_pairs = st.integers(2, 4).flatmap(
    lambda class_axis: st.lists(
        st.tuples(
            st.lists(st.sampled_from([0.0, 0.5, 3.0]), min_size=class_axis, max_size=class_axis),
            st.integers(0, class_axis - 1),
        ),
        min_size=1,
        max_size=60,
    )
)


def _groups_of_content(split, z, y, parts):
    return sorted(zip(z.tolist(), y.tolist(), split(z, y, parts).tolist(), strict=True))


@pytest.mark.parametrize("split", [stratified_folds, random_groups, hash_groups])
@given(rows=discrete_pairs, seed=st.integers(0, 9))
def test_splits_do_not_depend_on_the_order_of_rows(split, rows, seed):
    z, y = torch.tensor([row for row, _ in rows]), torch.tensor([label for _, label in rows])
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(seed))
    assert _groups_of_content(split, z[order], y[order], 3) == _groups_of_content(split, z, y, 3)


@given(rows=discrete_pairs, n_folds=st.integers(2, 5))
def test_folds_share_labels_evenly(rows, n_folds):
    z, y = torch.tensor([row for row, _ in rows]), torch.tensor([label for _, label in rows])
    fold = stratified_folds(z, y, n_folds)
    for kind in (fold, *(fold[y.numpy() == label] for label in set(y.tolist()))):
        counts = np.bincount(kind, minlength=n_folds)
        assert counts.max() - counts.min() <= 1


def test_copies_are_spread_over_the_folds_at_random():
    """Not all in one fold, where no curve has seen them, nor in turn, where it has seen their noise."""
    score, label = torch.arange(4000) % 400, torch.from_numpy(np.random.default_rng(0).integers(0, 2, 4000))
    z = torch.stack([torch.zeros(4000), score.float()], dim=1)
    losses = []
    for train, held_out in k_fold(z, label, 5):
        rate = np.bincount(score[train], label[train], 400) / np.bincount(score[train], minlength=400).clip(1)
        losses.append((rate[score[held_out]] - label[held_out].numpy()) ** 2)
    # Of 8 rows' frequency of a fair coin: the variance of a label, and an eighth of it.
    assert np.concatenate(losses).mean() == pytest.approx(0.25 * 9 / 8, abs=0.01)


def test_rows_that_differ_anywhere_have_places_of_their_own():
    z = torch.zeros(64, 9)
    z[:, 4] = torch.arange(64)  # neither the first, the last nor the label's logit
    y = torch.zeros(64, dtype=torch.int64)
    order = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    assert np.array_equal(stratified_folds(z[order], y[order], 5), stratified_folds(z, y, 5)[order.numpy()])


def test_random_groups_of_copies_show_the_noise_of_rows():
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(40):
        y = (rng.random(3000) < 0.3).astype(np.int64)
        z = np.zeros((3000, 2))
        z[:, 1] = rng.choice(rng.normal(size=2), 3000)
        group = random_groups(torch.from_numpy(z), torch.from_numpy(y), 32)
        ratios.append(np.bincount(group, weights=y - 0.3, minlength=32).var(ddof=1) * 32 / (3000 * 0.21))
    assert 0.9 < np.mean(ratios) < 1.1


def test_each_row_is_held_out_once():
    masks = k_fold(*_pair(), 5)
    assert len(masks) == 5
    assert torch.equal(sum(held_out.int() for _, held_out in masks), torch.ones(1000, dtype=torch.int32))
    assert all(bool((train ^ held_out).all()) for train, held_out in masks)


def test_copies_of_one_row_are_spread_and_one_row_has_no_fold():
    z, y = _pair(1)
    assert k_fold(z, y, 5) == []
    assert [int(held_out.sum()) for _, held_out in k_fold(z.expand(20, -1), y.expand(20), 5)] == [4] * 5


def test_fold_masks_of_an_order_cover_every_row_once():
    order = torch.randperm(17, generator=torch.Generator().manual_seed(0))
    masks = [fold_mask(order, fold, 4) for fold in range(4)]
    assert torch.equal(sum(mask.int() for mask in masks), torch.ones(17, dtype=torch.int32))
    assert sorted(int(mask.sum()) for mask in masks) == [4, 4, 4, 5]


@pytest.mark.parametrize("seed", [0, [1, 2]])
def test_a_random_order_depends_on_its_seed_alone(seed):
    assert np.array_equal(random_order(50, seed), np.random.RandomState(seed).permutation(50))


def test_a_generator_gives_its_own_order():
    assert np.array_equal(random_order(50, np.random.default_rng(3)), np.random.default_rng(3).permutation(50))


@pytest.mark.parametrize(("n", "share", "held_out"), [(10, 0.3, 3), (2, 0.0, 1), (2, 1.0, 1), (1000, 0.1, 100)])
def test_both_sides_of_a_split_have_rows(n, share, held_out):
    train, test = split_indices(n, share=share, seed=1)
    assert len(test) == held_out
    assert sorted([*train, *test]) == list(range(n))


def test_one_sample_cannot_be_split():
    with pytest.raises(ValueError, match="at least 2 samples, got 1"):
        split_indices(1, share=0.5, seed=0)


def test_sizes_take_consecutive_parts():
    parts = split_by_sizes(np.arange(10), [3, 2])
    assert [part.tolist() for part in parts] == [[0, 1, 2], [3, 4], [5, 6, 7, 8, 9]]


class TestClusters:
    def test_folds_hold_whole_clusters_of_every_label(self):
        rng = np.random.default_rng(0)
        code = np.repeat(np.arange(40), rng.integers(1, 30, 40))
        y = torch.from_numpy(np.where(rng.random(len(code)) < 0.9, code % 4, 0))
        clusters = Clusters(code, list(range(40)))
        fold = cluster_folds(y, clusters, 5)
        assert all(len(set(fold[code == k].tolist())) == 1 for k in range(40))
        assert set(fold.tolist()) == {0, 1, 2, 3, 4}
        assert all(set(y[fold == k].tolist()) == {0, 1, 2, 3} for k in range(5))
        sizes = np.bincount(fold)
        assert sizes.max() < 2 * sizes.min()

    def test_there_are_no_more_folds_than_clusters(self):
        z, y = torch.zeros(30, 2), torch.arange(30) % 2
        parts = k_fold(z, y, 5, Clusters(np.arange(30) // 10, [0, 1, 2]))
        assert len(parts) == 3
        assert all(int(test.sum()) == 10 for _, test in parts)

    @pytest.mark.parametrize("make", [cross_fit, lambda fit: choose({"a": fit, "b": fit})])
    def test_methods_on_folds_never_see_a_part_of_a_cluster(self, make):
        rng = np.random.default_rng(0)
        z, y = rng.normal(size=(120, 3)), rng.integers(0, 3, 120)
        image = rng.permutation(np.arange(120) // 8)
        z[:, 0] = image  # the fit can see which it got
        whole = {float(k): 8 for k in range(15)}

        def fit(logits, labels, **options):
            names, counts = torch.unique(torch.as_tensor(logits)[:, 0], return_counts=True)
            assert all(whole[k] == n for k, n in zip(names.tolist(), counts.tolist(), strict=True))
            return Identity()

        make(fit)(z, y, clusters=image)

    def test_auto_and_weights(self):
        z, y, image = images(12, 40, classes=3, sharpness=2.5)
        weights = np.where(image == 3, 0.0, 1.0)
        chosen = METHODS["auto"](z, y, clusters=image, sample_weight=weights, progress=False)
        assert chosen.choice.scores["bayesian_temperature"] < chosen.choice.scores["identity"]
        one = standard_error(np.repeat([1.0, 2.0, 4.0], 5), clusters=Clusters(np.repeat([0, 1, 2], 5), [0, 1, 2]))
        assert one == pytest.approx(np.std([1, 2, 4], ddof=1) / np.sqrt(3))
        with pytest.raises(ValueError, match="clusters must be at least 2"):
            METHODS["auto"](z, y, clusters=np.zeros(len(y), int))
