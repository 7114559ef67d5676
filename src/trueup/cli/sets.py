"""The verb sets: prediction sets that hold the truth with a stated probability."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trueup.cli import options as o
from trueup.cli.inputs import Reader
from trueup.cli.output import print_json, require_output
from trueup.core.warning_capture import silence_warnings


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
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="No random part in the scores: larger sets.")
    ] = False,
    probs: o.Probs = False,
    logits: o.Logits = None,
    labels: o.Labels = None,
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

    reader = Reader(probs, logits, labels)
    with silence_warnings(enabled=quiet):
        pair, held_out = reader.load_val_and_test(val, test)
        rule = PredictionSets.fit(
            *pair, **o.drop_unset(score=score, alpha=alpha, seed=seed), by_class=by_class, randomised=not deterministic
        )
        scores = None if held_out is None else evaluate_sets(rule(held_out.logits), held_out.labels)
        sizes = rule(pair.logits).sum(axis=1)
        if out is not None:
            save_prediction_sets(rule, out, summary={"fitted to": val.name, "rows": len(pair.labels)})
    if as_json:
        print_json(
            "sets", val=val, test=test, output=out, score=rule.score, alpha=rule.alpha, rows=len(pair.labels),
            limit=[1 + x for x in rule.quantile.reshape(-1).tolist()], mean_size=float(sizes.mean()),
            scores=None if scores is None else scores.to_dict(),
        )  # fmt: skip
        return
    kind = f"{rule.score.upper()}{', a limit for each class' if by_class else ''}"
    share = f"at most {100 * rule.alpha:g} %"
    print(f"{kind}: a set misses the truth in {share} of rows like the {len(pair.labels):,} of {val}.")
    print(f"\n{scores}" if scores is not None else f"\nThey have {sizes.mean():.2f} classes on average on those rows.")
    if out is not None and not quiet:
        print(f"\nWritten: {out}")


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command(
        rich_help_panel="Decide",
        epilog=o.format_examples(
            "trueup sets val.npz test.npz",
            "trueup sets val.npz test.npz --score raps --alpha 0.05 -o sets.safetensors",
            "trueup sets both.npz --by-class",
        ),
    )(sets)
