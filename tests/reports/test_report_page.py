"""The page: whole in one file, safe with anybody's words, and drawn by a real browser, light and dark."""

from __future__ import annotations

import json
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest

from trueup import METHODS, Predictions
from trueup.reports import Report, report
from trueup.reports.audit import RAW

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> & \"co\" 'x'"
CHARTS = {
    "reliability-before", "reliability-after", "confidence-before", "confidence-after", "methods-chart", "sweep-chart",
    "choice-chart",
    "risk-chart", "promise-chart", "classes-before", "classes-after",
}  # fmt: skip


def drawn(n=600, sharper=3.0, seed=0):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(n, 3))
    return Predictions((sharper * z).astype(np.float32), (z + rng.gumbel(size=z.shape)).argmax(axis=1))


def broken(logits, labels):
    raise ValueError("needs <more> rows")


@pytest.fixture(scope="module")
def result():
    methods = {name: METHODS[name] for name in ("temperature", "vector", "histogram")} | {"<b>own</b>": broken}
    extra = {EVIL: drawn(seed=1)}
    return report(drawn(), drawn(seed=1), methods=methods, extra=extra, progress=False).audit


@pytest.fixture(scope="module")
def page(result):
    return Report(result, title=EVIL, class_names=(EVIL, "b", "c"), sections=(("More", "<p>told</p>"),)).html()


class Outline(HTMLParser):
    """What a reader of the page's structure meets."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.headings, self.ids = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        given = dict(attributes)
        self.tags.append((tag, given))
        if re.fullmatch(r"h[1-6]", tag):
            self.headings.append(int(tag[1]))
        if "id" in given:
            self.ids.append(given["id"])


def without_scripts(page):
    return re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.DOTALL)


def test_is_one_small_file(page):
    assert len(page.encode()) < 300_000
    assert page.startswith("<!doctype html>")
    assert not re.search(r"""(?:src|href)\s*=\s*["']?(?:https?:)?//""", without_scripts(page))
    assert "@import" not in page.split("</style>")[0]
    assert "url(" not in page.split("</style>")[0]


def test_nobodys_words_become_markup(page):
    assert "<script>alert(1)" not in page
    assert "<img src=x" not in without_scripts(page)
    assert "<b>own" not in without_scripts(page)
    embedded = re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)
    charts = json.loads(embedded[1])
    assert set(charts) == CHARTS
    assert EVIL in json.dumps(charts, ensure_ascii=False).replace(
        '\\"', '"'
    )  # texts of SVG, which are never read as markup
    assert page.count("<script") == page.count("</script>") == 2


def test_structure(page):
    outline = Outline(without_scripts(page))
    assert outline.headings[0] == 1
    assert outline.headings.count(1) == 1
    assert all(after <= before + 1 for before, after in zip(outline.headings, outline.headings[1:], strict=False))
    assert len(outline.ids) == len(set(outline.ids))
    kinds = [tag for tag, _ in outline.tags]
    for landmark in ("header", "main", "footer"):
        assert kinds.count(landmark) == 1
    assert all("scope" in given for tag, given in outline.tags if tag == "th")
    charts = [given for _, given in outline.tags if given.get("class") == "chart"]
    assert {given["id"] for given in charts} == CHARTS
    for given in charts:
        assert given["role"] == "img"
        assert given["aria-describedby"] in outline.ids
    assert kinds.count("figure") == len(CHARTS)
    assert kinds.count("details") == len(CHARTS) - 2  # the table of methods has the numbers of two charts
    for _, given in outline.tags:
        for name in (given.get("aria-labelledby"), given.get("href", "").removeprefix("#") or None):
            assert name is None or name in outline.ids


def test_opens_with_the_verdict_and_tells_how(page, result):
    body = without_scripts(page).replace("\u00a0", " ").replace("&#x27;", "'")
    assert result.verdict() in body
    assert body.index(result.verdict()) < body.index("<h2")
    for words in ("Could not be fitted", "needs &lt;more&gt; rows", "600", "15 of equal width", "<p>told</p>"):
        assert words in body
    assert "trueup fit VAL -m temperature -o calibrator.safetensors" in body
    assert "calibrator = trueup.load(" in body


def test_a_calibrated_network_has_no_after():
    result = report(drawn(sharper=1.0), methods=["temperature"], progress=False).audit
    assert result.chosen == RAW
    page = Report(result).html()
    assert "reliability-after" not in page
    assert "No calibrator was chosen" in page
    assert "cross-fitted" in page


def test_save_is_whole_or_nothing(result, tmp_path):
    made = Report(result, title="x")
    assert isinstance(made, Report)
    made.save(tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text("utf-8") == made.html()
    assert [file.name for file in tmp_path.iterdir()] == ["report.html"]
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        made.save(tmp_path / "nowhere" / "report.html")


def test_names_must_fit(result):
    with pytest.raises(ValueError, match="class_names must have 3 entries, one per class, got 2"):
        Report(result, class_names=["a", "b"])


@pytest.fixture(scope="module")
def browser():
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if path is None:
        pytest.skip("no Chromium was found")
    options = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
    with sync_api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=path, args=options)
        yield opened
        opened.close()


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_browser_draws_it(browser, page, tmp_path, width, scheme):
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    context = browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme)
    tab = context.new_page()
    tab.set_default_timeout(600_000)
    problems, requests, dialogs = [], [], []
    tab.on("console", lambda message: problems.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.on("request", lambda request: requests.append(request.url))
    tab.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    tab.goto((tmp_path / "report.html").as_uri())
    tab.wait_for_selector(f'html[data-drawn="{len(CHARTS)}"]', timeout=600_000)
    marks = "id => document.querySelectorAll(`#${CSS.escape(id)} g[clip-path] > *`).length"
    for name in CHARTS:
        assert tab.evaluate(marks, name) > 0, f"{name} is empty"
    assert tab.evaluate("document.documentElement.scrollWidth") == width
    for name in CHARTS:
        box = tab.locator(f"#{name}").bounding_box()
        assert 0 <= box["x"] < box["x"] + box["width"] <= width
    ink = tab.evaluate("getComputedStyle(document.querySelector('#risk-chart text')).fill")
    assert ink == {"light": "rgb(96, 100, 108)", "dark": "rgb(160, 166, 174)"}[scheme]
    assert not problems
    assert not dialogs
    assert [url for url in requests if not url.startswith("file:")] == []
    context.close()


def test_table_sorts_by_keyboard_and_colours_follow_the_system(browser, page, tmp_path):
    (tmp_path / "report.html").write_text(page, encoding="utf-8")
    context = browser.new_context(viewport={"width": 1280, "height": 800}, color_scheme="light")
    tab = context.new_page()
    tab.set_default_timeout(600_000)
    tab.goto((tmp_path / "report.html").as_uri())
    tab.wait_for_selector("html[data-drawn]", timeout=600_000)
    column = "[...document.querySelectorAll('.sortable tbody tr')].map(row => Number(row.children[2].dataset.value))"
    button = tab.locator(".sortable thead button").nth(2)
    button.focus()
    for order, words in ((sorted, "ascending"), (lambda x: sorted(x, reverse=True), "descending")):
        tab.keyboard.press("Enter")
        values = tab.evaluate(column)
        assert values == order(values)
        assert tab.locator("th[aria-sort]").get_attribute("aria-sort") == words
    tab.emulate_media(color_scheme="dark")
    ink = tab.locator("#risk-chart text").first  # in the page itself no text may become a program, so ask anew
    sync_api = pytest.importorskip("playwright.sync_api")
    sync_api.expect(ink).to_have_css("fill", "rgb(160, 166, 174)", timeout=600_000)
    context.close()


def test_the_page_has_the_p_values_of_the_verdict():
    rng = np.random.default_rng(0)
    p = rng.uniform(0.001, 0.06, 20_000)
    y = (rng.random(20_000) < p).astype(int)
    z = np.stack([np.log1p(-(0.061 - p)), np.log(0.061 - p)], axis=1)  # reversed risks, in one bin of equal width
    audit = report((z, y), methods=["isotonic"], progress=False).audit
    assert "calibrates it" not in audit.verdict() or audit.scores.tests["isotonic"].p_value > 0.05
    assert not audit.verdict().startswith("No miscalibration")
    page = Report(audit).html()
    assert "Tests of calibration" in page
    assert "Calibration error, bins of equal mass" in page
    assert re.search(r"All tests, corrected</t.>.*?0\.001", page)
    assert "log-odds scale" in page


def test_the_table_of_methods_is_sorted_and_its_tail_is_folded():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(300, 3))
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    methods = {f"temperature {k}": METHODS["temperature"] for k in range(11)}
    page = Report(report((3 * z, y), methods=methods, progress=False).audit).html()
    assert "Show all 12 methods" in page
    tables = re.findall(r"<table.*?</table>", page, flags=re.DOTALL)
    shown, hidden = (next(t for t in tables if caption in t) for caption in ("Methods on held-out", "larger held-out"))
    assert shown.count("<tr") == 11
    assert hidden.count("<tr") == 3
    first = re.findall(r"<tbody>.*?<tr.*?</tr>", shown, flags=re.DOTALL)[0]
    assert "chosen" in first
