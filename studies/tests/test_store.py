import math
import multiprocessing
import sqlite3
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

import chores
from trueup_studies import Cell, Store
from trueup_studies import store as room
from trueup_studies.grid import plain
from trueup_studies.store import Origin


def cell(n=0, version=1):
    return Cell("demo", version, {"n": n})


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "results.sqlite")


def test_a_key_is_of_what_the_settings_say_and_of_nothing_else():
    one = Cell("demo", 1, {"a": 1, "b": {"x": [1, 2.5], "y": None}})
    assert one.key == Cell("demo", 1, {"b": {"y": None, "x": (1.0, np.float64(2.5))}, "a": np.int64(1)}).key
    assert one.key == Cell("demo", 1, one.settings, local={"folder": "/elsewhere"}).key
    others = [
        Cell("other", 1, one.settings),
        Cell("demo", 2, one.settings),
        Cell("demo", 1, {**one.settings, "a": 2}),
        Cell("demo", 1, {**one.settings, "a": "1"}),
        Cell("demo", 1, {**one.settings, "a": True}),
        Cell("demo", 1, {**one.settings, "a": None}),
        Cell("demo", 1, {"a": 1, "b": {"x": [2.5, 1], "y": None}}),
    ]
    assert len({one.key, *(other.key for other in others)}) == 1 + len(others)


def test_a_key_stays_what_it_was():
    """Otherwise everything that was ever run would be run again."""
    assert Cell("demo", 1, {"seed": 0, "method": "temperature"}).key == "1901f9484d1fc23714e7964f315b08e8"


def test_equal_cells_are_one():
    assert len({cell(1), cell(1.0), cell(2)}) == 2
    assert cell(1) == Cell("demo", 1, {"n": 1}, local={"threads": 2})
    assert str(cell(1)) == "demo(n=1)"


def test_what_is_not_plain_is_refused_by_name():
    with pytest.raises(ValueError, match=r"settings\['a'\]\[1\] must be plain data .*, got object"):
        Cell("demo", 1, {"a": [1, object()]})
    with pytest.raises(ValueError, match="settings must have names for keys, got 3"):
        Cell("demo", 1, {3: 4})
    with pytest.raises(ValueError, match="local must not repeat the names of settings, got 'n' in both"):
        Cell("demo", 1, {"n": 1}, local={"n": 2})
    assert plain({"t": torch.tensor(1.5), "a": np.arange(2), "f": np.float32(0.5)}, "row") == {
        "t": 1.5,
        "a": [0, 1],
        "f": 0.5,
    }


def test_rows_come_back_as_they_went_in(store):
    rows = [
        {"ece": 0.1 + 0.2, "name": "δ ± 1", "none": None, "list": [1, 2.5, {"a": True}]},
        {"ece": -0.0, "big": 2**60},
    ]
    store.finish(cell(1), rows, seconds=1.5)
    assert store.rows([cell(1)]) == [{"n": 1, **row} for row in rows]
    assert math.copysign(1, store.rows([cell(1)])[1]["ece"]) == -1
    store.finish(cell(2), [{"nan": math.nan, "inf": -math.inf}], seconds=1.0)
    [row] = store.rows([cell(2)])
    assert math.isnan(row["nan"])
    assert row["inf"] == -math.inf
    [outcome] = store.outcomes([cell(1)])
    assert (outcome.study, outcome.version, outcome.settings) == ("demo", 1, {"n": 1})
    assert (outcome.status, outcome.error, outcome.seconds) == ("finished", "", 1.5)


def test_rows_are_in_the_order_of_the_cells_asked_for(store):
    for n in (3, 1, 2):
        store.finish(cell(n), [{"i": i} for i in range(12)], seconds=0)
    found = store.rows([cell(2), cell(9), cell(3)])
    assert [(row["n"], row["i"]) for row in found] == [(n, i) for n in (2, 3) for i in range(12)]
    assert [outcome.settings["n"] for outcome in store.known("demo")] == [1, 2, 3]
    store.finish(cell(1, version=2), [], seconds=0)
    assert len(store.known("demo")) == 4
    assert len(store.known("demo", 2)) == 1
    assert store.known("other") == []


def test_the_first_to_finish_wins(store):
    assert store.finish(cell(), [{"x": 1}, {"x": 2}], seconds=1)
    assert not store.finish(cell(), [{"x": 3}], seconds=2)
    assert not store.fail(cell(), "late", seconds=2)
    [outcome] = store.outcomes([cell()])
    assert (list(outcome.rows), outcome.status, outcome.seconds) == ([{"x": 1}, {"x": 2}], "finished", 1)


def test_a_failure_gives_way(store):
    assert store.fail(cell(), "one", seconds=1)
    assert store.fail(cell(), "two", seconds=2)
    assert store.outcomes([cell()])[0].error == "two"
    assert store.statuses([cell(), cell(1)]) == {cell().key: "failed"}
    assert store.finish(cell(), [{"x": 1}], seconds=3)
    [outcome] = store.outcomes([cell()])
    assert (outcome.status, outcome.error, outcome.rows) == ("finished", "", [{"x": 1}])


def test_a_row_must_not_contradict_its_settings(store):
    with pytest.raises(ValueError, match="row 0 must not change the setting 'n' from 0, got 1"):
        store.finish(cell(), [{"n": 1}], seconds=0)
    with pytest.raises(ValueError, match="row 1 must be a mapping from names to values, got int"):
        store.finish(cell(), [{"n": 0}, 5], seconds=0)
    assert store.outcomes([cell()]) == []


def test_a_transaction_is_all_or_nothing(store, monkeypatch):
    monkeypatch.setattr(room, "as_json", lambda value: 1 / 0 if value == {"x": 2} else '{"x":1}')
    with pytest.raises(ZeroDivisionError):
        store.finish(Cell("demo", 1, {}), [{"x": 1}, {"x": 2}], seconds=0)
    monkeypatch.undo()
    assert store.known("demo") == []


def test_what_is_no_store_is_refused_and_left_alone(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("buy milk, and more than sixteen letters")
    with pytest.raises(ValueError, match=r"notes.txt: expected a store of results, an SQLite file; this is not one"):
        Store(text)
    assert text.read_text() == "buy milk, and more than sixteen letters"
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as connection:
        connection.execute("CREATE TABLE songs (name)")
    connection.close()
    before = other.read_bytes()
    with pytest.raises(ValueError, match=r"other.db: expected a store of results; this SQLite file holds songs"):
        Store(other)
    assert other.read_bytes() == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["notes.txt", "other.db"]
    with pytest.raises(ValueError, match="expected a file"):
        Store(tmp_path)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        Store(tmp_path / "no" / "results.sqlite")


def test_a_damaged_file_is_told_by_name(tmp_path):
    path = tmp_path / "results.sqlite"
    Store(path).finish(cell(), [{"x": 1}], seconds=0)
    path.write_bytes(path.read_bytes()[:100] + b"\xff" * 5000)
    with pytest.raises(ValueError, match=r"results.sqlite: the file is damaged"):
        Store(path)


def test_a_file_of_a_later_version_is_refused(tmp_path):
    path = tmp_path / "results.sqlite"
    Store(path)
    connection = sqlite3.connect(path)
    connection.execute("UPDATE trueup_store SET schema = 3")
    connection.commit()
    connection.close()
    with pytest.raises(ValueError, match=r"written by a later version of trueup \(schema 3; this one knows up to 2\)"):
        Store(path)


def test_a_store_that_knew_no_machines_keeps_its_rows(tmp_path):
    path = tmp_path / "results.sqlite"
    Store(path).finish(cell(1), [{"x": 1}], seconds=1.5)
    connection = sqlite3.connect(path)  # as the first schema was
    for column in ("machine", "software"):
        connection.execute(f"ALTER TABLE cells DROP COLUMN {column}")
    connection.execute("UPDATE trueup_store SET schema = 1")
    connection.commit()
    connection.close()
    store = Store(path)
    assert store.finish(cell(2), [{"x": 2}], seconds=1, origin=Origin("64 cores", "trueup 9"))
    assert not store.finish(cell(1), [{"x": 3}], seconds=1, origin=Origin("64 cores", "trueup 9"))
    old, new = store.outcomes([cell(1), cell(2)])
    assert (old.rows, old.seconds, old.origin) == ([{"x": 1}], 1.5, Origin())
    assert new.origin == Origin("64 cores", "trueup 9")


def test_an_empty_file_becomes_a_store(tmp_path):
    path = tmp_path / "results.sqlite"
    path.touch()
    assert Store(path).finish(cell(), [], seconds=0)
    assert Store(path).statuses([cell()]) == {cell().key: "finished"}


def test_the_file_alone_holds_everything(store, tmp_path):
    store.finish(cell(), [{"x": 1}], seconds=0)
    copy = tmp_path / "copy.sqlite"
    copy.write_bytes(store.path.read_bytes())
    assert Store(copy).rows([cell()]) == [{"n": 0, "x": 1}]


def test_several_processes_write_at_once(tmp_path):
    """All begin with the making of the file, and want to finish the same cells."""
    path, count, writers = tmp_path / "results.sqlite", 8, 4
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(writers)
    processes = [context.Process(target=chores.write, args=(path, w, count, barrier)) for w in range(writers)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)
    assert [process.exitcode for process in processes] == [0] * writers
    store = Store(path)
    outcomes = store.outcomes([cell(n) for n in range(count)])
    assert len(outcomes) == count
    for outcome in outcomes:
        assert [row["i"] for row in outcome.rows] == [0, 1, 2]
        assert len({row["writer"] for row in outcome.rows}) == 1
    assert [o.status for o in store.outcomes([cell(n + count) for n in range(count)])] == ["failed"] * count
    assert len(store.known("own")) == count * writers


def test_threads_may_share_a_store(store):
    with ThreadPoolExecutor(4) as pool:
        news = list(pool.map(lambda n: store.finish(cell(n % 5), [{"x": n % 5}], seconds=0), range(20)))
    assert sum(news) == 5
    assert store.rows([cell(n) for n in range(5)]) == [{"n": n, "x": n} for n in range(5)]


def test_a_dumped_store_comes_back_whole_and_its_bytes_do_not_depend_on_the_order(tmp_path):
    rows = [{"x": math.nan, "y": [0.1, 1e-300]}, {"x": math.inf}]
    cells, place = [cell(n) for n in range(4)], Origin("two cores", "trueup")
    stores = [Store(tmp_path / f"{name}.sqlite") for name in ("first", "second")]
    for each, order in zip(stores, (cells, cells[::-1]), strict=True):
        for one in order:
            each.finish(one, rows, seconds=0.1, origin=place)
        each.dump("demo", tmp_path / f"{each.path.stem}.gz")
    assert (tmp_path / "first.gz").read_bytes() == (tmp_path / "second.gz").read_bytes()
    stores[0].fail(cell(9), "no memory", seconds=0)
    stores[0].dump("demo", tmp_path / "first.gz")
    third = Store(tmp_path / "third.sqlite")
    third.finish(cells[0], [{"x": 1}], seconds=5)  # what is known here stays
    assert third.restore(tmp_path / "first.gz") == 3
    assert repr(third.outcomes(cells[1:])) == repr(stores[0].outcomes(cells[1:]))  # NaN is not equal to itself
    assert third.rows(cells[:1]) == [{"n": 0, "x": 1}]
    assert not third.outcomes([cell(9)])


def test_what_is_no_dumped_store_is_named(store, tmp_path):
    (tmp_path / "cells.jsonl.gz").write_bytes(b"no gzip")
    with pytest.raises(ValueError, match=r"cells\.jsonl\.gz: not a readable"):
        store.restore(tmp_path / "cells.jsonl.gz")


def test_results_are_of_the_files_they_were_made_of(store):
    cells = [Cell("demo", 1, {"data": name}) for name in ("boston", "yacht")]
    store.remember_data({"boston": "a", "yacht": "b"})
    store.remember_data({"boston": "c", "yacht": "b"})  # nothing is finished yet
    store.finish(cells[0], [{"ece": 0.1}], seconds=1.0)
    store.remember_data({"boston": "c", "yacht": "d"})
    with pytest.raises(ValueError, match="its results for boston come from other files than those in the folder"):
        store.remember_data({"boston": "e", "yacht": "f"})
    store.remember_data({"boston": "c", "yacht": "d"})  # the refusal has changed nothing
