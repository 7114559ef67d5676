"""Files of the benchmark's form, made here, read, calibrated and put beside the published tables."""

import csv
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trueup import METHODS, metrics
from trueup.convert import from_probs
from trueup_studies import STUDIES, Options, Store, run
from trueup_studies.papers.calarena import benchmark_files as files
from trueup_studies.papers.calarena.leaderboard import leaderboard

h5py = pytest.importorskip("h5py", reason="the benchmark's files need h5py")

STUDY = STUDIES["calarena"]
FIT_ROWS, TEST_ROWS = 200, 150


def drawn(classes, seed, sharper=2.0):
    """Over-confident probabilities in single precision, as the benchmark keeps them, and labels."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(FIT_ROWS + TEST_ROWS, classes))
    p = np.exp(sharper * z - np.logaddexp.reduce(sharper * z, axis=1, keepdims=True)).astype(np.float32)
    return p[:, 1] if classes == 2 else p, (z + rng.gumbel(size=z.shape)).argmax(axis=1).astype(np.int32)


def write(path, classes, names):
    with h5py.File(path, "w") as file:
        for k, name in enumerate(names):
            p, y = drawn(classes, k)
            group = file.create_group(name)
            for part, rows in {"cal": slice(FIT_ROWS), "test": slice(FIT_ROWS, None)}.items():
                group.create_dataset(f"probas_{part}", data=p[rows], compression="gzip")
                group.create_dataset(f"labels_{part}", data=y[rows], compression="gzip")


def publish(folder, method, losses, *, test_size=TEST_ROWS):
    """A results table of one method: {(data set, model): log-loss}."""
    folder.mkdir(parents=True, exist_ok=True)
    head = ["dataset", "model", "cal_size", "test_size", f"{method}_brier", f"{method}_logloss", f"{method}_time"]
    with (folder / f"{method}.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(head)
        for (data, model), loss in losses.items():
            writer.writerow([data, model, FIT_ROWS, test_size, loss / 2, loss, 0.01])


EXPERIMENTS = [("moons", "forest"), ("moons", "linear"), ("credit", "forest")]


@pytest.fixture(scope="module")
def arena(tmp_path_factory):
    """The benchmark's folder with one file of two classes and one of three, and tables of the first."""
    root = tmp_path_factory.mktemp("CalArena")
    (root / "calibration_benchmarks").mkdir()
    names = ["/".join(each) for each in EXPERIMENTS]
    write(root / "calibration_benchmarks" / "tabrepo-binary.h5", 2, names)
    write(root / "calibration_benchmarks" / "cv-multiclass.h5", 3, ["c10/resnet"])
    results = root / "results" / "tabrepo-binary"
    publish(results, "Worst", dict.fromkeys(EXPERIMENTS, 9.0))
    publish(results, "Oracle", dict.fromkeys(EXPERIMENTS, 0.0))
    publish(results, "Partial", dict.fromkeys(EXPERIMENTS[:1], 0.1))
    publish(results, "Elsewhere", dict.fromkeys(EXPERIMENTS, 0.1), test_size=1)
    return root


@pytest.fixture(scope="module")
def found(arena, tmp_path_factory):
    options = Options(data_dir=str(arena), methods=("temperature", "identity"))
    store = Store(tmp_path_factory.mktemp("store") / "results.sqlite")
    summary = run(STUDY, store, options=options, progress=False)
    assert summary.failed == {}
    return store.rows(STUDY.cells(options)), options


def test_every_experiment_of_every_file_is_a_cell(arena):
    cells = STUDY.cells(Options(data_dir=str(arena)))
    assert {cell.settings["method"] for cell in cells} == {"auto"}
    assert {(cell.settings["data"], cell.settings["model"]) for cell in cells} == {*EXPERIMENTS, ("c10", "resnet")}
    one = STUDY.cells(Options(data_dir=str(arena / "calibration_benchmarks"), data="cv-multiclass"))
    assert [cell.settings["classes"] for cell in one] == [3]
    with pytest.raises(ValueError, match="data must be one of cv-multiclass, tabrepo-binary, got 'cv'"):
        STUDY.cells(Options(data_dir=str(arena), data="cv"))


def test_rows_are_those_of_a_fit_by_hand(found):
    rows, _ = found
    row = next(r for r in rows if r["model"] == "linear" and r["method"] == "temperature")
    p, y = drawn(2, 1)
    z = from_probs(np.stack([1 - p.astype(float), p.astype(float)], axis=1))
    after = METHODS["temperature"](z[:FIT_ROWS], y[:FIT_ROWS].astype(int))(z[FIT_ROWS:])
    assert row["nll"] == pytest.approx(metrics.nll(after, y[FIT_ROWS:].astype(int)), rel=1e-9)
    probs = np.exp(after - np.logaddexp.reduce(after, axis=1, keepdims=True))
    truth = np.eye(2)[y[FIT_ROWS:]]
    assert row["brier"] == pytest.approx(((probs - truth) ** 2).sum(axis=1).mean(), rel=1e-9)
    assert row["raw_nll"] == pytest.approx(metrics.nll(z[FIT_ROWS:], y[FIT_ROWS:].astype(int)), rel=1e-9)
    assert (row["fit_rows"], row["test_rows"]) == (FIT_ROWS, TEST_ROWS)


def test_ours_stand_beside_theirs_in_one_table(found):
    rows, options = found
    tables = STUDY.tables(rows, options)
    assert list(tables) == ["families", "benchmarks", "data_sets"]
    title = "tabular, two classes: 3 experiments, 2 data sets"
    standings = tables["families"].groups[title]
    assert next(iter(standings)) == "Oracle"
    assert list(standings)[-1] == "Worst"
    assert set(standings) == {"trueup temperature", "trueup identity", "Oracle", "Worst"}
    assert standings["Oracle"]["win_rate"].mean == 100
    assert standings["Oracle"]["excess"].mean == 0
    assert standings["trueup identity"]["harm"].mean == 0
    means = {m: np.mean([r["nll"] for r in rows if r["method"] == m and r["benchmark"] == "tabrepo-binary"])
             for m in options.methods}  # fmt: skip
    for method, mean in means.items():
        assert standings[f"trueup {method}"]["excess"].mean == pytest.approx(mean)  # the oracle's loss is 0
    notes = " ".join(tables["families"].notes)
    assert "Partial (1 of 3)" in notes
    assert "Elsewhere (0 of 3)" in notes
    assert "cv-multiclass: no published results were found" in notes
    moons = tables["data_sets"].groups["tabular, two classes"]["moons"]
    assert moons["best"].mean == 0
    assert moons["regret"].mean == pytest.approx(moons["ours"].mean)


def test_a_benchmark_nobody_knows_is_a_family_of_its_own(tmp_path):
    write(tmp_path / "mine-binary.h5", 2, ["a/b"])
    options = Options(data_dir=str(tmp_path), methods=("identity",))
    store = Store(tmp_path / "results.sqlite")
    run(STUDY, store, options=options, progress=False)
    tables = STUDY.tables(store.rows(STUDY.cells(options)), options)
    assert list(tables["families"].groups) == ["mine-binary: 1 experiments, 1 data sets"]
    assert "mine-binary: no published results were found." in tables["families"].markdown()


def test_a_saturated_probability_is_no_finer_than_single_precision():
    p = np.array([1.0, 1e-30, 0.5], dtype=np.float32)
    floor = files._floor(files.as_probs(p), p)
    assert floor == pytest.approx(2.0**-25)
    assert files._floor(files.as_probs(p[1:]), p[1:]) is None, "there is no zero"
    votes = np.array([[1.0, 0.0, 0.0], [0.9, 0.1, 0.0]])
    assert files._floor(files.as_probs(votes), votes) == 0.05


def test_only_exact_zeros_are_raised(tmp_path):
    stored = np.array([[1.0, 1e-20, 0.0], [0.5, 0.5, 1e-30]] * 2, dtype=np.float32)
    with h5py.File(tmp_path / "x-multiclass.h5", "w") as file:
        for part in ("cal", "test"):
            file[f"a/b/probas_{part}"], file[f"a/b/labels_{part}"] = stored, np.zeros(4, dtype=np.int32)
    [cell] = STUDY.cells(Options(data_dir=str(tmp_path), methods=("identity",)))
    fit, test = files.load_experiment({**cell.settings, **cell.local})
    np.testing.assert_allclose(np.exp(fit.logits[0]), [1, 1e-20, 5e-31], rtol=1e-6)
    np.testing.assert_array_equal(fit.logits, test.logits)


def test_broken_files_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"expected a folder with the \.h5 files of CalArena, found none"):
        STUDY.cells(Options(data_dir=str(tmp_path)))
    with pytest.raises(ValueError, match="probs must sum to 1 in each row, got 0.5"):
        files.as_probs(np.array([[0.25, 0.25]]))
    publish(tmp_path / "results" / "x", "TS", {("a", "b"): 0.5})
    (tmp_path / "results" / "x" / "Named-otherwise.csv").write_text("dataset,model,cal_size,test_size,TS_logloss\n")
    with pytest.raises(ValueError, match=r"Named-otherwise\.csv: there is no column Named-otherwise_logloss"):
        files.read_results(str(tmp_path), "x")


def test_a_changed_file_is_noticed(tmp_path):
    write(tmp_path / "x-binary.h5", 2, ["a/b"])
    [cell] = STUDY.cells(Options(data_dir=str(tmp_path), methods=("identity",)))
    write(tmp_path / "x-binary.h5", 2, ["a/b", "a/c"])
    with pytest.raises(ValueError, match="the file has changed since the study began"):
        files.load_experiment({**cell.settings, **cell.local})


@given(st.integers(2, 6), st.integers(1, 12), st.booleans(), st.integers(0, 999))
def test_places_are_those_of_the_loop(k, n, tied, seed):
    rng = np.random.default_rng(seed)
    losses = rng.integers(0, 3, size=(n, k)) / 2 if tied else rng.random((n, k))
    losses[rng.random((n, k)) < 0.05] = math.nan  # a method that failed loses
    data_sets = [str(s) for s in rng.integers(0, 4, size=n)]
    raw = rng.random(n)
    standings = leaderboard({f"m{j}": losses[:, j] for j in range(k)}, data_sets=data_sets, raw=raw)
    filled = [[math.inf if math.isnan(x) else x for x in row] for row in losses]
    for j in range(k):
        standing = standings[f"m{j}"]
        wins = [sum(other > row[j] for i, other in enumerate(row) if i != j) / (k - 1) for row in filled]
        ranks = [1 + sum(x < row[j] for x in row) + (sum(x == row[j] for x in row) - 1) / 2 for row in filled]
        assert standing.win_rate == pytest.approx(np.mean(wins))
        assert standing.rank == pytest.approx(np.mean(ranks))
        sums = {}
        for name, win in zip(data_sets, wins, strict=True):
            sums[name] = sums.get(name, 0.0) + win - np.mean(wins)
        if len(sums) > 1:
            error = math.sqrt(len(sums) / (len(sums) - 1) * sum(s * s for s in sums.values())) / n
            assert standing.win_rate_error == pytest.approx(error)
        else:
            assert math.isnan(standing.win_rate_error)
    order = [standing.win_rate for standing in standings.values()]
    assert order == sorted(order, reverse=True)
