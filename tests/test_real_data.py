"""Figures published with the real data sets, from the files themselves."""

import numpy as np
import pytest

from trueup import METHODS, evaluate, from_probs, load, metrics
from trueup.metrics import Tally

LOGITS = [
    ("cifar10_densenet40", "val", 0.9382, 0.0436),
    ("cifar10_densenet40", "test", 0.9242, 0.0550),
    ("cifar10_resnet20", "val", 0.9164, 0.0539),
    ("cifar10_resnet20", "test", 0.9182, 0.0525),
    ("cifar10_resnet32", "val", 0.9244, 0.0525),
    ("cifar10_resnet32", "test", 0.9282, 0.0496),
]
PROBS = [
    ("cifar10_lenet5_probs", 0.5308, 0.1079),
    ("cifar10_wrn16x4_probs", 0.9109, 0.0537),
    ("cifar100_wrn16x4_probs", 0.7543, 0.0581),
    ("cifar100_lenet5_probs", 0.1246, 0.0149),
]
TOP = [
    ("imagenet_resnet101", 0.7737, 0.0492),
    ("imagenet_densenet161", 0.7714, 0.0564),
    ("imagenet_efficientnet_b1", 0.7870, 0.1000),
    ("imagenet_mobilenetv3_large_100", 0.7577, 0.0670),
    ("imagenet_resnet34", 0.7511, 0.0780),
    ("cifar100_resnet110", 0.7148, 0.1848),
    ("cifar100_densenet40", 0.7000, 0.2116),
    ("cifar10_resnet110", 0.9356, 0.0475),
]


@pytest.mark.parametrize(
    ("name", "before", "after"), [("mmbench_Qwen-VL-Chat", 0.8040, 0.6796), ("oodcv_MobileVLM_V2-7B", 0.9232, 0.7919)]
)
def test_options_that_are_not_offered_are_left_out(data, name, before, after):
    file = np.load(data / "llm" / f"{name}.npz")
    offered = np.arange(6) < file["options"][:, None]
    masked = np.where(offered, file["logits"], -np.inf)
    assert METHODS["temperature"](file["logits"], file["labels"]).certificate.loss == pytest.approx(before, abs=1e-4)
    calibrator = METHODS["temperature"](masked, file["labels"])
    assert metrics.nll(calibrator(masked), file["labels"]) == pytest.approx(after, abs=1e-4)
    assert np.array_equal(np.isfinite(calibrator(masked)), offered)


@pytest.mark.parametrize(("name", "split", "accuracy", "ece"), LOGITS)
def test_logits(data, name, split, accuracy, ece):
    pair = load(data / "logits" / f"{name}.npz", split=split)
    assert metrics.accuracy(*pair) == pytest.approx(accuracy, abs=5e-5)
    assert metrics.ece(*pair) == pytest.approx(ece, abs=5e-5)
    tally = Tally.of(*pair)
    assert tally.score_bins.ece() == pytest.approx(metrics.ece(*pair), abs=1e-6)  # float32: the quick pass
    assert abs(tally.grid.aece() - metrics.aece(*pair)) <= tally.grid.aece_error()


@pytest.mark.parametrize(("name", "accuracy", "ece"), PROBS)
@pytest.mark.filterwarnings("ignore:.*exact zeros.*:UserWarning")
def test_probs(data, name, accuracy, ece):
    pair = load(data / "logits" / f"{name}.npz", probs=True)
    assert metrics.accuracy(*pair) == pytest.approx(accuracy, abs=5e-5)
    assert metrics.ece(*pair) == pytest.approx(ece, abs=5e-5)


@pytest.mark.filterwarnings("ignore:.*exact zeros.*:UserWarning")
def test_seven_nets(data):
    with np.load(data / "logits" / "cifar10_seven_nets_probs.npz") as file:
        labels = file["labels"]
        nets = {name: from_probs(file[name]) for name in file.files if name != "labels"}
    assert len(nets) == 7
    eces = [metrics.ece(z, labels) for z in nets.values()]
    accuracies = [metrics.accuracy(z, labels) for z in nets.values()]
    assert min(eces) == pytest.approx(0.014, abs=5e-4)
    assert max(eces) == pytest.approx(0.060, abs=5e-4)
    assert round(min(accuracies), 2) == 0.90
    assert round(max(accuracies), 2) == 0.93


@pytest.mark.parametrize(("name", "accuracy", "ece"), TOP)
def test_top1(data, name, accuracy, ece):
    with np.load(data / "top1" / f"{name}.npz") as file:
        arrays = {key: file[key] for key in file.files}
    tally = metrics.Bins.of_scores(arrays["confidence"], arrays["correct"])
    assert tally.hits.sum() / tally.n == pytest.approx(accuracy, abs=5e-5)
    assert tally.ece() == pytest.approx(ece, abs=5e-5)


def test_the_published_temperature_repairs_densenet(data):
    logits, labels = load(data / "logits" / "cifar10_densenet40.npz", split="test")
    after = logits / 2.8826
    assert metrics.nll(after, labels) == pytest.approx(0.225086, abs=2e-6)
    assert metrics.ece(logits, labels) == pytest.approx(0.055003, abs=2e-6)
    assert metrics.ece(after, labels) == pytest.approx(0.009464, abs=2e-5)
    assert "overconfident" in evaluate(logits, labels).verdict()
