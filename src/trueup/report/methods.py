"""The table of methods, which sorts at the press of a column's head."""

from __future__ import annotations

import math

from trueup.core.formatting import format_interval, format_number, format_percent
from trueup.metrics.intervals import Interval
from trueup.report.audit import Audit
from trueup.report.html import TableCell, paragraph, table
from trueup.report.method_titles import title

_HEAD = ["Method", "Accuracy", "ECE", "Change of ECE", "Log‑loss", "Brier score", "Class‑wise error"]


def methods_table(found: Audit) -> list[str]:
    """What the choice rests on, and all methods with their numbers on the test rows."""
    chosen = title(found.chosen)
    why = (
        "Every method is fitted on the calibration rows. The choice is made there too, by cross-validation: "
        f"{chosen} is the simplest whose log-loss on held-out folds is within a standard error of the best."
    )
    level = format_percent(found.scores.level)
    where = "rows that its fit had not seen" if found.cross_fitted else "the test rows"
    told = (
        f"The table shows each on {where}. The change of ECE is paired, row by row, against the network as it is; "
        f"where its {level} interval excludes 0, noise alone hardly explains it; of many methods, one in twenty "
        "would do so by chance."
    )
    caption = f"Methods on {where}"
    head = [*_HEAD, "Held‑out log‑loss", "Seconds"]
    names = found.scores.methods
    rows = [_cells(found, name) for name in names]
    notes = [
        paragraph(why),
        paragraph(told),
        table(caption, head, rows, sortable=True, chosen=names.index(found.chosen)),
    ]
    if found.failures:
        failed = "; ".join(f"{title(name)} ({why})" for name, why in found.failures.items())
        notes.append(paragraph(f"Could not be fitted: {failed}.", "words"))
    return notes


def _cells(found: Audit, name: str) -> list[TableCell]:
    values, change = found.scores.values[name], found.scores.changes.get(name, {}).get("ece")
    loss = found.losses.get(name, (math.nan, math.nan))[0]
    seconds = found.seconds.get(name, math.nan)
    mark = "chosen" if name == found.chosen else ""
    ece = values["ece"]
    return [
        TableCell(title(name), title(name), mark),
        TableCell(format_percent(values["accuracy"].value, 2), values["accuracy"].value),
        TableCell(format_number(ece.value), ece.value, format_interval(ece.low, ece.high)),
        TableCell("–", 0.0) if change is None else _change(change),
        *(TableCell(format_number(values[metric].value), values[metric].value) for metric in ("nll", "brier", "sce")),
        TableCell(format_number(loss), loss),
        TableCell("–" if math.isnan(seconds) else f"{seconds:.1f}", seconds),
    ]


def _change(by: Interval) -> TableCell:
    shown, interval = (
        words.replace("-", "−")
        for words in (format_number(by.value, sign=True), format_interval(by.low, by.high, sign=True))
    )
    return TableCell(shown, by.value, interval)
