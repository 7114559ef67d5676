"""Density ratio and bin-mean-shift against slow loops; proximity that matters; the edges of small samples."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optional import torch
from reference import top_label
from strategies import calibrated
from trueup import metrics
from trueup.calibrators import BinMeanShift, DensityRatio
from trueup.metrics.proximity import proximity


def slow_proximity(row, others, k, rule):
    unit = [v / np.linalg.norm(v) for v in others]
    u = row / np.linalg.norm(row)
    distances = sorted(float(np.linalg.norm(u - v)) for v in unit)[:k]
    return math.exp(-np.mean(distances)) if rule == "distance" else np.mean([math.exp(-(d**2)) for d in distances])


def slow_points(logits, labels, features, k, rule):
    confidence, correct = top_label(logits, labels)
    near = [slow_proximity(features[i], np.delete(features, i, axis=0), k, rule) for i in range(len(features))]
    return confidence, np.array(near), correct


def slow_density(c, d, points, mirrored):
    m = len(points)
    h = [max(1.06 * np.std(points[:, j], ddof=1) * m ** (-1 / 6), 1e-3) for j in (0, 1)]
    total = 0.0
    for pc, pd in points:
        for centre in (pc, -pc, 2 - pc) if mirrored else (pc,):
            exponent = ((c - centre) / h[0]) ** 2 / 2 + ((d - pd) / h[1]) ** 2 / 2
            total += math.exp(-exponent) / (2 * math.pi * h[0] * h[1])
    return total / m


def slow_ratio(c, d, correct, wrong, mirrored):
    n = len(correct) + len(wrong)
    if min(len(correct), len(wrong)) < 2:
        return np.clip(len(correct) / n, 1 / (n + 2), 1 - 1 / (n + 2))
    f1, f0 = slow_density(c, d, correct, mirrored), slow_density(c, d, wrong, mirrored)
    rho = len(wrong) / len(correct)
    if len(correct) / n * (f1 + rho * f0) < 1e-10:
        return c
    return np.clip(f1 / (f1 + rho * f0), 1 / (n + 2), 1 - 1 / (n + 2))


def sample(seed, n=25, classes=3, width=4):
    logits, labels = calibrated(n, classes, temperature=2.0, seed=seed)
    rng = np.random.default_rng(seed)
    return logits, labels, rng.normal(size=(n, width)), rng.normal(size=(7, classes)) * 2, rng.normal(size=(7, width))


@settings(max_examples=15)
@given(st.integers(0, 1000), st.booleans(), st.sampled_from(["distance", "similarity"]))
def test_density_ratio_equals_the_slow_loop(seed, mirrored, rule):
    logits, labels, features, fresh, fresh_features = sample(seed)
    ratio = DensityRatio.fit(logits, labels, features=features, neighbours=3, rule=rule, mirrored=mirrored)
    c, near, hit = slow_points(logits, labels, features, 3, rule)
    points = np.stack([c, near], axis=1)
    confidence, _ = top_label(fresh, np.zeros(7, dtype=int))
    slow = [
        slow_ratio(
            confidence[i],
            slow_proximity(fresh_features[i], features, 3, rule),
            points[hit == 1],
            points[hit == 0],
            mirrored,
        )
        for i in range(7)
    ]
    assert ratio.confidence(fresh, features=fresh_features) == pytest.approx(slow, abs=1e-9)


@settings(max_examples=15)
@given(st.integers(0, 1000))
def test_bin_mean_shift_equals_the_slow_loop(seed):
    logits, labels, features, fresh, fresh_features = sample(seed, n=80)
    shift = BinMeanShift.fit(logits, labels, features=features, neighbours=3, bins=2, proximity_bins=2)
    c, near, hit = slow_points(logits, labels, features, 3, "distance")
    ordered = np.sort(near)
    cut = (ordered[39] + ordered[40]) / 2
    confidence, _ = top_label(fresh, np.zeros(7, dtype=int))
    for i in range(7):
        d = slow_proximity(fresh_features[i], features, 3, "distance")
        members = [j for j in range(80) if (near[j] > cut) == (d > cut) and (c[j] > 0.5) == (confidence[i] > 0.5)]
        gap = np.mean([hit[j] - c[j] for j in members]) if members else 0.0
        weight = 1.0 if len(members) >= 30 else len(members) / (len(members) + 30)
        wanted = np.clip(confidence[i] + weight * gap, min(confidence[i], 1 / 82), max(confidence[i], 81 / 82))
        assert shift.confidence(fresh, features=fresh_features)[i] == pytest.approx(wanted, abs=1e-9)


def far_and_near(n, seed=0):
    """A network as sure far out as in the dense region, where alone it is right."""
    rng = np.random.default_rng(seed)
    dense = rng.random(n) < 0.6
    features = np.where(dense[:, None], 1 + 0.05 * rng.normal(size=(n, 8)), rng.normal(size=(n, 8)))
    logits = np.stack([rng.normal(2, 0.5, n), np.zeros(n), np.zeros(n)], axis=1)
    labels = np.where(rng.random(n) < np.where(dense, 0.95, 0.5), 0, rng.integers(1, 3, n))
    return logits, labels, features, dense


@pytest.mark.parametrize("method", [DensityRatio, BinMeanShift])
def test_what_lies_far_out_is_trusted_less(method):
    logits, labels, features, _ = far_and_near(3000)
    fitted = method.fit(logits, labels, features=features)
    fresh, fresh_labels, fresh_features, dense = far_and_near(3000, seed=1)
    confidence = fitted.confidence(fresh, features=fresh_features)
    assert confidence[dense].mean() == pytest.approx(0.95, abs=0.03)
    assert confidence[~dense].mean() == pytest.approx(0.5, abs=0.06)
    after = fitted(fresh, features=fresh_features)
    assert np.exp(after.max(axis=1)) == pytest.approx(np.maximum(confidence, 1.00001 / 3), abs=1e-9)
    assert metrics.nll(after, fresh_labels) < metrics.nll(fresh, fresh_labels) - 0.05
    blind = method.fit(logits, labels)  # logits say nothing of the distance here
    assert metrics.nll(after, fresh_labels) < metrics.nll(blind(fresh), fresh_labels) - 0.05


def test_without_errors_the_accuracy_is_all_there_is():
    logits, _ = calibrated(20, 3)
    labels = logits.argmax(axis=1)
    assert DensityRatio.fit(logits, labels).confidence(logits) == pytest.approx(21 / 22)
    labels[0] = (labels[0] + 1) % 3
    assert DensityRatio.fit(logits, labels).confidence(logits) == pytest.approx(19 / 20)


def test_where_no_sample_is_near_the_confidence_stays():
    ratio = DensityRatio(np.eye(2), [[0.9, 0.9], [0.92, 0.9]], [[0.8, 0.9], [0.82, 0.9]], neighbours=1)
    assert ratio.confidence([[0.0, 0.1]], features=[[1.0, 0.0]]) == pytest.approx(1 / (1 + math.exp(-0.1)))


def test_no_shift_leads_to_certainty():
    shift = BinMeanShift(np.eye(2), [[0.5]], [0.0, 1.0], [0.0, 1.0], neighbours=1)
    odds = [[0.0, 1.0], [0.0, 30.0]]
    wanted = [0.75, 1 / (1 + math.exp(-30))]  # of two samples; what was surer already stays
    assert shift.confidence(odds, features=np.eye(2)) == pytest.approx(wanted)


@pytest.mark.parametrize("method", [DensityRatio, BinMeanShift])
def test_features_are_asked_for_as_in_the_fit(method):
    logits, labels, features, fresh, fresh_features = sample(0)
    with_features, without = method.fit(logits, labels, features=features), method.fit(logits, labels)
    with pytest.raises(ValueError, match="features must be given, as to the fit"):
        with_features(fresh)
    with pytest.raises(ValueError, match="features must be left out, as they were left out of the fit"):
        without.confidence(fresh, features=fresh_features)
    with pytest.raises(ValueError, match=r"features must have shape \(7, 4\), as in the fit, got \(7, 3\)"):
        with_features(fresh, features=fresh_features[:, :3])
    with pytest.raises(ValueError, match="logits must have at least 11 rows, got 10"):
        method.fit(logits[:10], labels[:10])
    with pytest.raises(ValueError, match=r"features must have shape \(25, width\), got \(24, 4\)"):
        method.fit(logits, labels, features=features[1:])
    as_torch = with_features(torch.as_tensor(fresh), features=torch.as_tensor(fresh_features))
    assert as_torch.numpy() == pytest.approx(with_features(fresh, features=fresh_features))


@pytest.mark.parametrize("method", [DensityRatio, BinMeanShift])
def test_config_rebuilds_and_gradients_are_finite_at_the_samples_themselves(method):
    logits, labels, features, _, _ = sample(0)
    fitted = method.fit(logits, labels, features=features)
    assert (method(**fitted.config())(logits, features=features) == fitted(logits, features=features)).all()
    z, x = torch.tensor(logits, requires_grad=True), torch.tensor(features, requires_grad=True)
    fitted(z, features=x).square().sum().backward()
    assert bool(torch.isfinite(z.grad).all() and z.grad.abs().sum() > 0)
    if method is DensityRatio:  # the other knows of proximity only the bin
        assert bool(torch.isfinite(x.grad).all() and x.grad.abs().sum() > 0)


def test_blocks_change_nothing(monkeypatch):
    logits, labels, features, fresh, fresh_features = sample(3, n=60)
    ratio = DensityRatio.fit(logits, labels, features=features)
    whole, near = ratio(fresh, features=fresh_features), proximity(features)
    monkeypatch.setattr("trueup._core.native.LARGE_CHUNK", 50)
    assert ratio(fresh, features=fresh_features) == pytest.approx(whole)
    monkeypatch.setattr("trueup._core.native.DEFAULT_CHUNK", 50)
    assert proximity(features) == pytest.approx(near)


def test_wrong_parameters_are_named():
    with pytest.raises(ValueError, match="shift must have shape"):
        BinMeanShift(np.eye(2), [[0.5, 0.1]], [0.0, 1.0], [0.0, 1.0], neighbours=1)
    with pytest.raises(ValueError, match="correct must have shape"):
        DensityRatio(np.eye(2), np.zeros(3), np.zeros((3, 2)), neighbours=1)
    with pytest.raises(ValueError, match='rule must be "distance" or "similarity"'):
        DensityRatio.fit(*calibrated(20, 3), rule="nearest")


def test_real_predictions_get_better(data):
    with np.load(data / "logits" / "cifar10_densenet40.npz") as file:
        val, test = ((file[f"{half}_logits"], file[f"{half}_labels"]) for half in ("val", "test"))
    for method, ece in ((DensityRatio, 0.035), (BinMeanShift, 0.018)):
        after = method.fit(*val)(test[0][::4])
        assert metrics.nll(after, test[1][::4]) < metrics.nll(test[0][::4], test[1][::4]) - 0.1
        assert metrics.ece(after, test[1][::4]) < ece + 0.004
