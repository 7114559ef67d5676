"""Forecasts of a number on the command line: what the verbs do where --mean, --std or --quantiles name its columns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.cli import options as o
from trueup.cli.output import print_json, print_remarks, print_table, require_output, working
from trueup.core.formatting import format_number

if TYPE_CHECKING:
    from trueup.io.forecasts import ForecastTable
    from trueup.metrics.forecast_table import ForecastScores
    from trueup.report.forecast_audit import ForecastAudit


@dataclass(frozen=True)
class ForecastReader:
    """Reads forecasts from files whose columns the user named."""

    columns: o.ForecastColumns
    weight: str | None = None
    storage: list[str] | None = None
    clusters: str | None = None

    @classmethod
    def of(cls, columns: o.ForecastColumns, reader: o.Reader, **others: Any) -> ForecastReader:
        """With what a reader of classes shares; its other options, and these others, are not for forecasts."""
        shared = ("weight", "storage", "clusters")
        for name, value in (vars(reader) | others).items():
            if name not in shared and value not in (None, False, []):
                raise ValueError(f"--{name.replace('_', '-')} is not for forecasts of a number: leave it out")
        return cls(columns, reader.weight, reader.storage, reader.clusters)

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
        given = o.drop_unset(
            mean=named.mean,
            std=named.std,
            targets=named.target,
            quantiles=quantiles[0] if quantiles is not None and len(quantiles) == 1 else quantiles,
            levels=self.level_list if quantiles is not None else None,
            weights=self.weight,
            clusters=self.clusters,
        )
        storage = o.Reader(storage=self.storage).storage_options
        given |= {"every_column": every_column, "labelled": labelled, "storage_options": storage}
        table = load_forecasts(path, **given)
        if not len(table.targets):
            raise ValueError(f"{path}: there are no rows")
        return table


def evaluate(file: str, reader: ForecastReader, options: dict[str, Any], *, as_json: bool, quiet: bool) -> None:
    """Print the table of a file's forecasts."""
    from trueup.metrics.forecast_table import evaluate_forecasts

    with working("measuring", quiet=quiet):
        table = reader.load(file)
        scores = evaluate_forecasts(*table.triple, **(options | table.options()))
    if as_json:
        print_json("evaluate", file=file, verdict=scores.verdict(), scores=scores.to_dict())
        return
    _print_scores(scores, quiet)


def _print_scores(scores: ForecastScores, quiet: bool) -> None:
    if not quiet:
        print(f"{scores.caption()}\n")
    print_table(scores.table())
    print_remarks(*scores.notes(), quiet=quiet)


def compare(
    val: str,
    test: str | None,
    reader: ForecastReader,
    methods: list[str] | None,
    options: dict[str, Any],
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Print the table of the recalibrations."""
    audit = _audit(val, test, reader, methods, options, quiet)
    if as_json:
        print_json("compare", val=val, test=test, audit=audit.to_dict())
        return
    _print_audit(audit, quiet)


def report(
    val: str,
    test: str | None,
    out: Path,
    recalibrator: Path | None,
    title: str | None,
    reader: ForecastReader,
    methods: list[str] | None,
    options: dict[str, Any],
    *,
    as_json: bool,
    quiet: bool,
) -> None:
    """Write the page about a file's forecasts."""
    from trueup.report.forecast_page import report_forecasts

    audit = _audit(val, test, reader, methods, options, quiet)
    chosen = None if audit.choice is None else audit.choice.recalibrator
    if recalibrator is not None and chosen is None:
        why = audit.failure or "the forecasts are best as they are"
        raise ValueError(f"there is no recalibrator to save with --calibrator: {why}")
    report_forecasts(audit, title=title).save(out)
    if recalibrator is not None and chosen is not None:
        _save(chosen, recalibrator, audit.chosen, val, audit.calibration_rows)
    if as_json:
        print_json("report", val=val, test=test, output=out, calibrator=recalibrator, audit=audit.to_dict())
        return
    if not quiet:
        _print_audit(audit, quiet)
        print_remarks(f"Written: {out if recalibrator is None else f'{out} and {recalibrator}'}")


def fit(val: str, out: Path, reader: ForecastReader, methods: list[str] | None, *, as_json: bool, quiet: bool) -> None:
    """Fit a recalibration to a file's forecasts, and save it."""
    from trueup.calibrators.recalibration_choice import RAW, choose_recalibration

    require_output(out, ".safetensors", reads=(Path(val),))
    names = _check_methods(methods)
    with working("fitting", quiet=quiet):
        table = reader.load(val)
        if not table.is_gaussian:
            raise ValueError("a recalibration is fitted to --mean and --std, not to --quantiles")
        if names is not None and len(names) == 1:
            from trueup.registry import RECALIBRATIONS

            chosen, losses, why = names[0], None, ""
            recalibrator = RECALIBRATIONS[chosen](*table.triple, weights=table.weights)
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
    if as_json:
        print_json(
            "fit", file=val, output=out, rows=rows, methods=names, chosen=chosen, losses=losses,
            recalibrator=repr(recalibrator),
        )  # fmt: skip
        return
    if quiet:
        return
    if losses is not None:
        print_table(
            [["recalibration", "cross-validated pinball loss"], *([n, format_number(x)] for n, x in losses.items())]
        )
        print_remarks(f"Chosen: {chosen}{why}.")
        print()
    print(f"{recalibrator!r}\n\nWritten: {out}")


def apply(path: Path, file: str, out: str, reader: ForecastReader, *, as_json: bool, quiet: bool) -> None:
    """Write a file again with its recalibrated forecasts beside the old ones."""
    from trueup.io.artifacts import load_recalibrator, read_header
    from trueup.io.forecasts import save_columns

    require_output(Path(out), reads=(path, Path(file)))
    if reader.columns.quantiles is not None:
        raise ValueError("a recalibration is applied to --mean and --std, not to --quantiles")
    with working("recalibrating", quiet=quiet):
        recalibrator = load_recalibrator(path)
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
    if as_json:
        print_json(
            "apply", calibrator=path, file=file, output=out, rows=len(table.targets), method=header.method,
            columns=list(columns), summary=header.summary,
        )  # fmt: skip
    elif not quiet:
        print(f"{header.method} on {len(table.targets):,} rows\n\nWritten: {out}")


def _audit(
    val: str,
    test: str | None,
    reader: ForecastReader,
    methods: list[str] | None,
    options: dict[str, Any],
    quiet: bool,
) -> ForecastAudit:
    from trueup.report.forecast_audit import audit_forecasts

    names = _check_methods(methods)
    with working("comparing", quiet=quiet):
        first = reader.load(val)
        second = None if test is None else reader.load(test)
        given = o.drop_unset(methods=names) | options | first.options()
        if second is not None:
            given |= {f"test_{name}": value for name, value in second.options().items()}
        return audit_forecasts(first.triple, None if second is None else second.triple, **given)


def _check_methods(methods: list[str] | None) -> list[str] | None:
    from trueup.registry import RECALIBRATIONS

    return None if not methods else [o.require_name("recalibration", RECALIBRATIONS, name) for name in methods]


def _print_audit(audit: ForecastAudit, quiet: bool) -> None:
    if audit.comparison is None:
        _print_scores(audit.scores, quiet)
        return
    if not quiet:
        how = f"cross-fitted in {audit.folds} folds" if audit.cross_fitted else f"fitted to {audit.calibration_rows:,}"
        print(f"{audit.comparison.caption()}; {how}\n")
    from trueup.cli.evaluate import select_metrics

    few = ("crps", "mae", "coverage_50", "coverage_90", "width_90", "pit_error")
    table = select_metrics(audit.comparison, [metric for metric in few if metric in audit.comparison.metrics])
    print_table(table.table())
    legend = audit.comparison.notes()[0] if len(audit.comparison.methods) > 2 else ""
    print_remarks(legend, audit.verdict(), quiet=quiet)


def _save(recalibrator: Any, path: Path, method: str, val: str, rows: int) -> None:
    from trueup.io.artifacts import save_recalibrator

    save_recalibrator(recalibrator, path, summary={"method": method, "fitted to": Path(val).name, "rows": rows})
