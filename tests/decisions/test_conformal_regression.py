"""Conformal intervals of regression cover, whatever the forecast."""

import numpy as np
import pytest

from trueup import load, save
from trueup.calibrators import IsotonicQuantiles
from trueup.decisions import ConformalQuantiles, ConformalResiduals
from trueup.io import load_artifact


def draw(n, rng):
    mean, std = rng.normal(size=n), rng.uniform(0.5, 2, n)
    return mean, std / 3, mean + std * rng.standard_t(3, n)  # too sure, with long tails


def test_intervals_cover():
    rng = np.random.default_rng(0)
    covered = []
    for _ in range(60):
        mean, std, y = draw(400, rng)
        new = draw(400, rng)
        low, high = ConformalResiduals.fit(mean, std, y, coverage=0.8).interval(*new[:2])
        residual = ((low <= new[2]) & (new[2] <= high)).mean()
        recalibrated = IsotonicQuantiles.fit(mean[:200], std[:200], y[:200])
        ends = recalibrated.quantiles(mean[200:], std[200:], levels=[0.1, 0.9])
        rule = ConformalQuantiles.fit(ends[:, 0], ends[:, 1], y[200:], coverage=0.8)
        ends = recalibrated.quantiles(*new[:2], levels=[0.1, 0.9])
        low, high = rule.interval(ends[:, 0], ends[:, 1])
        covered.append([residual, ((low <= new[2]) & (new[2] <= high)).mean()])
    assert np.abs(np.mean(covered, axis=0) - 0.8).max() < 0.02


def test_few_rows_promise_everything_and_bad_input_is_named():
    rule = ConformalQuantiles.fit([0.0], [1.0], [2.0], coverage=0.9)
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
        save(rule, path, summary={"rows": 9})
        again = load(path)
        assert type(again) is type(rule)
        assert (again.quantile, again.coverage) == (rule.quantile, rule.coverage)
    with pytest.raises(ValueError, match="obj must be predictions or one of trueup's own: .*, got object"):
        save(object(), path)
    with pytest.raises(ValueError, match="reads a rule of conformal intervals"):
        load_artifact(path, "calibrator")
