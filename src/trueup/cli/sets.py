"""The verb sets: prediction sets that hold the truth with a stated probability."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from trueup.cli import options as o
from trueup.cli.output import print_json, print_table, require_output, working
from trueup.core.formatting import format_interval, format_number


def sets(
    val: Annotated[
        Path,
        typer.Argument(metavar="VAL", help="Logits and labels that neither the network nor a calibrator has seen."),
    ],
    test: Annotated[
        Path | None, typer.Argument(metavar="TEST", help="Logits and labels on which the sets are judged.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="The rule of the sets, .safetensors.")
    ] = None,
    score: Annotated[
        str | None, typer.Option("--score", metavar="NAME", help="lac, aps or raps (default aps).")
    ] = None,
    alpha: Annotated[
        float | None, typer.Option("--alpha", metavar="SHARE", help="How often a set may miss the truth (default 0.1).")
    ] = None,
    by_class: Annotated[bool, typer.Option("--by-class", help="Cover each class by itself.")] = False,
    by: Annotated[
        list[str] | None, typer.Option("--by", metavar="COLUMN", help="Cover each group of this column by itself.")
    ] = None,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="No random part in the scores: larger sets.")
    ] = False,
    *,
    reader: Annotated[o.Reader, ("clusters", "probs", "logits", "labels")],
    seed: o.Seed = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Make prediction sets that hold the truth nine times in ten.

    The limit comes from VAL; coverage and sizes are measured on TEST. VAL may hold both halves (val_logits,
    test_logits, …).
    """
    if out is not None:
        require_output(out, ".safetensors", reads=(val, test))
    from trueup.decisions import PredictionSets, evaluate_sets, save_prediction_sets

    reader = replace(reader, by=by)
    with working("making sets", quiet=quiet):
        val_table, test_table = reader.load_val_and_test(val, test)
        groups = o.join_groups(val_table.groups)
        options = o.drop_unset(score=score, alpha=alpha, seed=seed)
        rule = PredictionSets.fit(
            *val_table.pair,
            **options,
            by_class=by_class,
            groups=groups,
            clusters=val_table.clusters,
            randomised=not deterministic,
        )
        own = rule(val_table.logits, groups=groups)
        scores, by_group = None, {}
        if test_table is not None:
            members = o.join_groups(test_table.groups)
            chosen = rule(test_table.logits, groups=members)
            scores = evaluate_sets(chosen, test_table.labels)
            for group in sorted(set(members or ())):
                rows = [i for i, member in enumerate(members or ()) if member == group]
                by_group[group] = evaluate_sets(chosen[rows], test_table.labels[rows])
        if out is not None:
            save_prediction_sets(rule, out, summary={"fitted to": val.name, "rows": len(val_table.labels)})
    size, rows_of_val = float(own.sum(axis=1).mean()), len(val_table.labels)
    if as_json:
        print_json(
            "sets", val=val, test=test, output=out, score=rule.score, alpha=rule.alpha, rows=rows_of_val,
            limit=[1 + x for x in rule.quantile.reshape(-1).tolist()], mean_size=size,
            scores=None if scores is None else scores.to_dict(),
            **({} if groups is None else {"groups": {g: one.to_dict() for g, one in by_group.items()}}),
        )  # fmt: skip
        return
    each = ", a limit for each class" if by_class else ", a limit for each group" if groups is not None else ""
    share = f"at most {100 * rule.alpha:g} %"
    print(f"{rule.score.upper()}{each}: a set misses the truth in {share} of rows like the {rows_of_val:,} of {val}.")
    if val_table.clusters is not None:
        print(f"One row of each {val_table.cluster_name} made the limit, since rows of one are correlated.")
    print(f"\n{scores}" if scores is not None else f"\nThey have {size:.2f} classes on average on those rows.")
    if by_group:
        print()
        head = ["group", "rows", "coverage", "95 % interval", "mean size"]
        print_table([head, *(_row(group, one) for group, one in by_group.items())])
    if out is not None and not quiet:
        print(f"\nWritten: {out}")


def _row(group: str, scores: Any) -> list[str]:
    one = scores.coverage
    interval = format_interval(one.low, one.high)
    return [group, f"{one.rows:,}", format_number(one.value), interval, f"{scores.size:.2f}"]


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    o.add_command(
        app,
        sets,
        "Decide",
        "trueup sets val.npz test.npz",
        "trueup sets val.npz test.npz --score raps --alpha 0.05 -o sets.safetensors",
        "trueup sets both.npz --by-class",
        "trueup sets val.csv test.csv --by region",
    )
