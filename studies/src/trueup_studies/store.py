"""Results in one SQLite file; several processes may write at once, and any of them may be killed."""

from __future__ import annotations

import gzip
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trueup_studies.grid import Cell, as_json, plain

SCHEMA = 2
PATIENCE = 60.0
"""Seconds to wait for another writer."""
OF_OTHERS = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
"""Error codes that vanish when other processes finish."""
_MACHINE = ("PERM", "NOMEM", "READONLY", "INTERRUPT", "IOERR", "FULL", "CANTOPEN")
OF_THE_MACHINE = (*OF_OTHERS, *(getattr(sqlite3, f"SQLITE_{name}") for name in _MACHINE))
"""Error codes that are not the file's fault: locked for a minute, no space, no permission."""
MAGIC = b"SQLite format 3\0"
DATA = "CREATE TABLE IF NOT EXISTS data (name TEXT PRIMARY KEY, digest TEXT NOT NULL) WITHOUT ROWID"
ORIGIN = "machine, software"
"""Columns of `cells` that schema 1 did not have."""
LINE = ("study", "version", "settings", "seconds", "machine", "software", "rows")
"""Fields of a line of a dumped store; the key follows from the first three."""

Row = dict[str, Any]


class Origin(NamedTuple):
    """Machine and software that ran a cell; empty if unknown."""

    machine: str = ""
    software: str = ""
    """Versions of trueup, Python and the numeric libraries."""


class Outcome(NamedTuple):
    """Stored outcome of a cell."""

    key: str
    study: str
    version: int
    settings: Mapping[str, Any]
    status: Literal["finished", "failed"]
    error: str
    """The error of a failed cell, else empty."""
    seconds: float
    """Run time; not part of the result."""
    rows: Sequence[Row]
    origin: Origin
    """Machine and software."""


class Store:
    """The results of studies, in a file that is created if it is missing.

    Each call opens the file, does one transaction and closes it. So a process that is killed, or that forks, holds
    nothing open. The file must be on a local disk; workers elsewhere send their results to the process that writes.

    >>> from tempfile import TemporaryDirectory
    >>> cell = Cell("demo", 1, {"seed": 0})
    >>> with TemporaryDirectory() as folder:
    ...     store = Store(f"{folder}/results.sqlite")
    ...     store.finish(cell, [{"ece": 0.05}], seconds=2.0), store.finish(cell, [{"ece": 0.06}], seconds=2.0)
    ...     store.rows([cell])
    (True, False)
    [{'seed': 0, 'ece': 0.05}]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        _check(self.path)
        with self._connection() as connection:
            _prepare(connection, self.path)

    def __repr__(self) -> str:
        return f"Store({str(self.path)!r})"

    def finish(
        self, cell: Cell, rows: Iterable[Mapping[str, Any]], *, seconds: float, origin: Origin | None = None
    ) -> bool:
        """Store a cell's rows unless it is already finished; return whether they were stored.

        `origin` is the machine and software, if known.
        """
        known = validate_rows(cell, rows)
        with self._connection() as connection, _transaction(connection):
            new = self._write(connection, cell, "finished", "", seconds, origin)
            if new:
                lines = [(cell.key, number, as_json(row)) for number, row in enumerate(known)]
                connection.executemany("INSERT INTO rows (key, number, row) VALUES (?, ?, ?)", lines)
        return new

    def fail(self, cell: Cell, error: str, *, seconds: float, origin: Origin | None = None) -> bool:
        """Store why a cell failed, unless it is already finished; return whether the error was stored."""
        with self._connection() as connection, _transaction(connection):
            return self._write(connection, cell, "failed", error, seconds, origin)

    def outcomes(self, cells: Iterable[Cell]) -> list[Outcome]:
        """Return the stored outcomes of these cells, in their order; cells without one are left out."""
        keys = [cell.key for cell in cells]
        outcomes = self._outcomes("key IN (SELECT value FROM json_each(?))", [as_json(keys)])
        return [outcomes[key] for key in keys if key in outcomes]

    def known(self, study: str, version: int | None = None) -> list[Outcome]:
        """Return all outcomes of a study, or of one version of it, ordered by settings."""
        outcomes = self._outcomes("study = ? AND version = ifnull(?, version)", [study, version])
        return sorted(outcomes.values(), key=lambda outcome: (outcome.version, as_json(outcome.settings)))

    def rows(self, cells: Iterable[Cell]) -> list[Row]:
        """Return the rows of the finished cells, each with its settings, in the order of the cells."""
        return [{**outcome.settings, **row} for outcome in self.outcomes(cells) for row in outcome.rows]

    def statuses(self, cells: Iterable[Cell]) -> dict[str, str]:
        """Return key → "finished" or "failed", for the cells with an outcome."""
        query = "SELECT key, status FROM cells WHERE key IN (SELECT value FROM json_each(?))"
        with self._connection() as connection:
            return dict(connection.execute(query, [as_json([cell.key for cell in cells])]))

    def remember_data(self, digests: Mapping[str, str]) -> None:
        """Store data set → digest of its files; reject files other than those of finished cells."""
        query = "SELECT DISTINCT json_extract(settings, '$.data') FROM cells WHERE status = 'finished'"
        with self._connection() as connection, _transaction(connection):
            connection.execute(DATA)
            known = dict(connection.execute("SELECT name, digest FROM data"))
            done = {name for (name,) in connection.execute(query)}
            if others := [name for name, new in digests.items() if name in done and known.get(name, new) != new]:
                raise ValueError(
                    f"{self.path}: its results for {', '.join(others)} come from other files than those in the folder "
                    "of data; use another store for the new files"
                )
            connection.executemany("INSERT OR REPLACE INTO data (name, digest) VALUES (?, ?)", list(digests.items()))

    def dump(self, study: str, path: str | Path) -> None:
        """Write the finished cells of a study as compressed lines of JSON, ordered by settings.

        The same results give the same bytes, in whatever order they were run. Failed cells are left out, so that
        another machine tries them again.
        """
        from trueup.io.atomic import atomic_write  # imported here, since it needs numpy

        lines = []
        for outcome in self.known(study):
            if outcome.status == "finished":
                known = outcome._asdict() | outcome.origin._asdict()
                lines.append(as_json({name: known[name] for name in LINE}) + "\n")
        with atomic_write(Path(path)) as [draft]:
            draft.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))

    def restore(self, path: str | Path) -> int:
        """Read a file of `dump`, so that a study continues from it; return the number of new cells.

        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     first, second = Store(f"{folder}/first.sqlite"), Store(f"{folder}/second.sqlite")
        ...     first.finish(Cell("demo", 1, {"seed": 0}), [{"ece": 0.05}], seconds=2.0)
        ...     first.dump("demo", f"{folder}/cells.jsonl.gz")
        ...     second.restore(f"{folder}/cells.jsonl.gz"), second.restore(f"{folder}/cells.jsonl.gz")
        True
        (1, 0)
        """
        from trueup.io.atomic import errors_name_file

        new = 0
        with errors_name_file(Path(path)), gzip.open(path, "rt", encoding="utf-8") as file:
            lines = [_mapping(line) for line in file]
        for line in lines:
            cell = Cell(line["study"], line["version"], line["settings"])
            origin = Origin(line["machine"], line["software"])
            new += self.finish(cell, line["rows"], seconds=line["seconds"], origin=origin)
        return new

    def _outcomes(self, which: str, values: list[Any]) -> dict[str, Outcome]:
        with self._connection() as connection, _transaction(connection, "DEFERRED"):  # both tables at one moment
            rows: dict[str, list[Row]] = {}
            query = f"SELECT key, row FROM rows WHERE key IN (SELECT key FROM cells WHERE {which}) ORDER BY key, number"
            for key, row in connection.execute(query, values):
                rows.setdefault(key, []).append(_mapping(row))
            query = f"SELECT key, study, version, settings, status, error, seconds, {ORIGIN} FROM cells WHERE {which}"
            outcomes = {}
            for key, study, version, settings, status, error, seconds, *origin in connection.execute(query, values):
                parts = rows.get(key, []), Origin(*origin)
                outcomes[key] = Outcome(key, study, version, _mapping(settings), status, error, seconds, *parts)
            return outcomes

    def _write(
        self, connection: sqlite3.Connection, cell: Cell, status: str, error: str, seconds: float, origin: Origin | None
    ) -> bool:
        """Store a finished cell, which is never changed again."""
        cursor = connection.execute(
            f"INSERT INTO cells (key, study, version, settings, status, error, seconds, {ORIGIN}) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET status = excluded.status, "
            "error = excluded.error, seconds = excluded.seconds, machine = excluded.machine, "
            "software = excluded.software WHERE cells.status = 'failed'",
            (cell.key, cell.study, cell.version, as_json(cell.settings), status, error, seconds, *(origin or Origin())),
        )
        return cursor.rowcount == 1

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """Open a connection without implicit transactions."""
        try:
            with closing(sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)) as connection:
                yield connection
        except (sqlite3.Error, TypeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
            if _code(error) in OF_THE_MACHINE:
                raise OSError(f"{self.path}: {error}") from error
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"{self.path}: the file is damaged: {reason}") from error


def _code(error: Exception) -> int:
    """Return SQLite's primary error code; 0 for other errors."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _mapping(text: str) -> Row:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise TypeError(f"expected a mapping, got {type(value).__name__}")
    return value


def validate_rows(cell: Cell, rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Return the rows as plain data. A row may repeat a setting, but must not contradict it."""
    known = []
    for number, row in enumerate(rows):
        if not isinstance(row, Mapping):
            raise ValueError(f"row {number} must be a mapping from names to values, got {type(row).__name__}")
        row = plain(row, f"row {number}")
        for name in cell.settings.keys() & row.keys():
            if row[name] != cell.settings[name]:
                raise ValueError(
                    f"row {number} must not change the setting {name!r} from {cell.settings[name]!r}, got {row[name]!r}"
                )
        known.append(row)
    return known


@contextmanager
def _transaction(connection: sqlite3.Connection, kind: str = "IMMEDIATE") -> Iterator[None]:
    """Run a transaction. A writer locks at the beginning, since a reader that turns writer may never get the lock."""
    connection.execute(f"BEGIN {kind}")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _check(path: Path) -> None:
    """Reject a file that is no database before SQLite opens it."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    if not path.exists():
        return
    if not path.is_file():
        raise ValueError(f"{path}: expected a file")
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if start not in (b"", MAGIC):  # empty: a process was killed before its first transaction
        raise ValueError(f"{path}: expected a store of results, an SQLite file; this is not one")


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Create the tables if there are none; reject files of other programs and of later versions."""
    if _schema(connection, path) < SCHEMA:
        with _transaction(connection):
            schema = _schema(connection, path)  # another process may have been faster
            if schema == 0:
                tables = files("trueup_studies").joinpath("store.sql").read_text(encoding="utf-8")
                for statement in filter(str.strip, tables.split(";")):
                    connection.execute(statement)
                connection.execute("INSERT INTO trueup_store (schema) VALUES (?)", (SCHEMA,))
            elif schema < SCHEMA:
                for name in ORIGIN.split(", "):
                    connection.execute(f"ALTER TABLE cells ADD COLUMN {name} TEXT NOT NULL DEFAULT ''")
                connection.execute("UPDATE trueup_store SET schema = ?", (SCHEMA,))
    _write_ahead(connection)


def _schema(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema of our tables; 0 for an empty file."""
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not names:
        return 0
    if "trueup_store" not in names:
        raise ValueError(f"{path}: expected a store of results; this SQLite file holds {', '.join(sorted(names))}")
    versions = connection.execute("SELECT schema FROM trueup_store").fetchall()
    if len(versions) != 1 or not isinstance(versions[0][0], int):
        raise ValueError(f"{path}: the file is damaged: it does not say its schema")
    [(schema,)] = versions
    if schema > SCHEMA:
        raise ValueError(
            f"{path}: written by a later version of trueup (schema {schema}; this one knows up to {SCHEMA})"
        )
    return int(schema)


def _write_ahead(connection: sqlite3.Connection) -> None:
    """Let processes read while another writes. SQLite does not wait when changing this mode, so retry."""
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError as error:
            if _code(error) not in OF_OTHERS or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return
