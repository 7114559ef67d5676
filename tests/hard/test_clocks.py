"""Clocks that jump: nothing is lost, and no number depends on them but those that tell a time."""

import time
from collections import Counter
from functools import partial

import numpy as np
import pytest
from commands import overconfident

import trueup
from trueup.reports import report
from trueup_studies import STUDIES, Options, Store, run

YEAR = 365 * 86400.0
CLOCKS = {
    "time.monotonic": "a study and its store",
    "trueup._core.progress.monotonic": "its progress line",
    "trueup.reports.audit.perf_counter": "an audit",
}
"""The clocks of the machine that are looked at, and by whom."""


def test_clock_of_the_machine(monkeypatch, tmp_path, tell):
    """The clocks of a study, its progress line and an audit jump by up to a year, back and forth, at each look."""

    def work(folder):
        folder.mkdir()
        z, y = overconfident(400)
        store = Store(folder / "results.sqlite")
        study, options = STUDIES["post-hoc"], Options(data="overconfident", seeds=1, methods=("temperature",))
        run(study, store, options=options)
        rows = [{k: v for k, v in row.items() if "seconds" not in k} for row in store.rows(study.cells(options))]
        found = report((z, y), methods=["temperature"], progress=False).audit.to_dict()
        return rows, {name: value for name, value in found.items() if name != "seconds"}

    before = work(tmp_path / "before")
    rng, looks = np.random.default_rng(0), Counter()

    def jumping(clock):
        looks[clock] += 1
        return 1.7e9 + rng.uniform(-1, 1) * YEAR

    for clock in CLOCKS:  # none of them can jump on a healthy machine; even so
        monkeypatch.setattr(clock, partial(jumping, clock))
    monkeypatch.setenv("TRUEUP_PROGRESS", "1")
    after = work(tmp_path / "after")
    monkeypatch.undo()
    assert after == before
    assert set(looks) == set(CLOCKS), f"nobody looked at {set(CLOCKS) - set(looks)}"
    told = ", ".join(f"{looks[clock]} by {who}" for clock, who in CLOCKS.items())
    tell("faults", f"{looks.total()} looks ({told}): same numbers, no failure")


def test_clock_of_kept_monitors(monkeypatch, tmp_path, tell):
    """The time of day jumps a year back, then two years forward, while `trueup serve` keeps a monitor."""
    serving = pytest.importorskip("serve.serving", reason="the web page needs fastapi: pip install 'trueup[serve]'")
    z, y = overconfident(400)
    monitor, jump, looks, now = trueup.Monitor(3), [0.0], [], time.time

    def jumping():
        looks.append(jump[0])
        return now() + jump[0]

    monkeypatch.setattr(time, "time", jumping)
    seen = []
    with serving.served(monitors_folder=tmp_path, checkpoint_seconds=0) as client:
        id = client.post("/api/monitors", json={"name": "watch", "n_classes": 3}).json()["id"]
        for part, jump[0] in zip(np.split(np.arange(400), 4), (0.0, -YEAR, 2 * YEAR, 0.0), strict=True):
            rows = {"logits": z[part].tolist(), "labels": y[part].tolist()}
            found = client.post(f"/api/monitors/{id}/update", json=rows).json()
            assert found["status"] == monitor.update(z[part], y[part]).to_dict()
            assert found["saved_rows"] == monitor.rows
            assert jump[0] in looks
            assert abs(found["updated"] - now() - jump[0]) < 60
            seen.append(monitor.rows)
        points = client.get(f"/api/monitors/{id}").json()["history"]["rows"]
        assert points == sorted(points)
        assert set(seen) <= set(points)
    with serving.served(monitors_folder=tmp_path) as client:
        (found,) = client.get("/api/monitors").json()
        assert found["status"] == monitor.status().to_dict()
    tell("faults", f"{len(seen)} updates of {monitor.rows} rows: only what is told as the time of the last update "
         "jumps; all rows, points and checkpoints as without, also after a restart")  # fmt: skip


def test_clock_of_the_server(tell):
    """The clock of `trueup serve` jumps a year forward and a year back."""
    serving = pytest.importorskip("serve.serving", reason="the web page needs fastapi: pip install 'trueup[serve]'")
    from trueup.serve.session_store import Store as Kept

    now = [1e9]
    store = Kept(seconds=3600, max_bytes=1 << 20, clock=lambda: now[0])
    first = store.put("before", 10)
    now[0] -= YEAR
    second = store.put("between", 10)
    kept_back = [store.get(name, str) for name in (first, second)]
    assert kept_back == ["before", "between"], "lost by a jump back"
    now[0] += 3599
    assert second in store
    now[0] += YEAR
    third = store.put("after", 10)
    assert first not in store
    assert store.get(third, str) == "after"
    now[0] -= 2 * YEAR
    assert store.get(third, str) == "after"
    for name in [store.put(str(i), 1 << 18) for i in range(20)]:
        assert len(name) > 20
    assert store.size <= 1 << 20

    moment, body = [1e9], serving.of(serving.overconfident(2000))
    with serving.served(clock=lambda: moment[0]) as client:
        id = serving.uploaded(client, body)["id"]
        moment[0] -= YEAR
        assert client.get(f"/api/data/{id}").status_code == 200
        moment[0] += 2 * YEAR
        gone = client.get(f"/api/data/{id}").status_code
        assert gone == 404
        moment[0] -= YEAR
        assert serving.uploaded(client, body)["rows"] == 2000
    tell("faults", f"back: nothing is lost, and the memory budget holds ({store.size >> 10:,} of 1,024 kB); forward: "
         f"what was left longer than an hour has expired ({gone}); no failure")  # fmt: skip
