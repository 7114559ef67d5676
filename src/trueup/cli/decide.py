"""The verb decide: from which confidence on to answer, and what to expect of files without labels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from trueup.cli import options as o
from trueup.cli.output import print_json, require_output, working


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
        str | None,
        typer.Option("--event", metavar="CLASS", help="Decide by the probability of this class, a number or a name."),
    ] = None,
    by: Annotated[
        list[str] | None,
        typer.Option("--by", metavar="COLUMN", help="A threshold for each group of this column; all hold together."),
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
    *,
    reader: Annotated[o.Reader, ("clusters", "probs", "logits", "labels", "confidence", "correct", "classes")],
    split: o.Split = None,
    seed: o.Seed = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Find the confidence from which errors are bounded, with a stated certainty.

    The threshold is chosen so that, with the certainty, no more than the stated share of what is answered is wrong; the
    rest is for review. With --event, what is flagged counts instead, and the net benefit of acting on it is shown. With
    NEW, also estimate what its labels would show.
    """
    from trueup.registry import METHODS

    if reader.clusters is not None and event is not None:
        raise ValueError("--clusters takes no --event: the intervals of the net benefit are of independent rows")
    if method is not None:
        o.require_name("method", METHODS, method)
    if out is not None:
        if new is None:
            raise ValueError("--output is for the class frequencies of NEW, which was not given")
        require_output(out, ".safetensors", reads=(val, new))
    reader = replace(reader, by=by, event=event)
    with working("deciding", quiet=quiet):
        table = reader.load(val, split) if split else reader.load_half(val, "val")
        number = reader.event_number(table.classes)
        names = reader.names(table.classes)
        options = o.drop_unset(risk=risk, at_most=at_most, certainty=certainty, method=method)
        found = _threshold(table, reader.confidence is not None, number, options | {"names": names})
        benefit = _net_benefit(table, number, names) if number is not None else None
        prior, performance = (None, None)
        if new is not None:
            prior, performance = _without_labels(reader, new, table.pair, number, seed, quiet)
        if out is not None and prior is not None:
            from trueup.io.artifacts import save_calibrator

            save_calibrator(prior.calibrator, out, classes=table.logits.shape[1], summary={"made for": new.name})  # type: ignore[union-attr]
    parts = {"prior": prior, "performance": performance, "net_benefit": benefit}
    if as_json:
        print_json(
            "decide", val=val, new=new, output=out, threshold=found.to_dict(), text=str(found),
            **{name: None if part is None else part.to_dict() for name, part in parts.items()},
        )  # fmt: skip
        return
    print(found)
    for part in parts.values():
        if part is not None:
            print(f"\n{part}")
    if prior is not None and table.clusters is not None:
        from trueup.decisions.label_shift import INDEPENDENT

        print(f"\n{INDEPENDENT}")
    if out is not None and not quiet:
        print(f"\nWritten: {out}")


def _threshold(table: Any, stated: bool, event: int | None, options: dict[str, Any]) -> Any:
    from trueup.decisions import threshold

    groups = o.join_groups(table.groups)
    if table.clusters is not None:
        options = options | {"clusters": {table.cluster_name: table.clusters}}
    if stated:
        if event is not None or options.get("risk", "error") != "error":
            raise ValueError("--confidence is about right and wrong answers: leave out --event and --risk")
        # The event is that the answer is right; what holds for it holds for the answers.
        found = threshold(*table.pair, groups=groups, **options | {"risk": "false_discovery_rate"}, event=1)
        if groups is None:
            return replace(found, risk="error", event=None)
        return replace(found, groups={g: replace(one, risk="error", event=None) for g, one in found.groups.items()})
    if event is not None:
        options = {"risk": "false_discovery_rate"} | options | {"event": event}
        if options["risk"] == "error":
            raise ValueError("--event goes with --risk false_discovery_rate or false_positive_rate, got error")
    return threshold(*table.pair, groups=groups, **options)


def _net_benefit(table: Any, event: int, names: tuple[str, ...] | None) -> Any:
    from trueup.decisions import net_benefit

    return net_benefit(*table.pair, event=event, names=names)


def _without_labels(
    reader: o.Reader, new: Path, pair: Any, event: int | None, seed: int | None, quiet: bool
) -> tuple[Any, Any]:
    from trueup.decisions import estimate_performance, estimate_prior

    reader = replace(reader, by=None, clusters=None)
    unlabelled = reader.load_unlabelled(new)
    rows = reader.load_half(new, "test").logits if unlabelled is None else unlabelled
    options = o.drop_unset(seed=seed)
    prior = estimate_prior(rows, val=tuple(pair), **options, progress=not quiet)
    if event is not None:
        options |= {"metrics": ("accuracy", "f1", "roc_auc"), "event": event}
    performance = estimate_performance(rows, val=tuple(pair), shift=prior.moved, **options, progress=not quiet)
    return prior, performance


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    o.add_command(
        app,
        decide,
        "Decide",
        "trueup decide val.npz --at-most 0.02",
        "trueup decide risk.csv --event ill --classes well,ill --at-most 0.1",
        "trueup decide val.npz --risk false_positive_rate --at-most 0.01 --event 1",
        "trueup decide answers.csv --confidence stated --at-most 0.1 --by category",
        "trueup decide val.npz --at-most 0.05 -m temperature",
        "trueup decide val.npz traffic.npz -o corrected.safetensors",
    )
