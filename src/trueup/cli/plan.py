"""The verb plan: how many labels are needed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from trueup.cli import options as o
from trueup.cli.output import print_json, working


@dataclass(frozen=True)
class Goals:
    """Goals that the labels must reach."""

    rows: int | None = o.option("N", "Number of rows: which errors could they detect? (default: the rows of FILE)")
    error: float | None = o.option("ECE", "Plan to detect this calibration error.")
    precision: float | None = o.option("ECE", "Plan for an interval of the ECE with this half-width.")
    max_risk: float | None = o.option("SHARE", "Plan to guarantee this error rate.")
    coverage: float | None = o.option("SHARE", "With --max-risk: answer this share of the rows.")
    level: float | None = o.option("SHARE", "Confidence level of the guarantee (default 0.95).")
    seed: int | None = o.option("N", "Random seed (default 0).")


def plan(
    file: Annotated[Path, o.argument("FILE", "A sample of logits and labels to plan with.")],
    *,
    goals: Goals,
    other: Annotated[
        Path | None,
        o.option("FILE", "Plan to detect a difference from this file, which has another method on the same rows."),
    ] = None,
    reader: Annotated[o.Reader, o.only("probs", "logits", "labels")],
    split: Annotated[o.Sharding, o.only("split")],
    output: o.Output,
) -> None:
    """Compute how many labels are needed to detect a calibration error, to guarantee a risk, or to compare methods.

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
            raise ValueError("--coverage goes with --max-risk: name the risk too")
        if other is not None:
            options["comparison"] = Comparison(reader.load(other, split.split).logits)
        result = make_plan(*pair, **options)
    if output.as_json:
        print_json("plan", file=file, split=split.split, text=str(result), plan=result.to_dict())
        return
    print(result)


register = o.commands("Decide", plan)
