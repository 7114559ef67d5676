"""Evidence of each seed for the claims of the rethinking paper: functions of rows and a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from pandas import DataFrame, Series

from trueup_studies.claims import by_run, paired, trends
from trueup_studies.grid import Options, Rows
from trueup_studies.papers.rethinking.rethinking_presets import REFERENCE, SWEEP, Growth, Plan
from trueup_studies.papers.rethinking.rethinking_study import choose_coefficients, selectors
from trueup_studies.statistics import LEVEL, paired_t_test

INVERSE = "inverse_focal"
DROP_TOLERANCE = 0.05
"""Share of the epochs; a rise that begins this soon after the first drop of the learning rate begins with the drop."""
FLAT = 0.5
"""A Kendall's τ below this is no clear trend."""
UNCERTAIN = 0.1
"""Share of the rows whose confidence is lowest."""
LARGE_RATIO = 2.0
"""A wrong coefficient costs much if its ECE is this many times that of the best."""


def learned_rows(rows: Rows) -> list[Mapping[str, Any]]:
    """Keep the rows of losses and coefficients that the tables may choose; ECE means nothing for failed networks.

    >>> accuracies = {0.01: 0.9, 0.1: 0.1}
    >>> rows = [{"loss": "norm", "coefficient": c, "val_ece": 0.1, "val_accuracy": a} for c, a in accuracies.items()]
    >>> [row["coefficient"] for row in learned_rows(rows)]
    [0.01]
    """
    pairs = dict.fromkeys((row["loss"], row["coefficient"]) for row in rows)
    learned = {(loss, value) for loss, value in pairs if choose_coefficients(rows, "val_accuracy", {loss: (value,)})}
    return [row for row in rows if (row["loss"], row["coefficient"]) in learned]


def best_coefficient(rows: Rows, growth: Growth, loss: str, by: str) -> float | None:
    """Choose a loss's coefficient from the rows of one training size; None unless all coefficients were tried."""
    tried = {row["coefficient"] for row in rows if row["loss"] == loss}
    best = choose_coefficients(rows, by, growth.coefficients).get(loss)
    return float(best[0]["coefficient"]) if best and tried >= {*growth.coefficients[loss]} else None


def by_seed(rows: Rows, metric: str, order: Sequence[tuple[str, float]] | None = None) -> DataFrame:
    """Tabulate a metric: one row per seed, one column per (loss, coefficient), in the given order.

    Columns that lack a run are left out, so that one failed training does not remove its seed from all others.
    """
    values = by_run(rows, metric, "loss", "coefficient")
    values = {pair: values[pair] for pair in (values if order is None else order) if pair in values}
    most = max(map(len, values.values()), default=0)
    return DataFrame({pair: Series(by) for pair, by in values.items() if len(by) == most}).dropna().sort_index()


def _others(table: DataFrame) -> DataFrame:
    """Sum each column over the other seeds, so that a seed's own noise does not choose for it."""
    return table.sum() - table


def versus_reference(
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
    """Compute a loss's metric, with its chosen coefficient, minus that of cross-entropy; a negative scale flips it."""
    chosen = choose_coefficients(rows, selectors(options)[repaired], plan.candidates)
    if not {loss, REFERENCE} <= chosen.keys():
        return []
    ours, theirs = (by_run(chosen[name], figure, "loss").get(name, {}) for name in (loss, REFERENCE))
    return [value + plus for value in paired(ours, theirs, scale=scale)]


def uncertain_gap(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """Compute confidence minus accuracy of the least confident predictions after temperature scaling."""
    chosen = choose_coefficients(rows, selectors(options)[0], plan.candidates).get(loss, [])
    return [100 * _low_gap(row["reliability_temperature"]) for row in chosen if "reliability_temperature" in row]


def _low_gap(diagram: Mapping[str, Sequence[float]]) -> float:
    """Average confidence minus accuracy over the lowest bins that hold `UNCERTAIN` of the rows or more.

    >>> gap = _low_gap({"count": [0, 5, 10, 85], "confidence": [None, 0.4, 0.6, 0.9], "accuracy": [None, 0.1, 0.6, 1]})
    >>> f"{gap:.2f}"
    '0.10'
    """
    count = np.array(diagram["count"], dtype=float)
    low = (count.cumsum() - count < UNCERTAIN * count.sum()) & (count > 0)
    gaps = np.array(diagram["confidence"], dtype=float) - np.array(diagram["accuracy"], dtype=float)
    return float(np.average(gaps[low], weights=count[low]))


def mean_confidence(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """Compute |mean confidence − accuracy| of cross-entropy minus that of a loss."""
    gaps = []
    for row in (row for row in rows if "reliability" in row):
        shown = {name: np.array(row["reliability"][name], dtype=float) for name in ("count", "confidence", "accuracy")}
        gap = np.nansum(shown["count"] * (shown["confidence"] - shown["accuracy"])) / shown["count"].sum()
        gaps.append({**row, "gap": abs(float(gap))})
    return versus_reference(gaps, plan, options, loss=loss, figure="gap", scale=-100)


def with_few(rows: Rows, plan: Plan, options: Options, *, loss: str, figure: str) -> list[float]:
    """Compute the same after calibration on the fewest validation samples."""
    few = [{**row, "few": _by_samples(row, figure, min)} for row in rows]
    return versus_reference(few, plan, options, loss=loss, figure="few")


def _by_samples(row: Mapping[str, Any], metric: str, end: Callable[[set[int]], int]) -> float:
    """Average a metric over draws of the fewest or the most validation samples."""
    size = end({line["size"] for line in row["validation_sizes"]})
    return float(np.mean([line[metric] for line in row["validation_sizes"] if line["size"] == size]))


def _curves(rows: Rows, plan: Plan, loss: str) -> dict[float, np.ndarray]:
    """Map each coefficient without missing runs to its optimal ECE: one row per seed, one column per epoch."""
    runs: dict[float, dict[int, list[float]]] = {value: {} for value in plan.candidates[loss]}
    for row in rows:
        if row["loss"] == loss and row["coefficient"] in runs and len(row["optimal_ece"]) > 1:
            runs[row["coefficient"]][row["seed"]] = row["optimal_ece"]
    most = max(map(len, runs.values()))
    whole = {value: by for value, by in runs.items() if len(by) == most}
    seeds = sorted(set.intersection(*(set(by) for by in whole.values())))
    return {value: np.array([by[seed] for seed in seeds]) for value, by in whole.items()} if len(seeds) > 1 else {}


def _rises(table: np.ndarray) -> np.ndarray:
    """Compute each seed's optimal ECE in the final epochs minus that in the epoch where the other seeds are lowest.

    The minimum of a seed's own noisy curve would lie below its end whether or not the curve rises.
    """
    final = max(1, table.shape[1] // 10)
    lowest = (table.sum(axis=0) - table).argmin(axis=1)
    return np.asarray(table[:, -final:].mean(axis=1) - table[np.arange(len(table)), lowest])


def rise(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """Average the rise of the optimal ECE over coefficients."""
    rises = [_rises(table) for table in _curves(rows, plan, loss).values()]
    return (100 * np.mean(rises, axis=0)).tolist() if rises else []


def _rising_curves(rows: Rows, plan: Plan, loss: str) -> dict[float, np.ndarray]:
    """Keep the curves that rise significantly, with Bonferroni's correction for the number of coefficients.

    A flat noisy curve has a lowest epoch too, which says nothing about when it rises.
    """
    curves = _curves(rows, plan, loss)
    rises = {value: _rises(table) for value, table in curves.items()}
    level = LEVEL / max(1, len(curves))
    return {value: curves[value] for value, each in rises.items() if each.mean() > 0 and paired_t_test(each) < level}


def rises_in_time(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """Compute the first drop of the learning rate plus `DROP_TOLERANCE`, minus the lowest epoch, in % of the epochs.

    The lowest epoch is of each seed's own curves; that of the other seeds would be nearly the same for every seed.
    """
    drop = first_drop(plan) + DROP_TOLERANCE
    epochs = [1 + table.argmin(axis=1) for table in _rising_curves(rows, plan, loss).values()]
    return (100 * (drop - np.mean(epochs, axis=0) / plan.epochs)).tolist() if epochs else []


def first_drop(plan: Plan) -> float:
    """Return the first drop of the learning rate as a share of the epochs."""
    return float(plan.how.get("drops", (0.5,))[0])


def stronger_rises_more(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """Compute Kendall's τ of the coefficient and the rise of the optimal ECE, for each seed."""
    rises = {value: _rises(table) for value, table in _curves(rows, plan, loss).items()}
    return trends((list(rises), list(each)) for each in zip(*rises.values(), strict=True)) if len(rises) > 2 else []


def stronger_rises_earlier(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """Compute minus Kendall's τ of the coefficient and the lowest epoch, for each seed."""
    epochs = {value: table.argmin(axis=1) for value, table in _rising_curves(rows, plan, loss).items()}
    runs = zip(*epochs.values(), strict=True)
    return trends(((list(epochs), list(each)) for each in runs), sign=-1) if len(epochs) > 2 else []


def _final_ece(rows: Rows) -> list[Mapping[str, Any]]:
    return [{**row, "final": row["optimal_ece"][-1]} for row in rows]


def stays_high(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """Compute the final optimal ECE of the strongest coefficient minus that of cross-entropy."""
    table = by_seed(_final_ece(rows), "final")
    strongest = loss, max((value for value in plan.candidates[loss] if (loss, value) in table), default=0)
    if not {strongest, (REFERENCE, 0)} <= {*table}:
        return []
    return (100 * (table[strongest] - table[REFERENCE, 0])).tolist()


def stronger_is_worse(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """Compute Kendall's τ of the coefficient and the final optimal ECE, for each seed."""
    return _trends(by_seed(_final_ece(rows), "final", [(loss, value) for value in plan.candidates[loss]]))


def _trends(table: DataFrame) -> list[float]:
    """Compute Kendall's τ of each seed's numbers and the order of the columns."""
    count = table.shape[1]
    return trends((range(count), list(values)) for values in table.to_numpy()) if count > 2 else []


def temperatures_rise(rows: Rows, plan: Plan, options: Options) -> list[float]:
    """Compute Kendall's τ of the order of figure 6 and the fitted temperature, for each seed."""
    return _trends(by_seed(rows, "temperature", SWEEP))


def logit_gaps(rows: Rows, plan: Plan, options: Options, *, loss: str, what: str) -> list[float]:
    """Compute cross-entropy minus a loss: the range of the largest logits, or the AUC of early and late learned."""
    measured = [{**row, "logits": row["max_logits"][what]} for row in rows if row["max_logits"][what] is not None]
    return versus_reference(measured, plan, options, loss=loss, figure="logits", scale=-1)


def sensitivity(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """Compute the raw ECE of the worst coefficient minus twice that of the best, both chosen by the other seeds."""
    table = by_seed(rows, "ece", [(loss, value) for value in plan.candidates[loss]])
    if table.shape[1] < 2 or len(table) < 2:
        return []
    best, worst = _others(table).idxmin(axis=1), _others(table).idxmax(axis=1)
    return [100 * float(table.at[s, worst[s]] - LARGE_RATIO * table.at[s, best[s]]) for s in table.index]


def histograms_gain_more(rows: Rows, plan: Plan, options: Options) -> list[float]:
    """Compute the fall of ECE from the fewest validation samples to all: histogram binning minus temperature scaling.

    Runs with one size only are left out.
    """
    plain = [row for row in rows if row["loss"] == REFERENCE]
    several = [row for row in plain if len({line["size"] for line in row["validation_sizes"]}) > 1]
    histogram, temperature = (
        {row["seed"]: _by_samples(row, metric, min) - _by_samples(row, metric, max) for row in several}
        for metric in ("ece_histogram", "ece_temperature")
    )
    return paired(histogram, temperature, scale=100)


def above_focal(rows: Rows, plan: Plan, options: Options) -> list[float]:
    """Compute the share of (γ̄, γ) pairs of figure 6 whose raw ECE is higher with inverse focal loss, minus ½."""
    table = by_seed(rows, "ece", SWEEP)
    inverse, focal = ([pair for pair in table if pair[0] == loss] for loss in (INVERSE, "focal"))
    if not inverse or not focal:
        return []
    return (np.mean([table[a] > table[b] for a in inverse for b in focal], axis=0) - 0.5).tolist()


def descends_then_ascends(rows: Rows, plan: Plan, options: Options) -> list[float]:
    """Compute the ECE after temperature scaling at the better end of the sweep minus the best inside.

    Both are chosen by the other seeds.
    """
    table = by_seed(rows, "ece_temperature", SWEEP)
    ends, between = [SWEEP[0], SWEEP[-1]], [pair for pair in SWEEP[1:-1] if pair in table]
    if not between or not {*ends} <= {*table} or len(table) < 2:
        return []
    end, inside = (_others(table)[pairs].idxmin(axis=1) for pairs in (ends, between))
    return [100 * float(table.at[s, end[s]] - table.at[s, inside[s]]) for s in table.index]


def no_trend(rows: Rows, plan: Plan, options: Options) -> list[float]:
    """Compute `FLAT` minus Kendall's τ of γ̄ and ECE with histogram binning; cross-entropy counts as γ̄ = 0.

    τ gets the sign that it has in the other seeds; its own sign would turn noise into a trend.
    """
    taus = np.array(_trends(by_seed(rows, "ece_histogram", [pair for pair in SWEEP if pair[0] != "focal"])))
    return (FLAT - np.sign(taus.sum() - taus) * taus).tolist() if len(taus) > 1 else []


def strongest_loses(rows: Rows, plan: Plan, options: Options) -> list[float]:
    """Compute the accuracy of cross-entropy minus that of inverse focal loss with the largest γ̄."""
    values = by_run(rows, "accuracy", "loss", "coefficient")
    strongest = max((pair for pair in values if pair[0] == INVERSE), default=None)
    if strongest is None or (REFERENCE, 0) not in values:
        return []
    return paired(values[REFERENCE, 0], values[strongest], scale=100)
