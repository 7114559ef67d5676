"""Every reader is given thousands of broken files, in processes of their own, so that a crash is seen and named.

Each file is a good one that `mutations` broke. Of each, a reader may say what is wrong (a ValueError that names the
file, in one line), or read what is whole. Anything else is a finding: another exception, a signal, more than
`LONGEST` seconds, gigabytes asked for, NaN, or memory that grows. The file that did it is kept.
"""

import ctypes
import faulthandler
import gc
import json
import math
import os
import resource
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
LONGEST = 10
"""Seconds a reader may take for one file."""
MOST = 1 << 30
"""Bytes that a reader may ask for beyond what it has after the warm-up; the good files have two kilobytes."""
GROWTH = 12 << 20
"""Bytes by which a process may have grown at the end, however many files it read after the warm-up."""
FILES = {"pairs": 90, "parquet": 80, "headers": 80, "clamped": 80, "shards": 20, "store": 70, "web": 45, "cli": 10}
"""How many broken files each group of readers gets, of each good one, at effort 1."""
ALARM = 3
"""The code of a monitor that read everything and found calibration lost."""
ALLOWED = (ValueError, FileNotFoundError, PermissionError, ImportError)


# In the child: good files, readers, and what must hold of what they read.


def good(folder):
    """One good file, or more, for each reader: name → (path, reader)."""
    import torch

    import trueup
    from trueup.artifact import save_calibrator
    from trueup.monitor.file import save_monitor
    from trueup.monitor.watch import Monitor
    from trueup.recalibration.file import save_recalibrator
    from trueup.recalibration.quantiles import IsotonicQuantiles
    from trueup.recalibration.variance import VarianceScaling

    rng = np.random.default_rng(0)
    logits = rng.normal(size=(24, 3))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    found = {"pairs": [], "parquet": [], "headers": [], "clamped": [], "store": [], "web": [], "cli": [], "shards": []}

    def path(name):
        place = folder / name
        place.parent.mkdir(exist_ok=True)
        return place

    for suffix in (".npz", ".npy", ".csv", ".safetensors"):
        trueup.save(path(f"pair{suffix}"), (logits, labels))
        found["pairs"].append((path(f"pair{suffix}"), read_pair))
    np.savez_compressed(path("packed.npz"), logits=logits.astype(np.float32), labels=labels.astype(np.uint8))
    found["pairs"].append((path("packed.npz"), read_pair))

    import pyarrow as pa
    import pyarrow.parquet as pq

    trueup.save(path("lists.parquet"), (logits, labels))
    table = pa.table({**{f"logit_{k}": logits[:, k] for k in range(3)}, "label": labels, "name": ["cat"] * 24})
    pq.write_table(table, path("columns.parquet"), row_group_size=10, compression="zstd")
    found["parquet"] += [(path("lists.parquet"), read_pair), (path("columns.parquet"), read_pair)]

    for name, method in (
        ("temperature", "temperature"),
        ("chain", "vector"),
        ("bins", "histogram"),
        ("spline", "spline"),
    ):
        calibrator = trueup.METHODS[method](logits, labels)
        save_calibrator(calibrator, path(f"{name}.safetensors"), classes=3, summary={"fitted to": [1, (2.5, None)]})
        found["headers"].append((path(f"{name}.safetensors"), read_calibrator))
    save_recalibrator(VarianceScaling(1.7), path("scale.safetensors"), summary={"a": [1]})
    save_recalibrator(IsotonicQuantiles([-1.0, 0.0, 2.0], [0.2, 0.5, 0.9]), path("quantiles.safetensors"))
    found["headers"] += [(path(f"{name}.safetensors"), read_recalibrator) for name in ("scale", "quantiles")]
    monitor = Monitor(3, bins=5, window=20, block=10)
    monitor.update(logits, labels)
    save_monitor(monitor, path("monitor.safetensors"))
    found["headers"].append((path("monitor.safetensors"), read_monitor))

    from trueup.clamping.file import save_clamped
    from trueup.clamping.fit import clamp

    pairs = [(torch.from_numpy(logits).float(), torch.from_numpy(labels))]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save_clamped(clamp(torch.nn.Identity(), pairs, lam=0.01), path("clamped.safetensors"))
    found["clamped"].append((path("clamped.safetensors"), read_clamped))

    from trueup.study.cell import Cell
    from trueup.study.store import Store

    store = Store(path("results.sqlite"))
    for seed in range(20):
        store.finish(Cell("demo", 1, {"seed": seed}), [{"ece": seed / 100, "name": "x" * 40}], seconds=1.0)
    store.fail(Cell("demo", 1, {"seed": 99}), "it broke", seconds=1.0)
    with sqlite3.connect(store.path) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
    connection.close()
    found["store"].append((store.path, read_store))

    for suffix in (".npz", ".parquet"):
        shards = path(f"shards{suffix[1:]}/0{suffix}").parent
        for i in range(3):
            trueup.save(shards / f"{i}{suffix}", (logits, labels))
        found["shards"].append((shards / f"1{suffix}", read_shards))
    for name in ("pair.npz", "pair.csv", "pair.safetensors", "lists.parquet", "both.npy"):
        if name == "both.npy":
            path(name).write_bytes(path("pair.npy").read_bytes() + path("pair.labels.npy").read_bytes())
        found["web"].append((path(name), read_upload))
    trueup.save(path("beside.npz"), (logits, labels))
    for name in ("pair.npz", "packed.npz", "pair.csv", "temperature.safetensors", "monitor.safetensors"):
        found["cli"].append((path(name), read_cli))
    return found


def read_pair(path):
    """load, stream and load_logits must agree on whether the file is whole, and on what is in it."""
    import trueup
    from trueup.predictions import load_logits

    heard = []
    answers = [
        _answer(heard, path, lambda: trueup.load(path)),
        _answer(heard, path, lambda: _joined(trueup.stream(path, rows=7))),
        _answer(heard, path, lambda: (load_logits(path), None)),
    ]
    whole, streamed, alone = answers
    for pair in filter(None, answers):
        z, y = pair
        _hold(z.ndim == 2 and z.shape[1] >= 2 and np.isfinite(z).all(), f"logits {z.shape} that are not finite")
        if y is not None:
            _hold(y.dtype == np.int64 and y.shape == z.shape[:1], f"labels {y.dtype} {y.shape} for logits {z.shape}")
            _hold(not len(y) or (y.min() >= 0 and y.max() < z.shape[1]), "labels out of range")
    _hold(whole is None or alone is not None, "load reads it, load_logits does not")
    if whole is not None and streamed is not None:
        same = all(np.array_equal(a, b) for a, b in zip(whole, streamed, strict=True))
        _hold(same and np.array_equal(whole[0], alone[0]), "load, stream and load_logits read different numbers")
    _hold(whole is not None or streamed is None, "stream reads it, load does not")
    _hold(streamed is not None or whole is None or "Fortran" in heard[0], "load reads it, stream does not")
    return whole is not None


def _joined(parts):
    parts = list(parts)
    return tuple(np.concatenate([part[i] for part in parts]) for i in range(2))


def _answer(heard, path, read):
    try:
        return read()
    except ALLOWED as error:
        heard.append(_told(error, path))
        return None


def _told(error, path):
    """An error must name the file, in one line that fits a screen."""
    message = str(error)
    _hold(str(path) in message or path.name in message, f"an error that does not name the file: {message[:200]!r}")
    _hold("\n" not in message and len(message) < 1500, f"an error of {len(message)} characters: {message[:200]!r}")
    return message


def _hold(true, fact):
    if not true:
        raise AssertionError(fact)


def _nonsense(path, read):
    """None if the file is refused."""
    return _answer([], path, read)


def _numbers(found):
    return [buffer.numpy() for buffer in found.buffers() if buffer.is_floating_point()]


def read_calibrator(path):
    from trueup.artifact import header, load_calibrator

    _nonsense(path, lambda: header(path))
    found = _nonsense(path, lambda: load_calibrator(path))
    if found is not None:
        _hold(not any(np.isnan(each).any() for each in _numbers(found)), "a calibrator with NaN in it")
        found(np.zeros((2, 3)))
    return found is not None


def read_recalibrator(path):
    from trueup.recalibration.file import header, load_recalibrator

    _nonsense(path, lambda: header(path))
    found = _nonsense(path, lambda: load_recalibrator(path))
    if found is not None:
        with np.errstate(all="ignore"):
            ends = found.quantiles([0.0], [1.0], levels=[0.1, 0.5, 0.9])
        _hold(not np.isnan(ends).any(), "a recalibrator that gives NaN")
    return found is not None


def read_monitor(path):
    from trueup.monitor.file import load_monitor

    found = _nonsense(path, lambda: load_monitor(path))
    if found is not None:
        status = found.update(np.zeros((1, found.classes)), [0])
        numbers = {name: value for name, value in vars(status).items() if isinstance(value, float)}
        _hold(all(math.isfinite(value) for value in numbers.values()), f"a monitor that says {numbers}")
    return found is not None


def read_clamped(path):
    import torch

    from trueup.clamping.file import load_clamped

    found = _nonsense(path, lambda: load_clamped(torch.nn.Identity(), path))
    if found is not None:
        _hold(not any(np.isnan(each).any() for each in _numbers(found)), "a clamped network with NaN in it")
        found(torch.zeros(2, 3))
    return found is not None


def read_store(path):
    from trueup.study.cell import Cell
    from trueup.study.store import Store

    cells = [Cell("demo", 1, {"seed": seed}) for seed in (0, 7, 99)]

    def read():
        store = Store(path)
        store.statuses(cells), store.outcomes(cells), store.rows(cells), store.known("demo")
        try:
            store.finish(Cell("demo", 1, {"seed": 1000}), [{"ece": 0.5}], seconds=1.0)
        except OSError as error:  # a file may say that its writers must be newer
            _hold("readonly" in _told(error, path), str(error))
        return store

    for other in ("-wal", "-shm", "-journal"):
        path.with_name(path.name + other).unlink(missing_ok=True)
    return _nonsense(path, read) is not None


def read_shards(path):
    """The bad shard is named, or left out and counted; the good ones lose no row."""
    from trueup.shards.reduce import evaluate
    from trueup.shards.source import Shards

    shards = Shards.of(path.parent)
    options = {"replicates": 2, "metrics": ["ece"], "progress": False}
    found = _nonsense(path, lambda: evaluate(shards, **options))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rest = evaluate(shards, **options, skip_bad=True) if found is None or found.classes == 3 else found
    told = any(f"1 bad shards were left out: {path}" in str(warning.message) for warning in caught)
    _hold(found is not None or (told and rest.rows == 48), f"{rest.rows} rows of the good shards, told: {told}")
    return found is not None


def read_upload(path):
    client = _client()
    answer = client.post("/api/upload", params={"name": path.name}, content=path.read_bytes())
    _hold(answer.status_code in (201, 422), f"status {answer.status_code}: {answer.text[:200]}")
    if answer.status_code == 422:
        message = answer.json()["error"]
        _hold(path.name in message or "file is empty" in message, f"does not name the file: {message[:200]!r}")
        _hold("\n" not in message and len(message) < 1500, f"{len(message)} characters: {message[:200]!r}")
        _hold(tempfile.gettempdir() not in message, f"tells where it was kept: {message[:200]!r}")
    else:
        client.delete(f"/api/data/{answer.json()['id']}")
    return answer.status_code == 201


_clients = []


def _client():
    if not _clients:
        sys.path.insert(0, str(HERE.parent / "serve"))
        from serving import served

        context = served()
        _clients.append((context.__enter__(), context))
    return _clients[0][0]


def read_cli(path):
    from typer.testing import CliRunner

    from trueup.cli import app

    beside = path.with_name("beside.npz")
    words = {
        "temperature": ["apply", path, beside, "--output", path.with_name("out.npz"), "--quiet"],
        "monitor": ["monitor", beside, "--state", path],
        "packed": ["fit", path, "-m", "temperature", "--output", path.with_name("out.safetensors")],
    }.get(path.stem, ["evaluate", path, "--replicates", "2"])
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exit_code not in (0, ALARM):
        _hold(result.exit_code == 2, f"code {result.exit_code}: {result.stderr[:300]}")
        lines = [line for line in result.stderr.splitlines() if not line.startswith("trueup: warning:")]
        _hold(len(lines) == 1 and lines[0].startswith("trueup: "), f"no single line: {result.stderr[:300]!r}")
        # A damaged temperature may be a temperature still, with which logits overflow.
        named = path.name in lines[0] or (path.stem == "temperature" and "logits must be finite" in lines[0])
        _hold(named and "Traceback" not in result.output, f"said {lines[0][:300]!r}")
    return result.exit_code in (0, ALARM)


# In the child: one process a group of readers, forked from one that has imported everything.


NOW = Path("now.txt")
"""Which file is being read, in case nobody is left to tell."""


class Slow(BaseException):
    """No reader may take it for a fault of the file."""


def _alarm(*_):
    raise Slow


@contextmanager
def in_time():
    """A reader that can be interrupted is; one that hangs outside of Python ends the process, with the place."""
    faulthandler.dump_traceback_later(2 * LONGEST, exit=True)
    signal.setitimer(signal.ITIMER_REAL, LONGEST)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def resident():
    """Bytes in memory, once what is free has been given back."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # not every C library has it
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def tried(path, read, count, seed, findings):
    """Break a file `count` times and read each; how many were read, and the longest time."""
    from mutations import broken, dice_of

    whole, content = 0, path.read_bytes()
    slowest = 0.0
    for i in range(count):
        way, bad = broken(content, path.suffix, dice_of(path.name, seed, i))
        path.write_bytes(bad)
        NOW.write_text(f"{path}\n{way} (seed {seed}, file {i})")
        start = time.perf_counter()
        fact = None
        try:
            with in_time():
                whole += read(path)
        except Slow:
            fact = f"took more than {LONGEST} s"
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            fact = f"{type(error).__name__}: {str(error)[:300]} ({Path(place.filename).name}:{place.lineno})"
        slowest = max(slowest, time.perf_counter() - start)
        if fact:
            kept = path.with_name(f"kept-{path.stem}-{seed}-{i}{path.suffix}")
            kept.write_bytes(bad)
            findings.append(f"{kept}: {path.name}, {way}: {fact}")
    path.write_bytes(content)
    return whole, slowest


def group(files, count, report):
    """One group of readers in this process: what came of it as JSON."""
    signal.signal(signal.SIGALRM, _alarm)
    warnings.simplefilter("ignore")
    findings, whole, slowest, total = [], 0, 0.0, 0
    for path, read in files:
        if not read(path):
            findings.append(f"{path}: the good file is refused")
        tried(path, read, max(8, count // 4), "warm-up", findings)
    before, peak = resident(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST, resource.RLIM_INFINITY))
    for path, read in files:
        good, longest = tried(path, read, count, 0, findings)
        whole, slowest, total = whole + good, max(slowest, longest), total + count + max(8, count // 4)
    facts = {
        "files": total,
        "whole": whole,
        "tried": count * len(files),
        "slowest": slowest,
        "growth": resident() - before,
        "peak": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak),
        "seconds": sum(os.times()[:2]),
        "findings": findings,
    }
    report.write_text(json.dumps(facts))


def main(folder, effort, *wanted):
    global NOW  # noqa: PLW0603 - every process inherits it
    folder = Path(folder)
    NOW = folder / "now.txt"
    files = good(folder)
    for name in wanted or files:
        report = folder / f"{name}.json"
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            if status:
                code = os.waitstatus_to_exitcode(status)
                how = signal.Signals(-code).name if code < 0 else f"code {code}"
                path, way = NOW.read_text().split("\n")
                kept = folder / f"kept-by-{name}{Path(path).suffix}"
                kept.write_bytes(Path(path).read_bytes())
                found = f"{kept}: {Path(path).name}, {way}: the process ended with {how}"
                report.write_text(json.dumps({"findings": [found]}))
        else:
            code = 1
            try:
                group(files[name], FILES[name] * effort, report)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)


# In the test: one trial a group.


@pytest.fixture(scope="session")
def fuzzed(tmp_path_factory, effort):
    """What came of each group of readers."""
    pytest.importorskip("pyarrow", reason="one of the readers needs pyarrow: pip install 'trueup[parquet]'")
    if not hasattr(os, "fork"):
        pytest.skip("processes cannot be forked here")
    folder = tmp_path_factory.mktemp("fuzzed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE), "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, __file__, str(folder), str(effort)]
    limit = 300 + 60 * effort
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return lambda name: (json.loads((folder / f"{name}.json").read_text()), done.stderr)


@pytest.fixture
def trial(fuzzed, tell):
    def judged(name):
        facts, stderr = fuzzed(name)
        assert not facts["findings"], "\n".join([*facts["findings"], stderr[-2000:]])
        assert facts["growth"] < GROWTH, f"memory grew by {facts['growth'] / 2**20:.1f} MB over {facts['files']} files"
        assert facts["peak"] < MOST / 2, f"{facts['peak'] / 2**20:.0f} MB were asked for at once"
        assert facts["whole"] < 0.6 * facts["tried"], "most files are as good as before: they were hardly broken"
        tell(
            "files",
            f"{facts['files']:,} broken files: no crash, none took longer than {facts['slowest']:.2f} s, "
            f"memory grew by {max(facts['growth'], 0) / 2**20:.1f} MB; every refusal named the file",
        )

    return judged


def test_broken_files_of_predictions(trial):
    """Broken .npz, .npy, .csv and .safetensors files are read by `load`, `stream` and `load_logits`."""
    trial("pairs")


def test_broken_parquet_files(trial):
    """Broken .parquet files, footers and pages, are read by `load`, `stream` and `load_logits`."""
    trial("parquet")


def test_broken_files_of_calibrators(trial):
    """Broken files of calibrators, recalibrators and monitors are loaded."""
    trial("headers")


def test_broken_files_of_clamped_networks(trial):
    """Broken files of clamped networks are loaded."""
    trial("clamped")


def test_a_broken_shard_among_good_ones(trial):
    """A broken shard lies among good ones: it is named, or left out and counted, and no other row is lost."""
    trial("shards")


def test_broken_stores_of_results(trial):
    """A study's store of results is damaged, then opened, read and written to."""
    trial("store")


def test_broken_uploads(trial):
    """Broken files are uploaded to the web page's server."""
    trial("web")


def test_broken_files_on_the_command_line(trial):
    """Commands are given broken files: they end with code 2 and one line."""
    trial("cli")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
