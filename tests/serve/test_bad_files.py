import io
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
from serving import npz, of, overconfident, served, upload, uploaded


class Bomb:
    def __reduce__(self):
        return exec, ("raise SystemExit('a pickle was run')",)


def zipped(method=zipfile.ZIP_DEFLATED, **members):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return file.getvalue()


def npy(array, **options):
    file = io.BytesIO()
    np.save(file, array, **options)
    return file.getvalue()


def promised(shape, dtype="<f4"):
    """The header of an array that is not there."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": dtype, "fortran_order": False, "shape": shape})
    return file.getvalue()


def tensors(**shapes):
    header, at = {}, 0
    for name, (dtype, shape, size) in shapes.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(at)


LONG = b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**31) + bytes(100)
GOOD = of(overconfident())
Z, Y = np.zeros((4, 3)), np.zeros(4, int)
NAN = np.array([[np.nan, 0.0], [0.0, 1.0]])

BAD = {
    "truncated npz": ("a.npz", GOOD[:-100], "not a readable .npz file"),
    "half an npz": ("a.npz", GOOD[: len(GOOD) // 2], "not a readable .npz file"),
    "damaged npz": ("a.npz", GOOD[:200] + bytes(100) + GOOD[300:], "logits is not an array: its header makes no sense"),
    "no npz": ("a.npz", b"hello", "not a readable .npz file"),
    "empty": ("a.npz", b"", "the file is empty"),
    "empty csv": ("a.csv", b"", "the file is empty"),
    "empty npy": ("a.npy", b"", "the file is empty"),
    "no rows": ("a.csv", b"logit_0,logit_1,label\n", "there are no rows"),
    "wrong shape": ("a.npz", npz(logits=np.zeros((4, 3, 2)), labels=Y), "must have shape (n, classes), got (4, 3, 2)"),
    "rows differ": ("a.npz", npz(logits=Z, labels=Y[:3]), "as many rows as each other"),
    "NaN": ("a.npz", npz(logits=NAN, labels=Y[:2]), "logits must be finite, got nan at [0, 0]"),
    "labels out of range": ("a.npz", npz(logits=Z, labels=Y + 7), "labels must lie in 0..2, got 7..7"),
    "real labels": ("a.npz", npz(logits=Z, labels=Y + 0.5), "labels must be integers"),
    "one class": ("a.npz", npz(logits=Z[:, :1], labels=Y), "at least 2 classes"),
    "other names": (
        "a.npz",
        npz(scores=Z, truth=Y),
        "must have logits and labels, got 'scores' (4, 3) float64",
    ),
    "halves differ": (
        "a.npz",
        npz(val_logits=Z, val_labels=Y, test_logits=Z[:, :2], test_labels=Y),
        "val and test must have equally many classes",
    ),
    "wrong suffix": (
        "a.exe",
        GOOD,
        ".npz .npy .csv .csv.gz .jsonl .jsonl.gz .parquet .safetensors, got '.exe'",
    ),
    "no suffix": ("npz", GOOD, "the suffix must be one of"),
    "a pickle": ("a.pkl", pickle.dumps(Bomb()), "the suffix must be one of"),
    "a pickle inside": (
        "a.npz",
        zipped(logits=npy(np.array([Bomb()]), allow_pickle=True), labels=npy(Y[:1])),
        "pickles are never",
    ),
    "a pickle for an array": ("a.npz", zipped(logits=pickle.dumps(Bomb()), labels=npy(Y)), "not an array"),
    "a pickled npy": ("a.npy", npy(np.array([Bomb()]), allow_pickle=True) + npy(Y), "pickles are never read"),
    "npy without labels": ("a.npy", npy(Z), "choose x.npy and x.labels.npy together"),
    "truncated npy": ("a.npy", npy(Z)[:-9], "cut off"),
    "a promise in npy": ("a.npy", promised((10**6, 10**6)), "cut off"),
    "a promise in npz": (
        "a.npz",
        zipped(logits=promised((50_000, 1000)), labels=npy(np.zeros(50_000, int))),
        "takes 200000000 bytes, got 0",
    ),
    "a great promise in npz": (
        "a.npz",
        zipped(logits=promised((10**6, 10**4)), labels=npy(Y)),
        "as many rows as each other",
    ),
    "a long header in npz": ("a.npz", zipped(logits=LONG, labels=npy(Y)), "at most 10,000 bytes, got 2,147,483,648"),
    "many columns in npz": (
        "a.npz",
        npz(logits=np.zeros((2, 10**6), np.int8), labels=Y[:2]),
        "1,000,000 classes; at most",
    ),
    "many columns in csv": ("a.csv", b",".join(b"c%d" % i for i in range(10**6)) + b"\n", "… 999988 more"),
    "a long line": ("a.csv", b"logit_0,logit_1,label\n" + b"1" * 10**6, "field larger than field limit"),
    "a gap among labels": (
        "a.csv",
        b"logit_0,logit_1,label\n1,2,0\n1,2,\n",
        "label must be present in every row, got 1 rows",
    ),
    "broken jsonl": ("a.jsonl", b'{"logits": [1, 2], "label": 0}\n{"logits": [1\n', "line 2 is not JSON"),
    "ragged csv": ("a.csv", b"logit_0,logit_1,label\n1,2,0\n1,2\n", "line 3: a line must have 3 fields, got 2"),
    "words in csv": ("a.csv", b"logit_0,logit_1,label\n1,two,0\n", "could not convert string to float: 'two'"),
    "no text": ("a.csv", b"\xff\xfe\x00\x01\n1,2,3\n", "not a readable .csv file"),
    "no parquet": ("a.parquet", b"PAR1" + bytes(40), "not a readable .parquet file"),
    "a long footer": ("a.parquet", b"PAR1" + struct.pack("<I", 2**31) + b"PAR1", "not a readable .parquet file"),
    "no safetensors": ("a.safetensors", b"\xff" * 50, "not a readable .safetensors file"),
    "a safe header without data": ("a.safetensors", tensors(logits=("F32", [10, 2], 0)), "not a readable .safetensors"),
    "a safe promise": ("a.safetensors", tensors(logits=("F32", [10**9, 2], 0)), "not a readable .safetensors file"),
    "other compression": ("a.npz", zipped(zipfile.ZIP_BZIP2, logits=npy(Z), labels=npy(Y)), "one that NumPy writes"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_told_and_the_server_lives(client, case):
    name, body, told = BAD[case]
    answer = upload(client, body, name)
    assert answer.status_code == 409, answer.text
    assert list(answer.json()) == ["error"]
    message = answer.json()["error"]
    assert told in message
    assert tempfile.gettempdir() not in message
    assert "upload." not in message
    assert len(message) < 600
    assert upload(client, GOOD).status_code == 201


P = np.array([[0.9, 0.1, 0.0], [0.2, 0.7, 0.1]] * 2)
PROBS = "tick “Probabilities, not logits” to read"
WORDS = {
    "a score": (npz(logits=Z[:, 0], labels=Y), {}, "a binary score x needs two columns in the file, 0 and x"),
    "tokens": (npz(logits=Z[:, None], labels=Y[:, None]), {}, "the file must have one row per token or pixel"),
    "ignored": (npz(logits=Z, labels=Y - 100), {}, "leave rows to be ignored out of the file"),
    "logits as probabilities": (npz(logits=Z - 1, labels=Y), {"probs": True}, "untick “Probabilities, not logits” if"),
    "logarithms of zero": (npz(logits=np.full((4, 3), -np.inf), labels=Y), {}, "send probabilities with exact zeros"),
    "named probabilities": (npz(probs=P, labels=Y), {}, PROBS),
    "chosen probabilities": (npz(probs=P, labels=Y), {"logits": "probs"}, PROBS),
    "halves": (npz(a_logits=Z, a_labels=Y), {}, "; enter their names under “What is in the file?”"),
}


@pytest.mark.parametrize("case", WORDS)
def test_the_page_speaks_of_its_own_boxes(client, case):
    body, options, told = WORDS[case]
    message = upload(client, body, **options).json()["error"]
    assert told in message
    assert not re.search(r"from_|flatten|probs=|split=|True", message)
    page = client.get("/").text
    assert all(box in page for box in re.findall("“(.*?)”", message))


def test_a_file_that_needs_too_much_memory_ends_its_reader_alone():
    bomb = npz(logits=np.zeros((2_000_000, 30)), labels=np.zeros(2_000_000, int))  # a thousandfold of its size
    with served(reader_bytes=400 << 20, rows=10**7) as client:
        answer = upload(client, bomb)
        assert (answer.status_code, answer.json()["error"]) == (
            413,
            "net.npz: the file needs more memory than the limit of 0.391 GB",
        )
        assert upload(client, GOOD).status_code == 201


def test_a_file_that_takes_too_long_ends_its_reader_alone(tmp_path):
    from starlette.exceptions import HTTPException

    path = tmp_path / "net.npz"
    path.write_bytes(GOOD)
    with pytest.raises(HTTPException) as caught:
        read_with(path, reader_seconds=0.01)
    assert caught.value.status_code == 413
    assert caught.value.detail == "net.npz: reading the file takes longer than the limit of 0.01 seconds"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.skipif(shutil.which("ps") is None, reason="there is no ps here")
def test_memory_is_watched_where_a_process_cannot_limit_its_own(tmp_path, monkeypatch):
    from starlette.exceptions import HTTPException

    from trueup.serve import uploads

    monkeypatch.setattr(uploads, "sys", SimpleNamespace(platform="darwin", executable=sys.executable))
    path = tmp_path / "net.npz"
    path.write_bytes(GOOD)
    assert len(read_with(path).val.labels) == 400
    monkeypatch.setattr(uploads, "WATCH_SECONDS", 0.001)
    resident = uploads._resident_bytes
    assert resident(os.getpid()) > 1 << 20
    monkeypatch.setattr(uploads, "_resident_bytes", lambda pid: resident(pid) + (1 << 30) + 1)
    with pytest.raises(HTTPException) as caught:
        read_with(path, reader_bytes=1 << 30)
    assert "needs more memory than the limit" in caught.value.detail


def test_the_reader_imports_no_torch():
    code = "import sys, trueup.serve.upload_reader; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def read_with(path, **settings):
    from trueup.serve import uploads
    from trueup.serve.settings import Settings

    return uploads.read(path, path.name, uploads.Options(), Settings(**settings))


def test_rows_are_limited_in_every_format(tmp_path):
    pytest.importorskip("pyarrow")
    from trueup import save

    pair = overconfident(rows=30)
    for suffix in (".npz", ".csv", ".parquet", ".safetensors"):
        path = tmp_path / f"net{suffix}"
        save(pair, path)
        read_with(path, rows=30, n_classes=3, numbers=90)
        for limit in ({"rows": 29}, {"numbers": 80}, {"n_classes": 2}):
            with pytest.raises(ValueError, match=rf"^net{suffix}: logit\w* has .*; at most .* are accepted"):
                read_with(path, **limit)


def test_a_column_of_lists_counts_its_numbers(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "net.parquet"
    lists = pa.array([[0.0] * 500] * 40)  # equal numbers take hardly any room in the file
    pq.write_table(pa.table({"logits": lists, "label": [0] * 40}), path)
    assert read_with(path).val.logits.shape == (40, 500)
    with pytest.raises(ValueError, match=r"net.parquet: logits has 500 classes; at most 499 are accepted"):
        read_with(path, n_classes=499)


def test_text_is_no_numbers(client, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    def sent(**columns):
        path = tmp_path / "net.parquet"
        pq.write_table(pa.table({"logit_0": [0.0, 1.0], "logit_1": [1.0, 0.0], **columns}), path)
        return upload(client, path.read_bytes(), name="net.parquet")

    assert sent(labels=[0, 1], file=["a.png", "b.png"]).status_code == 201
    assert sent(labels=[True, False]).status_code == sent(labels=pa.array([0, 1]).dictionary_encode()).status_code
    for columns, name in (
        ({"labels": ["9" * 1000] * 2}, "labels"),
        ({"label": [b"9", b"9"]}, "label"),
        ({"labels": [0, 1], "logits": [["a", "b"]] * 2}, "logits"),
        ({"labels": [0, 1], "logit_2": ["a", "b"]}, "logit_2"),
    ):
        answer = sent(**columns)
        assert answer.status_code == 409
        assert answer.json()["error"].startswith(f"net.parquet: {name} must be an array of real numbers, got ")


def test_probabilities_taken_for_logits_are_rejected(client):
    p = np.array([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5], [0.3, 0.7], [0.6, 0.4]])
    labels = np.array([0, 1, 0, 1, 0])
    answer = upload(client, npz(logits=p, labels=labels))
    assert answer.status_code == 409
    assert "logits must not be probabilities" in answer.json()["error"]
    assert "tick “Probabilities, not logits”" in answer.json()["error"]
    assert not uploaded(client, npz(logits=4 * p, labels=labels))["notes"]


def test_labels_beside_halves_are_the_whole(client):
    found = uploaded(client, npz(logits=Z, labels=Y, val_labels=Y))
    assert found["rows"] == 4
    assert uploaded(client, npz(test_logits=Z, test_labels=Y))["rows"] == 4


def test_an_interrupted_upload_leaves_nothing(monkeypatch, tmp_path):
    import socket
    import time

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with served(patience=0.3) as client:
        head = b"POST /api/upload?name=a.npz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n"
        for hang_up in (True, False):
            with socket.create_connection(("127.0.0.1", client.base_url.port)) as wire:
                wire.sendall(head + bytes(5000))
                for _ in range(3000):
                    if list(tmp_path.rglob("upload.npz")):
                        break
                    time.sleep(0.01)
                else:
                    raise AssertionError("nothing arrived")
                if not hang_up:
                    wire.settimeout(600)
                    assert b"408" in wire.recv(1000)
            for _ in range(3000):
                if not list(tmp_path.iterdir()):
                    break
                time.sleep(0.01)
            assert not list(tmp_path.iterdir())
        assert upload(client, GOOD).status_code == 201
        assert not list(tmp_path.iterdir())
