"""What a notebook and a checker show: short reprs, HTML, names that are found or doubted."""

import importlib
import pkgutil
from types import ModuleType

import numpy as np
import pytest
import torch

import trueup
from trueup._core.registry import CALIBRATORS
from trueup.reports import Report, report

RNG = np.random.default_rng(0)
LOGITS = RNG.normal(size=(60, 3)) * 3
LABELS = (LOGITS / 2 + RNG.gumbel(size=LOGITS.shape)).argmax(axis=1)


@pytest.fixture(scope="module")
def shown():
    monitor = trueup.Monitor(3)
    monitor.update(LOGITS, LABELS)
    result = report((LOGITS, LABELS), methods=["temperature"], progress=False).audit
    return {
        "Predictions": trueup.Predictions(LOGITS, LABELS),
        "Predictions of torch": trueup.Predictions(torch.tensor(LOGITS), torch.tensor(LABELS)),
        "Tally": trueup.metrics.Tally.of(LOGITS, LABELS),
        "Status": monitor.status(),
        "Monitor": monitor,
        "Audit": result,
        "Report": Report(result, title="a < b"),
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
    scores = trueup.evaluate(LOGITS, LABELS, metrics=["ece", "nll"])
    with pytest.raises(KeyError, match="no metric of this table is called 'ecce'; did you mean 'ece'"):
        scores["ecce"]
    with pytest.raises(KeyError, match="no method is called 'raw'; there are: network"):
        scores["raw", "ece"]


def test_help_of_a_method_is_its_docstring():
    assert trueup.METHODS["temperature"].__doc__.startswith("Minimise the negative log-likelihood")


def packages():
    names = [name for _, name, is_package in pkgutil.iter_modules(trueup.__path__) if is_package]
    return ["trueup", *(f"trueup.{name}" for name in names if name not in ("_core", "cli", "serve"))]


@pytest.mark.parametrize("name", packages()[1:])
def test_no_public_name_is_hidden_by_a_file_of_that_name(name):
    """Importing the file must not bind its name in the package instead of the public one."""
    module = importlib.import_module(name)
    files = {file for _, file, _ in pkgutil.iter_modules(module.__path__)}
    for file in files:
        if name != "trueup.integrations":
            importlib.import_module(f"{name}.{file}")
    for public in files & set(getattr(module, "__all__", ())):
        if name != "trueup.integrations":  # whose public names are its files
            assert not isinstance(getattr(module, public), ModuleType), public


def test_every_calibrator_is_public():
    assert set(CALIBRATORS) <= set(trueup.calibrators.__all__)
