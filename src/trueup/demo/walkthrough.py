"""The demo from end to end: train, compare methods, shift the camera, and write the files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trueup.calibrators.base import Calibrator, Identity
from trueup.clamping import clamp
from trueup.core.progress import track
from trueup.demo import camera, messages
from trueup.demo.digits import EPOCHS, digits, loader, train_network
from trueup.demo.repair_figure import SECTION_TITLE, repair_figure, save_png, section_html
from trueup.io.artifacts import save_calibrator
from trueup.io.load_save import save
from trueup.metrics.table import evaluate
from trueup.models.calibrated import collect
from trueup.registry import METHODS
from trueup.report.audit import DEFAULT, RAW, audit
from trueup.report.page import report

SKIPPED = ("identity", "auto", "matrix", "dirichlet")
"""Not compared: no calibration; the choice itself; and two whose 110 parameters are not penalized, which on so few
digits may take a minute to fail. Their penalized versions are compared."""
# The choice takes the first of those that are equally good, so the simple ones stand first.
COMPARED = (*DEFAULT, *(name for name in METHODS if name not in (*DEFAULT, *SKIPPED)))
FOLDS = 5
FILES = {
    "report.html": "everything on one page",
    "repair.png": "digits: clean, through the changed camera, repaired",
    "calibrator.safetensors": "the chosen calibrator",
    "val.npz, test.npz": "the network's logits, with the labels",
}


def run_demo(
    folder: Path, *, seed: int = 0, quiet: bool = False, epochs: int = EPOCHS, methods: Sequence[str] = COMPARED
) -> Path:
    """Train, compare, choose, shift the camera, repair and write; return the report's path."""
    write: Callable[[str], None] = (lambda text: None) if quiet else (lambda text: print(text, flush=True))

    write(messages.heading(1, "Train a network until it is overconfident"))
    data = digits(seed)
    sizes = [len(labels) for _, labels in (data.train, data.val, data.test)]
    write(messages.training(epochs, *sizes))
    network = train_network(data.train, epochs=epochs, seed=seed, progress=not quiet)
    val, test = (collect(network, loader(part), progress=False) for part in (data.val, data.test))
    write(messages.evaluation(evaluate(*test, seed=seed)))

    write(messages.heading(2, "Calibrate its confidence"))
    write(messages.comparison_intro(len(methods), *sizes[1:], folds=FOLDS, level=camera.LEVEL) + "\n")
    clamped = clamp(network, loader(data.val), seed=seed, progress=not quiet)
    extra = {"clamping": collect(clamped, loader(data.test), progress=False)}
    options: dict[str, Any] = {"folds": FOLDS, "level": camera.LEVEL, "seed": seed, "progress": not quiet}
    result = audit(val, test, methods=methods, extra=extra, **options)
    write(messages.comparison(result, clamped.fit_record.verdict))
    calibrator: Calibrator = Identity() if result.chosen == RAW else result.calibrators[result.chosen]

    write(messages.heading(3, "Change the camera"))
    write(messages.paragraph(messages.CAMERA))
    changes = track(camera.SHIFTS, label="changing the camera", enabled=not quiet)
    shifts = [camera.evaluate_shift(network, data, *change, kept=calibrator, seed=seed) for change in changes]
    write("\n" + "\n\n".join(messages.shift_summary(shift) for shift in shifts))

    write(messages.heading(4, "Use the calibrator"))
    summary = {"fitted to": f"{len(val.labels)} of scikit-learn's digits", "method": result.chosen, "seed": seed}
    save_calibrator(calibrator, folder / "calibrator.safetensors", classes=val.logits.shape[1], summary=summary)
    save(folder / "val.npz", val)
    save(folder / "test.npz", test)
    figure = repair_figure(network, data.test, shifts)
    save_png(figure, folder / "repair.png")
    page = folder / "report.html"
    section = section_html(shifts, figure, (folder / "repair.png").read_bytes())
    report(result, title="Overfitted digits", sections=[(SECTION_TITLE, section)]).save(page)
    write(messages.closing(folder, FILES))
    return page
