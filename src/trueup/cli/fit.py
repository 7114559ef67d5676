"""Verbs that calibrate: fit, apply."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trueup._core.errors import InputError
from trueup._core.formatting import format_number
from trueup.cli import forecasts
from trueup.cli import options as o
from trueup.cli.output import print_json, print_remarks, print_table, require_output, working

if TYPE_CHECKING:
    from collections.abc import Callable

    from trueup.calibrators.base import Calibrator
    from trueup.io.predictions import PredictionTable


def fit(
    val: Annotated[
        str,
        o.argument("VAL", "Logits and labels of held-out rows; or a folder, pattern or address of shards."),
    ],
    out: Annotated[Path, o.output_file("FILE", "The calibrator, .safetensors.")],
    *,
    chosen: o.Methods,
    reader: Annotated[o.Reader, o.without(o.Reader, "groups")],
    columns: o.ForecastColumns,
    sharding: o.Sharding,
    output: o.Output,
) -> None:
    """Fit a calibrator and save it.

    Without a method, or with `-m auto`, several are mixed with weights from cross-validation. If several methods are
    named, cross-validation chooses one; name the simplest first. If the file holds both halves, val is used. Shards
    need not fit in memory; they take one method: temperature, vector, matrix, svs, sms, a histogram, or with two
    classes platt, beta or isotonic. With `--multilabel`, one binary method (default platt) is fitted to each label and
    shrunk towards the fit to all labels. Forecasts of a number (--mean, --std, --target) take the methods variance and
    quantiles.

      $ trueup fit val.npz -m temperature -o calibrator.safetensors
      $ trueup fit val.csv --labels target -o calibrator.safetensors
      $ trueup fit val.npz -m temperature -m svs -m dirichlet_odir -o calibrator.safetensors
      $ trueup fit 'predictions/*.parquet' -m vector --scheduler local:2 -o calibrator.safetensors
    """
    if columns:
        forecasts.require_only(reader, sharding)
        forecasts.fit(val, out, columns, reader, chosen.method, output)
        return
    from trueup._core.registry import METHODS

    methods = [o.require_name("method", METHODS, name) for name in chosen.method or ["auto"]]
    if reader.multilabel:
        methods = methods if chosen.method else ["platt"]
        if len(methods) > 1 or reader.event is not None or reader.sample_weight is not None:
            raise ValueError("--multilabel takes one method, and neither --event nor --sample-weight")
    sharded = reader.is_sharded(val, sharding.scheduler)
    require_output(out, ".safetensors", reads=() if sharded else (Path(val),))
    names = None
    with working("fitting", quiet=output.quiet):
        if sharded:
            number = reader.event_number()
            calibrator, rows, n_classes = _fit_shards(reader, val, sharding, methods, output.quiet)
        else:
            split = sharding.split
            table = reader.load(val, split) if split else reader.load_half(val, "val")
            number = reader.event_number(table.class_names)
            rows, n_classes = len(table.labels), table.logits.shape[1] if number is None else 2
            if reader.multilabel:
                with reader.open(val) as file:
                    n_classes = file.width(split or ("val" if len(file.splits) == 2 else None))
                calibrator = _fit_labels(methods[0], table, reader.class_list, n_classes)
            else:
                calibrator = _fit(methods, table, number)
                names = table.class_names if number is None else None
    choice: Any = getattr(calibrator, "choice", None)
    method = methods[0] if choice is None else choice.chosen
    from trueup.io.load_save import save

    summary = {"method": method, "fitted to": val if sharded else Path(val).name, "rows": rows}
    summary |= o.drop_unset(event=number)
    save(calibrator, out, class_names=names, n_classes=n_classes, summary=summary)
    if output.as_json:
        losses = None if choice is None else choice.scores
        print_json(
            "fit", file=val, output=out, rows=rows, n_classes=n_classes, methods=methods, chosen=method,
            losses=losses, failures={} if choice is None else choice.reasons, calibrator=repr(calibrator),
        )  # fmt: skip
    elif not output.quiet:
        if choice is not None:
            _print_choice(choice, n_classes)
            print()
        # The repr of a mixture lists the parameters of all its members; the choice names them with their weights.
        described = "" if choice is not None and len(choice.weights) > 1 else f"{calibrator!r}\n\n"
        print(f"{described}Written: {out}")


def _print_choice(choice: Any, classes: int) -> None:
    """Print the held-out losses and weights of the candidates, the choice, and the smallest detectable gain."""
    from trueup.reports.figures.method_choice import method_choice, more_rows, why

    weights = {name: f"{weight:.1%}" for name, weight in choice.weights.items()}
    losses = {name: loss for name, loss in choice.scores.items() if loss < math.inf}
    lines = (
        [name, format_number(losses[name]), weights.get(name, "")] for name in sorted(losses, key=losses.__getitem__)
    )
    print_table([["method", "cross-validated NLL", "weight"], *lines])
    record = method_choice(choice, n_classes=classes)
    chosen = "" if len(weights) > 1 else f"Chosen: {choice.chosen}. "
    print_remarks(f"{chosen}{' '.join(why(record))}", more_rows(record))


def _fit(methods: list[str], table: PredictionTable, event: int | None) -> Calibrator:
    from trueup._core.registry import METHODS
    from trueup.calibrators.compose import accepts_option, choose, for_event

    fit = METHODS[methods[0]] if len(methods) == 1 else choose(methods)
    names = ("sample_weight", "clusters") if accepts_option(fit, "clusters") else ("sample_weight",)
    options = {name: value for name, value in table.options().items() if name in names}
    fit = fit if event is None else for_event(fit, event)
    return fit(*table.pair, **options)


def _fit_labels(method: str, table: PredictionTable, class_names: tuple[str, ...] | None, labels: int) -> Calibrator:
    import numpy as np

    from trueup.calibrators.groupwise import fit_events, per_group

    known = {name: k for k, name in enumerate(class_names or range(labels))}
    numbers = np.array([known[name] for name in table.groups["label"].tolist()])
    options: dict[str, Any] = {"labels": labels, "clusters": table.clusters}
    return fit_events(per_group(method), table.logits, table.labels, numbers, **options)


def _fit_shards(
    reader: o.Reader, source: str, sharding: o.Sharding, methods: list[str], quiet: bool
) -> tuple[Calibrator, int, int]:
    from trueup.calibrators.sharded import FITS, fit_shards

    event = reader.event_number()
    if event is not None or (reader.sample_weight is not None and (len(methods) > 1 or methods[0] not in FITS)):
        # Shards are fitted from sums over logits, labels and weights; events and clusters are fitted in memory.
        table = reader.load_shards(source)
        calibrator = _fit(methods, table, event)
        return calibrator, len(table.labels), table.logits.shape[1] if event is None else 2
    if len(methods) > 1 or methods[0] not in FITS:
        raise ValueError(f"shards take one of the methods {', '.join(FITS)}; choose it with -m")
    with reader.open_shards(source, sharding) as (shards, executor):
        options: dict[str, Any] = {"executor": executor, "skip_bad": sharding.skip_bad, "progress": not quiet}
        result = fit_shards(methods[0], shards, **options)
    return result.calibrator, result.rows, result.n_classes


def apply(
    calibrator: Annotated[Path, o.argument("CALIBRATOR", "A calibrator that `trueup fit` saved.")],
    file: Annotated[str, o.argument("FILE", "Logits, with or without labels; or a folder, pattern or address.")],
    out: Annotated[
        str,
        o.output_file("OUT", "File for the calibrated logits, whose suffix is the format; for shards, a folder."),
    ],
    *,
    reader: Annotated[
        o.Reader,
        o.only("probs", "logits", "labels", "confidence", "class_names", "class_axis", "sep", "decimal", "storage"),
    ],
    columns: Annotated[
        o.ForecastColumns, o.only("mean", "std", levels="Forecasts: also write the quantiles of these levels.")
    ],
    split: Annotated[o.Sharding, o.only("split")],
    output_probs: Annotated[bool, o.switch("Write calibrated probabilities instead of logits.")] = False,
    output: o.Output,
) -> None:
    """Calibrate the logits of a file with a saved calibrator, and keep its other columns.

    The output holds logits, whose softmax is the calibrated probability. With --output-probs it holds probabilities,
    which `--probs` reads. The file must have the classes of the fit. With --confidence the calibrated confidence
    becomes a new column. Each shard becomes a file of the same name in the folder OUT. Recalibrated forecasts of a
    number (--mean, --std) are written to new columns too.

      $ trueup apply calibrator.safetensors test.npz -o calibrated.npz
      $ trueup apply calibrator.safetensors both.npz --split test -o calibrated.csv
      $ trueup apply calibrator.safetensors answers.jsonl --confidence stated -o calibrated.jsonl
      $ trueup apply calibrator.safetensors predictions/ -o calibrated/
      $ trueup apply calibrator.safetensors test.npz --output-probs -o probabilities.npz
      $ trueup apply recalibrator.safetensors demand.csv --mean mu --std sigma --levels 0.05,0.95 -o new.csv
    """
    if columns:
        forecasts.require_only(reader, split)
        forecasts.apply(calibrator, file, out, columns, reader, output)
        return
    from trueup.io.artifacts import is_artifact, load_artifact, read_header
    from trueup.io.rewrite import rewrite
    from trueup.io.source import is_address

    if calibrator.is_file() and not is_artifact(calibrator):
        swapped = Path(file).is_file() and is_artifact(file)
        remedy = (
            f"the calibrator comes first: trueup apply {file} {calibrator}" if swapped else "`trueup fit` saves one"
        )
        raise ValueError(f"{calibrator}: not a calibrator; {remedy}")
    targets = _targets(reader, file, out, calibrator)
    with working("calibrating", quiet=output.quiet):
        fitted = load_artifact(calibrator, "calibrator")
        header = read_header(calibrator)
        function = _calibration(fitted, header, reader.class_axis)
        rows = n_classes = 0
        for source, target in targets.items():
            with reader.open(source) as opened:
                header.check_class_names(opened.class_names, source)
                if not is_address(target):
                    Path(target).parent.mkdir(parents=True, exist_ok=True)
                options: dict[str, Any] = {
                    "split": split.split,
                    "probs": output_probs,
                    "storage_options": reader.storage_options,
                }
                n, n_classes = rewrite(opened, target, function, **options)
            rows += n
    if output.as_json:
        print_json(
            "apply", calibrator=calibrator, file=file, split=split.split, output=out, rows=rows, n_classes=n_classes,
            method=header.class_name, summary=header.summary,
        )  # fmt: skip
    elif not output.quiet:
        several = f" in {len(targets)} files" if len(targets) > 1 else ""
        print(f"{header.class_name} on {rows:,} rows of {n_classes} classes{several}\n\nWritten: {out}")


def _calibration(fitted: Calibrator, header: Any, class_axis: str | None) -> Callable[[Any], Any]:
    """Return the calibrator as a function of arrays (n, K), or with `class_axis` (n, K, …) or (n, …, K).

    A calibrator of one event gets the log-odds of this event. A number of classes that differs from the fit is an
    error, also for calibrators such as a temperature that could map any number.
    """
    import numpy as np

    from trueup.calibrators.compose import OneEvent
    from trueup.convert import event_logits

    event = (header.summary or {}).get("event")

    def calibrate(logits: Any) -> Any:
        rows = np.moveaxis(logits, 1, -1) if class_axis == "first" else logits
        z = rows.reshape(-1, rows.shape[-1])
        if event is None and header.n_classes not in (None, z.shape[1]):
            raise InputError("logits", f"have the {header.n_classes} classes of the fit", f"{z.shape[1]}")
        if event is not None and not isinstance(fitted, OneEvent):
            z = event_logits(z, int(event))
        after = np.asarray(fitted(z))
        after = after.reshape(*rows.shape[:-1], after.shape[1])
        return np.moveaxis(after, -1, 1) if class_axis == "first" else after

    return calibrate


def _targets(reader: o.Reader, source: str, out: str, calibrator: Path) -> dict[str, str]:
    """Return the output path of each input: of one file, or of each shard in a folder."""
    from trueup.io.atomic import require_writable_folder
    from trueup.io.formats import FORMATS
    from trueup.io.rewrite import rewritten_name
    from trueup.io.source import is_address, suffix_of

    sharded = reader.is_sharded(source)
    if suffix_of(out) in FORMATS or not sharded:
        if sharded and suffix_of(source) not in FORMATS:
            raise ValueError(f"-o must be a folder, because {source} means several files, got the file {out}")
        if is_address(out):
            if suffix_of(out) not in FORMATS:
                raise ValueError(f"{out}: the suffix must be {' or '.join(FORMATS)}, got {suffix_of(out)!r}")
        else:
            reads = (calibrator,) if is_address(source) else (calibrator, Path(source))
            require_output(Path(out), *FORMATS, reads=reads)
        return {source: out}
    targets = {path: rewritten_name(path, source, out) for path in reader.find_shards(source).paths}
    if len(set(targets.values())) < len(targets):
        raise ValueError(f"files of {source} have the same name in different folders: give one folder at a time")
    if not is_address(out):
        require_writable_folder(Path(out))
        for path, target in targets.items():
            if not is_address(path) and Path(target).exists() and Path(target).samefile(path):
                raise ValueError(f"{target}: this would overwrite the input {path}; choose another folder")
    return targets


register = o.commands("Calibrate", fit, apply)
