"""The application with all its verbs, in the order of the help page; a verb's module is imported when it is used.

A command that fails ends with one line on stderr, and an exit code that says what kind of failure it was.
"""

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

from trueup.cli.options import format_examples
from trueup.cli.output import print_stderr
from trueup.core import __version__
from trueup.core.errors import Hint, message_of, write_warnings
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
WRONG_INPUT, FAILED, INTERRUPTED = 2, 1, 130
"""Exit codes: the input or the command line is wrong; something else failed; the user stopped it."""

HINTS = {
    Hint.BINARY_SCORE: "a binary score x needs two columns in the file, 0 and x; a network with one logit goes in as "
    "trueup.models.TwoClasses(network)",
    Hint.CONFIDENCE: "a confidence is read by --confidence and --correct",
    Hint.PER_CENT: "divide per cent by 100",
    Hint.LOG_ODDS: "a log-odds x needs two columns in the file, 0 and x",
    Hint.RENORMALISE: "divide rounded probabilities by their sums before you write the file",
    Hint.FLATTEN: "--class-axis says where the classes of tokens or pixels are",
    Hint.IGNORE_INDEX: "leave out of the file what is to be ignored; among tokens or pixels --ignore-index does",
    Hint.NOT_PROBABILITIES: "logits need no --probs",
    Hint.EXACT_ZEROS: "probabilities with exact zeros are read by --probs",
    Hint.PROBS: "say --probs to read probabilities",
    Hint.SPLIT: "choose --split {}",
    Hint.STATED: "a stated confidence is read by --confidence COLUMN --correct COLUMN",
    Hint.FORECAST: "forecasts of a number are read by --mean COLUMN --std COLUMN --target COLUMN",
    Hint.LEVELS: "--levels gives them",
    Hint.CLASSES: "--classes names the classes of labels that are texts",
    Hint.LOAD_CALIBRATOR: "`trueup apply` reads it",
    Hint.LOAD_MONITOR: "`trueup monitor --state` reads it",
    Hint.LOAD_CLAMPED: "",
    Hint.LOAD_RECALIBRATOR: "`trueup apply --mean COLUMN --std COLUMN` reads it",
}
"""The library's hints in the words of the command line; no verb reads a clamped network."""

OPTIONS = {
    "batch_size": "--batch-size",
    "lr": "--lr",
    "n_resamples": "--resamples",
    "penalty": "--penalty",
    "weights": "--weight",
    "groups": "--by",
    "classes": "--classes",
    "weight_decay": "--weight-decay",
    **{
        name: f"--{name}"
        for name in ("alpha", "bins", "epochs", "event", "folds", "level", "patience", "seed", "window")
    },
}
"""The library's arguments that are options here."""

_EXTRAS = {
    "fastapi": "serve",
    "h5py": "hdf5",
    "lightning": "train",
    "lightning_fabric": "train",
    "matplotlib": "report",
    "plotly": "report",
    "pyarrow": "parquet",
    "sklearn": "sklearn",
    "uvicorn": "serve",
}
_WRONG_INPUT_ERRORS = (
    ValueError,
    ImportError,
    FileNotFoundError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
    PermissionError,
)


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


def describe_error(error: Exception) -> tuple[int, str]:
    """The exit code of a failure, and the line that explains it.

    >>> describe_error(ValueError("labels must lie in 0..9,\\n got 1..10"))
    (2, 'labels must lie in 0..9, got 1..10')
    >>> describe_error(ZeroDivisionError("division by zero"))[0]
    1
    """
    usage = getattr(error, "format_message", None)
    if usage is not None:
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        return WRONG_INPUT, _line(usage()).rstrip(".") + hint
    message = _line(message_of(error, HINTS, OPTIONS))
    if isinstance(error, ModuleNotFoundError) and error.name:
        extra = _EXTRAS.get(error.name.partition(".")[0])
        return WRONG_INPUT, f"{error.name} is not installed: pip install 'trueup[{extra}]'" if extra else message
    wrong_input = isinstance(error, _WRONG_INPUT_ERRORS)
    if isinstance(error, OSError) and error.filename is not None:
        return WRONG_INPUT if wrong_input else FAILED, f"{error.filename}: {error.strerror}"
    if wrong_input:
        return WRONG_INPUT, message
    return FAILED, f"{type(error).__name__}: {message}; TRUEUP_DEBUG=1 shows where"


def _line(text: str) -> str:
    return " ".join(text.split())


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
