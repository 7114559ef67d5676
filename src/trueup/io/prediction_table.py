"""Tables of text: .csv, and .jsonl with one JSON object a line; either may be packed by gzip.

They are read line by line, so that a file need not fit in memory. Errors name the line.
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
from itertools import count, islice
from pathlib import Path
from typing import IO, Any

import numpy as np

from trueup._core.errors import Hint, InputError
from trueup.io import lm_eval, top_logprobs
from trueup.io.source import MISSING, Chunk, LabelParser, Plan, Source, as_list, is_gap, object_array

LINE_CHARACTERS = 1 << 26
"""The longest line of a .jsonl file: packed, a few kilobytes may stand for a line of gigabytes."""
_ROWS_OF_COLUMNS = 50
"""How many records tell which fields there are."""


def _open_text(path: Path, newline: str | None = None) -> IO[str]:
    with open(path, "rb") as file:
        is_packed = file.read(2) == b"\x1f\x8b"
    return (gzip.open if is_packed else open)(path, "rt", newline=newline, encoding="utf-8-sig")


@contextmanager
def _create_text(path: Path) -> Iterator[IO[str]]:
    """Drafts are called .name.suffix.token.tmp, so the suffix is looked for inside the name."""
    packed = ".gz" in path.suffixes
    # Without the time and the name in the header the same rows make the same bytes.
    with (
        open(path, "wb") as raw,
        gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) if packed else raw as binary,
        io.TextIOWrapper(binary, encoding="utf-8", newline="") as file,
    ):
        yield file


@contextmanager
def read_csv(path: Path) -> Iterator[Source]:
    """One column a class, and `label`."""
    with _open_text(path, newline="") as file:
        header = [name.strip() for name in next(csv.reader(file, strict=True), [])]
        if all(re.fullmatch(r"[-+.\de]*|nan|[-+]?inf", name, re.IGNORECASE) for name in header):
            raise ValueError(f"the first line must be a header of column names, got {','.join(header)[:80]!r}")
        if len(set(header)) < len(header):
            twice, _ = Counter(header).most_common(1)[0]
            raise ValueError(f"column names must differ, got {twice!r} twice")

        def read(plan: Plan, rows: int) -> Iterator[Chunk]:
            logits, labels, others, parse, gaps, absent = plan
            position = {name: i for i, name in enumerate(header)}
            at, last = [position[name] for name in logits], position[labels] if labels else None
            beside = {name: position[name] for name in others}
            label_of = parse or LabelParser(column=labels or "labels")
            empty = math.nan if gaps else absent
            file.seek(0)
            lines = csv.reader(file, strict=True)
            next(lines)
            filled = filter(None, lines)
            for part in count():
                z, y, n = array("d"), array("q"), 0
                cells: dict[str, list[str]] = {name: [] for name in beside}
                for line in islice(filled, rows):
                    with _errors_name_line(lines.line_num):
                        if len(line) != len(header):
                            raise ValueError(f"{len(header)} fields wanted, got {len(line)}")
                        try:
                            z.extend([float(line[i]) for i in at])
                        except ValueError:
                            z.extend([_number(line[i], empty) for i in at])
                        if last is not None:
                            y.append(_label(line[last], label_of))
                        for name, i in beside.items():
                            cells[name].append(line[i])
                        n += 1
                if n or not part:
                    columns = {name: object_array(values) for name, values in cells.items()}
                    yield Chunk(_shape(z, n, len(at), gaps), None if last is None else _int64(y), columns)
                if n < rows:
                    return

        yield Source(dict.fromkeys(header, ""), read, len)


def _label(text: str, parse: LabelParser) -> int:
    """Nearly all labels are whole numbers in plain digits."""
    plain = parse.takes_numbers and not parse.binary and text.isdecimal() and len(text) < 19
    return int(text) if plain else parse(text)


def _number(text: str, empty: float | None) -> float:
    return empty if empty is not None and is_gap(text) else float(text)


def _shape(z: array[float], n: int, width: int, gaps: bool) -> np.ndarray:
    """One column that may have gaps is a vector; logits are a matrix."""
    return np.frombuffer(z) if gaps and width == 1 else np.frombuffer(z).reshape(n, width)


def _int64(y: array[int]) -> np.ndarray:
    return np.frombuffer(y, np.int64)


@contextmanager
def _errors_name_line(number: int, word: str = "line") -> Iterator[None]:
    try:
        yield
    except InputError as error:
        raise error.replace(where=f"{word} {number}") from None
    except (ValueError, OverflowError, TypeError) as error:
        raise ValueError(f"{word} {number}: {error}") from None


def write_csv(chunks: Iterator[Chunk], path: Path) -> None:
    """A column a class, `label`, and the others."""
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
            # The shortest decimal that reads back as the same double, also for float32, since a reader parses doubles.
            out.writerows((*row.tolist(), *rest) for row, *rest in zip(numbers, *further, strict=True))


def _cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else value


@contextmanager
def read_jsonl(path: Path) -> Iterator[Source]:
    """A list `logits` or one field a class, and `label`; also the samples that lm-evaluation-harness logs."""
    with _open_text(path) as file:

        def records() -> Iterator[tuple[int, Mapping[str, Any]]]:
            file.seek(0)
            return _records(file)

        yield source_of_records(records)


def source_of_records(records: Callable[[], Iterator[tuple[int, Mapping[str, Any]]]], word: str = "line") -> Source:
    """A source of objects with named fields, each with its number; `records` begins from the first again."""
    first = [record for _, record in islice(records(), _ROWS_OF_COLUMNS)]
    kind = next((kind for kind in (lm_eval, top_logprobs) if first and kind.is_sample(first[0])), None)
    if kind is not None:
        first = [record for _, record in _samples(kind, islice(records(), 1), word)] + first[1:]
    columns: dict[str, str] = {}
    for record in first:
        for name, value in _fields(record):
            columns.setdefault(name, _describe(value))

    def read(plan: Plan, rows: int) -> Iterator[Chunk]:
        logits, labels, others, parse, gaps, absent = plan
        label_of = parse or LabelParser(column=labels or "labels")
        varying = kind is not None and list(logits) == ["logits"] and absent is not None
        wide = _most_options(kind, records(), word) if varying else None
        lines = records() if kind is None else _samples(kind, records(), word, wide)
        for part in count():
            z, y, n = array("d"), array("q"), 0
            cells: dict[str, list[Any]] = {name: [] for name in others}
            for number, record in islice(lines, rows):
                with _errors_name_line(number, word):
                    values = _numbers(record, logits, gaps, absent)
                    if wide is None:
                        wide = len(values)
                    if len(values) != wide:
                        hint = None if absent is None else Hint.NULL
                        raise InputError(
                            " and ".join(logits), f"have {wide} numbers, as before", str(len(values)), hint
                        )
                    z.extend(values)
                    if labels is not None:
                        y.append(label_of(_plain_label(_get(record, labels), labels)))
                    for name in others:
                        cells[name].append(_get(record, name))
                    n += 1
            if n or not part:
                shape = wide if wide is not None else 1 if gaps else max(2, len(logits))
                taken = {name: object_array(values) for name, values in cells.items()}
                yield Chunk(_shape(z, n, shape, gaps), None if labels is None else _int64(y), taken)
            if n < rows:
                return

    def width(logits: Sequence[str]) -> int:
        if kind is not None and list(logits) == ["logits"]:
            return _most_options(kind, records(), word)
        return len(_numbers(first[0], logits, gaps=True)) if first else 2

    return Source(columns, read, width, hidden=frozenset(("logits", "label")) if kind else frozenset())


def _most_options(kind: Any, records: Iterator[tuple[int, Mapping[str, Any]]], word: str) -> int:
    """How many options the question with the most has; others are filled up with absent ones."""
    return max((len(record["logits"]) for _, record in _samples(kind, records, word)), default=2)


def _samples(
    kind: Any, records: Iterator[tuple[int, Mapping[str, Any]]], word: str, width: int | None = None
) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Records of a kind, `lm_eval` or `top_logprobs`, with logits and a label."""
    for number, record in records:
        with _errors_name_line(number, word):
            record = kind.with_logits(record, width)
        yield number, record


def _records(file: IO[str]) -> Iterator[tuple[int, dict[str, Any]]]:
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
        except ValueError as error:
            raise ValueError(f"line {number} is not JSON: {error}") from None
        except RecursionError:
            raise ValueError(f"line {number} is not JSON that can be read: it is nested too deeply") from None
        if not isinstance(record, dict):
            raise ValueError(f"line {number} must be an object {{…}}, got {line.strip()[:40]!r}")
        yield number, record


def _fields(record: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The fields of a record, and those inside of them as `doc.category`."""
    for name, value in record.items():
        yield name, value
        if isinstance(value, dict):
            for inner, held in value.items():
                if not isinstance(held, list | dict):
                    yield f"{name}.{inner}", held


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
    # Rows of Hugging Face `datasets` may hold arrays of NumPy or torch.
    return value.tolist() if hasattr(value, "tolist") else value


def _numbers(record: Mapping[str, Any], names: Sequence[str], gaps: bool, absent: float | None = None) -> list[float]:
    values = [_get(record, name) for name in names]
    if len(values) == 1 and isinstance(values[0], list):
        values = values[0]
    elif len(values) == 1 and not gaps:
        raise InputError(names[0], "be a list of numbers", _show(values[0]))
    if gaps:
        values = [
            math.nan if value is None or (isinstance(value, str) and is_gap(value)) else value for value in values
        ]
    elif absent is not None:
        values = [absent if value is None else value for value in values]
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise InputError(" and ".join(names), "be numbers", _show(value))
    return values


def _plain_label(value: Any, name: str) -> Any:
    if isinstance(value, list | dict):
        raise InputError(name, "be whole numbers", _show(value))
    return value


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else f"{text[:77]}…"


def write_jsonl(chunks: Iterator[Chunk], path: Path) -> None:
    """An object a row: the list `logits`, `label`, and the other fields."""
    with _create_text(path) as file:
        for chunk in chunks:
            columns: dict[str, list[Any]] = {}
            if chunk.logits.ndim == 2:
                # JSON has no −∞; what an option that the row does not have reads as is null.
                columns[chunk.name] = [
                    [None if x == -math.inf else float(x) for x in row] for row in chunk.logits.tolist()
                ]
            if chunk.labels is not None:
                columns["label"] = [None if label == MISSING else label for label in chunk.labels.tolist()]
            columns |= {name: as_list(column) for name, column in chunk.others.items()}
            for values in zip(*columns.values(), strict=True):
                record = dict(zip(columns, values, strict=True))
                file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
