"""Help, version, completion, and how quickly they come."""

import inspect
import os
import re
import resource
import subprocess
import sys
from functools import reduce
from importlib import import_module

import numpy as np
import pytest
from typer.main import get_command
from typer.testing import CliRunner

from trueup.cli import app
from trueup.core import __version__

VERBS = (
    *("evaluate", "compare", "report", "monitor", "fit", "apply", "decide", "sets", "plan"),
    *("clamp", "repair", "train", "study", "serve", "demo"),
    *("methods", "metrics", "losses", "networks", "datasets"),
)
HEAVY = ("torch", "numpy", "scipy", "plotly", "matplotlib", "pandas", "fastapi", "sklearn")


def run(*command, **environment):
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env={**os.environ, **environment}
    )


@pytest.mark.parametrize("room", ["trueup", "trueup.cli"])
def test_the_package_runs_as_the_command(room):
    done = run("-m", room, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith("Usage: trueup ")
    assert all(f"  {verb} " in done.stdout for verb in VERBS)


def test_nothing_to_do_is_help():
    result = CliRunner().invoke(app, [])
    assert result.exit_code == 0
    assert result.output.startswith("Usage:")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_examples(verb):
    result = CliRunner().invoke(app, [verb, "--help"], terminal_width=80)
    assert result.exit_code == 0
    assert f"Examples:\n    $ trueup {verb}" in result.output
    assert "-h, --help" in result.output


LIBRARY = {
    "evaluate": {
        "trueup.metrics.table:evaluate": {
            "bins": "bins",
            "level": "level",
            "n_resamples": "n_resamples",
            "seed": "seed",
        }
    },
    "compare": {"trueup.report.audit:audit": {name: name for name in ("bins", "level", "folds", "seed")}},
    "monitor": {"trueup.monitor.monitor:Monitor": {name: name for name in ("alpha", "window", "bins")}},
    "clamp": {"trueup.clamping.fit:clamp": {name: name for name in ("recipe", "loss", "penalty", "input_map", "seed")}},
    "repair": {"trueup.clamping.input_repair:repair": {name: name for name in ("temperature", "budget", "seed")}},
    "train": {
        "trueup.training.loop:train": {
            name: name for name in ("batch_size", "optimiser", "lr", "weight_decay", "schedule", "seed")
        },
        "trueup.training.data:load_data": {"data": "name"},
    },
    "decide": {
        "trueup.decisions:threshold": {name: name for name in ("risk", "at_most", "certainty")},
        "trueup.decisions:estimate_prior": {"seed": "seed"},
    },
    "sets": {"trueup.decisions:PredictionSets.fit": {name: name for name in ("score", "alpha", "seed")}},
    "plan": {"trueup.decisions:plan": {name: name for name in ("certainty", "seed")}},
    "serve": {"trueup.serve.server:run": {"host": "host", "port": "port"}},
    "demo": {"trueup.demo:run": {"folder": "folder", "seed": "seed"}},
}
"""Verb → function of the library → option → its argument."""
LIBRARY["report"] = LIBRARY["compare"]
OF_FILES = {"trueup.io.load_save:load": {"logits": "logits", "labels": "labels"}}
OWN = {"data_dir", "store"}
"""Options whose default is not the library's."""


def stated_defaults(verb):
    """The default that the help of each option states in its text."""
    command = get_command(app).commands[verb]
    stated = {p.name: re.search(r"\(default ([^):]+)\)", getattr(p, "help", None) or "") for p in command.params}
    return {name: found.group(1) for name, found in stated.items() if found and name not in OWN}


@pytest.mark.parametrize("verb", VERBS)
def test_help_states_the_defaults_of_the_library(verb):
    stated = stated_defaults(verb)
    files = OF_FILES if "logits" in stated else {}
    of_forecasts = {name: name + "s" * (name == "target") for name in ("mean", "std", "target") if name in stated}
    files = {**files, "trueup.io.forecasts:load_forecasts": of_forecasts}
    expected = {}
    for where, arguments in {**LIBRARY.get(verb, {}), **files}.items():
        module, name = where.split(":")
        parameters = inspect.signature(reduce(getattr, name.split("."), import_module(module))).parameters
        expected |= {option: str(parameters[argument].default) for option, argument in arguments.items()}
    assert stated == expected


def test_options_tell_the_defaults_of_the_library():
    def text(verb):
        return " ".join(CliRunner().invoke(app, [verb, "--help"]).output.split())

    assert "of the calibration errors (default 15)." in text("evaluate")
    assert "Learning rate (default 0.1)." in text("train")
    assert "How to fit (default subspace)." in text("clamp")
    assert "olds of the cross-validation (default 5)." in text("report")
    assert "Port (default 8000)." in text("serve")


def test_help_imports_nothing_heavy():
    code = f"""
import sys
from typer.testing import CliRunner
from trueup.cli import app
for verb in {("", *VERBS)}:
    assert CliRunner().invoke(app, [*filter(None, [verb]), "--help"]).exit_code == 0
print([room for room in {HEAVY} if room in sys.modules])
"""
    assert run("-c", code).stdout.strip() == "[]"


def test_help_is_quick():
    def seconds():
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert run("-m", "trueup", "report", "--help").returncode == 0
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    assert min(seconds() for _ in range(3)) < 0.5


def test_version():
    assert CliRunner().invoke(app, ["--version"]).output.startswith(f"trueup {__version__}, ")


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("trueup fit val.npz -m temperature_h", ["temperature_histogram"]),
        ("trueup eval", ["evaluate"]),
        ("trueup evaluate x --metric smooth", ["smooth_ece"]),
        ("trueup train --loss dual", ["dual_focal"]),
        ("trueup train --network wrn16", ["wrn16x4"]),
    ],
)
def test_names_complete(words, offered):
    at = str(len(words.split()) - 1)
    done = run("-m", "trueup", _TRUEUP_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=at)
    assert done.stdout.split() == offered


def test_a_shell_can_be_taught_to_complete():
    # Without a shell among its ancestors, as under some runners, it could not be guessed.
    named = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    done = run("-m", "trueup", "--show-completion", "bash", **named)
    assert done.returncode == 0
    assert "complete -o default -F _trueup_completion trueup" in done.stdout


def test_without_the_extra_one_line_says_how_to_get_it():
    code = "import sys; sys.modules['typer'] = None; from trueup.cli import main; main()"
    done = run("-c", code)
    assert done.returncode == 2
    assert done.stderr == "trueup: typer is not installed: pip install 'trueup[cli]'\n"


@pytest.mark.parametrize("classes", [2, 10])
def test_a_report_loads_only_what_it_needs(classes, tmp_path):
    rng = np.random.default_rng(0)
    for name in ("val", "test"):
        z = 2 * rng.normal(size=(900, classes))
        y = (z + rng.gumbel(size=z.shape)).argmax(axis=1)
        np.savez(tmp_path / f"{name}.npz", logits=2 * z, labels=y)
    code = f"""
import os, sys
from typer.testing import CliRunner
from trueup.cli import app
os.chdir({str(tmp_path)!r})
assert CliRunner().invoke(app, ["report", "val.npz", "test.npz", "-q"]).exit_code == 0
print(*(name for name in sys.modules if name.split(".")[0] == "trueup"))
"""
    loaded = run("-c", code).stdout.split()
    assert {name.split(".")[1] for name in loaded if "." in name} & {"clamping", "training", "study", "serve"} == set()
    assert "trueup.report.page" in loaded
    assert len(loaded) <= 65  # a file for each figure, method, and candidate of the automatic choice
