"""Files that are whole but hold anything: arrays, tables and texts of every kind."""

import os
import sys
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import trueup
from small_datasets import CodeInPickle
from trueup.io import load_logits

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
        array.flat[0] = CodeInPickle()
    if draw(st.integers(0, 5)) == 0 and not dtype.hasobject:
        array = np.array(list(zip(array.ravel(), array.ravel(), strict=True)), [("a", dtype), ("b", dtype)])
    return np.asfortranarray(array) if draw(st.booleans()) else array


def read_all_ways(path):
    """Whether the file is read; if it is, all must be sound, and if not, one line must name it."""
    sys.modules.pop("evil", None)
    answers, refusals = [], []
    for read in (trueup.load, lambda p: list(trueup.io.stream(p, rows=4)), load_logits):
        try:
            answers.append(read(path))
        except ALLOWED as error:
            refusals.append(str(error))
            answers.append(None)
    assert all(str(path) in message and "\n" not in message for message in refusals), refusals
    assert "evil" not in sys.modules, "a pickle was run"
    whole, parts, logits = answers
    if whole is not None:
        z, y = whole
        assert z.ndim == 2
        assert z.dtype.kind == "f"
        assert z.dtype.isnative
        assert (z < np.inf).all()  # neither NaN
        assert ((z > -np.inf).sum(axis=1) >= 2).all(), "an option that is not there is -inf, and two are there"
        assert y.dtype == np.int64
        assert y.shape == z.shape[:1]
        assert not len(y) or (y.min() >= 0 and y.max() < z.shape[1])
        if logits is None:  # of rows without a label, one has fewer than two options
            assert any("options in each row" in message for message in refusals), refusals
        elif len(logits) == len(z):
            np.testing.assert_array_equal(logits, z)
        else:  # rows without a label are left out
            rows = iter(logits.tolist())
            assert len(logits) > len(z)
            assert all(row in rows for row in z.tolist()), "the others are there in their order"
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
        found = read_all_ways(path)
        if found is not None:
            np.testing.assert_array_equal(found.logits, logits)
            np.testing.assert_array_equal(found.labels, labels)
        count(found)

    trial()
    assert 0 < count.read < count.files
    tell("files", str(count))


@pytest.mark.filterwarnings("ignore:.*left out, without a label:UserWarning")
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
        count(read_all_ways(path))

    trial()
    assert 0 < count.read < count.files
    tell("files", str(count))


@pytest.mark.filterwarnings("ignore:.*left out, without a label:UserWarning")
@pytest.mark.filterwarnings("ignore:.*read as CSV with sep=:UserWarning")
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
        count(read_all_ways(path))

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
