"""Every post-hoc method on every file of logits: scores, ranks, and what an automatic choice costs."""

from __future__ import annotations

import base64
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trueup import metrics
from trueup._core.arrays import as_arrays
from trueup._core.errors import record_warnings
from trueup._core.registry import METHODS
from trueup._core.row_scores import score_rows as row_scores
from trueup.calibrators.auto import MANY_CLASSES
from trueup_studies.grid import Options, Rows, Study, WantedFile
from trueup_studies.papers.post_hoc import logit_files as logits
from trueup_studies.statistics import Ranking, ranking
from trueup_studies.tables import Column, Table, columns, tabulate

CHOSEN = "auto"
HEAVY = ("matrix", "ms_odir", "dirichlet", "dirichlet_odir", "diagonal", "diagonal_sms", "order_invariant")
"""Left out where there are more than `MANY_CLASSES` classes: a fit takes from a minute to hours at a thousand."""
FIGURES = columns("accuracy", "nll", "brier", "ece", "aece", "sce", "entropy")
RANKED = {"nll": "NLL", "brier": "Brier", "ece": "ECE"}


def grid(options: Options) -> Iterator[dict[str, Any]]:
    """A cell for each source, split and method."""
    wanted = options.methods or tuple(METHODS)
    if unknown := [name for name in wanted if name not in METHODS]:
        raise ValueError(f"methods must be among {', '.join(METHODS)}, got {unknown[0]!r}")
    folder = logits.find_folder(options.data_dir, data=options.data)
    for source in logits.sources(folder, data=options.data, splits=options.seeds):
        for method in wanted:
            if source["classes"] <= MANY_CLASSES or method not in HEAVY:
                yield {**source, "method": method}


def local(options: Options) -> dict[str, Any]:
    """The folder: the file's digest, not its place, is what a result depends on."""
    folder = logits.find_folder(options.data_dir, data=options.data)
    return {} if folder is None else {"folder": folder}


def work(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Fit one method on one half, and measure it on the other.

    >>> source = {"data": "overconfident", "rows": 2000, "split": 0}
    >>> [row] = work({**source, "method": "temperature"})
    >>> f"T {row['temperature']:.2f}, NLL {row['nll']:.4f}, ECE {row['ece']:.4f}"
    'T 2.48, NLL 1.3172, ECE 0.0431'
    """
    val, test = logits.load_halves(settings)
    with record_warnings() as messages:  # how the fit ended is part of the result
        calibrator = METHODS[settings["method"]](*val)
        after = calibrator(test.logits)
    temperature = getattr(calibrator, "temperature", None)
    return [
        {
            "fit_rows": len(val.labels),
            "test_rows": len(test.labels),
            **{column.name: getattr(metrics, column.name)(after, test.labels) for column in FIGURES},
            "temperature": None if temperature is None else float(temperature),
            "chosen": getattr(getattr(calibrator, "choice", None), "chosen", None),
            "warning": "; ".join(messages),
            "losses": pack(row_scores(*as_arrays(after, test.labels)).nll),
        }
    ]


def tables(rows: Rows, options: Options) -> dict[str, Table]:
    """Scores by data set, regret, and ranks over data sets; what has no result is shown as missing."""
    data = list(dict.fromkeys(row["data"] for row in rows))
    wanted = options.methods or tuple(METHODS)
    missing = {name: _missing(rows, name, wanted) for name in data}
    notes = [f"{name}: no result, or not of every split, of {', '.join(m)}." for name, m in missing.items() if m]
    if any(method in HEAVY for names in missing.values() for method in names):
        notes.append(f"{', '.join(HEAVY)} are not run on more than {MANY_CLASSES} classes: they take too long there.")
    tables = {
        "scores": tabulate(rows, by="method", group="data", columns=FIGURES, order=wanted, notes=notes),
        "regret": _regret_table(regrets(rows), notes),
    }
    complete = [method for method in wanted if not any(method in names for names in missing.values())]
    if len(complete) > 1 and len(data) > 1:
        tables["ranks"] = _rank_table({key: rank(rows, key, complete) for key in RANKED}, notes)
    return tables


class Regret(NamedTuple):
    """How much more NLL a method has on a data set than the method that is best there, known afterwards."""

    data: str
    method: str
    best: str
    mean: float
    error: float
    """The standard error of the mean, paired by test row."""


def regrets(rows: Rows) -> list[Regret]:
    """The regret of every method on every data set, that of the automatic choice like the others.

    The best is the fixed method of least mean test NLL, over all splits. Splits of a data set share rows, so the error
    is that of one split, on average, and does not shrink with their number.
    """
    regrets = []
    for data in dict.fromkeys(row["data"] for row in rows):
        losses: dict[str, dict[int, np.ndarray]] = {}
        for row in rows:
            if row["data"] == data:
                losses.setdefault(row["method"], {})[row["split"]] = unpack(row["losses"])
        whole = max(map(len, losses.values()))
        means = {m: np.mean([x.mean() for x in by.values()]) for m, by in losses.items() if len(by) == whole}
        fixed = {method: mean for method, mean in means.items() if method != CHOSEN}
        if not fixed:
            continue
        best = min(fixed, key=lambda method: float(fixed[method]))
        for method in means:
            behind = [losses[method][split] - losses[best][split] for split in losses[best]]
            error = np.mean([b.std(ddof=1) / math.sqrt(len(b)) for b in behind])
            regrets.append(Regret(data, method, best, float(np.mean([b.mean() for b in behind])), float(error)))
    return regrets


def rank(rows: Rows, figure: str, methods: Sequence[str]) -> Ranking:
    """Rank the methods by a figure, each data set counting once whatever its number of splits."""
    means: dict[str, dict[str, list[float]]] = {method: {} for method in methods}
    for row in rows:
        if row["method"] in means:
            means[row["method"]].setdefault(row["data"], []).append(row[figure])
    data = list(dict.fromkeys(row["data"] for row in rows))
    return ranking({method: [float(np.mean(by[name])) for name in data] for method, by in means.items()})


def pack(values: np.ndarray) -> str:
    """Numbers in single precision as text."""
    return base64.b64encode(zlib.compress(np.asarray(values, dtype="<f4").tobytes())).decode()


def unpack(text: str) -> np.ndarray:
    """What was packed, in double precision.

    >>> unpack(pack(np.array([0.5, 0.25])))
    array([0.5 , 0.25])
    """
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<f4").astype(float)


def _missing(rows: Rows, data: str, methods: Sequence[str]) -> list[str]:
    """The methods that lack a result on some split of a data set that others have one of."""
    counts = Counter(row["method"] for row in rows if row["data"] == data)
    return [method for method in methods if counts[method] < max(counts.values())]


def _regret_table(regrets: Sequence[Regret], notes: Sequence[str]) -> Table:
    """A column a data set and one of them all, for the methods that ran on all."""
    data = list(dict.fromkeys(regret.data for regret in regrets))
    lines: dict[str, dict[str, Any]] = {}
    for regret in regrets:
        line = lines.setdefault(regret.method, {"method": regret.method})
        line |= {regret.data: regret.mean, f"{regret.data} error": regret.error}
    for line in lines.values():
        if all(name in line for name in data):
            line["all"] = float(np.mean([line[name] for name in data]))
            line["all error"] = math.sqrt(sum(line[f"{name} error"] ** 2 for name in data)) / len(data)
    ordered = sorted(lines.values(), key=lambda line: (line["method"] != CHOSEN, line.get("all", math.inf)))
    names = ["all", *data] if len(data) > 1 else data
    best = "; ".join(f"{name}: {next(r.best for r in regrets if r.data == name)}" for name in data)
    note = f"NLL above that of the method that is best on the test half: {best}. "
    note += "± is a standard error, paired by test row; that of all takes the data sets for independent."
    shown = [Column(name, digits=5, error=f"{name} error") for name in names]
    return tabulate(ordered, by="method", columns=shown, notes=[note, *notes])


def _rank_table(rankings: Mapping[str, Ranking], notes: Sequence[str]) -> Table:
    lines = [{"method": m, **{key: each.ranks[m] for key, each in rankings.items()}} for m in rankings["nll"].ranks]
    test_notes = []
    for key, each in rankings.items():
        best = next(iter(each.ranks))
        worse = [method for method in each.ranks if method not in each.cliques[0]]
        test_notes.append(
            f"{RANKED[key]}: Friedman χ² = {each.statistic:.1f}, p = {each.p_value:.2g} ({each.data_sets} data sets); "
            f"ranks more than {each.critical:.2f} apart differ at 5 % (Nemenyi). "
            f"Statistically significantly worse than the best, {best}: {', '.join(worse) or 'none'}."
        )
    shown = [Column(key, f"mean rank by {title}", digits=2) for key, title in RANKED.items()]
    return tabulate(lines, by="method", columns=shown, notes=[*test_notes, *notes])


STUDY = Study(
    "post-hoc",
    2,
    grid=grid,
    work="trueup_studies.papers.post_hoc.post_hoc_study:work",
    tables=tables,
    local=local,
    files=lambda preset: [WantedFile("logits/*.npz", "predictions; without them some are drawn", False)],
    title="Post-hoc methods on files of logits",
)
