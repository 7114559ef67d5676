"""The page of what was tried lists every trial there is."""

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRIALS = sorted((ROOT / "tests" / "hard").glob("test_*.py"))


@pytest.mark.parametrize("file", TRIALS, ids=lambda file: file.stem)
def test_every_trial_is_on_the_page(file):
    page = (ROOT / "docs" / "reliability.md").read_text("utf-8")
    functions = [node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
    tried = [ast.get_docstring(node) or node.name for node in functions if node.name.startswith("test_")]
    assert [said for said in tried if " ".join(said.split()) not in page] == [], "run: python docs/reliability.py"


def test_tables_are_of_what_was_told():
    module = runpy.run_path(str(ROOT / "docs" / "reliability.py"))
    well = module["Trial"]("A | B", "faults", "3 saves", 1.25)
    skipped = module["Trial"]("C", outcome="skipped", reasons=["no mount"])
    page = module["page"]([well, skipped], 7)
    assert "| A \\| B | 3 saves | 1.2 |" in page
    assert "| C | no mount |" in page
    assert "--effort 7" in page
    assert "## Threads" not in page, "a table of nothing"
