"""The page of a study: whole in one file, safe with anybody's words, and honest about what was not run."""

import csv
import math
import re
import shutil
import subprocess
from dataclasses import replace

import pytest

from trueup_studies import Options, Store, Study, product
from trueup_studies.published import compare_with_paper, normalize_name, published_values
from trueup_studies.store import Origin
from trueup_studies.study_page import save_page
from trueup_studies.tables import Column, tabulate

EVIL = '</style><script>alert(1)</script><img src=x onerror=alert(2)> & "co"'
LOSSES = {"cross_entropy": "Cross-Entropy", "focal": "Focal Loss", "own": "Our own"}
COLUMNS = (Column("ece", "ECE, %", scale=100, digits=2), Column("accuracy", "accuracy, %", better="higher", scale=100))


def tables(rows, options):
    shared = {"by": "loss", "group": "data", "titles": LOSSES}
    return {
        "before": tabulate(rows, columns=COLUMNS, **shared).captioned(EVIL, ["& so on"]),
        "some": tabulate(rows, columns=COLUMNS[1:], **shared),
    }


def figures(rows, options):
    from trueup.reports.style import axes_for

    ax = axes_for(None)
    ax.plot([0, 1], [row["ece"] for row in rows][:2], label="curve")
    return {"a_curve": ax.figure}


def study(data="cifar10", paper="rethinking"):
    how = {"data": [data], "network": ["resnet32"], "loss": list(LOSSES), "seed": [0, 1]}
    return Study("toy", 3, lambda options: product(**how), "math:exp", tables, figures, title="A toy", paper=paper)


ECES = {"cross_entropy": 0.0643, "focal": 0.05, "own": 0.01}


def filled(path, made, *, leave=0, fail=0):
    store = Store(path)
    cells = made.cells()
    for number, cell in enumerate(cells):
        if number < leave:
            continue
        if number < leave + fail:
            store.fail(cell, f"ValueError: {EVIL}", seconds=1)
            continue
        ece = ECES[cell.settings["loss"]] + 0.001 * cell.settings["seed"]
        store.finish(cell, [{"ece": ece, "accuracy": 0.9046}], seconds=60)
    return store


def shown(tmp_path, made, **more):
    page = save_page(made, filled(tmp_path / "results.sqlite", made, **more), None, tmp_path / "page")
    return page, page.read_text("utf-8")


def words(html):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", html.split("</style>")[1])).replace("\u00a0", " ")


def test_the_files_beside_the_page(tmp_path):
    page, html = shown(tmp_path, study())
    names = {path.name for path in page.parent.iterdir()}
    assert names == {
        "index.html", "run.csv", "paper.csv", "a_curve.pdf", "a_curve.svg", "a_curve.png",
        *(f"{table}.{suffix}" for table in ("before", "some") for suffix in ("md", "tex", "csv")),
    }  # fmt: skip
    for link in re.findall(r'href="([^"#]+)"', html):
        assert (page.parent / link).stat().st_size > 0
    assert (page.parent / "a_curve.png").read_bytes()[:4] == b"\x89PNG"
    assert (page.parent / "a_curve.pdf").read_bytes()[:4] == b"%PDF"


def test_files_of_a_former_page_are_removed_and_nobody_elses(tmp_path):
    page, _ = shown(tmp_path, study())
    for name in ("notes.md", "mine.csv", "results.png"):
        (page.parent / name).write_text("mine")
    before = {path.name for path in page.parent.iterdir()}
    later = replace(study(paper=""), tables=lambda r, o: {"some": tables(r, o)["some"]}, figures=lambda r, o: {})
    shown(tmp_path, later)
    gone = {"paper.csv", "a_curve.pdf", "a_curve.svg", "a_curve.png", "before.md", "before.tex", "before.csv"}
    assert {path.name for path in page.parent.iterdir()} == before - gone
    page.write_text('<a href="notes.md">md</a>')  # a page of somebody else
    shown(tmp_path, later)
    assert (page.parent / "notes.md").exists()


def test_the_page_is_whole_and_safe(tmp_path):
    _, html = shown(tmp_path, study(), fail=1)
    assert "<script" not in html
    assert "<img src=x" not in html
    assert html.count("</style>") == 1
    assert "&lt;script&gt;alert(1)" in html
    assert "default-src &#39;none&#39;" in html
    outside = re.findall(r'(?:src|href)="((?:https?:)?//[^"]*)"', html)
    assert outside == []
    assert re.findall(r'<img alt="a curve" src="data:image/svg\+xml;base64,', html)


def test_missing_and_failed_runs_are_told(tmp_path):
    _, html = shown(tmp_path, study(), leave=2, fail=1)  # both of cross-entropy, and one of focal
    said = words(html)
    assert "3 of 6 runs are in; the numbers are of these alone." in said
    assert "Failed 1" in said
    assert "Not run 2" in said
    assert "ValueError:" in said
    assert "2 runs of 6 have not been done yet" in said
    assert "Cross-Entropy" not in said  # nothing of it was run


@pytest.mark.parametrize(("leave", "early"), [(2, True), (0, False)])  # both of cross-entropy: the others are whole
def test_an_early_page_says_how_many_runs_each_row_has(tmp_path, leave, early):
    page, html = shown(tmp_path, study(), leave=leave)
    text = (page.parent / "some.md").read_text("utf-8")
    assert ("accuracy, % | runs |" in text) == ("| 2 |" in text) == early
    assert (">runs</th>" in html) == early


def test_the_papers_numbers_beside_ours_are_in_a_file_too(tmp_path):
    page, html = shown(tmp_path, study())
    with (page.parent / "paper.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    wanted = {"table": "table 1", "data": "CIFAR-10", "method": "Cross-Entropy", "figure": "ece, %"}
    [line] = [x for x in lines if wanted.items() <= x.items()]
    assert (line["network"], line["paper"], line["paper std"]) == ("ResNet-32", "6.43", "0.22")
    assert float(line["ours"]) == pytest.approx(6.48)
    assert line["verdict"] == "agrees"
    assert 'href="paper.csv"' in html


def test_the_machine_is_that_of_the_runs(tmp_path):
    made = study()
    store = Store(tmp_path / "results.sqlite")
    for number, cell in enumerate(made.cells()):
        place = Origin("64 CPU cores (riscv)" if number else "a borrowed GPU", "trueup 0.0.7")
        store.finish(cell, [{"ece": 0.1, "accuracy": 0.9}], seconds=60, origin=place)
    page = save_page(made, store, None, tmp_path / "page")
    facts = dict(csv.reader((page.parent / "run.csv").read_text("utf-8").splitlines()))
    assert facts["machine"] == "a borrowed GPU (1 run); 64 CPU cores (riscv) (5 runs)"
    assert facts["version"] == "toy 3; trueup 0.0.7"
    assert "a borrowed GPU (1 run)" in words(page.read_text("utf-8"))


def test_nothing_run_gives_no_number(tmp_path):
    made = study()
    page = save_page(made, Store(tmp_path / "empty.sqlite"), None, tmp_path / "page")
    html = page.read_text("utf-8")
    assert {path.name for path in page.parent.iterdir()} == {"index.html", "run.csv"}
    assert "<table" not in html
    assert "0 of 6 runs are in" in words(html)


def test_every_number_of_the_paper_is_a_fact(tmp_path):
    _, html = shown(tmp_path, study())
    known = {f"{fact.mean:.2f}" for fact in published_values("rethinking")} | {MISSING}
    below = re.findall(r"<small>([^<]*)</small>", html)
    assert below
    assert {number.split(" ±")[0] for number in below} <= known


MISSING = "–"


def test_the_same_data_set_and_network():
    made = study()
    rows = [{**c.settings, "ece": ECES[c.settings["loss"]] + 0.001 * c.settings["seed"], "accuracy": 0.9046}
            for c in made.cells()]  # fmt: skip
    found = compare_with_paper(tables(rows, Options()), rows, "rethinking")
    found = [number for number in found if number.table == "table 1"]
    figures = {(number.method, number.figure): number for number in found if number.dataset == "CIFAR-10"}
    assert {(number.group, number.settings) for number in figures.values()} == {("cifar10", "")}
    plain = figures["Cross-Entropy", "ece"]
    assert (plain.ours, plain.theirs, plain.their_std) == (pytest.approx(6.48), 6.43, 0.22)
    assert plain.verdict == "agrees"
    assert figures["Focal Loss", "ece"].verdict == "differs"  # 5.05 ± 0.07 beside 3.00 ± 0.26
    assert ("Our own", "ece") not in figures
    assert {n.settings for n in found if n.dataset == "SVHN"} == {"data set cifar10 instead of SVHN"}


def test_another_data_set_is_compared_by_its_ways():
    def row(loss, seed, ece, accuracy):
        return {"data": "digits", "network": "cnn", "loss": loss, "seed": seed, "ece": ece, "accuracy": accuracy}

    rows = [row("cross_entropy", s, 0.03 + 0.0001 * s, 0.95) for s in (0, 1)]
    rows += [row("focal", s, 0.01 + 0.0001 * s, 0.96) for s in (0, 1)]
    found = compare_with_paper(tables(rows, Options()), rows, "rethinking")
    found = [number for number in found if (number.table, number.dataset) == ("table 1", "CIFAR-10")]
    assert {number.settings for number in found} == {
        "data set digits instead of CIFAR-10; network cnn instead of ResNet-32"
    }
    verdicts = {(number.method, number.figure): number.verdict for number in found}
    assert verdicts["Focal Loss", "ece"] == "same direction"
    assert verdicts["Focal Loss", "accuracy"] == "opposite direction"  # there it falls from 90.46 to 87.84
    assert verdicts["Cross-Entropy", "ece"] == "no number"
    noisy = [{**row, "ece": 0.03 + 0.05 * row["seed"]} for row in rows]
    found = [n for n in compare_with_paper(tables(noisy, Options()), noisy, "rethinking")
             if (n.table, n.dataset, n.method, n.figure) == ("table 1", "CIFAR-10", "Focal Loss", "ece")]  # fmt: skip
    assert {number.verdict for number in found} == {"within spread"}


def test_what_settings_explain_is_told(tmp_path):
    _, html = shown(tmp_path, study())
    said = words(html)
    assert "Table 1: CIFAR-10 ResNet-32; ours is cifar10 " in said
    assert "Table 1: SVHN ResNet-32; ours is cifar10 (data set cifar10 instead of SVHN)" in said
    assert re.search(r"Numbers by verdict: .*agrees \d+, differs \d+", said)
    (tmp_path / "two").mkdir()
    _, html = shown(tmp_path / "two", study(paper=""))
    assert "No published numbers are known." in words(html)


def test_a_table_as_html():
    rows = [{"m": "<b>", "x": 1.0}, {"m": "b", "x": 2.0}, {"m": "c", "x": math.nan}]
    html = tabulate(rows, by="m", columns=[Column("x", digits=1)]).html()
    assert '<th scope="row">&lt;b&gt;</th><td><strong>1.0</strong></td>' in html
    assert "<td><em>2.0</em></td>" in html
    assert "<td>–</td>" in html


def test_spellings_meet_the_facts():
    names = {normalize_name(fact.model) for fact in published_values("neural-clamping") if fact.model}
    for ours in ("timm:resnet50", "resnet110", "wrn40x10", "timm:resnet101"):
        assert normalize_name(ours) in names
    sets = {
        normalize_name(fact.dataset) for paper in ("rethinking", "neural-clamping") for fact in published_values(paper)
    }
    for ours in ("svhn", "cifar10", "cifar100", "newsgroups20", "bloodmnist", "imagenet"):
        assert normalize_name(ours) in sets


@pytest.mark.skipif(shutil.which("chromium") is None, reason="there is no Chromium")
def test_a_browser_shows_it_without_complaint(tmp_path):
    page, _ = shown(tmp_path, study())
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}",
               "--enable-logging=stderr", "--v=0", "--dump-dom", page.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr
    assert "<strong>" in done.stdout
