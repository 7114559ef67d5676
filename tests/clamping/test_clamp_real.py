"""Real networks under a real shift, in short."""

from functools import partial

import numpy as np
import pytest
import torch

from flat_options import clamp_with as clamp
from trueup import metrics
from trueup.calibrators import Temperature
from trueup.clamping.subspace_search import subspace
from trueup.models import collect, corrupt
from trueup_studies.networks import Normalise, load_weights, resnet20


@pytest.fixture(scope="module")
def model(data):
    return load_weights(resnet20(), data / "weights" / "cifar10_resnet20.th")


def batches(data, half, corruption=None, n=250):
    with np.load(data / "images" / "cifar10_test.npz") as file:
        index = np.load(data / "images" / "cifar10_test_split.npz")[f"{half}_index"][:n]
        pixels = torch.from_numpy(file["images"][index]).permute(0, 3, 1, 2).float() / 255
        labels = torch.from_numpy(file["labels"][index]).long()
    pixels = pixels if corruption is None else corrupt(pixels, corruption, 5)
    return list(zip(torch.split(Normalise()(pixels), 125), torch.split(labels, 125), strict=True))


def test_a_colour_cast_is_taken_off(data, model):
    given, test = (batches(data, half, "colour_cast") for half in ("val", "test"))
    clamped = clamp(model, given, penalty=1e-5, recipe=partial(subspace, subsample=100, passes=6), progress=False)
    plain = collect(model, test)
    alone = Temperature.fit(*collect(model, given))(plain.logits)
    repaired = collect(clamped, test)
    assert metrics.nll(*repaired) < metrics.nll(alone, plain.labels) - 0.1
    assert metrics.accuracy(*repaired) > metrics.accuracy(*plain) + 0.03
    assert clamped.fit_record.evidence < 0.05
    assert clamped.fit_record.equivalents < 30


def test_clean_images_are_left_alone(data, model):
    record = clamp(model, batches(data, "val"), progress=False).fit_record
    assert record.delta_norm == 0
    assert record.evidence > 0.01
    assert record.equivalents <= 20
