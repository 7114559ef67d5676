"""Expressions of calibrators: SQL, polars, JavaScript and Python give what the calibrator gives."""

import csv
import importlib
import math
import shutil
import sqlite3
from pathlib import Path

import numpy as np
import pytest

from trueup import METHODS, fit
from trueup.calibrators import Temperature
from trueup.calibrators.expression import Expression, Formula, curve, lines, piecewise, stairs

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "expressions.py"
NEEDED = {"duckdb": "duckdb", "polars": "polars"}


@pytest.fixture(scope="module")
def bench():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARK.parent))
        return importlib.import_module("expressions")


@pytest.fixture(params=["python", "sqlite", "javascript", "duckdb", "polars"])
def run(request, bench):
    """Return a function that evaluates an expression on rows, in one engine."""
    if request.param == "javascript" and shutil.which("node") is None:
        pytest.skip("node is not installed")
    if request.param in NEEDED:
        pytest.importorskip(NEEDED[request.param], reason="make test-integrations installs it")
    return bench.ENGINES.get(request.param, lambda expression, rows: expression(rows))


def identity_of(step, **options):
    """Return an expression that applies one step to the probability of an event."""
    formula = Formula("event", (step,), "event")
    return Expression.of("Test", lambda classes: formula, "score", input="probs", **options)


@pytest.mark.parametrize("classes", [2, 4])
def test_every_kind_of_chain_on_logits_probabilities_and_scores(bench, run, classes):
    """The benchmark runs each method; here, methods with the same steps as an earlier one are left out."""
    z, tried = bench.sample(300, classes, 1)[0], set()
    for name, calibrator in bench.fitted(classes):
        for expression, rows, expected in bench.cases(calibrator, z):
            chain = len(expression.columns), *(step["op"] for step in expression.steps)
            if chain not in tried:
                results = run(expression, rows)
                np.testing.assert_allclose(
                    results, expected, atol=1e-12, rtol=0, err_msg=f"{name} {expression.columns}"
                )
                tried.add(chain)
    assert len(tried) >= 15


def test_extreme_logits(bench, run):
    z = np.concatenate([np.zeros((1, 3)), 40 * np.eye(3), 800 * np.eye(3), -800 * np.eye(3)])
    for method in ("temperature", "vector", "dirichlet", "beta"):
        calibrator = fit(*bench.sample(500, 3), method)
        expression = calibrator.to_expression(["a", "b", "c"])
        np.testing.assert_allclose(run(expression, z), bench.expected_results(calibrator, expression, z), atol=1e-12)


def test_rows_without_a_valid_number_stay_and_have_no_result(bench, run):
    calibrator = fit(*bench.sample(3000, 2), "isotonic")
    bad = np.array([[math.nan], [math.inf], [-math.inf], [-0.1], [1.1]])
    rows = np.concatenate([bad, [[0.3], [0.0], [1.0]], bad])
    results = run(calibrator.to_expression("score", input="probs"), rows)
    assert np.isnan(results[:5]).all()
    assert np.isnan(results[8:]).all()
    assert np.isfinite(results[5:8]).all()
    two = np.array([[1.0, math.nan], [math.inf, 0.0], [2.0, 0.0]])
    results = run(Temperature(2.0).to_expression(["a", "b"]), two)
    assert np.isnan(results[:2]).all()
    np.testing.assert_allclose(results[2], bench.softmax(np.array([[1.0, 0.0]]))[0], atol=1e-15)


def steps_and_lines():
    """Return curves with many breaks: even, clustered, equal, tiny apart, and far apart."""
    rng = np.random.default_rng(0)
    even = np.linspace(0.1, 0.9, 200)
    close = np.sort(np.concatenate([0.5 + 1e-12 * np.arange(10), rng.random(40)]))
    doubled = np.sort(np.repeat(rng.random(30), 2))
    crowded = np.concatenate([np.nextafter(0.25, 1) * (1 + 2.0**-50 * np.arange(60)), [0.9]])
    skewed = np.geomspace(1e-12, 0.9, 64)
    for breaks in (even, close, doubled, crowded, skewed, even[:20] * 1e-250, even[:3]):
        values = np.sort(rng.random(len(breaks) + 1))
        for left_closed in (True, False):
            yield breaks, stairs(breaks, values, left_closed=left_closed)
            yield breaks, stairs(breaks, values, 1e-3, left_closed=left_closed)
        yield breaks, lines(breaks, values[:-1])
    pieces = rng.random((len(even) + 1, 4)) * 0.1
    yield even, curve(even, pieces)


def test_curves_at_their_breaks_and_next_to_them(run):
    rng = np.random.default_rng(1)
    for breaks, step in steps_and_lines():
        at = np.concatenate([breaks, np.nextafter(breaks, 0), np.nextafter(breaks, 1), rng.random(200), [0.0, 1.0]])
        expression = identity_of(piecewise(step))
        x = at[:, None]
        kept = np.array(step["breaks"])
        piece = np.searchsorted(kept, at, side="right" if step["closed"] == "left" else "left")
        origin = np.concatenate([kept[:1], kept])[piece]
        powers = (at - origin)[:, None] ** np.arange(4)
        coefficients = np.array([[*c, *[0.0] * (4 - len(c))] for c in step["coefficients"]])[piece]
        np.testing.assert_allclose(run(expression, x)[:, 0], (coefficients * powers).sum(axis=1), atol=1e-12, rtol=0)


def test_json_gives_the_expression_again(bench):
    for _, calibrator in bench.fitted(2):
        expression = calibrator.to_expression(["a", "b"])
        again = Expression.from_json(expression.to_json())
        assert again.to_json() == expression.to_json()
        z = bench.sample(20, 2)[0]
        assert np.array_equal(again(z), expression(z))
    with pytest.raises(ValueError, match="be a trueup-expression of version 1, got trueup-expression of version 2"):
        Expression.from_json(expression.to_json().replace('"version": 1', '"version": 2'))


def test_methods_without_an_expression_say_why(bench):
    z, y = bench.sample(300, 3)
    for name in ("venn_abers", "bin_mean_shift"):
        with pytest.raises(ValueError, match="has no expression: "):
            fit(z, y, name).to_sql(["a", "b", "c"])
    assert set(METHODS) >= bench.NO_EXPRESSION


@pytest.mark.parametrize("dialect", ["duckdb", "sqlite", "postgres", "spark", "bigquery"])
def test_names_stay_names_in_each_dialect(bench, dialect):
    calibrator = fit(*bench.sample(3000, 2), "isotonic")
    query = calibrator.to_sql(
        'a"; DROP TABLE `x`', dialect=dialect, table=["my schema", "t"], keep=["id"], input="probs"
    )
    quoted = {
        "duckdb": '"a""; DROP TABLE `x`"',
        "postgres": '"a""; DROP TABLE `x`"',
        "bigquery": '`a"; DROP TABLE \\`x\\``',
    }
    assert quoted.get(dialect, '`a"; DROP TABLE ``x```') in query
    mark = '"' if dialect in ("duckdb", "postgres") else "`"
    assert f"FROM {mark}my schema{mark}.{mark}t{mark} AS t" in query
    assert f"SELECT t.{mark}id{mark}, " in query


def test_wide_tables_do_not_take_long_in_sqlite(bench):
    """An intermediate result is computed once, not as often as it is used."""
    calibrator = fit(*bench.sample(2000, 10), "dirichlet")
    z = bench.sample(200, 10, 1)[0]
    expression = calibrator.to_expression([f"z{k}" for k in range(10)], input="probs")
    np.testing.assert_allclose(
        bench.in_sqlite(expression, bench.softmax(z)), bench.softmax(calibrator(np.log(bench.softmax(z)))), atol=1e-12
    )


def test_a_text_in_a_column_has_no_result():
    query = Temperature(2.0).to_sql("score", dialect="sqlite", input="probs", keep=["id"])
    with sqlite3.connect(":memory:") as database:
        database.execute("CREATE TABLE predictions (id INTEGER, score)")
        database.executemany("INSERT INTO predictions VALUES (?, ?)", [(1, "0.5"), (2, None), (3, 2)])
        results = database.execute(query).fetchall()
    assert results == [(1, pytest.approx(0.5)), (2, None), (3, None)]


@pytest.mark.parametrize("what", ["agree", "speed"])
def test_the_benchmark_runs(bench, what, capsys):
    pytest.importorskip("duckdb", reason="make test-integrations installs it")
    if what == "agree":
        records = bench.agree(50, ["sqlite"])
        assert max(record["sqlite"] for record in records) <= bench.MAX_DIFFERENCE
    else:
        records = bench.speed(5000)
        assert {record["source"] for record in records} == {"csv", "parquet"}
        assert all(record["share"] > 0 for record in records)


def test_the_stored_measurements_keep_their_bars_and_are_on_the_page(bench):
    with bench.AGREEMENT.open(newline="") as file:
        records = list(csv.DictReader(file))
    assert {record["method"] for record in records} >= {
        "temperature",
        "platt",
        "beta",
        "isotonic",
        "histogram",
        "spline",
    }
    for record in records:
        assert int(record["rows"]) == 100_000
        assert max(float(record[engine]) for engine in ("python", *bench.ENGINES)) <= bench.MAX_DIFFERENCE
    with bench.SPEED.open(newline="") as file:
        speeds = {(record["source"], record["result"]): float(record["share"]) for record in csv.DictReader(file)}
    for read in (("csv", "average"), ("csv", "numpy"), ("parquet", "numpy")):
        assert speeds[read] >= bench.MIN_SPEED
    assert bench.summary() in bench.PAGE.read_text(encoding="utf-8")
