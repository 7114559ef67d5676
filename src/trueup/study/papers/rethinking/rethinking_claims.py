"""What the paper claims of calibrated and calibratable networks, judged seed by seed.

Wang, Feng & Zhang (2021), Rethinking calibration of deep neural networks: do not be afraid of overconfidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from scipy.stats import kendalltau

from trueup.study.claims import Claim, by_run, paired
from trueup.study.grid import Options, Rows
from trueup.study.papers.rethinking.rethinking_presets import DATA_TITLES, REFERENCE, SWEEP, TITLES, Plan, plans
from trueup.study.papers.rethinking.rethinking_study import choose_coefficients, main_rows, selectors, whole_rows

Support = Mapping[str, Sequence[float]]

REGULARISED = ("label_smoothing", "norm", "focal")
INVERSE = "inverse_focal"


def _of_each_set(rows: Rows, options: Options, *, of_set: Callable[[Rows, Plan, Options], Sequence[float]]) -> Support:
    """A number of each seed, by data set and network."""
    support = {}
    for plan in plans(options):
        if own := main_rows(rows, plan):
            support[f"{DATA_TITLES.get(plan.data, plan.data)}, {plan.network}"] = of_set(own, plan, options)
    return support


def _beside_reference(
    rows: Rows,
    plan: Plan,
    options: Options,
    *,
    loss: str,
    figure: str,
    scale: float = 100,
    repaired: bool = False,
) -> list[float]:
    """The figure of a loss, its coefficient chosen, less that of cross-entropy; a negative scale turns it round."""
    chosen = choose_coefficients(rows, selectors(options)[repaired], plan.candidates)
    if not {loss, REFERENCE} <= chosen.keys():
        return []
    ours, theirs = (by_run(chosen[name], lambda row: 0, figure)[0] for name in (loss, REFERENCE))
    return paired(ours, theirs, scale=scale)


def _with_few(rows: Rows, plan: Plan, options: Options, *, loss: str, figure: str) -> list[float]:
    """The same with a repair that saw the fewest validation samples."""
    few = [{**row, "few": row["validation_sizes"][0][figure]} for row in rows]
    return _beside_reference(few, plan, options, loss=loss, figure="few")


def _rise(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """The optimal ECE of the last epochs less that of the epoch where the other seeds have their least.

    The least of a seed's own noisy curve would lie below its end whether or not it rises.
    """
    ends = []
    for value in plan.candidates[loss]:
        curves = [r["optimal_ece"] for r in rows if r["loss"] == loss and r["coefficient"] == value]
        if len(curves) < 2:
            return []
        table = np.array(curves)
        last = max(1, table.shape[1] // 10)
        lowest = [np.delete(table, seed, axis=0).mean(axis=0).argmin() for seed in range(len(table))]
        ends.append(table[:, -last:].mean(axis=1) - table[np.arange(len(table)), lowest])
    return (100 * np.mean(ends, axis=0)).tolist() if ends else []


def _stronger_is_worse(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """Kendall's τ of the coefficient and the optimal ECE after the last epoch, seed by seed."""
    values = by_run(
        [{**r, "last": r["optimal_ece"][-1]} for r in rows if r["loss"] == loss], lambda r: r["coefficient"], "last"
    )
    return _trend(values, [value for value in plan.candidates[loss] if value in values])


def _trend(values: Mapping[Any, Mapping[Any, float]], order: Sequence[Any]) -> list[float]:
    """Kendall's τ of each seed's numbers with an order."""
    if len(order) < 3:
        return []
    seeds = sorted(set.intersection(*(set(values[name]) for name in order)))
    return [float(kendalltau(range(len(order)), [values[name][s] for name in order]).statistic) for s in seeds]


def _temperatures(rows: Rows, plan: Plan, options: Options) -> list[float]:
    values = by_run(rows, lambda row: (row["loss"], row["coefficient"]), "temperature")
    return _trend(values, [pair for pair in SWEEP if pair in values])


def _logits(rows: Rows, plan: Plan, options: Options, *, loss: str, what: str) -> list[float]:
    """What cross-entropy has more than a loss: the range of greatest logits, or the AUC of early and late learned."""
    measured = [{**row, "logits": row["max_logits"][what]} for row in rows if row["max_logits"][what] is not None]
    return _beside_reference(measured, plan, options, loss=loss, figure="logits", scale=-1)


def _sensitivity(rows: Rows, plan: Plan, options: Options, *, loss: str) -> list[float]:
    """The raw ECE of the worst coefficient less that of cross-entropy, the worst by the other seeds.

    The worst of a seed's own noisy figures would lie above cross-entropy whether or not the coefficient matters.
    """
    values = by_run(rows, lambda row: (row["loss"], row["coefficient"]), "ece")
    own = [(loss, value) for value in plan.candidates[loss] if (loss, value) in values]
    if not own or (REFERENCE, 0) not in values:
        return []
    seeds = sorted(set.intersection(*(set(values[pair]) for pair in (*own, (REFERENCE, 0)))))
    costs = []
    for seed in seeds if len(seeds) > 1 else []:
        worst = max(own, key=lambda pair: sum(values[pair][other] for other in seeds if other != seed))
        costs.append(100 * (values[worst][seed] - values[REFERENCE, 0][seed]))
    return costs


def _shrinks_with_data(rows: Rows, options: Options, *, loss: str) -> Support:
    """Minus Kendall's τ of the size of the training set and the coefficient of least validation ECE, seed by seed."""
    support = {}
    for plan in (plan for plan in plans(options) if plan.growth and loss in plan.growth.coefficients):
        growth: Any = plan.growth
        wanted = {*growth.coefficients[loss]}
        own = [row for row in rows if row["data"] == plan.data and row["loss"] == loss]
        taus = []
        for seed in range(growth.seeds):
            best = []
            for size in growth.sizes:
                alike = [row for row in own if row["seed"] == seed and row["sizes"][0] == size]
                alike = [row for row in alike if row["coefficient"] in wanted]
                if len({row["coefficient"] for row in alike}) == len(wanted):
                    best.append(min(alike, key=lambda row: row[selectors(options)[0]])["coefficient"])
            if len(best) == len(growth.sizes):
                tau = kendalltau(growth.sizes, best).statistic
                taus.append(0.0 if np.isnan(tau) else -float(tau))  # NaN: the same coefficient at every size
        support[f"{DATA_TITLES.get(plan.data, plan.data)}, {plan.network}"] = taus
    return support


def _negative(rows: Rows, options: Options, *, loss: str, which: Callable[[Sequence[float]], float]) -> Support:
    """The accuracy of cross-entropy less that of one of the negative coefficients, seed by seed."""
    support = {}
    for plan in plans(options):
        own = by_run(whole_rows(rows, plan), lambda row: (row["loss"], row["coefficient"]), "accuracy")
        pair = (loss, which(plan.negative.get(loss, (0,))))
        if pair in own and (REFERENCE, 0) in own:
            support[f"{DATA_TITLES.get(plan.data, plan.data)}, {plan.network}"] = paired(
                own[REFERENCE, 0], own[pair], scale=100
            )
    return support


def _claim(source: str, text: str, measured: str, of_set: Any, printed: str = "") -> Claim:
    return Claim(source, text, measured, partial(_of_each_set, of_set=of_set), printed=printed)


def _in_text(title: str) -> str:
    """A title inside a sentence.

    >>> _in_text("Label Smoothing"), _in_text("L1 Norm")
    ('label smoothing', 'L1 norm')
    """
    return " ".join(word if any(map(str.isdigit, word)) else word.lower() for word in title.split())


def _per_loss(name: str) -> list[Claim]:
    title = TITLES[name]
    less = f"ECE of cross-entropy less that of {_in_text(title)}, points"
    more = f"ECE of {_in_text(title)} less that of cross-entropy, points"
    return [
        _claim(
            "Table 1",
            f"{title} is better calibrated",
            less,
            partial(_beside_reference, loss=name, figure="ece", scale=-100),
        ),
        *(
            _claim(
                "Table 2",
                f"{title} is less calibratable by {words}",
                more,
                partial(_beside_reference, loss=name, figure=figure),
            )
            for figure, words in (
                ("ece_temperature", "temperature scaling"),
                ("ece_histogram", "histogram binning"),
                ("ece_temperature_histogram", "histogram binning after temperature scaling"),
            )
        ),
        _claim(
            "Table 2",
            f"{title} is less calibratable by temperature scaling, its coefficient chosen for that",
            more,
            partial(_beside_reference, loss=name, figure="ece_temperature", repaired=True),
        ),
        _claim(
            "Figure 1",
            f"{title}: a wrong coefficient costs much raw ECE",
            f"{more}, worst coefficient",
            partial(_sensitivity, loss=name),
        ),
        Claim(
            "Figure 1(d)",
            f"{title}: the best coefficient shrinks as the training set grows",
            "minus Kendall's τ of size and best coefficient",
            partial(_shrinks_with_data, loss=name),
        ),
        _claim(
            "Figure 3",
            f"{title} is less calibratable with few validation samples too (TS)",
            more,
            partial(_with_few, loss=name, figure="ece_temperature"),
        ),
        _claim(
            "Figure 4",
            f"{title}: the optimal ECE rises in late epochs",
            "optimal ECE at the end less its least, points",
            partial(_rise, loss=name),
        ),
        _claim(
            "Figure 4",
            f"{title}: a stronger coefficient ends at a greater optimal ECE",
            "Kendall's τ of coefficient and optimal ECE",
            partial(_stronger_is_worse, loss=name),
        ),
        _claim(
            "Figure 5",
            f"{title} compresses the greatest logits",
            "5–95 % range, cross-entropy less this loss",
            partial(_logits, loss=name, what="range"),
        ),
        _claim(
            "Figure 5",
            f"{title} tells early from late learned samples less well",
            "AUC, cross-entropy less this loss",
            partial(_logits, loss=name, what="auc"),
        ),
    ]


CLAIMS = (
    _claim(
        "Beyond the paper",
        "Stopping on refinement makes the network more calibratable by temperature scaling",
        "ECE of cross-entropy less that of the stopped network, points",
        partial(_beside_reference, loss="cross_entropy_stopped", figure="ece_temperature", scale=-100, repaired=True),
    ),
    *(claim for name in REGULARISED for claim in _per_loss(name)),
    *(
        Claim(
            "§4.2",
            f"the {words} negative coefficient of {_in_text(TITLES[name])} lowers accuracy",
            f"accuracy of cross-entropy less that of the {words} negative coefficient, points",
            partial(_negative, loss=name, which=which),
            printed="destroys it",
        )
        for name in ("label_smoothing", "norm")
        for words, which in (("mildest", max), ("strongest", min))
    ),
    _claim(
        "Figure 6(c)",
        "Inverse focal loss has a greater raw ECE than cross-entropy",
        "ECE of inverse focal less that of cross-entropy, points",
        partial(_beside_reference, loss=INVERSE, figure="ece", repaired=True),
    ),
    _claim(
        "Figure 6(d)",
        "the temperature rises from focal over cross-entropy to inverse focal",
        "Kendall's τ along the sweep",
        _temperatures,
    ),
    _claim(
        "Figure 6(e)",
        "Inverse focal loss is more calibratable by temperature scaling",
        "ECE of cross-entropy less that of inverse focal, points",
        partial(_beside_reference, loss=INVERSE, figure="ece_temperature", scale=-100, repaired=True),
        "CIFAR-10, CIFAR-100 yes; SVHN, 20Newsgroups no",
    ),
    _claim(
        "Figure 6(f)",
        "Inverse focal loss is more calibratable by histogram binning",
        "ECE of cross-entropy less that of inverse focal, points",
        partial(_beside_reference, loss=INVERSE, figure="ece_histogram", scale=-100, repaired=True),
        "CIFAR-100 yes; SVHN, CIFAR-10 no",
    ),
    _claim(
        "Figure 6(b)",
        "Inverse focal loss keeps the accuracy of cross-entropy (no more than 0.5 points lower)",
        "change of accuracy plus 0.5 points",
        lambda rows, plan, options: [
            gain + 0.5
            for gain in _beside_reference(rows, plan, options, loss=INVERSE, figure="accuracy", repaired=True)
        ],
    ),
)
