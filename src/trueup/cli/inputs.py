"""Files of predictions that the user names: how they are read."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.cli.options import drop_unset, require_name

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from trueup.core.arrays import Array
    from trueup.io.predictions import PredictionFile, PredictionTable
    from trueup.io.shards import Shards


@dataclass(frozen=True)
class Reader:
    """Reads predictions from files whose arrays have the names that the user gave."""

    probs: bool = False
    logits: str | None = None
    labels: str | None = None
    confidence: str | None = None
    correct: str | None = None
    classes: str | None = None
    weight: str | None = None
    by: list[str] | None = None
    storage: list[str] | None = None
    clusters: str | None = None
    class_axis: str | None = None
    ignore_index: int | None = None
    multilabel: bool = False

    def __post_init__(self) -> None:
        if self.class_axis not in (None, "first", "last"):
            raise ValueError(f"--class-axis must be first (n, K, …) or last (n, …, K), got {self.class_axis!r}")
        if self.ignore_index is not None and not (self.class_axis or self.multilabel):
            raise ValueError("--ignore-index goes with --class-axis or --multilabel")
        if self.multilabel and (self.class_axis or self.confidence):
            raise ValueError("--multilabel takes no --class-axis and no --confidence")
        if self.correct is not None and self.confidence is None:
            raise ValueError("--correct goes with --confidence, the column that it judges")
        if self.confidence is not None and (self.probs or self.logits or self.labels):
            raise ValueError("--confidence takes the place of --logits, --labels and --probs: leave them out")

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names that the user gave, by commas or in a file."""
        if self.classes is None:
            return None
        if Path(self.classes).is_file():
            text = Path(self.classes).read_text(encoding="utf-8")
            names = json.loads(text) if Path(self.classes).suffix == ".json" else text.splitlines()
        else:
            names = self.classes.split(",")
        return tuple(str(name).strip() for name in names if str(name).strip())

    def names(self, found: tuple[str, ...] | None = None) -> tuple[str, ...] | None:
        """The names of the classes: those that the user gave, of a confidence its two, or those of the file."""
        if self.multilabel:  # whose names are those of the labels
            return found
        return ("wrong", "right") if self.confidence is not None else self.class_names or found

    def event_number(self, event: str | None, names: tuple[str, ...] | None = None) -> int | None:
        """The class that --event means, by its name or its number."""
        if event is None:
            return None
        known = self.class_names or names or ()
        if event in known:
            return known.index(event)
        if event.isdecimal():
            return int(event)
        if not known:
            raise ValueError(f"--event must be the number of a class, got {event!r}; with --classes it may be a name")
        return known.index(require_name("class", known, event))

    def load(self, path: str | Path, split: str | None = None) -> PredictionTable:
        """The predictions in a file, or in one half of it."""
        if split not in (None, "val", "test"):
            raise ValueError(f"--split must be val or test, got {split!r}")
        with self.open(path) as file:
            return self._load(file, split)

    def load_unlabelled(self, path: str | Path, split: str | None = None) -> Array | None:
        """The logits of a file without labels; None if it has labels."""
        with self.open(path) as file:
            if self.labels is not None or self.correct is not None or file.has_labels(split):
                return None
            logits = file.load_logits(split)
        self.warn_of_probabilities(path, logits)
        return logits

    def load_half(self, path: str | Path, split: str) -> PredictionTable:
        """One half of a file that holds both, else the whole file; or all shards."""
        if self.is_sharded(str(path), None):
            return self.load_shards(str(path))
        with self.open(path) as file:
            return self._load(file, split if len(file.splits) == 2 else None)

    def load_val_and_test(
        self, val: str | Path, test: str | Path | None
    ) -> tuple[PredictionTable, PredictionTable | None]:
        """The calibration and the test predictions: two files or folders, two halves of one file, or one and None."""
        if test is not None:
            return self.load_half(val, "val"), self.load_half(test, "test")
        if self.is_sharded(str(val), None):
            return self.load_shards(str(val)), None
        with self.open(val) as file:
            if len(file.splits) == 2:
                return self._load(file, "val"), self._load(file, "test")
            return self._load(file, None), None

    def load_shards(self, source: str) -> PredictionTable:
        """All rows of shards that fit in memory, else as many as do, drawn at random."""
        shards = self.find_shards(source, None)
        self._check_first_rows(shards)
        return shards.load()

    def is_sharded(self, source: str, cluster: str | None) -> bool:
        """Whether a name means several files."""
        from trueup.io.source import is_sharded

        several = is_sharded(source)
        if cluster is not None and not several:
            raise ValueError(
                f"--cluster is for shards: a folder, a pattern or an address, got the one file {source}; "
                "--clusters COLUMN says which rows are correlated"
            )
        if several and (self.class_axis or self.multilabel):
            which = "--class-axis" if self.class_axis else "--multilabel"
            raise ValueError(f"{which} takes one file, got {source}, which means several")
        return several

    def find_shards(self, source: str, split: str | None) -> Shards:
        """The files that a name means, one or several."""
        from trueup.io.shards import Shards

        return Shards.of(source, **self._fields(), **drop_unset(split=split), storage_options=self.storage_options)

    @contextmanager
    def open_shards(
        self, source: str, split: str | None, cluster: str | None
    ) -> Iterator[tuple[Shards, Executor | None]]:
        """The shards, and the executor that reads them."""
        from trueup.core.executors import executor_for

        shards = self.find_shards(source, split)
        self._check_first_rows(shards)
        with executor_for(cluster or "none") as executor:
            yield shards, executor

    def open(self, path: str | Path) -> AbstractContextManager[PredictionFile]:
        """An open file."""
        from trueup.io.predictions import open_predictions

        return open_predictions(path, **self._fields(), storage_options=self.storage_options)

    @property
    def storage_options(self) -> dict[str, Any] | None:
        """What fsspec is told."""
        if not self.storage:
            return None
        options = {}
        for entry in self.storage:
            key, equals, value = entry.partition("=")
            if not equals:
                raise ValueError(f"--storage must be KEY=VALUE, got {entry!r}")
            try:
                options[key] = json.loads(value)
            except ValueError:
                options[key] = value
        return options

    def _fields(self) -> dict[str, Any]:
        columns = tuple(self.logits.split(",")) if self.logits and "," in self.logits else self.logits
        return drop_unset(
            logits=columns,
            labels=self.labels,
            probs=self.probs,
            confidence=self.confidence,
            correct=self.correct,
            classes=self.class_names,
            weights=self.weight,
            groups=tuple(self.by) if self.by else None,
            clusters=self.clusters,
            class_axis=self.class_axis,
            ignore_index=self.ignore_index,
            multilabel=self.multilabel or None,
        )

    def _load(self, file: PredictionFile, split: str | None) -> PredictionTable:
        predictions = file.load_table(split, mmap=True)  # a vocabulary's logits may fill most of the memory
        self.warn_of_probabilities(file.name, predictions.logits)
        return predictions

    def warn_of_probabilities(self, path: str | Path, logits: Array) -> None:
        """Doubt logits that look like probabilities."""
        from trueup.io.predictions import looks_like_probabilities

        plain = not self.probs and self.confidence is None and not self.multilabel
        if plain and logits.ndim == 2 and (observation := looks_like_probabilities(logits)):
            warnings.warn(f"{path}: {observation}; say --probs if that is what they are", stacklevel=3)

    def _check_first_rows(self, shards: Shards) -> None:
        """Look for probabilities in the first rows there are; a bad shard is reported when it is read."""
        from trueup.io.predictions import ROWS_LOOKED_AT

        few = replace(shards, rows=ROWS_LOOKED_AT)
        for path in () if self.probs or self.confidence else few.paths:
            with suppress(ValueError, OSError):
                part = next(few.read(path))
                if len(part.labels):
                    self.warn_of_probabilities(path, part.logits)
                    return


def join_groups(columns: Any) -> list[str] | None:
    """One value a row from the columns of --by; of several, all their values together."""
    if not columns:
        return None
    return [", ".join(str(value) for value in values) for values in zip(*columns.values(), strict=True)]
