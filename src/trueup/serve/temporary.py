"""Temporary folders by the process that made them, so that those of one that was killed are recognised and removed."""

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
    """The beginning of the name of a temporary folder of this process."""
    return f"trueup-{purpose}-{os.getpid()}-"


def sweep_temporary() -> int:
    """Remove what killed processes of this user left behind; how many folders that were."""
    if os.name != "posix":  # elsewhere a process cannot be asked whether it lives
        return 0
    gone = 0
    for folder in Path(tempfile.gettempdir()).glob("trueup-*"):
        match = _OURS.fullmatch(folder.name)
        with suppress(OSError):  # somebody else may be faster
            status = folder.lstat()
            ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid()
            if match and ours and not _is_alive(int(match[1])):
                shutil.rmtree(folder, ignore_errors=True)
                gone += 1
    return gone


def _is_alive(pid: int) -> bool:
    with suppress(PermissionError):  # a process of another user is alive
        try:
            os.kill(pid, 0)
        except (ProcessLookupError, OverflowError):
            return False
    return True
