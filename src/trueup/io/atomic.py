"""Reading and writing files safely: a file is complete or absent, and errors and warnings name it."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from trueup._core.errors import Hint, InputError
from trueup.io.source import suffix_of

StrPath: TypeAlias = str | os.PathLike[str]
StorageOptions: TypeAlias = Mapping[str, Any] | None
"""Options with which fsspec opens an address."""


@contextmanager
def atomic_write(*paths: Path) -> Iterator[list[Path]]:
    """Provide drafts next to the files, which replace the files at once if the block succeeds.

    An interruption leaves the old files whole and no drafts behind. A link keeps pointing to its file, and a file keeps
    its permissions. If the system refuses (no space, no permission), the OSError names the file.
    """
    targets = [Path(os.path.realpath(check_name(path))) for path in paths]
    for file in targets:
        if not file.parent.is_dir():
            raise FileNotFoundError(f"{file}: there is no folder {file.parent}")
    drafts = [_draft(file) for file in targets]
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
    except Exception as error:
        refused = _refusal(error, drafts)
        if refused is None:
            raise
        raise OSError(*refused, str(targets[0])) from error
    finally:
        for draft in drafts:
            draft.unlink(missing_ok=True)
    if os.name == "posix":  # other systems cannot open folders
        for folder in {file.parent for file in targets}:
            with suppress(OSError):  # some file systems refuse; the files are complete anyway
                _sync(folder, os.O_RDONLY)


def require_writable(path: Path) -> Path:
    """Check that a file can be written, before long work begins."""
    with _explain_refusal(path):
        file = Path(os.path.realpath(check_name(path)))
        if not file.parent.is_dir():
            raise ValueError(f"{path}: there is no folder {path.parent}")
        if file.is_dir():
            raise ValueError(f"{path}: must be a file, but is a folder")
        _mode_of_new(_draft(file))
    return path


def require_writable_folder(path: Path) -> Path:
    """Check that a folder can be written to or created; nothing is created yet."""
    with _explain_refusal(path):
        folder = Path(os.path.realpath(check_name(path)))
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise ValueError(f"{path}: must be a folder, but {folder} is a file")
        _mode_of_new(_draft(folder / "new"))
    return path


@contextmanager
def errors_name_file(path: Path | str) -> Iterator[None]:
    """Turn any failure to read into one ValueError that names the file; parsers raise anything on bad bytes."""
    try:
        yield
    except InputError as error:
        hint = Hint.PROBABILITIES_IN_FILE if error.hint is Hint.PROBABILITIES else error.hint
        raise error.replace(file=error.file or path, got=shorten(error.got), hint=hint) from None
    except (FileNotFoundError, PermissionError, ImportError, MemoryError, Warning):
        raise
    except Exception as error:
        other = getattr(error, "filename", None) if isinstance(error, OSError) else None
        if other is not None and str(other) != str(path):
            raise  # the error is about another file, which is being written
        reason = shorten(" ".join(str(error).split())) or type(error).__name__
        if isinstance(error, UnicodeDecodeError):
            reason = f"it must be UTF-8 text; save it in that encoding ({reason})"
        kind = "" if type(error) is ValueError else f"not a readable {suffix_of(path)} file: "
        raise ValueError(f"{path}: {kind}{reason}") from None


def warn_of_skipped(skipped: int, name: str, missing: str = "a label or a confidence") -> None:
    """Warn of rows that were left out because they had no label, or no confidence."""
    if skipped:
        rows = "1 row was" if skipped == 1 else f"{skipped:,} rows were"
        warnings.warn(f"{name}: {rows} left out, without {missing}", stacklevel=3)


def shorten(text: str, most: int = 500) -> str:
    """Keep both ends of a long text."""
    return text if len(text) <= most else f"{text[: most - 200]} … {text[-200:]}"


def check_name(path: Path) -> Path:
    """Reject a path that is not UTF-8, which could not be printed or stored after long work."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        shown = os.fsencode(path).decode(errors="backslashreplace")
        raise ValueError(f"{shown}: the name of the file must be UTF-8; rename it") from None
    return path


def require_file(path: Path) -> Path:
    """Check that a file exists and is not empty."""
    if not check_name(path).exists():
        raise FileNotFoundError(f"{path}: no such file")
    if not path.is_file():
        raise ValueError(f"{path}: must be a file, but is none")
    if not path.stat().st_size:
        raise ValueError(f"{path}: the file is empty")
    effective = os.access in os.supports_effective_ids
    if not os.access(path, os.R_OK, effective_ids=effective):  # safetensors would report a missing file
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    return path


def _refusal(error: Exception, drafts: list[Path]) -> tuple[int, str] | None:
    """Return the system's error number and text if it refused to write these drafts; None for other errors."""
    if isinstance(error, OSError) and error.errno is not None:
        ours = error.filename is None or str(error.filename) in map(str, drafts)
        return (error.errno, os.strerror(error.errno)) if ours else None
    if number := re.search(r"\bos error (\d+)", str(error)):  # safetensors puts it into its message
        return int(number[1]), os.strerror(int(number[1]))
    # NumPy and torch report only that they wrote fewer bytes than intended.
    if type(error) is OSError or "inline_container" in str(error):
        full = not shutil.disk_usage(drafts[0].parent).free
        return (errno.ENOSPC, os.strerror(errno.ENOSPC)) if full else (errno.EIO, "only a part of it could be written")
    return None


@contextmanager
def _explain_refusal(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(f"{path}: it cannot be written: {error.strerror}") from None


def _draft(file: Path) -> Path:
    return file.with_name(f".{file.name}.{secrets.token_hex(8)}.tmp")


def _mode_of_new(path: Path) -> int:
    """Return the permissions that a new file gets here."""
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
