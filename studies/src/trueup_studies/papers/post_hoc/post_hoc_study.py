"""Every post-hoc method on every file of logits: scores, ranks, and the regret of the automatic choice."""

from __future__ import annotations

import base64
import math
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from pandas import DataFrame

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
"""Methods left out with more than `MANY_CLASSES` classes: with a thousand, a fit takes minutes to hours."""
FIGURES = columns("accuracy", "nll", "brier", "ece", "aece", "sce", "entropy")
RANKED = {"nll": "NLL", "brier": "Brier", "ece": "ECE"}


def grid(options: Options) -> Iterator[dict[str, Any]]:
    """Yield the settings of each source, split and method."""
    methods = options.methods or tuple(METHODS)
    if unknown := [name for name in methods if name not in METHODS]:
        raise ValueError(f"methods must be among {', '.join(METHODS)}, got {unknown[0]!r}")
    folder = logits.find_folder(options.data_dir, data=options.data)
    for source in logits.sources(folder, data=options.data, splits=options.seeds):
        for method in methods:
            if source["classes"] <= MANY_CLASSES or method not in HEAVY:
                yield {**source, "method": method}


def local(options: Options) -> dict[str, Any]:
    """Return the folder; results depend on the file's digest, not on its path."""
    folder = logits.find_folder(options.data_dir, data=options.data)
    return {} if folder is None else {"folder": folder}


def work(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Fit one method on one half, and score it on the other.

    >>> source = {"data": "overconfident", "rows": 2000, "split": 0}
    >>> [row] = work({**source, "method": "temperature"})
    >>> f"T {row['temperature']:.2f}, NLL {row['nll']:.4f}, ECE {row['ece']:.4f}"
    'T 2.48, NLL 1.3172, ECE 0.0431'
    """
    val, test = logits.load_halves(settings)
    with record_warnings() as messages:  # warnings of the fit are part of the result
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
    """Build the tables of scores, regrets, and ranks over data sets; methods without a result are shown as missing."""
    data = list(dict.fromkeys(row["data"] for row in rows))
    methods = options.methods or tuple(METHODS)
    missing = {name: _missing(rows, name, methods) for name in data}
    notes = [f"{name}: no result for some split of {', '.join(m)}." for name, m in missing.items() if m]
    if any(method in HEAVY for names in missing.values() for method in names):
        notes.append(f"{', '.join(HEAVY)} are not run on more than {MANY_CLASSES} classes: they take too long there.")
    tables = {
        "scores": tabulate(rows, by="method", group="data", columns=FIGURES, order=methods).captioned(notes=notes),
        "regret": _regret_table(regrets(rows), notes),
    }
    complete = [method for method in methods if not any(method in names for names in missing.values())]
    if len(complete) > 1 and len(data) > 1:
        tables["ranks"] = _rank_table({key: rank(rows, key, complete) for key in RANKED}, notes)
    return tables


class Regret(NamedTuple):
    """A method's NLL above that of the best method on a data set, known afterwards."""

    data: str
    method: str
    best: str
    mean: float
    error: float
    """Standard error of the mean, paired by test row."""


def regrets(rows: Rows) -> list[Regret]:
    """Compute the regret of every method, including the automatic choice, on every data set.

    The best is the fixed method with the lowest mean test NLL over all splits. Splits of a data set share rows, so the
    error is the average error of one split; it does not shrink with their number.
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
    """Rank the methods by a metric; each data set counts once, whatever its number of splits."""
    means = DataFrame(rows).pivot_table(index="data", columns="method", values=figure, sort=False)
    return ranking({method: means[method].tolist() for method in methods})


def pack(values: np.ndarray) -> str:
    """Encode numbers in single precision as text."""
    return base64.b64encode(zlib.compress(np.asarray(values, dtype="<f4").tobytes())).decode()


def unpack(text: str) -> np.ndarray:
    """Decode numbers of `pack`, in double precision.

    >>> unpack(pack(np.array([0.5, 0.25])))
    array([0.5 , 0.25])
    """
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<f4").astype(float)


def _missing(rows: Rows, data: str, methods: Sequence[str]) -> list[str]:
    """Return the methods that lack a result on some split of a data set."""
    counts = Counter(row["method"] for row in rows if row["data"] == data)
    return [method for method in methods if counts[method] < max(counts.values())]


def _regret_table(regrets: Sequence[Regret], notes: Sequence[str]) -> Table:
    """Build one column per data set, and one for all with the methods that ran on all."""
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
    note = f"NLL above that of the best method on the test half: {best}. "
    note += "± is a standard error, paired by test row; that of all assumes independent data sets."
    shown = [Column(name, digits=5, error=f"{name} error") for name in names]
    return tabulate(ordered, by="method", columns=shown).captioned(notes=[note, *notes])


def _rank_table(rankings: Mapping[str, Ranking], notes: Sequence[str]) -> Table:
    lines = [{"method": m, **{key: each.ranks[m] for key, each in rankings.items()}} for m in rankings["nll"].ranks]
    test_notes = []
    for key, each in rankings.items():
        best = next(iter(each.ranks))
        test_notes.append(
            f"{RANKED[key]}: Friedman χ² = {each.statistic:.1f}, p = {each.p_value:.2g} ({each.data_sets} data sets); "
            f"ranks more than {each.critical:.2f} apart differ at 5 % (Nemenyi). "
            f"Statistically significantly worse than the best, {best}: {', '.join(each.worse_than_best()) or 'none'}."
        )
    shown = [Column(key, f"mean rank by {title}", digits=2) for key, title in RANKED.items()]
    return tabulate(lines, by="method", columns=shown).captioned(notes=[*test_notes, *notes])


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
