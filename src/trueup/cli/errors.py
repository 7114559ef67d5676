"""How a command ends: with one line on stderr, and a code that tells whose fault it was."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import typer
from typer.core import TyperGroup

from trueup.core.warning_capture import write_warnings
from trueup.core.wording import of_files

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
_WORDS = {
    "probs=True": "--probs",
    r"split='(\w+)'": r"--split \1",
    "logits need no from_probs": "logits need no --probs",
    "log-probabilities of exact zeros come through from_probs": "probabilities with exact zeros are read by --probs",
    r"load_calibrator\(path\)": "`trueup apply`",
    r"load_monitor\(path\)": "`trueup monitor --state`",
    r", which load_\w+\(.*?\) reads": "",
}
"""What the library says, and what an option or a verb is called here."""
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
            with _warnings_on_stderr():
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
    return of_files(" ".join(str(text).split()), _WORDS)


def _warnings_on_stderr() -> AbstractContextManager[None]:
    if sys.warnoptions or os.environ.get("TRUEUP_DEBUG"):
        return nullcontext()
    return write_warnings(lambda message: print_stderr(f"warning: {message}"))
