"""The pages about papers contain only numbers of stored tables, and are what their templates make of these tables."""

import csv
import importlib.util
import re
import shutil
from pathlib import Path

import pytest

from trueup_studies import STUDIES, Options, Store
from trueup_studies import run as run_study
from trueup_studies.study_page import save_page

DOCS = Path(__file__).parents[2] / "docs"
TABLES, PAPERS = DOCS / "studies", DOCS / "papers"
RUNS = sorted(path.name for path in TABLES.iterdir() if path.is_dir())
PAGES = sorted(path.name.removesuffix(".j2") for path in PAPERS.glob("*.md.j2"))
ALLOWED = re.compile(
    r"\((?:\w+,? )?20\d\d\)|\((?:Nadeau and Bengio, 2003|Holm, 1979)\)|The level is 5 %"
    r"|CIFAR-10+|SST-5|ResNet-(?:20|32)|shortened to 60 steps|Tables? \d(?:–\d)?|§\d\.\d"
    r"|Figure \d(?:\(\w\))?|Figures 2 and 3|equation 9|95 %|τ = 1"
    r"|20 newsgroups|`digits-30`|(?:64|400) tokens|of 400|(?:32|128) channels|of 128|(?:16|100) epochs|of 100"
    r"|128 images of 28 × 28|median of 100"
    r"|[(]u[)]²|\)²|\(1 − α\)|L1 norm|newsgroups20|--seeds [18]|-j 1|\.svg|\.h5|class 1"
)
"""Numbers of a template that are no measurements: years, names, places in a paper, options of a command."""


@pytest.fixture(scope="module")
def studies():
    spec = importlib.util.spec_from_file_location("studies_page", DOCS / "studies.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pages_are_what_the_templates_make_of_the_tables(studies):
    texts = studies.assemble()
    assert sorted(texts) == PAGES
    for name, text in texts.items():
        assert (PAPERS / name).read_text("utf-8") == text, name


@pytest.mark.parametrize("page", PAGES)
def test_no_number_is_typed_into_a_template(page):
    text = re.sub(r"\{%.*?%\}|\{\{.*?\}\}", "", (PAPERS / f"{page}.j2").read_text("utf-8"), flags=re.DOTALL)
    assert not re.findall(r".{20}\d.{20}", ALLOWED.sub("", text))


@pytest.mark.parametrize("page", [page for page in PAGES if page != "index.md"])
def test_a_page_about_a_paper_is_short_and_has_figures(page):
    text = (PAPERS / page).read_text("utf-8")
    assert len(text.split()) <= 1200
    images = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)
    assert len(images) >= 2
    for image in images:
        assert "<svg" in (PAPERS / image).read_text("utf-8")
    answers = text.index("## Does it help me?")
    assert answers < 400


def test_a_number_is_the_one_of_the_table(studies, tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "TABLES", tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "methods.csv").write_text("group,method,figure,mean,std\ndigits,raw,NLL,0.1234,0.01\n")
    assert studies.value("run", "methods", "digits", "raw", "NLL", digits=3, spread=True) == "0.123 ± 0.010"
    with pytest.raises(ValueError, match="unpack"):
        studies.value("run", "methods", "digits", "other", "NLL")


def test_claims_show_the_number_of_one_data_set_and_the_counts_of_several(studies, tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "TABLES", tmp_path)
    (tmp_path / "run").mkdir()
    lines = ["held", "held", "not distinguishable"]
    with (tmp_path / "run" / "claims.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["source", "claim", "data", "mean", "verdict"])
        writer.writerows(["Table 1", "a beats b", f"set {i}", 0.25, verdict] for i, verdict in enumerate(lines))
    columns = [("one", [("run", "set 2")]), ("all", [("run", "set")]), ("none", [("run", "other")])]
    table = studies.claims(columns, [("a wins", "Table 1: a beats b", 2)])
    assert table.splitlines()[-1] == "| a wins | **open** (+0.25) | 2 held, 1 open | – |"


@pytest.mark.parametrize(
    ("page", "study"),
    [("neural-clamping.md", "neural-clamping"), ("rethinking-calibration.md", "rethinking"), ("clue.md", "clue")],
)
def test_a_page_shows_the_main_claims_of_its_paper(page, study):
    known = {f"{claim.source}: {claim.text}" for claim in STUDIES[study].claims() if claim.main}
    shown = re.findall(r'\("[^"]+", "([^"]+: [^"]+)", \d\)', (PAPERS / f"{page}.j2").read_text("utf-8"))
    assert sorted(shown) == sorted(known)
    assert 8 <= len(known) <= 12


def test_stored_claims_follow_from_the_stored_rows(studies, tmp_path, monkeypatch):
    before = (TABLES / "clue-diabetes" / "claims.csv").read_text("utf-8")
    shutil.copytree(TABLES / "clue-diabetes", tmp_path / "clue-diabetes")
    (tmp_path / "clue-diabetes" / "claims.csv").unlink()
    monkeypatch.setattr(studies, "TABLES", tmp_path)
    studies.judge("clue-diabetes")
    assert (tmp_path / "clue-diabetes" / "claims.csv").read_text("utf-8") == before


def test_figures_are_drawn_from_the_tables(studies, tmp_path):
    pytest.importorskip("matplotlib", reason="figures need matplotlib")
    drawn = studies.draw_figures(tmp_path / "figures")
    used = {
        image for page in PAGES for image in re.findall(r"papers/([\w-]+\.svg)", (PAPERS / page).read_text("utf-8"))
    }
    assert {path.name for path in drawn} == used


def test_tables_are_taken(studies, tmp_path, monkeypatch):
    source, target = TABLES / RUNS[0], tmp_path / "studies"
    (target / RUNS[0]).mkdir(parents=True)
    (target / RUNS[0] / "before.csv").touch()  # of an earlier run, which is replaced
    monkeypatch.setattr(studies, "TABLES", target)
    studies.take(RUNS[0], source)
    assert {path.name for path in (target / RUNS[0]).iterdir()} == {path.name for path in source.glob("*.csv")}
    with pytest.raises(SystemExit, match="no tables"):
        studies.take(RUNS[0], tmp_path)
    assert any((target / RUNS[0]).iterdir())


def test_taken_rows_can_be_restored(studies, tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "TABLES", tmp_path / "studies")
    study, options = STUDIES["post-hoc"], Options(data="overconfident", seeds=1, methods=("identity", "temperature"))
    first = Store(tmp_path / "post-hoc.sqlite")
    run_study(study, first, options=options, progress=False)
    save_page(study, first, options, tmp_path / "post-hoc")
    studies.take("some", tmp_path / "post-hoc")
    studies.restore("some", tmp_path / "elsewhere" / "post-hoc.sqlite")
    second = Store(tmp_path / "elsewhere" / "post-hoc.sqlite")
    assert second.known("post-hoc") == first.known("post-hoc")
    assert run_study(study, second, options=options, progress=False).finished == 0
    monkeypatch.setattr(studies, "LARGEST", 10)
    studies.take("some", tmp_path / "post-hoc")
    assert not (tmp_path / "studies" / "some" / studies.ROWS).exists()


def test_no_stored_file_is_large(studies):
    assert max(path.stat().st_size for path in TABLES.rglob("*") if path.is_file()) <= studies.LARGEST
