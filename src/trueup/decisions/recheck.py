"""A guarantee checked again as labels arrive, by a bound that is valid at any time."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from scipy.special import betaincc, betaln

from trueup._core.arrays import as_vector, check_share
from trueup._core.errors import InputError
from trueup._core.formatting import format_percent
from trueup._core.types import ArrayLike


@dataclass(frozen=True)
class Recheck:
    """A sequential test of the guarantee "at most `max_risk` of the answers are wrong".

    `update` adds answered rows with known outcomes and returns a new check. The guarantee is refuted once the wealth of
    bets against it reaches 1/α. If it holds, that happens with probability at most α, at any number of looks (Ville's
    inequality). The bets are a mixture over all risks above the bound, in closed form:
    M = ∫_r^1 (q/r)^k ((1−q)/(1−r))^(m−k) dπ(q), where π is a Beta distribution restricted to q > r.

    Parameters
    ----------
    max_risk
        Largest error rate of the answers.
    level
        Certainty, 1 − α.
    rows
        Number of answers checked.
    wrong
        Number of wrong answers among them.
    refuted
        Whether the wealth ever reached 1/α.

    Examples
    --------
    >>> check = Recheck(max_risk=0.02).update(np.zeros(500)).update(np.ones(30))
    >>> check.refuted, round(check.low, 4)
    (True, 0.0292)

    References
    ----------
    Ramdas et al., "Game-theoretic statistics and safe anytime-valid inference" (2023), arXiv:2210.01948.
    """

    max_risk: float
    level: float = 0.95
    rows: int = 0
    wrong: int = 0
    refuted: bool = False

    def __post_init__(self) -> None:
        check_share(self.max_risk, "max_risk")
        check_share(self.level, "level")

    def __add__(self, other: Recheck) -> Recheck:
        """Add the answers of two services; only the counts matter, so the test stays valid.

        The sum is refuted if its own wealth reaches 1/α, whether or not one of the two was refuted.
        """
        if not isinstance(other, Recheck):
            return NotImplemented
        if (self.max_risk, self.level) != (other.max_risk, other.level):
            raise ValueError("checks can be added only if they have the same max_risk and level")
        total = replace(self, rows=self.rows + other.rows, wrong=self.wrong + other.wrong, refuted=False)
        return replace(total, refuted=total.wealth >= 1 / (1 - self.level))

    def update(self, wrong: ArrayLike) -> Recheck:
        """Add answered rows.

        Parameters
        ----------
        wrong
            1 if the answer was wrong, 0 if it was right, shape (n,).

        Returns
        -------
        Recheck
            The check with these rows.
        """
        x = as_vector(wrong, "wrong")
        if len(x) and not np.isin(x, (0.0, 1.0)).all():
            raise InputError("wrong", "hold 0 and 1 only", f"{x[~np.isin(x, (0.0, 1.0))][0]:g}")
        # Crossing 1/α inside the batch counts too: the test is valid after every row.
        log_wealth = self._log_wealth(self.rows + np.arange(1, len(x) + 1), self.wrong + np.cumsum(x))
        crossed = bool((log_wealth >= -math.log(1 - self.level)).any())
        return replace(self, rows=self.rows + len(x), wrong=self.wrong + int(x.sum()), refuted=self.refuted or crossed)

    @property
    def wealth(self) -> float:
        """Wealth of the bets against the guarantee: 1 at the start, 1/α refutes."""
        return float(np.exp(np.minimum(self._log_wealth(np.array(self.rows), np.array(self.wrong)), 700.0)))

    @property
    def low(self) -> float:
        """Lower confidence bound of the risk, valid at any time; 0 without rows."""
        return self._end(lower=True)

    @property
    def high(self) -> float:
        """Upper confidence bound of the risk, valid at any time; 1 without rows."""
        return self._end(lower=False)

    def _log_wealth(self, rows: np.ndarray, wrong: np.ndarray) -> np.ndarray:
        r = self.max_risk
        a, b = 1.0, (1 - r) / r  # a Beta distribution with mean r: most bets are on risks near it.
        # If errors are much rarer than the bound, the tail underflows to 0, and so does the wealth.
        with np.errstate(divide="ignore"):
            tail = np.log(betaincc(a + wrong, b + rows - wrong, r))
        against = tail - math.log(betaincc(a, b, r)) + betaln(a + wrong, b + rows - wrong) - betaln(a, b)
        log_wealth: np.ndarray = against - wrong * math.log(r) - (rows - wrong) * math.log1p(-r)
        return log_wealth

    def _end(self, *, lower: bool) -> float:
        """Return an end of {q: M(q) < 1/α} by bisection, where M(q) is the wealth of bets against the risk q."""
        if not self.rows:
            return 0.0 if lower else 1.0
        m, k, limit = self.rows, self.wrong, -math.log(1 - self.level)
        a, b = 1.0, (1 - self.max_risk) / self.max_risk
        mixture = betaln(a + k, b + m - k) - betaln(a, b)

        def against(q: float) -> float:
            return float(mixture - (k * math.log(q) if k else 0.0) - ((m - k) * math.log1p(-q) if m > k else 0.0))

        inside, outside = k / m, 0.0 if lower else 1.0
        if inside == outside or against(min(max(inside, 1e-12), 1 - 1e-12)) >= limit:
            return outside
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (middle, outside) if against(middle) < limit else (inside, middle)
        return inside

    def __str__(self) -> str:
        counts = f"{self.wrong:,} of {self.rows:,} answers were wrong"
        interval = f"between {format_percent(self.low, 2)} and {format_percent(self.high, 2)}"
        result = "is broken" if self.refuted else "is not refuted"
        promise = f"The promise of at most {format_percent(self.max_risk)} errors {result}"
        return f"{promise}: {counts}; the risk lies {interval}."
