"""Monitors of rows that come in clusters."""

import numpy as np
import pytest
from scipy.special import logsumexp

from optional import torch
from strategies import calibrated, images
from trueup import Monitor
from trueup._core.errors import InputError
from trueup.monitor import MonitorSizes
from trueup.monitor.betting import GLOBAL_BETS, log_odds, log_payoffs, log_payoffs_of_clusters


def test_pixels_that_err_together_raise_no_false_alarm():
    alarms = {"row": 0, "image": 0}
    for seed in range(10):
        z, y, image = images(40, 64, common=0.5, seed=seed)
        by_row, by_image = Monitor(4), Monitor(4)
        by_row.update(z, y)
        for start in range(0, len(y), 640):
            part = slice(start, start + 640)
            by_image.update(z[part], y[part], clusters=image[part])
        alarms["row"] += by_row.alarm is not None
        alarms["image"] += by_image.alarm is not None
        assert by_image.rows == by_row.rows
        assert by_image.status().ece == pytest.approx(by_row.status().ece)
    assert alarms["row"] >= 8
    assert alarms["image"] <= 1


def test_what_is_wrong_in_every_image_is_found():
    z, y, image = images(200, 30, sharpness=3.0, seed=1)
    assert Monitor(4).update(z, y, clusters=image).alarm is not None


@pytest.mark.parametrize("classwise", [False, True])
def test_clusters_of_one_row_are_rows(classwise):
    z, y = calibrated(500, 3, temperature=1.3)
    by_row, each = Monitor(3, classwise=classwise), Monitor(3, classwise=classwise)
    assert each.update(z, y, clusters=np.arange(500)).evidence == pytest.approx(by_row.update(z, y).evidence)


def test_a_cluster_is_one_bet():
    c, a = np.array([0.9, 0.6, 0.7]), np.array([1.0, 0.0, 1.0])
    rows = log_payoffs(log_odds(c), a, GLOBAL_BETS)
    expected = logsumexp(rows[:2], axis=0) - np.log(2) + rows[2]
    found = log_payoffs_of_clusters(c, a, np.array([0, 2]))
    assert found[: len(GLOBAL_BETS)] == pytest.approx(expected)


def test_the_order_within_a_batch_does_not_matter_and_blocks_may_be_crossed():
    z, y, image = images(12, 25, seed=3)
    one, two = Monitor(4, sizes=MonitorSizes(block=40, window=60)), Monitor(4, sizes=MonitorSizes(block=40, window=60))
    one.update(z, y, clusters=image)
    order = np.argsort(np.arange(300) % 25, kind="stable")  # images interleaved, in the same order of beginning
    two.update(torch.from_numpy(z[order]), y[order], clusters=image[order])
    assert two.status().evidence == pytest.approx(one.status().evidence)
    assert one.evidence.begun == 1 + 300 // 40 if 300 // 40 <= 12 else True
    assert one.rows == 300


def test_what_is_wrong_changes_nothing():
    z, y, image = images(4, 10)
    monitor = Monitor(4)
    monitor.update(z, y, clusters=image)
    before = monitor.status()
    with pytest.raises(
        InputError, match="clusters must be complete within one batch, got 3 in this batch and the previous"
    ):
        monitor.update(z[30:], y[30:], clusters=image[30:])
    with pytest.raises(InputError, match="groups must be left out with clusters"):
        monitor.update(z, y, clusters=image + 10, groups=image)
    with pytest.raises(InputError, match="40 entries"):
        monitor.update(z, y, clusters=[1])
    assert monitor.status() == before
