"""Of two classes every method reads P(class 1) as it is: a row below one half is not that of the other class."""

import warnings

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import spearmanr

from optional import torch
from trueup import METHODS

RNG = np.random.default_rng(0)
ODDS = RNG.normal(-1.5, 1.2, size=2000)
HAPPENED = (RNG.random(2000) < expit(0.6 * ODDS - 1.0)).astype(int)
LOGITS = np.stack([np.zeros(2000), ODDS], axis=1)
PROBES = np.stack([np.zeros(25), np.linspace(-3.0, 0.5, 25)], axis=1)

SHARED = {
    "identity", "temperature", "temperature_ece", "temperature_ece_wide", "temperature_focal", "temperature_brier",
    "bayesian_temperature", "ets", "isotonic_pooled", "scaling_binning", "imax_shared", "diagonal", "order_invariant",
}  # fmt: skip
"""One map for both classes: what it does to p it does to 1 − p, so that it cannot move a mean."""
DRAWN = {"imax", "venn_abers_cross", "residual", "auto", "smoothing_spline"}
"""Random starts or folds, which fall otherwise on the exchanged columns."""


def fit(name, logits, labels):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        return METHODS[name](logits, labels)


def probs(logits):
    return torch.softmax(torch.as_tensor(np.asarray(logits)), dim=1).numpy()


@pytest.mark.parametrize("name", METHODS)
def test_low_probabilities_are_mapped_in_their_order_and_exchanged_classes_exchange_the_result(name):
    calibrator = fit(name, LOGITS, HAPPENED)
    mapped = probs(calibrator(PROBES))[:, 1]
    assert spearmanr(mapped, PROBES[:, 1]).statistic > 0.8  # the frequencies of bins are noisy
    if name not in SHARED:
        assert probs(calibrator(LOGITS))[:, 1].mean() == pytest.approx(HAPPENED.mean(), abs=0.02)
    if name not in DRAWN:
        other = fit(name, LOGITS[:, ::-1].copy(), 1 - HAPPENED)
        assert np.allclose(probs(other(PROBES[:, ::-1].copy()))[:, 0], mapped, atol=0.02)
