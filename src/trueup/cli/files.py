"""Files that the user names: what is read from them, and where results may go."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from concurrent.futures import Executor

    import numpy as np

    from trueup.core.arrays import Array
    from trueup.io.predictions import Predictions
    from trueup.io.shards import Shards


@dataclass(frozen=True)
class Names:
    """How the user calls what is in a file."""

    probs: bool = False
    logits: str | None = None
    labels: str | None = None

    def read(self, path: Path, split: str | None = None) -> Predictions:
        """Predictions of a file, or of one half of it."""
        from trueup.cli.options import given
        from trueup.io.predictions import load

        columns = self.logits.split(",") if self.logits and "," in self.logits else self.logits
        if split not in (None, "val", "test"):
            raise ValueError(f"--split must be val or test, got {split!r}")
        found = load(path, **given(logits=columns, labels=self.labels, split=split), probs=self.probs)
        self._doubt(path, found.logits)
        return found

    def sharded(self, where: str, cluster: str | None) -> bool:
        """Whether a name means several files."""
        from trueup.io.shards import is_sharded

        several = is_sharded(where)
        if cluster is not None and not several:
            raise ValueError(f"--cluster is for shards: a folder, a pattern or an address, got the one file {where}")
        return several

    @contextmanager
    def shards(self, where: str, split: str | None, cluster: str | None) -> Iterator[tuple[Shards, Executor | None]]:
        """The shards, and who reads them."""
        from trueup.core.executors import executor_for

        found = self.source(where, split)
        self._doubt_first(found)
        with executor_for(cluster or "none") as executor:
            yield found, executor

    def source(self, where: str, split: str | None) -> Shards:
        """The files that a name means, one or several."""
        from trueup.cli.options import given
        from trueup.io.shards import Shards

        columns = tuple(self.logits.split(",")) if self.logits and "," in self.logits else self.logits
        return Shards.of(where, **given(logits=columns, labels=self.labels, split=split), probs=self.probs)

    def unlabelled(self, path: Path, split: str | None = None) -> np.ndarray | None:
        """The logits of a file without labels; None if it has some."""
        from trueup.cli.options import given
        from trueup.io.predictions import has_labels, load_logits

        if self.labels is not None or has_labels(path, split=split):
            return None
        columns = self.logits.split(",") if self.logits and "," in self.logits else self.logits
        found = load_logits(path, **given(logits=columns, split=split), probs=self.probs)
        self._doubt(path, found)
        return found

    def half(self, path: Path, name: str) -> Predictions:
        """One half of a file that has both, else the whole."""
        return self.read(path, name if self.has_halves(path) else None)

    def has_halves(self, path: Path) -> bool:
        """Whether a file names its labels val_… and test_…."""
        from trueup.io.atomic import errors_name_file
        from trueup.io.formats import FORMATS

        if path.suffix.lower() not in FORMATS or not path.is_file() or not path.stat().st_size:
            return False  # reading it will say what is wrong
        reader, _ = FORMATS[path.suffix.lower()]
        with errors_name_file(path), reader(path) as source:
            return all(f"{half}_{self.labels or 'labels'}" in source.columns for half in ("val", "test"))

    def val_and_test(self, val: Path, test: Path | None) -> tuple[Predictions, Predictions | None]:
        """What is fitted to, and what is judged: two files, two halves of one, or one file and nothing."""
        if test is not None:
            return self.half(val, "val"), self.half(test, "test")
        return self.half(val, "val"), self.read(val, "test") if self.has_halves(val) else None

    def _doubt(self, path: str | Path, logits: Array) -> None:
        from trueup.io.sanity import looks_like_probabilities

        if not self.probs and (told := looks_like_probabilities(logits)):
            warnings.warn(f"{path}: {told}; say --probs if that is what they are", stacklevel=3)

    def _doubt_first(self, shards: Shards) -> None:
        """Look at the first rows there are; what is wrong with a shard is told where it is read."""
        from trueup.io.sanity import LOOKED_AT

        few = replace(shards, rows=LOOKED_AT)
        for path in () if self.probs else few.paths:
            with suppress(ValueError, OSError):
                part = next(few.read(path))
                if len(part.labels):
                    self._doubt(path, part.logits)
                    return


def output(path: Path, *suffixes: str, reads: tuple[Path | None, ...] = ()) -> Path:
    """A path that may be written, looked at before the work begins."""
    from trueup.io.atomic import require_writable
    from trueup.io.formats import file_list

    if suffixes and path.suffix.lower() not in suffixes:
        raise ValueError(f"{path}: the suffix must be {' or '.join(suffixes)}, got {path.suffix!r}")
    for written in file_list(path):
        require_writable(written)
    for source in filter(None, reads):
        for read in file_list(source):
            if any(read.exists() and written.exists() and read.samefile(written) for written in file_list(path)):
                raise ValueError(f"{path}: this would overwrite the input {source}; choose another name")
    return path
