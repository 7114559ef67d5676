"""The verb that watches: monitor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trueup.cli import options as o
from trueup.cli.files import Names, output
from trueup.cli.output import print_json, print_remarks, print_table
from trueup.core.formatting import format_number
from trueup.core.warning_capture import silence_warnings

if TYPE_CHECKING:
    from trueup.monitor import Monitor, Status

MONITOR = "trueup.monitor.monitor:Monitor"
FIGURES = ("accuracy", "confidence", "nll", "ece")


def monitor(
    files: Annotated[
        list[str], typer.Argument(metavar="FILE…", help="Logged logits and labels, oldest first; patterns are sorted.")
    ],
    state: Annotated[
        Path | None,
        typer.Option(
            "--state", metavar="FILE", help="A checkpoint to go on from, if it is there, and to keep current."
        ),
    ] = None,
    alpha: Annotated[
        float | None,
        typer.Option("--alpha", metavar="SHARE", help=o.help_of("Chance of a false alarm, ever", MONITOR, "alpha")),
    ] = None,
    window: Annotated[
        int | None, typer.Option("--window", metavar="ROWS", help=o.help_of("Rows of the window", MONITOR, "window"))
    ] = None,
    bins: Annotated[
        int | None,
        typer.Option("--bins", metavar="N", help=o.help_of("Bins of the calibration errors", MONITOR, "bins")),
    ] = None,
    probs: o.Probs = False,
    logits: o.Logits = None,
    labels: o.Labels = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Replay logged predictions, and tell whether calibration was lost on the way.

    The alarm holds whenever one looks: a calibrated network raises it ever with a chance of at most --alpha. Ends with
    code 3 if it was raised.
    """
    from trueup.monitor import load_monitor, save_monitor

    if state is not None:
        output(state, ".safetensors")
    settings = o.given(alpha=alpha, window=window, bins=bins)
    watching = load_monitor(state) if state is not None and state.exists() else None
    if watching is not None and settings:
        raise ValueError(f"--state {state} has its own settings: leave out {', '.join(f'--{s}' for s in settings)}")
    with silence_warnings(enabled=quiet):
        watching, seen = _replayed(Names(probs, logits, labels), files, watching, settings, quiet)
    if state is not None:
        save_monitor(watching, state)
    status = watching.status()
    if as_json:
        print_json("monitor", files=seen, state=state, status=status.to_dict())
    else:
        _print(status, watching, quiet)
    if status.alarm is not None:
        raise typer.Exit(3)


def _replayed(
    names: Names, places: list[str], watching: Monitor | None, settings: dict[str, Any], quiet: bool
) -> tuple[Monitor, list[str]]:
    from trueup.core.progress import track
    from trueup.monitor import Monitor

    seen: list[str] = []
    for place in places:
        shards = names.source(place, None)
        for path in track(shards.paths, label="replaying", enabled=not quiet):
            for part in shards.read(path):
                if watching is None:
                    watching = Monitor(part.logits.shape[1], **settings)
                watching.update(*part)
            seen.append(path)
    assert watching is not None  # a source has a file, and a file a part
    return watching, seen


def _print(status: Status, watching: Monitor, quiet: bool) -> None:
    spans = (("", "all rows"), ("recent_", f"last {status.recent_rows:,}"), ("fading_", "fading"))
    rows = [["", *FIGURES]]
    rows += [[name, *(format_number(getattr(status, prefix + figure)) for figure in FIGURES)] for prefix, name in spans]
    if not quiet:
        print(f"{status.rows:,} rows, {watching.classes} classes, {watching.bins} bins\n")
    print_table(rows)
    held = f"evidence against calibration {status.evidence:.3g}, p ≤ {status.p_value:.2g} at any time"
    if status.alarm is None:
        print_remarks(f"No alarm: {held} (alarm at {1 / watching.alpha:g}).", quiet=quiet)
    else:
        print_remarks(f"ALARM at row {status.alarm.row:,}: {status.alarm.reason} {held.capitalize()}.")


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(
        rich_help_panel="Measure",
        epilog=o.examples(
            "trueup monitor monday.npz tuesday.npz",
            "trueup monitor 'logs/*.parquet' --alpha 0.001",
            "trueup monitor today.npz --state watch.safetensors --json",
        ),
    )(monitor)
