"""Files that an enemy, or another program, may have written: small ones that stand for gigabytes, and others."""

import io
import json
import sqlite3
import struct
import subprocess
import sys
import zipfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from mutations import npy, promised

import trueup
from parquet_files import many_columns

pytestmark = pytest.mark.filterwarnings("ignore:.*a file of an older version has no hash:UserWarning")

MEMORY = 200 << 20
"""Bytes that a process may need at most beyond what it has, while it refuses a file that stands for gigabytes."""


# Files that stand for gigabytes are read in a process that can be measured.


def zipped(method, **members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def header_bomb():
    """An array whose header says that it has four gigabytes, with hundreds of megabytes of it packed into two."""
    file = io.BytesIO()
    zipped = zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with zipped as archive, archive.open("logits.npy", "w") as member:
        member.write(b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1))
        for _ in range(400):
            member.write(bytes(1 << 20))
    return file.getvalue()


def promise():
    """The archive's directory and the array's header agree on four gigabytes, of which nothing is there."""
    rows, labels = 17 * 10**7, npy(np.zeros(2, int))
    head = promised((rows, 3), "<f8")
    content = zipped(zipfile.ZIP_STORED, logits=head, labels=labels)
    for magic, offset in ((b"PK\x01\x02", 24), (b"PK\x03\x04", 22)):
        start = content.index(magic) + offset
        content = content[:start] + struct.pack("<I", len(head) + 24 * rows) + content[start + 4 :]
    return content


def ours(key, text, tensors=()):
    """A .safetensors file with a header of ours."""
    header, data = {"__metadata__": {key: json.dumps(text)}}, b""
    for name, array in tensors:
        span = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": "F64", "shape": list(array.shape), "data_offsets": span}
        data += array.tobytes()
    content = json.dumps(header).encode()
    return struct.pack("<Q", len(content)) + content + data


def of_classes(classes):
    one = {"method": "Temperature", "config": {"temperature": 2.0}, "certificate": None}
    return ours("trueup", {"schema": 1, "calibrator": one, "classes": classes, "versions": {}, "summary": None})


def of_bins(bins, classes):
    names = {
        "n_classes": classes,
        "level": 0.9,
        "bins": bins,
        "window": 10,
        "half_life": 5.0,
        "block": 5,
        "classwise": True,
    }
    seen = {"rows": 0, "begun": 1, "streams": 1}
    tensors = [("wealth", np.zeros(9)), ("tallies", np.zeros((2, 3, 5))), ("nll", np.zeros(2)), ("peak", np.zeros(1))]
    return ours("trueup_monitor", {"schema": 1, "settings": names, "seen": seen, "alarm": None}, tensors)


BOMBS = {
    "header.npz": (header_bomb, "trueup.load"),
    "promise.npz": (promise, "trueup.load"),
    "classes.safetensors": (lambda: of_classes(10**9), "trueup.load"),
    "bins.safetensors": (lambda: of_bins(10**9, 3), "trueup.load"),
    "betters.safetensors": (lambda: of_bins(5, 10**9), "trueup.load"),
    "footer.parquet": (lambda: many_columns(10**6), "trueup.load"),
}

TRAPS = {
    "bzip2.npz": lambda: zipped(zipfile.ZIP_BZIP2, logits=promised((10**5, 3), "<f8") + bytes(24 * 10**5)),
    "deep.npy": lambda: b"\x93NUMPY\x01\x00" + struct.pack("<H", 9001) + b"-" * 9000 + b"1",
}
"""What zipfile unpacks without a bound, and what Python's parser takes for nine thousand levels."""

PROGRAM = """
import resource, sys, trueup
from trueup.io.load_save import load_logits
trueup.load
def peak():
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
before = peak()
for line in sys.stdin.read().split("\\n"):
    reader, path = line.split(" ", 1)
    try:
        found = eval(reader)(path)
        print(path, "was read", sep="\\t")
    except Exception as error:
        print(path, type(error).__name__, str(error).replace("\\n", " / "), sep="\\t")
print(peak() - before)
"""


def refuse_in_child(lines, beginning="", seconds=1200):
    """Have files read by a process of its own, since it may hang or crash; each must be refused. Gives its peak."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=seconds, check=True)
    *answers, peak = done.stdout.splitlines()
    assert len(answers) == len(lines)
    for path, kind, *message in (answer.split("\t") for answer in answers):
        assert kind in ("ValueError", "InputError"), (path, kind, message)
        assert message[0].startswith(f"{path}: {beginning}"), message
    return int(peak)


def test_files_that_stand_for_gigabytes(tmp_path, tell):
    """Small files that unpack to, or speak of, gigabytes: archives, headers, numbers of classes and of bins."""
    for name, (made, _) in BOMBS.items():
        Path(tmp_path, name).write_bytes(made())
    peak = refuse_in_child([f"{reader} {tmp_path / name}" for name, (_, reader) in BOMBS.items()])
    assert peak < MEMORY, f"{peak / 2**20:.0f} MB were needed"
    size = sum(Path(tmp_path, name).stat().st_size for name in BOMBS)
    tell("files", f"{len(BOMBS)} files of {size / 2**20:.1f} MB refused by name, with {peak / 2**20:.0f} MB of memory")


def test_files_that_are_traps_for_a_parser(tmp_path, tell):
    """An archive packed by bzip2, which has no bound on what one read unpacks, and a header nested 9,000 times."""
    np.save(tmp_path / "deep.labels.npy", np.zeros(2, int))
    for name, made in TRAPS.items():
        path = tmp_path / name
        path.write_bytes(made())
        for read in (trueup.load, lambda path: list(trueup.io.stream(path, rows=4))):
            with pytest.raises(ValueError, match=rf"^{path}: [^\n]{{5,400}}$"):
                read(path)
    tell("files", f"{len(TRAPS)} files, each refused by name")


def test_parquet_files_that_lost_their_beginning(tmp_path, tell):
    """Parquet files that lost any number of bytes at their beginning, some of which arrow alone reads for ever."""
    pytest.importorskip("pyarrow")
    whole = tmp_path / "net.parquet"
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(24, 3))
    trueup.save((logits, (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)), whole)
    content, lines = whole.read_bytes(), []
    for lost in range(1, len(content) - 4):
        path = tmp_path / f"{lost}.parquet"
        path.write_bytes(content[lost:])
        lines.append(f"load_logits {path}")
    # Which of them it never ends with depends on what is in memory, so none may reach it.
    refuse_in_child(lines, "the file lost its beginning", seconds=1200)
    tell("files", f"{len(lines)} files, each refused by name")


DAMAGE = {
    "a schema in words": "UPDATE trueup_store SET schema = 'one'",
    "no schema": "DELETE FROM trueup_store",
    "two schemas": "INSERT INTO trueup_store (schema) VALUES (1)",
    "rows that are no JSON": "UPDATE rows SET row = '{'",
    "rows that are lists": "UPDATE rows SET row = '[1]'",
    "rows of bytes": "UPDATE rows SET row = x'ff00'",
    "deep rows": "UPDATE rows SET row = replace(hex(zeroblob(50000)), '00', '[')",
    "settings that are a number": "UPDATE cells SET settings = '7'",
    "a column less": "ALTER TABLE cells RENAME COLUMN settings TO others",
    "a table less": "DROP TABLE rows",
}


def test_a_store_changed_by_another_program(tmp_path, tell):
    """Another program changed the rows and tables of a study's store of results."""
    from trueup_studies.grid import Cell
    from trueup_studies.store import Store

    cell = Cell("demo", 1, {"seed": 0})
    for number, statement in enumerate(DAMAGE.values()):
        path = tmp_path / f"{number}.sqlite"
        Store(path).finish(cell, [{"ece": 0.1}], seconds=1.0)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(statement)
        with pytest.raises(ValueError, match=rf"^{path}: the file is damaged: [^\n]{{5,400}}$"):
            Store(path).rows([cell])
    tell("files", f"{len(DAMAGE)} stores, each refused by name")
