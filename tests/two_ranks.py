"""A test file run twice at once, as the two ranks of one group."""

import os
import subprocess
import sys
from pathlib import Path

import torch


def run_two_ranks(file, folder):
    """What each of two processes, started as `python file RANK FOLDER`, left in FOLDER/RANK.pt."""
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    processes = [
        subprocess.Popen([sys.executable, file, str(rank), str(folder)], env=environment, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        errors = [process.communicate(timeout=600)[1].decode() for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(errors)
    return [torch.load(Path(folder, f"{rank}.pt"), weights_only=True) for rank in range(2)]
