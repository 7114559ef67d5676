"""A monitor sees what happens, says so no more often than promised, and survives a restart."""

import inspect
import json
import re
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from artifact_files import rewrite_artifact
from optional import torch
from trueup import evaluate, load, metrics, save
from trueup.convert import as_event
from trueup.io import load_artifact
from trueup.monitor import Monitor, MonitorSizes
from trueup.monitor.betting import GLOBAL_BETS, SLOPE_BETS


def drawn(n, temperature=1.0, seed=0, classes=4):
    rng = np.random.default_rng(seed)
    z = 2 * rng.normal(size=(n, classes))
    return z, (z / temperature + rng.gumbel(size=z.shape)).argmax(axis=1)


def test_its_figures_are_those_of_the_metrics():
    z, y = drawn(3000)
    status = Monitor(4).update(z, y)
    assert status.rows == status.recent_rows == 3000
    for prefix in ("", "recent_"):
        assert getattr(status, prefix + "ece") == pytest.approx(metrics.ece(z, y), abs=1e-12)
        assert getattr(status, prefix + "nll") == pytest.approx(metrics.nll(z, y), abs=1e-12)
        assert getattr(status, prefix + "accuracy") == pytest.approx(metrics.accuracy(z, y), abs=1e-12)


def test_forgetting_halves_the_weight_of_what_is_a_half_life_older():
    z, y = drawn(700)
    status = Monitor(4, sizes=MonitorSizes(half_life=100, block=130)).update(z, y)
    weight = 0.5 ** (np.arange(700)[::-1] / 100)
    correct = (z.argmax(axis=1) == y).astype(float)
    assert status.fading_accuracy == pytest.approx((weight @ correct) / weight.sum(), abs=1e-12)


def test_the_window_holds_the_last_rows():
    z, y = drawn(5000)
    monitor = Monitor(4, sizes=MonitorSizes(window=1000))
    status = monitor.update(z, y)
    assert 1000 <= status.recent_rows <= 1100
    last = slice(5000 - status.recent_rows, None)
    assert status.recent_ece == pytest.approx(metrics.ece(z[last], y[last]), abs=1e-12)


@settings(max_examples=8)
@given(cuts=st.lists(st.integers(0, 900), max_size=6))
def test_however_rows_are_dealt_it_ends_the_same(cuts):
    z, y = drawn(900)
    whole = Monitor(4, sizes=MonitorSizes(block=128, window=300))
    whole.update(z, y)
    parts = Monitor(4, sizes=MonitorSizes(block=128, window=300))
    bounds = [0, *sorted(cuts), 900]
    for low, high in pairwise(bounds):
        parts.update(z[low:high], y[low:high])
    assert parts.status().evidence == pytest.approx(whole.status().evidence, rel=1e-9)
    assert parts.status().fading_ece == pytest.approx(whole.status().fading_ece, abs=1e-12)
    np.testing.assert_allclose(parts.evidence.wealth, whole.evidence.wealth, atol=1e-9)


def test_calibrated_streams_hardly_ever_alarm():
    alarms = 0
    for seed in range(60):  # thousands in `make bench-monitor`
        monitor = Monitor(3, level=0.9, sizes=MonitorSizes(block=100))
        alarms += monitor.update(*drawn(1000, seed=seed, classes=3)).alarm is not None
    # At most 6 are expected; more than 13 would come once in five hundred times at the promised rate.
    assert alarms <= 13


@pytest.mark.parametrize(("temperature", "how"), [(1.5, "Overconfident"), (0.6, "Underconfident")])
def test_a_drift_after_long_peace_is_found(temperature, how):
    monitor = Monitor(4, level=0.99, classwise=False)
    assert monitor.update(*drawn(20_000)).alarm is None
    alarm = monitor.update(*drawn(3_000, temperature, seed=1)).alarm
    assert 20_000 < alarm.row <= 23_000
    assert alarm.evidence >= 100
    assert how in alarm.reason


def test_a_class_gone_wrong_is_found_by_its_own_betters():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(4000, 5))
    swapped = rng.random(4000) < 0.5
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    y[swapped & (y == 3)] = 4  # half of class 3 is called 4
    assert Monitor(5, classwise=True).update(z, y).evidence > 100


def test_p_value_is_of_the_strongest_evidence_ever():
    monitor = Monitor(4)
    monitor.update(*drawn(3000, 1.5))
    least = monitor.status().p_value
    monitor.update(*drawn(3000, 1.0, seed=2))
    assert monitor.status().p_value <= least


def test_a_checkpoint_goes_on_as_if_nothing_had_happened(tmp_path):
    path = tmp_path / "watch.safetensors"
    one = Monitor(4, sizes=MonitorSizes(block=100, window=500))
    one.update(*drawn(1234))
    save(one, path)
    assert path.stat().st_size < 8192
    other = load(path)
    for monitor in (one, other):
        monitor.update(*drawn(4000, 1.6, seed=3))
    assert one.status() == other.status()
    assert one.alarm is not None


def test_a_checkpoint_of_a_raised_alarm_keeps_it(tmp_path):
    monitor = Monitor(4)
    monitor.update(*drawn(4000, 2.0))
    save(monitor, tmp_path / "a.safetensors")
    assert load(tmp_path / "a.safetensors").alarm == monitor.alarm
    json.dumps(monitor.status().to_dict())


def test_bad_checkpoints_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"suffix must be .safetensors"):
        save(Monitor(2), tmp_path / "a.json")
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(b"nothing of the kind")
    with pytest.raises(ValueError, match="bad.safetensors"):
        load(bad)
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(2)}, bad)
    with pytest.raises(ValueError, match="must hold a monitor"):
        load_artifact(bad, "monitor")


def changed(path, change):
    """A checkpoint whose header is not what it was."""
    rewrite_artifact(path, lambda header, arrays: change(header["content"]))


@pytest.fixture(scope="module")
def alarmed():
    monitor = Monitor(4)
    monitor.update(*drawn(4000, 2.0))
    return monitor


@pytest.mark.parametrize(
    ("part", "entry", "value", "message"),
    [
        ("alarm", "row", None, "the row of its alarm must lie in 0..4000, got None"),
        ("alarm", "row", True, "the row of its alarm must lie in 0..4000, got True"),
        ("alarm", "row", 4001, "the row of its alarm must lie in 0..4000, got 4001"),
        ("alarm", "row", -1, "the row of its alarm must lie in 0..4000, got -1"),
        ("alarm", "evidence", float("nan"), "the evidence of its alarm must be a positive number, got nan"),
        ("alarm", "evidence", float("inf"), "the evidence of its alarm must be a positive number, got inf"),
        ("alarm", "evidence", "much", "the evidence of its alarm must be a positive number, got 'much'"),
        ("alarm", "evidence", 10**400, "the evidence of its alarm must be a positive number"),
        ("alarm", "reason", 5, "the reason of its alarm must be text, got 5"),
        ("alarm", "more", 1, "is not a complete monitor"),
        ("alarm", None, [1, 2, "x"], "alarm must be a dictionary"),
        ("seen", None, [4000, 1, 1], "seen must be a dictionary"),
        ("seen", "begun", 42, "its bettors cannot have started 42 times in 4,000 rows"),
        ("seen", "begun", True, "must be whole numbers"),
        ("seen", "streams", 10**400, "must be whole numbers"),
        ("settings", None, [[1, 2]], "settings must be a dictionary"),
        ("settings", None, None, "settings must be a dictionary"),
    ],
)
def test_a_forged_header_is_refused(tmp_path, alarmed, part, entry, value, message):
    path = tmp_path / "a.safetensors"
    save(alarmed, path)
    changed(path, lambda header: None)
    assert load(path).status() == alarmed.status()
    changed(path, lambda header: (header if entry is None else header[part]).update({entry or part: value}))
    with pytest.raises(ValueError, match=re.escape(message)):
        load(path)


def test_settings_are_all_that_another_needs():
    options = {
        "level": 0.95,
        "bins": 7,
        "window": 300,
        "half_life": 50.0,
        "block": 20,
        "classwise": False,
        "top_label": True,
    }
    monitor = Monitor.from_settings({"n_classes": 3, **options})
    assert monitor.settings() == {"n_classes": 3, **options, "event": None, "promise": None}
    taken = {*inspect.signature(Monitor).parameters, *inspect.signature(MonitorSizes).parameters}
    assert {*monitor.settings(), "class_names", "sizes"} == taken
    named = Monitor(3, event="cat", class_names=["ant", "bee", "cat"])
    assert Monitor.from_settings(named.settings()).settings() == named.settings()
    assert named.event == 2


def test_bad_rows_change_nothing():
    monitor = Monitor(3)
    monitor.update(*drawn(50, classes=3))
    before = monitor.status()
    for logits, labels in (
        (np.zeros((2, 4)), [0, 1]),
        (np.full((1, 3), np.nan), [0]),
        (np.zeros((2, 3)), [0, 3]),
        (np.zeros((2, 3)), [0]),
    ):
        with pytest.raises(ValueError):
            monitor.update(logits, labels)
    assert monitor.status() == before


def test_no_rows_are_no_evidence():
    status = Monitor(3).update(np.zeros((0, 3)), np.zeros(0, int))
    assert status.rows == 0
    assert status.evidence == pytest.approx(1)
    assert status.p_value == 1
    assert status.to_dict()["ece"] is None


def test_torch_and_numpy_agree():
    z, y = drawn(300)
    assert Monitor(4).update(z, y) == Monitor(4).update(torch.tensor(z), torch.tensor(y))


def test_monitors_add_up():
    a, b = Monitor(4), Monitor(4)
    a.update(*drawn(3000, 1.8))
    b.update(*drawn(2000, seed=1))
    both = a + b
    pooled = [np.concatenate(parts) for parts in zip(drawn(3000, 1.8), drawn(2000, seed=1), strict=True)]
    assert both.rows == 5000
    assert both.status().ece == pytest.approx(metrics.ece(*pooled), abs=1e-12)
    assert both.status().evidence == pytest.approx((a.status().evidence + b.status().evidence) / 2, rel=0.01)
    assert both.alarm is not None
    with pytest.raises(ValueError, match="same classes and settings"):
        a + Monitor(4, level=0.8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_classes": 1}, "n_classes must be a whole number of at least 2, got 1"),
        ({"n_classes": 3, "level": 1.0}, r"level must lie in \(0, 1\), got 1.0"),
        ({"n_classes": 3, "window": 0}, "window must be a whole number of at least 1, got 0"),
        ({"n_classes": 3, "half_life": 0}, "half_life must be positive, got 0"),
    ],
)
def test_bad_settings_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Monitor.from_settings(options)


def test_prometheus_reads_it():
    pytest.importorskip("prometheus_client", reason="prometheus_client is not installed")
    from trueup.integrations.prometheus import prometheus_text

    monitor = Monitor(4)
    monitor.update(*drawn(4000, 2.0))
    text = prometheus_text({"net": monitor}).decode()
    assert 'trueup_alarm{monitor="net"} 1.0' in text
    assert 'trueup_rows{monitor="net",rows="all"} 4000.0' in text
    assert text.count("# HELP") == 8


def test_an_event_is_watched_in_the_logits_of_all_classes(tmp_path):
    z, y = drawn(3000)
    monitor = Monitor(4, event="cat", class_names=["ant", "bee", "cat", "dog"])
    status = monitor.update(z, y)
    expected = Monitor(2).update(*as_event(z, y, 2))
    assert status == expected
    assert status.event
    assert status.accuracy == pytest.approx((y == 2).mean())
    save(monitor, tmp_path / "watch.safetensors")
    again = load(tmp_path / "watch.safetensors")
    assert again.update(z, y) == monitor.update(z, y)
    with pytest.raises(ValueError, match=r"event must be a class, 0\.\.2: ant, bee, cat, got 'cow'"):
        Monitor(3, event="cow", class_names=["ant", "bee", "cat"])
    with pytest.raises(ValueError, match="monitors must have the same classes"):
        monitor + Monitor(4, event=1)


def test_weights_weigh_the_figures_and_the_evidence_counts_rows(tmp_path):
    z, y = drawn(3000)
    w = np.random.default_rng(5).integers(0, 4, 3000).astype(float)
    monitor = Monitor(4, sizes=MonitorSizes(window=500, half_life=1e12))
    status = monitor.update(z, y, sample_weight=w)
    copies = np.repeat(np.arange(3000), w.astype(int))
    for name in ("ece", "nll", "accuracy"):
        expected = getattr(metrics, name)(z[copies], y[copies])
        assert getattr(status, name) == pytest.approx(expected, abs=1e-12)
        assert getattr(status, f"fading_{name}") == pytest.approx(expected, abs=1e-6)
    some = w > 0
    assert status.rows == some.sum()
    assert 500 <= status.recent_rows <= 550
    assert status.evidence == Monitor(4).update(z[some], y[some]).evidence
    last = np.flatnonzero(some)[-status.recent_rows :]
    assert status.recent_ece == pytest.approx(metrics.ece(z[last], y[last], sample_weight=w[last]), abs=1e-12)
    halved = Monitor(4, sizes=MonitorSizes(window=500, half_life=1e12)).update(z, y, sample_weight=w / 2)
    assert halved.ece == pytest.approx(status.ece, abs=1e-12)
    save(monitor, tmp_path / "watch.safetensors")
    assert load(tmp_path / "watch.safetensors").status() == status
    with pytest.raises(ValueError, match="sample_weight must"):
        monitor.update(z, y, sample_weight=-w)
    assert monitor.status() == status


def test_groups_are_told_apart_and_survive_a_restart(tmp_path):
    z, y = drawn(3000)
    day = np.arange(3000) % 3
    batches = [slice(0, 1000), slice(1000, 1700), slice(1700, 3000)]
    monitor = Monitor(4)
    assert monitor.by_group() is None
    for batch in batches[:2]:
        monitor.update(z[batch], y[batch], groups={"day": day[batch]})
    save(monitor, tmp_path / "watch.safetensors")
    again = load(tmp_path / "watch.safetensors")
    again.update(z[batches[2]], y[batches[2]], groups={"day": day[batches[2]]})
    whole = evaluate(z, y, groups={"day": day}, n_resamples=19).groups
    assert {row.name: row.rows for row in again.by_group().rows} == {"day=0": 1000, "day=1": 1000, "day=2": 1000}
    for row in whole.rows:
        found = again.by_group()[row.name]
        assert (found.predicted, found.observed) == pytest.approx((row.predicted, row.observed), abs=1e-12)
        assert found.difference.low == pytest.approx(row.difference.low, abs=1e-9)
    both = again + Monitor(4)
    assert both.by_group()["day=1"].rows == 1000


def test_bad_groups_change_nothing():
    z, y = drawn(1500)
    monitor = Monitor(4)
    monitor.update(z, y, groups=np.zeros(1500, int))
    before = monitor.status(), str(monitor.by_group())
    with pytest.raises(ValueError, match="groups must be at most 1,000 over all batches and columns, got 1,500"):
        monitor.update(z, y, groups=np.arange(1500))
    with pytest.raises(ValueError, match="groups must have 1500 entries"):
        monitor.update(z, y, groups=[1])
    assert (monitor.status(), str(monitor.by_group())) == before


def test_rows_without_weight_are_in_no_group():
    z, y = drawn(100)
    monitor = Monitor(4)
    monitor.update(z, y, sample_weight=(np.arange(100) < 60) * 2.0, groups=np.where(np.arange(100) < 50, "a", "b"))
    assert {row.name: row.rows for row in monitor.by_group().rows} == {"a": 50, "b": 10}


def reversed_risks(rng, n):
    """Rare events whose predicted probabilities have the reversed order."""
    p = rng.uniform(0.001, 0.06, n)
    return 0.061 - p, rng.random(n) < p


def reversed_confidences(rng, n):
    """A network with confidences of .935 to .999 in the reversed order."""
    p = rng.uniform(0.935, 0.999, n)
    return 1.934 - p, rng.random(n) < p


@pytest.mark.parametrize("world", [reversed_risks, reversed_confidences])
@pytest.mark.parametrize("seed", range(5))
def test_a_reversed_ranking_raises_the_alarm_within_5000_rows(world, seed):
    predicted, happened = world(np.random.default_rng(seed), 5000)
    monitor = Monitor(2, level=0.99, top_label=world is reversed_confidences)
    logits = np.log(np.stack([1 - predicted, predicted], axis=1))
    labels = happened.astype(int)
    assert "calibrated" not in repr(monitor.status())
    status = monitor.update(logits, labels)
    assert status.alarm is not None
    assert status.alarm.row <= 5000
    assert "calibrated" not in repr(status).replace("miscalibrated", "")


def test_a_reversed_ranking_of_several_classes_raises_the_alarm():
    rng = np.random.default_rng(0)
    predicted, right = reversed_confidences(rng, 5000)
    logits = np.log(np.stack([predicted, *[(1 - predicted) / 3] * 3], axis=1))
    labels = np.where(right, 0, rng.integers(1, 4, 5000))
    assert Monitor(4, level=0.99).update(logits, labels).alarm is not None


def test_checkpoints_from_before_the_bets_on_the_slope_go_on(tmp_path):
    z, y = drawn(500)
    monitor = Monitor(4)
    monitor.update(z, y)
    save(monitor, tmp_path / "new.safetensors")

    def without_slopes(header, arrays):
        arrays["wealth"] = np.delete(arrays["wealth"], range(len(GLOBAL_BETS), len(GLOBAL_BETS) + len(SLOPE_BETS)))

    rewrite_artifact(tmp_path / "new.safetensors", without_slopes)
    old = load(tmp_path / "new.safetensors")
    assert old.status().evidence == pytest.approx(monitor.status().evidence, rel=0.1)
    assert old.update(z, y).rows == 1000


def test_an_acknowledged_alarm_starts_a_new_watch(tmp_path):
    promise = {"threshold": 0.5, "max_risk": 0.1}
    rng = np.random.default_rng(0)
    monitor = Monitor(3, level=0.95, promise=promise, sizes=MonitorSizes(block=20))
    with pytest.raises(ValueError, match="there is no alarm to acknowledge"):
        monitor.acknowledge()
    drifted = 9 * rng.normal(size=(405, 3)), rng.integers(3, size=405)
    before = monitor.update(*drifted)
    after = monitor.acknowledge()
    assert before.alarm is not None
    assert after.acknowledged == [before.alarm]
    assert (after.alarm, after.evidence, after.p_value, after.promise["answered"]) == (None, pytest.approx(1), 1, 0)
    assert (after.rows, after.ece, after.recent_ece, after.nll) == (405, before.ece, before.recent_ece, before.nll)
    save(monitor, tmp_path / "monitor.safetensors")
    restored = load(tmp_path / "monitor.safetensors")
    z = 2 * rng.normal(size=(2_000, 3))
    calibrated = z, (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    fresh = Monitor(3, level=0.95, promise=promise, sizes=MonitorSizes(block=20))
    one, two = monitor.update(*calibrated), restored.update(*calibrated)
    assert one == two
    assert one.alarm is None
    assert one.rows == 2_405
    # The evidence is that of a new monitor, which restarts its bettors at other rows.
    assert np.log(one.evidence) == pytest.approx(np.log(fresh.update(*calibrated).evidence), abs=1.5)
    assert monitor.update(*drifted).alarm.row > 2_405


def test_the_new_watch_rarely_raises_a_false_alarm():
    raised = 0
    for seed in range(100):
        rng = np.random.default_rng(seed)
        monitor = Monitor(2, level=0.8, sizes=MonitorSizes(block=50))
        monitor.update(9 * rng.normal(size=(200, 2)), rng.integers(2, size=200))
        monitor.acknowledge()
        z = 2 * rng.normal(size=(1_000, 2))
        raised += monitor.update(z, (z + rng.gumbel(size=z.shape)).argmax(axis=1)).alarm is not None
    assert raised <= 29  # 20 would be the level itself, and more than 29 then has a probability of 1 %
