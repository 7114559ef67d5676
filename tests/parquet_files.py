"""Parquet files written by hand, byte by byte, so that they can say what no writer would."""

import base64
import struct

I32, I64, BINARY, LIST, STRUCT = 5, 6, 8, 9, 12
DATA, DICTIONARY = 0, 2
INT64, DOUBLE = 2, 5
REQUIRED, REPEATED = 0, 2
GZIP, BROTLI = 2, 4
CUT = 1 << 16


def natural(n):
    out = b""
    while n > 127:
        out, n = out + bytes([n & 127 | 128]), n >> 7
    return out + bytes([n])


def value(kind, content):
    """A value of Thrift's compact protocol; a list is (kind, entries), or (kind, entries, how many it claims)."""
    if kind in (I32, I64):
        return natural(content << 1 if content >= 0 else ~content << 1 | 1)
    if kind == BINARY:
        return natural(len(content)) + content
    if kind == STRUCT:
        return thrift(*content)
    inner, entries, *claimed = content
    return bytes([0xF0 | inner]) + natural(*claimed or [len(entries)]) + b"".join(value(inner, e) for e in entries)


def thrift(*fields):
    return b"".join(bytes([kind]) + natural(number << 1) + value(kind, found) for number, kind, found in fields) + b"\0"


def page(kind, body, values, *, unpacked=None, packed=None, encoding=0, more=(), inside=(), after=()):
    """A page; `more` comes in its header after the sizes, `inside` where the values are told, `after` at the end."""
    told = (5, STRUCT, [(1, I32, values), (2, I32, encoding), (3, I32, 3), (4, I32, 3), *inside])
    told = (7, STRUCT, [(1, I32, values), (2, I32, 0)]) if kind == DICTIONARY else told
    sizes = [(2, I32, len(body) if unpacked is None else unpacked), (3, I32, len(body) if packed is None else packed)]
    return thrift((1, I32, kind), *sizes, *more, told, *after) + body


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


def one_long_row(n, told=4, hidden=False):
    """A row whose list has n numbers, in two hundred bytes: each run of equal levels and numbers is a count.

    The footer tells another number; if it is hidden, the page seems to tell that one too: readers cut the numbers of
    fields to 16 bits.
    """
    levels = [natural(2) + b"\0" + natural((n - 1) << 1) + b"\1", natural(n << 1) + b"\1"]
    body = b"".join(struct.pack("<I", len(run)) + run for run in levels) + b"\1" + natural(n << 1) + b"\0"
    first = page(DICTIONARY, struct.pack("<d", 1.5), 1)
    inside = [(CUT + 1, I32, n)] if hidden else []
    pages = first + page(DATA, body, told if hidden else n, encoding=8, inside=inside)
    lists = column("logits", DOUBLE, pages, told, dictionary=len(first), repeated=REPEATED)
    return written(1, lists, column("label", INT64, page(DATA, struct.pack("<q", 0), 1), 1))


def many_columns(n):
    """A footer whose list of columns claims to be so long, and ends at once."""
    schema = (2, LIST, (STRUCT, [[(4, BINARY, b"schema"), (5, I32, 0)]]))
    return closed(b"PAR1", (1, I32, 1), schema, (3, I64, 1), (4, LIST, (STRUCT, [[(1, LIST, (STRUCT, [], n))]])))


def wide_type(size):
    """Missing lists of a fixed size, which the type that is written beside them calls larger than it is."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    lists = pa.array([None, None], pa.list_(pa.float64(), 1234))
    pq.write_table(pa.table({"logits": lists, "label": [0, 1]}), sink)
    data = sink.getvalue().to_pybytes()
    told = pq.read_metadata(pa.BufferReader(data)).metadata[b"ARROW:schema"]
    larger = base64.b64decode(told).replace(struct.pack("<i", 1234), struct.pack("<i", size))
    return data.replace(told, base64.b64encode(larger))
