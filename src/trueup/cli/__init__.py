"""The command `trueup`: parse, call, print.

Each verb imports what it needs when it runs, so that help and completion come at once.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueup.cli.verbs import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command, and end the process with its code: 2 for what was asked wrongly, 1 for any other failure."""
    try:
        from trueup.cli.verbs import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich", "click"):
            raise
        sys.stderr.write(f"trueup: {error.name} is not installed: pip install 'trueup[cli]'\n")
        sys.exit(2)
    app(prog_name="trueup")


def __getattr__(name: str) -> Any:
    if name == "app":
        from trueup.cli import verbs

        return verbs.app
    raise AttributeError(f"module 'trueup.cli' has no attribute {name!r}")
