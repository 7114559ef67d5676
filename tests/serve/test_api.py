import io

import numpy as np
import pytest
from serving import fitted, npz, of, overconfident, served, upload, uploaded

from trueup import METHODS, METRICS, evaluate, load, metrics, save
from trueup.decisions import threshold
from trueup.serve.settings import Settings

JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def pair():
    return overconfident()


@pytest.fixture(scope="module")
def job(client, pair):
    val = overconfident(seed=1)
    arrays = {
        "val_logits": val.logits,
        "val_labels": val.labels,
        "test_logits": pair.logits,
        "test_labels": pair.labels,
    }
    return fitted(client, uploaded(client, npz(**arrays))["id"])


@pytest.mark.parametrize("suffix", [".npz", ".csv", ".jsonl", ".parquet", ".safetensors"])
def test_every_format_is_read(client, pair, tmp_path, suffix):
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    path = tmp_path / f"net{suffix}"
    save(pair, path)
    found = uploaded(client, path.read_bytes(), path.name)
    assert (found["name"], found["rows"], found["test_rows"], found["n_classes"]) == (path.name, 400, None, 3)
    ece = client.get(f"/api/data/{found['id']}/evaluate").json()["methods"]["network"]["metrics"]["ece"]["value"]
    assert ece == pytest.approx(metrics.ece(*pair), abs=1e-12)


def test_a_pair_of_arrays_is_sent_one_after_the_other(client, pair):
    file = io.BytesIO()
    np.save(file, pair.logits)
    np.save(file, pair.labels)
    found = uploaded(client, file.getvalue(), "net.npy")
    assert found["rows"] == 400
    assert client.get(f"/api/data/{found['id']}/curve").json()["ece"] == pytest.approx(metrics.ece(*pair), abs=1e-12)


def test_probabilities_are_read_when_said_so_and_their_zeros_are_told(client):
    body = npz(probs=np.array([[0.8, 0.2], [1.0, 0.0]]), labels=np.array([0, 1]))
    assert "tick “Probabilities, not logits”" in upload(client, body).json()["error"]
    found = uploaded(client, body, probs=True)
    assert found["notes"] == [
        "1 exact zeros among 4 probabilities were raised to 0.1, about half the smallest positive one"
    ]


def test_names_can_be_given(client, pair):
    assert uploaded(client, npz(scores=pair.logits, truth=pair.labels), logits="scores", labels="truth")["rows"] == 400
    table = b"a,b,target\n1.5,0.5,0\n0.1,0.9,1\n"
    assert uploaded(client, table, "net.csv", logits="a,b", labels="target")["n_classes"] == 2


def test_evaluate_is_the_library(client, pair):
    id = uploaded(client, of(pair))["id"]
    answer = client.get(f"/api/data/{id}/evaluate", params={"bins": 7, "metric": ["ece", "nll"]}).json()
    scores = evaluate(*pair, metrics=("ece", "nll"), bins=7)
    assert answer == {"verdict": scores.verdict(), **scores.to_dict()}


def test_reversed_risks_that_share_a_bin_are_called_miscalibrated(client):
    rng = np.random.default_rng(0)
    p = rng.uniform(0.001, 0.06, 20000)
    logits = np.stack([np.log1p(p - 0.061), np.log(0.061 - p)], axis=1)
    found = uploaded(client, npz(logits=logits, labels=(rng.random(20000) < p).astype(int)))
    scores = client.get(f"/api/data/{found['id']}/evaluate").json()
    assert scores["methods"]["network"]["test"]["p_value"] < 0.001
    assert "in the wrong order" in str(scores)
    assert "It is miscalibrated" in str(scores)


def test_the_sliders_are_the_library(client, pair):
    id = uploaded(client, of(pair))["id"]
    answer = client.get(f"/api/data/{id}/curve", params={"temperature": 2.5, "bins": 8}).json()
    assert answer["ece"] == pytest.approx(metrics.ece(pair.logits / 2.5, pair.labels, bins=8), abs=1e-12)
    assert answer["nll"] == pytest.approx(metrics.nll(pair.logits / 2.5, pair.labels), abs=1e-12)
    assert answer["accuracy"] == pytest.approx(metrics.accuracy(*pair), abs=1e-12)
    assert next(mark["name"] for mark in answer["chart"]["marks"] if mark["kind"] == "dots") == "accuracy"
    for wrong in ({"temperature": 0}, {"bins": 0}, {"bins": 10**9}, {"temperature": "nan"}):
        refused = client.get(f"/api/data/{id}/curve", params=wrong)
        assert refused.status_code == 422
        assert refused.json()["error"].startswith(next(iter(wrong)))


def test_a_fit_ends_in_a_verdict_and_scores(job, pair):
    assert job["state"] == "done"
    assert job["done"] == 2
    result = job["result"]
    assert result["verdict"].startswith("This network is")
    assert list(result["scores"]["methods"]) == ["raw", "temperature", "histogram"]
    assert not result["cross_fitted"]
    assert result["scores"]["methods"]["raw"]["metrics"]["ece"]["value"] == pytest.approx(metrics.ece(*pair), abs=1e-12)


def test_a_calibrator_is_taken_home(client, job, pair, tmp_path):
    path = tmp_path / "cal.safetensors"
    answer = client.get(f"/api/jobs/{job['id']}/calibrator", params={"method": "temperature"})
    assert answer.headers["content-disposition"] == 'attachment; filename="temperature.safetensors"'
    path.write_bytes(answer.content)
    calibrator = load(path)
    assert calibrator.config() == METHODS["temperature"](*overconfident(seed=1)).config()
    rows = pair.logits[:5]
    applied = client.post(
        f"/api/jobs/{job['id']}/apply", json={"logits": rows.tolist(), "method": "temperature"}
    ).json()
    np.testing.assert_allclose(applied["logits"], calibrator(rows))
    np.testing.assert_allclose(np.sum(applied["probs"], axis=1), 1)
    raw = client.post(f"/api/jobs/{job['id']}/apply", json={"logits": rows.tolist(), "method": "raw"}).json()
    np.testing.assert_allclose(raw["logits"], rows)


def test_two_methods_are_compared(client, job, pair):
    answer = client.get(f"/api/jobs/{job['id']}/compare", params={"first": "raw", "second": "histogram"}).json()
    assert answer["first"]["ece"] == pytest.approx(metrics.ece(*pair), abs=1e-12)
    assert answer["second"]["method"] == "histogram"
    assert answer["second"]["ece"] < answer["first"]["ece"]
    assert answer["scores"]["methods"]["histogram"]["change"]["ece"]["high"] < 0
    curve = client.get(f"/api/jobs/{job['id']}/curve", params={"method": "histogram"}).json()
    assert curve["ece"] == answer["second"]["ece"]


def test_promises_and_sets_are_the_library(client, job, pair):
    result = job["result"]
    found = client.get(f"/api/jobs/{job['id']}/promise?method=raw&level=0.9").json()
    assert found["method"] == "raw"
    for place, share in enumerate(found["allowed"]):
        promise = threshold(*pair, max_risk=share, level=0.9)
        assert found["threshold"][place] == (promise.threshold if promise.promised else None)
        assert found["coverage"][place] == promise.coverage
    assert "slider" not in found["chart"]
    assert client.get(f"/api/jobs/{job['id']}/promise").json()["method"] == result["chosen"]
    sets = client.get(f"/api/jobs/{job['id']}/sets?coverage=0.8&score=lac").json()
    assert (sets["coverage"], sets["score"]) == (0.8, "lac")
    assert 0.7 < sets["scores"]["coverage"]["value"] < 0.9
    assert client.get(f"/api/jobs/{job['id']}/sets?coverage=2").status_code == 422


def test_the_report_is_taken_home(client, job):
    answer = client.get(f"/api/jobs/{job['id']}/report")
    assert answer.headers["content-disposition"] == 'attachment; filename="report.html"'
    assert answer.text.lstrip().lower().startswith("<!doctype html")


def test_two_files_are_fitted_and_tested_on(client, pair):
    val, test = uploaded(client, of(overconfident(seed=1)), "val.npz"), uploaded(client, of(pair), "test.npz")
    found = fitted(client, val["id"], test=test["id"])["result"]
    assert not found["cross_fitted"]
    assert found["scores"]["methods"]["raw"]["metrics"]["ece"]["value"] == pytest.approx(metrics.ece(*pair), abs=1e-12)
    other = uploaded(client, of(overconfident(classes=4)))
    answer = client.post(f"/api/data/{val['id']}/fit", json={"test": other["id"]})
    assert (answer.status_code, answer.json()["error"]) == (409, "net.npz must have the 3 classes of val.npz, got 4")


def test_one_file_is_cross_fitted(client, pair):
    assert fitted(client, uploaded(client, of(pair))["id"])["result"]["cross_fitted"]


def test_the_example_is_overconfident(client):
    found = client.post("/api/example").json()
    assert (found["rows"], found["test_rows"], found["n_classes"]) == (4000, 4000, 10)
    assert "overconfident" in client.get(f"/api/data/{found['id']}/evaluate").json()["verdict"]


def test_what_there_is_comes_from_the_registries(client):
    methods, found = client.get("/api/methods").json(), client.get("/api/metrics").json()
    assert [method["name"] for method in methods] == list(METHODS)
    assert [metric["name"] for metric in found] == list(METRICS)
    assert all(entry["summary"] for entry in methods + found)
    assert client.get("/api/limits").json()["rows"] == Settings().rows


def test_every_verb_is_described(client):
    described = client.get("/openapi.json").json()["paths"]
    for path in ("upload", "jobs/{id}", "data/{id}/evaluate", "data/{id}/curve", "data/{id}/fit", "jobs/{id}/apply"):
        assert f"/api/{path}" in described
    for path in ("jobs/{id}/compare", "jobs/{id}/report", "jobs/{id}/calibrator", "methods", "metrics"):
        assert f"/api/{path}" in described


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("curve?method=matrix", "'matrix' was not fitted; choose from: raw, temperature, histogram"),
        ("calibrator?method=matrix", "'matrix' was not fitted; choose from: raw, temperature, histogram"),
        ("compare?first=raw&second=raw", "first and second must be different methods, got 'raw' twice"),
    ],
)
def test_wrong_wishes_are_told(client, job, path, told):
    answer = client.get(f"/api/jobs/{job['id']}/{path}")
    assert (answer.status_code, answer.json()["error"]) == (409, told)


def test_wrong_bodies_are_told(client, job):
    apply = f"/api/jobs/{job['id']}/apply"
    answer = client.post(apply, json={"logits": [[1, 2], [1, 2, 3]]})
    assert (answer.status_code, answer.json()["error"]) == (
        409,
        "logits: rows must have equally many numbers, got 2..3",
    )
    assert "finite" in client.post(apply, content=b'{"logits": [[1e999, 0, 0]]}', headers=JSON).json()["error"]
    assert client.post(apply, content=b"{", headers=JSON).status_code == 422
    id = uploaded(client, of(overconfident()))["id"]
    answer = client.post(f"/api/data/{id}/fit", json={"methods": ["sorcery"]})
    assert answer.status_code == 409
    assert answer.json()["error"].startswith("no method is called 'sorcery'; there are: identity, temperature")
    assert client.post(f"/api/data/{id}/fit", json={"bin": 3}).json()["error"] == "the request: there is no field 'bin'"


def test_ids_are_the_only_key(client, job, pair):
    ids = {uploaded(client, of(pair))["id"] for _ in range(5)}
    assert len(ids) == 5
    assert min(map(len, ids)) >= 32
    for path in ("/api/data", "/api/jobs", "/api/data/guess", "/api/jobs/guess", f"/api/data/{job['id']}"):
        answer = client.get(path)
        assert answer.status_code == 404
        assert "error" in answer.json()
    id = ids.pop()
    assert client.delete(f"/api/data/{id}").status_code == 204
    assert client.get(f"/api/data/{id}").status_code == 404


def test_results_expire(pair):
    now = [0.0]
    with served(seconds=60, clock=lambda: now[0]) as client:
        id = uploaded(client, of(pair))["id"]
        job = fitted(client, id, methods=["temperature"])
        now[0] = 50
        assert client.get(f"/api/data/{id}").status_code == 200
        now[0] = 105
        assert client.get(f"/api/data/{id}").status_code == 200
        answer = client.get(f"/api/jobs/{job['id']}/report")
        assert answer.status_code == 404
        assert "deleted" in answer.json()["error"]
