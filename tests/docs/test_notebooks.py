"""The notebooks are those of the tutorials, and run."""

import json
import runpy
from pathlib import Path

import pytest

import trueup
from trueup.demo.walkthrough import STORED

DOCS = Path(__file__).parents[2] / "docs"
MODULE = runpy.run_path(str(DOCS / "notebooks.py"))


def cells(name):
    text = (DOCS / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")
    return [(cell["cell_type"], "".join(cell["source"])) for cell in json.loads(text)["cells"]]


@pytest.mark.parametrize("name", MODULE["PAGES"])
def test_a_notebook_is_that_of_its_page(name):
    pytest.importorskip("jupytext")
    made = [(cell.cell_type, cell.source) for cell in MODULE["notebook"](name).cells]
    assert cells(name) == made, "run: python docs/notebooks.py"


@pytest.mark.filterwarnings("ignore:.*exact zeros among")
@pytest.mark.parametrize("name", MODULE["PAGES"])
def test_a_notebook_runs(name, tmp_path, monkeypatch):
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    values = {}
    code = [source for kind, source in cells(name) if kind == "code"]
    for source in code:
        if source == "!trueup demo":  # as it leaves them: tests/demo
            Path("demo").mkdir()
            for split in ("val", "test"):
                trueup.save(trueup.load(STORED, split=split), f"demo/{split}.npz")
        else:
            exec(compile(source, name, "exec"), values)
    assert len(code) >= 4
    assert values["figure"].axes


def test_code_has_no_prompts_and_pictures_are_shown():
    source = '>>> x = 1\n>>> for i in range(2):\n...     print(i)\n0\n1\n>>> figure.savefig("a.png", dpi=110)\n\n'
    block = MODULE["BLOCK"].search(f"```python\n{source}```")
    assert MODULE["cell"](block) == "```python\nx = 1\nfor i in range(2):\n    print(i)\nfigure\n```"
