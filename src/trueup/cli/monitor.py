"""The verb that monitors a stream of predictions: monitor."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trueup.cli import options as o
from trueup.cli.output import print_json, print_remarks, print_table, require_output
from trueup.core.errors import silence_warnings
from trueup.core.formatting import format_evidence, format_number, format_p

if TYPE_CHECKING:
    from trueup.monitor import Monitor, Status

_OPTIONS = {"promise": "--threshold, --at-most"}
FIGURES = ("accuracy", "confidence", "nll", "ece")


def monitor(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE…", help="Logged logits and labels, the oldest first; patterns are sorted."),
    ],
    state: Annotated[
        Path | None,
        typer.Option("--state", metavar="FILE", help="Checkpoint of the monitor: resumed if it exists, and updated."),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option("--alpha", metavar="SHARE", help="Probability of a false alarm, ever (default 0.01)."),
    ] = None,
    window: Annotated[
        int | None, typer.Option("--window", metavar="ROWS", help="Number of recent rows (default 10000).")
    ] = None,
    bins: o.Bins = None,
    threshold: Annotated[
        float | None,
        typer.Option("--threshold", metavar="SHARE", help="With --at-most: answers begin at this confidence."),
    ] = None,
    at_most: Annotated[
        float | None,
        typer.Option("--at-most", metavar="SHARE", help="The share of wrong answers that was promised, checked again."),
    ] = None,
    *,
    reader: Annotated[o.Reader, o.without("class_axis", "ignore_index", "multilabel")],
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Replay logged predictions, and raise an alarm if calibration was lost.

    The test is valid at any time: a calibrated network ever raises the alarm with a probability of at most --alpha. The
    exit code is 3 if the alarm was raised, or if the promise of --threshold and --at-most was broken. With --clusters
    each file holds whole clusters, and one counts as one bet.
    """
    from trueup.monitor import load_monitor, save_monitor

    if state is not None:
        require_output(state, ".safetensors")
    if (threshold is None) != (at_most is None):
        raise ValueError("--threshold and --at-most make a promise together: give both")
    settings = o.drop_unset(alpha=alpha, window=window, bins=bins)
    if threshold is not None:
        settings["promise"] = {"threshold": threshold, "at_most": at_most}
    running = load_monitor(state) if state is not None and state.exists() else None
    if running is not None and settings:
        raise ValueError(
            f"--state {state} has its own settings: leave out {', '.join(_OPTIONS.get(s, f'--{s}') for s in settings)}"
        )
    if reader.clusters is not None and reader.by:
        raise ValueError("--by counts independent rows: give either --by or --clusters")
    number = reader.event_number()
    if running is not None and number is not None and running.event != number:
        watched = "no event" if running.event is None else f"the event {running.event}"
        raise ValueError(f"--state {state} watches {watched}, got --event {reader.event}")
    with silence_warnings(enabled=quiet):
        running, seen = _replay(reader, files, running, settings, quiet, number)
    if state is not None:
        save_monitor(running, state)
    status = running.status()
    if as_json:
        groups = running.by_group()
        found = {} if groups is None else {"groups": groups.to_dict()}
        print_json("monitor", files=seen, state=state, status=status.to_dict(), **found)
    else:
        _print(status, running, quiet)
    if status.alarm is not None or (status.promise is not None and status.promise["broken"]):
        raise typer.Exit(3)


def _replay(
    reader: o.Reader, sources: list[str], running: Monitor | None, settings: dict[str, Any], quiet: bool,
    event: int | None,
) -> tuple[Monitor, list[str]]:  # fmt: skip
    from trueup.core.progress import track
    from trueup.io.predictions import warn_of_skipped
    from trueup.monitor import Monitor

    seen: list[str] = []
    for source in sources:
        shards = reader.find_shards(source, None)
        if reader.clusters is not None:  # a cluster must come whole
            shards = replace(shards, rows=sys.maxsize)
        for path in track(shards.paths, label="replaying", enabled=not quiet):
            skipped = 0
            for part in shards.read(path):
                if running is None:
                    running = Monitor(part.logits.shape[1], event=event, **settings)
                running.update(*part.pair, weights=part.weights, groups=part.groups or None, clusters=part.clusters)
                skipped += part.skipped
            warn_of_skipped(skipped, path)
            seen.append(path)
    assert running is not None  # every source has a file, and every file a part
    return running, seen


def _print(status: Status, running: Monitor, quiet: bool) -> None:
    spans = (("", "all rows"), ("recent_", f"last {status.recent_rows:,}"), ("fading_", "fading"))
    heads = {"accuracy": "observed", "confidence": "predicted"} if status.event else {}
    rows = [["", *(heads.get(figure, figure) for figure in FIGURES)]]
    rows += [[name, *(format_number(getattr(status, prefix + figure)) for figure in FIGURES)] for prefix, name in spans]
    if not quiet:
        event = f"the event is class {running.event} of {running.classes}"
        what = f"{running.classes} classes" if running.event is None else event
        print(f"{status.rows:,} rows, {what}, {running.bins} bins\n")
    print_table(rows)
    held = f"evidence against calibration {format_evidence(status.evidence)}, {format_p(status.p_value)} at any time"
    if status.alarm is None:
        print_remarks(f"No alarm: {held} (alarm at {1 / running.alpha:g}).", quiet=quiet)
    else:
        print_remarks(f"ALARM at row {status.alarm.row:,}: {status.alarm.reason} {held.capitalize()}.")
    if status.promise is not None:
        print_remarks(status.promise["text"], quiet=quiet and not status.promise["broken"])
    if (groups := running.by_group()) is not None:
        print()
        print_table(groups.table())
        print_remarks(groups.verdict(), quiet=quiet)


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    o.add_command(
        app,
        monitor,
        "Measure",
        "trueup monitor monday.npz tuesday.npz",
        "trueup monitor 'logs/*.parquet' --alpha 0.001",
        "trueup monitor today.npz --state watch.safetensors --json",
        "trueup monitor 'logs/*.parquet' --by region",
        "trueup monitor today.npz --threshold 0.83 --at-most 0.02",
    )
