"""All verbs in one application, in the order of the help page."""

from __future__ import annotations

from typing import Annotated

import typer

from trueup.cli import clamp, study, train
from trueup.cli import evaluate as measure
from trueup.cli import fit as repair
from trueup.cli import listing as lists
from trueup.cli import monitor as watch
from trueup.cli import serve as start
from trueup.cli.errors import Verbs
from trueup.cli.options import examples
from trueup.core.version import __version__

app = typer.Typer(
    name="trueup",
    cls=Verbs,
    rich_markup_mode=None,  # rich takes as long to import as all the rest
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"trueup {__version__}")
        raise typer.Exit


@app.callback(
    invoke_without_command=True,
    epilog=examples(
        "trueup report val.npz test.npz -o report.html",
        "trueup fit val.npz -m auto -o calibrator.safetensors",
        "trueup demo",
    ),
)
def everything(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Makes a neural network's confidence honest: measure it, repair it, report it.

    A file holds logits and labels: .npz, .npy, .csv, .parquet or .safetensors. Every verb has examples in its own help.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


for _room in (measure, watch, repair, clamp, train, study, start, lists):
    _room.add_to(app)
