"""Pages say what the code says, and their commands run."""

import json
import re
import runpy
import shlex
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import trueup

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MANUAL = sorted(DOCS.rglob("*.md"))
PAGES = [ROOT / "README.md", *MANUAL]
LARGEST_PICTURE = 200_000


def commands(page):
    """The lines of a page's shell blocks that call this package's own command."""
    blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [line[2:] for block in blocks for line in block.splitlines() if line.startswith("$ trueup ")]


@pytest.fixture(scope="module")
def catalogue():
    """The page of all methods, as mkdocs builds it."""
    hook = runpy.run_path(str(DOCS / "catalogue.py"))["on_page_markdown"]
    page = SimpleNamespace(file=SimpleNamespace(src_uri="catalogue.md"))
    other = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"))
    assert hook("# Five minutes", page=other, config={}, files=[]) == "# Five minutes"
    return hook((DOCS / "catalogue.md").read_text(), page=page, config={}, files=[])


@pytest.fixture(scope="module")
def reference():
    """The module that makes the pages of the reference."""
    return SimpleNamespace(**runpy.run_path(str(DOCS / "reference_pages.py")))


def test_the_table_of_methods_has_every_method():
    table = (DOCS / "methods.md").read_text().split("```python")[0]
    assert set(re.findall(r"`(\w+)`", table)) == set(trueup.METHODS)


def test_the_catalogue_has_every_method_once(catalogue):
    headings = re.findall(r"^## (.*)$", catalogue, re.MULTILINE)
    assert [name.strip("`") for heading in headings for name in heading.split(", ")] == list(trueup.METHODS)


def test_the_catalogue_says_of_every_method_when_not_to_use_it(catalogue):
    sections = catalogue.split("\n## ")[1:]
    silent = [s.split("\n")[0] for s in sections if "When not to use it" not in s]
    assert silent == ["`auto`"]


def test_the_reference_has_every_public_package():
    pages = [DOCS / "reference.md", *sorted((DOCS / "reference").glob("*.md"))]
    text = "\n".join(page.read_text() for page in pages)
    targets = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    targets += [name for names in re.findall(r"^packages: (.*)$", text, re.MULTILINE) for name in names.split()]
    assert len(targets) == len(set(targets))
    for target in targets:
        if target.removeprefix("trueup.integrations.") not in ("evaluate", "mlflow", "prometheus", "torchmetrics"):
            import_module(target)
    packages = {path.parent.name for path in (ROOT / "src" / "trueup").glob("*/__init__.py")}
    private = {"_core", "cli", "demo", "serve"}
    documented = {target.split(".")[1] for target in targets if target.startswith("trueup.")}
    documented = {target.split(".")[1] for target in targets if target.startswith("trueup.")}
    assert documented == packages - private | {"convert", "examples"}


def test_the_reference_has_a_page_for_every_public_name(reference):
    for page in sorted((DOCS / "reference").glob("*.md")):
        entries = list(reference.entries(page))
        files = [reference.file_of(entry.path).lower() for entry in entries]
        assert len(files) == len(set(files)), page  # some systems do not tell capitals from small letters
        listed = {reference.name_of(entry.path) for entry in entries}
        for package in reference.packages_of(page):
            assert {reference.name_of(path) for path in reference.public_names(package)} <= listed
        for entry in entries:
            module, _, name = entry.path.rpartition(".")
            assert getattr(import_module(module), name) is not None, entry.path


def test_formulas_belong_to_public_names(reference):
    formulas = tomllib.loads((DOCS / "reference" / "formulas.toml").read_text())
    pages = (DOCS / "reference").glob("*.md")
    names = {reference.name_of(entry.path) for page in pages for entry in reference.entries(page)}
    assert set(formulas) <= names


def test_references_in_docstrings_become_links(reference):
    linked = reference.link_papers("Guo et al. (2017), arXiv:1706.04599; doi:10.1175/WAF993.1.")
    assert "[arXiv:1706.04599](https://arxiv.org/abs/1706.04599)" in linked
    assert linked.endswith("[doi:10.1175/WAF993.1](https://doi.org/10.1175/WAF993.1).")


def test_the_readme_fits_on_a_few_screens():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= 900
    assert "<BLANKLINE>" not in text


def test_the_front_page_is_the_readme():
    hook = runpy.run_path(str(DOCS / "front_page.py"))["on_page_markdown"]
    text = hook("", page=SimpleNamespace(file=SimpleNamespace(src_uri="index.md")))
    assert text.startswith("# trueup")
    assert all((DOCS / target).is_file() for target in re.findall(r"\]\(([\w./-]+)", text))


def test_every_page_is_in_the_menu():
    menu = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in MANUAL if f": {page.relative_to(DOCS)}\n" not in menu] == []


def test_names_are_those_of_the_code():
    for page in PAGES:
        text = page.read_text()
        for name in set(re.findall(r"(?<![\w./-])trueup(?:\.[A-Za-z_]\w*)+(?!\.?\w)", text)):
            parts = name.split(".")[1:]
            found = trueup
            for depth, part in enumerate(parts):
                try:
                    module = ".".join(["trueup", *parts[: depth + 1]])
                    found = getattr(found, part) if hasattr(found, part) else import_module(module)
                except ImportError as error:
                    if " needs " not in str(error):
                        raise
                    break  # the other library is not installed
        methods = set(re.findall(r"METHODS\[\"(\w+)\"\]", text))
        assert methods <= set(trueup.METHODS), page


def test_pictures_are_there_and_small():
    for page in PAGES:
        text = page.read_text()
        shown = {(page.parent / target).resolve() for target in re.findall(r"!\[[^\]]*\]\((\S+)\)", text)}
        assert [path for path in shown if not path.is_file() or path.stat().st_size > LARGEST_PICTURE] == [], page
        assert {DOCS / "images" / name for name in re.findall(r'savefig\("(\S+\.png)"', text)} <= shown, page


def test_links_lead_to_pages_and_headings():
    for page in PAGES:
        for target, heading in re.findall(r"\]\(([\w./-]*\.md)(?:#([\w-]+))?\)", page.read_text()):
            linked = page.parent / target
            assert linked.is_file(), f"{page}: {target}"
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", title).strip().lower().replace(" ", "-") for title in titles]
            assert not heading or heading in slugs, f"{page}: {target}#{heading}"


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=lambda page: page.name)
def test_its_commands_run(page, tmp_path, monkeypatch):
    pytest.importorskip("typer", reason="the command line's libraries are not installed")
    from typer.testing import CliRunner

    from trueup.cli import app
    from trueup.io import save_columns

    monkeypatch.chdir(tmp_path)
    for split in ("val", "test"):  # as `trueup demo` leaves them: tests/demo
        Path("demo").mkdir(exist_ok=True)
        trueup.save(trueup.load(ROOT / "src/trueup/demo/predictions.npz", split=split), f"demo/{split}.npz")
    rng = np.random.default_rng(0)
    z = 3 * rng.normal(size=(600, 3))
    y = (z / 2 + rng.gumbel(size=z.shape)).argmax(axis=1)
    trueup.save((z[:300], y[:300]), "val.npz")
    rows = "\n".join(f"0.{5 + i % 5},{i % 3 % 2},{'ab'[i % 2]}" for i in range(300))
    Path("answers.csv").write_text(f"stated,right,category\n{rows}\n")
    samples = [
        {"doc": {"category": "law"}, "target": str(i % 2), "filtered_resps": [["-1.5", "False"], ["-0.5", "True"]]}
        for i in range(40)
    ]
    Path("samples_arc_challenge.jsonl").write_text("\n".join(map(json.dumps, samples)))
    trueup.save((z[300:], y[300:]), "test.npz")
    np.savez("both.npz", val_logits=z[:300], val_labels=y[:300], test_logits=z[300:], test_labels=y[300:])
    np.savez("probs.npz", probs=np.exp(z) / np.exp(z).sum(axis=1, keepdims=True), labels=y)
    np.savez("odd.npz", scores=z, truth=y)
    for name in ("demand.csv", "later.csv"):
        mean, sold = rng.normal(size=200), 3 * rng.normal(size=200)
        columns = {"mu": mean, "sigma": np.ones(200), "sold": mean + sold}
        save_columns(name, columns | {"q05": mean - 1.6, "q50": mean, "q95": mean + 1.6})
    np.savez("pixels.npz", logits=z.reshape(30, 5, 4, 3).transpose(0, 3, 1, 2), labels=y.reshape(30, 5, 4))
    visits = "\n".join(
        f"{a},{b},{label % 2},p{i // 20}" for i, (a, b, label) in enumerate(zip(*z.T[:2], y, strict=True))
    )
    Path("visits.csv").write_text(f"logit_0,logit_1,label,patient\n{visits}\n")
    for command in commands(page):
        if command == "trueup demo":
            continue
        result = CliRunner().invoke(app, shlex.split(command)[1:])
        assert result.exit_code == 0, f"{command}\n{result.output}"
