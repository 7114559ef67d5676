"""Pages that are written from the code say what the code says."""

import runpy
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def test_the_catalogue_of_methods_is_up_to_date():
    written = runpy.run_path(str(DOCS / "catalogue.py"))["page"]()
    assert (DOCS / "catalogue.md").read_text() == written, "run: python docs/catalogue.py"


def test_the_catalogue_says_of_every_method_when_not_to_use_it():
    sections = (DOCS / "catalogue.md").read_text().split("\n## ")[1:]
    silent = [s.split("\n")[0] for s in sections if "When not to use it" not in s]
    assert silent == ["`auto`"]
