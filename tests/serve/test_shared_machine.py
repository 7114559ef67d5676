"""On a shared machine: a token, limits on connections, slow bodies and disks, damaged files, and what a kill leaves."""

import os
import queue
import socket
import stat
import subprocess
import sys
import tempfile
import webbrowser
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import uvicorn
from serving import of, overconfident, served, upload

from trueup import load, save
from trueup.monitor import Monitor
from trueup.serve.guard import Guard, cookie_name
from trueup.serve.server import make_server, run
from trueup.serve.settings import Settings, is_loopback
from trueup.serve.temporary import sweep_temporary, temporary_prefix

TOKEN = "a-token-that-nobody-guesses"


def test_a_request_without_the_token_is_refused():
    with served(token=TOKEN) as client:
        for path in ("/", "/api/limits", "/static/page.js", "/metrics", "/api/nothing"):
            answer = client.get(path)
            assert answer.status_code == 401
            assert "token" in answer.json()["error"]
            assert answer.headers["www-authenticate"].startswith("Bearer")
        assert client.post("/api/example").status_code == 401
        assert upload(client, of(overconfident())).status_code == 401
        page = client.get("/", headers={"Accept": "text/html"})
        assert page.status_code == 401
        assert "<form" in page.text


@pytest.mark.parametrize("wrong", ["", "x", TOKEN[:-1], TOKEN + "x", "ü"])
def test_a_wrong_token_is_refused(wrong):
    with served(token=TOKEN) as client:
        assert client.get("/api/limits", params={"token": wrong}).status_code == 401
        bearer = f"bearer {wrong or 'x'}".encode()
        assert client.get("/api/limits", headers={"Authorization": bearer}).status_code == 401
        assert client.get("/api/limits", headers={"Cookie": f"{cookie_name(TOKEN)}={wrong!a}"}).status_code == 401


def test_a_link_with_the_token_leaves_a_cookie_and_no_token_in_the_address():
    with served(token=TOKEN) as client:
        answer = client.get("/monitor", params={"id": "7", "token": TOKEN})
        assert answer.status_code == 303
        assert answer.headers["location"] == "/monitor?id=7"
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert client.get("/api/limits").status_code == 200  # the client keeps cookies, as browsers do
        assert client.post("/api/example").status_code == 201
        client.cookies.clear()
        assert client.get("/metrics", headers={"Authorization": f"Bearer {TOKEN}"}).status_code == 200
        assert client.post("/api/example", params={"token": TOKEN}).status_code == 401  # a link only reads


def test_a_link_does_not_lead_elsewhere():
    with served(token=TOKEN) as client:
        answer = client.get("//evil.example/", params={"token": TOKEN})
        assert not answer.headers["location"].startswith("//")


def test_the_token_does_not_replace_the_other_checks():
    with served(token=TOKEN) as client:
        shown = {"Authorization": f"Bearer {TOKEN}"}
        assert client.get("/api/limits", headers={**shown, "Host": "evil.example"}).status_code == 400
        assert client.get("/api/limits", headers={**shown, "Origin": "https://evil.example"}).status_code == 403


def test_only_this_machine_needs_no_token():
    assert not is_loopback("192.168.0.7")
    assert not is_loopback("lab.example")


def connect(client):
    return socket.create_connection((client.base_url.host, client.base_url.port), timeout=600)


def test_half_open_connections_make_room():
    with served(connections=8) as client:
        idle = [connect(client) for _ in range(30)]
        idle[-1].sendall(b"GET / HT")
        assert client.get("/api/limits").status_code == 200
        closed = 0
        for one in idle[:20]:
            one.settimeout(600)
            try:
                closed += one.recv(1) == b""
            except ConnectionResetError:
                closed += 1
        assert closed == 20
        for one in idle:
            one.close()


def test_a_connection_that_asks_nothing_is_closed():
    with served(idle_seconds=0.2) as client:
        for words in (b"", b"GET / HTTP/1.1\r\nHost: loc"):
            with connect(client) as one:
                one.sendall(words)
                with suppress(ConnectionResetError):
                    assert one.recv(1) == b""


def test_a_body_that_trickles_is_refused():
    with served(patience=0.3) as client, connect(client) as one:
        head = f"POST /api/monitors HTTP/1.1\r\nHost: 127.0.0.1:{client.base_url.port}\r\nContent-Length: 500\r\n"
        one.sendall(f"{head}Content-Type: application/json\r\n\r\n{{".encode())
        assert b"408" in one.recv(100)


def test_uploads_share_the_disk():
    body = of(overconfident(rows=4000))
    with served(disk_bytes=len(body) // 2) as client:
        answer = upload(client, body)
        assert answer.status_code == 503
        assert "space" in answer.json()["error"]
        assert upload(client, of(overconfident(rows=20))).status_code == 201  # what was refused takes none any more


def test_monitors_share_the_disk(tmp_path):
    with served(monitors_folder=tmp_path, monitors_bytes=1000) as client:
        answer = client.post("/api/monitors", json={"name": "one", "n_classes": 3})
        assert answer.status_code == 507
        assert "delete one" in answer.json()["error"]
        assert not list(tmp_path.glob("*.safetensors"))


@pytest.fixture
def folder_with_damage(tmp_path):
    save(Monitor(3), tmp_path / "good.safetensors")
    save(Monitor(4), tmp_path / "nameless.safetensors")
    (tmp_path / "nameless.json").write_text("{")
    whole = (tmp_path / "good.safetensors").read_bytes()
    (tmp_path / "bad.safetensors").write_bytes(whole[: len(whole) // 2])
    (tmp_path / ".good.safetensors.0123456789abcdef.tmp").write_bytes(b"half")
    return tmp_path


def test_a_damaged_monitor_is_set_aside_and_the_others_served(folder_with_damage, caplog):
    with served(monitors_folder=folder_with_damage) as client:
        assert [one["name"] for one in client.get("/api/monitors").json()] == ["good", "nameless"]
        assert "trueup_damaged_monitors_total 1.0" in client.get("/metrics").text
    assert (folder_with_damage / "bad.safetensors.damaged").exists()
    assert not (folder_with_damage / "bad.safetensors").exists()
    assert not list(folder_with_damage.glob(".*.tmp"))
    (told,) = [record.getMessage() for record in caplog.records if "bad.safetensors" in record.getMessage()]
    assert "renamed to bad.safetensors.damaged" in told
    assert load(folder_with_damage / "good.safetensors").n_classes == 3


def test_folders_of_a_killed_server_are_swept(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    left = tmp_path / f"trueup-upload-{dead.pid}-abc"
    left.mkdir()
    (left / "upload.npz").write_bytes(b"half")
    mine = Path(tempfile.mkdtemp(prefix=temporary_prefix("upload")))
    (tmp_path / "trueup-notes").mkdir()
    assert sweep_temporary() == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([mine.name, "trueup-notes"])


@pytest.fixture
def started(monkeypatch):
    """The settings of the servers that `run` starts."""
    kept, mask = [], os.umask(0o022)

    def run_server(server, sockets):
        (guard,) = [each for each in server.config.app.user_middleware if each.cls is Guard]
        kept.append(guard.kwargs["settings"])

    monkeypatch.setattr(uvicorn.Server, "run", run_server)
    yield kept
    os.umask(mask)


@pytest.mark.parametrize(
    ("host", "require_token"), [("127.0.0.1", True), ("127.0.0.1", False), ("0.0.0.0", True), ("0.0.0.0", False)]
)
def test_a_token_is_made_by_default_and_always_for_other_machines(host, require_token, started):
    addresses = []
    run(host, 0, require_token=require_token, on_listening=addresses.append)
    token = started[0].token
    assert (token is None) == (host == "127.0.0.1" and not require_token)
    assert addresses[0].endswith("/" if token is None else f"/?token={token}")
    assert token is None or len(token) >= 32


def test_the_token_is_not_among_the_browsers_arguments(started, monkeypatch):
    opened = queue.Queue()

    def open_browser(address):
        link = Path(urlsplit(address).path)
        modes = [stat.S_IMODE(path.stat().st_mode) for path in (link, link.parent)]
        opened.put((address, link, modes, link.read_text()))

    monkeypatch.setattr(webbrowser, "open", open_browser)
    monkeypatch.setattr(uvicorn.Server, "run", lambda server, sockets: opened.put(opened.get(timeout=60)))
    run(port=0, settings=Settings(token=TOKEN), open_browser=True)
    address, link, modes, page = opened.get(timeout=60)
    assert address.startswith("file://")
    assert TOKEN not in address
    assert f"?token={TOKEN}" in page
    assert modes == [0o600, 0o700]
    assert not link.exists()  # removed when the server stops


@pytest.mark.parametrize(
    "token", ["with a space inside", "sixteen-letters#x", "zwölf-und-vier-Zeichen", "semi;colon-semi"]
)
def test_a_token_with_odd_characters_is_refused_at_the_start(token):
    with pytest.raises(ValueError, match="TRUEUP_TOKEN.*may have only the characters"):
        make_server(settings=Settings(token=token))


def test_a_token_with_all_allowed_characters_works():
    token = "azAZ09-._~azAZ09"
    with served(token=token) as client:
        assert client.get("/monitor", params={"token": token}).status_code == 303
        assert client.get("/api/limits").status_code == 200
        client.cookies.clear()
        assert client.get("/api/limits", headers={"Authorization": f"Bearer {token}"}).status_code == 200
