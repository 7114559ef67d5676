"""Predictions, and the command line asked to do something with them."""

import numpy as np
from typer.testing import CliRunner

from trueup.cli import app


def overconfident(rows, seed=0):
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(rows, 3))
    return 3 * z, (z + rng.gumbel(size=z.shape)).argmax(axis=1)


def invoke(*words):
    return CliRunner().invoke(app, [str(word) for word in words])
