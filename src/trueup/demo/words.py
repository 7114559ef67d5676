"""What the demonstration says: sentences and tables for a terminal of 80 columns."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

from trueup.core.formatting import Row, format_number, format_percent, text_table
from trueup.demo import camera
from trueup.metrics.intervals import Interval
from trueup.metrics.table import Scores
from trueup.report.audit import Audit

WIDTH = 79
SHOWN = ("accuracy", "nll", "brier", "ece", "sce")
"""Columns of the comparison."""
ROLES: Mapping[str, str] = {
    camera.CLEAN: "before the change, no calibration",
    camera.RAW: "no calibration",
    camera.KEPT: "the calibrator fitted before",
    camera.REFITTED: "temperature alone",
    camera.CLAMPED: "Neural Clamping",
}


CAMERA = (
    "The calibration digits and the test digits now come through a camera that has changed; the network has not. "
    "Temperature and Neural Clamping are fitted anew to the calibration digits as they come now. A star marks what "
    f"differs from temperature alone: the paired {format_percent(camera.LEVEL)} interval excludes 0."
)
CAPTION = (
    "The first test digit of each class: clean, through the changed camera, and with δ added. Above each, what the "
    "network takes it for and how surely; ≠ marks a mistake. δ is orange where it darkens and purple where it lightens."
)


def paragraph(*sentences: str) -> str:
    """Sentences, wrapped."""
    text = " ".join(sentences).replace(" %", "\N{NO-BREAK SPACE}%")
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False).replace("\N{NO-BREAK SPACE}", " ")


def heading(place: int, text: str) -> str:
    """The title of a part, underlined."""
    line = f"{place}. {text}"
    return f"\n{line}\n{'─' * len(line)}"


def training(epochs: int, learn: int, val: int, test: int) -> str:
    """What the network is about to go through."""
    return paragraph(
        f"A small convolutional network goes {epochs} times over {learn} handwritten digits, with cross-entropy, until",
        f"it knows them by heart. {val} others are kept for calibration, and {test} for the test.",
    )


def sureness(scores: Scores) -> str:
    """The verdict on the network as it is."""
    verdict = scores.verdict()
    return paragraph(f"On the test digits {verdict[:1].lower()}{verdict[1:]}")


def comparing(methods: int, val: int, test: int, *, folds: int, level: float) -> str:
    """What the table is about to show."""
    return paragraph(
        f"{methods} methods learn from the {val} calibration digits. Their loss there, in {folds}-fold",
        f"cross-validation (cv nll), orders and chooses them; the other columns are of the {test} test digits, with *",
        f"where the paired {format_percent(level)} interval of the difference from raw excludes 0.",
    )


def compared(found: Audit, clamping: str) -> str:
    """The table of all methods, the choice, the verdict, and what Neural Clamping says of itself."""
    return "\n\n".join(
        [
            comparison_table(found),
            *(paragraph(f"{name} could not be fitted: {why}") for name, why in found.failures.items()),
            paragraph(choice(found)),
            paragraph(found.verdict()),
            paragraph("Does an input shift help too, as Neural Clamping has it?", clamping),
        ]
    )


def comparison_table(found: Audit) -> str:
    """Methods in the order of their cross-validated loss, the chosen one marked, with their scores on the test rows."""
    names = sorted(found.scores.methods, key=lambda name: found.losses.get(name, (float("inf"), 0.0))[0])
    rows: list[Row] = [["  method", "cv nll", *(f"{metric} " for metric in SHOWN)]]
    for name in names:
        mark = "> " if name == found.chosen else "  "
        loss = format_number(found.losses[name][0]) if name in found.losses else "–"
        rows.append([mark + name, loss, *(_marked(found.scores, name, metric) for metric in SHOWN)])
    return text_table(rows)


def choice(found: Audit) -> str:
    """Which method was chosen, and why."""
    best = min(found.losses, key=lambda name: found.losses[name][0])
    why = f"of all that are within a standard error of the best ({best}), it is the simplest"
    if best == found.chosen:
        why = "its cross-validated loss is the least"
    return f"Chosen without a look at the test: {found.chosen}; {why}."


def shifting(found: camera.Shifted) -> str:
    """What became of the images, the table of what each way of calibrating makes of them, and what it comes to."""
    return "\n\n".join(
        [
            paragraph(f"{found.corruption.capitalize()}.", setting(found)),
            text_table(camera_rows(found)),
            paragraph(camera_verdict(found)),
            paragraph(earned(found)),
        ]
    )


def setting(found: camera.Shifted) -> str:
    """What the camera does."""
    return f"Every pixel x becomes {found.setting}, held between 0 and 1."


def camera_rows(found: camera.Shifted) -> list[Row]:
    """A row a way of calibrating; a star where it differs from temperature alone."""
    rows: list[Row] = [["calibration", *(f"{metric} " for metric in camera.METRICS)]]
    return rows + [
        [role, *(_marked(found.scores, name, metric) for metric in camera.METRICS)] for name, role in ROLES.items()
    ]


def camera_verdict(found: camera.Shifted) -> str:
    """What clamping changes beside temperature alone, as far as the test digits can tell."""
    scores, parts = found.scores, []
    for metric, shown in (("accuracy", _percent), ("nll", format_number), ("ece", format_number)):
        before, after = (shown(scores[name, metric].value) for name in (camera.REFITTED, camera.CLAMPED))
        clear = _apart(scores.changes[camera.CLAMPED][metric])
        name = metric if metric == "accuracy" else metric.upper()
        parts.append(f"{name} goes from {before} to {after}" if clear else f"{name} does not clearly change")
    return f"Neural Clamping instead of temperature alone: {', '.join(parts)}."


def earned(found: camera.Shifted) -> str:
    """What the fit says of its own input shift."""
    return f"Did the input shift earn its place? {found.clamped.fit_record.verdict}"


def _percent(share: float) -> str:
    return format_percent(share, 1)


def _marked(scores: Scores, method: str, metric: str) -> str:
    change = scores.changes.get(method, {}).get(metric)
    return format_number(scores[method, metric].value) + ("*" if change is not None and _apart(change) else " ")


def _apart(change: Interval) -> bool:
    return change.low > 0 or change.high < 0


def closing(folder: Path, files: Mapping[str, str]) -> str:
    """What was written where, and how the calibrator is used."""
    width = max(map(len, files))
    return "\n".join(
        [
            f"Written to {folder}:",
            *(f"    {name.ljust(width)}  {what}" for name, what in files.items()),
            "\nThe calibrator in three lines of Python:",
            *(f"    {line}" for line in usage(folder)),
            "\nMore from the command line:",
            f"    trueup compare {folder / 'val.npz'} {folder / 'test.npz'}",
            "    trueup --help",
            f"\nThe report: {folder / 'report.html'}",
        ]
    )


def usage(folder: Path) -> list[str]:
    """Three lines of Python that use the calibrator."""
    test, calibrator = (json.dumps((folder / name).as_posix()) for name in ("test.npz", "calibrator.safetensors"))
    return [
        "import trueup",
        f"logits, labels = trueup.load({test})",
        f"honest = trueup.load_calibrator({calibrator})(logits)",
    ]
