"""What the paper of CLUE claims, judged seed by seed: the claims are those of its abstract.

It claims "superior calibration quality" in vision, regression and language, under shift and out of distribution too,
"competitive predictive performance" and no "significant computational overhead", and names no figure. Where we take
another than ECE, the source says so. It sets CLUE against repairs after training too, which leave the network as it is.

Mendes, Romano & Garlan (2025), CLUE: calibration by learning uncertainty–error alignment.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from trueup.study.claims import Claim, by_run, paired
from trueup.study.grid import Options, Rows
from trueup.study.papers.clue.clue_tables import (
    AVERAGED,
    ENSEMBLE,
    GAUSSIAN,
    PLAIN,
    RIVALS,
    SHARED,
    choose_clue,
    figures_by_data,
    kind_of,
)

Support = Mapping[str, Sequence[float]]

KEPT = 0.005
"""An accuracy lower by less than this is competitive."""
KEPT_RMSE = 0.05
"""A root mean squared error greater by less than this share is competitive."""
CHEAP = 2.0
"""Steps of the plain loss: what costs less has no great overhead."""
CLASS_RIVALS = {
    PLAIN: "cross-entropy with Monte-Carlo dropout",
    AVERAGED: "cross-entropy of the mean of five passes",
    ENSEMBLE: "an ensemble of five networks",
    SHARED: "an ensemble of CLUE's compute",
    **RIVALS,
}
"""What CLUE is compared with on classes, in words."""
WITH_HEAD = "the Gaussian likelihood with a variance head (both have one)"
NOMINAL = 0.95
SEVEREST = 5


def _method(row: Mapping[str, Any]) -> str:
    return str(row["method"])


def _beside(
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


def _covered(rows: Rows, options: Options, *, other: str) -> Support:
    away = [{**row, "away": abs(row["coverage"] - NOMINAL)} for row in rows if row.get("coverage") is not None]
    return _beside(away, options, other=other, figure="away", scale=100, kinds=("regression",))


def _error_margin(rows: Rows, options: Options, *, other: str) -> Support:
    """What CLUE's error may be less what it is, in per cent of the other method's."""
    logs = [{**row, "log_rmse": math.log(row["rmse"])} for row in rows if row.get("rmse")]
    rises = _beside(logs, options, other=other, figure="log_rmse", scale=-1, kinds=("regression",))
    return {name: [100 * (1 + KEPT_RMSE - math.exp(rise)) for rise in values] for name, values in rises.items()}


def _cost(rows: Rows, options: Options) -> Support:
    """Twice the plain loss less the cost of CLUE, in steps of the plain loss."""
    support = {}
    for name, own in figures_by_data(rows).items():
        chosen, values = choose_clue(own, oracle=options.oracle), by_run(own, _method, "operations")
        if {chosen, PLAIN} <= values.keys():
            both = values[PLAIN].keys() & values[chosen].keys()
            support[name] = [CHEAP - values[chosen][seed] / values[PLAIN][seed] for seed in sorted(both)]
    return support


def _of_images(
    rows: Rows, options: Options, *, wanted: Callable[[Mapping[str, Any]], bool], figure: str, other: str, scale: float
) -> Support:
    """The mean of a figure over some rows of each seed, another method less CLUE."""
    support = {}
    for name, own in figures_by_data(rows).items():
        chosen = choose_clue(own, oracle=options.oracle)
        means: dict[str, dict[int, list[float]]] = {}
        for row in rows:
            if row["data"] == name and wanted(row):
                means.setdefault(_method(row), {}).setdefault(row["seed"], []).append(float(row[figure]))
        values = {m: {seed: sum(v) / len(v) for seed, v in by.items()} for m, by in means.items()}
        if chosen is not None and {other, chosen} <= values.keys():
            support[name] = paired(values[other], values[chosen], scale=scale)
    return support


def _against(other: str, words: str) -> list[Claim]:
    classes = ("classification", "language")
    less = f"of {words} less CLUE's"
    return [
        Claim(
            "Abstract",
            f"lower ECE than {words}",
            f"ECE {less}, points",
            partial(_beside, other=other, figure="ece", scale=100, kinds=classes),
        ),
        Claim(
            "Abstract, read as NLL",
            f"lower NLL than {words}",
            f"NLL {less}",
            partial(_beside, other=other, figure="nll", scale=1, kinds=classes),
            4,
        ),
        Claim(
            "Abstract, read as beside a repair",
            f"lower ECE than {words} and temperature scaling, itself without",
            f"ECE {less}, points",
            partial(_beside, other=other, figure="ece", other_figure="ece_after", scale=100, kinds=classes),
        ),
        Claim(
            "Beyond the paper",
            f"lower ECE than {words}, both after temperature scaling",
            f"ECE {less}, points",
            partial(_beside, other=other, figure="ece_after", scale=100, kinds=classes),
        ),
        Claim(
            "Abstract, read as alignment",
            f"|mean error − mean uncertainty| is smaller than with {words}",
            f"gap {less}",
            partial(_beside, other=other, figure="gap", scale=1, kinds=classes),
            4,
        ),
    ]


CLAIMS = (
    *(claim for other, words in CLASS_RIVALS.items() for claim in _against(other, words)),
    Claim(
        "Abstract",
        f"competitive accuracy (no more than {100 * KEPT:g} points below cross-entropy)",
        f"change of accuracy plus {100 * KEPT:g} points",
        partial(
            _beside,
            other=PLAIN,
            figure="accuracy",
            scale=-100,
            kinds=("classification", "language"),
            plus=100 * KEPT,
        ),
    ),
    *(
        Claim(
            "Abstract",
            f"regression: competitive errors (RMSE no more than {100 * KEPT_RMSE:g} % above that of {words})",
            f"{100 * (1 + KEPT_RMSE):g} less CLUE's RMSE in % of that of {words}",
            partial(_error_margin, other=other),
            1,
        )
        for other, words in {PLAIN: "squared error", GAUSSIAN: WITH_HEAD}.items()
    ),
    *(
        Claim(
            "Abstract, read as NLL",
            f"regression: lower NLL than {words}",
            f"NLL of {words} less CLUE's",
            partial(_beside, other=other, figure="nll", scale=1, kinds=("regression",)),
            3,
        )
        for other, words in {
            PLAIN: "squared error with Monte-Carlo dropout",
            AVERAGED: "squared error of the mean of five passes",
            ENSEMBLE: "an ensemble of five networks",
            SHARED: "an ensemble of CLUE's compute",
            GAUSSIAN: WITH_HEAD,
        }.items()
    ),
    Claim(
        "Abstract, read as coverage",
        "regression: 95 % intervals cover more nearly 95 % than with squared error",
        "distance of the coverage from 95 %, squared error less CLUE, points",
        partial(_covered, other=PLAIN),
        1,
    ),
    *(
        Claim(
            "Abstract",
            f"lower ECE than {words} under the severest shift",
            f"ECE of {words} less CLUE's, points",
            partial(
                _of_images,
                wanted=lambda row: row["part"] == "shift" and row["severity"] == SEVEREST,
                figure="ece",
                other=other,
                scale=100,
            ),
        )
        for other, words in CLASS_RIVALS.items()
    ),
    *(
        Claim(
            "Abstract, read as detection",
            f"out-of-distribution images are told apart better than by {words}",
            f"AUROC of the entropy, CLUE less {words}",
            partial(
                _of_images,
                wanted=lambda row: row["part"] == "ood" and row["score"] == "entropy",
                figure="auroc",
                other=other,
                scale=-1,
            ),
            4,
        )
        for other, words in CLASS_RIVALS.items()
    ),
    Claim(
        "Abstract",
        f"no significant computational overhead (below {CHEAP:g} steps of the plain loss)",
        f"{CHEAP:g} less the cost of a training step, in steps of the plain loss",
        _cost,
        exact=True,
    ),
)
