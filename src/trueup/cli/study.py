"""The verb that repeats the experiments of papers: study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trueup.cli import options as o
from trueup.cli.errors import FAILED, print_stderr
from trueup.cli.output import print_json

if TYPE_CHECKING:
    from trueup.study import Options, RunSummary, Store, Study

NAMES = ("neural-clamping", "rethinking", "clue", "post-hoc", "calarena")


def study(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[report] NAME",
            autocompletion=o.complete_from([*NAMES, "report"]),
            help=f"{', '.join(NAMES)}; with `report` before it, only the page is written, from finished runs.",
        ),
    ],
    data: Annotated[
        str | None, typer.Option("--data", metavar="NAME", help="The data set, or one of several files.")
    ] = None,
    data_dir: o.DataFolder = None,
    preset: Annotated[
        str | None,
        typer.Option("--preset", metavar="NAME", help="Sizes and schedules by name, such as digits or paper."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option("--seeds", metavar="N", help="Number of seeds, each a run of everything.")
    ] = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", "-m", metavar="NAME", help="Run only this method; may be repeated.")
    ] = None,
    oracle: Annotated[bool, typer.Option("--oracle", help="Choose on the test half, as some papers do.")] = False,
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-j", metavar="N", help="Number of processes (default: one for each core)."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="WHERE", help="A Dask cluster: tcp://host:port, or local[:N] to start one."),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="FILE", help="Database of the results (default FOLDER/NAME.sqlite)."),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the tables, figures and the page.")
    ] = Path("study"),
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Repeat a paper's experiments, and put our numbers beside the published ones.

    A finished cell is never run twice: if a study was stopped, the same command resumes it.
    """
    report_only, name = _parse(words)
    if workers is not None and cluster is not None:
        raise ValueError("give either --workers or --cluster")
    if data_dir is not None and not data_dir.expanduser().is_dir():
        raise FileNotFoundError(f"{data_dir}: no such folder; --data-dir names the folder of the study's data")
    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    from trueup.io.atomic import require_writable, require_writable_folder

    require_writable_folder(folder / name)
    from trueup.study import STUDIES, Options, Store
    from trueup.study.study_page import save_page

    selected: Study = STUDIES[name]
    options = Options(
        **o.drop_unset(data=data, data_dir=None if data_dir is None else str(data_dir), preset=preset, seeds=seeds),
        methods=tuple(method or ()),
        oracle=oracle,
    )
    folder.mkdir(parents=True, exist_ok=True)
    database = store or folder / f"{name}.sqlite"
    if report_only and not database.is_file():
        raise FileNotFoundError(f"{database}: no results yet; `trueup study {name}` makes them")
    results = Store(require_writable(database))
    ran = None if report_only else _run(selected, results, options, workers, cluster, quiet)
    page = save_page(selected, results, options, folder / name)
    if as_json:
        cells = len(selected.cells(options))
        summary = {} if ran is None else {"finished": ran.finished, "failed": dict(ran.failed), "seconds": ran.seconds}
        print_json("study", name=name, store=database, output=page, cells=cells, **summary)
    elif not quiet:
        print(f"Written: {page}")
    if ran is not None and ran.failed and not ran.finished and not ran.kept:
        raise typer.Exit(FAILED)


def _parse(words: list[str]) -> tuple[bool, str]:
    report_only = words[0] == "report"
    names = words[1:] if report_only else words
    if len(names) != 1:
        raise ValueError(f"wanted one study of {', '.join(NAMES)}, got {' '.join(names) or 'none'}")
    return report_only, o.require_name("study", NAMES, names[0])


def _run(
    study: Study, store: Store, options: Options, workers: int | None, cluster: str | None, quiet: bool
) -> RunSummary:
    from trueup.core.executors import executor_for
    from trueup.study import run

    where = cluster or ("none" if workers == 1 else "processes" if workers is None else f"processes:{workers}")
    with executor_for(where) as executor:
        ran = run(study, store, options=options, executor=executor, progress=not quiet)
    if not quiet:
        print_stderr(
            f"{ran.finished} cells run, {ran.kept} already there, {len(ran.failed)} failed, {ran.seconds:.0f} s"
        )
        for error in sorted(set(ran.failed.values())):
            print_stderr(f"warning: failed: {error}")
    return ran


def register(app: typer.Typer) -> None:
    """Add the verb to the application."""
    app.command(
        rich_help_panel="Studies",
        epilog=o.format_examples(
            "trueup study neural-clamping",
            "trueup study post-hoc --data-dir logits --workers 2 -o results",
            "trueup study calarena --data-dir CalArena --data cv-multiclass",
            "trueup study rethinking --preset fashion_mnist --data-dir data --cluster tcp://scheduler:8786",
            "trueup study report neural-clamping",
        ),
    )(study)
