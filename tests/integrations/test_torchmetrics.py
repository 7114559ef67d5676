import copy
import os
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from strategies import calibrated, pairs
from trueup import from_probs, metrics
from trueup._core.tally import TABLE_METRICS
from trueup.metrics import Tally

torchmetrics = pytest.importorskip("torchmetrics", reason="torchmetrics is not installed: trueup[torchmetrics]")

from trueup.integrations import torchmetrics as streaming  # noqa: E402
from trueup.integrations.torchmetrics import ECE, NLL, SCE, Brier, CalibrationTable  # noqa: E402

SINGLE = {
    "ece": (lambda class_axis: ECE(), metrics.ece),
    "sce": (SCE, metrics.sce),
    "nll": (lambda class_axis: NLL(), metrics.nll),
    "brier": (lambda class_axis: Brier(), metrics.brier),
}


def batches(z, y, sizes):
    ends = np.cumsum(sizes)
    return zip(np.split(z, ends), np.split(y, ends), strict=True)


@pytest.mark.parametrize("name", SINGLE)
@given(pairs(), st.lists(st.integers(0, 20), max_size=4))
def test_batches_give_the_number_of_all_rows(name, pair, sizes):
    z, y = pair
    make, function = SINGLE[name]
    metric = make(z.shape[1])
    for part in batches(z, y, sizes):
        metric.update(*part)
    assert metric.compute().item() == pytest.approx(function(z, y), rel=1e-9, abs=1e-12)


@given(pairs(), st.lists(st.integers(0, 20), max_size=4))
def test_the_table_is_the_tally_of_all_rows(pair, sizes):
    z, y = pair
    metric = CalibrationTable(z.shape[1], bins=10)
    for part in batches(z, y, sizes):
        metric.update(*map(torch.from_numpy, part))
    whole, found = Tally.of(z, y, bins=10), metric.compute()
    assert tuple(found) == TABLE_METRICS
    for name in TABLE_METRICS:
        assert found[name].item() == pytest.approx(whole.value(name), rel=1e-9, abs=1e-12)
    assert metric.tally.n == len(y)


def test_by_hand():
    # Two rows of confidence 0.8, one right: |0.5 − 0.8|. One row of 0.6, right: |1 − 0.6|. (2·0.3 + 0.4)/3.
    p = torch.tensor([[0.8, 0.2], [0.8, 0.2], [0.4, 0.6]], dtype=torch.float64)
    metric = ECE(bins=5)
    metric.update(from_probs(p), torch.tensor([0, 1, 1]))
    assert metric.compute().item() == pytest.approx(1 / 3)
    assert metric.compute().dtype == torch.float64


def test_forward_gives_the_batch_and_keeps_the_sum():
    z, y = (torch.from_numpy(a) for a in calibrated(300, 4, temperature=2.0))
    for metric, function in ((ECE(), metrics.ece), (SCE(4), metrics.sce), (NLL(), metrics.nll)):
        for start in range(0, 300, 100):
            part = z[start : start + 100], y[start : start + 100]
            assert metric(*part).item() == pytest.approx(function(*part))
        assert metric.compute().item() == pytest.approx(function(z, y))


def test_reset_pickle_and_copies():
    z, y = calibrated(100, 3)
    metric = CalibrationTable(3)
    metric.update(z, y)
    for other in (pickle.loads(pickle.dumps(metric)), copy.deepcopy(metric), metric.clone()):
        assert other.compute() == metric.compute()
    metric.reset()
    metric.update(z[:50], y[:50])
    assert metric.compute()["nll"].item() == pytest.approx(metrics.nll(z[:50], y[:50]))


def test_states_are_saved_with_a_model():
    z, y = calibrated(100, 3)
    metric, other = SCE(3), SCE(3)
    for each in (metric, other):
        each.persistent(True)
    metric.update(z, y)
    other.load_state_dict(metric.state_dict())
    assert other.tally.ece() == metric.compute().item()


def test_in_a_collection():
    z, y = calibrated(200, 3, temperature=3.0)
    together = torchmetrics.MetricCollection(
        {"ece": ECE(), "nll": NLL(), "brier": Brier(), "table": CalibrationTable(3)}, prefix="val_"
    )
    together.update(torch.from_numpy(z[:100]), torch.from_numpy(y[:100]))
    together.update(torch.from_numpy(z[100:]), torch.from_numpy(y[100:]))
    found = together.compute()
    assert found["val_ece"].item() == pytest.approx(metrics.ece(z, y))
    assert found["val_nll"].item() == pytest.approx(metrics.nll(z, y))
    assert found["val_brier"].item() == pytest.approx(metrics.brier(z, y))
    assert found["val_table_sce"].item() == pytest.approx(metrics.sce(z, y))


def test_memory_does_not_grow():
    metric = CalibrationTable(10)
    before = sum(state.numel() for state in metric.metric_state.values())
    for seed in range(3):
        metric.update(*calibrated(500, 10, seed=seed))
    assert sum(state.numel() for state in metric.metric_state.values()) == before
    assert before < 3 * 4900 * 2 + 36 * 10 * 15


def test_nothing_gives_nan():
    for metric in (ECE(), SCE(3), NLL(), Brier()):
        metric.update(torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64))
        assert np.isnan(metric.compute().item())


def test_wrong_batches_are_refused():
    with pytest.raises(ValueError, match=r"same classes and bins to be added, got \(5, 15\) and \(3, 15\)"):
        CalibrationTable(5).update(torch.zeros(2, 3), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match="same bins to be added"):
        SCE(5).update(torch.zeros(2, 3), torch.tensor([0, 1]))
    with pytest.raises(ValueError, match=r"labels must lie in 0\.\.2, got 1\.\.3"):
        ECE().update(torch.zeros(2, 3), torch.tensor([1, 3]))
    with pytest.raises(ValueError, match="bins must be a whole number"):
        ECE(bins=0)


def _process(rank, address, folder):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    z, y = calibrated(301, 4, temperature=2.0)
    table, ece = CalibrationTable(4), ECE()
    mine = slice(0, 100) if rank == 0 else slice(100, 301)
    for metric in (table, ece):
        metric.update(z[mine], y[mine])
    found = {name: value.item() for name, value in table.compute().items()} | {"alone": ece.compute().item()}
    assert table.tally.n == (100, 201)[rank]  # what was synchronised is let go again
    with table.sync_context():
        assert table.tally.n == 301
    torch.save(found, os.path.join(folder, f"{rank}.pt"))
    torch.distributed.destroy_process_group()


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch was built without torch.distributed")
def test_two_processes_give_the_numbers_of_all_rows(tmp_path):
    address = (tmp_path / "meeting").as_uri()
    torch.multiprocessing.spawn(_process, (address, str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first == second
    z, y = calibrated(301, 4, temperature=2.0)
    whole = Tally.of(z, y)
    assert first == pytest.approx({name: whole.value(name) for name in TABLE_METRICS} | {"alone": metrics.ece(z, y)})


def test_without_torchmetrics_the_extra_is_named(monkeypatch):
    import importlib

    monkeypatch.setitem(__import__("sys").modules, "torchmetrics", None)
    with pytest.raises(ImportError, match=r"pip install 'trueup\[torchmetrics\]'"):
        importlib.reload(streaming)
    monkeypatch.undo()
    importlib.reload(streaming)


@pytest.mark.parametrize(("classes", "top_label"), [(2, True), (2, False), (4, True)])
def test_weights_of_rows_count_as_in_a_tally(classes, top_label):
    z, y = calibrated(240, classes, temperature=1.6, scale=1.5, seed=classes)
    weights = np.random.default_rng(7).gamma(1.0, size=240)
    expected = Tally.of(z, y, top_label=top_label, sample_weight=weights).value("ece")
    table, ece = CalibrationTable(classes, top_label=top_label), ECE(top_label=top_label)
    for part in (slice(0, 90), slice(90, None)):
        for metric in (table, ece):
            metric.update(z[part], y[part], weights[part])
    assert table.compute()["ece"].item() == pytest.approx(expected, abs=1e-12)
    assert ece.compute().item() == pytest.approx(expected, abs=1e-12)
