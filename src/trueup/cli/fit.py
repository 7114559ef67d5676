"""Verbs that calibrate: fit, apply."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trueup.cli import options as o
from trueup.cli.inputs import Reader
from trueup.cli.output import print_json, print_remarks, print_table, require_output
from trueup.core.formatting import format_number
from trueup.core.warning_capture import silence_warnings

if TYPE_CHECKING:
    from collections.abc import Callable

    from trueup.calibrators.base import Calibrator
    from trueup.io.predictions import PredictionTable


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
    confidence: o.Confidence = None,
    correct: o.Correct = None,
    event: o.Event = None,
    classes: o.Classes = None,
    weight: o.Weight = None,
    clusters: o.Clusters = None,
    class_axis: o.ClassAxis = None,
    ignore_index: o.IgnoreIndex = None,
    mean: o.Mean = None,
    std: o.Std = None,
    target: o.Target = None,
    quantiles: o.Quantiles = None,
    levels: o.Levels = None,
    split: o.Split = None,
    cluster: o.Cluster = None,
    skip_bad: o.SkipBad = False,
    storage: o.Storage = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Fit a calibrator and save it.

    Without a method, or with `-m auto`, cross-validation weighs several and mixes those that help. If several are
    given, it chooses one of them; give the simplest first. If the file holds both halves, the fit is to val. Shards
    need not fit in memory; they take one method: temperature, vector, matrix, svs, sms or a histogram. Forecasts of a
    number (--mean, --std, --target) take the methods variance and quantiles.
    """
    if o.any_given(mean, std, target, quantiles, levels):
        from trueup.cli import forecasts as forecast_verbs

        forecasts = forecast_verbs.ForecastReader(mean, std, target, quantiles, levels, weight, storage)
        forecasts.refuse(
            probs=probs, logits=logits, labels=labels, confidence=confidence, correct=correct, event=event,
            classes=classes, clusters=clusters, class_axis=class_axis, ignore_index=ignore_index, split=split,
            cluster=cluster, skip_bad=skip_bad,
        )  # fmt: skip
        forecast_verbs.fit(val, out, forecasts, method, as_json=as_json, quiet=quiet)
        return
    from trueup.registry import METHODS

    methods = [o.require_name("method", METHODS, name) for name in method or ["auto"]]
    reader = Reader(
        probs, logits, labels, confidence, correct, classes, weight, storage=storage,
        clusters=clusters, class_axis=class_axis, ignore_index=ignore_index,
    )  # fmt: skip
    sharded = reader.is_sharded(val, cluster)
    require_output(out, ".safetensors", reads=() if sharded else (Path(val),))
    with silence_warnings(enabled=quiet):
        if sharded:
            number = reader.event_number(event)
            calibrator, rows, n_classes = _fit_shards(reader, val, split, methods, cluster, skip_bad, quiet, number)
        else:
            table = reader.load(val, split) if split else reader.load_half(val, "val")
            number = reader.event_number(event, table.classes)
            calibrator = _fit(methods, table, number)
            rows, n_classes = len(table.labels), table.logits.shape[1] if number is None else 2
    choice: Any = getattr(calibrator, "choice", None)
    chosen = methods[0] if choice is None else choice.chosen
    from trueup.io.artifacts import save_calibrator

    summary = {"method": chosen, "fitted to": val if sharded else Path(val).name, "rows": rows}
    summary |= o.drop_unset(event=number)
    save_calibrator(calibrator, out, classes=n_classes, summary=summary)
    if as_json:
        losses = None if choice is None else choice.scores
        print_json(
            "fit", file=val, output=out, rows=rows, classes=n_classes, methods=methods, chosen=chosen,
            losses=losses, failures={} if choice is None else choice.reasons, calibrator=repr(calibrator),
        )  # fmt: skip
        return
    if quiet:
        return
    if choice is not None:
        _print_choice(choice, n_classes)
        print()
    print(f"{calibrator!r}\n")
    print(f"Written: {out}")


def _print_choice(choice: Any, classes: int) -> None:
    """The candidates with their held-out loss and weight, what was chosen, and what these rows could have shown."""
    from trueup.report.figures.method_choice import method_choice, more_rows, why

    weights = {name: f"{weight:.1%}" for name, weight in choice.weights.items()}
    losses = {name: format_number(loss) if loss < math.inf else "left out" for name, loss in choice.scores.items()}
    lines = ([name, loss, weights.get(name, "")] for name, loss in losses.items())
    print_table([["method", "cross-validated NLL", "weight"], *lines])
    record = method_choice(choice, classes=classes)
    print_remarks(f"Chosen: {choice.chosen}. {' '.join(why(record))}", more_rows(record))


def _fit(methods: list[str], table: PredictionTable, event: int | None) -> Calibrator:
    from trueup.calibrators.compose import choose, for_event, takes
    from trueup.registry import METHODS

    fit = METHODS[methods[0]] if len(methods) == 1 else choose(methods)
    fit = fit if event is None else for_event(fit, event)
    given = table.options()
    options = {name: given[name] for name in ("weights", "clusters") if name in given}
    if not takes(METHODS[methods[0]] if len(methods) == 1 else choose(methods), "clusters"):
        options.pop("clusters", None)
    calibrator: Calibrator = fit(*table.pair, **options)
    return calibrator


def _fit_shards(
    reader: Reader, source: str, split: str | None, methods: list[str], cluster: str | None, skip_bad: bool,
    quiet: bool, event: int | None,
) -> tuple[Calibrator, int, int]:  # fmt: skip
    from trueup.calibrators.sharded import FITS, fit_shards

    if event is not None or (reader.weight is not None and (len(methods) > 1 or methods[0] not in FITS)):
        # Only sums over plain pairs and their weights are there for shards; what needs more is fitted in memory.
        table = reader.load_shards(source)
        calibrator = _fit(methods, table, event)
        return calibrator, len(table.labels), table.logits.shape[1] if event is None else 2
    if len(methods) > 1 or methods[0] not in FITS:
        raise ValueError(f"shards take one method of {', '.join(FITS)}; choose it with -m")
    with reader.open_shards(source, split, cluster) as (shards, executor):
        result = fit_shards(methods[0], shards, executor=executor, skip_bad=skip_bad, progress=not quiet)
    return result.calibrator, result.rows, result.classes


def apply(
    calibrator: Annotated[Path, typer.Argument(metavar="CALIBRATOR", help="A calibrator that `trueup fit` saved.")],
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Logits, with or without labels; or a folder, pattern or address.")
    ],
    out: Annotated[
        str,
        typer.Option(
            "--output", "-o", metavar="OUT",
            help="File of the calibrated logits, whose suffix is the format; of shards, a folder.",
        ),
    ],
    probs: o.Probs = False,
    logits: o.Logits = None,
    labels: o.Labels = None,
    confidence: o.Confidence = None,
    classes: o.Classes = None,
    mean: o.Mean = None,
    std: o.Std = None,
    levels: Annotated[
        str | None,
        typer.Option("--levels", metavar="NUMBERS", help="Of forecasts: also write the quantiles of these levels."),
    ] = None,
    split: o.Split = None,
    storage: o.Storage = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:  # fmt: skip
    """Calibrate the logits of a file with a saved calibrator, and keep its other columns.

    The output holds logits again: their softmax is the calibrated probability. With --confidence the new confidence
    stands beside the old one. Of shards, each becomes a file of the same name in the folder OUT. Forecasts of a number
    (--mean, --std) stay, with the recalibrated ones beside them.
    """
    if o.any_given(mean, std, levels):
        from trueup.cli import forecasts as forecast_verbs

        forecasts = forecast_verbs.ForecastReader(mean, std, levels=levels, storage=storage)
        forecasts.refuse(probs=probs, logits=logits, labels=labels, confidence=confidence, classes=classes, split=split)
        forecast_verbs.apply(calibrator, file, out, forecasts, as_json=as_json, quiet=quiet)
        return
    from trueup.io.artifacts import load_calibrator, read_header
    from trueup.io.source import is_address

    reader = Reader(probs, logits, labels, confidence, None, classes, storage=storage)
    targets = _targets(reader, file, out, calibrator)
    with silence_warnings(enabled=quiet):
        fitted = load_calibrator(calibrator)
        header = read_header(calibrator)
        function = _on_event(fitted, header)
        rows = n_classes = 0
        for source, target in targets.items():
            if not is_address(target):
                Path(target).parent.mkdir(parents=True, exist_ok=True)
            n, n_classes = _rewrite(reader, source, target, function, split)
            rows += n
    if as_json:
        print_json(
            "apply", calibrator=calibrator, file=file, split=split, output=out, rows=rows, classes=n_classes,
            method=header.method, summary=header.summary,
        )  # fmt: skip
    elif not quiet:
        several = f" in {len(targets)} files" if len(targets) > 1 else ""
        print(f"{header.method} on {rows:,} rows of {n_classes} classes{several}\n\nWritten: {out}")


def _rewrite(
    reader: Reader, source: str, target: str, function: Callable[[Any], Any], split: str | None
) -> tuple[int, int]:
    from trueup.io.predictions import ROWS_LOOKED_AT
    from trueup.io.rewrite import rewrite

    first = True

    def doubt_first(values: Any) -> Any:
        nonlocal first
        if first:
            reader.warn_of_probabilities(source, values[:ROWS_LOOKED_AT])
        first = False
        return function(values)

    with reader.open(source) as opened:
        return rewrite(opened, target, doubt_first, split=split, storage_options=reader.storage_options)


def _on_event(fitted: Calibrator, header: Any) -> Callable[[Any], Any]:
    """The calibrator, behind the event that it was fitted to, if it was."""
    event = (header.summary or {}).get("event")
    if event is None:
        return fitted
    from trueup.core.events import event_logits

    return lambda logits: fitted(event_logits(logits, int(event)))


def _targets(reader: Reader, source: str, out: str, calibrator: Path) -> dict[str, str]:
    """What is written of what: one file, or each shard in a folder."""
    from trueup.io.atomic import require_writable_folder
    from trueup.io.formats import FORMATS
    from trueup.io.rewrite import rewritten_name
    from trueup.io.source import is_address, suffix_of

    one = suffix_of(out) in FORMATS
    if not one and not reader.is_sharded(source, None):
        one = True
    if one:
        if reader.is_sharded(source, None) and suffix_of(source) not in FORMATS:
            raise ValueError(f"-o must be a folder, since {source} means several files, got the file {out}")
        if is_address(out):
            if suffix_of(out) not in FORMATS:
                raise ValueError(f"{out}: the suffix must be {' or '.join(FORMATS)}, got {suffix_of(out)!r}")
        else:
            reads = (calibrator,) if is_address(source) else (calibrator, Path(source))
            require_output(Path(out), *FORMATS, reads=reads)
        return {source: out}
    shards = reader.find_shards(source, None)
    targets = {path: rewritten_name(path, source, out) for path in shards.paths}
    if len(set(targets.values())) < len(targets):
        raise ValueError(f"files of {source} have the same name in different folders: name one folder at a time")
    if not is_address(out):
        require_writable_folder(Path(out))
        for path, target in targets.items():
            if not is_address(path) and Path(target).exists() and Path(target).samefile(path):
                raise ValueError(f"{target}: this would overwrite the input {path}; choose another folder")
    return targets


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
            "trueup apply calibrator.safetensors answers.jsonl --confidence stated -o calibrated.jsonl",
            "trueup apply calibrator.safetensors predictions/ -o calibrated/",
            "trueup apply recalibrator.safetensors demand.csv --mean mu --std sigma --levels 0.05,0.95 -o new.csv",
        ),
    )(apply)
