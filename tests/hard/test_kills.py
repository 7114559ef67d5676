"""Kills and interruptions at any moment: what was saved is whole, and who waits is told."""

import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from importlib import import_module

import numpy as np
import pytest
from child_processes import FORKS, command, die_soon, save_for_ever
from commands import invoke, overconfident
from saves import WRITTEN, pair

import trueup
from trueup import load
from trueup.io import Shards

DRAFT = re.compile(r"\..+\.[0-9a-f]{16}\.tmp|\.tmp\w{6}")  # ours, and the one that safetensors makes of it


def killed(kind, path, first, pause):
    """A process that saves without end, killed after so many seconds."""
    ready = FORKS.Event()
    process = FORKS.Process(target=save_for_ever, args=(kind, path, first, ready))
    process.start()
    try:
        while not ready.wait(1):
            assert process.is_alive(), "the saving process did not begin"
        time.sleep(pause)
    finally:
        process.kill()
        process.join()


def test_kill_during_save(tmp_path, effort, tell):
    """A process that saves version after version to one path is killed (SIGKILL) at random moments."""
    rng = np.random.default_rng(0)
    names = [name for name in WRITTEN if name != "predictions .npy"]  # which has its own trial
    kills = drafts = versions = 0
    for name in names:
        path = tmp_path / name / WRITTEN[name].file
        path.parent.mkdir()
        version = 0
        for _ in range(2 * effort):
            first = version + 1
            killed(name, path, first, rng.uniform(0, 0.04))
            version = WRITTEN[name].read(path)  # it loads, and is whole
            assert version >= first, "what was saved is lost"
            kills, versions = kills + 1, versions + version - first + 1
        left = [file for file in path.parent.iterdir() if file != path]
        assert all(DRAFT.fullmatch(file.name) for file in left), left
        drafts += len(left)
    assert Shards.of(tmp_path / "predictions .npz").paths == (str(tmp_path / "predictions .npz" / "net.npz"),)
    tell(
        "faults",
        f"{kills} kills in {versions:,} saves of {len(names)} kinds: each file whole and at least as new as the "
        f"last known save; {drafts} hidden drafts left behind, which nothing reads",
    )


def test_kill_during_save_of_two_files(tmp_path, effort, tell):
    """The same with a `.npy` pair, which is two files: logits, and labels beside them."""
    path, version, mixed = tmp_path / "net.npy", 0, 0
    for pause in np.random.default_rng(1).uniform(0, 0.04, 4 * effort):
        killed("predictions .npy", path, version + 1, pause)
        logits, labels = trueup.load(path)  # each of them whole
        (version,), (label,) = map(set, ((-logits).ravel().astype(int).tolist(), labels.tolist()))
        mixed += label != version % 3
    tell("faults", f"{4 * effort} kills: both files whole; {mixed} fell between the two renames")


def test_worker_killed(tmp_path, tell):
    """A worker of a pool of processes is killed (SIGKILL) in the middle of `trueup evaluate` of 600 shards."""
    for i in range(600):
        trueup.save(pair(i % 3, 50), tmp_path / f"{i:03}.npz")
    pool = ProcessPoolExecutor(2, mp_context=FORKS)

    @contextmanager
    def executor_for(name):
        with pool:
            yield pool

    pool.submit(die_soon, 0.2)  # one worker; the other reads shards meanwhile
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("trueup._core.executors"), "executor_for", executor_for)
        started = time.monotonic()
        told = invoke("evaluate", tmp_path, "--scheduler", "processes:2")
    seconds = time.monotonic() - started
    assert told.exit_code == 1, told.output
    assert told.stderr.startswith("trueup: BrokenProcessPool: ")
    assert told.stderr.count("\n") == 1
    assert told.stdout == "", "half of a table"
    assert seconds < 30
    tell("faults", f"code 1 and one line (BrokenProcessPool) after {seconds:.1f} s; no number printed; nothing hangs")


def is_whole(path):
    if path.suffix == ".html":
        return path.read_text("utf-8").rstrip().endswith("</html>")
    return load(path) is not None


def test_interrupt(tmp_path, effort, tell):
    """Ctrl-C at random moments of `trueup fit` and `trueup report`, over older results."""
    trueup.save(overconfident(3000), tmp_path / "val.npz")
    said, rng, codes = tmp_path / "said.txt", np.random.default_rng(0), []
    out = tmp_path / "out"
    out.mkdir()
    commands = {"fit.safetensors": ["fit"], "report.html": ["report", "--n-folds", "2"]}
    old = {out / name: str(i).encode() for i, name in enumerate(commands)}
    for path, words in zip(old, commands.values(), strict=True):
        for pause in rng.uniform(0, 0.9, 3 * effort):
            path.write_bytes(old[path])
            ready = FORKS.Event()
            line = [words[0], str(tmp_path / "val.npz"), *words[1:], "-o", str(path)]
            process = FORKS.Process(target=command, args=(line, said, ready))
            process.start()
            while not ready.wait(1):
                assert process.is_alive(), "the command did not begin"
            time.sleep(pause)
            if process.exitcode is None:
                os.kill(process.pid, signal.SIGINT)
            process.join(600)
            codes.append(process.exitcode)
            text = said.read_text()
            assert process.exitcode in (0, 130), (process.exitcode, text)
            if process.exitcode == 130:
                assert text.endswith("trueup: interrupted\n"), text
                assert path.read_bytes() == old[path] or is_whole(path)  # it may have come after the last write
            assert {file.name for file in out.iterdir()} <= set(commands)
    path.write_bytes(old[path])
    for pause in rng.uniform(0.3, 2, effort):  # and as a shell starts it; there, death by the signal is code 130 too
        line = [sys.executable, "-m", "trueup", "fit", str(tmp_path / "val.npz"), "-o", str(out / "fit.safetensors")]
        real = subprocess.Popen(line, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)
        time.sleep(pause)
        real.send_signal(signal.SIGINT)
        said_last = real.communicate(timeout=600)[1]
        codes.append(130 if real.returncode == -signal.SIGINT else real.returncode)
        assert codes[-1] == 0 or (codes[-1], said_last) == (130, b"trueup: interrupted\n")
    stopped = codes.count(130)
    assert stopped
    tell("faults", f"{len(codes)} runs: {stopped} ended with code 130 and one line, old results byte for byte; "
         f"{len(codes) - stopped} were done before; no draft")  # fmt: skip
