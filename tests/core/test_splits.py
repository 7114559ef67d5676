import numpy as np
import pytest
import torch

from trueup.core.splits import fold_mask, hash_folds, k_fold, random_order, split_by_sizes, split_indices


def _pair(n=1000, classes=5):
    z = torch.randn(n, classes, generator=torch.Generator().manual_seed(3))
    return z, torch.arange(n) % classes


def test_hash_folds_follow_content_not_order():
    z, y = _pair()
    fold = hash_folds(z, y, 5)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(4))
    assert np.array_equal(hash_folds(z[order], y[order], 5), fold[order.numpy()])
    assert np.bincount(fold, minlength=5).min() > 100


def test_each_row_is_held_out_once():
    masks = k_fold(*_pair(), 5)
    assert len(masks) == 5
    assert torch.equal(sum(held_out.int() for _, held_out in masks), torch.ones(1000, dtype=torch.int32))
    assert all(bool((train ^ held_out).all()) for train, held_out in masks)


def test_copies_of_one_row_leave_no_fold():
    z, y = _pair(1)
    assert k_fold(z.expand(20, -1), y.expand(20), 5) == []


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
    drawn = random_order(50, torch.Generator().manual_seed(3))
    assert np.array_equal(drawn, torch.randperm(50, generator=torch.Generator().manual_seed(3)).numpy())


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
