"""Where the files of a data set may be, and what to say when they are not there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from trueup.io.atomic import atomic_write
from trueup.models.image_data import Parts

PLACES = (".", "{name}", "images", "text", "tabular")
"""Where files are looked for inside the folder of data, `{name}` being the data set's."""
PATIENCE = 30.0
"""Seconds to wait for a server."""


@dataclass(frozen=True)
class Source:
    """Files in one format, all of which must be there (as patterns, inside one folder), and how they are read."""

    files: tuple[str, ...]
    read: Callable[[Path], Any]
    told_by: tuple[str, ...] = ()
    """Which tell one content from another, if not the same."""


@dataclass(frozen=True)
class Download:
    """A way to fetch the files into a folder; it raises ImportError without its library, OSError without a network."""

    by: str
    fetch: Callable[[Path], Parts | None]
    """Fetches files that one of the sources reads, and returns None; or returns the parts themselves."""


def folder_of(data_dir: str | os.PathLike[str] | None) -> Path:
    """The folder of data: the one named, else that of the variable TRUEUP_DATA, else one in the user's cache."""
    named = data_dir if data_dir is not None else os.environ.get("TRUEUP_DATA")
    folder = Path(named) if named else Path.home() / ".cache" / "trueup" / "data"
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"data_dir must be a folder, got the file {folder}")
    return folder


class FileSearch(Exception):
    """What a data set wants, and where it is: raised in the place of reading while `only_look` is set."""

    def __init__(self, wanted: str, found: tuple[Source, Path] | None) -> None:
        super().__init__(wanted)
        self.wanted, self.where = wanted, None if found is None else found[1]
        self.told_by = () if found is None else found[0].told_by or found[0].files


only_look: ContextVar[bool] = ContextVar("only_look", default=False)


def obtain(name: str, folder: Path, sources: Sequence[Source], download: Download | None = None) -> Any:
    """Read the first source whose files are there, after fetching them if none is; else say what was wanted where."""
    match = _find_source(name, folder, sources)
    wanted = "; or ".join(" + ".join(source.files) for source in sources)
    if only_look.get():
        raise FileSearch(wanted, match)
    why = "and there is no library to fetch them with"
    if match is None and download is not None:
        target = folder / name
        new = not target.exists()
        parts = None
        why = f"and {download.by} fetched others"
        try:
            parts = download.fetch(target)
        except ImportError as error:
            why = f"and {download.by}, which would fetch them, cannot be imported: {error}"
        except (OSError, HTTPException, RuntimeError) as error:  # the last is torchvision's, where a file does not come
            reason = " ".join(str(error).split()) or type(error).__name__
            why = f"and fetching them by {download.by} failed: {reason}"
            if new:
                with suppress(OSError):
                    target.rmdir()  # only if nothing came
        if parts is not None:
            return parts
        match = _find_source(name, folder, sources)
    if match is not None:
        source, where = match
        return source.read(where)
    places = ", ".join(dict.fromkeys(str(folder / p.format(name=name)) for p in PLACES))
    raise FileNotFoundError(f"{name}: wanted {wanted}; in one of {places}; none is there, {why}")


def files_by_url(urls: Mapping[str, str]) -> Download:
    """Fetch plain files, each whole or not at all, from where they are published."""

    def fetch(folder: Path) -> None:
        for file, url in urls.items():
            if (folder / file).exists():
                continue
            with urlopen(url, timeout=PATIENCE) as answer:
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                with atomic_write(folder / file) as [draft], draft.open("wb") as out:
                    shutil.copyfileobj(answer, out)

    return Download(by="https from " + next(iter(urls.values())).split("/")[2], fetch=fetch)


def _find_source(name: str, folder: Path, sources: Sequence[Source]) -> tuple[Source, Path] | None:
    for source in sources:
        for pattern in PLACES:
            path = folder / pattern.format(name=name)
            if path.is_dir() and all(any(path.glob(file)) for file in source.files):
                return source, path
    return None
