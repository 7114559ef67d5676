"""Expressions of calibrators: the steps give what the calibrator gives."""

import numpy as np
import pytest

from trueup import METHODS, fit

SEARCHED = {"auto", "residual", "diagonal_sms", "sms_cv", "density_ratio", "order_invariant"}
"""Methods whose fit takes long; their parts are tested by other methods."""
NO_EXPRESSION = {"venn_abers", "venn_abers_cross", "bin_mean_shift", "density_ratio", "order_invariant"}


def sample(rows, classes, seed=0):
    """Return overconfident logits and labels."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(rows, classes)) * 2
    return z, (z * 0.6 + 0.3 * rng.normal(size=classes) + rng.gumbel(size=z.shape)).argmax(axis=1)


def softmax(z):
    """Return probabilities."""
    p = np.exp(z - z.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def wanted(calibrator, expression, z):
    """Return what the calibrator itself gives for logits."""
    if expression.outputs == ("confidence_calibrated",):
        for part in getattr(calibrator, "steps", ())[:-1]:
            z = part(z)
        return getattr(calibrator, "steps", [calibrator])[-1].confidence(z)[:, None]
    return softmax(calibrator(z))


@pytest.fixture(scope="module", params=[2, 4])
def fitted(request):
    """Return the number of classes, and fitted calibrators that have an expression, by the names of their methods."""
    z, y = sample(1000, request.param)
    return request.param, {
        name: fit(z, y, name) for name in METHODS if name not in SEARCHED | NO_EXPRESSION and "hidden" not in name
    }


def test_steps_on_logits_equal_the_calibrator(fitted):
    classes, calibrators = fitted
    z = np.concatenate([sample(3000, classes, 1)[0], np.zeros((1, classes)), 40 * np.eye(classes)])
    for name, calibrator in calibrators.items():
        expression = calibrator.to_expression([f"z{k}" for k in range(classes)])
        np.testing.assert_allclose(expression(z), wanted(calibrator, expression, z), atol=1e-12, rtol=0, err_msg=name)
