"""What holds for every file of ours: it is whole or not there, and what is wrong with one is told by name."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replacing(*paths: Path) -> Iterator[list[Path]]:
    """Drafts to write to, beside the files, which take the files' places at once if the block ends well.

    An interruption leaves the old files whole and no drafts behind. A link keeps pointing to its file, and a file keeps
    its permissions.
    """
    targets = [Path(os.path.realpath(path)) for path in paths]
    for file in targets:
        if not file.parent.is_dir():
            raise FileNotFoundError(f"{file}: there is no folder {file.parent}")
    drafts = [file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp") for file in targets]
    try:
        modes = [_mode_of_new(draft) for draft in drafts]
        yield drafts
        for draft, file, mode in zip(drafts, targets, modes, strict=True):
            _sync(draft, os.O_RDWR)
            if file.exists():
                shutil.copymode(file, draft)
            else:
                draft.chmod(mode)  # some writers make files that nobody else may read
        for draft, file in zip(drafts, targets, strict=True):
            os.replace(draft, file)
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        for folder in {file.parent for file in targets}:
            _sync(folder, os.O_RDONLY)


@contextmanager
def blaming(path: Path) -> Iterator[None]:
    """Turn any failure to read into one ValueError that names the file; strange bytes make parsers raise anything."""
    try:
        yield
    except (FileNotFoundError, PermissionError, ImportError, MemoryError, Warning):
        raise
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        ours = type(error) is ValueError
        raise ValueError(f"{path}: {'' if ours else f'not a readable {path.suffix} file: '}{reason}") from None


def existing(path: Path) -> Path:
    """The path of a file that is there and has something in it."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    if not path.is_file():
        raise ValueError(f"{path}: wanted a file, this is none")
    if not path.stat().st_size:
        raise ValueError(f"{path}: the file is empty")
    return path


def _mode_of_new(path: Path) -> int:
    """The permissions that a new file gets here."""
    path.touch()
    mode = path.stat().st_mode & 0o777
    path.unlink()
    return mode


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
