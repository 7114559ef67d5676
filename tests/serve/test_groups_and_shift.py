"""Groups, correlated rows and other class frequencies, by the API and on the page: the same as the library finds."""

import io

import numpy as np
import pytest
from serving import finished, fitted, npz, overconfident, served, upload, uploaded

from trueup import evaluate, load
from trueup.decisions import estimate_performance, estimate_prior
from trueup.serve import jobs
from trueup.serve.upload_reader import MAX_GROUPS

OPENED = ""


def shifted(rows, seed, prior):
    rng = np.random.default_rng(seed)
    y = rng.choice(3, size=rows, p=prior)
    return 2.5 * (1.5 * np.eye(3)[y] + rng.normal(size=(rows, 3))), y


VAL, TEST = overconfident(rows=400), overconfident(rows=300, seed=1)
REGIONS = {"val": np.arange(400) % 2, "test": np.where(np.arange(300) % 3 > 0, "north", "")}
PATIENTS = {"val": np.arange(400) // 4, "test": np.arange(300) // 4}


def both():
    halves = {"val": VAL, "test": TEST}
    arrays = {f"{split}_{name}": getattr(pair, name) for split, pair in halves.items() for name in pair._fields}
    beside = {f"{split}_{name}": of[split] for split in halves for name, of in (("region", REGIONS), ("id", PATIENTS))}
    return npz(**arrays, **beside)


@pytest.fixture(scope="module")
def server():
    small = pytest.MonkeyPatch()
    small.setattr(jobs, "methods_for", lambda rows, class_axis: ("temperature", "histogram"))
    with served() as client:
        yield client
    small.undo()


def test_groups_and_clusters_of_the_halves_are_those_of_the_library(client):
    data = uploaded(client, both(), group=["region"], clusters="id")
    assert (data["groups"], data["clusters"], data["labelled"]) == (["region"], "id", True)
    groups = {"region": ["north" if k % 3 > 0 else "(missing)" for k in range(300)]}
    wanted = evaluate(*TEST, groups=groups, clusters={"id": PATIENTS["test"]})
    found = client.get(f"/api/data/{data['id']}/evaluate").json()
    assert (found["clusters"], found["cluster_name"], found["verdict"]) == (75, "id", wanted.verdict())
    listed = found["methods"]["network"]["groups"]["groups"]
    assert [(row["group"], row["rows"], row["low"]) for row in listed] == [
        (row.group, row.rows, row.difference.low) for row in wanted.groups.rows
    ]
    job = fitted(client, data["id"])
    assert job["result"]["scores"]["clusters"] == 75
    panels = client.get(f"/api/jobs/{job['id']}/groups").json()["panels"]
    assert [panel["title"] for panel in panels] == ["Uncalibrated, by region", "After temperature scaling, by region"]
    assert sorted(row[0] for row in panels[0]["rows"]) == ["(missing)", "north"]
    assert panels[0]["chart"]["x"]["range"] == panels[1]["chart"]["x"]["range"]
    for verb in ("promise", "sets"):
        answer = client.get(f"/api/jobs/{job['id']}/{verb}").json()
        assert "One row per id is used (75)" in answer["note"]
        assert answer["rows"] == (75 if verb == "promise" else 37)
    page = client.get(f"/api/jobs/{job['id']}/report").text
    assert "Where is it wrong?" in page
    assert "to 75 clusters (id)" in page


def test_columns_that_are_wrong_are_told(client):
    answer = upload(client, both(), group=["regoin"])
    assert answer.status_code == 409
    assert "must have regoin" in answer.json()["error"]
    many = npz(
        logits=np.tile([0.0, 1.0], (MAX_GROUPS + 1, 1)),
        labels=np.zeros(MAX_GROUPS + 1, int),
        a=np.arange(MAX_GROUPS + 1),
    )
    assert f"at most {MAX_GROUPS:,} are accepted" in upload(client, many, group=["a"]).json()["error"]
    assert uploaded(client, many, clusters="a")["clusters"] == "a"
    assert "at most 10 columns" in upload(client, many, group=list("abcdefghijk")).json()["error"]
    job = fitted(client, uploaded(client, npz(logits=VAL.logits, labels=VAL.labels))["id"])
    assert "there are no groups" in client.get(f"/api/jobs/{job['id']}/groups").json()["error"]


def test_a_label_shift_is_that_of_the_library(client, tmp_path):
    val, (new, _) = shifted(500, 0, [0.2, 0.3, 0.5]), shifted(600, 1, [0.6, 0.3, 0.1])
    data = uploaded(client, npz(logits=val[0], labels=val[1], id=np.arange(500) // 2), clusters="id")
    file = io.BytesIO()
    np.save(file, new)
    rows = uploaded(client, file.getvalue(), "new.npy", labelled=False)
    assert (rows["rows"], rows["labelled"], rows["test_rows"]) == (600, False, None)
    begun = client.post(f"/api/data/{data['id']}/label-shift", json={"new": rows["id"]})
    assert begun.status_code == 202
    found = finished(client, begun.json()["id"], "label-shifts")
    assert found["state"] == "done", found["error"]
    prior = estimate_prior(new, val=val)
    assert found["prior"] == prior.to_dict()
    assert found["performance"] == estimate_performance(new, val=val, shift=True).to_dict()
    assert found["text"][0] == "The class frequencies moved (p ≤ 0.001)."
    assert "these intervals are too narrow" in found["text"][-1]  # the labelled rows are correlated
    path = tmp_path / "shift.safetensors"
    path.write_bytes(client.get(f"/api/label-shifts/{found['id']}/calibrator").content)
    assert load(path)(new) == pytest.approx(prior.calibrator(new), abs=1e-12)
    assert client.get(f"/api/jobs/{found['id']}").status_code == 404  # each id of its own kind
    assert client.get(f"/api/data/{rows['id']}/evaluate").status_code == 404
    assert client.delete(f"/api/label-shifts/{found['id']}").status_code == 204
    assert client.get(f"/api/label-shifts/{found['id']}").status_code == 404


def test_a_label_shift_of_other_classes_is_refused(client):
    data = uploaded(client, npz(logits=VAL.logits, labels=VAL.labels))
    other = uploaded(client, npz(logits=np.zeros((5, 4)) + np.arange(4)), labelled=False)
    answer = client.post(f"/api/data/{data['id']}/label-shift", json={"new": other["id"]})
    assert (answer.status_code, answer.json()["error"]) == (409, "net.npz must have the 3 classes of net.npz, got 4")
    assert client.post(f"/api/data/{data['id']}/label-shift", json={"new": data["id"]}).status_code == 404
    assert "there are no rows" in upload(client, npz(logits=np.zeros((0, 3))), labelled=False).json()["error"]


def test_the_page_has_groups_and_the_shift_also_after_a_reload(page, tmp_path):
    (tmp_path / "net.npz").write_bytes(both())
    (tmp_path / "new.npz").write_bytes(npz(logits=shifted(400, 2, [0.8, 0.1, 0.1])[0]))
    page.click("summary:has-text('What is in the file')")
    page.fill("#groups", "region")
    page.fill("#clusters", "id")
    page.set_input_files("#file", tmp_path / "net.npz")
    page.wait_for_selector("#where[data-drawn='2']")
    assert "correlated by id" in page.inner_text("#source")
    assert page.locator("#where .chart svg").count() > 0
    page.wait_for_selector("#compare[data-drawn]")
    page.set_input_files("#new-file", tmp_path / "new.npz")
    page.wait_for_selector("#shift[data-drawn]")
    words = page.inner_text("#shift-result")
    assert "The class frequencies moved" in words
    assert page.locator("#frequencies tbody tr").count() == 3
    page.reload()
    page.wait_for_selector("#shift[data-drawn]")
    assert page.inner_text("#shift-result") == words
    page.wait_for_selector("#where[data-drawn='2']")
    page.wait_for_selector("#compare[data-drawn]")
    page.set_viewport_size({"width": 390, "height": 844})
    for _ in range(600):  # charts follow a little later
        if page.evaluate("document.documentElement.scrollWidth") <= 390:
            return
        page.wait_for_timeout(50)
    raise AssertionError("it is wider than a phone")


def test_of_two_classes_the_page_speaks_of_class_1(page, tmp_path):
    pair = overconfident(rows=200, classes=2)
    (tmp_path / "two.npz").write_bytes(npz(logits=pair.logits, labels=pair.labels))
    page.set_input_files("#file", tmp_path / "two.npz")
    page.wait_for_selector("#compare[data-drawn]")
    page.wait_for_selector("#diagram[data-drawn]")
    assert page.inner_text("#t-accuracy") == "class 1 happens in"
    assert page.inner_text("#n-accuracy") == f"{100 * pair.labels.mean():.1f}\u00a0%"


def test_clusters_of_one_file_alone_are_refused_not_forgotten(client):
    val = uploaded(client, npz(**VAL._asdict()))
    test = uploaded(client, npz(**TEST._asdict(), id=PATIENTS["test"]), clusters="id")
    ended = fitted(client, val["id"], test=test["id"])
    assert ended["state"] == "failed"
    assert "clusters with test_clusters" in ended["error"]


def test_of_both_halves_the_rows_without_labels_are_the_new_ones(client):
    arrays = {"val_logits": VAL.logits, "val_labels": VAL.labels, "test_logits": TEST.logits}
    assert uploaded(client, npz(**arrays), labelled=False)["rows"] == 300


def test_a_group_is_one_value_a_row(client):
    answer = upload(client, npz(**VAL._asdict(), two=np.zeros((400, 2))), group=["two"])
    assert answer.status_code == 409
    assert "two must have one value per row" in answer.json()["error"]
