"""Measured pages are short, say which commit they were made from, and are not older than the last release."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
WORDS = 1500
"""Largest number of words on a page."""
ORIGIN = re.compile(r"\bMade from trueup (\d+(?:\.\d+)+)(?:, commit ([0-9a-f]{7,40}))?")
MEASURED = {
    "benchmarks.md": "make bench",
    "choice.md": "make bench-choice",
    "coverage.md": "make bench-coverage",
    "versions.md": "make bench-versions",
    "repair.md": "make bench-repair",
    "reliability.md": "make reliability",
    **dict.fromkeys((f"papers/{page.name}" for page in (DOCS / "papers").glob("*.md")), "make studies"),
}
"""Pages that a measurement writes, and its command."""


def number(version):
    """A version as numbers that can be ordered."""
    return tuple(map(int, version.split(".")))


def last_release():
    """The latest version with a section in the changelog; neither git nor tags are needed."""
    return re.findall(r"^## \[(\d[\d.]*)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0]


@pytest.mark.parametrize("page", MEASURED)
def test_a_measured_page_is_not_older_than_the_last_release(page):
    found = ORIGIN.search((DOCS / page).read_text())
    assert found, "the page does not say what it was made from"
    version, commit = found.groups()
    assert commit, "the page does not name its commit"
    assert number(version) >= number(last_release()), MEASURED[page]


def test_versions_are_ordered_as_numbers():
    assert number("0.10.0") > number("0.9.1") > number("0.9")
    assert number(last_release()) >= (0, 2, 0)


def test_no_page_is_longer_than_fifteen_hundred_words():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.rglob("*.md")]
    assert {page.name: words for page in pages if (words := len(page.read_text().split())) > WORDS} == {}
