"""Choice of a method: the held-out loss of each candidate, its weight, and the loss that more rows would detect."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from trueup._core.formatting import format_number, format_percent
from trueup._core.registry import METHODS
from trueup.calibrators.auto import BASES, CANDIDATES, FEW_ROWS, FEW_ROWS_OF_CLASS, PENALTIES
from trueup.calibrators.compose import Choice
from trueup.reports import style
from trueup.reports.audit import RAW, Audit, method_title
from trueup.reports.figures import Panel, Table, lower_title
from trueup.reports.plot import Axis, Plot, Rule, cut_outliers, interval_dots

AUTO = "auto"
_UNCALIBRATED = (RAW, "identity")
_MIXED = "mixed_"


@dataclass(frozen=True, eq=False)
class MethodChoice:
    """The choice of one method, or a mixture, by log-loss on held-out rows."""

    chosen: str
    """Name of a method, or "mixture"."""
    methods: tuple[str, ...]
    """Candidates with a held-out loss, the lowest first; the arrays have one entry per candidate."""
    loss: np.ndarray
    """Mean log-loss on held-out rows."""
    error: np.ndarray
    """Standard error of the paired difference from the chosen method's loss."""
    weight: np.ndarray
    """Weight in the chosen mixture; 0 for candidates outside it."""
    chosen_loss: float
    """Mean log-loss of the chosen method or mixture."""
    detectable: float
    """Smallest mean improvement that these rows detect with 80 % power."""
    dropped: tuple[tuple[str, str], ...]
    """Methods without a held-out loss, and the reason."""
    too_few_rows: tuple[str, ...]
    """Methods that were not tried because there were too few rows."""


def method_choice(choice: Choice, *, n_classes: int | None = None) -> MethodChoice:
    """Return the record of an automatic choice.

    Parameters
    ----------
    choice
        The `choice` of a calibrator or an audit.
    n_classes
        Number of classes; with it, the record names the methods that were not tried because there were too few rows.

    Returns
    -------
    MethodChoice
        The record.

    Examples
    --------
    >>> from trueup.calibrators.compose import choose
    >>> rng = np.random.default_rng(0)
    >>> z = rng.normal(size=(1000, 3))
    >>> y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    >>> record = method_choice(choose(["identity", "temperature"])(3 * z, y).choice)
    >>> record.methods, record.weight
    (('temperature', 'identity'), array([1., 0.]))
    """
    losses = {name: loss for name, loss in choice.scores.items() if math.isfinite(loss)}
    methods = tuple(sorted(losses, key=lambda name: losses[name]))
    return MethodChoice(
        chosen=choice.chosen,
        methods=methods,
        loss=np.array([losses[name] for name in methods]),
        error=np.array([choice.errors.get(name, math.nan) for name in methods]),
        weight=np.array([choice.weights.get(name, 0.0) for name in methods]),
        chosen_loss=choice.loss,
        detectable=choice.detectable,
        dropped=tuple(choice.reasons.items()),
        too_few_rows=() if n_classes is None else _too_few_rows(choice, n_classes),
    )


def _too_few_rows(choice: Choice, classes: int) -> tuple[str, ...]:
    """Return the further candidates that the automatic choice would try with more rows."""
    tried = tuple(name for name in choice.scores if not name.startswith(_MIXED))
    if tried == CANDIDATES["few rows, two classes"] and classes == 2:
        more = CANDIDATES["two classes"]
    elif tried in (CANDIDATES["few rows"], CANDIDATES["few rows, many classes"]) and classes > 2:
        sizes = ("up to 30 classes", "up to 200 classes", "more classes")
        more = CANDIDATES[sizes[(classes > 30) + (classes > 200)]]
    else:
        return ()
    return tuple(name for name in more if name not in tried)


def choice_panels(audit: Audit) -> tuple[Panel, ...]:
    """Return the charts: the methods on held-out rows, and the mixture of the automatic choice if it was tried."""
    record = method_choice(audit.choice)
    panel = Panel("choice-chart", "Why this method? Log-loss on held-out rows", record, {}, numbered=False)
    words = (
        "Each candidate is fitted to folds of the calibration rows and scored by its log-loss on the held-out rows. A "
        f"dot is its loss minus that of the choice; a line is one standard error of this difference. {summary(record)}"
    )
    panels = [replace(panel, summary=words)]
    pooled: Choice | None = getattr(audit.calibrators.get(AUTO), "choice", None)
    if pooled is not None:
        record = method_choice(pooled, n_classes=audit.scores.n_classes)
        panels.append(Panel("pool-chart", "The mixture of the automatic choice", record))
    return tuple(panels)


def plot(record: MethodChoice, *, most: int = 10) -> Plot:
    """Plot a dot with its standard error for each of `most` candidates, with its weight after its name.

    These are the uncalibrated network, the choice or the parts of the mixture, and those with the lowest losses.
    """
    important = (record.weight > 0) | np.isin(record.methods, _UNCALIBRATED)
    rows = np.sort(np.argsort(~important, kind="stable")[: max(most, int(important.sum()))])
    names = [candidate_title(record.methods[k]) for k in rows]
    excess, error = record.loss[rows] - record.chosen_loss, np.nan_to_num(record.error[rows])
    weight, used = record.weight[rows], record.weight[rows] > 0
    cells = numbers(record)[1]
    hover = ["{}\nlog-loss {}: {} above the choice".format(*cells[k][:3]) for k in rows]
    kinds = ("chosen", used, style.BLUE, "circle"), ("not chosen", ~used, style.MUTED, "circle-open")
    marks = interval_dots(kinds, excess, (excess - error, excess + error), hover=hover)
    limits, texts = cut_outliers(excess - error, excess, excess + error, reference=0.0, sign=True)
    part = f", {len(rows)} of {len(record.methods)}" if len(rows) < len(record.methods) else ""
    return Plot(
        title=f"Candidates on held-out rows{part}",
        marks=[*marks, Rule(at=0.0, color=style.MUTED, dash="dot"), *texts],
        x=Axis(title="Log-loss above that of the choice", range=limits),
        y=Axis(
            rows=names,
            notes=[format_percent(share, 0) if 0 < share < 1 else "" for share in weight],
            bold=frozenset(np.flatnonzero(used).tolist()),
            names_above=True,
        ),
        legend=("lower right", 2),
    )


def summary(record: MethodChoice) -> str:
    """Return the choice, its loss, and the improvement that these rows can detect."""
    return " ".join([*why(record), more_rows(record)]).strip()


def why(record: MethodChoice) -> list[str]:
    """Return the choice and its loss, next to that without calibration."""
    losses = dict(zip(record.methods, record.loss, strict=True))
    before = next((losses[name] for name in _UNCALIBRATED if name in losses), None)
    loss = format_number(record.chosen_loss)
    weighted = sorted(zip(record.weight, record.methods, strict=True), reverse=True)
    shares = [f"{_in_words(name)} {format_percent(weight, 0)}" for weight, name in weighted if weight > 0]
    if record.chosen in _UNCALIBRATED:
        best = next((name for name in record.methods if name not in _UNCALIBRATED), None)
        other = "" if best is None else f"; the best method, {_in_words(best)}, has {format_number(losses[best])}"
        words = [f"No calibration was chosen: its log-loss on held-out rows is {loss}{other}."]
    else:
        alone = f"{candidate_title(record.chosen)} was chosen alone."
        words = [f"A mixture was chosen: {'; '.join(shares)}." if len(shares) > 1 else alone]
        other = "" if before is None else f", {format_number(before)} without calibration"
        words.append(f"Its log-loss on held-out rows is {loss}{other}.")
        if before is not None and before < record.chosen_loss:
            words.append("These rows cannot distinguish the two, and temperature scaling is then preferred.")
    return words


def more_rows(record: MethodChoice) -> str:
    """Return the smallest detectable improvement, and the methods that need more rows."""
    words = []
    if math.isfinite(record.detectable) and record.detectable > 0:
        words.append(
            f"With these rows, a log-loss gain below {format_number(record.detectable)} would probably go unnoticed "
            "(80 % power); four times the rows would halve that."
        )
    if record.too_few_rows:
        names = "; ".join(_in_words(name) for name in record.too_few_rows)
        rows = f"With {FEW_ROWS} rows, and {FEW_ROWS_OF_CLASS} or more in nearly every class"
        words.append(f"{rows}, these methods would also be tried: {names}.")
    return " ".join(words)


def candidate_title(name: str) -> str:
    """Return the title of a candidate of the automatic choice.

    >>> candidate_title("temperature"), candidate_title("mixed_platt")
    ('Temperature scaling', 'Platt scaling after a share of the uniform')
    """
    if name in _UNCALIBRATED:
        return method_title(RAW)
    if name.startswith(_MIXED):
        return f"{candidate_title(name.removeprefix(_MIXED))} after a share of the uniform"
    if name in PENALTIES:
        return f"Structured matrix scaling at {PENALTIES[name]:g} of its penalty"
    if name in BASES and name not in METHODS:
        return f"{method_title('residual')} on {_in_words(BASES[name][0])}"
    return method_title(name)


def _in_words(name: str) -> str:
    return lower_title(candidate_title(name))


def numbers(record: MethodChoice) -> Table:
    """Return one row per candidate; those without a loss come last."""
    rows = [
        [
            candidate_title(name),
            format_number(loss),
            "–" if math.isnan(error) else f"{loss - record.chosen_loss:+.4f} ± {error:.4f}".replace("-", "−"),
            format_percent(weight, 1) if weight > 0 else "–",
        ]
        for name, loss, error, weight in zip(record.methods, record.loss, record.error, record.weight, strict=True)
    ]
    rows += [[candidate_title(name), "–", reason, "–"] for name, reason in record.dropped]
    return ["Candidate", "Held-out log-loss", "Above the choice", "Weight"], rows
