"""One server for all tests that need no settings of their own, and a browser for those that drive a page."""

import os
import shutil

import pytest
from serving import served


@pytest.fixture(scope="session")
def client():
    with served() as client:
        yield client


QUIET = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
QUIET += ["--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="the page is driven by playwright")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("no chromium on this machine: the page is not driven")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=QUIET)
        yield chromium
        chromium.close()


@pytest.fixture
def said():
    """What the browser's console complained of."""
    return []


@pytest.fixture
def page(browser, server, said, request):
    """The page, opened; whatever it complains of and asks of others is a failure."""
    home = str(server.base_url)
    opened = browser.new_page(viewport={"width": 1200, "height": 900}, accept_downloads=True)
    opened.set_default_timeout(60_000)
    asked = []
    opened.on("console", lambda message: said.append(message.text) if message.type in ("error", "warning") else None)
    opened.on("pageerror", lambda error: said.append(str(error)))
    opened.on("request", lambda sent: asked.append(sent.url))
    opened.goto(home + request.module.OPENED)
    yield opened
    opened.close()
    assert said == []
    assert [url for url in asked if not url.startswith((home, "data:", f"blob:{home}"))] == []
