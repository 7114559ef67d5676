"""Find the files of a data set, download them, or say what is missing."""

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

FOLDERS = (".", "{name}", "images", "text", "tabular")
"""Subfolders of the folder of data that are searched; `{name}` is the data set's name."""
PATIENCE = 30.0
"""Seconds to wait for a server."""


@dataclass(frozen=True)
class Source:
    """Files in one format, as patterns that must all match in one folder, and the function that reads them."""

    files: tuple[str, ...]
    read: Callable[[Path], Any]
    identifying: tuple[str, ...] = ()
    """Files whose content identifies the data; `files` if empty."""


@dataclass(frozen=True)
class Download:
    """A way to download the files; it raises ImportError without its library, and OSError without a network."""

    by: str
    fetch: Callable[[Path], Parts | None]
    """Function of a folder that downloads files for one of the sources, or returns the parts themselves."""


def folder_of(data_dir: str | os.PathLike[str] | None) -> Path:
    """Return the folder of data: the named one, else that of the variable TRUEUP_DATA, else one in the user's cache."""
    named = data_dir if data_dir is not None else os.environ.get("TRUEUP_DATA")
    folder = Path(named) if named else Path.home() / ".cache" / "trueup" / "data"
    if folder.exists() and not folder.is_dir():
        raise NotADirectoryError(f"data_dir must be a folder, got the file {folder}")
    return folder


class FileSearch(Exception):
    """The files of a data set and their folder: raised, while `only_look` is set, instead of reading them."""

    def __init__(self, files: str, match: tuple[Source, Path] | None) -> None:
        super().__init__(files)
        self.files, self.where = files, None if match is None else match[1]
        self.identifying = () if match is None else match[0].identifying or match[0].files


only_look: ContextVar[bool] = ContextVar("only_look", default=False)


def obtain(name: str, folder: Path, sources: Sequence[Source], download: Download | None = None) -> Any:
    """Read the first source whose files exist, downloading them if necessary; else name the missing files."""
    match = _find_source(name, folder, sources)
    files = "; or ".join(" + ".join(source.files) for source in sources)
    if only_look.get():
        raise FileSearch(files, match)
    reason = "and there is no library to download them"
    if match is None and download is not None:
        target = folder / name
        new = not target.exists()
        parts = None
        reason = f"and {download.by} downloaded others"
        try:
            parts = download.fetch(target)
        except ImportError as error:
            reason = f"and {download.by}, which would download them, cannot be imported: {error}"
        except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError: torchvision
            message = " ".join(str(error).split()) or type(error).__name__
            reason = f"and downloading them by {download.by} failed: {message}"
            if new:
                with suppress(OSError):
                    target.rmdir()  # only if it is empty
        if parts is not None:
            return parts
        match = _find_source(name, folder, sources)
    if match is not None:
        source, where = match
        return source.read(where)
    folders = ", ".join(dict.fromkeys(str(folder / p.format(name=name)) for p in FOLDERS))
    raise FileNotFoundError(f"{name}: wanted {files}; in one of {folders}; none is there, {reason}")


def files_by_url(urls: Mapping[str, str]) -> Download:
    """Download plain files atomically from their publishers."""

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
        for pattern in FOLDERS:
            path = folder / pattern.format(name=name)
            if path.is_dir() and all(any(path.glob(file)) for file in source.files):
                return source, path
    return None
