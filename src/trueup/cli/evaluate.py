"""Verbs that measure: evaluate, compare, report."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trueup.cli import options as o
from trueup.cli.errors import print_stderr, silence_warnings
from trueup.cli.files import Names, output
from trueup.cli.output import print_json, print_remarks, print_table

if TYPE_CHECKING:
    from trueup.metrics.table import Scores
    from trueup.report.audit import Audit

AUDIT = "trueup.report.audit:audit"
NARROW = ("accuracy", "nll", "brier", "ece", "aece", "sce")
"""The metrics of a table of many methods, which is to fit a terminal of 80 columns."""

Folds = Annotated[
    int | None, typer.Option("--folds", metavar="N", help=o.help_of("Folds of the cross-validation", AUDIT, "folds"))
]
All = Annotated[bool, typer.Option("--all", help="Try every method; this takes its time.")]
Val = Annotated[Path, typer.Argument(metavar="VAL", help="What methods are fitted to.")]
Test = Annotated[
    Path | None,
    typer.Argument(metavar="TEST", help="What they are judged on; without it, rows that a fit has not seen."),
]


def evaluate(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="Logits and labels; also a folder, pattern or address of shards.")
    ],
    probs: o.Probs = False,
    logits: o.Logits = None,
    labels: o.Labels = None,
    split: o.Split = None,
    metric: o.Metrics = None,
    bins: o.Bins = None,
    level: o.Level = None,
    replicates: Annotated[
        int | None,
        typer.Option("--replicates", metavar="N", help=o.help_of("Bootstrap replicates", o.COMPARE, "replicates")),
    ] = None,
    seed: o.Seed = None,
    cluster: o.Cluster = None,
    skip_bad: o.SkipBad = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """How calibrated a network is, and how sure that is.

    Shards are read once, some rows at a time, and never together.
    """
    from trueup.metrics.table import DEFAULT
    from trueup.metrics.table import evaluate as scored
    from trueup.registry import METRICS

    for name in metric or ():
        o.known("metric", dict.fromkeys([*METRICS, *DEFAULT]), name)
    names = Names(probs, logits, labels)
    chosen = o.given(metrics=metric, bins=bins, level=level, replicates=replicates, seed=seed)
    with silence_warnings(quiet):
        if names.sharded(file, cluster):
            with names.shards(file, split, cluster) as (shards, executor):
                from trueup.metrics.sharded import evaluate_shards as over_shards

                scores = over_shards(shards, **chosen, executor=executor, skip_bad=skip_bad, progress=not quiet)
        else:
            pair = names.read(Path(file), split)
            if not len(pair.labels):
                raise ValueError(f"{file}: there are no rows")
            scores = scored(*pair, **chosen)
    if as_json:
        print_json("evaluate", file=file, split=split, verdict=scores.verdict(), scores=scores.to_dict())
        return
    print_scores(scores, quiet=quiet)


def compare(
    val: Val,
    test: Test = None,
    method: o.Methods = None,
    every: All = False,
    probs: o.Probs = False,
    logits: o.Logits = None,
    labels: o.Labels = None,
    metric: o.Metrics = None,
    bins: o.Bins = None,
    level: o.Level = None,
    folds: Folds = None,
    seed: o.Seed = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Which method repairs a network best: each is fitted to VAL and judged on TEST.

    One file with both halves inside (val_logits, test_logits, …) does as well. One file without halves is
    cross-fitted: each row is judged by a fit that has not seen it.
    """
    from trueup.metrics.table import DEFAULT

    for name in metric or ():
        o.known("metric of the comparison", DEFAULT, name)
    found = _audited(
        Names(probs, logits, labels), val, test, method, every, quiet,
        bins=bins, level=level, folds=folds, seed=seed,
    )  # fmt: skip
    if as_json:
        print_json("compare", val=val, test=test, audit=found.to_dict())
        return
    print_audit(found, metric, quiet=quiet)


def report(
    val: Val,
    test: Test = None,
    out: Annotated[Path, typer.Option("--output", "-o", metavar="HTML", help="The page to write.")] = Path(
        "report.html"
    ),
    calibrator: Annotated[
        Path | None,
        typer.Option("--calibrator", "-c", metavar="FILE", help="Also write the chosen calibrator, .safetensors."),
    ] = None,
    method: o.Methods = None,
    every: All = False,
    title: Annotated[str | None, typer.Option("--title", metavar="TEXT", help="The page's title.")] = None,
    classes: Annotated[
        str | None, typer.Option("--classes", metavar="NAMES", help="Names of the classes, with commas.")
    ] = None,
    probs: o.Probs = False,
    logits: o.Logits = None,
    labels: o.Labels = None,
    bins: o.Bins = None,
    level: o.Level = None,
    folds: Folds = None,
    seed: o.Seed = None,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Write one page that says how miscalibrated a network is, which repair is best and by how much.

    One file with both halves inside (val_logits, test_logits, …) does as well. One file without halves is
    cross-fitted: each row is judged by a fit that has not seen it.
    """
    output(out, ".html", ".htm", reads=(val, test))
    if calibrator is not None:
        output(calibrator, ".safetensors", reads=(val, test))
    # What the page needs is better missed now than after the audit.
    import plotly  # noqa: F401

    from trueup.report import report as page

    named = classes.split(",") if classes else None
    found = _audited(
        Names(probs, logits, labels), val, test, method, every, quiet, named,
        bins=bins, level=level, folds=folds, seed=seed,
    )  # fmt: skip
    page(found, **o.given(title=title, names=named)).save(out)
    if calibrator is not None:
        _save_chosen(found, calibrator, val)
    if as_json:
        print_json("report", val=val, test=test, output=out, calibrator=calibrator, audit=found.to_dict())
        return
    if not quiet:
        print_audit(found, None)
        written = str(out) if calibrator is None else f"{out} and {calibrator}"
        print_remarks(f"Written: {written}")


def print_scores(scores: Scores, *, quiet: bool = False) -> None:
    """The table, and what it means."""
    if not quiet:
        print(f"{scores.caption()}\n")
    print_table(scores.table())
    print_remarks(*scores.notes(), quiet=quiet)


def print_audit(found: Audit, metrics: list[str] | None, *, quiet: bool = False) -> None:
    """The table of methods, the choice and the verdict."""
    from trueup.report.audit import method_title

    scores = found.scores
    many = len(scores.methods) > 2
    if not quiet:
        how = f"cross-fitted in {found.folds} folds" if found.cross_fitted else f"fitted to {found.calibration_rows:,}"
        print(f"{scores.caption()}; {how}\n")
    shown = metrics or (NARROW if many else scores.metrics)
    print_table(_only(scores, shown).table())
    legend = scores.notes()[0] if many else ""
    chosen = (
        "" if found.chosen == "raw" else f"Chosen by cross-validation: {found.chosen}, {method_title(found.chosen)}."
    )
    print_remarks(legend, chosen, found.verdict(), quiet=quiet)


def _only(scores: Scores, metrics: Any) -> Scores:
    def narrowed(table: Any) -> Any:
        return {name: {metric: found[metric] for metric in metrics} for name, found in table.items()}

    return replace(scores, values=narrowed(scores.values), changes=narrowed(scores.changes))


def _audited(
    names: Names,
    val: Path,
    test: Path | None,
    methods: list[str] | None,
    every: bool,
    quiet: bool,
    named: list[str] | None = None,
    **options: Any,
) -> Audit:
    from trueup.registry import METHODS

    for name in methods or ():
        o.known("method", METHODS, name)
    if every and methods:
        raise ValueError("--all tries every method: give either --all or --method")
    wanted = list(METHODS) if every else methods
    from trueup.report.audit import audit

    with silence_warnings(quiet):
        halves = names.val_and_test(val, test)
        count = halves[0].logits.shape[1]
        if named is not None and len(named) != count:
            raise ValueError(f"--classes must name the {count} classes, got {len(named)} names")
        found = audit(*halves, **o.given(methods=wanted, **options), progress=not quiet)
    if not quiet:
        for name, why in found.failures.items():
            print_stderr(f"warning: {name} was left out: {why}")
        for name, said in found.warnings.items():
            for line in said:
                print_stderr(f"warning: {name}: {line}")
    return found


def _save_chosen(found: Audit, path: Path, val: Path) -> None:
    from trueup.calibrators.identity import Identity
    from trueup.io.artifacts import save_calibrator

    summary = {"method": found.chosen, "fitted to": val.name, "rows": found.calibration_rows}
    chosen = found.calibrators.get(found.chosen) or Identity()
    save_calibrator(chosen, path, classes=found.scores.classes, summary=summary)


def add_to(app: typer.Typer) -> None:
    """Register the verbs."""
    app.command(
        rich_help_panel="Measure",
        epilog=o.examples(
            "trueup evaluate test.npz",
            "trueup evaluate test.csv --probs --labels target",
            "trueup evaluate both.npz --split test --json",
            "trueup evaluate test.parquet --metric ece --metric smooth_ece --bins 20",
            "trueup evaluate 'predictions/*.parquet' --cluster local:2 --skip-bad",
        ),
    )(evaluate)
    app.command(
        rich_help_panel="Measure",
        epilog=o.examples(
            "trueup compare val.npz test.npz",
            "trueup compare val.npz test.npz -m temperature -m svs -m histogram",
            "trueup compare both.npz --json",
        ),
    )(compare)
    app.command(
        rich_help_panel="Measure",
        epilog=o.examples(
            "trueup report val.npz test.npz -o report.html",
            "trueup report test.npz -o report.html -c calibrator.safetensors",
            "trueup report val.npz test.npz --all --title 'ResNet-50, March'",
        ),
    )(report)
