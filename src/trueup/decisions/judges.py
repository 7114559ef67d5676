"""The rate of right answers if a language-model judge labels all answers and people label some of them."""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
from scipy.special import stdtr

from trueup._core.arrays import check_share
from trueup._core.clusters import ClustersLike, as_clusters, degrees_of_freedom, t_quantile
from trueup._core.errors import Hint, InputError
from trueup._core.formatting import Row, format_interval, format_number, format_percent, text_table
from trueup._core.types import ArrayLike
from trueup.decisions.planning import JudgePlan, plan_labels
from trueup.io.source import is_gap
from trueup.metrics.intervals import Interval
from trueup.metrics.resampling import tail_share
from trueup.metrics.table import plain_record

_WORDS = {"true": 1.0, "yes": 1.0, "false": 0.0, "no": 0.0}
_CORNERS = np.array([(0.0, 0.0), (0.0, 1.0), (1.0, 0.0), (1.0, 1.0)])
"""Human label and judge's label of the rows that smooth the interval."""
_PSEUDO_ROWS = 2.0
"""Total weight of the smoothing rows: with fewer, intervals of rates near 1 are too short (simulated)."""
_MAX_SELECTION_P = 0.01
"""P-value below which the rows with human labels are called different from the others."""


@dataclass(frozen=True)
class JudgeRate:
    """The rate of right answers, with what the judge alone and people alone would have said."""

    rate: Interval
    """The estimate from the judge's and the human labels."""
    people_alone: Interval
    """The estimate from the human labels only."""
    judge_alone: float
    """The mean of the judge's labels."""
    judge_error: Interval
    """The judge's mean minus the rate."""
    rows: int
    """Number of answers."""
    human_labels: int
    """Number of answers with a human label."""
    method: str
    """The method behind `rate`: "ppi" or "rogan-gladen"."""
    judge_weight: float
    """λ of PPI++: 0 ignores the judge, 1 uses it fully."""
    right_if_right: Interval
    """Mean of the judge's labels where people say right: its sensitivity."""
    right_if_wrong: Interval
    """Mean of the judge's labels where people say wrong: 1 minus its specificity."""
    strata: Mapping[Hashable, Interval] = field(default_factory=dict)
    """The rate in each stratum; each interval has the level alone, not all together."""
    clusters: int | None = None
    """Number of clusters with a human label, if clusters were passed."""
    biased_sample: bool = False
    """Whether the judge's labels show that the answers with human labels are not a random sample."""
    notes: tuple[str, ...] = ()
    """Warnings about the labels."""
    variances: tuple[float, float, float] = (math.nan, math.nan, math.nan)
    """Variance of the human label, its covariance with the judge's, and the judge's variance, by independent label."""

    def plan(self, precision: float) -> JudgePlan:
        """Estimate how many human labels an interval of a given half-width takes, with and without this judge.

        Parameters
        ----------
        precision
            Half-width of the interval.

        Returns
        -------
        JudgePlan
            The numbers of labels; prints as a sentence.
        """
        return plan_labels(*self.variances, self.rows, check_share(precision, "precision"), self.rate.level)

    def verdict(self) -> str:
        """Say what the judge alone would have said, and how far off it is."""
        if self.biased_sample:
            return " ".join(self.notes)
        error, level = self.judge_error, format_percent(self.rate.level)
        claim = f"The judge alone would have said {format_percent(self.judge_alone, 1)}"
        ends = f"{level} interval {100 * error.low:+.1f} to {100 * error.high:+.1f}"
        if error.low <= 0 <= error.high:
            text = f"{claim}; the human labels do not show that this is wrong (error in points, {ends})."
        else:
            direction = "high" if error.value > 0 else "low"
            text = f"{claim}, which is {100 * abs(error.value):.1f} points too {direction} ({ends})."
        width, alone = (i.high - i.low for i in (self.rate, self.people_alone))
        if width > 0.95 * alone:
            gain = "The judge's labels do not make the interval shorter than people alone do."
        else:
            gain = f"The judge's labels make the interval {100 * (1 - width / alone):.0f} % shorter."
        return " ".join([text, gain, *self.notes])

    def table(self) -> list[Row]:
        """Return the cells of the table as text; the first row holds the heads."""
        judge = Interval(self.judge_alone, math.nan, math.nan)
        named = {"estimate": self.rate, "people alone": self.people_alone, "judge alone": judge}
        named |= {f"stratum {name}": rate for name, rate in self.strata.items()}
        rows = [[name, format_number(i.value), format_interval(i.low, i.high)] for name, i in named.items()]
        return [["", "rate", f"{format_percent(self.rate.level)} interval"], *rows]

    def caption(self) -> str:
        """Return the numbers of rows and labels, and the method."""
        method = "PPI++" if self.method == "ppi" else "Rogan–Gladen"
        clusters = "" if self.clusters is None else f" in {self.clusters:,} clusters"
        return f"{self.rows:,} answers, {self.human_labels:,} human labels{clusters}, {method}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, ready for JSON."""
        record = {name: value for name, value in asdict(self).items() if name != "variances"}
        for name in ("rate", "people_alone", "judge_error", "right_if_right", "right_if_wrong"):
            record[name] = plain_record(record[name])
        strata = [{"stratum": str(name), **plain_record(asdict(i))} for name, i in self.strata.items()]
        return {"schema": 1, **plain_record(record), "strata": strata, "notes": list(self.notes)}

    def __str__(self) -> str:
        return "\n\n".join([self.caption(), text_table(self.table()), self.verdict()])

    __repr__ = __str__


def judge_rate(
    judge: ArrayLike,
    human: ArrayLike,
    *,
    strata: ArrayLike | None = None,
    clusters: ClustersLike = None,
    method: Literal["ppi", "rogan-gladen"] = "ppi",
    level: float = 0.95,
) -> JudgeRate:
    """Estimate the rate of right answers from a judge's labels of all and human labels of some.

    The answers with human labels must be a random sample, in each stratum if there are strata. PPI++ corrects the
    judge's mean by its mean error on these answers, as far as this shortens the interval. Rogan–Gladen corrects it by
    the judge's sensitivity and specificity. Intervals use Student's t, and are smoothed by two rows of weight.

    Parameters
    ----------
    judge
        The judge's labels or scores in [0, 1] of all answers, shape (n,); 1, true and yes mean right.
    human
        Human labels in [0, 1], shape (n,); NaN, None or an empty text where there is none.
    strata
        System or category of each answer, shape (n,). Human labels may be more frequent in some strata than in others.
    clusters
        Question of each answer, shape (n,), where answers are correlated.
    method
        "ppi" or "rogan-gladen".
    level
        Level of the intervals.

    Returns
    -------
    JudgeRate
        The rate with its interval; prints as a table and a verdict.

    Examples
    --------
    >>> rng = np.random.default_rng(1)
    >>> right = rng.random(5000) < 0.7
    >>> judge = np.where(right, rng.random(5000) < 0.95, rng.random(5000) < 0.4)
    >>> human = np.where(np.arange(5000) < 300, right, np.nan)
    >>> print(judge_rate(judge, human))
    5,000 answers, 300 human labels, PPI++
    <BLANKLINE>
                    rate     95 % interval
    estimate      0.7256  [0.6830, 0.7675]
    people alone  0.7100  [0.6570, 0.7602]
    judge alone   0.7880                 –
    <BLANKLINE>
    The judge alone would have said 78.8 %, which is 6.2 points too high (95 % interval +2.1 to +10.5). ...

    References
    ----------
    Angelopoulos, Duchi & Zrnic (2023), arXiv:2311.01453. Rogan & Gladen (1978), Am. J. Epidemiology 107.
    """
    if method not in ("ppi", "rogan-gladen"):
        raise InputError("method", 'be "ppi" or "rogan-gladen"', repr(method))
    tail = tail_share(level)
    f, y = _check_pair(judge, human)
    labelled = ~np.isnan(y)
    if method == "rogan-gladen" and not np.isin(y[labelled], (0, 1)).all():
        raise InputError("human", "be 0 or 1 for Rogan–Gladen", "other numbers", 'method="ppi" takes any in [0, 1]')
    stratum, names = _check_strata(strata, labelled)
    of_row = as_clusters(clusters, len(f))
    code = np.arange(len(f)) if of_row is None else of_row.code
    if len(np.unique(code[labelled])) < 2:
        raise InputError("clusters", "have human labels in at least 2", "1", "intervals need several clusters")
    whole = _Sample(f, y, stratum, code)
    selection, rate = whole.selection_note(), whole.ppi(whole.weight)
    notes = [selection] if selection else []
    if method == "rogan-gladen":
        corrected = whole.rogan_gladen(tail)
        if corrected is None:
            needed = "answers without a human label, and a judge that is shown to be better than a constant"
            notes.append(f"This is PPI++: Rogan–Gladen needs {needed}.")
            method = "ppi"
        else:
            rate = corrected
    parts = {}
    for k, name in enumerate(names):
        part = _Sample(f[stratum == k], y[stratum == k], np.zeros_like(stratum[stratum == k]), code[stratum == k])
        parts[name] = part.ppi(part.weight).interval(tail)
    right, wrong = whole.quality()
    return JudgeRate(
        rate=rate.interval(tail),
        people_alone=whole.ppi(0.0).interval(tail),
        judge_alone=float(f.mean()),
        judge_error=whole.error_of_judge(rate).interval(tail, lowest=-1.0),
        rows=len(f),
        human_labels=int(labelled.sum()),
        method=method,
        judge_weight=whole.weight,
        right_if_right=right.interval(tail),
        right_if_wrong=wrong.interval(tail),
        strata=parts,
        clusters=None if of_row is None else len(np.unique(code[labelled])),
        biased_sample=bool(selection),
        notes=tuple(notes),
        variances=whole.variances(),
    )


class _Estimate(NamedTuple):
    """An estimate, the centre of its smoothed interval, and its influence on each cluster's sum."""

    value: float
    centre: float
    influence: np.ndarray
    df: float
    between: float = 0.0
    """Variance from the strata's shares."""

    def interval(self, tail: float, *, lowest: float = 0.0) -> Interval:
        """Return the interval, extended to the value."""
        half = t_quantile(tail, self.df) * math.sqrt(float(self.influence @ self.influence) + self.between)
        value = min(max(self.value, lowest), 1.0)
        low, high = max(self.centre - half, lowest), min(self.centre + half, 1.0)
        return Interval(value, min(low, value), max(high, value), round(1 - 2 * tail, 12))


class _Sample:
    """Labels with their weights; estimates are sums over rows, and their variances are sums over clusters.

    Rows with a human label have weights `a`, the others `b`; in each stratum they add up to its share of all rows. Two
    rows in the corners of (human, judge) smooth the intervals, as by Agresti and Coull. A corner has the size of an
    independent row: with clusters, of the design effect.
    """

    def __init__(self, f: np.ndarray, y: np.ndarray, stratum: np.ndarray, code: np.ndarray) -> None:
        labelled = ~np.isnan(y)
        self.f, self.y, self.stratum = f, np.where(labelled, y, 0.0), stratum
        self.code = np.unique(code, return_inverse=True)[1]
        self.share = np.bincount(stratum) / len(f)
        self.a, self.b = (
            some * (self.share / np.maximum(np.bincount(stratum, some), 1))[stratum] for some in (labelled, ~labelled)
        )
        of_cluster = np.bincount(self.code, self.a)
        independent = degrees_of_freedom(of_cluster[of_cluster > 0]) + 1
        self.df = max(independent - len(self.share) - 1, 1.0)
        self.factor = math.sqrt(independent / self.df)
        self.n = 1 / float(self.a @ self.a)
        off = self.a * (self.y - self.means(self.y, self.a)[stratum])
        by_row, by_cluster = (float(x @ x) for x in (off, np.bincount(self.code, off)))
        largest = max(self.n / independent, 1.0)
        effect = min(max(by_cluster / by_row, 1.0), largest) if by_row > 1e-15 else largest
        self.shrink = _PSEUDO_ROWS * effect / (self.n + _PSEUDO_ROWS * effect)
        # A stratum in which all rows have a human label does not need the judge.
        self.open = labelled * (np.bincount(stratum, ~labelled) > 0)[stratum]
        self.human = self.influence(off, _CORNERS[:, 0] - self.mean(self.y, _CORNERS[:, 0]))
        judge_off = self.a * self.open * (f - self.means(f, self.a)[stratum])
        corner = (_CORNERS[:, 1] - self.mean(f, _CORNERS[:, 1])) * self.open.any()
        self.judge = self.influence(judge_off, corner)
        self.others = self.sums(self.b * (f - self.means(f, self.b)[stratum]))
        q = self.judge - self.others
        self.weight = min(max(float(self.human @ q) / max(float(q @ q), 1e-300), 0.0), 1.0)

    def means(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        """Return the weighted mean in each stratum, 0 without rows."""
        total = np.bincount(self.stratum, weight)
        return np.bincount(self.stratum, weight * x) / np.where(total > 0, total, 1.0)

    def mean(self, x: np.ndarray, corners: np.ndarray) -> float:
        """Return the smoothed mean over the rows with a human label."""
        return (1 - self.shrink) * float(self.a @ x) + self.shrink * float(corners.mean())

    def sums(self, rows: np.ndarray) -> np.ndarray:
        """Sum over clusters; the four corners are clusters too."""
        return np.append(np.bincount(self.code, rows), np.zeros(4))

    def influence(self, rows: np.ndarray, corners: np.ndarray) -> np.ndarray:
        """Return the influence of the clusters with a human label, and of the corners."""
        smoothing = math.sqrt(_PSEUDO_ROWS / 4) * self.shrink / _PSEUDO_ROWS * corners
        return np.append((1 - self.shrink) * self.factor * np.bincount(self.code, rows), smoothing)

    def between(self, means: np.ndarray) -> float:
        """Return the variance from the strata's shares if rows were drawn from a population."""
        return float(self.share @ (means - self.share @ means) ** 2) / len(self.f)

    def ppi(self, weight: float) -> _Estimate:
        """Correct the judge's mean by its mean error; with weight 0, use people alone."""
        gap = weight * (self.means(self.f, self.b) - self.means(self.f * self.open, self.a))
        means = self.means(self.y, self.a) + gap * (np.bincount(self.stratum, self.b) > 0)
        corners = _CORNERS @ (1.0, -weight * self.open.any())
        residual = self.y - weight * self.open * self.f
        centre = self.mean(residual, corners) + weight * float(self.b @ self.f)
        influence = self.human - weight * (self.judge - self.others)
        return _Estimate(float(self.share @ means), centre, influence, self.df, self.between(means))

    def quality(self) -> tuple[_Estimate, _Estimate]:
        """Return the mean of the judge's labels where people say right, and where people say wrong."""
        estimates = []
        for of_row, corners in ((self.y, _CORNERS[:, 0]), (1 - self.y, 1 - _CORNERS[:, 0])):
            total, smoothed = float(self.a @ of_row), self.mean(of_row, corners)
            centre = self.mean(of_row * self.f, corners * _CORNERS[:, 1]) / smoothed
            value = float(self.a @ (of_row * self.f)) / total if total > 0 else math.nan
            off = self.a * of_row * (self.f - centre), corners * (_CORNERS[:, 1] - centre)
            df = max((self.df + 1) * total - 1, 1.0)
            estimates.append(_Estimate(value, centre, self.influence(*off) / smoothed, df))
        return estimates[0], estimates[1]

    def rogan_gladen(self, tail: float) -> _Estimate | None:
        """Correct the judge's mean by its sensitivity and specificity; None if it may be useless."""
        right, wrong = self.quality()
        youden = right.centre - wrong.centre
        informative = _Estimate(youden, youden, right.influence - wrong.influence, self.df)
        if not self.b.any() or informative.interval(tail, lowest=-1.0).low <= 0:
            return None
        mean = float(self.b @ self.f) / float(self.b.sum())
        centre = (mean - wrong.centre) / youden
        influence = (self.others - centre * right.influence - (1 - centre) * wrong.influence) / youden
        value = (mean - wrong.value) / (right.value - wrong.value)
        means = np.where(np.bincount(self.stratum, self.b) > 0, self.means(self.f, self.b), mean)
        between = self.between(means) / youden**2
        return _Estimate(value if math.isfinite(value) else centre, centre, influence, self.df, between)

    def error_of_judge(self, rate: _Estimate) -> _Estimate:
        """Subtract the rate from the judge's mean over all rows."""
        everywhere = np.full(len(self.f), 1 / len(self.f))
        influence = self.sums(everywhere * (self.f - self.means(self.f, everywhere)[self.stratum])) - rate.influence
        judge = float(self.f.mean())
        value, centre = judge - min(max(rate.value, 0.0), 1.0), judge - rate.centre
        return _Estimate(value, centre, influence, rate.df, rate.between)

    def selection_note(self) -> str:
        """Return a warning if the judge's labels show that the rows with human labels are not a random sample."""
        labelled, others = float((self.a * self.open) @ self.f), float(self.b @ self.f)
        influence = (self.judge - self.others)[:-4]
        error = math.sqrt(float(influence @ influence))
        if error < 1e-12 or 2 * stdtr(self.df, -abs(labelled - others) / error) > _MAX_SELECTION_P:
            return ""
        means = (format_percent(x / float(self.b.sum()), 1) for x in (labelled, others))
        judged = "The judge's mean is {} with and {} without a human label".format(*means)
        return (
            f"{judged}, so the human labels are hardly a random sample, and these intervals do not hold. "
            "Draw the answers for people at random, or pass the strata."
        )

    def variances(self) -> tuple[float, float, float]:
        """Return the variances and the covariance of human and judge's label, scaled to the number of labels."""
        labels, human, judge = np.count_nonzero(self.a), self.human, self.judge
        return labels * float(human @ human), labels * float(human @ judge), labels * float(judge @ judge)


def _check_pair(judge: Any, human: Any) -> tuple[np.ndarray, np.ndarray]:
    """Check the labels; those of people may be missing."""
    f, y = _labels(judge, "judge"), _labels(human, "human")
    if len(y) != len(f):
        hint = "human needs NaN or None where an answer has no human label"
        raise InputError("human", f"have {len(f)} entries, one for each of judge", str(len(y)), hint)
    if len(missing := np.flatnonzero(np.isnan(f))):
        got = f"{len(missing)} rows without, the first of them row {missing[0]}"
        raise InputError("judge", "have a label in every row", got, "leave out those rows")
    if (labels := np.count_nonzero(~np.isnan(y))) < 2:
        raise InputError("human", "have at least 2 labels", str(labels))
    return f, y


def _labels(values: Any, name: str) -> np.ndarray:
    """Convert labels to numbers in [0, 1], with NaN for missing ones."""
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    try:
        x = np.array(listed, dtype=np.float64)
    except (TypeError, ValueError):
        x = np.array([_label(value, name, row) for row, value in enumerate(listed)])
    if x.ndim != 1:
        raise InputError(name, "have one label per row", f"shape {x.shape}")
    if len(outside := np.flatnonzero((x < 0) | (x > 1))):
        ratings = "(score − lowest) / (highest − lowest) turns ratings into [0, 1]"
        hint = Hint.PER_CENT if 10 < np.nanmax(x) <= 100 else ratings
        raise InputError(name, "lie in [0, 1]", f"{x[outside[0]]:g} in row {outside[0]}", hint)
    return x


def _label(value: Any, name: str, row: int) -> float:
    """Convert a number, true, false, yes or no; an empty text or a missing value of pandas is NaN."""
    if is_gap(value) or type(value).__name__ in ("NAType", "NaTType"):
        return math.nan
    try:
        return _WORDS[value.strip().lower()] if isinstance(value, str) and value.strip().isalpha() else float(value)
    except (KeyError, TypeError, ValueError):
        kinds = "be a number in [0, 1], true or false, or yes or no"
        raise InputError(name, kinds, repr(value), where=f"row {row}") from None


def _check_strata(strata: Any, labelled: np.ndarray) -> tuple[np.ndarray, list[Hashable]]:
    """Return the stratum of each row and the names of the strata; without strata there is one without a name."""
    try:
        of_row = as_clusters(strata, len(labelled))
    except InputError as error:
        raise error.replace(argument="strata") from None
    if of_row is None:
        return np.zeros(len(labelled), dtype=np.int64), []
    counts = np.bincount(of_row.code, labelled, len(of_row.names))
    if (few := int(counts.argmin())) >= 0 and counts[few] < 2:
        got = f"{counts[few]:.0f} in {of_row.names[few]!r}"
        raise InputError("strata", "have at least 2 human labels each", got, "join small strata, or label more rows")
    return of_row.code, of_row.names
