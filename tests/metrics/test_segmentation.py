"""Class-wise calibration errors of images."""

import numpy as np
import pytest

from optional import torch
from reference import image_class_errors
from trueup._core.errors import InputError
from trueup.metrics import SegmentationTally


def logits_of(probs):
    """Probabilities (n, …, K) as logits (n, K, …)."""
    return np.moveaxis(np.log(np.asarray(probs)), -1, 1)


def test_two_images_by_hand():
    # Two bins, (0, ½] and (½, 1]. Image 0 has pixels .9/.1, .6/.4, .2/.8 labelled 0, 1, 1; image 1 has .7/.3, .7/.3
    # labelled 0, 0.
    z = logits_of([[[[0.9, 0.1], [0.6, 0.4], [0.2, 0.8]]], [[[0.7, 0.3], [0.7, 0.3], [0.5, 0.5]]]])
    y = np.array([[[0, 1, 1]], [[0, 0, -100]]])
    tally = SegmentationTally.of(z, y, bins=2)
    # Image 0, class 0: upper bin .9 and .6 of which one is class 0: |.75 − .5| = .25; lower bin .2, never: .2.
    # ECE = 2/3 · .25 + 1/3 · .2 = .7/3; mean over bins .225; largest .25. Class 1 is its mirror image.
    # Image 1, class 0: upper bin .7 and .7, both class 0: .3.
    assert tally.errors["ece"] == pytest.approx(np.array([[0.7 / 3, 0.7 / 3], [0.3, 0.3]]))
    assert tally.errors["average_ce"] == pytest.approx(np.array([[0.225, 0.225], [0.3, 0.3]]))
    assert tally.errors["mce"] == pytest.approx(np.array([[0.25, 0.25], [0.3, 0.3]]))
    assert tally.of_images("ece") == pytest.approx([0.7 / 3, 0.3])
    assert tally.value("average_ce").value == pytest.approx((0.225 + 0.3) / 2)
    assert tally.accuracy().value == pytest.approx((2 / 3 + 1) / 2)
    assert tally.pixels.tolist() == [3, 2]
    # Of all pixels together: what is too high in one image and too low in another cancels.
    assert tally.bins.ece() < tally.value("ece").value


@pytest.mark.parametrize("bins", [1, 7, 15])
def test_it_is_the_slow_loop(bins):
    rng = np.random.default_rng(bins)
    z, y = rng.normal(size=(4, 5, 6, 3)) * 2, rng.integers(0, 5, (4, 6, 3))
    y[rng.random(y.shape) < 0.2] = 255
    tally = SegmentationTally.of(z, y, ignore_index=255, bins=bins)
    for error in ("ece", "average_ce", "mce"):
        assert tally.errors[error] == pytest.approx(image_class_errors(z, y, error, bins, ignore_index=255))


def test_parts_add_up_and_axes_agree():
    rng = np.random.default_rng(0)
    z, y = torch.from_numpy(rng.normal(size=(6, 3, 4, 4))), torch.from_numpy(rng.integers(0, 3, (6, 4, 4)))
    whole = SegmentationTally.of(z, y, background=0)
    parts = sum(SegmentationTally.of(z[i : i + 2], y[i : i + 2], background=0) for i in (0, 2, 4))
    classes_last = SegmentationTally.of(z.movedim(1, -1), y, class_axis="last", background=0)
    for other in (parts, classes_last):
        assert other.value() == whole.value()
        assert str(other) == str(whole)
    assert whole.classes == (1, 2)
    assert whole.of_images() == pytest.approx(whole.errors["ece"][:, 1:].mean(axis=1))
    assert str(whole).startswith("6 images, 96 pixels, class 0 left out: intervals by image")
    assert "class" in whole._repr_html_()
    with pytest.raises(ValueError, match="same classes, bins and background"):
        whole + SegmentationTally.of(z, y)


def test_an_image_without_pixels_counts_nothing():
    z, y = np.zeros((3, 2, 2, 2)), np.zeros((3, 2, 2), int)
    y[1] = -100
    tally = SegmentationTally.of(z, y)
    assert tally.images == 2
    assert tally.value().value == pytest.approx(0.5)
    assert np.isnan(SegmentationTally.of(z[1:2], y[1:2]).value().value)
    assert np.isnan(SegmentationTally.of(z[:1], y[:1]).value().low)


def test_bad_input_is_named_in_the_error():
    z, y = np.zeros((2, 3, 4, 4)), np.zeros((2, 4, 4), int)
    with pytest.raises(InputError, match=r"labels must have shape \(2, 3, 4\) to match the logits, got \(2, 4, 4\)"):
        SegmentationTally.of(z, y, class_axis="last")
    with pytest.raises(InputError, match="background must be a class, 0..2, got 3"):
        SegmentationTally.of(z, y, background=3)
    with pytest.raises(InputError, match="error must be one of ece, average_ce, mce"):
        SegmentationTally.of(z, y).value("rmsce")
    with pytest.raises(InputError, match="logits must have shape"):
        SegmentationTally.of(z[0, 0], y[0, 0])
