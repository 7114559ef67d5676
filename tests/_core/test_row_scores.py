import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from optional import torch
from reference import softmax
from strategies import pairs
from trueup._core import native as room
from trueup._core import row_scores as scoring
from trueup._core.bins import equal_width
from trueup._core.row_scores import (
    ClassCells,
    confidences,
    log_sum_exp,
    score_rows,
    score_rows_and_classes,
)
from trueup._core.splits import hash_groups

PASSES = [pytest.param(True, id="native"), pytest.param(False, id="numpy")]


@pytest.fixture
def use(monkeypatch):
    """Choose the pass; the compiled one must be there, because the tests' environment compiles it."""

    def choose(native):
        if native:
            assert room.compiled is not None, "the compiled pass is missing"
        else:
            monkeypatch.setattr(room, "compiled", None)

    return choose


@pytest.mark.parametrize("native", PASSES)
@pytest.mark.parametrize("seed", range(8))
def test_scores_equal_the_slow_loop(use, native, seed):
    use(native)

    @given(pairs(max_classes=20))
    def check(pair):
        logits, labels = pair
        p = softmax(logits)
        found = score_rows(torch.tensor(logits), torch.tensor(labels))
        label = np.arange(len(p)), labels
        with np.errstate(divide="ignore", invalid="ignore"):
            entropy = -np.where(p > 0, p * np.log(p), 0).sum(axis=1)
        onehot = np.eye(p.shape[1])[labels]
        assert np.array_equal(found.predicted, logits.argmax(axis=1))
        assert np.array_equal(found.correct, logits.argmax(axis=1) == labels)
        assert np.allclose(found.confidence, p.max(axis=1), rtol=1e-14, atol=0)
        assert np.allclose(found.label_prob, p[label], rtol=1e-12, atol=1e-300)
        assert np.allclose(found.brier, ((p - onehot) ** 2).sum(axis=1), atol=1e-14)
        assert np.allclose(found.entropy, entropy, atol=1e-13)
        with np.errstate(divide="ignore"):
            finite = p[label] > 1e-300
            assert np.allclose(found.nll[finite], -np.log(p[label])[finite], rtol=1e-12, atol=1e-13)

    if seed == 0:
        check()
    else:  # wide rows, where vectors have tails of every length
        rng = np.random.default_rng(seed)
        logits, labels = rng.normal(size=(5, 60 + seed)) * 4, rng.integers(0, 60, 5)
        found = score_rows(torch.tensor(logits), torch.tensor(labels))
        assert np.allclose(found.confidence, softmax(logits).max(axis=1), rtol=1e-14)
        assert np.allclose(found.label_prob, softmax(logits)[np.arange(5), labels], rtol=1e-13)


@pytest.mark.parametrize("native", PASSES)
def test_extreme_logits(use, native):
    use(native)
    z = torch.tensor([[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4], [1e4 + 1.0, 1e4, 1e4]], dtype=torch.float64)
    found = score_rows(z, torch.tensor([1, 0, 0]))
    assert np.allclose(found.nll, [2e4, np.log(3), np.log(1 + 2 * np.exp(-1))])
    assert np.allclose(found.confidence, [1, 1 / 3, 1 / (1 + 2 * np.exp(-1))])
    assert found.entropy[0] == pytest.approx(0, abs=1e-300)
    assert np.isfinite(np.stack([found.brier, found.entropy])).all()


@pytest.mark.parametrize("native", PASSES)
@given(pair=pairs(max_classes=20), groups=st.integers(1, 4), bins=st.integers(1, 20))
def test_class_tallies_equal_the_slow_loop(native, pair, groups, bins):
    logits, labels = pair
    compiled = room.compiled
    room.compiled = compiled if native else None
    try:
        cuts = equal_width(bins)[1:-1]
        found, tally = score_rows_and_classes(torch.tensor(logits), torch.tensor(labels), ClassCells(cuts, groups))
    finally:
        room.compiled = compiled
    p = softmax(logits)
    n, classes = p.shape
    count, confidence, hits = np.zeros((3, classes, bins))
    gap = np.zeros((groups, classes, bins))
    for i in range(n):
        for k in range(classes):
            b = sum(p[i, k] > cut for cut in cuts)
            if any(abs(p[i, k] - cut) < 1e-14 for cut in cuts):
                return  # on an edge, the last digit decides: the rule for that is tested in test_bins
            count[k, b] += 1
            confidence[k, b] += p[i, k]
            hits[k, b] += labels[i] == k
            gap[found.group[i], k, b] += (labels[i] == k) - p[i, k]
    assert np.array_equal(tally.counts, count)
    assert np.array_equal(tally.hits, hits)
    assert np.allclose(tally.confidence, confidence, atol=1e-12)
    assert np.allclose(tally.gap, gap, atol=1e-12)


def test_both_passes_agree_on_many_rows_and_threads(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(3000, 401, generator=generator) * 3  # beyond the size from which threads share the work
    y = torch.randint(0, 401, (3000,), generator=generator)
    cells = ClassCells(equal_width(15)[1:-1], 7)
    native = score_rows_and_classes(z.double(), y, cells)
    monkeypatch.setattr(room, "compiled", None)
    numpy_pass = score_rows_and_classes(z.double(), y, cells)
    for ours, theirs in zip((*native[0], *native[1]), (*numpy_pass[0], *numpy_pass[1]), strict=True):
        assert np.allclose(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("native", PASSES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_equals_float32(use, native, dtype):
    use(native)
    z = (torch.randn(500, 30, generator=torch.Generator().manual_seed(1)) * 3).to(dtype)
    y = torch.arange(500) % 30
    cells = ClassCells(equal_width(15)[1:-1], 3)
    for ours, theirs in zip(
        score_rows_and_classes(z, y, cells), score_rows_and_classes(z.float(), y, cells), strict=True
    ):
        for a, b in zip(ours, theirs, strict=True):
            assert np.array_equal(a, b)


@pytest.mark.parametrize("native", PASSES)
def test_strides_do_not_matter(use, native):
    use(native)
    z = torch.randn(50, 9, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    y = torch.arange(50) % 9
    plain = score_rows(z, y)
    for odd in (z.T.contiguous().T, torch.stack([z, z], dim=2)[..., 0]):
        assert not odd.is_contiguous()
        assert all(np.allclose(a, b, rtol=1e-13) for a, b in zip(score_rows(odd, y), plain, strict=True))


def test_ties_go_to_the_lowest_class():
    _, predicted = confidences(torch.tensor([[0.0, 2.0, 2.0], [1.0, 1.0, 1.0]]))
    assert predicted.tolist() == [1, 0]


def test_the_pass_has_the_hash_of_the_folds():
    z = torch.randn(1000, 5, generator=torch.Generator().manual_seed(3))
    y = torch.arange(1000) % 5
    group = hash_groups(z, y, 32)
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(4))
    assert np.array_equal(hash_groups(z[order], y[order], 32), group[order.numpy()])
    sizes = np.bincount(group, minlength=32)
    assert sizes.min() > 10
    assert sizes.max() < 60
    dealt = score_rows_and_classes(z, y, ClassCells(equal_width(5)[1:-1], 32))[0].group
    assert np.array_equal(dealt, group)


def test_log_normaliser():
    z = torch.randn(20, 7, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 10
    assert np.allclose(log_sum_exp(z), torch.logsumexp(z, dim=1).numpy(), rtol=1e-14)


@pytest.mark.parametrize("native", PASSES)
def test_no_rows(use, native):
    use(native)
    scored, tally = score_rows_and_classes(
        torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), ClassCells(equal_width(4)[1:-1], 2)
    )
    assert len(scored.nll) == 0
    assert tally.counts.shape == (3, 4)
    assert not tally.counts.any()


def test_class_wise_sums_are_made_once_a_thread_not_once_a_chunk(monkeypatch):
    made = []
    zero = scoring._Sums.zero
    monkeypatch.setattr(scoring._Sums, "zero", lambda *args: made.append(args) or zero(*args))
    monkeypatch.setattr("trueup._core.native.CACHE_CHUNK", 64)
    z = torch.randn(100, 32, generator=torch.Generator().manual_seed(6)).half()
    y = torch.arange(100) % 32
    cells = ClassCells(equal_width(15)[1:-1])
    copied = score_rows_and_classes(z, y, cells)
    assert len(made) == 1  # the only thread adds to the whole
    for ours, whole in zip(copied, score_rows_and_classes(z.float(), y, cells), strict=True):
        assert all(np.array_equal(a, b) for a, b in zip(ours, whole, strict=True))
