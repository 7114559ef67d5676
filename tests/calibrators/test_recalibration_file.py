"""A recalibrator comes back from its file bit for bit, and nothing else comes out of one."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from trueup import load, save
from trueup._core.registry import ARTIFACTS
from trueup.calibrators import IsotonicQuantiles, Recalibrator, VarianceScaling
from trueup.io import load_artifact, read_header

pytestmark = pytest.mark.filterwarnings("ignore:.*a file of an older version has no hash:UserWarning")


@pytest.fixture
def forecasts():
    rng = np.random.default_rng(0)
    return rng.normal(size=40), rng.uniform(0.5, 2, size=40), rng.normal(size=40)


@pytest.mark.parametrize("kind", [VarianceScaling, IsotonicQuantiles])
def test_it_comes_back_bit_for_bit(kind, forecasts, tmp_path):
    file = tmp_path / "net.safetensors"
    fitted = kind.fit(*forecasts)
    save(fitted, file, summary={"rmse": 0.5, "parts": [1, 2]})
    loaded = load(file)
    assert type(loaded) is kind
    for name, value in fitted.config().items():
        assert np.array_equal(loaded.config()[name], value)
    for a, b in zip(loaded(*forecasts[:2]), fitted(*forecasts[:2]), strict=True):
        np.testing.assert_array_equal(a, b)
    said = read_header(file, "recalibrator")
    assert said.class_name == kind.__name__
    assert said.summary == {"rmse": 0.5, "parts": [1, 2]}
    assert set(said.versions) == {"trueup", "numpy"}
    assert [path.name for path in tmp_path.iterdir()] == ["net.safetensors"]


def test_every_recalibrator_of_the_package_can_be_saved():
    assert {kind.__name__ for kind in Recalibrator.__subclasses__() if kind.__module__.startswith("trueup")} == {
        *ARTIFACTS["recalibrator"].classes
    }


def test_what_cannot_be_saved_is_named(tmp_path):
    class Own(VarianceScaling):
        pass

    file = tmp_path / "x.safetensors"
    with pytest.raises(ValueError, match=r"suffix must be .safetensors, got '.pt'"):
        save(VarianceScaling(1.0), tmp_path / "x.pt")
    with pytest.raises(ValueError, match="obj must be predictions or one of trueup's own: .* got Own"):
        save(Own(1.0), file)
    with pytest.raises(ValueError, match="summary.a must be plain data"):
        save(VarianceScaling(1.0), file, summary={"a": object()})
    assert not file.exists()


def written(file, content, **tensors):
    save_file(tensors, file, metadata={"trueup": content if isinstance(content, str) else json.dumps(content)})


GOOD = {"schema": 1, "recalibrator": "VarianceScaling", "versions": {}, "summary": None}


@pytest.mark.parametrize(
    ("content", "tensors", "message"),
    [
        ({**GOOD, "schema": 3}, {}, "schema must be 1 or 2, got 3"),
        ({**GOOD, "recalibrator": "os.system"}, {}, "no class of a stored value is called 'os.system'"),
        ("{", {}, "header is not JSON"),
        ("[]", {}, "schema must be 1 or 2, got None"),
        (GOOD, {}, "VarianceScaling does not take the parameters of the file"),
        (GOOD, {"scale": torch.tensor(-1.0)}, "scale must be one positive number"),
        (GOOD, {"scale": torch.tensor(1.0), "other": torch.ones(1)}, "VarianceScaling does not take"),
    ],
)
def test_files_that_hold_something_else_are_named(tmp_path, content, tensors, message):
    file = tmp_path / "x.safetensors"
    written(file, content, **tensors)
    with pytest.raises(ValueError, match=rf"x\.safetensors: .*{message}"):
        load(file)


def test_files_that_are_none_of_ours(tmp_path):
    file = tmp_path / "x.safetensors"
    save_file({"weight": torch.ones(1)}, file)
    with pytest.raises(ValueError, match="must hold a recalibrator, got weight"):
        load_artifact(file, "recalibrator")
    file.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="not a readable .safetensors file"):
        load(file)
    with pytest.raises(FileNotFoundError, match="no such file"):
        load(tmp_path / "y.safetensors")
