"""What the paper claims of calibrated and calibratable networks, judged seed by seed.

Wang, Feng & Zhang (2021), Rethinking calibration of deep neural networks: do not be afraid of overconfidence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import attrgetter, eq
from typing import Any

from trueup.study.claims import (
    Claim,
    Incomplete,
    by_run,
    least_on_average,
    paired,
    published_key,
    trend,
    with_common_runs,
)
from trueup.study.grid import Options, Rows
from trueup.study.papers.rethinking.rethinking_evidence import (
    INVERSE,
    LATE,
    above_focal,
    beside_reference,
    best_coefficient,
    descends_then_ascends,
    first_drop,
    histograms_gain_more,
    learned_rows,
    logit_gaps,
    no_trend,
    rise,
    rises_in_time,
    sensitivity,
    stays_high,
    stronger_is_worse,
    stronger_rises_earlier,
    stronger_rises_more,
    strongest_loses,
    temperatures_rise,
    with_few,
)
from trueup.study.papers.rethinking.rethinking_presets import (
    DATA_TITLES,
    PRESETS,
    REFERENCE,
    STOPPED,
    SWEEP,
    TITLES,
    Plan,
    plans,
)
from trueup.study.papers.rethinking.rethinking_study import (
    choose_coefficients,
    main_rows,
    selectors,
    unfinished_losses,
    whole_rows,
)
from trueup.study.published import PublishedValue, normalize_name, published_values

Support = Mapping[str, Sequence[float]]

REGULARISED = ("label_smoothing", "norm", "focal")
PAPER = "rethinking"
NEWSGROUPS = "20newsgroups"
"""The data set that the paper names where it takes something back."""
BEST_LOSSES = {"CE": REFERENCE, "inverse focal": INVERSE, "focal gamma=1": "focal"}
"""The paper's words for the loss of least ECE with temperature scaling → our name; the focal one has γ = 1."""


def _of_each_set(rows: Rows, options: Options, *, of_set: Callable[[Rows, Plan, Options], Sequence[float]]) -> Support:
    """A number of each seed, by data set and network."""
    support = {}
    for plan in plans(options):
        if own := learned_rows(main_rows(rows, plan)):
            values = of_set(own, plan, options)
            tried = {(row["loss"], row["coefficient"]) for row in whole_rows(rows, plan)}
            if isinstance(values, Incomplete) and tried >= {*SWEEP}:  # what failed is no rival
                values = list(values)
            more = ", of some of the losses" if isinstance(values, Incomplete) else ""
            more += ", not all coefficients run yet" if unfinished_losses(rows, plan) else ""
            support[f"{DATA_TITLES.get(plan.data, plan.data)}, {plan.network}{more}"] = values
    return support


def _flags(table: str) -> dict[str, PublishedValue]:
    """Data set, in the paper's spelling, → what a figure says of it."""
    return {normalize_name(value.dataset): value for value in published_values(PAPER, table)}


def _says(data: str, *, word: str) -> bool:
    """Whether figure 6(f) says so of a data set."""
    flag = _flags("figure 6f").get(data)
    return flag is not None and word in flag.method


def _best_of_the_paper(rows: Rows, plan: Plan, options: Options, *, named: str) -> list[float]:
    """The ECE with temperature scaling of the best other loss of the sweep, less that of the loss the paper names."""
    loss = BEST_LOSSES[named]
    own = plan.candidates if loss == INVERSE else {loss: (0,) if loss == REFERENCE else (1,)}
    chosen = choose_coefficients(rows, selectors(options)[1], {loss: own[loss]}).get(loss)
    if chosen is None:
        return []
    mine = loss, chosen[0]["coefficient"]
    rivals = [pair for pair in SWEEP if pair[0] != loss or (loss == "focal" and pair[1] != 1)]
    known = by_run(rows, lambda row: (row["loss"], row["coefficient"]), "ece_temperature")
    values = with_common_runs(known, [*rivals, mine])
    best = least_on_average(values, rivals)
    if best is None or mine not in values:
        return []
    margins = paired(values[best], values[mine], scale=100)
    return margins if all(pair in values for pair in rivals) else Incomplete(margins)


def _only(of_set: Any, wanted: Callable[[str], bool]) -> Any:
    """The same, of data sets whose name in the paper is wanted."""
    return lambda rows, plan, options: of_set(rows, plan, options) if wanted(normalize_name(plan.data)) else []


def _gaps(table: str, metric: str, loss: str) -> dict[str, float]:
    """What a loss has more than cross-entropy in a table of the paper, by data set and network."""
    of_loss, of_reference = (
        {published_key(v.dataset, v.model): v.mean for v in published_values(PAPER, table, metric=metric, method=m)}
        for m in (TITLES[loss], TITLES[REFERENCE])
    )
    return {key: of_loss[key] - of_reference[key] for key in of_loss}


def _differences(table: str, metric: str, loss: str, sign: float) -> dict[str, str]:
    """The same in words, with another sign or not, and for other data sets the range."""
    return _printed_range({key: sign * gap for key, gap in _gaps(table, metric, loss).items()})


def _printed_range(numbers: Mapping[str, float], notes: Mapping[str, str] | None = None) -> dict[str, str]:
    printed = {key: f"{number:+.2f}{(notes or {}).get(key, '')}" for key, number in numbers.items()}
    return {**printed, "": f"{min(numbers.values()):+.2f} to {max(numbers.values()):+.2f} elsewhere"}


def _opposite(metric: str, loss: str) -> set[str]:
    """The data sets where the paper's table 2 has a loss below cross-entropy after a repair."""
    return {key.split(", ")[0] for key, gap in _gaps("table 2", metric, loss).items() if gap < 0}


def _printed_rises() -> dict[str, str]:
    """The first drop of the learning rate, and a little more, less the epoch where the paper sees the rise begin."""
    values = published_values(PAPER, "figure 4", metric="epoch_where_optimal_ece_starts_to_rise")
    begins = {published_key(v.dataset, v.model): v.mean for v in values}
    own = {published_key(plan.data, plan.network): plan for plan in PRESETS["paper"]}
    early = {key: 100 * (first_drop(own[key]) + LATE - epoch / own[key].epochs) for key, epoch in begins.items()}
    return _printed_range(early, {key: f" (from epoch {epoch:g})" for key, epoch in begins.items()})


def _better_by_temperature() -> list[str]:
    values = published_values(PAPER, "figure 6e", method="inverse focal")
    return [published_key(v.dataset, v.model) for v in values]


def _shrinks_with_data(rows: Rows, options: Options, *, loss: str) -> Support:
    """Minus Kendall's τ of the size of the training set and the coefficient of least validation ECE, seed by seed."""
    support = {}
    for plan in (plan for plan in plans(options) if plan.growth and loss in plan.growth.coefficients):
        growth: Any = plan.growth
        own = [row for row in rows if row["data"] == plan.data]
        taus = []
        for seed in range(growth.seeds):
            of_size = [[row for row in own if row["seed"] == seed and row["sizes"][0] == size] for size in growth.sizes]
            best = [best_coefficient(alike, growth, loss, selectors(options)[0]) for alike in of_size]
            known = [value for value in best if value is not None]
            if len(known) == len(growth.sizes):
                taus.append(-trend(growth.sizes, known))
        support[f"{DATA_TITLES.get(plan.data, plan.data)}, {plan.network}"] = taus
    return support


def _accuracy_loss(
    rows: Rows,
    options: Options,
    *,
    loss: str,
    coefficients: Callable[[Plan], Mapping[str, Sequence[float]]],
    end: Callable[..., float],
    share: float = 1.0,
) -> Support:
    """A share of the accuracy of cross-entropy less the accuracy of the greatest or least coefficient, seed by seed.

    A training that failed counts with the accuracy of chance: to fail is to lose accuracy.
    """
    support = {}
    for plan in plans(options):
        own = by_run(whole_rows(rows, plan), lambda row: (row["loss"], row["coefficient"]), "accuracy")
        pair = loss, end(coefficients(plan).get(loss, (0,)))
        if pair in own and (REFERENCE, 0) in own:
            plain = {seed: share * accuracy for seed, accuracy in own[REFERENCE, 0].items()}
            support[f"{DATA_TITLES.get(plan.data, plan.data)}, {plan.network}"] = paired(plain, own[pair], scale=100)
    return support


def _claim(
    source: str,
    text: str,
    measured: str,
    of_set: Any,
    printed: str | Mapping[str, str] = "",
    *,
    discrete: bool = False,
) -> Claim:
    return Claim(source, text, measured, partial(_of_each_set, of_set=of_set), printed=printed, discrete=discrete)


def _in_text(title: str) -> str:
    """A title inside a sentence.

    >>> _in_text("Label Smoothing"), _in_text("L1 Norm")
    ('label smoothing', 'L1 norm')
    """
    return " ".join(word if any(map(str.isdigit, word)) else word.lower() for word in title.split())


def _epoch_claims(name: str, title: str) -> list[Claim]:
    """Of the optimal ECE along the epochs: it rises with smoothing and the norm, and stays high with focal loss."""
    if name == "focal":
        return [
            _claim(
                "Appendix, figure A",
                f"{title}: a large coefficient keeps the optimal ECE high",
                "optimal ECE of the largest coefficient less that of cross-entropy after the last epoch, points",
                partial(stays_high, loss=name),
            )
        ]
    source = "Figure 4" if name == "label_smoothing" else "Appendix, figure A"
    rises: Any = partial(rise, loss=name)
    claims = [
        _claim(
            source,
            f"{title}: the optimal ECE rises in late epochs",
            "optimal ECE at the end less its least, points",
            # The paper excepts the texts: there a large norm hurts, which is the claim after this.
            _only(rises, lambda data: data != NEWSGROUPS) if name == "norm" else rises,
        ),
        _claim(
            source,
            f"{title}: a stronger coefficient ends at a greater optimal ECE",
            "Kendall's τ of coefficient and optimal ECE",
            partial(stronger_is_worse, loss=name),
            discrete=True,
        ),
    ]
    if name != "label_smoothing":
        return claims
    return [
        *claims,
        _claim(
            source,
            f"{title}: it rises from the first drop of the learning rate on, if not before",
            f"that drop and {100 * LATE:g} % more, less the epoch of the least optimal ECE, in % of the epochs, "
            "of coefficients with a significant rise",
            partial(rises_in_time, loss=name),
            _printed_rises(),
        ),
        _claim(
            source,
            f"{title}: it rises more with a stronger coefficient",
            "Kendall's τ of coefficient and rise",
            partial(stronger_rises_more, loss=name),
            discrete=True,
        ),
        _claim(
            source,
            f"{title}: it rises earlier with a stronger coefficient",
            "minus Kendall's τ of coefficient and epoch of the least optimal ECE, of those with a significant rise",
            partial(stronger_rises_earlier, loss=name),
            discrete=True,
        ),
    ]


def _more_than_reference(name: str) -> str:
    return f"ECE of {_in_text(TITLES[name])} less that of cross-entropy, points"


def _less_than_reference(name: str) -> str:
    return f"ECE of cross-entropy less that of {_in_text(TITLES[name])}, points"


def _calibratable(name: str, metric: str, figure: str, words: str) -> list[Claim]:
    """Less calibratable than cross-entropy, and more on the data sets of which the paper's table says so."""
    opposite = _opposite(metric, name)
    claims = [
        _claim(
            "Table 2",
            f"{TITLES[name]} is less calibratable by {words}",
            _more_than_reference(name),
            _only(partial(beside_reference, loss=name, figure=figure), lambda data: data not in opposite),
            _differences("table 2", metric, name, 1),
        )
    ]
    if opposite:
        claims.append(
            _claim(
                "Table 2",
                f"{TITLES[name]} is more calibratable by {words}",
                _less_than_reference(name),
                _only(partial(beside_reference, loss=name, figure=figure, scale=-100), lambda data: data in opposite),
                _differences("table 2", metric, name, -1),
            )
        )
    return claims


def _per_loss(name: str) -> list[Claim]:
    title = TITLES[name]
    less, more = _less_than_reference(name), _more_than_reference(name)
    return [
        _claim(
            "Table 1",
            f"{title} is better calibrated",
            less,
            partial(beside_reference, loss=name, figure="ece", scale=-100),
            _differences("table 1", "ece_pct", name, -1),
        ),
        *(
            claim
            for metric, figure, words in (
                ("ece_pct_after_ts", "ece_temperature", "temperature scaling"),
                ("ece_pct_after_hb", "ece_histogram", "histogram binning"),
            )
            for claim in _calibratable(name, metric, figure, words)
        ),
        _claim(
            "Beyond the paper",
            f"{title} is less calibratable by histogram binning after temperature scaling",
            more,
            partial(beside_reference, loss=name, figure="ece_temperature_histogram"),
        ),
        _claim(
            "Table 2",
            f"cross-entropy needs a higher temperature than {_in_text(title)}",
            f"temperature of cross-entropy less that of {_in_text(title)}",
            partial(beside_reference, loss=name, figure="temperature", scale=-1),
            _differences("table 2", "temperature", name, -1),
        ),
        _claim(
            "Beyond the paper",
            f"{title} is less calibratable by temperature scaling, its coefficient chosen for that",
            more,
            partial(beside_reference, loss=name, figure="ece_temperature", repaired=True),
        ),
        _claim(
            "Figure 1",
            f"{title}: a wrong coefficient costs much raw ECE (more than doubles it)",
            f"ECE of the worst coefficient of {_in_text(title)} less twice that of the best, points",
            partial(sensitivity, loss=name),
        ),
        Claim(
            "Figure 1(d)",
            f"{title}: the best coefficient shrinks as the training set grows",
            "minus Kendall's τ of size and best coefficient",
            partial(_shrinks_with_data, loss=name),
            discrete=True,
        ),
        *(
            _claim(
                "Figure 3",
                f"{title} is less calibratable with few validation samples too ({repair})",
                more,
                partial(with_few, loss=name, figure=figure),
            )
            for repair, figure in (("TS", "ece_temperature"), ("HB", "ece_histogram"))
        ),
        *_epoch_claims(name, title),
        _claim(
            "Figure 5",
            f"{title} compresses the greatest logits",
            "5–95 % range, cross-entropy less this loss",
            partial(logit_gaps, loss=name, what="range"),
        ),
        _claim(
            "Figure 5",
            f"{title} tells early from late learned samples less well",
            "AUC, cross-entropy less this loss",
            partial(logit_gaps, loss=name, what="auc"),
        ),
    ]


CLAIMS = (
    _claim(
        "Beyond the paper",
        "Stopping on refinement makes the network more calibratable by temperature scaling",
        "ECE of cross-entropy less that of the stopped network, points",
        partial(beside_reference, loss=STOPPED, figure="ece_temperature", scale=-100, repaired=True),
    ),
    *(claim for name in REGULARISED for claim in _per_loss(name)),
    *(
        Claim(
            "§3.1",
            f"{TITLES[name]}: a large coefficient lowers accuracy",
            "accuracy of cross-entropy less that of the greatest coefficient, points",
            partial(_accuracy_loss, loss=name, coefficients=attrgetter("candidates"), end=max),
            printed="harmed",
        )
        for name in ("norm", "focal")
    ),
    *(
        Claim(
            "§5.2",
            f"the {words} negative coefficient of {_in_text(TITLES[name])} destroys accuracy (leaves less than half)",
            f"half the accuracy of cross-entropy less that of the {words} negative coefficient, points",
            partial(_accuracy_loss, loss=name, coefficients=attrgetter("negative"), end=end, share=0.5),
            printed="extremely low",
        )
        for name in ("label_smoothing", "norm")
        for words, end in (("mildest", max), ("strongest", min))
    ),
    _claim(
        "Figure 6(c)",
        "Inverse focal loss has a greater raw ECE than cross-entropy",
        "ECE of inverse focal less that of cross-entropy, points",
        partial(beside_reference, loss=INVERSE, figure="ece", repaired=True),
        "in most cases",
    ),
    _claim(
        "Figure 6(c)",
        "Inverse focal loss has a greater raw ECE than focal loss",
        "share of the pairs of γ̄ and γ where the ECE of inverse focal is the greater, less ½",
        above_focal,
        "in most cases",
        discrete=True,
    ),
    _claim(
        "Figure 6(d)",
        "the temperature rises from focal over cross-entropy to inverse focal",
        "Kendall's τ along the sweep",
        temperatures_rise,
        discrete=True,
    ),
    *(
        _claim(
            "Figure 6(e)",
            f"the loss of least ECE with temperature scaling on {flag.dataset} is the paper's",
            "ECE of the best other loss of the sweep less that of the paper's, points",
            _only(partial(_best_of_the_paper, named=flag.method), partial(eq, data)),
            flag.method.replace("gamma=", "γ = "),
        )
        for data, flag in _flags("figure 6e").items()
    ),
    _claim(
        "Figure 6(e)",
        "ECE with temperature scaling falls, then rises, from focal over cross-entropy to inverse focal",
        "ECE of the better end less that of the best between them, both by the other seeds, points",
        descends_then_ascends,
    ),
    _claim(
        "Figure 6(e)",
        "Inverse focal loss is more calibratable by temperature scaling",
        "ECE of cross-entropy less that of inverse focal, points",
        _only(
            partial(beside_reference, loss=INVERSE, figure="ece_temperature", scale=-100, repaired=True),
            lambda data: data not in _flags("figure 6e") or _flags("figure 6e")[data].method == "inverse focal",
        ),
        {**dict.fromkeys(_better_by_temperature(), "lower"), "": "in some cases: CIFAR-10 and CIFAR-100"},
    ),
    *(
        _claim(
            "Figure 6(f)",
            f"Inverse focal loss is {word} calibratable by histogram binning",
            f"ECE of {first} less that of {second}, points",
            _only(
                partial(beside_reference, loss=INVERSE, figure="ece_histogram", scale=sign, repaired=True),
                partial(_says, word=said),
            ),
            f"on {where}",
        )
        for word, said, first, second, sign, where in (
            ("more", "better", "cross-entropy", "inverse focal", -100, "CIFAR-100"),
            ("less", "worse", "inverse focal", "cross-entropy", 100, "SVHN and CIFAR-10"),
        )
    ),
    _claim(
        "Figure 6(f)",
        "ECE with histogram binning has no clear trend as γ̄ of inverse focal loss grows (τ below ½)",
        "½ less Kendall's τ of γ̄ and ECE, its sign by the other seeds",
        no_trend,
        discrete=True,
    ),
    _claim(
        "Figure 3",
        "histogram binning needs more validation samples than temperature scaling",
        "what the ECE of cross-entropy falls from the fewest samples to all, with histogram binning less with "
        "temperature scaling, points",
        histograms_gain_more,
    ),
    _claim(
        "Figure 6(b)",
        "Inverse focal loss keeps the accuracy of cross-entropy (no more than 0.5 points lower)",
        "change of accuracy plus 0.5 points",
        _only(
            lambda rows, plan, options: [
                gain + 0.5
                for gain in beside_reference(rows, plan, options, loss=INVERSE, figure="accuracy", repaired=True)
            ],
            lambda data: data != NEWSGROUPS,
        ),
        "highly competitive",
        discrete=True,
    ),
    _claim(
        "Figure 6(b)",
        "Inverse focal loss with large γ̄ lowers accuracy",
        "accuracy of cross-entropy less that of the greatest γ̄, points",
        _only(strongest_loses, lambda data: data == NEWSGROUPS),
        "worse",
    ),
)
