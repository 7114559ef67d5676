"""The papers' ablations on a small network: each row is what its name says."""

from dataclasses import asdict

import pytest
import torch

from trueup import metrics
from trueup.calibrators import Temperature
from trueup.models import Calibrated, collect
from trueup_studies.ablation import GAMMAS, ablation_rows
from trueup_studies.ablation import clamp_with as clamp
from trueup_studies.networks import MLP


def loader(seed, model, n=300, shift=0.4):
    """Inputs that are off by a constant, with labels drawn where the network is half as sure as it says."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, 4, generator=generator)
    with torch.no_grad():
        noise = -torch.empty(n, 3).exponential_(generator=generator).log()
        y = (model(x) + noise).argmax(dim=1)
    return [(0.6 * x + 0.1 * shift, y)]


@pytest.fixture(scope="module")
def model():
    net = MLP(3, inputs=4, hidden=(16,), seed=2).eval()
    net.head[-1].weight.data.mul_(4)
    return net


@pytest.fixture(scope="module")
def halves(model):
    return loader(0, model), loader(1, model)


def ablate(clamped, calibration, test):
    shifted = Calibrated(clamped.model, before=clamped.before)
    networks = ((clamped.model, calibration), (clamped.model, test), (shifted, test))
    return ablation_rows(clamped.fit_record, *(collect(net, half, progress=False) for net, half in networks))


def test_the_parts_of_a_fit(model, halves):
    clamped = clamp(model, halves[0], recipe="varpro", penalty=1e-3, loss="focal", gamma=0.5, progress=False)
    rows = {row.method: row for row in ablate(clamped, *halves)}
    assert list(rows) == ["uncalibrated", "temperature", "temperature (focal)", "input only", "output only", "both"]
    (x, y), record = halves[1][0], clamped.fit_record
    with torch.no_grad():
        plain, shifted = model(x), model(clamped.before(x))
    fit = collect(model, halves[0])
    temperature, focal = Temperature.fit(*fit), Temperature.fit_focal(*fit, gamma=0.5)
    expected = {
        "uncalibrated": plain,
        "temperature": plain / float(temperature.temperature),
        "temperature (focal)": plain / float(focal.temperature),
        "input only": shifted,
        "output only": plain / record.temperature,
        "both": shifted / record.temperature,
    }
    for method, logits in expected.items():
        row = rows[method]
        assert row.nll == pytest.approx(metrics.nll(logits, y), abs=1e-6)
        assert row.ece == pytest.approx(metrics.ece(logits, y), abs=1e-5)
        assert row.entropy == pytest.approx(metrics.entropy(logits), abs=1e-6)
        assert row.accuracy == metrics.accuracy(logits, y)
        assert row.delta_norm == (record.delta_norm if method in ("input only", "both") else 0)
    assert rows["both"].loss == record.objective
    assert rows["temperature"].loss == pytest.approx(temperature.certificate.loss)
    assert rows["temperature (focal)"].gamma == 0.5
    assert rows["uncalibrated"].accuracy == rows["output only"].accuracy


def test_a_fit_by_cross_entropy_is_set_beside_a_focal_temperature_of_one(model, halves):
    clamped = clamp(model, halves[0], recipe="varpro", penalty=1e-2, progress=False)
    assert {row.method: row.gamma for row in ablate(clamped, *halves)}["temperature (focal)"] == 1.0


def test_entropy_grows_with_gamma(model, halves):
    fits = [
        clamp(model, halves[0], loss="focal", gamma=g, recipe="varpro", penalty=1e-2, progress=False)
        for g in (0.0, 0.5, 1.0)
    ]
    rows = [ablate(fit, *halves)[-1] for fit in fits]
    assert [row.gamma for row in rows] == [0.0, 0.5, 1.0]
    assert rows[0].entropy < rows[1].entropy < rows[2].entropy
    assert rows[0].loss > rows[1].loss > rows[2].loss
    assert rows[0].temperature < rows[2].temperature


def test_the_papers_grid():
    assert len(GAMMAS) == 21
    assert (GAMMAS[0], GAMMAS[1], GAMMAS[-1]) == (0.0, 0.05, 1.0)


def test_rows_are_plain_numbers(model, halves):
    clamped = clamp(model, halves[0], recipe="varpro", penalty=1e-2, progress=False)
    for row in ablate(clamped, *halves):
        values = asdict(row)
        assert isinstance(values.pop("method"), str)
        assert isinstance(values.pop("seed"), int)
        assert all(isinstance(value, float) for value in values.values())
