"""Ours beside the published results of CalArena, on the benchmark's own files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trueup._core.arrays import as_arrays
from trueup._core.errors import record_warnings
from trueup._core.registry import METHODS
from trueup._core.row_scores import score_rows
from trueup_studies.grid import Options, Rows, Study, WantedFile, read_toml
from trueup_studies.papers.calarena import benchmark_files as files
from trueup_studies.papers.calarena.leaderboard import leaderboard
from trueup_studies.tables import Column, Table, columns, tabulate

CHOSEN = "auto"
DEFAULT = (CHOSEN,)
OURS = "trueup {}"
"""How a method of ours is called beside theirs."""
_KNOWN = read_toml(__package__, "benchmarks.toml")
NOTE, FAMILIES = " ".join(_KNOWN["note"].split()), _KNOWN["families"]
"""Benchmark → family; any other is a family of its own."""
PLACES = columns("win rate", "rank", "excess", "harm", "brier win rate", "brier excess")


def grid(options: Options) -> Iterator[dict[str, Any]]:
    """A cell for each experiment and method."""
    wanted = options.methods or DEFAULT
    if unknown := [name for name in wanted if name not in METHODS]:
        raise ValueError(f"methods must be among {', '.join(METHODS)}, got {unknown[0]!r}")
    for experiment in files.experiments(_folder(options), benchmark=options.data):
        yield from ({**experiment, "method": method} for method in wanted)


def local(options: Options) -> dict[str, Any]:
    """The folder: a file's digest, not its place, is what a result depends on."""
    return {"folder": str(files.predictions_folder(_folder(options)))}


def work(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Fit one method to one experiment's calibration rows, and measure it on its test rows."""
    fit, test = files.load_experiment(settings)
    with record_warnings() as messages:  # how the fit ended is part of the result
        calibrator = METHODS[settings["method"]](*fit)
        after = calibrator(test.logits)
    scores, raw = (score_rows(*as_arrays(z, test.labels)) for z in (after, test.logits))
    return [
        {
            "fit_rows": len(fit.labels),
            "test_rows": len(test.labels),
            **{"nll": float(scores.nll.mean()), "brier": float(scores.brier.mean())},
            **{"accuracy": float(scores.correct.mean())},
            **{"raw_nll": float(raw.nll.mean()), "raw_brier": float(raw.brier.mean())},
            "chosen": getattr(getattr(calibrator, "choice", None), "chosen", None),
            "warning": "; ".join(messages),
        }
    ]


def tables(rows: Rows, options: Options) -> dict[str, Table]:
    """Win rates, ranks and excess losses of ours beside theirs, by family and by benchmark, and losses by data set."""
    wanted = options.methods or DEFAULT
    groups: dict[str, dict[str, _Group]] = {"families": {}, "benchmarks": {}}
    for benchmark in dict.fromkeys(row["benchmark"] for row in rows):
        results = _results(rows, benchmark, wanted, files.read_results(_folder(options), benchmark))
        family = FAMILIES.get(benchmark, benchmark)
        groups["families"].setdefault(family, _Group(family)).add(results)
        groups["benchmarks"].setdefault(benchmark, _Group(benchmark)).add(results)
    tables = {name: _places_table(list(each.values())) for name, each in groups.items()}
    return tables | {"data_sets": _data_sets_table(list(groups["families"].values()), wanted)}


@dataclass
class _Results:
    """Of one benchmark: the losses of ours and theirs on the experiments that all of ours have."""

    experiments: list[files.Experiment]
    raw: dict[str, list[float]]
    losses: dict[str, dict[str, list[float]]]
    """Loss → method → experiment."""
    notes: list[str] = field(default_factory=list)


def _results(
    rows: Rows,
    benchmark: str,
    wanted: Sequence[str],
    published: Mapping[str, Mapping[files.Experiment, files.PublishedLosses]],
) -> _Results:
    by_experiment: dict[files.Experiment, dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        if row["benchmark"] == benchmark:
            by_experiment.setdefault((benchmark, row["data"], row["model"]), {})[row["method"]] = row
    of_each = {key: next(iter(each.values())) for key, each in by_experiment.items()}
    complete = [key for key, each in by_experiment.items() if all(method in each for method in wanted)]
    found = _Results(complete, {}, {})
    if incomplete := len(by_experiment) - len(complete):
        found.notes.append(f"{benchmark}: {incomplete} experiments lack a result of ours and are left out.")
    absent = []
    theirs: dict[str, dict[files.Experiment, files.PublishedLosses]] = {}
    for method, losses in published.items():
        known = {
            key: losses[key]
            for key in complete
            if key in losses and losses[key][2:] == (of_each[key]["fit_rows"], of_each[key]["test_rows"])
        }
        if len(known) == len(complete):
            theirs[method] = known
        else:
            absent.append(f"{method} ({len(known)} of {len(complete)})")
    if absent:
        found.notes.append(f"{benchmark}: without a result on every experiment, so not compared: {', '.join(absent)}.")
    if not published:
        found.notes.append(f"{benchmark}: no published results were found.")
    for loss in files.COLUMNS:
        found.raw[loss] = [of_each[key][f"raw_{loss}"] for key in complete]
        ours = {OURS.format(method): [by_experiment[key][method][loss] for key in complete] for method in wanted}
        found.losses[loss] = ours | {m: [getattr(each[key], loss) for key in complete] for m, each in theirs.items()}
    return found


class _Group:
    """Benchmarks that are compared together."""

    def __init__(self, name: str) -> None:
        self.name, self.parts = name, list[_Results]()

    def add(self, results: _Results) -> None:
        self.parts.append(results)

    @property
    def experiments(self) -> list[files.Experiment]:
        return [key for part in self.parts for key in part.experiments]

    @property
    def data_sets(self) -> list[str]:
        return [f"{benchmark}/{data}" for benchmark, data, _ in self.experiments]

    def raw(self, loss: str) -> list[float]:
        return [value for part in self.parts for value in part.raw[loss]]

    def losses(self, loss: str) -> dict[str, list[float]]:
        """Of the methods that every benchmark has."""
        parts = [part.losses[loss] for part in self.parts]
        shared = [method for method in parts[0] if all(method in part for part in parts)]
        return {method: [value for part in parts for value in part[method]] for method in shared}


def _places_table(groups: Sequence[_Group]) -> Table:
    lines, notes = [], []
    for group in groups:
        notes += [note for part in group.parts for note in part.notes]
        if not group.experiments:
            continue
        nll, brier = (
            leaderboard(group.losses(loss), data_sets=group.data_sets, raw=group.raw(loss)) for loss in ("nll", "brier")
        )
        title = f"{group.name}: {len(group.experiments):,} experiments, {len(set(group.data_sets)):,} data sets"
        for method, place in nll.items():
            by_brier = {f"brier_{name}": value for name, value in brier[method]._asdict().items()}
            lines.append({"group": title, "method": method, **place._asdict(), **by_brier})
    return tabulate(lines, by="method", group="group", columns=PLACES, notes=[NOTE, *notes])


def _data_sets_table(groups: Sequence[_Group], wanted: Sequence[str]) -> Table:
    """For each data set the mean log-loss of ours, beside the best of all others known afterwards."""
    ours = OURS.format(CHOSEN if CHOSEN in wanted else wanted[0])
    lines = []
    for group in groups:
        losses, raw, sets = group.losses("nll"), np.array(group.raw("nll")), np.array(group.data_sets, dtype=str)
        for name in dict.fromkeys(group.data_sets):
            of_set = sets == name
            means = {method: float(np.array(values)[of_set].mean()) for method, values in losses.items()}
            others = [mean for method, mean in means.items() if method != ours]
            line = {"family": group.name, "data set": name.split("/", 1)[1], "raw": float(raw[of_set].mean())}
            line |= {"ours": means[ours]}
            lines.append(line | ({"best": min(others), "regret": means[ours] - min(others)} if others else {}))
    named = {"raw": "uncalibrated", "best": "best other, known afterwards", "ours": ours, "regret": "regret"}
    shown = [Column(name, title, better="") for name, title in named.items()]
    note = "Mean test log-loss over a data set's models. The best other is the method with the least of them all there."
    return tabulate(lines, by="data set", group="family", columns=shown, notes=[note])


def _folder(options: Options) -> str:
    if options.data_dir is None:
        raise ValueError(
            "calarena needs --data-dir, the folder with the benchmark's .h5 files (huggingface.co/datasets/probkit/"
            "CalArena) and its results"
        )
    return options.data_dir


STUDY = Study(
    "calarena",
    1,
    grid=grid,
    work="trueup_studies.papers.calarena.calarena_study:work",
    tables=tables,
    local=local,
    files=lambda preset: [
        WantedFile("calibration_benchmarks/*.h5", "the benchmark's predictions"),
        WantedFile("results/*/*.csv", "its published results; without them ours stand alone", needed=False),
    ],
    title="The automatic choice beside the published results of CalArena",
)
