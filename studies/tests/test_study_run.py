import math
import os
import platform
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

import chores
from trueup._core.executors import executor_for
from trueup_studies import STUDIES, Options, Store, Study, cost, product, run
from trueup_studies.run import _processor, describe_origin

PATHS = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)}


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "results.sqlite")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The rows of a run that nothing happened to, by the number of cells."""
    folder = tmp_path_factory.mktemp("undisturbed")

    def rows(count):
        study, store = chores.study(count=count), Store(folder / f"{count}.sqlite")
        run(study, store)
        return told(store, study)

    return rows


def told(store, study):
    """Rows as text, for NaN is not equal to itself."""
    return [repr(row) for row in store.rows(study.cells())]


def test_in_this_process(store, tmp_path):
    study, seen = chores.study(folder=tmp_path), []
    ran = run(study, store, on_cell=seen.append)
    assert (ran.finished, ran.kept, ran.failed) == (6, 0, {})
    assert [outcome.settings["n"] for outcome in seen] == list(range(6))
    assert all(outcome.status == "finished" and len(outcome.rows) == 2 for outcome in seen)
    rows = store.rows(study.cells())
    assert rows[4] == {"n": 2, "power": 2, "value": 4 / 7, "root": math.sqrt(2)}
    again = run(study, store, on_cell=seen.append)
    assert (again.finished, again.kept) == (0, 6)
    assert len(seen) == len(chores.lines(tmp_path)) == 6


def test_a_new_version_is_run_anew(store, tmp_path):
    run(chores.study(folder=tmp_path), store)
    assert run(chores.study(folder=tmp_path, version=2), store).finished == 6
    assert run(chores.study(folder=tmp_path, count=8), store).finished == 2


def test_a_place_is_not_a_setting(store, tmp_path):
    run(chores.study(folder=tmp_path), store)
    assert run(chores.study(folder=tmp_path / "elsewhere"), store).kept == 6


@pytest.mark.parametrize("executor", ["none", "processes:2"])
def test_a_cell_that_fails_does_not_stop_the_others(store, tmp_path, executor):
    study = chores.study("sevenths", folder=tmp_path)
    bad = study.cells()[3].key
    with executor_for(executor) as workers:
        ran = run(study, store, executor=workers)
    assert (ran.finished, list(ran.failed)) == (5, [bad])
    [outcome] = [o for o in store.known("chores") if o.status == "failed"]
    assert outcome.key == bad
    assert outcome.error.startswith("ZeroDivisionError: three is too much\n")
    assert "chores:" in outcome.error.splitlines()[-1]
    assert outcome.rows == []
    kept = run(study, store, retry_failed=False)
    assert (kept.finished, kept.kept, kept.failed) == (0, 6, {})
    assert list(run(study, store).failed) == [bad]
    (tmp_path / "cured").touch()
    assert run(study, store).finished == 1
    assert len(store.rows(study.cells())) == 12


def test_rows_that_cannot_be_kept_are_failures(store):
    ran = run(chores.study("strange", count=4), store)
    assert [error.splitlines()[0] for error in ran.failed.values()] == [
        "ValueError: row 0['x'] must be plain data (None, bool, number, text, list, dict), got object",
        "ValueError: row 0 must not change the setting 'n' from 1, got 7",
        "ValueError: row 0 must be a mapping from names to values, got str",
        "TypeError: 'int' object is not iterable",
    ]
    missing = run(chores.study("nothing", count=1), store)
    assert "has no attribute 'nothing'" in next(iter(missing.failed.values()))


def test_an_interruption_keeps_what_is_finished(store, tmp_path):
    study = chores.study("interrupted", folder=tmp_path)
    with pytest.raises(KeyboardInterrupt):
        run(study, store)
    assert [outcome.settings["n"] for outcome in store.known("chores")] == [0, 1, 2]
    assert run(chores.study(folder=tmp_path), store).finished == 3


def test_an_interruption_cancels_what_has_not_begun(store, tmp_path):
    study = chores.study(count=20, folder=tmp_path, pause=0.3)

    def enough(outcome):
        raise KeyboardInterrupt

    with ThreadPoolExecutor(2) as pool, pytest.raises(KeyboardInterrupt):
        run(study, store, executor=pool, on_cell=enough)
    assert len(store.known("chores")) == 1
    assert len(chores.lines(tmp_path)) < 20
    assert run(chores.study(count=20), store).finished == 19


def test_a_pool_of_processes(store, tmp_path, undisturbed):
    study = chores.study(count=12, folder=tmp_path, pause=0.01)
    with executor_for("processes:2") as workers:
        assert isinstance(workers, ProcessPoolExecutor)
        assert run(study, store, executor=workers).finished == 12
        assert run(study, store, executor=workers).kept == 12
    assert told(store, study) == undisturbed(12)
    assert os.getpid() not in {pid for _, pid in chores.lines(tmp_path)}


def test_a_pool_that_breaks_ends_the_run_and_keeps_the_rest(store, tmp_path):
    study = chores.study("deadly", count=8, folder=tmp_path)
    with (
        executor_for("processes:1") as workers,
        pytest.raises(
            RuntimeError, match="the workers were lost .* finished cells are kept: run the same command again"
        ),
    ):
        run(study, store, executor=workers)
    statuses = {outcome.settings["n"]: outcome.status for outcome in store.known("chores")}
    assert statuses == {0: "finished", 1: "finished", 2: "finished"}
    assert run(chores.study(count=8, folder=tmp_path), store).finished == 5


def test_an_executor_that_cannot_bring_a_result_home_fails_that_cell(store):
    class Lossy(ThreadPoolExecutor):
        def submit(self, function, *args):
            if args[1].settings["n"] != 1:
                return super().submit(function, *args)
            lost = Future()
            lost.set_exception(OSError("lost on the way"))
            return lost

    with Lossy(1) as pool:
        ran = run(chores.study(), store, executor=pool)
    assert (ran.finished, len(ran.failed)) == (5, 1)
    assert "OSError: lost on the way" in next(iter(ran.failed.values()))


@pytest.mark.parametrize(("executor", "kills"), [("none", 6), ("processes:2", 3)])
def test_killed_again_and_again(store, tmp_path, undisturbed, executor, kills):
    """kill −9 at moments drawn at random, some while the file is made or opened; the last run is left alone."""
    count, rng = 100, random.Random(0)
    study = chores.study(count=count)
    command = [sys.executable, chores.__file__, str(store.path), str(tmp_path), str(count), "0.01", executor]
    store.path.unlink()
    for turn in range(kills):
        before = len(chores.lines(tmp_path))
        process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL)
        while (
            turn % 4 and process.poll() is None and len(chores.lines(tmp_path)) < before + 6
        ):  # however slow the machine is
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.05 if turn % 4 else 0.2))
        process.kill()
        process.wait()
    done = len(Store(store.path).known("chores"))
    assert 0 < done < count
    subprocess.run(command, env=ENVIRONMENT, check=True, timeout=600)
    assert told(store, study) == undisturbed(count)
    counts = Counter(n for n, _ in chores.lines(tmp_path))
    assert sorted(counts) == list(range(count))
    if (
        executor == "none"
    ):  # what was running may have been run the same command again; a pool also runs ahead of what is written
        assert sum(counts.values()) - count <= kills
    for pid in {pid for _, pid in chores.lines(tmp_path)}:
        assert gone(pid), "a worker outlived its parent"


def test_an_interrupted_pool_does_not_wait_for_what_is_running(store, tmp_path):
    command = [sys.executable, chores.__file__, str(store.path), str(tmp_path), "4", "600", "processes:2"]
    process = subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and len(chores.lines(tmp_path)) < 2:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=1200)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in error
    assert all(gone(pid) for _, pid in chores.lines(tmp_path))
    assert Store(store.path).known("chores") == []


def gone(pid, patience=5.0):
    until = time.monotonic() + patience
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


# Dask leaves the socket to a worker that was killed to the garbage collector.
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_dask_cluster_that_loses_a_worker(store, tmp_path, undisturbed):
    """Two worker processes, one killed in the middle: nothing is lost, and nothing is there twice."""
    pytest.importorskip("distributed")
    study = chores.study(count=24, folder=tmp_path, pause=0.05)
    killed, seen = [], []

    def kill(outcome):
        seen.append(outcome.settings["n"])
        if len(seen) == 8:
            killed.append(chores.lines(tmp_path)[-1][1])
            os.kill(killed[0], signal.SIGKILL)

    with quiet("distributed"), executor_for("local:2") as workers:
        ran = run(study, store, executor=workers, on_cell=kill)
        assert run(study, store, executor=workers).kept == 24
    assert (ran.finished, ran.failed) == (24, {})
    assert sorted(seen) == list(range(24))
    assert told(store, study) == undisturbed(24)
    pids = Counter(pid for _, pid in chores.lines(tmp_path))
    assert killed[0] in pids
    assert os.getpid() not in pids
    assert len(pids) >= 2


class quiet:
    """Keeps a library's log to itself, which tells of the worker that was killed."""

    def __init__(self, name):
        import logging

        self.logger = logging.getLogger(name)

    def __enter__(self):
        self.level = self.logger.level
        self.logger.setLevel(100)

    def __exit__(self, *error):
        self.logger.setLevel(self.level)


def test_a_cell_uses_one_thread_unless_told_otherwise(store):
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    study = Study("threads", 1, lambda o: [{"t": o.threads}], "chores:threads", lambda rows, o: {})
    torch.set_num_threads(3)
    try:
        for threads in (1, 2):
            run(study, store, options=Options(threads=threads))
            [row] = store.rows(study.cells(Options(threads=threads)))
            assert row["used"] == threads
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)


def test_another_run_may_finish_a_cell_meanwhile(store, tmp_path):
    study = chores.study(folder=tmp_path)

    def meanwhile(outcome):
        if outcome.settings["n"] == 0:
            thread = threading.Thread(target=lambda: run(study, store))
            thread.start()
            thread.join()

    ran = run(study, store, on_cell=meanwhile)
    assert (ran.finished, ran.kept) == (1, 5)
    assert len(chores.lines(tmp_path)) == 6


@pytest.mark.parametrize("name", ["nothing", "processes:", "processes:0", "local:x", "none:2", "", "Processes:2"])
def test_executors_have_names(name):
    with pytest.raises(ValueError, match='executor must be "none", "processes'), executor_for(name):
        pass


def test_processes_are_dealt_to_gpus(undisturbed, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,7")
    with executor_for("processes:2", gpus=2) as pool:
        seen = {pool.submit(chores.visible_gpu, 0.5).result() for _ in range(2)}
        both = {f.result() for f in [pool.submit(chores.visible_gpu, 1.0) for _ in range(6)]}
    assert seen <= both == {"4", "7"}


@pytest.mark.parametrize(("visible", "seen"), [("4,7,9", {"4", "7"}), (None, {"0", "1"})])
def test_workers_of_a_local_cluster_are_dealt_to_the_first_gpus(visible, seen, monkeypatch):
    pytest.importorskip("distributed")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with executor_for("local:3", gpus=2) as workers:
        asked = [workers.submit(chores.visible_gpu, 0.5 + 0.01 * i) for i in range(6)]
        assert {future.result() for future in asked} == seen


def where(settings):
    """The device that the work is told of."""
    return [{"told": settings["device"]}]


@pytest.mark.parametrize(("gpu", "asked", "used"), [(True, None, "cuda"), (False, None, "cpu"), (True, "cpu", "cpu")])
def test_a_worker_chooses_the_device_where_none_is_named_and_says_which(gpu, asked, used, store, monkeypatch):
    pytest.importorskip("torch")
    for name in ("is_available", "is_initialized"):
        monkeypatch.setattr(f"torch.cuda.{name}", lambda: gpu)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: f"GPU {device}")
    study = Study("devices", 1, lambda o: [{"n": 0}], f"{__name__}:where", lambda rows, o: {})
    run(study, store, options=Options(device=asked))
    [outcome] = store.outcomes(study.cells())
    assert outcome.rows == [{"told": used}]
    assert ("GPU cuda" in outcome.origin.machine) == (used == "cuda")


def test_a_gpu_is_part_of_the_machine_unless_it_is_not_there(monkeypatch):
    def name(device):
        if device == "cuda:7":
            raise AssertionError("Invalid device id")
        return f"GPU {device}"

    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", name)
    devices = (None, "cpu", "cuda", "cuda:1", "cuda:7")
    gpus = [describe_origin(device).machine.partition("), ")[2] for device in devices]
    assert gpus == ["", "", "GPU cuda", "GPU cuda:1", ""]
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)  # nothing was done there
    assert "GPU" not in describe_origin("cuda").machine


def test_the_machine_has_its_processors_name_where_it_is_told(monkeypatch):
    assert _processor() in describe_origin("cpu").machine
    monkeypatch.setattr("platform.processor", lambda: "")
    for text, name in (("processor\t: 0\nmodel name\t: A  Chip\n", "A Chip"), ("processor: 0", platform.machine())):
        monkeypatch.setattr(Path, "read_text", lambda path, text=text, **how: text)
        assert _processor.__wrapped__() == name


def test_studies_are_listed_without_their_import():
    loaded = "'torch' in sys.modules, 'numpy' in sys.modules"
    code = f"import sys; from trueup_studies import STUDIES; print(*STUDIES, {loaded})"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["neural-clamping", "rethinking", "clue", "post-hoc", "calarena", "False", "False"]
    with pytest.raises(KeyError, match="no study is called 'x'; there are: neural-clamping"):
        STUDIES["x"]


def test_an_oracle_and_parts_are_refused_where_there_are_none():
    with pytest.raises(ValueError, match="oracle is for studies that choose among settings, got it with post-hoc"):
        STUDIES["post-hoc"].cells(Options(oracle=True))
    with pytest.raises(ValueError, match="without leaves nothing out of clue, got 'x'"):
        STUDIES["clue"].cells(Options(without=("x",)))
    with pytest.raises(ValueError, match="without must be among figure-1d in rethinking, got 'x'"):
        STUDIES["rethinking"].cells(Options(without=("x",)))
    whole, fewer = (len(STUDIES["rethinking"].cells(Options(without=w))) for w in ((), ("figure-1d",)))
    assert fewer < 0.5 * whole


def test_what_a_study_costs():
    assert cost.estimate(STUDIES["post-hoc"], Options()) is None
    study = STUDIES["rethinking"]
    options = Options(methods=("cross_entropy",), seeds=1, without=("figure-1d",))
    forward = 2 * (64 * 128 + 128 * 128 + 128 * 10)
    found = cost.estimate(study, options)
    assert (found.cells, found.flops) == (1, forward * 60 * (4 * 200 + 450 + 900))
    assert found.hours(found.flops) == 1 / 3600
    [cell] = study.cells(options)
    assert cost.estimate(study, options, done=frozenset([cell.key])).flops == 0
    texts = cost.estimate(study, Options(preset="trec", methods=("cross_entropy",), seeds=1))
    places = 2 * 37 + 2 * 19 + 2 * 10 + 5  # pooled after every second convolution
    words = 2 * places * 3 * 32 * 32 + 2 * 32 * 6  # seven convolutions over three words each, and a linear layer
    assert texts.flops == words * 20 * (4 * 4907 + 545 + 500)
    assert cost.estimate(study, Options(preset="paper")).unknown == ()
    clamping = STUDIES["neural-clamping"]
    one = Options(methods=("nc_ce",), seeds=1)
    more = cost.estimate(clamping, one)
    image = cost.forward_flops("cnn", "digits", '{"width":8,"batch_norm":false}')
    training = 60 * (4 * 400 + 700 + 697)
    fits = 21 * (2 * 100 * 700 + 2 * 700 + 697)
    assert more.flops == pytest.approx(image * (training + 700 + 697 + fits))
    assert cost.measure_rate() > 1e7


def test_fits_to_logits_cost_something_and_once_where_every_run_has_the_same():
    def flops(seeds, *methods, preset="paper"):
        networks = {"paper": "resnet110", "digits": None}
        return cost.estimate(STUDIES["neural-clamping"], Options(preset=preset, seeds=seeds, methods=methods,
                                                                 network=networks[preset])).flops  # fmt: skip

    steps = flops(1, "uncalibrated", "matrix_steps") - flops(1, "uncalibrated")
    assert steps == pytest.approx(1000 * 4 * 5000 * 100**2)
    assert flops(1, "uncalibrated", "ms_odir_steps") - flops(1, "uncalibrated") == pytest.approx(7 * steps)
    assert flops(5, "matrix", "matrix_steps") == flops(1, "matrix", "matrix_steps")
    assert flops(2, "matrix", preset="digits") == 2 * flops(1, "matrix", preset="digits")


def test_costs_are_the_same_with_and_without_timm():
    networks = STUDIES["neural-clamping"].cells(Options(preset="paper", seeds=1, methods=("temperature",)))
    by_timm = {(cell.settings["network"], cell.settings["data"]) for cell in networks}
    assert {pair for pair in by_timm if pair[0].startswith("timm:")} == cost.TIMM_FLOPS.keys()
    assert cost.estimate(STUDIES["neural-clamping"], Options(preset="paper")).unknown == ()


def test_the_operations_of_timms_networks_are_what_torch_counts():
    pytest.importorskip("timm", exc_type=ImportError)
    for (network, data), flops in cost.TIMM_FLOPS.items():
        assert cost._count(network, data, "{}") == flops


@pytest.mark.parametrize("name", ["seeds", "threads"])
def test_options_are_checked(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        Options(**{name: 0})


def test_a_grid_with_the_same_settings_twice_is_one_cell():
    twice = Study("twice", 1, lambda o: product(a=[1, 1.0, 2]), "chores:square", lambda rows, o: {})
    assert [cell.settings for cell in twice.cells()] == [{"a": 1.0}, {"a": 2}]


def test_a_cluster_that_does_not_answer_is_named(monkeypatch):
    distributed = pytest.importorskip("distributed")

    def silent(address):
        raise OSError("timed out")

    monkeypatch.setattr(distributed, "Client", silent)
    with (
        pytest.raises(ValueError, match=r"no Dask scheduler answers at tcp://nowhere:8786: timed out"),
        executor_for("tcp://nowhere:8786"),
    ):
        pass
