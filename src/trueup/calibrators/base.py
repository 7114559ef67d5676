"""The base of all calibrators: a fitted map from logits to logits.

A map is written once, against the array namespace `xp` (see `trueup._core.namespace`). Inside `map` every array
parameter is an array of that namespace in float64, and every scalar parameter is a plain number.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np

from trueup._core import arrays, native
from trueup._core.namespace import NUMPY, Namespace, namespace_of
from trueup._core.optimize import Certificate
from trueup._core.row_scores import confidences
from trueup._core.types import Array, ArrayLike, ArrayT, WeightsLike
from trueup._core.values import Value
from trueup.calibrators import expression as e

if TYPE_CHECKING:
    from polars import Expr

TIE_MARGIN = 1e-5
"""Relative margin that keeps the predicted class's probability above the others where rounding would make a tie."""
_VANISHED_SHARE = 1e-12  # share of a class whose probability has underflowed, so that it can be scaled up
_LARGEST_LOGIT = 1e15
"""Logits whose map would overflow are first scaled down to this size; differences of that size stay decisive."""


class Calibrator(Value):
    """A fitted map from logits to logits: the constructor takes its parameters, `fit` estimates them.

    The output is the same kind of array as the input, with its dtype and device. Half precision is computed in float32.
    An absent option, a logit of −∞, stays at −∞. A map that mixes classes replaces an absent option by the mean of the
    row's other inputs. A map that treats classes one by one learns each from the rows that offer it.
    """

    keeps_argmax: ClassVar[bool] = False
    """The predicted class never changes."""
    shift_invariant: ClassVar[bool] = True
    """Adding a constant to a row of logits leaves the output probabilities unchanged."""
    sample_invariant: ClassVar[bool] = False
    """The fit depends neither on the order of the rows nor on repeating all of them."""
    differentiable: ClassVar[bool] = True
    """The output has a useful gradient with respect to the input."""

    no_formula: ClassVar[str] = "its map is not a chain of formulas; apply it in Python"
    """Why `formula` is missing, and what to use instead; for classes that do not define it."""

    certificate: Certificate | None = None
    """Convergence of the fit; None if the fit needs no search or the calibrator was constructed from parameters."""
    choice: Any = None
    """The comparison of methods that selected this calibrator, if several were tried."""

    def __call__(self, logits: ArrayT, **extra: Any) -> ArrayT:
        """Calibrate logits (n, classes) of any array library."""
        xp = namespace_of(logits)
        with np.errstate(all="ignore"):  # `_saturate` repairs overflow afterwards
            if xp is None or xp.is_numpy:
                return arrays.match_kind(self._map_rows(arrays.as_logits(logits), **extra), logits)
            return self.bind(xp, logits).forward(xp, logits, **extra)

    def _map_rows(self, z: np.ndarray, **extra: Any) -> np.ndarray:
        """Map an array in chunks of rows that fit the cache, which is up to four times faster."""
        if extra or z.size <= native.CACHE_CHUNK:
            return self.forward(NUMPY, z, **extra)
        chunks = native.row_chunks(z.shape[0], z.shape[1], native.CACHE_CHUNK // 2)
        return np.concatenate([self.forward(NUMPY, arrays.take_logits(z, rows)) for rows in chunks])

    def forward(self, xp: Namespace, z: Array, **extra: Any) -> Array:
        """Map logits (n, classes) of the namespace; composed calibrators call this method of their parts.

        Parameters
        ----------
        xp
            The array namespace.
        z
            Logits of that namespace, shape (n, classes).
        **extra
            Further inputs of the map, such as `groups`.

        Returns
        -------
        array
            Calibrated logits, shape (n, classes).
        """
        if z.ndim != 2:
            raise ValueError(f"logits must have shape (n, classes), got {tuple(z.shape)}")
        x, traced = xp.upcast_half(z), xp.is_traced(z)
        if not traced:  # an exported graph recognises −∞ only
            x = _read_padding(xp, x)
        absent = arrays.find_absent(x) if xp.is_numpy else xp.find_absent(x)
        mapped = xp.astype(self.map(xp, x, **extra), z.dtype)
        if not traced and not bool(xp.isfinite(xp.sum(mapped))):
            mapped = self._saturate(xp, x, mapped, extra)
        return mapped if absent is None else xp.where(absent, -math.inf, mapped)

    def _saturate(self, xp: Namespace, z: Array, mapped: Array, extra: dict[str, Any]) -> Array:
        """Remap rows that overflow: scale their logits down before the map, shift the results below zero."""
        finite = xp.isfinite(z)
        overflown = xp.any(finite, axis=1, keepdims=True) & xp.any(~xp.isfinite(mapped) & finite, axis=1, keepdims=True)
        if not bool(xp.any(overflown)):
            return mapped  # the sum overflowed, or the input was not finite
        size = xp.max(xp.where(finite, xp.abs(z), 0.0), axis=1, keepdims=True)
        out = self.map(xp, xp.where(overflown, z * (_LARGEST_LOGIT / xp.clip(size, min=_LARGEST_LOGIT)), z), **extra)
        limit = float(xp.finfo(mapped.dtype).max)
        shifted = xp.clip(out - xp.max(out, axis=1, keepdims=True), min=-limit)  # order and differences stay
        return xp.where(overflown, xp.astype(xp.where(finite, shifted, out), mapped.dtype), mapped)

    @abstractmethod
    def map(self, xp: Namespace, z: Array) -> Array:
        """Map logits in float32 or float64; subclasses implement it.

        Parameters
        ----------
        xp
            The array namespace.
        z
            Logits of that namespace, shape (n, classes).

        Returns
        -------
        array
            Calibrated logits, shape (n, classes).
        """

    def formula(self, classes: int) -> e.Formula:
        """Return the map as a chain of arithmetic steps, for `to_sql`, `to_polars` and `to_json`.

        Parameters
        ----------
        classes
            Number of classes.

        Returns
        -------
        Formula
            The steps, and the form of the numbers before and after them.
        """
        raise ValueError(f"{type(self).__name__} has no expression: {self.no_formula}")

    def to_expression(
        self, columns: str | Sequence[str], *, input: e.Input = "logits", floor: float | None = None
    ) -> e.Expression:
        """Return the calibrator as an expression in the columns of a table.

        Parameters
        ----------
        columns
            The columns of a table, one per class; or one column for the score of an event or a stated confidence.
        input
            What the columns hold: "logits" (one column: the log-odds of class 1), or "probs".
        floor
            Smallest probability; smaller ones are raised to it. Without it, a method that takes logarithms gives no
            result for a probability of exactly 0, or of exactly 1 in one column.

        Returns
        -------
        Expression
            The expression; its outputs are probabilities, in columns named after the inputs.
        """
        return e.Expression.of(type(self).__name__, self.formula, columns, input=input, floor=floor)

    def to_sql(
        self,
        columns: str | Sequence[str],
        *,
        dialect: e.Dialect = "duckdb",
        table: str | Sequence[str] = "predictions",
        keep: Sequence[str] = (),
        input: e.Input = "logits",
        floor: float | None = None,
    ) -> str:
        """Return a query that computes calibrated probabilities in a database.

        Parameters
        ----------
        columns
            The columns of a table, one per class; or one column for the score of an event or a stated confidence.
        dialect
            The database: "duckdb", "sqlite", "postgres", "spark" or "bigquery".
        table
            The table or view that has the columns; for a qualified name, its parts.
        keep
            Further columns of the table to keep in the result.
        input
            What the columns hold: "logits" (one column: the log-odds of class 1), or "probs".
        floor
            Smallest probability, as in `to_expression`.

        Returns
        -------
        str
            A SELECT statement. A row with a missing, infinite or impossible number gives NULL.

        Examples
        --------
        >>> import sqlite3
        >>> from trueup.calibrators import Temperature
        >>> database = sqlite3.connect(":memory:")
        >>> _ = database.execute("CREATE TABLE predictions AS SELECT 7 AS id, 3.0 AS score")
        >>> query = Temperature(2.0).to_sql("score", dialect="sqlite", keep=["id"])
        >>> [(row, round(p, 3)) for row, p in database.execute(query)]
        [(7, 0.818)]
        """
        return self.to_expression(columns, input=input, floor=floor).to_sql(dialect=dialect, table=table, keep=keep)

    def to_polars(
        self, columns: str | Sequence[str], *, input: e.Input = "logits", floor: float | None = None
    ) -> list[Expr]:
        """Return polars expressions for calibrated probabilities, one per output.

        Parameters
        ----------
        columns
            The columns of a frame, one per class; or one column for the score of an event or a stated confidence.
        input
            What the columns hold: "logits" (one column: the log-odds of class 1), or "probs".
        floor
            Smallest probability, as in `to_expression`.

        Returns
        -------
        list of polars.Expr
            For `frame.with_columns(…)`, of a DataFrame or a LazyFrame.
        """
        return self.to_expression(columns, input=input, floor=floor).to_polars()

    def to_json(self, columns: str | Sequence[str], *, input: e.Input = "logits", floor: float | None = None) -> str:
        """Return the map as JSON, for programs in other languages.

        Parameters
        ----------
        columns
            Names of the inputs, one per class; or one name for the score of an event or a stated confidence.
        input
            What the inputs are: "logits" (one input: the log-odds of class 1), or "probs".
        floor
            Smallest probability, as in `to_expression`.

        Returns
        -------
        str
            The specification; the manual documents its format.
        """
        return self.to_expression(columns, input=input, floor=floor).to_json()

    def with_certificate(self, certificate: Certificate | None) -> Self:
        """Return a copy that records how its fit ended.

        Parameters
        ----------
        certificate
            How the fit ended.

        Returns
        -------
        Self
            The copy.
        """
        return self._replace(certificate=certificate)

    def with_choice(self, choice: Any) -> Self:
        """Return a copy that records the comparison that selected it.

        Parameters
        ----------
        choice
            The comparison.

        Returns
        -------
        Self
            The copy.
        """
        return self._replace(choice=choice)

    def parts(self) -> list[Calibrator]:
        """Return the calibrators that this one is composed of."""
        values = [value if isinstance(value, tuple) else (value,) for value in vars(self).values()]
        return [part for value in values for part in value if isinstance(part, Calibrator)]

    def _check_classes(self, z: Any, classes: int) -> None:
        if z.shape[1] != classes:
            raise ValueError(f"logits must have the {classes} classes of the fit, got {z.shape[1]}")


def if_all_parts(flag: str) -> Any:
    """Return a property that is true if all parts of a calibrator have the flag."""
    return property(lambda calibrator: all(getattr(part, flag) for part in calibrator.parts()))


def _read_padding(xp: Namespace, z: Array) -> Array:
    """Replace finite padding values of absent options by −∞."""
    if (xp.is_numpy and arrays.is_checked(z)) or not z.shape[0] or bool(xp.min(z) > -arrays.MIN_PADDING):
        return z
    padding = arrays.find_padding(arrays.to_array(z, "logits"))
    return xp.where(xp.constant(padding, z, dtype=xp.bool), -math.inf, z) if padding.any() else z


class Identity(Calibrator):
    """Return the logits unchanged, q = softmax(z): the baseline that every method must beat.

    Not for miscalibrated networks.

    Examples
    --------
    >>> Identity.fit([[1.0, 2.0]], [1])([[1.0, 2.0]])
    array([[1., 2.]])
    """

    keeps_argmax = True
    sample_invariant = True

    def map(self, xp: Namespace, z: Array) -> Array:
        """Return the logits."""
        return z

    def formula(self, classes: int) -> e.Formula:
        """Return no steps."""
        return e.Formula("logits", (), "logits")

    @classmethod
    def fit(cls, logits: ArrayLike, labels: ArrayLike, *, sample_weight: WeightsLike = None) -> Self:
        """Check the arguments as every method does; nothing is estimated.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities of the calibration rows, shape (n, classes).
        labels
            True classes of the rows, numbered from 0, shape (n,).
        sample_weight
            Weight of each row, shape (n,). By default all rows count equally.

        Returns
        -------
        Self
            The fitted calibrator.
        """
        arrays.as_weighted(logits, labels, sample_weight, min_rows=1)
        return cls()


class ScoreCalibrator(Calibrator):
    """A calibrator of one score per row: the predicted class's confidence or, with `event`, P(class 1)."""

    event: bool = False

    @property
    def keeps_argmax(self) -> bool:  # type: ignore[override]
        """Return whether the predicted class stays; a map of P(class 1) may cross one half."""
        return not self.event

    def score(self, xp: Namespace, z: Array) -> Array:
        """Return the scores (n,) in float64: float32 cannot distinguish confidences near one."""
        if self.event:
            self._check_classes(z, 2)
            return xp.sigmoid(xp.double(z[:, 1]) - xp.double(z[:, 0]))
        return confidences(z)[0] if xp.is_numpy else xp.max(xp.softmax(xp.double(z)), axis=1)


class TopLabel(ScoreCalibrator):
    """A calibrator of the predicted class's confidence; the other classes share the rest.

    With `event`, as in every fit to two classes, it maps P(class 1), and class 0 gets the rest.
    """

    differentiable = False
    margin: float = 0.0
    """Smallest distance of a calibrated confidence from 0 and 1."""

    def confidence(self, logits: ArrayT) -> ArrayT:
        """Return the calibrated confidence of each row, before it is raised or clipped for `map`.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities, shape (n, classes).

        Returns
        -------
        array
            Confidence of the predicted class, shape (n,); for two classes, the probability of class 1.
        """
        xp = namespace_of(logits) or NUMPY
        z = xp.upcast_half(arrays.as_logits(logits) if xp.is_numpy else logits)
        bound = self.bind(xp, z)
        confidence = xp.astype(bound.map_confidence(xp, bound.score(xp, z)), z.dtype)
        return arrays.match_kind(confidence, logits) if xp.is_numpy else confidence

    def count_clipped(self, logits: ArrayLike) -> int:
        """Return the number of rows whose confidence is below 1/K and must be raised.

        Parameters
        ----------
        logits
            Network outputs or log-probabilities, shape (n, classes).

        Returns
        -------
        int
            Number of rows.
        """
        if self.event:
            return 0
        z = NUMPY.upcast_half(arrays.as_logits(logits))
        least = (1 + TIE_MARGIN) / NUMPY.count_options(z, arrays.find_absent(z))
        return int((self.confidence(z)[:, None] < least).sum())

    @abstractmethod
    def map_confidence(self, xp: Namespace, confidence: Array) -> Array:
        """Map confidences (n,)."""

    def curve_formula(self, curve: e.Step, *, odds: bool = False) -> e.Formula:
        """Return a curve of the score as steps; a confidence stays as `confidence` returns it, unclipped.

        Parameters
        ----------
        curve
            The curve.
        odds
            Whether the curve is one of the log-odds.

        Returns
        -------
        Formula
            The steps.
        """
        if not self.event:
            return e.Formula("top_odds" if odds else "top", (e.piecewise(curve),), "top")
        limits = (e.clip(self.margin, 1 - self.margin),) if self.margin else ()
        return e.Formula("event_odds" if odds else "event", (e.piecewise(curve), *limits), "event")

    def map(self, xp: Namespace, z: Array) -> Array:
        """Set the predicted class, or the event, to its calibrated confidence and share the rest."""
        confidence = xp.clip(self.map_confidence(xp, self.score(xp, z)), self.margin, 1 - self.margin)
        return set_confidence(xp, z, confidence, event=self.event)


def set_confidence(xp: Namespace, z: Array, confidence: Array, *, event: bool) -> Array:
    """Return log-probabilities with this confidence on the predicted class or, with `event`, on class 1 of two."""
    if not event:
        return set_top_confidence(xp, z, confidence)
    limits = xp.finfo(confidence.dtype)
    c = xp.clip(confidence, float(limits.smallest_normal), 1 - float(limits.eps) / 2)
    return xp.astype(xp.stack([xp.log1p(-c), xp.log(c)], axis=1), z.dtype)


def set_top_confidence(xp: Namespace, z: Array, confidence: Array) -> Array:
    """Return log-probabilities with this confidence on the predicted class, which stays the predicted class.

    The other classes share the rest in proportion to their probabilities, each at most the confidence. The excess over
    that cap goes to the classes below it. A confidence below 1/K cannot be the largest of K, so it is raised to just
    above 1/K. Absent options get nothing.
    """
    absent = xp.find_absent(z)
    classes = xp.count_options(z, absent)
    best = xp.argmax(z, axis=1, keepdims=True)
    top = xp.clip(xp.clip(xp.astype(confidence, z.dtype)[:, None], max=1.0), min=(1 + TIE_MARGIN) / classes)
    cap = top - top * (TIE_MARGIN / 2)  # ONNX optimisers drop a factor this close to one
    others = xp.put_along_axis(z, best, -math.inf)
    log_share = xp.log_softmax(others)
    share = xp.exp(log_share)
    tiny = float(xp.finfo(z.dtype).smallest_normal)
    rest = xp.clip(1 - top, min=tiny)
    log_shared = log_share + xp.log(rest)
    over = xp.max(share, axis=1, keepdims=True) * rest > cap

    def capped(rows: Any, rest: Any, cap: Any) -> Any:
        # Classes whose probability underflowed can take an excess only from a positive share.
        options = classes if absent is None else classes[rows, ...]
        mass = xp.put_along_axis(share[rows, ...] + _VANISHED_SHARE, best[rows, ...], 0.0)
        mass = mass / (1 + (options - 1) * _VANISHED_SHARE) * rest
        mass = mass if absent is None else xp.where(absent[rows, ...], 0.0, mass)
        return xp.log(xp.clip(_cap_masses(xp, mass, rest, cap), min=tiny))

    if xp.is_traced(z) or not (xp.is_numpy or xp.is_torch):  # unused rows get 0.5, whose gradients are finite
        limits = (xp.where(over, limit, 0.5) for limit in (rest, cap))
        log_shared = xp.where(over, capped(slice(None), *limits), log_shared)
    elif bool(xp.any(over)):  # only some rows need the slow sort
        rows = xp.nonzero(over[:, 0])[0]
        log_shared[rows] = capped(rows, rest[rows], cap[rows])
    return xp.put_along_axis(log_shared, best, xp.log(top))


def break_ties(xp: Namespace, z: Array, calibrated: Array) -> Array:
    """Lower other classes by a few units of rounding where rounding made them equal to the predicted class."""
    best = xp.argmax(z, axis=1, keepdims=True)
    top = xp.take_along_axis(calibrated, best, axis=1)
    below = top - 4 * float(xp.finfo(calibrated.dtype).eps) * (1 + xp.abs(top))
    return xp.where(z < xp.take_along_axis(z, best, axis=1), xp.minimum(calibrated, below), calibrated)


def _cap_masses(xp: Namespace, mass: Array, total: Array, cap: Array) -> Array:
    """Scale the masses up and cap them so that they still sum to the total."""
    ordered = xp.sort(mass, axis=1)  # ascending: sums start with the smallest terms
    below = xp.flip(xp.cumulative_sum(ordered, axis=1), axis=1)  # sum of all masses up to each rank, largest first
    ordered = xp.flip(ordered, axis=1)
    number = xp.arange_like(mass.shape[1], mass)
    scale = xp.clip(total - number * cap, min=0.0) / xp.where(below > 0, below, 1.0)
    fits = xp.astype(ordered * scale <= cap, xp.int32)
    first = xp.argmax(fits, axis=1, keepdims=True)  # smallest number of capped masses for which the others fit
    return xp.minimum(mass * xp.take_along_axis(scale, first, axis=1), cap)


def row_count(z: np.ndarray, w: np.ndarray | None) -> float:
    """Return the number of rows, or the sum of their weights."""
    return float(len(z) if w is None else w.sum())


def check_positive(value: Any, name: str) -> None:
    """Raise unless the value is one finite positive number."""
    if not (isinstance(value, float) and 0 < value < math.inf):
        raise ValueError(f"{name} must be one positive number, got {value}")


def check_margin(margin: float) -> float:
    """Check and return a smallest distance of confidences from 0 and 1."""
    if not 0 <= margin < 0.5:
        raise ValueError(f"margin must lie in [0, 0.5), got {margin!r}")
    return float(margin)


def clip_frequencies(values: np.ndarray, n: float) -> np.ndarray:
    """Clip frequencies among n samples to [1/(n+2), 1 − 1/(n+2)]."""
    return np.clip(values, 1 / (n + 2), 1 - 1 / (n + 2))
