"""The verb decide: from which confidence on to answer, and what can be said of files without labels."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from trueup.cli import options as o
from trueup.cli.inputs import Reader
from trueup.cli.output import print_json, require_output
from trueup.core.warning_capture import silence_warnings


def decide(
    val: Annotated[
        Path,
        typer.Argument(metavar="VAL", help="Logits and labels that neither the network nor a calibrator has seen."),
    ],
    new: Annotated[
        Path | None,
        typer.Argument(metavar="NEW", help="Logits without labels: their class frequencies and expected accuracy."),
    ] = None,
    risk: Annotated[
        str | None,
        typer.Option(
            "--risk",
            metavar="NAME",
            help="What to bound: error, false_discovery_rate or false_positive_rate (default error).",
        ),
    ] = None,
    at_most: Annotated[
        float | None, typer.Option("--at-most", metavar="SHARE", help="The largest risk allowed (default 0.02).")
    ] = None,
    certainty: Annotated[
        float | None, typer.Option("--certainty", metavar="SHARE", help="Certainty of the promise (default 0.95).")
    ] = None,
    event: Annotated[
        int | None, typer.Option("--event", metavar="CLASS", help="The class that is the event (default 1).")
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            "--method", "-m", metavar="NAME", help="Calibrate first: half of the rows fit, the others promise."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="With NEW: a calibrator for its class frequencies."),
    ] = None,
    probs: o.Probs = False,
    logits: o.Logits = None,
    labels: o.Labels = None,
    confidence: o.Confidence = None,
    correct: o.Correct = None,
    split: o.Split = None,
    seed: o.Seed = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Find the confidence from which errors are bounded, with a stated certainty.

    The threshold is chosen so that, with the certainty, no more than the stated share of what is answered is wrong; the
    rest is for review. With NEW, also estimate what its labels would show. Of stated confidences, what is bounded is
    how many of the claims above the threshold are wrong (false_discovery_rate).
    """
    from trueup.registry import METHODS

    if method is not None:
        o.require_name("method", METHODS, method)
    if out is not None:
        if new is None:
            raise ValueError("--output is for the class frequencies of NEW, which was not given")
        require_output(out, ".safetensors", reads=(val, new))
    from trueup.decisions import threshold

    reader = Reader(probs, logits, labels, confidence, correct)
    if confidence is not None and risk is None:
        risk = "false_discovery_rate"  # an answer that claims to be wrong is not given
    with silence_warnings(enabled=quiet):
        pair = reader.load(val, split) if split else reader.load_half(val, "val")
        options = o.drop_unset(risk=risk, at_most=at_most, certainty=certainty, event=event, method=method)
        found = threshold(*pair, **options)
        prior, performance = (None, None) if new is None else _without_labels(reader, new, pair, seed, quiet)
        if out is not None and prior is not None:
            from trueup.io.artifacts import save_calibrator

            save_calibrator(prior.calibrator, out, classes=pair.logits.shape[1], summary={"made for": new.name})  # type: ignore[union-attr]
    if as_json:
        print_json(
            "decide", val=val, new=new, output=out, threshold=found.to_dict(), text=str(found),
            prior=None if prior is None else prior.to_dict(),
            performance=None if performance is None else performance.to_dict(),
        )  # fmt: skip
        return
    print(found)
    for part in (prior, performance):
        if part is not None:
            print(f"\n{part}")
    if out is not None and not quiet:
        print(f"\nWritten: {out}")


def _without_labels(reader: Reader, new: Path, pair: Any, seed: int | None, quiet: bool) -> tuple[Any, Any]:
    from trueup.decisions import estimate_performance, estimate_prior

    unlabelled = reader.load_unlabelled(new)
    rows = reader.load_half(new, "test").logits if unlabelled is None else unlabelled
    options = o.drop_unset(seed=seed)
    prior = estimate_prior(rows, val=tuple(pair), **options, progress=not quiet)
    performance = estimate_performance(rows, val=tuple(pair), shift=prior.moved, **options, progress=not quiet)
    return prior, performance


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command(
        rich_help_panel="Decide",
        epilog=o.format_examples(
            "trueup decide val.npz --at-most 0.02",
            "trueup decide val.npz --risk false_positive_rate --at-most 0.01 --event 1",
            "trueup decide val.npz --at-most 0.05 -m temperature",
            "trueup decide val.npz traffic.npz -o corrected.safetensors",
            "trueup decide answers.csv --confidence stated --correct right --at-most 0.1",
        ),
    )(decide)
