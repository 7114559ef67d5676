"""Files at addresses such as `s3://bucket/net.npz` or `memory://net.csv`, opened by fsspec."""

from __future__ import annotations

import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from trueup.io.atomic import StorageOptions
from trueup.io.source import file_list, suffix_of

_ATOMIC_PROTOCOLS = frozenset({"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "memory"})
"""Protocols that replace a file in one step. With others, files are sent under a temporary name and then renamed."""


def file_system(address: str, storage_options: StorageOptions = None) -> tuple[Any, str]:
    """Return the file system of an address, and the path on it."""
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ImportError(f"{address}: addresses need fsspec: pip install fsspec") from None
    try:
        return url_to_fs(address, **(storage_options or {}))
    except ValueError as error:
        raise ValueError(f"{address}: {error}") from None


@contextmanager
def local_copy(path: str, storage_options: StorageOptions = None) -> Iterator[Path]:
    """Download the file at an address to a temporary copy, which is removed when the block ends."""
    system, remote = file_system(path, storage_options)
    name = PurePosixPath(remote).name
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, name)
        if not system.isfile(remote):
            raise FileNotFoundError(f"{path}: no such file")
        system.get_file(remote, str(target))
        labels = remote.removesuffix(".npy") + ".labels.npy"
        if name.endswith(".npy") and system.exists(labels):
            system.get_file(labels, str(target.with_suffix(".labels.npy")))
        yield target


@contextmanager
def remote_files(path: str, storage_options: StorageOptions = None, *, labels: bool = True) -> Iterator[list[Path]]:
    """Provide local drafts of the files at an address, and send them there if the block succeeds."""
    system, remote = file_system(path, storage_options)
    protocols = {system.protocol} if isinstance(system.protocol, str) else {*system.protocol}
    with tempfile.TemporaryDirectory() as folder:
        drafts = list(file_list(Path(folder, f"draft{suffix_of(remote)}")))[: 2 if labels else 1]
        yield drafts
        for draft, target in zip(drafts, file_list(Path(PurePosixPath(remote))), strict=False):
            if protocols & _ATOMIC_PROTOCOLS:
                system.put_file(str(draft), str(target))
                continue
            hidden = str(target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp"))
            try:
                system.put_file(str(draft), hidden)
                system.mv(hidden, str(target))
            finally:
                if system.exists(hidden):
                    system.rm_file(hidden)
