"""The claims in the abstract of the CLUE paper, judged seed by seed.

The abstract claims "superior calibration quality" in vision, regression and language, also under shift and out of
distribution. It claims "competitive predictive performance" and no "significant computational overhead" too. It gives
no number; where we judge by another metric than ECE, the source of the claim says so. The paper also compares with
post-hoc methods, which leave the network as it is.

Mendes, Romano & Garlan (2025), CLUE: calibration by learning uncertainty–error alignment.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from trueup_studies.claims import by_run, paired, read_claims
from trueup_studies.grid import Options, Rows
from trueup_studies.papers.clue.clue_tables import GAUSSIAN, PLAIN, choose_clue, figures_by_data, kind_of

Support = Mapping[str, Sequence[float]]

KEPT = 0.005
"""A smaller loss of accuracy counts as competitive."""
KEPT_RMSE = 0.05
"""A smaller relative increase of the root mean squared error counts as competitive."""
CHEAP = 2.0
"""Cost in steps of the plain loss below which the overhead counts as small."""
NOMINAL = 0.95


def versus(
    rows: Rows,
    options: Options,
    *,
    other: str,
    figure: str,
    scale: float,
    kinds: Sequence[str],
    plus: float = 0.0,
    other_figure: str = "",
) -> Support:
    """Compute another method's metric minus that of CLUE, chosen on validation; a negative scale flips it.

    `other_figure` is the other method's metric, if it differs.
    """
    support = {}
    for name, group in figures_by_data(rows).items():
        # Only the Gaussian likelihood has a variance head, so only it is compared with a CLUE that has one.
        ours = choose_clue(group, head=other == GAUSSIAN, oracle=options.oracle)
        mine, theirs = (by_run(group, metric, "method") for metric in (figure, other_figure or figure))
        if kind_of(group[0]) in kinds and ours in mine and other in theirs:
            support[name] = [value + plus for value in paired(theirs[other], mine[ours], scale=scale)]
    return support


def covered(rows: Rows, options: Options, *, other: str) -> Support:
    """Compute the other method's distance from nominal coverage minus CLUE's, in points."""
    away = [{**row, "away": abs(row["coverage"] - NOMINAL)} for row in rows if row.get("coverage") is not None]
    return versus(away, options, other=other, figure="away", scale=100, kinds=("regression",))


def error_margin(rows: Rows, options: Options, *, other: str) -> Support:
    """Compute the largest competitive error minus CLUE's error, in per cent of the other method's."""
    logs = [{**row, "log_rmse": math.log(row["rmse"])} for row in rows if row.get("rmse")]
    rises = versus(logs, options, other=other, figure="log_rmse", scale=-1, kinds=("regression",))
    return {name: [100 * (1 + KEPT_RMSE - math.exp(rise)) for rise in values] for name, values in rises.items()}


def cost(rows: Rows, options: Options) -> Support:
    """Compute `CHEAP` minus the cost of CLUE, in steps of the plain loss."""
    support = {}
    for name, group in figures_by_data(rows).items():
        chosen, values = choose_clue(group, oracle=options.oracle), by_run(group, "operations", "method")
        if {chosen, PLAIN} <= values.keys():
            both = values[PLAIN].keys() & values[chosen].keys()
            support[name] = [CHEAP - values[chosen][seed] / values[PLAIN][seed] for seed in sorted(both)]
    return support


def of_images(
    rows: Rows, options: Options, *, figure: str, other: str, scale: float, part: str, **matching: Any
) -> Support:
    """Compute another method's mean metric minus CLUE's, seed by seed, over the rows with the matching values."""
    matching["part"] = part
    support = {}
    for name, group in figures_by_data(rows).items():
        chosen = choose_clue(group, oracle=options.oracle)
        means: dict[str, dict[int, list[float]]] = {}
        for row in rows:
            if row["data"] == name and matching.items() <= row.items():
                means.setdefault(row["method"], {}).setdefault(row["seed"], []).append(float(row[figure]))
        values = {m: {seed: sum(v) / len(v) for seed, v in by.items()} for m, by in means.items()}
        if chosen is not None and {other, chosen} <= values.keys():
            support[name] = paired(values[other], values[chosen], scale=scale)
    return support


CLAIMS = read_claims(__package__, {f.__name__: f for f in (versus, cost, covered, error_margin, of_images)})
