"""Networks of regression: recalibrated live, in every kind of output, saved and exported."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trueup.calibrators import IsotonicQuantiles, VarianceScaling
from trueup.metrics import evaluate_forecasts
from trueup.models import Recalibrated, as_module, collect_forecasts, recalibrate

RNG = np.random.default_rng(0)
X = torch.from_numpy(RNG.normal(size=(400, 3))).float()
Y = (X @ torch.tensor([1.0, -2.0, 0.5]) + 2.5 * torch.from_numpy(RNG.normal(size=400)).float()).double()


class Network(nn.Module):
    """Too sure by a factor of 2.5."""

    def __init__(self, say=lambda mean, std: (mean, std)):
        super().__init__()
        self.line = nn.Linear(3, 1, bias=False)
        self.line.weight.data = torch.tensor([[1.0, -2.0, 0.5]])
        self.say = say
        self.unit = "mm"

    def forward(self, x):
        mean = self.line(x)[:, 0]
        return self.say(mean, torch.ones_like(mean))


def stacked(mean, std):
    return torch.stack([mean, std], dim=1)


SAID = {
    "pair": lambda mean, std: (mean, std, "state"),
    "mapping": lambda mean, std: {"mean": mean, "std": std, "state": 1},
    "normal": torch.distributions.Normal,
}


def loader(y=Y):
    return DataLoader(TensorDataset(X, y), batch_size=150)


@pytest.mark.parametrize("kind", SAID)
def test_forecasts_are_collected_fitted_and_put_behind_the_network(kind):
    model = Network(SAID[kind])
    mean, std, targets = collect_forecasts(model, loader())
    assert mean.shape == std.shape == targets.shape == (400,)
    np.testing.assert_allclose(targets, Y)
    recalibrated = recalibrate(model, loader(), "variance")
    assert float(recalibrated.recalibrator.scale) == pytest.approx(2.5, rel=0.1)
    output = recalibrated(X)
    assert type(output) is type(model(X))
    after = collect_forecasts(recalibrated, loader())
    np.testing.assert_allclose(after.spread, std * float(recalibrated.recalibrator.scale), rtol=1e-6)
    assert evaluate_forecasts(*after)["coverage_95"].value == pytest.approx(0.95, abs=0.03)
    assert recalibrated.unit == "mm"
    assert type(copy.deepcopy(recalibrated)(X)) is type(output)


def test_any_other_output_is_told_by_a_function():
    model = Network(stacked)
    read = lambda output: (output[:, 0], output[:, 1])  # noqa: E731
    with pytest.raises(ValueError, match="batch 0: the model's output must be a pair"):
        collect_forecasts(model, loader())
    recalibrated = recalibrate(model, loader(Y[:, None]), IsotonicQuantiles.fit, forecast=read)
    _, std = recalibrated(X)
    assert float(std.detach().mean()) == pytest.approx(2.5, rel=0.15)
    with pytest.raises(ValueError, match="recalibrator must be of the class Recalibrator, got Linear"):
        Recalibrated(model, nn.Linear(1, 1))
    with pytest.raises(ValueError, match="at least one batch"):
        collect_forecasts(model, [])
    with pytest.raises(ValueError, match=r"targets must be numbers of shape \(n,\)"):
        collect_forecasts(model, [(X, torch.zeros(400, 2))])
    with pytest.raises(AttributeError):
        _ = object.__new__(Recalibrated).unit


@pytest.mark.parametrize("recalibrator", [VarianceScaling(2.5), IsotonicQuantiles([-1.0, 0.5, 4.0], [0.2, 0.5, 0.9])])
def test_recalibrators_and_their_quantiles_export(recalibrator, tmp_path):
    inputs = (torch.linspace(-2, 2, 7), torch.linspace(0.5, 2, 7))
    rows = torch.export.Dim("rows")
    maps = recalibrator, recalibrator.at_levels([0.05, 0.5, 0.95])
    for module in (*(as_module(each) for each in maps), Recalibrated(_Pair(), recalibrator)):
        shapes = ({0: rows}, {0: rows})
        if isinstance(module, Recalibrated):
            shapes = (shapes,)  # its arguments are those of the network
        exported = torch.export.export(module, tuple(x[:3] for x in inputs), dynamic_shapes=shapes)
        torch.testing.assert_close(exported.module()(*inputs), module(*inputs))
    expected = recalibrator.quantiles(*inputs, levels=[0.05, 0.5, 0.95])
    torch.testing.assert_close(recalibrator.at_levels([0.05, 0.5, 0.95])(*inputs), expected)
    again = pickle.loads(pickle.dumps(recalibrator))
    torch.testing.assert_close(again(*inputs), recalibrator(*inputs))
    other = as_module(
        IsotonicQuantiles([0.0, 1.0, 2.0], [0.3, 0.5, 0.7]) if len(recalibrator.config()) == 2 else VarianceScaling(1.0)
    )
    other.load_state_dict(as_module(recalibrator).state_dict())
    torch.testing.assert_close(other(*inputs), recalibrator(*inputs))
    with pytest.raises(ValueError, match="levels must lie between 0 and 1"):
        recalibrator.at_levels([0.0, 0.5])


class _Pair(nn.Module):
    def forward(self, mean, std):
        return mean, std


def test_onnx_gives_the_same_forecasts():
    runtime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    from trueup.integrations.onnx import export_recalibrator

    recalibrator = IsotonicQuantiles([-1.0, 0.5, 4.0], [0.2, 0.5, 0.9])
    mean, std = torch.linspace(-2, 2, 7), torch.linspace(0.5, 2, 7)
    for levels in (None, [0.1, 0.9]):
        model = export_recalibrator(recalibrator, levels=levels)
        result = runtime.InferenceSession(model).run(None, {"mean": mean.numpy(), "std": std.numpy()})
        expected = recalibrator(mean, std) if levels is None else (recalibrator.at_levels(levels)(mean, std),)
        for a, b in zip(result, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
