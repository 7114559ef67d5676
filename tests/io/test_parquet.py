"""Parquet files of all honest kinds are read; of a damaged one, an error names the file."""

import tracemalloc
from itertools import product

import numpy as np
import pytest

from trueup import load
from trueup.io import Predictions, load_table, stream

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

COMPRESSIONS = ("none", "snappy", "gzip", "brotli", "zstd", "lz4")


def pair(n=600, classes=4, seed=0):
    rng = np.random.default_rng(seed)
    return Predictions(rng.normal(size=(n, classes)).astype(np.float32), rng.integers(0, classes, n))


def by_column(z, y):
    return pa.table({**{f"logit_{k}": z[:, k] for k in range(z.shape[1])}, "label": y})


def by_list(z, y):
    return pa.table({"logits": z.tolist(), "label": y})


def by_fixed_list(z, y):
    lists = pa.FixedSizeListArray.from_arrays(pa.array(z.ravel()), z.shape[1])
    return pa.table({"logits": lists, "label": pa.array(y).dictionary_encode(), "name": ["cat"] * len(y)})


def read(path, rows=250):
    whole, parts = load(path), list(stream(path, rows=rows))
    for together in (np.concatenate(arrays) for arrays in zip(*parts, strict=True)):
        assert any(np.array_equal(together, array) for array in whole)
    return whole


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_every_way_to_write_is_read(tmp_path, version, compression):
    z, y = pair()
    path = tmp_path / "net.parquet"
    for table, dictionary, size, more in product(
        (by_column(z, y), by_list(z, y), by_fixed_list(z, y)),
        (True, False),
        (None, 500),
        (
            {},
            {"row_group_size": 250, "write_page_checksum": True, "write_page_index": True, "write_statistics": False},
            # As others write them: without arrow's own schema, lists under other names.
            {"store_schema": False, "use_compliant_nested_type": False, "version": "1.0", "flavor": "spark"},
        ),
    ):
        options = {"compression": compression, "use_dictionary": dictionary, "data_page_size": size, **more}
        pq.write_table(table, path, data_page_version=version, **options)
        found = read(path)
        np.testing.assert_array_equal(found.logits, z)
        np.testing.assert_array_equal(found.labels, y)


@pytest.mark.parametrize("encoding", ["PLAIN", "BYTE_STREAM_SPLIT"])
@pytest.mark.parametrize("of_labels", ["PLAIN", "DELTA_BINARY_PACKED", "BYTE_STREAM_SPLIT"])
def test_every_encoding_is_read(tmp_path, encoding, of_labels):
    z, y = pair()
    encodings = {**{f"logit_{k}": encoding for k in range(4)}, "label": of_labels}
    for version in ("1.0", "2.0"):
        pq.write_table(
            by_column(z, y), tmp_path / "a.parquet", use_dictionary=False, column_encoding=encodings,
            data_page_version=version,
        )  # fmt: skip
        found = read(tmp_path / "a.parquet")
        np.testing.assert_array_equal(found.logits, z)
        np.testing.assert_array_equal(found.labels, y)


@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_what_is_always_the_same_is_read(tmp_path, compression):
    """Nothing packs better: a page of a million zeros takes a few bytes."""
    z, y = np.zeros((400_000, 3)), np.zeros(400_000, int)
    for table, dictionary in product((by_column(z, y), by_fixed_list(z, y)), (True, False)):
        pq.write_table(
            table, tmp_path / "a.parquet", compression=compression, use_dictionary=dictionary, data_page_size=1 << 25,
            compression_level={"brotli": 9, "zstd": 15, "gzip": 9}.get(compression),
        )  # fmt: skip
        assert load(tmp_path / "a.parquet").logits.shape == (400_000, 3)


def test_odd_but_honest_columns_are_read(tmp_path):
    path = tmp_path / "a.parquet"
    z = np.array([[0.5, -0.5], [1.5, 2.0]])
    for labels in (
        pa.DictionaryArray.from_arrays([0, 1], pa.array(np.arange(1000))),  # most of which are never used
        pa.array([0, 1], pa.int8()),
        pa.array([False, True]).cast(pa.uint8()),
    ):
        pq.write_table(pa.table({"logit.0": z[:, 0], "logit.1": z[:, 1], "label": labels}), path)
        found = load(path, logits=["logit.0", "logit.1"])
        np.testing.assert_array_equal(found.logits, z)
        assert found.labels.tolist() == [0, 1]
    for kind in (pa.float16(), pa.float64()):
        halves = pa.array((2 * z).astype(kind.to_pandas_dtype()).tolist(), pa.list_(kind))
        pq.write_table(pa.table({"logits": halves, "label": [0, 1]}), path)
        np.testing.assert_array_equal(load(path).logits, 2 * z)


@pytest.mark.parametrize("kind", ["f2", "f4", "f8"])
def test_gaps_among_labels_of_any_precision(tmp_path, kind):
    """Half precision cannot hold the number that marks a gap; a label beyond 64 bits is no gap."""
    path = tmp_path / "net.parquet"

    def write(last):
        labels = pa.array([None, *np.array([1, 0, last], kind)])
        pq.write_table(pa.table({"logits": [[0.5, -1.5]] * 4, "label": labels}), path)

    write(1)
    with pytest.warns(UserWarning, match="1 rows? (was|were) left out, without a label"):
        assert load(path).labels.tolist() == [1, 0, 1]
    for wrong in (0.5, np.inf, *([] if kind == "f2" else [1e30, -(2.0**63)])):
        write(wrong)
        with pytest.raises(ValueError, match="labels must be integers"):
            load(path)


def table_bytes(**columns):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table(columns), sink)
    return sink.getvalue().to_pybytes()


GOOD = table_bytes(logits=[[1.5, -1.5], [0.5, 1.0]], label=[0, 1])
BAD = {
    "another file": (b"PK" + GOOD[2:], "the file lost its beginning, or it is no .parquet file"),
    "text": (b"logit_0,logit_1,label\n", "the file lost its beginning, or it is no .parquet file"),
    "a lost end": (GOOD[:-20], "not a readable .parquet file"),
    "a beginning alone": (GOOD[:60], "not a readable .parquet file"),
    "a lost middle": (GOOD[:20] + bytes(40) + GOOD[60:], ""),
    "long texts": (
        table_bytes(logits=["x" * 10**4] * 10**3, label=[0] * 10**3),
        "logits must be an array of real numbers, got string",
    ),
    "lists of texts": (
        table_bytes(logits=[["a", "b"]], label=[0]),
        r"logits must be an array of real numbers, got list<element: string>",
    ),
    "lists of unequal length": (
        table_bytes(logits=[[1.0, 2.0], [1.0]], label=[0, 1]),
        r"logits must have the same length in each row, got 1\.\.2",
    ),
    "structures": (
        table_bytes(logits=[{"a": 1.0}], label=[0]),
        "logits must be an array of real numbers, got struct",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_a_damaged_file_is_named(tmp_path, case):
    body, message = BAD[case]
    path = tmp_path / "net.parquet"
    path.write_bytes(body)
    for call in (load, lambda path: list(stream(path, rows=4))):
        with pytest.raises(ValueError, match=rf"net\.parquet: .*{message}"):
            call(path)


def test_long_names_of_groups_are_not_repeated_in_every_row(tmp_path):
    n = 400_000
    name = pa.DictionaryArray.from_arrays(pa.array(np.arange(n) % 2, pa.int32()), pa.array(["a" * 1000, "b" * 1000]))
    logits = pa.array(np.zeros(n))
    columns = {"logit_0": logits, "logit_1": logits, "label": pa.array(np.zeros(n, int)), "g": name.cast(pa.string())}
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path, compression="zstd")
    assert path.stat().st_size < 1e5
    del columns, name
    tracemalloc.start()
    table = load_table(path, groups="g", columns="g", clusters="g")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100e6
    assert [x.nbytes for x in (table.groups["g"], table.columns["g"], table.clusters)] == [8 * n] * 3
    assert sorted(set(table.groups["g"].tolist())) == ["a" * 1000, "b" * 1000]
