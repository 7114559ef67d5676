"""Artifacts that version 0.2.0 wrote, under schema 1, give the outputs that they gave then."""

from pathlib import Path

import numpy as np
import pytest

from optional import nn, torch
from trueup import load
from trueup.monitor.betting import GLOBAL_BETS, SLOPE_BETS

pytestmark = pytest.mark.filterwarnings("ignore:.*a file of an older version has no hash:UserWarning")

FOLDER = Path(__file__).parents[1] / "data" / "schema1"
EXPECTED = np.load(FOLDER / "expected.npz")
LOGITS, MEAN, STD, TARGETS = (EXPECTED[f"input.{name}"] for name in ("k4.new", "mean", "std", "targets_f"))
NETWORKS = {"clamped": (1.0, 0.0), "clamped_affine": (1.0, 0.0), "repaired": (0.6, 0.2)}
OTHERS = ("sets_", "conformal_", "forecast_", "monitor_")
NAMES = sorted(path.name.removesuffix(".safetensors") for path in FOLDER.glob("*.safetensors"))


@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith(OTHERS) and name not in NETWORKS])
def test_calibrators(name):
    extra = {"groups": ["a", "b", "c", "d"] * 2} if name == "per_group" else {}
    np.testing.assert_allclose(
        load(FOLDER / f"{name}.safetensors")(LOGITS, **extra), EXPECTED[name], rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("sets_")])
def test_prediction_sets(name):
    rule = load(FOLDER / f"{name}.safetensors")
    extra = {"groups": EXPECTED["input.groups"]} if "groups" in name else {}
    sets = rule(LOGITS, sample_weight=EXPECTED["input.w"]) if "weighted" in name else rule(LOGITS, **extra)
    np.testing.assert_array_equal(sets, EXPECTED[name])


def test_conformal_intervals():
    residuals, quantiles = (load(FOLDER / f"conformal_{name}.safetensors") for name in ("residuals", "quantiles"))
    np.testing.assert_allclose(residuals.interval(MEAN, STD), EXPECTED["conformal_residuals"], rtol=1e-12)
    np.testing.assert_allclose(quantiles.interval(MEAN - STD, MEAN + STD), EXPECTED["conformal_quantiles"], rtol=1e-12)


@pytest.mark.parametrize("name", ["forecast_variance.u", "forecast_quantiles.u"])
def test_forecast_recalibrators(name):
    found = load(FOLDER / f"{name}.safetensors")
    quantiles = found.quantiles(MEAN, STD, levels=[0.05, 0.5, 0.9])
    np.testing.assert_allclose(quantiles, EXPECTED[f"{name}.quantiles"], rtol=1e-9)
    np.testing.assert_allclose(found.probabilities(MEAN, STD, TARGETS), EXPECTED[f"{name}.probabilities"], rtol=1e-9)


def test_a_monitor_continues():
    monitor = load(FOLDER / "monitor_k4.safetensors")
    monitor.update(EXPECTED["input.z"], EXPECTED["input.y"])
    new_bettors = np.arange(len(GLOBAL_BETS), len(GLOBAL_BETS) + len(SLOPE_BETS))
    wealth = np.delete(monitor.evidence.wealth, new_bettors)
    np.testing.assert_allclose(wealth, EXPECTED["monitor_k4.wealth"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NETWORKS)
def test_networks(name):
    layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, 3)]
    network = nn.Sequential(*layers).eval()
    weights = {key.removeprefix("net."): EXPECTED[key] for key in EXPECTED.files if key.startswith("net.")}
    network.load_state_dict({key: torch.from_numpy(value) for key, value in weights.items()})
    scale, shift = NETWORKS[name]
    images = torch.from_numpy(EXPECTED["input.net_x"]) * scale + shift
    logits = load(FOLDER / f"{name}.safetensors", model=network)(images)
    np.testing.assert_allclose(logits.detach().numpy(), EXPECTED[name], rtol=1e-5, atol=1e-6)
