"""Methods of the CLUE study, the choice on validation samples, tables and figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trueup.models.shift import ShiftRow
from trueup.reports import style
from trueup_studies.figures import draw, shift_curves
from trueup_studies.grid import Options, Rows, read_toml
from trueup_studies.statistics import LEVEL
from trueup_studies.tables import Column, Table, columns, paired_differences, tabulate

PASSES_IN_TRAINING = 5
CONSISTENT = "consistent"
"""CLUE of each sample with the gradient stopped through the error, whose optimum is the true probability."""
CLUES: Mapping[str, Mapping[str, Any]] = {
    f"{name}_{alpha}": {"level": level, "alpha": alpha, **({"detach_error": True} if name == CONSISTENT else {})}
    for name, level in (*((level, level) for level in ("batch", "group", "sample")), (CONSISTENT, "sample"))
    for alpha in (0.5, 0.9)
}
PLAIN, AVERAGED, GAUSSIAN, HEAD = "plain", "passes", "gaussian", "_head"
"""The plain loss; that of the mean of several passes (CLUE with α = 1); the Gaussian NLL; suffix of variance heads."""
ENSEMBLE, MEMBERS = "ensemble", 5
"""Networks of the plain loss with other initial weights, as many as CLUE has passes, each trained for all epochs."""
SHARED = "ensemble_shared"
"""An ensemble whose training costs as much as CLUE's: its members share the epochs."""
RIVALS = {"focal": "focal loss", "avuc": "AvUC", "mmce": "MMCE"}
"""Other losses that train for calibration, for classification only."""
CHOSEN = "chosen"
LANGUAGES = ("descriptions", "tinyshakespeare")
"""Data sets of characters, each predicted from the previous ones."""
CLASSIFIERS = (PLAIN, AVERAGED, ENSEMBLE, SHARED, *RIVALS, *CLUES)
REGRESSORS = (PLAIN, AVERAGED, ENSEMBLE, SHARED, GAUSSIAN, *CLUES, *(name + HEAD for name in CLUES))
BASELINES = (PLAIN, AVERAGED, ENSEMBLE, SHARED, *RIVALS, GAUSSIAN)
ALIGNED = ("gap", "alignment", "correlation", "auroc of u")
CLASSES = columns("accuracy", "nll", "ece", "uce", *ALIGNED, "nll after TS", "ece after TS")
NUMBERS = columns("rmse", "nll", "crps", "ence", "coverage", *ALIGNED, "nll after scaling")
KINDS = {"classification": CLASSES, "language": CLASSES, "regression": NUMBERS}
SHIFT = columns("accuracy", "nll", "ece", "mean entropy")
FOREIGN = columns("auroc", "aupr", "fpr95")
MEASURED = " ".join(read_toml(__package__, "presets.toml")["measured"].split())


def title(method: str, kind: str = "classification") -> str:
    """Return a method's printed name.

    >>> title("group_0.5"), title("batch_0.9_head"), title("plain", "regression")
    ('CLUE group, α 0.5', 'CLUE batch, α 0.9, variance head', 'squared error')
    """
    task = "squared error" if kind == "regression" else "cross-entropy"
    head = ", variance head" if method.endswith(HEAD) else ""
    names = {PLAIN: task, AVERAGED: f"{task} of {PASSES_IN_TRAINING} passes", GAUSSIAN: "Gaussian NLL, variance head"}
    names |= {name: f"CLUE {name.partition('_')[0]}, α {each['alpha']:g}" for name, each in CLUES.items()}
    names |= {CHOSEN: "CLUE, chosen on validation", ENSEMBLE: f"{task}, ensemble of {MEMBERS}", **RIVALS}
    names[SHARED] = f"{task}, ensemble of CLUE's compute"
    return names[method.removesuffix(HEAD)] + head


def share_epochs(epochs: int) -> tuple[int, int]:
    """Return the members of an ensemble that shares these epochs, and the epochs of each.

    There are as many members as possible, up to five, with at most a tenth of the epochs unused.

    >>> [share_epochs(epochs) for epochs in (22, 8, 3)]
    [(5, 4), (4, 2), (3, 1)]
    """
    members = max(m for m in range(1, MEMBERS + 1) if m * (epochs // m) >= 0.9 * epochs)
    return members, epochs // members


def kind_of(row: Mapping[str, Any]) -> str:
    """Return the table to which a row belongs."""
    return "regression" if "rmse" in row else "language" if row["data"] in LANGUAGES else "classification"


def resplit_ratio(data: str) -> float:
    """Return test samples over other samples for tables, which each seed splits anew; else 0.

    >>> [resplit_ratio(name) for name in ("diabetes", "digits")]
    [0.25, 0.0]
    """
    return 1 / 4 if data == "diabetes" else 1 / 9 if data.startswith("uci_") else 0.0


def choose_clue(rows: Rows, *, head: bool = False, oracle: bool = False) -> str | None:
    """Choose CLUE's level and α on one data set by the lowest mean validation NLL; an oracle uses the test NLL.

    >>> choose_clue([{"method": "batch_0.5", "val_nll": 0.3}, {"method": "group_0.9", "val_nll": 0.2}])
    'group_0.9'
    """
    key = "nll" if oracle else "val_nll"
    alike = {name + HEAD * head: _values(rows, name + HEAD * head, key) for name in CLUES}
    most = max(map(len, alike.values()))
    means = {name: float(values.mean()) for name, values in alike.items() if most and len(values) == most}
    means = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    return min(means, key=means.__getitem__, default=None)


def tables(rows: Rows, options: Options) -> dict[str, Table]:
    """Build the tables: metrics by task, differences from baselines and between levels, shift, OOD images and cost."""
    by_data = figures_by_data(rows)
    choices = {name: choices_of(data_rows, options) for name, data_rows in by_data.items()}
    tables: dict[str, Table] = {}
    for kind, figures in KINDS.items():
        mine = {name: each for name, each in by_data.items() if kind_of(each[0]) == kind}
        if mine:
            tables[kind] = _figures_table(kind, figures, mine, choices, options)
            tables[f"{kind}-differences"] = _differences_table(kind, figures, mine, choices)
            levels = _levels_table(kind, figures, mine)
            tables |= {f"{kind}-levels": levels} if any(levels.groups.values()) else {}
    shown = [row for row in rows if row["method"] in _methods_shown(choices, row["data"])]
    titles = {name: title(name) for name in CLASSIFIERS}
    note = f"Cross-entropy, and CLUE {_how(options)}. Mean over the corruptions."
    order: dict[str, Any] = {"by": "method", "titles": titles}
    if shifted := [row for row in shown if row["part"] == "shift"]:
        groups = ["data", "severity"]
        named = [{**row, "severity": f"severity {row['severity']}"} for row in shifted]
        tables["shift"] = tabulate(named, group=groups, columns=SHIFT, **order).captioned("Shifted images", [note])
    if others := [row for row in shown if row["part"] == "ood" and row["score"] != "confidence"]:  # entropy is enough
        note = f"How well a score separates out-of-distribution images from known ones. CLUE {_how(options)}."
        groups, heading = ["data", "foreign", "score"], "Foreign images"
        tables["ood"] = tabulate(others, group=groups, columns=FOREIGN, **order).captioned(heading, [note])
    if by_data:
        tables["overhead"] = _cost_table(by_data)
    return tables


def figures(rows: Rows, options: Options) -> dict[str, Any]:
    """Draw error against uncertainty for every data set, and ECE and NLL by the severity of a shift."""
    drawings: dict[str, Any] = {}
    by_data = figures_by_data(rows)
    for name, data_rows in by_data.items():
        shown = _methods_shown({name: choices_of(data_rows, options)}, name)
        drawings[f"alignment-{name}"] = _alignment(name, [row for row in data_rows if row["method"] in shown])
        for metric in ("ece", "nll"):
            curves = {
                title(method): [ShiftRow(**{key: row[key] for key in ShiftRow.__annotations__}) for row in alike]
                for method in shown
                if (alike := [r for r in rows if (r["part"], r["data"], r["method"]) == ("shift", name, method)])
            }
            if curves:
                drawings[f"shift-{name}-{metric}"] = draw(shift_curves(curves, metric)).figure
    return drawings


def _alignment(name: str, rows: Rows) -> Any:
    """Draw mean error against mean uncertainty in bins of equal size; they are equal if the network is calibrated."""
    from matplotlib.ticker import LogLocator, NullLocator

    ax = style.axes_for(None, height=3.0)
    kind, ends = kind_of(rows[0]), []
    for index, method in enumerate(dict.fromkeys(row["method"] for row in rows)):
        curve = np.mean([np.array(row["curve"])[:, :2] for row in rows if row["method"] == method], axis=0)
        ax.plot(*np.maximum(curve, 1e-6).T, **style.line_style(index), label=title(method, kind))
        ends.append(np.maximum(curve, 1e-6))
    low, high = float(np.min(ends)), float(np.max(ends))
    ax.plot([low, high], [low, high], color=style.text_color(ax), linewidth=0.6, linestyle=":", zorder=0)
    ax.set(xscale="log", yscale="log")
    subs = (1.0, 2.0, 5.0) if high < 200 * low else (1.0,)  # more labels would overlap
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=subs))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_locator(NullLocator())
    style.set_labels(ax, f"Error and uncertainty: {name}", "mean uncertainty u", "mean error e")
    style.legend(ax, loc="lower right")
    return ax.figure


def _figures_table(
    kind: str,
    columns: Sequence[Column],
    by_data: Mapping[str, Rows],
    choices: Mapping[str, Sequence[str]],
    options: Options,
) -> Table:
    names = REGRESSORS if kind == "regression" else CLASSIFIERS
    rows = [row for data_rows in by_data.values() for row in data_rows]
    notes = [
        f"{name}: {' and '.join(title(m, kind) for m in choices[name])}, {_how(options)}."
        for name in by_data
        if choices[name]
    ]
    notes.append(MEASURED)
    order = [name for name in names if any(row["method"] == name for row in rows)]
    titles = {name: title(name, kind) for name in names}
    unbounded = [titles[row["method"]] for row in rows if "stopped at its bound" in row.get("warning", "")]
    notes += [
        f"{name}, {unbounded.count(name)} of {sum(titles[row['method']] == name for row in rows)} runs: every "
        "validation sample was correct, so no temperature is optimal and the NLL after it means nothing."
        for name in dict.fromkeys(unbounded)
    ]
    named: dict[str, Any] = {"by": "method", "group": "data", "titles": titles}
    return tabulate(rows, columns=columns, order=order, **named).captioned(kind.capitalize(), notes)


def _differences_table(
    kind: str, columns: Sequence[Column], by_data: Mapping[str, Rows], choices: Mapping[str, Sequence[str]]
) -> Table:
    """Build the table of the chosen CLUE minus each baseline."""
    pairs = {
        name: {
            f"{title(CHOSEN + HEAD * ours.endswith(HEAD))} − {title(base, kind)}": (ours, base)
            for ours in choices[name]
            for base in BASELINES
        }
        for name in by_data
    }
    return _paired_table(f"{kind.capitalize()}: CLUE minus each baseline", columns, by_data, pairs)


def _levels_table(kind: str, columns: Sequence[Column], by_data: Mapping[str, Rows]) -> Table:
    """Build the table of finer levels minus batch level at the same α."""
    names = [name for name in CLUES if not name.startswith("batch")]
    heads = ("", HEAD) if kind == "regression" else ("",)
    pairs = {
        f"{title(name + head)} − batch": (name + head, f"batch_{CLUES[name]['alpha']}{head}")
        for head in heads
        for name in names
    }
    return _paired_table(
        f"{kind.capitalize()}: finer levels minus batch means", columns, by_data, dict.fromkeys(by_data, pairs)
    )


def _paired_table(
    heading: str,
    columns: Sequence[Column],
    by_data: Mapping[str, Rows],
    pairs: Mapping[str, Mapping[str, tuple[str, str]]],
) -> Table:
    groups = {
        name: {
            words: entries
            for words, (ours, theirs) in pairs[name].items()
            if (entries := paired_differences(rows, ours, theirs, columns, resplit_ratio=resplit_ratio(name)))
        }
        for name, rows in by_data.items()
    }
    plain = tuple(Column(c.name, c.title, better="", scale=c.scale, digits=c.digits) for c in columns)
    note = f"Differences seed by seed, mean ± std; an arrow marks a significant paired t-test (p < {LEVEL:g})"
    note += ", corrected for the samples that splits share." if any(map(resplit_ratio, by_data)) else "."
    return Table(heading, "difference", plain, groups, (note,))


def _cost_table(by_data: Mapping[str, Rows]) -> Table:
    lines = []
    for name, rows in by_data.items():
        kind = kind_of(rows[0])
        one = {row["method"]: row["operations"] for row in rows}
        base = one.get(PLAIN)
        for method, count in one.items():
            numbers = {"operations": count / 1e6, "ratio": count / base if base else None}
            lines.append({"data": name, "method": title(method, kind), **numbers})
    note = f"CLUE takes {PASSES_IN_TRAINING} passes in training, only of the head if the layers before it are fixed. "
    note += "torch counts matrix products only; random masks and elementwise operations are not included."
    shown = columns("operations", "ratio")
    return tabulate(lines, by="method", group="data", columns=shown).captioned("Cost of a training step", [note])


def figures_by_data(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Group the rows of the main metrics by data set."""
    by_data: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["part"] == "figures":
            by_data.setdefault(row["data"], []).append(row)
    return by_data


def choices_of(rows: Rows, options: Options) -> list[str]:
    """Return the chosen CLUE and, for a regression, the chosen CLUE with a variance head."""
    choices = [choose_clue(rows, head=head, oracle=options.oracle) for head in (False, True)]
    return [name for name in choices if name is not None]


def _methods_shown(choices: Mapping[str, Sequence[str]], data: str) -> list[str]:
    """Return the baselines and the chosen methods."""
    return list(dict.fromkeys([*BASELINES, *choices.get(data, ())]))


def _how(options: Options) -> str:
    return "chosen by NLL on the test part, as an oracle" if options.oracle else "chosen by NLL on validation"


def _values(rows: Rows, method: str, key: str) -> np.ndarray:
    return np.array([row[key] for row in rows if row["method"] == method], dtype=float)
