"""The claims of the rethinking paper about calibrated and calibratable networks, judged seed by seed.

Wang, Feng & Zhang (2021), Rethinking calibration of deep neural networks: do not be afraid of overconfidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

from trueup_studies import claims
from trueup_studies.claims import Incomplete, by_run, paired
from trueup_studies.grid import Options, Rows
from trueup_studies.papers.rethinking import rethinking_evidence as evidence
from trueup_studies.papers.rethinking import rethinking_study as study
from trueup_studies.papers.rethinking.rethinking_presets import REFERENCE, SWEEP, Plan, plans

Support = Mapping[str, Sequence[float]]

BEST_LOSSES = {"CE": REFERENCE, "inverse focal": evidence.INVERSE, "focal gamma=1": "focal"}
"""The paper's name of the loss with the lowest ECE after temperature scaling → our name; the focal one has γ = 1."""


def _by_plan(rows: Rows, options: Options, *, of_plan: Callable[..., Sequence[float]], **settings: Any) -> Support:
    """Compute the evidence of each data set and network, one number per seed."""
    support = {}
    for plan in plans(options):
        if learned := evidence.learned_rows(study.main_rows(rows, plan)):
            values = of_plan(learned, plan, options, **settings)
            tried = {(row["loss"], row["coefficient"]) for row in study.whole_rows(rows, plan)}
            if isinstance(values, Incomplete) and tried >= {*SWEEP}:  # losses whose training failed do not compete
                values = list(values)
            suffix = ", of some of the losses" if isinstance(values, Incomplete) else ""
            suffix += ", not all coefficients run yet" if study.unfinished_losses(rows, plan) else ""
            support[f"{plan.title}, {plan.network}{suffix}"] = values
    return support


def best_of_the_paper(rows: Rows, plan: Plan, options: Options, *, named: str) -> list[float]:
    """Compute the ECE after temperature scaling of the best other loss of the sweep, minus that of the paper's loss."""
    loss = BEST_LOSSES[named]
    coefficients = plan.candidates[loss] if loss == evidence.INVERSE else (0,) if loss == REFERENCE else (1,)
    chosen = study.choose_coefficients(rows, study.selectors(options)[1], {loss: coefficients}).get(loss)
    if chosen is None:
        return []
    mine = loss, chosen[0]["coefficient"]
    rivals = [pair for pair in SWEEP if pair[0] != loss or (loss == "focal" and pair[1] != 1)]
    known = by_run(rows, "ece_temperature", "loss", "coefficient")
    values = claims.with_common_runs(known, [*rivals, mine])
    best = claims.least_on_average(values, rivals)
    if best is None or mine not in values:
        return []
    margins = paired(values[best], values[mine], scale=100)
    return margins if all(pair in values for pair in rivals) else Incomplete(margins)


def shrinks_with_data(rows: Rows, options: Options, *, loss: str) -> Support:
    """Compute minus Kendall's τ of the training size and the coefficient with the lowest validation ECE, per seed."""
    support = {}
    for plan in plans(options):
        growth = plan.growth
        if growth is None or loss not in growth.coefficients:
            continue
        runs = []
        for seed in range(growth.seeds):
            best = [
                evidence.best_coefficient(
                    [row for row in rows if (row["data"], row["seed"], row["sizes"][0]) == (plan.data, seed, size)],
                    growth,
                    loss,
                    study.selectors(options)[0],
                )
                for size in growth.sizes
            ]
            known = [value for value in best if value is not None]
            if len(known) == len(growth.sizes):
                runs.append((growth.sizes, known))
        support[f"{plan.title}, {plan.network}"] = claims.trends(runs, sign=-1)
    return support


def accuracy_loss(
    rows: Rows,
    options: Options,
    *,
    loss: str,
    coefficients: Literal["candidates", "negative"],
    end: Literal["min", "max"],
    share: float = 1.0,
) -> Support:
    """Compute a share of cross-entropy's accuracy minus the accuracy of the largest or smallest coefficient, per seed.

    A failed training counts with the accuracy of random guessing.
    """
    support = {}
    for plan in plans(options):
        accuracies = by_run(study.whole_rows(rows, plan), "accuracy", "loss", "coefficient")
        pair = loss, {"min": min, "max": max}[end](getattr(plan, coefficients).get(loss, (0,)))
        if pair in accuracies and (REFERENCE, 0) in accuracies:
            plain = {seed: share * accuracy for seed, accuracy in accuracies[REFERENCE, 0].items()}
            support[f"{plan.title}, {plan.network}"] = paired(plain, accuracies[pair], scale=100)
    return support


BY_PLAN = (
    evidence.above_focal, evidence.versus_reference, evidence.descends_then_ascends, evidence.histograms_gain_more,
    evidence.logit_gaps, evidence.mean_confidence, evidence.no_trend, evidence.rise, evidence.rises_in_time,
    evidence.sensitivity, evidence.stays_high, evidence.stronger_is_worse, evidence.stronger_rises_earlier,
    evidence.stronger_rises_more, evidence.strongest_loses, evidence.temperatures_rise, evidence.uncertain_gap,
    evidence.with_few, best_of_the_paper,
)  # fmt: skip
SUPPORT: dict[str, Callable[..., Support]] = {
    "accuracy_loss": accuracy_loss,
    "shrinks_with_data": shrinks_with_data,
    **{function.__name__: partial(_by_plan, of_plan=function) for function in BY_PLAN},
}
CLAIMS = claims.read_claims(__package__, SUPPORT)
"""The claims of claims.toml."""
