"""What a notebook and a checker show: short reprs, HTML, names that are found or doubted."""

import ast
import importlib
import pkgutil
from pathlib import Path

import numpy as np
import pytest
import torch

import trueup
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
    return ["trueup", *(f"trueup.{name}" for name in names if name not in ("cli", "core", "serve", "calibrators"))]


@pytest.mark.parametrize("name", packages())
def test_a_checker_sees_every_public_name_and_no_others(name):
    """A module's `__getattr__` would let a misspelt name pass; what it finds is imported for checkers instead."""
    module = importlib.import_module(name)
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    assert not [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__getattr__"]
    bound = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom | ast.Import):
            bound |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            bound.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound.add(node.id)
    assert set(getattr(module, "__all__", ())) <= bound
