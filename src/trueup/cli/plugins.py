"""Verbs and data that other installed packages add to the command line by entry points."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

VERBS = "trueup.verbs"
"""Group of entry points: each maps a verb to the function that registers it on a typer application."""
RESOLVE = "trueup.resolve"
"""Group of entry points that load a folder of `trueup train` (`run`) or a data set by name (`data`)."""
STUDY_VERBS = ("train", "study", "networks", "datasets")


def find_verbs() -> dict[str, EntryPoint]:
    """Return the verbs of other packages."""
    from importlib.metadata import entry_points  # slow to import, and rarely needed

    return {entry.name: entry for entry in entry_points(group=VERBS)}


def load_resolver(name: str, subject: str) -> Any:
    """Load a function of the group `trueup.resolve`; without one, the ImportError says what to install."""
    from importlib.metadata import entry_points

    for entry in entry_points(group=RESOLVE, name=name):
        return entry.load()
    raise ImportError(needs_studies(subject))


def needs_studies(subject: str) -> str:
    """Return the error message for missing studies."""
    return f"{subject} needs the studies: pip install trueup-studies"
