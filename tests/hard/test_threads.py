import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from child_processes import FORKS, save_some
from fuzz_readers import parameters
from saves import SAVES

import trueup
from fitted import CLASSES, fitted
from strategies import calibrated
from trueup import load, save

THREADS = 8
pytestmark = pytest.mark.filterwarnings("ignore")  # how fits of little data end is other tests' matter


def at_once(function, tasks):
    """The results of a function over tasks, on eight threads that begin together."""
    gate = threading.Barrier(THREADS)

    def share(number):
        gate.wait(600)
        return [function(task) for task in tasks[number::THREADS]]

    with ThreadPoolExecutor(THREADS) as threads:
        shares = list(threads.map(share, range(THREADS)))
    return [shares[i % THREADS][i // THREADS] for i in range(len(tasks))]


@contextmanager
def as_before():
    """Nothing of the process's own may change: threads of torch, filters of warnings, random states."""

    def state():
        random = np.random.get_state()[1].tobytes(), torch.random.get_rng_state().numpy().tobytes()  # noqa: NPY002
        return torch.get_num_threads(), list(warnings.filters), random

    before = state()
    yield
    assert state() == before


def inputs(count, rows=50):
    return [calibrated(rows, CLASSES, temperature=2.0, seed=100 + i)[0] for i in range(count)]


def test_calibrators_in_threads(effort, tell):
    """One fitted calibrator of every method is used from 8 threads at once, each with other inputs."""
    batches = inputs(2 * THREADS * effort)
    calls = 0
    with as_before():
        for method in trueup.METHODS:
            calibrator = fitted(method)
            alone = [calibrator(z) for z in batches]
            together = at_once(calibrator, batches)
            assert all(np.array_equal(a, b, equal_nan=True) for a, b in zip(alone, together, strict=True)), method
            calls += len(batches)
    tell("threads", f"{len(trueup.METHODS)} methods, {calls:,} calls: bit for bit the numbers of one thread")


def test_fits_in_threads(effort, tell):
    """Every method is fitted from 8 threads at the same time, and so are different data with one method."""
    quick = [name for name in trueup.METHODS if name != "auto"]
    methods = list(trueup.METHODS) if effort > 1 else quick
    tasks = [(name, seed) for seed in range(2 * effort) for name in methods]

    def fit(task):
        method, seed = task
        found = trueup.METHODS[method](*calibrated(120, CLASSES, temperature=2.0, seed=seed))
        return parameters(found), found(inputs(1)[0])

    alone = [fit(task) for task in tasks]
    with as_before():
        together = at_once(fit, tasks)
    # Not bit for bit: while others run, torch may sum with another number of threads.
    worst = 0.0
    for task, one, other in zip(tasks, alone, together, strict=True):
        for a, b in zip((*one[0], one[1]), (*other[0], other[1]), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-9, atol=1e-12, err_msg=str(task))
            finite = np.isfinite(a)
            if finite.any():
                worst = max(worst, float(np.abs(b - a)[finite].max() / max(np.abs(a[finite]).max(), 1e-12)))
    same = f"those of one thread to {max(worst, 1e-16):.0e} of them"
    kept = "the process's random state, warnings and thread count untouched"
    tell("threads", f"{len(tasks)} fits of {len(methods)} methods: parameters and answers {same}; {kept}")


def test_tables_in_threads(effort, tell):
    """`evaluate` and `compare` are called from 8 threads at once, each with other predictions."""
    tasks = list(range(THREADS * 2 * effort))

    def table(seed):
        z, y = calibrated(500, 5, temperature=1.5, seed=seed)
        if seed % 2:
            return trueup.evaluate(z, y, n_resamples=50).to_json()
        return trueup.compare(raw=(z, y), cooler=(z / 1.5, y), n_resamples=50).to_json()

    alone = [table(seed) for seed in tasks]
    with as_before():
        assert at_once(table, tasks) == alone
    tell("threads", f"{len(tasks)} tables with intervals and tests: the same to the last digit")


def test_monitor_in_threads(effort, tmp_path, tell):
    """One `Monitor` gets batches from 8 threads while another thread reads its status and saves it."""
    batches = [calibrated(25, 3, seed=seed) for seed in range(20 * THREADS * effort)]
    alone, shared = (
        trueup.Monitor(3, sizes=trueup.monitor.MonitorSizes(window=10**6)),
        trueup.Monitor(3, sizes=trueup.monitor.MonitorSizes(window=10**6)),
    )
    for batch in batches:
        alone.update(*batch)
    over, looks, path = threading.Event(), [], tmp_path / "watch.safetensors"

    def look():
        while not over.is_set() or not looks:
            save(shared, path)
            status, saved = shared.status(), load(path)
            assert saved.rows == saved.total.seen == saved.status().recent_rows, "a checkpoint between two thoughts"
            assert status.rows % 25 == saved.rows % 25 == 0, "half of a batch"
            looks.append(status.rows)

    with ThreadPoolExecutor(1) as watcher:
        watching = watcher.submit(look)
        try:
            at_once(lambda batch: shared.update(*batch), batches)
        finally:
            over.set()
        watching.result()
    one, all_ = alone.status(), shared.status()
    assert all_.rows == one.rows == 25 * len(batches)
    for name in ("accuracy", "confidence", "nll", "ece", "recent_accuracy", "recent_ece"):
        assert getattr(all_, name) == pytest.approx(getattr(one, name), rel=1e-12), name
    assert looks == sorted(looks)
    tell("threads", f"{len(batches):,} batches: {all_.rows:,} of {one.rows:,} rows counted; {len(looks)} checkpoints "
         "meanwhile, each of whole batches")  # fmt: skip


def test_saves_in_threads_and_processes(effort, tmp_path, tell):
    """8 threads, then 4 processes, save different versions to the same path at once."""
    kinds = [name for name in SAVES if name.startswith("predictions") and name != "predictions .npy"]
    kinds += ["calibrator", "monitor"]
    versions = list(range(THREADS * effort))
    count = 0
    for name in kinds:
        path = tmp_path / name / SAVES[name].file
        path.parent.mkdir()
        at_once(lambda version, name=name, path=path: SAVES[name].write(path, version), versions)
        assert SAVES[name].read(path) in versions
        assert [file.name for file in path.parent.iterdir()] == [path.name], "a draft is left"
        count += len(versions)
    path = tmp_path / "net.parquet"
    together = FORKS.Barrier(4)
    writers = [
        FORKS.Process(target=save_some, args=("predictions .parquet", path, versions[i::4], together)) for i in range(4)
    ]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(600)
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert SAVES["predictions .parquet"].read(path) in versions
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == [path.name]
    count += len(versions)
    tell(
        "threads",
        f"{count} saves of {len(kinds)} kinds: no error, no draft; the file is one of the versions, whole",
    )
