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

from trueup.study.claims import (
    Claim,
    Incomplete,
    by_group,
    by_run,
    least_on_average,
    paired,
    published_key,
    trend,
    with_common_runs,
)
from trueup.study.grid import Options, Rows
from trueup.study.papers.neural_clamping.clamping_presets import preset_of
from trueup.study.papers.neural_clamping.clamping_tables import (
    ABLATION,
    BINS,
    COMPARED,
    TITLES,
    by_rule,
    choose_gamma,
    name_shifts,
    scored_rows,
)
from trueup.study.published import published_values

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
PAPER = "neural-clamping"
SECOND_IN_AECE = "cifar100, wideresnet4010"
"""Where the paper claims the lowest AECE or the second-lowest; it claims the lowest of every other network."""
NO_SCE = "bloodmnist"
"""The data set on which the paper claims nothing of SCE: Neural Clamping is fourth there."""


def _method(row: Mapping[str, Any]) -> str:
    return str(row["method"])


def _networks(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    return by_group(name_shifts(rows), "data", "network")


def _over_best(
    rows: Rows,
    options: Options,
    *,
    figure: str,
    baselines: Sequence[str],
    rank: int = 1,
    ours: Sequence[str] = (OURS,),
    wanted: Callable[[str], bool] = lambda key: True,
) -> Support:
    """How much lower Neural Clamping's figure is than that of the baseline that is best on average, or second.

    In per cent of the baseline's mean, so that the mean over runs is the improvement as the paper states it. Of
    several of `ours` the best on average; only on data sets and networks whose key in the paper is `wanted`.
    """
    support = {}
    for name, own in _networks(scored_rows(rows, options)).items():
        values = with_common_runs(by_run(own, _method, figure), [*baselines, *ours])
        best, mine = least_on_average(values, baselines, rank=rank), least_on_average(values, ours)
        both = best is not None and all(name in values for name in ours)
        if both and wanted(published_key(own[0]["data"], own[0]["network"])):
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


def _other_bins(rows: Rows, options: Options) -> Support:
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


def _over(rows: Rows, options: Options, *, figure: str, other: str, ours: str = OURS, sign: float = 100) -> Support:
    """The figure of another method less that of ours."""
    values = {name: by_run(own, _method, figure) for name, own in _networks(scored_rows(rows, options)).items()}
    return {n: paired(v[other], v[ours], scale=sign) for n, v in values.items() if other in v and ours in v}


def _closed_comparable(rows: Rows, options: Options) -> Support:
    """What the closed form's ECE may be less what it is, in per cent of the trained δ's mean."""
    support = {}
    for name, own in _networks(scored_rows(rows, options)).items():
        values = by_run(own, _method, "ece")
        if {OURS, "closed_scaled"} <= values.keys():
            mean = float(np.mean(list(values[OURS].values())))
            extra = paired(values["closed_scaled"], values[OURS], scale=100 / mean if mean else 0.0)
            support[name] = [100 * SIMILAR - more for more in extra]
    return support


def _accuracy_kept(rows: Rows, options: Options) -> Support:
    gains = _over(rows, options, figure="accuracy", other="uncalibrated", sign=-100)
    return {name: [gain + 100 * KEPT for gain in values] for name, values in gains.items()}


def _ablation(
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


def _starts(rows: Rows, options: Options) -> Support:
    """ECE from random starts less that from the data's, seed by seed."""
    own = [row for row in rows if row["part"] == "starts"]
    values = {name: by_run(group, lambda row: row["start"], "ece") for name, group in _networks(own).items()}
    return {n: paired(v["random"], v["data"], scale=100) for n, v in values.items() if {"random", "data"} <= v.keys()}


def _starts_alike(rows: Rows, options: Options, *, figure: str) -> Support:
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


def _starts_spread(rows: Rows, options: Options, *, figure: str, scale: float) -> Support:
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


def _order_by_bins(rows: Rows, options: Options) -> Support:
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


def _printed(metric: str) -> dict[str, str]:
    """The improvement over the best baseline that captions print, by data set and network."""
    values = published_values(PAPER, "captions", metric=metric)
    printed = {published_key(value.dataset, value.model): f"{value.mean:g} %" for value in values}
    return {**printed, "": f"{', '.join(printed.values())} elsewhere"}


def _printed_ablation(other: str, than: str, figure: str, digits: int = 2) -> dict[str, str]:
    """What a part alone has more than the joint fit, or than another part, in the paper's table 4."""
    values = [value for value in published_values(PAPER, "table 4") if value.metric.startswith(f"{figure}_")]
    means = {value.method: value.mean for value in values}
    gap = means[ABLATION[other]] - means[ABLATION[than]]
    return {published_key(values[0].dataset, values[0].model): f"{gap:+.{digits}f}", "": f"{gap:+.{digits}f} elsewhere"}


def _over_baselines(
    source: str,
    figure: str,
    words: str,
    printed: str | Mapping[str, str],
    *,
    rank: int = 1,
    ours: Sequence[str] = (OURS,),
    wanted: Callable[[str], bool] = lambda key: True,
) -> list[Claim]:
    """A claim against the paper's baselines, fitted to convergence and as the paper fits them."""
    whose = " or ".join(TITLES[name] for name in ours)
    return [
        Claim(
            source,
            f"{words}, {how}",
            f"{figure.upper()} of that baseline less that of {whose}, in % of the baseline's",
            partial(_over_best, figure=figure, baselines=baselines, rank=rank, ours=ours, wanted=wanted),
            1,
            printed,
        )
        for baselines, how in ((BASELINES, "all converged"), (AS_PUBLISHED, "all as the paper fits them"))
    ]


CLAIMS = (
    *_over_baselines("Tables 1–3", "ece", "lower ECE than the best baseline", _printed("ece_rel_improvement_pct")),
    *_over_baselines(
        "Tables 1–3",
        "aece",
        "lower AECE than the best baseline",
        _printed("aece_rel_improvement_pct"),
        wanted=lambda key: key != SECOND_IN_AECE,
    ),
    *_over_baselines(
        "Table 2",
        "aece",
        "lowest or second-lowest AECE: lower than the second-best baseline",
        "lowest or second",
        rank=2,
        wanted=lambda key: key == SECOND_IN_AECE,
    ),
    *_over_baselines(
        "Tables 2 and 3",
        "sce",
        "lowest or second-lowest SCE: lower than the second-best baseline",
        "lowest or second",
        rank=2,
        ours=(OURS, "nc_ce"),  # in the paper's tables it is the one or the other
        wanted=lambda key: not key.startswith(NO_SCE),
    ),
    *(
        Claim(
            "Tables 1–3",
            f"lower ECE than the best baseline, all converged, Neural Clamping {how}",
            "ECE of that baseline less Neural Clamping's, in % of the baseline's",
            partial(_over_best, figure="ece", baselines=BASELINES, ours=(ours,)),
            1,
        )
        for ours, how in (("nc_code", "by its released code"), ("nc_converged", "too"))
    ),
    Claim(
        "Tables 1–3",
        "lower ECE than the uncalibrated network",
        "ECE of the network less Neural Clamping's (FL), points",
        partial(_over, figure="ece", other="uncalibrated"),
    ),
    Claim(
        "Tables 1–3, read as no loss",
        f"accuracy is kept (no more than {100 * KEPT:g} points lower)",
        f"change of accuracy plus {100 * KEPT:g} points",
        _accuracy_kept,
    ),
    Claim(
        "Tables 1–3",
        "accuracy is improved",
        "change of accuracy, points",
        partial(_over, figure="accuracy", other="uncalibrated", sign=-100),
    ),
    Claim(
        "Beyond the paper",
        "λ chosen by calibration ECE too has lower ECE than λ by the rule",
        "ECE with γ alone chosen less that with γ and λ chosen, points",
        partial(_over, figure="ece", other="nc_fl", ours="nc_searched"),
    ),
    Claim(
        "§3.3",
        "focal loss has lower ECE than cross-entropy",
        "ECE with γ = 0 less that with the γ chosen as in the tables, points",
        partial(_over, figure="ece", other="nc_ce"),
    ),
    *(
        Claim(
            "Table 4",
            f"δ and T together have lower {title} than {words}",
            f"{title} of {words} less both, points",
            partial(_ablation, other=other, figure=figure),
            printed=_printed_ablation(other, "both", figure),
        )
        for other, words, figure, title in (
            ("input only", "δ alone", "ece", "ECE"),
            ("output only", "T alone", "ece", "ECE"),
            ("output only", "T alone", "aece", "AECE"),
            ("temperature (focal)", "temperature scaling by focal loss", "ece", "ECE"),
        )
    ),
    *(
        Claim(
            "Table 4",
            f"temperature scaling by focal loss has greater {figure.upper()} than {words}",
            f"{figure.upper()} of temperature scaling by focal loss less that of {words}, points",
            partial(_ablation, other="temperature (focal)", than=than, figure=figure),
            digits,
            _printed_ablation("temperature (focal)", than, figure, digits),
        )
        for than, words in (("temperature", "that by likelihood"), ("output only", "the T of the joint fit alone"))
        for figure, digits in (("ece", 2), ("aece", 2), ("sce", 4))
    ),
    Claim(
        "Table 4",
        "the fitted δ raises the entropy at the same T",
        "entropy of both less that of T alone, nats",
        partial(_ablation, other="output only", figure="entropy", scale=-1),
        4,
        _printed_ablation("both", "output only", "entropy", 4),
    ),
    Claim(
        "Figure 2",
        "entropy rises with γ",
        "Kendall's τ of γ and entropy",
        partial(_sweep, of_run=_entropy_trend),
        discrete=True,
    ),
    Claim(
        "Figure 2",
        "ECE is least at a γ inside",
        "ECE at γ = 0 or γ = 1 less that at a γ inside, both chosen as in the tables, points",
        partial(_sweep, of_run=_inside_minimum),
    ),
    Claim(
        "Figure 3",
        "the data-driven start ends lower",
        "ECE from random starts less the data's, points",
        _starts,
        one_split=True,
    ),
    *(
        Claim(
            "Figure 3",
            f"both starts have a similar mean {title} (within {100 * SIMILAR:g} %)",
            f"{100 * SIMILAR:g} less the difference of the starts, in % of their mean, its sign by the other seeds",
            partial(_starts_alike, figure=figure),
            1,
            one_split=True,
        )
        for figure, title in zip(COMPARED, ("entropy", "ECE", "AECE", "SCE"), strict=True)
    ),
    *(
        Claim(
            "Figure 3",
            f"the data-driven start varies less in {title}",
            f"distance from the mean {title} of its start, random starts less the data's, not in pairs, {unit}",
            partial(_starts_spread, figure=figure, scale=scale),
            digits,
            one_split=True,
        )
        for figure, title, unit, scale, digits in (
            ("entropy", "entropy", "nats", 1, 4),
            *((figure, figure.upper(), "points", 100, 3) for figure in ("ece", "aece", "sce")),
        )
    ),
    Claim(
        "Appendix F",
        "the closed form, scaled, has lower ECE than temperature scaling",
        "ECE of temperature scaling less the closed form's, points",
        partial(_over, figure="ece", other="temperature", ours="closed_scaled"),
    ),
    Claim(
        "§4.3",
        f"the closed form, scaled, is comparable to the trained δ (ECE no more than {100 * SIMILAR:g} % greater)",
        f"{100 * (1 + SIMILAR):g} less the closed form's ECE in % of Neural Clamping's (FL)",
        _closed_comparable,
        1,
    ),
    Claim(
        "Appendix D",
        f"lower ECE than the best baseline with {BINS[0]} to {BINS[-1]} bins too",
        "ECE of the best baseline less Neural Clamping's (FL), mean over other numbers of bins than 15, points",
        _other_bins,
    ),
    Claim(
        "Beyond the paper",
        "the number of bins hardly changes the order of methods (τ above ½)",
        "mean Kendall's τ with the order at 15 bins, less ½",
        _order_by_bins,
        discrete=True,
    ),
)
