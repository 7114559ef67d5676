"""How a command ends: with one line on stderr, and an exit code that says what kind of failure it was."""

from __future__ import annotations

import sys

from trueup.core.errors import Hint, message_of
from trueup.core.progress import clear_line

WRONG_INPUT, FAILED, INTERRUPTED = 2, 1, 130
"""Exit codes: the input or the command line is wrong; something else failed; the user stopped it."""

HINTS = {
    Hint.BINARY_SCORE: "a binary score x needs two columns in the file, 0 and x",
    Hint.CONFIDENCE: "a confidence is read by --confidence and --correct",
    Hint.PER_CENT: "divide per cent by 100",
    Hint.LOG_ODDS: "a log-odds x needs two columns in the file, 0 and x",
    Hint.RENORMALISE: "",
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


def print_stderr(line: str) -> None:
    """Print what is not the result."""
    clear_line()
    sys.stderr.write(f"trueup: {line}\n")
    sys.stderr.flush()


def _line(text: str) -> str:
    return " ".join(text.split())
