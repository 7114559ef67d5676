"""Shards give what all rows in memory give, wherever they lie and whoever reads them."""

from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context

import numpy as np
import pytest

import trueup
from trueup import metrics
from trueup.calibrators.sharded import FITS, _Data, _Sample, fit
from trueup.io import BadShard, Shards
from trueup.io import shards as source
from trueup.metrics import evaluate_shards

CLASSES = 4


def drawn(n=6000, classes=CLASSES, seed=0):
    rng = np.random.default_rng(seed)
    z = (3 * rng.normal(size=(n, classes))).astype(np.float32)
    return z, (z / 2 + rng.normal(size=classes) + rng.gumbel(size=z.shape)).argmax(axis=1)


def written(folder, z, y, parts=5, suffix="npz"):
    folder.mkdir(exist_ok=True)
    for i, (a, b) in enumerate(zip(np.array_split(z, parts), np.array_split(y, parts), strict=True)):
        trueup.save((a, b), folder / f"part{i}.{suffix}")
    return folder


@pytest.fixture(scope="module")
def whole():
    return drawn()


@pytest.fixture(scope="module")
def folder(whole, tmp_path_factory):
    return written(tmp_path_factory.mktemp("shards") / "a", *whole)


@pytest.mark.parametrize("suffix", ["npz", "npy", "parquet", "safetensors", "csv"])
def test_the_table_is_that_of_all_rows(tmp_path, suffix):
    z, y = drawn(900)
    shards = Shards.of(written(tmp_path / "b", z, y, suffix=suffix), rows=100)
    assert len(shards) == 5
    z = z.astype(np.float64) if suffix == "csv" else z  # which keeps values, but not types
    ours, theirs = evaluate_shards(shards, progress=False), trueup.evaluate(z, y)
    assert (ours.rows, ours.n_classes) == (theirs.rows, theirs.n_classes)
    for metric in theirs.metrics:
        if metric != "aece":
            assert ours[metric].value == pytest.approx(theirs[metric].value, abs=1e-9)
            assert ours[metric].low == pytest.approx(theirs[metric].low, abs=1e-6)
    tally = trueup.metrics.Tally.of(z, y)
    assert abs(ours["aece"].value - theirs["aece"].value) <= tally.grid.aece_error() + 1e-9
    assert ours.verdict() == theirs.verdict()


def test_the_temperature_is_that_of_all_rows(folder, whole):
    ours, theirs = (
        fit("temperature", Shards.of(folder, rows=700), progress=False),
        trueup.METHODS["temperature"](*whole),
    )
    assert float(ours.temperature) == pytest.approx(float(theirs.temperature), rel=1e-8)


@pytest.mark.parametrize("method", ["vector", "matrix", "svs", "sms"])
def test_a_fit_is_as_likely_as_that_of_all_rows(folder, whole, method):
    ours, theirs = fit(method, Shards.of(folder, rows=700), progress=False), trueup.METHODS[method](*whole)
    assert type(ours) is type(theirs)
    assert ours.certificate.loss == pytest.approx(theirs.certificate.loss, abs=1e-9)
    for name, value in theirs.config().items():
        np.testing.assert_allclose(ours.config()[name], value, atol=1e-4, err_msg=name)


@pytest.mark.parametrize("method", ["histogram", "histogram_ovr"])
def test_counts_are_those_of_all_rows(folder, whole, method):
    ours, theirs = fit(method, Shards.of(folder, rows=700), progress=False), trueup.METHODS[method](*whole)
    np.testing.assert_allclose(ours(whole[0]), theirs(whole[0]), atol=1e-9)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("method", ["platt", "beta", "isotonic"])
def test_methods_of_one_score_are_those_of_all_rows(tmp_path, method, weighted):
    z, y = drawn(3000, classes=2)
    w = np.random.default_rng(1).gamma(1.0, size=len(y)) if weighted else None
    for i in range(4):
        part = slice(i * 750, (i + 1) * 750)
        np.savez(tmp_path / f"{i}.npz", logits=z[part], labels=y[part], **({} if w is None else {"w": w[part]}))
    shards = Shards.of(tmp_path, rows=400, sample_weight="w" if weighted else None)
    ours, theirs = fit(method, shards, progress=False), trueup.METHODS[method](z, y, sample_weight=w)
    np.testing.assert_allclose(ours(z), theirs(z), atol=1e-6)


@pytest.mark.parametrize("method", ["platt", "beta", "isotonic"])
def test_methods_of_one_score_need_two_classes(folder, method):
    with pytest.raises(
        ValueError, match=f"logits must have two classes for a fit of {method} to shards, got 4 classes"
    ):
        fit(method, Shards.of(folder), progress=False)


def test_bins_of_equal_mass_come_from_the_grid(folder, whole):
    ours = fit("histogram_mass", Shards.of(folder, rows=700), progress=False)
    theirs = trueup.METHODS["histogram_mass"](*whole)
    np.testing.assert_allclose(ours.edges, theirs.edges, atol=1 / 4000)
    assert metrics.ece(ours(whole[0]), whole[1]) == pytest.approx(metrics.ece(theirs(whole[0]), whole[1]), abs=0.01)


def test_every_fit_has_its_method():
    assert set(FITS) <= set(trueup.METHODS)
    with pytest.raises(ValueError, match=r"method must be one of temperature, .*got 'spline'"):
        fit("spline", Shards(("a.npz",)))


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_any_executor_gives_the_same(folder, kind):
    shards = Shards.of(folder)
    executor = ThreadPoolExecutor(2) if kind == "threads" else ProcessPoolExecutor(2, get_context("spawn"))
    with executor:
        table = evaluate_shards(shards, executor=executor, progress=False)
        scaled = fit("temperature", shards, executor=executor, progress=False)
    assert table.to_dict() == evaluate_shards(shards, progress=False).to_dict()
    assert scaled.temperature == fit("temperature", shards, progress=False).temperature


def test_a_folder_a_pattern_and_a_list_are_the_same(folder):
    by_folder = Shards.of(folder)
    assert Shards.of(f"{folder}/*.npz") == by_folder == Shards.of(sorted(folder.iterdir()))
    with pytest.raises(FileNotFoundError, match="no file of predictions"):
        Shards.of(f"{folder}/*.parquet")
    with pytest.raises(FileNotFoundError, match="no such file, folder or pattern"):
        Shards.of(folder / "nothing")


def test_what_fsspec_opens_is_read(whole):
    fsspec = pytest.importorskip("fsspec", reason="fsspec is not installed")
    memory = fsspec.filesystem("memory")
    memory.makedirs("/watched", exist_ok=True)
    z, y = whole
    for i in range(3):
        for name, array in ((f"{i}.npy", z[i::3]), (f"{i}.labels.npy", y[i::3])):
            with memory.open(f"/watched/{name}", "wb") as file:
                np.save(file, array)
    for where in ("memory://watched", "memory://watched/*.npy"):
        shards = Shards.of(where)
        assert len(shards) == 3
        assert evaluate_shards(shards, progress=False)["ece"].value == pytest.approx(metrics.ece(*whole), abs=1e-7)


def test_a_corrupt_shard_is_named_or_counted(tmp_path, whole):
    folder = written(tmp_path / "c", *whole)
    bad = folder / "part2.npz"
    bad.write_bytes(bad.read_bytes()[:-5000])
    shards = Shards.of(folder)
    for call in (lambda **o: evaluate_shards(shards, **o), lambda **o: fit("temperature", shards, **o)):
        with pytest.raises(BadShard, match=r"part2\.npz"):
            call(progress=False)
        with pytest.warns(UserWarning, match=r"1 bad shards were left out: .*part2\.npz"):
            call(skip_bad=True, progress=False)
    with pytest.warns(UserWarning, match="1 bad shards"):
        assert evaluate_shards(shards, skip_bad=True, progress=False).rows == 4800


def test_nan_in_a_shard_is_named(tmp_path, whole):
    folder = written(tmp_path / "d", *whole)
    z = whole[0][:10].copy()
    z[3, 1] = np.nan
    np.savez(folder / "part3.npz", logits=z, labels=whole[1][:10])
    with pytest.raises(BadShard, match=r"part3\.npz: .*finite|part3\.npz: .*NaN"):
        evaluate_shards(Shards.of(folder), progress=False)


def test_an_empty_shard_adds_nothing(tmp_path, whole):
    folder = written(tmp_path / "e", *whole)
    trueup.save((np.zeros((0, CLASSES)), np.zeros(0, int)), folder / "none.npz")
    assert evaluate_shards(Shards.of(folder), progress=False)["nll"].value == pytest.approx(
        metrics.nll(*whole), abs=1e-9
    )
    with pytest.raises(BadShard, match="no rows in 1 shards"):
        evaluate_shards(Shards.of(folder / "none.npz"), progress=False)


def test_shards_of_different_classes_are_refused_by_name(tmp_path, whole):
    folder = written(tmp_path / "f", *whole)
    trueup.save(drawn(50, classes=3), folder / "part9.npz")
    for skip in (False, True):
        with pytest.raises(BadShard, match=r"part0\.npz has 4, .*part9\.npz 3"):
            evaluate_shards(Shards.of(folder), skip_bad=skip, progress=False)


def test_metrics_that_need_all_rows_are_refused(folder):
    with pytest.raises(ValueError, match=r"metrics must be among accuracy.*got 'smooth_ece'"):
        evaluate_shards(Shards.of(folder), metrics=("smooth_ece",), progress=False)


def test_a_sample_is_drawn_from_all_shards_and_stays_small(tmp_path):
    z, y = drawn(5000)
    z[:, 0] = np.arange(5000)
    from functools import partial

    from trueup.io.shards import map_shards

    shards = Shards.of(written(tmp_path / "g", z, y, parts=10), rows=100)
    joined = partial(_Sample.join, max_rows=500)
    sample, rows, _ = map_shards(partial(_Sample.of, max_rows=64), shards, combine=joined, progress=False)
    assert rows == 5000
    assert 250 <= len(sample.labels) <= 1000
    held = np.bincount((sample.logits[:, 0] // 500).astype(int), minlength=10)
    assert held.min() >= 0.5 * held.max() > 0


def test_a_search_may_begin_where_the_first_rows_say_nothing(tmp_path):
    """The start comes from the files' first rows; the end does not depend on it."""
    z, y = drawn(3000)
    for i, (a, b) in enumerate(zip(np.array_split(z, 3), np.array_split(y, 3), strict=True)):
        flat = np.zeros((60, CLASSES), np.float32)
        trueup.save((np.concatenate([flat, a]), np.concatenate([np.zeros(60, int), b])), tmp_path / f"{i}.npz")
    ours = fit("temperature", Shards.of(tmp_path, rows=60), progress=False)
    assert float(ours.temperature) == pytest.approx(float(trueup.METHODS["temperature"](z, y).temperature), rel=1e-7)


def test_a_fit_finds_rows_beyond_empty_files(tmp_path, whole):
    z, y = whole
    for i in range(80):
        trueup.save((z[:0], y[:0]), tmp_path / f"{i:02d}.npz")
    trueup.save((z, y), tmp_path / "01.npz")  # one of those from which no first rows are taken
    found = fit("temperature", Shards.of(tmp_path), progress=False)
    assert float(found.temperature) == pytest.approx(float(trueup.METHODS["temperature"](z, y).temperature), rel=1e-7)


def test_a_parquet_file_of_ours_says_that_nothing_is_missing(tmp_path, whole):
    pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")
    trueup.save(whole, tmp_path / "a.parquet")
    schema = pq.read_schema(tmp_path / "a.parquet")
    assert not any(field.nullable for field in schema)
    assert not schema.field("logits").type.value_field.nullable


def test_other_types_and_byte_orders_are_read_again_as_they_were(tmp_path, whole):
    """A second pass does not look at every number, and must see the same ones."""
    z, y = whole
    for dtype in (">f4", "<f2", ">f8"):
        folder = tmp_path / dtype[1:]
        folder.mkdir()
        np.save(folder / "a.npy", z.astype(dtype))
        np.save(folder / "a.labels.npy", y.astype(">i4"))
        ours = fit("temperature", Shards.of(folder), progress=False)
        theirs = trueup.METHODS["temperature"](z.astype(dtype).astype(dtype[1:]), y)
        assert float(ours.temperature) == pytest.approx(float(theirs.temperature), rel=1e-7)


def test_a_file_that_turns_bad_between_two_passes_is_no_number(tmp_path, whole):
    z, y = whole[0].copy(), whole[1]
    trueup.save((z, y), tmp_path / "a.npy")
    held = _Data(Shards.of(tmp_path), None, skip_bad=False, progress=False)
    assert held.rows == len(y)
    z[5, 0] = np.nan
    np.save(tmp_path / "a.npy", z)
    z[5, 0] = 0.0
    with pytest.raises(ValueError, match="logits must be finite, got nan at"):
        FITS["temperature"](held)
    np.save(tmp_path / "a.npy", z)
    np.save(tmp_path / "a.labels.npy", y + CLASSES)
    with pytest.raises(ValueError, match="labels must lie in"):
        FITS["temperature"](held)


def sorted_by_label(folder, z, y):
    order = np.argsort(y, kind="stable")
    return written(folder, z[order], y[order], parts=4)


@pytest.mark.parametrize("method", ["vector", "svs", "matrix"])
def test_files_sorted_by_class_take_no_more_passes_than_memory(tmp_path, method):
    """A search that began from the first rows of each file would have seen few classes."""
    z, y = drawn(4000, classes=8)
    ours = fit(method, Shards.of(sorted_by_label(tmp_path / "s", z, y), rows=100), progress=False)
    theirs = trueup.METHODS[method](z, y)
    assert ours.certificate.passes <= 2 * theirs.certificate.passes
    assert metrics.nll(ours(z), y) == pytest.approx(metrics.nll(theirs(z), y), abs=1e-6)


def test_separable_shards_end_at_the_bound_at_once_and_say_why(tmp_path):
    z = np.tile(np.eye(3, dtype=np.float32) * 4, (4000, 1))
    y = np.tile(np.arange(3), 4000)
    held = _Data(Shards.of(written(tmp_path / "p", z, y)), None, skip_bad=False, progress=False)
    with pytest.warns(UserWarning, match="every label has its row"):
        found = FITS["temperature"](held)
    with pytest.warns(UserWarning, match="every label has its row"):
        theirs = trueup.METHODS["temperature"](z, y)
    assert found.certificate.status == theirs.certificate.status == "bound"
    assert found.certificate.passes == theirs.certificate.passes


def test_a_part_has_as_many_rows_as_make_a_fixed_number_of_logits(tmp_path, monkeypatch):
    z, y = drawn(1000, classes=10)
    trueup.save((z, y), tmp_path / "a.npy")
    monkeypatch.setattr(source, "NUMBERS", 2000)
    assert [len(part.labels) for part in Shards.of(tmp_path).read(str(tmp_path / "a.npy"))] == [200] * 5


@pytest.fixture(scope="module", params=[2, 3], ids=["two classes", "three classes"])
def weighted(request, tmp_path_factory):
    z, y = drawn(2000, request.param)
    w = np.random.default_rng(1).gamma(1.0, size=2000)
    w[:400] = 0.0  # a whole shard, and some rows of others
    w[900:950] = 0.0
    folder = tmp_path_factory.mktemp("weighted")
    for i, rows in enumerate(np.split(np.arange(2000), 5)):
        np.savez(folder / f"{i}.npz", logits=z[rows], labels=y[rows], w=w[rows])
    return folder, z, y, w


@pytest.mark.parametrize("method", [name for name in FITS if name not in ("platt", "beta", "isotonic")])
def test_weights_of_shards_are_those_of_rows_in_memory(weighted, method):
    folder, z, y, w = weighted
    ours, theirs = (
        fit(method, Shards.of(folder, sample_weight="w"), progress=False)(z),
        trueup.METHODS[method](z, y, sample_weight=w)(z),
    )
    if method == "histogram_mass":  # whose cuts are on a grid: a few rows near one change their bin
        assert np.median(np.abs(ours - theirs)) < 0.02
    else:
        assert metrics.nll(ours, y, sample_weight=w) == pytest.approx(metrics.nll(theirs, y, sample_weight=w), abs=1e-7)
        np.testing.assert_allclose(ours, theirs, atol=2e-3)


def test_weights_of_shards_that_are_all_zero_are_one_clear_error(tmp_path):
    z, y = drawn(50)
    np.savez(tmp_path / "a.npz", logits=z, labels=y, w=np.zeros(50))
    with pytest.raises(ValueError, match="w must not all be zero"):
        fit("temperature", Shards.of(tmp_path, sample_weight="w"), progress=False)
