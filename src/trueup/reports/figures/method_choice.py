"""Why this method: the held-out loss of each candidate, its weight in the choice, and what more rows would show."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from trueup._core.formatting import format_number, format_percent
from trueup._core.registry import METHODS
from trueup.calibrators.auto import BASES, CANDIDATES, FEW_ROWS, FEW_ROWS_OF_CLASS, PENALTIES
from trueup.calibrators.compose import Choice
from trueup.reports import style
from trueup.reports.audit import RAW, Audit, method_title
from trueup.reports.figures import Panel, Section, Table, lower_title
from trueup.reports.plot import Axis, Plot, Rule, Text, interval_dots, plain_text

AUTO = "auto"
_UNCALIBRATED = (RAW, "identity")
_MIXED = "mixed_"


@dataclass(frozen=True, eq=False)
class MethodChoice:
    """What was chosen among methods by their loss on held-out rows."""

    chosen: str
    """A method, or "mixture"."""
    methods: tuple[str, ...]
    """Those that could be compared, the least loss first."""
    loss: np.ndarray
    """Mean log-loss on held-out rows."""
    error: np.ndarray
    """Standard error of its difference from that of what was chosen."""
    weight: np.ndarray
    """Share in what was chosen; 0 of the others."""
    chosen_loss: float
    detectable: float
    """The smallest mean improvement that these rows could have shown in four of five cases."""
    dropped: tuple[tuple[str, str], ...]
    """Methods without a held-out loss, and why."""
    too_few_rows: tuple[str, ...]
    """Methods that so few rows were not given to."""


def method_choice(choice: Choice, *, n_classes: int | None = None) -> MethodChoice:
    """The record of an automatic choice, as a calibrator or an audit carries it.

    With `n_classes`, the number of classes, it names the methods that were left out because there were too few rows.

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
    """What the automatic choice would try with more rows, if its candidates were those for few."""
    tried = tuple(name for name in choice.scores if not name.startswith(_MIXED))
    if tried == CANDIDATES["few rows, two classes"] and classes == 2:
        more = CANDIDATES["two classes"]
    elif tried in (CANDIDATES["few rows"], CANDIDATES["few rows, many classes"]) and classes > 2:
        sizes = ("up to 30 classes", "up to 200 classes", "more classes")
        more = CANDIDATES[sizes[(classes > 30) + (classes > 200)]]
    else:
        return ()
    return tuple(name for name in more if name not in tried)


def section(audit: Audit) -> Section:
    """The methods on held-out rows, what more rows would show, and what the automatic choice, if it is there, mixes."""
    panels = [Panel("choice-chart", "Methods on held-out rows", method_choice(audit.choice))]
    pooled: Choice | None = getattr(audit.calibrators.get(AUTO), "choice", None)
    if pooled is not None:
        record = method_choice(pooled, n_classes=audit.scores.n_classes)
        panels.append(Panel("pool-chart", "What the automatic choice mixes", record))
    return Section(
        name="choice",
        title="Why this method?",
        text="Each candidate is fitted to folds of the calibration rows and judged by its log-loss on the rows left "
        "out. A dot is how much more it loses there than what was chosen, a line one standard error of that, paired "
        "row by row: a candidate whose line reaches 0 is within a standard error of it. Of the methods within a "
        "standard error of the best, the simplest is taken. The percentages are the weights in what was chosen.",
        panels=tuple(panels),
    )


def plot(record: MethodChoice) -> Plot:
    """A dot with its error for each candidate, the weight of each behind its name."""
    names = [candidate_title(name) for name in record.methods]
    behind, error, used = record.loss - record.chosen_loss, np.nan_to_num(record.error), record.weight > 0
    hover = "%{text}<br>log-loss %{customdata[0]:.4f}: %{x:+.4f} ± %{customdata[1]:.4f}"
    kinds = ("chosen", used, style.BLUE, "circle"), ("not chosen", ~used, style.MUTED, "circle-open")
    data, texts = np.stack([record.loss, record.error], axis=1), [plain_text(name, 48) for name in names]
    marks = interval_dots(kinds, behind, (behind - error, behind + error), texts=texts, data=data, hover=hover)
    reach, most = behind + error, 1.0
    if np.isfinite(reach).any():  # to all candidates, unless one is so far behind that the others would lie on one spot
        most = float(max(min(reach.max(), 8 * max(np.median(reach), 1e-6)), 1e-6))
    least = float(np.nanmin(behind - error, initial=0.0))
    marks.append(Rule(at=0.0, color=style.MUTED, dash="dot"))
    marks += [
        Text(x=0.98, y=float(k), text=f"{behind[k]:+.4f} →", color=style.MUTED) for k in np.flatnonzero(behind > most)
    ]
    margin = 0.06 * (most - least)
    weights = [format_percent(weight, 0) if weight > 0 else "" for weight in record.weight]
    return Plot(
        title="Candidates on held-out rows",
        marks=marks,
        x=Axis(title="Log-loss above that of the choice", range=(least - margin, most + margin)),
        y=Axis(rows=names, notes=weights, bold=frozenset(np.flatnonzero(used).tolist()), names_above=True),
        legend=("lower right", 2),
    )


def summary(record: MethodChoice) -> str:
    """What was chosen and why, and what more rows would show."""
    return " ".join([*why(record), more_rows(record)]).strip()


def why(record: MethodChoice) -> list[str]:
    """What was chosen, its loss beside that without calibration, and what is as good."""
    losses = dict(zip(record.methods, record.loss, strict=True))
    before = next((losses[name] for name in _UNCALIBRATED if name in losses), None)
    loss = format_number(record.chosen_loss)
    weighted = sorted(zip(record.weight, record.methods, strict=True), reverse=True)
    shares = [f"{_in_words(name)} {format_percent(weight, 0)}" for weight, name in weighted if weight > 0]
    if record.chosen in _UNCALIBRATED:
        best = next((name for name in record.methods if name not in _UNCALIBRATED), None)
        beside = "" if best is None else f"; the best method, {_in_words(best)}, has {format_number(losses[best])}"
        words = [f"No calibration was chosen: its log-loss on held-out rows is {loss}{beside}."]
    else:
        alone = f"{candidate_title(record.chosen)} was chosen alone."
        words = [f"A mixture was chosen: {'; '.join(shares)}." if len(shares) > 1 else alone]
        beside = "" if before is None else f", {format_number(before)} without calibration"
        words.append(f"Its log-loss on held-out rows is {loss}{beside}.")
        if before is not None and before < record.chosen_loss:
            words.append("These rows cannot tell the two apart, and temperature scaling is favoured then.")
    return words


def more_rows(record: MethodChoice) -> str:
    """The smallest improvement that could have been seen, and what was not tried for want of rows."""
    words = []
    if math.isfinite(record.detectable) and record.detectable > 0:
        words.append(
            f"These rows would show a log-loss that is lower than the uncalibrated network's by "
            f"{format_number(record.detectable)} or more in four of five cases; four times as many would show half of "
            "that."
        )
    if record.too_few_rows:
        names = "; ".join(_in_words(name) for name in record.too_few_rows)
        rows = f"With {FEW_ROWS} rows, and {FEW_ROWS_OF_CLASS} or more in nearly every class"
        words.append(f"{rows}, these would be tried too: {names}.")
    return " ".join(words)


def candidate_title(name: str) -> str:
    """The title of a candidate of the automatic choice.

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
    """A row for each candidate, those without a loss last."""
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
