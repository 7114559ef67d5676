"""Repair of shifted images: on images and a network made for it, and on a real network."""

import sys
import warnings
from functools import partial
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from trueup import metrics
from trueup.clamping.subspace_search import subspace
from trueup.models import corrupt
from trueup_studies.networks import Normalise, load_weights, resnet20

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
try:
    benchmark = import_module("shift_benchmark")
finally:
    del sys.path[0]
OFFSETS, benchmark_shift, offset_of = benchmark.OFFSETS, benchmark.benchmark_shift, benchmark.offset_of

NORMALISE = Normalise((0.5, 0.4, 0.3), (0.25, 0.2, 0.15))


class Means(nn.Module):
    """Classes by the mean of each channel, after normalising: a constant offset is all that can go wrong."""

    def forward(self, x):
        return 4 * x.mean(dim=(2, 3))


def images(n, seed):
    generator = torch.Generator().manual_seed(seed)
    levels = torch.rand(n, 3, 1, 1, generator=generator) * 0.3 + 0.25
    pixels = (levels + 0.1 * torch.rand(n, 3, 4, 4, generator=generator)).clamp(0, 1)
    noise = -torch.empty(n, 3).exponential_(generator=generator).log()
    return pixels, (Means()(NORMALISE(pixels)) / 1.5 + noise).argmax(dim=1)


@pytest.fixture(scope="module")
def rows():
    names = ("colour_cast", "jpeg")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "temperature stopped at its bound")  # at points of the search, not at its end
        scored = [benchmark_shift(Means(), images(500, 0), images(400, 1), n, 1, normalise=NORMALISE) for n in names]
    return {(row.corruption, row.method): row for rows in scored for row in rows}


def test_there_is_a_row_for_each_method_and_an_oracle_where_the_shift_is_an_offset(rows):
    methods = ("uncalibrated", "temperature", "clamping")
    assert list(rows) == [
        *(("colour_cast", method) for method in (*methods, "oracle")),
        *(("jpeg", method) for method in methods),
    ]


def test_clamping_undoes_an_offset(rows):
    scaled, clamped, oracle = (rows["colour_cast", m] for m in ("temperature", "clamping", "oracle"))
    assert clamped.nll < scaled.nll - 0.1
    assert clamped.accuracy > scaled.accuracy + 0.05
    assert (scaled.nll - clamped.nll) / (scaled.nll - oracle.nll) > 0.9
    assert clamped.delta_norm > 0
    assert clamped.verdict
    assert clamped.equivalents > 5


def test_the_oracle_is_no_upper_bound_where_pixels_were_clipped():
    def bright(n, seed):
        pixels, _ = images(n, seed)
        pixels = (pixels + torch.tensor([0.35, 0.0, 0.0]).reshape(3, 1, 1)).clamp(0, 1)
        noise = -torch.empty(n, 3).exponential_(generator=torch.Generator().manual_seed(seed)).log()
        return pixels, (Means()(NORMALISE(pixels)) / 1.5 + noise).argmax(dim=1)

    # One channel is white everywhere once it is brightened: to take the whole offset away makes it too dark.
    scored = benchmark_shift(Means(), bright(500, 0), bright(400, 1), "brightness", 5, normalise=NORMALISE)
    nll = {row.method: row.nll for row in scored}
    assert nll["clamping"] < nll["oracle"] - 0.05


def test_where_nothing_is_to_be_gained_nothing_is_lost(rows):
    scaled, clamped = (rows["jpeg", m] for m in ("temperature", "clamping"))
    assert clamped.nll <= scaled.nll + 0.002


def test_the_figures_are_those_of_the_shifted_test_images(rows):
    pixels, labels = images(400, 1)
    logits = Means()(NORMALISE(corrupt(pixels, "colour_cast", 1, first=500)))
    row = rows["colour_cast", "uncalibrated"]
    assert row.accuracy == metrics.accuracy(logits, labels)
    assert row.nll == pytest.approx(metrics.nll(logits, labels), abs=1e-6)
    assert row.ece == pytest.approx(metrics.ece(logits, labels), abs=1e-6)
    scaled = rows["colour_cast", "temperature"]
    assert scaled.nll == pytest.approx(metrics.nll(logits / scaled.temperature, labels), abs=1e-6)


def test_calibration_and_test_images_have_noise_of_their_own():
    # The same images on both sides: had they the same noise, an uncalibrated network would score the same as here.
    same = images(50, 0)
    row = benchmark_shift(Means(), same, same, "gaussian_noise", 5, normalise=NORMALISE)[0]
    shared = metrics.nll(Means()(NORMALISE(corrupt(same[0], "gaussian_noise", 5))), same[1])
    separate = metrics.nll(Means()(NORMALISE(corrupt(same[0], "gaussian_noise", 5, first=50))), same[1])
    assert row.nll == pytest.approx(separate, abs=1e-6)
    assert row.nll != pytest.approx(shared, abs=1e-6)


def test_offsets():
    assert offset_of("brightness", 3, 3).flatten().tolist() == pytest.approx([0.3] * 3)
    assert offset_of("colour_cast", 1, 3).flatten().tolist() == pytest.approx([0.1, -0.05, -0.075])
    assert offset_of("contrast", 1, 3) is None
    assert offset_of("brightness", 0, 3) is None
    grey = torch.full((1, 3, 2, 2), 0.5)
    for name in OFFSETS:
        torch.testing.assert_close(corrupt(grey, name, 2) - grey, offset_of(name, 2, 3).expand(1, 3, 2, 2))


def test_a_colour_cast_of_real_images_is_repaired(data):
    with np.load(data / "images" / "cifar10_test.npz") as file:
        pixels = torch.from_numpy(file["images"][:400]).permute(0, 3, 1, 2).float() / 255
        labels = torch.from_numpy(file["labels"][:400]).long()
    model = load_weights(resnet20(), data / "weights" / "cifar10_resnet20.th")
    halves = (pixels[:200], labels[:200]), (pixels[200:], labels[200:])
    few = partial(subspace, passes=14, subsample=64)
    scored = benchmark_shift(model, *halves, "colour_cast", 4, normalise=Normalise(), recipe=few, penalty=1e-4)
    rows = {row.method: row for row in scored}
    assert rows["clamping"].nll < rows["temperature"].nll - 0.03
    assert rows["oracle"].nll < rows["temperature"].nll - 0.03
    assert model.training
