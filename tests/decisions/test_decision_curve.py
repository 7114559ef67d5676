"""Net benefit by hand and by law."""

import json

import numpy as np
import pytest

from trueup._core.errors import InputError
from trueup.decisions import net_benefit


def test_by_hand():
    p = np.array([0.9, 0.7, 0.4, 0.2])
    z = np.stack([np.log1p(-p), np.log(p)], axis=1)
    result = net_benefit(z, [1, 0, 1, 0], thresholds=[0.25, 0.5, 0.8])
    assert result.value == pytest.approx([2 / 4 - 1 / 4 / 3, 1 / 4 - 1 / 4, 1 / 4])
    assert result.treat_all == pytest.approx([0.5 - 0.5 / 3, 0.0, 0.5 - 0.5 * 4])
    other = net_benefit(z[:, ::-1].copy(), [0, 1, 0, 1], event=0, thresholds=[0.25, 0.5, 0.8])
    assert other.value == pytest.approx(result.value)


def test_intervals_cover_and_a_coin_is_useless():
    rng = np.random.default_rng(0)

    def curve(n):
        x = rng.normal(size=n)
        y = (rng.random(n) < 1 / (1 + np.exp(-2 * x))).astype(int)
        return net_benefit(np.stack([np.zeros(n), 2 * x], axis=1), y, thresholds=[0.2, 0.5])

    truth = curve(400_000).value
    held = [(one.low <= truth) & (truth <= one.high) for one in (curve(300) for _ in range(200))]
    assert np.mean(held) > 0.91
    coin = net_benefit(rng.normal(size=(500, 2)), rng.integers(0, 2, 500))
    assert "show no threshold" in str(coin)
    assert curve(2000).useful == [(0.2, 0.5)]
    json.dumps(coin.to_dict(), allow_nan=False)


def test_weights_count_rows_and_no_events_are_no_proof():
    rng = np.random.default_rng(0)
    z = rng.normal(size=(300, 2))
    y, w = rng.integers(0, 2, 300), rng.integers(1, 4, 300)
    whole, weighted = net_benefit(np.repeat(z, w, axis=0), np.repeat(y, w)), net_benefit(z, y, sample_weight=w)
    assert weighted.value == pytest.approx(whole.value)
    assert weighted.treat_all == pytest.approx(whole.treat_all)
    assert (weighted.high - weighted.low > whole.high - whole.low - 1e-12).all()
    # Ten rows of 0.5 % without an event do not prove that it is better to leave them alone.
    p = np.array([0.005] * 10 + [0.5] * 20)
    sure = net_benefit(np.stack([np.log1p(-p), np.log(p)], axis=1), [0] * 10 + [0, 1] * 10, thresholds=[0.01])
    assert sure.useful == []
    named = net_benefit(z, y, event="ill", class_names=["well", "ill"])
    assert named.event == 1


def test_bad_input():
    z, y = np.zeros((4, 2)), [0, 1, 0, 1]
    with pytest.raises(InputError, match="event must be a class, 0..1"):
        net_benefit(z, y, event=2)
    with pytest.raises(InputError, match="thresholds must rise"):
        net_benefit(z, y, thresholds=[0.5, 0.2])
