"""A real server on a free port, and files to send to it."""

import io
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="the web page needs fastapi: pip install 'trueup[serve]'")
pytest.importorskip("uvicorn", reason="the web page needs uvicorn: pip install 'trueup[serve]'")
httpx = pytest.importorskip("httpx", reason="the tests of the web page need httpx")

from trueup.io import Predictions  # noqa: E402
from trueup.serve.server import make_server  # noqa: E402
from trueup.serve.settings import Settings  # noqa: E402


@contextmanager
def served(**settings):
    """A client of a server with these settings; the server is at `client.app`."""
    server = make_server(port=0, settings=Settings(**settings))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=1200) as client:
            client.app = server.config.app
            yield client
    finally:
        server.should_exit = True
        thread.join(600)
        assert not thread.is_alive(), "the server did not stop"


def overconfident(rows=400, classes=3, seed=0):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(rows, classes))
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    return Predictions(3 * z, y)


def npz(**arrays):
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)
    return file.getvalue()


def of(pair):
    return npz(logits=pair.logits, labels=pair.labels)


def upload(client, body, name="net.npz", **options):
    return client.post("/api/upload", params={"name": name, **options}, content=body)


def uploaded(client, body, name="net.npz", **options):
    answer = upload(client, body, name, **options)
    assert answer.status_code == 201, answer.text
    return answer.json()


def fitted(client, id, **wanted):
    answer = client.post(f"/api/data/{id}/fit", json={"methods": ["temperature", "histogram"], **wanted})
    assert answer.status_code == 202, answer.text
    return finished(client, answer.json()["id"])


def finished(client, id, kind="jobs"):
    for _ in range(600):
        job = client.get(f"/api/{kind}/{id}").json()
        if job["state"] not in ("waiting", "running"):
            return job
        time.sleep(0.05)
    raise AssertionError(f"the fit did not end: {job}")


def assert_all_is_named(page):
    """Whatever can be used has a name to be read aloud, and no two things have one id."""
    unnamed = page.evaluate(
        """() => [...document.querySelectorAll("input, select, button, a[href], progress, summary, [role=img]")].filter(
            (e) => e.checkVisibility() && !((e.labels && e.labels.length) || e.textContent.trim() || e.ariaLabel
            || e.getAttribute("aria-labelledby"))).map((e) => e.outerHTML.slice(0, 100))"""
    )
    assert unnamed == []
    assert page.evaluate("new Set([...document.querySelectorAll('[id]')].map((e) => e.id)).size") == page.evaluate(
        "document.querySelectorAll('[id]').length"
    )
