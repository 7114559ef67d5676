"""The demo from end to end: train, compare methods, shift the camera, and write the files.

Without torch, stored predictions replace the training, and the camera does not change.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import Any

from trueup._core.formatting import text_table
from trueup._core.progress import track
from trueup._core.registry import METHODS
from trueup.io.load_save import load, save
from trueup.metrics.table import evaluate
from trueup.reports.audit import RAW, Audit, best_first
from trueup.reports.page import Report, report

WIDTH = 79
METRICS = ("accuracy", "nll", "brier", "ece", "sce")
"""Columns of the comparison of methods."""
EPOCHS = 150
"""Far more than needed to fit the digits: growing confidence alone keeps lowering the training loss."""
TITLE = "Overfitted digits"
STORED = Path(__file__).with_name("predictions.npz")
"""Predictions of the network with seed 0, written by `python -m trueup.demo.digits`."""
FILES = {
    "report.html": "everything on one page",
    "repair.png": "digits: clean, through the changed camera, repaired",
    "calibrator.safetensors": "the chosen calibrator",
    "val.npz, test.npz": "the network's logits, with the labels",
}
WITHOUT_TORCH = (
    "PyTorch is not installed, so the demo neither trains a network nor repairs a changed camera; "
    "pip install 'trueup[torch]' enables both. It uses stored predictions of a network that was trained for "
    "150 epochs on 200 handwritten digits, until it overfitted them. 700 other digits are for calibration, and 897 for "
    "the test."
)


def run_demo(
    folder: Path, *, seed: int = 0, quiet: bool = False, epochs: int = EPOCHS, methods: Sequence[str] | None = None
) -> Path:
    """Train, compare, choose, shift the camera, repair and write the files; return the path of the report."""
    from trueup.demo import camera
    from trueup.demo.digits import digits, loader, train_network
    from trueup.models.calibrated import collect

    write = _writer(quiet)
    data = digits(seed)
    sizes = [len(labels) for _, labels in (data.train, data.val, data.test)]
    write(heading("1. Train a network until it is overconfident"))
    write(
        paragraph(
            f"A small convolutional network is trained with cross-entropy for {epochs} epochs on {sizes[0]} "
            f"handwritten digits, until it overfits them. {sizes[1]} others are held out for calibration, and "
            f"{sizes[2]} for the test."
        )
    )
    network = train_network(data.train, epochs=epochs, seed=seed, progress=not quiet)
    val, test = (collect(network, loader(part), progress=False) for part in (data.val, data.test))
    page = _calibrate(val, test, methods, seed, quiet)
    changes = track(camera.SHIFTS, label="changing the camera", enabled=not quiet)
    kept = _chosen(page)
    shifts = [camera.evaluate_shift(network, data, *change, kept=kept, seed=seed) for change in changes]
    write(camera.describe(shifts))
    camera.write_picture(network, data.test, shifts, folder / "repair.png")
    page = replace(page, sections=(camera.section(shifts, folder / "repair.png"),))
    _save(page, val, test, folder, seed)
    write(closing("4. Use the calibrator", folder, FILES))
    return folder / "report.html"


def run_stored(folder: Path, *, quiet: bool = False, methods: Sequence[str] | None = None) -> Path:
    """Compare methods on the stored predictions, choose and write the files; return the path of the report."""
    write = _writer(quiet)
    write(heading("1. Look at a network that is overconfident"))
    write(paragraph(WITHOUT_TORCH))
    val, test = (load(STORED, split=split) for split in ("val", "test"))
    _save(_calibrate(val, test, methods, 0, quiet), val, test, folder, 0)
    files = {name: what for name, what in FILES.items() if name != "repair.png"}
    write(closing("3. Use the calibrator", folder, files))
    return folder / "report.html"


def _calibrate(val: Any, test: Any, methods: Sequence[str] | None, seed: int, quiet: bool) -> Report[Audit]:
    """Evaluate the network, compare methods, and describe both."""
    write = _writer(quiet)
    write(paragraph(f"On the test digits: {evaluate(*test, seed=seed).verdict()}"))
    write(heading("2. Calibrate its confidence"))
    page = report(val, test, methods=methods, title=TITLE, seed=seed, progress=not quiet)
    audit = page.audit
    write(
        paragraph(
            f"{len(audit.calibrators)} methods are fitted to the {len(val.labels)} calibration digits. They are "
            f"ordered and chosen by their log-loss in {audit.n_folds}-fold cross-validation (held-out); the other "
            f"columns are for the {len(test.labels)} test digits. A star marks a statistically significant difference "
            "from raw: its paired 95 % bootstrap interval excludes 0."
        )
    )
    head, *rows = best_first(audit.scores.table(), audit)
    columns = [0, 1, *map(head.index, METRICS)]
    write("\n" + text_table([[row[k] for k in columns] for row in (head, *rows)]) + "\n")
    write(paragraph(f"Chosen without the test digits: {audit.chosen}. {audit.verdict()}"))
    return page


def _writer(quiet: bool) -> Callable[[str], None]:
    return (lambda text: None) if quiet else (lambda text: print(text, flush=True))


def _chosen(page: Report[Audit]) -> Any:
    chosen = page.audit.chosen
    return METHODS["identity"](*page.audit.pairs[RAW]) if chosen == RAW else page.audit.calibrators[chosen]


def _save(page: Report[Audit], val: Any, test: Any, folder: Path, seed: int) -> None:
    summary = {"fitted to": f"{len(val.labels)} of scikit-learn's digits", "method": page.audit.chosen, "seed": seed}
    save(_chosen(page), folder / "calibrator.safetensors", n_classes=val.logits.shape[1], summary=summary)
    save(val, folder / "val.npz")
    save(test, folder / "test.npz")
    page.save(folder / "report.html")


def paragraph(text: str) -> str:
    """Wrap sentences to the width of the terminal."""
    text = text.replace(" %", "\N{NO-BREAK SPACE}%")
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False).replace("\N{NO-BREAK SPACE}", " ")


def heading(text: str) -> str:
    """Underline the title of a part."""
    return f"\n{text}\n{'─' * len(text)}"


def closing(title: str, folder: Path, files: Mapping[str, str]) -> str:
    """List the files that were written, and show how to use the calibrator."""
    width = max(map(len, files))
    lines = [
        f"{heading(title)}\nWritten to {folder}:",
        *(f"    {name.ljust(width)}  {description}" for name, description in files.items()),
        "\nThe calibrator in three lines of Python:",
        *(f"    {line}" for line in usage(folder)),
        "\nMore from the command line:",
        f"    trueup rank {folder / 'val.npz'} {folder / 'test.npz'}",
        f"    trueup --help\n\nThe report: {folder / 'report.html'}",
    ]
    return "\n".join(lines)


def usage(folder: Path) -> list[str]:
    """Return three lines of Python that use the calibrator."""
    test, calibrator = (json.dumps((folder / name).as_posix()) for name in ("test.npz", "calibrator.safetensors"))
    return ["import trueup", f"logits, labels = trueup.load({test})", f"calibrated = trueup.load({calibrator})(logits)"]
