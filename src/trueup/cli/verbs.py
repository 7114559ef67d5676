"""The application with all its verbs, in the order of the help page; a verb's module is imported when it is used."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from trueup.cli.errors import FAILED, INTERRUPTED, describe_error, print_stderr
from trueup.cli.options import format_examples
from trueup.core import __version__
from trueup.core.errors import write_warnings
from trueup.core.progress import log_lines

MODULES = {
    **dict.fromkeys(("evaluate", "compare", "report"), "evaluate"),
    "monitor": "monitor",
    **dict.fromkeys(("fit", "apply"), "fit"),
    **{verb: verb for verb in ("decide", "sets", "plan")},
    "clamp": "clamp",
    "repair": "repair",
    "train": "train",
    "study": "study",
    **dict.fromkeys(("serve", "demo"), "serve"),
    **dict.fromkeys(("methods", "metrics", "losses", "networks", "datasets"), "listing"),
}
"""Verb → the module of this package that registers it."""
SETTINGS: dict[str, Any] = {
    "rich_markup_mode": None,  # rich takes as long to import as all the rest
    "pretty_exceptions_enable": False,
}


class _Commands(Mapping[str, Any]):
    """Verb → command, from the verb's module."""

    def __getitem__(self, verb: str) -> Any:
        verbs = typer.Typer(**SETTINGS)
        import_module(f"trueup.cli.{MODULES[verb]}").register(verbs)
        verbs.callback()(lambda: None)  # a group, also if there is one verb in it
        return get_group(verbs).commands[verb]

    def __iter__(self) -> Iterator[str]:
        return iter(MODULES)

    def __len__(self) -> int:
        return len(MODULES)


class Verbs(TyperGroup):
    """A group of commands that reports a failure in one line; `TRUEUP_DEBUG=1` shows the traceback."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Commands()

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line, and exit with its code; return the code unless in standalone mode."""
        try:
            with _warnings_on_stderr(), log_lines():
                result = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
                sys.stdout.flush()
            code = result if isinstance(result, int) else 0
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except BrokenPipeError:  # the reader closed the pipe: nothing more can be written, at exit either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = FAILED
        except Exception as error:
            if os.environ.get("TRUEUP_DEBUG"):
                raise
            code, line = describe_error(error)
            print_stderr(line)
        if code == INTERRUPTED:
            print_stderr("interrupted")
        if standalone_mode:
            sys.exit(code)
        return code

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The verbs by panel, each with its first sentence."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            panels.setdefault(command.rich_help_panel, []).append((name, command.get_short_help_str(limit=200)))
        for panel, verbs in panels.items():
            with formatter.section(panel):
                formatter.write_dl(verbs)


def _warnings_on_stderr() -> AbstractContextManager[None]:
    if sys.warnoptions or os.environ.get("TRUEUP_DEBUG"):
        return nullcontext()
    return write_warnings(lambda message: print_stderr(f"warning: {message}"))


app = typer.Typer(name="trueup", cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]}, **SETTINGS)


def _print_version(wanted: bool) -> None:
    if wanted:
        fast = "compiled" if find_spec("trueup.core._native") else "not compiled: a C compiler would make it faster"
        typer.echo(f"trueup {__version__}, {fast}")
        raise typer.Exit


@app.callback(
    invoke_without_command=True,
    epilog=format_examples(
        "trueup report val.npz test.npz -o report.html",
        "trueup fit val.npz -m auto -o calibrator.safetensors",
        "trueup demo",
    ),
)
def trueup(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Make a neural network's confidence honest: measure it, calibrate it, report it.

    A file holds logits and labels: .npz, .npy, .csv, .jsonl, .parquet or .safetensors. `trueup VERB --help` has
    examples.
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
