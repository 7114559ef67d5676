"""A promise checked again as labels arrive, by a bound that is valid whenever one looks."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from scipy.special import betaincc, betaln

from trueup._core.arrays import as_vector, check_share
from trueup._core.errors import InputError
from trueup._core.formatting import format_percent


@dataclass(frozen=True)
class Recheck:
    """A promise checked again as labels arrive: valid whenever it is looked at.

    `update` adds rows that were answered and whose outcome is known, and returns a new check. The promise is refuted
    once the wealth of bets against it reaches 1/α: were it kept, that would happen with probability α at most, however
    often and whenever one looks (Ville). Bets are a mixture over all risks above the bound, in closed form:
    M = ∫_r^1 (q/r)^k ((1−q)/(1−r))^(m−k) dπ(q), π a Beta law beyond r.

    >>> check = Recheck(max_risk=0.02).update(np.zeros(500)).update(np.ones(30))
    >>> check.refuted, round(check.low, 4)
    (True, 0.0292)
    """

    max_risk: float
    level: float = 0.95
    rows: int = 0
    wrong: int = 0
    refuted: bool = False
    """Stays, once it was so."""

    def __post_init__(self) -> None:
        check_share(self.max_risk, "max_risk")
        check_share(self.level, "level")

    def __add__(self, other: Recheck) -> Recheck:
        """Two services' answers as one stream: valid too, since only the counts matter, not their order.

        Whether one of the two was refuted stays with it: the sum is refuted if its own wealth says so.
        """
        if not isinstance(other, Recheck):
            return NotImplemented
        if (self.max_risk, self.level) != (other.max_risk, other.level):
            raise ValueError("checks must be of the same promise to be added")
        total = replace(self, rows=self.rows + other.rows, wrong=self.wrong + other.wrong, refuted=False)
        return replace(total, refuted=total.wealth >= 1 / (1 - self.level))

    def update(self, wrong: Any) -> Recheck:
        """Add answered rows: 1 where wrong, 0 where right."""
        x = as_vector(wrong, "wrong")
        if len(x) and not np.isin(x, (0.0, 1.0)).all():
            raise InputError("wrong", "hold 0 and 1 only", f"{x[~np.isin(x, (0.0, 1.0))][0]:g}")
        # A crossing inside the batch counts too: it was valid to look then.
        log_wealth = self._log_wealth(self.rows + np.arange(1, len(x) + 1), self.wrong + np.cumsum(x))
        crossed = bool((log_wealth >= -math.log(1 - self.level)).any())
        return replace(self, rows=self.rows + len(x), wrong=self.wrong + int(x.sum()), refuted=self.refuted or crossed)

    @property
    def wealth(self) -> float:
        """Of the bets against the promise, 1 at the start; 1/α is proof."""
        return float(np.exp(np.minimum(self._log_wealth(np.array(self.rows), np.array(self.wrong)), 700.0)))

    @property
    def low(self) -> float:
        """The risk is at least this, with the stated certainty, whenever one looks; 0 where nothing is known."""
        return self._end(lower=True)

    @property
    def high(self) -> float:
        """The risk is at most this, with the stated certainty, whenever one looks."""
        return self._end(lower=False)

    def _log_wealth(self, rows: np.ndarray, wrong: np.ndarray) -> np.ndarray:
        r = self.max_risk
        a, b = 1.0, (1 - r) / r  # a law with mean r: most risks worth a bet are not far above it
        # Where errors are much rarer than promised the tail underflows to 0: nothing is left of the wealth.
        with np.errstate(divide="ignore"):
            tail = np.log(betaincc(a + wrong, b + rows - wrong, r))
        against = tail - math.log(betaincc(a, b, r)) + betaln(a + wrong, b + rows - wrong) - betaln(a, b)
        log_wealth: np.ndarray = against - wrong * math.log(r) - (rows - wrong) * math.log1p(-r)
        return log_wealth

    def _end(self, *, lower: bool) -> float:
        """The end of {q: M(q) < 1/α}, M the mixture over all risks against q, by bisection."""
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
        found = f"{self.wrong:,} of {self.rows:,} answers were wrong"
        span = f"between {format_percent(self.low, 2)} and {format_percent(self.high, 2)}"
        promise = f"at most {format_percent(self.max_risk)}"
        if self.refuted:
            return f"The promise of {promise} errors is broken: {found}; the risk lies {span}."
        return f"Nothing speaks against the promise of {promise} errors: {found}; the risk lies {span}."
