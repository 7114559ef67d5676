"""A demo of one minute: an overconfident network, its calibration, and a camera that changes."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

NEEDS = {"sklearn": "sklearn", "matplotlib": "report", "plotly": "report"}
"""Modules beyond the core's, with the extra that brings each."""


def run(folder: str | os.PathLike[str] = "demo", *, seed: int = 0, quiet: bool = False) -> Path:
    """Train a small network on digits, calibrate it, shift its camera, and write the results to a folder.

    The folder gets `report.html`, whose path is returned, `repair.png`, `calibrator.safetensors`, and the pairs
    `val.npz` and `test.npz` that the calibrator was fitted and evaluated on. Nothing is downloaded. Unless `quiet`,
    each step is explained on the terminal.
    """
    missing = [module for module in NEEDS if find_spec(module) is None]
    if missing:
        extras = ",".join(dict.fromkeys(NEEDS[module] for module in missing))
        raise ImportError(f"the demo needs {', '.join(missing)}: pip install 'trueup[{extras}]'")
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"folder must be a folder, or not be there yet, got the file {path}")
    path.mkdir(parents=True, exist_ok=True)
    if not quiet:
        print("Is a network's confidence honest, and can it be made so?", flush=True)
    from trueup.demo.walkthrough import run_demo  # after a first line, for torch takes seconds to import

    return run_demo(path, seed=seed, quiet=quiet)
