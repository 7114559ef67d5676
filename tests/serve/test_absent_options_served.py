"""Questions with different numbers of options, sent to the web app."""

import numpy as np
import pytest
from serving import fitted, npz, overconfident, uploaded

from trueup import load, metrics


def test_absent_options_go_through_the_app(client, tmp_path):
    logits, labels = overconfident(rows=600, classes=4)
    absent = (np.arange(4) == 3) & (np.arange(600)[:, None] % 2 == 0) & (labels[:, None] != 3)
    z = np.where(absent, -np.inf, logits)
    found = uploaded(client, npz(logits=z, labels=labels))
    ece = client.get(f"/api/data/{found['id']}/evaluate").json()["methods"]["network"]["metrics"]["ece"]["value"]
    assert ece == pytest.approx(metrics.ece(z, labels), abs=1e-12)
    job = fitted(client, found["id"])
    assert job["state"] == "done"
    page = client.get(f"/api/jobs/{job['id']}/report")
    assert page.status_code == 200
    path = tmp_path / "calibrator.safetensors"
    path.write_bytes(client.get(f"/api/jobs/{job['id']}/calibrator").content)
    assert np.array_equal(np.isneginf(load(path)(z)), absent)
    answer = client.post(f"/api/jobs/{job['id']}/apply", json={"logits": [[1.0, 2.0, 0.0, None]]}).json()
    assert answer["logits"][0][3] is None
    assert answer["probs"][0][3] == 0


def test_a_monitor_takes_null_for_an_absent_option(client):
    made = client.post("/api/monitors", json={"name": "choice", "n_classes": 3}).json()
    rows = {"logits": [[1.0, 2.0, None], [0.0, 1.0, 2.0]], "labels": [1, 2]}
    answer = client.post(f"/api/monitors/{made['id']}/update", json=rows)
    assert answer.status_code == 200, answer.text
    refused = client.post(f"/api/monitors/{made['id']}/update", json={"logits": [[1.0, 2.0, None]], "labels": [2]})
    assert "that option is absent" in refused.json()["error"]
    client.delete(f"/api/monitors/{made['id']}")


def test_padding_is_told_to_who_sent_it(client):
    z = np.array([[1.0, 2.0, -1e9], [2.0, 1.0, 0.5]])
    found = uploaded(client, npz(logits=z, labels=np.array([0, 1])))
    assert any("read as absent options" in note for note in found["notes"])
