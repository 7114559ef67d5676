"""Draw the pictures of the manual: `python docs/pictures.py`. They show the network of `trueup demo`."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from matplotlib.figure import Figure

import trueup
from trueup import demo
from trueup.report.figures import draw
from trueup.report.figures.reliability import reliability

FOLDER = Path(__file__).with_name("images")


def main(made: Path | None) -> None:
    """Draw the reliability of the demo's network before and after its repair."""
    with TemporaryDirectory() as folder:
        place = made or demo.run(folder, quiet=True).parent
        test = trueup.load(place / "test.npz")
        repaired = trueup.load_calibrator(place / "calibrator.safetensors")(test.logits)
    figure = Figure(figsize=(7.2, 3.7), layout="constrained")
    for ax, (title, logits) in zip(
        figure.subplots(1, 2), (("as trained", test.logits), ("repaired", repaired)), strict=True
    ):
        draw(reliability(logits, test.labels, bins=10), ax, title=title)
    FOLDER.mkdir(exist_ok=True)
    figure.savefig(FOLDER / "reliability.png", dpi=110)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
