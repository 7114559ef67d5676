"""The command `trueup`: parse the command line, call the library, print the result.

Each verb imports what it needs when it runs, so that help and completion are immediate.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueup.cli.verbs import app

__all__ = ["app", "main"]


def main() -> None:
    """Run the command and exit with its code: 2 if the command line or the input is wrong, 1 for any other failure."""
    try:
        from trueup.cli.verbs import app

        app(prog_name="trueup")
    except KeyboardInterrupt:  # before the verb starts; a running verb reports its own
        sys.stderr.write("trueup: interrupted\n")
        sys.exit(130)


def __getattr__(name: str) -> Any:
    if name == "app":
        from trueup.cli import verbs

        return verbs.app
    raise AttributeError(f"module 'trueup.cli' has no attribute {name!r}")
