"""Rows of the page: what each library took for a task and how good its answer is, and where ours is not the best."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, NamedTuple

import truths
from children import Child
from tasks import PASSES, TASKS, draw
from timing import OURS

SEED = 2026
SAME_VALUE, SAME_NLL, SAME_ECE, SAME_MB = 1e-6, 1e-4, 2e-3, 1.0
"""Up to which difference answers, and memory, count as the same: what float32 carries, and what the draw of the rows
does to a fit."""


class Plan(NamedTuple):
    """How often, and how long at most."""

    limit: float = 20.0
    """Seconds of a lap, after which a library is ended."""
    enough: int = 3
    """Laps of each library, unless they take long."""
    long: float = 8.0
    """Seconds after which a library has no further lap."""
    short: float = 1.0
    """Seconds that short laps fill together."""
    most: int = 30


@dataclass
class Row:
    """One library on one task."""

    task: str
    n: int
    classes: int
    library: str
    laps: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    """CPU seconds of the laps, where the library's child tells them."""
    peak: float | None = None
    """MB beyond the input, the most of any lap; None where it cannot be measured."""
    error: float | None = None
    """Of a metric: |value − exact value|."""
    excess: float | None = None
    """Of a fit: nats beyond the least possible, on fresh rows."""
    ece: float | None = None
    passes: int | None = None
    """How often the fit read the data, where it says so."""
    trouble: str = ""
    """Why there is nothing, or not all."""

    @property
    def best(self) -> float:
        return min(self.laps)

    @property
    def middle(self) -> float:
        return median(self.laps)

    @property
    def answered(self) -> bool:
        return bool(self.laps) and not self.trouble

    @property
    def group(self) -> tuple[str, int, int]:
        return self.task, self.n, self.classes


def measure(task: str, n: int, classes: int, children: Iterable[Child], plan: Plan) -> list[Row]:
    """Race the libraries, turn by turn, so that a slow spell of the machine falls on all of them."""
    asked = [child for child in children if task in child.offers]
    rows = {child.name: Row(task, n, classes, child.name) for child in asked}
    running: list[Child] = []
    request = {"do": "prepare", "task": task, "n": n, "classes": classes, "seed": SEED}
    for child in asked:
        answer = {"absent": child.absent} if child.absent else child.ask(request, 30 + 2 * plan.limit)
        if "ready" in answer:
            running.append(child)
        else:
            late = f"{trouble(answer)} on a tenth of the rows" if "late" in answer else ""
            rows[child.name].trouble = late or trouble(answer)
    still = list(running)
    while still:
        still = [child for child in still if _lap(child, rows[child.name], plan)]
    kind = {**TASKS, **PASSES}[task].kind
    exact = truths.reference(task, draw(kind, n, classes, SEED)) if kind in ("metric", "regression") else 0.0
    for child in running:
        row = rows[child.name]
        if row.answered:
            _judge(row, child.ask({"do": "judge"}, 3 * plan.limit), exact)
    return list(rows.values())


def _lap(child: Child, row: Row, plan: Plan) -> bool:
    """One lap; whether there is to be another."""
    answer = child.ask({"do": "lap"}, plan.limit)
    if "seconds" not in answer:
        row.trouble = trouble(answer)
        return False
    row.laps.append(float(answer["seconds"]))
    row.cpu += [float(answer["cpu_seconds"])] if "cpu_seconds" in answer else []
    if answer["peak_mb"] is not None:
        row.peak = max(row.peak or 0.0, float(answer["peak_mb"]))
    took = sum(row.laps)
    return (len(row.laps) < plan.enough and took < plan.long) or (took < plan.short and len(row.laps) < plan.most)


def _judge(row: Row, answer: dict[str, Any], exact: float) -> None:
    if "value" in answer:
        row.error = abs(answer["value"] - exact)
    elif "excess" in answer:
        row.excess, row.ece, row.passes = answer["excess"], answer["ece"], answer.get("passes")
    elif answer:
        row.trouble = f"its answer could not be judged: {trouble(answer)}"


def trouble(answer: dict[str, Any]) -> str:
    if "late" in answer:
        return f"> {answer['late']:g} s"
    if "absent" in answer:
        return "not offered" if answer["absent"] == "not offered" else f"absent: {answer['absent']}"
    return f"failed: {answer.get('failed', 'an odd answer')}"


class Loss(NamedTuple):
    """Where a peer is better than ours."""

    ours: Row
    peer: Row
    how: str


def grouped(rows: Sequence[Row]) -> Iterator[list[Row]]:
    for group in dict.fromkeys(row.group for row in rows):
        yield [row for row in rows if row.group == group]


def losses(rows: Sequence[Row]) -> list[Loss]:
    """Every row in which a peer is faster, needs less memory, or answers better, whatever else it does worse."""
    found: list[Loss] = []
    for together in grouped(rows):
        mine = next((row for row in together if row.library == OURS), None)
        for peer in together:
            if mine is not None and peer is not mine and peer.answered:
                found += [Loss(mine, peer, how) for how in _better(mine, peer)]
    return found


def _better(mine: Row, peer: Row) -> Iterator[str]:
    if not mine.answered:
        yield f"ours: {mine.trouble}"
        return
    gains = compared(mine, peer)
    answer = "a better answer" if gains > 0 else "a worse answer" if gains < 0 else "an answer as good"
    if peer.best < mine.best:
        yield f"{mine.best / peer.best:.2f} × as fast, {answer}"
    if gains > 0:
        yield f"a better answer: {quality(peer)} against {quality(mine)}"
    elif mine.ece is not None and peer.ece is not None and peer.ece + SAME_ECE < mine.ece:
        yield f"a lower ECE, if not a better likelihood: {quality(peer)} against {quality(mine)}"
    if mine.peak is not None and peer.peak is not None and peer.peak + SAME_MB < mine.peak:
        yield f"{peer.peak:,.0f} MB against {mine.peak:,.0f} MB, {answer}"


def compared(mine: Row, peer: Row) -> int:
    """1 if the peer's answer is better, −1 if it is worse, 0 if it is as good."""
    if mine.error is not None and peer.error is not None:
        return _sign(mine.error - peer.error, SAME_VALUE)
    if mine.excess is None or peer.excess is None or mine.ece is None or peer.ece is None:
        return 0
    return _sign(mine.excess - peer.excess, SAME_NLL) or _sign(mine.ece - peer.ece, SAME_ECE)


def _sign(gain: float, slack: float) -> int:
    return 0 if abs(gain) <= slack else 1 if gain > 0 else -1


def quality(row: Row) -> str:
    """The answer's quality in a cell."""
    if row.error is not None:
        return f"off by {row.error:.0e}" if row.error >= 1e-12 else "exact to 1e-12"
    if row.excess is not None:
        return f"{row.excess:+.5f} nat, ECE {row.ece:.4f}"
    return ""
