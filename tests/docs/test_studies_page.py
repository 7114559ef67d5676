"""Every number of docs/studies.md is one that a study wrote into a table, and the page is what these tables make."""

import csv
import importlib.util
import re
from pathlib import Path

import pytest

from trueup_studies import STUDIES, Options, Store
from trueup_studies import run as run_study
from trueup_studies.study_page import save_page

DOCS = Path(__file__).parents[2] / "docs"
TABLES = DOCS / "studies"
NUMBER = re.compile(r"[+−-]?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")
DECIMAL = re.compile(r"[+-]?\d+\.\d+(?:e[+-]?\d+)?")
RUNS = sorted(path.name for path in TABLES.iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def studies():
    spec = importlib.util.spec_from_file_location("studies_page", DOCS / "studies.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read(path):
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def floats(path):
    cells = (cell for line in read(path) for cell in line.values() if cell)
    return [float(cell) for cell in cells if re.fullmatch(r"[+-]?\d[\d.]*(e[+-]?\d+)?", cell)]


def is_rounding(text, numbers):
    digits = len(text.partition(".")[2])
    return any(f"{number:.{digits}f}" in (text.removeprefix("+"), f"-{text}") for number in numbers)


def test_the_page_is_assembled_from_the_tables(studies):
    assert studies.PAGE.read_text("utf-8") == studies.assemble()


def test_no_number_is_typed_into_the_words(studies):
    allowed = re.compile(r"\(20\d\d\)|CIFAR-10+|SST-5|Tables? \d(–\d)?|95 %")
    for section in studies.SECTIONS:
        for words in (section.title, section.words, *(text for run in section.runs for text in (run.title, run.words))):
            assert not re.search(r"\d", allowed.sub("", words)), words


@pytest.mark.parametrize("run", RUNS)
def test_printed_tables_have_the_numbers_of_the_files(run):
    """A cell of a Markdown table is the mean and the standard deviation that the CSV has in all digits."""
    seen = 0
    for path in sorted((TABLES / run).glob("*.md")):
        if path.stem == "claims":
            continue
        lines = read(path.with_suffix(".csv"))
        entries = {(line["group"], *list(line.values())[1:3]): line for line in lines}
        group, headings = "", None
        for line in path.read_text("utf-8").splitlines():
            cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
            if not line.startswith("| ") or set(line) <= set("|:- "):
                continue
            if headings is None:
                headings = cells
            elif cells[0].startswith("**") and not any(cells[1:]):
                group = cells[0].strip("*")
            else:
                name = cells[0]
                for heading, cell in zip(headings[1:], cells[1:], strict=True):
                    printed = list(DECIMAL.findall(cell))
                    if printed and heading != "runs":
                        entry = entries[group, name, heading]
                        wanted = [entry["mean"], *([entry["std"]] if "±" in cell else [])]
                        assert len(printed) == len(wanted), (path, line)
                        for text, number in zip(printed, wanted, strict=True):
                            assert is_rounding(text, [float(number)]), (path, line, number)
                            seen += 1
    assert seen > 20


def blocks(page, studies):
    """Folder of the tables, or None, → the parts of the page that stand between headings of sections and runs."""
    names = {(section.title, run.title): run.name for section in studies.SECTIONS for run in section.runs}
    for section in re.split(r"^## ", page, flags=re.MULTILINE):
        title = section.partition("\n")[0]
        first, *parts = re.split(r"^### ", section, flags=re.MULTILINE)
        yield None, first
        for part in parts:
            yield names.get((title, part.partition("\n")[0])), part


def unknown_numbers(page, studies):
    """Numbers of the page that are in no file: neither as they are written nor rounded."""
    costs = TABLES / studies.COSTS
    template = {"95"}  # per cent, of the intervals
    for run, text in blocks(page, studies):
        files = [costs, *TABLES.glob("*/run.csv")] if run is None else sorted((TABLES / run).glob("*.*[dv]"))
        words = {*template, *(n for path in files for n in NUMBER.findall(path.read_text("utf-8")))}
        numbers = [number for path in files if path.suffix == ".csv" for number in floats(path)]
        for number in NUMBER.findall(text):
            if not {number, number.lstrip("+-")} & words and not is_rounding(number, numbers):
                yield run, number


def test_every_number_of_the_page_is_in_a_file(studies):
    page = "".join(studies.PAGE.read_text("utf-8").split(studies.count_verdicts(TABLES)))  # those are counted below
    assert {run for run, _ in blocks(page, studies)} == {None, *RUNS}
    assert {number for _, number in unknown_numbers(page, studies)} == {"2003", "2021", "2024", "2025"}  # of papers


def test_verdicts_are_counted(studies):
    page = studies.PAGE.read_text("utf-8")
    for section in studies.SECTIONS:
        for run in section.runs:
            claims = read(TABLES / run.name / "claims.csv") if (TABLES / run.name / "claims.csv").exists() else []
            counts = [sum(claim["verdict"] == verdict for claim in claims) for verdict in studies.VERDICTS]
            line = " | ".join(["", section.title, run.title, *map(str, counts), ""]).strip()
            assert (line in page) == bool(claims)
            assert sum(counts) == len(claims)


@pytest.mark.parametrize("wrong", ["| 9.87 ± 0.12 |", "of 4321 runs", "98,765.4"])
def test_a_typed_number_is_noticed_wherever_it_stands(studies, wrong):
    page = studies.PAGE.read_text("utf-8")
    for place in ("#### Claims\n", "### What the presets cost\n", "## CLUE\n"):
        assert list(unknown_numbers(page.replace(place, f"{place}\n{wrong}\n", 1), studies))


def test_a_changed_number_is_noticed(studies, tmp_path, monkeypatch):
    wrong = tmp_path / "studies.md"
    wrong.write_text(re.sub(r"\d\.\d\d ±", "9.99 ±", studies.assemble(), count=1), encoding="utf-8")
    monkeypatch.setattr(studies, "PAGE", wrong)
    with pytest.raises(AssertionError):
        test_the_page_is_assembled_from_the_tables(studies)


def test_tables_are_taken_and_the_page_written(studies, tmp_path, monkeypatch):
    source, target = TABLES / RUNS[0], tmp_path / "studies"
    (target / RUNS[0]).mkdir(parents=True)
    (target / RUNS[0] / "before.csv").touch()  # of a run before, which is not to be mixed with this one
    monkeypatch.setattr(studies, "TABLES", target)
    monkeypatch.setattr(studies, "PAGE", tmp_path / "studies.md")
    studies.main(["--take", RUNS[0], str(source)])
    tables = {path.name for path in source.iterdir()} - {studies.ROWS}  # rows come from a store
    assert {path.name for path in (target / RUNS[0]).iterdir()} == tables
    assert (tmp_path / "studies.md").read_text("utf-8") == studies.assemble(target)
    with pytest.raises(SystemExit, match="no tables"):
        studies.main(["--take", RUNS[0], str(tmp_path)])
    assert any((target / RUNS[0]).iterdir())


def test_rows_that_were_taken_are_a_store_again(studies, tmp_path, monkeypatch):
    monkeypatch.setattr(studies, "TABLES", tmp_path / "studies")
    monkeypatch.setattr(studies, "PAGE", tmp_path / "studies.md")
    study, options = STUDIES["post-hoc"], Options(data="overconfident", seeds=1, methods=("identity", "temperature"))
    there = Store(tmp_path / "post-hoc.sqlite")
    run_study(study, there, options=options, progress=False)
    save_page(study, there, options, tmp_path / "post-hoc")
    studies.main(["--take", "some", str(tmp_path / "post-hoc")])
    studies.main(["--restore", "some", str(tmp_path / "elsewhere" / "post-hoc.sqlite")])
    here = Store(tmp_path / "elsewhere" / "post-hoc.sqlite")
    assert here.known("post-hoc") == there.known("post-hoc")
    assert run_study(study, here, options=options, progress=False).finished == 0
    monkeypatch.setattr(studies, "LARGEST", 10)
    studies.main(["--take", "some", str(tmp_path / "post-hoc")])
    assert not (tmp_path / "studies" / "some" / studies.ROWS).exists()


def test_no_kept_file_is_large(studies):
    assert max(path.stat().st_size for path in TABLES.rglob("*") if path.is_file()) <= studies.LARGEST
