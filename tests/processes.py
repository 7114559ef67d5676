"""A test file run twice at once, as the two ranks of one group."""

import os
import subprocess
import sys
from pathlib import Path

import torch


def found_by_two(file, folder):
    """What each of two processes, started as `python file RANK FOLDER`, left in FOLDER/RANK.pt."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    started = [
        subprocess.Popen([sys.executable, file, str(rank), str(folder)], env=environment, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120)[1].decode() for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    return [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(2)]
