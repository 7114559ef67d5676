"""What the paper of Neural Clamping claims, judged run by run.

Tang, Chen & Ho (2024), Neural Clamping: joint input perturbation and temperature scaling for neural network
calibration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from trueup_studies.claims import (
    Incomplete,
    by_group,
    by_run,
    least_on_average,
    paired,
    read_claims,
    trend,
    with_common_runs,
)
from trueup_studies.grid import Options, Rows
from trueup_studies.papers.neural_clamping.clamping_presets import preset_of
from trueup_studies.papers.neural_clamping.clamping_tables import (
    BINS,
    TITLES,
    by_rule,
    choose_gamma,
    name_shifts,
    scored_rows,
)

Support = Mapping[str, Sequence[float]]

BASELINES = ("temperature", "temperature_ece", "vector", "matrix", "ms_odir", "dirichlet_odir")
"""The paper's, each fitted to convergence."""
AS_PUBLISHED = (
    "temperature_steps",
    "temperature_ece",
    "vector_steps",
    "matrix_steps",
    "ms_odir_steps",
    "dirichlet_odir_steps",
)
"""The same as the paper fits them: by a thousand gradient steps, but for the grid search."""
OURS = "nc_fl"
KEPT = 0.002
"""An accuracy lower by less than this is kept."""
SIMILAR = 0.1
"""Of their mean: two means that differ by less are similar."""


def _method(row: Mapping[str, Any]) -> str:
    return str(row["method"])


def _networks(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    return by_group(name_shifts(rows), "data", "network")


def over_best(
    rows: Rows,
    options: Options,
    *,
    figure: str,
    as_published: bool = False,
    rank: int = 1,
    ours: Sequence[str] = (OURS,),
) -> Support:
    """How much lower Neural Clamping's figure is than that of the baseline that is best on average, or second.

    In per cent of the baseline's mean, so that the mean over runs is the improvement as the paper states it. Of
    several of `ours` the best on average. Baselines converged, unless they are to be fitted as published.
    """
    support, baselines = {}, AS_PUBLISHED if as_published else BASELINES
    for name, own in _networks(scored_rows(rows, options)).items():
        values = with_common_runs(by_run(own, _method, figure), [*baselines, *ours])
        best, mine = least_on_average(values, baselines, rank=rank), least_on_average(values, ours)
        if best is not None and all(name in values for name in ours):
            mean = float(np.mean(list(values[best].values())))
            margins = paired(values[best], values[mine], scale=100 / mean if mean else 0.0)
            more, margins = _compared(values, baselines, margins)
            support[f"{name}, {TITLES[best]}{more}"] = margins
    return support


def _compared(values: Mapping[str, Any], baselines: Sequence[str], margins: list[float]) -> tuple[str, list[float]]:
    """How many of the baselines were there, if not all, and the margins over the best of them as what they are."""
    present = sum(name in values for name in baselines)
    if present == len(baselines):
        return "", margins
    return f", of {present} of {len(baselines)} baselines", Incomplete(margins)


def other_bins(rows: Rows, options: Options) -> Support:
    """The same of ECE with other numbers of bins than 15, their mean run by run."""
    support = {}
    for name, own in _networks(scored_rows(rows, options)).items():
        margins: dict[int, list[float]] = {}
        values: dict[Any, dict[Any, float]] = {}
        for count in (bins for bins in BINS if bins != 15):
            values = with_common_runs(by_run(own, _method, f"ece_{count}"), [*BASELINES, OURS])
            best = least_on_average(values, BASELINES)
            if best is not None and OURS in values:
                for seed, value in values[OURS].items():
                    margins.setdefault(seed, []).append(100 * (values[best][seed] - value))
        means = [float(np.mean(margins[seed])) for seed in sorted(margins)]
        more, means = _compared(values, BASELINES, means)
        support[name + more] = means
    return support


def over(rows: Rows, options: Options, *, figure: str, other: str, ours: str = OURS, sign: float = 100) -> Support:
    """The figure of another method less that of ours."""
    values = {name: by_run(own, _method, figure) for name, own in _networks(scored_rows(rows, options)).items()}
    return {n: paired(v[other], v[ours], scale=sign) for n, v in values.items() if other in v and ours in v}


def closed_comparable(rows: Rows, options: Options) -> Support:
    """What the closed form's ECE may be less what it is, in per cent of the trained δ's mean."""
    support = {}
    for name, own in _networks(scored_rows(rows, options)).items():
        values = by_run(own, _method, "ece")
        if {OURS, "closed_scaled"} <= values.keys():
            mean = float(np.mean(list(values[OURS].values())))
            extra = paired(values["closed_scaled"], values[OURS], scale=100 / mean if mean else 0.0)
            support[name] = [100 * SIMILAR - more for more in extra]
    return support


def accuracy_kept(rows: Rows, options: Options) -> Support:
    """The change of accuracy plus what it may fall, points."""
    gains = over(rows, options, figure="accuracy", other="uncalibrated", sign=-100)
    return {name: [gain + 100 * KEPT for gain in values] for name, values in gains.items()}


def ablation(
    rows: Rows, options: Options, *, other: str, figure: str = "ece", than: str = "both", scale: float = 100
) -> Support:
    """A part alone less the joint fit, or another part, of the exponent chosen on the calibration images."""
    best = choose_gamma([row for row in rows if row["part"] == "sweep"], options)
    values = {name: by_run(own, _method, figure) for name, own in _networks(best).items()}
    return {n: paired(v[other], v[than], scale=scale) for n, v in values.items() if other in v and than in v}


def _sweep(rows: Rows, options: Options, *, of_run: Callable[[dict[float, Mapping[str, Any]], bool], float]) -> Support:
    """A number of each run's sweep over γ, of runs with all of them."""
    support = {}
    wanted = set(preset_of(options).gammas)
    swept = [row for row in by_rule(rows) if row["part"] == "sweep" and row["method"] == "both"]
    for name, own in _networks(swept).items():
        runs: dict[int, dict[float, Mapping[str, Any]]] = {}
        for row in own:
            if math.isfinite(row["ece"]) and math.isfinite(row["fit_ece"]):
                runs.setdefault(row["seed"], {})[row["exponent"]] = row
        whole = [seed for seed in sorted(runs) if len(runs[seed]) > 2 and runs[seed].keys() >= wanted]
        support[name] = [of_run(runs[seed], options.oracle) for seed in whole]
    return support


def _entropy_trend(run: dict[float, Mapping[str, Any]], oracle: bool) -> float:
    exponents = sorted(run)
    return trend(exponents, [run[gamma]["entropy"] for gamma in exponents])


def _inside_minimum(run: dict[float, Mapping[str, Any]], oracle: bool) -> float:
    """The test ECE of the better end of the sweep less that of the best γ inside, both chosen as `choose_gamma`."""
    exponents, seen = sorted(run), "ece" if oracle else "fit_ece"
    both = exponents[1:-1], [exponents[0], exponents[-1]]
    inside, end = (min(some, key=lambda gamma: run[gamma][seen]) for some in both)
    return float(100 * (run[end]["ece"] - run[inside]["ece"]))


def starts(rows: Rows, options: Options) -> Support:
    """ECE from random starts less that from the data's, seed by seed."""
    own = [row for row in rows if row["part"] == "starts"]
    values = {name: by_run(group, lambda row: row["start"], "ece") for name, group in _networks(own).items()}
    return {n: paired(v["random"], v["data"], scale=100) for n, v in values.items() if {"random", "data"} <= v.keys()}


def starts_alike(rows: Rows, options: Options, *, figure: str) -> Support:
    """What is similar less how far the starts' figures are apart, in per cent of their mean, seed by seed.

    With the sign that the difference has in the other seeds: that of its own would make a difference of noise.
    """
    own = [row for row in rows if row["part"] == "starts"]
    support = {}
    for name, group in _networks(own).items():
        values = by_run(group, lambda row: row["start"], figure)
        if {"random", "data"} <= values.keys():
            mean = float(np.mean([value for by in values.values() for value in by.values()]))
            gaps = np.array(paired(values["random"], values["data"], scale=100 / mean if mean else 0.0))
            signs = np.sign(gaps.sum() - gaps)
            support[name] = (100 * SIMILAR - signs * gaps).tolist() if len(gaps) > 1 else []
    return support


def starts_spread(rows: Rows, options: Options, *, figure: str, scale: float) -> Support:
    """How far a figure lies from the mean of its start, random less data's.

    No pairs: the two fits with a seed have no more than its number in common, and their order makes no difference to
    the mean. It is Levene's comparison of two spreads.
    """
    own = [row for row in rows if row["part"] == "starts"]
    support = {}
    for name, group in _networks(own).items():
        values = by_run(group, lambda row: row["start"], figure)
        if all(len(values.get(start, ())) > 1 for start in ("random", "data")):  # one fit has no spread
            away = {
                start: {seed: abs(value - float(np.mean(list(by.values())))) for seed, value in by.items()}
                for start, by in values.items()
            }
            support[name] = paired(away["random"], away["data"], scale=scale)
    return support


def order_by_bins(rows: Rows, options: Options) -> Support:
    """Kendall's τ between the methods' order with few or many bins and with 15, less one half, run by run."""
    support = {}
    for name, own in _networks(scored_rows(rows, options)).items():
        by_seed = by_group(own, "seed")
        most = max(map(len, by_seed.values()))
        taus = []
        for run in (run for run in by_seed.values() if len(run) == most and len(run) > 2):
            usual = [row["ece_15"] for row in run]
            others = [trend(usual, [row[f"ece_{bins}"] for row in run]) for bins in BINS if bins != 15]
            taus.append(float(np.mean(others)) - 0.5)
        support[name] = taus
    return support


SUPPORT: dict[str, Callable[..., Support]] = {
    **{
        function.__name__: function
        for function in (
            *(ablation, accuracy_kept, closed_comparable, order_by_bins, other_bins, over, over_best),
            *(starts, starts_alike, starts_spread),
        )
    },
    "entropy_trend": partial(_sweep, of_run=_entropy_trend),
    "inside_minimum": partial(_sweep, of_run=_inside_minimum),
}
CLAIMS = read_claims(__package__, SUPPORT)
