"""Results in one SQLite file, which several processes may write to at once and any of them may be killed."""

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
"""Codes of errors that pass when other processes have done their part."""
_MACHINE = ("PERM", "NOMEM", "READONLY", "INTERRUPT", "IOERR", "FULL", "CANTOPEN")
OF_THE_MACHINE = (*OF_OTHERS, *(getattr(sqlite3, f"SQLITE_{name}") for name in _MACHINE))
"""Codes of errors that are not the file's: locked for a minute, no space, no permission."""
MAGIC = b"SQLite format 3\0"
DATA = "CREATE TABLE IF NOT EXISTS data (name TEXT PRIMARY KEY, digest TEXT NOT NULL) WITHOUT ROWID"
PLACE = "machine, software"
"""Columns of `cells` that schema 1 did not have."""
LINE = ("study", "version", "settings", "seconds", "machine", "software", "rows")
"""What a line of a dumped store has; the key follows from the first three."""

Row = dict[str, Any]


class Place(NamedTuple):
    """Where a cell was run; nothing where that is not known."""

    machine: str = ""
    software: str = ""
    """The versions of trueup and of what it computes with."""


class Outcome(NamedTuple):
    """What came of a cell."""

    key: str
    study: str
    version: int
    settings: Mapping[str, Any]
    status: Literal["finished", "failed"]
    error: str
    """Why it failed, else nothing."""
    seconds: float
    """That it took: of the machine, not of the result."""
    rows: Sequence[Row]
    place: Place
    """Where it was run."""


class Store:
    """The results of studies, in a file that is made when it is not there.

    Each call opens the file, does one transaction and closes it, so nothing is held between calls: not by a process
    that is killed, nor by one that forks. The file must be on a disk of this machine; workers elsewhere send their
    results to the one process that writes.

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
        self, cell: Cell, rows: Iterable[Mapping[str, Any]], *, seconds: float, place: Place | None = None
    ) -> bool:
        """Keep a cell's rows, unless it is finished already: the first who comes wins. True if that was now.

        `place` says where it was run, if that is known.
        """
        known = validate_rows(cell, rows)
        with self._connection() as connection, _transaction(connection):
            new = self._write(connection, cell, "finished", "", seconds, place)
            if new:
                lines = [(cell.key, number, as_json(row)) for number, row in enumerate(known)]
                connection.executemany("INSERT INTO rows (key, number, row) VALUES (?, ?, ?)", lines)
        return new

    def fail(self, cell: Cell, error: str, *, seconds: float, place: Place | None = None) -> bool:
        """Keep why a cell failed, unless somebody has finished it. True if that is what is known now."""
        with self._connection() as connection, _transaction(connection):
            return self._write(connection, cell, "failed", error, seconds, place)

    def outcomes(self, cells: Iterable[Cell]) -> list[Outcome]:
        """What came of these cells, in their order; those that nothing is known of are left out."""
        keys = [cell.key for cell in cells]
        outcomes = self._outcomes("key IN (SELECT value FROM json_each(?))", [as_json(keys)])
        return [outcomes[key] for key in keys if key in outcomes]

    def known(self, study: str, version: int | None = None) -> list[Outcome]:
        """Everything that is known of a study, or of one version of it, in the order of the settings."""
        outcomes = self._outcomes("study = ? AND version = ifnull(?, version)", [study, version])
        return sorted(outcomes.values(), key=lambda outcome: (outcome.version, as_json(outcome.settings)))

    def rows(self, cells: Iterable[Cell]) -> list[Row]:
        """The rows of the finished cells, each with its settings, in the order of the cells."""
        return [{**outcome.settings, **row} for outcome in self.outcomes(cells) for row in outcome.rows]

    def statuses(self, cells: Iterable[Cell]) -> dict[str, str]:
        """Key → "finished" or "failed", of those cells that something is known of."""
        query = "SELECT key, status FROM cells WHERE key IN (SELECT value FROM json_each(?))"
        with self._connection() as connection:
            return dict(connection.execute(query, [as_json([cell.key for cell in cells])]))

    def seconds(self, cells: Iterable[Cell]) -> dict[str, float]:
        """Key → how long it took, of those cells that are finished."""
        query = "SELECT key, seconds FROM cells WHERE status = 'finished' AND key IN (SELECT value FROM json_each(?))"
        with self._connection() as connection:
            return dict(connection.execute(query, [as_json([cell.key for cell in cells])]))

    def remember_data(self, digests: Mapping[str, str]) -> None:
        """Keep which files results are of, data set → digest; refuse others than those of cells that are finished."""
        query = "SELECT DISTINCT json_extract(settings, '$.data') FROM cells WHERE status = 'finished'"
        with self._connection() as connection, _transaction(connection):
            connection.execute(DATA)
            known = dict(connection.execute("SELECT name, digest FROM data"))
            done = {name for (name,) in connection.execute(query)}
            if others := [name for name, own in digests.items() if name in done and known.get(name, own) != own]:
                raise ValueError(
                    f"{self.path}: its results of {', '.join(others)} are of other files than those in the folder of "
                    "data; keep those of these in another store"
                )
            connection.executemany("INSERT OR REPLACE INTO data (name, digest) VALUES (?, ?)", list(digests.items()))

    def dump(self, study: str, path: str | Path) -> None:
        """Write the finished cells of a study as compressed lines of JSON, in the order of the settings.

        The same results make the same bytes, in whatever order they were run. What failed is left out: another machine
        tries it again.
        """
        from trueup.io.atomic import atomic_write  # it needs numpy, which a list of studies does not

        lines = []
        for outcome in self.known(study):
            if outcome.status == "finished":
                known = outcome._asdict() | outcome.place._asdict()
                lines.append(as_json({name: known[name] for name in LINE}) + "\n")
        with atomic_write(Path(path)) as [draft]:
            draft.write_bytes(gzip.compress("".join(lines).encode(), mtime=0))

    def restore(self, path: str | Path) -> int:
        """Take what `dump` wrote, so that a study goes on from it; return the number of cells that were not known.

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
            place = Place(line["machine"], line["software"])
            new += self.finish(cell, line["rows"], seconds=line["seconds"], place=place)
        return new

    def _outcomes(self, which: str, values: list[Any]) -> dict[str, Outcome]:
        with self._connection() as connection, _transaction(connection, "DEFERRED"):  # both tables at one moment
            rows: dict[str, list[Row]] = {}
            query = f"SELECT key, row FROM rows WHERE key IN (SELECT key FROM cells WHERE {which}) ORDER BY key, number"
            for key, row in connection.execute(query, values):
                rows.setdefault(key, []).append(_mapping(row))
            query = f"SELECT key, study, version, settings, status, error, seconds, {PLACE} FROM cells WHERE {which}"
            outcomes = {}
            for key, study, version, settings, status, error, seconds, *place in connection.execute(query, values):
                found = rows.get(key, []), Place(*place)
                outcomes[key] = Outcome(key, study, version, _mapping(settings), status, error, seconds, *found)
            return outcomes

    def _write(
        self, connection: sqlite3.Connection, cell: Cell, status: str, error: str, seconds: float, place: Place | None
    ) -> bool:
        """A finished cell is never changed again."""
        cursor = connection.execute(
            f"INSERT INTO cells (key, study, version, settings, status, error, seconds, {PLACE}) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (key) DO UPDATE SET status = excluded.status, "
            "error = excluded.error, seconds = excluded.seconds, machine = excluded.machine, "
            "software = excluded.software WHERE cells.status = 'failed'",
            (cell.key, cell.study, cell.version, as_json(cell.settings), status, error, seconds, *(place or Place())),
        )
        return cursor.rowcount == 1

    @contextmanager
    def _connection(self) -> Iterator[sqlite3.Connection]:
        """A connection that begins and ends transactions when it is told to."""
        try:
            with closing(sqlite3.connect(self.path, timeout=PATIENCE, isolation_level=None)) as connection:
                yield connection
        except (sqlite3.Error, TypeError, RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
            if _code(error) in OF_THE_MACHINE:
                raise OSError(f"{self.path}: {error}") from error
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"{self.path}: the file is damaged: {reason}") from error


def _code(error: Exception) -> int:
    """SQLite's own, without what it adds for details; 0 of what is none of its errors."""
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _mapping(text: str) -> Row:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise TypeError(f"a mapping was wanted, got {type(value).__name__}")
    return value


def validate_rows(cell: Cell, rows: Iterable[Mapping[str, Any]]) -> list[Row]:
    """The rows in plain data. One may repeat a setting, but must not contradict it."""
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
    """All or nothing. A writer takes its turn at the beginning: who reads first and then writes may never get it."""
    connection.execute(f"BEGIN {kind}")
    try:
        yield
    except BaseException:
        connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")


def _check(path: Path) -> None:
    """Refuse what is no database before SQLite touches it."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    if not path.exists():
        return
    if not path.is_file():
        raise ValueError(f"{path}: wanted a file, this is none")
    with path.open("rb") as file:
        start = file.read(len(MAGIC))
    if start not in (b"", MAGIC):  # nothing yet: a process was killed before its first transaction
        raise ValueError(f"{path}: wanted a store of results, which is an SQLite file; this is none")


def _prepare(connection: sqlite3.Connection, path: Path) -> None:
    """Make the tables if there are none; refuse other programs' files and those of a later version of this one."""
    if _schema(connection, path) < SCHEMA:
        with _transaction(connection):
            schema = _schema(connection, path)  # somebody else may have been quicker
            if schema == 0:
                tables = files("trueup_studies").joinpath("store.sql").read_text(encoding="utf-8")
                for statement in filter(str.strip, tables.split(";")):
                    connection.execute(statement)
                connection.execute("INSERT INTO trueup_store (schema) VALUES (?)", (SCHEMA,))
            elif schema < SCHEMA:
                for name in PLACE.split(", "):
                    connection.execute(f"ALTER TABLE cells ADD COLUMN {name} TEXT NOT NULL DEFAULT ''")
                connection.execute("UPDATE trueup_store SET schema = ?", (SCHEMA,))
    _write_ahead(connection)


def _schema(connection: sqlite3.Connection, path: Path) -> int:
    """Of our tables; 0 if it has none at all."""
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not names:
        return 0
    if "trueup_store" not in names:
        raise ValueError(f"{path}: wanted a store of results; this SQLite file holds {', '.join(sorted(names))}")
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
    """Let readers read while somebody writes. The change of mode waits for nobody by itself, so it is tried again."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL").fetchone()
        except sqlite3.OperationalError as error:
            if _code(error) not in OF_OTHERS or time.monotonic() > until:
                raise
            time.sleep(0.01)
        else:
            return
