"""Tables of text: .csv, and .jsonl with one JSON object per line; either may be packed by gzip.

They are read line by line, so a file need not fit in memory. Errors name the line.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from trueup._core.arrays import warn_users
from trueup._core.errors import Hint, InputError
from trueup.io.source import MISSING, Chunk, LabelParser, Plan, Source, as_list, is_gap, object_array

LINE_CHARACTERS = 1 << 26
"""Longest line of a .jsonl file. A packed file of a few kilobytes can contain a line of gigabytes."""
_ROWS_OF_COLUMNS = 50
"""Number of records read to find the names of fields, or the separator."""
SEPARATORS = ",;\t|"
"""Separators that are recognised in CSV files."""
_DECIMAL_COMMA, _DECIMAL_POINT = (re.compile(rf"\s*[-+]?\d*{mark}\d+([eE][-+]?\d+)?\s*%?\s*") for mark in (",", r"\."))


def _open_text(path: Path, newline: str | None = None) -> IO[str]:
    with open(path, "rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    return (gzip.open if is_packed else open)(path, "rt", newline=newline, encoding="utf-8-sig")


@contextmanager
def _create_text(path: Path) -> Iterator[IO[str]]:
    """Create a text file, packed if its name has .gz; drafts are called .name.suffix.token.tmp."""
    packed = ".gz" in path.suffixes
    # The gzip header has neither time nor name, so equal rows give equal bytes.
    with (
        open(path, "wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) if packed else raw as binary,
        io.TextIOWrapper(binary, encoding="utf-8", newline="") as file,
    ):
        yield file


def _sniff(path: Path, sep: str | None, decimal: str | None) -> tuple[str, str]:
    """Return the separator and the decimal mark of a CSV file, with a warning if they are not comma and point."""
    with _open_text(path, newline="") as file:
        lines = [line[:LINE_CHARACTERS] for line in islice(file, _ROWS_OF_COLUMNS)]
    separator = sep or max(SEPARATORS, key="".join(lines[:1]).count)
    cells = [cell for line in csv.reader(lines[1:], delimiter=separator) for cell in line]
    has_commas = any(map(_DECIMAL_COMMA.fullmatch, cells)) and not any(map(_DECIMAL_POINT.fullmatch, cells))
    mark = decimal or ("," if separator != "," and has_commas else ".")
    if (separator, mark) != (sep or ",", decimal or "."):
        warn_users(f"{path.name}: read as CSV with sep={separator!r} and decimal={mark!r}")
    return separator, mark


def _number(cell: str) -> float:
    """Parse a number, which may be in per cent.

    >>> _number("93.5 %"), _number(" 0.5")
    (0.935, 0.5)
    """
    text = cell.strip()
    return float(text[:-1]) / 100 if text.endswith("%") else float(text)


@contextmanager
def read_csv(path: Path, sep: str | None = None, decimal: str | None = None) -> Iterator[Source]:
    """Read one column per class, and `label`."""
    sep, decimal = _sniff(path, sep, decimal)
    with _open_text(path, newline="") as file:
        header = [name.strip() for name in next(csv.reader(file, strict=True, delimiter=sep), [])]
        if all(re.fullmatch(r"[-+.\de]*|nan|[-+]?inf", name, re.IGNORECASE) for name in header):
            raise ValueError(f"the first line must be a header of column names, got {','.join(header)[:80]!r}")
        if len(set(header)) < len(header):
            repeated, _ = Counter(header).most_common(1)[0]
            raise ValueError(f"column names must differ, got {repeated!r} twice")

        def read(plan: Plan, rows: int) -> Iterator[Chunk]:
            position = {name: i for i, name in enumerate(header)}
            numbers, others = ([position[name] for name in names] for names in (plan.logits, plan.others))
            label = position[plan.labels] if plan.labels else None
            empty = math.nan if plan.gaps else plan.absent

            def values_of(line: list[str]) -> tuple[list[float], Any, list[str]]:
                if len(line) != len(header):
                    raise ValueError(f"a line must have {len(header)} fields, got {len(line)}")
                if decimal == ",":
                    if point := next((line[i] for i in numbers if "." in line[i]), None):
                        raise ValueError(f"numbers must have a decimal comma, got {point!r}")
                    line = [cell.replace(",", ".") if _DECIMAL_COMMA.fullmatch(cell) else cell for cell in line]
                try:
                    z = [float(line[i]) for i in numbers]
                except ValueError:
                    z = [empty if empty is not None and is_gap(line[i]) else _number(line[i]) for i in numbers]
                return z, None if label is None else line[label], [line[i] for i in others]

            file.seek(0)
            lines = csv.reader(file, strict=True, delimiter=sep)
            next(lines)
            numbered = ((lines.line_num, line) for line in lines if line)
            return _read_chunks(numbered, plan, rows, values_of, width=len(numbers))

        yield Source(dict.fromkeys(header, ""), read, len)


def _read_chunks(
    lines: Iterator[tuple[int, Any]],
    plan: Plan,
    rows: int,
    values_of: Callable[[Any], tuple[list[float], Any, list[Any]]],
    *,
    width: int | None = None,
    word: str = "line",
) -> Iterator[Chunk]:
    """Yield chunks of numbered lines, each with numbers, a label and other values.

    Without `width`, each line has as many numbers as the first. A single column that may have gaps is a vector.
    """
    parse = plan.parse or LabelParser(column=plan.labels or "labels")
    for part in count():
        z, y, n = array("d"), array("q"), 0
        cells: list[list[Any]] = [[] for _ in plan.others]
        texts: dict[str, str] = {}  # equal texts share one object
        for number, line in islice(lines, rows):
            try:
                values, label, others = values_of(line)
                width = len(values) if width is None else width
                if len(values) != width:
                    hint, names = None if plan.absent is None else Hint.NULL, " and ".join(plan.logits)
                    raise InputError(names, f"have {width} numbers, as before", str(len(values)), hint)
                z.extend(values)
                if plan.labels is not None:
                    y.append(_label(label, parse))
                for column, value in zip(cells, others, strict=True):
                    column.append(texts.setdefault(value, value) if isinstance(value, str) else value)
            except _BAD_LINE as error:
                raise _with_line(error, number, word) from None
            n += 1
        if n or not part:
            if width is None:  # there are no lines
                width = 1 if plan.gaps else max(2, len(plan.logits))
            logits = np.frombuffer(z) if plan.gaps and width == 1 else np.frombuffer(z).reshape(n, width)
            columns = {name: object_array(column) for name, column in zip(plan.others, cells, strict=True)}
            yield Chunk(logits, None if plan.labels is None else np.frombuffer(y, np.int64), columns)
        if n < rows:
            return


def _label(value: Any, parse: LabelParser) -> int:
    """Parse a label quickly if it is a whole number in plain digits, as nearly all are."""
    if isinstance(value, str) and value.isdecimal() and len(value) < 19 and parse.takes_numbers and not parse.binary:
        return int(value)
    if isinstance(value, list | dict):
        raise InputError(parse.column, "be whole numbers", _show(value))
    return parse(value)


_BAD_LINE = (ValueError, OverflowError, TypeError)


def _with_line(error: Exception, number: int, word: str) -> ValueError:
    """Add the number of the line to an error."""
    if isinstance(error, InputError):
        return error.replace(where=f"{word} {number}")
    return ValueError(f"{word} {number}: {error}")


def write_csv(chunks: Iterator[Chunk], path: Path) -> None:
    """Write one column per class, `label`, and the other columns."""
    with _create_text(path) as file:
        out = csv.writer(file, lineterminator="\n")
        for part, chunk in enumerate(chunks):
            z, y = chunk.logits, chunk.labels
            if not part:
                names = [f"{chunk.name[:-1]}_{k}" for k in range(z.shape[1])] if z.ndim == 2 else []
                out.writerow([*names, *([] if y is None else ["label"]), *chunk.others])
            numbers = z if z.ndim == 2 else np.empty((len(z), 0))
            further = [] if y is None else [y.tolist()]
            further += [[_cell(value) for value in as_list(column)] for column in chunk.others.values()]
            # Python writes the shortest decimal that reads back as the same double, also for float32.
            out.writerows((*row.tolist(), *rest) for row, *rest in zip(numbers, *further, strict=True))


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else value


@contextmanager
def read_jsonl(path: Path) -> Iterator[Source]:
    """Read a list `logits` or one field per class, and `label`; also the samples that lm-evaluation-harness logs."""
    with _open_text(path) as file:
        yield source_of_records(partial(_records, file))


def source_of_records(records: Callable[[], Iterator[tuple[int, Mapping[str, Any]]]], word: str = "line") -> Source:
    """Make a source of numbered records with named fields; each call of `records` starts at the first."""
    first = [record for _, record in islice(records(), _ROWS_OF_COLUMNS)]
    from trueup.io import lm_eval, top_logprobs  # only records can be of these kinds

    kind = next((kind for kind in (lm_eval, top_logprobs) if first and kind.is_sample(first[0])), None)
    if kind is not None:
        first = [record for _, record in _samples(kind, islice(records(), 1), word)] + first[1:]
    columns: dict[str, str] = {}
    for record in first:
        for name, value in _fields(record):
            columns.setdefault(name, _describe(value))

    def read(plan: Plan, rows: int) -> Iterator[Chunk]:
        varying = kind is not None and list(plan.logits) == ["logits"] and plan.absent is not None
        wide = _most_options(kind, records(), word) if varying else None
        lines = records() if kind is None else _samples(kind, records(), word, wide)

        def values_of(record: Mapping[str, Any]) -> tuple[list[float], Any, list[Any]]:
            label = _get(record, plan.labels) if plan.labels else None
            others = [_get(record, name) for name in plan.others]
            return _numbers(record, plan.logits, plan.gaps, plan.absent), label, others

        return _read_chunks(lines, plan, rows, values_of, width=wide, word=word)

    def width(logits: Sequence[str]) -> int:
        if kind is not None and list(logits) == ["logits"]:
            return _most_options(kind, records(), word)
        return len(_numbers(first[0], logits, gaps=True)) if first else 2

    return Source(columns, read, width, hidden=frozenset(("logits", "label")) if kind else frozenset())


def _most_options(kind: Any, records: Iterator[tuple[int, Mapping[str, Any]]], word: str) -> int:
    """Return the largest number of options of any question; others are filled up with absent ones."""
    return max((len(record["logits"]) for _, record in _samples(kind, records, word)), default=2)


def _samples(
    kind: Any, records: Iterator[tuple[int, Mapping[str, Any]]], word: str, width: int | None = None
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Convert records of a kind, `lm_eval` or `top_logprobs`, to records with logits and a label."""
    for number, record in records:
        try:
            sample = kind.with_logits(record, width)
        except _BAD_LINE as error:
            raise _with_line(error, number, word) from None
        yield number, sample


def _records(file: IO[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    file.seek(0)
    for number in count(1):
        line = file.readline(LINE_CHARACTERS)
        if not line:
            return
        if len(line) >= LINE_CHARACTERS:
            raise ValueError(f"line {number} is longer than {LINE_CHARACTERS:,} characters")
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"line {number} is not JSON: {error}") from None
        if not isinstance(record, dict):
            raise ValueError(f"line {number} must be an object {{…}}, got {line.strip()[:40]!r}")
        yield number, record


def _fields(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a record, and nested fields as `doc.category`."""
    for name, value in record.items():
        yield name, value
        if isinstance(value, dict):
            for inner_name, inner_value in value.items():
                if not isinstance(inner_value, list | dict):
                    yield f"{name}.{inner_name}", inner_value


def _describe(value: Any) -> str:
    if isinstance(value, list):
        return f"list of {len(value)}"
    kinds = {bool: "true or false", int: "number", float: "number", str: "text", dict: "object"}
    return kinds.get(type(value), "null")


def _get(record: Mapping[str, Any], name: str) -> Any:
    value: Any = record.get(name)
    if value is None and "." in name:
        value = record
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
    # Rows of Hugging Face `datasets` may have arrays of NumPy or torch.
    return value.tolist() if hasattr(value, "tolist") else value


def _numbers(record: Mapping[str, Any], names: Sequence[str], gaps: bool, absent: float | None = None) -> list[float]:
    values = [_get(record, name) for name in names]
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    elif len(values) == 1 and not gaps:
        raise InputError(names[0], "be a list of numbers", _show(values[0]))
    if gaps:
        values = [math.nan if is_gap(value) else value for value in values]
    elif absent is not None:
        values = [absent if value is None else value for value in values]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(" and ".join(names), "be numbers", _show(value))
    return values


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}…"


def write_jsonl(chunks: Iterator[Chunk], path: Path) -> None:
    """Write one object per row: the list `logits`, `label`, and the other fields."""
    with _create_text(path) as file:
        for chunk in chunks:
            columns: dict[str, list[Any]] = {}
            if chunk.logits.ndim == 2:
                # JSON has no −∞; absent options are null.
                rows = chunk.logits.tolist()
                columns[chunk.name] = [[None if x == -math.inf else float(x) for x in row] for row in rows]
            if chunk.labels is not None:
                columns["label"] = [None if label == MISSING else label for label in chunk.labels.tolist()]
            columns |= {name: as_list(column) for name, column in chunk.others.items()}
            for values in zip(*columns.values(), strict=True):
                record = dict(zip(columns, values, strict=True))
                file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
