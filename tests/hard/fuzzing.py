"""Broken files are read in processes of their own, one a group of readers: `python fuzzing.py FOLDER EFFORT`.

What came of each group is left in the folder as JSON, with the files that did harm.
"""

import ctypes
import faulthandler
import gc
import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from contextlib import contextmanager, suppress
from pathlib import Path

from fuzz_good import good
from mutations import break_file, dice_of

LONGEST = 10
"""Seconds a reader may take for one file."""
MOST = 1 << 30
"""Bytes that a reader may ask for beyond what it has after the warm-up; the good files have some kilobytes."""
FILES = {
    **{"pairs": 75, "parquet": 70, "headers": 60, "clamped": 60, "shards": 16, "store": 60, "web": 9, "monitors": 6},
    **{"cli": 5, "images": 40, "texts": 40},
}
"""How many broken files each group of readers gets, of each good one, times the effort; at effort 1, a fifth.

Each upload to the web app starts a process, so those are few."""
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


def read_broken(path, read, count, seed, findings):
    """Break a file `count` times and read each; how many were read, and the longest time."""
    whole, content = 0, path.read_bytes()
    slowest = 0.0
    for i in range(count):
        way, bad = break_file(content, path.suffix, dice_of(path.name, seed, i))
        path.write_bytes(bad)
        NOW.write_text(f"{path}\n{way} (seed {seed}, file {i})")
        start = time.perf_counter()
        complaint = None
        try:
            with in_time():
                whole += read(path)
        except Slow:
            complaint = f"took more than {LONGEST} s"
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            complaint = f"{type(error).__name__}: {str(error)[:300]} ({Path(place.filename).name}:{place.lineno})"
        slowest = max(slowest, time.perf_counter() - start)
        if complaint:
            kept = path.with_name(f"kept-{path.stem}-{seed}-{i}{path.suffix}")
            kept.write_bytes(bad)
            findings.append(f"{kept}: {path.name}, {way}: {complaint}")
    path.write_bytes(content)
    return whole, slowest


def _warm_up(count):
    """Files read before memory is looked at."""
    return max(min(8, count), count // 4)


def group(files, count, report):
    """One group of readers in this process: what came of it as JSON."""
    signal.signal(signal.SIGALRM, _alarm)
    warnings.simplefilter("ignore")
    findings, whole, slowest, total, began = [], 0, 0.0, 0, time.perf_counter()
    for path, read in files:
        if not read(path):
            findings.append(f"{path}: the good file is refused")
        read_broken(path, read, _warm_up(count), "warm-up", findings)
    before, peak = resident(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MOST, resource.RLIM_INFINITY))
    for path, read in files:
        good, longest = read_broken(path, read, count, 0, findings)
        whole, slowest, total = whole + good, max(slowest, longest), total + count + _warm_up(count)
    facts = {
        "files": total,
        "whole": whole,
        "tried": count * len(files),
        "slowest": slowest,
        "growth": resident() - before,
        "peak": 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak),
        "seconds": time.perf_counter() - began,
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
                group(files[name], FILES[name] * effort if effort > 1 else -(-FILES[name] // 5), report)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
