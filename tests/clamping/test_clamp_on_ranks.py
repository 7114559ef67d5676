"""What two processes fit to a share of the samples each is what one fits to all of them."""

import os
import sys
from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import nn

from colour_images import images, trained, white_balance
from flat_options import adapt_with, repair_with
from flat_options import clamp_with as clamp
from trueup.adaptation.batch_norm import Crop, estimate
from trueup.clamping.calibration_set import CalibrationSet
from trueup.clamping.network import Network
from trueup.clamping.varpro import varpro
from trueup_studies.networks import MLP
from two_ranks import run_two_ranks

SHARES = (slice(0, 260), slice(260, 600))
WAYS = {
    "subspace": {"recipe": "subspace"},
    "affine": {"recipe": "subspace", "input_map": "affine"},
    "focal": {"recipe": "subspace", "loss": "focal", "gamma": 1.0, "penalty": 1e-3},
    "pool": {"recipe": "subspace", "loss": "focal", "gamma": (0.0, 1.0), "gamma_folds": 2, "penalty": 1e-2},
    "varpro": {"recipe": partial(varpro, passes=40), "penalty": 0.01},
    "held out": {"recipe": partial(varpro, passes=20, penalties=(0.1, 0.001))},
    "principal": {"recipe": "subspace", "penalty": 1e-3},
}


def network(way):
    model = MLP(3, inputs=30 if way == "principal" else 4, hidden=(16,), seed=0).double()
    return nn.Sequential(model, nn.Tanh(), nn.Linear(3, 3, bias=False).double().requires_grad_(False)).eval()


def sample(way):
    generator = torch.Generator().manual_seed(1)
    m = 30 if way == "principal" else 4
    x = torch.randn(600, m, generator=generator).double()
    model = network(way)
    model[2].weight.data = 6 * torch.eye(3).double()
    with torch.no_grad():
        y = torch.multinomial(torch.softmax(model(x), dim=1), 1, generator=generator)[:, 0]
    return model, x + 0.8, y


def fitted(way, share=slice(None), size=150):
    model, x, y = sample(way)
    x, y = x[share], y[share]
    found = clamp(
        model, list(zip(torch.split(x, size), torch.split(y, size), strict=True)), progress=False, **WAYS[way]
    )
    record = found.fit_record
    scale = found.before.scale if hasattr(found.before, "scale") else torch.ones(1)
    return {
        "delta": found.before.delta,
        "scale": scale,
        "temperature": record.temperature,
        "penalty": record.penalty,
        "gamma": record.gamma,
        "gammas": dict(record.gammas),
        "candidates": dict(record.candidates),
        "evidence": record.evidence,
        "samples": record.samples,
        "objective": record.objective,
        "costs": (record.forwards, record.backwards, record.backward_cost, record.equivalents),
    }


def repaired(share=slice(None), size=60):
    x, y = (values[share] for values in images(240, 2))
    batches = list(zip(white_balance(x).split(size), y.split(size), strict=True))
    found = repair_with(trained(), batches, normalise=nn.Identity(), maps=("affine", "gamma"), progress=False)
    dark = [inputs**2 for inputs, _ in batches]
    taught = adapt_with(
        trained(), dark, normalise=nn.Identity(), maps=("gamma",), augment=None, entropy=True, progress=False
    )
    estimates = [estimate_of(batches), *found.changed.values(), *taught.changed.values()]
    record = found.repair_record
    return {
        "theta": found.before.inner.theta,
        "estimates": [tensor.clone() for tensor in estimates],
        "numbers": [
            *(record.temperature, record.held_out, record.equivalents),
            *(step.loss for step in record.steps),
            *(taught.repair_record.shift_p_value, taught.repair_record.equivalents),
        ],
    }


def estimate_of(batches):
    """New statistics of the last batch norm."""
    with torch.no_grad():
        samples = Network(trained(), CalibrationSet.read(batches, device="cpu"))
        return estimate(samples, None, 1.0, augment=Crop(torch.zeros(1, 1, 1)))["4.running_var"]


class Weighted(nn.Module):
    """Takes weights that the samples share, as many as one rank's only batch has samples."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, sample_weight):
        return self.model(x) * (sample_weight.sum() / 780)


def shared(rank):
    model, x, y = sample("subspace")
    x, y = (x[:560], y[:560]) if rank == 0 else (x[560:], y[560:])
    batches = zip(torch.split(x, 100), torch.split(y, 100), strict=True)
    weights = torch.arange(40.0).double()
    return clamp(Weighted(model), [(a, weights, b) for a, b in batches], penalty=1e-3, progress=False).before.delta


def broken(rank):
    model, x, y = sample("subspace")
    if rank == 1:
        model.register_forward_pre_hook(lambda module, inputs: 1 / 0)
    try:
        clamp(model, [(x, y)], progress=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


class Masked(nn.Module):
    """A third class that only one rank's samples do not have."""

    def forward(self, x):
        return torch.where(x[:, :1] > 10, torch.tensor([0.0, 0.0, -torch.inf]), x[:, :3])


def masked(rank):
    _, x, y = sample("subspace")
    try:
        clamp(Masked(), [(x + 20 * rank, y.clamp(max=1))], progress=False)
    except Exception as error:
        return f"{error}"


def last_layer(share=slice(None)):
    x, y = (values[share] for values in images(240, 2))
    batches = [(white_balance(x), y)] if len(y) else []
    parts = ("batch_norm", "head")
    record = repair_with(trained(), batches, normalise=nn.Identity(), parts=parts, progress=False).repair_record
    return [step.loss for step in record.steps]


def main(rank, folder):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2, timeout=timedelta(seconds=600)
    )
    found = {way: fitted(way, SHARES[rank], size=70) for way in WAYS}
    found["alone"] = fitted("subspace", slice(None) if rank == 1 else slice(0, 0))
    found["shared"] = shared(rank)
    found["repaired"] = repaired(slice(0, 100) if rank == 0 else slice(100, 240), size=50)
    found["broken"] = broken(rank)
    found["masked"] = masked(rank)
    found["last layer"] = last_layer(slice(0, 0) if rank == 0 else slice(None))
    torch.save(found, folder / f"{rank}.pt")
    dist.barrier()
    os._exit(0)  # an ordinary end may abort in a thread of gloo's that is still there


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return run_two_ranks(__file__, tmp_path_factory.mktemp("ranks"))


def test_repair_by_two_ranks_is_that_of_one_process(pair):
    alone = repaired()
    for found in pair:
        torch.testing.assert_close(found["repaired"]["theta"], alone["theta"], atol=1e-5, rtol=1e-5)
        for mine, other in zip(found["repaired"]["estimates"], alone["estimates"], strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)
        assert found["repaired"]["numbers"] == pytest.approx(alone["numbers"], rel=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_both_ranks_end_where_one_process_ends(pair, way):
    alone = fitted(way)
    assert (alone["delta"] != 0).any()
    for found in pair:
        torch.testing.assert_close(found[way]["delta"], alone["delta"], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(found[way]["scale"], alone["scale"], atol=1e-5, rtol=1e-5)
        for name in ("temperature", "objective", "penalty", "gamma"):
            assert found[way][name] == pytest.approx(alone[name], rel=1e-5), name
        assert found[way]["evidence"] == alone["evidence"]
        assert found[way]["samples"] == 600
    for name in ("delta", "scale"):
        assert torch.equal(pair[0][way][name], pair[1][way][name])
    for name in ("temperature", "gammas", "candidates", "costs"):
        assert pair[0][way][name] == pair[1][way][name], name
    assert pair[0][way]["gammas"] == pytest.approx(alone["gammas"], rel=1e-5)
    assert len(alone["gammas"]) == (2 if way == "pool" else 0)
    # What a backward pass takes beside a forward is measured, and differs from run to run.
    assert pair[0][way]["costs"][:2] == pytest.approx(alone["costs"][:2], abs=1e-9)


def test_a_rank_may_have_no_samples(pair):
    expected = fitted("subspace")
    for found in pair:
        torch.testing.assert_close(found["alone"]["delta"], expected["delta"], atol=1e-5, rtol=1e-5)


def test_what_one_ranks_batches_tell_of_the_arguments_holds_for_all(pair):
    model, x, y = sample("subspace")
    expected = clamp(model, [(x, y)], penalty=1e-3, progress=False).before.delta
    for found in pair:
        torch.testing.assert_close(found["shared"], expected, atol=1e-5, rtol=1e-5)


def test_one_ranks_failure_is_everyones(pair):
    assert pair[1]["broken"].startswith("ZeroDivisionError")
    assert pair[0]["broken"].startswith("RuntimeError: rank 1 failed with ZeroDivisionError")


def test_masked_classes_of_one_rank_are_refused_on_both(pair):
    assert all("logits must be finite, got masked classes" in found["masked"] for found in pair)


def test_the_last_layer_is_found_where_a_rank_has_no_samples(pair):
    alone = last_layer()
    assert len(alone) > 2
    for found in pair:
        assert found["last layer"] == pytest.approx(alone, rel=1e-4)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
