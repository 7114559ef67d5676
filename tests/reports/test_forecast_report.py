"""The audit of forecasts, its figures and its page."""

import numpy as np
import pytest
from scipy.special import ndtri
from scipy.stats import binom

from trueup.calibrators import IsotonicQuantiles, VarianceScaling
from trueup.calibrators.forecasts import choose_recalibration
from trueup.reports import (
    Report,
    chart,
    coverage_curve,
    draw,
    numbers,
    pit_histogram,
    report_forecasts,
    summary,
)
from trueup.reports.figures.coverage_curve import binomial_band

TAU = np.array([0.05, 0.25, 0.5, 0.75, 0.95])


def forecast(n=400, factor=2.0, seed=0):
    """Targets spread `factor` times as far as forecast."""
    rng = np.random.default_rng(seed)
    mean, std = rng.normal(size=n), rng.uniform(0.5, 2, size=n)
    return mean, std, mean + factor * std * rng.normal(size=n)


@pytest.fixture(scope="module")
def narrow():
    return report_forecasts(forecast(), forecast(300, seed=1)).audit


def test_the_choice_is_made_on_rows_left_out():
    assert choose_recalibration(*forecast()).chosen == "variance"
    assert choose_recalibration(*forecast(factor=1.0, seed=1)).chosen == "raw"
    mean, std, _ = forecast(800)
    skewed = mean + std * (np.random.default_rng(2).exponential(size=800) * 2 - 0.5)
    result = choose_recalibration(mean, std, skewed)
    assert result.chosen == "quantiles"
    assert isinstance(result.recalibrator, IsotonicQuantiles)
    # By hand: the folds' own fits, row by row.
    y, losses = skewed, []
    for i in range(0, 800, 97):
        others = result.fold != result.fold[i]
        scale = float(VarianceScaling.fit(mean[others], std[others], y[others]).scale)
        q = mean[i] + std[i] * scale * ndtri(np.linspace(0.01, 0.99, 99))
        tau = np.linspace(0.01, 0.99, 99)
        losses.append(np.mean(np.maximum(tau * (y[i] - q), (tau - 1) * (y[i] - q))))
    bounds = result.bounds["variance"][result.fold]
    q = mean[:, None] + std[:, None] * bounds
    tau = np.linspace(0.01, 0.99, 99)
    every = np.maximum(tau * (y[:, None] - q), (tau - 1) * (y[:, None] - q)).mean(axis=1)
    np.testing.assert_allclose(losses, every[::97][: len(losses)], rtol=1e-9)
    assert result.losses["variance"] == pytest.approx(every.mean())


def test_weights_of_recalibrations_are_copies_of_rows():
    mean, std, y = forecast(60)
    counts = np.random.default_rng(0).integers(0, 3, size=60)
    copies = np.repeat(np.arange(60), counts)
    for kind in (VarianceScaling, IsotonicQuantiles):
        weighted = kind.fit(mean, std, y, sample_weight=counts)
        again = kind.fit(mean[copies], std[copies], y[copies])
        levels = np.array([0.2, 0.5, 0.8])
        np.testing.assert_allclose(weighted.standard_quantiles(levels), again.standard_quantiles(levels), atol=0.1)
    assert float(weighted(mean, std)[1].mean()) > 0


def test_an_audit_says_what_recalibration_changes(narrow):
    assert narrow.chosen == "variance"
    assert "too narrow" in narrow.verdict()
    assert "Chosen on held-out rows: variance scaling. The CRPS changes by -" in narrow.verdict()
    assert narrow.comparison["variance", "coverage_90"].value == pytest.approx(0.9, abs=0.06)
    assert narrow.to_dict()["comparison"]["methods"]["variance"]["change"]["crps"]["high"] < 0
    honest = report_forecasts(forecast(factor=1.0, seed=1)).audit
    assert honest.chosen == "raw"
    assert honest.cross_fitted
    assert "No recalibration predicts held-out rows better" in honest.verdict()
    certain = report_forecasts((np.zeros(30), np.zeros(30), np.ones(30))).audit
    assert "Recalibration was left out: std must be positive, got 0 at [0]" in certain.verdict()
    assert report_forecasts(([0.0], [1.0], [0.5])).audit.chosen == "raw"  # too few rows to fold
    mean, std, y = forecast(20)
    with pytest.raises(ValueError, match="test must hold forecasts of the same kind as val"):
        report_forecasts((mean, std, y), (mean[:, None] + TAU, TAU, y))


def test_the_pit_histogram_by_hand():
    record = pit_histogram(np.zeros(10), np.ones(10), np.r_[np.full(6, -3.0), np.full(4, 0.1)], bins=4)
    assert record.density.tolist() == pytest.approx([2.4, 0, 1.6, 0])
    assert record.high[0] == pytest.approx(binom.ppf(0.975, 10, 0.25) / 10 * 4)
    mean, std, y = forecast(200, 1.0)
    of_quantiles = pit_histogram(mean[:, None] + std[:, None] * ndtri(TAU), TAU, y)
    assert of_quantiles.edges.tolist() == [0, *TAU, 1]
    assert float(of_quantiles.density @ np.diff(of_quantiles.edges)) == pytest.approx(1)
    many = np.linspace(0.01, 0.99, 99)
    gathered = pit_histogram(mean[:, None] + std[:, None] * ndtri(many), many, y)
    np.testing.assert_allclose(gathered.edges, np.linspace(0, 1, 21), atol=1e-9)
    with pytest.raises(ValueError, match="bins must be a whole number"):
        pit_histogram(mean, std, y, bins=0)


@pytest.mark.parametrize("n", [1, 7, 500, 10**6])
def test_the_band_is_binomial(n):
    probs = np.array([0.01, 0.05, 0.5, 0.9, 0.999])
    low, high = binomial_band(probs, n, None, 0.95)
    np.testing.assert_allclose(low, binom.ppf(0.025, n, probs) / n)
    np.testing.assert_allclose(high, binom.ppf(0.975, n, probs) / n)


@pytest.mark.parametrize("kind", ["gaussian", "quantiles", "no pairs"])
@pytest.mark.parametrize("figure", [pit_histogram, coverage_curve])
def test_figures_are_drawn_and_told(kind, figure):
    mean, std, y = forecast(150)
    tau = TAU if kind == "quantiles" else np.array([0.2, 0.4])
    triple = (mean, std, y) if kind == "gaussian" else (mean[:, None] + std[:, None] * ndtri(tau), tau, y)
    record = figure(*triple, sample_weight=np.ones(150))
    ax = draw(record)
    ax.figure.canvas.draw()
    assert ax.get_title(loc="left")
    if figure is coverage_curve and kind == "no pairs":
        assert len(record.levels) == 0
        return
    assert len([mark for mark in chart(record).plot.marks if mark.name]) == 2
    assert "outside the band" in summary(record)
    head, rows = numbers(record)
    assert len(head) == 3
    assert len(rows) == (len(record.levels) if figure is coverage_curve else len(record.density))


def test_the_page_is_whole(narrow, tmp_path):
    Report(narrow, title="demand <b>").save(tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    assert "demand &lt;b&gt;" in page
    for name in ("pit-before", "pit-after", "coverage-before", "coverage-after"):
        assert f'id="{name}"' in page
    assert "Variance scaling" in page
    assert "default-src 'none'" in page.replace("&#39;", "'")
    mean, std, y = forecast(100)
    plain = report_forecasts((mean[:, None] + std[:, None] * ndtri([0.2, 0.4]), [0.2, 0.4], y)).html()
    assert 'id="coverage"' not in plain
    assert "evaluate_forecasts(quantiles, levels, targets)" in plain
