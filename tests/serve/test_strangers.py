"""Clients that do not read, requests that cost much memory, malformed headers, and slow uploads."""

import json
import resource
import socket
import time
import tracemalloc
from contextlib import suppress

import httpx
import numpy as np
import pytest
from monitored import error, made, update
from serving import served
from starlette.responses import FileResponse

from trueup.serve.app import PAGES
from trueup.serve.models import UpdateRequest, describe_fields

TOKEN = "a-token-that-nobody-guesses"
JSON = {"Content-Type": "application/json"}


def connect(client):
    wire = socket.socket()
    wire.settimeout(60)
    wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # little waits unread in the system
    wire.connect((client.base_url.host, client.base_url.port))
    return wire


def received(wire):
    """Everything until the server closes the connection."""
    content = b""
    with suppress(ConnectionResetError):
        while piece := wire.recv(1 << 16):
            content += piece
    return content


def is_closed(wire, seconds=60.0):
    """Whether the server closes the connection, without reading the answer before."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(OSError):
            wire.send(b"x")
            time.sleep(0.05)
            continue
        return True
    return False


def test_a_refusal_echoes_nothing_and_is_the_only_answer_of_its_connection():
    with served(token=TOKEN) as client:
        for host in ("127.0.0.1", "evil" * 3000 + ".example"):
            request = f"GET /api/limits HTTP/1.1\r\nHost: {host}\r\nX-Long: {'y' * 1000}\r\n\r\n".encode()
            with connect(client) as wire:
                with suppress(OSError):
                    wire.sendall(request * 20)
                answer = received(wire)
            assert answer.count(b"HTTP/1.1") == 1
            assert len(answer) < 2000
            assert b"evil" not in answer


def test_headers_are_limited():
    with served() as client, connect(client) as wire:
        with suppress(OSError):
            wire.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Long: " + b"y" * 40_000)
        assert b" 400 " in received(wire).split(b"\r\n")[0]


@pytest.fixture
def large(monkeypatch, tmp_path):
    """The server has a page larger than any buffer between it and a client."""
    (tmp_path / "large.txt").write_bytes(bytes(4 << 20))
    monkeypatch.setitem(PAGES, "/large", lambda: FileResponse(tmp_path / "large.txt"))


@pytest.mark.usefixtures("large")
def test_a_client_that_does_not_read_its_answer_is_closed():
    with served(idle_seconds=0.5) as client, connect(client) as wire:
        wire.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
        assert is_closed(wire)
        assert client.get("/api/limits").status_code == 200


@pytest.mark.usefixtures("large")
def test_a_slow_client_that_reads_gets_its_whole_answer():
    with served(idle_seconds=1) as client, connect(client) as wire:
        wire.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        size, start = 0, time.monotonic()
        while piece := wire.recv(1 << 16):
            size += len(piece)
            if time.monotonic() - start < 3:
                time.sleep(0.01)
        assert size > 1_000_000


@pytest.mark.usefixtures("large")
def test_clients_that_do_not_read_make_room_for_others():
    with served(connections=8) as client:
        wires = [connect(client) for _ in range(20)]
        for wire in wires:
            with suppress(OSError):
                wire.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n" * 3)
        time.sleep(2)  # until all wait for their clients
        seconds = []
        for _ in range(5):
            start = time.monotonic()
            assert httpx.get(client.base_url.join("/api/limits"), trust_env=False, timeout=30).status_code == 200
            seconds.append(time.monotonic() - start)
        assert np.median(seconds) < 1
        for wire in wires:
            wire.close()


def test_an_upload_has_a_total_time():
    with served(body_seconds=0.5, patience=30) as client, connect(client) as wire:
        wire.sendall(b"POST /api/upload?name=a.npz HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        wire.settimeout(0.05)
        start, answer = time.monotonic(), b""
        while not answer and time.monotonic() - start < 10:
            with suppress(TimeoutError):
                answer = wire.recv(1000)
                break
            wire.sendall(b"x" * 100)
        assert b" 408 " in answer.split(b"\r\n")[0]
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("origin", ["http://[", "http://[::1", "null", "//", "http://evil.example", "[", "http://"])
def test_malformed_origins_are_refused(origin, client):
    assert client.get("/api/limits", headers={"Origin": origin.encode()}).status_code in (400, 403)


def test_a_malformed_origin_is_refused_before_the_token_is_asked_for():
    with served(token=TOKEN) as client:
        assert error(client.get("/api/limits", headers={"Origin": "http://["}), 403)


def test_a_wrong_method_is_answered_with_the_right_ones(client):
    allowed = {"/": "GET", "/api/limits": "GET", "/api/example": "POST", "/api/monitors": "GET, POST"}
    allowed |= {"/api/monitors/7": "DELETE, GET", "/api/monitors/example": "POST"}
    for path, methods in allowed.items():
        answer = client.request("PATCH", path)
        assert (answer.status_code, answer.headers["allow"]) == (405, methods)


def test_every_route_documents_its_refusals(client):
    paths = client.get("/openapi.json").json()["paths"]
    for path, methods in paths.items():
        for method, about in methods.items():
            documented = set(about["responses"])
            assert {"400", "401", "403", "404", "405", "408", "409", "413", "422", "500", "503", "507"} <= documented, (
                path
            )
            assert all("description" in answer for answer in about["responses"].values()), (path, method)


BODIES = {
    "texts for numbers": '{"logits": [[' + ",".join(['"x"'] * 100_000) + "]]" + ', "labels": [0]}',
    "rows of texts": '{"logits": [' + ",".join(['["x"]'] * 80_000) + '], "labels": [0]}',
    "empty rows": '{"logits": [' + ",".join(["[]"] * 100_000) + '], "labels": [0]}',
    "objects for rows": '{"logits": [' + ",".join(["{}"] * 100_000) + '], "labels": [0]}',
    "texts for labels": '{"logits": [[1, 2, 3]], "labels": [' + ",".join(['"x"'] * 100_000) + "]}",
    "unknown fields": "{" + ",".join(f'"{n}":0' for n in range(60_000)) + "}",
    "deep": "[" * 200_000,
}


@pytest.mark.parametrize("kind", BODIES)
def test_a_wrong_body_gets_a_short_answer(kind, client):
    id = made(client, f"wrong {kind}")
    answer = client.post(f"/api/monitors/{id}/update", content=BODIES[kind], headers=JSON)
    assert answer.status_code in (400, 409, 422)
    assert len(answer.content) < 1000
    client.delete(f"/api/monitors/{id}")


def test_validation_stops_at_the_first_error():
    rows = json.loads(BODIES["rows of texts"])
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"^1 validation error|^2 validation errors|^3 validation errors"):
        UpdateRequest.model_validate(rows)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 << 20


def test_whole_numbers_may_have_a_point(client):
    body = {"name": "whole", "n_classes": 3.0, "block": 20.0}
    id = client.post("/api/monitors", json=body).json()["id"]
    path = f"/api/monitors/{id}/update"
    assert client.post(path, json={"logits": [[1, 2, 3]], "labels": [2.0]}).json()["status"]["rows"] == 1
    for wrong in (True, "2", 1.5):
        assert error(client.post(path, json={"logits": [[1, 2, 3]], "labels": [wrong]}), 422)
        assert error(client.post("/api/monitors", json={**body, "name": "other", "n_classes": wrong}), 422)
    client.delete(f"/api/monitors/{id}")


@pytest.mark.parametrize("label", [-1, 2**31, 10**19, 10**400])
def test_labels_that_no_integer_holds_are_refused(label, client):
    id = made(client, f"labels {str(label)[:20]}")
    body = json.dumps({"logits": [[1, 2, 3]], "labels": [label]})
    answer = client.post(f"/api/monitors/{id}/update", content=body, headers=JSON)
    assert answer.status_code == 422
    client.delete(f"/api/monitors/{id}")


def test_three_errors_are_named_and_the_others_counted():
    errors = [{"loc": ("body", "logits", n), "msg": "is wrong"} for n in range(10)]
    assert describe_fields(errors, skip=1) == (
        "logits.0: is wrong; logits.1: is wrong; logits.2: is wrong; and 7 more errors"
    )


def test_eight_megabytes_of_errors_take_little_memory(client):
    """The largest request, all of it wrong."""
    id = made(client, "large")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for cell in ('["x"]', "[]"):
        rows = ",".join([cell] * ((8 << 20) // (len(cell) + 1) - 100))
        start = time.monotonic()
        answer = client.post(f"/api/monitors/{id}/update", content=f'{{"logits":[{rows}],"labels":[]}}', headers=JSON)
        assert answer.status_code == 422
        assert len(answer.content) < 1000
        assert time.monotonic() - start < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # in kilobytes: 1 GB
    client.delete(f"/api/monitors/{id}")


def test_probabilities_sent_as_logits_are_refused_until_declared(client):
    rng = np.random.default_rng(0)
    probs = rng.dirichlet(np.ones(3), 40)
    labels = np.array([rng.choice(3, p=row) for row in probs])
    id = made(client, "probabilities sent as logits")
    assert "not be probabilities" in error(update(client, id, (probs, labels)), 409)
    path, rows = f"/api/monitors/{id}/update", {"logits": probs.tolist(), "labels": labels.tolist()}
    assert "not be probabilities" in error(
        client.post(f"/api/monitors/{id}/expect", json={"logits": rows["logits"]}), 409
    )
    assert client.get(f"/api/monitors/{id}").json()["status"]["rows"] == 0
    status = client.post(path, json={**rows, "probs": True}).json()["status"]
    assert status["confidence"] == pytest.approx(probs.max(axis=1).mean())
    assert client.post(path, json={**rows, "probs": False}).json()["status"]["rows"] == 80
    client.delete(f"/api/monitors/{id}")
