"""Draw the pictures of the manual: `python docs/pictures.py [PAGE …]` (make pictures).

Pages with examples save their pictures: the examples run, and the pictures go to docs/images. Pages on real data need
TRUEUP_DATA. The picture of the README shows the network of `trueup demo`; the flow chart is drawn here.
"""

from __future__ import annotations

import doctest
import os
import sys
from contextlib import chdir
from html import escape
from pathlib import Path
from shutil import copy
from tempfile import TemporaryDirectory

from matplotlib.figure import Figure

import trueup
from trueup import demo
from trueup.demo.walkthrough import STORED

DOCS = Path(__file__).parent
IMAGES = DOCS / "images"
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS


def main(names: list[str]) -> None:
    """Draw the pictures of the named pages, or of all pages."""
    IMAGES.mkdir(exist_ok=True)
    pages = [DOCS / name for name in names] or [
        page for page in sorted(DOCS.rglob("*.md")) if ".savefig(" in page.read_text()
    ]
    for page in pages:
        if "TRUEUP_DATA" in page.read_text() and not os.environ.get("TRUEUP_DATA"):
            print(f"{page.name}: skipped, TRUEUP_DATA is not set")
        else:
            draw_page(page)
    if not names:
        draw_demo(IMAGES / "reliability.png")
        (IMAGES / "guide.svg").write_text(flow_chart())


def draw_page(page: Path) -> None:
    """Run the examples of a page, and keep its pictures if every example passes."""
    with TemporaryDirectory() as folder, chdir(folder):
        for split in ("val", "test"):  # as `trueup demo` leaves them
            Path("demo").mkdir(exist_ok=True)
            trueup.save(trueup.load(STORED, split=split), f"demo/{split}.npz")
        failed, _ = doctest.testfile(str(page), module_relative=False, optionflags=FLAGS, encoding="utf-8")
        if failed:
            sys.exit(f"{page}: {failed} examples print something else than the page")
        for picture in Path(folder).glob("*.png"):
            copy(picture, IMAGES)
            print(picture.name)


def draw_demo(path: Path) -> None:
    """Draw the reliability of the demo's network before and after calibration."""
    with TemporaryDirectory() as folder:
        results = demo.run(folder, quiet=True).parent
        test = trueup.load(results / "test.npz")
        calibrated = trueup.load(results / "calibrator.safetensors")(test.logits)
    figure = Figure(figsize=(7.2, 3.7), layout="constrained")
    titles = (("as trained", test.logits), ("calibrated", calibrated))
    for ax, (title, logits) in zip(figure.subplots(1, 2), titles, strict=True):
        trueup.plot_reliability(logits, test.labels, bins=10, ax=ax, title=title)
    figure.savefig(path, dpi=110)


def flow_chart() -> str:
    """Draw the guide as a chart for narrow screens: questions on the left, answers on the right."""
    steps = [
        ("Do you forecast a number?", "yes", ["evaluate_forecasts", "choose_recalibration"], "no"),
        ("One probability per row (a risk,|a stated confidence)?", "yes", ["from_probs", 'METHODS["auto"]'], "no"),
        ("Is the network still to be trained?", "yes", ["trueup.losses", "then go on below"], "no"),
        ("Do you have a few hundred|rows with labels?", "no", ["decisions.plan", "estimate_performance"], "yes"),
        ("Has the camera or the light|changed since the training?", "yes", ["trueup.repair"], "no"),
        ("Must the predicted class|stay as it is?", "yes", ['METHODS["temperature"]', 'METHODS["ets"]'], "no"),
    ]
    width, height, gap = 232, 54, 26
    parts = []
    for i, (question, aside, answers, onward) in enumerate(steps):
        top = 8 + i * (height + gap)
        middle = top + height / 2
        parts += [box(8, top, width, height, "q"), *text(8 + width / 2, middle, question.split("|"), "")]
        parts += [box(292, top, 180, height, "a"), *text(382, middle, answers, "c")]
        parts += [arrow(8 + width, middle, 292, middle), label(8 + width + 25, middle - 5, aside)]
        parts += [arrow(124, top + height, 124, top + height + gap), label(142, top + height + 17, onward)]
    top = 8 + len(steps) * (height + gap)
    parts += [box(8, top, width, height, "a"), *text(124, top + height / 2, ['METHODS["auto"]'], "c")]
    style = (
        "text{font:13px system-ui,sans-serif;fill:#1a1a1a;text-anchor:middle}.c{font:12px ui-monospace,monospace}"
        ".q{fill:#fff;stroke:#5b6770}.a{fill:#e6effa;stroke:#2b6cb0}path{stroke:#5b6770;fill:none;marker-end:url(#m)}"
        ".l{font-size:12px;fill:#5b6770}"
    )
    marker = '<marker id="m" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 480 {top + height + 8}" width="480" role="img">'
    title = "<title>Which function for what you have</title>"
    point = f'<defs>{marker}<path d="M0 0 8 4 0 8z" style="fill:#5b6770;stroke:none;marker-end:none"/></marker></defs>'
    return "\n".join([head, title, f"<style>{style}</style>", point, *parts, "</svg>"]) + "\n"


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    """Draw the box of a question or an answer."""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width}" height="{height}" rx="8"/>'


def text(x: float, middle: float, lines: list[str], kind: str) -> list[str]:
    """Draw lines of text, vertically centred."""
    first = middle + 4.5 - 8.5 * (len(lines) - 1)
    return [
        f'<text class="{kind}" x="{x:g}" y="{first + 17 * i:g}">{escape(line, quote=False)}</text>'
        for i, line in enumerate(lines)
    ]


def arrow(x0: float, y0: float, x1: float, y1: float) -> str:
    """Draw an arrow."""
    return f'<path d="M{x0:g} {y0:g} {x1:g} {y1:g}"/>'


def label(x: float, y: float, word: str) -> str:
    """Draw a word next to an arrow."""
    return f'<text class="l" x="{x:g}" y="{y:g}">{word}</text>'


if __name__ == "__main__":
    main(sys.argv[1:])
