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
from trueup._core import __version__
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

`METHODS["auto"]`, the default of `trueup fit`, is compared with single methods of this package and with the calibrators
of other packages at their defaults. All of these files had a part in choosing its candidates and their prior, so its
results are slightly optimistic. All methods get the same probabilities in single precision and are scored on rows that
none of them was fitted to. The page is written by

```sh
$ make bench-choice{options}
```

which needs the packages of `benchmarks/requirements.txt`; `TRUEUP_DATA` names the folder with the files of the networks
and language models. {machine}

Each "file" below is one model on one data set. Its loss is {splits}. *Regret* is the log-loss of `auto` minus that of
the best single method, ours or another package's, on the test rows of that file. Nobody can know that method
beforehand, and a negative regret means that `auto` is better than all of them. *Harm* is the log-loss of `auto`
minus that of the uncalibrated predictions, in the worst file.
"""
WORDS = """
Other packages' probabilities of labels are clipped at 2.2e-16, as in scikit-learn's log-loss, because isotonic
regression gives exact zeros. Iris and wine have about fifty rows to calibrate and fifty to test, so a single loss there
is mostly noise. Splits share rows and models share data sets, so files are not independent. Options that no question
has are removed from the language models' logits: `auto` keeps the odds of a class without rows, and warns, since only
the user knows whether it can occur.
"""


class File(NamedTuple):
    """A model on a data set: the mean log-loss of every method over the seeds."""

    data: str
    model: str
    losses: dict[str, float]
    raw: float


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
    page = write_page(folder, run_ours(folder, where), seeds, absent)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "choice.md").write_text(page, encoding="utf-8")
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


def files_table(all_files: Sequence[File]) -> str:
    """Every file: the loss without calibration, of `auto`, and of the best other, by name."""
    lines = [
        "| data set | model | uncalibrated | auto | best other | its log-loss | regret |",
        "|:--|:--|--:|--:|:--|--:|--:|",
    ]
    for file in all_files:
        others = {name: loss for name, loss in file.losses.items() if name != CHOSEN}
        best = min(others, key=lambda name: others[name])
        numbers = f"{file.raw:.4f} | {file.losses[CHOSEN]:.4f} | {best} | {others[best]:.4f} | {_regret(file):+.4f}"
        lines.append(f"| {file.data} | {file.model} | {numbers} |")
    return "\n".join(lines)


def write_page(
    folder: Path, results: dict[str, tuple[Options, list[dict[str, Any]]]], seeds: int, absent: dict[str, str]
) -> str:
    collected = {name: collect(folder, name, rows) for name, (_, rows) in results.items()}
    splits = f"averaged over {seeds} splits (1 for networks)" if seeds > 1 else "that of one split"
    flags = "" if seeds == SEEDS else f' OPTIONS="--seeds {seeds}"'
    parts = [HEAD.format(options=flags, splits=splits, machine=_machine()), summary(collected).markdown(), WORDS]
    if absent:
        parts.append("Other packages: " + "; ".join(f"{name} {why}" for name, why in absent.items()) + ".\n")
    for benchmark, (options, rows) in results.items():
        table = STUDY.tables(rows, options)["benchmarks"]
        parts += [f"## {TITLES[benchmark]}\n", table.markdown(), "", files_table(collected[benchmark]), ""]
    return "\n".join(parts)


def _machine() -> str:
    names = dict.fromkeys(each[0] for each in peers.PEERS.values())
    there = [f"{name} {version(name)}" for name in names if not peers.absence(name, "sys")]
    return f"This run: trueup {__version__}, Python {platform.python_version()}, {', '.join(there)}."


if __name__ == "__main__":
    main()
