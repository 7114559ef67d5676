"""The verb check: a gate for continuous integration."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from trueup._core import __version__
from trueup.cli import options as o
from trueup.cli.output import SCHEMA, print_json, print_remarks, print_table, require_output, to_json, working

EXIT_CODES = {"passed": 0, "failed": 1, "undecided": 3}
"""Exit code of each outcome."""


@dataclass(frozen=True)
class Limits:
    """Limits on metrics."""

    max: list[str] | None = o.option("METRIC=X", "Largest value, such as ece=0.02 or groups=0.05; may be repeated.")
    min: list[str] | None = o.option("METRIC=X", "Smallest value, such as accuracy=0.9; may be repeated.")
    baseline: str | None = o.option(
        "FILE", "Another model on the same rows: a significant loss against it is a failure."
    )
    strict: bool = o.switch("Exit with 1, not 3, if there are too few rows to tell.")


@dataclass(frozen=True)
class Records:
    """Files to write, and what they say about the model."""

    junit: Path | None = o.option("FILE", "Write the outcomes as JUnit XML.")
    receipt: Path | None = o.option("FILE", "Write a JSON file with outcomes, hashes of the inputs and versions.")
    model_id: str | None = o.option("TEXT", "Name of the model in the receipt.")
    prompt_id: str | None = o.option("TEXT", "Name of the prompt in the receipt.")


def check(
    file: Annotated[str, o.argument("FILE", "Logits and labels.")],
    *,
    limits: Limits,
    records: Records,
    reader: Annotated[
        o.Reader,
        o.only(
            *(name for name in o.without(o.Reader, "multilabel", "groups")),
            groups="With --max groups=X: check the groups of this column; may be repeated.",
        ),
    ],
    split: Annotated[o.Sharding, o.only("split")],
    scoring: Annotated[o.Scoring, o.without(o.Scoring, "metric", "n_folds")],
    output: o.Output,
) -> None:
    """Check limits on metrics: exit with 0 if they are shown to be kept, and with 1 if one is shown to be broken.

    A limit is kept if the whole confidence interval lies on its good side, and broken if the whole interval lies on its
    bad side. Otherwise there are too few rows to tell, and the exit code is 3, or 1 with --strict.

      $ trueup check test.npz --max ece=0.02 --min accuracy=0.9
      $ trueup check answers.csv --confidence stated --max ece=0.1 --max groups=0.05 --groups topic
      $ trueup check new.npz --baseline old.npz
      $ trueup check test.npz --max ece=0.02 --strict --junit check.xml --receipt check.json --model-id resnet-7
    """
    from trueup.metrics.limits import check as check_limits

    maximum, minimum = _parse("--max", limits.max), _parse("--min", limits.min)
    if not maximum and not minimum and limits.baseline is None:
        raise ValueError("name a limit with --max METRIC=X or --min METRIC=X, or another model with --baseline FILE")
    if records.receipt is None and (records.model_id is not None or records.prompt_id is not None):
        raise ValueError("--model-id and --prompt-id go with --receipt: name that file too")
    inputs = [name for name in (file, limits.baseline) if name is not None]
    for path in filter(None, (records.junit, records.receipt)):
        require_output(path, reads=tuple(map(Path, inputs)))
    with working("checking", quiet=output.quiet):
        table = reader.load(file, split.split)
        options: dict[str, Any] = o.set_options(scoring, "bins", "level", "n_resamples", "seed") | table.options()
        options |= o.drop_unset(
            event=reader.event_number(table.class_names), class_names=reader.names(table.class_names)
        )
        if limits.baseline is not None:
            other = replace(reader, groups=None, clusters=None, sample_weight=None)
            options["baseline"] = other.load(limits.baseline, split.split).pair
        result = check_limits(*table.pair, maximum=maximum, minimum=minimum, **options)
    code = EXIT_CODES["failed" if limits.strict and result.outcome == "undecided" else result.outcome]
    content: dict[str, Any] = {"file": file, "split": split.split, "baseline": limits.baseline, "exit_code": code}
    content |= {"verdict": result.verdict(), "check": result.to_dict()}
    if records.junit is not None:
        _write(records.junit, result.to_junit(strict=limits.strict))
    if records.receipt is not None:
        _write(records.receipt, _receipt(content, records, inputs))
    if output.as_json:
        print_json("check", **content)
    else:
        if not output.quiet:
            print(f"{result.caption()}\n")
        print_table(result.table())
        print_remarks(result.verdict(), quiet=output.quiet)
    raise typer.Exit(code)


def _parse(flag: str, entries: Iterable[str] | None) -> dict[str, float]:
    """Read METRIC=X entries."""
    limits: dict[str, float] = {}
    for entry in entries or ():
        metric, _, text = entry.partition("=")
        metric = metric.strip().lower()
        try:
            limit = float(text)
        except ValueError:
            raise ValueError(f"{flag} must be METRIC=X with a number X, such as ece=0.02, got {entry!r}") from None
        if metric in limits:
            raise ValueError(f"{flag} must have one limit per metric, got two for {metric}")
        limits[metric] = limit
    return limits


def _receipt(content: dict[str, Any], records: Records, inputs: list[str]) -> str:
    """Return the outcomes with what they depend on as JSON; it holds no time, so equal runs have equal receipts."""
    import numpy as np

    versions = {"trueup": __version__, "numpy": np.__version__, "python": platform.python_version()}
    named = {"model_id": records.model_id, "prompt_id": records.prompt_id}
    record = {"schema": SCHEMA, "verb": "check", **named, **content, "versions": versions, "sha256": _hashes(inputs)}
    return json.dumps(to_json(record), indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def _hashes(inputs: list[str]) -> dict[str, str | None]:
    """Return the SHA-256 of each file; None for an address, which may have changed since."""
    from trueup.io.source import file_list, is_address

    hashes: dict[str, str | None] = {}
    for name in inputs:
        if is_address(name):
            hashes[name] = None
            continue
        for part in filter(Path.is_file, file_list(Path(name))):
            with part.open("rb") as opened:
                hashes[str(part)] = hashlib.file_digest(opened, "sha256").hexdigest()
    return hashes


def _write(path: Path, text: str) -> None:
    from trueup.io.atomic import atomic_write

    with atomic_write(path) as (draft,):
        draft.write_text(text, encoding="utf-8")


register = o.commands("Measure", check)
