"""What hypothesis draws: pairs of logits and labels, from tame to nasty."""

import numpy as np
from hypothesis import strategies as st
from scipy.special import ndtr


@st.composite
def pairs(draw, max_rows=40, max_classes=6, min_rows=1, tied=True):
    """A pair in float64; with `tied`, sometimes with many equal confidences and saturated rows."""
    n = draw(st.integers(min_rows, max_rows))
    classes = draw(st.integers(2, max_classes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    logits = rng.normal(size=(n, classes)) * draw(st.sampled_from([0.02, 1.0, 5.0, 50.0]))
    if tied and draw(st.booleans()):
        logits = np.round(logits)
    labels = rng.integers(0, classes, n)
    if draw(st.booleans()):
        labels = np.where(rng.random(n) < 0.7, logits.argmax(axis=1), labels)
    return logits, labels


def calibrated(n, classes, *, temperature=1.0, scale=2.0, seed=0):
    """Labels drawn from the softmax of logits/temperature: calibrated at temperature 1, overconfident above."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, classes)) * scale
    labels = (logits / temperature + rng.gumbel(size=logits.shape)).argmax(axis=1)
    return logits, labels


def images(n, pixels, *, classes=4, common=0.3, sharpness=1.0, seed=0):
    """Pixels of images with the image of each: labels drawn from the softmax, those of one image together."""
    rng = np.random.default_rng(seed)
    image = np.repeat(np.arange(n), pixels)
    logits = rng.normal(size=(n, classes))[image] + 1.5 * rng.normal(size=(len(image), classes))
    shared = np.sqrt(common) * rng.normal(size=(n, classes))[image]
    u = ndtr(shared + np.sqrt(1 - common) * rng.normal(size=logits.shape))
    labels = (logits - np.log(-np.log(np.clip(u, 1e-15, 1 - 1e-15)))).argmax(axis=1)
    return sharpness * logits, labels, image
