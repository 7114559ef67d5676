"""Files of tokens, pixels and labels by the dozen, and columns of clusters."""

import numpy as np
import pytest

import trueup
from trueup._core.errors import InputError
from trueup.io import Shards, load_table
from trueup.metrics import evaluate_shards


@pytest.fixture
def pixels(tmp_path):
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(5, 3, 4, 2)), rng.integers(0, 3, (5, 4, 2))
    y[0, 0, 0] = 255
    np.savez(tmp_path / "first.npz", logits=z, labels=y, site=np.array(["a", "a", "b", "b", "b"]))
    np.savez(tmp_path / "last.npz", logits=np.moveaxis(z, 1, -1), labels=y)
    probs = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    np.savez(tmp_path / "probs.npz", probs=probs, labels=y)
    return tmp_path, z, y


def test_pixels_become_rows_with_their_image(pixels):
    folder, z, y = pixels
    expected = trueup.convert.flatten(z, y, class_axis="first", ignore_index=255, clusters=True)
    for name, axis in (("first", "first"), ("last", "last")):
        table = load_table(folder / f"{name}.npz", class_axis=axis, ignore_index=255)
        assert np.array_equal(table.logits, expected[0])
        assert table.labels.tolist() == expected[1].tolist()
        assert table.clusters.tolist() == expected[2].tolist()
        assert table.options()["clusters"].keys() == {"sample"}
    pair = trueup.load(folder / "first.npz", class_axis="first", ignore_index=255)
    assert np.array_equal(pair.logits, expected[0])
    read = load_table(folder / "probs.npz", probs=True, class_axis="first", ignore_index=255)
    assert np.exp(read.logits).sum(axis=1) == pytest.approx(np.ones(39))
    by_site = load_table(folder / "first.npz", class_axis="first", ignore_index=255, clusters="site", groups="site")
    assert by_site.clusters.tolist() == np.array(["a", "a", "b", "b", "b"])[expected[2]].tolist()
    assert by_site.groups["site"].tolist() == by_site.clusters.tolist()


def test_pixels_must_fit(pixels):
    folder, *_ = pixels
    with pytest.raises(InputError, match=r"logits must have shape \(n, classes\), got \(5, 3, 4, 2\)"):
        trueup.load(folder / "first.npz")
    with pytest.raises(InputError, match=r"labels must have shape \(5, 3, 4\) to match the logits, got \(5, 4, 2\)"):
        trueup.load(folder / "first.npz", class_axis="last")
    with pytest.raises(InputError, match='class_axis must be "first"'):
        trueup.load(folder / "first.npz", class_axis="second")
    np.savez(folder / "flat.npz", logits=np.zeros((2, 3)), labels=np.zeros(2, int))
    with pytest.raises(InputError, match="more than 2 dimensions"):
        trueup.load(folder / "flat.npz", class_axis="first")


def test_labels_by_the_dozen(tmp_path):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(30, 4)), rng.integers(0, 2, (30, 4))
    y[3, 2] = -1
    np.savez(tmp_path / "tags.npz", logits=x, labels=y)
    table = load_table(tmp_path / "tags.npz", multilabel=True, ignore_index=-1, class_names=("a", "b", "c", "d"))
    expected = trueup.io.from_multilabel(x, y, ignore_index=-1, class_names=["a", "b", "c", "d"])
    assert np.array_equal(table.logits, expected.logits)
    assert table.groups["label"].tolist() == expected.groups["label"].tolist()
    assert table.clusters.tolist() == expected.clusters.tolist()
    with pytest.raises(InputError, match="class_names must name the 4 labels, got 2 names"):
        load_table(tmp_path / "tags.npz", multilabel=True, ignore_index=-1, class_names=("a", "b"))
    with pytest.raises(InputError, match="multilabel must be left out"):
        load_table(tmp_path / "tags.npz", multilabel=True, class_axis="first")


def test_a_column_of_clusters(tmp_path):
    rng = np.random.default_rng(0)
    z, y, patient = rng.normal(size=(60, 2)), rng.integers(0, 2, 60), np.arange(60) // 6
    lines = [f"{a},{b},{label},p{k}" for (a, b), label, k in zip(z.tolist(), y, patient, strict=True)]
    (tmp_path / "a.csv").write_text("\n".join(["logit_0,logit_1,label,patient", *lines[:33]]) + "\n")
    (tmp_path / "b.csv").write_text("\n".join(["logit_0,logit_1,label,patient", *lines[33:]]) + "\n")
    table = load_table(tmp_path / "a.csv", clusters="patient")
    assert table.clusters.tolist() == [f"p{k}" for k in patient[:33]]
    scores = evaluate_shards(Shards.of(tmp_path / "*.csv", clusters="patient"), top_label=True, progress=False)
    whole = trueup.evaluate(z, y, clusters=patient, top_label=True)
    assert scores.clusters == 10
    assert scores.caption() == "60 rows, 2 classes, 15 bins, 10 clusters (patient): intervals by patient"
    assert scores["nll"].low == pytest.approx(whole["nll"].low)
    with pytest.raises(InputError, match="groups must not be combined with clusters in shards"):
        evaluate_shards(Shards.of(tmp_path / "*.csv", clusters="patient", groups=("patient",)), progress=False)
    with pytest.raises(ValueError, match="ward"):
        load_table(tmp_path / "a.csv", clusters="ward")
