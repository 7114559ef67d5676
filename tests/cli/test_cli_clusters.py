"""Clusters, pixels and labels by the dozen at the command line."""

import numpy as np
import pytest

import trueup
from strategies import images


@pytest.fixture
def visits(folder):
    z, y, patient = images(20, 15, classes=3, common=0.5, sharpness=2.0)
    names = np.array([f"p{k}" for k in patient])
    np.savez(folder / "visits.npz", logits=z, labels=y, patient=names, site=np.where(patient % 2, "A", "B"))
    np.savez(folder / "pixels.npz", logits=z.reshape(20, 5, 3, 3), labels=y.reshape(20, 5, 3))
    return z, y, names


def test_a_column_says_which_rows_are_correlated(visits, asked, command):
    z, y, patient = visits
    found = asked("evaluate", "visits.npz", "--clusters", "patient", "--groups", "site", "-q")["scores"]
    expected = trueup.evaluate(z, y, clusters=patient)
    assert found["clusters"] == 20
    assert found["methods"]["network"]["metrics"]["nll"]["low"] == pytest.approx(expected["nll"].low)
    assert (
        "20 clusters (patient): intervals by patient"
        in command("evaluate", "visits.npz", "--clusters", "patient").stdout
    )
    told = command("evaluate", "visits.npz", "--clusters", "ward", code=2).stderr
    assert "ward" in told


def test_pixels_are_read_by_their_axis(visits, asked, command):
    found = asked("evaluate", "pixels.npz", "--class-axis", "last", "-q")["scores"]
    assert (found["rows"], found["clusters"]) == (300, 20)
    assert "--class-axis must be first" in command("evaluate", "pixels.npz", "--class-axis", "2", code=2).stderr
    assert "--ignore-index goes with" in command("evaluate", "visits.npz", "--ignore-index", "1", code=2).stderr
    command(
        "fit", "pixels.npz", "--class-axis", "last", "-m", "identity", "-m", "temperature", "-o", "t.safetensors", "-q"
    )
    assert float(trueup.load("t.safetensors").temperature) > 1.5
    command("apply", "t.safetensors", "pixels.npz", "--class-axis", "last", "-o", "after.npz", "-q")
    after = np.load("after.npz")
    assert after["logits"].shape == (20, 5, 3, 3)
    assert after["labels"].shape == (20, 5, 3)
    temperature = float(trueup.load("t.safetensors").temperature)
    assert after["logits"] == pytest.approx(np.load("pixels.npz")["logits"] / temperature)


def test_compare_and_report_are_by_cluster(visits, asked, command):
    audit = asked("rank", "visits.npz", "--clusters", "patient", "-m", "temperature", "--n-folds", "4", "-q")["audit"]
    assert audit["scores"]["clusters"] == 20
    command("report", "visits.npz", "--clusters", "patient", "-m", "temperature", "-o", "r.html", "-q")
    with open("r.html", encoding="utf-8") as file:
        page = file.read()
    assert "The 300 rows belong to 20 clusters (patient) and are not independent" in page
    assert "What can I promise?" not in page


def test_labels_by_the_dozen(folder, asked, command):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(100, 3))
    np.savez(folder / "tags.npz", logits=x, labels=rng.random(x.shape) < 1 / (1 + np.exp(-x)))
    found = asked("evaluate", "tags.npz", "--multilabel", "--class-names", "cat,dog,car", "--resamples", "100", "-q")
    assert found["scores"]["clusters"] == 100
    assert list(found["labels"]["labels"]) == ["cat", "dog", "car"]
    told = command("evaluate", "tags.npz", "--multilabel", "--class-names", "cat,dog,car", "--resamples", "100").stdout
    assert "mean (macro)" in told
    assert "label=dog" in told
    command("fit", "tags.npz", "--multilabel", "--class-names", "cat,dog,car", "-o", "tags.safetensors", "-q")
    command("apply", "tags.safetensors", "tags.npz", "-o", "after.npz", "-q")
    assert np.load("after.npz")["logits"] == pytest.approx(trueup.load("tags.safetensors")(x))
    told = command("fit", "tags.npz", "--multilabel", "-m", "platt", "-m", "beta", "-o", "t.safetensors", code=2).stderr
    assert "--multilabel takes one method" in told


def test_a_monitor_counts_a_cluster_as_one_bet(folder, asked, command):
    z, y, image = images(40, 64, common=0.5)
    np.savez(folder / "a.npz", logits=z[:1280], labels=y[:1280], image=image[:1280])
    np.savez(folder / "b.npz", logits=z[1280:], labels=y[1280:], image=image[1280:])
    assert "ALARM" in command("monitor", "a.npz", "b.npz", code=3).stdout
    found = asked("monitor", "a.npz", "b.npz", "--clusters", "image", "-q")["status"]
    assert found["alarm"] is None
    assert found["rows"] == 2560
    assert "be complete within one batch" in command("monitor", "a.npz", "a.npz", "--clusters", "image", code=2).stderr
    assert (
        "give either --groups or --clusters"
        in command("monitor", "a.npz", "--clusters", "image", "--groups", "image", code=2).stderr
    )
