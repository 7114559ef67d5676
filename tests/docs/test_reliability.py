"""The page of what was tried lists every trial there is."""

import ast
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRIALS = sorted((ROOT / "tests" / "hard").glob("test_*.py"))


@pytest.mark.parametrize("file", TRIALS, ids=lambda file: file.stem)
def test_every_trial_is_on_the_page(file):
    page = (ROOT / "docs" / "reliability.csv").read_text("utf-8").replace('""', '"')
    functions = [node for node in ast.parse(file.read_text("utf-8")).body if isinstance(node, ast.FunctionDef)]
    tried = [ast.get_docstring(node) or node.name for node in functions if node.name.startswith("test_")]
    assert [said for said in tried if " ".join(said.split()) not in page] == [], "run: python docs/reliability.py"


def test_tables_are_of_what_was_told():
    module = runpy.run_path(str(ROOT / "docs" / "reliability.py"))
    well = module["Trial"]("A | B", "faults", "3 saves", 1.25)
    short = module["Trial"]("D", "faults", "4 saves", 2.0)
    skipped = module["Trial"]("C", outcome="skipped", reasons=["no mount"])
    trials = {
        "tests/hard/a.py::test_full_disk": well,
        "tests/hard/a.py::test_d": short,
        "tests/hard/a.py::test_c": skipped,
    }
    page = module["page"](trials, 7)
    assert "| A &#124; B | 3 saves |" in page
    assert "4 saves" not in page
    assert "fails during writing, sending or waiting. | 2 | 3 |" in page
    assert "Skipped in this run: C (no mount)" in page
    assert "--effort 7" in page
    assert "Eight threads" not in page, "a row of nothing"
    rows = module["cells"](list(trials.values()))
    assert rows[1] == ["Disks, permissions, kills, clocks", "A | B", "passed", "3 saves", "1.2"]
    assert rows[3] == ["", "C", "skipped", "no mount", "0.0"]


def test_the_page_is_short():
    assert len((ROOT / "docs" / "reliability.md").read_text("utf-8").split()) <= 1500
