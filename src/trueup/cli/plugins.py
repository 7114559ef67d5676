"""What other installed packages add to the command line, by their entry points; nothing is imported to list it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

VERBS = "trueup.verbs"
"""Group of entry points: a verb → the function that registers it on a typer application."""
RESOLVE = "trueup.resolve"
"""Group of entry points that read what only other packages know: `run`, a folder of `trueup train`; `data`, a name."""
OF_STUDIES = ("train", "study", "networks", "datasets")


def find_verbs() -> dict[str, EntryPoint]:
    """The verbs of other packages."""
    from importlib.metadata import entry_points  # slow, and seldom needed

    return {entry.name: entry for entry in entry_points(group=VERBS)}


def load_resolver(name: str, wanted: str) -> Any:
    """A function of the group `trueup.resolve`; ImportError says what to install where there is none."""
    from importlib.metadata import entry_points

    for entry in entry_points(group=RESOLVE, name=name):
        return entry.load()
    raise ImportError(needs_studies(wanted))


def needs_studies(wanted: str) -> str:
    """What to say where the studies are missing."""
    return f"{wanted} needs the studies: pip install trueup-studies"
