"""The verb that repeats the experiments of papers: study."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trueup.cli import options as o
from trueup.cli.output import print_json, print_stderr

if TYPE_CHECKING:
    from trueup.study import Cell, Options, RunSummary, Store, Study

GPU_TERAFLOPS = 10
"""For which hours are listed, as `study.cost` has it."""
NAMES = ("neural-clamping", "rethinking", "clue", "post-hoc", "calarena")


def study(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[report] NAME",
            autocompletion=o.complete_from([*NAMES, "report", "list"]),
            help=f"{', '.join(NAMES)}; with `report` before it, only the page is written, from finished runs; "
            "`list` shows the presets of all, with the files they want.",
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
    network: Annotated[
        str | None,
        typer.Option("--network", metavar="NAME", help="Another network than the preset's, or one of its several."),
    ] = None,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", metavar="PART", help="Leave out a part, as figure-1d or starts; may be repeated."),
    ] = None,
    device: o.Device = None,
    oracle: Annotated[
        bool, typer.Option("--oracle", help="Choose coefficients on the test half, as some papers do.")
    ] = False,
    retrain: Annotated[
        bool, typer.Option("--retrain", help="Train also the small networks that come with the package.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option("--workers", "-j", metavar="N", help="Number of processes (default: one for each GPU or core)."),
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
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask before a run of networks of over a day or unknown length.")
    ] = False,
    as_json: o.Json = False,
    quiet: o.Quiet = False,
) -> None:
    """Repeat a paper's experiments, and put our numbers beside the published ones.

    A finished cell is never run twice: if a study was stopped, the same command resumes it.
    """
    if words == ["list"]:
        _list(None if data_dir is None else str(data_dir), as_json)
        return
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
    if device is None and not report_only:
        device = _default_device(selected, cluster)
    options = Options(
        **o.drop_unset(data=data, data_dir=None if data_dir is None else str(data_dir), preset=preset, seeds=seeds),
        **o.drop_unset(network=network, device=device),
        methods=tuple(method or ()),
        without=tuple(without or ()),
        oracle=oracle,
        retrain=retrain,
    )
    cells = selected.cells(options)  # an unknown preset or data set is refused here, before anything is written
    if not report_only:
        _require_data(cells, options)
        _require_device(options, cluster)
        if cluster is None:
            _require_timm(cells)
    database = store or folder / f"{name}.sqlite"
    if report_only and not database.is_file():
        raise FileNotFoundError(f"{database}: no results yet; `trueup study {name}` makes them")
    if store is None:  # one that is named must lie in a folder that is there
        folder.mkdir(parents=True, exist_ok=True)
    results = Store(require_writable(database))
    if not report_only:
        results.remember_data(_digests(cells, options))
        if not yes:
            _confirm(selected, results, options, workers)
    folder.mkdir(parents=True, exist_ok=True)
    ran = None if report_only else _run(selected, results, options, workers, cluster, quiet)
    page = save_page(selected, results, options, folder / name)
    if as_json:
        summary = {} if ran is None else {"finished": ran.finished, "failed": dict(ran.failed), "seconds": ran.seconds}
        print_json("study", name=name, store=database, output=page, cells=len(cells), **summary)
    elif not quiet:
        print(f"Written: {page}")
    if ran is not None and ran.failed:
        raise typer.Exit(1)


def _require_data(cells: list[Cell], options: Options) -> None:
    """Find the data sets before the first run, or fetch them, so that all missing files are known at once."""
    from trueup.study.overview import missing_files
    from trueup.training.data import load_data

    names = list(dict.fromkeys(str(cell.settings["data"]) for cell in cells if "data" in cell.settings))
    errors = []
    for missing in missing_files(names, options.data_dir):
        try:
            load_data(missing.partition(":")[0], options.data_dir)
        except FileNotFoundError as error:
            errors.append(str(error))
    if errors:
        raise FileNotFoundError(". ".join(errors))


def _digests(cells: list[Cell], options: Options) -> dict[str, str]:
    """Data set → by what its files are told from others, of those that have files."""
    from trueup.training.data import DATASETS, digest_files

    names = dict.fromkeys(str(cell.settings.get("data")) for cell in cells)
    found = {name: digest_files(name, options.data_dir) for name in names if name in DATASETS}
    return {name: own for name, own in found.items() if own is not None}


def _default_device(study: Study, cluster: str | None) -> str | None:
    """A GPU if this machine has one and the study has networks; None where each worker is to see what it has."""
    if study.flops is None:
        return "cpu"
    if (cluster or "").startswith(("tcp", "tls")):
        return None
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _require_timm(cells: list[Cell]) -> None:
    """Refuse networks of timm that it does not have, or where it cannot be imported, before the first run."""
    networks = dict.fromkeys(str(cell.settings.get("network")) for cell in cells)
    names = [name.removeprefix("timm:") for name in networks if name.startswith("timm:")]
    if not names:
        return
    from trueup.models.timm_networks import require_network

    for name in names:
        require_network(name)


def _require_device(options: Options, cluster: str | None) -> None:
    """Refuse a device that this machine does not have; those of a cluster are not this machine's."""
    if options.device in (None, "cpu") or cluster is not None:
        return
    import torch

    try:
        torch.zeros(1, device=options.device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch has one for each way of not having it
        reason = str(error).partition("\n")[0]
        raise ValueError(f"--device must be one that this machine has, got {options.device!r}: {reason}") from None


def _confirm(study: Study, store: Store, options: Options, workers: int | None) -> None:
    """Ask before a run of networks that will take more than a day of this machine, or nobody knows how long.

    A study of predictions alone has none, and is not asked about.
    """
    from trueup.study.cost import DAY, SLOWEST, estimate, measure_rate

    finished = frozenset(key for key, status in store.statuses(study.cells(options)).items() if status == "finished")
    left = estimate(study, options, done=finished)
    if left is None or (left.hours(SLOWEST) < DAY and not left.unknown):
        return
    units = _count_units(options)
    hours = left.hours(measure_rate(options.device) * min(workers or units, units))  # more processes share the units
    if hours < DAY and not left.unknown:
        return
    more = f", and how long is not known of {'; '.join(left.unknown)}" if left.unknown else ""
    words = f"Runs left: {left.cells:,}, about {hours:,.0f} hours on this machine{more}"
    if not sys.stdin.isatty():
        raise ValueError(f"{words}; --yes starts them")
    typer.confirm(f"{words}. Start them?", abort=True, err=True)


def _count_units(options: Options) -> int:
    """GPUs that networks may be on, or cores."""
    kind, _, number = (options.device or "cpu").partition(":")
    if kind == "cpu":
        from trueup.core.executors import count_cores

        return count_cores()
    if kind != "cuda" or number:
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def _list(data_dir: str | None, as_json: bool) -> None:
    from trueup.study.overview import list_presets, places

    presets = list_presets(data_dir)
    if as_json:
        print_json("study", presets=[preset._asdict() for preset in presets])
        return
    for preset in presets:
        runs = "runs unknown without its files" if preset.cells is None else f"{preset.cells:,} runs"
        option = f" --preset {preset.preset}" if preset.preset else ""
        data = ", ".join(dict.fromkeys(preset.data)) or "files of predictions"
        hours = ""
        if preset.gpu_hours is not None and preset.machine_hours is not None:
            gpu, here = _hours(preset.gpu_hours), _hours(preset.machine_hours)
            hours = f"; networks alone: {gpu} at {GPU_TERAFLOPS} TFLOP/s, {here} on the cores of this machine"
            hours += " without some networks" if preset.uncounted else ""
        print(f"trueup study {preset.study}{option}: {runs}; {data}{hours}{'; files missing' if preset.files else ''}")
    for title, field in (("Missing files:", "files"), ("Files found:", "found"), ("Also taken if there:", "optional")):
        if lines := dict.fromkeys(line for preset in presets for line in getattr(preset, field)):
            print(title, *(f"  {line}" for line in lines), sep="\n")
    print(
        "Reading data, metrics and fits on logits come on top of the networks; with small networks they are most of it."
    )
    print("Hours are for whole data sets; files with fewer samples take less.")
    print(f"Files of data sets are looked for in {places(data_dir)}; other paths are inside the first of these.")


def _hours(hours: float) -> str:
    minutes = 60 * hours
    return f"{hours:,.1f} h" if hours >= 1 else "less than 0.1 min" if minutes < 0.1 else f"{minutes:,.1f} min"


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

    gpus = _count_units(options) if options.device == "cuda" else 0
    workers = workers or _count_units(options)
    where = cluster or ("none" if workers == 1 else f"processes:{workers}")
    with executor_for(where, gpus=gpus) as executor:
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
    o.add_command(
        app,
        study,
        "Studies",
        "trueup study list",
        "trueup study neural-clamping",
        "trueup study post-hoc --data-dir logits --workers 2 -o results",
        "trueup study calarena --data-dir CalArena --data cv-multiclass",
        "trueup study rethinking --preset fashion_mnist --data-dir data --cluster tcp://scheduler:8786",
        "trueup study report neural-clamping",
    )
