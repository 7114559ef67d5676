"""The studies and the library have the same version, and each needs the other's."""

import tomllib
from importlib.metadata import entry_points
from pathlib import Path

import trueup


def test_the_studies_are_pinned_to_the_version_of_the_library():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["version"] == trueup.__version__
    needed = [*project["dependencies"], *project["optional-dependencies"]["cluster"]]
    assert [name.partition("==")[2] for name in needed if name.startswith("trueup[")] == [trueup.__version__] * 2


def test_the_verbs_are_entry_points():
    assert {"study", "train", "networks", "datasets"} <= {entry.name for entry in entry_points(group="trueup.verbs")}
