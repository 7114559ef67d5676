"""What the Trainer logs equals the metrics of all rows at once."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from trueup import metrics
from trueup.integrations.transformers import TrainerMetrics

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(90, 4, generator=GENERATOR)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 1).long()


def expected(logits, labels):
    return {name: getattr(metrics, name)(logits, labels) for name in ("ece", "nll", "brier")}


def prediction(logits, labels):
    return SimpleNamespace(predictions=logits, label_ids=labels)


def test_the_trainer_gets_the_figures_of_all_rows_at_once_or_batch_by_batch():
    z, y = X.numpy(), Y.numpy()
    compute = TrainerMetrics()
    whole = compute(prediction((z, "hidden states"), y))
    assert whole == pytest.approx(expected(z, y), abs=1e-9)
    assert compute(prediction(X[:50], Y[:50]), compute_result=False) == {}
    assert compute(prediction(X[50:], Y[50:]), compute_result=True) == pytest.approx(whole, abs=1e-9)
    assert compute(prediction(z[:9], y[:9])) == pytest.approx(expected(z[:9], y[:9]), abs=1e-9)  # begun anew


def test_tokens_are_flattened_shifted_and_left_out():
    rng = np.random.default_rng(0)
    z, y = rng.normal(size=(3, 6, 4)), rng.integers(4, size=(3, 6))
    y[0, :3] = -100
    plain, moved = TrainerMetrics()(prediction(z, y)), TrainerMetrics(shifted=True)(prediction(z, y))
    rows = [(z[i, t], y[i, t]) for i in range(3) for t in range(6) if y[i, t] >= 0]
    after = [(z[i, t - 1], y[i, t]) for i in range(3) for t in range(1, 6) if y[i, t] >= 0]
    for found, wanted in ((plain, rows), (moved, after)):
        assert found == pytest.approx(expected(*(np.array(part) for part in zip(*wanted, strict=True))), abs=1e-9)
