"""A server among strangers: connections that say nothing, uploads that break off, wrong tokens, foreign pages, damaged
files, and kills between updates of its monitors. `make server-trial` runs all of it at full length."""

import io
import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest
from child_processes import FORKS, serve_monitors

httpx = pytest.importorskip("httpx", reason="the tests of the web page need httpx")
pytest.importorskip("fastapi", reason="the web page needs fastapi: pip install 'trueup[serve]'")

DESCRIPTORS = 256
ROWS = 5


@contextmanager
def running(folder, full_disk=False, **settings):
    """A server in a process of its own, and its port; it is killed at the end."""
    port = FORKS.Value("i", 0)
    process = FORKS.Process(target=serve_monitors, args=(folder, port, DESCRIPTORS, settings, full_disk))
    process.start()
    try:
        while not port.value:
            assert process.is_alive(), "the server did not start"
            time.sleep(0.02)
        yield process, port.value
    finally:
        process.kill()
        process.join()


def client_of(port):
    return httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=600)


def open_files(process):
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def memory(process):
    return int(Path(f"/proc/{process.pid}/statm").read_text().split()[1]) * 4096


def wait_for_files(process, most):
    """Until the server has no more files open than that, or a minute has gone; how many it has."""
    for _ in range(3000):
        if open_files(process) <= most:
            break
        time.sleep(0.02)
    return open_files(process)


counted = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")


@counted
def test_half_open_connections(tmp_path, effort, tell):
    """Connections that send nothing, or half a header, are opened to a server that may open 256 files."""
    number = 200 * effort
    with running(tmp_path) as (process, port), client_of(port) as client:
        assert client.get("/api/limits").status_code == 200
        before, held = open_files(process), memory(process)
        wires = []
        answers = 0
        for i in range(number):
            wire = socket.create_connection(("127.0.0.1", port), timeout=600)
            with suppress(OSError):  # it may have been closed already
                wire.sendall(b"" if i % 2 else b"POST /api/upl")
            wires.append(wire)
            if i % 20 == 0:
                with client_of(port) as new:
                    answers += new.get("/api/limits").status_code == 200
        most = open_files(process)
        for wire in wires:
            wire.close()
        after, grown = wait_for_files(process, before + 4), memory(process) - held
        with client_of(port) as new:
            assert new.get("/api/limits").status_code == 200
    assert answers == -(-number // 20), "somebody was not served meanwhile"
    assert most < DESCRIPTORS
    assert after <= before + 4, "descriptors leak"
    assert grown < 64 << 20
    tell(
        "faults",
        f"{number:,} connections without a request: {answers} of {answers} new clients served meanwhile, at most "
        f"{most} files open of {DESCRIPTORS}, {after} afterwards ({before} before), memory {grown / 2**20:+.0f} MB",
    )


def upload_body(rows, seed):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(rows, 10))
    file = io.BytesIO()
    np.savez(file, logits=z, labels=(z + rng.gumbel(size=z.shape)).argmax(axis=1))
    return file.getvalue()


@counted
def test_uploads(tmp_path, effort, tell):
    """Files are sent side by side: some whole, some damaged, some broken off; what the server takes stays level."""
    number = 12 * effort
    body = upload_body(2000, 0)

    def send(port, i):
        if i % 3 == 2:  # a length that does not come
            with socket.create_connection(("127.0.0.1", port), timeout=600) as wire:
                head = f"POST /api/upload?name=a.npz HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
                wire.sendall(head.encode() + body[: len(body) // 2])
            return "broken off"
        with client_of(port) as client:
            sent = body if i % 3 == 0 else body[: len(body) // 2]
            answer = client.post("/api/upload", params={"name": "a.npz"}, content=sent)
            if answer.status_code == 201:
                table = client.get(f"/api/data/{answer.json()['id']}/evaluate", params={"metric": "ece"})
                assert table.status_code == 200, table.text
            return answer.status_code

    with running(tmp_path, memory_bytes=4 << 20) as (process, port), ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(send, [port] * 6, range(6)))
        before, held = open_files(process), memory(process)
        answers += threads.map(send, [port] * (number - 6), range(6, number))
        after, grown = wait_for_files(process, before + 4), memory(process) - held
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        left = list(Path(tempfile.gettempdir()).glob(f"trueup-upload-{process.pid}-*"))
        readers = children.read_text().split() if children.exists() else []
    counts = {kind: answers.count(kind) for kind in (201, 409, "broken off")}
    assert counts == dict.fromkeys(counts, number // 3), answers
    assert after <= before + 4, "descriptors leak"
    assert grown < 64 << 20
    assert not left
    assert not readers
    tell(
        "faults",
        f"{number} uploads, six at a time, a third damaged, a third broken off: the others measured, the damaged "
        f"refused, no file or process left, {after} files open ({before} before), memory {grown / 2**20:+.0f} MB",
    )


def test_strangers(tmp_path, effort, tell):
    """Wrong tokens, foreign pages and names that point here are refused, and a damaged file is set aside."""
    token, rounds = "a-token-that-nobody-guesses", 20 * effort
    (tmp_path / "damaged.safetensors").write_bytes(b"not a monitor")
    with running(tmp_path, token=token) as (_, port), client_of(port) as client:
        shown = {"Authorization": f"Bearer {token}"}
        wrong = {
            "no token": ({}, 401),
            "wrong token": ({"Authorization": f"Bearer {token[:-1]}"}, 401),
            "foreign page": ({**shown, "Origin": "https://evil.example"}, 403),
            "foreign name": ({**shown, "Host": f"evil.example:{port}"}, 400),
        }
        for _ in range(rounds):
            for kind, (headers, code) in wrong.items():
                assert client.get("/api/monitors", headers=headers).status_code == code, kind
                made = client.post("/api/monitors", headers=headers, json={"name": "a", "n_classes": 3})
                assert made.status_code == code, kind
            assert client.get("/api/monitors", headers=shown).json() == []  # and nothing was made
    assert [path.name for path in tmp_path.glob("damaged*")] == ["damaged.safetensors.damaged"]
    tell(
        "faults",
        f"{2 * rounds * len(wrong):,} requests without the token, with a wrong one, from foreign pages and by foreign "
        "names: each refused, none had an effect; one damaged file set aside at the start",
    )


def test_kills_between_updates(tmp_path, effort, tell):
    """Clients send rows to their monitors while the server is killed (SIGKILL) again and again."""
    clients, updates, kills = min(20, 3 + effort), min(100, 10 * effort), 1 + effort
    rng = np.random.default_rng(0)
    acknowledged = dict.fromkeys(range(clients), 0)
    sent = dict.fromkeys(range(clients), 0)
    ids: dict[int, str] = {}
    lost = 0
    for kill in range(kills + 1):
        with running(tmp_path) as (process, port):
            with client_of(port) as client:
                there = {each["name"]: each["status"]["rows"] for each in client.get("/api/monitors").json()}
                for k, rows in acknowledged.items():
                    found = there.get(f"client {k}", 0)
                    lost += found < rows
                    assert found in (rows, sent[k]), "rows are there that nobody sent, or not all of an update"
                    acknowledged[k] = sent[k] = found
                if kill == 0:
                    for k in acknowledged:
                        made = client.post("/api/monitors", json={"name": f"client {k}", "n_classes": 3})
                        ids[k] = made.json()["id"]
            if kill == kills:
                break

            def work(k, port=port):
                with client_of(port) as mine:
                    for _ in range(updates):
                        rows = {"logits": [[1.0, 0.0, 0.0]] * ROWS, "labels": [0] * ROWS}
                        sent[k] = acknowledged[k] + ROWS
                        try:
                            mine.post(f"/api/monitors/{ids[k]}/update", json=rows).raise_for_status()
                        except httpx.HTTPError:
                            return
                        acknowledged[k] += ROWS

            threading.Timer(rng.uniform(0.2, 0.4 + 0.2 * effort), process.kill).start()
            with ThreadPoolExecutor(clients) as threads:
                list(threads.map(work, acknowledged))
    total = sum(acknowledged.values())
    assert lost == 0
    assert total > 0
    assert not list(tmp_path.glob(".*.tmp"))
    tell(
        "faults",
        f"{clients} clients, {total:,} rows acknowledged in updates of {ROWS}, {kills} kills: "
        "each is there after the restart, none in part, no draft left",
    )


def test_full_disks_and_kills(tmp_path, effort, tell):
    """Rows are sent while the disk is full half of the time (RLIMIT_FSIZE) and the server is killed (SIGKILL)."""
    trials, acknowledged, refused = 3 + 6 * (effort - 1), 0, 0
    id, folder = None, tmp_path / "monitors"
    for trial in range(trials + 1):
        with running(folder, full_disk=0 < trial < trials) as (_, port), client_of(port) as client:
            if trial == 0:
                id = client.post("/api/monitors", json={"name": "kept", "n_classes": 3}).json()["id"]
            (kept,) = client.get("/api/monitors").json()
            assert kept["status"]["rows"] == acknowledged, f"trial {trial}"
            for _ in range(40):
                rows = {"logits": [[1.0, 0.0, 0.5]] * ROWS, "labels": [0] * ROWS}
                answer = client.post(f"/api/monitors/{id}/update", json=rows)
                assert answer.status_code in (200, 507), answer.text
                acknowledged += ROWS * (answer.status_code == 200)
                refused += answer.status_code == 507
    assert refused > 0, "the disk was never full"
    assert not list(folder.glob("*.damaged"))
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.iterdir())}
    assert modes.pop("monitors") == 0o700
    assert set(modes.values()) == {0o600}, modes
    tell(
        "faults",
        f"{trials} kills: {acknowledged:,} acknowledged rows, all there after each restart; {refused} updates refused "
        "by 507, none of them counted; the folder and its files are readable by their owner only",
    )


def connect_without_reading(port, token):
    """A connection that requests a large page many times and never reads."""
    wire = socket.socket()
    wire.settimeout(600)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    wire.connect(("127.0.0.1", port))
    head = f"GET /large HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\r\n"
    with suppress(OSError):  # it may have been closed already
        wire.sendall(head.encode() * 20)
    return wire


@counted
def test_clients_that_do_not_read(tmp_path, effort, tell):
    """Connections with and without the token request a large page and never read it."""
    number, seconds, wires = 200 * effort, [], []
    token = "a-token-that-nobody-guesses"
    with running(tmp_path, idle_seconds=2.0, memory_bytes=256 << 20, token=token) as (process, port):
        for i in range(number):
            wires.append(connect_without_reading(port, token if i % 4 == 0 else "x" * 8000))
            if i % 20 == 19:
                time.sleep(0.1)
                start = time.monotonic()
                with client_of(port) as client:
                    answer = client.get("/api/limits", headers={"Authorization": f"Bearer {token}"})
                assert answer.status_code == 200
                seconds.append(time.monotonic() - start)
        held = memory(process)
        time.sleep(5)
        after = open_files(process)
        for wire in wires:
            wire.close()
    assert np.median(seconds) < 1
    assert held < 1.5 * (256 << 20)
    assert after < DESCRIPTORS / 2
    tell(
        "faults",
        f"{number:,} connections that never read, a quarter with the token: a new client is served in "
        f"{np.median(seconds):.2f} s (median), at most {max(seconds):.2f} s; {held / 2**20:.0f} MB of memory; "
        f"{after} files open after 5 s",
    )


@counted
def test_wrong_bodies(tmp_path, effort, tell):
    """The largest requests, in which every element is wrong, from several clients at once."""
    bodies = []
    for cell in ('["x"]', "[]"):
        cells = ",".join([cell] * ((8 << 20) // (len(cell) + 1) - 100))
        bodies.append(f'{{"logits":[{cells}],"labels":[]}}'.encode())
    with running(tmp_path) as (process, port), ThreadPoolExecutor(2) as threads, client_of(port) as client:
        id = client.post("/api/monitors", json={"name": "wrong", "n_classes": 3}).json()["id"]

        def send(body):
            with client_of(port) as mine:
                headers = {"Content-Type": "application/json"}
                return mine.post(f"/api/monitors/{id}/update", content=body, headers=headers)

        largest, seconds, jobs = 0, [], [threads.submit(send, body) for body in bodies * (1 + effort)]
        while not all(job.done() for job in jobs):
            largest, start = max(largest, memory(process)), time.monotonic()
            assert client.get("/api/limits").status_code == 200
            seconds.append(time.monotonic() - start)
            time.sleep(0.02)
        answers = [job.result() for job in jobs]
    assert {answer.status_code for answer in answers} == {422}
    longest = max(len(answer.content) for answer in answers)
    assert longest < 1000
    assert np.median(seconds) < 1
    assert largest < 1.5 * (2 << 30)
    tell(
        "faults",
        f"{len(answers)} requests of 8 MB, two at a time: refused in at most {longest} bytes; others are "
        f"answered in {np.median(seconds):.2f} s (median), at most {max(seconds):.2f} s; "
        f"at most {largest / 2**20:,.0f} MB of memory",
    )


def test_generated_requests(tmp_path, effort, tell):
    """Requests that Schemathesis generates from the OpenAPI document are sent, and its default checks applied."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    program = shutil.which("schemathesis", path=folders)
    if program is None:
        pytest.skip("schemathesis is not installed")
    with running(tmp_path) as (_, port):
        address = f"http://127.0.0.1:{port}/openapi.json"
        options = (
            f"--request-timeout 60 --max-examples {5 * effort} --max-time {60 * effort} --seed 1 --no-color".split()
        )
        result = subprocess.run(
            [program, "run", address, *options], cwd=tmp_path, capture_output=True, text=True, check=False
        )
    assert result.returncode == 0, result.stdout
    generated, passed = re.search(r"([\d,]+) generated, ([\d,]+) passed", result.stdout).groups()
    assert generated == passed, result.stdout
    operations = re.search(r"Tested: (\d+)", result.stdout).group(1)
    tell("faults", f"{generated} requests to {operations} operations passed all checks")
