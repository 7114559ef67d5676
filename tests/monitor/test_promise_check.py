"""A promise is checked again as labels arrive, and rows without labels are told what to expect of them."""

import json

import numpy as np
import pytest

from artifact_files import rewrite_artifact
from trueup import load, save
from trueup.decisions import EventRisk, Recheck, calibrated_threshold, threshold
from trueup.monitor import Monitor, MonitorSizes


def draw(n, temperature=1.0, seed=0, classes=4):
    rng = np.random.default_rng(seed)
    z = 3 * rng.normal(size=(n, classes))
    return z, (z / temperature + rng.gumbel(size=z.shape)).argmax(axis=1)


def test_the_check_is_that_of_the_answered_rows():
    promise = threshold(*draw(4000), max_risk=0.1)
    z, y = draw(3000, seed=1)
    monitor = Monitor(4, promise=promise, sizes=MonitorSizes(block=70))
    for start in range(0, 3000, 450):
        status = monitor.update(z[start : start + 450], y[start : start + 450])
    answered = promise.answers(z)
    alone = Recheck(0.1).update((z.argmax(axis=1) != y)[answered])
    assert (status.promise["answered"], status.promise["wrong"]) == (alone.rows, alone.wrong)
    assert (status.promise["low"], status.promise["high"]) == (alone.low, alone.high)
    assert status.promise["coverage"] == pytest.approx(answered.mean())
    assert not status.promise["broken"]
    assert "is not refuted" in status.promise["text"]
    json.dumps(status.to_dict(), allow_nan=False)


def test_a_broken_promise_is_found_and_stays_broken(tmp_path):
    monitor = Monitor(4, promise={"threshold": 0.8, "max_risk": 0.05})
    monitor.update(*draw(3000, temperature=3.0))
    assert monitor.status().promise["broken"]
    save(monitor, tmp_path / "watch.safetensors")
    again = load(tmp_path / "watch.safetensors")
    assert again.status() == monitor.status()
    assert again.update(*draw(20_000, 0.5)).promise["broken"]


def test_the_false_discoveries_of_an_event():
    z, y = draw(5000, classes=3)
    found = threshold(z, y, risk=EventRisk(event=2), max_risk=0.2)
    flagged = found.answers(z)
    status = Monitor(3, event=2, promise=found).update(z, y)
    assert status.promise["answered"] == flagged.sum()
    assert status.promise["wrong"] == (y[flagged] != 2).sum()
    with pytest.raises(ValueError, match="about the event that is watched, class 1"):
        Monitor(3, event=1, promise=found)
    with pytest.raises(ValueError, match="unless an event is watched"):
        Monitor(3, promise=found)


def test_what_is_expected_comes_true_and_leaves_when_labels_arrive(tmp_path):
    z, y = draw(5000, seed=1)
    monitor = Monitor(4, promise={"threshold": 0.8, "max_risk": 0.1})
    expected = monitor.expect(z).unlabelled
    right = z.argmax(axis=1) == y
    assert expected["accuracy"]["low"] < right.mean() < expected["accuracy"]["high"]
    p = np.exp(z - z.max(axis=1, keepdims=True))
    above = (p / p.sum(axis=1, keepdims=True)).max(axis=1) >= 0.8
    assert expected["answered"] == above.sum()
    assert expected["error"]["low"] < 1 - right[above].mean() < expected["error"]["high"]
    save(monitor, tmp_path / "watch.safetensors")
    again = load(tmp_path / "watch.safetensors")
    assert again.unlabelled == monitor.unlabelled
    status = again.update(z[:2000], y[:2000], awaited=True)
    assert (status.rows, status.unlabelled["rows"]) == (2000, 3000)
    rest = Monitor(4, promise={"threshold": 0.8, "max_risk": 0.1}).expect(z[2000:]).unlabelled
    assert status.unlabelled["accuracy"]["value"] == pytest.approx(rest["accuracy"]["value"])
    assert again.update(z[2000:], y[2000:], awaited=True).unlabelled is None
    with pytest.raises(ValueError, match="awaited must mark at most the 0 rows without labels"):
        again.update(z[:1], y[:1], awaited=True)
    assert again.rows == 5000


def test_monitors_of_shards_add_up():
    z, y = draw(4000)
    promise = {"threshold": 0.7, "max_risk": 0.2, "level": 0.9}
    parts = []
    for rows in (slice(0, 1500), slice(1500, 4000)):
        parts.append(Monitor(4, promise=promise))
        parts[-1].update(z[rows], y[rows])
        parts[-1].expect(z[rows])
    whole = Monitor(4, promise=promise)
    whole.update(z, y)
    whole.expect(z)
    both, one = (parts[0] + parts[1]).status(), whole.status()
    assert both.promise == one.promise
    assert both.unlabelled["accuracy"] == pytest.approx(one.unlabelled["accuracy"])
    with pytest.raises(ValueError, match="same classes and settings"):
        parts[0] + Monitor(4)


@pytest.mark.parametrize(
    ("promise", "message"),
    [
        ({"threshold": 2, "max_risk": 0.1}, "threshold between 0 and 1, got 2"),
        ({"threshold": float("inf"), "max_risk": 0.1}, "threshold between 0 and 1, got inf"),
        ({"threshold": 0.5}, "promise must have the entry max_risk"),
        ({"threshold": 0.5, "max_risk": 1.5}, "max_risk must lie between 0 and 1"),
        ({"threshold": 0.5, "max_risk": 0.1, "risk": "cost"}, "bound the risk error or false_discovery_rate"),
        ({"threshold": 0.5, "max_risk": 0.1, "more": 1}, "promise must have the entries"),
        (0.8, "promise must be a Threshold, or a mapping"),
    ],
)
def test_bad_promises_are_refused(promise, message):
    with pytest.raises(ValueError, match=message):
        Monitor(4, promise=promise)


def test_forged_counts_are_refused(tmp_path):
    path = tmp_path / "watch.safetensors"
    for part, wrong in (("wrong", 10**6), ("answered", True), ("broken", 1)):
        monitor = Monitor(4, promise={"threshold": 0.5, "max_risk": 0.1})
        monitor.update(*draw(300))
        save(monitor, path)
        forge(path, lambda inside, part=part, wrong=wrong: inside["promise"].update({part: wrong}))
        with pytest.raises(ValueError, match="counts of its promise contradict"):
            load(path)
    for part, wrong in (("rows", -1), ("confidence", float("nan")), ("answered", 10**9), ("errors", "many")):
        monitor = Monitor(4)
        monitor.expect(draw(10)[0])
        save(monitor, path)
        forge(path, lambda inside, part=part, wrong=wrong: inside["unlabelled"].update({part: wrong}))
        with pytest.raises(ValueError, match="rows without labels contradict"):
            load(path)


def forge(path, change):
    rewrite_artifact(path, lambda header, arrays: change(header["content"]))


def test_a_monitor_does_not_call_a_promise_broken_that_is_kept_for_long():
    z = np.tile([[4.0, 0.0]], (40_000, 1))
    monitor = Monitor(2, promise={"threshold": np.float32(0.5), "max_risk": 0.05})
    status = monitor.update(z, np.arange(40_000) % 100 == 0)
    assert not status.promise["broken"]
    assert "is not refuted" in status.promise["text"]


def test_a_promise_that_has_a_calibrator_wants_its_logits():
    z, y = draw(2000)
    promise = calibrated_threshold(2 * z, y, max_risk=0.2)
    with pytest.warns(UserWarning, match=r"give the monitor promise\.calibrator\(logits\)"):
        monitor = Monitor(4, promise=promise)
    assert not monitor.update(promise.calibrator(2 * z), y).promise["broken"]
