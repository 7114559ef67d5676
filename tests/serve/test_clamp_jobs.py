"""Neural Clamping on the server: a network with its data, progress, and refusals."""

import time

import pytest
from serving import finished, served

from trueup.serve.settings import ServedNetwork

torch = pytest.importorskip("torch")

SHAPE = (3, 40, 36)


def network():
    """Images of three classes, of which each raises a channel; a tenth of the labels are wrong."""
    torch.manual_seed(0)
    labels = torch.arange(240) % 3
    images = 0.2 * torch.rand(240, *SHAPE)
    images[torch.arange(240), labels, :4] += 0.5
    labels = torch.where(torch.rand(240) < 0.1, (labels + 1) % 3, labels)
    model = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 3))
    model[2].load_state_dict({"weight": 60 * torch.eye(3), "bias": torch.zeros(3)})
    return model, ([(images[:120], labels[:120])], [(images[120:], labels[120:])])


@pytest.fixture(scope="module")
def client():
    with served(network=ServedNetwork("stripes, images.npz", network)) as client:
        yield client


def test_the_network_of_the_server_is_clamped(client):
    assert client.get("/api/limits").json()["served_network"] == "stripes, images.npz"
    started = client.post("/api/clamps", json={"network": "served", "camera": "brightness", "recipe": "code"})
    assert started.status_code == 202
    job = finished(client, started.json()["id"], "clamps")
    assert (job["state"], job["error"]) == ("done", None)
    result = job["result"]
    assert [len(result[name]) for name in ("delta", "image")] == [32, 32]
    assert {len(row) for row in result["delta"]} == {32}
    assert list(result["scores"]["methods"]) == ["Uncalibrated", "Temperature scaling", "Neural Clamping"]
    for name, curve in (("Uncalibrated", "before"), ("Neural Clamping", "after")):
        assert result[curve]["rows"] == 120
        assert result[curve]["ece"] == pytest.approx(result["scores"]["methods"][name]["metrics"]["ece"]["value"])
    assert result["temperature"] > 0


def test_progress_is_shown_and_a_stopped_fit_is_deleted(client):
    id = client.post("/api/clamps", json={"network": "served", "recipe": "code"}).json()["id"]
    lines = set()
    while client.get(f"/api/clamps/{id}").json()["state"] in ("waiting", "running"):
        lines.add(client.get(f"/api/clamps/{id}").json()["progress"])
        time.sleep(0.005)
        if any("epoch" in line for line in lines):
            break
    assert any("epoch" in line for line in lines)
    assert client.delete(f"/api/clamps/{id}").status_code == 204
    assert client.get(f"/api/clamps/{id}").status_code == 404
    following = client.post("/api/clamps", json={"network": "served", "recipe": "code"}).json()["id"]
    assert finished(client, following, "clamps")["state"] == "done"


def test_a_clamp_stops_after_its_time_and_others_are_served_meanwhile():
    with served(network=ServedNetwork("stripes", network), fit_seconds=0.1) as client:
        id = client.post("/api/clamps", json={"network": "served", "recipe": "paper"}).json()["id"]
        seconds = []
        while (job := client.get(f"/api/clamps/{id}").json())["state"] in ("waiting", "running"):
            start = time.monotonic()
            assert client.get("/api/limits").status_code == 200
            seconds.append(time.monotonic() - start)
            time.sleep(0.02)
    assert (job["state"], job["result"]) == ("stopped", None)
    assert "longer than 0.1 seconds" in job["error"]
    assert sorted(seconds)[len(seconds) // 2] < 1


def test_a_network_that_is_no_image_network_has_no_picture():
    def rows():
        x = torch.randn(100, 3, generator=torch.Generator().manual_seed(0))
        return torch.nn.Identity(), ([(x, x.argmax(1))], [(x, x.argmax(1))])

    with served(network=ServedNetwork("rows", rows)) as client:
        job = finished(client, client.post("/api/clamps", json={"network": "served"}).json()["id"], "clamps")
    assert job["state"] == "done", job["error"]
    assert job["result"]["delta"] is None
    assert "every label has its row's largest logit" in " ".join(job["result"]["warnings"])


def test_a_fit_that_fails_says_why(client):
    def broken():
        raise ValueError("images.npz: no such file")

    with served(network=ServedNetwork("broken", broken)) as other:
        job = finished(other, other.post("/api/clamps", json={"network": "served"}).json()["id"], "clamps")
    assert (job["state"], job["error"]) == ("failed", "images.npz: no such file")
    assert client.post("/api/clamps", json={"recipe": "varpro"}).status_code == 422


def test_a_server_without_a_network_refuses_to_clamp_it():
    with served() as client:
        assert client.get("/api/limits").json()["served_network"] is None
        answer = client.post("/api/clamps", json={"network": "served"})
    assert answer.status_code == 409
    assert "trueup serve --network" in answer.json()["error"]
