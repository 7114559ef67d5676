"""The verb judge: the rate of right answers from a judge's labels of all and human labels of some."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Annotated, Any

from trueup.cli import options as o
from trueup.cli.output import print_json, print_remarks, print_table, working


@dataclass(frozen=True)
class Columns:
    """Columns of the file."""

    judge: str = o.option("COLUMN", "The judge's labels or scores in [0, 1] (default judge).", default="judge")
    human: str = o.option("COLUMN", "Human labels; empty where there is none (default human).", default="human")
    strata: str | None = o.option("COLUMN", "System or category; human labels may be more frequent in some.")
    clusters: str | None = o.option("COLUMN", "Question of each answer, where answers are correlated.")


def judge(
    file: Annotated[str, o.argument("FILE", "One row per answer: .csv, .jsonl, .parquet or .npz.")],
    *,
    columns: Columns,
    method: Annotated[str | None, o.option("ppi|rogan-gladen", "How to correct the judge (default ppi).")] = None,
    level: Annotated[float | None, o.option("SHARE", "Coverage of the intervals (default 0.95).")] = None,
    precision: Annotated[
        float | None, o.option("SHARE", "Compute how many human labels an interval of this half-width takes.")
    ] = None,
    output: o.Output,
) -> None:
    """Estimate the rate of right answers, labelled by a language-model judge and in part by people.

    A label is 1 or 0, true or false, yes or no, or a score in [0, 1].

      $ trueup judge answers.csv
      $ trueup judge answers.jsonl --judge gpt --human expert --clusters question
      $ trueup judge answers.csv --strata system --precision 0.02
    """
    from trueup.decisions.judges import judge_rate

    with working("estimating", quiet=output.quiet):
        table = _load(file, columns)
        options: dict[str, Any] = o.drop_unset(method=method, level=level)
        options |= {name: table[column] for name, column in o.set_options(columns, "strata", "clusters").items()}
        result = judge_rate(table[columns.judge], table[columns.human], **options)
        plan = None if precision is None else result.plan(precision)
    if output.as_json:
        plans = {} if plan is None else {"plan": vars(plan)}
        print_json("judge", file=file, verdict=result.verdict(), rates=result.to_dict(), **plans)
        return
    if not output.quiet:
        print(f"{result.caption()}\n")
    print_table(result.table())
    print_remarks(result.verdict(), "" if plan is None else str(plan), quiet=output.quiet)


def _load(path: str, columns: Columns) -> dict[str, list[Any]]:
    """Read columns as they are."""
    from trueup.io.atomic import errors_name_file
    from trueup.io.predictions import open_predictions
    from trueup.io.source import Plan, as_list, gather, require_columns

    names = list(dict.fromkeys(o.set_options(columns).values()))
    with open_predictions(path) as file, errors_name_file(file.name):
        require_columns(file.source.columns, names)
        chunk = gather(file.source.read(Plan([], others=names), sys.maxsize))
        if not len(chunk.others[columns.judge]):
            raise ValueError("there are no rows")
        return {name: as_list(chunk.others[name]) for name in names}


register = o.commands("Decide", judge)
