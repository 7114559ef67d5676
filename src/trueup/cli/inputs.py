"""Files of predictions that the user names: how they are read."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trueup.cli.options import drop_unset

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import numpy as np

    from trueup.core.arrays import Array
    from trueup.io.predictions import PredictionFile, Predictions
    from trueup.io.shards import Shards


@dataclass(frozen=True)
class Reader:
    """Reads predictions from files whose arrays have the names that the user gave."""

    probs: bool = False
    logits: str | None = None
    labels: str | None = None

    def load(self, path: Path, split: str | None = None) -> Predictions:
        """The predictions in a file, or in one half of it."""
        if split not in (None, "val", "test"):
            raise ValueError(f"--split must be val or test, got {split!r}")
        with self._open(path) as file:
            return self._load(file, split)

    def load_unlabelled(self, path: Path, split: str | None = None) -> np.ndarray | None:
        """The logits of a file without labels; None if it has labels."""
        with self._open(path) as file:
            if self.labels is not None or file.has_labels(split):
                return None
            logits = file.load_logits(split)
        self._warn_of_probabilities(path, logits)
        return logits

    def load_half(self, path: Path, split: str) -> Predictions:
        """One half of a file that holds both, else the whole file."""
        with self._open(path) as file:
            return self._load(file, split if len(file.splits) == 2 else None)

    def load_val_and_test(self, val: Path, test: Path | None) -> tuple[Predictions, Predictions | None]:
        """The calibration and the test predictions: two files, two halves of one file, or one file and None."""
        if test is not None:
            return self.load_half(val, "val"), self.load_half(test, "test")
        with self._open(val) as file:
            if len(file.splits) == 2:
                return self._load(file, "val"), self._load(file, "test")
            return self._load(file, None), None

    def is_sharded(self, source: str, cluster: str | None) -> bool:
        """Whether a name means several files."""
        from trueup.io.shards import is_sharded

        several = is_sharded(source)
        if cluster is not None and not several:
            raise ValueError(f"--cluster is for shards: a folder, a pattern or an address, got the one file {source}")
        return several

    def find_shards(self, source: str, split: str | None) -> Shards:
        """The files that a name means, one or several."""
        from trueup.io.shards import Shards

        columns = self._columns()
        names = drop_unset(
            logits=tuple(columns) if isinstance(columns, list) else columns, labels=self.labels, split=split
        )
        return Shards.of(source, **names, probs=self.probs)

    @contextmanager
    def open_shards(
        self, source: str, split: str | None, cluster: str | None
    ) -> Iterator[tuple[Shards, Executor | None]]:
        """The shards, and the executor that reads them."""
        from trueup.study.run import executor_for

        shards = self.find_shards(source, split)
        self._check_first_rows(shards)
        with executor_for(cluster or "none") as executor:
            yield shards, executor

    def _columns(self) -> str | list[str] | None:
        return self.logits.split(",") if self.logits and "," in self.logits else self.logits

    def _open(self, path: Path) -> AbstractContextManager[PredictionFile]:
        from trueup.io.predictions import open_predictions

        return open_predictions(path, **drop_unset(logits=self._columns(), labels=self.labels), probs=self.probs)

    def _load(self, file: PredictionFile, split: str | None) -> Predictions:
        predictions = file.load(split)
        self._warn_of_probabilities(file.path, predictions.logits)
        return predictions

    def _warn_of_probabilities(self, path: str | Path, logits: Array) -> None:
        from trueup.io.predictions import looks_like_probabilities

        if not self.probs and (observation := looks_like_probabilities(logits)):
            warnings.warn(f"{path}: {observation}; say --probs if that is what they are", stacklevel=3)

    def _check_first_rows(self, shards: Shards) -> None:
        """Look for probabilities in the first rows there are; a bad shard is reported when it is read."""
        from trueup.io.predictions import ROWS_LOOKED_AT

        few = replace(shards, rows=ROWS_LOOKED_AT)
        for path in () if self.probs else few.paths:
            with suppress(ValueError, OSError):
                part = next(few.read(path))
                if len(part.labels):
                    self._warn_of_probabilities(path, part.logits)
                    return
