"""Conformal intervals of regression cover, whatever the forecast."""

import numpy as np
import pytest

from trueup.calibrators.regression import IsotonicQuantiles
from trueup.decisions import (
    ConformalQuantiles,
    ConformalResiduals,
    load_conformal,
    load_prediction_sets,
    save_conformal,
)


def draw(n, rng):
    mean, std = rng.normal(size=n), rng.uniform(0.5, 2, n)
    return mean, std / 3, mean + std * rng.standard_t(3, n)  # too sure, with long tails


def test_intervals_cover():
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(60):
        mean, std, y = draw(400, rng)
        new = draw(400, rng)
        low, high = ConformalResiduals.fit(mean, std, y, alpha=0.2).interval(*new[:2])
        residual = ((low <= new[2]) & (new[2] <= high)).mean()
        recalibrated = IsotonicQuantiles.fit(mean[:200], std[:200], y[:200])
        ends = recalibrated.quantiles(mean[200:], std[200:], levels=[0.1, 0.9])
        rule = ConformalQuantiles.fit(ends[:, 0], ends[:, 1], y[200:], alpha=0.2)
        ends = recalibrated.quantiles(*new[:2], levels=[0.1, 0.9])
        low, high = rule.interval(ends[:, 0], ends[:, 1])
        covered.append([residual, ((low <= new[2]) & (new[2] <= high)).mean()])
    assert np.abs(np.mean(covered, axis=0) - 0.8).max() < 0.02


def test_few_rows_promise_everything_and_bad_input_is_named():
    rule = ConformalQuantiles.fit([0.0], [1.0], [2.0], alpha=0.1)
    assert rule.interval([0.0], [1.0]) == (-np.inf, np.inf)
    assert type(rule)(**rule.config()).quantile == rule.quantile
    with pytest.raises(ValueError, match="std must be positive"):
        ConformalResiduals.fit([0.0], [0.0], [1.0])
    with pytest.raises(ValueError, match="low must not exceed high"):
        ConformalQuantiles.fit([1.0], [0.0], [1.0])
    narrow = ConformalQuantiles(-5.0, 0.1).interval([0.0], [1.0])
    assert narrow == (0.5, 0.5)


def test_rules_are_kept(tmp_path):
    path = tmp_path / "rule.safetensors"
    for rule in (ConformalResiduals(1.25, 0.1), ConformalQuantiles(-0.5, 0.2), ConformalQuantiles(float("inf"), 0.2)):
        save_conformal(rule, path, summary={"rows": 9})
        again = load_conformal(path)
        assert type(again) is type(rule)
        assert (float(again.quantile), again.alpha) == (float(rule.quantile), rule.alpha)
    with pytest.raises(ValueError, match="rule must be a ConformalResiduals"):
        save_conformal(object(), path)
    with pytest.raises(ValueError, match="load_conformal"):
        load_prediction_sets(path)
