"""Options that several verbs share, and what is said about them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

import typer

from trueup.cli.defaults import default_of
from trueup.registry import LOSSES, METHODS, METRICS, NETWORKS


def examples(*lines: str) -> str:
    """The end of a help page."""
    return "\n".join(["\b", "Examples:", *(f"  $ {line}" for line in lines)])


def help_of(text: str, where: str, option: str) -> str:
    """What an option is for, and what it is unless given, as the library's signature has it."""
    default = default_of(where, option)
    return f"{text} (default {default})." if default else f"{text}."


def given(**options: Any) -> dict[str, Any]:
    """Those that the user gave; the library knows the others' defaults."""
    return {name: value for name, value in options.items() if value is not None and value != []}


def known(kind: str, names: Iterable[str], name: str) -> str:
    """A name of the registry, or an error that offers the nearest ones."""
    there = list(names)
    if name in there:
        return name
    near = get_close_matches(name, there, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(there)}"
    raise ValueError(f"no {kind} is called {name!r}; {hint}")


def completing(names: Iterable[str]) -> Callable[[str], list[str]]:
    """What the shell offers for a name that has been begun."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in names if name.startswith(incomplete)]

    return complete


LOAD = "trueup.io.predictions:load"
COMPARE = "trueup.metrics.table:compare"

Probs = Annotated[bool, typer.Option("--probs", help="The file holds probabilities, not logits.")]
Logits = Annotated[
    str | None,
    typer.Option(
        "--logits", metavar="NAME", help=help_of("The array of logits, or the columns, with commas", LOAD, "logits")
    ),
]
Labels = Annotated[
    str | None,
    typer.Option("--labels", metavar="NAME", help=help_of("The array or column of labels", LOAD, "labels")),
]
Split = Annotated[
    str | None,
    typer.Option("--split", metavar="val|test", help="Which half of a file that holds val_logits and test_logits."),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="WHERE", help="Who reads shards: processes[:N], local[:N] or tcp://host:port (Dask)."
    ),
]
SkipBad = Annotated[
    bool, typer.Option("--skip-bad", help="Leave out shards that cannot be read, and count them, instead of stopping.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout, and nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print the result alone: no progress, no remarks.")]
Seed = Annotated[int | None, typer.Option("--seed", metavar="N", help=help_of("Seed", COMPARE, "seed"))]
Bins = Annotated[
    int | None, typer.Option("--bins", metavar="N", help=help_of("Bins of the calibration errors", COMPARE, "bins"))
]
Level = Annotated[
    float | None,
    typer.Option("--level", metavar="SHARE", help=help_of("Coverage of the intervals", COMPARE, "level")),
]
Metrics = Annotated[
    list[str] | None,
    typer.Option(
        "--metric",
        metavar="NAME",
        autocompletion=completing(METRICS),
        help="A metric to show; may be given several times. `trueup metrics` lists them.",
    ),
]
Methods = Annotated[
    list[str] | None,
    typer.Option(
        "--method",
        "-m",
        metavar="NAME",
        autocompletion=completing(METHODS),
        help="A method; may be given several times. `trueup methods` lists them.",
    ),
]
Network = Annotated[
    str,
    typer.Option(
        "--network", metavar="NAME", autocompletion=completing(NETWORKS), help="Network; `trueup networks` lists them."
    ),
]
Loss = Annotated[
    str,
    typer.Option("--loss", metavar="NAME", autocompletion=completing(LOSSES), help="Loss; `trueup losses` lists them."),
]
DataFolder = Annotated[
    Path | None,
    typer.Option("--data-dir", metavar="FOLDER", help="Where data sets are kept (default $TRUEUP_DATA)."),
]
