"""The demo from end to end: train, compare methods, shift the camera, and write the files.

Without torch, stored predictions replace the training, and the camera does not change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trueup._core.progress import track
from trueup._core.registry import METHODS
from trueup.demo import messages
from trueup.io.load_save import load, save
from trueup.metrics.table import evaluate
from trueup.reports.audit import DEFAULT, RAW
from trueup.reports.page import Report, report

SKIPPED = ("identity", "auto", "matrix", "dirichlet")
"""Methods that are not compared: no calibration, the automatic choice, and two with 110 parameters without a penalty.
With 700 digits these two may take a minute to fail; their penalized versions are compared."""
# The choice takes the first of equally good methods, so the simple ones come first.
COMPARED = (*DEFAULT, *(name for name in METHODS if name not in (*DEFAULT, *SKIPPED)))
EPOCHS = 150
"""Far more than needed to fit the digits: growing confidence alone keeps lowering the training loss."""
FOLDS = 5
TITLE = "Overfitted digits"
STORED = Path(__file__).with_name("predictions.npz")
"""Predictions of the network with seed 0, written by `python -m trueup.demo.digits`."""
FILES = {
    "report.html": "everything on one page",
    "repair.png": "digits: clean, through the changed camera, repaired",
    "calibrator.safetensors": "the chosen calibrator",
    "val.npz, test.npz": "the network's logits, with the labels",
}


def run_demo(
    folder: Path, *, seed: int = 0, quiet: bool = False, epochs: int = EPOCHS, methods: Sequence[str] = COMPARED
) -> Path:
    """Train, compare, choose, shift the camera, repair and write the files; return the path of the report."""
    from trueup.clamping import clamp
    from trueup.demo import camera
    from trueup.demo.digits import digits, loader, train_network
    from trueup.demo.repair_figure import SECTION_TITLE, repair_figure, save_png, section_html
    from trueup.models.calibrated import collect

    write = _writer(quiet)
    write(messages.heading(1, "Train a network until it is overconfident"))
    data = digits(seed)
    sizes = [len(labels) for _, labels in (data.train, data.val, data.test)]
    write(messages.training(epochs, *sizes))
    network = train_network(data.train, epochs=epochs, seed=seed, progress=not quiet)
    val, test = (collect(network, loader(part), progress=False) for part in (data.val, data.test))
    write(messages.evaluation(evaluate(*test, seed=seed)))

    write(messages.heading(2, "Calibrate its confidence"))
    write(messages.comparison_intro(len(methods), *sizes[1:], n_folds=FOLDS) + "\n")
    clamped = clamp(network, loader(data.val), seed=seed, progress=not quiet)
    extra = {"clamping": collect(clamped, loader(data.test), progress=False)}
    page = _compare(val, test, methods, extra=extra, seed=seed, progress=not quiet)
    write(messages.comparison(page.audit, clamped.fit_record.verdict))
    calibrator = _chosen(page)

    write(messages.heading(3, "Change the camera"))
    write(messages.paragraph(messages.CAMERA))
    changes = track(camera.SHIFTS, label="changing the camera", enabled=not quiet)
    shifts = [camera.evaluate_shift(network, data, *change, kept=calibrator, seed=seed) for change in changes]
    write("\n" + "\n\n".join(messages.shift_summary(shift) for shift in shifts))

    write(messages.heading(4, "Use the calibrator"))
    figure = repair_figure(network, data.test, shifts)
    save_png(figure, folder / "repair.png")
    section = section_html(shifts, figure, (folder / "repair.png").read_bytes())
    _save(replace(page, sections=((SECTION_TITLE, section),)), val, test, folder, seed)
    write(messages.closing(folder, FILES))
    return folder / "report.html"


def run_stored(folder: Path, *, quiet: bool = False, methods: Sequence[str] = COMPARED) -> Path:
    """Compare methods on the stored predictions, choose and write the files; return the path of the report."""
    write = _writer(quiet)
    write(messages.heading(1, "Look at a network that is overconfident"))
    write(messages.paragraph(messages.STORED))
    val, test = (load(STORED, split=split) for split in ("val", "test"))
    write(messages.evaluation(evaluate(*test)))
    write(messages.heading(2, "Calibrate its confidence"))
    sizes = len(val.labels), len(test.labels)
    write(messages.comparison_intro(len(methods), *sizes, n_folds=FOLDS) + "\n")
    page = _compare(val, test, methods, progress=not quiet)
    write(messages.comparison(page.audit))
    write(messages.heading(3, "Use the calibrator"))
    _save(page, val, test, folder, seed=0)
    write(messages.closing(folder, {name: what for name, what in FILES.items() if name != "repair.png"}))
    return folder / "report.html"


def _writer(quiet: bool) -> Callable[[str], None]:
    return (lambda text: None) if quiet else (lambda text: print(text, flush=True))


def _compare(val: Any, test: Any, methods: Sequence[str], **options: Any) -> Report[Any]:
    return report(val, test, methods=methods, title=TITLE, n_folds=FOLDS, level=messages.LEVEL, **options)


def _chosen(page: Report[Any]) -> Any:
    chosen = page.audit.chosen
    return METHODS["identity"](*page.audit.predictions[RAW]) if chosen == RAW else page.audit.calibrators[chosen]


def _save(page: Report[Any], val: Any, test: Any, folder: Path, seed: int) -> None:
    summary = {"fitted to": f"{len(val.labels)} of scikit-learn's digits", "method": page.audit.chosen, "seed": seed}
    save(_chosen(page), folder / "calibrator.safetensors", n_classes=val.logits.shape[1], summary=summary)
    save(val, folder / "val.npz")
    save(test, folder / "test.npz")
    page.save(folder / "report.html")
