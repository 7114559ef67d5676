"""Run the steps of an expression: on NumPy arrays, and on the texts of SQL.

The meaning of the steps is written once, in `_run`, for any kind of number with the four operations. `_Arrays` and
`_Query` add what differs: exponential, logarithm, maximum, the choice of a piece, and names of intermediate results.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, get_args

import numpy as np

from trueup._core.arrays import shape_of, to_array
from trueup._core.errors import InputError
from trueup._core.types import ArrayLike
from trueup.calibrators.expression import Dialect, Expression, Step

LIMIT = 700.0
"""exp(x) is 0 below −700, and e⁷⁰⁰ above 700, so that no database reports an overflow."""


def _run(steps: Sequence[Step], x: list[Any], a: _Arrays | _Query) -> list[Any]:
    """Apply the steps to the numbers of a row."""
    for number, step in enumerate(steps):
        x = _STEPS[step["op"]](x if number == 0 else a.bind(x), step, a)
    return x


def _total(x: Sequence[Any]) -> Any:
    return reduce(add, x)


def _softmax(x: list[Any], step: Step, a: _Arrays | _Query) -> list[Any]:
    (top,) = a.bind([a.maximum(x)])
    return _normalise(a.bind([a.exp(v - top) for v in x]), step, a)


def _normalise(x: list[Any], step: Step, a: _Arrays | _Query) -> list[Any]:
    (total,) = a.bind([_total(x)])
    return [v / total for v in x]


def _log_sums(groups: list[list[Any]], a: _Arrays | _Query) -> list[Any]:
    """Return the logarithm of the summed exponentials of each group of numbers."""
    tops = a.bind([a.maximum(group) for group in groups])
    parts = [a.bind([a.exp(v - top) for v in group]) for group, top in zip(groups, tops, strict=True)]
    return [top + a.log(_total(part)) for top, part in zip(tops, parts, strict=True)]


def _log_odds(x: list[Any], step: Step, a: _Arrays | _Query) -> list[Any]:
    if len(x) == 2:
        return [x[0] - x[1], x[1] - x[0]]
    return [v - rest for v, rest in zip(x, _log_sums([x[:k] + x[k + 1 :] for k in range(len(x))], a), strict=True)]


def _log_sigmoid(x: list[Any], step: Step, a: _Arrays | _Query) -> list[Any]:
    # With t = exp(−|x|), ln σ(x) = min(x, 0) − ln(1 + t).
    sizes = a.bind([a.maximum([v, -v]) for v in x])
    return [(v - size) * 0.5 - a.log(a.exp(-size) + 1.0) for v, size in zip(x, sizes, strict=True)]


def _matrix(x: list[Any], step: Step, a: _Arrays | _Query) -> list[Any]:
    def row(weights: Sequence[float], bias: float) -> Any:
        total = _total([v if w == 1 else v * w for v, w in zip(x, weights, strict=True) if w] or [x[0] * 0.0])
        return total + bias if bias else total

    return [row(weights, bias) for weights, bias in zip(step["weight"], step["bias"], strict=True)]


def _piecewise(x: list[Any], step: Step, a: _Arrays | _Query) -> list[Any]:
    curves = step["curves"] * len(x) if len(step["curves"]) == 1 else step["curves"]
    return [a.choose(v, curve) for v, curve in zip(x, curves, strict=True)]


def _mix(x: list[Any], step: Step, a: _Arrays | _Query) -> list[Any]:
    branches = [_run(branch, x, a) for branch in step["branches"]]
    return [
        _total([v * w for v, w in zip(values, step["weights"], strict=True)]) for values in zip(*branches, strict=True)
    ]


_STEPS: dict[str, Callable[[list[Any], Step, Any], list[Any]]] = {
    "log": lambda x, step, a: [a.log(v) for v in a.bind([a.at_least(v, step["floor"]) for v in x])],
    "log_odds": _log_odds,
    "log_sigmoid": _log_sigmoid,
    "logsumexp": lambda x, step, a: [*x, *_log_sums([x], a)],
    "matrix": _matrix,
    "max": lambda x, step, a: [a.maximum(x)],
    "mix": _mix,
    "normalise": _normalise,
    "piecewise": _piecewise,
    "sigmoid": lambda x, step, a: [1.0 / (a.exp(-v) + 1.0) for v in x],
    "softmax": _softmax,
}


def _polynomial(x: Any, coefficients: Sequence[float], origin: float) -> Any:
    """Return the polynomial in x − origin by Horner's rule; a constant stays a number."""
    u = x - origin if origin and len(coefficients) > 1 else x
    value: Any = coefficients[-1]
    for c in coefficients[-2::-1]:
        value = value * u if not isinstance(value, float) else u if value == 1 else u * value
        value = value + c if c else value
    return value


def origins(curve: Step) -> list[float]:
    """Return for each piece of a curve the number whose difference from x its polynomial takes."""
    breaks = curve["breaks"]
    return [breaks[0], *breaks] if breaks else [0.0]


def _padded(pieces: Sequence[Sequence[float]]) -> np.ndarray:
    """Return the coefficients as an array, padded with zeros: one row per piece."""
    width = max(map(len, pieces))
    return np.array([[*piece, *[0.0] * (width - len(piece))] for piece in pieces])


class _Arrays:
    """Numbers are float64 arrays (n,); NaN has no result."""

    def exp(self, x: Any) -> Any:
        return np.where(x < -LIMIT, 0.0, np.exp(np.clip(x, -LIMIT, LIMIT)))

    def log(self, x: Any) -> Any:
        return np.log(x)

    def at_least(self, x: Any, low: float) -> Any:
        return np.maximum(x, low)

    def maximum(self, x: Sequence[Any]) -> Any:
        return reduce(np.maximum, x)

    def choose(self, x: Any, curve: Step) -> Any:
        table = _padded(curve["coefficients"])
        piece = np.searchsorted(curve["breaks"], x, side="right" if curve["closed"] == "left" else "left")
        u = x - np.take(origins(curve), piece)
        value = table[piece, -1]
        for power in range(table.shape[1] - 2, -1, -1):
            value = value * u + table[piece, power]
        return np.where(np.isnan(x), np.nan, value)

    def bind(self, x: list[Any]) -> list[Any]:
        return x


def evaluate(expression: Expression, rows: ArrayLike) -> np.ndarray:
    """Return the outputs of rows (n, columns), shape (n, outputs); NaN where a row has no result."""
    x = to_array(rows, "rows").astype(np.float64)
    if x.ndim != 2 or x.shape[1] != len(expression.columns):
        raise InputError("rows", f"have shape (n, {len(expression.columns)})", shape_of(x))
    valid = np.isfinite(x)
    if (low := expression.low) is not None and (high := expression.high) is not None:
        valid &= ((low < x) & (x < high)) if expression.open_range else ((low <= x) & (x <= high))
    with np.errstate(all="ignore"):
        outputs = np.stack(_run(expression.steps, list(np.where(valid, x, np.nan).T), _Arrays()), axis=1)
    return np.where(valid.all(axis=1, keepdims=True), outputs, np.nan)


def to_polars(expression: Expression) -> list[Any]:
    """Return a polars expression for each output: it evaluates batches with NumPy.

    Native expressions have no names for intermediate results, so they would repeat each as often as it is used.
    """
    import polars as pl

    rows = pl.struct([pl.col(name).cast(pl.Float64) for name in expression.columns])

    def output(number: int, name: str) -> Any:
        def run(batch: Any) -> Any:
            return pl.Series(evaluate(expression, batch.struct.unnest().to_numpy())[:, number], nan_to_null=True)

        return rows.map_batches(run, return_dtype=pl.Float64, is_elementwise=True).alias(name)

    return [output(number, name) for number, name in enumerate(expression.outputs)]


_MIN_BREAKS_FOR_GRID = 16  # below, a CASE of as many branches is as fast
_CELLS_PER_BREAK = 16
_MAX_BREAKS_PER_CELL = 16
_RANGES_FOR_GRID = (1e-200, 1e200)  # of the breaks: nothing overflows
_LARGEST = float(np.finfo(np.float64).max)


def _operator(sign: str) -> Callable[[_Text, Any], _Text]:
    """Return the method of an operator."""
    return lambda one, other: _Text(f"({one.sql} {sign} {_text(other)})")


@dataclass(frozen=True)
class _Text:
    """A number as SQL."""

    sql: str

    __add__ = _operator("+")
    __sub__ = _operator("-")
    __mul__ = _operator("*")
    __truediv__ = _operator("/")

    def __rtruediv__(self, other: float) -> _Text:
        return _Text(f"({_text(other)} / {self.sql})")

    def __neg__(self) -> _Text:
        return _Text(f"(-{self.sql})")


def _text(x: Any) -> str:
    """Return a number as SQL; an exponent makes a literal a double and not a decimal."""
    if isinstance(x, _Text):
        return x.sql
    number = repr(float(x))
    number = number if "e" in number else f"{number}e0"
    return f"({number})" if x < 0 else number


@dataclass
class _Query:
    """Numbers are SQL; each `bind` adds a common table expression whose columns name the intermediate results."""

    dialect: str
    source: str
    """The table, or the last common table expression."""
    columns: int = 0
    tables: list[str] = field(default_factory=list)
    """The common table expressions; nested subqueries would overflow the stack of SQLite's parser."""

    def exp(self, x: Any) -> Any:
        low, high = _text(-LIMIT), _text(LIMIT)
        ends = f"WHEN {x.sql} < {low} THEN 0e0 WHEN {x.sql} > {high} THEN {_text(math.exp(LIMIT))}"
        return _Text(f"CASE {ends} ELSE EXP({x.sql}) END")

    def log(self, x: Any) -> Any:
        return _Text(f"LN({x.sql})")

    def at_least(self, x: Any, low: float) -> Any:
        return _Text(f"CASE WHEN {x.sql} < {_text(low)} THEN {_text(low)} ELSE {x.sql} END")

    def maximum(self, x: Sequence[Any]) -> Any:
        name = "MAX" if self.dialect == "sqlite" else "GREATEST"
        return _Text(f"{name}({', '.join(v.sql for v in x)})")

    def choose(self, x: Any, curve: Step) -> Any:
        breaks, pieces, at = curve["breaks"], curve["coefficients"], origins(curve)
        if not breaks:
            value = _polynomial(x, pieces[0], 0.0)
            return value if isinstance(value, _Text) else x * 0.0 + value
        low, high = _RANGES_FOR_GRID
        if self.dialect == "duckdb" and len(breaks) >= _MIN_BREAKS_FOR_GRID and low < breaks[-1] - breaks[0] < high:
            scale = 2.0 ** math.ceil(math.log2(_CELLS_PER_BREAK * len(breaks) / (breaks[-1] - breaks[0])))
            cells = np.floor((np.array(breaks) - breaks[0]) * scale).astype(np.int64)
            if np.bincount(cells).max() <= _MAX_BREAKS_PER_CELL:
                return self._look_up(x, curve, scale, cells)
        less, more = ("<", ">=") if curve["closed"] == "left" else ("<=", ">")

        def tree(low: int, high: int) -> str:
            if low == high:
                return _text(_polynomial(x, pieces[low], at[low]))
            middle = (low + high) // 2
            root = (low, high) == (0, len(breaks))
            # The root states both conditions, so that NULL has no result.
            at_least = f"WHEN {x.sql} {more} {_text(breaks[middle])} THEN" if root else "ELSE"
            first, second = tree(low, middle), tree(middle + 1, high)
            return f"CASE WHEN {x.sql} {less} {_text(breaks[middle])} THEN {first} {at_least} {second} END"

        return _Text(tree(0, len(breaks)))

    def _look_up(self, x: Any, curve: Step, scale: float, cells: np.ndarray) -> Any:
        """Find the piece of x in a list by its cell, and look up the coefficients of the piece in lists.

        DuckDB spends 0.5 µs per node of a CASE on each 2,048 rows, so that 200 breaks would take 50 ns per row. A cell
        number never falls as x rises, so x is compared with the breaks in its cell only. A cell that has breaks holds
        the negative number of the piece before them.
        """
        breaks, less, crowd = curve["breaks"], "<" if curve["closed"] == "left" else "<=", int(np.bincount(cells).max())
        table = _padded(curve["coefficients"])
        of_cell = 1 + np.searchsorted(cells, np.arange(cells[-1] + 1))
        of_cell[cells] *= -1
        numbers = [
            map(str, of_cell.tolist()),
            *(map(_text, each) for each in ([*breaks, *[_LARGEST] * crowd], *table.T, origins(curve))),
        ]
        lists = self.bind([_Text(f"(SELECT [{', '.join(each)}])") for each in numbers])
        (pieces_of_cells, cuts, *coefficients, origin) = (each.sql for each in lists)
        ends = f"WHEN {x.sql} <= {_text(breaks[0])} THEN 1 WHEN {x.sql} >= {_text(breaks[-1])} THEN {len(of_cell)}"
        cell = f"CASE {ends} ELSE CAST(FLOOR(({x.sql} - {_text(breaks[0])}) * {_text(scale)}) AS INTEGER) + 1 END"
        (k,) = (each.sql for each in self.bind([_Text(f"{pieces_of_cells}[{cell}]")]))
        branches = [f"WHEN {x.sql} {less} {cuts}[{i} - {k}] THEN {i} - {k}" for i in range(crowd)]
        (piece,) = self.bind([_Text(f"CASE WHEN {k} > 0 THEN {k} {' '.join(branches)} ELSE {crowd} - {k} END")])
        *low, value = [_Text(f"{each}[{piece.sql}]") for each in coefficients]
        u = x - _Text(f"{origin}[{piece.sql}]")
        for coefficient in reversed(low):
            value = value * u + coefficient
        return value

    def bind(self, x: list[Any]) -> list[Any]:
        names = [_Text(f"trueup_{self.columns + k}") for k in range(len(x))]
        self.columns += len(x)
        items = ", ".join(f"{value.sql} AS {name.sql}" for value, name in zip(x, names, strict=True))
        table = f"trueup_table_{len(self.tables) + 1}"
        self.tables.append(f"{table} AS {_KEPT.get(self.dialect, '')}(SELECT t.*, {items} FROM {self.source} AS t)")
        self.source = table
        return names


_KEPT = {"duckdb": "NOT MATERIALIZED ", "sqlite": "MATERIALIZED ", "postgres": "MATERIALIZED "}
"""SQLite and PostgreSQL would otherwise compute an intermediate result as often as it is used."""
_DOUBLE = {"sqlite": "REAL", "postgres": "DOUBLE PRECISION", "bigquery": "FLOAT64"}


def _quote(name: str, dialect: str) -> str:
    """Quote a name; whatever it holds stays a name."""
    if not isinstance(name, str) or not name or "\0" in name:
        raise InputError("a name", "be a text that is not empty", repr(name))
    if dialect == "bigquery":
        return "`" + name.replace("\\", "\\\\").replace("`", "\\`") + "`"
    if dialect in ("spark", "sqlite"):  # SQLite takes "name" for a text if there is no such column
        return "`" + name.replace("`", "``") + "`"
    return '"' + name.replace('"', '""') + '"'


def to_sql(expression: Expression, *, dialect: Dialect, table: str | Sequence[str], keep: Sequence[str]) -> str:
    """Return a query that computes the outputs, and keeps some columns."""
    if dialect not in get_args(Dialect):
        raise InputError("dialect", f"be one of {', '.join(get_args(Dialect))}", repr(dialect))
    source = ".".join(_quote(part, dialect) for part in ((table,) if isinstance(table, str) else table))
    query = _Query(dialect, source)
    double = _DOUBLE.get(dialect, "DOUBLE")

    def read(name: str) -> _Text:
        x = f"CAST(t.{_quote(name, dialect)} AS {double})"
        if expression.low is None:
            return _Text(f"CASE WHEN {x} - {x} = 0 THEN {x} END")  # infinity less itself is no number
        less = "<" if expression.open_range else "<="
        return _Text(
            f"CASE WHEN {_text(expression.low)} {less} {x} AND {x} {less} {_text(expression.high)} THEN {x} END"
        )

    numbers = query.bind([read(name) for name in expression.columns])
    outputs = _run(expression.steps, numbers, query)
    kept = [f"t.{_quote(name, dialect)}" for name in keep]
    items = [f"{_text(x)} AS {_quote(name, dialect)}" for x, name in zip(outputs, expression.outputs, strict=True)]
    tables = ",\n".join(query.tables)
    return f"WITH {tables}\nSELECT {', '.join(kept + items)} FROM {query.source} AS t"
