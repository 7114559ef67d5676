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

from trueup._core import __version__
from trueup.cli import app

VERBS = (
    *("evaluate", "compare", "rank", "report", "monitor", "fit", "apply", "decide", "sets", "plan"),
    *("clamp", "repair", "serve", "demo"),
    *("methods", "metrics", "losses"),
)
HEAVY = ("torch", "numpy", "scipy", "matplotlib", "pandas", "fastapi", "sklearn")


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


def test_options_come_in_groups_and_arguments_without_braces():
    text = CliRunner().invoke(app, ["report", "--help"], terminal_width=80).output
    assert text.startswith("Usage: trueup report [OPTIONS] VAL [TEST]")
    heads = "Arguments", "Options", "Contents of the file", "Forecasts of a number", "Scores", "Screen", "  Examples"
    places = [text.index(f"\n{head}:") for head in heads]
    assert places == sorted(places)
    assert places[1] < text.index("--output") < places[2] < text.index("--probs") < places[3] < text.index("--mean")
    assert "<str>" not in text


LIBRARY = {
    "evaluate": {
        "trueup.metrics.table:evaluate": {
            "bins": "bins",
            "level": "level",
            "n_resamples": "n_resamples",
            "seed": "seed",
        }
    },
    "rank": {"trueup.reports:report": {name: name for name in ("bins", "level", "n_folds", "seed")}},
    "monitor": {
        "trueup.monitor:Monitor": {"level": "level"},
        "trueup.monitor:MonitorSizes": {"window": "window", "bins": "bins"},
    },
    "clamp": {
        "trueup.clamping:clamp": {name: name for name in ("recipe", "seed")},
        "trueup.clamping:Objective": {name: name for name in ("loss", "penalty", "norm")},
        "trueup.clamping:MapOptions": {"input_map": "kind"},
        "trueup.clamping.published_recipes:paper": {name: name for name in ("epochs", "lr", "reduction")},
    },
    "repair": {
        "trueup.adaptation:AdaptOptions": {name: name for name in ("temperature", "budget")},
        "trueup.adaptation:repair": {"seed": "seed"},
    },
    "decide": {
        "trueup.decisions:threshold": {"risk": "risk", "max_risk": "max_risk", "level": "level"},
        "trueup.decisions:estimate_prior": {"seed": "seed"},
    },
    "sets": {"trueup.decisions:PredictionSets.fit": {"score": "score", "coverage": "coverage", "seed": "seed"}},
    "plan": {"trueup.decisions:plan": {"seed": "seed"}, "trueup.decisions:Promise": {"level": "level"}},
    "serve": {"trueup.serve.server:run": {"host": "host", "port": "port"}},
    "demo": {"trueup.demo:run": {"folder": "folder", "seed": "seed"}},
}
"""Verb → function of the library → option → its argument."""
LIBRARY["report"] = LIBRARY["rank"]
LIBRARY["compare"] = LIBRARY["evaluate"]
OF_FILES = {"trueup.io.predictions:Fields": {"logits": "logits", "labels": "labels"}}
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
    files = {**files, "trueup.io.forecasts:ForecastFields": of_forecasts}
    expected = {}
    for where, arguments in {**LIBRARY.get(verb, {}), **files}.items():
        module, name = where.split(":")
        parameters = inspect.signature(reduce(getattr, name.split("."), import_module(module))).parameters
        defaults = {option: (argument, parameters[argument].default) for option, argument in arguments.items()}
        expected |= {key: str(value) for key, (_, value) in defaults.items()}
    assert stated == expected


def test_options_tell_the_defaults_of_the_library():
    def text(verb):
        return " ".join(CliRunner().invoke(app, [verb, "--help"]).output.split())

    assert "of the calibration errors (default 15)." in text("evaluate")
    assert "How to fit (default subspace);" in text("clamp")
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


@pytest.mark.parametrize("module", ["trueup.cli.verbs", "trueup.serve", "trueup.serve.server", "trueup.serve.app"])
def test_the_doors_load_no_torch(module):
    if module == "trueup.serve.app":
        pytest.importorskip("fastapi", reason="fastapi is not installed")
    assert run("-c", f"import sys, {module}; print('torch' in sys.modules)").stdout == "False\n"


def test_evaluate_loads_no_torch_and_nothing_slow(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "a.npz", logits=rng.normal(size=(99, 3)), labels=rng.integers(0, 3, 99))
    slow = ("torch", "pandas", "matplotlib", "scipy.stats", "scipy.optimize", "pydantic", "multiprocessing.context")
    code = f"""
import sys
from trueup.cli import app
app(["evaluate", {str(tmp_path / "a.npz")!r}, "-q"], standalone_mode=False)
print([name for name in {slow} if name in sys.modules])
"""
    assert run("-c", code).stdout.splitlines()[-1] == "[]"


def test_without_torch_one_line_says_how_to_get_it(tmp_path):
    (tmp_path / "mine.py").write_text("def net(): return None\n")
    np.savez(tmp_path / "a.npz", images=np.zeros((4, 8, 8), np.uint8), labels=np.zeros(4, int))
    code = f"""
import os, sys
sys.modules["torch"] = None
os.chdir({str(tmp_path)!r})
sys.argv = ["trueup", "clamp", "mine:net", "--data", "a.npz", "-o", "c.safetensors"]
from trueup.cli import main
main()
"""
    done = run("-c", code)
    assert done.returncode == 2
    assert done.stderr == "trueup: torch is not installed: pip install 'trueup[torch]'\n"


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
print(*(name for name in sys.modules if name.startswith("trueup")))
"""
    loaded = run("-c", code).stdout.split()
    assert {name.split(".")[1] for name in loaded if "." in name} & {"clamping", "serve"} == set()
    assert not [name for name in loaded if name.startswith("trueup_studies")]
    assert "trueup.reports.page" in loaded
    assert len(loaded) <= 82  # a file for each figure, method, and candidate of the automatic choice
