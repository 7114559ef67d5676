"""The page, driven as a reader would drive it, in a real browser."""

import re

import numpy as np
import pytest
from serving import assert_all_is_named, npz, overconfident, served

from trueup import load, metrics
from trueup.serve import api, jobs
from trueup.serve.example import example

OPENED = ""
"""The page that `page` opens."""


@pytest.fixture(scope="module")
def server():
    small = pytest.MonkeyPatch()
    small.setattr(api, "example", lambda: example(rows=800))
    small.setattr(jobs, "methods_for", lambda rows, class_axis: ("temperature", "histogram", "vector"))
    with served() as client:
        yield client
    small.undo()


def measured(page):
    page.click("#example")
    page.wait_for_selector("#compare[data-drawn]")


def test_from_the_example_to_the_calibrator(page, tmp_path):
    measured(page)
    verdict = page.inner_text("#verdict")
    assert "This network is" in verdict
    assert "falls from" in verdict
    assert page.locator("#methods tbody tr").count() == 4
    assert page.locator("#methods tr.chosen .tag").inner_text() == "chosen"
    assert page.locator("#diagram svg").count() == 1
    assert page.locator("#diagram g[clip-path] rect").count() > 5

    page.wait_for_selector("#diagram[data-drawn='1.00/15']")
    before = page.inner_text("#n-ece")
    page.locator("#temperature").fill("0.9")
    page.wait_for_selector("#diagram[data-drawn='2.46/15']")
    test = example(rows=800)[1]
    assert float(page.inner_text("#n-ece")) == pytest.approx(
        metrics.ece(test.logits / np.exp(0.9), test.labels), abs=2e-3
    )
    assert float(page.inner_text("#n-ece")) < float(before)
    page.locator("#bins").fill("5")
    page.wait_for_selector("#diagram[data-drawn='2.46/5']")
    page.click("#reset")
    page.wait_for_selector("#diagram[data-drawn='1.00/5']")

    page.select_option("#first", "temperature")
    page.select_option("#second", "histogram")
    page.wait_for_selector("#compare[data-drawn='temperature/histogram']")
    assert page.locator("#chart-first svg").count() == 1
    assert "With Histogram binning instead of Temperature scaling" in page.inner_text("#difference")

    with page.expect_download() as waiting:
        page.click("#calibrator")
    waiting.value.save_as(tmp_path / "cal.safetensors")
    assert load(tmp_path / "cal.safetensors")(test.logits).shape == test.logits.shape
    with page.expect_download() as waiting:
        page.click("#report")
    assert waiting.value.suggested_filename == "report.html"
    waiting.value.save_as(tmp_path / "report.html")
    assert "<html" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_promise_is_chosen_with_the_slider(page):
    measured(page)
    page.wait_for_selector("#sets-text[data-drawn='0.9']")
    assert page.locator("#promise-chart svg").count() == 1
    last = page.locator("#allowed").get_attribute("max")
    page.locator("#allowed").fill(last)
    assert "At most 30\u00a0% wrong: answer if the confidence is at least" in page.inner_text("#promise-text")
    page.locator("#allowed").fill("0")
    assert "cannot be promised" in page.inner_text("#promise-text")
    page.locator("#coverage").fill("80")
    page.wait_for_selector("#sets-text[data-drawn='0.8']")
    assert "they contain the true class in" in page.inner_text("#sets-text")


def test_a_file_is_dropped_and_another_that_is_wrong(page, said, tmp_path):
    good, bad = tmp_path / "net.npz", tmp_path / "nan.npz"
    pair = overconfident(rows=200)
    good.write_bytes(npz(logits=pair.logits, labels=pair.labels))
    bad.write_bytes(npz(logits=np.full((3, 2), np.nan), labels=np.zeros(3, int)))
    page.set_input_files("#file", bad)
    page.wait_for_selector("#message:not([hidden])")
    assert "nan.npz: logits must be finite" in page.inner_text("#message")
    assert [text for text in said if "status of 409" not in text] == []  # the browser itself notes a refusal
    said.clear()
    assert page.is_hidden("#result")
    page.set_input_files("#file", good)
    page.wait_for_selector("#compare[data-drawn]")
    assert page.is_hidden("#message")
    assert "net.npz · 200 rows · 3 classes" in page.inner_text("#source")
    assert "Cross-fitted" in page.inner_text("#how")


def test_arrays_and_two_files_are_understood(page, tmp_path):
    val, test = overconfident(rows=120), overconfident(rows=90, seed=1)
    for name, pair in (("val", val), ("test", test)):
        np.save(tmp_path / f"{name}.npy", pair.logits)
        np.save(tmp_path / f"{name}.labels.npy", pair.labels)
    page.set_input_files("#file", sorted(tmp_path.iterdir()))
    page.wait_for_selector("#compare[data-drawn]")
    assert page.inner_text("#source") == "val.npy and test.npy · 120 calibration rows · 90 test rows · 3 classes"


def test_the_digits_network_is_clamped_on_the_page(page):
    pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    page.select_option("#clamp-camera", "contrast")
    page.click("#clamp-start")
    page.wait_for_selector("#clamp[data-drawn]")
    assert page.is_hidden("#clamp-fitting")
    assert re.match(r"T = \d+\.\d\d, ‖δ‖ = \d+\.\d\d\. (Yes|No|Not)", page.inner_text("#clamp-words"))
    rows = page.locator("#clamp-table tbody tr").all_inner_texts()
    assert [row.split("\t")[0] for row in rows] == ["Uncalibrated", "Temperature scaling", "Neural Clamping"]
    raw, temperature, clamped = ([float(cell) for cell in row.split("\t")[1:]] for row in rows)
    assert raw[0] == temperature[0]
    assert clamped[0] > raw[0]
    assert clamped[1] < raw[1]
    for chart in ("before", "after"):
        assert page.locator(f"#clamp-{chart} svg rect").count() > 5
    pixels = "(c) => [...c.getContext('2d').getImageData(0, 0, c.width, c.height).data].join()"
    image, delta, seen = (page.eval_on_selector(f"#clamp-{name}", pixels) for name in ("image", "delta", "sum"))
    assert len({image, delta, seen}) == 3
    page.click("#clamp-start")
    page.click("#clamp-stop")
    assert page.is_hidden("#clamp-result")


def test_everything_has_a_name_and_is_reached_by_keyboard(page):
    measured(page)
    assert_all_is_named(page)
    page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
    page.locator("body").click(position={"x": 2, "y": 2})
    reached = set()
    for _ in range(80):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.id"))
    wanted = {"file", "example", "temperature", "bins", "reset", "best", "report", "calibrator", "first", "second"}
    assert wanted | {"clamp-camera", "clamp-recipe", "clamp-start"} <= reached
    page.focus("#bins")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector("#diagram[data-drawn='1.00/16']")


def test_it_fits_a_phone_and_the_dark(browser, server):
    for scheme in ("light", "dark"):
        page = browser.new_page(viewport={"width": 390, "height": 844}, color_scheme=scheme)
        page.set_default_timeout(600_000)
        page.goto(str(server.base_url))
        measured(page)
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        ground, ink = (
            page.evaluate(f"getComputedStyle(document.body).{name}") for name in ("backgroundColor", "color")
        )
        light = [sum(map(int, colour[4:-1].split(","))) for colour in (ground, ink)]
        assert (light[0] > light[1]) == (scheme == "light")
        words = page.evaluate("getComputedStyle(document.querySelector('#diagram text')).fill")
        assert words == ("rgb(96, 100, 108)" if scheme == "light" else "rgb(160, 166, 174)")
        page.close()


def test_the_api_is_documented_on_a_page_of_its_own(page, server):
    page.goto(str(server.base_url.join("/docs")))
    page.wait_for_selector("details")
    assert page.locator("details").count() == sum(
        len(verbs) for verbs in server.get("/openapi.json").json()["paths"].values()
    )
    page.locator("summary:has(code:text-is('/api/upload'))").click()
    assert "the file has probabilities, not logits" in page.inner_text("main")


def test_a_result_survives_a_reload(page):
    measured(page)
    verdict, address = page.inner_text("#verdict"), page.url
    assert "data=" in address
    assert "job=" in address
    page.reload()
    page.wait_for_selector("#compare[data-drawn]")
    assert page.inner_text("#verdict") == verdict
    assert page.url == address
    assert page.get_attribute("#link", "href") == address


def test_a_result_that_is_gone_is_told(page, said):
    page.goto(page.url + "?data=nothing&job=nothing")
    page.wait_for_selector("#message:not([hidden])")
    assert "has deleted this result" in page.inner_text("#message")
    assert "data=" not in page.url
    said.clear()  # the browser tells of the answer 404 itself


def test_methods_and_folds_are_chosen(page):
    page.click("#choices summary")
    page.check("#method-choices input[value=platt]")
    page.check("#method-choices input[value=beta]")
    page.fill("#folds", "3")
    measured(page)
    names = page.locator("#methods tbody th").all_inner_texts()
    assert [name.split("\n")[0].replace("chosen", "").strip() for name in names] == [
        "No calibration",
        "Platt scaling",
        "Beta calibration",
    ]
