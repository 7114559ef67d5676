"""Parquet files whose footer, pages or types promise what is not there, written by hand."""

import base64
import struct
from itertools import product

import numpy as np
import pytest
from serving import upload

from trueup.serve.limits import declared
from trueup.serve.parquet_pages import Chunk, unpacked_bytes
from trueup.serve.settings import Settings

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet", reason="pyarrow is not installed")

I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12
DATA, DICTIONARY = 0, 2
INT64, DOUBLE = 2, 5
REQUIRED, REPEATED = 0, 2
GZIP = 2


def natural(n):
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def value(kind, content):
    """A value of Thrift's compact protocol; a list is (kind, entries), or (kind, entries, how many it claims)."""
    if kind in (I32, I64):
        return natural(content << 1)
    if kind == BINARY:
        return natural(len(content)) + content
    if kind == STRUCT:
        return thrift(*content)
    inner, entries, *claimed = content
    return bytes([0xF0 | inner]) + natural(*claimed or [len(entries)]) + b"".join(value(inner, e) for e in entries)


def thrift(*fields):
    return b"".join(bytes([kind]) + natural(number << 1) + value(kind, found) for number, kind, found in fields) + b"\0"


def page(kind, body, values, *, unpacked=None, encoding=0, more=()):
    told = (5, STRUCT, [(1, I32, values), (2, I32, encoding), (3, I32, 3), (4, I32, 3)])
    told = (7, STRUCT, [(1, I32, values), (2, I32, 0)]) if kind == DICTIONARY else told
    size = len(body) if unpacked is None else unpacked
    return thrift((1, I32, kind), (2, I32, size), (3, I32, len(body)), *more, told) + body


def column(name, kind, pages, values, *, dictionary=0, codec=0, repeated=REQUIRED):
    return {"name": name, "kind": kind, "pages": pages, "values": values, "dictionary": dictionary, "codec": codec,
            "repeated": repeated}  # fmt: skip


def written(rows, *columns):
    data, chunks, schema = b"PAR1", [], [[(4, BINARY, b"schema"), (5, I32, len(columns))]]
    for c in columns:
        at, data = len(data), data + c["pages"]
        facts = [(1, I32, c["kind"]), (2, LIST, (I32, [0])), (3, LIST, (BINARY, [c["name"].encode()]))]
        facts += [(4, I32, c["codec"]), (5, I64, c["values"]), (6, I64, 60), (7, I64, len(c["pages"]))]
        facts += [(9, I64, at + c["dictionary"]), *([(11, I64, at)] if c["dictionary"] else [])]
        chunks.append([(2, I64, at), (3, STRUCT, facts)])
        schema.append([(1, I32, c["kind"]), (3, I32, c["repeated"]), (4, BINARY, c["name"].encode())])
    group = [(1, LIST, (STRUCT, chunks)), (2, I64, 100), (3, I64, rows)]
    return closed(data, (1, I32, 1), (2, LIST, (STRUCT, schema)), (3, I64, rows), (4, LIST, (STRUCT, [group])))


def closed(data, *footer):
    told = thrift(*footer)
    return data + told + struct.pack("<I", len(told)) + b"PAR1"


LABELS = column("label", INT64, page(DATA, struct.pack("<2q", 0, 1), 2), 2)
PLAIN = page(DATA, struct.pack("<2d", 1.5, -1.5), 2)


def with_first(pages, values=2, **options):
    return written(2, column("logit_0", DOUBLE, pages, values, **options), column("logit_1", DOUBLE, PLAIN, 2), LABELS)


def one_long_row(n):
    """A row whose list has n numbers, in two hundred bytes: each run of equal levels and numbers is a count."""
    levels = [natural(2) + b"\0" + natural((n - 1) << 1) + b"\1", natural(n << 1) + b"\1"]
    body = b"".join(struct.pack("<I", len(run)) + run for run in levels) + b"\1" + natural(n << 1) + b"\0"
    first = page(DICTIONARY, struct.pack("<d", 1.5), 1)
    pages = first + page(DATA, body, n, encoding=8)
    lists = column("logits", DOUBLE, pages, 4, dictionary=len(first), repeated=REPEATED)
    return written(1, lists, column("label", INT64, page(DATA, struct.pack("<q", 0), 1), 1))


def wide_type(size):
    """Missing lists of a fixed size, which the type that is written beside them calls larger than it is."""
    sink = pa.BufferOutputStream()
    lists = pa.array([None, None], pa.list_(pa.float64(), 1234))
    pq.write_table(pa.table({"logits": lists, "label": [0, 1]}), sink)
    data = sink.getvalue().to_pybytes()
    told = pq.read_metadata(pa.BufferReader(data)).metadata[b"ARROW:schema"]
    larger = base64.b64decode(told).replace(struct.pack("<i", 1234), struct.pack("<i", size))
    return data.replace(told, base64.b64encode(larger))


COLUMNS = [(1, I32, 1), (2, LIST, (STRUCT, [[(4, BINARY, b"schema"), (5, I32, 0)]])), (3, I64, 1)]
DECOY = [(2, I64, 16), (3, I64, 16)]
BAD = {
    "a list in one row": (one_long_row(200_000_000), "more than the 4 values that the file says it has"),
    "a page of 2 GB": (with_first(page(DATA, b"x", 2, unpacked=2**31 - 1), codec=GZIP), "it unpacks to 2,048 MB"),
    "a page that tells two sizes": (
        with_first(page(DATA, b"x", 2, unpacked=2**31 - 1, more=DECOY), codec=GZIP),
        "it unpacks to 2,048 MB",
    ),
    "a page of more values": (with_first(page(DATA, b"", 2**31 - 1)), "more than the 2 values"),
    "a dictionary of more": (
        with_first(page(DICTIONARY, b"", 2**31 - 1) + PLAIN, dictionary=11),
        "more than the 2 values",
    ),
    "many rows in few pages": (with_first(PLAIN, values=2 * 10**9), "it unpacks to 2,000,000,004 numbers; at most"),
    "a list of columns": (
        closed(b"PAR1", *COLUMNS, (4, LIST, (STRUCT, [[(1, LIST, (STRUCT, [], 10**6))]]))),
        "Exceeded size limit",
    ),
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
        chunks = [facts.row_group(g).column(c) for g in range(facts.num_row_groups) for c in range(facts.num_columns)]
        starts = [chunk.dictionary_page_offset or chunk.data_page_offset for chunk in chunks]
        found = unpacked_bytes(path, [Chunk(at, c.num_values) for at, c in zip(starts, chunks, strict=True)])
        total = sum(chunk.total_uncompressed_size for chunk in chunks)  # with the headers of the pages
        assert 0.3 * total < found < total
