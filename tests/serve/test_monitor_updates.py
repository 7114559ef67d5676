"""Rows sent to monitors: what is wrong changes nothing, and many at once lose nothing and wait for nobody else."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from monitored import error, made, replay, state, stream, update, updated
from serving import npz, of, served

from trueup.monitor import Monitor, MonitorSizes
from trueup.serve.monitors import History, MonitorSession


def broken(change):
    z, y = (array.copy() for array in stream(250))
    change(z, y)
    return z, y


WRONG = {
    "classes": ((stream(9, 4)), "logits must have 3 classes, got 4"),
    "labels": (broken(lambda z, y: y.__setitem__(-1, 3)), "labels must lie in 0..2, got 0..3"),
    "length": ((stream(9).logits, stream(8).labels), "labels must have 9 entries, one for each row of logits, got 8"),
    "finite": (broken(lambda z, y: z.__setitem__((-1, 0), 3e999)), "should be a finite number"),
}


@pytest.fixture(scope="module")
def watched(client):
    id = made(client, "not to be changed", block=10)
    updated(client, id, stream(33))
    return id


def unchanged(client, id, before):
    """Whether only the number of refused requests has grown."""
    after = state(client, id)
    return after.pop("refused") > before.pop("refused") and after == before


@pytest.mark.parametrize("what", WRONG)
def test_rows_that_are_wrong_change_nothing(client, watched, what):
    pair, told = WRONG[what]
    before = state(client, watched)
    body = {"logits": np.asarray(pair[0]).tolist(), "labels": np.asarray(pair[1]).tolist()}
    text = str(body).replace("'", '"').replace("inf", "Infinity").encode()
    sent = client.post(f"/api/monitors/{watched}/update", content=text, headers={"Content-Type": "application/json"})
    assert told in error(sent, 409)
    assert error(replay(client, watched, npz(logits=pair[0], labels=pair[1])), 409)
    assert unchanged(client, watched, before)


@pytest.mark.parametrize(
    ("body", "name", "told"),
    [
        (of(stream(100))[:-40], "log.npz", "log.npz"),
        (b"", "log.npz", "the file is empty"),
        (of(stream(100)), "log.pkl", "the suffix must be one of"),
        (
            npz(**{f"{half}_{name}": array for half in ("val", "test") for name, array in stream(9)._asdict().items()}),
            "both.npz",
            "both.npz: a log must have one split, got val and test",
        ),
    ],
)
def test_logs_that_are_wrong_change_nothing(client, watched, body, name, told):
    before = state(client, watched)
    assert told in error(replay(client, watched, body, name), 409)
    assert unchanged(client, watched, before)


def test_bodies_that_are_wrong_change_nothing(client, watched):
    before = state(client, watched)
    path = f"/api/monitors/{watched}/update"
    ragged = client.post(path, json={"logits": [[1, 2, 3], [1, 2]], "labels": [0, 0]})
    assert ragged.status_code == 409  # the schema cannot express it
    assert "equally many numbers" in error(ragged, 409)
    assert error(client.post(path, json={"logits": [[1, 2, 3]], "labels": [0.5]}), 409).startswith("labels.0:")
    assert "send labels" in error(client.post(path, json={"logits": [[1, 2, 3]]}), 409)
    assert error(client.post(path, json={"logit": []}), 409)
    assert error(client.post(path, content=b"{"), 409)
    assert unchanged(client, watched, before)


def test_foreign_pages_are_refused_here_too(client, watched):
    for path in (f"/api/monitors/{watched}/replay?name=a.npz", f"/api/monitors/{watched}/update", "/api/monitors"):
        assert error(client.post(path, content=b"{}", headers={"Origin": "https://evil.example"}), 403)
    assert error(client.get("/metrics", headers={"Host": "evil.example"}), 400)
    assert "default-src 'none'" in client.get("/monitor").headers["content-security-policy"]


def test_an_update_that_fails_halfway_is_undone(monkeypatch):
    session = MonitorSession("id", "name", Monitor(3, sizes=MonitorSizes(block=10)), History(500))
    before, points = session.monitor.status(), session.history.columns()
    whole, calls = Monitor.update, []

    def tired(self, *pair, **options):
        calls.append(pair)
        if len(calls) == 3:
            raise MemoryError
        return whole(self, *pair, **options)

    monkeypatch.setattr(Monitor, "update", tired)
    with pytest.raises(MemoryError):
        session.update(*stream(500))
    assert repr(session.monitor.status()) == repr(before)
    assert session.history.columns() == points
    assert session.replaying is None


def test_no_rows_are_no_news():
    session = MonitorSession("id", "name", Monitor(3), History(500))
    successor = session.update(np.zeros((0, 3)), np.zeros(0, int))
    assert successor.monitor.rows == 0
    assert list(successor.points) == []


def test_eight_threads_lose_no_rows(client):
    id = made(client, "eight threads", block=10, window=10**6)
    parts = [stream(7, seed=seed) for seed in range(80)]
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(lambda part: updated(client, id, part)["status"]["rows"], parts))
    assert sorted(seen) == [7 * (k + 1) for k in range(80)]  # each saw the rows of those before it, and its own
    status, whole = state(client, id)["status"], Monitor(3, sizes=MonitorSizes(block=10, window=10**6))
    whole.update(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    for figure in ("rows", "accuracy", "confidence", "nll", "ece"):
        assert status[figure] == pytest.approx(getattr(whole.status(), figure))


def test_one_monitor_does_not_wait_for_another(client, monkeypatch):
    slow, fast = made(client, "slow"), made(client, "fast")
    go, update_one = threading.Event(), MonitorSession.update

    def held(self, *pair, **options):
        if self.name == "slow":
            assert go.wait(600)
        return update_one(self, *pair, **options)

    monkeypatch.setattr(MonitorSession, "update", held)
    with ThreadPoolExecutor(60) as pool:  # more than the server has threads
        waiting = [pool.submit(updated, client, slow, stream(5)) for _ in range(50)]
        try:
            deadline = time.monotonic() + 600
            while client.app.state.monitors.get(slow).waiting < 50:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert updated(client, fast, stream(5))["status"]["rows"] == 5
            assert state(client, slow)["status"]["rows"] == 0
        finally:
            go.set()
    assert sorted(job.result()["status"]["rows"] for job in waiting) == [5 * (k + 1) for k in range(50)]


def test_an_update_that_waited_for_a_deleted_monitor_is_told(client, monkeypatch):
    id, go, entered, update_one = made(client, "doomed"), threading.Event(), threading.Event(), MonitorSession.update

    def held(self, *pair, **options):
        entered.set()
        assert go.wait(600)
        return update_one(self, *pair, **options)

    monkeypatch.setattr(MonitorSession, "update", held)
    session = client.app.state.monitors.get(id)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(update, client, id, stream(5)) for _ in range(2)]
        try:
            deadline = time.monotonic() + 600
            while session.waiting < 2 or not entered.is_set():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert client.delete(f"/api/monitors/{id}").status_code == 204
        finally:
            go.set()
        assert sorted(job.result().status_code for job in jobs) == [200, 404]
    assert session.monitor.rows == 5


def test_too_many_updates_at_once_are_told(monkeypatch):
    go, entered, update_one = threading.Event(), threading.Event(), MonitorSession.update

    def held(self, *pair, **options):
        entered.set()
        assert go.wait(600)
        return update_one(self, *pair, **options)

    monkeypatch.setattr(MonitorSession, "update", held)
    with served(waiting=1) as client, ThreadPoolExecutor(1) as pool:
        id = made(client, "busy")
        first = pool.submit(update, client, id, stream(5))
        try:
            assert entered.wait(600)
            answer = update(client, id, stream(5))
            assert "try again" in error(answer, 503)
            assert answer.headers["retry-after"] == "60"
        finally:
            go.set()
        assert first.result().status_code == 200
