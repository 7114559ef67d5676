"""What a fresh installation must do: measure, fit, save, load, draw and report, in a few seconds."""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import trueup


def main() -> None:
    """Walk through the package from outside."""
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(2000, 5)) * 3
    labels = (logits / 2 + rng.gumbel(size=logits.shape)).argmax(axis=1)
    scores = trueup.evaluate(logits, labels)
    assert "overconfident" in scores.verdict(), scores
    calibrator = trueup.METHODS["temperature"](logits, labels)
    assert abs(float(calibrator.temperature) - 2) < 0.2, calibrator
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trueup.save(calibrator, folder / "calibrator.safetensors")
        assert repr(trueup.load(folder / "calibrator.safetensors")) == repr(calibrator)
        trueup.save((logits, labels), folder / "val.npz")
        run = [sys.executable, "-m", "trueup"]
        subprocess.run([*run, "evaluate", folder / "val.npz"], check=True)
        subprocess.run(
            [*run, "report", folder / "val.npz", "-m", "temperature", "-o", folder / "page.html"], check=True
        )
        assert (folder / "page.html").stat().st_size > 10_000
        version = subprocess.run([*run, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    print(f"Python {sys.version.split()[0]}: {version}: all well")


if __name__ == "__main__":
    main()
