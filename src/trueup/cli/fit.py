"""Verbs that repair logits: fit, apply."""

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
    from trueup.calibrators.base import Calibrator


def fit(
    val: Annotated[
        str,
        typer.Argument(
            metavar="VAL",
            help="Logits and labels that the network was not trained on; also a folder, pattern or address of shards.",
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

    Without a method, or with `-m auto`, cross-validation chooses one; of several methods it chooses among them, the
    first being taken for the simplest. Of a file with both halves inside, val is fitted to. Shards, which are never in
    memory together, take one method: temperature, vector, matrix, svs, sms or a histogram.
    """
    from trueup.registry import METHODS

    wanted = [o.known("method", METHODS, name) for name in method or ["auto"]]
    names = Names(probs, logits, labels)
    several = names.sharded(val, cluster)
    output(out, ".safetensors", reads=() if several else (Path(val),))
    with silence_warnings(enabled=quiet):
        if several:
            calibrator, rows, classes = _fitted_to_shards(names, val, split, wanted, cluster, skip_bad, quiet)
        else:
            pair = names.read(Path(val), split) if split else names.half(Path(val), "val")
            calibrator = _fitted(wanted, pair)
            rows, classes = pair.logits.shape
    choice: Any = getattr(calibrator, "choice", None)
    chosen = wanted[0] if choice is None else choice.chosen
    from trueup.io.artifacts import save_calibrator

    summary = {"method": chosen, "fitted to": val if several else Path(val).name, "rows": rows}
    save_calibrator(calibrator, out, classes=classes, summary=summary)
    if as_json:
        losses = None if choice is None else choice.scores
        print_json(
            "fit", file=val, output=out, rows=rows, classes=classes, methods=wanted, chosen=chosen,
            losses=losses, failures={} if choice is None else choice.reasons, calibrator=repr(calibrator),
        )  # fmt: skip
        return
    if quiet:
        return
    if choice is not None:
        print_table(
            [["method", "cross-validated NLL"], *([name, format_number(x)] for name, x in choice.scores.items())]
        )
        print_remarks(f"Chosen: {chosen}, the simplest within a standard error of the best.")
        print()
    print(f"{calibrator!r}\n")
    print(f"Written: {out}")


def _fitted(methods: list[str], pair: Any) -> Calibrator:
    from trueup.calibrators.compose import choose
    from trueup.registry import METHODS

    found: Calibrator = METHODS[methods[0]](*pair) if len(methods) == 1 else choose(methods)(*pair)
    return found


def _fitted_to_shards(
    names: Names, where: str, split: str | None, methods: list[str], cluster: str | None, skip_bad: bool, quiet: bool
) -> tuple[Calibrator, int, int]:
    from trueup.calibrators.sharded import FITS, fit_shards

    if len(methods) > 1 or methods[0] not in FITS:
        raise ValueError(f"shards take one method of {', '.join(FITS)}; say which with -m")
    with names.shards(where, split, cluster) as (shards, executor):
        found = fit_shards(methods[0], shards, executor=executor, skip_bad=skip_bad, progress=not quiet)
    return found.calibrator, found.rows, found.classes


def apply(
    calibrator: Annotated[Path, typer.Argument(metavar="CALIBRATOR", help="What `trueup fit` wrote.")],
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Logits, with or without labels.")],
    out: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT", help="Where the calibrated logits go; the suffix decides.")
    ],
    probs: o.Probs = False,
    logits: o.Logits = None,
    labels: o.Labels = None,
    split: o.Split = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Calibrate the logits of a file with a saved calibrator.

    What is written are logits again: their softmax is the calibrated probability.
    """
    from trueup.io.formats import FORMATS

    output(out, *FORMATS, reads=(calibrator, file))
    from trueup.io.artifacts import load_calibrator, read_header
    from trueup.io.predictions import save, save_logits

    names = Names(probs, logits, labels)
    with silence_warnings(enabled=quiet):
        fitted = load_calibrator(calibrator)
        alone = names.unlabelled(file, split)
        if alone is not None:
            save_logits(out, fitted(alone))
            rows, classes = alone.shape
        else:
            pair = names.read(file, split)
            save(out, (fitted(pair.logits), pair.labels))
            rows, classes = pair.logits.shape
    told = read_header(calibrator)
    if as_json:
        print_json(
            "apply", calibrator=calibrator, file=file, split=split, output=out, rows=rows, classes=classes,
            method=told.method, summary=told.summary,
        )  # fmt: skip
    elif not quiet:
        print(f"{told.method} on {rows:,} rows of {classes} classes\n\nWritten: {out}")


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.command(
        rich_help_panel="Repair",
        epilog=o.examples(
            "trueup fit val.npz -m temperature -o calibrator.safetensors",
            "trueup fit val.csv --labels target -o calibrator.safetensors",
            "trueup fit val.npz -m temperature -m svs -m dirichlet_odir -o calibrator.safetensors",
            "trueup fit 'predictions/*.parquet' -m vector --cluster local:2 -o calibrator.safetensors",
        ),
    )(fit)
    app.command(
        rich_help_panel="Repair",
        epilog=o.examples(
            "trueup apply calibrator.safetensors test.npz -o calibrated.npz",
            "trueup apply calibrator.safetensors both.npz --split test -o calibrated.csv",
        ),
    )(apply)
