"""`auto` warns if the labels have other class frequencies than the network predicts, and a label shift explains it."""

import warnings

import numpy as np
import pytest

import trueup


def drawn(n, frequencies, scale=2.0):
    """Logits of a network trained on equal frequencies; rows of these frequencies."""
    rng = np.random.default_rng(0)
    y = rng.choice(3, size=n, p=frequencies)
    return scale * (2 * np.eye(3)[y] + rng.normal(size=(n, 3))), y


@pytest.mark.parametrize("scale", [2.0, 5.0])
def test_other_class_frequencies_are_noticed(scale):
    with pytest.warns(
        UserWarning, match=r"class [12] is 1?\d\.\d % of the labels, but the network predicts .*shift_prior"
    ):
        trueup.fit(*drawn(1000, [0.8, 0.1, 0.1], scale), progress=False)


def test_the_remedy_restores_the_networks_frequencies():
    z, y = drawn(3000, [0.8, 0.1, 0.1])
    with pytest.warns(UserWarning, match="class frequencies"):
        calibrator = trueup.fit(z, y, progress=False)
    new, labels = drawn(3000, [1 / 3] * 3)
    correction = trueup.decisions.shift_prior(new=[1 / 3] * 3, old=[0.8, 0.1, 0.1])
    mapped = np.asarray(calibrator(new))
    assert trueup.metrics.nll(correction(mapped), labels) < trueup.metrics.nll(mapped, labels) - 0.05


@pytest.mark.parametrize("case", ["equal", "weighted", "wrong in other ways"])
def test_nothing_is_said_where_a_shift_explains_nothing(case):
    z, y = drawn(1000, [1 / 3] * 3 if case == "equal" else [0.8, 0.1, 0.1])
    options = {"sample_weight": np.random.default_rng(1).gamma(9.0, size=len(y))} if case == "weighted" else {}
    if case == "wrong in other ways":
        z[:, 0] *= 0.3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trueup.fit(z, y, progress=False, **options)
