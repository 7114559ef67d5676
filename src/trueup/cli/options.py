"""Options that several verbs share.

Options are None unless given, and then the library's own default holds. The defaults that help texts name are those of
the library's signatures: a test compares them, since help must not import what the library needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from trueup.registry import LOSSES, METHODS, METRICS, NETWORKS


def format_examples(*lines: str) -> str:
    """The examples at the end of a help page."""
    return "\n".join(["\b", "Examples:", *(f"  $ {line}" for line in lines)])


def drop_unset(**options: Any) -> dict[str, Any]:
    """The options that the user gave; the library has defaults for the others."""
    return {name: value for name, value in options.items() if value is not None and value != []}


def any_given(*options: Any) -> bool:
    """Whether the user gave any of these."""
    return any(option is not None for option in options)


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
