"""Polars frames, DuckDB queries and Arrow tables as predictions, without a copy through pandas."""

import sys

import numpy as np
import pytest
from frame_rows import overconfident, softmax

import trueup
from trueup.io import load_logits, load_table

pl = pytest.importorskip("polars", reason="polars is not installed: make test-integrations")
duckdb = pytest.importorskip("duckdb", reason="duckdb is not installed: make test-integrations")
pa = pytest.importorskip("pyarrow")

NAMES = ["ant", "bee", "cat"]
COLUMNS = ["p_ant", "p_bee", "p_cat"]


@pytest.fixture(scope="module")
def pair():
    pair = overconfident(3000, classes=3)
    return pair._replace(logits=pair.logits.astype(np.float64))


@pytest.fixture(scope="module")
def frame(pair):
    """Logits as lists, probabilities as columns, labels as numbers and as names, weights and sites."""
    probs = dict(zip(COLUMNS, softmax(pair.logits).T, strict=True))
    columns = {"logits": pl.Series(pair.logits.tolist()), "label": pair.labels, **probs}
    columns |= {"animal": np.array(NAMES)[pair.labels], "weight": 1.0 + pair.labels, "site": ["n", "s", "s"] * 1000}
    return pl.DataFrame(columns)


@pytest.fixture
def con(frame):
    with duckdb.connect() as con:
        con.register("predictions", frame)
        yield con


def test_evaluate_fit_and_report_take_a_polars_frame(frame, pair):
    assert str(trueup.evaluate(*trueup.load(frame))) == str(trueup.evaluate(*pair))
    assert trueup.fit(*trueup.load(frame), "temperature").config() == trueup.fit(*pair, "temperature").config()
    page = trueup.report(trueup.load(frame), methods=["temperature"], progress=False)
    assert page.audit.scores.rows == 3000


def test_a_frame_is_read_without_pandas(frame, con, monkeypatch):
    class Refuse:
        def find_spec(self, name, path=None, target=None):
            if name.partition(".")[0] == "pandas":
                raise AssertionError("pandas was imported")

    for name in [name for name in sys.modules if name.partition(".")[0] == "pandas"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Refuse(), *sys.meta_path])
    assert len(trueup.load(frame).labels) == len(trueup.load(con.sql("from predictions")).labels) == 3000


@pytest.mark.parametrize("kind", ["list", "array", "arrow"])
def test_logits_keep_their_bits(frame, pair, kind):
    held = frame.with_columns(pl.Series("logits", pair.logits, dtype=pl.Array(pl.Float64, 3)))
    held = {"list": frame, "array": held, "arrow": held.to_arrow()}[kind]
    assert np.array_equal(trueup.load(held).logits, pair.logits)
    assert np.array_equal(load_logits(held), pair.logits)


def test_the_numbers_of_a_float32_array_stay_float32(pair):
    held = pl.DataFrame({"logits": pl.Series(pair.logits.astype(np.float32), dtype=pl.Array(pl.Float32, 3))})
    assert load_logits(held).dtype == np.float32


def test_a_query_with_names_weights_and_groups(con, pair):
    query = con.sql(f"select {', '.join(COLUMNS)}, animal::enum{tuple(NAMES)} animal, weight, site from predictions")
    fields = {"logits": COLUMNS, "labels": "animal", "probs": True, "class_names": NAMES}
    table = load_table(query, sample_weight="weight", groups="site", **fields)
    ours = trueup.evaluate(*table, **table.options())
    options = {"sample_weight": 1.0 + pair.labels, "groups": {"site": table.groups["site"]}}
    direct = trueup.evaluate(np.log(softmax(pair.logits)), pair.labels, **options)
    assert ours["nll"].value == pytest.approx(direct["nll"].value, abs=1e-12)
    assert (ours["ece"].low, ours["ece"].high) == pytest.approx((direct["ece"].low, direct["ece"].high), abs=1e-9)
    assert set(table.groups["site"]) == {"n", "s"}


def test_decimals_of_sql_are_numbers(con):
    query = con.sql("select p_ant::decimal(9, 8) stated, label = 0 correct from predictions")
    z = trueup.load(query, confidence="stated").logits
    assert z.shape == (3000, 2)
    assert np.exp(z[:, 1]) == pytest.approx(con.sql("select p_ant from predictions").fetchnumpy()["p_ant"], abs=1e-8)
    literal = trueup.load(con.sql("select [0.2, 0.8] probs, 1 label"), probs=True)
    assert np.exp(literal.logits) == pytest.approx(np.array([[0.2, 0.8]]))


def test_zeros_are_replaced_by_the_resolution_of_all_rows():
    p = np.tile([[0.95, 0.05, 0.0], [0.5, 0.25, 0.25]], (10, 1))
    with pytest.warns(UserWarning, match="10 exact zeros among 60"):
        z = trueup.load(pl.DataFrame({"probs": p.tolist(), "label": [0, 1] * 10}), probs=True).logits
    assert np.exp(z).min() == pytest.approx(0.025)


def test_rows_without_a_label_are_counted(frame):
    gaps = frame.with_columns(pl.when(pl.col("label") > 0).then("label").alias("label"))
    with pytest.warns(UserWarning, match=f"{(frame['label'] == 0).sum():,} rows were left out"):
        assert len(trueup.load(gaps).labels) == (frame["label"] > 0).sum()


def test_refusals(frame, con):
    for held, words in (
        (frame.lazy(), r"got a LazyFrame; .collect\(\) makes a table of it"),
        (con, r"got a DuckDBPyConnection; con.sql\(query\)"),
        (None, "path must be a file, an address or a data frame, got a NoneType"),
        (frame.select("label"), "must have logits"),
        (frame.drop("label"), "must have labels"),
        (frame.with_columns(logits=pl.lit("a")), "logits must be an array of real numbers, got string"),
        (con.sql("select p_ant, p_ant, label from predictions"), "got two named 'p_ant'"),
        (frame.select(pl.col("logits").list.head(pl.col("label") + 1), "label"), r"the same length in each row"),
        (frame.select(pl.concat_list(COLUMNS).alias("logits"), "label"), "must not be probabilities"),
        (frame.head(0), "at least 2 classes"),
    ):
        with pytest.raises(ValueError, match=words):
            trueup.load(held)
    with pytest.raises(ValueError, match="did you mean label"):
        trueup.load(frame, labels="lable")
    with pytest.raises(ValueError, match="sep must be left out"):
        trueup.load(frame, sep=";")
