"""Forecasts of a number on the command line: what the verbs do where --mean, --std or --quantiles name its columns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup._core.formatting import format_number
from trueup.cli import options as o
from trueup.cli.output import print_json, print_remarks, print_table, require_output, working
from trueup.cli.rank import Halves, ReportFiles, print_report, select_metrics

if TYPE_CHECKING:
    from trueup.io.forecasts import ForecastTable
    from trueup.metrics.forecast_table import ForecastScores
    from trueup.reports.forecasts import ForecastAudit


TAKEN = ("sample_weight", "storage", "clusters", "method", "level", "n_resamples", "n_folds", "seed")
"""The options of verbs that also hold for forecasts."""


@dataclass(frozen=True)
class ForecastReader:
    """Reads forecasts from files whose columns the user named."""

    columns: o.ForecastColumns
    reader: o.Reader

    @classmethod
    def of(cls, columns: o.ForecastColumns, reader: o.Reader, *records: Any) -> ForecastReader:
        """With what a reader of classes shares; its other options, and those of other records, must not be set."""
        for record in (reader, *records):
            for name, value in o.set_options(record).items():
                if name not in TAKEN and value is not False:
                    raise ValueError(f"{o.flag_of(record, name)} is not for forecasts of a number: leave it out")
        return cls(columns, reader)

    @property
    def level_list(self) -> list[float] | None:
        """The levels that the user gave."""
        levels = self.columns.levels
        if levels is None:
            return None
        try:
            return [float(level) for level in levels.split(",")]
        except ValueError:
            raise ValueError(f"--levels must be numbers separated by commas, got {levels!r}") from None

    def load(self, path: str | Path, *, every_column: bool = False, labelled: bool = True) -> ForecastTable:
        """The forecasts of a file."""
        from trueup.io.forecasts import load_forecasts

        named = self.columns
        quantiles = None if named.quantiles is None else named.quantiles.split(",")
        options = o.drop_unset(
            mean=named.mean,
            std=named.std,
            targets=named.target,
            quantiles=quantiles[0] if quantiles is not None and len(quantiles) == 1 else quantiles,
            levels=self.level_list if quantiles is not None else None,
            sample_weight=self.reader.sample_weight,
            clusters=self.reader.clusters,
            storage_options=self.reader.storage_options,
        )
        table = load_forecasts(path, **options, every_column=every_column, labelled=labelled)
        if not len(table.targets):
            raise ValueError(f"{path}: there are no rows")
        return table


def evaluate(file: str, reader: ForecastReader, scoring: o.Scoring, output: o.Output) -> None:
    """Print the table of a file's forecasts."""
    from trueup.metrics.forecast_table import evaluate_forecasts

    with working("measuring", quiet=output.quiet):
        table = reader.load(file)
        scores = evaluate_forecasts(*table.triple, **(o.set_options(scoring) | table.options()))
    if output.as_json:
        print_json("evaluate", file=file, verdict=scores.verdict(), scores=scores.to_dict())
        return
    _print_scores(scores, output.quiet)


def _print_scores(scores: ForecastScores, quiet: bool) -> None:
    if not quiet:
        print(f"{scores.caption()}\n")
    print_table(scores.table())
    print_remarks(*scores.notes(), quiet=quiet)


def rank(
    halves: Halves, reader: ForecastReader, methods: list[str] | None, scoring: o.Scoring, output: o.Output
) -> None:
    """Print the table of the recalibrations."""
    audit = _report(halves, reader, methods, scoring, output.quiet).audit
    if output.as_json:
        print_json("rank", val=halves.val, test=halves.test, audit=audit.to_dict())
        return
    _print_audit(audit, output.quiet)


def report(
    halves: Halves,
    files: ReportFiles,
    reader: ForecastReader,
    methods: list[str] | None,
    scoring: o.Scoring,
    output: o.Output,
) -> None:
    """Write the page about a file's forecasts."""
    page = _report(halves, reader, methods, scoring, output.quiet, **o.drop_unset(title=files.title))
    audit = page.audit
    chosen = None if audit.choice is None else audit.choice.recalibrator
    if files.calibrator is not None and chosen is None:
        why = audit.failure or "the forecasts are best as they are"
        raise ValueError(f"there is no recalibrator to save with --calibrator: {why}")
    page.save(files.page)
    if files.calibrator is not None and chosen is not None:
        _save(chosen, files.calibrator, audit.chosen, halves.val, audit.calibration_rows)
    if output.as_json:
        print_report(halves, files, audit)
    elif not output.quiet:
        _print_audit(audit, output.quiet)
        print_remarks(f"Written: {files.written}")


def fit(val: str, out: Path, reader: ForecastReader, methods: list[str] | None, output: o.Output) -> None:
    """Fit a recalibration to a file's forecasts, and save it."""
    from trueup.calibrators.forecasts import RAW, choose_recalibration

    require_output(out, ".safetensors", reads=(Path(val),))
    names = _check_methods(methods)
    with working("fitting", quiet=output.quiet):
        table = reader.load(val)
        if not table.is_gaussian:
            raise ValueError("a recalibration is fitted to --mean and --std, not to --quantiles")
        if names is not None and len(names) == 1:
            from trueup._core.registry import FORECAST_METHODS

            chosen, losses, why = names[0], None, ""
            recalibrator = FORECAST_METHODS[chosen](*table.triple, sample_weight=table.sample_weight)
        else:
            choice = choose_recalibration(*table.triple, **(o.drop_unset(methods=names) | table.options()))
            chosen, losses, why = choice.chosen, dict(choice.losses), choice.why()
            recalibrator = choice.recalibrator
    rows = len(table.targets)
    if recalibrator is None:
        best = min((name for name in losses or {} if name != RAW), key=lambda name: (losses or {})[name])
        raise ValueError(
            f"no recalibration predicts held-out rows better than the forecasts as they are; -m {best} fits one anyway"
        )
    _save(recalibrator, out, chosen, val, rows)
    if output.as_json:
        print_json(
            "fit", file=val, output=out, rows=rows, methods=names, chosen=chosen, losses=losses,
            recalibrator=repr(recalibrator),
        )  # fmt: skip
        return
    if output.quiet:
        return
    if losses is not None:
        print_table(
            [["recalibration", "cross-validated pinball loss"], *([n, format_number(x)] for n, x in losses.items())]
        )
        print_remarks(f"Chosen: {chosen}{why}.")
        print()
    print(f"{recalibrator!r}\n\nWritten: {out}")


def apply(path: Path, file: str, out: str, reader: ForecastReader, output: o.Output) -> None:
    """Write a file again with its recalibrated forecasts beside the old ones."""
    from trueup.io.artifacts import load_artifact, read_header
    from trueup.io.forecasts import save_columns

    require_output(Path(out), reads=(path, Path(file)))
    if reader.columns.quantiles is not None:
        raise ValueError("a recalibration is applied to --mean and --std, not to --quantiles")
    with working("recalibrating", quiet=output.quiet):
        recalibrator = load_artifact(path, "recalibrator")
        header = read_header(path, "recalibrator")
        table = reader.load(file, every_column=True, labelled=False)
        names = reader.columns.mean or "mean", reader.columns.std or "std"
        after = recalibrator(table.forecast, table.spread)
        columns = dict(table.columns)
        for name, values in zip(names, after, strict=True):
            columns[f"{name}_calibrated"] = values
        levels = reader.level_list or []
        if levels:
            quantiles = recalibrator.quantiles(table.forecast, table.spread, levels=levels)
            columns |= {f"q{level:g}": quantiles[:, k] for k, level in enumerate(levels)}
        save_columns(out, columns)
    if output.as_json:
        print_json(
            "apply", calibrator=path, file=file, output=out, rows=len(table.targets), method=header.class_name,
            columns=list(columns), summary=header.summary,
        )  # fmt: skip
    elif not output.quiet:
        print(f"{header.class_name} on {len(table.targets):,} rows\n\nWritten: {out}")


def _report(
    halves: Halves, reader: ForecastReader, methods: list[str] | None, scoring: o.Scoring, quiet: bool, **title: Any
) -> Any:
    from trueup.reports.forecasts import report_forecasts

    names = _check_methods(methods)
    with working("comparing", quiet=quiet):
        val = reader.load(halves.val)
        test = None if halves.test is None else reader.load(halves.test)
        return report_forecasts(val, test, **o.drop_unset(methods=names), **o.set_options(scoring), **title)


def _check_methods(methods: list[str] | None) -> list[str] | None:
    from trueup._core.registry import FORECAST_METHODS

    return None if not methods else [o.require_name("recalibration", FORECAST_METHODS, name) for name in methods]


def _print_audit(audit: ForecastAudit, quiet: bool) -> None:
    if audit.comparison is None:
        _print_scores(audit.scores, quiet)
        return
    if not quiet:
        how = (
            f"cross-fitted in {audit.n_folds} folds" if audit.cross_fitted else f"fitted to {audit.calibration_rows:,}"
        )
        print(f"{audit.comparison.caption()}; {how}\n")
    few = ("crps", "mae", "coverage_50", "coverage_90", "width_90", "pit_error")
    table = select_metrics(audit.comparison, [metric for metric in few if metric in audit.comparison.metrics])
    print_table(table.table())
    legend = audit.comparison.notes()[0] if len(audit.comparison.methods) > 2 else ""
    print_remarks(legend, audit.verdict(), quiet=quiet)


def _save(recalibrator: Any, path: Path, method: str, val: str, rows: int) -> None:
    from trueup.io.load_save import save

    save(recalibrator, path, summary={"method": method, "fitted to": Path(val).name, "rows": rows})
