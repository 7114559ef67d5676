"""What a notebook and a checker show: short reprs, HTML, names that are found or doubted."""

import ast
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

import trueup
from trueup.registry import CALIBRATORS
from trueup.report import report
from trueup.report.audit import audit

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(60, 3)) * 3
LABELS = (LOGITS / 2 + RNG.gumbel(size=LOGITS.shape)).argmax(axis=1)


@pytest.fixture(scope="module")
def shown():
    monitor = trueup.Monitor(3)
    monitor.update(LOGITS, LABELS)
    result = audit((LOGITS, LABELS), methods=["temperature"], progress=False)
    return {
        "Predictions": trueup.Predictions(LOGITS, LABELS),
        "Predictions of torch": trueup.Predictions(torch.tensor(LOGITS), torch.tensor(LABELS)),
        "Tally": trueup.Tally.of(LOGITS, LABELS),
        "Status": monitor.status(),
        "Monitor": monitor,
        "Audit": result,
        "Report": report(result, title="a < b"),
    }


NAMES = ["Predictions", "Predictions of torch", "Tally", "Status", "Monitor", "Audit", "Report"]


@pytest.mark.parametrize("name", NAMES)
def test_a_repr_is_one_short_line_and_the_html_a_piece(shown, name):
    text = repr(shown[name])
    assert text.startswith(f"{name.split()[0]}(")
    assert len(text) < 400
    assert "\n" not in text
    html = shown[name]._repr_html_()
    assert html.startswith(("<div", "<p"))
    assert "<table" in html
    assert html.count("<table") == html.count("</table>")


def test_text_is_escaped(shown):
    assert "a &lt; b" in shown["Report"]._repr_html_()


def test_nothing_seen_is_shown_too():
    assert "rows 0" in repr(trueup.Monitor(3).status())
    assert "–" in trueup.Predictions(np.zeros((0, 3)), np.zeros(0, dtype=int))._repr_html_()


def test_a_name_that_is_not_there_suggests_the_nearest():
    with pytest.raises(KeyError, match="no method is called 'temprature'; did you mean 'temperature'"):
        trueup.METHODS["temprature"]
    with pytest.raises(KeyError, match="there are: accuracy"):
        trueup.METRICS["zzz"]
    with pytest.raises(KeyError):
        trueup.METRICS[3]


def test_help_of_a_method_is_its_docstring():
    assert trueup.METHODS["temperature"].__doc__.startswith("Temperature scaling:")


def packages():
    names = [name for _, name, is_package in pkgutil.iter_modules(trueup.__path__) if is_package]
    return ["trueup", *(f"trueup.{name}" for name in names if name not in ("cli", "core", "serve"))]


def _bound(node):
    """The names that a node of the syntax tree binds itself."""
    if isinstance(node, ast.ImportFrom | ast.Import):
        return {alias.asname or alias.name for alias in node.names}
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign):
        return {name.id for target in node.targets for name in ast.walk(target) if isinstance(name, ast.Name)}
    return {node.target.id} if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) else set()


@pytest.mark.parametrize("name", packages())
def test_a_checker_sees_every_public_name_and_no_others(name):
    """A module's `__getattr__` would let a misspelt name pass; what it finds is imported for checkers instead."""
    module = importlib.import_module(name)
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    plain = [node for node in tree.body if not isinstance(node, ast.If)]  # not what is hidden from checkers
    assert "__getattr__" not in {each for node in plain for each in _bound(node)}
    bound = {each for node in ast.walk(tree) for each in _bound(node)}
    assert set(getattr(module, "__all__", ())) <= bound


@pytest.mark.parametrize("name", packages()[1:])
def test_no_public_name_is_hidden_by_a_file_of_that_name(name):
    """Whoever imports the file binds its name in the package, in place of what `__getattr__` would find."""
    module = importlib.import_module(name)
    files = {file for _, file, _ in pkgutil.iter_modules(module.__path__)}
    for public in files & set(getattr(module, "__all__", ())):
        assert not isinstance(vars(module).get(public), ModuleType | None), public


def test_every_calibrator_is_public():
    assert set(CALIBRATORS) <= set(trueup.calibrators.__all__)
