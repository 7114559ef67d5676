"""A demo of one minute: an overconfident network, its calibration, and a camera that changes."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

NEEDS = {"sklearn": "sklearn", "matplotlib": "report", "plotly": "report"}
"""Modules beyond those of the library, with the extra that brings each; without torch, scikit-learn is not needed."""


def run(folder: str | os.PathLike[str] = "demo", *, seed: int = 0, quiet: bool = False) -> Path:
    """Train a small network on digits, calibrate it, shift its camera, and write the results to a folder.

    The folder gets `report.html`, whose path is returned, `repair.png`, `calibrator.safetensors`, and the pairs
    `val.npz` and `test.npz` that the calibrator was fitted and evaluated on. Nothing is downloaded. Unless `quiet`,
    each step is explained on the terminal. Without torch, stored predictions of the network with seed 0 are
    calibrated instead, and the camera does not change.
    """
    torch = find_spec("torch") is not None
    missing = [module for module in NEEDS if find_spec(module) is None and (torch or module != "sklearn")]
    if missing:
        extras = ",".join(dict.fromkeys(NEEDS[module] for module in missing))
        raise ImportError(f"the demo needs {', '.join(missing)}: pip install 'trueup[{extras}]'")
    if seed and not torch:
        raise ImportError("another seed trains another network: pip install 'trueup[torch]'")
    path = Path(folder)
    if path.exists() and not path.is_dir():
        raise ValueError(f"folder must be a folder, or not be there yet, got the file {path}")
    path.mkdir(parents=True, exist_ok=True)
    if not quiet:
        print("Is a network's confidence honest, and can it be made so?", flush=True)
    from trueup.demo.walkthrough import run_demo, run_stored  # after a first line, for imports take seconds

    return run_demo(path, seed=seed, quiet=quiet) if torch else run_stored(path, quiet=quiet)
