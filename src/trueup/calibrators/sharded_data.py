"""Shards as what a fit asks of them: sums over all rows, and some rows to begin with."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from trueup.io.predictions import Predictions
from trueup.io.shards import NUMBERS, BadShard, NoRows, Shards, map_shards

SAMPLE = 20_000
"""Rows, about, from all shards, by which a search is begun."""
_HEADS = 32  # of so many files


@dataclass(frozen=True)
class Sample:
    """Some rows, of all parts alike: when there are more than twice as many as wanted, every other one is let go."""

    logits: np.ndarray
    labels: np.ndarray
    every: int
    most: int

    @classmethod
    def of(cls, part: Predictions, *, most: int) -> Sample:
        """Of a chunk."""
        return cls(np.asarray(part.logits), np.asarray(part.labels), 1, most)._thinned(most)

    def __add__(self, other: Sample) -> Sample:
        return self.joined(other, most=self.most)

    def joined(self, other: Sample, *, most: int) -> Sample:
        """With another, as many rows as are wanted."""
        every = max(self.every, other.every)
        logits, labels = (
            np.concatenate([getattr(one, name)[:: every // one.every] for one in (self, other)])
            for name in ("logits", "labels")
        )
        return Sample(logits, labels, every, self.most)._thinned(most)

    def _thinned(self, most: int) -> Sample:
        logits, labels, every = self.logits, self.labels, self.every
        while len(labels) > 2 * max(64, min(most, NUMBERS // logits.shape[1])):
            logits, labels, every = logits[::2], labels[::2], 2 * every
        return Sample(logits.copy(), labels.copy(), every, self.most)  # not the whole chunk they were part of


class Data:
    """Shards, sums over all of their rows, and some of the rows."""

    def __init__(self, shards: Shards, executor: Executor | None, skip_bad: bool, progress: bool) -> None:
        self._shards, self._executor, self._skip_bad, self._progress = shards, executor, skip_bad, progress
        self._rows: int | None = None
        self._sample: Predictions | None = None
        self.bad: tuple[str, ...] = ()
        """Shards that were left out, once all were read."""

    @property
    def sample(self) -> Predictions:
        """Some rows, by which a search is begun: the first of some shards, unless all were looked over."""
        if self._sample is None:
            try:
                found = self._sampled(self._shards.heads(_HEADS, SAMPLE), "first rows of shards")
            except NoRows:
                found = self._sampled(self._shards.heads(len(self._shards), SAMPLE), "first rows of shards")
            self._sample = Predictions(found[0].logits, found[0].labels)
        return self._sample

    def look_over(self) -> None:
        """Read all shards, count their rows, and take the sample from all of them.

        A temperature is found from any rows; a number a class only from rows of all classes, which the first ones may
        lack.
        """
        sample, rows, bad = self._sampled(self._shards, "looking over shards")
        self._sample = Predictions(sample.logits, sample.labels)
        self._note(rows, bad)

    @property
    def rows(self) -> int:
        """How many there are."""
        if self._rows is None:
            self.look_over()
        assert self._rows is not None
        return self._rows

    def sum(self, task: Callable[[Predictions], Any], label: str) -> Any:
        """Sum a task over all rows; bad shards are found by the first sum, and left out of those that follow."""
        total, rows, bad = self._gathered(task, self._shards, label)
        self._note(rows, bad)
        return total

    def _note(self, rows: int, bad: tuple[str, ...]) -> None:
        if self._rows is None:
            self._rows, self.bad = rows, bad
            self._shards, self._skip_bad = self._shards.without(bad).reread(), False
        elif rows != self._rows:
            raise BadShard(f"shards must not change during a fit: {self._rows} rows have become {rows}")

    def _sampled(self, shards: Shards, label: str) -> tuple[Sample, int, tuple[str, ...]]:
        task = partial(Sample.of, most=max(64, SAMPLE // len(shards)))
        found: tuple[Sample, int, tuple[str, ...]] = self._gathered(
            task, shards, label, combine=partial(Sample.joined, most=SAMPLE)
        )
        return found

    def _gathered(self, task: Callable[[Predictions], Any], shards: Shards, label: str, **options: Any) -> Any:
        return map_shards(
            task,
            shards,
            executor=self._executor,
            skip_bad=self._skip_bad,
            progress=self._progress,
            label=label,
            **options,
        )
