"""Options that several verbs share, and `Reader`, which loads the files that they describe.

A verb takes records, such as a `Reader`; each field of a record is an option of the command line. An option that the
user does not set is None, and the library's default applies. Help texts repeat these defaults, because help must not
import the library; a test compares them with the signatures.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_type_hints

import typer
from typer.core import TyperCommand

from trueup._core.registry import METHODS, METRICS

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from trueup._core.types import Array
    from trueup.io.predictions import PredictionFile, PredictionTable
    from trueup.io.shards import Shards

PARAMETER = "parameter"
"""Key of a field's metadata that holds its option or argument."""


def option(
    metavar: str | None, help: str, *flags: str, default: Any = None, complete: Iterable[str] | None = None
) -> Any:
    """Make an option of a record's field, or in `Annotated` of a verb's parameter; it is called `--name` or `flags`."""
    completion = None if complete is None else complete_from(complete)
    settings = {"metavar": metavar, "help": help, "autocompletion": completion}
    return field(default=default, metadata={PARAMETER: (typer.Option, flags, settings)})


def switch(help: str, *flags: str) -> Any:
    """Make an option without a value."""
    return option(None, help, *flags, default=False)


def output_file(metavar: str, help: str, default: Any = None) -> Any:
    """Make the option --output, or -o."""
    return option(metavar, help, "--output", "-o", default=default)


def argument(metavar: str, help: str, *, default: Any = MISSING) -> Any:
    """Make an argument of a record's field, or in `Annotated` of a verb's parameter."""
    return field(default=default, metadata={PARAMETER: (typer.Argument, (), {"metavar": metavar, "help": help})})


def only(*names: str, **helps: str) -> Mapping[str, str | None]:
    """Select fields of a record for `Annotated[Record, only(…)]`, by name or by name with another help text."""
    return {**dict.fromkeys(names), **helps}


def without(record: type[Any], *names: str) -> Mapping[str, str | None]:
    """Select all fields of a record except these."""
    return only(*(field.name for field in fields(record) if field.name not in names))


def commands(panel: str, *verbs: Callable[..., None]) -> Callable[[typer.Typer], None]:
    """Make the `register` function of a module, which adds verbs under a heading of the help page."""

    def register(app: typer.Typer) -> None:
        for verb in verbs:
            app.command(cls=_Command, rich_help_panel=panel, **help_page(verb))(_expand(verb))

    return register


class _Command(TyperCommand):
    """A command whose help page lists the options in groups, by the record that they come from."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the arguments for the usage line, without the braces of required ones."""
        return [re.sub("[{}]", "", piece) for piece in super().collect_usage_pieces(ctx)]

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the arguments, the options of the verb, and those of each record."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            if (entry := parameter.get_help_record(ctx)) is not None:
                is_argument = parameter.param_type_name == "argument"
                group = "Arguments" if is_argument else getattr(parameter, "rich_help_panel", None) or "Options"
                groups.setdefault(group, []).append((entry[0].partition(" <")[0], entry[1]) if is_argument else entry)
        for group, entries in groups.items():
            if entries:
                with formatter.section(group):
                    formatter.write_dl(entries)


def help_page(verb: Callable[..., None]) -> dict[str, Any]:
    """Split the docstring of a verb for typer into the text and the examples that end it."""
    text, *examples = re.split(r"\n+ *(?=\$ )", inspect.cleandoc(verb.__doc__ or ""))
    return {"help": text, "epilog": "\n".join(["\b", "Examples:", *(f"  {line}" for line in examples)])}


def _expand(verb: Callable[..., None]) -> Callable[..., None]:
    """Return the verb with each record among its parameters replaced by one option per field."""
    records: dict[str, tuple[type, list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(verb, eval_str=True).parameters.values():
        kind, *details = get_args(parameter.annotation) or (parameter.annotation,)
        if is_dataclass(kind):
            assert isinstance(kind, type)
            types, described = get_type_hints(kind), {f.name: f for f in fields(kind)}
            helps = details[0] if details else dict.fromkeys(described)
            group = getattr(kind, "GROUP", None)
            parameters += [_parameter(described[name], name, types[name], helps[name], group) for name in helps]
            records[parameter.name] = kind, list(helps)
        elif details and isinstance(details[0], Field):
            parameters.append(_parameter(details[0], parameter.name, kind).replace(default=parameter.default))
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    def run(**values: Any) -> None:
        built = {key: record(**{name: values.pop(name) for name in names}) for key, (record, names) in records.items()}
        verb(**values, **built)

    run.__name__, run.__annotations__ = verb.__name__, {}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _parameter(
    described: Field[Any], name: str, kind: Any, help: str | None = None, group: str | None = None
) -> inspect.Parameter:
    """Return a field as a parameter for typer, with its help text or another, in a group of the help page."""
    make, flags, settings = described.metadata[PARAMETER]
    flags = () if make is typer.Argument else flags or (f"--{name.replace('_', '-')}",)
    annotation = Annotated[kind, make(*flags, **settings | drop_unset(help=help, rich_help_panel=group))]
    default = inspect.Parameter.empty if described.default is MISSING else described.default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def flag_of(record: Any, name: str) -> str:
    """Return the flag of a record's field, such as `--class-names`."""
    _, flags, _ = next(f for f in fields(record) if f.name == name).metadata[PARAMETER]
    return flags[0].partition("/")[0] if flags else f"--{name.replace('_', '-')}"


def drop_unset(**options: Any) -> dict[str, Any]:
    """Keep the options that the user set; the library has defaults for the others."""
    return {name: value for name, value in options.items() if value is not None and value != []}


def set_options(record: Any, *names: str) -> dict[str, Any]:
    """Return the fields of a record that the user set, all or only those in `names`."""
    return drop_unset(**{f.name: getattr(record, f.name) for f in fields(record) if not names or f.name in names})


def require_name(kind: str, names: Iterable[str], name: str) -> str:
    """Return a name that a registry has; the error for any other name suggests similar ones."""
    known = list(names)
    if name in known:
        return name
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"choose from: {', '.join(known)}"
    raise ValueError(f"no {kind} is called {name!r}; {hint}")


def complete_from(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Make a shell completion from a list of names."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


Json = Annotated[bool, switch("Print JSON on stdout, and nothing else.", "--json")]
Seed = Annotated[int | None, option("N", "Random seed (default 0).")]


@dataclass(frozen=True)
class Output:
    """Output options of a verb."""

    GROUP: ClassVar = "Screen"

    as_json: bool = switch("Print JSON on stdout, and nothing else.", "--json")
    quiet: bool = switch("Print only the result: no progress, no remarks.", "--quiet", "-q")


@dataclass(frozen=True)
class Scoring:
    """Options of the scores."""

    GROUP: ClassVar = "Scores"

    metric: list[str] | None = option("NAME", "A metric of `trueup metrics`; may be repeated.", complete=METRICS)
    bins: int | None = option("N", "Number of bins of the calibration errors (default 15).")
    level: float | None = option("SHARE", "Coverage of the intervals (default 0.95).")
    n_resamples: int | None = option("N", "Number of bootstrap resamples (default 1000).", "--resamples")
    n_folds: int | None = option("N", "Number of folds of the cross-validation (default 5).")
    seed: int | None = option("N", "Random seed (default 0).")


@dataclass(frozen=True)
class Methods:
    """Calibration methods by name."""

    method: list[str] | None = option(
        "NAME", "A method of `trueup methods`; may be repeated.", "--method", "-m", complete=METHODS
    )


@dataclass(frozen=True)
class Sharding:
    """Options for halves of a file and for shards."""

    GROUP: ClassVar = "Many files"

    split: str | None = option("val|test", "Half of a file that holds val_logits and test_logits.")
    scheduler: str | None = option("WHERE", "Read shards in processes[:N], local[:N] or tcp://host:port (Dask).")
    skip_bad: bool = switch("Skip unreadable shards, and count them.")


@dataclass(frozen=True)
class Reader:
    """Load predictions from files; the fields are the options that describe the files."""

    GROUP: ClassVar = "Contents of the file"

    probs: bool | None = option(
        None, "The file holds probabilities, not logits; --no-probs insists on logits.", "--probs/--no-probs"
    )
    logits: str | None = option("NAME", "The array of logits, or its columns separated by commas (default logits).")
    labels: str | None = option("NAME", "The array or column of labels (default labels).")
    confidence: str | None = option("COLUMN", "A column of stated confidences in [0, 1], instead of logits.")
    correct: str | None = option("COLUMN", "With --confidence: 1 if the answer was right, else 0; `correct` if unset.")
    event: str | None = option("CLASS", "Evaluate the probability of this class, given by number or name.")
    class_names: str | None = option("NAMES", "Class names: separated by commas, or a file with one name per line.")
    sample_weight: str | None = option("COLUMN", "A column of weights, one per row.")
    groups: list[str] | None = option("COLUMN", "Also evaluate each group of this column; may be repeated.")
    clusters: str | None = option("COLUMN", "Rows with the same value are correlated, such as visits of a patient.")
    class_axis: str | None = option("first|last", "Class axis of tokens or pixels: (n, K, …) or (n, …, K).")
    ignore_index: int | None = option("N", "Leave out tokens, pixels or tags with this label; -100 if unset.")
    multilabel: bool = switch("Multi-label data: log-odds (n, labels) and labels 0 or 1 (n, labels).")
    sep: str | None = option("MARK", "Separator of a CSV file; recognised if unset.")
    decimal: str | None = option("MARK", "Decimal mark of a CSV file; recognised if unset.")
    storage: list[str] | None = option("KEY=VALUE", "Storage option for addresses such as s3://…; may be repeated.")

    def __post_init__(self) -> None:
        if self.class_axis not in (None, "first", "last"):
            raise ValueError(f"--class-axis must be first (n, K, …) or last (n, …, K), got {self.class_axis!r}")
        if self.ignore_index is not None and not (self.class_axis or self.multilabel):
            raise ValueError("--ignore-index goes with --class-axis or --multilabel")
        if self.multilabel and (self.class_axis or self.confidence):
            raise ValueError("--multilabel takes no --class-axis and no --confidence")
        if self.correct is not None and self.confidence is None:
            raise ValueError("--correct goes with --confidence: name that column too")
        if self.confidence is not None and (self.probs is not None or self.logits or self.labels):
            raise ValueError("--confidence replaces --logits, --labels and --probs: leave them out")

    @property
    def class_list(self) -> tuple[str, ...] | None:
        """Class names that the user set, separated by commas or in a file."""
        if self.class_names is None:
            return None
        file = Path(self.class_names)
        if file.is_file():
            text = file.read_text(encoding="utf-8")
            names = json.loads(text) if file.suffix == ".json" else text.splitlines()
        else:
            names = self.class_names.split(",")
        return tuple(str(name).strip() for name in names if str(name).strip())

    def names(self, stored: tuple[str, ...] | None = None) -> tuple[str, ...] | None:
        """Return the class names that the user set, those of a confidence, or those stored in the file."""
        if self.multilabel:  # the stored names are those of the labels
            return stored
        return ("wrong", "right") if self.confidence is not None else self.class_list or stored

    def event_number(self, class_names: tuple[str, ...] | None = None) -> int | None:
        """Return the number of the class that --event names."""
        event, known = self.event, self.class_list or class_names or ()
        if event is None:
            return None
        if event.isdecimal() and event not in known:
            return int(event)
        if not known:
            raise ValueError(f"--event must be a class number, or with --class-names a name, got {event!r}")
        return known.index(require_name("class", known, event))

    def load(self, path: str | Path, split: str | None = None) -> PredictionTable:
        """Load the predictions of a file, or of one half of it."""
        if split not in (None, "val", "test"):
            raise ValueError(f"--split must be val or test, got {split!r}")
        with self.open(path) as file:
            return self._load(file, split)

    def load_unlabelled(self, path: str | Path) -> Array | None:
        """Load the logits of a file without labels; return None if it has labels."""
        with self.open(path) as file:
            if self.labels is not None or self.correct is not None or file.label_column() is not None:
                return None
            return file.load_logits()

    def load_half(self, path: str | Path, split: str) -> PredictionTable:
        """Load one half of a file if it holds two, else the whole file, or all shards."""
        if self.is_sharded(str(path)):
            return self.load_shards(str(path))
        with self.open(path) as file:
            return self._load(file, split if len(file.splits) == 2 else None)

    def load_val_and_test(
        self, val: str | Path, test: str | Path | None
    ) -> tuple[PredictionTable, PredictionTable | None]:
        """Load calibration and test predictions: two files or folders, the halves of one file, or one file and None."""
        if test is not None:
            return self.load_half(val, "val"), self.load_half(test, "test")
        if self.is_sharded(str(val)):
            return self.load_shards(str(val)), None
        with self.open(val) as file:
            if len(file.splits) == 2:
                return self._load(file, "val"), self._load(file, "test")
            return self._load(file, None), None

    def load_shards(self, source: str) -> PredictionTable:
        """Load all rows of shards, or a random sample of the rows if they do not fit in memory."""
        shards = self.find_shards(source)
        return shards.load()

    def is_sharded(self, source: str, scheduler: str | None = None) -> bool:
        """Return whether a name means several files."""
        from trueup.io.source import is_sharded

        several = is_sharded(source)
        if scheduler is not None and not several:
            raise ValueError(f"--scheduler is for a folder, a pattern or an address, got the single file {source}")
        if several and (self.class_axis or self.multilabel):
            flag = "--class-axis" if self.class_axis else "--multilabel"
            raise ValueError(f"{flag} takes one file, got {source}, which means several")
        return several

    def find_shards(self, source: str, split: str | None = None) -> Shards:
        """Return the files that a name means, one or several, as shards."""
        from trueup.io.shards import Shards

        return Shards.of(source, **self._fields(), **drop_unset(split=split))

    @contextmanager
    def open_shards(self, source: str, sharding: Sharding) -> Iterator[tuple[Shards, Executor | None]]:
        """Open shards, together with the executor that reads them."""
        from trueup._core.executors import executor_for

        shards = self.find_shards(source, sharding.split)
        with executor_for(sharding.scheduler or "none") as executor:
            yield shards, executor

    def open(self, path: str | Path) -> AbstractContextManager[PredictionFile]:
        """Open a file."""
        from trueup.io.predictions import open_predictions

        return open_predictions(path, **self._fields())

    @property
    def storage_options(self) -> dict[str, Any] | None:
        """Options for fsspec."""
        options: dict[str, Any] = {}
        for entry in self.storage or ():
            key, equals, value = entry.partition("=")
            if not equals:
                raise ValueError(f"--storage must be KEY=VALUE, got {entry!r}")
            options[key] = value
            with suppress(ValueError):
                options[key] = json.loads(value)
        return options or None

    def _fields(self) -> dict[str, Any]:
        """Return the options that describe a file, as `load` takes them."""
        columns = tuple((self.logits or "").split(","))
        plain = (f.name for f in fields(self) if f.name not in ("event", "storage"))
        return set_options(self, *plain) | drop_unset(
            logits=columns if len(columns) > 1 else None,
            class_names=self.class_list,
            storage_options=self.storage_options,
        )

    def _load(self, file: PredictionFile, split: str | None) -> PredictionTable:
        table = file.load_table(split, mmap=True)  # logits over a vocabulary may fill most of the memory
        if not len(table.labels):
            raise ValueError(f"{file.name}: there are no rows")
        return table


@dataclass(frozen=True)
class ForecastColumns:
    """Columns of forecasts of a number; true if the user named one."""

    GROUP: ClassVar = "Forecasts of a number"

    mean: str | None = option("COLUMN", "Column of means (default mean).")
    std: str | None = option("COLUMN", "Column of standard deviations (default std).")
    target: str | None = option("COLUMN", "Column of outcomes (default targets).")
    quantiles: str | None = option("COLUMNS", "Columns of quantiles, separated by commas, or a pattern such as 'q*'.")
    levels: str | None = option("NUMBERS", "Levels of the quantiles, by commas, if the column names lack them.")

    def __bool__(self) -> bool:
        return bool(set_options(self))


def join_groups(columns: Any) -> list[str] | None:
    """Return one group per row from the columns of --groups; values of several columns are joined."""
    if not columns:
        return None
    return [", ".join(str(value) for value in values) for values in zip(*columns.values(), strict=True)]
