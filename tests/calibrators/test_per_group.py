"""Maps by group: mixtures by hand, files and copies, groups not seen, and when the map of all rows is left."""

import copy
import pickle

import numpy as np
import pytest
from scipy.special import expit, softmax

from trueup import load, metrics, save
from trueup.calibrators import PerGroup, Temperature, per_group

RNG = np.random.default_rng(0)
SITE = np.repeat(["A", "B"], 3000)
ODDS = RNG.normal(0, 2, 6000)
Z = np.stack([np.zeros(6000), ODDS], axis=1)
Y = (RNG.random(6000) < expit(np.where(SITE == "A", 1.0, 0.3) * ODDS)).astype(int)
MIXED = PerGroup(Temperature(1.0), [Temperature(2.0), Temperature(4.0)], ["A", "B"], [0.25, 1.0])


def probs(z):
    return softmax(np.asarray(z), axis=1)


def test_mixtures_by_hand():
    out = probs(MIXED(Z[:3], groups=["A", "B", "new"]))
    one, two, four = (probs(Z[:3] / t) for t in (1, 2, 4))
    np.testing.assert_allclose(out[0], 0.75 * one[0] + 0.25 * two[0])
    np.testing.assert_allclose(out[1], four[1])
    np.testing.assert_allclose(out[2], one[2])
    assert MIXED.keeps_argmax
    assert MIXED.differentiable
    with pytest.raises(ValueError, match="groups must be given, as to the fit"):
        MIXED(Z)
    with pytest.raises(ValueError, match="groups must have 6000 entries, one for each row, got 2"):
        MIXED(Z, groups=["A", "B"])


def test_files_pickles_and_copies(tmp_path):
    path = tmp_path / "map.safetensors"
    save(MIXED, path)
    wanted = MIXED(Z, groups=SITE)
    for other in (
        load(path),
        pickle.loads(pickle.dumps(MIXED)),
        copy.deepcopy(MIXED),
        PerGroup(**MIXED.config()),
    ):
        np.testing.assert_array_equal(other(Z, groups=SITE), wanted)


def test_groups_that_differ_get_their_own_map():
    fitted = per_group("temperature")(Z, Y, groups=SITE)
    assert fitted.names == ["A", "B"]
    assert (fitted.shares > 0.7).all()
    pooled = Temperature.fit(Z, Y)
    assert metrics.nll(fitted(Z, groups=SITE), Y) < metrics.nll(pooled(Z), Y) - 0.01
    weights = np.where(np.arange(6000) < 10, 0.0, 1.0)
    weights[20] = 2.0
    assert per_group("temperature")(Z, Y, groups={"site": SITE}, sample_weight=weights).names == ["A", "B"]


def test_the_map_of_all_rows_is_left_where_groups_are_alike_or_small():
    alike = per_group("temperature")(Z, Y, groups=RNG.integers(0, 5, 6000))
    assert alike.names == []
    np.testing.assert_allclose(probs(alike(Z, groups=[1] * 6000)), probs(Temperature.fit(Z, Y)(Z)))
    tiny = per_group("platt")(Z[:200], Y[:200], groups=np.arange(200) // 5)
    assert tiny.names == []


def test_errors_name_the_argument():
    with pytest.raises(ValueError, match="groups must have 6000 entries, one for each row, got 3"):
        per_group("temperature")(Z, Y, groups=["A", "B", "C"])
    with pytest.raises(ValueError, match="calibrators, names and shares must have one entry per group"):
        PerGroup(Temperature(1.0), [Temperature(1.0)], ["A"], [])
    with pytest.raises(ValueError, match=r"shares must lie in \[0, 1\]"):
        PerGroup(Temperature(1.0), [Temperature(1.0)], ["A"], [1.5])
