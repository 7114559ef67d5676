"""What the rethinking study measures of each seed, as evidence for or against a claim: functions of rows and a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from trueup_studies.claims import by_run, paired, trend
from trueup_studies.grid import Options, Rows
from trueup_studies.papers.rethinking.rethinking_presets import REFERENCE, SWEEP, Growth, Plan
from trueup_studies.papers.rethinking.rethinking_study import choose_coefficients, selectors
from trueup_studies.statistics import LEVEL, paired_t_test

INVERSE = "inverse_focal"
LATE = 0.05
"""Of the epochs: what begins so soon after the first drop of the learning rate begins with it."""
FLAT = 0.5
"""A Kendall's τ below is no clear trend."""
MUCH = 2.0
"""A wrong coefficient costs much if it has this many times the ECE of the best."""


def learned_rows(rows: Rows) -> list[Mapping[str, Any]]:
    """Those of losses and coefficients of which the tables could choose: the others' ECE says nothing.

    >>> seen = (0.01, 0.9), (0.1, 0.1)
    >>> rows = [{"loss": "norm", "coefficient": c, "val_ece": 0.1, "val_accuracy": a} for c, a in seen]
    >>> [row["coefficient"] for row in learned_rows(rows)]
    [0.01]
    """
    pairs = dict.fromkeys((row["loss"], row["coefficient"]) for row in rows)
    learned = {(loss, value) for loss, value in pairs if choose_coefficients(rows, "val_accuracy", {loss: (value,)})}
    return [row for row in rows if (row["loss"], row["coefficient"]) in learned]


def best_coefficient(rows: Rows, growth: Growth, loss: str, by: str) -> float | None:
    """The best coefficient of a loss, of rows of one size of the training set; None if some were not tried.

    The best of some coefficients is not the best.
    """
    tried = {row["coefficient"] for row in rows if row["loss"] == loss}
    best = choose_coefficients(rows, by, growth.coefficients).get(loss)
    return float(best[0]["coefficient"]) if best and tried >= {*growth.coefficients[loss]} else None


def _without_gaps(values: Mapping[Any, Mapping[Any, Any]]) -> dict[Any, Mapping[Any, Any]]:
    """Those that lack no run: one training that failed must not take the seed from all others."""
    most = max(map(len, values.values()), default=0)
    return {name: by for name, by in values.items() if len(by) == most}


def beside_reference(
    rows: Rows,
    plan: Plan,
    options: Options,
    *,
    loss: str,
    figure: str,
    scale: float = 100,
    repaired: bool = False,
    plus: float = 0.0,
) -> list[float]:
    """The figure of a loss, its coefficient chosen, less that of cross-entropy; a negative scale turns it round."""
    chosen = choose_coefficients(rows, selectors(options)[repaired], plan.candidates)
    if not {loss, REFERENCE} <= chosen.keys():
        return []
    ours, theirs = (by_run(chosen[name], lambda row: 0, figure).get(0, {}) for name in (loss, REFERENCE))
    return [value + plus for value in paired(ours, theirs, scale=scale)]


def with_few(rows: Rows, plan: Plan, options: Options, *, loss: str, figure: str) -> list[float]:
    """The same with a repair that saw the fewest validation samples."""
    few = [{**row, "few": _by_samples(row, figure, min)} for row in rows]
    return beside_reference(few, plan, options, loss=loss, figure="few")


def _by_samples(row: Mapping[str, Any], figure: str, end: Callable[[set[int]], int]) -> float:
    """A figure after a repair that saw the fewest or the most validation samples, the mean over draws of them."""
    size = end({line["size"] for line in row["validation_sizes"]})
    return float(np.mean([line[figure] for line in row["validation_sizes"] if line["size"] == size]))


def _curves(rows: Rows, plan: Plan, loss: str) -> dict[float, np.ndarray]:
    """Coefficient → the optimal ECE of each seed (rows) after each epoch (columns), of coefficients without gaps."""
    runs: dict[float, dict[int, list[float]]] = {value: {} for value in plan.candidates[loss]}
    for row in rows:
        if row["loss"] == loss and row["coefficient"] in runs:
            runs[row["coefficient"]][row["seed"]] = row["optimal_ece"]
    whole = _without_gaps(runs)
    seeds = sorted(set.intersection(*(set(by) for by in whole.values())))
    return {value: np.array([by[seed] for seed in seeds]) for value, by in whole.items()} if len(seeds) > 1 else {}


def _least_epochs(table: np.ndarray) -> np.ndarray:
    """For each seed the epoch, from 0, where the others have their least on average."""
    return np.array([np.delete(table, seed, axis=0).mean(axis=0).argmin() for seed in range(len(table))])


def _rises(table: np.ndarray) -> np.ndarray:
    """For each seed the optimal ECE of the last epochs less that of the epoch where the others have their least.

    The least of a seed's own noisy curve would lie below its end whether or not it rises.
    """
    last = max(1, table.shape[1] // 10)
    return np.asarray(table[:, -last:].mean(axis=1) - table[np.arange(len(table)), _least_epochs(table)])


def rise(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """How far the optimal ECE rises, the mean over coefficients."""
    rises = [_rises(table) for table in _curves(rows, plan, loss).values()]
    return (100 * np.mean(rises, axis=0)).tolist() if rises else []


def _rising_curves(rows: Rows, plan: Plan, loss: str) -> dict[float, np.ndarray]:
    """Those whose rise is statistically significant, with Bonferroni's correction for the number of coefficients.

    A curve that only wavers has a least epoch too, which says nothing of when it rises.
    """
    curves = _curves(rows, plan, loss)
    rises = {value: _rises(table) for value, table in curves.items()}
    level = LEVEL / max(1, len(curves))
    return {value: curves[value] for value, each in rises.items() if each.mean() > 0 and paired_t_test(each) < level}


def rises_in_time(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """The first drop of the learning rate, and a little more, less the epoch of the least optimal ECE; in per cent.

    Of each seed's own curves: where the others have theirs would be nearly the same epoch for every seed.
    """
    drop = first_drop(plan) + LATE
    epochs = [1 + table.argmin(axis=1) for table in _rising_curves(rows, plan, loss).values()]
    return (100 * (drop - np.mean(epochs, axis=0) / plan.epochs)).tolist() if epochs else []


def first_drop(plan: Plan) -> float:
    """When the learning rate drops first, as a share of the epochs."""
    return float(plan.how.get("drops", (0.5,))[0])


def stronger_rises_more(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """Kendall's τ of the coefficient and how far the optimal ECE rises, seed by seed."""
    rises = {value: _rises(table) for value, table in _curves(rows, plan, loss).items()}
    return [trend(list(rises), list(each)) for each in zip(*rises.values(), strict=True)] if len(rises) > 2 else []


def stronger_rises_earlier(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """Minus Kendall's τ of the coefficient and the epoch of the least optimal ECE, seed by seed."""
    epochs = {value: table.argmin(axis=1) for value, table in _rising_curves(rows, plan, loss).items()}
    return [-trend(list(epochs), list(each)) for each in zip(*epochs.values(), strict=True)] if len(epochs) > 2 else []


def stays_high(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """The optimal ECE of the strongest coefficient less that of cross-entropy, after the last epoch."""
    last = [{**row, "last": row["optimal_ece"][-1]} for row in rows]
    values = _without_gaps(by_run(last, lambda row: (row["loss"], row["coefficient"]), "last"))
    strongest = loss, max((value for value in plan.candidates[loss] if (loss, value) in values), default=0)
    if not {strongest, (REFERENCE, 0)} <= values.keys():
        return []
    return paired(values[strongest], values[REFERENCE, 0], scale=100)


def stronger_is_worse(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """Kendall's τ of the coefficient and the optimal ECE after the last epoch, seed by seed."""
    values = by_run(
        [{**r, "last": r["optimal_ece"][-1]} for r in rows if r["loss"] == loss], lambda r: r["coefficient"], "last"
    )
    return _trend(values, [value for value in plan.candidates[loss] if value in values])


def _trend(values: Mapping[Any, Mapping[Any, float]], order: Sequence[Any]) -> list[float]:
    """Kendall's τ of each seed's numbers with an order, without what lacks a run."""
    whole = _without_gaps({name: values[name] for name in order})
    if len(whole) < 3:
        return []
    seeds = sorted(set.intersection(*(set(by) for by in whole.values())))
    return [trend(range(len(whole)), [by[s] for by in whole.values()]) for s in seeds]


def temperatures_rise(rows: Rows, plan: Plan, options: Options) -> list[float]:
    """Kendall's τ of the order of figure 6 and the fitted temperature, seed by seed."""
    values = by_run(rows, lambda row: (row["loss"], row["coefficient"]), "temperature")
    return _trend(values, [pair for pair in SWEEP if pair in values])


def logit_gaps(rows: Rows, plan: Plan, options: Options, *, loss: str, what: str) -> list[float]:
    """What cross-entropy has more than a loss: the range of greatest logits, or the AUC of early and late learned."""
    measured = [{**row, "logits": row["max_logits"][what]} for row in rows if row["max_logits"][what] is not None]
    return beside_reference(measured, plan, options, loss=loss, figure="logits", scale=-1)


def sensitivity(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """The raw ECE of the worst coefficient less twice that of the best, both by the other seeds.

    The worst of a seed's own noisy figures would lie above the best whether or not the coefficient matters.
    """
    values = by_run([row for row in rows if row["loss"] == loss], lambda row: row["coefficient"], "ece")
    own = _without_gaps({value: values[value] for value in plan.candidates[loss] if value in values})
    seeds = sorted(set.intersection(*(set(by) for by in own.values()))) if len(own) > 1 else []
    costs = []
    for seed in seeds if len(seeds) > 1 else []:
        others = {value: sum(by[other] for other in seeds if other != seed) for value, by in own.items()}
        best, worst = (end(others, key=others.__getitem__) for end in (min, max))
        costs.append(100 * (own[worst][seed] - MUCH * own[best][seed]))
    return costs


def histograms_gain_more(rows: Rows, plan: Plan, options: Options) -> list[float]:
    """How far the ECE falls from the fewest validation samples to all, with histogram binning less with a temperature.

    One size of them shows no fall.
    """
    plain = [row for row in rows if row["loss"] == REFERENCE]
    several = [row for row in plain if len({line["size"] for line in row["validation_sizes"]}) > 1]
    histogram, temperature = (
        {row["seed"]: _by_samples(row, figure, min) - _by_samples(row, figure, max) for row in several}
        for figure in ("ece_histogram", "ece_temperature")
    )
    return paired(histogram, temperature, scale=100)


def above_focal(rows: Rows, plan: Plan, options: Options) -> list[float]:
    """The share of pairs of γ̄ and γ of figure 6 whose raw ECE is greater with inverse focal loss, less a half."""
    known = by_run(rows, lambda row: (row["loss"], row["coefficient"]), "ece")
    values = _without_gaps({pair: known[pair] for pair in SWEEP if pair in known})
    inverse, focal = ([by for (name, _), by in values.items() if name == loss] for loss in (INVERSE, "focal"))
    if not inverse or not focal:
        return []
    seeds = sorted(set.intersection(*(set(by) for by in (*inverse, *focal))))
    return [float(np.mean([a[seed] > b[seed] for a in inverse for b in focal])) - 0.5 for seed in seeds]


def descends_then_ascends(rows: Rows, plan: Plan, options: Options) -> list[float]:
    """The ECE with temperature scaling of the better end of the sweep less that of the best inside.

    Both by the other seeds: the better by a seed's own noise would lie too low.
    """
    known = by_run(rows, lambda row: (row["loss"], row["coefficient"]), "ece_temperature")
    values = _without_gaps({pair: known[pair] for pair in SWEEP if pair in known})
    ends = [SWEEP[0], SWEEP[-1]]
    between = [pair for pair in SWEEP[1:-1] if pair in values]
    if not between or not {*ends} <= values.keys():
        return []
    seeds = sorted(set.intersection(*(set(by) for by in values.values())))
    differences = []
    for seed in seeds if len(seeds) > 1 else []:
        others = {pair: sum(by[other] for other in seeds if other != seed) for pair, by in values.items()}
        end, inside = (min(some, key=others.__getitem__) for some in (ends, between))
        differences.append(100 * (values[end][seed] - values[inside][seed]))
    return differences


def no_trend(rows: Rows, plan: Plan, options: Options) -> list[float]:
    """What is no clear trend less Kendall's τ of γ̄ and ECE with histogram binning, cross-entropy being γ̄ = 0.

    With the sign that τ has in the other seeds: that of its own would make a trend of noise.
    """
    values = by_run(rows, lambda row: (row["loss"], row["coefficient"]), "ece_histogram")
    taus = np.array(_trend(values, [pair for pair in SWEEP if pair[0] != "focal" and pair in values]))
    return [FLAT - float(np.sign(taus.sum() - tau) * tau) for tau in taus] if len(taus) > 1 else []


def strongest_loses(rows: Rows, plan: Plan, options: Options) -> list[float]:
    """The accuracy of cross-entropy less that of the inverse focal loss of greatest γ̄."""
    values = by_run(rows, lambda row: (row["loss"], row["coefficient"]), "accuracy")
    strongest = max((pair for pair in values if pair[0] == INVERSE), default=None)
    if strongest is None or (REFERENCE, 0) not in values:
        return []
    return paired(values[REFERENCE, 0], values[strongest], scale=100)
