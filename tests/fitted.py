"""Every method, fitted once to the same small data, for the tests that only need a fitted calibrator."""

import warnings
from functools import cache

from strategies import calibrated
from trueup import METHODS

CLASSES = 4


def sample():
    """Overconfident logits of 100 rows and four classes, with their labels."""
    return calibrated(100, CLASSES, temperature=2.0)


@cache
def fitted(method):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # how a fit ends on little data is other tests' matter
        return METHODS[method](*sample())
