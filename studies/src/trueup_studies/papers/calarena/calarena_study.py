"""Our methods compared with the published results of CalArena, on the benchmark's own files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from pandas import DataFrame, Series, concat

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
"""Name of our method in tables with theirs."""
_KNOWN = read_toml(__package__, "benchmarks.toml")
NOTE, FAMILIES = " ".join(_KNOWN["note"].split()), _KNOWN["families"]
"""Benchmark → family; any other benchmark is a family by itself."""
RANKING = columns("win rate", "rank", "excess", "harm", "brier win rate", "brier excess")


def grid(options: Options) -> Iterator[dict[str, Any]]:
    """Yield the settings of each experiment and method."""
    methods = options.methods or DEFAULT
    if unknown := [name for name in methods if name not in METHODS]:
        raise ValueError(f"methods must be among {', '.join(METHODS)}, got {unknown[0]!r}")
    for experiment in files.experiments(_folder(options), benchmark=options.data):
        yield from ({**experiment, "method": method} for method in methods)


def local(options: Options) -> dict[str, Any]:
    """Return the folder; results depend on a file's digest, not on its path."""
    return {"folder": str(files.predictions_folder(_folder(options)))}


def work(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Fit one method to an experiment's calibration rows, and score it on the test rows."""
    fit, test = files.load_experiment(settings)
    with record_warnings() as messages:  # warnings of the fit are part of the result
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
    """Compare our win rates, ranks and excess losses with the published ones, by family, benchmark and data set."""
    methods = options.methods or DEFAULT
    groups: dict[str, dict[str, list[_Results]]] = {"families": {}, "benchmarks": {}}
    for benchmark in dict.fromkeys(row["benchmark"] for row in rows):
        results = _results(rows, benchmark, methods, files.read_results(_folder(options), benchmark))
        groups["families"].setdefault(FAMILIES.get(benchmark, benchmark), []).append(results)
        groups["benchmarks"][benchmark] = [results]
    tables = {name: _ranking_table(parts) for name, parts in groups.items()}
    return tables | {"data_sets": _data_sets_table(groups["families"], methods)}


class _Results(NamedTuple):
    """The losses on the experiments of one benchmark that all of our methods have."""

    losses: dict[str, DataFrame]
    """Loss → one row per experiment (benchmark, data, model), one column per method."""
    raw: DataFrame
    """Losses without calibration."""
    notes: list[str]


def _results(
    rows: Rows,
    benchmark: str,
    methods: Sequence[str],
    published: Mapping[str, Mapping[files.Experiment, files.PublishedLosses]],
) -> _Results:
    frame = DataFrame([row for row in rows if row["benchmark"] == benchmark])
    frame = frame.set_index(["benchmark", "data", "model"])
    experiments = frame[~frame.index.duplicated()]
    ours = {loss: frame.pivot(columns="method", values=loss).reindex(columns=list(methods)) for loss in files.COLUMNS}
    complete = experiments.index[experiments.index.isin(ours["nll"].dropna().index)]
    sizes = experiments.loc[complete, ["fit_rows", "test_rows"]].itertuples(index=False, name=None)
    known_sizes = dict(zip(complete, sizes, strict=True))
    notes, absent = [], []
    if incomplete := len(experiments) - len(complete):
        notes.append(f"{benchmark}: {incomplete} experiments lack a result of ours and are left out.")
    losses = {loss: table.loc[complete].rename(columns=OURS.format) for loss, table in ours.items()}
    for method, theirs in published.items():
        present = [key for key, size in known_sizes.items() if key in theirs and theirs[key][2:] == size]
        if len(present) < len(complete):
            absent.append(f"{method} ({len(present)} of {len(complete)})")
        else:
            for loss, table in losses.items():
                table[method] = [getattr(theirs[key], loss) for key in complete]
    if absent:
        notes.append(f"{benchmark}: not compared, since some experiments have no result: {', '.join(absent)}.")
    if not published:
        notes.append(f"{benchmark}: no published results were found.")
    raw = experiments.loc[complete, [f"raw_{loss}" for loss in files.COLUMNS]]
    return _Results(losses, raw, notes)


def _joined(parts: Sequence[_Results], loss: str) -> tuple[DataFrame, list[str], list[float]]:
    """Join benchmarks: losses of the methods that all of them have, data sets, and losses without calibration."""
    table = concat([part.losses[loss] for part in parts], join="inner")
    data_sets = [f"{benchmark}/{data}" for benchmark, data, _ in table.index]
    return table, data_sets, concat([part.raw for part in parts])[f"raw_{loss}"].tolist()


def _ranking_table(groups: Mapping[str, Sequence[_Results]]) -> Table:
    lines, notes = [], []
    for name, parts in groups.items():
        notes += [note for part in parts for note in part.notes]
        if not any(len(part.raw) for part in parts):
            continue
        nll, brier = (
            leaderboard(dict(table.items()), data_sets=data_sets, raw=raw)
            for table, data_sets, raw in (_joined(parts, loss) for loss in ("nll", "brier"))
        )
        table, data_sets, _ = _joined(parts, "nll")
        title = f"{name}: {len(table):,} experiments, {len(set(data_sets)):,} data sets"
        for method, scores in nll.items():
            by_brier = {f"brier_{key}": value for key, value in brier[method]._asdict().items()}
            lines.append({"group": title, "method": method, **scores._asdict(), **by_brier})
    return tabulate(lines, by="method", group="group", columns=RANKING).captioned(notes=[NOTE, *notes])


def _data_sets_table(families: Mapping[str, Sequence[_Results]], methods: Sequence[str]) -> Table:
    """Show each data set's mean log-loss of our method, next to that of the best other method, known afterwards."""
    ours = OURS.format(CHOSEN if CHOSEN in methods else methods[0])
    lines = []
    for family, parts in families.items():
        table, data_sets, raw = _joined(parts, "nll")
        raw_means = Series(raw).groupby(data_sets, sort=False).mean()
        means = table.groupby(data_sets, sort=False).mean().assign(raw=raw_means)
        for name, values in means.iterrows():
            others = values.drop([ours, "raw"])
            line = {"family": family, "data set": name.split("/", 1)[1], "raw": values["raw"], "ours": values[ours]}
            best = {"best": others.min(), "regret": values[ours] - others.min()} if len(others) else {}
            lines.append(line | best)
    named = {"raw": "uncalibrated", "best": "best other, known afterwards", "ours": ours, "regret": "regret"}
    shown = [Column(name, title, better="") for name, title in named.items()]
    note = "Mean test log-loss over a data set's models. The best other method has the lowest of all on that data set."
    return tabulate(lines, by="data set", group="family", columns=shown).captioned(notes=[note])


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
        WantedFile("results/*/*.csv", "its published results; without them only ours are shown", needed=False),
    ],
    title="The automatic choice compared with the published results of CalArena",
)
