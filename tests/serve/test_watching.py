"""Monitors over the API: nothing is lost, nothing half done, and the numbers are the library's."""

import io
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving import npz, of, served

from trueup import METHODS, save, save_calibrator
from trueup.monitor import Monitor, load_monitor, save_monitor
from trueup.predictions import Predictions
from trueup.serve import watches
from trueup.serve.app import create_app
from trueup.serve.settings import Settings
from trueup.serve.watches import POINTS, History, Watch

parser = pytest.importorskip("prometheus_client.parser")


def stream(rows=700, classes=3, seed=0, temperature=1.0):
    rng = np.random.default_rng(seed)
    z = 2 * rng.normal(size=(rows, classes))
    return Predictions(z, (z / temperature + rng.gumbel(size=z.shape)).argmax(axis=1))


def made(client, name, classes=3, **settings):
    answer = client.post("/api/monitors", json={"name": name, "classes": classes, **settings})
    assert answer.status_code == 201, answer.text
    return answer.json()["id"]


def update(client, id, pair):
    rows = {"logits": np.asarray(pair[0]).tolist(), "labels": np.asarray(pair[1]).tolist()}
    return client.post(f"/api/monitors/{id}/update", json=rows)


def updated(client, id, pair):
    answer = update(client, id, pair)
    assert answer.status_code == 200, answer.text
    return answer.json()


def replay(client, id, body, name="log.npz", **options):
    return client.post(f"/api/monitors/{id}/replay", params={"name": name, **options}, content=body)


def state(client, id):
    return client.get(f"/api/monitors/{id}").json()


def error(answer, status):
    assert answer.status_code == status, answer.text
    assert list(answer.json()) == ["error"]
    return answer.json()["error"]


def test_a_monitor_is_the_library_s(client):
    id = made(client, "the library", alpha=0.05, window=300, half_life=50, block=20, classwise=False, bins=7)
    monitor = Monitor(3, alpha=0.05, window=300, half_life=50, block=20, classwise=False, bins=7)
    found = state(client, id)
    assert found["status"] == monitor.status().to_dict()
    assert found["history"] == {"rows": []}
    assert found["settings"]["bins"] == 7
    assert found["saved_rows"] is None
    rows, lines = stream(731), []
    for start in range(0, 731, 37):
        part = Predictions(rows.logits[start : start + 37], rows.labels[start : start + 37])
        found, status = updated(client, id, part), monitor.update(*part)
        assert found["status"] == status.to_dict()
        lines.append((status.rows, status.evidence, status.recent_ece))
    history = state(client, id)["history"]
    told = list(zip(history["rows"], history["evidence"], history["ece"], strict=True))
    assert set(lines) <= set(told)  # and points within a batch
    assert [one["name"] for one in client.get("/api/monitors").json() if one["id"] == id] == ["the library"]
    assert time.time() - 60 < found["updated"] <= time.time()


@pytest.mark.parametrize("suffix", [".npz", ".csv", ".parquet", ".safetensors", ".npy"])
def test_a_log_of_any_format_is_replayed(client, tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    log = stream(2_090, temperature=2.0)
    if suffix == ".npy":
        file = io.BytesIO()
        np.save(file, log.logits)
        np.save(file, log.labels)
        body = file.getvalue()
    else:
        save(tmp_path / f"log{suffix}", log)
        body = (tmp_path / f"log{suffix}").read_bytes()
    id = made(client, f"log{suffix}", block=10, window=1000)
    first, monitor = stream(17, seed=1), Monitor(3, block=10, window=1000)
    updated(client, id, first)
    monitor.update(*first)
    answer = replay(client, id, body, f"log{suffix}")
    assert answer.status_code == 200, answer.text
    status = monitor.update(*log)
    assert answer.json()["status"] == status.to_dict()
    assert status.alarm is not None
    assert answer.json()["replaying"] is None
    history = state(client, id)["history"]
    assert POINTS / 2 < len(history["rows"]) <= POINTS + 3
    assert history["rows"] == sorted(set(history["rows"]))
    assert history["rows"][-1] == 2_107


def test_probabilities_and_names_of_a_log(client):
    log = stream(50)
    p = np.exp(log.logits) / np.exp(log.logits).sum(axis=1, keepdims=True)
    id = made(client, "probabilities")
    answer = replay(client, id, npz(p=p, y=log.labels), probs=True, logits="p", labels="y")
    assert answer.json()["status"]["nll"] == pytest.approx(Monitor(3).update(*log).nll)
    assert answer.json()["notes"] == []
    told = error(replay(client, id, npz(logits=p, labels=log.labels)), 422)
    assert told == (
        "log.npz: each row sums to 1 like probabilities, but was read as logits; say probs=true if they are, "
        "else probs=false"
    )
    assert state(client, id)["status"]["rows"] == 50
    found = replay(client, id, npz(logits=p, labels=log.labels), probs=False).json()
    assert found["status"]["rows"] == 100
    assert "probabilities" in found["notes"][0]


def broken(change):
    z, y = (array.copy() for array in stream(250))
    change(z, y)
    return z, y


WRONG = {
    "classes": ((stream(9, 4)), "logits must have 3 classes, got 4"),
    "labels": (broken(lambda z, y: y.__setitem__(-1, 3)), "labels must lie in 0..2, got 0..3"),
    "length": ((stream(9).logits, stream(8).labels), "labels must have 9 entries, one for each row of logits, got 8"),
    "finite": (broken(lambda z, y: z.__setitem__((-1, 0), 3e999)), "logits must be finite"),
}


@pytest.fixture(scope="module")
def watched(client):
    id = made(client, "not to be changed", block=10)
    updated(client, id, stream(33))
    return id


@pytest.mark.parametrize("what", WRONG)
def test_rows_that_are_wrong_change_nothing(client, watched, what):
    pair, told = WRONG[what]
    before = state(client, watched)
    body = {"logits": np.asarray(pair[0]).tolist(), "labels": np.asarray(pair[1]).tolist()}
    text = str(body).replace("'", '"').replace("inf", "Infinity").encode()
    sent = client.post(f"/api/monitors/{watched}/update", content=text, headers={"Content-Type": "application/json"})
    assert told in error(sent, 422)
    assert error(replay(client, watched, npz(logits=pair[0], labels=pair[1])), 422)
    assert state(client, watched) == before


@pytest.mark.parametrize(
    ("body", "name", "told"),
    [
        (of(stream(100))[:-40], "log.npz", "log.npz"),
        (b"", "log.npz", "the file is empty"),
        (of(stream(100)), "log.pkl", "the suffix must be one of"),
        (
            npz(**{f"{half}_{name}": array for half in ("val", "test") for name, array in stream(9)._asdict().items()}),
            "both.npz",
            "both.npz: a log has one list of rows, got val and test",
        ),
    ],
)
def test_logs_that_are_wrong_change_nothing(client, watched, body, name, told):
    before = state(client, watched)
    assert told in error(replay(client, watched, body, name), 422)
    assert state(client, watched) == before


def test_bodies_that_are_wrong_change_nothing(client, watched):
    before = state(client, watched)
    path = f"/api/monitors/{watched}/update"
    assert "rectangular" in error(client.post(path, json={"logits": [[1, 2, 3], [1, 2]], "labels": [0, 0]}), 422)
    assert error(client.post(path, json={"logits": [[1, 2, 3]], "labels": [0.5]}), 422).startswith("labels.0:")
    assert error(client.post(path, json={"logits": [[1, 2, 3]]}), 422).startswith("labels:")
    assert error(client.post(path, json={"logit": []}), 422)
    assert error(client.post(path, content=b"{"), 422)
    assert state(client, watched) == before


def test_an_update_that_fails_halfway_is_undone(monkeypatch):
    watch = Watch("id", "name", Monitor(3, block=10), History(500))
    watch.update(*stream(55))
    before, points = watch.monitor.status(), watch.history.columns()
    whole, calls = Monitor.update, []

    def tired(self, *pair):
        calls.append(pair)
        if len(calls) == 3:
            raise MemoryError
        return whole(self, *pair)

    monkeypatch.setattr(Monitor, "update", tired)
    with pytest.raises(MemoryError):
        watch.update(*stream(500))
    assert watch.monitor.status() == before
    assert watch.history.columns() == points
    assert watch.replaying is None


def test_no_rows_are_no_news():
    watch = Watch("id", "name", Monitor(3), History(500))
    watch.update(np.zeros((0, 3)), np.zeros(0, int))
    assert watch.monitor.rows == 0
    assert watch.history.columns() == {"rows": []}


def test_eight_threads_lose_no_rows(client):
    id = made(client, "eight threads", block=10, window=10**6)
    parts = [stream(7, seed=seed) for seed in range(80)]
    with ThreadPoolExecutor(8) as pool:
        seen = list(pool.map(lambda part: updated(client, id, part)["status"]["rows"], parts))
    assert sorted(seen) == [7 * (k + 1) for k in range(80)]  # each saw the rows of those before it, and its own
    status, whole = state(client, id)["status"], Monitor(3, block=10, window=10**6)
    whole.update(*(np.concatenate(arrays) for arrays in zip(*parts, strict=True)))
    for figure in ("rows", "accuracy", "confidence", "nll", "ece"):
        assert status[figure] == pytest.approx(getattr(whole.status(), figure))


def test_one_monitor_does_not_wait_for_another(client, monkeypatch):
    slow, fast = made(client, "slow"), made(client, "fast")
    go, update_one = threading.Event(), Watch.update

    def held(self, *pair):
        if self.name == "slow":
            assert go.wait(20)
        update_one(self, *pair)

    monkeypatch.setattr(Watch, "update", held)
    with ThreadPoolExecutor(60) as pool:  # more than the server has threads
        waiting = [pool.submit(updated, client, slow, stream(5)) for _ in range(50)]
        try:
            deadline = time.monotonic() + 20
            while client.app.state.watches.get(slow).waiting < 50:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert updated(client, fast, stream(5))["status"]["rows"] == 5
            assert state(client, slow)["status"]["rows"] == 0
        finally:
            go.set()
    assert sorted(job.result()["status"]["rows"] for job in waiting) == [5 * (k + 1) for k in range(50)]


def test_an_update_that_waited_for_a_deleted_monitor_is_told(client, monkeypatch):
    id, go, entered, update_one = made(client, "doomed"), threading.Event(), threading.Event(), Watch.update

    def held(self, *pair):
        entered.set()
        assert go.wait(20)
        update_one(self, *pair)

    monkeypatch.setattr(Watch, "update", held)
    watch = client.app.state.watches.get(id)
    with ThreadPoolExecutor(2) as pool:
        jobs = [pool.submit(update, client, id, stream(5)) for _ in range(2)]
        try:
            deadline = time.monotonic() + 20
            while watch.waiting < 2 or not entered.is_set():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert client.delete(f"/api/monitors/{id}").status_code == 204
        finally:
            go.set()
        assert sorted(job.result().status_code for job in jobs) == [200, 404]
    assert watch.monitor.rows == 5


def test_too_many_updates_at_once_are_told(monkeypatch):
    go, entered = threading.Event(), threading.Event()

    def held(self, *pair):
        entered.set()
        assert go.wait(20)

    monkeypatch.setattr(Watch, "update", held)
    with served(waiting=1) as client, ThreadPoolExecutor(1) as pool:
        id = made(client, "busy")
        first = pool.submit(update, client, id, stream(5))
        try:
            assert entered.wait(20)
            answer = update(client, id, stream(5))
            assert "try again" in error(answer, 503)
            assert answer.headers["retry-after"] == "60"
        finally:
            go.set()
        assert first.result().status_code == 200


def test_a_restart_goes_on_exactly(tmp_path):
    folder, first, second = tmp_path / "deep" / "monitors", stream(333), stream(500, seed=1, temperature=2.0)
    with served(monitors_folder=folder, checkpoint_seconds=1000) as client:
        id = made(client, "prod/net “1” ✓", block=10)
        found = updated(client, id, first)
        assert (found["status"]["rows"], found["saved_rows"]) == (333, 0)
    with served(monitors_folder=folder) as client:
        (found,) = client.get("/api/monitors").json()
        assert (found["id"], found["name"], found["saved_rows"], found["updated"]) == (id, "prod/net “1” ✓", 333, None)
        assert state(client, id)["history"]["rows"] == [333]  # the charts begin anew
        found = updated(client, id, second)
    monitor = Monitor(3, block=10)
    monitor.update(*first)
    assert found["status"] == monitor.update(*second).to_dict()
    assert found["status"]["alarm"] is not None
    kept = load_monitor(folder / f"{id}.safetensors")
    np.testing.assert_array_equal(kept.evidence.wealth, monitor.evidence.wealth)
    assert kept.status() == monitor.status()


def test_checkpoints_are_written_meanwhile_and_if_wanted_before_each_answer(tmp_path):
    with served(monitors_folder=tmp_path / "a", checkpoint_seconds=0.05) as client:
        id = made(client, "soon")
        updated(client, id, stream(20))
        deadline = time.monotonic() + 20
        while state(client, id)["saved_rows"] < 20:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert load_monitor(tmp_path / "a" / f"{id}.safetensors").rows == 20
    with served(monitors_folder=tmp_path / "b", checkpoint_seconds=0) as client:
        id = made(client, "at once")
        for rows in (20, 40):
            assert updated(client, id, stream(20))["saved_rows"] == rows
            assert load_monitor(tmp_path / "b" / f"{id}.safetensors").rows == rows


def test_a_full_disk_is_told_and_survived(tmp_path, monkeypatch):
    def full(monitor, path):
        raise OSError(28, "No space left on device", str(path))

    with served(monitors_folder=tmp_path, checkpoint_seconds=0) as client:
        id = made(client, "kept")
        monkeypatch.setattr(watches, "save_monitor", full)
        found = updated(client, id, stream(20))
        assert (found["status"]["rows"], found["saved_rows"], found["problem"]) == (20, 0, "No space left on device")
        refused = client.post("/api/monitors", json={"name": "another", "classes": 3})
        assert error(refused, 507) == "the monitor was not made, for it cannot be kept: No space left on device"
        assert len(client.get("/api/monitors").json()) == 1
        assert "trueup_failed_checkpoints_total 2.0" in client.get("/metrics").text
        monkeypatch.undo()
        found = updated(client, id, stream(20))
        assert (found["status"]["rows"], found["saved_rows"], found["problem"]) == (40, 40, None)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"{id}.json", f"{id}.safetensors", ".lock"])


def test_a_deleted_monitor_does_not_come_back(tmp_path):
    with served(monitors_folder=tmp_path, checkpoint_seconds=0.02) as client:
        id = made(client, "gone")
        updated(client, id, stream(20))
        watch = client.app.state.watches.get(id)
        assert client.delete(f"/api/monitors/{id}").status_code == 204
        watch.update(*stream(20))  # one that was on its way
        client.app.state.watches.write(watch)
        time.sleep(0.1)
        for answer in (client.get(f"/api/monitors/{id}"), client.delete(f"/api/monitors/{id}")):
            assert error(answer, 404) == "no monitor is kept here under that id"
        assert error(update(client, id, stream(5)), 404)
        assert error(replay(client, id, of(stream(5))), 404)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_folder_belongs_to_one_server(tmp_path):
    pytest.importorskip("fcntl", reason="there are no such locks here")
    with served(monitors_folder=tmp_path), pytest.raises(ValueError, match="another server keeps its monitors there"):
        create_app(Settings(monitors_folder=tmp_path))
    create_app(Settings(monitors_folder=tmp_path)).state.watches.close()


def test_a_folder_that_cannot_be_used_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file: monitors cannot be kept there: File exists"):
        create_app(Settings(monitors_folder=tmp_path / "file"))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "odd.safetensors").write_bytes(b"nothing of ours")
    for _ in range(2):  # and it stays free for others
        with pytest.raises(ValueError, match=r"odd\.safetensors"):
            create_app(Settings(monitors_folder=folder))


def test_checkpoints_put_there_by_hand_are_taken_by_their_names(tmp_path):
    monitor = Monitor(3)
    monitor.update(*stream(40))
    save_monitor(monitor, tmp_path / "night shift.safetensors")
    with served(monitors_folder=tmp_path) as client:
        (found,) = client.get("/api/monitors").json()
        assert (found["name"], found["status"]["rows"]) == ("night shift", 40)
        assert updated(client, found["id"], stream(2))["status"]["rows"] == 42
    assert load_monitor(tmp_path / "night shift.safetensors").rows == 42


def test_monitors_do_not_expire_as_data_does():
    now = [0.0]
    with served(seconds=60, clock=lambda: now[0]) as client:
        id = made(client, "patient")
        now[0] = 1e7
        client.app.state.store.sweep()
        assert state(client, id)["name"] == "patient"


def test_limits():
    with served(monitors=2, classes=50, json_bytes=2000, upload_bytes=3000) as client:
        id = made(client, "one")
        assert "called 'one' already" in error(client.post("/api/monitors", json={"name": " one ", "classes": 2}), 409)
        assert "at most 50 here" in error(client.post("/api/monitors", json={"name": "wide", "classes": 51}), 422)
        made(client, "two")
        assert "there are 2 monitors already" in error(
            client.post("/api/monitors", json={"name": "3", "classes": 2}), 409
        )
        assert error(client.post("/api/monitors/example"), 409)
        assert error(update(client, id, stream(100)), 413) == "the request must have at most 2,000 bytes"
        assert "too large" in error(replay(client, id, of(stream(1000))), 413)
        assert replay(client, id, of(stream(80))).status_code == 200  # longer than what is no file may be
        client.delete(f"/api/monitors/{id}")
        made(client, "one")


@pytest.mark.parametrize(
    "wrong",
    [
        *({"name": " "}, {"name": "a\nb"}, {"name": "x" * 101}, {"classes": 1}, {"alpha": 0}, {"alpha": 1}),
        *({"window": 0}, {"half_life": 0}, {"block": 1}, {"classwise": "perhaps"}, {"bins": 0}, {"sorcery": 1}),
    ],
    ids=str,
)
def test_settings_that_are_wrong_are_told(client, wrong):
    answer = client.post("/api/monitors", json={"name": "wrong", "classes": 3, **wrong})
    assert error(answer, 422).startswith(next(iter(wrong)))
    assert "wrong" not in [one["name"] for one in client.get("/api/monitors").json()]


def test_a_checkpoint_goes_home_and_comes_back(client, tmp_path):
    id = made(client, "Müller & Söhne/1", block=10)
    updated(client, id, stream(123))
    answer = client.get(f"/api/monitors/{id}/file")
    assert answer.headers["content-disposition"] == 'attachment; filename="M-ller-S-hne-1.safetensors"'
    (tmp_path / "home.safetensors").write_bytes(answer.content)
    monitor = load_monitor(tmp_path / "home.safetensors")
    back = client.post("/api/monitors/restore", params={"name": "back"}, content=answer.content)
    assert back.status_code == 201
    assert back.json()["status"] == monitor.status().to_dict()
    other = back.json()["id"]
    assert other != id
    assert updated(client, other, stream(50, seed=2))["status"] == monitor.update(*stream(50, seed=2)).to_dict()
    taken = client.post("/api/monitors/restore", params={"name": "back"}, content=answer.content)
    assert "called 'back' already" in error(taken, 409)


def checkpoint(tmp_path, change):
    path = tmp_path / "changed.safetensors"
    monitor = Monitor(3)
    monitor.update(*stream(40))
    save_monitor(monitor, path)
    size, text = int.from_bytes(path.read_bytes()[:8], "little"), path.read_bytes()
    header = change(text[8 : 8 + size])
    assert header != text[8 : 8 + size]
    return len(header).to_bytes(8, "little") + header + text[8 + size :]


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        (rb"\"classes\": 3", rb"\"classes\": 1000000000", "classes must be at most 20,000 here"),
        (rb"\"classes\": 3", rb"\"classes\": 4", "do not fit its settings"),
        (rb"\"bins\": 15", rb"\"bins\": 100000000", "bins"),
        (rb"\"rows\": 40", rb"\"rows\": \"x\"", "the checkpoint"),
        (rb"\"begun\": 1", rb"\"begun\": -9", "begun"),
        (b"trueup_monitor", b"trueup_marmalad", "holds no monitor"),
        (rb"\"settings\"", rb"\"sittings\"", "classes"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_forged_checkpoint_is_refused(client, tmp_path, old, new, told):
    body = checkpoint(tmp_path, lambda header: header.replace(old, new))
    answer = client.post("/api/monitors/restore", params={"name": "forged"}, content=body)
    assert told in error(answer, 422)
    assert "/tmp" not in answer.text
    assert "forged" not in [one["name"] for one in client.get("/api/monitors").json()]


def test_other_files_are_no_checkpoints(client, tmp_path):
    save_calibrator(METHODS["temperature"](*stream()), tmp_path / "cal.safetensors")
    for body in (b"", b"junk", (tmp_path / "cal.safetensors").read_bytes(), of(stream(10))):
        assert error(client.post("/api/monitors/restore", params={"name": "forged"}, content=body), 422)
    assert "name" in error(client.post("/api/monitors/restore", content=b""), 422)


def test_prometheus_reads_it():
    names = ["plain", 'say "hi" \\ {there}, a=b', "ünïcode ✓"]
    with served() as client:
        ids = [made(client, name) for name in names]
        status = updated(client, ids[0], stream(400, temperature=3.0))["status"]
        error(update(client, ids[1], stream(5, classes=4)), 422)
        answer = client.get("/metrics")
        assert answer.headers["content-type"] == pytest.importorskip("prometheus_client").exposition.CONTENT_TYPE_LATEST
        families = {family.name: family for family in parser.text_string_to_metric_families(answer.text)}
    alarms = {sample.labels["monitor"]: sample.value for sample in families["trueup_alarm"].samples}
    assert alarms == dict(zip(names, (1, 0, 0), strict=True))
    ece = {tuple(sample.labels.values()): sample.value for sample in families["trueup_ece"].samples}
    assert ece["plain", "all"] == status["ece"]
    assert ece["plain", "window"] == status["recent_ece"]
    assert families["trueup_monitors"].samples[0].value == 3
    assert families["trueup_updates"].samples[0].value == 1
    assert families["trueup_refused_updates"].samples[0].value == 1


def test_the_example_drifts_and_is_found_out(client):
    found = [client.post("/api/monitors/example").json() for _ in range(2)]
    assert len({one["name"] for one in found}) == 2
    assert found[0]["status"] == found[1]["status"]
    assert 10_000 < found[0]["status"]["alarm"]["row"] < 11_000
    history = state(client, found[0]["id"])["history"]
    before = [e for row, e in zip(history["rows"], history["evidence"], strict=True) if row <= 10_000]
    assert max(before) < 100


def test_foreign_pages_are_refused_here_too(client, watched):
    for path in (f"/api/monitors/{watched}/replay?name=a.npz", f"/api/monitors/{watched}/update", "/api/monitors"):
        assert error(client.post(path, content=b"{}", headers={"Origin": "https://evil.example"}), 403)
    assert error(client.get("/metrics", headers={"Host": "evil.example"}), 400)
    assert "default-src 'none'" in client.get("/monitor").headers["content-security-policy"]


@given(st.lists(st.integers(1, 50), min_size=1, max_size=300), st.integers(4, 20))
def test_a_history_is_short_and_even(steps, most):
    history, rows = History(most), np.cumsum(steps).tolist()
    for at in rows:
        history.add(at, {"ece": at / 1000})
    kept = history.columns()["rows"]
    assert history.columns()["ece"] == [at / 1000 for at in kept]
    assert len(kept) <= most
    assert kept[-1] == rows[-1]
    assert set(kept) <= set(rows)
    assert kept == sorted(set(kept))
    if len(rows) > most:
        # No gap is much wider than if all points were spread evenly, but for the steps themselves.
        assert max(np.diff([rows[0], *kept])) <= 4 * (rows[-1] - rows[0]) / most + 2 * max(steps)
    else:
        assert kept == rows


def test_the_command_gives_the_folder(monkeypatch, tmp_path):
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from trueup.cli import app

    asked = []
    room = ModuleType("trueup.serve.run")
    room.run = lambda **options: asked.append(options)
    monkeypatch.setitem(sys.modules, "trueup.serve.run", room)
    for arguments in ([], ["--monitors", str(tmp_path)]):
        assert CliRunner().invoke(app, ["serve", "-q", *arguments]).exit_code == 0
    assert "settings" not in asked[0]
    assert asked[1]["settings"] == Settings(monitors_folder=tmp_path)
