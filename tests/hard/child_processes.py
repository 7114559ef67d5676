"""What is done in processes of their own, which are killed or stopped from outside."""

import multiprocessing
import os
import signal
import sys
import time
from itertools import count

# Forked from a process that has imported everything and has no threads: at once, and without anybody's locks.
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "pyarrow.parquet",
        "trueup.cli.verbs",
        "trueup.clamping",
        "trueup.monitor",
        "trueup.io.load_save",
        "trueup.io.artifacts",
        "trueup.reports.page",
        "trueup.metrics.table",
        "trueup.calibrators.sharded",
    ]
)


def save_for_ever(kind, path, first, ready):
    """One version after the other, until somebody ends it."""
    from saves import WRITTEN

    for version in count(first):
        WRITTEN[kind].write(path, version)
        if version == first:
            ready.set()


def save_some(kind, path, versions, together):
    """Some versions, beside others who do the same."""
    from saves import SAVES

    together.wait(600)
    for version in versions:
        SAVES[kind].write(path, version)


def command(words, said, ready):
    """The command, what it says going to a file."""
    handle = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    from trueup.cli import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["trueup", *words]
    ready.set()
    main()


def die_soon(seconds):
    """The end of a worker that was at work."""
    time.sleep(seconds)
    os.kill(os.getpid(), signal.SIGKILL)


def serve_monitors(folder, port, descriptors, settings, full_disk=False):
    """Serve monitors, and a large page, with these settings and this many descriptors; `port` gets the port.

    With `full_disk`, files can become at most 500 bytes long, half of the time.
    """
    import resource
    import threading
    from urllib.parse import urlsplit

    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    from starlette.responses import Response

    from trueup.serve.app import PAGES
    from trueup.serve.server import run
    from trueup.serve.settings import Settings

    PAGES["/large"] = lambda: Response(bytes(4 << 20))  # larger than any buffer between server and client

    def fill_disk_at_times():
        for turn in count():
            limit = 500 if turn % 2 else resource.RLIM_INFINITY
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            time.sleep(0.02)

    def tell(address):
        port.value = urlsplit(address).port
        if full_disk:
            threading.Thread(target=fill_disk_at_times, daemon=True).start()

    run(port=0, settings=Settings(monitors_folder=folder, **settings), require_token=False, on_listening=tell)
