from __future__ import annotations

import errno
import os
import pickle
import stat
import tempfile
import tracemalloc
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from optional import torch
from trueup._core.errors import Hint, InputError
from trueup.io import Predictions, formats, load, load_logits, open_predictions, save, stream

SUFFIXES = [".npz", ".npy", ".csv", ".parquet", ".safetensors"]
BINARY = [suffix for suffix in SUFFIXES if suffix != ".csv"]


def pair(n=23, classes=12, dtype=np.float64, seed=0):
    rng = np.random.default_rng(seed)
    return Predictions((3 * rng.normal(size=(n, classes))).astype(dtype), rng.integers(0, classes, n))


def same(a, b):
    """Equal to the bit, the sign of zero included."""
    assert a.logits.dtype == b.logits.dtype
    assert a.logits.shape == b.logits.shape
    assert np.asarray(a.logits).tobytes() == np.asarray(b.logits).tobytes()
    np.testing.assert_array_equal(a.labels, b.labels)
    assert a.labels.dtype == b.labels.dtype == np.int64


def joined(parts):
    parts = list(parts)
    return Predictions(np.concatenate([p.logits for p in parts]), np.concatenate([p.labels for p in parts]))


def arrays_in(path, **columns):
    """Write the columns under their own names, in whatever format the suffix says."""
    if path.suffix == ".npz":
        np.savez(path, **columns)
    elif path.suffix == ".safetensors":
        from safetensors.numpy import save_file

        save_file({name: np.ascontiguousarray(column) for name, column in columns.items()}, path)
    else:
        import pandas as pd

        frame = pd.DataFrame({name: list(c) if c.ndim == 2 else c for name, c in columns.items()})
        frame.to_parquet(path) if path.suffix == ".parquet" else frame.to_csv(path, index=False)
    return path


# Round trips


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_round_trip_is_exact(tmp_path, suffix, dtype, kind):
    whole = pair(dtype=dtype)
    given_pair = whole if kind == "numpy" else tuple(map(torch.from_numpy, whole))
    save(given_pair, tmp_path / f"a{suffix}")
    back = load(tmp_path / f"a{suffix}")
    same(back, whole._replace(logits=whole.logits.astype(np.float64)) if suffix == ".csv" else whole)
    assert type(back) is Predictions
    assert type(back.logits) is np.ndarray
    back.logits[0, 0] = back.labels[0] = 1  # what is loaded belongs to the caller


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=40)
@given(data=st.data())
def test_any_finite_number_survives(suffix, data):
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    finite = st.floats(allow_nan=False, allow_infinity=False, width=np.dtype(dtype).itemsize * 8)
    logits = data.draw(
        hnp.arrays(dtype, hnp.array_shapes(min_dims=2, max_dims=2, min_side=2, max_side=5), elements=finite)
    )
    labels = data.draw(hnp.arrays(np.int64, len(logits), elements=st.integers(0, logits.shape[1] - 1)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"a{suffix}")
        save((logits, labels), path)
        expected = logits.astype(np.float64) if suffix == ".csv" else logits
        same(load(path), Predictions(expected, labels))
        same(joined(stream(path, rows=2)), Predictions(expected, labels))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_rows(tmp_path, suffix):
    empty = Predictions(np.zeros((0, 4)), np.zeros(0, np.int64))
    save(empty, tmp_path / f"a{suffix}")
    same(load(tmp_path / f"a{suffix}"), empty)
    (part,) = stream(tmp_path / f"a{suffix}")
    same(part, empty)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_any_memory_layout_is_saved_by_rows(tmp_path, suffix):
    whole = pair(n=20)
    path = tmp_path / f"a{suffix}"
    for logits in (np.asfortranarray(whole.logits), np.repeat(whole.logits, 2, axis=1)[:, ::2], whole.logits.tolist()):
        save((logits, whole.labels.tolist()), path)
        same(load(path), whole)
        same(joined(stream(path, rows=3)), whole)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_bfloat16_becomes_float32(tmp_path, suffix):
    logits, labels = (
        torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).bfloat16(),
        torch.tensor([0, 1, 2, 0, 1]),
    )
    save((logits.requires_grad_(), labels), tmp_path / f"a{suffix}")
    back = load(tmp_path / f"a{suffix}")
    assert back.logits.dtype == (np.float64 if suffix == ".csv" else np.float32)
    np.testing.assert_array_equal(back.logits, logits.detach().float().numpy())


def test_safetensors_of_others_in_bfloat16(tmp_path):
    from safetensors.torch import save_file

    logits = torch.tensor([[1.5, -2.0], [0.25, 3.0]], dtype=torch.bfloat16)
    save_file({"logits": logits, "labels": torch.tensor([1, 0], dtype=torch.uint8)}, tmp_path / "a.safetensors")
    expected = Predictions(np.array([[1.5, -2.0], [0.25, 3.0]], np.float32), np.array([1, 0]))
    same(load(tmp_path / "a.safetensors"), expected)


def test_csv_is_what_a_person_would_write(tmp_path):
    save((np.array([[0.1, -2.0], [1e-20, 3.0]], np.float32), [1, 0]), tmp_path / "a.csv")
    assert (tmp_path / "a.csv").read_text() == (
        "logit_0,logit_1,label\n0.10000000149011612,-2.0,1\n9.999999682655225e-21,3.0,0\n"
    )


# Names


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_split_reads_one_half(tmp_path, suffix):
    val, test = pair(5), pair(7, seed=1)
    columns = {
        "val_logits": val.logits,
        "val_labels": val.labels,
        "test_logits": test.logits,
        "test_labels": test.labels,
    }
    path = arrays_in(tmp_path / f"a{suffix}", **columns)
    same(load(path, split="val"), val)
    same(load(path, split="test"), test)
    same(joined(stream(path, rows=2, split="test")), test)
    with pytest.raises(
        ValueError, match=r"a\.\w+: the file must have logits and labels, got .*'val_logits' \(5, 12\)"
    ) as caught:
        load(path)
    assert caught.value.hint is Hint.SPLIT
    assert sorted(caught.value.choices) == ["test", "val"]
    with pytest.raises(ValueError, match="the file must have train_logits and train_labels"):
        load(path, split="train")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors", ".parquet"])
def test_probabilities_only_when_asked_for(tmp_path, suffix):
    probs = np.array([[0.25, 0.75], [0.5, 0.5]])
    path = arrays_in(tmp_path / f"a{suffix}", probs=probs, labels=np.array([1, 0]))
    np.testing.assert_allclose(load(path, probs=True).logits, np.log(probs), rtol=1e-15)
    with pytest.raises(ValueError, match=r"the file must have logits, got .*'probs'.*; say probs=True"):
        load(path)
    with pytest.raises(ValueError, match="probs must hold logits, got probabilities by its name; say probs=True"):
        load(path, logits="probs")


def test_logits_taken_for_probabilities_are_refused(tmp_path):
    save(pair(), tmp_path / "a.npz")
    with pytest.raises(ValueError, match=r"a\.npz: probs must lie in \[0, 1\]"):
        load(tmp_path / "a.npz", probs=True)


def test_zeros_among_probabilities_warn(tmp_path):
    path = arrays_in(tmp_path / "a.npz", probs=np.array([[0.0, 1.0]]), labels=np.array([1]))
    with pytest.warns(UserWarning, match="1 exact zeros"):
        load(path, probs=True)
    # A warning that the caller turns into an error is not the file's fault.
    with pytest.raises(UserWarning, match="1 exact zeros"):
        load(path, probs=True)


def test_npy_of_probabilities(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[0.25, 0.75]]))
    np.save(tmp_path / "a.labels.npy", np.array([1]))
    np.testing.assert_allclose(load(tmp_path / "a.npy", probs=True).logits, np.log([[0.25, 0.75]]))


@pytest.mark.parametrize("suffix", [".npz", ".csv", ".parquet", ".safetensors"])
def test_one_column_a_class_in_the_order_of_numbers(tmp_path, suffix):
    whole = pair(classes=12)
    columns = {f"logit_{k}": whole.logits[:, k] for k in reversed(range(12))}
    path = arrays_in(tmp_path / f"a{suffix}", label=whole.labels, **columns)
    same(load(path), whole)
    same(joined(stream(path, rows=4)), whole)
    reordered = load(path, logits=[f"logit_{k}" for k in reversed(range(12))])
    same(reordered, whole._replace(logits=np.ascontiguousarray(whole.logits[:, ::-1])))


@pytest.mark.parametrize("suffix", [".npz", ".csv", ".parquet"])
def test_probability_columns(tmp_path, suffix):
    path = arrays_in(
        tmp_path / f"a{suffix}",
        prob_0=np.array([0.2]),
        prob_1=np.array([0.8]),
        label=np.array([1]),
        extra=np.array([7]),
    )
    np.testing.assert_allclose(load(path, probs=True).logits, np.log([[0.2, 0.8]]))
    with pytest.raises(ValueError, match=r"the file must have logits, got 'prob_0'.*say probs=True"):
        load(path)


@pytest.mark.parametrize("suffix", [".npz", ".csv", ".parquet"])
def test_other_names(tmp_path, suffix):
    z, y = np.array([0.5, 1.0]), np.array([1, 0])
    path = arrays_in(tmp_path / f"a{suffix}", cat=z, dog=-z, truth=y, labels=1 - y)
    expected = Predictions(np.stack([z, -z], axis=1), y)
    same(load(path, logits=["cat", "dog"], labels="truth"), expected)
    same(load(path, logits=["cat", "dog"]), expected._replace(labels=1 - y))
    with pytest.raises(ValueError, match="the file must have bird and gold, got 'cat'"):
        load(path, logits=["cat", "bird"], labels="gold")
    with pytest.raises(ValueError, match="the file must have logits, got"):
        load(path, logits=[])


def test_numbers_of_columns_have_no_gaps(tmp_path):
    path = arrays_in(tmp_path / "a.csv", logit_0=np.ones(2), logit_2=np.ones(2), label=np.zeros(2, int))
    with pytest.raises(
        ValueError, match=r"a\.csv: columns logit_0 … must be numbered 0\.\.1, got 'logit_0', 'logit_2'"
    ):
        load(path)


def test_many_columns_are_not_all_listed(tmp_path):
    path = arrays_in(tmp_path / "a.csv", **{f"x{k}": np.ones(2) for k in range(1000)})
    with pytest.raises(ValueError, match=r"'x11', … 988 more; name the columns"):
        load(path)


# Tables


@pytest.mark.parametrize("lists", ["list_", "large_list", "fixed"])
def test_parquet_lists(tmp_path, lists):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    whole = pair(n=11, classes=3, dtype=np.float32)
    kind = pa.list_(pa.float32(), 3) if lists == "fixed" else getattr(pa, lists)(pa.float32())
    table = pa.table({"label": whole.labels.astype(np.int16), "logits": pa.array(whole.logits.tolist(), kind)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=4)
    same(load(tmp_path / "a.parquet"), whole)
    same(joined(stream(tmp_path / "a.parquet", rows=3)), whole)


@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        ([[1.0, 2.0], [1.0, 2.0, 3.0]], [0, 1], r"logits must have the same length in each row, got 2\.\.3"),
        ([[1.0, 2.0], None], [0, 1], "logits must have no missing values, got 1"),
        ([[1.0, 2.0], [1.0, None]], [0, 0], "logits must have at least 2 options in each row, got 1 in row 1"),
        ([[1.0, 2.0], [1.0, 2.0]], ["a", "b"], "label must be an array of real numbers"),
        ([["a", "b"], ["c", "d"]], [0, 1], "logits must be an array of real numbers"),
    ],
)
def test_bad_parquet(tmp_path, logits, labels, message):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"logits": logits, "label": labels}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=rf"a\.parquet: {message}"):
        load(tmp_path / "a.parquet")


def test_parquet_whose_classes_change_on_the_way(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"logits": [[1.0, 2.0]] * 4 + [[1.0] * 3] * 4, "label": [0] * 8}), tmp_path / "a.parquet")
    parts = stream(tmp_path / "a.parquet", rows=4)
    next(parts)
    with pytest.raises(ValueError, match="from row 4 on, logits must have 2 classes as before, got 3"):
        next(parts)


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    for call in (lambda: load(tmp_path / "a.parquet"), lambda: save(pair(), tmp_path / "b.parquet")):
        with pytest.raises(ImportError, match=r"pip install 'trueup\[parquet\]'"):
            call()
    assert os.listdir(tmp_path) == ["a.parquet"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.5,2.5,0\n0.5,1,1\n", "the first line must be a header of column names, got '1.5,2.5,0'"),
        ("\n", "the first line must be a header"),
        ("logit_0:logit_1:label\n1:2:0\n", "the file must have logits and labels, got 'logit_0:logit_1:label'"),
        ("logit_0,logit_1\n1,2\n", "the file must have labels, got 'logit_0', 'logit_1'"),
        ("logit_0,logit_1,label\n1,2,0\n1,2\n", "line 3: a line must have 3 fields, got 2"),
        ("logit_0,logit_1,label\n1,2,0,4\n", "line 2: a line must have 3 fields, got 4"),
        ("logit_0,logit_1,label\n1,x,0\n", "line 2: could not convert string to float: 'x'"),
        ("logit_0,logit_1,label\n1,,0\n", "at least 2 options in each row, got 1 in row 0"),
        ("logit_0,logit_1,label\n1,2,cat\n", "line 2, label must be whole numbers, got 'cat'; class_names= names"),
        ("logit_0,logit_1,label\n1,2,1.5\n", r"line 2, label must be whole numbers, got '1\.5'"),
        (f"logit_0,logit_1,label\n1,2,{10**30}\n", "line 2, "),
        ("logit_0,logit_1,label\n1,nan,0\n", "logits must be finite, got nan at"),
        ("logit_0,logit_1,label\n1,2,2\n", r"labels must lie in 0\.\.1, got 2\.\.2"),
        ("logit_0,logit_0,label\n1,2,0\n", "column names must differ, got 'logit_0' twice"),
        ('logit_0,logit_1,label\n"1,2,0\n', "not a readable .csv file: unexpected end of data"),
    ],
)
def test_bad_csv(tmp_path, text, message):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=rf"^{tmp_path}/a\.csv: .*{message}"):
        load(tmp_path / "a.csv")


def test_csv_of_other_tools(tmp_path):
    (tmp_path / "a.csv").write_bytes('\ufeff"label", logit_1,name,logit_0\r\n1,2,"a, b",1\r\n\r\n 0,4,é,3'.encode())
    same(load(tmp_path / "a.csv"), Predictions(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([1, 0])))


def test_errors_in_a_stream_say_where(tmp_path):
    (tmp_path / "a.csv").write_text("logit_0,logit_1,label\n" + "1,2,0\n" * 5 + "1,2,5\n")
    parts = stream(tmp_path / "a.csv", rows=2)
    next(parts), next(parts)
    with pytest.raises(ValueError, match=r"a\.csv: from row 4 on, labels must lie in 0\.\.1, got 0\.\.5"):
        next(parts)


# Streams


@pytest.mark.parametrize("rows", [1, 2, 7, 22, 23, 24, 1000])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_parts_make_the_whole(tmp_path, suffix, rows):
    save(pair(dtype=np.float32), tmp_path / f"a{suffix}")
    parts = list(stream(tmp_path / f"a{suffix}", rows=rows))
    assert [len(part.labels) for part in parts] == [len(range(23)[i : i + rows]) for i in range(0, 23, rows)]
    same(joined(parts), load(tmp_path / f"a{suffix}"))


def test_compressed_npz_streams(tmp_path):
    whole = pair(n=5000, dtype=np.float32)
    np.savez_compressed(tmp_path / "a.npz", **whole._asdict())
    same(joined(stream(tmp_path / "a.npz", rows=999)), whole)


def test_columns_of_a_fortran_npz_cannot_stream(tmp_path):
    whole = pair()
    np.savez(tmp_path / "a.npz", logits=np.asfortranarray(whole.logits), labels=whole.labels)
    same(load(tmp_path / "a.npz"), whole)
    same(joined(stream(tmp_path / "a.npz", rows=23)), whole)
    with pytest.raises(ValueError, match=r"a\.npz: logits is stored column by column \(Fortran order\)"):
        next(stream(tmp_path / "a.npz", rows=22))


def test_fortran_and_big_endian_npy(tmp_path):
    whole = pair(dtype=np.float32)
    np.save(tmp_path / "a.labels.npy", whole.labels.astype(">i2"))
    for logits in (np.asfortranarray(whole.logits), whole.logits.astype(">f4")):
        np.save(tmp_path / "a.npy", logits)
        same(load(tmp_path / "a.npy"), whole)
        same(joined(stream(tmp_path / "a.npy", rows=5)), whole)


def test_memory_map_stays_on_disk(tmp_path):
    path, whole = tmp_path / "a.npy", pair(dtype=np.float32)
    save(whole, path)
    mapped, loaded = load(path, mmap=True), load(path)
    assert isinstance(mapped.logits, np.memmap)
    assert not mapped.logits.flags.writeable
    assert all(isinstance(part.logits, np.memmap) for part in stream(path, rows=5))
    same(mapped, whole)
    with open(path, "r+b") as file:  # both see the file, only one still looks at it
        file.seek(-4, os.SEEK_END)
        file.write(np.float32(77).tobytes())
    assert mapped.logits[-1, -1] == 77
    same(loaded, whole)
    mapped.labels[0] = loaded.labels[0] = 1  # labels are few and belong to the caller
    for suffix in (".npz", ".csv", ".parquet", ".safetensors"):
        save(whole, tmp_path / f"a{suffix}")
        with pytest.raises(ValueError, match=r"mmap=True needs a \.npy file"):
            load(tmp_path / f"a{suffix}", mmap=True)


def test_what_is_loaded_from_safetensors_is_no_view_of_the_file(tmp_path):
    path, whole = tmp_path / "a.safetensors", pair()
    save(whole, path)
    loaded, parts = load(path), list(stream(path, rows=5))
    with open(path, "r+b") as file:
        file.write(bytes(path.stat().st_size))
    same(loaded, whole)
    same(joined(parts), whole)


@pytest.mark.parametrize("rows", [0, -1, 2.0, True, None])
def test_rows_are_a_positive_number(tmp_path, rows):
    save(pair(), tmp_path / "a.npz")
    with pytest.raises(ValueError, match="rows must be a positive whole number"):
        stream(tmp_path / "a.npz", rows=rows)


def private_memory():
    """Bytes this process holds that no file backs: this also counts what arrow and torch ask for themselves."""
    try:
        status = Path("/proc/self/status").read_text()
    except FileNotFoundError:
        return 0
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


@pytest.mark.parametrize(
    ("suffix", "n", "rows", "most"),
    [
        (".csv", 20_000, 500, 0.5e6),  # 1.6 MB of numbers, many more of text
        *((suffix, 800_000, 20_000, 12e6) for suffix in BINARY),  # 64 MB
    ],
)
def test_a_stream_takes_the_memory_of_a_few_parts(tmp_path, suffix, n, rows, most):
    rng = np.random.default_rng(0)
    save((rng.normal(size=(n, 10)), rng.integers(0, 10, n)), tmp_path / f"a{suffix}")
    for _ in stream(tmp_path / f"a{suffix}", rows=n // 10):  # pools and caches fill before the measure
        break
    before, grown, seen = private_memory(), 0, 0
    tracemalloc.start()
    try:
        for part in stream(tmp_path / f"a{suffix}", rows=rows):
            seen += len(part.labels)
            if seen % (10 * rows) == 0:
                grown = max(grown, private_memory() - before)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert seen == n
    assert peak < most
    assert grown < most + 4e6


# What cannot be read


def complain(path, *, match=None, **options):
    """Loading and streaming both raise one ValueError that begins with the file's name."""
    for read in (lambda: load(path, **options), lambda: list(stream(path, rows=2, **options))):
        with pytest.raises(ValueError, match=match) as caught:
            read()
        assert str(caught.value).startswith(f"{path}: ")
        assert "\n" not in str(caught.value)
        assert type(caught.value) in (ValueError, InputError)
        assert caught.value.__cause__ is None
        assert caught.value.__suppress_context__ or caught.value.__context__ is None


@pytest.mark.parametrize(("message", "reason"), [("two\n  lines", "two lines"), ("", "RuntimeError")])
def test_any_failure_of_a_parser_is_told_in_one_line(tmp_path, monkeypatch, message, reason):
    def fails(path):
        raise RuntimeError(message)

    monkeypatch.setitem(formats.FORMATS, ".npz", (fails, None))
    (tmp_path / "a.npz").write_bytes(b"?")
    complain(tmp_path / "a.npz", match=rf"a\.npz: not a readable \.npz file: {reason}$")


def test_npy_with_bytes_left_over(tmp_path):
    save(pair(n=6, classes=3), tmp_path / "a.npy")
    with open(tmp_path / "a.npy", "ab") as file:
        file.write(b"more")
    complain(tmp_path / "a.npy", match=r"a\.npy \(6, 3\) float64 takes 144 bytes, got 148")


@pytest.mark.parametrize("suffix", BINARY)
def test_truncated_at_every_length(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    save(pair(n=6, classes=3), path)
    for file in formats.file_list(path):
        whole = file.read_bytes()
        for length in [*range(0, len(whole), 1 + len(whole) // 80), len(whole) - 1]:
            file.write_bytes(whole[:length])
            complain(path)
        file.write_bytes(whole)
    same(load(path), pair(n=6, classes=3))


def test_truncated_csv_never_loses_more_than_its_end(tmp_path):
    path, whole = tmp_path / "a.csv", pair(n=6, classes=3)
    save(whole, path)
    text, ends = path.read_bytes(), set()
    for length in range(len(text)):
        path.write_bytes(text[:length])
        # A cut after a whole line, or after its last field, leaves a valid file that is shorter.
        if b"\n" in (text[length - 1 : length], text[length : length + 1]):
            part = load(path)
            ends.add(len(part.labels))
            same(part, Predictions(*(column[: len(part.labels)] for column in whole)))
        elif (
            text[:length].endswith(b",")
            and text[:length].rpartition(b"\n")[2].count(b",") == 3
            and b"\n" in text[:length]
        ):
            with pytest.warns(UserWarning, match="1 row was left out, without a label"):
                load(path)
        else:
            complain(path)
    assert ends == set(range(7))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_foreign_content(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    others = {}
    for other in SUFFIXES:
        if other != suffix:
            save(pair(n=6), tmp_path / f"other{other}")
            others[other] = (tmp_path / f"other{other}").read_bytes()
    others |= {
        "empty": b"",
        "text": b"hello, world\n" * 100,
        "html": b"<!doctype html><html>404</html>",
        "zeros": bytes(5000),
        "noise": np.random.default_rng(0).bytes(5000),
        "pickle": pickle.dumps({"logits": np.zeros((3, 2)), "labels": [0, 1, 0]}),
        "lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n",
    }
    if suffix == ".npy":
        np.save(tmp_path / "a.labels.npy", np.zeros(6, int))
    for content in others.values():
        path.write_bytes(content)
        complain(path)


def outcome(path):
    try:
        load(path)
    except ValueError as error:
        return str(error)
    return "read"


@pytest.mark.parametrize("suffix", BINARY)
def test_damaged_bytes_never_raise_anything_else(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    save(pair(n=6, classes=3), path)
    whole, rng = path.read_bytes(), np.random.default_rng(0)
    for at in rng.integers(0, len(whole), 120):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ rng.integers(1, 256)]) + whole[at + 1 :])
        assert outcome(path).startswith(("read", f"{path}: "))


@pytest.mark.parametrize("rows", [7, 40])
def test_a_damaged_number_in_a_compressed_npz(tmp_path, rows):
    whole = pair(n=40, classes=3)
    np.savez_compressed(tmp_path / "a.npz", **whole._asdict())
    with zipfile.ZipFile(tmp_path / "a.npz") as archive:
        central = archive.start_dir
    data = bytearray((tmp_path / "a.npz").read_bytes())
    at = data.index(b"PK\x01\x02", central) + 16  # the checksum that the archive's directory gives for its first member
    data[at] ^= 1
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.npz: not a readable \.npz file: Bad CRC-32"):
        list(stream(tmp_path / "a.npz", rows=rows))


@pytest.mark.parametrize("suffix", [".npz", ".parquet"])
def test_a_damaged_number_is_noticed_by_its_checksum(tmp_path, suffix):
    path, whole = tmp_path / f"a{suffix}", pair(n=40, classes=3)
    save(whole, path)
    data = path.read_bytes()
    at = data.index(whole.logits[20].tobytes())
    path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    complain(path, match="(?i)crc")


class Payload:
    def __reduce__(self):
        return os._exit, (3,)


def test_pickles_are_never_read(tmp_path):
    objects = np.array([[Payload(), 1], [2, 3]], dtype=object)
    np.savez(tmp_path / "a.npz", logits=objects, labels=np.array([0, 1]), notes=objects)
    complain(tmp_path / "a.npz", match="logits holds pickled Python objects; pickles are never read")
    np.savez(tmp_path / "b.npz", logits=np.zeros((3, 2)), labels=np.array([0, 1, 0]), notes=objects)
    assert load(tmp_path / "b.npz").logits.shape == (3, 2)
    np.save(tmp_path / "a.npy", objects)
    np.save(tmp_path / "a.labels.npy", np.array([0, 1]))
    complain(tmp_path / "a.npy", match=r"a\.npy holds pickled Python objects")
    np.save(tmp_path / "a.npy", np.zeros((2, 2)))
    np.save(tmp_path / "a.labels.npy", np.array([Payload(), 1]))
    complain(tmp_path / "a.npy", match=r"a\.labels\.npy holds pickled Python objects")


@pytest.mark.parametrize("suffix", [".pt", ".pth", ".pkl"])
def test_suffixes_of_pickles(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    torch.save(pair()._asdict(), path)
    before = path.read_bytes()
    for call in (lambda: load(path), lambda: stream(path), lambda: save(pair(), path)):
        with pytest.raises(ValueError, match=r"must be one of \.npz .*; pickles are never read or written"):
            call()
    assert path.read_bytes() == before


def test_unknown_suffix_and_missing_file(tmp_path):
    (tmp_path / "a.h5").touch()
    (tmp_path / "d.npz").mkdir()
    np.save(tmp_path / "lone.npy", np.zeros((2, 2)))
    with pytest.raises(ValueError, match=r"a\.h5: the suffix must be one of .*, got '\.h5'$"):
        load(tmp_path / "a.h5")
    with pytest.raises(ValueError, match=r"d\.npz: must be a file, but is none"):
        load(tmp_path / "d.npz")
    for suffix in SUFFIXES:
        for read in (load, stream):
            with pytest.raises(FileNotFoundError, match=rf"none\{suffix}: no such file"):
                read(tmp_path / f"none{suffix}")
    with pytest.raises(FileNotFoundError, match=r"the labels of lone\.npy must be next to it"):
        load(tmp_path / "lone.npy")
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        save(pair(), tmp_path / "nowhere" / "a.npz")


@pytest.mark.parametrize("suffix", [".npz", ".safetensors"])
def test_wrong_shapes_and_values(tmp_path, suffix):
    path, (z, y) = tmp_path / f"a{suffix}", pair(n=6, classes=3)

    def refused(match, **columns):
        complain(arrays_in(path, **columns), match=match)

    refused(r"as many rows as each other, got logits \(6, 3\), labels \(5,\)", logits=z, labels=y[:5])
    refused(r"as many rows", logits=np.array(1.0), labels=y)
    refused(r"logits must have shape \(n, classes\), got", logits=y.astype(float), labels=y)
    refused(r"labels must have shape", logits=z, labels=z)
    refused(r"labels must be integers, got 0.5 in row 0", logits=z, labels=y + 0.5)
    refused(r"logits must be floating point", logits=z.astype(int), labels=y)
    refused(r"labels must lie in 0\.\.2", logits=z, labels=y + 3)
    refused(r"logits must be finite, got nan", logits=np.where(z == z[0, 0], np.nan, z), labels=y)
    refused(r"the file must have logits and labels, got 'other' \(6, 3\)", other=z)


def test_npz_that_lies_about_its_size(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        for name, shape in (("logits", (10**15, 3)), ("labels", (10**15,))):
            with archive.open(f"{name}.npy", "w") as file:
                header = {"descr": "<f8", "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(file, header)
    complain(tmp_path / "a.npz", match="takes 24000000000000000 bytes, got 0")
    (tmp_path / "b.npz").write_bytes(b"PK\x05\x06" + bytes(18))
    complain(tmp_path / "b.npz", match="the file must have logits and labels, got nothing")


# Saving is all or nothing


class Stop(BaseException):
    """Like a KeyboardInterrupt: no ordinary except clause catches it."""


def interrupted_write(chunks, *paths):
    paths[0].write_bytes(b"half")
    raise Stop


def interrupt(monkeypatch, where, suffix):
    def stop(*_):
        raise Stop

    if where == "write":
        monkeypatch.setitem(formats.FORMATS, suffix, (formats.FORMATS[suffix][0], interrupted_write))
    else:
        monkeypatch.setattr(os, where, stop)


@pytest.mark.parametrize("where", ["write", "fsync", "replace"])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_interrupted_save_changes_nothing(tmp_path, monkeypatch, suffix, where):
    path, old, new = tmp_path / f"a{suffix}", pair(n=6), pair(n=9, seed=1)
    save(old, path)
    listed = sorted(os.listdir(tmp_path))
    with monkeypatch.context() as patch:
        interrupt(patch, where, suffix)
        for target in (path, tmp_path / f"b{suffix}"):
            with pytest.raises(Stop):
                save(new, target)
    assert sorted(os.listdir(tmp_path)) == listed
    same(load(path), old)
    save(new, path)
    same(load(path), new)
    assert sorted(os.listdir(tmp_path)) == listed


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_file_and_folder_reach_the_disk_in_order(tmp_path, monkeypatch, suffix):
    events = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda h: (events.append(Path(os.readlink(f"/proc/self/fd/{h}")).suffix), sync(h)))
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append("replace"), replace(a, b)))
    if not Path("/proc/self/fd").exists():
        pytest.skip("needs /proc to see which file is synchronised")
    save(pair(), tmp_path / f"a{suffix}")
    count = len(formats.file_list(tmp_path / f"a{suffix}"))
    assert events == [".tmp"] * count + ["replace"] * count + [""]


def test_a_file_system_that_refuses_to_synchronise_a_folder_keeps_the_file(tmp_path, monkeypatch):
    sync = os.fsync

    def refusing(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(handle)

    monkeypatch.setattr(os, "fsync", refusing)
    save(pair(), tmp_path / "a.npz")
    same(load(tmp_path / "a.npz"), pair())


def test_save_checks_the_pair(tmp_path):
    with pytest.raises(ValueError, match="labels must lie in"):
        save(([[1.0, 2.0]], [2]), tmp_path / "a.npz")
    assert not os.listdir(tmp_path)


def test_save_keeps_links_and_permissions(tmp_path):
    (tmp_path / "real").mkdir()
    path, link = tmp_path / "real" / "a.npz", tmp_path / "link.npz"
    save(pair(n=3), path)
    path.chmod(0o640)
    link.symlink_to(path)
    save(pair(n=4), link)
    assert link.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    assert len(load(path).labels) == 4


def test_a_file_can_be_rewritten_from_its_own_map(tmp_path):
    save(pair(), tmp_path / "a.npy")
    save(load(tmp_path / "a.npy", mmap=True), tmp_path / "a.npy")
    same(load(tmp_path / "a.npy"), pair())


# Real files


@pytest.fixture
def logits_folder():
    if "TRUEUP_DATA" not in os.environ:
        pytest.skip("set TRUEUP_DATA to the folder of real data")
    return Path(os.environ["TRUEUP_DATA"], "logits")


@pytest.mark.parametrize(
    ("name", "split", "rows", "accuracy"),
    [
        ("cifar10_densenet40", "val", 5000, 0.9382),
        ("cifar10_densenet40", "test", 10000, 0.9242),
        ("cifar10_resnet20", "val", 5000, 0.9164),
        ("cifar10_resnet20", "test", 5000, 0.9182),
        ("cifar10_resnet32", "val", 5000, 0.9244),
        ("cifar10_resnet32", "test", 5000, 0.9282),
    ],
)
def test_real_logits(logits_folder, name, split, rows, accuracy):
    whole = load(logits_folder / f"{name}.npz", split=split)
    assert whole.logits.shape == (rows, 10)
    assert np.mean(whole.logits.argmax(1) == whole.labels) == pytest.approx(accuracy, abs=5e-5)
    same(joined(stream(logits_folder / f"{name}.npz", split=split, rows=777)), whole)
    with pytest.raises(ValueError, match="choose the split val or test"):
        load(logits_folder / f"{name}.npz")


@pytest.mark.filterwarnings("ignore:.*exact zeros:UserWarning")
@pytest.mark.parametrize(
    ("name", "classes", "accuracy"),
    [
        ("cifar10_lenet5_probs", 10, 0.5308),
        ("cifar10_wrn16x4_probs", 10, 0.9109),
        ("cifar100_wrn16x4_probs", 100, 0.7543),
        ("cifar100_lenet5_probs", 100, 0.1246),
    ],
)
def test_real_probabilities(logits_folder, name, classes, accuracy):
    whole = load(logits_folder / f"{name}.npz", probs=True)
    assert whole.logits.shape == (10000, classes)
    assert np.mean(whole.logits.argmax(1) == whole.labels) == pytest.approx(accuracy, abs=5e-5)
    with pytest.raises(ValueError, match="say probs=True"):
        load(logits_folder / f"{name}.npz")


@pytest.mark.filterwarnings("ignore:.*exact zeros:UserWarning")
def test_seven_networks_in_one_file(logits_folder):
    path = logits_folder / "cifar10_seven_nets_probs.npz"
    with pytest.raises(
        ValueError, match=r"the file must have logits, got 'labels' \(10000,\) uint8, 'densenet121' \(10000, 10\)"
    ):
        load(path)
    accuracies = [
        np.mean(net.logits.argmax(1) == net.labels)
        for name in ("densenet121", "googlenet", "mobilenet_v2", "resnet18", "resnet50", "vgg11_bn", "vgg16_bn")
        for net in [load(path, logits=name, probs=True)]
    ]
    assert 0.895 < min(accuracies) < max(accuracies) < 0.935
    assert len(set(accuracies)) == 7


@pytest.mark.filterwarnings("ignore:.*exact zeros")
@pytest.mark.parametrize("suffix", [".npz", ".csv", ".parquet"])
def test_zeros_become_the_same_in_every_part_of_a_stream(tmp_path, suffix):
    votes = np.array([[1.0, 0.0], [0.6, 0.4], [0.0, 1.0], [0.9, 0.1]])
    path = tmp_path / f"forest{suffix}"
    save((votes, [0, 1, 1, 0]), path)
    whole = load(path, probs=True)
    assert np.exp(whole.logits).min() == pytest.approx(0.05)
    parts = list(stream(path, rows=1, probs=True))
    assert np.array_equal(np.concatenate([part.logits for part in parts]), whole.logits)


def test_logits_without_labels_may_be_written_as_probabilities_or_confidences(tmp_path):
    path = tmp_path / "new.npz"
    np.savez(path, probs=np.array([[0.75, 0.25], [0.5, 0.5]]), stated=np.array([0.75, 0.5]))
    assert np.exp(load_logits(path, probs=True)) == pytest.approx(np.array([[0.75, 0.25], [0.5, 0.5]]))
    with open_predictions(path, confidence="stated") as file:
        assert np.exp(file.load_logits())[:, 1] == pytest.approx([0.75, 0.5])
