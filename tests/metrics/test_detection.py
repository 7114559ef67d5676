"""Matched detections: their groups, and the error over score and box."""

import numpy as np
import pytest

import trueup
from trueup._core.errors import InputError
from trueup.calibrators import per_group
from trueup.metrics import d_ece, from_detections


def detections(n=200):
    """The recipe of the numbers below, which netcal 1.4.0 gave: ECE(bins, detection=True, sample_threshold=…)."""
    rng = np.random.default_rng(0)
    p = rng.random(n).round(3)
    box = np.stack([rng.random(n), rng.random(n), rng.random(n) * 0.6, rng.random(n) * 0.6], axis=1).round(2)
    hit = (rng.random(n) < p * 0.8 + 0.1 * box[:, 0]).astype(int)
    return p, hit, box


@pytest.mark.parametrize(
    ("bins", "least", "netcal"),
    [
        (10, 1, 0.34253),
        (10, 8, 0.0),
        ((8, 3, 3, 2, 2), 1, 0.24613),
        ((5, 2, 2, 2, 2), 1, 0.1799),
        ((5, 2, 2, 2, 2), 8, 0.03923),
    ],
)
def test_it_equals_netcal(bins, least, netcal):
    assert d_ece(*detections(), bins=bins, least=least) == pytest.approx(netcal, abs=1e-6)


def test_without_boxes_it_is_the_ece_of_the_score():
    p, hit, _ = detections()
    assert d_ece(p, hit) == pytest.approx(0.10036, abs=1e-6)


def test_three_boxes_by_hand():
    # Two halves of the score and of cx. (.9, left) and (.7, left) share a cell: |.8 − .5| · 2; (.2, right) alone: .2.
    assert d_ece([0.9, 0.7, 0.2], [1, 0, 0], [[0.1], [0.4], [0.9]], bins=2) == pytest.approx((2 * 0.3 + 0.2) / 3)
    # An edge belongs to the cell above it, and 1 to the last.
    assert d_ece([0.5, 1.0], [0, 1], bins=2) == pytest.approx(0.25)
    assert np.isnan(d_ece([], []))


def test_from_rows_to_a_repaired_detector(tmp_path):
    rng = np.random.default_rng(1)
    n = 3000
    p = rng.uniform(0.05, 0.95, n)
    kind = np.where(np.arange(n) % 2, "car", "dog")
    truth = np.where(kind == "car", p, p**3)
    hit = rng.random(n) < truth
    boxes = np.stack([rng.uniform(0, 640, n), rng.uniform(0, 480, n), *rng.uniform(5, 200, (2, n))], axis=1)
    table = from_detections(p, hit, classes=kind, boxes=boxes, images=np.arange(n) // 10, image_size=(640, 480))
    area = boxes[:, 2] * boxes[:, 3]
    assert (table.groups["size"] == "small").tolist() == (area < 1024).tolist()
    scores = trueup.evaluate(*table, **table.options())
    assert "300 clusters (image): intervals by image" in scores.caption()
    assert scores.groups["class", "dog"].difference.high < 0
    assert not scores.groups["class", "car"].stands_out
    fitted = per_group("platt")(*table, groups=table.groups["class"], clusters=table.clusters)
    trueup.save(fitted, tmp_path / "boxes.safetensors")
    after = trueup.load(tmp_path / "boxes.safetensors")(table.logits, groups=table.groups["class"])
    now = trueup.evaluate(after, table.labels, **table.options())
    assert now["ece"].value < scores["ece"].value / 2
    assert not now.groups["class", "dog"].stands_out
    dog = kind == "dog"
    assert np.abs(np.exp(after[dog, 1]) - truth[dog]).mean() < 0.05


def test_bad_input_is_named_in_the_error():
    with pytest.raises(InputError, match="hits must be 0 or 1, got 0.5"):
        d_ece([0.5], [0.5])
    with pytest.raises(InputError, match=r"boxes must lie in \[0, 1\], as shares of the image, got 0.5..320"):
        d_ece([0.5], [1], [[320.0]])
    with pytest.raises(InputError, match="bins must be one number, or one for each of 2 dimensions, got 3 numbers"):
        d_ece([0.5], [1], [[0.2]], bins=(2, 2, 2))
    with pytest.raises(InputError, match="scores must lie in"):
        from_detections([1.5], [1])
    with pytest.raises(InputError, match="classes must have 2 entries"):
        from_detections([0.5, 0.5], [1, 0], classes=["car"])
    with pytest.raises(InputError, match=r"boxes must have shape \(1, 4\): cx, cy, w, h"):
        from_detections([0.5], [1], boxes=[[1, 2]])
