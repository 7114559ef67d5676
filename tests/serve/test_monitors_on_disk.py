"""Monitors that are kept: in the server's folder, over a restart, and in files that come back."""

import json
import time

import numpy as np
import pytest
from monitored import error, made, replay, state, stream, update, updated
from serving import of, served

from artifact_files import rewrite_artifact
from trueup import METHODS, load, save
from trueup.monitor import Monitor, MonitorSizes
from trueup.serve import monitors
from trueup.serve.app import create_app
from trueup.serve.settings import Settings


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
    monitor = Monitor(3, sizes=MonitorSizes(block=10))
    monitor.update(*first)
    assert found["status"] == monitor.update(*second).to_dict()
    assert found["status"]["alarm"] is not None
    kept = load(folder / f"{id}.safetensors")
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
        assert load(tmp_path / "a" / f"{id}.safetensors").rows == 20
    with served(monitors_folder=tmp_path / "b", checkpoint_seconds=0) as client:
        id = made(client, "at once")
        for rows in (20, 40):
            assert updated(client, id, stream(20))["saved_rows"] == rows
            assert load(tmp_path / "b" / f"{id}.safetensors").rows == rows


def test_a_full_disk_is_told_and_survived(tmp_path, monkeypatch):
    def full(monitor, path):
        raise OSError(28, "No space left on device", str(path))

    with served(monitors_folder=tmp_path, checkpoint_seconds=0) as client:
        id = made(client, "kept")
        monkeypatch.setattr(monitors, "save", full)
        not_counted = "the update was not counted, since it cannot be written: No space left on device"
        assert error(update(client, id, stream(20)), 507) == not_counted
        found = state(client, id)
        assert (found["status"]["rows"], found["saved_rows"], found["problem"]) == (0, 0, "No space left on device")
        refused = client.post("/api/monitors", json={"name": "another", "n_classes": 3})
        assert error(refused, 507) == "the monitor was not made, since it cannot be written: No space left on device"
        assert len(client.get("/api/monitors").json()) == 1
        assert "trueup_failed_checkpoints_total 2.0" in client.get("/metrics").text
        monkeypatch.undo()
        found = updated(client, id, stream(20))
        assert (found["status"]["rows"], found["saved_rows"], found["problem"]) == (20, 20, None)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted([f"{id}.json", f"{id}.safetensors", ".lock"])


def test_a_deleted_monitor_does_not_come_back(tmp_path):
    with served(monitors_folder=tmp_path, checkpoint_seconds=0.02) as client:
        id = made(client, "gone")
        updated(client, id, stream(20))
        session = client.app.state.monitors.get(id)
        assert client.delete(f"/api/monitors/{id}").status_code == 204
        client.app.state.monitors.commit(session, session.update(*stream(20)))  # one that was on its way
        time.sleep(0.1)
        for answer in (client.get(f"/api/monitors/{id}"), client.delete(f"/api/monitors/{id}")):
            assert error(answer, 404) == "there is no monitor under that id"
        assert error(update(client, id, stream(5)), 404)
        assert error(replay(client, id, of(stream(5))), 404)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_folder_belongs_to_one_server(tmp_path):
    pytest.importorskip("fcntl", reason="there are no such locks here")
    with served(monitors_folder=tmp_path), pytest.raises(ValueError, match="another server keeps its monitors there"):
        create_app(Settings(monitors_folder=tmp_path))
    create_app(Settings(monitors_folder=tmp_path)).state.monitors.close()


def test_a_folder_that_cannot_be_used_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="file: monitors cannot be kept there: File exists"):
        create_app(Settings(monitors_folder=tmp_path / "file"))


def test_checkpoints_put_there_by_hand_are_taken_by_their_names(tmp_path):
    monitor = Monitor(3)
    monitor.update(*stream(40))
    save(monitor, tmp_path / "night shift.safetensors")
    with served(monitors_folder=tmp_path) as client:
        (found,) = client.get("/api/monitors").json()
        assert (found["name"], found["status"]["rows"]) == ("night shift", 40)
        assert updated(client, found["id"], stream(2))["status"]["rows"] == 42
    assert load(tmp_path / "night shift.safetensors").rows == 42


def test_monitors_do_not_expire_as_data_does():
    now = [0.0]
    with served(seconds=60, clock=lambda: now[0]) as client:
        id = made(client, "patient")
        now[0] = 1e7
        client.app.state.store.sweep()
        assert state(client, id)["name"] == "patient"


def test_a_checkpoint_goes_home_and_comes_back(client, tmp_path):
    id = made(client, "Müller & Söhne/1", block=10)
    updated(client, id, stream(123))
    answer = client.get(f"/api/monitors/{id}/file")
    assert answer.headers["content-disposition"] == 'attachment; filename="M-ller-S-hne-1.safetensors"'
    (tmp_path / "home.safetensors").write_bytes(answer.content)
    monitor = load(tmp_path / "home.safetensors")
    back = client.post("/api/monitors/restore", params={"name": "back"}, content=answer.content)
    assert back.status_code == 201
    assert back.json()["status"] == monitor.status().to_dict()
    other = back.json()["id"]
    assert other != id
    assert updated(client, other, stream(50, seed=2))["status"] == monitor.update(*stream(50, seed=2)).to_dict()
    taken = client.post("/api/monitors/restore", params={"name": "back"}, content=answer.content)
    assert "there is already a monitor 'back'" in error(taken, 409)


def checkpoint(tmp_path, change):
    path = tmp_path / "changed.safetensors"
    monitor = Monitor(3)
    monitor.update(*stream(40))
    save(monitor, path)
    before = path.read_bytes()
    rewrite_artifact(path, lambda header, arrays: header.update(json.loads(change(json.dumps(header)))))
    assert path.read_bytes() != before
    return path.read_bytes()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ('"n_classes": 3', '"n_classes": 1000000000', "n_classes must be at most 20,000"),
        ('"n_classes": 3', '"n_classes": 4', "do not fit its settings"),
        ('"bins": 15', '"bins": 100000000', "bins"),
        ('"rows": 40', '"rows": "x"', "the checkpoint"),
        ('"begun": 1', '"begun": -9', "begun"),
        ('"kind": "monitor"', '"kind": "calibrator"', "must hold a monitor"),
        ('"settings"', '"sittings"', "settings must be a dictionary, got None"),
        ('"settings": ', '"settings": [[1, 2]], "others": ', "settings must be a dictionary, got [[1, 2]]"),
        ('"seen": ', '"seen": 7, "others": ', "seen must be a dictionary, got 7"),
    ],
)
@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_a_forged_checkpoint_is_refused(client, tmp_path, old, new, told):
    body = checkpoint(tmp_path, lambda header: header.replace(old, new))
    answer = client.post("/api/monitors/restore", params={"name": "forged"}, content=body)
    assert told in error(answer, 409)
    assert "/tmp" not in answer.text
    assert "forged" not in [one["name"] for one in client.get("/api/monitors").json()]


def test_other_files_are_no_checkpoints(client, tmp_path):
    save(METHODS["temperature"](*stream()), tmp_path / "cal.safetensors")
    for body in (b"", b"junk", (tmp_path / "cal.safetensors").read_bytes(), of(stream(10))):
        assert error(client.post("/api/monitors/restore", params={"name": "forged"}, content=body), 409)
    assert "name" in error(client.post("/api/monitors/restore", content=b""), 409)


@pytest.mark.parametrize("name", ["two\nlines", "", "   ", "x" * 101, 7, None, ["a"], "\u202ereversed\x00"])
def test_a_name_on_disk_is_checked_like_one_of_a_request(name, tmp_path, caplog):
    save(Monitor(3), tmp_path / "kept.safetensors")
    (tmp_path / "kept.json").write_text(json.dumps({"name": name}))
    with served(monitors_folder=tmp_path) as client:
        assert [one["name"] for one in client.get("/api/monitors").json()] == ["kept"]
    assert any("kept.json is damaged" in record.getMessage() for record in caplog.records)


def test_a_flipped_bit_sets_a_checkpoint_aside(tmp_path):
    monitor = Monitor(3)
    monitor.update(*stream(40))
    rng = np.random.default_rng(0)
    for number in range(60):
        save(monitor, tmp_path / f"m{number}.safetensors")
        content = bytearray((tmp_path / f"m{number}.safetensors").read_bytes())
        content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
        (tmp_path / f"m{number}.safetensors").write_bytes(content)
    with served(monitors_folder=tmp_path, monitors=100) as client:
        loaded = client.get("/api/monitors").json()
    for one in loaded:  # a bit that means nothing, such as one in a space
        assert one["status"] == monitor.status().to_dict()
    assert len(loaded) <= 3
    assert len(list(tmp_path.glob("*.damaged"))) == 60 - len(loaded)
