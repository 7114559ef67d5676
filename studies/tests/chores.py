"""Small work for studies, importable by workers, that leaves a line in a file each time it is done."""

import math
import os
import signal
import sys
import time
from pathlib import Path

from trueup._core.executors import executor_for
from trueup_studies import Cell, Store, Study, product, run


def square(settings):
    """A row or two of a number, some milliseconds later."""
    note(settings, settings["n"])
    time.sleep(settings.get("pause", 0))
    n = settings["n"]
    return [{"power": power, "value": n**power / 7, "root": math.nan if n == 1 else math.sqrt(n)} for power in (2, 3)]


def sevenths(settings):
    """The same, but for a number that does not get on."""
    if settings["n"] == 3 and not Path(settings["folder"], "cured").exists():
        raise ZeroDivisionError("three is too much")
    return square(settings)


def strange(settings):
    """Rows that no file could hold."""
    return {0: [{"x": object()}], 1: [{"n": 7}], 2: ["text"], 3: 5}[settings["n"]]


def deadly(settings):
    """The end of whoever takes the third."""
    if settings["n"] == 3:
        os._exit(9)
    return square(settings)


def interrupted(settings):
    """Ctrl-C at the third."""
    if settings["n"] == 3:
        signal.raise_signal(signal.SIGINT)
    return square(settings)


def threads(settings):
    """How many threads torch may use."""
    return [{"used": sys.modules["torch"].get_num_threads()}]


def note(settings, text):
    if "folder" in settings:
        with open(Path(settings["folder"], "log"), "a") as file:  # short lines at the end of a file do not mix
            file.write(f"{text} {os.getpid()}\n")


def lines(folder):
    log = Path(folder, "log")
    return [tuple(map(int, line.split())) for line in log.read_text().splitlines()] if log.exists() else []


def study(work="square", count=6, folder=None, pause=0.0, version=1):
    local = {"pause": pause} | ({} if folder is None else {"folder": str(folder)})
    return Study(
        "chores",
        version,
        grid=lambda options: product(n=range(count)),
        work=f"chores:{work}",
        tables=lambda rows, options: {},
        local=lambda options: local,
    )


def write(path, writer, count, barrier):
    """What one of several writers does to the same store."""
    barrier.wait()
    store = Store(path)
    for n in range(count):
        store.finish(Cell("demo", 1, {"n": n}), [{"writer": writer, "i": i} for i in range(3)], seconds=0)
        store.fail(Cell("demo", 1, {"n": n + count}), f"{writer}", seconds=0)
        store.finish(Cell("own", 1, {"writer": writer, "n": n}), [{"i": n}], seconds=0)


if __name__ == "__main__":
    path, folder, count, pause, executor = sys.argv[1:]
    with executor_for(executor) as workers:
        run(study(count=int(count), folder=folder, pause=float(pause)), Store(path), executor=workers)


def visible_gpu(seconds):
    time.sleep(seconds)
    return os.environ["CUDA_VISIBLE_DEVICES"]
