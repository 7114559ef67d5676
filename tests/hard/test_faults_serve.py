import socket
import struct
import subprocess
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

serving = pytest.importorskip("serve.serving", reason="the web page needs fastapi: pip install 'trueup[serve]'")
served, npz, uploaded, upload = serving.served, serving.npz, serving.uploaded, serving.upload

RNG = np.random.default_rng(0)
BODY = npz(logits=RNG.normal(size=(2000, 5)), labels=RNG.integers(0, 5, 2000))
RESET = struct.pack("ii", 1, 0)


def wire_to(client):
    return socket.create_connection(("127.0.0.1", client.base_url.port), timeout=1200)


def head(length, name="net.npz"):
    return f"POST /api/upload?name={name} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n".encode()


def emptied(folder):
    """Whether the folder gets empty: the server needs a moment to notice that somebody has gone."""
    for _ in range(6000):
        if not list(folder.iterdir()):
            return True
        time.sleep(0.01)
    return False


def test_cut_uploads(monkeypatch, tmp_path, effort, tell):
    """Uploads to `trueup serve` end at a random byte: the connection is closed, reset or half closed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    rng = np.random.default_rng(0)
    with served(patience=5) as client:

        def cut(at, how):
            with wire_to(client) as wire:
                wire.sendall(head(len(BODY)) + BODY[:at])
                if how == "half closed":
                    wire.shutdown(socket.SHUT_WR)
                    return wire.recv(1000)[:15]
                time.sleep(0.01)
                if how == "reset":
                    wire.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                return b""

        ways = [("closed", "reset", "half closed")[i % 3] for i in range(30 * effort)]
        with ThreadPoolExecutor(8) as threads:
            answers = list(threads.map(cut, rng.integers(0, len(BODY), len(ways)), ways))
        assert not any(b" 2" in answer for answer in answers), answers
        assert emptied(tmp_path), "temporary files are left"
        limits = client.get("/api/limits")
        assert limits.status_code == 200
        found = uploaded(client, BODY)
        assert found["rows"] == 2000
        assert emptied(tmp_path)
    tell(
        "faults",
        f"{len(ways)} uploads cut off, 8 at a time: none taken for a file, no temporary file left; the next is taken",
    )


def test_dripping_uploads(monkeypatch, tmp_path, tell):
    """An upload to `trueup serve` stands still, or comes a byte at a time to hold its place for ever."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ended = {}
    with served(patience=0.4, uploads=2) as client:

        def slowly(pause):
            began = time.monotonic()
            with wire_to(client) as wire:
                wire.sendall(head(len(BODY)) + BODY[:100])
                wire.settimeout(pause)
                for byte in BODY[100:200]:
                    try:
                        answer = wire.recv(1000)
                    except TimeoutError:
                        wire.sendall(bytes([byte]))
                    else:
                        return answer, time.monotonic() - began
            raise AssertionError("it may go on for ever")

        with ThreadPoolExecutor(2) as threads:
            for pause, (answer, seconds) in zip((5.0, 0.05), threads.map(slowly, (5.0, 0.05)), strict=True):
                assert b"408" in answer.split(b"\r\n")[0], answer
                ended[pause] = seconds
        assert emptied(tmp_path)
        assert upload(client, BODY).status_code == 201
    tell(
        "faults",
        f"with 0.4 s of patience, ended by 408 after {ended[5.0]:.1f} s and {ended[0.05]:.1f} s; no file left; the "
        "next is taken",
    )


def test_upload_to_a_full_disk(monkeypatch, tmp_path, tell):
    """`trueup serve` has no space left where uploads arrive."""
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", tmp_path], capture_output=True, text=True, check=False
    )
    if made.returncode:
        pytest.skip(f"a small disk needs the right to mount one: {made.stderr.strip()}")
    try:
        with served() as client:
            monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
            answers = [upload(client, BODY) for _ in range(3)]
            assert {answer.status_code for answer in answers} == {507}
            assert "no space left" in answers[0].text
            assert emptied(tmp_path)
            small = npz(logits=np.eye(3), labels=np.arange(3))
            assert uploaded(client, small)["rows"] == 3
    finally:
        subprocess.run(["umount", tmp_path], check=True)
    tell("faults", f"{len(answers)} uploads answered by 507, no file left; a file that fits is taken")
