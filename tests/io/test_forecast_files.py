"""Files of forecasts: every format, names of columns, levels, gaps, and one clear error for the rest."""

import numpy as np
import pytest

from trueup.io import load_forecasts, save_columns
from trueup.io.forecasts import levels_of_names

RNG = np.random.default_rng(0)
MEAN, STD, Y = RNG.normal(size=20), RNG.uniform(0.5, 2, size=20), RNG.normal(size=20)
FORMATS = (".csv", ".csv.gz", ".jsonl", ".parquet", ".npz", ".safetensors")


@pytest.mark.parametrize("suffix", FORMATS)
def test_every_format_gives_the_same_forecasts(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    columns = {"mu": MEAN, "sd": STD, "sold": Y, "w": STD, "q10": MEAN - 1, "q50": MEAN, "q90": MEAN + 1}
    save_columns(path, columns)
    table = load_forecasts(path, mean="mu", std="sd", targets="sold", sample_weight="w")
    assert table.is_gaussian
    for found, wanted in zip((*table, table.sample_weight), (MEAN, STD, Y, STD), strict=True):
        np.testing.assert_array_equal(found, wanted)
    for named in ("q*", ["q10", "q50", "q90"]):
        quantiles, levels, targets = load_forecasts(path, quantiles=named, targets="sold")
        np.testing.assert_array_equal(quantiles, np.stack([MEAN - 1, MEAN, MEAN + 1], axis=1))
        np.testing.assert_allclose(levels, [0.1, 0.5, 0.9])
        np.testing.assert_array_equal(targets, Y)
    whole = load_forecasts(path, mean="mu", std="sd", every_column=True, labelled=False)
    assert set(whole.columns) == set(columns)


def test_arrays_of_quantiles_bring_their_levels(tmp_path):
    q = np.sort(RNG.normal(size=(20, 3)), axis=1)
    np.savez(tmp_path / "a.npz", quantiles=q, levels=np.array([0.1, 0.5, 0.9]), targets=Y[:, None])
    quantiles, levels, targets = load_forecasts(tmp_path / "a.npz", quantiles="quantiles")
    np.testing.assert_array_equal(quantiles, q)
    assert levels.tolist() == [0.1, 0.5, 0.9]
    np.testing.assert_array_equal(targets, Y)
    given = load_forecasts(tmp_path / "a.npz", quantiles="quantiles", levels=[0.2, 0.5, 0.8])
    assert given.spread.tolist() == [0.2, 0.5, 0.8]


def test_rows_without_a_target_or_a_forecast_are_left_out_and_told(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("mean,std,target\n1,1,2\n,1,3\n2,1,\n3,1,NaN\n4,2,5\n")
    with pytest.warns(UserWarning, match="3 rows were left out, without a target or a forecast"):
        mean, std, targets = load_forecasts(path)
    assert (mean.tolist(), std.tolist(), targets.tolist()) == ([1, 4], [1, 2], [2, 5])
    assert len(load_forecasts(path, labelled=False).forecast) == 5


def test_levels_are_read_from_names():
    names = ["q0.05", "q_0.5", "p95", "q05", "quantile 2.5%", "0.975"]
    np.testing.assert_allclose(levels_of_names(names), [0.05, 0.5, 0.95, 0.05, 0.025, 0.975])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mean": "mo"}, "must have mo, got 'mean', 'std', 'target'"),
        ({"targets": "tarjet"}, "must have tarjet.*did you mean target"),
        ({"quantiles": "q*"}, "quantiles must name columns among mean, std, target"),
        ({"quantiles": ["mean", "std"]}, "column 'mean' must end in its level"),
        ({"quantiles": "mean"}, "levels must be known of the quantiles in 'mean'"),
        ({"quantiles": ["mean", "std"], "levels": [0.5]}, "levels must be 2, one for each quantile, got 1"),
        ({"quantiles": "mean", "mean": "std"}, "quantiles must come without mean and std"),
        ({"sample_weight": "w"}, "must have w"),
    ],
)
def test_refusals(tmp_path, options, words):
    save_columns(tmp_path / "a.csv", {"mean": MEAN, "std": STD, "target": Y})
    with pytest.raises(ValueError, match=words):
        load_forecasts(tmp_path / "a.csv", **options)


def test_more_refusals(tmp_path):
    (tmp_path / "a.csv").write_text("mean,std,target\n1,1,2\n1,x,2\n")
    with pytest.raises(ValueError, match="a.csv: line 3"):
        load_forecasts(tmp_path / "a.csv")
    with pytest.raises(ValueError, match=r"the suffix must be one of .*got '.npy'"):
        save_columns(tmp_path / "a.npy", {"mean": MEAN})
    with pytest.warns(UserWarning, match="cannot hold the columns name"):
        save_columns(tmp_path / "a.safetensors", {"mean": MEAN[:2], "name": np.array(["a", "b"])})
    from trueup.io import load

    save_columns(tmp_path / "b.csv", {"mean": MEAN, "std": STD, "target": Y})
    with pytest.raises(ValueError, match="forecasts of a number are read by load_forecasts"):
        load(tmp_path / "b.csv")
