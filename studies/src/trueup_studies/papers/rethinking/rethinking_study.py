"""Are regularised networks calibrated but less calibratable? One network per loss, coefficient and seed.

Wang, Feng & Zhang (2021), Rethinking calibration of deep neural networks: do not be afraid of overconfidence.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

import numpy as np

from trueup_studies import cost
from trueup_studies.grid import Options, Rows, Study, as_json
from trueup_studies.papers.rethinking import rethinking_presets
from trueup_studies.papers.rethinking.rethinking_presets import REFERENCE, TITLES, Plan, plans
from trueup_studies.tables import Column, Table, columns, tabulate
from trueup_studies.training.data.sources import folder_of

GROWTH = "figure-1d"
"""Part with training sets of several sizes, half of the runs, which can be left out."""
CHOICES = ("val_ece", "ece", "val_ece_temperature", "ece_temperature")
"""Metrics that can choose a coefficient."""
USABLE = 0.5
"""Smallest usable share of the reference's validation accuracy, or of the best where the reference was not run.

A network below it has learned nothing, so its ECE means nothing.
"""


def grid(options: Options) -> Iterator[dict[str, Any]]:
    """Yield the settings of each data set, training size, loss, coefficient and seed."""
    if unknown := [name for name in options.methods if name not in TITLES]:
        raise ValueError(f"methods must be among {', '.join(TITLES)}, got {unknown[0]!r}")
    selected = {REFERENCE, *(options.methods or TITLES)}  # every comparison needs the reference
    if options.network is not None:
        _require_fit(plans(options), options.network)
    for plan in plans(options):
        seeds = options.seeds or plan.seeds
        candidates = [(loss, value) for loss, values in plan.candidates.items() for value in values]
        refused = [(loss, value) for loss, values in plan.negative.items() for value in values]
        several = dict.fromkeys([*candidates, *(rethinking_presets.SWEEP if plan.sweep else ()), *refused])
        runs = [(plan.sizes[0], loss, value, seed) for loss, value in several for seed in range(seeds)]
        if plan.growth is not None and GROWTH not in options.without:
            pairs = [(loss, value) for loss, values in plan.growth.coefficients.items() for value in values]
            few = range(min(options.seeds or plan.growth.seeds, plan.growth.seeds))
            runs += [(size, *pair, seed) for size in plan.growth.sizes for pair in pairs for seed in few]
        for size, loss, value, seed in runs:
            if loss in selected:
                named = {"data": plan.data, "network": plan.network, "options": plan.options, "how": plan.how}
                sizes = [size, *plan.sizes[1:]]
                fixed = {"sizes": sizes, "pooled": plan.pooled, "epochs": plan.epochs}
                stop = {"stop_on": "refinement"} if loss == rethinking_presets.STOPPED else {}
                yield {**named, **fixed, "loss": loss, "coefficient": value, "seed": seed, **stop}


def _require_fit(plans: Sequence[Plan], network: str) -> None:
    """Reject a network that does not fit some of the data sets, and suggest the others."""
    refused, fit = None, []
    for plan in plans:
        try:
            with suppress(cost.Unknown):
                cost.forward_flops(network, plan.data, as_json(plan.options))
            fit.append(plan.data)
        except ValueError as error:
            refused = refused or error
    if refused is not None and fit:
        presets = [
            name for name, each in rethinking_presets.PRESETS.items() if all(plan.network == network for plan in each)
        ]
        instead = [f"--data {data}" for data in fit] + [f"--preset {preset}" for preset in presets]
        raise ValueError(f"{refused}; it goes with {' or '.join(instead)}")
    if refused is not None:
        raise refused


def local(options: Options) -> dict[str, Any]:
    """Return the folder of data."""
    return {} if options.data_dir is None else {"data_dir": str(folder_of(options.data_dir).expanduser().resolve())}


def has_failed(row: Mapping[str, Any]) -> bool:
    """Return whether training diverged; such rows have the accuracy of random guessing and nothing else."""
    return "training failed" in row.get("warning", "")


def main_rows(rows: Rows, plan: Plan) -> list[Mapping[str, Any]]:
    """Keep rows of the whole training set, without negative coefficients and failed trainings."""
    return [row for row in whole_rows(rows, plan) if row["coefficient"] >= 0 and not has_failed(row)]


def unfinished_losses(rows: Rows, plan: Plan) -> list[str]:
    """Return the losses of which some seed has not tried all coefficients yet."""
    tried: dict[tuple[str, Any], set[float]] = {}
    for row in whole_rows(rows, plan):
        tried.setdefault((row["loss"], row["seed"]), set()).add(row["coefficient"])
    sweep = rethinking_presets.SWEEP if plan.sweep else ()
    swept = {loss: [value for name, value in sweep if name == loss] for loss in plan.candidates}
    planned = {loss: {*values, *swept[loss]} for loss, values in plan.candidates.items()}
    return list(dict.fromkeys(loss for (loss, _), values in tried.items() if planned.get(loss, set()) - values))


def whole_rows(rows: Rows, plan: Plan) -> list[Mapping[str, Any]]:
    """Keep rows of the whole training set."""
    return [row for row in rows if row["data"] == plan.data and row["sizes"][0] == plan.sizes[0]]


def choose_coefficients(
    rows: Rows, by: str, candidates: Mapping[str, Sequence[float]] = rethinking_presets.CANDIDATES
) -> dict[str, list[Mapping[str, Any]]]:
    """Choose each loss's coefficient: the lowest mean metric among those that learned with every seed.

    Returns loss → rows of the chosen coefficient. A seed whose training failed counts as missing.

    >>> errors = {1: 0.03, 3: 0.02}
    >>> rows = [{"loss": "focal", "coefficient": c, "val_ece": e, "val_accuracy": 0.9} for c, e in errors.items()]
    >>> [row["coefficient"] for row in choose_coefficients(rows, "val_ece")["focal"]]
    [3]
    """
    groups: dict[str, dict[float, list[Mapping[str, Any]]]] = {}
    rows = [row for row in rows if not has_failed(row)]
    for row in rows:
        if row["coefficient"] in candidates.get(row["loss"], ()):
            groups.setdefault(row["loss"], {}).setdefault(row["coefficient"], []).append(row)
    most = max((len(alike) for tried in groups.values() for alike in tried.values()), default=0)
    known = [row for row in rows if row["loss"] == REFERENCE]
    least = USABLE * (_mean(known, "val_accuracy") if known else max((row["val_accuracy"] for row in rows), default=0))
    chosen = {}
    for loss in (name for name in TITLES if name in groups):
        fit = [alike for alike in groups[loss].values() if len(alike) == most and _mean(alike, "val_accuracy") >= least]
        if finite := [alike for alike in fit if math.isfinite(_mean(alike, by))]:
            chosen[loss] = min(finite, key=lambda alike: _mean(alike, by))
    return chosen


def selectors(options: Options) -> tuple[str, str]:
    """Return the metrics that choose coefficients: without, and with, calibration afterwards."""
    return ("ece", "ece_temperature") if options.oracle else ("val_ece", "val_ece_temperature")


def tables(rows: Rows, options: Options) -> dict[str, Table]:
    """Build the paper's two tables, one with coefficients chosen for use after calibration, and the coefficients."""
    raw, repaired = selectors(options)
    before = columns("ece", "accuracy")
    after = columns("ece with TS", "temperature", "ece with HB", "ece with both")
    where = "test" if options.oracle else "validation"
    words = {
        raw: f"on {where} samples{', as in the paper' if options.oracle else ''}",
        repaired: f"with TS on {where} samples",
    }
    missing = [
        f"{plan.title}: not all coefficients of {', '.join(TITLES[loss] for loss in losses)} were run yet, so others "
        "may be chosen in the end."
        for plan in plans(options)
        if (losses := unfinished_losses(rows, plan))
    ]
    marks = "↑ and ↓: higher or lower than cross-entropy by a two-sample t-test at 5 %; ± is over seeds."
    failures = _failures(rows, options)
    tables = {}
    for name, title, by, shown in (
        ("table_1", "Table 1: before calibration", raw, before),
        ("table_2", "Table 2: after calibration", raw, after),
        ("table_3", "Table 2 with coefficients chosen after calibration", repaired, (*after, *before[1:])),
    ):
        lines, picked = _lines(rows, options, by)
        # Cross-entropy, stopped or not, has no coefficient to name.
        notes = [f"Coefficients with the lowest ECE {words[by]}: {'; '.join(picked)}."] if picked else []
        notes += [*missing, marks, *failures]
        tables[name] = tabulate(
            lines, by="loss", group="set", columns=shown, titles=TITLES, reference=REFERENCE
        ).captioned(title, notes)
    metrics = dict(zip(CHOICES, ("validation", "test", "validation, TS", "test, TS"), strict=True))
    merged: dict[tuple[str, str], dict[str, Any]] = {}
    for by in metrics:
        for row in _lines(rows, options, by)[0]:
            line = merged.setdefault((row["set"], row["loss"]), {"set": row["set"], "loss": row["loss"]})
            line[by] = row["coefficient"]
    chosen = tuple(Column(by, f"lowest ECE, {part}", better="", digits=3) for by, part in metrics.items())
    several = {loss for plan in plans(options) for loss, values in plan.candidates.items() if len(values) > 1}
    kept = [line for line in merged.values() if line["loss"] in several]
    tables["coefficients"] = tabulate(kept, by="loss", group="set", columns=chosen, titles=TITLES).captioned(
        "Coefficient that each rule chooses"
    )
    if (refused := _negative_table(rows, options)) is not None:
        tables["negative"] = refused
    return tables


def _failures(rows: Rows, options: Options) -> list[str]:
    """Note the coefficients with which training failed; they are not chosen."""
    notes = []
    for plan in plans(options):
        whole = [row for row in whole_rows(rows, plan) if row["coefficient"] >= 0]
        runs = Counter((row["loss"], row["coefficient"]) for row in whole)
        failed = Counter((row["loss"], row["coefficient"]) for row in whole if has_failed(row))
        if failed:
            named = [f"{TITLES[loss]} {c:g} ({n} of {runs[loss, c]} runs)" for (loss, c), n in sorted(failed.items())]
            notes.append(f"{plan.title}: training failed with {', '.join(named)}.")
    return notes


def _negative_table(rows: Rows, options: Options) -> Table | None:
    """Build the table of accuracies with negative coefficients; failed trainings have that of random guessing."""
    lines = []
    for plan in plans(options):
        whole = [row for row in whole_rows(rows, plan) if row["coefficient"] < 0]
        plain = [row for row in whole_rows(rows, plan) if row["loss"] == REFERENCE] if whole else []
        for row in [*plain, *sorted(whole, key=lambda row: (row["loss"], -row["coefficient"]))]:
            coefficient = f" {row['coefficient']:g}" if row["coefficient"] else ""
            named = {"set": plan.title, "loss": f"{TITLES[row['loss']]}{coefficient}"}
            lines.append({**named, "accuracy": row["accuracy"], "failed": float(has_failed(row))})
    if not lines:
        return None
    notes, title = [rethinking_presets.NEGATIVE_NOTE], "§5.2: negative coefficients"
    return tabulate(lines, by="loss", group="set", columns=columns("accuracy", "failed")).captioned(title, notes)


def _lines(rows: Rows, options: Options, by: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows of the chosen coefficients, and a note naming these."""
    lines, notes = [], []
    for plan in plans(options):
        chosen = choose_coefficients(main_rows(rows, plan), by, plan.candidates)
        lines += [{**row, "set": plan.title} for alike in chosen.values() for row in alike]
        picked = {TITLES[loss]: alike[0]["coefficient"] for loss, alike in chosen.items()}
        named = [f"{loss} {coefficient:g}" for loss, coefficient in picked.items() if coefficient]
        if named:
            notes.append(f"{plan.title}: {', '.join(named)}")
    return lines, notes


def _mean(rows: Rows, name: str) -> float:
    return float(np.mean([row[name] for row in rows]))


def flops(cells: Sequence[Mapping[str, Any]]) -> tuple[float, list[str]]:
    """Count the operations of training the networks of these cells."""
    total, unknown = 0.0, []
    for settings in cells:
        try:
            forward = cost.forward_flops(settings["network"], settings["data"], as_json(settings["options"]))
        except cost.Unknown as error:
            unknown.append(str(error))
        else:
            total += cost.training_flops(
                forward, cost.part_sizes(settings["data"], settings["sizes"]), settings["epochs"]
            )
    return total, unknown


STUDY = Study(
    "rethinking",
    2,
    grid=grid,
    work="trueup_studies.papers.rethinking.rethinking_runs:work",
    tables=tables,
    figures=lambda rows, options: import_module(f"{__package__}.rethinking_figures").figures(rows, options),
    local=local,
    presets=lambda: {name: [plan.data for plan in each] for name, each in rethinking_presets.PRESETS.items()},
    claims=lambda: import_module(f"{__package__}.rethinking_claims").CLAIMS,
    flops=flops,
    parts=(GROWTH,),
    takes=("network",),
    chooses=True,
    title="Calibrated or calibratable: training losses before and after post-hoc calibration",
    paper="rethinking",
)
