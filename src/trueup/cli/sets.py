"""The verb sets: prediction sets that contain the true class with a stated probability."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from trueup._core.formatting import format_interval, format_number
from trueup.cli import options as o
from trueup.cli.output import print_json, print_table, require_output, working


@dataclass(frozen=True)
class Files:
    """Input and output files of `sets`."""

    val: Path = o.argument("VAL", "Logits and labels that were used neither for training nor for calibration.")
    test: Path | None = o.argument("TEST", "Logits and labels to evaluate the sets on.", default=None)
    out: Path | None = o.output_file("FILE", "Save the rule that makes the sets, .safetensors.")


@dataclass(frozen=True)
class Rule:
    """Options of the rule that makes the sets."""

    score: str | None = o.option("NAME", "lac, aps or raps (default aps).")
    coverage: float | None = o.option("SHARE", "Share of sets that contain the true class (default 0.9).")
    by_class: bool = o.switch("Reach the coverage for each class separately.")
    deterministic: bool = o.switch("No randomization of the scores; the sets are larger.")
    seed: int | None = o.option("N", "Random seed (default 0).")


def sets(
    files: Files,
    *,
    rule: Rule,
    reader: Annotated[
        o.Reader,
        o.only(
            "clusters",
            "probs",
            "logits",
            "labels",
            groups="Reach the coverage for each group of this column separately.",
        ),
    ],
    output: o.Output,
) -> None:
    """Make prediction sets that contain the true class nine times in ten.

    The threshold is computed on VAL; coverage and set sizes are measured on TEST. VAL may hold both halves
    (val_logits, test_logits, …).

      $ trueup sets val.npz test.npz
      $ trueup sets val.npz test.npz --score raps --coverage 0.95 -o sets.safetensors
      $ trueup sets both.npz --by-class
      $ trueup sets val.csv test.csv --groups region
    """
    if files.out is not None:
        require_output(files.out, ".safetensors", reads=(files.val, files.test))
    import numpy as np

    from trueup.decisions import PredictionSets, evaluate_sets
    from trueup.io.load_save import save

    with working("making sets", quiet=output.quiet):
        val, test = reader.load_val_and_test(files.val, files.test)
        groups = o.join_groups(val.groups)
        if rule.by_class and groups is not None:
            raise ValueError("give one of --by-class and --groups")
        options = o.set_options(rule, "score", "coverage", "seed") | ({"seed": None} if rule.deterministic else {})
        options |= {"groups": "class" if rule.by_class else groups, "clusters": val.clusters}
        fitted = PredictionSets.fit(*val.pair, **options)
        size = float(fitted(val.logits, groups=groups).sum(axis=1).mean())
        scores, by_group = None, {}
        if test is not None:
            members = o.join_groups(test.groups)
            test_sets = fitted(test.logits, groups=members)
            scores = evaluate_sets(test_sets, test.labels)
            for group in sorted(set(members or ())):
                rows = [i for i, member in enumerate(members or ()) if member == group]
                by_group[group] = evaluate_sets(test_sets[rows], test.labels[rows])
        if files.out is not None:
            save(fitted, files.out, summary={"fitted to": files.val.name, "rows": len(val.labels)})
    coverage = fitted.coverage
    if output.as_json:
        print_json(
            "sets", val=files.val, test=files.test, output=files.out, score=fitted.score, coverage=coverage,
            rows=len(val.labels), limit=[1 + x for x in np.atleast_1d(fitted.quantile).tolist()], mean_size=size,
            scores=None if scores is None else scores.to_dict(),
            **({} if groups is None else {"groups": {g: one.to_dict() for g, one in by_group.items()}}),
        )  # fmt: skip
        return
    each = ", one threshold per class" if rule.by_class else ", one threshold per group" if groups is not None else ""
    rows_of_val = f"rows like the {len(val.labels):,} of {files.val}"
    print(f"{fitted.score.upper()}{each}: sets contain the truth in at least {100 * coverage:g} % of {rows_of_val}.")
    if val.clusters is not None:
        print(f"The threshold uses one row per {val.cluster_name}, because rows of a cluster are correlated.")
    print(f"\n{scores}" if scores is not None else f"\nOn those rows they have {size:.2f} classes on average.")
    if by_group:
        print()
        table = [["group", "rows", "coverage", "95 % interval", "mean size"]]
        for group, one in by_group.items():
            share, interval = one.coverage, format_interval(one.coverage.low, one.coverage.high)
            table.append([group, f"{share.rows:,}", format_number(share.value), interval, f"{one.size:.2f}"])
        print_table(table)
    if files.out is not None and not output.quiet:
        print(f"\nWritten: {files.out}")


register = o.commands("Decide", sets)
