"""The client and the routes of monitors: kinds of predictions, malformed requests, acknowledged alarms."""

import math

import numpy as np
import pytest
from monitored import error, made, state, stream
from serving import fitted, of, overconfident, served, uploaded

from trueup import METHODS, from_probs, load, save
from trueup.monitor import Monitor, MonitorSizes
from trueup.serve.client import Client, ServerError

parser = pytest.importorskip("prometheus_client.parser")


@pytest.fixture(scope="module")
def python(client):
    return Client(str(client.base_url))


def softmax(z):
    p = np.exp(z - z.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def stated(rows=300, seed=0):
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(0.1, 0.9, rows)
    return confidence, rng.random(rows) < confidence


def test_each_kind_of_predictions_gives_the_library_s_status(python):
    rows = stream(300)
    p = softmax(rows.logits)
    expected = Monitor(3).update(*rows).to_dict()
    kinds = {"logits": rows.logits, "probs": p}
    for name, values in kinds.items():
        info = python.create(f"kind {name}", 3)
        status = python.update(info.id, **{name: values}, labels=rows.labels).status
        assert status["nll"] == pytest.approx(expected["nll"])
        assert status["ece"] == pytest.approx(expected["ece"])
        assert python.expect(info.id, **{name: values}).status["unlabelled"]["rows"] == 300
        python.delete(info.id)


def test_probabilities_of_an_event_and_stated_confidences(python):
    confidence, correct = stated()
    expected = Monitor(2).update(from_probs(confidence), correct.astype(int)).to_dict()
    one, two = python.create("event", 2), python.create("confidence", 2)
    assert python.update(one.id, probs=confidence, labels=correct.astype(int)).status == expected
    assert python.update(two.id, confidence=confidence, correct=correct).status == expected
    assert python.update(two.id, confidence=[0.25], correct=[0]).status["rows"] == 301
    assert python.expect(two.id, confidence=[0.5]).status["unlabelled"]["rows"] == 1
    assert python.update(two.id, confidence=[0.5], correct=[1], awaited=True).status["unlabelled"] is None
    for info in (one, two):
        python.delete(info.id)


def test_zeros_among_probabilities_are_raised_with_a_note(python):
    info = python.create("votes", 2)
    assert "exact zeros" in python.update(info.id, probs=[[0.8, 0.2], [1.0, 0.0]], labels=[0, 0]).notes[0]
    python.delete(info.id)


REFUSED = [
    ({"labels": [0]}, "exactly one of logits, probs and confidence"),
    ({"probs": True, "labels": [0]}, "exactly one of logits, probs and confidence"),
    ({"logits": [[1, 2]], "probs": [[0.5, 0.5]], "labels": [0]}, "exactly one of logits, probs and confidence"),
    ({"logits": [[1, 2]]}, "send labels with logits or probs"),
    ({"logits": [[1, 2]], "correct": [1]}, "send labels with logits or probs"),
    ({"confidence": [0.5], "labels": [1]}, "send correct with confidence"),
    ({"confidence": [50, 60], "correct": [True, False]}, "got 50..60; divide percentages by 100"),
    ({"confidence": [0.5], "correct": [2]}, "correct"),
    ({"confidence": [0.5, 0.6], "correct": [1]}, "labels"),
    ({"confidence": ["0.5"], "correct": [1]}, "confidence"),
    ({"probs": [[0.5, 0.6]], "labels": [0]}, "probs must sum to 1"),
    ({"probs": [[0.2, 0.3, 0.5], [0.5, 0.5]], "labels": [0, 0]}, "rows must have equally many numbers"),
    ({"probs": "yes", "logits": [[1, 2]], "labels": [0]}, "probs"),
    ({"logits": [[0.9, 0.1]] * 6, "labels": [0] * 6}, "logits must not be probabilities"),
]


@pytest.mark.parametrize(("body", "told"), REFUSED, ids=str)
def test_malformed_updates_are_refused_and_counted(client, body, told):
    id = made(client, f"malformed {told}", n_classes=2)
    total = counted(client, "trueup_refused_updates")
    assert told in error(client.post(f"/api/monitors/{id}/update", json=body), 409)
    found = state(client, id)
    assert (found["refused"], found["status"]["rows"]) == (1, 0)
    assert counted(client, "trueup_refused_updates") == total + 1
    assert counted(client, "trueup_monitor_refused", monitor=f"malformed {told}") == 1
    client.delete(f"/api/monitors/{id}")


def test_bodies_that_are_no_json_too_long_or_no_log_are_counted_too(tmp_path):
    with served(json_bytes=2000) as client:
        id, path = made(client, "net"), "/api/monitors/{}/{}"
        for verb in ("update", "expect"):
            assert client.post(path.format(id, verb), content=b"{").status_code == 422
            assert client.post(path.format(id, verb), content=b" " * 3000).status_code == 413
        assert client.post(path.format(id, "replay"), params={"name": "a.npz"}, content=b"?").status_code == 409
        assert state(client, id)["refused"] == 5
        assert client.post(path.format("nobody", "update"), json={"logits": [[1, 2]], "labels": [0]}).status_code == 404
        assert counted(client, "trueup_refused_updates") == 5  # a monitor that is not there is not malformed
        with pytest.raises(ServerError, match="at most 2,000 bytes"):
            Client(str(client.base_url)).update(id, logits=np.zeros((900, 3)), labels=np.zeros(900, int))


def test_an_acknowledged_alarm_starts_a_new_watch_and_stays_on_record(tmp_path):
    rows = stream(2000, temperature=4.0)
    with served(monitors_folder=tmp_path / "monitors") as client:
        python = Client(str(client.base_url))
        info = python.create("net", 3, level=0.95, block=50)
        with pytest.raises(ServerError, match="there is no alarm to acknowledge") as refused:
            python.acknowledge(info.id)
        assert refused.value.status == 409
        alarm = python.update(info.id, logits=rows.logits, labels=rows.labels).alarm
        points = state(client, info.id)["history"]["rows"]
        after = python.acknowledge(info.id)
        assert (after.alarm, after.status["rows"], after.status["acknowledged"]) == (None, 2000, [alarm])
        assert after.saved_rows == 2000
        assert state(client, info.id)["history"]["rows"] == points
        monitor = Monitor(3, level=0.95, sizes=MonitorSizes(block=50))
        monitor.update(*rows)
        assert after.status == monitor.acknowledge().to_dict()
        assert after.refused == 0
        assert counted(client, "trueup_acknowledged_alarms") == 1
        assert counted(client, "trueup_alarm", monitor="net") == 0
    with served(monitors_folder=tmp_path / "monitors") as client:
        (restarted,) = Client(str(client.base_url)).monitors()
        assert restarted.status == after.status
        (tmp_path / "copy.safetensors").write_bytes(Client(str(client.base_url)).checkpoint(info.id))
        assert [vars(each) for each in load(tmp_path / "copy.safetensors").acknowledged] == [alarm]


def test_health_needs_neither_token_nor_host_name():
    with served(token="secret") as client:
        url = str(client.base_url)
        answer = client.get("/healthz", headers={"Host": "10.0.0.7:8000"})
        assert (answer.status_code, answer.json()) == (200, {"status": "ok"})
        assert client.head("/healthz").status_code == 200
        assert client.post("/healthz").status_code == 401
        assert client.get("/healthz/../api/limits", headers={"Host": "10.0.0.7"}).status_code == 400
        assert Client(url).is_healthy()
        with pytest.raises(ServerError, match="requires its token") as refused:
            Client(url).monitors()
        assert refused.value.status == 401
        assert Client(url, token="secret").monitors() == []
    assert not Client(url).is_healthy()
    with pytest.raises(ServerError, match="does not answer"):
        Client(url).monitors()
    with pytest.raises(ValueError, match="url must start with"):
        Client("file:///etc/passwd")


def test_the_client_s_other_calls(python, tmp_path):
    rows = stream(200)
    info = python.create("client / name?", 3, window=500)
    assert info.settings["window"] == 500
    assert info.id in [each.id for each in python.monitors()]
    save(rows, tmp_path / "log.npz")
    assert python.replay(info.id, tmp_path / "log.npz").status["rows"] == 200
    np.savez(tmp_path / "probs.npz", p=softmax(rows.logits), labels=rows.labels)
    assert python.replay(info.id, tmp_path / "probs.npz", probs=True, logits="p").status["rows"] == 400
    assert python.get(info.id).status["rows"] == 400
    assert 'monitor="client / name?"' in python.metrics()
    absent = [[1.0, 2.0, -math.inf], [0.5, 0.1, 0.2]]
    assert python.update(info.id, logits=absent, labels=[1, 0]).status["rows"] == 402
    with pytest.raises(ValueError, match="must be finite"):
        python.update(info.id, logits=[[math.inf, 1.0, 2.0]], labels=[0])
    python.delete(info.id)
    with pytest.raises(ServerError, match="no monitor under that id"):
        python.get(info.id)


def test_a_fitted_method_is_applied_to_probabilities(client):
    pair = overconfident()
    job = fitted(client, uploaded(client, of(pair))["id"])
    calibrator = METHODS["temperature"](*pair)
    p = softmax(pair.logits[:8])
    path = f"/api/jobs/{job['id']}/apply"
    after = client.post(path, json={"probs": p.tolist(), "method": "temperature"}).json()
    assert np.array(after["probs"]) == pytest.approx(softmax(np.asarray(calibrator(np.log(p)))), abs=1e-12)
    assert after["notes"] == []
    same = client.post(path, json={"logits": p.tolist(), "probs": True, "method": "temperature"}).json()
    assert same["probs"] == after["probs"]
    told = error(client.post(path, json={"logits": p.tolist()}), 409)
    assert "logits must not be probabilities" in told
    assert '"probs"' in told
    assert "confidence needs two classes" in error(client.post(path, json={"confidence": [0.5]}), 409)


def test_the_schema_names_every_kind(client):
    document = client.get("/openapi.json").json()
    assert {"/healthz", "/api/monitors/{id}/acknowledge"} <= set(document["paths"])
    assert "security" not in document["paths"]["/healthz"]["get"]
    update = document["components"]["schemas"]["UpdateRequest"]["properties"]
    assert {"logits", "probs", "confidence", "labels", "correct", "awaited"} == set(update)
    assert all(each.get("description") for each in update.values())


def counted(client, name, **labels):
    families = {family.name: family for family in parser.text_string_to_metric_families(client.get("/metrics").text)}
    (value,) = [sample.value for sample in families[name].samples if labels.items() <= sample.labels.items()]
    return value
