"""How a command ends: with one line on stderr, and a code that tells whose fault it was."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from typer.core import TyperGroup

from trueup.core.errors import Hint, message_of

WRONG, FAILED, INTERRUPTED = 2, 1, 130
"""Codes: what was asked cannot be done; it could, but failed; the user stopped it."""

_EXTRAS = {
    "fastapi": "serve",
    "lightning": "train",
    "lightning_fabric": "train",
    "matplotlib": "report",
    "plotly": "report",
    "pyarrow": "parquet",
    "sklearn": "sklearn",
    "uvicorn": "serve",
}
_HINTS = {
    Hint.BINARY_SCORE: "a binary score x needs two columns in the file, 0 and x",
    Hint.FLATTEN: "tokens or pixels must be in the file as rows, one each",
    Hint.IGNORE_INDEX: "what is to be ignored must be left out of the file",
    Hint.NOT_PROBABILITIES: "logits need no --probs",
    Hint.EXACT_ZEROS: "probabilities with exact zeros are read by --probs",
    Hint.PROBS: "say --probs to read probabilities",
    Hint.SPLIT: "choose --split {}",
    Hint.LOAD_CALIBRATOR: "`trueup apply` reads it",
    Hint.LOAD_MONITOR: "`trueup monitor --state` reads it",
    Hint.LOAD_CLAMPED: "",
    Hint.LOAD_RECALIBRATOR: "",
}
"""What to do instead, in the words of the command line."""
_INPUT = (ValueError, ImportError, FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)


class Verbs(TyperGroup):
    """A group of commands that tells failures in one line; `TRUEUP_DEBUG=1` shows where they came from."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line and exit, or return the code if it does not stand alone."""
        try:
            with _warnings_in_a_line():
                found = super().main(args, prog_name, complete_var, False, windows_expand_args, **extra)
                sys.stdout.flush()
            code = found if isinstance(found, int) else 0
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except BrokenPipeError:  # the reader has seen enough; what is left must not be written at the end either
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
        """The verbs by their panels, each with its first sentence."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            panels.setdefault(command.rich_help_panel, []).append((name, command.get_short_help_str(limit=200)))
        for panel, verbs in panels.items():
            with formatter.section(panel):
                formatter.write_dl(verbs)


def describe_error(error: Exception) -> tuple[int, str]:
    """The code of a failure, and what to say of it.

    >>> describe_error(ValueError("labels must lie in 0..9,\\n got 1..10"))
    (2, 'labels must lie in 0..9, got 1..10')
    >>> describe_error(ZeroDivisionError("division by zero"))[0]
    1
    """
    usage = getattr(error, "format_message", None)
    if usage is not None:
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        return WRONG, _line(usage()).rstrip(".") + hint
    if isinstance(error, ModuleNotFoundError) and error.name:
        extra = _EXTRAS.get(error.name.partition(".")[0])
        return WRONG, f"{error.name} is not installed: pip install 'trueup[{extra}]'" if extra else _line(error)
    if isinstance(error, OSError) and error.filename is not None:
        wrong = isinstance(error, (*_INPUT, PermissionError))
        return WRONG if wrong else FAILED, f"{error.filename}: {error.strerror}"
    if isinstance(error, (*_INPUT, PermissionError)):
        return WRONG, _line(error)
    return FAILED, f"{type(error).__name__}: {_line(error)}; TRUEUP_DEBUG=1 shows where"


def print_stderr(line: str) -> None:
    """Tell a person something that is not the result."""
    sys.stderr.write(f"trueup: {line}\n")
    sys.stderr.flush()


def _line(text: object) -> str:
    words = message_of(text, _HINTS) if isinstance(text, BaseException) else str(text)
    return " ".join(words.split())


@contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Show what the library warns of without the place in its code; what only its developers need is not shown."""
    if sys.warnoptions or os.environ.get("TRUEUP_DEBUG"):
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        warnings.simplefilter("default", UserWarning)
        warnings.showwarning = lambda message, *_, **__: print_stderr(f"warning: {_line(message)}")
        yield


@contextmanager
def silence_warnings(quiet: bool) -> Iterator[None]:
    """Show no warnings inside, if so asked."""
    with warnings.catch_warnings():
        if quiet:
            warnings.simplefilter("ignore")
        yield
