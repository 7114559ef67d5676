"""A real cluster of two worker processes on this machine, one of which is killed while it works."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest

import trueup
from trueup.calibrators.sharded import fit
from trueup.io import Shards
from trueup.io.shards import map_shards
from trueup.metrics import evaluate_shards

distributed = pytest.importorskip("distributed", reason="dask distributed is not installed")

pytestmark = [
    # Of the libraries: sockets and event loops that their own threads close a little later.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning:distributed"),
]


def slow_count(part):
    """Count rows, slowly, having told who does it."""
    Path(os.environ["TRUEUP_TEST_SEEN"], str(os.getpid())).touch()
    time.sleep(0.2)
    return np.array([len(part.labels)])


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cluster")
    rng = np.random.default_rng(0)
    for i in range(12):
        z = 3 * rng.normal(size=(300, 3))
        trueup.save((z, (z / 2 + rng.gumbel(size=z.shape)).argmax(axis=1)), folder / f"{i:02d}.npz")
    return Shards.of(folder)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    seen = tmp_path_factory.mktemp("seen")
    os.environ["TRUEUP_TEST_SEEN"] = str(seen)
    with (
        distributed.LocalCluster(
            n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client
    del os.environ["TRUEUP_TEST_SEEN"]


def test_two_workers_give_what_one_process_gives(client, shards):
    executor = client.get_executor()
    assert (
        evaluate_shards(shards, executor=executor, progress=False).to_dict()
        == evaluate_shards(shards, progress=False).to_dict()
    )
    ours = fit("temperature", shards, executor=executor, progress=False)
    assert ours.temperature == fit("temperature", shards, progress=False).temperature


def test_a_worker_killed_in_the_middle_loses_nothing(client, shards):
    from threading import Thread

    seen = Path(os.environ["TRUEUP_TEST_SEEN"])

    def kill():
        deadline = time.monotonic() + 20
        while not list(seen.iterdir()) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(int(next(iter(seen.iterdir())).name), signal.SIGKILL)

    killer = Thread(target=kill)
    killer.start()
    total, rows, bad = map_shards(slow_count, shards, executor=client.get_executor(), progress=False)
    killer.join()
    assert (int(total[0]), rows, bad) == (3600, 3600, ())
    assert len(list(seen.iterdir())) >= 2
