"""Files that are whole but hold the wrong things: what a program in another language, or an enemy, may have written."""

import io
import json
import os
import sqlite3
import struct
import subprocess
import sys
import warnings
import zipfile
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutations import npy, promised

import trueup
from parts import Evil
from trueup.predictions import load_logits

ALLOWED = (ValueError, FileNotFoundError, ImportError)
DTYPES = (
    "f2",
    "f4",
    "f8",
    ">f4",
    ">f8",
    "f16",
    "i1",
    "u1",
    "<i4",
    ">i8",
    "u8",
    "?",
    "c16",
    "O",
    "U3",
    "S4",
    "M8[s]",
    "m8",
)
MEMORY = 200 << 20
"""Bytes that a process may need at most beyond what it has, while it refuses a file that stands for gigabytes."""


@st.composite
def arrays(draw, labels):
    """An array of any type, shape, order and content; now and then a good one."""
    dtype = np.dtype(
        draw(st.sampled_from(DTYPES if draw(st.booleans()) else (("<i8", "u1") if labels else ("f4", "f8"))))
    )
    shape = (6,) if labels else (6, 3)
    if draw(st.integers(0, 3)) == 0:
        shape = draw(st.sampled_from([(), (0,), (6,), (5,), (0, 3), (6, 0), (6, 1), (6, 3), (1, 6, 3), (2, 2, 2, 2)]))
    low, high = draw(st.sampled_from([(0, 3), (0, 3), (0, 2), (-1, 3), (0, 9), (2**40, 2**40 + 2)]))
    values = np.random.default_rng(draw(st.integers(0, 99))).integers(low, high, shape)
    with np.errstate(all="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex numbers lose their other half on purpose
        array = values.astype(dtype)
    if dtype.kind == "f" and array.size and draw(st.booleans()):
        array.flat[draw(st.integers(0, array.size - 1))] = draw(st.sampled_from([np.nan, np.inf, -np.inf, 6e4, -0.0]))
    if dtype.hasobject and array.size:
        array.flat[0] = Evil()
    if draw(st.integers(0, 5)) == 0 and not dtype.hasobject:
        array = np.array(list(zip(array.ravel(), array.ravel(), strict=True)), [("a", dtype), ("b", dtype)])
    return np.asfortranarray(array) if draw(st.booleans()) else array


def judged(path):
    """Whether the file is read; if it is, all must be sound, and if not, one line must name it."""
    sys.modules.pop("evil", None)
    answers, told = [], []
    for read in (trueup.load, lambda p: list(trueup.stream(p, rows=4)), load_logits):
        try:
            answers.append(read(path))
        except ALLOWED as error:
            told.append(str(error))
            answers.append(None)
    assert all(str(path) in message and "\n" not in message for message in told), told
    assert "evil" not in sys.modules, "a pickle was run"
    whole, parts, logits = answers
    if whole is not None:
        z, y = whole
        assert z.ndim == 2
        assert z.dtype.kind == "f"
        assert z.dtype.isnative
        assert np.isfinite(z).all()
        assert y.dtype == np.int64
        assert y.shape == z.shape[:1]
        assert not len(y) or (y.min() >= 0 and y.max() < z.shape[1])
        np.testing.assert_array_equal(logits, z)
        if parts is not None:  # what is stored by columns is not
            np.testing.assert_array_equal(np.concatenate([part.logits for part in parts]), z)
    else:
        assert parts is None
    return whole


class Count:
    """How many files were tried, and how many of them were read."""

    def __init__(self):
        self.files = self.read = 0

    def __call__(self, found):
        self.files += 1
        self.read += found is not None

    def __str__(self):
        return f"{self.files:,} files: {self.files - self.read:,} refused by name, {self.read:,} read, all of it sound"


def test_arrays_of_any_type_and_shape(tmp_path, effort, tell):
    """Arrays of every type, shape, order and content in .npz and .npy files; no pickle is run."""
    count = Count()

    @settings(max_examples=100 * effort)
    @given(arrays(labels=False), arrays(labels=True), st.booleans())
    def trial(logits, labels, packed):
        if packed:
            path = tmp_path / "net.npz"
            (np.savez if count.files % 2 else np.savez_compressed)(path, logits=logits, labels=labels)
        else:
            path = tmp_path / "net.npy"
            np.save(path, logits)
            np.save(tmp_path / "net.labels.npy", labels)
        found = judged(path)
        if found is not None:
            np.testing.assert_array_equal(found.logits, logits)
            np.testing.assert_array_equal(found.labels, labels)
        count(found)

    trial()
    assert 0 < count.read < count.files
    tell("files", str(count))


def test_tables_of_any_content(tmp_path, effort, tell):
    """Parquet columns of every type: ragged lists, missing values, text, dictionaries, structs, times, decimals."""
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    count = Count()
    kinds = [
        *(pa.float16(), pa.float32(), pa.float64(), pa.int8(), pa.uint8(), pa.int64(), pa.uint64(), pa.bool_()),
        *(pa.string(), pa.binary(), pa.null(), pa.date32(), pa.timestamp("ns"), pa.decimal128(5, 2)),
        *(
            pa.list_(pa.float32()),
            pa.list_(pa.float64(), 3),
            pa.large_list(pa.float64()),
            pa.list_(pa.list_(pa.int8())),
        ),
        *(pa.struct([("a", pa.float32())]), pa.map_(pa.string(), pa.float32()), pa.dictionary(pa.int8(), pa.float64())),
    ]

    @st.composite
    def columns(draw, rows, good):
        kind = good if draw(st.integers(0, 2)) else draw(st.sampled_from(kinds))
        gaps = draw(st.integers(0, 4)) == 0
        values = [None if gaps and i % 3 == 0 else draw(st.integers(0, 1)) for i in range(rows)]
        try:
            if pa.types.is_nested(kind):
                length = draw(st.sampled_from([2, 3, 3, 3]))
                ragged = draw(st.integers(0, 4)) == 0
                lists = [
                    None if v is None else [float(v)] * (length + (ragged and i % 2)) for i, v in enumerate(values)
                ]
                return pa.array(lists, kind)
            if pa.types.is_dictionary(kind):
                return pa.array(values, pa.float64()).dictionary_encode()
            return pa.array(values, pa.int64()).cast(kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError, ValueError):
            return pa.array(["text"] * rows)

    @settings(max_examples=70 * effort)
    @given(st.data())
    def trial(data):
        rows = data.draw(st.sampled_from([6, 6, 6, 1, 0]))
        if data.draw(st.booleans()):
            table = {"logits": data.draw(columns(rows, pa.list_(pa.float32())))}
        else:
            table = {f"logit_{k}": data.draw(columns(rows, pa.float64())) for k in (0, 1, data.draw(st.integers(1, 3)))}
        table["label"] = data.draw(columns(rows, pa.int64()))
        path = tmp_path / "net.parquet"
        pq.write_table(pa.table(table), path, row_group_size=4)
        count(judged(path))

    trial()
    assert 0 < count.read < count.files
    tell("files", str(count))


def test_text_of_any_content(tmp_path, effort, tell):
    """CSV files of any text: cells of every kind, quotes, encodings, lines of any length."""
    count = Count()
    cell = st.one_of(
        st.floats().map(repr), st.integers(-2, 5).map(str), st.text(max_size=4), st.just("1.0"), st.just("0")
    )
    names = st.lists(st.sampled_from(["logit_0", "logit_1", "logit_2", "label", "labels", "x", "1.5"]), max_size=5)

    @settings(max_examples=70 * effort)
    @given(
        st.one_of(names, st.just(["logit_0", "logit_1", "label"])),
        st.lists(st.one_of(st.lists(cell, max_size=4), st.just(["1.5", "2", "1"])), max_size=5),
        st.sampled_from([",", ",", ",", ";", "\t"]),
        st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1"]),
        st.sampled_from(["\n", "\r\n", "\r"]),
    )
    def trial(header, lines, comma, encoding, end):
        text = end.join(comma.join(line) for line in (header, *lines))
        path = tmp_path / "net.csv"
        path.write_bytes(text.encode(encoding, "replace"))
        count(judged(path))

    trial()
    assert 0 < count.read < count.files
    tell("files", str(count))


def test_very_wide_tables_are_read_in_time(tmp_path, tell):
    """A CSV file of 40,000 classes, and one whose last two of 40,000 columns have one name."""
    width = 40_000
    path = tmp_path / "wide.csv"
    names = [f"logit_{k}" for k in range(width)]
    with InTime() as seconds:
        path.write_text(",".join([*names, "label"]) + "\n" + "0.5," * width + "7\n")
        assert trueup.load(path).logits.shape == (1, width)
        path.write_text(",".join([*names, names[-1]]) + "\n")
        with pytest.raises(ValueError, match=f"got 'logit_{width - 1}' twice"):
            trueup.load(path)
    tell("files", f"{2 * width:,} columns in {seconds():.1f} s")


class InTime:
    """The processor's seconds that a block took, which must be few."""

    def __enter__(self):
        self.start = sum(os.times()[:2])
        return lambda: self.seconds

    def __exit__(self, kind, *_):
        self.seconds = sum(os.times()[:2]) - self.start
        assert kind is not None or self.seconds < 5, f"it took {self.seconds:.1f} s"


# Files that stand for gigabytes are read in a process that can be measured.


def zipped(method, **members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def header_bomb():
    """An array whose header has hundreds of megabytes, packed into two."""
    file = io.BytesIO()
    zipped = zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with zipped as archive, archive.open("logits.npy", "w") as member:
        member.write(b"\x93NUMPY\x02\x00" + struct.pack("<I", 400 << 20))
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
        "classes": classes,
        "alpha": 0.1,
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
    "bzip2.npz": (
        lambda: zipped(zipfile.ZIP_BZIP2, logits=promised((10**5, 3), "<f8") + bytes(24 * 10**5)),
        "trueup.load",
    ),
    "promise.npz": (promise, "trueup.load"),
    "deep.npy": (lambda: b"\x93NUMPY\x01\x00" + struct.pack("<H", 9001) + b"-" * 9000 + b"1", "trueup.load"),
    "classes.safetensors": (lambda: of_classes(10**9), "trueup.load_calibrator"),
    "bins.safetensors": (lambda: of_bins(10**9, 3), "load_monitor"),
    "betters.safetensors": (lambda: of_bins(5, 10**9), "load_monitor"),
}

PROGRAM = """
import resource, sys, trueup
from trueup.monitor import load_monitor
from trueup.predictions import load_logits
trueup.load_calibrator, trueup.load
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


def apart(lines, told="", seconds=60):
    """Have files read by a process of its own, since it may hang or crash; each must be refused. Gives its peak."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, input="\n".join(lines), capture_output=True, text=True, timeout=seconds, check=True)
    *answers, peak = done.stdout.splitlines()
    assert len(answers) == len(lines)
    for path, kind, *said in (answer.split("\t") for answer in answers):
        assert kind == "ValueError", (path, kind, said)
        assert said[0].startswith(f"{path}: {told}"), said
    return int(peak)


def test_files_that_stand_for_gigabytes(tmp_path, tell):
    """Small files that unpack to, or speak of, gigabytes: archives, headers, numbers of classes and of bins."""
    for name, (made, _) in BOMBS.items():
        Path(tmp_path, name).write_bytes(made())
    np.save(tmp_path / "deep.labels.npy", np.zeros(2, int))
    peak = apart([f"{reader} {tmp_path / name}" for name, (_, reader) in BOMBS.items()])
    assert peak < MEMORY, f"{peak / 2**20:.0f} MB were needed"
    size = sum(Path(tmp_path, name).stat().st_size for name in BOMBS)
    tell("files", f"{len(BOMBS)} files of {size / 2**20:.1f} MB refused by name, with {peak / 2**20:.0f} MB of memory")


def test_parquet_files_that_lost_their_beginning(tmp_path, tell):
    """Parquet files that lost any number of bytes at their beginning, some of which arrow alone reads for ever."""
    pytest.importorskip("pyarrow")
    whole = tmp_path / "net.parquet"
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(24, 3))
    trueup.save(whole, (logits, (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)))
    content, lines = whole.read_bytes(), []
    for lost in range(1, len(content) - 4):
        path = tmp_path / f"{lost}.parquet"
        path.write_bytes(content[lost:])
        lines.append(f"load_logits {path}")
    # Which of them it never ends with depends on what is in memory, so none may reach it.
    apart(lines, "the file lost its beginning", seconds=30)
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
    from trueup.study.cell import Cell
    from trueup.study.store import Store

    cell = Cell("demo", 1, {"seed": 0})
    for number, statement in enumerate(DAMAGE.values()):
        path = tmp_path / f"{number}.sqlite"
        Store(path).finish(cell, [{"ece": 0.1}], seconds=1.0)
        with closing(sqlite3.connect(path)) as connection, connection:
            connection.execute(statement)
        with pytest.raises(ValueError, match=rf"^{path}: the file is damaged: [^\n]{{5,400}}$"):
            Store(path).rows([cell])
    tell("files", f"{len(DAMAGE)} stores, each refused by name")
