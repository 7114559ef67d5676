"""The verb plan: how many labels it takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from trueup.cli import options as o
from trueup.cli.output import print_json, working


@dataclass(frozen=True)
class Goals:
    """What the labels are for."""

    rows: int | None = o.option("N", "What could so many rows show? (those of FILE, if not given)")
    error: float | None = o.option("ECE", "Rows to detect this calibration error.")
    precision: float | None = o.option("ECE", "Rows to know the ECE this precisely.")
    max_risk: float | None = o.option("SHARE", "Rows to promise an error rate.")
    coverage: float | None = o.option("SHARE", "… on this share of the rows.")
    level: float | None = o.option("SHARE", "Certainty of the promise (default 0.95).")
    seed: int | None = o.option("N", "Random seed (default 0).")


def plan(
    file: Annotated[Path, o.argument("FILE", "Some logits and labels, to plan with.")],
    *,
    goals: Goals,
    other: Annotated[
        Path | None, o.option("FILE", "Rows to detect a difference from this file: another method, same rows.")
    ] = None,
    reader: Annotated[o.Reader, o.only("probs", "logits", "labels")],
    split: Annotated[o.Sharding, o.only("split")],
    output: o.Output,
) -> None:
    """Tell how many labels it takes to see a calibration error, to promise, to compare.

    Examples:
      $ trueup plan val.npz
      $ trueup plan val.npz --rows 1000 --error 0.01
      $ trueup plan val.npz --max-risk 0.02 --coverage 0.7
      $ trueup plan val.npz --other calibrated.npz
    """
    from trueup.decisions.planning import Comparison, Detection, Promise
    from trueup.decisions.planning import plan as make_plan

    with working("planning", quiet=output.quiet):
        pair = reader.load(file, split.split)
        options: dict[str, Any] = o.set_options(goals, "precision", "seed")
        options["detection"] = Detection(goals.rows, goals.error)
        if goals.max_risk is not None:
            options["promise"] = Promise(**o.set_options(goals, "max_risk", "coverage", "level"))
        elif goals.coverage is not None:
            raise ValueError("--coverage goes with --max-risk, the promise that so many rows are to have")
        if other is not None:
            options["comparison"] = Comparison(reader.load(other, split.split).logits)
        made = make_plan(*pair, **options)
    if output.as_json:
        print_json("plan", file=file, split=split.split, text=str(made), plan=made.to_dict())
        return
    print(made)


register = o.commands("Decide", plan)
