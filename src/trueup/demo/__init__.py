"""A one-minute demo: an overconfident network, its calibration, and a changed camera."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from trueup.io.atomic import require_writable_folder

NEEDS = {"sklearn": "sklearn", "matplotlib": "report"}
"""Modules that the demo needs, with the extra that installs each; scikit-learn is needed only with torch."""


def run(folder: str | os.PathLike[str] = "demo", *, seed: int = 0, quiet: bool = False) -> Path:
    """Train a small network on digits, calibrate it, shift its camera, and write the results to a folder.

    The folder then has `report.html`, `repair.png`, `calibrator.safetensors`, and the predictions `val.npz` and
    `test.npz` that the calibrator was fitted to and evaluated on. Nothing is downloaded. Without torch, stored
    predictions of the network with seed 0 are calibrated instead, and the camera does not change.

    Parameters
    ----------
    folder
        Folder of the results.
    seed
        Random seed of the data split and the network.
    quiet
        Do not explain each step on the terminal.

    Returns
    -------
    Path
        The path of the report.
    """
    torch = find_spec("torch") is not None
    missing = [module for module in NEEDS if find_spec(module) is None and (torch or module != "sklearn")]
    if missing:
        extras = ",".join(dict.fromkeys(NEEDS[module] for module in missing))
        raise ImportError(f"the demo needs {', '.join(missing)}: pip install 'trueup[{extras}]'")
    if seed and not torch:
        raise ImportError("another seed needs another network, which torch trains: pip install 'trueup[torch]'")
    path = require_writable_folder(Path(folder))
    path.mkdir(parents=True, exist_ok=True)
    if not quiet:
        print("Is a network's confidence honest, and can it be made so?", flush=True)
    from trueup.demo.walkthrough import run_demo, run_stored  # after the first line, because imports take seconds

    return run_demo(path, seed=seed, quiet=quiet) if torch else run_stored(path, quiet=quiet)
