"""Claims of papers, and verdicts on them from the rows of a study: a paired difference, its interval, a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import numpy as np

from trueup.reports.html import TableCell
from trueup.reports.html import table as html_table
from trueup_studies.grid import Options, Rows, read_toml
from trueup_studies.published import normalize_name
from trueup_studies.statistics import LEVEL, holm, is_constant, paired_interval, paired_t_test
from trueup_studies.tables import MISSING, Markup, PrintedTable, to_csv

ClaimVerdict = Literal["held", "did not hold", "not distinguishable"]
NOTE = " ".join(files("trueup_studies").joinpath("templates/claims_note.txt").read_text(encoding="utf-8").split())
HEADINGS = ["source", "claim", "data", "paper", "ours", "95 % interval", "runs", "verdict"]


class Incomplete(list[float]):
    """Numbers of a claim about several methods, some of which were not run: they can refute it, but not confirm it."""


class Trends(list[float]):
    """Kendall's τ of each run, which is a test by itself: under the null, every order of its values is as likely."""

    def __init__(self, runs: Iterable[tuple[int, float]]) -> None:
        self.runs = list(runs)
        """Number of values of each run, and concordant minus discordant pairs."""
        super().__init__(2 * surplus / (n * (n - 1)) for n, surplus in self.runs)

    def p_value(self, *, dependent: bool = False) -> float:
        """Compute the two-sided p-value of the sum over runs, by permutations; ties make it larger than necessary.

        For runs that are `dependent`, twice the mean of the runs' p-values is valid on each side (Vovk & Wang 2020,
        Combining p-values via averaging).

        >>> f"{Trends([(5, 10)] * 2).p_value(dependent=True):.4f}", f"{Trends([(5, 10)] * 2).p_value():.6f}"
        ('0.0333', '0.000139')
        """
        counts = [(_concordant_pairs(n), (n * (n - 1) / 2 + surplus) / 2) for n, surplus in self.runs]
        if not dependent:
            counts = [(reduce(np.convolve, (p for p, _ in counts)), sum(pairs for _, pairs in counts))]
        tails = [(p[math.floor(pairs) :].sum(), p[: math.ceil(pairs) + 1].sum()) for p, pairs in counts]
        return float(min(1.0, (4 if dependent else 2) * min(np.mean(tails, axis=0))))


def _concordant_pairs(n: int) -> np.ndarray:
    """Return the probabilities of each number of concordant pairs of n values in random order."""
    return reduce(np.convolve, (np.full(k, 1 / k) for k in range(1, n + 1)))


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, and the function that computes the evidence for it from the rows of a study.

    `support` gives, for each data set and network, one number per run: a paired difference, positive where the run
    supports the claim.
    """

    source: str
    """Place in the paper, such as "Table 2"."""
    text: str
    """The statement."""
    measured: str
    """Meaning and unit of the numbers of `support`."""
    support: Callable[[Rows, Options], Mapping[str, Sequence[float]]]
    digits: int = 2
    printed: str | Mapping[str, str] = ""
    """The paper's own number: one for all, or by data set and network as in `published_key`, with "" for the others."""
    main: bool = False
    """Whether it is a main claim of its paper; the main claims on one data set and network are corrected for their
    number."""
    discrete: bool = False
    """Whether the numbers have few distinct values, such as rank correlations, so that runs may agree by accident."""
    exact: bool = False
    """Whether the numbers are counted, not measured: one run is then conclusive."""
    one_split: bool = False
    """Whether its runs share one split, although the study's other runs each split the samples anew."""
    only: Sequence[str] = ()
    """Data sets, or data sets and networks as in `published_key`, that the claim is about; all if empty."""
    skip: Sequence[str] = ()
    """Data sets, or data sets and networks, that the claim is not about."""

    def covers(self, group: str) -> bool:
        """Return whether the claim is about a data set and network.

        >>> claim = Claim("Table 2", "a beats b", "ECE", dict, skip=["cifar10"])
        >>> claim.covers("CIFAR-10, resnet110"), claim.covers("CIFAR-100, resnet110")
        (False, True)
        """
        data, network = [*group.split(", "), ""][:2]
        names = {normalize_name(data), published_key(data, network)}
        return not names & {*self.skip} and (not self.only or bool(names & {*self.only}))

    def printed_for(self, group: str) -> str:
        """Return the paper's number for a data set and network.

        >>> claim = Claim("Table 2", "a beats b", "ECE", dict, printed={"cifar100, resnet110": "34 %", "": "others"})
        >>> claim.printed_for("CIFAR-100, resnet110, Dir-ODIR"), claim.printed_for("digits, cnn")
        ('34 %', 'others')
        """
        if isinstance(self.printed, str):
            return self.printed
        data, network = [*group.split(", "), ""][:2]
        return self.printed.get(published_key(data, network), self.printed.get("", ""))


class ClaimResult(NamedTuple):
    """The verdict on a claim, on one data set and network."""

    claim: Claim
    group: str
    runs: int
    mean: float
    low: float
    """Lower end of the mean's interval, by Student's t over runs; NaN for one run or equal runs."""
    high: float
    p: float
    """p-value that decides; of a main claim, corrected by Holm's method."""
    verdict: ClaimVerdict

    @property
    def printed(self) -> str:
        """The paper's number."""
        return self.claim.printed_for(self.group)

    @property
    def cells(self) -> list[str]:
        """The printed texts, in the order of `HEADINGS`, without the verdict."""
        claim, digits = self.claim, self.claim.digits
        interval = MISSING if math.isnan(self.low) else f"{self.low:+.{digits}f} to {self.high:+.{digits}f}"
        ours = f"{self.mean:+.{digits}f} ({claim.measured})"
        return [claim.source, claim.text, self.group, self.printed or MISSING, ours, interval, str(self.runs)]


@dataclass(frozen=True)
class ClaimTable(PrintedTable):
    """Every claim for which there are rows, with its verdict."""

    results: tuple[ClaimResult, ...]
    title: str = "Claims"
    notes: tuple[str, ...] = (NOTE,)

    def layout(self) -> tuple[list[str], str]:
        """Return the headings, and l or r for the alignment of each column."""
        return HEADINGS, "lllrrrrl"

    def lines(self, markup: Markup) -> Iterator[str | list[str]]:
        """Yield one row of escaped cells per claim."""
        for result in self.results:
            yield [*map(markup.escape, result.cells), markup.mark(result.verdict, 1)]

    def csv(self) -> str:
        """Format as CSV: one line per claim and data set, in all digits."""
        lines = [
            [c.source, c.text, r.group, r.printed, c.measured, r.mean, r.low, r.high, r.runs, r.p, c.main, r.verdict]
            for r, c in ((result, result.claim) for result in self.results)
        ]
        head = ["source", "claim", "data", "paper", "measured", "mean", "low", "high", "runs", "p", "main", "verdict"]
        return to_csv(lines, head)

    def html(self) -> str:
        """Format as an HTML table; claims that did not hold have the colour of warnings."""
        rows: list[str | list[str | TableCell]] = []
        for result in self.results:
            source, text, group, printed, _, interval, runs = result.cells
            number = f"{result.mean:+.{result.claim.digits}f}"
            note = f"{'no interval' if interval == MISSING else interval}; {runs} {'run' if runs == '1' else 'runs'}"
            verdict = result.verdict
            verdicts = {"held": TableCell(verdict, rank=1), "did not hold": TableCell("", mark=verdict, warn=True)}
            claim = TableCell(text, note=f"{source}. {result.claim.measured}")
            rows.append([claim, group, printed, TableCell(number, note=note), verdicts.get(verdict, verdict)])
        return html_table(self.title, ["claim", "data", "paper", "ours, 95 % interval", "verdict"], rows)


def read_claims(package: str, support: Mapping[str, Callable[..., Mapping[str, Sequence[float]]]]) -> tuple[Claim, ...]:
    """Read the file `claims.toml` of a package; each entry names its support function and that function's options."""
    entries = read_toml(package, "claims.toml")["claim"]
    return tuple(Claim(support=partial(support[e.pop("support")], **e.pop("options", {})), **e) for e in entries)


def judge_claims(
    claims: Sequence[Claim], rows: Rows, options: Options, *, resplit_ratio: Mapping[str, float] | None = None
) -> ClaimTable:
    """Judge each claim on each data set that has rows for it.

    `resplit_ratio` is that of `standard_error`, by data set, where each run splits the same samples anew.

    >>> claim = Claim("Table 1", "a beats b", "ECE of b minus that of a", lambda rows, options: {"digits": [1, 2, 3]})
    >>> result = judge_claims([claim], [], Options()).results[0]
    >>> f"{result.mean:.1f} [{result.low:.2f}, {result.high:.2f}]", result.verdict
    ('2.0 [-0.48, 4.48]', 'not distinguishable')
    """
    results: list[tuple[Claim, str, Sequence[float], float]] = []
    families: dict[str, list[int]] = {}
    for claim in claims:
        ratios = {} if claim.one_split else resplit_ratio or {}
        for group, values in claim.support(rows, options).items():
            if len(values) and claim.covers(group):
                names = group.split(", ")
                if claim.main:
                    families.setdefault(", ".join(names[:2]), []).append(len(results))
                results.append((claim, group, values, ratios.get(names[0], 0.0)))
    p_values = [_p_value(claim, values, ratio) for claim, _, values, ratio in results]
    for members in families.values():
        for index, corrected in zip(members, holm([p_values[i] for i in members]), strict=True):
            p_values[index] = corrected
    return ClaimTable(tuple(_judge(*result, p) for result, p in zip(results, p_values, strict=True)))


def _p_value(claim: Claim, values: Sequence[float], resplit_ratio: float) -> float:
    """Compute the p-value of a claim: over runs by Student's t or by signs, within runs by permutations for ranks."""
    if isinstance(values, Trends):
        return values.p_value(dependent=resplit_ratio > 0)
    numbers, by_sign = np.asarray(values, dtype=float), 2 * 0.5 ** len(values)
    if not is_constant(numbers):
        p = paired_t_test(numbers, resplit_ratio=resplit_ratio)
        return max(p, by_sign) if claim.discrete else p
    # A deterministic method gives the same number with every seed; repeating it is no evidence. Splits that share
    # samples are no independent signs either.
    if not numbers[0] or not (claim.exact or (claim.discrete and not resplit_ratio)):
        return 1.0
    return 0.0 if claim.exact else by_sign


def _judge(claim: Claim, group: str, values: Sequence[float], resplit_ratio: float, p: float) -> ClaimResult:
    numbers = np.asarray(values, dtype=float)
    mean, ends = float(numbers.mean()), (math.nan, math.nan)
    if not is_constant(numbers):
        ends = paired_interval(numbers, resplit_ratio=resplit_ratio)
    verdict: ClaimVerdict = "not distinguishable"
    if p < LEVEL and (mean < 0 or not isinstance(values, Incomplete)):
        verdict = "held" if mean > 0 else "did not hold"
    return ClaimResult(claim, group, len(values), mean, *ends, p, verdict)


def published_key(data: str, network: str) -> str:
    """Return a data set and network in the papers' spelling, the keys of `Claim.printed`.

    >>> published_key("newsgroups20", "text_cnn")
    '20newsgroups, 8layer1dcnn'
    """
    return f"{normalize_name(data)}, {normalize_name(network)}"


def by_group(rows: Rows, *keys: str) -> dict[str, list[Mapping[str, Any]]]:
    """Group rows by the values of these fields, joined to one name.

    >>> list(by_group([{"data": "digits", "network": "cnn"}, {"data": "digits", "network": "mlp"}], "data", "network"))
    ['digits, cnn', 'digits, mlp']
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(", ".join(str(row[key]) for key in keys), []).append(row)
    return groups


def by_run(rows: Rows, metric: str, *fields: str) -> dict[Any, dict[Any, float]]:
    """Map the value of a field, or the values of several, to the finite metric of each run.

    >>> by_run([{"method": "a", "seed": 0, "ece": 0.1}], "ece", "method")
    {'a': {0: 0.1}}
    """
    values: dict[Any, dict[Any, float]] = {}
    for row in rows:
        value = row.get(metric)
        if value is not None and math.isfinite(value):
            key = row[fields[0]] if len(fields) == 1 else tuple(row[field] for field in fields)
            values.setdefault(key, {})[row["seed"]] = float(value)
    return values


def paired(worse: Mapping[Any, float], better: Mapping[Any, float], *, scale: float = 1.0) -> list[float]:
    """Compute the first minus the second for each run that both have, in the order of runs.

    >>> paired({0: 0.25, 1: 0.5}, {1: 0.25}, scale=100)
    [25.0]
    """
    return [scale * (worse[run] - better[run]) for run in sorted(worse.keys() & better.keys())]


def with_common_runs(values: Mapping[Any, Mapping[Any, float]], names: Sequence[Any]) -> dict[Any, dict[Any, float]]:
    """Keep the methods that have runs, each with the runs that all of them share; none if they share none.

    >>> with_common_runs({"a": {0: 0.1, 1: 0.3}, "b": {1: 0.2}}, ["a", "b", "c"])
    {'a': {1: 0.3}, 'b': {1: 0.2}}
    """
    present = [name for name in names if values.get(name)]
    runs = sorted(set.intersection(*(set(values[name]) for name in present))) if present else []
    return {name: {run: values[name][run] for run in runs} for name in present} if runs else {}


def least_on_average(values: Mapping[Any, Mapping[Any, float]], among: Sequence[Any], *, rank: int = 1) -> Any:
    """Return the method with the least mean, or with another rank; None if there are too few methods.

    All methods must have the same runs.
    """
    present = [name for name in among if name in values]
    ordered = sorted(present, key=lambda name: float(np.mean(list(values[name].values()))))
    return ordered[rank - 1] if len(ordered) >= rank else None


def trend(x: Sequence[float], y: Sequence[float]) -> float:
    """Compute Kendall's τ; 0 where one of the two is constant.

    >>> trend([1, 2, 3], [0.1, 0.3, 0.2]), trend([1, 2, 3], [0.1, 0.1, 0.1])
    (0.33333333333333337, 0.0)
    """
    from scipy.stats import kendalltau

    tau = float(kendalltau(x, y).statistic)
    return 0.0 if math.isnan(tau) else tau


def trends(runs: Iterable[tuple[Sequence[float], Sequence[float]]], *, sign: int = 1) -> Trends:
    """Compute `sign` times Kendall's τ (without a correction for ties) of each run's pairs of values.

    >>> trends([([1, 2, 3], [0.1, 0.2, 0.3]), ([1, 2, 3], [0.1, 0.3, 0.2])], sign=-1)
    [-1.0, -0.3333333333333333]
    """

    def surplus(x: np.ndarray, y: np.ndarray) -> float:
        return float((np.sign(x[:, None] - x) * np.sign(y[:, None] - y)).sum()) / 2

    return Trends((len(x), sign * surplus(np.asarray(x), np.asarray(y))) for x, y in runs)
