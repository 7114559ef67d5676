"""Verbs that calibrate: fit, apply."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trueup.cli import options as o
from trueup.cli.inputs import Reader
from trueup.cli.output import print_json, print_remarks, print_table, require_output
from trueup.core.formatting import format_number
from trueup.core.warning_capture import silence_warnings

if TYPE_CHECKING:
    from trueup.calibrators.base import Calibrator


def fit(
    val: Annotated[
        str,
        typer.Argument(
            metavar="VAL",
            help="Logits and labels that the network was not trained on; or a folder, pattern or address of shards.",
        ),
    ],
    out: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The calibrator, .safetensors.")],
    method: o.Methods = None,
    probs: o.Probs = False,
    logits: o.Logits = None,
    labels: o.Labels = None,
    split: o.Split = None,
    cluster: o.Cluster = None,
    skip_bad: o.SkipBad = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Fit a calibrator and save it.

    Without a method, or with `-m auto`, cross-validation weighs several and mixes those that help. If several are
    given, it chooses one of them; give the simplest first. If the file holds both halves, the fit is to val. Shards
    need not fit in memory; they take one method: temperature, vector, matrix, svs, sms or a histogram.
    """
    from trueup.registry import METHODS

    methods = [o.require_name("method", METHODS, name) for name in method or ["auto"]]
    reader = Reader(probs, logits, labels)
    sharded = reader.is_sharded(val, cluster)
    require_output(out, ".safetensors", reads=() if sharded else (Path(val),))
    with silence_warnings(enabled=quiet):
        if sharded:
            calibrator, rows, classes = _fit_shards(reader, val, split, methods, cluster, skip_bad, quiet)
        else:
            pair = reader.load(Path(val), split) if split else reader.load_half(Path(val), "val")
            calibrator = _fit(methods, pair)
            rows, classes = pair.logits.shape
    choice: Any = getattr(calibrator, "choice", None)
    chosen = methods[0] if choice is None else choice.chosen
    from trueup.io.artifacts import save_calibrator

    summary = {"method": chosen, "fitted to": val if sharded else Path(val).name, "rows": rows}
    save_calibrator(calibrator, out, classes=classes, summary=summary)
    if as_json:
        losses = None if choice is None else choice.scores
        print_json(
            "fit", file=val, output=out, rows=rows, classes=classes, methods=methods, chosen=chosen,
            losses=losses, failures={} if choice is None else choice.reasons, calibrator=repr(calibrator),
        )  # fmt: skip
        return
    if quiet:
        return
    if choice is not None:
        _print_choice(choice, classes)
        print()
    print(f"{calibrator!r}\n")
    print(f"Written: {out}")


def _print_choice(choice: Any, classes: int) -> None:
    """The candidates with their held-out loss and weight, what was chosen, and what these rows could have shown."""
    from trueup.report.figures.method_choice import method_choice, more_rows, why

    weights = {name: f"{weight:.1%}" for name, weight in choice.weights.items()}
    lines = ([name, format_number(loss), weights.get(name, "")] for name, loss in choice.scores.items())
    print_table([["method", "cross-validated NLL", "weight"], *lines])
    record = method_choice(choice, classes=classes)
    print_remarks(f"Chosen: {choice.chosen}. {' '.join(why(record))}", more_rows(record))


def _fit(methods: list[str], pair: Any) -> Calibrator:
    from trueup.calibrators.compose import choose
    from trueup.registry import METHODS

    calibrator: Calibrator = METHODS[methods[0]](*pair) if len(methods) == 1 else choose(methods)(*pair)
    return calibrator


def _fit_shards(
    reader: Reader, source: str, split: str | None, methods: list[str], cluster: str | None, skip_bad: bool, quiet: bool
) -> tuple[Calibrator, int, int]:
    from trueup.calibrators.sharded import FITS, fit_shards

    if len(methods) > 1 or methods[0] not in FITS:
        raise ValueError(f"shards take one method of {', '.join(FITS)}; choose it with -m")
    with reader.open_shards(source, split, cluster) as (shards, executor):
        result = fit_shards(methods[0], shards, executor=executor, skip_bad=skip_bad, progress=not quiet)
    return result.calibrator, result.rows, result.classes


def apply(
    calibrator: Annotated[Path, typer.Argument(metavar="CALIBRATOR", help="A calibrator that `trueup fit` saved.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Logits, with or without labels.")],
    out: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="OUT", help="File of the calibrated logits; its suffix is the format."),
    ],
    probs: o.Probs = False,
    logits: o.Logits = None,
    labels: o.Labels = None,
    split: o.Split = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Calibrate the logits of a file with a saved calibrator.

    The output holds logits again: their softmax is the calibrated probability.
    """
    from trueup.io.formats import FORMATS

    require_output(out, *FORMATS, reads=(calibrator, file))
    from trueup.io.artifacts import load_calibrator, read_header
    from trueup.io.predictions import save, save_logits

    reader = Reader(probs, logits, labels)
    with silence_warnings(enabled=quiet):
        fitted = load_calibrator(calibrator)
        unlabelled = reader.load_unlabelled(file, split)
        if unlabelled is not None:
            save_logits(out, fitted(unlabelled))
            rows, classes = unlabelled.shape
        else:
            pair = reader.load(file, split)
            save(out, (fitted(pair.logits), pair.labels))
            rows, classes = pair.logits.shape
    header = read_header(calibrator)
    if as_json:
        print_json(
            "apply", calibrator=calibrator, file=file, split=split, output=out, rows=rows, classes=classes,
            method=header.method, summary=header.summary,
        )  # fmt: skip
    elif not quiet:
        print(f"{header.method} on {rows:,} rows of {classes} classes\n\nWritten: {out}")


def register(app: typer.Typer) -> None:
    """Add the verbs to the application."""
    app.command(
        rich_help_panel="Calibrate",
        epilog=o.format_examples(
            "trueup fit val.npz -m temperature -o calibrator.safetensors",
            "trueup fit val.csv --labels target -o calibrator.safetensors",
            "trueup fit val.npz -m temperature -m svs -m dirichlet_odir -o calibrator.safetensors",
            "trueup fit 'predictions/*.parquet' -m vector --cluster local:2 -o calibrator.safetensors",
        ),
    )(fit)
    app.command(
        rich_help_panel="Calibrate",
        epilog=o.format_examples(
            "trueup apply calibrator.safetensors test.npz -o calibrated.npz",
            "trueup apply calibrator.safetensors both.npz --split test -o calibrated.csv",
        ),
    )(apply)
