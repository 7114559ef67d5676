import io

import pytest
import torch
from torch import nn

from fitted import CLASSES, fitted
from trueup import METHODS
from trueup.calibrators import Temperature
from trueup.integrations import onnx as export
from trueup.integrations.onnx import TOLERANCE, check_export
from trueup.models import as_module

ROWS = 150
INPUTS = torch.randn(ROWS, 6, generator=torch.Generator().manual_seed(1))

# Methods that fit the same class share its operations: one of them is exported (two where vectors and matrices differ).
ONE_EACH = [*{getattr(METHODS[m], "__self__", m): m for m in METHODS}.values(), "svs"]


class Stranger(Temperature):
    """Reads a number out of the tensor, which no exporter can follow."""

    def map(self, xp, z):
        return z / (2.0 if float(xp.sum(z)) > 0 else 3.0)


@pytest.fixture(scope="module")
def onnxruntime():
    for name in ("onnx", "onnxscript"):
        pytest.importorskip(name, reason=f"{name} is not installed: trueup[onnx]")
    return pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: trueup[onnx]")


class Network(nn.Module):
    """Logits of the scale that the calibrators were fitted to; some rows do not have the last option."""

    def __init__(self):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.layers = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, x):
        last = torch.arange(CLASSES) == CLASSES - 1
        return (10 * self.layers(x)).masked_fill((x[:, :1] > 0.5) & last, -torch.inf)


class Heads(nn.Module):
    """One network with a calibrator of every method, so that all are exported at once."""

    def __init__(self, methods):
        super().__init__()
        self.network = Network()
        self.calibrators = nn.ModuleDict({method: as_module(fitted(method)) for method in methods})

    def forward(self, x):
        logits = self.network(x)
        return {method: calibrator(logits) for method, calibrator in self.calibrators.items()}


@pytest.fixture(scope="module")
def heads():
    return Heads(ONE_EACH).eval()


@pytest.fixture(scope="module")
def program(heads):
    return torch.export.export(heads, (INPUTS[:3],), dynamic_shapes=({0: torch.export.Dim("rows")},))


def assert_same_outputs(run, heads):
    for n in (1, 2, ROWS):
        found = run(INPUTS[:n])
        with torch.no_grad():
            expected = heads(INPUTS[:n])
        for method, logits in expected.items():
            assert found[method].dtype == logits.dtype
            difference = (found[method].softmax(dim=1) - logits.softmax(dim=1)).abs().max()
            assert difference <= 2 * TOLERANCE, method  # of logits, a steep step makes more
            assert torch.equal(found[method].argmax(dim=1), logits.argmax(dim=1)), method
            assert torch.equal(torch.isneginf(found[method]), torch.isneginf(heads.network(INPUTS[:n]))), method


def test_torch_export(heads, program):
    assert_same_outputs(program.module(), heads)


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own
def test_calibrated_networks_run_in_onnxruntime(heads, program, onnxruntime):
    exported = torch.onnx.export(program, dynamo=True, input_names=["x"], verbose=False, optimize=False)
    file = io.BytesIO()
    exported.save(file)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])

    def run(x):
        outputs = session.run(None, {"x": x.numpy()})
        return dict(zip(heads.calibrators, map(torch.from_numpy, outputs), strict=True))

    assert_same_outputs(run, heads)


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
