"""Options that several verbs share, and the reader of the files that they describe.

Options are None unless given, and then the library's own default holds. The defaults that help texts name are those of
the library's signatures: a test compares them, since help must not import what the library needs.
"""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import astuple, dataclass, fields, is_dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from trueup.registry import LOSSES, METHODS, METRICS, NETWORKS

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from trueup.core.arrays import Array
    from trueup.io.predictions import PredictionFile, PredictionTable
    from trueup.io.shards import Shards


def add_command(app: typer.Typer, verb: Callable[..., None], panel: str, *examples: str) -> None:
    """Add a verb to the application, under a heading of the help page and with examples at the end of its own."""
    app.command(rich_help_panel=panel, epilog=format_examples(*examples))(_expand(verb))


def _expand(verb: Callable[..., None]) -> Callable[..., None]:
    """The verb with each record among its parameters, such as a `Reader`, replaced by options for its fields.

    `Annotated[Reader, names]` has options for these fields alone.
    """
    signature = inspect.signature(verb, eval_str=True)
    records: dict[str, tuple[type, tuple[str, ...]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        record, *chosen = get_args(parameter.annotation) or (parameter.annotation,)
        if not is_dataclass(record):
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        assert isinstance(record, type)
        names = chosen[0] if chosen else tuple(field.name for field in fields(record))
        types = get_type_hints(record, include_extras=True)
        records[parameter.name] = record, names
        parameters += [
            inspect.Parameter(f.name, inspect.Parameter.KEYWORD_ONLY, default=f.default, annotation=types[f.name])
            for f in fields(record)
            if f.name in names
        ]

    def run(**given: Any) -> None:
        made = {key: record(**{name: given.pop(name) for name in names}) for key, (record, names) in records.items()}
        verb(**given, **made)

    run.__name__, run.__doc__, run.__annotations__ = verb.__name__, verb.__doc__, {}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def format_examples(*lines: str) -> str:
    """The examples at the end of a help page."""
    return "\n".join(["\b", "Examples:", *(f"  $ {line}" for line in lines)])


def drop_unset(**options: Any) -> dict[str, Any]:
    """The options that the user gave; the library has defaults for the others."""
    return {name: value for name, value in options.items() if value is not None and value != []}


def require_name(kind: str, names: Iterable[str], name: str) -> str:
    """A name of a registry; the error for any other suggests the nearest ones."""
    known = list(names)
    if name in known:
        return name
    near = get_close_matches(name, known, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(known)}"
    raise ValueError(f"no {kind} is called {name!r}; {hint}")


def complete_from(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Shell completion from a list of names."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


Probs = Annotated[bool, typer.Option("--probs", help="The file holds probabilities, not logits.")]
Logits = Annotated[
    str | None,
    typer.Option(
        "--logits", metavar="NAME", help="The array of logits, or its columns separated by commas (default logits)."
    ),
]
Labels = Annotated[
    str | None, typer.Option("--labels", metavar="NAME", help="The array or column of labels (default labels).")
]
Confidence = Annotated[
    str | None,
    typer.Option(
        "--confidence", metavar="COLUMN", help="A column of stated confidences in [0, 1], in place of logits."
    ),
]
Correct = Annotated[
    str | None,
    typer.Option(
        "--correct",
        metavar="COLUMN",
        help="With --confidence: whether each was right, 1 or 0; else `correct`.",
    ),
]
Event = Annotated[
    str | None,
    typer.Option("--event", metavar="CLASS", help="Judge the probability of this class, a number or a name."),
]
By = Annotated[
    list[str] | None,
    typer.Option("--by", metavar="COLUMN", help="Also judge each group of this column; may be repeated."),
]
Clusters = Annotated[
    str | None,
    typer.Option(
        "--clusters", metavar="COLUMN", help="Rows with the same value are correlated, such as visits of a patient."
    ),
]
ClassAxis = Annotated[
    str | None,
    typer.Option(
        "--class-axis", metavar="first|last", help="Where the classes of tokens or pixels are: (n, K, …) or (n, …, K)."
    ),
]
IgnoreIndex = Annotated[
    int | None,
    typer.Option("--ignore-index", metavar="N", help="The label of tokens, pixels or tags to leave out; else -100."),
]
Multilabel = Annotated[
    bool,
    typer.Option("--multilabel", help="Log-odds (n, labels) and labels 0 or 1 (n, labels), each label an event."),
]
Weight = Annotated[str | None, typer.Option("--weight", metavar="COLUMN", help="A column of weights, one a row.")]
Mean = Annotated[
    str | None,
    typer.Option("--mean", metavar="COLUMN", help="Of forecasts of a number: the column of means (default mean)."),
]
Std = Annotated[
    str | None,
    typer.Option("--std", metavar="COLUMN", help="Of forecasts: the column of standard deviations (default std)."),
]
Target = Annotated[
    str | None,
    typer.Option("--target", metavar="COLUMN", help="Of forecasts: the column of what came (default targets)."),
]
Quantiles = Annotated[
    str | None,
    typer.Option(
        "--quantiles",
        metavar="COLUMNS",
        help="Of forecasts: columns of quantiles, separated by commas, or a pattern such as 'q*'.",
    ),
]
Levels = Annotated[
    str | None,
    typer.Option(
        "--levels",
        metavar="NUMBERS",
        help="Of quantiles: their levels, separated by commas; else the columns' names end in them.",
    ),
]
Classes = Annotated[
    str | None,
    typer.Option(
        "--classes", metavar="NAMES", help="Names of the classes: separated by commas, or a file with one a line."
    ),
]
Storage = Annotated[
    list[str] | None,
    typer.Option("--storage", metavar="KEY=VALUE", help="An option for addresses such as s3://…; may be repeated."),
]
Split = Annotated[
    str | None,
    typer.Option("--split", metavar="val|test", help="Which half of a file that holds val_logits and test_logits."),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="WHERE",
        help="Read shards in parallel: processes[:N], local[:N] or tcp://host:port (Dask).",
    ),
]
SkipBad = Annotated[bool, typer.Option("--skip-bad", help="Skip and count shards that cannot be read.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print only the result: no progress, no remarks.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help="Random seed (default 0).")]
Bins = Annotated[
    int | None, typer.Option("--bins", metavar="N", help="Number of bins of the calibration errors (default 15).")
]
Level = Annotated[
    float | None, typer.Option("--level", metavar="SHARE", help="Coverage of the intervals (default 0.95).")
]
Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metric",
        metavar="NAME",
        autocompletion=complete_from(METRICS),
        help="A metric to show; may be repeated. `trueup metrics` lists them.",
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        "-m",
        metavar="NAME",
        autocompletion=complete_from(METHODS),
        help="A method; may be repeated. `trueup methods` lists them.",
    ),
]
Network = Annotated[
    str,
    typer.Option(
        "--network",
        metavar="NAME",
        autocompletion=complete_from(NETWORKS),
        help="Network; `trueup networks` lists them.",
    ),
]
Loss = Annotated[
    str,
    typer.Option(
        "--loss", metavar="NAME", autocompletion=complete_from(LOSSES), help="Loss; `trueup losses` lists them."
    ),
]
DataFolder = Annotated[
    Path | None, typer.Option("--data-dir", metavar="FOLDER", help="Folder of the data sets (default $TRUEUP_DATA).")
]
Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="package.module:make_model, or a folder that `trueup train` wrote.")
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="NAME|FILE",
        help="A data set, or a .npz file of images or inputs, and labels (default: that of the `train` folder).",
    ),
]
Weights = Annotated[
    Path | None, typer.Option("--weights", metavar="FILE", help="Weights of the network, .safetensors or .pt.")
]
BatchSize = Annotated[int, typer.Option("--batch-size", metavar="N", help="Rows in a batch.")]
Device = Annotated[str | None, typer.Option("--device", metavar="NAME", help="Device of the network, such as cuda.")]


@dataclass(frozen=True)
class Reader:
    """Reads predictions from files; its fields are the options that say what the files hold."""

    probs: Probs = False
    logits: Logits = None
    labels: Labels = None
    confidence: Confidence = None
    correct: Correct = None
    event: Event = None
    classes: Classes = None
    weight: Weight = None
    by: By = None
    clusters: Clusters = None
    class_axis: ClassAxis = None
    ignore_index: IgnoreIndex = None
    multilabel: Multilabel = False
    storage: Storage = None

    def __post_init__(self) -> None:
        if self.class_axis not in (None, "first", "last"):
            raise ValueError(f"--class-axis must be first (n, K, …) or last (n, …, K), got {self.class_axis!r}")
        if self.ignore_index is not None and not (self.class_axis or self.multilabel):
            raise ValueError("--ignore-index goes with --class-axis or --multilabel")
        if self.multilabel and (self.class_axis or self.confidence):
            raise ValueError("--multilabel takes no --class-axis and no --confidence")
        if self.correct is not None and self.confidence is None:
            raise ValueError("--correct goes with --confidence, the column that it judges")
        if self.confidence is not None and (self.probs or self.logits or self.labels):
            raise ValueError("--confidence takes the place of --logits, --labels and --probs: leave them out")

    @property
    def class_names(self) -> tuple[str, ...] | None:
        """The names that the user gave, by commas or in a file."""
        if self.classes is None:
            return None
        if Path(self.classes).is_file():
            text = Path(self.classes).read_text(encoding="utf-8")
            names = json.loads(text) if Path(self.classes).suffix == ".json" else text.splitlines()
        else:
            names = self.classes.split(",")
        return tuple(str(name).strip() for name in names if str(name).strip())

    def names(self, found: tuple[str, ...] | None = None) -> tuple[str, ...] | None:
        """The names of the classes: those that the user gave, of a confidence its two, or those of the file."""
        if self.multilabel:  # whose names are those of the labels
            return found
        return ("wrong", "right") if self.confidence is not None else self.class_names or found

    def event_number(self, names: tuple[str, ...] | None = None) -> int | None:
        """The class that --event means, by its name or its number."""
        event = self.event
        if event is None:
            return None
        known = self.class_names or names or ()
        if event in known:
            return known.index(event)
        if event.isdecimal():
            return int(event)
        if not known:
            raise ValueError(f"--event must be the number of a class, got {event!r}; with --classes it may be a name")
        return known.index(require_name("class", known, event))

    def load(self, path: str | Path, split: str | None = None) -> PredictionTable:
        """The predictions in a file, or in one half of it."""
        if split not in (None, "val", "test"):
            raise ValueError(f"--split must be val or test, got {split!r}")
        with self.open(path) as file:
            return self._load(file, split)

    def load_unlabelled(self, path: str | Path, split: str | None = None) -> Array | None:
        """The logits of a file without labels; None if it has labels."""
        with self.open(path) as file:
            if self.labels is not None or self.correct is not None or file.has_labels(split):
                return None
            logits = file.load_logits(split)
        self.warn_of_probabilities(path, logits)
        return logits

    def load_half(self, path: str | Path, split: str) -> PredictionTable:
        """One half of a file that holds both, else the whole file; or all shards."""
        if self.is_sharded(str(path), None):
            return self.load_shards(str(path))
        with self.open(path) as file:
            return self._load(file, split if len(file.splits) == 2 else None)

    def load_val_and_test(
        self, val: str | Path, test: str | Path | None
    ) -> tuple[PredictionTable, PredictionTable | None]:
        """The calibration and the test predictions: two files or folders, two halves of one file, or one and None."""
        if test is not None:
            return self.load_half(val, "val"), self.load_half(test, "test")
        if self.is_sharded(str(val), None):
            return self.load_shards(str(val)), None
        with self.open(val) as file:
            if len(file.splits) == 2:
                return self._load(file, "val"), self._load(file, "test")
            return self._load(file, None), None

    def load_shards(self, source: str) -> PredictionTable:
        """All rows of shards that fit in memory, else as many as do, drawn at random."""
        shards = self.find_shards(source, None)
        self._check_first_rows(shards)
        return shards.load()

    def is_sharded(self, source: str, cluster: str | None) -> bool:
        """Whether a name means several files."""
        from trueup.io.source import is_sharded

        several = is_sharded(source)
        if cluster is not None and not several:
            raise ValueError(
                f"--cluster is for shards: a folder, a pattern or an address, got the one file {source}; "
                "--clusters COLUMN says which rows are correlated"
            )
        if several and (self.class_axis or self.multilabel):
            which = "--class-axis" if self.class_axis else "--multilabel"
            raise ValueError(f"{which} takes one file, got {source}, which means several")
        return several

    def find_shards(self, source: str, split: str | None) -> Shards:
        """The files that a name means, one or several."""
        from trueup.io.shards import Shards

        return Shards.of(source, **self._fields(), **drop_unset(split=split), storage_options=self.storage_options)

    @contextmanager
    def open_shards(
        self, source: str, split: str | None, cluster: str | None
    ) -> Iterator[tuple[Shards, Executor | None]]:
        """The shards, and the executor that reads them."""
        from trueup.core.executors import executor_for

        shards = self.find_shards(source, split)
        self._check_first_rows(shards)
        with executor_for(cluster or "none") as executor:
            yield shards, executor

    def open(self, path: str | Path) -> AbstractContextManager[PredictionFile]:
        """An open file."""
        from trueup.io.predictions import open_predictions

        return open_predictions(path, **self._fields(), storage_options=self.storage_options)

    @property
    def storage_options(self) -> dict[str, Any] | None:
        """The options of fsspec."""
        if not self.storage:
            return None
        options = {}
        for entry in self.storage:
            key, equals, value = entry.partition("=")
            if not equals:
                raise ValueError(f"--storage must be KEY=VALUE, got {entry!r}")
            try:
                options[key] = json.loads(value)
            except ValueError:
                options[key] = value
        return options

    def _fields(self) -> dict[str, Any]:
        columns = tuple(self.logits.split(",")) if self.logits and "," in self.logits else self.logits
        return drop_unset(
            logits=columns,
            labels=self.labels,
            probs=self.probs,
            confidence=self.confidence,
            correct=self.correct,
            classes=self.class_names,
            weights=self.weight,
            groups=tuple(self.by) if self.by else None,
            clusters=self.clusters,
            class_axis=self.class_axis,
            ignore_index=self.ignore_index,
            multilabel=self.multilabel or None,
        )

    def _load(self, file: PredictionFile, split: str | None) -> PredictionTable:
        predictions = file.load_table(split, mmap=True)  # a vocabulary's logits may fill most of the memory
        self.warn_of_probabilities(file.name, predictions.logits)
        return predictions

    def warn_of_probabilities(self, path: str | Path, logits: Array) -> None:
        """Doubt logits that look like probabilities."""
        from trueup.io.predictions import looks_like_probabilities

        plain = not self.probs and self.confidence is None and not self.multilabel
        if plain and logits.ndim == 2 and (observation := looks_like_probabilities(logits)):
            warnings.warn(f"{path}: {observation}; say --probs if that is what they are", stacklevel=3)

    def _check_first_rows(self, shards: Shards) -> None:
        """Look for probabilities in the first rows there are; a bad shard is reported when it is read."""
        from trueup.io.predictions import ROWS_LOOKED_AT

        few = replace(shards, rows=ROWS_LOOKED_AT)
        for path in () if self.probs or self.confidence else few.paths:
            with suppress(ValueError, OSError):
                part = next(few.read(path))
                if len(part.labels):
                    self.warn_of_probabilities(path, part.logits)
                    return


def without(*names: str) -> tuple[str, ...]:
    """The fields of a `Reader` but for these, for a verb that does not take them."""
    return tuple(field.name for field in fields(Reader) if field.name not in names)


@dataclass(frozen=True)
class ForecastColumns:
    """The options that say where the forecasts of a number are; true where one was given."""

    mean: Mean = None
    std: Std = None
    target: Target = None
    quantiles: Quantiles = None
    levels: Levels = None

    def __bool__(self) -> bool:
        return any(name is not None for name in astuple(self))


def join_groups(columns: Any) -> list[str] | None:
    """One value a row from the columns of --by; of several, all their values together."""
    if not columns:
        return None
    return [", ".join(str(value) for value in values) for values in zip(*columns.values(), strict=True)]
