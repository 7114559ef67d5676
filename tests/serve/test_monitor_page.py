"""The page of monitors, driven as its reader would drive it, in a real browser."""

import re
import shutil
import subprocess
import time

import numpy as np
import pytest
from serving import assert_all_is_named, npz, served

from trueup import load
from trueup.monitor import Monitor

OPENED = "/monitor"
"""The page that `page` opens."""


@pytest.fixture
def server():
    with served() as client:
        yield client


def stream(rows=600, classes=3, seed=0, temperature=1.0):
    rng = np.random.default_rng(seed)
    z = 2 * rng.normal(size=(rows, classes))
    return {"logits": z, "labels": (z / temperature + rng.gumbel(size=z.shape)).argmax(axis=1)}


def made(page, name, classes=3):
    page.locator("[data-do=new]:visible").click()
    page.fill("#new-name", name)
    page.fill("#new-n_classes", str(classes))
    page.click("#make-it")
    page.wait_for_function("(name) => document.getElementById('name').textContent === name", arg=name)


def rows_shown(page, rows):
    page.wait_for_function("(rows) => document.getElementById('source').textContent.startsWith(rows)", arg=rows)


def test_a_newcomer_sees_an_alarm(page, server, tmp_path):
    page.wait_for_selector("#empty:not([hidden])")
    assert page.inner_text(".lead").count(".") == 2
    assert page.is_hidden("#watch")
    page.click("#empty [data-do=example]")
    page.wait_for_selector("#charts[data-drawn]")
    assert page.is_hidden("#empty")
    (found,) = server.get("/api/monitors").json()
    alarm = found["status"]["alarm"]
    assert page.inner_text("#says") == f"Alarm at row {alarm['row']:,}. {alarm['reason']}"
    assert page.inner_text("#list .chip") == "alarm"
    assert "alarm at 100" in page.locator("#evidence").inner_text()
    assert page.locator("#evidence g[clip-path] path").count() == 3  # the evidence, the level, and when it was reached
    assert page.locator("#rates g[clip-path] path").count() == 3
    assert f"reached at row {alarm['row']:,}" in page.get_attribute("#evidence", "aria-label")
    assert page.inner_text("#n-ece") == f"{found['status']['recent_ece']:.4f}"
    with page.expect_download() as waiting:
        page.click("#checkpoint")
    waiting.value.save_as(tmp_path / "watch.safetensors")
    assert load(tmp_path / "watch.safetensors").rows == 20_000


def test_a_log_is_replayed_and_one_that_is_wrong_changes_nothing(page, said, tmp_path):
    made(page, "net <b>1</b>")
    assert page.inner_text("#says") == "Waiting for the first rows."
    assert page.is_hidden("#charts")
    for day in (9, 10):
        (tmp_path / f"day{day}.npz").write_bytes(npz(**stream(seed=day)))
    page.set_input_files("#file", [tmp_path / "day10.npz", tmp_path / "day9.npz"])
    rows_shown(page, "1,200 rows")
    page.wait_for_selector("#charts[data-drawn]")
    monitor = Monitor(3)
    for day in (9, 10):  # by name, as people count
        monitor.update(**stream(seed=day))
    assert page.inner_text("#n-ece") == f"{monitor.status().recent_ece:.4f}"
    assert page.inner_text("#says").startswith("No alarm. The evidence against calibration is")
    assert page.inner_text("#list .chip") == "no alarm"
    assert page.inner_text("#list .called") == "net <b>1</b>"
    (tmp_path / "wide.npz").write_bytes(npz(**stream(classes=4)))
    page.set_input_files("#file", tmp_path / "wide.npz")
    page.wait_for_selector("#message:not([hidden])")
    assert page.inner_text("#message") == "logits must have 3 classes, got 4"
    assert [text for text in said if "status of 409" not in text] == []  # the browser itself notes a refusal
    said.clear()
    rows_shown(page, "1,200 rows")
    assert page.is_hidden("#replaying")
    assert page.is_enabled("#file")


def test_what_looks_like_probabilities_is_asked_for(page, said, tmp_path):
    made(page, "odd")
    rows = stream(40)
    p = np.exp(rows["logits"]) / np.exp(rows["logits"]).sum(axis=1, keepdims=True)
    (tmp_path / "log.npz").write_bytes(npz(logits=p, labels=rows["labels"]))
    page.set_input_files("#file", tmp_path / "log.npz")
    page.wait_for_selector("#message:not([hidden])")
    assert "choose which they are under “What is in the file?”" in page.inner_text("#message")
    assert [text for text in said if "status of 409" not in text] == []
    said.clear()
    page.locator("summary", has_text="What is in the file?").click()
    assert page.input_value("#probs") == ""
    for choice, seen in (("false", "40 rows"), ("true", "80 rows")):
        page.select_option("#probs", choice)
        page.set_input_files("#file", tmp_path / "log.npz")
        rows_shown(page, seen)


def test_a_long_log_tells_how_far_it_is(page, monkeypatch, tmp_path):
    whole = Monitor.update
    monkeypatch.setattr(
        Monitor, "update", lambda self, *pair, **options: (time.sleep(0.3), whole(self, *pair, **options))[1]
    )
    made(page, "long")
    (tmp_path / "log.npz").write_bytes(npz(**stream()))
    page.set_input_files("#file", tmp_path / "log.npz")
    page.wait_for_function(
        "() => /^Replaying [1-5]00 of 600 rows$/.test(document.getElementById('progress-text').textContent)"
    )
    assert 0 < page.evaluate("document.getElementById('progress').position") < 1
    rows_shown(page, "600 rows")
    assert page.is_hidden("#replaying")


def test_what_a_service_sends_appears_by_itself(page, server):
    made(page, "live")
    (found,) = server.get("/api/monitors").json()
    rows = stream(50)
    body = {name: array.tolist() for name, array in rows.items()}
    server.post(f"/api/monitors/{found['id']}/update", json=body)
    rows_shown(page, "50 rows")
    server.post("/api/monitors", json={"name": "another", "n_classes": 2})
    page.wait_for_function("() => document.getElementById('list').children.length === 2")
    assert page.inner_text("#list li:first-child .called") == "another"
    assert page.inner_text("#name") == "live"
    page.click("#list li:first-child a")
    page.wait_for_function("() => document.getElementById('name').textContent === 'another'")
    assert page.get_attribute("#list li:first-child a", "aria-current") == "true"
    page.reload()
    page.wait_for_function("() => document.getElementById('name').textContent === 'another'")


def test_what_it_tells_to_send_works(page, server):
    made(page, "snippets")
    id = server.get("/api/monitors").json()[0]["id"]
    inside = {}
    exec(page.inner_text("#python"), inside)
    assert inside["send"](np.zeros((5, 3)), np.zeros(5, int)) is None
    rows_shown(page, "5 rows")
    if shutil.which("curl"):
        shell = page.inner_text("#curl").replace("--json", "-s -H 'Content-Type: application/json' -d")  # older ones
        subprocess.run(["sh", "-c", shell.rpartition("\n")[0]], check=True, capture_output=True, timeout=1200)
        rows_shown(page, "6 rows")
    assert f"/api/monitors/{id}/replay?name=log.npz" in page.inner_text("#curl").replace(
        "$monitor", f"/api/monitors/{id}"
    )
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.click("[data-copy=curl]")
    page.wait_for_function("() => document.getElementById('copied').textContent === 'Copied.'")
    assert page.evaluate("navigator.clipboard.readText()") == page.evaluate(
        "document.getElementById('curl').textContent"
    )


def test_a_monitor_is_made_from_a_checkpoint_and_deleted(page, server, said, tmp_path):
    made(page, "first")
    (found,) = server.get("/api/monitors").json()
    path = tmp_path / "watch.safetensors"
    server.post(f"/api/monitors/{found['id']}/update", json={k: v.tolist() for k, v in stream(30).items()})
    path.write_bytes(server.get(f"/api/monitors/{found['id']}/file").content)
    page.click(".side [data-do=new]")
    page.fill("#new-name", "first")
    page.locator("dialog summary", has_text="checkpoint").click()
    page.set_input_files("#restore", path)
    page.click("#make-it")
    page.wait_for_selector("#making-message:not([hidden])")
    assert "there is already a monitor 'first'" in page.inner_text("#making-message")
    said.clear()
    page.fill("#new-name", "second")
    page.click("#make-it")
    page.wait_for_function("() => document.getElementById('name').textContent === 'second'")
    rows_shown(page, "30 rows")
    asked = []
    page.on("dialog", lambda dialog: (asked.append(dialog.message), dialog.accept()))
    page.click("#delete")
    page.wait_for_function("() => document.getElementById('name').textContent === 'first'")
    page.click("#delete")
    page.wait_for_selector("#empty:not([hidden])")
    assert asked == [f"Delete the monitor {name} and its history?" for name in ("second", "first")]
    assert server.get("/api/monitors").json() == []


def test_the_hints_are_the_library_s_defaults(page):
    defaults = Monitor(2).settings()
    for name in ("level", "window", "half_life", "block"):
        assert float(page.get_attribute(f"#new-{name}", "placeholder")) == defaults[name]


def test_a_server_that_is_gone_is_told_and_forgiven(page, said):
    made(page, "patient")
    page.route("**/api/monitors*", lambda route: route.abort())
    page.wait_for_selector("#message:not([hidden])")
    assert page.inner_text("#message") == "The server cannot be reached."
    page.unroute("**/api/monitors*")
    page.wait_for_selector("#message", state="hidden")
    assert [text for text in said if "ERR_FAILED" not in text] == []
    said.clear()


def test_everything_has_a_name_and_is_reached_by_keyboard(page):
    page.wait_for_selector("#empty:not([hidden])")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.focus("#empty [data-do=example]")
    page.keyboard.press("Enter")
    page.wait_for_selector("#charts[data-drawn]")
    assert_all_is_named(page)
    assert page.evaluate("document.activeElement.id") == "name"  # a new monitor is where the reader goes on
    page.locator("body").click(position={"x": 2, "y": 2})
    reached = set()
    for _ in range(30):
        page.keyboard.press("Tab")
        reached.add(
            page.evaluate(
                "(({ id, dataset, hash }) => id || dataset.copy || dataset.do || hash)(document.activeElement)"
            )
        )
    assert {"file", "python", "curl", "checkpoint", "delete", "new", "example"} <= reached
    assert any(re.fullmatch(r"#[0-9a-f]{16}", name or "") for name in reached)
    page.focus("#list a")
    page.wait_for_timeout(2500)  # it looks again
    assert page.evaluate("document.activeElement.closest('#list') !== null")


def test_it_fits_a_phone_and_the_dark(browser, server):
    server.post("/api/monitors/example")
    for scheme in ("light", "dark"):
        page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme=scheme)
        page.set_default_timeout(600_000)
        page.goto(f"{server.base_url}/monitor")
        page.wait_for_selector("#charts[data-drawn]")
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        words = page.evaluate("getComputedStyle(document.querySelector('#evidence text')).fill")
        assert words == ("rgb(96, 100, 108)" if scheme == "light" else "rgb(160, 166, 174)")
        page.close()


def test_the_pages_lead_to_each_other(page, server):
    page.click("nav >> text=Measure")
    page.wait_for_selector("#measure")
    page.click("nav >> text=Monitor")
    page.wait_for_selector("#empty:not([hidden])")
