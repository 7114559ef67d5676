import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from serving import finished, fitted, of, overconfident, served, upload, uploaded

from trueup import metrics
from trueup.serve import jobs as room
from trueup.serve.server import run


@pytest.fixture
def gate(monkeypatch):
    """Audits wait until the gate is opened."""
    opened, real = threading.Event(), room.report

    def slow(*pair, on_step, **options):
        on_step("temperature", 0, 2)
        assert opened.wait(600)
        on_step("histogram", 1, 2)
        return real(*pair, **options)

    monkeypatch.setattr(room, "report", slow)
    yield opened
    opened.set()


@pytest.mark.parametrize(
    ("error", "told"),
    [(ValueError("too few rows"), "too few rows"), (MemoryError(), "MemoryError: "), (KeyError("a"), "KeyError: 'a'")],
)
def test_a_failure_is_recorded_and_the_next_fit_runs(monkeypatch, error, told):
    def broken(*pair, **options):
        raise error

    with served() as client:
        id = uploaded(client, of(overconfident()))["id"]
        with monkeypatch.context() as patch:
            patch.setattr(room, "report", broken)
            failed = fitted(client, id)
        assert (failed["state"], failed["error"], failed["result"]) == ("failed", told, None)
        answer = client.get(f"/api/jobs/{failed['id']}/report")
        assert (answer.status_code, answer.json()["error"]) == (409, f"this fit failed: {told}")
        assert fitted(client, id)["state"] == "done"


def test_an_error_of_the_server_is_answered_and_it_lives(monkeypatch):
    from trueup.serve import diagrams as pictures

    with served() as client:
        id = uploaded(client, of(overconfident()))["id"]
        with monkeypatch.context() as patch:
            patch.setattr(pictures, "curve", lambda *pair, **options: 1 / 0)
            answer = client.get(f"/api/data/{id}/curve")
        assert answer.status_code == 500
        assert answer.json()["error"].startswith("internal error")
        assert "default-src" in answer.headers["content-security-policy"]
        assert client.get(f"/api/data/{id}/curve").status_code == 200


def test_too_few_rows_fail_with_a_sentence(client):
    job = fitted(client, uploaded(client, of(overconfident(rows=5)))["id"])
    assert (job["state"], job["error"]) == ("failed", "logits must have at least 10 rows, got 5")


def test_progress_is_told_and_too_many_are_refused(gate):
    with served(waiting=1) as client:
        id = uploaded(client, of(overconfident()))["id"]
        started = [client.post(f"/api/data/{id}/fit", json={"methods": ["temperature", "histogram"]}) for _ in range(3)]
        assert [answer.status_code for answer in started] == [202, 202, 503]
        assert started[2].json()["error"].startswith("too many fits are waiting")
        first, second = (answer.json()["id"] for answer in started[:2])
        for _ in range(200):
            told = client.get(f"/api/jobs/{first}").json()
            if told["fitting"]:
                break
            time.sleep(0.01)
        assert (told["state"], told["fitting"], told["done"]) == ("running", "temperature", 0)
        assert client.get(f"/api/jobs/{second}").json()["state"] == "waiting"
        assert client.get(f"/api/jobs/{second}/compare").status_code == 409
        gate.set()
        assert finished(client, first)["state"] == "done"
        assert finished(client, second)["state"] == "done"


def test_an_unwanted_fit_stops(gate):
    with served() as client:
        id = uploaded(client, of(overconfident()))["id"]
        unwanted = client.post(f"/api/data/{id}/fit", json={}).json()["id"]
        job = client.app.state.store.get(unwanted, room.Job)
        assert client.delete(f"/api/jobs/{unwanted}").status_code == 204
        assert client.get(f"/api/jobs/{unwanted}").status_code == 404
        gate.set()
        for _ in range(200):
            if job.state == "stopped":
                break
            time.sleep(0.01)
        assert job.state == "stopped"
        assert job.result is None


def test_a_fit_stops_after_its_time(gate):
    with served(fit_seconds=0.0) as client:
        job = fitted(client, uploaded(client, of(overconfident()))["id"])
    assert (job["state"], job["error"]) == ("stopped", "the fit was stopped, since it took longer than 0 seconds")


def test_users_at_the_same_time_get_their_own_answers(client):
    pairs = [overconfident(rows=300, classes=3 + seed % 3, seed=seed) for seed in range(20)]

    def ask(pair):
        id = uploaded(client, of(pair))["id"]
        return client.get(f"/api/data/{id}/curve").json()["ece"]

    with ThreadPoolExecutor(20) as users:
        answers = list(users.map(ask, pairs))
    assert answers == pytest.approx([metrics.ece(*pair) for pair in pairs], abs=1e-12)
    assert len(set(answers)) == 20


def test_many_slow_answers_leave_the_server_to_others(monkeypatch):
    from trueup.serve import diagrams

    real = diagrams.curve

    def slow(*pair, **options):
        time.sleep(0.3)
        return real(*pair, **options)

    monkeypatch.setattr(diagrams, "curve", slow)
    with served() as client, ThreadPoolExecutor(100) as users:
        id = uploaded(client, of(overconfident()))["id"]
        answers = [users.submit(client.get, f"/api/data/{id}/curve") for _ in range(100)]
        time.sleep(0.5)
        start = time.monotonic()
        assert httpx.get(client.base_url.join("/api/limits"), trust_env=False, timeout=60).status_code == 200
        seconds = time.monotonic() - start
        assert {answer.result().status_code for answer in answers} == {200}
    assert seconds < 2


def test_memory_is_bounded(monkeypatch):
    body = of(overconfident(rows=500))
    size = 500 * 4 * 8
    with served(memory_bytes=4 * size) as client:
        ids = [uploaded(client, body)["id"] for _ in range(30)]
        store = client.app.state.store
        assert (len(store), store.size) == (4, 4 * size)
        assert client.get(f"/api/data/{ids[0]}").status_code == 404
        assert client.get(f"/api/data/{ids[-1]}").status_code == 200
        fitted(client, ids[-1])
        assert store.size <= 4 * size
        assert upload(client, body).status_code == 201


def test_a_taken_port_is_told(client):
    with pytest.raises(ValueError, match=rf"^cannot listen on port {client.base_url.port} of 127.0.0.1: .*; choose"):
        run(port=client.base_url.port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_cannot_be_is_told(port):
    with pytest.raises(ValueError, match=rf"^port must lie in 0..65535, got {port}$"):
        run(port=port)


def test_the_server_stops_its_fits(gate):
    with served() as client:
        id = uploaded(client, of(overconfident()))["id"]
        name = client.post(f"/api/data/{id}/fit", json={}).json()["id"]
        job = client.app.state.store.get(name, room.Job)
    gate.set()
    for _ in range(200):
        if job.state == "stopped":
            return
        time.sleep(0.01)
    raise AssertionError(f"the fit is {job.state}")


def test_what_waits_counts_as_memory(gate):
    with served(memory_bytes=200_000) as client:
        id = uploaded(client, of(overconfident(rows=1000)))["id"]
        first = client.post(f"/api/data/{id}/fit", json={"methods": ["temperature"]})
        assert first.status_code == 202
        answers = [client.post(f"/api/data/{id}/fit", json={"methods": ["temperature"]}) for _ in range(6)]
        assert answers[-1].status_code == 503
        assert "too many fits are waiting" in answers[-1].json()["error"]
        gate.set()


def test_a_fit_that_nobody_can_ask_for_is_not_run(gate):
    with served(workers=1) as client:
        id = uploaded(client, of(overconfident()))["id"]
        running = client.post(f"/api/data/{id}/fit", json={"methods": ["temperature"]}).json()["id"]
        waiting = client.post(f"/api/data/{id}/fit", json={"methods": ["temperature"]}).json()["id"]
        assert client.delete(f"/api/jobs/{waiting}").status_code == 204
        gate.set()
        assert finished(client, running)["state"] == "done"
        assert client.get(f"/api/jobs/{waiting}").status_code == 404
