"""A file of something fitted in which one bit is flipped is rejected, or its content is unchanged."""

import json
from pathlib import Path

import numpy as np
import pytest

from trueup import Monitor, load, save
from trueup.calibrators import FORECAST_METHODS, METHODS
from trueup.decisions import PredictionSets, threshold
from trueup.io.artifacts import open_artifact

RNG = np.random.default_rng(0)
Z = RNG.normal(size=(400, 3)) * 2
Y = (Z + RNG.gumbel(size=Z.shape)).argmax(axis=1)
FLIPS = 800
"""Per kind of artifact."""


def fitted():
    """One value for each of five kinds of artifact."""
    monitor = Monitor(3)
    monitor.update(Z, Y)
    mean = RNG.normal(size=200)
    return {
        "calibrator": METHODS["vector"](Z, Y),
        "recalibrator": FORECAST_METHODS["variance"](mean, np.ones(200), mean + RNG.normal(size=200) * 2),
        "prediction_sets": PredictionSets.fit(Z, Y, coverage=0.9),
        "threshold": threshold(Z, Y, max_risk=0.4),
        "monitor": monitor,
    }


def content(path):
    """Return everything that a file says: its header and the parameters of its value."""
    with open_artifact(path) as (header, arrays):
        return json.dumps(header._asdict(), default=str), {name: array.tobytes() for name, array in arrays.items()}


@pytest.mark.parametrize("kind", fitted())
def test_no_flipped_bit_changes_the_content(kind, tmp_path):
    path = tmp_path / "a.safetensors"
    names = ["a", "b", "c"] if kind in ("calibrator", "monitor") else None
    save(fitted()[kind], path, class_names=names, summary={"note": "a fit"})
    data, expected = path.read_bytes(), content(path)
    assert accepted_changes(path, data, expected, FLIPS) == 0


def accepted_changes(path, data, expected, flips, seed=0):
    """Count flips of single bits after which another content is accepted."""
    changed = 0
    for bit in np.random.default_rng(seed).choice(8 * len(data), size=flips, replace=False).tolist():
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            load(path)
            changed += content(path) != expected
        except (ValueError, MemoryError):
            pass
    return changed


def test_old_files_load_with_a_note():
    path = next((Path(__file__).parents[1] / "data" / "schema1").glob("*emperature*.safetensors"))
    with pytest.warns(UserWarning, match="emperature.*older version has no hash, .* save it again"):
        load(path)
