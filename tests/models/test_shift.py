import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import reference
from trueup import metrics
from trueup.models import Shifts, by_severity, corrupt, evaluate_ood, evaluate_shift
from trueup.models.corruptions import corruptions_for
from trueup_studies.networks import CNN, Normalise, load_weights, resnet20


def images(n=12, channels=3, seed=0):
    return torch.rand(n, channels, 8, 8, generator=torch.Generator().manual_seed(seed))


def numbers(row):
    return row.accuracy, row.nll, row.ece, row.entropy


def test_rows_are_the_metrics_of_the_shifted_images():
    model, x, y = CNN(5, seed=3).train(), images(), torch.arange(12) % 5
    rows = evaluate_shift(model, x, y, Shifts(None, (0, 2, 5), seed=7), batch_size=5, bins=4)
    assert [(r.corruption, r.severity) for r in rows] == [(c, s) for c in corruptions_for(3) for s in (0, 2, 5)]
    assert model.training
    for row in rows:
        with torch.no_grad():
            logits = model.eval()(corrupt(x, row.corruption, row.severity, seed=7))
        expected = (
            metrics.accuracy(logits, y),
            metrics.nll(logits, y),
            metrics.ece(logits, y, bins=4),
            metrics.entropy(logits, y),
        )
        np.testing.assert_allclose(numbers(row), expected, rtol=1e-5, atol=1e-7)


def test_severity_zero_is_computed_once():
    calls = []

    def model(batch):
        calls.append(batch.clone())
        return batch.mean(dim=(2, 3))

    x, y = images(), torch.arange(12) % 3
    rows = evaluate_shift(model, x, y, Shifts(["haze", "contrast"], (0, 1)))
    assert len(calls) == 3
    assert sum(call.equal(x) for call in calls) == 1
    assert numbers(rows[0]) == numbers(rows[2])
    assert numbers(rows[0]) != numbers(rows[1])


def test_bytes_and_one_channel():
    x, y = (images(channels=1) * 255).byte(), np.arange(12) % 2
    rows = evaluate_shift(CNN(2, channels=1), x, y, Shifts(None, (1,)))
    assert {r.corruption for r in rows} == set(corruptions_for(1))
    assert rows == evaluate_shift(CNN(2, channels=1), x.float() / 255, y, Shifts(None, (1,)))


def test_by_severity_is_the_mean_over_corruptions():
    rows = evaluate_shift(CNN(3), images(), torch.arange(12) % 3, Shifts(["haze", "contrast"], (0, 3)))
    result = by_severity(rows)
    assert [(r.corruption, r.severity) for r in result] == [("mean", 0), ("mean", 3)]
    np.testing.assert_allclose(numbers(result[1]), np.mean([numbers(rows[1]), numbers(rows[3])], axis=0))
    assert by_severity([]) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": torch.zeros(0, 3, 8, 8)}, "images must be a torch tensor .* with at least one image, got"),
        ({"images": np.zeros((2, 3, 8, 8))}, "images must be a torch tensor .*, got ndarray"),
        ({"images": torch.full((12, 3, 8, 8), 2.0)}, r"images must lie in \[0, 1\], before normalisation"),
        ({"labels": torch.zeros(11, dtype=torch.int64)}, r"labels must have shape \(12,\), one per image, got \(11,\)"),
        ({"shifts": Shifts(["rain"])}, "corruptions must be among brightness, .* got 'rain'"),
        ({"shifts": Shifts(None, (6,))}, r"severity must be a whole number in 0..5, got 6"),
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
    ],
)
def test_shift_checks_its_inputs(change, message):
    given_ = {"images": images(), "labels": torch.zeros(12, dtype=torch.int64), **change}
    with pytest.raises(ValueError, match=message):
        evaluate_shift(CNN(3), given_.pop("images"), given_.pop("labels"), **given_)


def test_ood_by_hand():
    # Doubts of known inputs 0 and 1, of foreign ones 1 and 2: three of four pairs in order and one tie.
    z = np.log([[0.9, 0.1], [0.6, 0.4]])
    *_, row = evaluate_ood(z, z, scores={"mi": ([0.0, 1.0], [1.0, 2.0])})
    # Precision 1 at recall 1/2, then 2/3 at recall 1; 95 % of the known inputs means both, and with them the tie.
    assert (row.score, row.auroc, row.fpr95, row.share) == ("mi", 0.875, 0.5, 0.5)
    assert row.aupr == pytest.approx(0.5 * 1 + 0.5 * 2 / 3)


@given(st.integers(0, 10_000), st.integers(1, 12), st.integers(1, 12))
def test_ood_equals_the_slow_loops(seed, known, foreign):
    rng = np.random.default_rng(seed)
    z, ood = rng.normal(size=(known, 4)).round(1), 0.5 * rng.normal(size=(foreign, 4)).round(1)
    mutual = rng.integers(0, 5, known) / 4, rng.integers(1, 6, foreign) / 4
    rows = {row.score: row for row in evaluate_ood(z, ood, scores={"mutual_information": mutual})}
    p, q = reference.softmax(z), reference.softmax(ood)
    scores = {
        "confidence": np.concatenate([1 - p.max(axis=1), 1 - q.max(axis=1)]).round(12),
        "entropy": np.concatenate([-(r * np.log(r)).sum(axis=1) for r in (p, q)]).round(12),
        "mutual_information": np.concatenate(mutual),
    }
    positive = np.repeat([0, 1], [known, foreign])
    assert list(rows) == ["entropy", "confidence", "mutual_information"]
    for name, doubt in scores.items():
        row = rows[name]
        assert row.auroc == pytest.approx(reference.roc_area(doubt, positive))
        assert row.aupr == pytest.approx(reference.average_precision(doubt, positive))
        assert row.fpr95 == pytest.approx(reference.false_positive_rate(-doubt, 1 - positive, 0.95))
        assert row.share == foreign / (known + foreign)


def test_no_rows():
    empty = np.zeros((0, 3))
    for row in evaluate_ood(empty, empty, scores={"mi": ([], [])}):
        assert all(math.isnan(v) for k, v in dataclasses.asdict(row).items() if k != "score")


def test_scores_are_checked():
    z = np.zeros((2, 3))
    with pytest.raises(ValueError, match=r"scores\['mi'\] must have 2 entries, one per row, got 1"):
        evaluate_ood(z, z, scores={"mi": ([0.0, 1.0], [1.0])})
    with pytest.raises(ValueError, match=r"scores\['mi'\] must be finite, got nan"):
        evaluate_ood(z, z, scores={"mi": ([0.0, math.nan], [0.0, 1.0])})
    with pytest.raises(ValueError, match="ood must have as many classes as logits, 3, got 2"):
        evaluate_ood(z, np.zeros((2, 2)))


def test_real_networks_lose_calibration_with_severity(data):
    with np.load(data / "images" / "cifar10_test.npz") as file:
        x, y = torch.from_numpy(file["images"][:200]).permute(0, 3, 1, 2), torch.from_numpy(file["labels"][:200]).long()
    model = nn.Sequential(Normalise(), load_weights(resnet20(), data / "weights" / "cifar10_resnet20.th"))
    clean, mild, hard = by_severity(evaluate_shift(model, x, y, Shifts(["gaussian_noise", "contrast"], (0, 2, 5))))
    assert clean.accuracy > 0.85
    assert clean.accuracy > mild.accuracy > hard.accuracy
    assert clean.nll < mild.nll < hard.nll
    assert clean.ece < hard.ece
    assert clean.entropy < hard.entropy
