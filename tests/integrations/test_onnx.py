import io

import numpy as np
import pytest
import torch
from torch import nn

from fitted import CLASSES, fitted, sample
from trueup import METHODS
from trueup.calibrators.temperature import Temperature
from trueup.integrations import onnx as export
from trueup.integrations.onnx import TOLERANCE, check_export

NOT_TO_ONNX: dict[str, str] = {}
"""Methods with an operation that ONNX Runtime lacks, and which."""

ROWS = 150

# Methods that fit the same class share its operations: one of them is exported (two where vectors and matrices differ).
ONE_EACH = [*{getattr(METHODS[m], "__self__", m): m for m in METHODS}.values(), "svs"]


class Stranger(Temperature):
    """Reads a number out of the tensor, which no exporter can follow."""

    def map(self, logits):
        return logits / (2.0 if float(logits.sum()) > 0 else 3.0)


@pytest.fixture(scope="module")
def onnxruntime():
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name, reason=f"{name} is not installed: trueup[onnx]")
    return pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: trueup[onnx]")


class Network(nn.Module):
    """Logits of the scale that the calibrators were fitted to."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, x):
        return 10 * self.layers(x)


@pytest.mark.parametrize("method", ONE_EACH)
def test_torch_export(method):
    calibrator, logits = fitted(method), torch.from_numpy(sample()[0]).float()
    program = torch.export.export(calibrator, (logits[:3],), dynamic_shapes=({0: torch.export.Dim("rows")},))
    for n in (1, 2, len(logits)):
        expected = calibrator(logits[:n])
        torch.testing.assert_close(program.module()(logits[:n]), expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("method", ONE_EACH)
@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own
def test_a_calibrated_network_runs_in_onnxruntime(method, onnxruntime):
    model = nn.Sequential(Network(), fitted(method)).eval()
    inputs = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))
    if method in NOT_TO_ONNX:
        assert isinstance(check_export(model, inputs)["ONNX"], str), "no longer an exception"
        pytest.xfail(NOT_TO_ONNX[method])
    program = torch.onnx.export(
        model,
        (inputs[:3],),
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("rows")},),
        input_names=["x"],
        verbose=False,
    )
    file = io.BytesIO()
    program.save(file)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    for n in (1, 2, ROWS):
        with torch.no_grad():
            expected = model(inputs[:n]).numpy()
        (found,) = session.run(None, {"x": inputs[:n].numpy()})
        assert found.dtype == expected.dtype
        np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)
        np.testing.assert_array_equal(found.argmax(axis=1), expected.argmax(axis=1))


def test_the_table_tells_what_was_tried(onnxruntime):
    ways = check_export(Temperature(3.0), torch.eye(4))
    assert ways["torch.export"] == 0.0
    assert ways["ONNX"] <= TOLERANCE
    ways = check_export(Stranger(1.0), torch.eye(4))
    assert all(isinstance(why, str) for why in ways.values())
    rows = export.export_table({"good": Temperature.fit, "bad": lambda z, y: Stranger(1.0)}).splitlines()
    assert rows[0] == "| method | torch.export | ONNX |"
    assert rows[2].startswith("| `good` | yes (0e+00) | yes (")
    assert rows[3].startswith("| `bad` | no: ")


def test_a_difference_is_a_no(monkeypatch):
    monkeypatch.setattr(export, "EXPORTERS", {"sloppy": lambda module, logits: module(logits) + 1e-4})
    ways = check_export(Temperature(1.0), torch.ones(4, 2))
    assert ways["sloppy"] == pytest.approx(1e-4, rel=1e-2)
    assert "no: differs by 1e-04" in export.export_table({"t": Temperature.fit})


def test_without_onnxruntime_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
    ways = check_export(Temperature(1.0), torch.ones(4, 2))
    assert ways["torch.export"] == 0.0
    assert "pip install 'trueup[onnx]'" in ways["ONNX"]
