"""Temporary folders named after their process, so that the folders of killed processes can be removed."""

from __future__ import annotations

import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

_OURS = re.compile(r"trueup-[a-z]+-(\d+)-\w+")


def temporary_prefix(purpose: str) -> str:
    """Return the start of a temporary folder's name, which contains this process's id."""
    return f"trueup-{purpose}-{os.getpid()}-"


def sweep_temporary() -> int:
    """Remove the temporary folders of this user's killed processes; return their number."""
    if os.name != "posix":  # no way to test whether a process is alive
        return 0
    removed = 0
    for folder in Path(tempfile.gettempdir()).glob("trueup-*"):
        match = _OURS.fullmatch(folder.name)
        with suppress(OSError):  # another process may have removed it
            status = folder.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if match and ours and not _is_alive(int(match[1])):
                shutil.rmtree(folder, ignore_errors=True)
                removed += 1
    return removed


def _is_alive(pid: int) -> bool:
    with suppress(PermissionError):  # raised for a process of another user, which is alive
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
    return True
