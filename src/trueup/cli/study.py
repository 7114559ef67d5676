"""The verb that runs the papers' experiments: study."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trueup.cli import options as o
from trueup.cli.errors import print_stderr
from trueup.cli.output import print_json

if TYPE_CHECKING:
    from trueup.study import Options, RunSummary, Store, Study

NAMES = ("neural-clamping", "rethinking", "clue", "post-hoc")
RUN = "trueup.study.run:run"


def study(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[report] NAME",
            autocompletion=o.completing([*NAMES, "report"]),
            help=f"{', '.join(NAMES)}; after `report`, nothing is run and the page is written of what there is.",
        ),
    ],
    data: Annotated[
        str | None, typer.Option("--data", metavar="NAME", help="The data set, or one file of several.")
    ] = None,
    data_dir: o.DataFolder = None,
    preset: Annotated[
        str | None, typer.Option("--preset", metavar="NAME", help="Sizes and schedules by name, as digits or paper.")
    ] = None,
    seeds: Annotated[int | None, typer.Option("--seeds", metavar="N", help="How many runs of everything.")] = None,
    method: Annotated[
        list[str] | None, typer.Option("--method", "-m", metavar="NAME", help="These methods alone; may be repeated.")
    ] = None,
    oracle: Annotated[bool, typer.Option("--oracle", help="Choose on the test half, as some papers did.")] = False,
    workers: Annotated[
        int | None, typer.Option("--workers", "-j", metavar="N", help="Processes on this machine (default: its cores).")
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="WHERE", help="A Dask cluster: tcp://host:port, or local[:N] to start one."),
    ] = None,
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="FILE", help="Where results are (default FOLDER/NAME.sqlite)."),
    ] = None,
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Where tables, figures and the page go.")
    ] = Path("study"),
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Run a paper's experiments, and put our numbers beside the printed ones.

    A finished cell is never run twice: stopped in the middle, by whatever, the same command goes on.
    """
    only, name = _parsed(words)
    if workers is not None and cluster is not None:
        raise ValueError("give either --workers or --cluster")
    if workers is not None and workers < 1:
        raise ValueError(f"--workers must be at least 1, got {workers}")
    from trueup.io.atomic import require_writable, require_writable_folder

    require_writable_folder(folder / name)
    from trueup.study import STUDIES, Options, Store
    from trueup.study.study_page import save_page

    wanted: Study = STUDIES[name]
    options = Options(
        **o.given(data=data, data_dir=None if data_dir is None else str(data_dir), preset=preset, seeds=seeds),
        methods=tuple(method or ()),
        oracle=oracle,
    )
    folder.mkdir(parents=True, exist_ok=True)
    place = store or folder / f"{name}.sqlite"
    if only and not place.is_file():
        raise FileNotFoundError(f"{place}: no results yet; `trueup study {name}` makes them")
    kept = Store(require_writable(place))
    ran = None if only else _run(wanted, kept, options, workers, cluster, quiet)
    page = save_page(wanted, kept, options, folder / name)
    if as_json:
        cells = len(wanted.cells(options))
        found = {} if ran is None else {"finished": ran.finished, "failed": dict(ran.failed), "seconds": ran.seconds}
        print_json("study", name=name, store=place, output=page, cells=cells, **found)
        return
    if not quiet:
        print(f"Written: {page}")


def _parsed(words: list[str]) -> tuple[bool, str]:
    only = words[0] == "report"
    rest = words[1:] if only else words
    if len(rest) != 1:
        raise ValueError(f"wanted one study of {', '.join(NAMES)}, got {' '.join(rest) or 'none'}")
    return only, o.known("study", NAMES, rest[0])


def _run(
    wanted: Study, kept: Store, options: Options, workers: int | None, cluster: str | None, quiet: bool
) -> RunSummary:
    from trueup.core.executors import executor_for
    from trueup.study import run

    where = cluster or ("none" if workers == 1 else "processes" if workers is None else f"processes:{workers}")
    with executor_for(where) as executor:
        ran = run(wanted, kept, options=options, executor=executor, progress=not quiet)
    if not quiet:
        print_stderr(
            f"{ran.finished} cells run, {ran.kept} there already, {len(ran.failed)} failed, {ran.seconds:.0f} s"
        )
        for error in sorted(set(ran.failed.values())):
            print_stderr(f"warning: failed: {error}")
    return ran


def add_to(app: typer.Typer) -> None:
    """Register the verb."""
    app.command(
        rich_help_panel="Studies",
        epilog=o.examples(
            "trueup study neural-clamping",
            "trueup study post-hoc --data-dir logits --workers 2 -o results",
            "trueup study rethinking --preset fashion_mnist --data-dir data --cluster tcp://scheduler:8786",
            "trueup study report neural-clamping",
        ),
    )(study)
