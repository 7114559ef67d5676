"""Monitors asked over the API."""

import numpy as np

from trueup.io import Predictions


def stream(rows=700, classes=3, seed=0, temperature=1.0):
    rng = np.random.default_rng(seed)
    z = 2 * rng.normal(size=(rows, classes))
    return Predictions(z, (z / temperature + rng.gumbel(size=z.shape)).argmax(axis=1))


def made(client, name, n_classes=3, **settings):
    answer = client.post("/api/monitors", json={"name": name, "n_classes": n_classes, **settings})
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
    """The message of a refusal; 409 stands for 422 too, where the schema already excludes the content."""
    assert answer.status_code in {409: (409, 422)}.get(status, (status,)), answer.text
    assert list(answer.json()) == ["error"]
    return answer.json()["error"]
