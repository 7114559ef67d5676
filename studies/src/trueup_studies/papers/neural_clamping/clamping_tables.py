"""Tables and figures of the Neural Clamping study, in the form of the paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np

from trueup.reports.figures.reliability import Reliability
from trueup_studies.ablation import AblationRow
from trueup_studies.figures import draw, gamma_sweep, panels, starts
from trueup_studies.grid import Options, Rows, read_toml
from trueup_studies.papers.neural_clamping.clamping_presets import preset_of
from trueup_studies.published import normalize_name, published_values
from trueup_studies.tables import Column, Table, columns, tabulate
from trueup_studies.trained_networks import KNOWN_WEIGHTS, WeightsSplit

BINS = (5, 10, 15, 20, 25, 30, 50)
PASS_BACK = 2
"""Cost of a backward pass in forward passes; a fixed number, since measured times vary."""

FORMS = {"mean": "nc", "sum": "nc_sum"}
"""Form of the objective over a batch → prefix of its methods. The released code has means; equation 9 has a sum."""
SUM_SUFFIX = ", sum form"
_WORDS = read_toml(__package__, "titles.toml")
TITLES, ABLATION, HELD_OUT = _WORDS["titles"], _WORDS["ablation"], _WORDS["held_out"]
"""Printed names of methods and of ablation rows, and descriptions of the images that weights were not trained on."""
COSTS = {"nc_short": "Neural Clamping (CE), 1 epoch", **TITLES}
FIGURES = columns("accuracy", "entropy", "ece", "aece", "sce", "nll")
COMPARED = ("entropy", "ece", "aece", "sce")
"""Metrics of figure 3."""
TIMED = ("temperature", "nc_short", "closed", "closed_scaled", "ours", "nc_ce")
"""Methods in the table of costs."""


def tables(rows: Rows, options: Options) -> dict[str, Table]:
    """Build the paper's tables, and tables of the numbers of its figures."""
    rows = name_shifts(rows)
    swept = [row for row in rows if row["part"] == "sweep"]
    start_rows = [row for row in rows if row["part"] == "starts"]
    best, scored = choose_gamma(swept, options), scored_rows(rows, options)
    shown = [row for row in scored if row["method"] in TITLES]
    order = [name for name in TITLES if any(row["method"] == name for row in scored)]
    fits = _fit_notes(rows, best, options)
    bins = [Column(f"ece_{count}", f"{count} bins, %", scale=100, digits=2) for count in BINS]
    paid = [row for row in scored if row["method"] in TIMED]
    main, along = (*FIGURES, *columns("T")), (*columns("T", "δ"), *FIGURES[1:], *columns("objective"))
    passes = (*columns("passes"), *FIGURES[2:], *columns("T", "δ"))
    cost = f"A pass is one forward over the calibration images; a backward one counts for {PASS_BACK}."
    both = [{**row, "γ": f"{row['exponent']:g}"} for row in by_rule(swept) if row["method"] == "both"]
    starts_note = "One network, one set of calibration images, γ = 1: only the seed of the fit differs."

    def table(title: str, rows: Rows, columns: Sequence[Column], notes: Sequence[str], **how: Any) -> Table:
        named = {"by": "method", "group": ("data", "network"), **how}
        return tabulate(rows, columns=columns, **named).captioned(title, notes)

    def size(rows: Rows, by: str = "method") -> str:
        return _sizes_note(rows, by, options)

    tables = {
        "methods": table("Tables 1–3: methods", shown, main, [size(shown), *fits], order=order, titles=TITLES),
        "bins": table(
            "Appendix D: ECE with other numbers of bins", shown, bins, [size(shown)], order=order, titles=TITLES
        ),
    }
    if paid:
        order = [name for name in TIMED if any(row["method"] == name for row in paid)]
        notes = [cost, size(paid)]
        tables["efficient"] = table("Appendix F: cost of a fit", paid, passes, notes, order=order, titles=COSTS)
    if best:
        notes = [size(best), *fits]
        tables["ablation"] = table("Table 4: ablation", best, main, notes, order=list(ABLATION), titles=ABLATION)
    if both:
        tables["gamma"] = table("Figure 2: exponents of the focal loss", both, along, [size(both, "γ")], by="γ")
    if start_rows:
        tables["starts"] = table("Figure 3: starts of δ", start_rows, along, [starts_note], by="start")
    return tables


def name_shifts(rows: Rows) -> list[Mapping[str, Any]]:
    """Add the shift of the images to the name of the data set, and the sum form to that of the network.

    >>> row = {"data": "cifar10", "how": {"shift": ["haze", 3]}, "network": "resnet20", "reduction": "sum"}
    >>> [named] = name_shifts([row])
    >>> named["data"], named["network"]
    ('cifar10, haze 3', 'resnet20, sum form')
    """
    named: list[Mapping[str, Any]] = []
    for row in rows:
        data = " ".join([f"{row['data']},", *map(str, row["how"]["shift"])]) if "shift" in row["how"] else row["data"]
        network = row["network"] + SUM_SUFFIX if row.get("reduction") == "sum" else row["network"]
        named.append({**row, "data": data, "network": network})
    return named


def scored_rows(rows: Rows, options: Options) -> list[Mapping[str, Any]]:
    """Return the rows of every method, with Neural Clamping at γ = 0 and at γ, or γ and λ, chosen by ECE."""
    joint: list[Mapping[str, Any]] = []
    for form, prefix in FORMS.items():
        swept = [row for row in rows if row["part"] == "sweep" and row.get("reduction", "mean") == form]
        chosen = {"ce": [row for row in by_rule(swept) if row["exponent"] == 0], "fl": choose_gamma(swept, options)}
        if len(by_rule(swept)) < len(swept):
            chosen["searched"] = choose_gamma(swept, options, penalties=True)
        for name, best in chosen.items():
            for row in (row for row in best if row["method"] == "both"):
                network = row["network"].removesuffix(SUM_SUFFIX)
                joint.append({**row, "method": f"{prefix}_{name}", "network": network, "reduction": "mean"})
    return [*(row for row in rows if row["part"] == "method"), *joint]


def by_rule(swept: Rows) -> list[Mapping[str, Any]]:
    """Keep rows with λ by the paper's rule, a tenth of the initial loss."""
    return [row for row in swept if row.get("penalty") is None]


def choose_gamma(swept: Rows, options: Options, *, penalties: bool = False) -> list[Mapping[str, Any]]:
    """Choose the γ > 0 with the lowest calibration ECE for each network and run, the smaller one if equal.

    With `penalties`, choose γ and λ jointly. With `options.oracle`, choose by test ECE. Runs that have not tried all
    values yet are left out.
    """
    preset = preset_of(options)
    searched = {(gamma, value) for gamma in preset.searched_gammas for value in preset.penalties if penalties}
    runs: dict[tuple[Any, ...], dict[tuple[float, float], list[Mapping[str, Any]]]] = {}
    for row in swept if penalties else by_rule(swept):
        if row["exponent"] > 0:
            key = row["data"], str(row["how"].get("shift")), row["network"], row.get("reduction"), row["seed"]
            pair = row["exponent"], row.get("penalty") or 0.0
            runs.setdefault(key, {}).setdefault(pair, []).append(row)
    best: list[Mapping[str, Any]] = []
    metric = "ece" if options.oracle else "fit_ece"
    for key, by in runs.items():
        planned = searched | {(gamma, 0.0) for gamma in preset.gammas_of(key[3]) if gamma > 0}
        if not by.keys() >= planned:
            continue
        errors = {g: next(row[metric] for row in rows if row["method"] == "both") for g, rows in by.items()}
        known = {g: error for g, error in errors.items() if math.isfinite(error)}
        best += by[min(known, key=lambda g: (known[g], g))] if known else []
    return best


def figures(rows: Rows, options: Options) -> dict[str, Any]:
    """Draw the paper's figures 2 and 3, and a reliability diagram of each method in the first run."""
    drawings: dict[str, Any] = {}
    rows = name_shifts(rows)
    for data, network in dict.fromkeys((row["data"], row["network"]) for row in rows):
        net_rows = [row for row in rows if (row["data"], row["network"]) == (data, network)]
        name = f"{data.replace(', ', '-').replace(' ', '-')}-{network.replace(':', '-')}"
        swept = [row for row in net_rows if row["part"] == "sweep"]
        if both := [_row(row) for row in by_rule(swept) if row["method"] == "both"]:
            drawings[f"gamma-{name}"] = draw(gamma_sweep(both), title=f"Figure 2: {data}, {network}").figure
        if start_rows := [_row(row) for row in net_rows if row["part"] == "starts"]:
            figure, axes = panels(1, len(COMPARED))
            for ax, metric in zip(axes, COMPARED, strict=True):
                draw(starts(start_rows, metric), ax, title="")
            figure.suptitle(f"Figure 3: {data}, {network}", fontsize="small")
            drawings[f"starts-{name}"] = figure
        shown = [row for row in net_rows if row["part"] == "method" and row["method"] in TITLES]
        shown += [row for row in scored_rows(swept, options) if row["method"] == "nc_fl"]
        for row in shown:
            if row["seed"] == 0 and "reliability" in row:
                record = Reliability(**{k: _array(v) for k, v in row["reliability"].items()})
                drawings[f"reliability-{name}-{row['method']}"] = draw(record, title=TITLES[row["method"]]).figure
    return drawings


def _row(row: Mapping[str, Any]) -> AblationRow:
    return AblationRow(**{field.name: row[field.name] for field in fields(AblationRow)})


def _array(value: Any) -> Any:
    return np.asarray(value, dtype=float) if isinstance(value, list) else value


def _sizes_note(rows: Rows, by: str, options: Options) -> str:
    """State the numbers of images and runs behind the rows of a table."""
    sizes = dict.fromkeys((row["data"], row["fit_rows"], row["test_rows"]) for row in rows)
    samples = "; ".join(f"{data}: {fit:,} calibration and {test:,} test images" for data, fit, test in sizes)
    same = "each with a new network and split" if preset_of(options).retrained else "all with the same network"
    seeds: dict[tuple[Any, ...], set[int]] = {}
    for row in rows:
        seeds.setdefault((row["data"], row["network"], row[by]), set()).add(row["seed"])
    counts = {len(numbers) for numbers in seeds.values()}
    several = f"{'' if len(counts) == 1 else 'up to '}{max(counts, default=0)} runs, {same}"
    runs = "One run" if counts == {1} else f"Mean ± standard deviation of {several}"
    return f"{samples}. {runs}; 15 bins unless said otherwise."


def _fit_notes(rows: Rows, best: Rows, options: Options) -> list[str]:
    """State how Neural Clamping was fitted, and the origin of weights from files."""
    preset, notes = preset_of(options), []
    if best:
        chosen: dict[str, list[str]] = {}
        for row in best:
            if row["method"] == "both":
                chosen.setdefault(f"{row['data']}, {row['network']}", []).append(f"{row['exponent']:g}")
        several = len(chosen) > 1
        exponents = "; ".join(", ".join(values) + f" ({name})" * several for name, values in chosen.items())
        notes.append(
            f"Neural Clamping by SGD: rate 0.001, no momentum, {preset.epochs} epochs, batches of {preset.batch}; γ "
            f"with the lowest ECE on the {'test' if options.oracle else 'calibration'} images: {exponents}."
        )
    if any("shift" in row["how"] for row in rows):
        notes.append("Both calibration and test images are shifted, by the named corruption and severity.")
    if any(row["how"].get("resize") == "squash" for row in rows):
        notes.append("Pictures are scaled to 224 × 224 pixels whatever their shape, as in the released code.")
    if any(row["data"] == "imagenet" and row.get("method") == "nc_code_augmented" for row in rows):
        note = "Augmented: crops are taken from the scaled picture with a margin of zeros"
        notes.append(f"{note}; the released code takes them from a picture of 256 pixels.")
    for name, data, how in {row["network"]: (row["network"], row["data"], row["how"]) for row in rows}.values():
        if how.get("weights"):
            split = KNOWN_WEIGHTS.get(how.get("digest", "")) or WeightsSplit(*how["split"])
            whose = "the paper's weights" if split.published else "not the paper's weights"
            notes.append(f"{name}: {whose}, {how['weights']}; {HELD_OUT[split.held_out]}.")
        elif "epochs" in how and normalize_name(data) in _published_data():
            notes.append(f"{name}: trained here, so not the paper's weights.")
    return notes


def _published_data() -> set[str]:
    return {normalize_name(value.dataset) for value in published_values("neural-clamping")}
