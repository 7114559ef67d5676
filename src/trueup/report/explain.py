"""What a chart shows in words, and its numbers as a table: for those who do not see it, and for those who check."""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import numpy as np

from trueup.core.formatting import format_interval, format_number, format_percent
from trueup.report.labels import label
from trueup.report.records import ClassErrors, Comparison, Confidences, Reliability, RiskCoverage, TemperatureSweep

Table = tuple[list[str], list[list[str]]]
"""The head and the rows."""


SECTIONS = {
    "reliability": (
        "Does it mean what it says?",
        "Predictions are put into bins by how sure the network is; each dot shows how often those of a bin were right. "
        "On the dotted diagonal the network means what it says; below it, it says too much. Dots inside the grey band "
        "are no further off than chance would put a calibrated network.",
    ),
    "confidence": (
        "How sure is it?",
        "How the predictions spread over the confidences, and how many of each were wrong.",
    ),
    "sweep": (
        "What would one temperature do?",
        "Temperature scaling divides all logits by one number: above 1 the network becomes less sure, below 1 surer. "
        "This is what each temperature would do to the rows shown here; the one that is fitted comes from the "
        "calibration rows alone.",
    ),
    "risk": (
        "Can it tell when it is wrong?",
        "A network that knows when it may be wrong can leave its unsure cases to somebody else. The lower the curve, "
        "the better its confidence tells right from wrong; the dotted line is the best possible.",
    ),
    "classes": (
        "Which classes are off?",
        "Every class has a probability of its own, whether it is predicted or not. The error of a class is how far "
        "that probability is from how often the class occurs, bin by bin.",
    ),
}
"""Headings, and what a reader needs to know to read the charts under them."""


def share(x: float, digits: int = 1) -> str:
    """A share in per cent, or a dash."""
    return "–" if np.isnan(x) else format_percent(x, digits)


@singledispatch
def summary(record: Any, **options: Any) -> str:
    """What a record shows, in a sentence or two.

    >>> from trueup.report.records import reliability
    >>> summary(reliability([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1]))
    'Over 3 rows the confidence misses the accuracy by 0.447 on average (ECE). ...'
    """
    raise TypeError(f"record must be one of trueup.report's records, got {type(record).__name__}")


@singledispatch
def numbers(record: Any) -> Table:
    """The numbers of a record as a table's head and rows.

    >>> from trueup.report.records import reliability
    >>> head, rows = numbers(reliability([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]], [0, 1, 1], bins=2))
    >>> rows
    [['50 % – 100 %', '3', '85.5 %', '66.7 %', '33.3 % – 100.0 %']]
    """
    raise TypeError(f"record must be one of trueup.report's records, got {type(record).__name__}")


@summary.register(Reliability)
def _(record: Reliability) -> str:
    some = record.count > 0
    outside = some & ((record.accuracy < record.low) | (record.accuracy > record.high))
    gap = np.where(some, record.confidence - record.accuracy, 0.0)
    most = int(np.argmax(np.abs(gap) * record.count))
    side = "too much" if gap[most] > 0 else "too little"
    return (
        f"Over {record.rows:,} rows the confidence misses the accuracy by {record.ece:.3f} on average (ECE). Outside "
        f"the band of a calibrated network: {int(outside.sum()) or 'none'} of {int(some.sum())} bins. The bin that "
        f"adds most to the ECE says {share(record.confidence[most])} and is right {share(record.accuracy[most])} of "
        f"the time: {side}."
    )


@numbers.register(Reliability)
def _(record: Reliability) -> Table:
    head = ["Confidence", "Rows", "Mean confidence", "Accuracy", f"{format_percent(record.level)} band if calibrated"]
    rows = []
    for k in np.flatnonzero(record.count > 0):
        between = f"{100 * record.edges[k]:.3g} % – {100 * record.edges[k + 1]:.3g} %"
        band = f"{share(record.low[k])} – {share(record.high[k])}"
        rows.append([between, f"{record.count[k]:,.0f}", share(record.confidence[k]), share(record.accuracy[k]), band])
    return head, rows


@summary.register(Confidences)
def _(record: Confidences) -> str:
    total = record.right + record.wrong
    n = max(total.sum(), 1.0)
    last = total[-1] / n
    wrong = record.wrong[-1] / max(total[-1], 1.0)
    return (
        f"It is {share(record.mean)} sure on average (dotted line) and right {share(record.accuracy)} of the time "
        f"(solid line). {share(last, 0)} of the rows have a confidence above {100 * record.edges[-2]:.3g} %; "
        f"{share(wrong)} of those are wrong."
    )


@numbers.register(Confidences)
def _(record: Confidences) -> Table:
    rows = [
        [f"{100 * a:.3g} % – {100 * b:.3g} %", f"{right:,.0f}", f"{wrong:,.0f}"]
        for a, b, right, wrong in zip(record.edges[:-1], record.edges[1:], record.right, record.wrong, strict=True)
        if right + wrong
    ]
    return ["Confidence", "Right", "Wrong"], rows


@summary.register(RiskCoverage)
def _(record: RiskCoverage, *, beside: RiskCoverage | None = None) -> str:
    last = beside or record
    half = min(int(np.searchsorted(last.coverage, 0.5)), len(last.risk) - 1)
    whole = f"Of all rows {share(last.risk[-1])} are wrong; of the surer half {share(last.risk[half])}."
    area = f"The area under the curve is {last.aurc:.4f}, at best {last.best_aurc:.4f}"
    return f"{whole} {area}." if beside is None else f"{whole} {area}; before calibration it was {record.aurc:.4f}."


@numbers.register(RiskCoverage)
def _(record: RiskCoverage) -> Table:
    at = np.unique(np.searchsorted(record.coverage, np.linspace(0.1, 1.0, 10)).clip(max=len(record.coverage) - 1))
    rows = [[share(record.coverage[k], 0), share(record.risk[k], 2), share(record.best[k], 2)] for k in at]
    return ["Rows kept", "Wrong among them", "At best"], rows


@summary.register(TemperatureSweep)
def _(record: TemperatureSweep) -> str:
    one = int(np.abs(np.log(record.temperatures)).argmin())
    return (
        f"The log-loss is least at temperature {record.best_nll:.2f} (line), the ECE at {record.best_ece:.2f}. "
        f"At 1, the network as it is, they are {record.nll[one]:.3f} and {record.ece[one]:.3f}; "
        f"the least are {record.nll.min():.3f} and {record.ece.min():.3f}."
    )


@numbers.register(TemperatureSweep)
def _(record: TemperatureSweep) -> Table:
    step = max(1, len(record.temperatures) // 20)
    each = list(zip(record.temperatures, record.nll, record.ece, strict=True))[::step]
    return ["Temperature", "Log-loss", "ECE"], [
        [f"{t:.3f}", format_number(nll), format_number(ece)] for t, nll, ece in each
    ]


@summary.register(Comparison)
def _(record: Comparison, *, titles: dict[str, str] | None = None) -> str:
    name, called = label(record.metric), titles or {}
    best, first = int(np.nanargmin(record.value)), record.methods[0]
    better = int((record.change_high < 0).sum())
    others = len(record.methods) - 1
    return (
        f"{called.get(record.methods[best], record.methods[best])} has the least {name}, {record.value[best]:.4f}; "
        f"{called.get(first, first).lower()} gives {record.value[0]:.4f}. {better} of the {others} others "
        f"surely lower it: their paired {format_percent(record.level)} interval lies below 0. Noise makes a "
        "calibration error look larger than it is, so an interval may lie below its dot."
    )


@numbers.register(Comparison)
def _(record: Comparison) -> Table:
    rows = [
        [
            name,
            format_number(record.value[k]),
            format_interval(record.low[k], record.high[k]),
            format_number(record.change[k], sign=True),
            format_interval(record.change_low[k], record.change_high[k], sign=True),
        ]
        for k, name in enumerate(record.methods)
    ]
    level = format_percent(record.level)
    return ["Method", label(record.metric), f"{level} interval", "Change", f"{level} interval, paired"], rows


@summary.register(ClassErrors)
def _(record: ClassErrors) -> str:
    worst = int(record.error.argmax())
    often = int((record.said > record.seen).sum())
    classes = len(record.names)
    return (
        f"The mean over {classes:,} classes is {record.error.mean():.4f}. Class {record.names[worst]} is worst with "
        f"{record.error[worst]:.4f}: said {share(record.said[worst], 2)} of the time on average, seen "
        f"{share(record.seen[worst], 2)}. {often:,} classes are said too often, {classes - often:,} too rarely."
    )


@numbers.register(ClassErrors)
def _(record: ClassErrors, most: int = 200) -> Table:
    order = np.argsort(-record.error, kind="stable")[:most]
    rows = [
        [record.names[k], format_number(record.error[k]), share(record.said[k], 2), share(record.seen[k], 2)]
        for k in order
    ]
    return ["Class", "Error", "Said", "Seen"], rows
