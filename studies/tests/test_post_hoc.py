import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from strategies import calibrated
from trueup import METHODS, metrics
from trueup._core.executors import executor_for
from trueup_studies import STUDIES, Options, Store, run
from trueup_studies.papers.post_hoc import logit_files as source
from trueup_studies.papers.post_hoc import post_hoc_study as post_hoc
from trueup_studies.statistics import ranking

STUDY = STUDIES["post-hoc"]


def results(tmp_path, options):
    store = Store(tmp_path / "results.sqlite")
    ran = run(STUDY, store, options=options)
    assert ran.failed == {}
    return store.rows(STUDY.cells(options))


def test_a_folder_of_files(tmp_path):
    val, test = calibrated(300, 4, temperature=2.0), calibrated(400, 4, temperature=2.0, seed=1)
    whole = np.concatenate([val[0], test[0]]), np.concatenate([val[1], test[1]])
    probs = np.exp(whole[0]) / np.exp(whole[0]).sum(axis=1, keepdims=True)
    halves = {"val_logits": val[0], "val_labels": val[1], "test_logits": test[0], "test_labels": test[1]}
    np.savez(tmp_path / "halves.npz", **halves)
    np.savez(tmp_path / "one_probs.npz", probs=probs, labels=whole[1])
    np.savez(tmp_path / "two_probs.npz", first=probs, second=probs, labels=whole[1])
    np.savez(tmp_path / "raw.npz", logits=whole[0], labels=whole[1])
    options = Options(data_dir=str(tmp_path), seeds=2, methods=("identity", "temperature"))
    rows = results(tmp_path, options)
    seen = [(row["data"], row["split"]) for row in rows if row["method"] == "identity"]
    assert seen == [("halves", 0)] + [(n, s) for n in ("one", "raw", "two_first", "two_second") for s in (0, 1)]
    after = METHODS["temperature"](*val)(test[0])
    [row] = [row for row in rows if row["data"] == "halves" and row["method"] == "temperature"]
    assert row["nll"] == metrics.nll(after, test[1])
    assert row["brier"] == metrics.brier(after, test[1])
    assert row["ece"] == metrics.ece(after, test[1])
    assert row["accuracy"] == metrics.accuracy(after, test[1])
    assert (row["fit_rows"], row["test_rows"]) == (300, 400)
    assert post_hoc.unpack(row["losses"]).mean() == pytest.approx(row["nll"], abs=1e-7)
    one, two = ([row for row in rows if (row["data"], row["method"]) == (name, "identity")] for name in ("one", "raw"))
    assert one[0]["nll"] == pytest.approx(two[0]["nll"], rel=1e-6)  # the same rows, as probabilities and as logits
    assert one[0]["nll"] != one[1]["nll"]  # another split
    assert "folder" not in rows[0]


def names_of(folder):
    few = Options(data_dir=str(folder), seeds=1, methods=("identity",))
    return {cell.settings["data"]: cell.settings["array"] for cell in STUDY.cells(few)}


def test_files_as_people_keep_them(tmp_path):
    z, y = calibrated(80, 3)
    probs = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    np.savez(tmp_path / "net.npz", logits=z, labels=y, ids=np.arange(80), features=np.zeros((80, 7)))
    np.savez(tmp_path / "net_probs.npz", probs=probs, labels=y)  # the same name, were it not for its suffix
    np.savez(tmp_path / "old.npz", probabilities=probs, labels=y, names=np.array([{"a": 1}], dtype=object))
    np.savez(tmp_path / "odd_probs.npz", logits=probs, labels=y)  # the file's name says what they are
    np.savez(tmp_path / "parts.npz", val_probs=probs, val_labels=y, test_probs=probs, test_labels=y)
    np.savez(tmp_path / "three_probs.npz", one=probs, two=probs, labels=y, weights=np.ones(80))
    assert names_of(tmp_path) == {
        "net": "logits",
        "net_probs": "probs",
        "odd": "logits",
        "old": "probabilities",
        "parts": None,
        "three_one": "one",
        "three_two": "two",
    }
    rows = results(tmp_path, Options(data_dir=str(tmp_path), seeds=1, methods=("identity",)))
    by_data = {row["data"]: row["nll"] for row in rows}
    for name in ("net_probs", "old", "odd"):
        assert by_data[name] == pytest.approx(by_data["net"])


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"logits": "z", "targets": "y"}, "wanted arrays labels and logits or probs, .*, found logits .*, targets"),
        ({"ids": "y", "labels": "y"}, "wanted arrays labels and logits or probs"),
        (
            {"logits": "probs", "labels": "y"},
            "logits must not be probabilities, got rows",
        ),
        ({"labels": "y", "logits": "none"}, "wanted predictions, got none at all|label"),
        ({"val_logits": "z", "val_labels": "y", "test_logits": "two", "test_labels": "y"}, "as many classes|label"),
        ({"logits": "z", "labels": "zero"}, "wanted arrays labels and logits or probs"),
        ({"logits": "nan", "labels": "y"}, "finite|NaN"),
        ({"logits": "z", "labels": "many"}, "labels"),
        ({"val_logits": "z", "val_labels": "y"}, "test_logits"),
    ],
)
def test_files_that_cannot_be_studied_are_refused_before_any_run(tmp_path, arrays, words):
    z, y = calibrated(80, 3)
    broken = z.copy()
    broken[3, 1] = np.nan
    known = {"z": z, "y": y, "probs": np.full((80, 3), 1 / 3), "nan": broken, "many": y + 7}
    known |= {"none": z[:0], "two": z[:, :2], "zero": np.array(3)}
    np.savez(tmp_path / "net.npz", **{name: known[which] for name, which in arrays.items()})
    with pytest.raises(ValueError, match=f"net.npz.*({words})"):
        names_of(tmp_path)


def test_two_files_may_not_share_a_name(tmp_path):
    z, y = calibrated(80, 3)
    np.savez(tmp_path / "a.npz", b=z, c=z, labels=y)
    np.savez(tmp_path / "a_b.npz", logits=z, labels=y)
    with pytest.raises(ValueError, match=r"a_b.npz and a.npz both have 'a_b': give one of them another name"):
        names_of(tmp_path)


def test_a_result_is_of_the_file_not_of_its_place(tmp_path):
    z, y = calibrated(60, 3)
    for folder in ("a", "b", "c"):
        (tmp_path / folder / "logits").mkdir(parents=True)
        np.savez(tmp_path / folder / "logits" / "net.npz", logits=z if folder != "c" else 2 * z, labels=y)
    options = [Options(data_dir=str(tmp_path / folder), seeds=1, methods=("identity",)) for folder in "abc"]
    one, two, three = (STUDY.cells(option)[0] for option in options)
    assert one.key == two.key != three.key
    np.savez(tmp_path / "a" / "logits" / "net.npz", logits=z + 1, labels=y)
    with pytest.raises(ValueError, match="net.npz: the file has changed since the study began"):
        post_hoc.work({**one.settings, **one.local})


def test_the_folder_of_data_may_be_named_by_the_environment(tmp_path, monkeypatch):
    z, y = calibrated(60, 3)
    (tmp_path / "logits").mkdir()
    monkeypatch.setenv("TRUEUP_DATA", str(tmp_path))
    few = {"seeds": 1, "methods": ("identity",)}
    drawn = [cell.key for cell in STUDY.cells(Options(**few))]  # there is no file yet
    assert len(drawn) == len(source.SYNTHETIC)
    np.savez(tmp_path / "logits" / "net.npz", logits=z, labels=y)
    [found] = STUDY.cells(Options(**few))
    [named] = STUDY.cells(Options(data_dir=str(tmp_path), **few))
    assert (found.key, found.local) == (named.key, named.local)
    assert post_hoc.work({**found.settings, **found.local})
    assert [cell.key for name in source.SYNTHETIC for cell in STUDY.cells(Options(data=name, **few))] == drawn


def test_what_is_asked_for_must_be_there(tmp_path, monkeypatch):
    monkeypatch.delenv("TRUEUP_DATA", raising=False)
    with pytest.raises(ValueError, match="wanted a folder with .npz files of logits, found none"):
        STUDY.cells(Options(data_dir=str(tmp_path)))
    with pytest.raises(ValueError, match="data must be one of calibrated, overconfident, .*, got 'x'"):
        STUDY.cells(Options(data="x"))
    with pytest.raises(ValueError, match="methods must be among identity, .*, got 'x'"):
        STUDY.cells(Options(methods=("x",)))


def test_every_method_on_every_drawn_problem_by_default(monkeypatch):
    monkeypatch.delenv("TRUEUP_DATA", raising=False)
    cells = STUDY.cells()
    assert len(cells) == len(source.SYNTHETIC) * source.SPLITS * len(METHODS)


def test_methods_too_slow_for_many_classes_are_left_out_and_shown_as_missing(tmp_path):
    rng = np.random.default_rng(0)
    for name, classes in (("few", 5), ("many", 201)):
        np.savez(tmp_path / f"{name}.npz", logits=rng.normal(size=(40, classes)), labels=np.arange(40) % classes)
    options = Options(data_dir=str(tmp_path), seeds=1, methods=("identity", "temperature", "matrix"))
    made = [(cell.settings["data"], cell.settings["method"]) for cell in STUDY.cells(options)]
    assert ("few", "matrix") in made
    assert ("many", "matrix") not in made
    row = {"split": 0, "accuracy": 0.5, "nll": 1.0, "brier": 0.4, "ece": 0.1, "losses": post_hoc.pack(np.ones(4))}
    tables = STUDY.tables([{"data": data, "method": method, **row} for data, method in made], options)
    assert "| matrix | – | – | – | – |" in tables["scores"].markdown()
    assert tables["scores"].notes[0] == "many: no result for some split of matrix."
    assert "are not run on more than 200 classes" in tables["scores"].notes[1]
    assert "matrix" not in tables["ranks"].groups[""]
    assert "all" not in tables["regret"].groups[""]["matrix"]
    assert "many" not in tables["regret"].groups[""]["matrix"]


def test_a_warning_of_a_fit_is_kept_with_its_row(tmp_path):
    z = 5 * np.eye(2)[np.arange(40) % 2]
    np.savez(
        tmp_path / "sure.npz", val_logits=z, val_labels=np.arange(40) % 2, test_logits=z, test_labels=np.arange(40) % 2
    )
    [row] = results(tmp_path, Options(data_dir=str(tmp_path), methods=("temperature",)))
    assert row["warning"]
    assert row["chosen"] is None


def drawn_losses(n=50, seed=0, **means):
    rng = np.random.default_rng(seed)
    base = rng.exponential(size=n)
    return {method: base + mean + 0.1 * rng.normal(size=n) for method, mean in means.items()}


def test_regret_is_paired_by_test_row():
    made = {"x": drawn_losses(a=0.0, b=0.2, auto=0.1), "y": drawn_losses(n=80, seed=1, a=0.3, b=0.0, auto=0.0)}
    rows = [
        {"data": data, "method": method, "split": 0, "losses": post_hoc.pack(each)}
        for data, losses in made.items()
        for method, each in losses.items()
    ]
    found = {(regret.data, regret.method): regret for regret in post_hoc.regrets(rows)}
    assert {key[0]: regret.best for key, regret in found.items()} == {"x": "a", "y": "b"}
    for (data, method), regret in found.items():
        behind = made[data][method] - made[data][regret.best]
        assert regret.mean == pytest.approx(behind.mean(), abs=1e-6)
        assert regret.error == pytest.approx(stats.sem(behind) if method != regret.best else 0.0, abs=1e-6)
    assert found["x", "auto"].mean > 0
    assert found["x", "a"].mean == 0


def test_the_automatic_choice_is_not_its_own_measure():
    rows = [
        {"data": "x", "method": method, "split": 0, "losses": post_hoc.pack(np.array([value, value]))}
        for method, value in (("auto", 0.5), ("a", 1.0), ("b", 2.0))
    ]
    found = {regret.method: regret for regret in post_hoc.regrets(rows)}
    assert found["auto"].best == "a"
    assert found["auto"].mean == -0.5


def test_splits_are_averaged_and_a_method_that_misses_one_is_left_out():
    pairs = {
        ("a", 0): [1.0, 3.0],
        ("a", 1): [2.0, 2.0],
        ("b", 0): [4.0, 4.0],
        ("b", 1): [2.0, 4.0],
        ("c", 0): [0.0, 0.0],
    }
    rows = [
        {"data": "x", "method": method, "split": split, "losses": post_hoc.pack(np.array(values))}
        for (method, split), values in pairs.items()
    ]
    found = {regret.method: regret for regret in post_hoc.regrets(rows)}
    assert set(found) == {"a", "b"}
    assert found["b"].mean == 1.5  # of 2 and 1
    assert found["b"].error == pytest.approx(1.0)  # of b − a: 3, 1 and 0, 2, each with error 1


def test_the_tables(tmp_path, monkeypatch):
    monkeypatch.delenv("TRUEUP_DATA", raising=False)
    options = Options(seeds=1, methods=("identity", "temperature", "svs", "histogram"))
    rows = results(tmp_path, options)
    tables = STUDY.tables(rows, options)
    assert list(tables) == ["scores", "regret", "ranks"]
    assert list(tables["scores"].groups) == list(source.SYNTHETIC)
    assert tables["scores"].groups["overconfident"]["identity"]["ece"].rank == 0
    regret = tables["regret"].groups[""]
    assert list(regret["svs"]) == ["all", *source.SYNTHETIC]
    assert min(entry.mean for entries in regret.values() for entry in entries.values()) == 0
    assert regret["identity"]["overconfident"].mean > 10 * regret["identity"]["overconfident"].std
    means = [each["all"].mean for each in regret.values()]
    assert means == sorted(means)
    each = [regret["svs"][name] for name in source.SYNTHETIC]
    assert regret["svs"]["all"].mean == pytest.approx(np.mean([e.mean for e in each]))
    assert regret["svs"]["all"].std == pytest.approx(math.sqrt(sum(e.std**2 for e in each)) / 6)
    ranks = tables["ranks"]
    assert sum(entries["nll"].mean for entries in ranks.groups[""].values()) == pytest.approx(10)
    assert "Friedman" in ranks.notes[0]
    assert "6 data sets" in ranks.notes[0]


def test_another_process_finds_the_same(tmp_path):
    options = Options(data="biased", seeds=1, methods=("temperature", "sms"))
    here, there = results(tmp_path, options), Store(tmp_path / "there.sqlite")
    with executor_for("processes:1") as workers:
        run(STUDY, there, options=options, executor=workers)
    assert there.rows(STUDY.cells(options)) == here


def test_auto_tells_what_it_chose(tmp_path):
    [row] = results(tmp_path, Options(data="overconfident", seeds=1, methods=("auto",)))
    assert row["chosen"] == "mixture"


@given(st.integers(2, 7), st.integers(1, 12), st.booleans(), st.integers(0, 999))
def test_ranks_and_friedman_as_scipy_has_them(k, n, tied, seed):
    scores = np.random.default_rng(seed).normal(size=(n, k))
    scores = np.round(scores) if tied else scores
    found = ranking({f"m{j}": scores[:, j] for j in range(k)})
    means = stats.rankdata(scores, axis=1).mean(axis=0)
    assert found.ranks == pytest.approx({f"m{j}": means[j] for j in range(k)})
    assert list(found.ranks.values()) == sorted(found.ranks.values())
    if k > 2 and any(len(set(row)) > 1 for row in scores):
        theirs = stats.friedmanchisquare(*scores.T)
        assert found.statistic == pytest.approx(theirs.statistic, abs=1e-9)
        assert found.p_value == pytest.approx(theirs.pvalue, abs=1e-9)
    best = min(found.ranks.values())
    assert found.worse_than_best() == [name for name, rank in found.ranks.items() if rank > best + found.critical]


@pytest.mark.parametrize(("k", "q"), [(2, 1.960), (3, 2.343), (5, 2.728), (10, 3.164)])
def test_critical_differences_are_those_printed(k, q):
    """Demšar (2006), table 5, for 5 %."""
    found = ranking({f"m{j}": [float(j)] * 10 for j in range(k)})
    assert found.critical == pytest.approx(q * math.sqrt(k * (k + 1) / 60), abs=1e-3)


def test_ranks_of_methods_that_are_all_alike():
    found = ranking({"a": [1.0, 2.0], "b": [1.0, 2.0]})
    assert (found.ranks, found.statistic, found.p_value) == ({"a": 1.5, "b": 1.5}, 0.0, 1.0)
    with pytest.raises(ValueError, match="scores must be finite, for two or more methods .*, got 1 methods on 2"):
        ranking({"a": [1.0, 2.0]})
    with pytest.raises(ValueError, match="scores must be finite"):
        ranking({"a": [1.0, math.nan], "b": [1.0, 2.0]})


def test_drawn_faults_are_those_they_are_called_by():
    for name, temperature in (("calibrated", 1.0), ("overconfident", 2.5), ("underconfident", 0.4)):
        z, y = source.SYNTHETIC[name].draw(20_000, 0)
        assert float(METHODS["temperature"](z, y).temperature) == pytest.approx(temperature, rel=0.05)
    z, y = source.SYNTHETIC["overconfident"].draw(10, 3)
    again = source.SYNTHETIC["overconfident"].draw(10, 3)
    assert np.array_equal(z, again.logits)
    assert np.array_equal(y, again.labels)
    assert not np.array_equal(z, source.SYNTHETIC["overconfident"].draw(10, 4).logits)


def test_the_published_figures_of_one_network(tmp_path, data):
    options = Options(data_dir=str(data), data="cifar10_densenet40", methods=("identity", "temperature"))
    raw, scaled = results(tmp_path, options)
    assert scaled["temperature"] == pytest.approx(2.8826, abs=5e-5)
    assert scaled["nll"] == pytest.approx(0.225086, abs=1e-6)
    assert scaled["ece"] == pytest.approx(0.009464, abs=1e-6)
    assert raw["ece"] == pytest.approx(0.055003, abs=1e-6)
