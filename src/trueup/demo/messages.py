"""Texts of the demo: sentences and tables for a terminal of 80 columns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING

from trueup._core.formatting import Row, format_number, format_percent, text_table
from trueup.metrics.intervals import Interval
from trueup.metrics.table import Scores
from trueup.reports.audit import Audit

if TYPE_CHECKING:
    from trueup.demo.camera import ShiftResult

WIDTH = 79
METRICS = ("accuracy", "nll", "brier", "ece", "sce")
"""Columns of the comparison of methods."""
SHIFT_METRICS = ("accuracy", "confidence", "nll", "ece")
"""Columns of the table on the changed camera."""
LEVEL = 0.95
"""Confidence level of the intervals."""
CLEAN, RAW, KEPT, REFITTED, CLAMPED, REPAIRED = "clean", "raw", "kept", "temperature", "clamping", "repair"
"""Names of the networks in the table on the changed camera; `ROLES` describes them."""
ROLES: Mapping[str, str] = {
    CLEAN: "before the shift, no calibration",
    RAW: "no calibration",
    KEPT: "calibrator fitted before the shift",
    REFITTED: "temperature scaling, refitted",
    CLAMPED: "Neural Clamping, refitted",
    REPAIRED: "repair",
}


CAMERA = (
    "The camera changes: calibration and test digits are shifted, and the network stays the same. Temperature "
    "scaling and Neural Clamping are refitted to the shifted calibration digits. Repair uses the same digits to find "
    "input maps with few parameters that undo the change, and corrects the last layer. A star marks a "
    "statistically significant difference from temperature scaling: its paired "
    f"{format_percent(LEVEL)} bootstrap interval excludes 0."
)
STORED = (
    "PyTorch is not installed, so the demo neither trains a network nor repairs a changed camera; "
    "pip install 'trueup[torch]' enables both. It uses stored predictions of a network that was trained for "
    "150 epochs on 200 handwritten digits, until it overfitted them. 700 other digits are for calibration, and 897 for "
    "the test."
)
CAPTION = (
    "The first test digit of each class: clean, through the changed camera, with δ added, and repaired. The predicted "
    "class and its probability are above each digit; ≠ marks an error. Orange parts of δ darken the digit, and purple "
    "parts lighten it."
)


def paragraph(*sentences: str) -> str:
    """Wrap sentences to the width of the terminal."""
    text = " ".join(sentences).replace(" %", "\N{NO-BREAK SPACE}%")
    return fill(text, WIDTH, break_long_words=False, break_on_hyphens=False).replace("\N{NO-BREAK SPACE}", " ")


def heading(number: int, text: str) -> str:
    """Underline the title of a part."""
    return f"\n{number}. {text}\n{'─' * len(f'{number}. {text}')}"


def training(epochs: int, train: int, val: int, test: int) -> str:
    """Describe the training of the network."""
    return paragraph(
        f"A small convolutional network is trained with cross-entropy for {epochs} epochs on {train} handwritten",
        f"digits, until it overfits them. {val} others are held out for calibration, and {test} for the test.",
    )


def evaluation(scores: Scores) -> str:
    """State the verdict on the uncalibrated network."""
    return paragraph("On the test digits:", scores.verdict())


def comparison_intro(methods: int, val: int, test: int, *, n_folds: int) -> str:
    """Describe the table of methods."""
    return paragraph(
        f"{methods} methods are fitted to the {val} calibration digits. They are ordered and chosen by their loss in",
        f"{n_folds}-fold cross-validation (cv nll); the other columns are for the {test} test digits. A star",
        f"marks a statistically significant difference from raw: its paired {format_percent(LEVEL)} bootstrap interval",
        "excludes 0.",
    )


def comparison(audit: Audit, clamping: str | None = None) -> str:
    """Print the table of methods, the choice, the verdict, and the verdict on Neural Clamping."""
    failures = (f"{name} could not be fitted: {why}" for name, why in audit.failures.items())
    shift = () if clamping is None else (f"Does an input shift help too, as in Neural Clamping? {clamping}",)
    return "\n\n".join([comparison_table(audit), *map(paragraph, (*failures, choice(audit), audit.verdict(), *shift))])


def comparison_table(audit: Audit) -> str:
    """Tabulate the methods by cross-validated loss, with their scores on the test rows; mark the chosen one."""
    names = sorted(audit.scores.methods, key=lambda name: audit.losses.get(name, (float("inf"), 0.0))[0])
    rows: list[Row] = [["  method", "cv nll", *(f"{metric} " for metric in METRICS)]]
    for name in names:
        mark = "> " if name == audit.chosen else "  "
        loss = format_number(audit.losses[name][0]) if name in audit.losses else "–"
        rows.append([mark + name, loss, *_stars(audit.scores, name, METRICS)])
    return text_table(rows)


def choice(audit: Audit) -> str:
    """Explain which method was chosen, and why."""
    best = min(audit.losses, key=lambda name: audit.losses[name][0])
    why = f"it is the simplest within a standard error of the best ({best})"
    if best == audit.chosen:
        why = "it has the smallest cross-validated loss"
    return f"Chosen by cross-validation, without the test digits: {audit.chosen}; {why}."


def shift_summary(shift: ShiftResult) -> str:
    """Describe the shift, with the table of calibrations and the verdicts."""
    setting = paragraph(f"{shift.corruption.capitalize()}.", shift.setting)
    return "\n\n".join([setting, text_table(shift_rows(shift)), *map(paragraph, shift_verdicts(shift))])


def shift_rows(shift: ShiftResult) -> list[Row]:
    """Make one row per calibration; stars mark significant differences from temperature scaling."""
    head = ["calibration", *(f"{metric} " for metric in SHIFT_METRICS)]
    return [head, *([role, *_stars(shift.scores, name, SHIFT_METRICS)] for name, role in ROLES.items())]


def shift_verdicts(shift: ShiftResult) -> list[str]:
    """Compare Neural Clamping and repair with temperature scaling, and quote their own verdicts."""
    return [
        f"{shift_verdict(shift, CLAMPED)} Does the input shift help? {shift.clamped.fit_record.verdict}",
        f"{shift_verdict(shift, REPAIRED)} Was there anything to repair? {shift.repaired.repair_record.verdict}",
    ]


def shift_verdict(shift: ShiftResult, way: str) -> str:
    """Compare a calibration with temperature scaling on the test digits."""
    scores, parts = shift.scores, []
    for metric in ("accuracy", "nll", "ece"):
        values = (scores[name, metric].value for name in (REFITTED, way))
        share = metric == "accuracy"
        before, after = (format_percent(value, 1) if share else format_number(value) for value in values)
        significant = _is_significant(scores.changes[way][metric])
        name = metric if share else metric.upper()
        parts.append(f"{name} goes from {before} to {after}" if significant else f"no significant change of {name}")
    title = "Neural Clamping" if way == CLAMPED else "Repair"
    return f"{title} instead of temperature scaling: {', '.join(parts)}."


def _stars(scores: Scores, method: str, metrics: Sequence[str]) -> list[str]:
    """Format scores, with a star after each that differs significantly."""
    changes = scores.changes.get(method, {})
    stars = ("*" if metric in changes and _is_significant(changes[metric]) else " " for metric in metrics)
    return [format_number(scores[method, metric].value) + star for metric, star in zip(metrics, stars, strict=True)]


def _is_significant(change: Interval) -> bool:
    return change.low > 0 or change.high < 0


def closing(folder: Path, files: Mapping[str, str]) -> str:
    """List the files that were written, and show how to use the calibrator."""
    width = max(map(len, files))
    lines = [
        f"Written to {folder}:",
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
