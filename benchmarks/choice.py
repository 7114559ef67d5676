"""The automatic choice compared with single methods and other packages, on models of scikit-learn and logit files.

    python benchmarks/choice.py            everything, half an hour on one core; writes docs/choice.md
    python benchmarks/choice.py --small    a smoke run of seconds; its results mean nothing

Predictions and all results are kept in --folder, in the format of the CalArena benchmark. An interrupted run can be
continued, and `trueup study calarena --data-dir FOLDER` makes the same tables. TRUEUP_DATA names a folder with
files of logits, tables and language models' answers; without it only scikit-learn's data sets are used.
"""

from __future__ import annotations

import argparse
import csv
import os
import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import choice_experiments as made
import choice_peers as peers
from measured import draw_dots, made_from, write_csv
from trueup._core.executors import executor_for
from trueup_studies import STUDIES, Options, Store, run
from trueup_studies.papers.calarena import benchmark_files as files
from trueup_studies.papers.calarena.calarena_study import CHOSEN
from trueup_studies.tables import Column, Table, tabulate

STUDY = STUDIES["calarena"]
SEEDS = 3
TWO_CLASSES = (
    "identity",
    "temperature",
    "platt",
    "beta",
    "quadratic",
    "smoothing_spline",
    "isotonic_ovr",
    "venn_abers",
)
MORE_CLASSES = (
    "identity",
    "temperature",
    "bias_corrected_temperature",
    "svs",
    "sms",
    "diagonal_sms",
    "isotonic_ovr",
    "order_invariant",
    "residual",
)
"""Single methods of ours that the choice is compared with."""
TITLES = {
    "tabular-binary": "Models of scikit-learn, two classes",
    "tabular-multiclass": "Models of scikit-learn, more classes",
    "networks-multiclass": "Networks' logits on CIFAR-10 and CIFAR-100",
    "language-binary": "Language models: stated confidence in an answer",
    "language-multiclass": "Language models: logits of a question's options",
}
SKLEARN = tuple(name for name in peers.PEERS if name.startswith("scikit-learn"))
HEAD = """# The automatic choice, measured

Made from {origin} by `make bench-choice`{options}; nothing is typed by hand. `method="auto"`, the default of `fit`, is
compared with single methods of this package and with the calibrators of other packages at their defaults.

{conclusion}

![Regret of auto on each file](images/choice.svg)

"""
WORDS = """
Each file is one model on one data set. Its loss is {splits}. *Regret* is the log-loss of `auto` minus that of the best
other method, ours or another package's, on the test rows of that file. Nobody can know that method beforehand. A
negative regret means that `auto` is better than all of them. *Harm* is the log-loss of `auto` minus that of the
uncalibrated predictions, in the worst file. [All files](choice-files.csv), [all methods](choice-methods.csv).

All methods get the same probabilities in single precision, and are scored on rows that none of them was fitted to.
Other packages' probabilities of labels are clipped at 2.2e-16, as in scikit-learn's log-loss, because isotonic
regression gives exact zeros. Options that no question has are removed from the language models' logits.

**What is missing.** All of these files had a part in choosing the candidates of `auto` and their prior, so its results
are slightly optimistic. Splits share rows and models share data sets, so files are not independent. Iris and wine have
about fifty rows to calibrate and fifty to test, so a single loss there is mostly noise. {absent}

{machine} The packages are those of `benchmarks/requirements.txt`; `TRUEUP_DATA` names the folder with the files of the
networks and language models.
"""


class File(NamedTuple):
    """A model on a data set: the mean log-loss of every method over the seeds."""

    data: str
    model: str
    losses: dict[str, float]
    raw: float


class Circumstances(NamedTuple):
    """What the page says about a run."""

    origin: str
    """Version and commit."""
    machine: str
    options: str
    seeds: int
    absent: dict[str, str]
    """Other packages that are missing or raised, and why."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="two data sets, two models, one seed")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--folder", type=Path, default=Path("build/choice"), help="where everything is kept")
    parser.add_argument("--out", type=Path, default=Path("docs"), help="folder of choice.md")
    parser.add_argument("--report", action="store_true", help="only write the page, of the parts that are finished")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args(arguments)
    folder, seeds = (options.folder / "small", 1) if options.small else (options.folder, options.seeds)
    predictions = folder / files.PREDICTIONS
    if not predictions.is_dir() and not options.report:
        draft = folder / "draft"
        made.write(draft, _experiments(options.small, seeds))
        draft.rename(predictions)
    where = None if options.report else f"processes:{options.workers}" if options.workers > 1 else "none"
    absent = run_peers(folder, where)
    ours = run_ours(folder, where)
    collected = {name: collect(folder, name, rows) for name, (_, rows) in ours.items()}
    methods = [
        row
        for benchmark, (chosen, rows) in ours.items()
        for row in methods_cells(benchmark, STUDY.tables(rows, chosen)["benchmarks"].markdown())
    ]
    options.out.mkdir(parents=True, exist_ok=True)
    origin, flags = made_from(), "" if seeds == SEEDS else f' `OPTIONS="--seeds {seeds}"`'
    write_page(options.out, collected, methods, Circumstances(origin, _machine(), flags, seeds, absent))
    print(f"Written: {options.out / 'choice.md'}")


def _experiments(small: bool, seeds: int) -> Iterator[made.Experiment]:
    data_sets = dict(made.data_sets())
    if small:
        return made.tabular({name: data_sets[name] for name in ("diabetes", "wine")}, seeds, kinds=2)
    if "TRUEUP_DATA" not in os.environ:
        return made.tabular(data_sets, seeds)
    data = Path(os.environ["TRUEUP_DATA"])
    return chain(
        made.tabular(data_sets | made.stored_tables(data), seeds), made.networks(data, 1), made.language(data, seeds)
    )


def run_peers(folder: Path, where: str | None) -> dict[str, str]:
    """Run every peer that is there, if there is somewhere to run, and write its tables; why others are absent."""
    present = peers.present()
    options = Options(data_dir=str(folder), methods=tuple(name for name, why in present.items() if not why))
    store = Store(folder / "peers.sqlite")
    if where is not None:
        with executor_for(where) as executor:
            run(peers.STUDY, store, options=options, executor=executor)
    lines: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in store.rows(peers.STUDY.cells(options)):
        lines.setdefault((row["benchmark"], row["method"]), []).append(row)
    for (benchmark, method), rows in lines.items():
        path = folder / files.RESULTS / benchmark / f"{method}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            losses = [f"{method}_{name}" for name in files.COLUMNS.values()]
            writer.writerow(["dataset", "model", "cal_size", "test_size", *losses])
            for row in rows:
                known = [row[name] for name in ("data", "model", "fit_rows", "test_rows")]
                writer.writerow([*known, *(row[loss] for loss in files.COLUMNS)])
    failed = {name: sum(bool(row["error"]) for row in rows) for (_, name), rows in lines.items()}
    return {name: why for name, why in present.items() if why} | {
        name: f"raised on {count} files" for name, count in failed.items() if count
    }


def run_ours(folder: Path, where: str | None) -> dict[str, tuple[Options, list[dict[str, Any]]]]:
    """Our methods on each benchmark: benchmark → options and rows."""
    store, results = Store(folder / "calarena.sqlite"), {}
    benchmarks = {
        cell.settings["benchmark"]: cell.settings["classes"] for cell in STUDY.cells(Options(data_dir=str(folder)))
    }
    for benchmark in [name for name in TITLES if name in benchmarks]:
        methods = (*(TWO_CLASSES if benchmarks[benchmark] == 2 else MORE_CLASSES), CHOSEN)
        options = Options(data_dir=str(folder), data=benchmark, methods=methods)
        if where is not None:
            with executor_for(where) as executor:
                run(STUDY, store, options=options, executor=executor)
        cells = STUDY.cells(options)
        outcomes = store.outcomes(cells)
        if len(outcomes) < len(cells):
            continue
        rows = [{**each.settings, **row} for each in outcomes for row in each.rows]
        results[benchmark] = options, rows
    return results


def collect(folder: Path, benchmark: str, rows: Sequence[dict[str, Any]]) -> list[File]:
    """The losses of ours and of theirs, averaged over the seeds of each file."""
    gathered: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in rows:
        of_file = gathered.setdefault((row["data"], _kind(row["model"])), {})
        of_file.setdefault(row["method"], []).append(row["nll"])
        if row["method"] == CHOSEN:
            of_file.setdefault("raw", []).append(row["raw_nll"])
    for method, losses in files.read_results(str(folder), benchmark).items():
        for (_, data, model), loss in losses.items():
            gathered[data, _kind(model)].setdefault(method, []).append(loss.nll)
    result = []
    for (data, model), values in gathered.items():
        means = {name: float(np.mean(each)) for name, each in values.items()}
        result.append(File(data, model, means, means.pop("raw")))
    return result


def _kind(model: str) -> str:
    """A model's name without the seed."""
    return "network" if model.startswith("split ") else model.partition(", seed ")[0]


def summary(results: dict[str, list[File]]) -> Table:
    """One line a benchmark: regret, how often `auto` beats the peers' defaults, harm."""
    lines = []
    for benchmark, all_files in results.items():
        regrets = np.array([_regret(file) for file in all_files])
        line: dict[str, Any] = {
            "predictions": f"{TITLES[benchmark]} ({len(all_files)} files)",
            "regret": regrets.mean(),
            "worst": regrets.max(),
            "harm": max(file.losses[CHOSEN] - file.raw for file in all_files),
        }
        for name, group in (("probmetrics", ("probmetrics",)), ("sklearn", SKLEARN)):
            theirs = [[file.losses[peer] for peer in group if peer in file.losses] for file in all_files]
            if all(theirs):
                wins = [file.losses[CHOSEN] < min(loss) for file, loss in zip(all_files, theirs, strict=True)]
                line[name] = float(np.mean(wins))
        lines.append(line)
    columns = [
        Column("regret", "mean regret", better=""),
        Column("worst", "largest regret", better=""),
        Column("harm", "worst harm", better=""),
        Column("probmetrics", "below probmetrics' default, %", better="", scale=100, digits=0),
        Column("sklearn", "below the best of scikit-learn's three, %", better="", scale=100, digits=0),
    ]
    return tabulate(lines, by="predictions", columns=columns)


def _regret(file: File) -> float:
    return file.losses[CHOSEN] - min(loss for name, loss in file.losses.items() if name != CHOSEN)


def files_cells(benchmark: str, all_files: Sequence[File]) -> list[list[str]]:
    """Every file: the loss without calibration, of `auto`, and of the best other, by name."""
    cells = []
    for file in all_files:
        others = {name: loss for name, loss in file.losses.items() if name != CHOSEN}
        best = min(others, key=lambda name: others[name])
        numbers = f"{file.raw:.4f}", f"{file.losses[CHOSEN]:.4f}", best, f"{others[best]:.4f}", f"{_regret(file):+.4f}"
        cells.append([TITLES[benchmark], file.data, file.model, *numbers])
    return cells


def methods_cells(benchmark: str, markdown: str) -> list[list[str]]:
    """The rows of a table of methods, without its headings."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")][2:]
    cells = [[cell.strip().strip("*") for cell in line.strip("|").split("|")] for line in lines]
    return [[TITLES[benchmark], *row] for row in cells if any(row[1:])]


def conclusion(collected: dict[str, list[File]]) -> str:
    """How often and by how much the choice is worse than the best other method."""
    regrets = np.array([_regret(file) for all_files in collected.values() for file in all_files])
    harmed = sum(file.losses[CHOSEN] > file.raw for all_files in collected.values() for file in all_files)
    return (
        f"On {np.sum(regrets < 0)} of {len(regrets)} files `auto` has a smaller log-loss than every other method. Its "
        f"mean regret is {regrets.mean():+.4f} nat, the largest {regrets.max():.4f}. On {harmed} files it has a larger "
        "log-loss than the uncalibrated predictions."
    )


def write_page(
    out: Path, collected: dict[str, list[File]], methods: list[list[str]], seen: Circumstances, overview: str = ""
) -> None:
    """Write the page, its figure and its tables into a folder."""
    heads = ["files", "data set", "model", "uncalibrated", "auto", "best other", "its log-loss", "regret"]
    write_csv(
        out / "choice-files.csv", [heads, *(row for name in collected for row in files_cells(name, collected[name]))]
    )
    heads = ["files", "method", "win rate %", "mean rank", "excess log-loss", "worst harm", "win rate by Brier %"]
    write_csv(out / "choice-methods.csv", [[*heads, "excess Brier"], *methods])
    regrets = {TITLES[name]: [_regret(file) for file in all_files] for name, all_files in collected.items()}
    draw_dots(
        out / "images/choice.svg", regrets, label="regret: log-loss of auto minus that of the best other", reference=0
    )
    splits = f"averaged over {seen.seeds} splits (1 for networks)" if seen.seeds > 1 else "that of one split"
    absent = "; ".join(f"{name} {why}" for name, why in seen.absent.items())
    absent = f"Other packages: {absent}." if absent else ""
    head = HEAD.format(options=seen.options, origin=seen.origin, conclusion=conclusion(collected))
    words = WORDS.format(splits=splits, absent=absent, machine=seen.machine)
    (out / "choice.md").write_text(head + (overview or summary(collected).markdown()) + "\n" + words, encoding="utf-8")


def _machine() -> str:
    names = dict.fromkeys(each[0] for each in peers.PEERS.values())
    there = [f"{name} {version(name)}" for name in names if not peers.absence(name, "sys")]
    return f"Python {platform.python_version()}, {', '.join(there)}."


if __name__ == "__main__":
    main()
