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


def serve_monitors(folder, port, descriptors, settings):
    """A server of monitors with these settings that may open so many files, and tells its port."""
    import resource
    import threading
    import time

    resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
    from trueup.serve.server import make_server
    from trueup.serve.settings import Settings

    server = make_server(port=0, settings=Settings(monitors_folder=folder, **settings))

    def tell():
        while not server.started:
            time.sleep(0.01)
        port.value = server.servers[0].sockets[0].getsockname()[1]

    threading.Thread(target=tell, daemon=True).start()
    server.run()
