"""Callbacks of one's own training loop."""

import numpy as np
import pytest
import torch
from torch import nn

from trueup.calibrators import refinement
from trueup.models import EarlyStopping, LearnedEpochs


def pairs(n=900):
    rng = np.random.default_rng(0)
    z = 2 * rng.normal(size=(n, 3))
    y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
    return z, y


def test_what_a_temperature_repairs_is_no_reason_to_stop():
    z, y = pairs()
    worse = np.where(np.arange(len(z))[:, None] % 4 == 0, -0.2 * z, 0.2 * z)
    epochs = [worse, 8 * z, 9 * z]  # more accurate, and overconfident
    plain, refined = EarlyStopping("nll", patience=1), EarlyStopping("refinement", patience=1)
    model = nn.Linear(2, 2)
    stopped = []
    for epoch in epochs:
        with torch.no_grad():
            model.weight.fill_(len(stopped))
        stopped.append((plain.update(model, epoch, y), refined.update(model, epoch, y)))
    assert stopped[1] == (True, False)
    assert refined.best_epoch >= 2
    assert refined.scores[1] == pytest.approx(refinement(epochs[1], y).refinement)
    assert float(plain.restore(model).weight.detach().mean()) == 0
    with pytest.raises(ValueError, match='stop_on must be "nll" or "refinement"'):
        EarlyStopping("ece")


def test_samples_are_learned_when_they_stay_right():
    tracker, y = LearnedEpochs(), torch.tensor([0, 1, 1])
    for predicted in ([0, 0, 1], [1, 1, 1], [0, 1, 0]):
        tracker.update(torch.eye(2)[torch.tensor(predicted)].requires_grad_(), y)
    np.testing.assert_array_equal(tracker.epochs(), [3, 2, np.inf])
