"""What the paper claims of calibrated and calibratable networks, judged seed by seed.

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
from trueup_studies.papers.rethinking.rethinking_presets import DATA_TITLES, REFERENCE, SWEEP, Plan, plans

Support = Mapping[str, Sequence[float]]

BEST_LOSSES = {"CE": REFERENCE, "inverse focal": evidence.INVERSE, "focal gamma=1": "focal"}
"""The paper's words for the loss of least ECE with temperature scaling → our name; the focal one has γ = 1."""


def _of_each_set(rows: Rows, options: Options, *, of_set: Callable[..., Sequence[float]], **settings: Any) -> Support:
    """A number of each seed, by data set and network."""
    support = {}
    for plan in plans(options):
        if own := evidence.learned_rows(study.main_rows(rows, plan)):
            values = of_set(own, plan, options, **settings)
            tried = {(row["loss"], row["coefficient"]) for row in study.whole_rows(rows, plan)}
            if isinstance(values, Incomplete) and tried >= {*SWEEP}:  # what failed is no rival
                values = list(values)
            more = ", of some of the losses" if isinstance(values, Incomplete) else ""
            more += ", not all coefficients run yet" if study.unfinished_losses(rows, plan) else ""
            support[f"{DATA_TITLES.get(plan.data, plan.data)}, {plan.network}{more}"] = values
    return support


def best_of_the_paper(rows: Rows, plan: Plan, options: Options, *, named: str) -> list[float]:
    """The ECE with temperature scaling of the best other loss of the sweep, less that of the loss the paper names."""
    loss = BEST_LOSSES[named]
    own = plan.candidates if loss == evidence.INVERSE else {loss: (0,) if loss == REFERENCE else (1,)}
    chosen = study.choose_coefficients(rows, study.selectors(options)[1], {loss: own[loss]}).get(loss)
    if chosen is None:
        return []
    mine = loss, chosen[0]["coefficient"]
    rivals = [pair for pair in SWEEP if pair[0] != loss or (loss == "focal" and pair[1] != 1)]
    known = by_run(rows, lambda row: (row["loss"], row["coefficient"]), "ece_temperature")
    values = claims.with_common_runs(known, [*rivals, mine])
    best = claims.least_on_average(values, rivals)
    if best is None or mine not in values:
        return []
    margins = paired(values[best], values[mine], scale=100)
    return margins if all(pair in values for pair in rivals) else Incomplete(margins)


def shrinks_with_data(rows: Rows, options: Options, *, loss: str) -> Support:
    """Minus Kendall's τ of the size of the training set and the coefficient of least validation ECE, seed by seed."""
    support = {}
    for plan in (plan for plan in plans(options) if plan.growth and loss in plan.growth.coefficients):
        growth: Any = plan.growth
        own = [row for row in rows if row["data"] == plan.data]
        taus = []
        for seed in range(growth.seeds):
            of_size = [[row for row in own if row["seed"] == seed and row["sizes"][0] == size] for size in growth.sizes]
            best = [evidence.best_coefficient(alike, growth, loss, study.selectors(options)[0]) for alike in of_size]
            known = [value for value in best if value is not None]
            if len(known) == len(growth.sizes):
                taus.append(-claims.trend(growth.sizes, known))
        support[f"{DATA_TITLES.get(plan.data, plan.data)}, {plan.network}"] = taus
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
    """A share of the accuracy of cross-entropy less the accuracy of the greatest or least coefficient, seed by seed.

    A training that failed counts with the accuracy of chance: to fail is to lose accuracy.
    """
    support = {}
    for plan in plans(options):
        own = by_run(study.whole_rows(rows, plan), lambda row: (row["loss"], row["coefficient"]), "accuracy")
        pair = loss, {"min": min, "max": max}[end](getattr(plan, coefficients).get(loss, (0,)))
        if pair in own and (REFERENCE, 0) in own:
            plain = {seed: share * accuracy for seed, accuracy in own[REFERENCE, 0].items()}
            support[f"{DATA_TITLES.get(plan.data, plan.data)}, {plan.network}"] = paired(plain, own[pair], scale=100)
    return support


OF_EACH_SET = (
    evidence.above_focal, evidence.beside_reference, evidence.descends_then_ascends, evidence.histograms_gain_more,
    evidence.logit_gaps, evidence.no_trend, evidence.rise, evidence.rises_in_time, evidence.sensitivity,
    evidence.stays_high, evidence.stronger_is_worse, evidence.stronger_rises_earlier, evidence.stronger_rises_more,
    evidence.strongest_loses, evidence.temperatures_rise, evidence.with_few, best_of_the_paper,
)  # fmt: skip
SUPPORT: dict[str, Callable[..., Support]] = {
    "accuracy_loss": accuracy_loss,
    "shrinks_with_data": shrinks_with_data,
    **{function.__name__: partial(_of_each_set, of_set=function) for function in OF_EACH_SET},
}
CLAIMS = claims.read_claims(__package__, SUPPORT)
