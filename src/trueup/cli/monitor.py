"""The verb monitor: test a stream of logged predictions for a loss of calibration."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trueup._core.formatting import format_evidence, format_number, format_p
from trueup.cli import options as o
from trueup.cli.output import collect_warnings, print_groups, print_json, print_remarks, print_table, require_output

if TYPE_CHECKING:
    from trueup.monitor import Monitor, Status

FIGURES = ("accuracy", "confidence", "nll", "ece")


@dataclass(frozen=True)
class Settings:
    """The settings of a new monitor."""

    level: float | None = o.option("SHARE", "Probability of no alarm for a calibrated network (default 0.99).")
    window: int | None = o.option("ROWS", "Number of recent rows (default 10000).")
    bins: int | None = o.option("N", "Number of bins of the calibration errors (default 15).")
    threshold: float | None = o.option("SHARE", "With --max-risk: the confidence above which rows are answered.")
    max_risk: float | None = o.option("SHARE", "The promised maximum share of wrong answers, which is then checked.")


def monitor(
    files: Annotated[
        list[str], o.argument("FILE…", "Logged logits and labels, oldest first; files of a pattern are sorted by name.")
    ],
    *,
    state: Annotated[
        Path | None, o.option("FILE", "Checkpoint of the monitor: resumed if it exists, and updated.")
    ] = None,
    settings: Settings,
    reader: Annotated[o.Reader, o.without(o.Reader, "class_axis", "ignore_index", "multilabel")],
    output: o.Output,
) -> None:
    """Replay logged predictions, and raise an alarm if calibration was lost.

    The test is valid at any time: with probability --level or more, a calibrated network never raises an alarm. The
    exit code is 3 after an alarm, or if more answers were wrong than --threshold and --max-risk promise. With
    --clusters, each file must hold whole clusters, and each cluster counts once.

      $ trueup monitor monday.npz tuesday.npz
      $ trueup monitor 'logs/*.parquet' --level 0.999
      $ trueup monitor today.npz --state watch.safetensors --json
      $ trueup monitor 'logs/*.parquet' --groups region
      $ trueup monitor today.npz --threshold 0.83 --max-risk 0.02
    """
    from trueup.io.artifacts import load_artifact
    from trueup.io.load_save import save

    if state is not None:
        require_output(state, ".safetensors")
    promise = {"threshold": settings.threshold, "max_risk": settings.max_risk}
    if len(o.drop_unset(**promise)) == 1:
        raise ValueError("a promise needs both --threshold and --max-risk")
    options = o.set_options(settings, "level", "window", "bins")
    options |= {} if settings.threshold is None else {"promise": promise}
    running = load_artifact(state, "monitor") if state is not None and state.exists() else None
    if running is not None and options:
        flags = ", ".join(o.flag_of(settings, name) for name in o.set_options(settings))
        raise ValueError(f"--state {state} stores its own settings: leave out {flags}")
    if reader.clusters is not None and reader.groups:
        raise ValueError("--groups assumes independent rows: give either --groups or --clusters")
    number = reader.event_number()
    if running is not None and number is not None and running.event != number:
        watched = "no event" if running.event is None else f"the event {running.event}"
        raise ValueError(f"--state {state} watches {watched}, got --event {reader.event}")
    with collect_warnings(quiet=output.quiet):
        running, replayed = _replay(reader, files, running, options | {"event": number}, output.quiet)
    if state is not None:
        save(running, state)
    status = running.status()
    if output.as_json:
        groups = running.by_group()
        table = {} if groups is None else {"groups": groups.to_dict()}
        print_json("monitor", files=replayed, state=state, status=status.to_dict(), **table)
    else:
        _print(status, running, output.quiet)
    if status.alarm is not None or (status.promise is not None and status.promise["broken"]):
        raise typer.Exit(3)


def _replay(
    reader: o.Reader, sources: list[str], running: Monitor | None, options: dict[str, Any], quiet: bool
) -> tuple[Monitor, list[str]]:
    from trueup._core.progress import track
    from trueup.io.atomic import warn_of_skipped
    from trueup.monitor import Monitor

    replayed: list[str] = []
    for source in sources:
        shards = reader.find_shards(source)
        if reader.clusters is not None:  # each update needs whole clusters
            shards = replace(shards, rows=sys.maxsize)
        for path in track(shards.paths, label="replaying", enabled=not quiet):
            skipped = 0
            for part in shards.read(path):
                if running is None:
                    running = Monitor.from_settings({"n_classes": part.logits.shape[1], **options})
                running.update(
                    *part.pair, sample_weight=part.sample_weight, groups=part.groups or None, clusters=part.clusters
                )
                skipped += part.skipped
            warn_of_skipped(skipped, path)
            replayed.append(path)
    assert running is not None  # every source has a file, and every file a part
    return running, replayed


def _print(status: Status, running: Monitor, quiet: bool) -> None:
    spans = (("", "all rows"), ("recent_", f"last {status.recent_rows:,}"), ("fading_", "fading"))
    columns = {"accuracy": "observed", "confidence": "predicted"} if status.event else {}
    rows = [["", *(columns.get(figure, figure) for figure in FIGURES)]]
    rows += [[name, *(format_number(getattr(status, prefix + figure)) for figure in FIGURES)] for prefix, name in spans]
    if not quiet:
        event = f"the event is class {running.event} of {running.n_classes}"
        target = f"{running.n_classes} classes" if running.event is None else event
        print(f"{status.rows:,} rows, {target}, {running.bins} bins\n")
    print_table(rows)
    evidence = (
        f"evidence against calibration {format_evidence(status.evidence)}, {format_p(status.p_value)} at any time"
    )
    if status.alarm is None:
        print_remarks(f"No alarm: {evidence} (alarm at {1 / (1 - running.level):g}).", quiet=quiet)
    else:
        print_remarks(f"ALARM at row {status.alarm.row:,}: {status.alarm.reason} {evidence.capitalize()}.")
    if status.promise is not None:
        print_remarks(status.promise["text"], quiet=quiet and not status.promise["broken"])
    print_groups(running.by_group(), quiet)


register = o.commands("Measure", monitor)
