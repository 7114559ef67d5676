import json
import os
import subprocess
import sys
from contextlib import contextmanager

import numpy as np
import pytest
import torch

import trueup
from strategies import calibrated
from trueup._core import native

pytestmark = pytest.mark.filterwarnings("ignore")  # how fits end is other tests' matter

TABLE = 1e-12
"""By how much of itself a number of a table may depend on the number of threads."""
FIT = 1e-8
"""By how much a calibrated probability may."""
SLOW = ("auto",)
LARGE = ("temperature", "histogram_ovr", "svs", "temperature_ece", "ets", "isotonic", "vector")
"""Methods that are quick enough to be fitted on so many rows that threads share the work, the quickest first."""


@contextmanager
def threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def numbers(value):
    """All numbers in nested plain data, in order."""
    if isinstance(value, dict):
        return [x for key in value for x in numbers(value[key])]
    if isinstance(value, (list, tuple)):
        return [x for item in value for x in numbers(item)]
    return [float(value)] if isinstance(value, (int, float)) and not isinstance(value, bool) else []


def largest_difference(one, other):
    """The worst difference between two lists of numbers, relative to their size."""
    a, b = np.asarray(one, dtype=float), np.asarray(other, dtype=float)
    assert a.shape == b.shape
    assert np.array_equal(np.isnan(a), np.isnan(b))
    return float(np.nanmax(np.abs(a - b) / np.maximum(np.maximum(np.abs(a), np.abs(b)), 1e-300), initial=0.0))


def tables(rows):
    z, y = calibrated(rows, 10, temperature=2.0)
    few = [(z[:3000], y[:3000]), (z[:300], y[:300])]  # the slowest metrics go over all pairs of rows
    tally = trueup.metrics.Tally.of(z.astype(np.float32), y)
    return {
        "evaluate": numbers(trueup.evaluate(z, y, n_resamples=200).to_dict()),
        "compare": numbers(trueup.compare(raw=(z, y), cooler=(z / 2, y), n_resamples=50).to_dict()),
        "tally of float32": [tally.n, tally.nll.value, *tally.classes.confidence.ravel(), *tally.score_bins.confidence],
        **{name: [metric(*few[: 2 if "skce" in name else 1][-1])] for name, metric in trueup.METRICS.items()},
    }


def probabilities(method, rows, classes=10):
    z, y = calibrated(rows, classes, temperature=2.0, seed=3)
    new = torch.from_numpy(calibrated(500, classes, seed=4)[0])
    return torch.softmax(trueup.METHODS[method](z, y)(new).double(), dim=1).numpy()


def test_tables_by_thread_count(effort, tell):
    """`evaluate`, `compare`, the tally and every metric are computed by 1, 2 and 4 threads."""
    rows = 110_000 * min(effort, 5)  # beyond the size from which threads share the work
    found = {}
    for count in (1, 2, 4):
        with threads(count):
            found[count] = tables(rows)
    gaps = {name: max(largest_difference(found[1][name], found[n][name]) for n in (2, 4)) for name in found[1]}
    worst = max(gaps, key=gaps.get)
    assert gaps[worst] <= TABLE, gaps
    same = sum(gap == 0 for gap in gaps.values())
    tell("numbers", f"{rows:,} rows: {same} of {len(gaps)} tables and metrics bit for bit; worst relative difference "
         f"{gaps[worst]:.1e} ({worst}); at most {TABLE:.0e} is promised")  # fmt: skip


def test_fits_by_thread_count(effort, tell):
    """Every method is fitted by 1, 2 and 4 threads, on few rows and some on many."""
    tasks = [(name, 500 * min(effort, 6)) for name in trueup.METHODS if effort > 1 or name not in SLOW]
    tasks += [(name, 220_000) for name in LARGE[: 2 + effort]]
    found = {}
    for count in (1, 2, 4) if effort > 1 else (1, 4):
        with threads(count):
            found[count] = {task: probabilities(*task) for task in tasks}
    gaps = {task: max(float(np.abs(found[1][task] - found[n][task]).max()) for n in found) for task in tasks}
    worst = max(gaps, key=gaps.get)
    assert gaps[worst] <= FIT, {task: gap for task, gap in gaps.items() if gap}
    same = sum(gap == 0 for gap in gaps.values())
    counts = ", ".join(map(str, found))
    tell("numbers", f"{len(tasks)} fits by {counts} threads: {same} bit for bit; worst difference of a calibrated "
         f"probability {gaps[worst]:.1e} ({worst[0]}, {worst[1]:,} rows); at most {FIT:.0e} is promised")  # fmt: skip


def test_environment(tell):
    """The same in a new process that is given two threads by OMP_NUM_THREADS."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen([sys.executable, __file__], env=environment, stdout=subprocess.PIPE, text=True) as process:
        with threads(1):
            one = child_results()
        two = json.loads(process.communicate(timeout=600)[0])
    count = two.pop("threads")
    gaps = {name: largest_difference(one[name], two[name]) for name in one}
    worst = max(gaps, key=gaps.get)
    assert gaps[worst] <= FIT, gaps
    tell("numbers", f"{len(gaps)} results by {count} threads and by one: worst relative difference {gaps[worst]:.1e} "
         f"({worst}); at most {FIT:.0e} is promised")  # fmt: skip


def child_results():
    """What a new process tells: a table and some fits, on enough rows for threads to share the work."""
    z, y = calibrated(110_000, 10, temperature=2.0)
    found = {name: probabilities(name, 1000)[:5].ravel().tolist() for name in ("vector", "dirichlet_odir")}
    large = {f"{name} of many": probabilities(name, 220_000)[:5].ravel().tolist() for name in LARGE[:1]}
    return {"evaluate": numbers(trueup.evaluate(z, y, n_resamples=100).to_dict()), **found, **large}


def test_same_seed(effort, tell):
    """Everything that draws random numbers is run twice with one seed, after draws from the global generators."""
    rows = 300 * min(effort, 5)
    tasks = [name for name in trueup.METHODS if effort > 1 or name not in SLOW]
    z, y = calibrated(rows, 6, temperature=2.0)

    def all_of_it():
        np.random.rand(3), torch.rand(3)  # noqa: NPY002
        fits = [probabilities(name, rows, 6) for name in tasks]
        scores = trueup.evaluate(z, y, n_resamples=200, seed=7).to_json()
        metrics = [metric(z, y) for metric in trueup.METRICS.values()]
        return fits, scores, metrics

    (fits, scores, metrics), (fits_again, scores_again, metrics_again) = all_of_it(), all_of_it()
    assert all(np.array_equal(a, b) for a, b in zip(fits, fits_again, strict=True))
    assert scores == scores_again
    assert np.array_equal(metrics, metrics_again, equal_nan=True)
    other = trueup.evaluate(z, y, n_resamples=200, seed=8).to_json()
    assert other != scores, "the seed does nothing"
    tell("numbers", f"{len(fits)} fits, {len(metrics)} metrics and a table with its intervals: bit for bit")


@pytest.mark.skipif(native.compiled is None, reason="no C compiler was at hand at installation")
def test_compiled_and_torch(effort, monkeypatch, tell):
    """The compiled passes and those of torch, which take over where nothing was compiled."""
    rows, few = 110_000 * min(effort, 5), 200 * min(effort, 10)
    fits = [name for name in trueup.METHODS if name not in SLOW]
    compiled = tables(rows), {name: probabilities(name, few) for name in fits}
    monkeypatch.setattr(native, "compiled", None)
    plain = tables(rows), {name: probabilities(name, few) for name in fits}
    gaps = {name: largest_difference(compiled[0][name], plain[0][name]) for name in plain[0]}
    of_fits = {name: float(np.abs(compiled[1][name] - plain[1][name]).max()) for name in fits}
    worst_fit = max(of_fits, key=of_fits.get)
    single = gaps.pop("tally of float32")
    assert single <= 1e-6
    worst = max(gaps, key=gaps.get)
    assert gaps[worst] <= 1e-10, gaps
    assert of_fits[worst_fit] <= 1e-8, of_fits
    tell("numbers", f"{len(gaps)} tables and metrics of {rows:,} rows: worst relative difference {gaps[worst]:.1e} "
         f"({worst}), of float32 {single:.1e}; {len(fits)} fits: worst difference of a probability "
         f"{of_fits[worst_fit]:.1e} ({worst_fit})")  # fmt: skip


if __name__ == "__main__":
    import warnings

    warnings.simplefilter("ignore")
    print(json.dumps({"threads": torch.get_num_threads(), **child_results()}))
