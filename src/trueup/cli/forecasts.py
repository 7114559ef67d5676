"""Forecasts of a number: what the verbs do when --mean, --std or --quantiles name the columns of a file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup._core.formatting import format_number
from trueup.cli import options as o
from trueup.cli.output import (
    print_caption,
    print_json,
    print_remarks,
    print_scores,
    print_table,
    require_output,
    select_metrics,
    working,
)

if TYPE_CHECKING:
    from trueup.cli.rank import Halves, Ranking
    from trueup.io.forecasts import ForecastTable
    from trueup.metrics.forecast_table import ForecastScores
    from trueup.reports.forecasts import ForecastAudit


FORECAST_OPTIONS = ("sample_weight", "storage", "clusters", "method", "level", "n_resamples", "n_folds", "seed")
"""Options of the verbs that also apply to forecasts."""


def require_only(*records: Any) -> None:
    """Reject options that do not apply to forecasts."""
    for record in records:
        for name, value in o.set_options(record).items():
            if name not in FORECAST_OPTIONS and value is not False:
                raise ValueError(f"{o.flag_of(record, name)} does not apply to forecasts of a number: leave it out")


def list_levels(columns: o.ForecastColumns) -> list[float]:
    """Return the quantile levels that the user set."""
    try:
        return [float(level) for level in columns.levels.split(",")] if columns.levels is not None else []
    except ValueError:
        raise ValueError(f"--levels must be numbers separated by commas, got {columns.levels!r}") from None


def load(path: str, columns: o.ForecastColumns, reader: o.Reader, **options: Any) -> ForecastTable:
    """Load forecasts from the columns that the user named."""
    from trueup.io.forecasts import load_forecasts

    options |= o.set_options(columns, "mean", "std") | o.set_options(reader, "sample_weight", "clusters")
    options |= o.drop_unset(targets=columns.target, storage_options=reader.storage_options)
    if columns.quantiles is not None:
        quantiles = columns.quantiles.split(",")
        options["quantiles"] = quantiles[0] if len(quantiles) == 1 else quantiles
        options |= o.drop_unset(levels=list_levels(columns))
    table = load_forecasts(path, **options)
    if not len(table.targets):
        raise ValueError(f"{path}: there are no rows")
    return table


def evaluate(file: str, columns: o.ForecastColumns, reader: o.Reader, scoring: o.Scoring) -> ForecastScores:
    """Score the forecasts of a file."""
    from trueup.metrics.forecast_table import evaluate_forecasts

    table = load(file, columns, reader)
    return evaluate_forecasts(*table.triple, **(o.set_options(scoring) | table.options()))


def make_report(
    halves: Halves,
    columns: o.ForecastColumns,
    reader: o.Reader,
    ranking: Ranking,
    scoring: o.Scoring,
    quiet: bool,
    **title: Any,
) -> Any:
    """Build the report on recalibrations of a file's forecasts."""
    from trueup.reports.forecasts import report_forecasts

    require_only(reader, ranking, scoring)
    methods = _check_methods(ranking.method)
    with working("comparing", quiet=quiet):
        val = load(halves.val, columns, reader)
        test = None if halves.test is None else load(halves.test, columns, reader)
        return report_forecasts(val, test, **o.drop_unset(methods=methods), **o.set_options(scoring), **title)


def chosen_recalibrator(audit: ForecastAudit) -> Any:
    """Return the recalibrator of the chosen method."""
    recalibrator = None if audit.choice is None else audit.choice.recalibrator
    if recalibrator is None:
        why = audit.failure or "no recalibration improves on the raw forecasts"
        raise ValueError(f"there is no recalibrator to save with --calibrator: {why}")
    return recalibrator


def fit(
    val: str, out: Path, columns: o.ForecastColumns, reader: o.Reader, methods: list[str] | None, output: o.Output
) -> None:
    """Fit a recalibration to the forecasts of a file, and save it."""
    from trueup._core.registry import FORECAST_METHODS
    from trueup.calibrators.forecasts import RAW, choose_recalibration
    from trueup.io.load_save import save

    require_output(out, ".safetensors", reads=(Path(val),))
    names = _check_methods(methods)
    losses: dict[str, float] = {}
    with working("fitting", quiet=output.quiet):
        table = load(val, columns, reader)
        if not table.is_gaussian:
            raise ValueError("a recalibration is fitted to --mean and --std, not to --quantiles")
        if names is not None and len(names) == 1:
            chosen = names[0]
            recalibrator = FORECAST_METHODS[chosen](*table.triple, sample_weight=table.sample_weight)
        else:
            choice = choose_recalibration(*table.triple, **(o.drop_unset(methods=names) | table.options()))
            chosen, losses, recalibrator = choice.chosen, dict(choice.losses), choice.recalibrator
    rows = len(table.targets)
    if recalibrator is None:
        best = min((name for name in losses if name != RAW), key=losses.__getitem__)
        raise ValueError(f"no recalibration improves the forecasts of held-out rows; -m {best} fits one anyway")
    save(recalibrator, out, summary={"method": chosen, "fitted to": Path(val).name, "rows": rows})
    if output.as_json:
        print_json(
            "fit", file=val, output=out, rows=rows, methods=names, chosen=chosen, losses=losses or None,
            recalibrator=repr(recalibrator),
        )  # fmt: skip
    elif not output.quiet:
        if losses:
            cells = ([name, format_number(loss)] for name, loss in losses.items())
            print_table([["recalibration", "cross-validated pinball loss"], *cells])
            print_remarks(f"Chosen: {chosen}{choice.why()}.")
            print()
        print(f"{recalibrator!r}\n\nWritten: {out}")


def apply(path: Path, file: str, out: str, columns: o.ForecastColumns, reader: o.Reader, output: o.Output) -> None:
    """Copy a file, and add columns with its recalibrated forecasts."""
    from trueup.io.artifacts import load_artifact, read_header
    from trueup.io.forecasts import save_columns

    require_output(Path(out), reads=(path, Path(file)))
    with working("recalibrating", quiet=output.quiet):
        recalibrator = load_artifact(path, "recalibrator")
        header = read_header(path, "recalibrator")
        table = load(file, columns, reader, every_column=True, labelled=False)
        after = recalibrator(table.forecast, table.spread)
        names = columns.mean or "mean", columns.std or "std"
        written = dict(table.columns)
        written |= {f"{name}_calibrated": values for name, values in zip(names, after, strict=True)}
        if levels := list_levels(columns):
            quantiles = recalibrator.quantiles(table.forecast, table.spread, levels=levels)
            written |= {f"q{level:g}": quantiles[:, k] for k, level in enumerate(levels)}
        save_columns(out, written)
    if output.as_json:
        print_json(
            "apply", calibrator=path, file=file, output=out, rows=len(table.targets), method=header.class_name,
            columns=list(written), summary=header.summary,
        )  # fmt: skip
    elif not output.quiet:
        print(f"{header.class_name} on {len(table.targets):,} rows\n\nWritten: {out}")


def _check_methods(methods: list[str] | None) -> list[str] | None:
    from trueup._core.registry import FORECAST_METHODS

    return None if not methods else [o.require_name("recalibration", FORECAST_METHODS, name) for name in methods]


def print_audit(audit: ForecastAudit, *, quiet: bool = False) -> None:
    """Print the table of recalibrations and the verdict."""
    scores = audit.comparison
    if scores is None:
        print_scores(audit.scores, quiet=quiet)
        return
    if not quiet:
        print_caption(scores, audit)
    shown = ("crps", "mae", "coverage_50", "coverage_90", "width_90", "pit_error")
    print_table(select_metrics(scores, [metric for metric in shown if metric in scores.metrics]).table())
    print_remarks(scores.notes()[0] if len(scores.methods) > 2 else "", audit.verdict(), quiet=quiet)
