"""The application: the verbs in the order of the help page, then those of other packages.

The module of a verb is imported when the verb is used. A command that fails prints one line on stderr, and its exit
code gives the kind of failure.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from trueup._core import __version__
from trueup._core.errors import Hint, error_message
from trueup._core.progress import log_lines
from trueup.cli.options import help_page
from trueup.cli.output import COMMAND_WARNINGS, collect_warnings, print_stderr

_NAMES = (
    "evaluate compare check rank report monitor fit apply decide sets plan judge clamp repair serve demo "
    "methods metrics losses"
)
_SHARED = {"compare": "evaluate", "report": "rank", "apply": "fit", "clamp": "networks", "repair": "networks"}
_SHARED |= {"demo": "serve", "methods": "listing", "metrics": "listing", "losses": "listing"}
MODULES = {verb: _SHARED.get(verb, verb) for verb in _NAMES.split()}
"""For each verb, the module of this package that registers it."""
SETTINGS: dict[str, Any] = {
    "rich_markup_mode": None,  # importing rich would double the time of a command
    "pretty_exceptions_enable": False,
}
WRONG_INPUT, FAILED, INTERRUPTED = 2, 1, 130
"""Exit codes: wrong input or command line; any other failure; stopped by the user."""

HINTS = {
    Hint.BINARY_SCORE: "a binary score x needs two columns in the file, 0 and x; wrap a network with one logit in "
    "trueup.models.TwoClasses(network)",
    Hint.CONFIDENCE: "read a confidence with --confidence and --correct",
    Hint.PER_CENT: "divide per cent by 100",
    Hint.LOG_ODDS: "a log-odds x needs two columns in the file, 0 and x",
    Hint.RENORMALISE: "divide rounded probabilities by their sums before you write the file",
    Hint.FLATTEN: "name the axis of classes of tokens or pixels with --class-axis",
    Hint.IGNORE_INDEX: "remove rows to be ignored from the file; for tokens or pixels use --ignore-index",
    Hint.NOT_PROBABILITIES: "leave out --probs for logits",
    Hint.EXACT_ZEROS: "use --probs for probabilities with exact zeros",
    Hint.PROBS: "read probabilities with --probs",
    Hint.PROBABILITIES_IN_FILE: "read probabilities with --probs, or insist on logits with --no-probs",
    Hint.SPLIT: "choose --split {0}",
    Hint.STATED: "read a stated confidence with --confidence COLUMN --correct COLUMN",
    Hint.COLUMNS: "name the columns, such as --logits {1} --labels {2}",
    Hint.FORECAST: "read forecasts of a number with --mean COLUMN --std COLUMN --target COLUMN",
    Hint.LEVELS: "list them with --levels",
    Hint.CLASSES: "list the classes of text labels with --class-names",
    Hint.COLUMN_ORDER: "list the columns of the classes in that order with --logits",
    Hint.LOAD_CALIBRATOR: "`trueup apply` reads it",
    Hint.LOAD_MONITOR: "`trueup monitor --state` reads it",
    Hint.LOAD_CLAMPED: "",
    Hint.LOAD_RECALIBRATOR: "`trueup apply --mean COLUMN --std COLUMN` reads it",
}
"""The library's hints in terms of the command line; no verb reads a clamped network."""

_SAME_NAME = (
    "batch_size bins class_names epochs event groups level lr max_risk n_folds patience penalty sample_weight seed "
    "weight_decay window"
)
OPTIONS = {name: f"--{name.replace('_', '-')}" for name in _SAME_NAME.split()} | {
    **{"n_resamples": "--resamples", "maximum": "--max", "minimum": "--min"}
}
"""The library's arguments that are options of the command line."""

_EXTRAS = {"fastapi": "serve", "uvicorn": "serve", "matplotlib": "report", "torch": "torch"}
_EXTRAS |= {"h5py": "hdf5", "pyarrow": "parquet", "sklearn": "sklearn"}
_WRONG_PATHS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)


class _Commands(Mapping[str, Any]):
    """Mapping of verbs to commands, which imports the module of a verb on access."""

    def __getitem__(self, verb: str) -> Any:
        verbs = typer.Typer(**SETTINGS)
        self._register(verb)(verbs)
        verbs.callback()(lambda: None)  # makes a group even of a single verb
        command: Any = get_group(verbs).commands[verb]
        get_params = command.get_params
        command.get_params = lambda context: _skip_validation(get_params(context))
        return command

    def _register(self, verb: str) -> Any:
        """Return the function that registers a verb; other packages are searched only for verbs that are not ours."""
        if verb in MODULES:
            return import_module(f"trueup.cli.{MODULES[verb]}").register
        from trueup.cli import plugins

        if (entry := plugins.find_verbs().get(verb)) is not None:
            return entry.load()
        if verb in plugins.STUDY_VERBS:
            raise ImportError(plugins.needs_studies(f"`trueup {verb}`"))
        raise KeyError(verb)

    def __iter__(self) -> Iterator[str]:
        from trueup.cli.plugins import find_verbs

        return iter({**MODULES, **find_verbs()})

    def __len__(self) -> int:
        return len(list(iter(self)))


def _skip_validation(parameters: list[Any]) -> list[Any]:
    """Pass unset and text values on unchanged: typer would validate them with pydantic, which is slow to import."""
    for parameter in parameters:
        if "process_value" not in vars(parameter):
            parameter.process_value = partial(_process_value, parameter, parameter.process_value)
    return parameters


def _process_value(parameter: Any, process: Callable[[Any, Any], Any], context: Any, value: Any) -> Any:
    kind = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    is_unset = value is None and not parameter.required
    if not (is_unset or (kind is str and isinstance(value, str))):
        return process(context, value)
    return value if parameter.callback is None else parameter.callback(context, parameter, value)


class Verbs(TyperGroup):
    """A group of commands that reports a failure in one line; `TRUEUP_DEBUG=1` shows the traceback."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = _Commands()

    def get_params(self, ctx: Any) -> list[Any]:
        """Return the options of the application itself."""
        return _skip_validation(super().get_params(ctx))

    def main(self, *args: Any, standalone_mode: bool = True, **options: Any) -> Any:
        """Run a command line, and exit with its code; return the code unless in standalone mode."""
        COMMAND_WARNINGS.clear()
        try:
            with collect_warnings(quiet=False), log_lines():
                result = super().main(*args, **options | {"standalone_mode": False})
                sys.stdout.flush()
            code = result if isinstance(result, int) else 0
        except (KeyboardInterrupt, typer.Abort):
            code = INTERRUPTED
        except BrokenPipeError:  # the reader closed the pipe: nothing can be written, not even at exit
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
        """List the verbs by panel, each with its first sentence."""
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            panels.setdefault(command.rich_help_panel, []).append((name, command.get_short_help_str(limit=200)))
        for panel, verbs in panels.items():
            with formatter.section(panel):
                formatter.write_dl(verbs)


def describe_error(error: Exception) -> tuple[int, str]:
    r"""Return the exit code of a failure and the line that explains it.

    >>> describe_error(ValueError("labels must lie in 0..9,\n got 1..10"))
    (2, 'labels must lie in 0..9, got 1..10')
    >>> describe_error(ZeroDivisionError("division by zero"))[0]
    1
    """
    usage = getattr(error, "format_message", None)
    if usage is not None:
        context = getattr(error, "ctx", None)
        hint = f" (see {context.command_path} --help)" if context is not None else ""
        return WRONG_INPUT, _line(usage()).rstrip(".") + hint
    message = _line(error_message(error, HINTS, OPTIONS))
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        hint = f"{package} is not installed: pip install 'trueup[{_EXTRAS.get(package)}]'"
        return WRONG_INPUT, hint if package in _EXTRAS else message
    wrong_input = isinstance(error, (ValueError, ImportError, *_WRONG_PATHS))
    if isinstance(error, OSError) and error.filename is not None:
        return WRONG_INPUT if wrong_input else FAILED, f"{error.filename}: {error.strerror}"
    if wrong_input:
        return WRONG_INPUT, message
    return FAILED, f"{type(error).__name__}: {message}; TRUEUP_DEBUG=1 shows where"


def _line(text: str) -> str:
    return " ".join(text.split())


def _print_version(enabled: bool) -> None:
    if enabled:
        fast = "compiled" if find_spec("trueup._core._native") else "not compiled: a C compiler would make it faster"
        typer.echo(f"trueup {__version__}, {fast}")
        raise typer.Exit


def trueup(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Make predicted probabilities honest: measure their calibration, improve it, report it.

    A file holds logits and labels: .npz, .npy, .csv, .jsonl, .parquet or .safetensors. `trueup VERB --help` has
    examples.

      $ trueup report val.npz test.npz -o report.html
      $ trueup fit val.npz -m auto -o calibrator.safetensors
      $ trueup demo
    """
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


app = typer.Typer(name="trueup", cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]}, **SETTINGS)
app.callback(invoke_without_command=True, **help_page(trueup))(trueup)
