"""What a paper claims, and whether it held in the rows of a study: a paired difference, its interval and a verdict."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from typing import Any, Literal, NamedTuple

import numpy as np

from trueup.reports.html import TableCell
from trueup.reports.html import table as html_table
from trueup_studies.grid import Options, Rows, read_toml
from trueup_studies.published import normalize_name
from trueup_studies.statistics import LEVEL, is_constant, paired_interval
from trueup_studies.tables import MISSING, latex_row, latex_text, pipe_row, to_csv

ClaimVerdict = Literal["held", "did not hold", "not distinguishable"]
NOTE = " ".join(files("trueup_studies").joinpath("templates/claims_note.txt").read_text(encoding="utf-8").split())
HEADINGS = ("source", "claim", "data", "paper", "ours", "95 % interval", "runs", "verdict")


class Incomplete(list[float]):
    """Numbers of a claim about all of some methods, not all of which were run: they may refute it, not confirm it."""


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, and what of the rows speaks for it.

    `support` gives, for each data set and network, one number a run: how far the run speaks for the claim. It is a
    paired difference, positive where the claim is true of the run.
    """

    source: str
    """Where the paper says so: "Table 2"."""
    text: str
    """What it says."""
    measured: str
    """What the numbers of `support` are, with their unit."""
    support: Callable[[Rows, Options], Mapping[str, Sequence[float]]]
    digits: int = 2
    printed: str | Mapping[str, str] = ""
    """The paper's own number, where it prints one: the same for all, or by data set and network as `published_key`
    names them, under "" for those that the paper has not."""
    discrete: bool = False
    """Whether the numbers have few values, as rank correlations: some runs may agree by chance, or nearly."""
    exact: bool = False
    """Whether the numbers are counted, not measured: one run then says all."""
    one_split: bool = False
    """Whether its runs are of one split, though those of the study each split the samples anew."""
    only: Sequence[str] = ()
    """Data sets that it is of, or data sets and networks, as `published_key` names them; of all if empty."""
    skip: Sequence[str] = ()
    """Those that it is not of."""

    def covers(self, group: str) -> bool:
        """Whether the claim is of a data set and network.

        >>> claim = Claim("Table 2", "a beats b", "ECE", dict, skip=["cifar10"])
        >>> claim.covers("CIFAR-10, resnet110"), claim.covers("CIFAR-100, resnet110")
        (False, True)
        """
        data, network = [*group.split(", "), ""][:2]
        names = {normalize_name(data), published_key(data, network)}
        return not names & {*self.skip} and (not self.only or bool(names & {*self.only}))

    def printed_for(self, group: str) -> str:
        """What the paper prints for a data set and network.

        >>> claim = Claim("Table 2", "a beats b", "ECE", dict, printed={"cifar100, resnet110": "34 %", "": "others"})
        >>> claim.printed_for("CIFAR-100, resnet110, Dir-ODIR"), claim.printed_for("digits, cnn")
        ('34 %', 'others')
        """
        if isinstance(self.printed, str):
            return self.printed
        data, network = [*group.split(", "), ""][:2]
        return self.printed.get(published_key(data, network), self.printed.get("", ""))


class ClaimResult(NamedTuple):
    """A claim on one data set and network."""

    claim: Claim
    group: str
    runs: int
    mean: float
    low: float
    """The interval of the mean, by Student's t over runs; NaN of one run, or of runs that say all the same."""
    high: float
    verdict: ClaimVerdict

    @property
    def printed(self) -> str:
        """What the paper has there."""
        return self.claim.printed_for(self.group)

    @property
    def cells(self) -> tuple[str, ...]:
        """Its texts, in the order of `HEADINGS`."""
        digits = self.claim.digits
        interval = MISSING if math.isnan(self.low) else f"{self.low:+.{digits}f} to {self.high:+.{digits}f}"
        ours = f"{self.mean:+.{digits}f} ({self.claim.measured})"
        text = self.claim.source, self.claim.text, self.group, self.printed or MISSING, ours, interval
        return *text, str(self.runs), self.verdict


@dataclass(frozen=True)
class ClaimTable:
    """Every claim that the rows can judge."""

    results: tuple[ClaimResult, ...]
    title: str = "Claims"
    notes: tuple[str, ...] = (NOTE,)

    def markdown(self) -> str:
        """A table of GitHub's kind."""
        lines = [self.title, "", pipe_row(HEADINGS), "|:--|:--|:--|--:|--:|--:|--:|:--|"]
        lines += [pipe_row([*result.cells[:-1], f"**{result.verdict}**"]) for result in self.results]
        return "\n".join([*lines, *(f"\n{note}" for note in self.notes)])

    def latex(self) -> str:
        """A `tabular` for the booktabs package."""
        head, *body = (latex_row(map(latex_text, cells)) for cells in (HEADINGS, *(r.cells for r in self.results)))
        begin = rf"\begin{{tabular}}{{{'l' * len(HEADINGS)}}}"
        return "\n".join([begin, r"\toprule", head, r"\midrule", *body, r"\bottomrule", r"\end{tabular}"])

    def csv(self) -> str:
        """One line a claim and data set, in all digits."""
        lines = [
            [c.source, c.text, r.group, r.printed, c.measured, r.mean, r.low, r.high, r.runs, r.verdict]
            for r, c in ((result, result.claim) for result in self.results)
        ]
        head = ["source", "claim", "data", "paper", "measured", "mean", "low", "high", "runs", "verdict"]
        return to_csv(lines, head)

    def html(self) -> str:
        """A table of a page, whose claims wrap; what did not hold is in the colour of warnings."""
        rows: list[str | list[str | TableCell]] = []
        for result in self.results:
            source, text, group, printed, _, interval, runs, verdict = result.cells
            number = f"{result.mean:+.{result.claim.digits}f}"
            where = f"{'no interval' if interval == MISSING else interval}; {runs} {'run' if runs == '1' else 'runs'}"
            verdicts = {"held": TableCell(verdict, rank=1), "did not hold": TableCell("", mark=verdict, warn=True)}
            claim = TableCell(text, note=f"{source}. {result.claim.measured}")
            rows.append([claim, group, printed, TableCell(number, note=where), verdicts.get(verdict, verdict)])
        return html_table(self.title, ["claim", "data", "paper", "ours, 95 % interval", "verdict"], rows)


def read_claims(package: str, support: Mapping[str, Callable[..., Mapping[str, Sequence[float]]]]) -> tuple[Claim, ...]:
    """The claims in the file `claims.toml` of a package, each supported by a function with the options named there."""
    entries = read_toml(package, "claims.toml")["claim"]
    return tuple(Claim(support=partial(support[e.pop("support")], **e.pop("options", {})), **e) for e in entries)


def judge_claims(
    claims: Sequence[Claim], rows: Rows, options: Options, *, resplit_ratio: Mapping[str, float] | None = None
) -> ClaimTable:
    """Judge each claim on each data set that has rows for it.

    `resplit_ratio` is that of `standard_error`, by data set, for those whose samples each run splits anew.

    >>> claim = Claim("Table 1", "a beats b", "ECE of b less that of a", lambda rows, options: {"digits": [1, 2, 3]})
    >>> result = judge_claims([claim], [], Options()).results[0]
    >>> f"{result.mean:.1f} [{result.low:.2f}, {result.high:.2f}]", result.verdict
    ('2.0 [-0.48, 4.48]', 'not distinguishable')
    """
    results = []
    for claim in claims:
        ratios = {} if claim.one_split else resplit_ratio or {}
        for group, values in claim.support(rows, options).items():
            if len(values) and claim.covers(group):
                ratio = ratios.get(group.split(", ")[0], 0.0)
                result = _judge(claim, group, np.asarray(values, dtype=float), ratio)
                if isinstance(values, Incomplete) and result.verdict == "held":
                    result = result._replace(verdict="not distinguishable")
                results.append(result)
    return ClaimTable(tuple(results))


def _judge(claim: Claim, group: str, values: np.ndarray, resplit_ratio: float) -> ClaimResult:
    runs, mean = len(values), float(values.mean())
    low, high = math.nan, math.nan
    certain = not claim.discrete or 2 * 0.5**runs < LEVEL
    if not is_constant(values):
        low, high = sides = paired_interval(values, resplit_ratio=resplit_ratio)
    else:
        # What draws nothing says the same with every seed: repeated, it would seem certain. Nor are splits that share
        # samples so many signs.
        certain = claim.exact or (claim.discrete and certain and not resplit_ratio)
        sides = mean, mean
    verdict: ClaimVerdict = "not distinguishable"
    if certain and (sides[0] > 0 or sides[1] < 0):
        verdict = "held" if mean > 0 else "did not hold"
    return ClaimResult(claim, group, runs, mean, low, high, verdict)


def published_key(data: str, network: str) -> str:
    """A data set and network in the papers' spelling, by which `Claim.printed` has them.

    >>> published_key("newsgroups20", "text_cnn")
    '20newsgroups, 8layer1dcnn'
    """
    return f"{normalize_name(data)}, {normalize_name(network)}"


def by_group(rows: Rows, *keys: str) -> dict[str, list[Mapping[str, Any]]]:
    """Rows by the values of these fields, joined to a name.

    >>> list(by_group([{"data": "digits", "network": "cnn"}, {"data": "digits", "network": "mlp"}], "data", "network"))
    ['digits, cnn', 'digits, mlp']
    """
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault(", ".join(str(row[key]) for key in keys), []).append(row)
    return groups


def by_run(rows: Rows, method: Callable[[Mapping[str, Any]], Hashable], figure: str) -> dict[Any, dict[Any, float]]:
    """Method → run → figure.

    >>> by_run([{"m": "a", "seed": 0, "ece": 0.1}], lambda row: row["m"], "ece")
    {'a': {0: 0.1}}
    """
    values: dict[Any, dict[Any, float]] = {}
    for row in rows:
        value = row.get(figure)
        if value is not None and math.isfinite(value):  # what could not be measured says nothing
            values.setdefault(method(row), {})[row["seed"]] = float(value)
    return values


def paired(worse: Mapping[Any, float], better: Mapping[Any, float], *, scale: float = 1.0) -> list[float]:
    """What the first has more than the second, run by run, in the order of runs.

    >>> paired({0: 0.25, 1: 0.5}, {1: 0.25}, scale=100)
    [25.0]
    """
    return [scale * (worse[run] - better[run]) for run in sorted(worse.keys() & better.keys())]


def with_common_runs(values: Mapping[Any, Mapping[Any, float]], names: Sequence[Any]) -> dict[Any, dict[Any, float]]:
    """Those of the methods that have any run, each with the runs that all of them have; none if they share none.

    >>> with_common_runs({"a": {0: 0.1, 1: 0.3}, "b": {1: 0.2}}, ["a", "b", "c"])
    {'a': {1: 0.3}, 'b': {1: 0.2}}
    """
    present = [name for name in names if values.get(name)]
    runs = sorted(set.intersection(*(set(values[name]) for name in present))) if present else []
    return {name: {run: values[name][run] for run in runs} for name in present} if runs else {}


def least_on_average(values: Mapping[Any, Mapping[Any, float]], among: Sequence[Any], *, rank: int = 1) -> Any:
    """The method of least mean, or that of another rank, of methods with the same runs; None if there is none."""
    present = [name for name in among if name in values]
    ordered = sorted(present, key=lambda name: float(np.mean(list(values[name].values()))))
    return ordered[rank - 1] if len(ordered) >= rank else None


def trend(x: Sequence[float], y: Sequence[float]) -> float:
    """Kendall's τ; 0 where one of the two never changes.

    >>> trend([1, 2, 3], [0.1, 0.3, 0.2]), trend([1, 2, 3], [0.1, 0.1, 0.1])
    (0.33333333333333337, 0.0)
    """
    from scipy.stats import kendalltau

    tau = float(kendalltau(x, y).statistic)
    return 0.0 if math.isnan(tau) else tau
