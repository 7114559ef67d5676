"""Verbs that measure: evaluate, compare, report."""

from __future__ import annotations

import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from trueup.cli import options as o
from trueup.cli.output import print_json, print_remarks, print_stderr, print_table, require_output, working
from trueup.core.formatting import Row, format_number

if TYPE_CHECKING:
    from trueup.metrics.table import Scores
    from trueup.report.audit import Audit

T = TypeVar("T")

SHOWN = 10
"""So many methods a table shows at most, unless all were asked for."""
NARROW = ("accuracy", "nll", "brier", "ece", "aece", "sce")
"""The metrics of a table of many methods, which fits a terminal of 80 columns."""
NARROW_EVENT = ("predicted", "nll", "event_brier", "ece", "calibration_slope")
"""Those of an event."""

Folds = Annotated[
    int | None, typer.Option("--folds", metavar="N", help="Number of folds of the cross-validation (default 5).")
]
All = Annotated[bool, typer.Option("--all", help="Show every method that was tried, not only the first ten.")]
TryAll = Annotated[bool, typer.Option("--try-all", help="Try every method there is; this may take long.")]
Val = Annotated[str, typer.Argument(metavar="VAL", help="Logits and labels that the methods are fitted to.")]
Test = Annotated[
    str | None,
    typer.Argument(metavar="TEST", help="Logits and labels that they are scored on; without it, held-out rows of VAL."),
]


def evaluate(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Logits and labels; or a folder, pattern or address of shards.")
    ],
    *,
    reader: o.Reader,
    columns: o.ForecastColumns,
    split: o.Split = None,
    metric: o.Metrics = None,
    bins: o.Bins = None,
    level: o.Level = None,
    n_resamples: Annotated[
        int | None,
        typer.Option("--resamples", metavar="N", help="Number of bootstrap resamples (default 1000)."),
    ] = None,
    seed: o.Seed = None,
    cluster: o.Cluster = None,
    skip_bad: o.SkipBad = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Measure the calibration of a network, with bootstrap intervals and a test.

    Shards are read once, in chunks, so that they need not fit in memory. Forecasts of a number are read by --mean,
    --std and --target, or by --quantiles and --target.
    """
    if columns:
        from trueup.cli import forecasts as forecast_verbs

        forecasts = forecast_verbs.ForecastReader.of(
            columns, reader, split=split, metric=metric, bins=bins, cluster=cluster, skip_bad=skip_bad
        )
        given = o.drop_unset(level=level, n_resamples=n_resamples, seed=seed)
        forecast_verbs.evaluate(file, forecasts, given, as_json=as_json, quiet=quiet)
        return
    from trueup.metrics import table
    from trueup.registry import METRICS

    for name in metric or ():
        o.require_name("metric", dict.fromkeys([*METRICS, *table.DEFAULT]), name)
    options = o.drop_unset(metrics=metric, bins=bins, level=level, n_resamples=n_resamples, seed=seed)
    of_labels = None
    with working("measuring", quiet=quiet):
        if reader.is_sharded(file, cluster):
            from trueup.metrics.sharded import evaluate_shards

            with reader.open_shards(file, split, cluster) as (shards, executor):
                options |= o.drop_unset(event=reader.event_number())
                scores = evaluate_shards(shards, **options, executor=executor, skip_bad=skip_bad, progress=not quiet)
        else:
            pair = reader.load(file, split)
            if not len(pair.labels):
                raise ValueError(f"{file}: there are no rows")
            options |= o.drop_unset(event=reader.event_number(pair.classes))
            options |= o.drop_unset(names=reader.names(pair.classes))
            if reader.multilabel:
                from trueup.metrics.multilabel import scores_of_labels

                of_labels = scores_of_labels(
                    pair, **{k: v for k, v in options.items() if k not in ("metrics", "names")}
                )
            scores = table.evaluate(pair.logits, pair.labels, **(options | pair.options()))
    if as_json:
        labelled = {} if of_labels is None else {"labels": of_labels.to_dict()}
        print_json("evaluate", file=file, split=split, verdict=scores.verdict(), scores=scores.to_dict(), **labelled)
        return
    print_scores(scores, quiet=quiet)
    if of_labels is not None:
        print()
        print_table(of_labels.table())
        print_remarks(of_labels.note(), quiet=quiet)


def compare(
    val: Val,
    test: Test = None,
    method: o.Methods = None,
    try_all: TryAll = False,
    show_all: All = False,
    *,
    reader: o.Reader,
    columns: o.ForecastColumns,
    metric: o.Metrics = None,
    bins: o.Bins = None,
    level: o.Level = None,
    folds: Folds = None,
    seed: o.Seed = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Compare calibration methods: each is fitted to VAL and scored on TEST.

    VAL may hold both halves (val_logits, test_logits, …). A single file without halves is cross-fitted: each row is
    scored by a fit to the other folds. Of forecasts of a number (--mean, --std, --target) recalibrations are compared.
    """
    if columns:
        from trueup.cli import forecasts as forecast_verbs

        forecasts = forecast_verbs.ForecastReader.of(
            columns, reader, bins=bins, try_all=try_all, all=show_all, metric=metric
        )
        given = o.drop_unset(level=level, folds=folds, seed=seed)
        forecast_verbs.compare(val, test, forecasts, method, given, as_json=as_json, quiet=quiet)
        return
    from trueup.metrics.table import DEFAULT, EVENT_DEFAULT

    for name in metric or ():
        o.require_name("metric of the comparison", dict.fromkeys((*DEFAULT, *EVENT_DEFAULT)), name)
    audit = _audit(reader, val, test, method, try_all, quiet, bins=bins, level=level, folds=folds, seed=seed)
    if as_json:
        print_json("compare", val=val, test=test, audit=audit.to_dict())
        return
    print_audit(audit, metric, quiet=quiet, show_all=show_all or bool(method))


def report(
    val: Val,
    test: Test = None,
    out: Annotated[Path, typer.Option("--output", "-o", metavar="HTML", help="The page to write.")] = Path(
        "report.html"
    ),
    calibrator: Annotated[
        Path | None,
        typer.Option("--calibrator", "-c", metavar="FILE", help="Also save the chosen calibrator, .safetensors."),
    ] = None,
    method: o.Methods = None,
    try_all: TryAll = False,
    show_all: All = False,
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", help="Title of the page.")] = None,
    *,
    reader: o.Reader,
    columns: o.ForecastColumns,
    bins: o.Bins = None,
    level: o.Level = None,
    folds: Folds = None,
    seed: o.Seed = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Write a page on how miscalibrated a network is, and which method calibrates it best.

    Up to 100,000 logits the automatic choice is among the methods, and the page has the weights of its mixture.
    VAL may hold both halves (val_logits, test_logits, …). A single file without halves is cross-fitted: each row is
    scored by a fit to the other folds.
    """
    read = tuple(Path(name) for name in (val, test) if name is not None)
    require_output(out, ".html", ".htm", reads=read)
    if calibrator is not None:
        require_output(calibrator, ".safetensors", reads=read)
    import plotly  # noqa: F401, if it is missing, better now than after the audit

    if columns:
        from trueup.cli import forecasts as forecast_verbs

        forecasts = forecast_verbs.ForecastReader.of(columns, reader, bins=bins, try_all=try_all, all=show_all)
        given = o.drop_unset(level=level, folds=folds, seed=seed)
        forecast_verbs.report(val, test, out, calibrator, title, forecasts, method, given, as_json=as_json, quiet=quiet)
        return
    from trueup.report import report as make_report
    from trueup.report.page import describe_file

    audit = _audit(
        reader, val, test, method, try_all, quiet, pooled=True, bins=bins, level=level, folds=folds, seed=seed
    )
    names = reader.class_names
    if reader.event is not None:
        names = (f"not {reader.event}", reader.event)
    elif reader.confidence is not None:
        names = ("wrong", "right")
    elif reader.multilabel:
        names = ("no", "yes")
    origin = {"Calibration file": describe_file(val)}
    origin |= {} if test is None else {"Test file": describe_file(test)}
    origin["Command"] = shlex.join(["trueup", *sys.argv[1:]])
    with working("writing the page", quiet=quiet):
        make_report(audit, **o.drop_unset(title=title, names=names), origin=origin).save(out)
    if calibrator is not None:
        _save_chosen(audit, calibrator, val, reader.event_number())
    if as_json:
        print_json("report", val=val, test=test, output=out, calibrator=calibrator, audit=audit.to_dict())
        return
    if not quiet:
        print_audit(audit, None, show_all=show_all or bool(method))
        written = str(out) if calibrator is None else f"{out} and {calibrator}"
        print_remarks(f"Written: {written}")


def print_scores(scores: Scores, *, quiet: bool = False) -> None:
    """Print the table, and what it means."""
    if not quiet:
        print(f"{scores.caption()}\n")
    print_table(scores.table())
    notes = scores.notes()
    print_remarks(*notes[: len(notes) - len(scores.group_tables)], quiet=quiet)  # the groups have a table of their own
    _print_groups(scores, quiet)


def _print_groups(scores: Scores, quiet: bool) -> None:
    if scores.groups is not None:
        print()
        print_table(scores.groups.table())
        print_remarks(scores.groups.verdict(), quiet=quiet)


def print_audit(audit: Audit, metrics: list[str] | None, *, quiet: bool = False, show_all: bool = False) -> None:
    """Print the table of methods, the chosen one first and then by held-out loss, and the verdict.

    At most `SHOWN` methods are in the table, unless all are asked for.
    """
    from trueup.metrics.table import default_metrics
    from trueup.report.audit import method_title

    scores = audit.scores
    many = len(scores.methods) > 2
    if not quiet:
        how = f"cross-fitted in {audit.folds} folds" if audit.cross_fitted else f"fitted to {audit.calibration_rows:,}"
        print(f"{scores.caption()}; {how}\n")
    if metrics is None or not metrics:
        event = scores.is_event
        metrics = list((NARROW_EVENT if event else NARROW) if many else default_metrics(scores.classes, not event))
    absent = [metric for metric in metrics if metric not in scores.metrics]
    if absent:
        raise ValueError(f"--metric {absent[0]} is of an event; there are: {', '.join(scores.metrics)}")
    table = select_metrics(scores, metrics).table()
    hidden: list[str] = []
    if many:
        table, hidden = _best_first(table, audit, None if show_all else SHOWN)
    print_table(table)
    legend = f"held-out: NLL on folds of the calibration rows. {scores.notes()[0]}" if many else ""
    more = f"Not shown, with a larger held-out loss: {', '.join(hidden)}; --all shows them." if hidden else ""
    chosen = (
        "" if audit.chosen == "raw" else f"Chosen by cross-validation: {audit.chosen}, {method_title(audit.chosen)}."
    )
    from trueup.report.figures.method_choice import method_choice, more_rows

    print_remarks(more, legend, chosen, more_rows(method_choice(audit.choice)), audit.verdict(), quiet=quiet)
    _print_groups(scores, quiet)


def _best_first(table: list[Row], audit: Audit, most: int | None) -> tuple[list[Row], list[str]]:
    """The chosen method on top, without calibration below it, the others by held-out loss; and those left out."""
    losses = {name: loss for name, (loss, _) in audit.losses.items()}
    rows = {row[0]: row for row in table[1:]}
    order = sorted(rows, key=lambda name: (name != audit.chosen, name != "raw", losses.get(name, math.inf)))
    head, *cells = table[0]
    shown = [[rows[name][0], format_number(losses[name]) if name in losses else "–", *rows[name][1:]] for name in order]
    return [[head, "held-out", *cells], *shown[:most]], order[most:] if most else []


def select_metrics(scores: T, metrics: Any) -> T:
    """The same table with some of its metrics."""

    def select(table: Any) -> Any:
        return {name: {metric: row[metric] for metric in metrics} for name, row in table.items()}

    of: Any = scores
    changed: T = replace(of, values=select(of.values), changes=select(of.changes))
    return changed


def _audit(
    reader: o.Reader,
    val: str,
    test: str | None,
    methods: list[str] | None,
    try_all: bool,
    quiet: bool,
    *,
    pooled: bool = False,
    **options: Any,
) -> Audit:
    """With `pooled` the automatic choice is among the methods by default, if there are not too many logits."""
    from trueup.registry import METHODS

    for name in methods or ():
        o.require_name("method", METHODS, name)
    if try_all and methods:
        raise ValueError("--try-all tries every method: give either --try-all or --method")
    options["methods"] = list(METHODS) if try_all else methods
    from trueup.report.audit import POOLED, audit, methods_for

    with working("comparing", quiet=quiet):
        tables = reader.load_val_and_test(val, test)
        number = reader.event_number(tables[0].classes)
        pair, test_pair = tables[0].pair, None if tables[1] is None else tables[1].pair
        rows, classes = pair.logits.shape
        classes = classes if number is None else 2
        if pooled and options["methods"] is None and rows * classes <= POOLED:
            options["methods"] = [*methods_for(rows, classes), "auto"]
        given = o.drop_unset(**options, event=number, names=reader.names(tables[0].classes))
        if tables[0].weights is not None:
            given |= {"weights": tables[0].weights, "test_weights": tables[1] and tables[1].weights}
        if tables[0].clusters is not None:
            given["clusters"] = tables[0].options()["clusters"]
            given |= {} if tables[1] is None else {"test_clusters": tables[1].options().get("clusters")}
        if scored_groups := (tables[1] or tables[0]).groups:
            given["groups"] = dict(scored_groups)
        result = audit(pair, test_pair, **given, progress=not quiet)
    if not quiet:
        for name, reason in result.failures.items():
            print_stderr(f"warning: {name} was left out: {reason}")
        for name, messages in result.warnings.items():
            for message in messages:
                print_stderr(f"warning: {name}: {message}")
    return result


def _save_chosen(audit: Audit, path: Path, val: str, event: int | None) -> None:
    from trueup.calibrators.base import Identity
    from trueup.io.artifacts import save_calibrator

    summary = {"method": audit.chosen, "fitted to": Path(val).name, "rows": audit.calibration_rows}
    summary |= o.drop_unset(event=event)
    calibrator = audit.calibrators.get(audit.chosen) or Identity()
    save_calibrator(calibrator, path, classes=audit.scores.classes, summary=summary)


def register(app: typer.Typer) -> None:
    """Add the verbs to the application."""
    o.add_command(
        app,
        evaluate,
        "Measure",
        "trueup evaluate test.npz",
        "trueup evaluate test.csv --probs --labels target",
        "trueup evaluate both.npz --split test --json",
        "trueup evaluate test.parquet --metric ece --metric smooth_ece --bins 20",
        "trueup evaluate answers.jsonl --confidence stated --correct right --by category",
        "trueup evaluate risk.csv --probs --logits well,ill --labels outcome --event ill --weight w",
        "trueup evaluate visits.csv --clusters patient",
        "trueup evaluate segmentation.npz --class-axis first --ignore-index 255",
        "trueup evaluate tags.npz --multilabel",
        "trueup evaluate 'predictions/*.parquet' --cluster local:2 --skip-bad",
        "trueup evaluate demand.csv --mean mu --std sigma --target sold",
        "trueup evaluate demand.csv --quantiles q05,q50,q95 --target sold",
    )
    o.add_command(
        app,
        compare,
        "Measure",
        "trueup compare val.npz test.npz",
        "trueup compare val.npz test.npz -m temperature -m svs -m histogram",
        "trueup compare both.npz --json",
    )
    o.add_command(
        app,
        report,
        "Measure",
        "trueup report val.npz test.npz -o report.html",
        "trueup report test.npz -o report.html -c calibrator.safetensors",
        "trueup report val.npz test.npz --try-all --title 'ResNet-50, March'",
        "trueup report risk.csv --probs --by ward --by sex --weight w",
        "trueup report demand.csv --mean mu --std sigma --target sold",
    )
