"""A calibrator as an expression: a chain of arithmetic steps that SQL, polars and other languages can run.

Each calibrator states its steps once, in `Calibrator.formula`. An `Expression` adds the named columns of a table.
`trueup.calibrators.interpreters` runs the steps; their meaning is written there once, for numbers and for texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, Self, TypeAlias

import numpy as np

from trueup._core.errors import InputError
from trueup._core.types import ArrayLike

if TYPE_CHECKING:
    from polars import Expr

FORMAT, VERSION = "trueup-expression", 1
"""The name and the version of the JSON specification; a change of meaning raises the version."""

Step: TypeAlias = Mapping[str, Any]
"""One step, as in the specification: its name `op`, and lists of numbers."""
Form: TypeAlias = Literal["logits", "probs", "event", "event_odds", "top", "top_odds"]
"""The meaning of a row's numbers: logits or probabilities of all classes, P(class 1) of two classes or its log-odds, or
the confidence in the predicted class or its log-odds."""
Input: TypeAlias = Literal["logits", "probs"]
Dialect: TypeAlias = Literal["duckdb", "sqlite", "postgres", "spark", "bigquery"]

_ROUNDED = 1e-6  # a probability among several may exceed 1 by this: sums in single precision do


@dataclass(frozen=True)
class Formula:
    """The steps of a calibrator, with the form of the numbers that they read and of those that they return."""

    reads: Form
    steps: tuple[Step, ...]
    gives: Form


def op(name: str) -> Step:
    """Return a step without parameters."""
    return {"op": name}


def matrix(weight: ArrayLike, bias: ArrayLike | None = None) -> Step:
    """Return the step x ↦ W x + b."""
    w = np.asarray(weight, dtype=np.float64)
    b = np.zeros(len(w)) if bias is None else np.asarray(bias, dtype=np.float64)
    return {"op": "matrix", "weight": w.tolist(), "bias": b.tolist()}


def piecewise(*curves: Step) -> Step:
    """Return the step that applies one curve to all numbers, or a curve to each."""
    return {"op": "piecewise", "curves": list(curves)}


def polynomial(*coefficients: float) -> Step:
    """Return a polynomial, lowest power first."""
    return {"breaks": [], "closed": "left", "coefficients": [[float(c) for c in coefficients]]}


def scale(factor: float) -> Step:
    """Return the step x ↦ factor·x."""
    return piecewise(polynomial(0.0, factor))


def curve(breaks: Iterable[float], coefficients: Sequence[Iterable[float]], *, left_closed: bool = True) -> Step:
    """Return a piecewise polynomial, in powers of x less the break on the left of a piece.

    The first piece takes the first break. Breaks between two equal constants are dropped.
    """
    kept, pieces = [], [[float(c) for c in coefficients[0]]]
    for at, piece in zip(breaks, coefficients[1:], strict=True):
        numbers = [float(c) for c in piece]
        if len(numbers) > 1 or numbers != pieces[-1]:
            kept.append(float(at))
            pieces.append(numbers)
    return {"breaks": kept, "closed": "left" if left_closed else "right", "coefficients": pieces}


def lines(knots: np.ndarray, values: np.ndarray, order_weight: float = 0.0) -> Step:
    """Return linear interpolation between knots, constant outside, plus `order_weight` times x."""
    last_of_ties = np.append(np.diff(knots) > 0, True)
    x, y = knots[last_of_ties], values[last_of_ties]
    with np.errstate(over="ignore"):
        slopes = np.diff(y) / np.diff(x)
    slopes = np.where(np.isfinite(slopes), slopes, 0.0)  # knots that nearly coincide
    pieces = [[y[0], 0.0], *map(list, zip(y, np.append(slopes, 0.0), strict=True))]
    return _with_order(x, pieces, order_weight, left_closed=True)


def stairs(cuts: np.ndarray, values: np.ndarray, order_weight: ArrayLike = 0.0, *, left_closed: bool = False) -> Step:
    """Return a step function, plus `order_weight` times x; each piece may have a weight of its own."""
    return _with_order(cuts, [[v, 0.0] for v in values], order_weight, left_closed=left_closed)


def _with_order(breaks: np.ndarray, pieces: list[list[float]], order: ArrayLike, *, left_closed: bool) -> Step:
    origins = np.append(breaks[:1], breaks) if len(breaks) else np.zeros(1)
    weight = np.broadcast_to(np.asarray(order, dtype=np.float64), origins.shape)
    summed = np.array(pieces) + np.stack([weight * origins, weight], axis=1)
    return curve(breaks, [piece if piece[1] else piece[:1] for piece in summed.tolist()], left_closed=left_closed)


def clip(low: float, high: float) -> Step:
    """Return the step that clips numbers to a range."""
    return piecewise(curve([low, high], [[low], [low, 1.0], [high]]))


def mix(weights: ArrayLike, branches: Sequence[Sequence[Step]]) -> Step:
    """Return the step that sums the weighted results of several chains of steps."""
    return {"op": "mix", "weights": np.asarray(weights).tolist(), "branches": list(map(list, branches))}


TINY = float(np.finfo(np.float64).smallest_normal)
"""Smallest number whose logarithm is taken: smaller ones are raised to it, unless another floor is given."""
DIFFERENCE = matrix([[-1.0, 1.0]])
"""(z₀, z₁) ↦ z₁ − z₀."""
COMPLEMENT = matrix([[-1.0], [1.0]], [1.0, 0.0])
"""p ↦ (1 − p, p)."""
SECOND = matrix([[0.0, 1.0]])
"""(p₀, p₁) ↦ p₁."""
_ZERO_FIRST = matrix([[0.0], [1.0]])
_LOG: Step = {"op": "log", "floor": TINY}
_INSIDE = clip(TINY, 1 - float(np.finfo(np.float64).eps) / 2)  # as calibrators return an event that is certain
_CONVERSIONS: dict[tuple[str, str], tuple[Step, ...]] = {
    ("logits", "logits"): (),
    ("logits", "probs"): (op("softmax"),),
    ("logits", "event"): (DIFFERENCE, op("sigmoid")),
    ("logits", "event_odds"): (DIFFERENCE,),
    ("logits", "top"): (op("softmax"), op("max")),
    ("logits", "top_odds"): (op("log_odds"), op("max")),
    ("probs", "logits"): (_LOG,),
    ("probs", "probs"): (),
    ("probs", "event"): (SECOND,),
    ("probs", "event_odds"): (_LOG, DIFFERENCE),
    ("probs", "top"): (op("max"),),
    ("probs", "top_odds"): (_LOG, op("log_odds"), op("max")),
    ("event_odds", "logits"): (_ZERO_FIRST,),
    ("event_odds", "probs"): (op("sigmoid"), COMPLEMENT),
    ("event_odds", "event"): (op("sigmoid"),),
    ("event_odds", "event_odds"): (),
    ("event", "logits"): (COMPLEMENT, _LOG),
    ("event", "probs"): (COMPLEMENT,),
    ("event", "event"): (),
    ("event", "event_odds"): (COMPLEMENT, _LOG, DIFFERENCE),
    ("top", "top"): (),
    ("top", "top_odds"): (COMPLEMENT, _LOG, DIFFERENCE),
}
"""Steps that turn numbers of one form into another; other pairs are impossible."""


def convert(before: Form, after: Form) -> tuple[Step, ...]:
    """Return the steps that turn numbers of one form into another.

    >>> [step["op"] for step in convert("logits", "top")]
    ['softmax', 'max']
    """
    try:
        return _CONVERSIONS[before, after]
    except KeyError:
        raise ValueError(f"{_FORM_NAMES[before]} cannot be turned into {_FORM_NAMES[after]}") from None


_FORM_NAMES = {
    "logits": "logits",
    "probs": "probabilities of all classes",
    "event": "the probability of class 1",
    "event_odds": "the log-odds of class 1",
    "top": "the confidence in the predicted class",
    "top_odds": "the log-odds of the predicted class",
}


def join(first: Formula, second: Formula) -> Formula:
    """Return the steps of two formulas, one after the other."""
    between = convert(first.gives, second.reads)
    inside = (_INSIDE,) if first.gives == "event" else ()
    return Formula(first.reads, (*first.steps, *inside, *between, *second.steps), second.gives)


@dataclass(frozen=True)
class Expression:
    """A calibrator applied to named columns of a table; JSON, SQL, polars and Python give the same numbers.

    A row with a missing, infinite or impossible number has no result: NULL in SQL, null in polars, NaN in Python.

    Parameters
    ----------
    calibrator
        Name of the calibrator's class.
    columns
        The columns that are read.
    outputs
        The columns that result: a probability of each class, P(class 1) if one column is read, or a confidence.
    low
        Smallest number that the columns may hold.
    high
        Largest number that they may hold.
    open_range
        Whether the ends of the range are excluded too.
    steps
        The steps, as in the specification.

    Examples
    --------
    >>> from trueup.calibrators.temperature import Temperature
    >>> expression = Temperature(2.0).to_expression("score", input="probs")
    >>> expression(np.array([[0.9], [1.7]])).round(2)
    array([[0.75],
           [ nan]])
    """

    calibrator: str
    columns: tuple[str, ...]
    outputs: tuple[str, ...]
    low: float | None
    high: float | None
    open_range: bool
    steps: tuple[Step, ...]

    @classmethod
    def of(
        cls,
        name: str,
        formula: Callable[[int], Formula],
        columns: str | Sequence[str],
        *,
        input: Input = "logits",
        floor: float | None = None,
    ) -> Self:
        """Bind a formula to columns.

        Parameters
        ----------
        name
            Name of the calibrator's class.
        formula
            Function from the number of classes to the formula.
        columns
            The columns of a table, one per class; or one column for the score of an event or a stated confidence.
        input
            What the columns hold: "logits" (one column: the log-odds of class 1), or "probs".
        floor
            Smallest probability; smaller ones are raised to it. Without it, a method that takes logarithms gives no
            result for a probability of exactly 0, or of exactly 1 in one column.

        Returns
        -------
        Self
            The expression.
        """
        names = (columns,) if isinstance(columns, str) else tuple(columns)
        if not names or len(set(names)) < len(names):
            raise InputError("columns", "be different names", f"{list(names)}")
        if input not in ("logits", "probs"):
            raise InputError("input", 'be "logits" or "probs"', f"{input!r}")
        if floor is not None and not 0 < floor < 0.5:
            raise InputError("floor", "lie between 0 and 0.5", f"{floor}")
        single, probs = len(names) == 1, input == "probs"
        maps = formula(max(2, len(names)))
        before: Form = ("event" if probs else "event_odds") if single else input
        after: Form = maps.gives if maps.gives == "top" else "event" if single else "probs"
        if single and maps.gives == "top":
            if not probs or maps.reads not in ("top", "top_odds"):
                need = "columns of all classes" + ("" if probs else ', or input="probs" for the confidence itself')
                raise InputError("columns", f"be {need}, since {name} calibrates the predicted class", f"{names[0]!r}")
            before = "top"
        first = convert(before, maps.reads)
        takes_logs = any(step["op"] == "log" for step in first)
        if before == "probs" and not takes_logs:
            first = (op("normalise"), *first)
        elif floor is not None:
            first = tuple({**step, "floor": floor} if step["op"] == "log" else step for step in first)
        steps = (*first, *maps.steps, *convert(maps.gives, after))
        _check_sizes(steps, len(names), name)
        return cls(
            calibrator=name,
            columns=names,
            outputs=tuple(f"{n}_calibrated" for n in (names if single or after == "probs" else ["confidence"])),
            low=0.0 if probs else None,
            high=(1.0 if single else 1 + _ROUNDED) if probs else None,
            open_range=takes_logs and floor is None,
            steps=steps,
        )

    def __call__(self, rows: ArrayLike) -> np.ndarray:
        """Return the results, shape (n, outputs), for rows of shape (n, columns)."""
        from trueup.calibrators.interpreters import evaluate

        return evaluate(self, rows)

    def to_json(self) -> str:
        """Return the specification as JSON.

        Returns
        -------
        str
            A JSON object.
        """
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read a specification.

        Parameters
        ----------
        text
            What `to_json` returned.

        Returns
        -------
        Self
            The expression.
        """
        parts = json.loads(text)
        name, version = parts.pop("format", None), parts.pop("version", None)
        if (name, version) != (FORMAT, VERSION):
            raise InputError("text", f"be a {FORMAT} of version {VERSION}", f"{name} of version {version}")
        for name in ("columns", "outputs", "steps"):
            parts[name] = tuple(parts[name])
        return cls(**parts)

    def to_polars(self) -> list[Expr]:
        """Return polars expressions, one for each output.

        Returns
        -------
        list of polars.Expr
            For `frame.with_columns(…)`, of a DataFrame or a LazyFrame.
        """
        from trueup.calibrators.interpreters import to_polars

        return to_polars(self)

    def to_sql(
        self, *, dialect: Dialect = "duckdb", table: str | Sequence[str] = "predictions", keep: Sequence[str] = ()
    ) -> str:
        """Return a query that computes the outputs.

        Parameters
        ----------
        dialect
            The database: "duckdb", "sqlite", "postgres", "spark" or "bigquery".
        table
            The table or view that has the columns; for a qualified name, its parts.
        keep
            Further columns of the table to keep in the result.

        Returns
        -------
        str
            A SELECT statement.
        """
        from trueup.calibrators.interpreters import to_sql

        return to_sql(self, dialect=dialect, table=table, keep=keep)


def _check_sizes(steps: Sequence[Step], classes: int, name: str) -> int:
    """Return the number of numbers after the steps; raise if a step is for another number of classes."""
    size = classes
    for step in steps:
        takes = size
        match step["op"]:
            case "matrix":
                takes, gives = len(step["weight"][0]), len(step["weight"])
            case "piecewise":
                takes = gives = size if len(step["curves"]) == 1 else len(step["curves"])
            case "logsumexp":
                gives = size + 1
            case "max":
                gives = 1
            case "mix":
                (gives,) = {_check_sizes(branch, size, name) for branch in step["branches"]}
            case _:
                gives = size
        if takes != size:
            raise InputError("columns", f"have the classes of the fit of {name}", f"{classes}")
        size = gives
    return size
