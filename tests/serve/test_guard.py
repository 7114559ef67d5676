import re
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from serving import of, overconfident, served, upload

from trueup.serve import app as room
from trueup.serve.server import _host_names

STATIC = Path(room.__file__).parent / "static"


def test_every_answer_is_sealed(client):
    for path in ("/", "/docs", "/static/page.js", "/static/chart.js", "/api/limits", "/nowhere", "/openapi.json"):
        headers = client.get(path).headers
        policy = headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cross-origin-opener-policy"] == "same-origin"
        assert "server" not in headers
    assert client.get("/api/limits").headers["cache-control"] == "no-store"


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.", ""])
def test_foreign_names_are_refused(client, host):
    answer = client.get("/api/limits", headers={"Host": host})
    assert answer.status_code == 400
    assert "does not answer to that host name" in answer.json()["error"]
    assert "evil" not in answer.text
    assert answer.headers["connection"] == "close"


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "127.0.0.1:9", "[::1]:8000", "[::1]"])
def test_local_names_are_answered(client, host):
    assert client.get("/api/limits", headers={"Host": host}).status_code == 200


def test_foreign_pages_are_refused(client):
    body = of(overconfident())
    for origin in ("https://evil.example", "null", "http://localhost:1"):
        answer = client.post("/api/upload", params={"name": "a.npz"}, content=body, headers={"Origin": origin})
        assert (answer.status_code, answer.json()["error"]) == (403, "requests from pages of other origins are refused")
    same = f"http://127.0.0.1:{client.base_url.port}"
    answer = client.post("/api/upload", params={"name": "a.npz"}, content=body, headers={"Origin": same})
    assert answer.status_code == 201


def test_other_names_only_when_told():
    with served(hosts=("calibration.example",)) as client:
        assert client.get("/api/limits", headers={"Host": "calibration.example"}).status_code == 200
        assert client.get("/api/limits", headers={"Host": "evil.example"}).status_code == 400
    assert "0.0.0.0" not in _host_names("0.0.0.0")
    assert "192.168.0.7" in _host_names("192.168.0.7")
    assert "[fe80::1]" in _host_names("fe80::1")


def test_long_bodies_are_refused():
    with served(json_bytes=1000, upload_bytes=5000) as client:
        id = client.post("/api/example").json()["id"]
        answer = client.post(f"/api/data/{id}/fit", json={"methods": ["temperature"] * 200})
        assert (answer.status_code, answer.json()["error"]) == (
            413,
            "the body is too large: at most 1,000 bytes are accepted",
        )
        answer = upload(client, (b"x" * 1000 for _ in range(6)))
        assert answer.status_code == 413
        assert "too large" in answer.json()["error"]
        with suppress(httpx.TransportError):  # the server hangs up on what it will not read
            assert upload(client, b"x" * 10**7).status_code == 413
        assert client.get("/api/limits").status_code == 200


def test_nothing_comes_from_elsewhere():
    for file in STATIC.iterdir():
        addresses = re.findall(r"(?:https?:)?//[\w.-]+\.\w+", file.read_text(encoding="utf-8"))
        assert set(addresses) <= {"http://www.w3.org"}, file.name


def test_pages_do_not_leave_their_folder(client):
    for path in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd"):
        assert client.get(path).status_code == 404
