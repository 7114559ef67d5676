"""The claims of the Neural Clamping paper, judged run by run.

Tang, Chen & Ho (2024), Neural Clamping: joint input perturbation and temperature scaling for neural network
calibration.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from trueup_studies import claims
from trueup_studies.claims import Incomplete, by_group, by_run, paired
from trueup_studies.grid import Options, Rows
from trueup_studies.papers.neural_clamping import clamping_tables as tables
from trueup_studies.papers.neural_clamping.clamping_presets import preset_of

Support = Mapping[str, Sequence[float]]
Values = Mapping[Any, Mapping[Any, float]]
"""Method → run → metric."""

BASELINES = ("temperature", "temperature_ece", "vector", "matrix", "ms_odir", "dirichlet_odir")
"""The paper's baselines, each fitted to convergence."""
FITTED = {
    end: tuple(name if name == "temperature_ece" else f"{name}{end}" for name in BASELINES)
    for end in ("", "_steps", "_sum")
}
"""Baselines converged, and fitted as in the paper: 1,000 gradient steps of the mean or of the sum."""
OURS = "nc_fl"
MAX_ACCURACY_LOSS = 0.002
"""A smaller loss of accuracy counts as none."""
SIMILAR = 0.1
"""Two means are similar if they differ by less than this share of their mean."""


def _networks(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    return by_group(tables.name_shifts(rows), "data", "network")


def _scores(rows: Rows, options: Options, metric: str) -> dict[str, dict[Any, dict[Any, float]]]:
    """Map each network to its methods' metric in each run."""
    groups = _networks(tables.scored_rows(rows, options))
    return {name: by_run(group, metric, "method") for name, group in groups.items()}


def _mean(values: Mapping[Any, float]) -> float:
    return float(np.mean(list(values.values())))


def _percent_of(mean: float) -> float:
    """Return the factor from a difference to per cent of a mean."""
    return 100 / mean if mean else 0.0


def over_best(
    rows: Rows,
    options: Options,
    *,
    figure: str,
    fitted: str = "",
    rank: int = 1,
    ours: Sequence[str] = (OURS,),
) -> Support:
    """Compute the metric of the baseline that is best (or second) on average, minus that of Neural Clamping.

    The unit is per cent of the baseline's mean, as in the paper. The best of several `ours` is taken. Baselines are
    converged, or `fitted` by gradient steps of the mean ("_steps") or the sum ("_sum").
    """
    support, baselines = {}, FITTED[fitted]
    for name, scores in _scores(rows, options, figure).items():
        values = claims.with_common_runs(scores, [*baselines, *ours])
        best, mine = (claims.least_on_average(values, among, rank=r) for among, r in ((baselines, rank), (ours, 1)))
        if best is not None and all(name in values for name in ours):
            margins = paired(values[best], values[mine], scale=_percent_of(_mean(values[best])))
            suffix, margins = _compared(values, baselines, margins)
            support[f"{name}, {tables.TITLES[best]}{suffix}"] = margins
    return support


def _compared(values: Values, baselines: Sequence[str], margins: list[float]) -> tuple[str, list[float]]:
    """Mark margins over some of the baselines as incomplete, and say how many there were."""
    present = sum(name in values for name in baselines)
    if present == len(baselines):
        return "", margins
    return f", of {present} of {len(baselines)} baselines", Incomplete(margins)


def other_bins(rows: Rows, options: Options) -> Support:
    """Compute the best baseline's ECE minus Neural Clamping's, averaged over numbers of bins other than 15."""
    margins: dict[str, dict[int, list[float]]] = {}
    present: dict[str, Values] = {}
    for count in (bins for bins in tables.BINS if bins != 15):
        for name, scores in _scores(rows, options, f"ece_{count}").items():
            values = present[name] = claims.with_common_runs(scores, [*BASELINES, OURS])
            best = claims.least_on_average(values, BASELINES)
            if best is not None and OURS in values:
                for seed, value in values[OURS].items():
                    difference = 100 * (values[best][seed] - value)
                    margins.setdefault(name, {}).setdefault(seed, []).append(difference)
    support = {}
    for name, by_seed in margins.items():
        suffix, means = _compared(present[name], BASELINES, [float(np.mean(by_seed[seed])) for seed in sorted(by_seed)])
        support[name + suffix] = means
    return support


def over(rows: Rows, options: Options, *, figure: str, other: str, ours: str = OURS, sign: float = 100) -> Support:
    """Compute the metric of another method minus that of ours."""
    return _paired(_scores(rows, options, figure), other, ours, sign)


def _paired(scores: Mapping[str, Values], first: str, second: str, scale: float) -> Support:
    return {n: paired(v[first], v[second], scale=scale) for n, v in scores.items() if first in v and second in v}


def closed_comparable(rows: Rows, options: Options) -> Support:
    """Compute the allowed excess minus the closed form's excess ECE, in per cent of the trained δ's mean."""
    support = {}
    for name, values in _scores(rows, options, "ece").items():
        if {OURS, "closed_scaled"} <= values.keys():
            excess = paired(values["closed_scaled"], values[OURS], scale=_percent_of(_mean(values[OURS])))
            support[name] = [100 * SIMILAR - value for value in excess]
    return support


def accuracy_kept(rows: Rows, options: Options) -> Support:
    """Compute the change of accuracy plus the allowed loss, in points."""
    gains = over(rows, options, figure="accuracy", other="uncalibrated", sign=-100)
    return {name: [gain + 100 * MAX_ACCURACY_LOSS for gain in values] for name, values in gains.items()}


def ablation(
    rows: Rows, options: Options, *, other: str, figure: str = "ece", than: str = "both", scale: float = 100
) -> Support:
    """Compute the metric of one part alone minus that of another part, at the γ chosen on the calibration images."""
    best = tables.choose_gamma([row for row in rows if row["part"] == "sweep"], options)
    scores = {name: by_run(group, figure, "method") for name, group in _networks(best).items()}
    return _paired(scores, other, than, scale)


Sweep = Mapping[float, Mapping[str, Any]]
"""γ → the row of one run."""


def _sweep(rows: Rows, options: Options, *, of_runs: Callable[[Sequence[Sweep], bool], Sequence[float]]) -> Support:
    """Compute one number per complete sweep over γ."""
    support = {}
    swept = [row for row in tables.by_rule(rows) if row["part"] == "sweep" and row["method"] == "both"]
    for name, group in _networks(swept).items():
        runs: dict[int, dict[float, Mapping[str, Any]]] = {}
        for row in group:
            if math.isfinite(row["ece"]) and math.isfinite(row["fit_ece"]):
                runs.setdefault(row["seed"], {})[row["exponent"]] = row
        exponents = preset_of(options).gammas_of(group[0].get("reduction"))
        whole = [seed for seed in sorted(runs) if len(runs[seed]) > 2 and runs[seed].keys() >= set(exponents)]
        support[name] = of_runs([runs[seed] for seed in whole], options.oracle)
    return support


def _entropy_trends(runs: Sequence[Sweep], oracle: bool) -> Sequence[float]:
    return claims.trends((sorted(run), [run[gamma]["entropy"] for gamma in sorted(run)]) for run in runs)


def _inside_minima(runs: Sequence[Sweep], oracle: bool) -> Sequence[float]:
    """Compute the test ECE of the better end of the sweep minus that of the best γ inside, chosen as in the tables."""
    metric, margins = "ece" if oracle else "fit_ece", []
    for run in runs:
        exponents = sorted(run)
        both = exponents[1:-1], [exponents[0], exponents[-1]]
        inside, end = (run[min(some, key=lambda gamma: run[gamma][metric])] for some in both)
        margins.append(float(100 * (end["ece"] - inside["ece"])))
    return margins


def _start_scores(rows: Rows, metric: str) -> dict[str, dict[Any, dict[Any, float]]]:
    """Map each network with both starts to the metric of each start and seed."""
    groups = _networks([row for row in rows if row["part"] == "starts"])
    scores = {name: by_run(group, metric, "start") for name, group in groups.items()}
    return {name: values for name, values in scores.items() if {"random", "data"} <= values.keys()}


def starts(rows: Rows, options: Options) -> Support:
    """Compute the ECE from random starts minus that from the data-driven start, seed by seed."""
    return _paired(_start_scores(rows, "ece"), "random", "data", 100)


def starts_alike(rows: Rows, options: Options, *, figure: str) -> Support:
    """Compute the similarity bound minus the difference of the two starts, in per cent of their mean, seed by seed.

    The difference gets the sign that it has in the other seeds; its own sign would turn noise into a difference.
    """
    support = {}
    for name, values in _start_scores(rows, figure).items():
        mean = float(np.mean([value for by in values.values() for value in by.values()]))
        gaps = np.array(paired(values["random"], values["data"], scale=_percent_of(mean)))
        signs = np.sign(gaps.sum() - gaps)
        support[name] = (100 * SIMILAR - signs * gaps).tolist() if len(gaps) > 1 else []
    return support


def starts_spread(rows: Rows, options: Options, *, figure: str, scale: float) -> Support:
    """Compute the distance of a metric from the mean of its start, random minus data-driven: Levene's test.

    The fits are no pairs: two fits with one seed share nothing but its number.
    """
    distances = {
        name: {start: {seed: abs(value - _mean(by)) for seed, value in by.items()} for start, by in values.items()}
        for name, values in _start_scores(rows, figure).items()
        if all(len(values[start]) > 1 for start in ("random", "data"))  # one fit has no spread
    }
    return _paired(distances, "random", "data", scale)


def order_by_bins(rows: Rows, options: Options) -> Support:
    """Compute Kendall's τ of the methods' order with other numbers of bins and with 15, minus ½, run by run."""
    support = {}
    for name, group in _networks(tables.scored_rows(rows, options)).items():
        by_seed = by_group([row for row in group if math.isfinite(row["ece_15"])], "seed")
        most = max(map(len, by_seed.values()))
        taus = []
        for run in (run for run in by_seed.values() if len(run) == most and len(run) > 2):
            usual = [row["ece_15"] for row in run]
            others = [claims.trend(usual, [row[f"ece_{bins}"] for row in run]) for bins in tables.BINS if bins != 15]
            taus.append(float(np.mean(others)) - 0.5)
        support[name] = taus
    return support


_NAMED = (
    ablation, accuracy_kept, closed_comparable, order_by_bins, other_bins, over, over_best,
    starts, starts_alike, starts_spread,
)  # fmt: skip
SUPPORT: dict[str, Callable[..., Support]] = {
    **{function.__name__: function for function in _NAMED},
    "entropy_trend": partial(_sweep, of_runs=_entropy_trends),
    "inside_minimum": partial(_sweep, of_runs=_inside_minima),
}
CLAIMS = claims.read_claims(__package__, SUPPORT)
"""The claims of claims.toml."""
