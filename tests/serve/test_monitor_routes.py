"""Monitors over the API: the numbers are the library's, and settings, limits and figures are told."""

import io
import sys
import time
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from monitored import error, made, replay, state, stream, update, updated
from serving import npz, of, served

from trueup import save
from trueup.io import Predictions
from trueup.monitor import Monitor, MonitorSizes
from trueup.serve.monitors import MAX_POINTS_PER_LOG, History
from trueup.serve.settings import Settings

parser = pytest.importorskip("prometheus_client.parser")


def test_a_monitor_is_the_library_s(client):
    id = made(client, "the library", level=0.95, window=300, half_life=50, block=20, classwise=False, bins=7)
    monitor = Monitor(3, level=0.95, classwise=False, sizes=MonitorSizes(window=300, half_life=50, block=20, bins=7))
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
        save(log, tmp_path / f"log{suffix}")
        body = (tmp_path / f"log{suffix}").read_bytes()
    id = made(client, f"log{suffix}", block=10, window=1000)
    first, monitor = stream(17, seed=1), Monitor(3, sizes=MonitorSizes(block=10, window=1000))
    updated(client, id, first)
    monitor.update(*first)
    answer = replay(client, id, body, f"log{suffix}")
    assert answer.status_code == 200, answer.text
    status = monitor.update(*log)
    assert answer.json()["status"] == status.to_dict()
    assert status.alarm is not None
    assert answer.json()["replaying"] is None
    history = state(client, id)["history"]
    assert MAX_POINTS_PER_LOG / 2 < len(history["rows"]) <= MAX_POINTS_PER_LOG + 3
    assert history["rows"] == sorted(set(history["rows"]))
    assert history["rows"][-1] == 2_107


def test_probabilities_and_names_of_a_log(client):
    log = stream(50)
    p = np.exp(log.logits) / np.exp(log.logits).sum(axis=1, keepdims=True)
    id = made(client, "probabilities")
    answer = replay(client, id, npz(p=p, y=log.labels), probs=True, logits="p", labels="y")
    assert answer.json()["status"]["nll"] == pytest.approx(Monitor(3).update(*log).nll)
    assert answer.json()["notes"] == []
    told = error(replay(client, id, npz(logits=p, labels=log.labels)), 409)
    assert told == (
        "log.npz: logits must not be probabilities, got rows of numbers in [0, 1] that sum to 1; choose which they are "
        "under “What is in the file?”, or send probs=true or probs=false"
    )
    assert state(client, id)["status"]["rows"] == 50
    found = replay(client, id, npz(logits=p, labels=log.labels), probs=False).json()
    assert found["status"]["rows"] == 100
    for name, options in (("probs", {"logits": "probs"}), ("logits", {"probs": True})):
        told = error(replay(client, id, npz(**{name: log.logits}, labels=log.labels), **options), 409)
        assert "tick" not in told  # there is no box on this page
        assert "under “What is in the file?”" in told


def test_limits():
    with served(monitors=2, n_classes=50, json_bytes=2000, upload_bytes=3000) as client:
        id = made(client, "one")
        assert "there is already a monitor 'one'" in error(
            client.post("/api/monitors", json={"name": " one ", "n_classes": 2}), 409
        )
        assert "at most 50" in error(client.post("/api/monitors", json={"name": "wide", "n_classes": 51}), 409)
        made(client, "two")
        assert "there are already 2 monitors" in error(
            client.post("/api/monitors", json={"name": "3", "n_classes": 2}), 409
        )
        assert error(client.post("/api/monitors/example"), 409)
        assert error(update(client, id, stream(100)), 413) == "the body is too large: at most 2,000 bytes are accepted"
        assert "too large" in error(replay(client, id, of(stream(1000))), 413)
        assert replay(client, id, of(stream(80))).status_code == 200  # longer than what is no file may be
        client.delete(f"/api/monitors/{id}")
        made(client, "one")


@pytest.mark.parametrize(
    "wrong",
    [
        *({"name": " "}, {"name": "a\nb"}, {"name": "x" * 101}, {"n_classes": 1}, {"level": 0}, {"level": 1}),
        *({"window": 0}, {"half_life": 0}, {"block": 1}, {"classwise": "perhaps"}, {"bins": 0}, {"sorcery": 1}),
    ],
    ids=str,
)
def test_settings_that_are_wrong_are_told(client, wrong):
    answer = client.post("/api/monitors", json={"name": "wrong", "n_classes": 3, **wrong})
    assert next(iter(wrong)) in error(answer, 409)
    assert "wrong" not in [one["name"] for one in client.get("/api/monitors").json()]


def test_prometheus_reads_it():
    names = ["plain", 'say "hi" \\ {there}, a=b', "ünïcode ✓"]
    with served() as client:
        ids = [made(client, name) for name in names]
        status = updated(client, ids[0], stream(400, temperature=3.0))["status"]
        error(update(client, ids[1], stream(5, classes=4)), 409)
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
    room = ModuleType("trueup.serve.server")
    room.run = lambda **options: asked.append(options)
    monkeypatch.setitem(sys.modules, "trueup.serve.server", room)
    for arguments in ([], ["--monitors", str(tmp_path)]):
        assert CliRunner().invoke(app, ["serve", "-q", *arguments]).exit_code == 0
    assert asked[0]["settings"].monitors_folder is None
    assert asked[1]["settings"] == Settings(monitors_folder=tmp_path)


def test_a_promise_and_rows_without_labels(client):
    promise = {"threshold": 0.6, "max_risk": 0.3, "level": 0.9, "risk": "error"}
    id = made(client, "promised", promise=promise)
    monitor, rows = Monitor(3, promise=promise), stream(400)
    expected = client.post(f"/api/monitors/{id}/expect", json={"logits": rows.logits.tolist()}).json()
    assert expected["status"] == monitor.expect(rows.logits).to_dict()
    body = {"logits": rows.logits.tolist(), "labels": rows.labels.tolist(), "awaited": True}
    found = client.post(f"/api/monitors/{id}/update", json=body).json()
    assert found["status"] == monitor.update(*rows, awaited=True).to_dict()
    assert found["status"]["promise"]["answered"] > 0
    assert found["status"]["unlabelled"] is None
    assert "wait" in error(client.post(f"/api/monitors/{id}/update", json=body), 409)
    restored = client.post("/api/monitors/restore?name=again", content=client.get(f"/api/monitors/{id}/file").content)
    assert restored.json()["status"] == found["status"]
    assert 'trueup_promise_broken{monitor="promised"}' in client.get("/metrics").text
