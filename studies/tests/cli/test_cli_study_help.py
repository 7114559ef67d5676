"""Help and lists of the verbs that the studies add, and what is said without them."""

import inspect
import os
import re
import subprocess
import sys
from importlib import import_module

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from trueup.cli import app, plugins
from trueup_studies.registry import NETWORKS
from trueup_studies.training.data import DATASETS

VERBS = ("train", "study", "networks", "datasets")
LISTS = {"networks": NETWORKS, "datasets": DATASETS}
HEAVY = ("torch", "numpy", "scipy", "plotly", "matplotlib", "pandas", "jinja2", "sklearn")
DEFAULTS = {
    "trueup_studies.training.run_settings:RunSettings": (
        "batch_size",
        "optimiser",
        "lr",
        "weight_decay",
        "schedule",
        "seed",
    ),
    "trueup_studies.training.data:load_data": ("data",),
}
"""Function → the options of `train` that are its arguments; `data` is the name."""


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_is_listed_and_has_examples(verb):
    assert f"  {verb} " in CliRunner().invoke(app, ["--help"]).output
    result = CliRunner().invoke(app, [verb, "--help"], terminal_width=80)
    assert result.exit_code == 0
    assert f"Examples:\n    $ trueup {verb}" in result.output


@pytest.mark.parametrize("verb", VERBS)
def test_without_the_studies_it_is_said_what_to_install(verb, monkeypatch):
    monkeypatch.setattr(plugins, "find_verbs", dict)
    result = CliRunner().invoke(app, [verb])
    assert result.exit_code == 2
    assert result.stderr == f"trueup: `trueup {verb}` needs the studies: pip install trueup-studies\n"


def test_help_states_the_defaults_of_the_training():
    texts = {p.name: getattr(p, "help", None) or "" for p in get_command(app).commands["train"].params}
    stated = {
        name: found.group(1) for name, text in texts.items() if (found := re.search(r"\(default ([^)$]+)\)", text))
    }
    expected = {}
    for where, names in DEFAULTS.items():
        module, function = where.split(":")
        parameters = inspect.signature(getattr(import_module(module), function)).parameters
        expected |= {name: str(parameters["name" if name == "data" else name].default) for name in names}
    assert stated == expected


def test_help_imports_nothing_heavy():
    code = f"""
import sys
from typer.testing import CliRunner
from trueup.cli import app
for verb in {VERBS}:
    assert CliRunner().invoke(app, [verb, "--help"]).exit_code == 0
print([name for name in {HEAVY} if name in sys.modules])
"""
    assert run("-c", code).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "offered"),
    [("trueup train --loss dual", ["dual_focal"]), ("trueup train --network wrn16", ["wrn16x4"])],
)
def test_names_complete(words, offered):
    at = str(len(words.split()) - 1)
    done = run("-m", "trueup", _TRUEUP_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=at)
    assert done.stdout.split() == offered


@pytest.mark.parametrize("verb", LISTS)
def test_every_name_has_a_line_that_says_what_it_is(command, asked, verb):
    lines = command(verb).stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["name", *LISTS[verb]]
    for name, entry in asked(verb)[verb].items():
        assert set(entry) == {"summary", "defaults"}
        assert len(entry["summary"]) > 15, name
        assert entry["summary"].endswith((".", "?")), (name, entry["summary"])
