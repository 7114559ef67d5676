"""Verbs that compare calibration methods: rank, report."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from trueup.cli import forecasts
from trueup.cli import options as o
from trueup.cli.output import (
    print_caption,
    print_groups,
    print_json,
    print_remarks,
    print_stderr,
    print_table,
    require_output,
    select_metrics,
    working,
)

if TYPE_CHECKING:
    from trueup.calibrators.base import Calibrator
    from trueup.reports.audit import Audit
    from trueup.reports.page import Report

MAX_METHODS_SHOWN = 10
"""Largest number of methods in a table, unless --all is set."""
NARROW = ("accuracy", "nll", "brier", "ece", "aece", "sce")
"""Metrics of a table of many methods that fits a terminal of 80 columns."""
NARROW_EVENT = ("predicted", "nll", "event_brier", "ece", "calibration_slope")
"""The same for an event."""


@dataclass(frozen=True)
class Ranking(o.Methods):
    """Which methods are fitted, and how many of them are shown."""

    try_all: bool = o.switch("Try every method; this may take long.")
    show_all: bool = o.switch("Show every method that was tried, not only the best ten.", "--all")


@dataclass(frozen=True)
class Halves:
    """Files for fitting and for scoring."""

    val: str = o.argument("VAL", "Logits and labels to fit the methods to.")
    test: str | None = o.argument(
        "TEST", "Logits and labels for the scores (default: held-out rows of VAL).", default=None
    )


@dataclass(frozen=True)
class ReportFiles:
    """Output files of `report`."""

    page: Path = o.output_file("HTML", "The page to write.", Path("report.html"))
    calibrator: Path | None = o.option("FILE", "Also save the chosen calibrator, .safetensors.", "--calibrator", "-c")
    title: str | None = o.option("TEXT", "Title of the page.")


def rank(
    halves: Halves,
    *,
    ranking: Ranking,
    reader: o.Reader,
    columns: o.ForecastColumns,
    scoring: Annotated[o.Scoring, o.without(o.Scoring, "n_resamples")],
    output: o.Output,
) -> None:
    """Rank calibration methods: each is fitted to VAL and scored on TEST.

    VAL may hold both halves (val_logits, test_logits, …). A single file without halves is cross-fitted: each row is
    scored by a fit to the other folds. For forecasts of a number (--mean, --std, --target), recalibrations are ranked.

      $ trueup rank val.npz test.npz
      $ trueup rank val.npz test.npz -m temperature -m svs -m histogram
      $ trueup rank both.npz --json
    """
    if columns:
        audit = forecasts.make_report(halves, columns, reader, ranking, scoring, output.quiet).audit
    else:
        from trueup.metrics.table import DEFAULT, EVENT_DEFAULT

        for name in scoring.metric or ():
            o.require_name("metric of the comparison", dict.fromkeys((*DEFAULT, *EVENT_DEFAULT)), name)
        audit = _make_report(halves, ranking, reader, scoring, output.quiet, auto=False).audit
    if output.as_json:
        print_json("rank", val=halves.val, test=halves.test, audit=audit.to_dict())
    elif columns:
        forecasts.print_audit(audit, quiet=output.quiet)
    else:
        print_audit(audit, scoring.metric, quiet=output.quiet, show_all=ranking.show_all or bool(ranking.method))


def report(
    halves: Halves,
    *,
    files: ReportFiles,
    ranking: Ranking,
    reader: o.Reader,
    columns: o.ForecastColumns,
    scoring: Annotated[o.Scoring, o.without(o.Scoring, "metric", "n_resamples")],
    output: o.Output,
) -> None:
    """Write a page on how miscalibrated the predictions are, and which method calibrates them best.

    Up to 100,000 logits, the automatic choice is among the methods, and the page shows the weights of its mixture.
    VAL may hold both halves (val_logits, test_logits, …). A single file without halves is cross-fitted: each row is
    scored by a fit to the other folds.

      $ trueup report val.npz test.npz -o report.html
      $ trueup report test.npz -o report.html -c calibrator.safetensors
      $ trueup report val.npz test.npz --try-all --title 'ResNet-50, March'
      $ trueup report risk.csv --probs --groups ward --groups sex --sample-weight w
      $ trueup report demand.csv --mean mu --std sigma --target sold
    """
    read = tuple(Path(name) for name in (halves.val, halves.test) if name is not None)
    require_output(files.page, ".html", ".htm", reads=read)
    if files.calibrator is not None:
        require_output(files.calibrator, ".safetensors", reads=read)
    about = o.drop_unset(title=files.title)
    if columns:
        page = forecasts.make_report(halves, columns, reader, ranking, scoring, output.quiet, **about)
    else:
        from trueup.reports.page import describe_file

        about["origin"] = {"Calibration file": describe_file(halves.val)}
        about["origin"] |= {} if halves.test is None else {"Test file": describe_file(halves.test)}
        about["origin"]["Command"] = shlex.join(["trueup", *sys.argv[1:]])
        page = _make_report(halves, ranking, reader, scoring, output.quiet, **about)
    audit, calibrator, written = page.audit, None, str(files.page)
    if files.calibrator is not None:
        calibrator = forecasts.chosen_recalibrator(audit) if columns else _chosen_calibrator(audit)
        written += f" and {files.calibrator}"
    with working("writing the page", quiet=output.quiet):
        page.save(files.page)
    if files.calibrator is not None:
        from trueup.io.load_save import save

        summary = {"method": audit.chosen, "fitted to": Path(halves.val).name, "rows": audit.calibration_rows}
        summary |= o.drop_unset(event=reader.event_number())
        save(calibrator, files.calibrator, n_classes=getattr(audit.scores, "n_classes", None), summary=summary)
    if output.as_json:
        outputs = {"output": files.page, "calibrator": files.calibrator}
        print_json("report", val=halves.val, test=halves.test, **outputs, audit=audit.to_dict())
    elif not output.quiet:
        if columns:
            forecasts.print_audit(audit)
        else:
            print_audit(audit, None, show_all=ranking.show_all or bool(ranking.method))
        print_remarks(f"Written: {written}")


def print_audit(audit: Audit, metrics: list[str] | None, *, quiet: bool = False, show_all: bool = False) -> None:
    """Print the table of methods, the chosen one first and then by held-out loss, and the verdict.

    At most `MAX_METHODS_SHOWN` methods are in the table, unless `show_all` is set.
    """
    from trueup.metrics.table import default_metrics
    from trueup.reports.audit import best_first, method_title

    scores = audit.scores
    many = len(scores.methods) > 2
    if not quiet:
        print_caption(scores, audit)
    if not metrics:
        event = scores.is_event
        metrics = list((NARROW_EVENT if event else NARROW) if many else default_metrics(scores.n_classes, not event))
    absent = [metric for metric in metrics if metric not in scores.metrics]
    if absent:
        raise ValueError(f"--metric {absent[0]} does not apply here; choose from: {', '.join(scores.metrics)}")
    table = select_metrics(scores, metrics).table()
    hidden: list[str] = []
    if many:
        table = best_first(table, audit)
        if not show_all:
            table, hidden = table[: MAX_METHODS_SHOWN + 1], [row[0] for row in table[MAX_METHODS_SHOWN + 1 :]]
    print_table(table)
    legend = f"held-out: cross-validated NLL on the calibration rows. {scores.notes()[0]}" if many else ""
    not_shown = f"Not shown, with a larger held-out loss: {', '.join(hidden)}; --all shows them." if hidden else ""
    chosen = f"Chosen by cross-validation: {audit.chosen}, {method_title(audit.chosen)}."
    from trueup.reports.figures.method_choice import method_choice, more_rows

    chosen = "" if audit.chosen == "raw" else chosen
    print_remarks(not_shown, legend, chosen, more_rows(method_choice(audit.choice)), audit.verdict(), quiet=quiet)
    print_groups(scores.groups, quiet)


def _make_report(
    halves: Halves,
    ranking: Ranking,
    reader: o.Reader,
    scoring: o.Scoring,
    quiet: bool,
    auto: bool = True,
    **about: Any,
) -> Report[Audit]:
    """Build the report; with `auto`, small files also get the automatic choice by default."""
    from trueup._core.registry import METHODS

    methods = ranking.method
    for name in methods or ():
        o.require_name("method", METHODS, name)
    if ranking.try_all:
        if methods:
            raise ValueError("--try-all tries every method: give either --try-all or --method")
        methods = list(METHODS)
    from trueup.reports.audit import methods_for
    from trueup.reports.page import report as make_report

    with working("comparing", quiet=quiet):
        val, test = reader.load_val_and_test(halves.val, halves.test)
        number = reader.event_number(val.class_names)
        if methods is None and not auto:
            rows, classes = val.logits.shape
            methods = list(methods_for(rows, classes if number is None else 2))
        options = o.set_options(scoring, "bins", "level", "n_folds", "seed")
        options |= o.drop_unset(methods=methods, event=number, class_names=reader.names(val.class_names))
        options |= val.options() | {"groups": dict((test or val).groups) or None}
        options |= {f"test_{name}": x for name, x in (test.options() if test else {}).items() if name != "groups"}
        test_pair = None if test is None else test.pair
        page = make_report(val.pair, test_pair, **options, **about, progress=not quiet)
    if not quiet:
        if reader.multilabel:
            print_stderr("warning: each method is one map for all labels; `trueup fit --multilabel` fits one per label")
        for name, reason in page.audit.failures.items():
            print_stderr(f"warning: {name} was left out: {reason}")
        for name, messages in page.audit.warnings.items():
            for message in messages:
                print_stderr(f"warning: {name}: {message}")
    return page


def _chosen_calibrator(audit: Audit) -> Calibrator:
    from trueup.calibrators.base import Identity

    return audit.calibrators.get(audit.chosen) or Identity()


register = o.commands("Measure", rank, report)
