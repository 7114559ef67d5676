import math

import numpy as np
import pytest
import torch

from strategies import calibrated
from trueup.models import ShiftRow, by_severity
from trueup.reports import style
from trueup_studies.ablation import AblationRow
from trueup_studies.figures import draw, fill_style, gamma_sweep, max_logits, shift_curves, starts


def fitted(start="random", gamma=1.0, ece=0.02, entropy=0.5, loss=0.3, seed=0):
    return AblationRow(start, 0.9, entropy, 0.3, ece, 0.02, 0.01, 1.2, 0.1, gamma, loss, seed)


def test_gammas_rise_and_seeds_are_averaged():
    rows = [
        fitted(gamma=1, ece=0.04, seed=0),
        fitted(gamma=1, ece=0.06, seed=1),
        fitted(gamma=0.5, entropy=0.25, loss=9),
    ]
    record = gamma_sweep(rows)
    np.testing.assert_array_equal(record.gammas, [0.5, 1])
    np.testing.assert_allclose(record.ece, [0.02, 0.05])
    np.testing.assert_allclose(record.entropy, [0.25, 0.5])
    np.testing.assert_allclose(record.loss, [9, 0.3])


def test_starts_keep_their_order_and_every_seed():
    record = starts([fitted("random", loss=3), fitted("data", loss=1), fitted("random", loss=2)], "loss")
    assert record.names == ("random", "data")
    assert [found.tolist() for found in record.values] == [[3, 2], [1]]
    assert record.metric == "loss"


def test_curves_of_methods_are_means_over_corruptions():
    rows = [ShiftRow(c, s, 0.9, 0.3, 0.1 * s * k, 0.5) for k, c in enumerate(("haze", "jpeg")) for s in (0, 1, 2)]
    record = shift_curves({"raw": rows, "scaled": rows[:3]})
    np.testing.assert_allclose(record.series["raw"], [row.ece for row in by_severity(rows)])
    np.testing.assert_allclose(record.series["scaled"], [0, 0, 0])


def test_what_was_not_measured_is_nan():
    rows = {"raw": [ShiftRow("haze", 1, 0.9, 0.3, 0.1, 0.5)], "other": [ShiftRow("haze", 2, 0.9, 0.3, 0.2, 0.5)]}
    np.testing.assert_array_equal(shift_curves(rows).series["raw"], [0.1, np.nan])
    assert shift_curves({}).series == {}


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: starts([fitted()], "speed"), "metric must be one of accuracy, .* got 'speed'"),
        (lambda: starts([fitted()], "method"), "metric must be one of accuracy, .* got 'method'"),
        (lambda: shift_curves(shifted(1), "speed"), "metric must be one of .* got 'speed'"),
    ],
)
def test_what_is_wrong_is_said(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def shifted(curves, severities=range(6)):
    return {
        f"curve {c}": [ShiftRow("haze", s, 0.9, 0.3, 0.02 + 0.01 * c * s, 0.5) for s in severities]
        for c in range(curves)
    }


LOGITS, LABELS = calibrated(400, 4, temperature=2.0)
RECORDS = {
    "greatest logits": lambda: max_logits(LOGITS, np.where(LABELS == 3, np.inf, 1 + np.arange(400) % 9)),
    "greatest logits, one band": lambda: max_logits(LOGITS[:5], [np.inf] * 5),
    "gammas": lambda: gamma_sweep([fitted(gamma=g / 5, ece=0.01 * g) for g in range(6)]),
    "one gamma": lambda: gamma_sweep([fitted()]),
    "starts": lambda: starts([fitted(start, ece=0.01 * k) for start in ("random", "data") for k in range(5)]),
    "one start": lambda: starts([fitted()]),
    "starts with NaN": lambda: starts([fitted(ece=math.nan), fitted(), fitted("data", ece=math.nan)]),
    "no starts": lambda: starts([]),
    "shift": lambda: shift_curves(shifted(3)),
    "shift of many": lambda: shift_curves(shifted(19)),
    "shift with holes": lambda: shift_curves({**shifted(12, [1, 5]), **shifted(1)}),
    "no shift": lambda: shift_curves({}),
}


@pytest.fixture(params=RECORDS)
def record(request):
    return RECORDS[request.param]()


def words_of(ax):
    legend = [text.get_text() for text in ax.get_legend().get_texts()] if ax.get_legend() else []
    return [*(text.get_text() for text in ax.texts), *legend]


def test_every_record_is_drawn_in_a_column_and_leaves_no_trace(record):
    matplotlib = pytest.importorskip("matplotlib", reason="drawings need matplotlib")
    from matplotlib import _pylab_helpers

    before = dict(matplotlib.rcParams)
    ax = draw(record)
    assert ax.figure.get_figwidth() == pytest.approx(3.3)
    ax.figure.draw_without_rendering()
    assert dict(matplotlib.rcParams) == before
    assert _pylab_helpers.Gcf.get_all_fig_managers() == []
    assert ax.get_xlabel()
    assert ax.get_ylabel() or [label.get_text() for label in ax.get_yticklabels()]
    assert ax.get_title(loc="left")


def test_the_given_axes_are_drawn_on(record):
    figure = pytest.importorskip("matplotlib.figure", reason="drawings need matplotlib").Figure()
    others, given = figure.subplots(1, 2)
    assert draw(record, given, title="mine") is given
    assert given.get_title(loc="left") == "mine"
    assert not others.has_data()
    assert draw(record, figure.add_subplot(), title="").get_title(loc="left") == ""


def test_no_rows_are_said_to_be_none():
    pytest.importorskip("matplotlib", reason="drawings need matplotlib")
    assert "no rows" in words_of(draw(shift_curves({})))


def test_of_many_curves_the_oddest_are_named():
    names = words_of(draw(shift_curves(shifted(19))))
    assert {"14 others", "mean of 19", "curve 18", "curve 0"} <= set(names)
    assert len(names) == 7


def test_bands_of_learned_epochs_by_hand():
    tops = np.array([10.0, 9.0, 6.0, 5.0, 7.0, 1.0, 0.5])
    learned = np.array([1, 1, 2, 3, 9, 10, np.inf])
    found = max_logits(np.stack([tops, tops - 1, tops - 4], axis=1), learned, bounds=[1, 4], bins=19)
    assert [(band.first, band.final, int(band.count.sum())) for band in found.bands] == [
        (1, 1, 2),
        (2, 4, 2),
        (5, 10, 2),
        (math.inf, math.inf, 1),
    ]
    assert found.edges[0] == 0.5
    assert found.edges[-1] == 10.0
    assert found.bands[2].count.nonzero()[0].tolist() == [1, 13]  # 1 and 7, in steps of a half from 0.5 on
    assert found.range == pytest.approx(np.percentile(tops, 95) - np.percentile(tops, 5))
    assert found.auc == 1.0  # 10 and 9 are above 7 and 1
    assert max_logits(np.stack([-tops, -20 - tops], axis=1), learned, bounds=[1, 4]).auc == 0.0


def test_bands_default_to_thirds_and_count_every_sample_once():
    rng = np.random.default_rng(0)
    z, learned = rng.normal(size=(300, 5)), np.where(rng.random(300) < 0.1, np.inf, rng.integers(1, 40, 300))
    found = max_logits(torch.from_numpy(z), learned)
    assert sum(int(band.count.sum()) for band in found.bands) == 300
    counts = [int(band.count.sum()) for band in found.bands[:-1]]
    assert len(counts) == 3
    assert max(counts) < 1.4 * min(counts)
    first, last = (
        z.max(axis=1)[(learned >= band.first) & (learned <= band.final)] for band in (found.bands[0], found.bands[2])
    )
    pairs = (first[:, None] > last[None]).mean()
    assert found.auc == pytest.approx(pairs)


def test_one_band_has_no_area_and_wrong_epochs_are_named():
    z = np.eye(3)
    assert math.isnan(max_logits(z, [1, 1, 1]).auc)
    assert [band.count.sum() for band in max_logits(z, [np.inf] * 3).bands] == [3]
    with pytest.raises(ValueError, match="learned must"):
        max_logits(z, [1, 2])
    with pytest.raises(ValueError, match="learned must"):
        max_logits(z, [1, 2, np.nan])
    with pytest.raises(ValueError, match="bins must be"):
        max_logits(z, [1, 2, 3], bins=0)


def test_areas_differ_without_colour():
    assert len({fill_style(index)["hatch"] for index in range(len(style.SERIES))}) == len(style.SERIES)
