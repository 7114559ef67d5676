"""The demonstration from end to end, told in the order in which it happens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trueup.calibrators.base import Calibrator
from trueup.calibrators.identity import Identity
from trueup.clamping import clamp
from trueup.core.progress import track
from trueup.demo import camera, words
from trueup.demo.digits import EPOCHS, digits, loader, trained
from trueup.demo.pictures import repairs, save_picture
from trueup.demo.section import TITLE, camera_html
from trueup.io.artifacts import save_calibrator
from trueup.io.predictions import save
from trueup.metrics.table import evaluate
from trueup.models.calibrated import collect
from trueup.registry import METHODS
from trueup.report.audit import DEFAULT, audit
from trueup.report.method_titles import RAW
from trueup.report.page import report

SKIPPED = ("identity", "auto", "matrix", "dirichlet")
"""What is not compared: no repair; the choice itself; and, without a penalty on 110 numbers that so few digits hardly
determine, two that may take a minute to say that they found no minimum. With penalties they are compared."""
# The choice takes the first of those that are equally good, so the simple ones stand first.
COMPARED = (*DEFAULT, *(name for name in METHODS if name not in (*DEFAULT, *SKIPPED)))
FOLDS = 5
FILES = {
    "report.html": "the whole of it on one page",
    "repair.png": "digits: clean, through the changed camera, repaired",
    "calibrator.safetensors": "the chosen calibrator",
    "val.npz, test.npz": "the network's logits, with the labels",
}


def tell(
    folder: Path, *, seed: int = 0, quiet: bool = False, epochs: int = EPOCHS, methods: Sequence[str] = COMPARED
) -> Path:
    """Train, compare, choose, shift the camera, repair and write; return the report's path."""
    say: Callable[[str], None] = (lambda text: None) if quiet else (lambda text: print(text, flush=True))

    say(words.heading(1, "Train a network until it is too sure of itself"))
    data = digits(seed)
    sizes = [len(labels) for _, labels in (data.learn, data.val, data.test)]
    say(words.training(epochs, *sizes))
    network = trained(data.learn, epochs=epochs, seed=seed, progress=not quiet)
    val, test = (collect(network, loader(part), progress=False) for part in (data.val, data.test))
    say(words.sureness(evaluate(*test, seed=seed)))

    say(words.heading(2, "Repair its confidence"))
    say(words.comparing(len(methods), *sizes[1:], folds=FOLDS, level=camera.LEVEL) + "\n")
    clamped = clamp(network, loader(data.val), seed=seed, progress=not quiet)
    extra = {"clamping": collect(clamped, loader(data.test), progress=False)}
    options: dict[str, Any] = {"folds": FOLDS, "level": camera.LEVEL, "seed": seed, "progress": not quiet}
    found = audit(val, test, methods=methods, extra=extra, **options)
    say(words.compared(found, clamped.fit_record.verdict))
    calibrator: Calibrator = Identity() if found.chosen == RAW else found.calibrators[found.chosen]

    say(words.heading(3, "Change the camera"))
    say(words.paragraph(words.CAMERA))
    changes = track(camera.SHIFTS, label="changing the camera", enabled=not quiet)
    shifts = [camera.shifted(network, data, *change, kept=calibrator, seed=seed) for change in changes]
    say("\n" + "\n\n".join(words.shifting(each) for each in shifts))

    say(words.heading(4, "Take it home"))
    summary = {"fitted to": f"{len(val.labels)} of scikit-learn's digits", "method": found.chosen, "seed": seed}
    save_calibrator(calibrator, folder / "calibrator.safetensors", classes=val.logits.shape[1], summary=summary)
    save(folder / "val.npz", val)
    save(folder / "test.npz", test)
    record = repairs(network, data.test, shifts)
    save_picture(record, folder / "repair.png")
    page = folder / "report.html"
    shown = camera_html(shifts, record, (folder / "repair.png").read_bytes())
    report(found, title="Digits learnt by heart", sections=[(TITLE, shown)]).save(page)
    say(words.closing(folder, FILES))
    return page
