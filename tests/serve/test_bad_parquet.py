"""Parquet files whose footer, pages or types promise what is not there, written by hand."""

from itertools import product

import numpy as np
import pytest
from serving import upload

from parquet_files import (
    BROTLI,
    CUT,
    DATA,
    DICTIONARY,
    DOUBLE,
    GZIP,
    I32,
    I64,
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
from trueup import load
from trueup.io.parquet_footer import groups_of
from trueup.io.parquet_pages import unpacked_bytes
from trueup.serve.limits import declared
from trueup.serve.settings import Settings

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")


DECOY = [(2, I64, 16), (3, I64, 16)]
HUGE = 2**31 - 1
DAMAGED = "the header of a page is damaged"
BAD = {
    "a list in one row": (one_long_row(200_000_000), "more than the 4 values that the file says it has"),
    "a list that hides": (one_long_row(50_000_000, hidden=True), DAMAGED),
    "a page of 2 GB": (with_first(page(DATA, bytes(600), 2, unpacked=HUGE), codec=BROTLI), "it unpacks to 2,048 MB"),
    "a page of 2 GB in a byte": (
        with_first(page(DATA, b"x", 2, unpacked=HUGE), codec=GZIP),
        "a page cannot unpack to 2,147,483,647 bytes, since 1 are there",
    ),
    "a page that tells two sizes": (
        with_first(page(DATA, b"x", 2, unpacked=HUGE, more=DECOY), codec=GZIP),
        DAMAGED,
    ),
    "a page that hides its size": (
        with_first(page(DATA, b"x", 2, unpacked=16, more=[(CUT + 2, I32, HUGE)]), codec=GZIP),
        DAMAGED,
    ),
    "a number of too many bits": (with_first(page(DATA, bytes(16), (1 << 32) + 2)), DAMAGED),
    "a page of another kind": (
        # What counts is the kind that the page says it has: the next one would never be looked at.
        with_first(page(DATA, b"", 0, after=[(8, STRUCT, [(1, I32, 2)])]) + page(DATA, b"", HUGE)),
        "more than the 2 values",
    ),
    "a page of no kind": (with_first(page(9, bytes(16), 2)), DAMAGED),
    "a page that ends beyond the file": (
        with_first(page(DATA, b"", 1, packed=HUGE, unpacked=HUGE) + page(DATA, b"", HUGE)),
        "the header of a page is cut off",
    ),
    "a page of more values": (with_first(page(DATA, b"", HUGE)), "more than the 2 values"),
    "a dictionary of more": (
        with_first(page(DICTIONARY, b"", HUGE) + PLAIN, dictionary=11),
        "a page cannot hold 2,147,483,647 values in 0 bytes",
    ),
    "rows without values": (written(9, column("logit_0", DOUBLE, PLAIN, 2)), "2 values in 9 rows"),
    "many rows in few pages": (with_first(PLAIN, values=2 * 10**9), "it unpacks to 2,000,000,004 numbers; at most"),
    "a list of columns": (many_columns(10**6), "Exceeded size limit"),
    "a type of many numbers": (wide_type(300_000_000), "logits has 300,000,000 classes; at most 20,000 are taken"),
}


@pytest.mark.parametrize("case", BAD)
def test_promises_are_not_believed(client, case):
    body, told = BAD[case]
    assert len(body) < 4000
    answer = upload(client, body, "net.parquet")
    assert answer.status_code == 422, answer.text
    assert told in answer.json()["error"]


def test_what_is_written_by_hand_can_be_read(client):
    assert upload(client, with_first(PLAIN), "net.parquet").status_code == 201
    assert upload(client, one_long_row(4), "net.parquet").json()["classes"] == 4


def test_a_long_footer_takes_no_more_than_the_settings_allow(tmp_path):
    path = tmp_path / "net.parquet"
    path.write_bytes(with_first(PLAIN))
    declared(path, Settings(unpacked_bytes=1 << 18))
    with pytest.raises(ValueError, match="it describes too many columns"):
        declared(path, Settings(unpacked_bytes=1 << 15))


@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_every_way_to_write_is_read(tmp_path, version):
    rng, n, path = np.random.default_rng(0), 600, tmp_path / "net.parquet"
    z, y = rng.normal(size=(n, 4)), rng.integers(0, 4, n)
    tables = [
        pa.table({**{f"logit_{k}": z[:, k] for k in range(4)}, "label": y, "file": [f"{i}.png" for i in range(n)]}),
        pa.table({"logits": pa.FixedSizeListArray.from_arrays(pa.array(z.ravel()), 4), "label": y}),
        pa.table({"logits": z.tolist(), "label": pa.array(y).dictionary_encode()}),
    ]
    ways = product(tables, ("none", "snappy", "zstd"), (True, False), (n, 250), (None, 500), (True, False))
    for table, compression, dictionary, group, size, index in ways:
        pq.write_table(
            table, path, data_page_version=version, compression=compression, use_dictionary=dictionary,
            row_group_size=group, data_page_size=size, write_page_checksum=index, write_page_index=index,
        )  # fmt: skip
        shapes = declared(path, Settings())
        assert shapes["label"] == (n,)
        assert shapes.get("logits", (n, 4)) == (n, 4)
        facts = pq.read_metadata(path)
        found = unpacked_bytes(path, [chunk for group in groups_of(path) for chunk in group.chunks])
        groups = [facts.row_group(group) for group in range(facts.num_row_groups)]
        total = sum(g.column(c).total_uncompressed_size for g in groups for c in range(facts.num_columns))
        # The headers of the pages are not in what is found.
        assert 0.3 * total < found < total


def test_a_footer_damaged_anywhere_is_refused_or_read(tmp_path):
    """Arrow ends the whole process if it is asked for a column's facts in some of these."""
    path, refused = tmp_path / "net.parquet", 0
    pq.write_table(pa.table({"logits": [[1.5, -1.5], [0.5, 1.0]], "label": [0, 1]}), path, store_schema=False)
    content = path.read_bytes()
    start = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    for at in range(start, len(content) - 8):
        for new in (content[at] ^ 0x80, content[at] ^ 0x40, content[at] ^ 2, 0x13, 30):
            path.write_bytes(content[:at] + bytes([new]) + content[at + 1 :])
            for read in (lambda: declared(path, Settings()), lambda: load(path)):
                try:
                    read()
                except ValueError:
                    refused += 1
    assert refused > 1000
