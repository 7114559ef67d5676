"""The verb plan: how many labels it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trueup.cli import options as o
from trueup.cli.output import print_json, working


def plan(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Some logits and labels, to plan with.")],
    rows: Annotated[
        int | None,
        typer.Option("--rows", metavar="N", help="What could so many rows show? (those of FILE, if not given)"),
    ] = None,
    error: Annotated[
        float | None, typer.Option("--error", metavar="ECE", help="Rows to detect this calibration error.")
    ] = None,
    precision: Annotated[
        float | None, typer.Option("--precision", metavar="ECE", help="Rows to know the ECE this precisely.")
    ] = None,
    at_most: Annotated[
        float | None, typer.Option("--at-most", metavar="SHARE", help="Rows to promise an error rate.")
    ] = None,
    coverage: Annotated[
        float | None, typer.Option("--coverage", metavar="SHARE", help="… on this share of the rows.")
    ] = None,
    certainty: Annotated[
        float | None, typer.Option("--certainty", metavar="SHARE", help="Certainty of the promise (default 0.95).")
    ] = None,
    beside: Annotated[
        Path | None,
        typer.Option(
            "--beside", metavar="FILE", help="Rows to detect a difference from this file: another method, same rows."
        ),
    ] = None,
    *,
    reader: Annotated[o.Reader, ("probs", "logits", "labels")],
    split: o.Split = None,
    seed: o.Seed = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Tell how many labels it takes to see a calibration error, to promise, to compare."""
    from trueup.decisions import plan as make_plan

    with working("planning", quiet=quiet):
        pair = reader.load(file, split)
        other = None if beside is None else reader.load(beside, split).logits
        options = o.drop_unset(
            rows=rows, error=error, precision=precision, at_most=at_most, coverage=coverage, certainty=certainty,
            seed=seed,
        )  # fmt: skip
        found = make_plan(*pair, **options, beside=other)
    if as_json:
        print_json("plan", file=file, split=split, text=str(found), plan=found.to_dict())
        return
    print(found)


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    o.add_command(
        app,
        plan,
        "Decide",
        "trueup plan val.npz",
        "trueup plan val.npz --rows 1000 --error 0.01",
        "trueup plan val.npz --at-most 0.02 --coverage 0.7",
        "trueup plan val.npz --beside calibrated.npz",
    )
