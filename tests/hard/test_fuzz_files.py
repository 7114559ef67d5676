"""Every reader is given thousands of broken files, in processes of their own, so that a crash is seen and named.

Each file is a good one that `mutations` broke. Of each, a reader may say what is wrong (a ValueError that names the
file, in one line), or read what is whole. Anything else is a finding: another exception, a signal, more than
`LONGEST` seconds, gigabytes asked for, NaN, or memory that grows. The file that did it is kept.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from fuzzing import MOST

HERE = Path(__file__).parent
GROWTH = 12 << 20
"""Bytes by which a process may have grown at the end, however many files it read after the warm-up."""


@pytest.fixture(scope="session")
def fuzzed(tmp_path_factory, effort):
    """What came of each group of readers."""
    pytest.importorskip("pyarrow", reason="one of the readers needs pyarrow: pip install 'trueup[parquet]'")
    if not hasattr(os, "fork"):
        pytest.skip("processes cannot be forked here")
    folder = tmp_path_factory.mktemp("fuzzed")
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"}
    command = [sys.executable, HERE / "fuzzing.py", folder, str(effort)]
    limit = 900 + 120 * effort
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return lambda name: (json.loads((folder / f"{name}.json").read_text()), done.stderr)


@pytest.fixture
def trial(fuzzed, tell):
    def judged(name, refusals="every refusal named the file"):
        facts, stderr = fuzzed(name)
        assert not facts["findings"], "\n".join([*facts["findings"], stderr[-2000:]])
        assert facts["growth"] < GROWTH, f"memory grew by {facts['growth'] / 2**20:.1f} MB over {facts['files']} files"
        assert facts["peak"] < MOST / 2, f"{facts['peak'] / 2**20:.0f} MB were asked for at once"
        assert facts["whole"] < 0.6 * facts["tried"], "most files are as good as before: they were hardly broken"
        tell(
            "files",
            f"{facts['files']:,} broken files: no crash, none took longer than {facts['slowest']:.2f} s, "
            f"memory grew by {max(facts['growth'], 0) / 2**20:.1f} MB; {refusals}",
            seconds=facts["seconds"],
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


def test_broken_logs_and_checkpoints_of_monitors(trial):
    """Broken logs are replayed to a monitor of the web page's server, and broken checkpoints restored."""
    trial("monitors", "every refusal was one line, and no row of a refused log was taken in")


def test_broken_data_sets_of_images(trial):
    """Broken data sets of images: IDX, CIFAR's batches (binary and pickled), .mat, .npz, .png and .jpg files."""
    trial("images", "every refusal named the file; nothing that a pickle calls was run")


def test_broken_data_sets_of_texts_and_tables(trial):
    """Broken data sets of texts and tables: labelled lines, archives of posts (.tar, .tar.gz), .csv and .npz files."""
    trial("texts")


def test_broken_files_on_the_command_line(trial):
    """Commands are given broken files: they end with code 2 and one line."""
    trial("cli")
