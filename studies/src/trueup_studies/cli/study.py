"""The verb that repeats the experiments of papers: study."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trueup.cli import options as o
from trueup.cli.output import print_json, print_stderr

if TYPE_CHECKING:
    from trueup_studies import Cell, Options, RunSummary, Store, Study

GPU_TERAFLOPS = 10
"""Rate of the listed hours, as in `trueup_studies.cost`."""
NAMES = ("neural-clamping", "rethinking", "clue", "post-hoc", "calarena")


@dataclass(frozen=True)
class Selection:
    """Parts of a study to run, and their data."""

    data: str | None = o.option("NAME", "The data set, or one of several files.")
    data_dir: Path | None = o.option("FOLDER", "Folder of the data sets (default $TRUEUP_DATA).")
    preset: str | None = o.option("NAME", "Sizes and schedules by name, such as digits or paper.")
    seeds: int | None = o.option("N", "Number of seeds, each a run of everything.")
    method: list[str] | None = o.option("NAME", "Run only this method; may be repeated.", "--method", "-m")
    network: str | None = o.option("NAME", "Another network than the preset's, or one of its several.")
    without: list[str] | None = o.option("PART", "Leave out a part, as figure-1d or starts; may be repeated.")
    device: str | None = o.option("NAME", "Device of the network, such as cuda.")
    oracle: bool = o.switch("Choose coefficients on the test half, as some papers do.")
    retrain: bool = o.switch("Train also the small networks that come with the package.")

    def __post_init__(self) -> None:
        if self.data_dir is not None and not self.data_dir.expanduser().is_dir():
            raise FileNotFoundError(f"{self.data_dir}: no such folder; --data-dir names the folder of the study's data")

    @property
    def folder(self) -> str | None:
        """The named folder of data."""
        return None if self.data_dir is None else str(self.data_dir)

    def options(self, device: str | None) -> Options:
        """Return the options of the study."""
        from trueup_studies import Options

        chosen = o.set_options(self, "data", "preset", "seeds", "network", "oracle", "retrain")
        chosen |= o.drop_unset(data_dir=self.folder, device=device)
        return Options(**chosen, methods=tuple(self.method or ()), without=tuple(self.without or ()))


@dataclass(frozen=True)
class Workers:
    """Workers that run the cells of a study."""

    workers: int | None = o.option("N", "Number of processes (default: one for each GPU or core).", "--workers", "-j")
    scheduler: str | None = o.option("WHERE", "A Dask cluster: tcp://host:port, or local[:N] to start one.")

    def __post_init__(self) -> None:
        if self.workers is not None and self.scheduler is not None:
            raise ValueError("give either --workers or --scheduler")
        if self.workers is not None and self.workers < 1:
            raise ValueError(f"--workers must be at least 1, got {self.workers}")


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
    folder: Annotated[
        Path, typer.Option("--output", "-o", metavar="FOLDER", help="Folder of the tables, figures and the page.")
    ] = Path("study"),
    store: Annotated[
        Path | None,
        typer.Option("--store", metavar="FILE", help="Database of the results (default FOLDER/NAME.sqlite)."),
    ] = None,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Do not ask before a run of networks of over a day or unknown length.")
    ] = False,
    *,
    selection: Selection,
    workers: Workers,
    output: o.Output,
) -> None:
    """Repeat a paper's experiments, and compare our numbers with the published ones.

    A finished cell is never run twice: if a study was stopped, the same command resumes it.

      $ trueup study list
      $ trueup study neural-clamping
      $ trueup study post-hoc --data-dir logits --workers 2 -o results
      $ trueup study calarena --data-dir CalArena --data cv-multiclass
      $ trueup study rethinking --preset fashion_mnist --data-dir data --scheduler tcp://scheduler:8786
      $ trueup study report neural-clamping
    """
    if words == ["list"]:
        _list(selection.folder, output.as_json)
        return
    report_only, name = _parse(words)
    from trueup.io.atomic import require_writable, require_writable_folder

    require_writable_folder(folder / name)
    from trueup_studies import STUDIES, Store
    from trueup_studies.study_page import save_page

    selected: Study = STUDIES[name]
    device = selection.device or (None if report_only else _default_device(selected, workers.scheduler))
    options = selection.options(device)
    cells = selected.cells(options)  # rejects an unknown preset or data set before anything is written
    if not report_only:
        _require_data(cells, options)
        _require_device(options, workers.scheduler)
        if workers.scheduler is None:
            _require_timm(cells)
    database = store or folder / f"{name}.sqlite"
    if report_only and not database.is_file():
        raise FileNotFoundError(f"{database}: no results yet; `trueup study {name}` makes them")
    if store is None:  # a named store must lie in an existing folder
        folder.mkdir(parents=True, exist_ok=True)
    results = Store(require_writable(database))
    if not report_only:
        results.remember_data(_digests(cells, options))
        if not yes:
            _confirm(selected, results, options, workers.workers)
    folder.mkdir(parents=True, exist_ok=True)
    ran = None if report_only else _run(selected, results, options, workers, output.quiet)
    page = save_page(selected, results, options, folder / name)
    if output.as_json:
        summary = {} if ran is None else {"finished": ran.finished, "failed": dict(ran.failed), "seconds": ran.seconds}
        print_json("study", name=name, store=database, output=page, cells=len(cells), **summary)
    elif not output.quiet:
        print(f"Written: {page}")
    if ran is not None and ran.failed:
        raise typer.Exit(1)


def _require_data(cells: list[Cell], options: Options) -> None:
    """Find or fetch the data sets before the first run, so that all missing files are reported at once."""
    from trueup_studies.overview import missing_files
    from trueup_studies.training.data import load_data

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
    """Return data set → digest of its files, for those with files."""
    from trueup_studies.training.data import DATASETS, digest_files

    names = dict.fromkeys(str(cell.settings.get("data")) for cell in cells)
    digests = {name: digest_files(name, options.data_dir) for name in names if name in DATASETS}
    return {name: digest for name, digest in digests.items() if digest is not None}


def _default_device(study: Study, scheduler: str | None) -> str | None:
    """Return a GPU if this machine has one and the study has networks; None lets each remote worker decide."""
    if study.flops is None:
        return "cpu"
    if (scheduler or "").startswith(("tcp", "tls")):
        return None
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _require_timm(cells: list[Cell]) -> None:
    """Reject unknown networks of timm, or a missing timm, before the first run."""
    networks = dict.fromkeys(str(cell.settings.get("network")) for cell in cells)
    names = [name.removeprefix("timm:") for name in networks if name.startswith("timm:")]
    if not names:
        return
    from trueup_studies.timm_networks import require_network

    for name in names:
        require_network(name)


def _require_device(options: Options, scheduler: str | None) -> None:
    """Reject a device that this machine does not have; a cluster has its own devices."""
    if options.device in (None, "cpu") or scheduler is not None:
        return
    import torch

    try:
        torch.zeros(1, device=options.device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:  # torch raises different errors
        reason = str(error).partition("\n")[0]
        raise ValueError(f"--device must be one that this machine has, got {options.device!r}: {reason}") from None


def _confirm(study: Study, store: Store, options: Options, workers: int | None) -> None:
    """Ask for confirmation of a run that would take more than a day on this machine, or has an unknown length.

    Studies without networks need no confirmation.
    """
    from trueup_studies.cost import DAY, SLOWEST, estimate, measure_rate

    finished = frozenset(key for key, status in store.statuses(study.cells(options)).items() if status == "finished")
    left = estimate(study, options, done=finished)
    if left is None or (left.hours(SLOWEST) < DAY and not left.unknown):
        return
    units = _count_units(options)
    hours = left.hours(measure_rate(options.device) * min(workers or units, units))  # further processes share the units
    if hours < DAY and not left.unknown:
        return
    more = f", and an unknown time for {'; '.join(left.unknown)}" if left.unknown else ""
    words = f"Runs left: {left.cells:,}, about {hours:,.0f} hours on this machine{more}"
    if not sys.stdin.isatty():
        raise ValueError(f"{words}; --yes starts them")
    typer.confirm(f"{words}. Start them?", abort=True, err=True)


def _count_units(options: Options) -> int:
    """Count the GPUs for networks, or the cores."""
    kind, _, number = (options.device or "cpu").partition(":")
    if kind == "cpu":
        from trueup._core.executors import count_cores

        return count_cores()
    if kind != "cuda" or number:
        return 1
    import torch

    return max(1, torch.cuda.device_count())


def _list(data_dir: str | None, as_json: bool) -> None:
    from trueup_studies.overview import list_presets, search_folders

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
    for title, field in (("Missing files:", "files"), ("Files found:", "present"), ("Optional files:", "optional")):
        if lines := dict.fromkeys(line for preset in presets for line in getattr(preset, field)):
            print(title, *(f"  {line}" for line in lines), sep="\n")
    print("Reading data, metrics and fits on logits take additional time; with small networks they take most of it.")
    print("Hours are for whole data sets; files with fewer samples take less.")
    print(f"Data sets are searched for in {search_folders(data_dir)}; other paths are inside the first of these.")


def _hours(hours: float) -> str:
    minutes = 60 * hours
    return f"{hours:,.1f} h" if hours >= 1 else "less than 0.1 min" if minutes < 0.1 else f"{minutes:,.1f} min"


def _parse(words: list[str]) -> tuple[bool, str]:
    report_only = words[0] == "report"
    names = words[1:] if report_only else words
    if len(names) != 1:
        raise ValueError(f"wanted one study of {', '.join(NAMES)}, got {' '.join(names) or 'none'}")
    return report_only, o.require_name("study", NAMES, names[0])


def _run(study: Study, store: Store, options: Options, workers: Workers, quiet: bool) -> RunSummary:
    from trueup._core.executors import executor_for
    from trueup_studies import run

    gpus = _count_units(options) if options.device == "cuda" else 0
    count = workers.workers or _count_units(options)
    with executor_for(workers.scheduler or ("none" if count == 1 else f"processes:{count}"), gpus=gpus) as executor:
        ran = run(study, store, options=options, executor=executor, progress=not quiet)
    if not quiet:
        print_stderr(
            f"{ran.finished} cells run, {ran.kept} already there, {len(ran.failed)} failed, {ran.seconds:.0f} s"
        )
        for error in sorted(set(ran.failed.values())):
            print_stderr(f"warning: failed: {error}")
    return ran


register = o.commands("Studies", study)
