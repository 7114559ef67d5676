"""Pages say what the code says, and their commands run."""

import re
import runpy
import shlex
from pathlib import Path

import numpy as np
import pytest

import trueup

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]


def commands(page):
    """The lines of a page's shell blocks that call this package's own command."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ trueup ")]


def test_the_catalogue_of_methods_is_up_to_date():
    written = runpy.run_path(str(DOCS / "catalogue.py"))["page"]()
    assert (DOCS / "catalogue.md").read_text() == written, "run: python docs/catalogue.py"


def test_the_catalogue_says_of_every_method_when_not_to_use_it():
    sections = (DOCS / "catalogue.md").read_text().split("\n## ")[1:]
    silent = [s.split("\n")[0] for s in sections if "When not to use it" not in s]
    assert silent == ["`auto`"]


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    assert [page.name for page in DOCS.glob("*.md") if page.name not in menu] == []


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_its_commands_run(page, tmp_path, monkeypatch):
    pytest.importorskip("typer", reason="the command line's libraries are not installed")
    from typer.testing import CliRunner

    from trueup.cli import app

    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    z = 3 * rng.normal(size=(600, 3))
    y = (z / 2 + rng.gumbel(size=z.shape)).argmax(axis=1)
    trueup.save("val.npz", (z[:300], y[:300]))
    trueup.save("test.npz", (z[300:], y[300:]))
    np.savez("both.npz", val_logits=z[:300], val_labels=y[:300], test_logits=z[300:], test_labels=y[300:])
    np.savez("probs.npz", probs=np.exp(z) / np.exp(z).sum(axis=1, keepdims=True), labels=y)
    np.savez("odd.npz", scores=z, truth=y)
    for command in commands(page):
        result = CliRunner().invoke(app, shlex.split(command)[1:])
        assert result.exit_code == 0, f"{command}\n{result.output}"
