"""A hook of mkdocs that makes the reference: one page per public name, listed on the page of its package.

A page `reference/PACKAGE.md` lists names in the order of their importance, as items like "- `trueup.evaluate`". The
hook turns each item into a row of a table and adds a page for it. Public names that the page does not list follow
under the heading "More".
"""

from __future__ import annotations

import inspect
import re
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from mkdocs.structure.files import Files

REFERENCE = Path(__file__).parent / "reference"
ITEMS = re.compile(r"(?:^- `trueup[\w.]*`\n)+", re.MULTILINE)
ITEM = re.compile(r"^- `(trueup[\w.]*)`$", re.MULTILINE)
PACKAGES = re.compile(r"^packages: (.*)$", re.MULTILINE)
PAPERS = (
    (re.compile(r"\barXiv:(\d{4}\.\d{4,5})"), r"[arXiv:\1](https://arxiv.org/abs/\1)"),
    (re.compile(r"\bdoi:(10\.\d+/[^\s,;]*[^\s,;.])"), r"[doi:\1](https://doi.org/\1)"),
)
"""References in docstrings, and the links that they become."""


class Entry(NamedTuple):
    """One public name on the page of its package."""

    path: str
    """Dotted path, such as trueup.metrics.ece."""
    group: tuple[str, ...]
    """Paths of the names under the same heading."""


def name_of(path: str) -> str:
    """Return the last part of a dotted path."""
    return path.rpartition(".")[2]


def file_of(path: str) -> str:
    """Return the file name of a page; `Brier` and `brier` stay apart where capitals do not count."""
    name = name_of(path)
    return f"{name}.md" if name.islower() else f"class-{name}.md"


def link_papers(text: str) -> str:
    """Turn arXiv numbers and DOIs into links."""
    for pattern, link in PAPERS:
        text = pattern.sub(link, text)
    return text


def packages_of(page: Path) -> list[str]:
    """Return the packages that a page documents."""
    stated = PACKAGES.search(page.read_text())
    return stated[1].split() if stated else []


def public_names(package: str) -> list[str]:
    """Return the paths of the public names of a package, or of a module."""
    module = import_module(package)
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == package
    ]
    return [f"{package}.{name}" for name in names if not inspect.ismodule(getattr(module, name))]


def complete(page: Path) -> str:
    """Return the text of a page, with the public names that it does not list under "More"."""
    text = page.read_text()
    listed = {name_of(path) for path in ITEM.findall(text)}
    more = [path for package in packages_of(page) for path in public_names(package)]
    items = "".join(f"- `{path}`\n" for path in more if name_of(path) not in listed)
    return f"{text}\n## More\n\n{items}" if items else text


def entries(page: Path) -> Iterator[Entry]:
    """List the names of a page in order."""
    for items in ITEMS.findall(complete(page)):
        group = tuple(ITEM.findall(items))
        yield from (Entry(path, group) for path in group)


def summary(path: str) -> str:
    """Return the first sentence of a name's docstring."""
    module, _, name = path.rpartition(".")
    value = getattr(import_module(module), name)
    if not (inspect.isclass(value) or inspect.isroutine(value)):
        return ""
    first = (inspect.getdoc(value) or "").split("\n\n")[0]
    return link_papers(" ".join(first.split()).replace("|", "&#124;"))


def on_config(config: Any) -> None:
    """Put the pages of names into the menu, below the page of their package."""
    for section in config.nav:
        for i, item in enumerate(section.get("Reference", [])):
            [(title, target)] = item.items() if isinstance(item, dict) else [(None, None)]
            page = REFERENCE / Path(str(target)).name
            if str(target).startswith("reference/") and packages_of(page):
                names = [{name_of(entry.path): target_of(entry, page)} for entry in entries(page)]
                section["Reference"][i] = {title: [target, *names]}


def on_files(files: Files, config: Any) -> None:
    """Add one page per name."""
    from mkdocs.structure.files import File  # the tests read this module without mkdocs

    formulas = tomllib.loads((REFERENCE / "formulas.toml").read_text())
    for page in sorted(REFERENCE.glob("*.md")):
        for entry in entries(page):
            content = page_of(entry, formulas.get(name_of(entry.path), ""))
            files.append(File.generated(config, target_of(entry, page), content=content))


def target_of(entry: Entry, page: Path) -> str:
    """Return the source path of the page of one name."""
    return f"reference/{page.stem}/{file_of(entry.path)}"


def page_of(entry: Entry, formula: str) -> str:
    """Return the page of one name."""
    options = "    options:\n      show_root_heading: false\n      show_root_toc_entry: false\n      heading_level: 2"
    parts = [f"# {name_of(entry.path)}", f"::: {entry.path}\n{options}"]
    if formula:
        parts.insert(1, f"$$\n{formula}\n$$")
    if others := [path for path in entry.group if path != entry.path]:
        parts.append("**See also** " + ", ".join(f"[`{name_of(path)}`]({file_of(path)})" for path in others))
    return "\n\n".join(parts)


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Turn lists of names into tables, and references into links."""
    source = REFERENCE / Path(page.file.src_uri).name
    if page.file.src_uri == f"reference/{source.name}" and packages_of(source):
        text = complete(source)
        text = PACKAGES.sub("", text)
        return ITEMS.sub(lambda items: table(ITEM.findall(items[0]), source.stem), text)
    return markdown


def table(paths: list[str], folder: str) -> str:
    """Return a table with one row per name."""
    rows = [f"| [`{path.removeprefix('trueup.')}`]({folder}/{file_of(path)}) | {summary(path)} |" for path in paths]
    return "\n".join(["| name | what it does |", "|---|---|", *rows]) + "\n"
