"""What the paper of CLUE claims, judged seed by seed: the claims are those of its abstract.

It claims "superior calibration quality" in vision, regression and language, under shift and out of distribution too,
"competitive predictive performance" and no "significant computational overhead", and names no figure. Where we take
another than ECE, the source says so. It sets CLUE against repairs after training too, which leave the network as it is.

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
"""An accuracy lower by less than this is competitive."""
KEPT_RMSE = 0.05
"""A root mean squared error greater by less than this share is competitive."""
CHEAP = 2.0
"""Steps of the plain loss: what costs less has no great overhead."""
NOMINAL = 0.95


def _method(row: Mapping[str, Any]) -> str:
    return str(row["method"])


def beside(
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
    """The figure of another method less that of CLUE, chosen on validation; a negative scale turns it round.

    `other_figure` is the other method's, if not the same.
    """
    support = {}
    for name, own in figures_by_data(rows).items():
        # Only the Gaussian likelihood has a variance head, so it alone is compared with a CLUE that has one.
        ours = choose_clue(own, head=other == GAUSSIAN, oracle=options.oracle)
        mine, theirs = (by_run(own, _method, name) for name in (figure, other_figure or figure))
        if kind_of(own[0]) in kinds and ours in mine and other in theirs:
            support[name] = [value + plus for value in paired(theirs[other], mine[ours], scale=scale)]
    return support


def covered(rows: Rows, options: Options, *, other: str) -> Support:
    """How much nearer to its nominal value the coverage of intervals is than with another method, points."""
    away = [{**row, "away": abs(row["coverage"] - NOMINAL)} for row in rows if row.get("coverage") is not None]
    return beside(away, options, other=other, figure="away", scale=100, kinds=("regression",))


def error_margin(rows: Rows, options: Options, *, other: str) -> Support:
    """What CLUE's error may be less what it is, in per cent of the other method's."""
    logs = [{**row, "log_rmse": math.log(row["rmse"])} for row in rows if row.get("rmse")]
    rises = beside(logs, options, other=other, figure="log_rmse", scale=-1, kinds=("regression",))
    return {name: [100 * (1 + KEPT_RMSE - math.exp(rise)) for rise in values] for name, values in rises.items()}


def cost(rows: Rows, options: Options) -> Support:
    """Twice the plain loss less the cost of CLUE, in steps of the plain loss."""
    support = {}
    for name, own in figures_by_data(rows).items():
        chosen, values = choose_clue(own, oracle=options.oracle), by_run(own, _method, "operations")
        if {chosen, PLAIN} <= values.keys():
            both = values[PLAIN].keys() & values[chosen].keys()
            support[name] = [CHEAP - values[chosen][seed] / values[PLAIN][seed] for seed in sorted(both)]
    return support


def of_images(
    rows: Rows, options: Options, *, figure: str, other: str, scale: float, part: str, **wanted: Any
) -> Support:
    """The mean of a figure over the rows of a part with the values wanted, seed by seed, another method less CLUE."""
    wanted["part"] = part
    support = {}
    for name, own in figures_by_data(rows).items():
        chosen = choose_clue(own, oracle=options.oracle)
        means: dict[str, dict[int, list[float]]] = {}
        for row in rows:
            if row["data"] == name and wanted.items() <= row.items():
                means.setdefault(_method(row), {}).setdefault(row["seed"], []).append(float(row[figure]))
        values = {m: {seed: sum(v) / len(v) for seed, v in by.items()} for m, by in means.items()}
        if chosen is not None and {other, chosen} <= values.keys():
            support[name] = paired(values[other], values[chosen], scale=scale)
    return support


CLAIMS = read_claims(__package__, {f.__name__: f for f in (beside, cost, covered, error_margin, of_images)})
