"""The calibration set: read once or again, in one order, in part, and dealt anew."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from trueup.clamping.calibration_set import CalibrationSet, batches_of

X = torch.arange(22.0).reshape(11, 2)
Y = torch.arange(11) % 3


def loader(sizes=(4, 4, 3)):
    return list(zip(torch.split(X, sizes), torch.split(Y, sizes), strict=True))


class Rereadable:
    """A loader that counts how often it is read."""

    def __init__(self, batches):
        self.batches, self.readings = batches, 0

    def __iter__(self):
        self.readings += 1
        yield from self.batches


def joined(inputs):
    batches = list(inputs)
    return torch.cat([b.args[0] for b in batches]), torch.cat([b.labels for b in batches])


@pytest.mark.parametrize("limit", [1 << 20, 0])
def test_every_reading_is_the_same(limit):
    source = Rereadable(loader())
    inputs = CalibrationSet.read(source, device="cpu", limit=limit)
    for _ in range(2):
        x, y = joined(inputs)
        assert torch.equal(x, X)
        assert torch.equal(y, Y)
    assert source.readings == (1 if limit else 3)
    assert (inputs.n, inputs.total, inputs.labels.tolist()) == (11, 11, Y.tolist())
    assert [len(b.labels) for b in inputs] == [4, 4, 3]


@pytest.mark.parametrize("limit", [1 << 20, 0])
def test_a_part_is_those_samples_in_their_order(limit):
    inputs = CalibrationSet.read(loader(), device="cpu", limit=limit)
    part = inputs.subset(torch.tensor([9, 0, 5]))
    x, y = joined(part)
    assert torch.equal(x, X[[0, 5, 9]])
    assert torch.equal(y, Y[[0, 5, 9]])
    assert torch.equal(part.labels, y)
    x, _ = joined(part.subset(torch.tensor([2, 0])))
    assert torch.equal(x, X[[0, 9]])
    assert list(inputs.subset(torch.empty(0, dtype=torch.int64))) == []


def test_a_loader_that_uses_its_memory_again_is_copied():
    buffer = torch.zeros(2, 2)

    def reusing():
        for i in range(3):
            buffer.fill_(i)
            yield buffer, torch.tensor([0, 1])

    x, _ = joined(CalibrationSet.read(reusing(), device="cpu"))
    assert x[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


def test_shuffled_batches_hold_every_sample_once_and_depend_on_the_generator_alone():
    inputs = CalibrationSet.read(loader(), device="cpu")
    state = torch.get_rng_state()
    first, again, other = (
        [b.args[0][:, 0].tolist() for b in inputs.shuffled_batches(5, torch.Generator().manual_seed(seed))]
        for seed in (1, 1, 2)
    )
    assert first == again != other
    assert [len(b) for b in first] == [5, 5, 1]
    assert sorted(x for batch in first for x in batch) == X[:, 0].tolist()
    for batch in inputs.shuffled_batches(4, torch.Generator().manual_seed(1)):
        assert torch.equal(Y[(batch.args[0][:, 0] / 2).long()], batch.labels)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize(("size", "lengths"), [(4, [4, 4, 3]), (5, [5, 4, 2]), (10, [9, 2]), (11, [11]), (99, [11])])
def test_a_batch_is_split_in_its_order_and_leaves_no_sample_alone(size, lengths):
    inputs = CalibrationSet.read([(X, Y)], device="cpu")
    [whole] = inputs
    parts = list(inputs.split(whole, size))
    assert [len(part.labels) for part in parts] == lengths
    assert torch.equal(joined(parts)[0], X)
    assert torch.equal(joined(parts)[1], Y)


class Numbered(Rereadable):
    """A loader of one's own that can give the samples of any numbers."""

    def batches_of(self, numbers):
        yield from ((X[index], Y[index]) for index in numbers)


def in_order(**more):
    return DataLoader(TensorDataset(X, Y), batch_size=3, **more)


@pytest.mark.parametrize("source", [in_order(), Numbered(loader())], ids=["torch", "own"])
def test_a_set_too_large_to_keep_is_shuffled_just_as_one_that_is_kept(source):
    kept = CalibrationSet.read(loader(), device="cpu")
    state = torch.get_rng_state()
    again = CalibrationSet.read(source, device="cpu", limit=0)
    torch.set_rng_state(state)
    chosen = torch.tensor([1, 4, 5, 9, 10])
    for one, other in ((kept, again), (kept.subset(chosen), again.subset(chosen))):
        batches = [list(inputs.shuffled_batches(4, torch.Generator().manual_seed(3))) for inputs in (one, other)]
        for ours, theirs in zip(*batches, strict=True):
            assert torch.equal(ours.args[0], theirs.args[0])
            assert torch.equal(ours.labels, theirs.labels)
    assert torch.equal(state, torch.get_rng_state())


def test_a_loader_without_numbers_keeps_its_order():
    assert batches_of(loader()) is None
    assert batches_of(in_order(shuffle=True)) is None
    for other in ({"batch_size": 1}, {"batch_size": None}, {"batch_sampler": [[3, 1], [2, 0]]}):
        assert batches_of(DataLoader(TensorDataset(X, Y), **other)) is None
    inputs = CalibrationSet.read(Rereadable(loader()), device="cpu", limit=0)
    assert torch.equal(joined(inputs.shuffled_batches(2, torch.Generator()))[0], X)


def test_inputs_of_several_shapes_come_in_their_own_batches():
    ragged = [(torch.ones(2, 3), torch.tensor([0, 1])), (torch.ones(2, 5), torch.tensor([1, 1]))]
    inputs = CalibrationSet.read(ragged, device="cpu")
    assert [b.args[0].shape[1] for b in inputs] == [3, 5]
    fitted = [b.args[0].shape[1] for b in inputs.shuffled_batches(1, torch.Generator().manual_seed(0))]
    assert sorted(fitted) == [3, 5]
    (part,) = inputs.subset(torch.tensor([2]))
    assert part.args[0].shape == (1, 5)


def test_what_is_shared_by_the_samples_of_a_batch_stays_whole():
    batch = {"x": X[:4], "pair": (X[:4], [torch.ones(7)]), "flag": True, "labels": Y[:4]}
    inputs = CalibrationSet.read([batch], device="cpu")
    (part,) = inputs.subset(torch.tensor([1, 2]))
    assert part.kwargs["flag"] is True
    assert part.kwargs["pair"][0].shape == (2, 2)
    assert part.kwargs["pair"][1][0].shape == (7,)


@pytest.mark.parametrize("limit", [1 << 20, 0])
def test_what_is_shared_stays_whole_though_a_batch_has_as_many_rows(limit):
    weights, words = torch.arange(3.0), ["a", "b", "c"]
    batches = [
        {"x": x, "names": [f"{v:g}" for v in x[:, 0]], "weights": weights, "words": words, "more": (weights,), "y": y}
        for x, y in loader()  # of 4, 4 and 3
    ]
    inputs = CalibrationSet.read(batches, device="cpu", limit=limit)
    part = inputs.subset(torch.tensor([1, 8, 10]))
    dealt = list(inputs.shuffled_batches(2, torch.Generator().manual_seed(0))) if limit else []
    seen = []
    for batch in (*inputs, *part, *part.subset(torch.tensor([2])), *dealt):
        assert torch.equal(batch.kwargs["weights"], weights)
        assert torch.equal(batch.kwargs["more"][0], weights)
        assert batch.kwargs["words"] == words
        assert batch.kwargs["names"] == [f"{v:g}" for v in batch.kwargs["x"][:, 0]]
        assert len(batch.kwargs["x"]) == len(batch.labels)
        seen += batch.kwargs["x"][:, 0].tolist()
    assert sorted(seen) == sorted([*X[:, 0].tolist() * (2 if limit else 1), 2.0, 16.0, 20.0, 20.0])


def test_what_never_differs_from_the_number_of_labels_goes_with_the_samples():
    masks = [{"x": x, "mask": torch.ones(len(x)), "y": y} for x, y in loader((4, 4, 3))]
    (first, second) = CalibrationSet.read(masks, device="cpu").subset(torch.tensor([0, 1, 5, 6, 9]))
    assert [len(b.kwargs["mask"]) for b in (first, second)] == [len(b.labels) for b in (first, second)] == [3, 2]


def test_a_loader_too_large_must_keep_its_order():
    with pytest.raises(ValueError, match="readable more than once.*got an iterator"):
        CalibrationSet.read(iter(loader()), device="cpu", limit=10)
    changing = Rereadable(loader())
    inputs = CalibrationSet.read(changing, device="cpu", limit=10)
    changing.batches = loader()[::-1]
    with pytest.raises(ValueError, match="turn shuffling off"):
        list(inputs)
    changing.batches = loader()[:2]
    with pytest.raises(ValueError, match="the same samples each time it is read, got only 8"):
        list(inputs)
