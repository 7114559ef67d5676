"""A server among strangers: connections that say nothing, and kills between updates of its monitors."""

import os
import socket
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
def running(folder):
    """A server in a process of its own, and its port; it is killed at the end."""
    port = FORKS.Value("i", 0)
    process = FORKS.Process(target=serve_monitors, args=(folder, port, DESCRIPTORS))
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


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="descriptors are counted in /proc")
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
        for _ in range(3000):
            if open_files(process) <= before + 4:
                break
            time.sleep(0.02)
        after, grown = open_files(process), memory(process) - held
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
                        made = client.post("/api/monitors", json={"name": f"client {k}", "classes": 3})
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
