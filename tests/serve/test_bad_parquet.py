"""Parquet files whose footer, pages or types promise what is not there: they end their reader alone."""

import resource

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
    column,
    many_columns,
    one_long_row,
    page,
    wide_type,
    with_first,
    written,
)

pytest.importorskip("pyarrow", reason="pyarrow is not installed")

DECOY = [(2, I64, 16), (3, I64, 16)]
HUGE = 2**31 - 1
BAD = {
    "a list in one row": one_long_row(200_000_000),
    "a list that hides": one_long_row(50_000_000, hidden=True),
    "a page of 2 GB": with_first(page(DATA, bytes(600), 2, unpacked=HUGE), codec=BROTLI),
    "a page of 2 GB in a byte": with_first(page(DATA, b"x", 2, unpacked=HUGE), codec=GZIP),
    "a page that gives two sizes": with_first(page(DATA, b"x", 2, unpacked=HUGE, more=DECOY), codec=GZIP),
    "a page that hides its size": with_first(page(DATA, b"x", 2, unpacked=16, more=[(CUT + 2, I32, HUGE)]), codec=GZIP),
    "a page of no kind": with_first(page(9, bytes(16), 2)),
    "a page that ends beyond the file": with_first(
        page(DATA, b"", 1, packed=HUGE, unpacked=HUGE) + page(DATA, b"", HUGE)
    ),
    "a page of more values": with_first(page(DATA, b"", HUGE)),
    "a dictionary of more": with_first(page(DICTIONARY, b"", HUGE) + PLAIN, dictionary=11),
    "rows without values": written(9, column("logit_0", DOUBLE, PLAIN, 2)),
    "a list of columns": many_columns(10**6),
    "a type of many numbers": wide_type(300_000_000),
}


@pytest.mark.parametrize("case", BAD)
def test_promises_fill_no_memory_of_the_server(client, case):
    assert len(BAD[case]) < 4000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    answer = upload(client, BAD[case], "net.parquet")
    assert answer.status_code in (409, 413), answer.text
    assert answer.json()["error"].startswith("net.parquet: ")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # of kilobytes
    assert upload(client, with_first(PLAIN), "net.parquet").status_code == 201


def test_what_is_written_by_hand_can_be_read(client):
    assert upload(client, with_first(PLAIN), "net.parquet").status_code == 201
    assert upload(client, one_long_row(4), "net.parquet").json()["n_classes"] == 4
