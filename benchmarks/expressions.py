"""Agreement of a calibrator's expressions with Python, and the speed of an isotonic calibrator in DuckDB.

    python benchmarks/expressions.py agree        10⁵ rows per method, written to docs/expressions-agreement.csv
    python benchmarks/expressions.py speed        10⁷ rows, written to docs/expressions-speed.csv
    python benchmarks/expressions.py agree --small, speed --small       smoke runs of seconds, printed only

It needs duckdb, polars and node. The JavaScript is that of docs/how-to/expressions.md. The speed is the CPU time of
reading the rows, and of reading and calibrating them, on all cores; the best of five runs.
"""

from __future__ import annotations

import argparse
import csv
import re
import resource
import sqlite3
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from measured import fill, table, write_csv
from trueup import METHODS, fit
from trueup.calibrators.expression import Expression

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "how-to" / "expressions.md"
AGREEMENT, SPEED = DOCS / "expressions-agreement.csv", DOCS / "expressions-speed.csv"
NO_EXPRESSION = {"venn_abers", "venn_abers_cross", "bin_mean_shift", "density_ratio", "order_invariant"}
"""Methods without an expression."""
SLOW = {"auto", "residual", "diagonal_sms", "sms_cv"}
"""Methods whose fit takes long; their parts are those of other methods."""
MAX_DIFFERENCE = 1e-12
MIN_SPEED = 1 / 3
"""Smallest speed of reading and calibrating rows, as a share of the speed of reading them."""


def sample(rows: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Return overconfident logits and labels."""
    rng = np.random.default_rng(seed)
    z = rng.normal(size=(rows, classes)) * 2
    return z, (z * 0.6 + 0.3 * rng.normal(size=classes) + rng.gumbel(size=z.shape)).argmax(axis=1)


def softmax(z: np.ndarray) -> np.ndarray:
    """Return probabilities."""
    p = np.exp(z - z.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


def in_sqlite(expression: Expression, rows: np.ndarray) -> np.ndarray:
    """Return the outputs from SQLite; a NaN is stored as NULL."""
    with sqlite3.connect(":memory:") as database:
        columns = ", ".join(f"`{name}` REAL" for name in expression.columns)
        database.execute(f"CREATE TABLE predictions (number INTEGER PRIMARY KEY, {columns})")
        marks = ", ".join("?" * (1 + rows.shape[1]))
        numbered = ((i, *row) for i, row in enumerate(rows.tolist()))
        database.executemany(f"INSERT INTO predictions VALUES ({marks})", numbered)
        query = expression.to_sql(dialect="sqlite", keep=["number"])
        results = database.execute(f"SELECT * FROM ({query}) ORDER BY number").fetchall()
    return np.array(results, dtype=np.float64)[:, 1:]


def in_duckdb(expression: Expression, rows: np.ndarray) -> np.ndarray:
    """Return the outputs from DuckDB."""
    import duckdb
    import pyarrow as pa

    table = {"number": pa.array(np.arange(len(rows)))}
    table |= {name: pa.array(column) for name, column in zip(expression.columns, rows.T, strict=True)}
    with duckdb.connect() as database:
        database.register("predictions", pa.table(table))
        query = expression.to_sql(dialect="duckdb", keep=["number"])
        results = database.execute(f"SELECT * FROM ({query}) ORDER BY number").fetchnumpy()
    return np.stack([np.ma.filled(results[name], np.nan) for name in expression.outputs], axis=1)


def in_polars(expression: Expression, rows: np.ndarray) -> np.ndarray:
    """Return the outputs from polars."""
    import polars as pl

    frame = pl.DataFrame(dict(zip(expression.columns, rows.T, strict=True)))
    results = frame.select(expression.to_polars())
    return np.stack([results[name].fill_null(float("nan")).to_numpy() for name in expression.outputs], axis=1)


def in_node(expression: Expression, rows: np.ndarray) -> np.ndarray:
    """Return the outputs from the JavaScript of the manual."""
    (reader,) = re.findall(r"```javascript\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    driver = """
const fs = require("fs"), spec = JSON.parse(fs.readFileSync("spec.json")), width = spec.columns.length;
const bytes = fs.readFileSync("rows.bin"), x = new Float64Array(bytes.buffer, bytes.byteOffset, bytes.length / 8);
const out = new Float64Array(x.length / width * spec.outputs.length);
for (let i = 0; i * width < x.length; i++) {
  const row = apply(spec, Array.from(x.subarray(i * width, (i + 1) * width)));
  out.set(row === null ? spec.outputs.map(() => NaN) : row, i * spec.outputs.length);
}
fs.writeFileSync("out.bin", out);
"""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "run.js").write_text(reader + driver, encoding="utf-8")
        Path(folder, "spec.json").write_text(expression.to_json(), encoding="utf-8")
        Path(folder, "rows.bin").write_bytes(np.ascontiguousarray(rows, dtype=np.float64).tobytes())
        subprocess.run(["node", "run.js"], cwd=folder, check=True)
        return np.fromfile(Path(folder, "out.bin")).reshape(len(rows), -1)


ENGINES: dict[str, Callable[[Expression, np.ndarray], np.ndarray]] = {
    "duckdb": in_duckdb,
    "sqlite": in_sqlite,
    "polars": in_polars,
    "javascript": in_node,
}


def expected_results(calibrator: Any, expression: Expression, z: np.ndarray) -> np.ndarray:
    """Return what the calibrator itself gives for logits of all classes."""
    if expression.outputs == ("confidence_calibrated",):
        *before, final = getattr(calibrator, "steps", [calibrator])
        for part in before:
            z = part(z)
        return final.confidence(z)[:, None]
    p = softmax(calibrator(z))
    return p[:, 1:] if len(expression.outputs) == 1 else p


def fitted(classes: int, rows: int = 1000) -> Iterator[tuple[str, Any]]:
    """Return the methods that have an expression, and fitted calibrators."""
    z, y = sample(rows, classes)
    for name in METHODS:
        if name not in SLOW | NO_EXPRESSION and "hidden" not in name:
            yield name, fit(z, y, name)


def cases(calibrator: Any, z: np.ndarray) -> Iterator[tuple[Expression, np.ndarray, np.ndarray]]:
    """Return expressions in logits, probabilities and the score of an event, with rows and the calibrator's results."""
    p, classes = softmax(z), z.shape[1]
    kinds = [("logits", z, z), ("probs", p, np.log(p))]
    if classes == 2:
        odds, risk = z[:, 1:] - z[:, :1], p[:, 1:]
        kinds += [("logits", odds, np.hstack([0 * odds, odds])), ("probs", risk, np.log(np.hstack([1 - risk, risk])))]
    for kind, rows, logits in kinds:
        try:
            expression = calibrator.to_expression([f"z{k}" for k in range(rows.shape[1])], input=kind)
        except ValueError:  # a calibrator of the predicted class needs the columns of all classes
            if rows.shape[1] == 1:
                continue
            raise
        if rows.shape[1] > 1 or expression.outputs == ("z0_calibrated",):
            yield expression, rows, expected_results(calibrator, expression, logits)


def agree(rows: int, engines: Sequence[str]) -> list[dict[str, Any]]:
    """Return the largest difference from the calibrator, by method and engine."""
    records = []
    for classes in (2, 4):
        z = sample(rows, classes, 1)[0]
        for name, calibrator in fitted(classes):
            record: dict[str, Any] = {"method": name, "classes": classes, "rows": rows}
            for expression, x, expected in cases(calibrator, z):
                for engine in ("python", *engines):
                    results = expression(x) if engine == "python" else ENGINES[engine](expression, x)
                    difference = float(np.abs(results - expected).max())
                    record[engine] = max(record.get(engine, 0.0), difference)
            records.append(record)
            print(record, flush=True)
    return records


def speed(rows: int) -> list[dict[str, Any]]:
    """Measure DuckDB reading rows, and reading and calibrating them."""
    import duckdb

    z, y = sample(20_000, 2)
    expression = fit(z, y, "isotonic").to_expression("score", input="probs")
    breaks = len(expression.steps[-1]["curves"][0]["breaks"])
    records = []
    with tempfile.TemporaryDirectory() as folder, duckdb.connect() as database:
        made = f"SELECT i AS id, 1 / (1 + EXP(4 - 8 * RANDOM())) AS score FROM RANGE({rows}) AS r(i)"
        database.execute(f"CREATE TABLE made AS {made}")
        for kind in ("parquet", "csv"):
            database.execute(f"COPY made TO '{folder}/rows.{kind}' (FORMAT {kind})")
            database.execute(f"CREATE VIEW {kind}_rows AS SELECT * FROM '{folder}/rows.{kind}'")
        for source, target in (("csv", "average"), ("csv", "numpy"), ("parquet", "numpy"), ("parquet", "average")):
            raw = f"SELECT id, score AS score_calibrated FROM {source}_rows"
            query = expression.to_sql(dialect="duckdb", table=f"{source}_rows", keep=["id"])
            seconds = [_cpu_seconds(database, each, target) for each in (raw, query)]
            share = seconds[0] / seconds[1]
            named = {"source": source, "result": target, "rows": rows, "breaks": breaks}
            records.append(named | {"read": seconds[0], "read_and_calibrate": seconds[1], "share": share})
            print(records[-1], flush=True)
    return records


def _cpu_seconds(database: Any, query: str, target: str) -> float:
    best = np.inf
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_SELF)
        if target == "numpy":
            database.execute(query).fetchnumpy()
        else:
            database.execute(f"SELECT AVG(id), AVG(score_calibrated) FROM ({query})").fetchall()
        after = resource.getrusage(resource.RUSAGE_SELF)
        best = min(best, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return best


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["agree", "speed"])
    parser.add_argument("--engines", nargs="+", choices=list(ENGINES), default=list(ENGINES))
    parser.add_argument("--small", action="store_true")
    options = parser.parse_args(arguments)
    if options.what == "agree":
        records = agree(500 if options.small else 100_000, options.engines)
        worst = max(record[engine] for record in records for engine in ("python", *options.engines))
        print(f"Largest difference: {worst:.1e} (bar {MAX_DIFFERENCE:g})")
    else:
        records = speed(10_000 if options.small else 10_000_000)
        print(f"Bar: a share of {MIN_SPEED:.2f} of the speed of reading")
    if not options.small:
        path = AGREEMENT if options.what == "agree" else SPEED
        numbers = [[f"{v:.3g}" if isinstance(v, float) else str(v) for v in record.values()] for record in records]
        write_csv(path, [list(records[0]), *numbers])
        fill(PAGE, summary())


def summary() -> str:
    """Return the stored measurements as two tables."""
    parts = []
    if AGREEMENT.exists():
        records = _read(AGREEMENT)
        engines = [name for name in records[0] if name not in ("method", "classes", "rows")]
        cells = [["", *engines], ["largest difference"]]
        cells[1] += [f"{max(float(record[engine]) for record in records):.1e}" for engine in engines]
        methods, rows = len({record["method"] for record in records}), int(records[0]["rows"])
        parts += [f"Difference from the calibrator, over {methods} methods with {rows:,} rows each:", table(cells)]
    if SPEED.exists():
        records = _read(SPEED)
        cells = [["rows from", "result", "reading", "reading and calibrating", "share of the speed"]]
        for r in records:
            share = f"{float(r['share']):.2f}"
            cells.append([r["source"], r["result"], f"{r['read']} s", f"{r['read_and_calibrate']} s", share])
        rows, breaks = int(records[0]["rows"]), records[0]["breaks"]
        head = f"DuckDB, CPU time for {rows:,} rows and an isotonic calibrator with {breaks} breaks:"
        parts += [head, table(cells)]
    return "\n\n".join(parts)


def _read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()
