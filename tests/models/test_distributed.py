"""What two processes say of a share of the data each is what one says of the whole."""

import copy
import os
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn

from trueup.models import _distributed as distributed
from trueup.models import calibrate, collect
from trueup.models._distributed import all_gather_object, all_gather_rows, all_reduce_sum, raise_on_all_ranks
from two_ranks import run_two_ranks

SHARES = (slice(0, 53), slice(53, 90))  # of 90 samples: three batches for one rank and two for the other
SIZE = 20


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 4))


def sample():
    generator = torch.Generator().manual_seed(1)
    return torch.randn(90, 6, generator=generator), torch.randint(0, 4, (90,), generator=generator)


def loader(share=slice(None)):
    x, y = (part[share] for part in sample())
    return [(x[i : i + SIZE], y[i : i + SIZE]) for i in range(0, len(x), SIZE)]


def outcome(call):
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def work(rank):
    """All that the tests ask of one process."""
    model = network()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(rank)
    state = torch.get_rng_state()
    rows = torch.arange(12.0).reshape(6, 2)
    tensor = torch.full((2, 3), rank + 1.0, dtype=torch.float64)
    broken = [(torch.zeros(2, 6), [0, 1 + 6 * rank])]
    wrapped = nn.parallel.DistributedDataParallel(network())
    result = {
        "place": (distributed.rank(), distributed.world_size()),
        "everyone": all_gather_object(("rank", rank)),
        "uneven": all_gather_rows(rows[:2] if rank == 0 else rows[2:]),
        "strided": all_gather_rows(rows.T + 100 * rank),
        "integers": all_gather_rows(torch.arange(3 + rank)),
        "one without rows": all_gather_rows(torch.empty(0, 0) if rank == 0 else rows.half()),
        "none with rows": all_gather_rows(torch.empty(0, 5)),
        "widths": outcome(lambda: all_gather_rows(torch.ones(1, 2 + rank))),
        "types": outcome(lambda: all_gather_rows(torch.ones(2, dtype=(torch.float32, torch.float64)[rank]))),
        "sum": all_reduce_sum(tensor),
        "column sum": all_reduce_sum(tensor.T),
        "count": all_reduce_sum(torch.tensor(10 + rank)),
        "summand": tensor,
        "collected": tuple(collect(model, loader(SHARES[rank]))),
        "collected by one": tuple(collect(model, loader() if rank == 1 else [])),
        "collected from a wrapper": tuple(collect(wrapped, loader() if rank == 0 else [])),
        "collected by none": outcome(lambda: collect(model, [])),
        "bad labels": outcome(lambda: collect(model, broken)),
        "temperature": calibrate(model, loader(SHARES[rank])).after.temperature,
        "as it was": all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        and torch.equal(state, torch.get_rng_state())
        and all(module.training for module in model.modules()),
    }
    with raise_on_all_ranks():
        result["together"] = "nothing"
    return result


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What each of two processes result."""
    return run_two_ranks(__file__, tmp_path_factory.mktemp("ranks"))


@pytest.fixture(params=[0, 1])
def result(ranks, request):
    return ranks[request.param]


def test_each_rank_knows_its_place(ranks):
    assert [result["place"] for result in ranks] == [(0, 2), (1, 2)]
    assert [result["everyone"] for result in ranks] == [[("rank", 0), ("rank", 1)]] * 2


def test_rows_are_gathered_in_the_order_of_the_ranks(result):
    rows = torch.arange(12.0).reshape(6, 2)
    assert torch.equal(result["uneven"], rows)
    assert torch.equal(result["strided"], torch.cat([rows.T, rows.T + 100]))
    assert result["integers"].tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert result["integers"].dtype == torch.int64


def test_a_rank_without_rows_takes_the_shape_and_type_of_the_others(result):
    assert torch.equal(result["one without rows"], torch.arange(12.0).reshape(6, 2).half())
    assert result["one without rows"].dtype == torch.float16
    assert result["none with rows"].shape == (0, 5)


def test_rows_that_do_not_fit_are_refused_on_every_rank(result):
    wish = "ValueError: the ranks' tensors may differ in the number of rows only, got "
    assert result["widths"] == wish + "(1, 2) float32, (1, 3) float32"
    assert result["types"] == wish + "(2,) float32, (2,) float64"


def test_sums(ranks):
    for rank, result in enumerate(ranks):
        assert torch.equal(result["sum"], torch.full((2, 3), 3.0, dtype=torch.float64))
        assert torch.equal(result["column sum"], torch.full((3, 2), 3.0, dtype=torch.float64))
        assert result["count"].item() == 21
        assert torch.equal(result["summand"], torch.full((2, 3), rank + 1.0, dtype=torch.float64))


@pytest.mark.parametrize("way", ["collected", "collected by one", "collected from a wrapper"])
def test_collecting_shares_is_collecting_the_whole(result, way):
    logits, labels = result[way]
    whole = collect(network(), loader())
    torch.testing.assert_close(logits, whole.logits, rtol=1e-5, atol=1e-6)
    assert torch.equal(labels, whole.labels)


def test_every_rank_ends_with_the_same_calibrator(ranks):
    whole = calibrate(network(), loader())
    one, other = (result["temperature"] for result in ranks)
    assert one == other
    assert one == pytest.approx(whole.after.temperature, rel=1e-5)


def test_the_model_and_the_random_state_stay(result):
    assert result["as it was"]


def test_an_error_on_one_rank_ends_all(ranks):
    wish = "batch 0: labels must lie in 0..3, got 0..7"
    assert ranks[1]["bad labels"] == f"ValueError: {wish}"
    assert ranks[0]["bad labels"] == f"RuntimeError: rank 1 failed with ValueError: {wish}"


def test_no_data_at_all(result):
    assert result["collected by none"].startswith("ValueError: loader must give at least one batch")


def test_alone_nothing_happens():
    tensor = torch.arange(3)
    assert all_gather_rows(tensor) is tensor
    assert all_reduce_sum(tensor) is tensor
    assert all_gather_object("me") == ["me"]
    assert (distributed.rank(), distributed.world_size()) == (0, 1)
    with raise_on_all_ranks():
        pass
    with pytest.raises(KeyError, match="mine"), raise_on_all_ranks():
        raise KeyError("mine")


if __name__ == "__main__":
    number, folder = int(sys.argv[1]), Path(sys.argv[2])
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=number, world_size=2, timeout=timedelta(seconds=600)
    )
    torch.save(work(number), folder / f"{number}.pt")
    dist.barrier()
    os._exit(0)  # an ordinary end may abort in a thread of gloo's that is still there
