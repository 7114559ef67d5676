"""Names of files, groups, classes and monitors that contain scripts are shown as text, in a real browser."""

import re
from pathlib import Path

import numpy as np
import pytest
from serving import npz, served

from trueup.metrics.groups import evaluate_groups
from trueup.reports import draw, group_errors

OPENED = ""
IMAGE = "<img src=x onerror=window.hacked=1>"
SCRIPT = "</title></script></text><script>window.hacked=1</script>" + IMAGE
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def server():
    with served() as client:
        yield client


def predictions(rows=300):
    rng = np.random.default_rng(0)
    z = 2 * rng.normal(size=(rows, 3))
    groups = np.where(np.arange(rows) % 2, SCRIPT, "' onmouseover=window.hacked=1 x='")
    return z, (z / 2 + rng.gumbel(size=z.shape)).argmax(axis=1), groups


def assert_harmless(page):
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked") is None
    assert page.locator("img[onerror], script:not([src]):not([type]):has-text('hacked')").count() == 0


def test_hostile_names_on_the_page_and_in_the_report_are_text(page, browser, tmp_path):
    z, y, groups = predictions()
    column, file = f"region{IMAGE}", tmp_path / f"net{IMAGE}.npz"
    file.write_bytes(npz(**{"logits": z, "labels": y, column: groups}))
    page.click("summary:has-text('What is in the file')")
    page.fill("#groups", column)
    page.set_input_files("#file", file)
    page.wait_for_selector("#where[data-drawn='2']")
    page.wait_for_selector("#compare[data-drawn]")
    assert IMAGE in page.inner_text("#source")
    page.locator("#where summary").first.click()
    assert "<script>window.hacked=1</script>" in page.inner_text("#where")
    assert_harmless(page)
    with page.expect_download() as waiting:
        page.click("#report")
    waiting.value.save_as(tmp_path / "report.html")
    report = browser.new_page()
    report.goto((tmp_path / "report.html").as_uri())
    assert IMAGE in report.inner_text("body")
    assert_harmless(report)
    report.close()


def test_a_hostile_name_of_a_monitor_is_text(page, server):
    answer = server.post("/api/monitors", json={"name": IMAGE, "n_classes": 3})
    assert answer.status_code == 201
    page.goto(f"{server.base_url}/monitor")
    page.wait_for_function("(name) => document.getElementById('name').textContent === name", arg=IMAGE)
    assert_harmless(page)


def test_hostile_names_in_a_picture_are_text(browser, tmp_path):
    z, y, groups = predictions()
    score, correct = np.exp(z).max(axis=1) / np.exp(z).sum(axis=1), (z.argmax(axis=1) == y).astype(float)
    ax = draw(group_errors(evaluate_groups(score, correct, {f"region{IMAGE}": groups})))
    picture = tmp_path / "groups.svg"
    ax.figure.savefig(picture, metadata={"Title": SCRIPT})
    page = browser.new_page()
    page.goto(picture.as_uri())
    assert page.evaluate("document.documentElement.tagName") == "svg"
    page.wait_for_timeout(300)
    assert page.evaluate("window.hacked") is None
    assert page.evaluate("document.querySelectorAll('script, [onerror], [onmouseover]').length") == 0
    page.close()


def test_every_promise_names_its_test():
    page = (ROOT.parent / "docs" / "security.md").read_text(encoding="utf-8")
    table = page.split("## Threats, promises and tests")[1].split("##")[0]
    rows = [row for row in table.splitlines() if row.startswith("| ") and "`test_" in row]
    assert len(rows) >= 20
    for row in rows:
        file, name = re.search(r"`(test_\w+\.py)::(test_\w+)` \|$", row).groups()
        (path,) = ROOT.glob(f"*/{file}")
        assert f"def {name}(" in path.read_text(encoding="utf-8"), row
