"""Take the screenshots of the manual: `python docs/screenshots.py` (make pictures), with playwright and Chromium.

They show the report of `trueup demo`, and the web page and its monitor with the built-in example.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import which
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

from trueup import demo
from trueup.serve.server import make_server

IMAGES = Path(__file__).with_name("images")
OPTIONS = ("--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")
SIZE = {"width": 1100, "height": 1180}
LIMIT = 120_000
"""Milliseconds to wait for results on the page."""


def main() -> None:
    """Take the three screenshots."""
    browsers = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := which(name))]
    with sync_playwright() as driver, TemporaryDirectory() as folder, running_server() as address:
        browser = driver.chromium.launch(executable_path=browsers[0] if browsers else None, args=list(OPTIONS))
        page = browser.new_page(viewport=SIZE, color_scheme="light")
        page.goto(demo.run(folder, quiet=True).resolve().as_uri())
        save(page, "report")
        page.goto(address)
        page.click("#example")
        page.wait_for_selector("text=save", timeout=LIMIT)  # the link that saves a calibrator
        save(page, "page")
        page.goto(f"{address}/monitor")
        page.click("[data-do=example]:visible")
        page.wait_for_selector("#charts[data-drawn]", timeout=LIMIT)
        save(page, "monitor")
        browser.close()


@contextmanager
def running_server() -> Iterator[str]:
    """Run a server in a thread until the block ends, and yield its address."""
    server = make_server(port=0)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.05)
        yield f"http://localhost:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def save(page: Any, name: str) -> None:
    """Save the screenshot in 256 colours, which takes a third of the size."""
    page.wait_for_timeout(1500)
    path = IMAGES / f"screenshot-{name}.png"
    page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
