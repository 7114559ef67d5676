"""Ours against the peers on the same data; where they differ, a slow loop over the definition says who is right.

A test whose peer is absent is skipped, saying so.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import ndtr, ndtri

import peers
from trueup import metrics
from trueup.metrics import regression

# The peers divide by empty bins and call what NumPy and torch have deprecated; none of that is ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore")


def need(package: str) -> Any:
    reason = peers.absence(package)
    if reason is not None:
        pytest.skip(f"{package} is absent: {reason}")
    return peers.module(package)


def classifier(n: int = 3000, classes: int = 10, *, sharpness: float = 1.7, seed: int = 0) -> tuple[Any, Any]:
    """Logits in float64 of a classifier that is mostly right, and its labels."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, classes))
    labels = rng.integers(0, classes, n)
    logits[np.arange(n), labels] += 2.0
    return sharpness * logits, labels


def softmax(logits: Any) -> Any:
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    return shifted / shifted.sum(axis=1, keepdims=True)


def top(logits: Any, labels: Any) -> tuple[Any, Any]:
    probs = softmax(logits)
    return probs.max(axis=1), (probs.argmax(axis=1) == labels).astype(float)


def with_confidence(confidence: Any, correct: Any, classes: int = 4) -> tuple[Any, Any]:
    """Logits whose first class has the given confidence, with labels that make it right or wrong as told."""
    c = np.asarray(confidence, dtype=float)
    rest = np.repeat(((1 - c) / (classes - 1))[:, None], classes - 1, axis=1)
    with np.errstate(divide="ignore"):
        logits = np.log(np.concatenate([c[:, None], rest], axis=1))
    return np.maximum(logits, -1e4), np.where(np.asarray(correct) == 1, 0, 1)


def slow_ece(confidence: Any, correct: Any, bins: int) -> float:
    """The definition of Guo et al.: bin b holds the confidences in ((b − 1)/B, b/B]."""
    total = 0.0
    for b in range(1, bins + 1):
        inside = [(c, a) for c, a in zip(confidence, correct, strict=True) if (b - 1) / bins < c <= b / bins]
        total += abs(sum(a - c for c, a in inside))
    return total / len(confidence)


def as_torch(logits: Any, labels: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(logits).float(), torch.from_numpy(labels)


EQUAL_MASS_BY_INTERPOLATION = {"netcal", "mapie"}
"""Their equal-mass edges are interpolated quantiles, which put a few rows next to an edge on its other side."""


@pytest.mark.parametrize(("metric", "package"), [(m, p) for m in ("ece", "aece", "sce") for p in peers.METRICS[m]])
@pytest.mark.parametrize("size", [(3000, 10), (2000, 100)])
def test_binned_errors_agree_with_every_peer_away_from_edges(metric: str, package: str, size: tuple[int, int]) -> None:
    need(package)
    logits, labels = as_torch(*classifier(*size))
    theirs = peers.METRICS[metric][package](logits, labels)
    loose = metric == "aece" and package in EQUAL_MASS_BY_INTERPOLATION
    assert getattr(metrics, metric)(logits, labels) == pytest.approx(theirs, abs=2e-3 if loose else 2e-6)


def test_ece_at_an_inner_edge_follows_the_definition_and_torchmetrics_does_not() -> None:
    peer = need("torchmetrics")
    confidence, correct = np.array([0.5, 0.5, 0.45, 0.55]), np.array([1, 1, 0, 0])
    logits, labels = with_confidence(confidence, correct)
    ours = metrics.ece(logits, labels, bins=10)
    probs = torch.from_numpy(softmax(logits))
    theirs = float(peer.multiclass_calibration_error(probs, torch.from_numpy(labels), 4, n_bins=10))
    # (0.4, 0.5] holds 0.45, 0.5, 0.5 with two right: |2 − 1.45|; (0.5, 0.6] holds 0.55: |0 − 0.55|.
    assert ours == pytest.approx((0.55 + 0.55) / 4)
    assert slow_ece(confidence, correct, 10) == pytest.approx(ours)
    # Closed on the left instead, 0.5 joins 0.55: |0 − 0.45| and |2 − 1.55|.
    assert theirs == pytest.approx((0.45 + 0.45) / 4, abs=1e-6)
    assert metrics.ece(logits, labels, bins=10, closed="left") == pytest.approx(theirs, abs=1e-6)


def test_ece_of_certain_predictions_follows_the_definition_and_torchmetrics_does_not() -> None:
    peer = need("torchmetrics")
    confidence, correct = np.array([1.0, 0.95, 0.95]), np.array([0, 1, 1])
    logits, labels = with_confidence(confidence, correct)
    ours = metrics.ece(logits, labels, bins=15)
    probs = torch.from_numpy(softmax(logits))
    theirs = float(peer.multiclass_calibration_error(probs, torch.from_numpy(labels), 4, n_bins=15))
    # All three lie in the last bin, (14/15, 1].
    assert ours == pytest.approx(abs(2 - 2.9) / 3)
    assert slow_ece(confidence, correct, 15) == pytest.approx(ours)
    # torchmetrics keeps a sixteenth bin for confidence 1 alone: |0 − 1| and |2 − 1.9|.
    assert theirs == pytest.approx((1 + 0.1) / 3, abs=1e-6)
    assert metrics.ece(logits, labels, bins=15, compat="torchmetrics") == pytest.approx(theirs, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_debiased_l2_equals_uncertainty_calibration(seed: int) -> None:
    peer = need("uncertainty-calibration")
    logits, labels = classifier(seed=seed)
    probs = softmax(logits)
    theirs = peer.lower_bound_scaling_top_ce(probs, labels, p=2, debias=True, num_bins=15)
    assert metrics.debiased_l2(logits, labels) == pytest.approx(theirs, abs=1e-10)
    theirs = peer.lower_bound_scaling_ce(probs, labels, p=2, debias=True, num_bins=15, mode="marginal")
    assert metrics.debiased_l2(logits, labels, classwise=True) == pytest.approx(theirs, abs=1e-9)


def slow_debiased_l2(confidence: Any, correct: Any, sizes: Any) -> float:
    """The estimator of Kumar et al., for chunks of these sizes of the rows in the order of their confidences."""
    rows = sorted(zip(confidence.tolist(), correct.tolist(), strict=True))
    square, start = 0.0, 0
    for size in sizes:
        chunk = rows[start : start + size]
        start += size
        conf, acc = (sum(column) / size for column in zip(*chunk, strict=True))
        square += size / len(rows) * ((conf - acc) ** 2 - acc * (1 - acc) / (size - 1))
    return math.sqrt(max(square, 0.0))


@pytest.mark.parametrize("n", [4000, 4500])
def test_debiased_l2_of_calibrated_data_equals_uncertainty_calibration(n: int) -> None:
    peer = need("uncertainty-calibration")
    rng = np.random.default_rng(3)
    logits = 2 * rng.normal(size=(n, 5))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    theirs = peer.lower_bound_scaling_top_ce(softmax(logits), labels, p=2, debias=True, num_bins=15)
    biased = peer.lower_bound_scaling_top_ce(softmax(logits), labels, p=2, debias=False, num_bins=15)
    ours = metrics.debiased_l2(logits, labels)
    # Both follow the formula. If 15 does not divide the rows, some bins have a row more: ours are spread over the
    # range, as weights need it, and theirs come first. On 4,000 rows that changes 0.01816 into 0.01846.
    spread = np.bincount(15 * np.arange(n) // n)
    first = [len(chunk) for chunk in np.array_split(np.arange(n), 15)]
    assert ours == pytest.approx(slow_debiased_l2(*top(logits, labels), spread), abs=1e-9)
    assert theirs == pytest.approx(slow_debiased_l2(*top(logits, labels), first), abs=1e-9)
    assert (ours == pytest.approx(theirs, abs=1e-9)) == (n % 15 == 0)
    assert ours < 0.75 * biased


def test_debiased_l2_keeps_ties_together_as_uncertainty_calibration_does() -> None:
    peer = need("uncertainty-calibration")
    rng = np.random.default_rng(5)
    confidence = rng.choice([0.4, 0.55, 0.7, 0.9], size=400, p=[0.1, 0.2, 0.3, 0.4])
    logits, labels = with_confidence(confidence, rng.random(400) < confidence - 0.1)
    # The peer sees the four values themselves: through a softmax they would come back split by rounding.
    theirs = peer.lower_bound_scaling_ce(confidence, (labels == 0).astype(int), p=2, debias=True, num_bins=15)
    assert metrics.debiased_l2(logits, labels) == pytest.approx(theirs, abs=1e-10)


@pytest.mark.parametrize("sharpness", [0.8, 1.7])
def test_debiased_l1_is_the_limit_of_uncertainty_calibrations_simulation(sharpness: float) -> None:
    peer = need("uncertainty-calibration")
    logits, labels = classifier(1500, sharpness=sharpness)
    confidence, correct = top(logits, labels)
    gaps, noise, plugin = [], [], 0.0
    for chunk in np.array_split(np.argsort(confidence, kind="stable"), 15):
        acc, conf, share = correct[chunk].mean(), confidence[chunk].mean(), len(chunk) / len(confidence)
        gaps.append((share, acc - conf, math.sqrt(acc * (1 - acc) / len(chunk))))
        plugin += share * abs(acc - conf)
        noise.append(share * gaps[-1][2])
    # The mean of |N(m, s²)| is known, so nothing need be simulated.
    again = sum(
        w * (s * math.sqrt(2 / math.pi) * math.exp(-((m / s) ** 2) / 2) + m * (1 - 2 * ndtr(-m / s)))
        for w, m, s in gaps
    )
    ours = metrics.debiased_l1(logits, labels)
    assert ours == pytest.approx(2 * plugin - again, abs=1e-12)
    state = np.random.get_state()  # noqa: NPY002 — the peer draws from the global generator
    np.random.seed(0)  # noqa: NPY002
    theirs = peer.lower_bound_scaling_top_ce(softmax(logits), labels, p=1, debias=True, num_bins=15)
    np.random.set_state(state)  # noqa: NPY002
    # Four standard errors of the mean of its thousand draws (folding a Gaussian never widens it).
    assert theirs == pytest.approx(ours, abs=4 * math.sqrt(sum(s * s for s in noise) / 1000))


def slow_smooth_ece_at(confidence: Any, correct: Any, sigma: float, *, reach: float = math.inf) -> float:
    """∫|r_σ| by the midpoint rule, with the Gaussian (nothing of it beyond `reach`) and its images in the mirrors."""
    t = (np.arange(2000) + 0.5) / 2000
    density, smoothed = np.zeros_like(t), np.zeros_like(t)
    for c, a in zip(confidence, correct, strict=True):
        for image in [2 * k + sign * c for k in range(-2, 3) for sign in (1, -1)]:
            kernel = np.exp(-(((t - image) / sigma) ** 2) / 2) * (np.abs(t - image) <= reach)
            density += kernel
            smoothed += (c - a) * kernel
    return float(np.abs(smoothed).sum() / density.sum())


def slow_smooth_ece(confidence: Any, correct: Any, *, reach: float = math.inf) -> float:
    """The σ at which ∫|r_σ| = σ, by halving."""
    low, high = 0.0, 1.0
    for _ in range(18):
        sigma = (low + high) / 2
        above = slow_smooth_ece_at(confidence, correct, sigma, reach=reach) > sigma
        low, high = (sigma, high) if above else (low, sigma)
    return high


def contrary(n: int, by: float, seed: int = 0) -> tuple[Any, Any]:
    """A classifier too modest when unsure and too bold when sure, so that it matters how far residuals are smoothed."""
    rng = np.random.default_rng(seed)
    confidence = rng.uniform(0.3, 0.95, n)
    return with_confidence(confidence, rng.random(n) < confidence + np.where(confidence < 0.6, by, -by))


@pytest.mark.parametrize("data", [classifier(), classifier(sharpness=0.5), contrary(3000, 0.1), contrary(3000, 0.15)])
def test_smooth_ece_agrees_with_relplot_to_its_resolution(data: tuple[Any, Any]) -> None:
    peer = need("relplot")
    # relplot halves [0, 1] ten times and stops: its scale is known to a thousandth.
    assert metrics.smooth_ece(*data) == pytest.approx(peer.smECE(*top(*data)), abs=1.5e-3)


def test_smooth_ece_follows_the_definition_also_at_large_scales_where_relplot_cuts_its_kernel() -> None:
    peer = need("relplot")
    logits, labels = contrary(80, 0.6)
    confidence, correct = top(logits, labels)
    exact = slow_smooth_ece(confidence, correct)
    assert metrics.smooth_ece(logits, labels) == pytest.approx(exact, abs=1e-5)
    # relplot's Gaussian ends at ±½, here some two σ: too narrow, it lets less of the two errors cancel.
    theirs = peer.smECE(confidence, correct)
    assert theirs > exact + 5e-3
    assert theirs == pytest.approx(slow_smooth_ece(confidence, correct, reach=0.5), abs=1.5e-3)


def test_smooth_ece_of_certain_mistakes_is_whole_and_relplot_halves_them() -> None:
    peer = need("relplot")
    confidence, correct = np.array([1.0, 0.6]), np.array([0.0, 0.0])
    # All residuals have one sign and the kernel integrates to 1, so at any scale ∫|r_σ| is their mean.
    exact = (1.0 + 0.6) / 2
    assert slow_smooth_ece_at(confidence, correct, 0.2) == pytest.approx(exact, abs=1e-6)
    assert metrics.smooth_ece(*with_confidence(confidence, correct)) == pytest.approx(exact, abs=1e-6)
    # relplot mirrors its mesh about the last point without repeating it: what lies at 1 gets no image of itself, and
    # the half that is left counts half in numerator and denominator.
    assert peer.smECE(confidence, correct) == pytest.approx((0.5 * 1.0 + 0.6) / 1.5, abs=2e-3)


def scaled_ks(peer: Any, confidence: Any, correct: Any) -> float:
    """MAPIE divides the largest drift by its standard deviation under calibration; take that off."""
    return float(peer.kolmogorov_smirnov_statistic(correct, confidence) * peer.length_scale(confidence))


@pytest.mark.parametrize("seed", range(3))
def test_ks_equals_mapie_without_ties(seed: int) -> None:
    peer = need("mapie")
    logits, labels = classifier(seed=seed)
    # MAPIE jitters the scores by 1e-8 of themselves.
    assert metrics.ks(logits, labels) == pytest.approx(scaled_ks(peer, *top(logits, labels)), abs=1e-7)


def test_ks_of_ties_does_not_depend_on_their_order_and_mapies_does() -> None:
    peer = need("mapie")
    confidence, correct = np.full(40, 0.5), np.repeat([1.0, 0.0], 20)
    answers = {round(scaled_ks(peer, confidence, c), 9) for c in (correct, correct[::-1], np.tile([1.0, 0.0], 20))}
    assert len(answers) > 1
    # As a function of the score, Σ_{c ≤ t} (a − c) jumps once, at t = ½, from 0 to 0: half of them were right.
    for order in (correct, correct[::-1]):
        assert metrics.ks(*with_confidence(confidence, order)) == pytest.approx(0.0, abs=1e-12)
    assert min(answers) > 0


def test_nll_and_brier_equal_scikit_learn() -> None:
    peer = need("scikit-learn")
    logits, labels = classifier()
    probs, classes = softmax(logits), range(logits.shape[1])
    assert metrics.nll(logits, labels) == pytest.approx(peer.log_loss(labels, probs, labels=classes), abs=1e-12)
    theirs = peer.brier_score_loss(labels, probs, labels=classes, scale_by_half=False)
    assert metrics.brier(logits, labels) == pytest.approx(theirs, abs=1e-12)


def test_binary_brier_is_twice_scikit_learns_default() -> None:
    peer = need("scikit-learn")
    logits, labels = classifier(500, 2)
    theirs = peer.brier_score_loss(labels, softmax(logits)[:, 1])
    # Σ_k (p_k − e_k)² counts the error of both classes, and they are equal.
    assert metrics.brier(logits, labels) == pytest.approx(2 * theirs, abs=1e-12)


def test_nll_of_a_confident_mistake_is_exact_and_scikit_learns_is_clipped() -> None:
    peer = need("scikit-learn")
    logits, labels = np.array([[100.0, 0.0, 0.0], [2.0, 0.0, 0.0]]), np.array([1, 0])
    exact = (100 + math.log(1 + 2 * math.exp(-100)) - 2 + math.log(math.exp(2) + 2)) / 2
    assert metrics.nll(logits, labels) == pytest.approx(exact, rel=1e-12)
    # e^−100 is a fine number, but log_loss raises it to the spacing of floats at 1 and so forgives two thirds of it.
    theirs = peer.log_loss(labels, softmax(logits), labels=[0, 1, 2])
    assert theirs == pytest.approx((-math.log(np.finfo(float).eps) - 2 + math.log(math.exp(2) + 2)) / 2)


def forecasts(n: int = 500, *, doubt: float = 1.0, seed: int = 0) -> tuple[Any, Any, Any]:
    """Means, standard deviations (true ones times `doubt`) and skewed targets."""
    rng = np.random.default_rng(seed)
    mean, std = rng.normal(size=n), np.exp(0.4 * rng.normal(size=n))
    return mean, doubt * std, mean + std * (rng.exponential(size=n) - 1)


@pytest.mark.parametrize("doubt", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ("gaussian_nll", "nll_gaussian"),
        ("crps", "crps_gaussian"),
        ("miscalibration_area", "miscalibration_area"),
        ("mean_calibration_error", "mean_absolute_calibration_error"),
        ("rms_calibration_error", "root_mean_squared_calibration_error"),
    ],
)
def test_regression_equals_uncertainty_toolbox(ours: str, theirs: str, doubt: float) -> None:
    peer = need("uncertainty-toolbox")
    mean, std, targets = forecasts(doubt=doubt)
    assert getattr(regression, ours)(mean, std, targets) == pytest.approx(
        getattr(peer, theirs)(mean, std, targets), abs=1e-12
    )


def test_sharpness_and_rmse_equal_uncertainty_toolbox() -> None:
    peer = need("uncertainty-toolbox")
    mean, std, targets = forecasts()
    assert regression.sharpness(mean, std, targets) == pytest.approx(peer.sharpness(std), abs=1e-12)
    assert regression.rmse(mean, std, targets) == pytest.approx(
        peer.prediction_error_metrics(mean, targets)["rmse"], abs=1e-12
    )


@pytest.mark.parametrize("level", [0.1, 0.5, 0.95])
def test_coverage_equals_uncertainty_toolbox(level: float) -> None:
    peer = need("uncertainty-toolbox")
    mean, std, targets = forecasts()
    theirs = peer.get_proportion_in_interval(mean, std, targets, level)
    assert regression.coverage(mean, std, targets, level=level) == pytest.approx(theirs, abs=1e-12)


def test_quantile_shares_are_below_the_quantile_and_uncertainty_toolboxs_are_mirrored() -> None:
    peer = need("uncertainty-toolbox")
    mean, std, targets = forecasts()
    levels, theirs = peer.get_proportion_lists_vectorized(mean, std, targets, num_bins=21, prop_type="quantile")
    ours = regression.quantile_calibration(mean, std, targets, levels=levels)
    for q, share in zip(levels, ours, strict=True):
        below = sum(y <= m + ndtri(q) * s for m, s, y in zip(mean, std, targets, strict=True))
        assert share == pytest.approx(below / len(mean), abs=1e-12)
    # The toolbox counts μ − y ≤ Φ⁻¹(q)σ, the share above the quantile of level 1 − q: of skewed targets another number,
    # though the gaps to the diagonal are the same ones in reverse.
    assert np.abs(ours - theirs).max() > 0.05
    assert np.allclose(ours, 1 - theirs[::-1], atol=1e-12)
