"""Parquet files of all honest kinds are read; what a file only promises is refused before it takes memory."""

from itertools import product

import numpy as np
import pytest

from parquet_files import (
    BINARY,
    DATA,
    DOUBLE,
    GZIP,
    INT64,
    PLAIN,
    STRUCT,
    column,
    many_columns,
    one_long_row,
    page,
    wide_type,
    with_first,
    written,
)
from trueup import load, stream
from trueup.io import parquet_pages
from trueup.io.parquet import numbers_a_row
from trueup.io.parquet_footer import groups_of
from trueup.io.parquet_pages import Chunk, unpacked_bytes
from trueup.io.predictions import Predictions

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

COMPRESSIONS = ("none", "snappy", "gzip", "brotli", "zstd", "lz4")
HUGE = 2**31 - 1


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


def test_only_columns_that_are_read_must_be_sound(tmp_path):
    path = tmp_path / "a.parquet"
    columns = [column(f"logit_{k}", DOUBLE, PLAIN, 2) for k in range(2)]
    columns += [column("label", INT64, page(DATA, bytes(16), 2), 2), column("other", DOUBLE, page(DATA, b"", HUGE), 2)]
    path.write_bytes(written(2, *columns))
    assert load(path).logits.tolist() == [[1.5, 1.5], [-1.5, -1.5]]
    with pytest.raises(ValueError, match=r"a\.parquet: a page holds more than the 2 values that the file says it has"):
        load(path, logits=["logit_0", "other"])


def of_rows(rows, values):
    """Flat columns of which the footer tells so many rows and values."""
    return written(rows, *(column(name, DOUBLE, PLAIN, values) for name in ("logit_0", "logit_1", "label")))


def long_texts():
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"logits": ["x" * 10**4] * 10**3, "label": [0] * 10**3}), sink)
    return sink.getvalue().to_pybytes()


BAD = {
    "a list in one row": (one_long_row(50_000_000), "a page holds more than the 4 values that the file says it has"),
    "a list that hides": (one_long_row(50_000_000, hidden=True), "the header of a page is damaged"),
    "a list that all agree on": (one_long_row(50_000_000, told=50_000_000), "it has 50,000,001 numbers in 2.. bytes"),
    "a page of 2 GB": (
        with_first(page(DATA, b"x", 2, unpacked=HUGE), codec=GZIP),
        "a page cannot unpack to 2,147,483,647 bytes, since 1 are there",
    ),
    "rows without values": (of_rows(10**9, 2), "it says that a column has 2 values in 1,000,000,000 rows"),
    "values without pages": (of_rows(2, 10**9), "the header of a page is"),
    "fewer rows than none": (of_rows(-2, 2), "2 values in -2 rows"),
    "a type of many numbers": (wide_type(300_000_000), "it says that it has 600,000,002 numbers"),
    "a list of columns": (many_columns(10**6), "Exceeded size limit"),
    "text": (long_texts(), "logits must be an array of real numbers, got string"),
}


@pytest.mark.parametrize("case", BAD)
def test_promises_are_not_believed(tmp_path, case):
    body, told = BAD[case]
    path = tmp_path / "net.parquet"
    path.write_bytes(body)
    for call in (load, lambda path: list(stream(path, rows=4))):
        with pytest.raises(ValueError, match=rf"net\.parquet: .*{told}"):
            call(path)


def test_pages_are_looked_at_only_as_often_as_there_is_room(tmp_path):
    """Many columns that begin at the same place, before many empty pages, would take their product of steps."""
    path = tmp_path / "a.bin"
    pages = b"".join(page(DATA, b"", 0) for _ in range(1000)) + PLAIN
    path.write_bytes(pages)
    one = Chunk(0, 2, 0)
    assert unpacked_bytes(path, [one]) == 16
    with pytest.raises(ValueError, match="it has more than 100 pages"):
        unpacked_bytes(path, [one], most=100)
    with pytest.raises(ValueError, match=f"it has more than {len(pages) // 8:,} pages"):
        unpacked_bytes(path, [one] * 100)
    for start in (-5, len(pages), 2**63 - 1):
        with pytest.raises(ValueError, match="begins outside the file"):
            unpacked_bytes(path, [one._replace(start=start)])


def test_headers_of_any_length_are_read(tmp_path):
    path, sizes = tmp_path / "a.bin", (0, 300, 5000, 10**5, 2 * 10**6)
    texts = [page(DATA, bytes(8), 1, inside=[(5, STRUCT, [(1, BINARY, bytes(size))])]) for size in sizes]
    path.write_bytes(b"".join(texts))
    assert unpacked_bytes(path, [Chunk(0, len(sizes), 0)]) == 8 * len(sizes)
    path.write_bytes(b"\x15" + b"\x80" * (1 << 20))  # a number without an end
    with pytest.raises(ValueError, match="the header of a page is damaged"):
        unpacked_bytes(path, [Chunk(0, 1, 0)])


def test_what_a_type_gives_to_each_row():
    tensor = pa.fixed_shape_tensor(pa.float32(), (2, 3))
    for kind, expected in (
        (pa.float32(), (True, 1)),
        (pa.list_(pa.int8()), (True, 1)),
        (pa.list_(pa.list_(pa.float64(), 5), 7), (True, 35)),
        (pa.dictionary(pa.int8(), pa.float64()), (True, 1)),
        (tensor, (True, 6)),
        (pa.list_(pa.string(), 2), (False, 2)),
        (pa.struct([("a", pa.float32())]), (False, 1)),
    ):
        assert numbers_a_row(kind) == expected


def test_pages_that_are_damaged_anywhere_are_refused_or_read_as_they_are(tmp_path):
    """Each byte of the headers changed in turn: never anything but a ValueError, never more than is there."""
    z, y = pair(20)
    path = tmp_path / "a.parquet"
    pq.write_table(by_column(z, y), path)
    content = bytearray(path.read_bytes())
    chunks = groups_of(path)[0].chunks
    refused = 0
    for at in range(chunks[0].start, chunks[0].start + 20):
        for new in (0, 1, 127, 128, 255):
            changed = content.copy()
            changed[at] = new
            path.write_bytes(changed)
            try:
                assert unpacked_bytes(path, chunks) <= len(content) * max(parquet_pages.EXPANDS.values())
            except ValueError:
                refused += 1
    assert refused > 50
