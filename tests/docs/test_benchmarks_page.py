"""The page of benchmarks, in its small form, with libraries that misbehave beside the honest ones."""

import csv
import importlib
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
TITLE = "Expected calibration error, 15 bins of equal width"

# Children without any library, so that they start at once: the first lines of each are the same.
ANSWERS = """
import json, os, sys, time
def say(**answer):
    print(json.dumps(answer), flush=True)
say(version="9.9", offers=["ece"])
for line in sys.stdin:
    if json.loads(line)["do"] == "prepare":
        say(ready=True)
        continue
    {}
"""
FAKES = {
    "absent": "",
    "raises": 'say(failed="ValueError: no such bins")',
    "hangs": "time.sleep(600)",
    "dies": 'print("out of luck", file=sys.stderr); os.kill(os.getpid(), 9)',
    "babbles": 'print("Fitting 15 bins", flush=True)',
    "wins": 'say(**({"seconds": 1e-9, "peak_mb": 0.0} if json.loads(line)["do"] == "lap" else {"value": 0.5}))',
}


def run(folder, *options):
    """The folder that a run fills."""
    command = [sys.executable, "benchmarks/page.py", "--small", "--out", str(folder), *options]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=600)
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    for package in ("sklearn", "torchmetrics", "matplotlib"):
        pytest.importorskip(package, reason=f"{package} is not installed")
    also = []
    for name, deed in FAKES.items():
        script = ANSWERS.format(deed or "pass")
        if name == "absent":
            script = script.replace('version="9.9"', 'absent="not installed"')
        command = shlex.join([sys.executable, "-S", "-c", script])
        also += ["--also", f"{name}={command}"]
    libraries = ["--libraries", "ours,scikit-learn,torchmetrics"]
    return run(tmp_path_factory.mktemp("page"), *libraries, "--limit", "10", *also)


@pytest.fixture(scope="module")
def page(folder):
    return (folder / "benchmarks.md").read_text()


def rows(folder, title):
    """The rows of a task, by library."""
    with (folder / "benchmarks.csv").open(encoding="utf-8", newline="") as file:
        return {row["library"]: row for row in csv.DictReader(file) if row["task"] == title}


def test_every_task_has_a_row_of_ours_with_times_memory_and_an_answer(folder, benchmark_modules):
    tasks = benchmark_modules("tasks").TASKS
    for task in tasks.values():
        row = rows(folder, task.title)["trueup"]
        assert row["best_ms"] == row["median_ms"] == row["worst_ms"], "one lap in the smoke run"
        assert re.fullmatch(r"[\d.]+", row["best_ms"])
        assert row["laps"] == "1"
        assert re.fullmatch(r"off by \de-\d+|exact to 1e-12|\+\d+\.\d{5} nat, ECE 0\.\d{4}", row["answer"])


@pytest.mark.parametrize(
    ("title", "library"),
    [
        ("Negative log-likelihood", "scikit-learn"),
        ("Brier score", "scikit-learn"),
        ("Temperature scaling", "scikit-learn"),
        ("Isotonic regression of every class", "scikit-learn"),
        ("Expected calibration error, 15 bins of equal width", "torchmetrics"),
    ],
)
def test_the_peers_have_rows_with_answers(folder, title, library):
    row = rows(folder, title)[library]
    assert row["laps"] == "1"
    assert row["answer"].startswith(("off by", "exact", "+"))


def test_libraries_that_fail_have_rows_that_say_so(folder, page):
    found = {name: row["answer"] for name, row in rows(folder, TITLE).items()}
    assert found["raises"] == "failed: ValueError: no such bins"
    assert found["hangs"] == "> 10 s"
    assert found["dies"] == "failed: died of signal 9: out of luck"
    assert found["babbles"] == "failed: an answer that is no JSON"
    assert found["absent"] == "absent: not installed"
    assert "absent absent: not installed" in page


def test_a_faster_peer_is_told_among_our_losses_even_with_a_worse_answer(page):
    losses = page.split("## Where we lose\n")[1].split("\n#")[0]
    lines = [line for line in losses.splitlines() if "| wins |" in line]
    assert lines
    assert all("× as fast, a worse answer" in line for line in lines)
    assert len(losses.strip().splitlines()) <= 12, "ten rows below the headings"
    assert re.search(r"In \d+ of \d+ rows of other libraries, one is faster", page)
    assert "| raises |" not in losses


def test_what_lacks_in_ours_is_a_loss(benchmark_modules):
    rows = benchmark_modules("rows")
    ours = rows.Row("venn_abers", 10, 2, "ours", trouble="not offered")
    theirs = rows.Row("venn_abers", 10, 2, "mapie", laps=[1.0], excess=0.1, ece=0.1)
    assert [loss.how for loss in rows.losses([ours, theirs])] == ["ours: not offered"]


def test_losses_are_in_time_answer_and_memory_and_ties_are_none(benchmark_modules):
    rows = benchmark_modules("rows")

    def row(library, seconds, *, peak=5.0, excess=0.02, ece=0.01):
        return rows.Row("vector", 10, 2, library, laps=[seconds, 9.0], peak=peak, excess=excess, ece=ece)

    def hows(**theirs):
        return [loss.how for loss in rows.losses([row("ours", 1.0), row("other", **{"seconds": 1.0, **theirs})])]

    assert hows() == []
    assert hows(seconds=2.0, excess=0.5, peak=50.0) == []
    assert hows(seconds=0.5) == ["2.00 × as fast, an answer as good"]
    assert hows(seconds=0.5, excess=0.5) == ["2.00 × as fast, a worse answer"]
    assert hows(peak=1.0) == ["1 MB against 5 MB, an answer as good"]
    (better,) = hows(excess=0.01)
    assert better == "a better answer: +0.01000 nat, ECE 0.0100 against +0.02000 nat, ECE 0.0100"
    assert hows(ece=0.005)[0].startswith("a better answer")
    assert hows(ece=0.005, excess=0.5)[0].startswith("a lower ECE, if not a better likelihood")
    assert hows(excess=0.02001, ece=0.0101) == []


def test_a_smoke_run_says_that_it_is_one(page):
    assert "its figures mean nothing" in page.splitlines()[2]


def test_the_page_is_one_screen_with_its_commit_and_the_tables_beside_it(folder, page):
    assert len(page.split()) <= 900
    assert re.search(r"Made from trueup \d+\.\d+\.\d+", page)
    targets = re.findall(r"\]\(([\w./-]+\.(?:csv|svg))\)", page)
    assert len(targets) == 6
    assert [name for name in targets if not (folder / name).is_file()] == []
    with (folder / "benchmarks-growth.csv").open(encoding="utf-8", newline="") as file:
        against = [row["against"] for row in csv.DictReader(file)]
    assert against.count("rows, 4 classes") == 4
    assert against.count("classes, 200 rows") == 4


def test_exponents_are_of_the_largest_decade(benchmark_modules):
    scaling, rows = benchmark_modules("scaling"), benchmark_modules("rows")
    sweep = scaling.Sweep("n", 7, (1, 10, 100, 316, 1000))

    def curve(seconds, passes=(None, None)):
        made = [rows.Row("vector", n, 7, "ours", laps=[seconds(n)]) for n in sweep.sizes]
        made[2].passes, made[-1].passes = passes
        return scaling.Curve("vector", "ours", sweep, tuple(made))

    linear = curve(lambda n: 3.0 if n < 100 else n / 50)
    assert linear.exponent() == pytest.approx(1.0)
    assert linear.verdict() == "PASS"
    flat = curve(lambda n: 2.0 + n / 500)
    assert flat.fixed() == pytest.approx(2.0)
    assert flat.verdict() == "MISS: of the first 2.2000 s, 2.0000 do not grow"
    steep = curve(lambda n: n**1.5, passes=(7, 34))
    assert steep.exponent() == pytest.approx(1.5)
    assert steep.verdict() == "MISS: it reads the data 34 times where 7 did"
    some = scaling.Curve("vector", "ours", sweep, linear.rows[:-1])
    assert math.isnan(some.exponent())
    assert some.verdict().startswith("MISS")


def test_a_childs_library_that_raises_or_is_absent_breaks_nothing(benchmark_modules, monkeypatch):
    child, runs = benchmark_modules("child"), benchmark_modules("runs")

    def odd(data):
        raise ValueError("no bins\nand more")

    def said(library):
        monkeypatch.setitem(runs.MORE, "ece", {library: odd})
        answers = []
        prepare = '{"do": "prepare", "task": "%s", "n": 300, "classes": 3, "seed": 0}'
        child.serve(library, ['{"do": "lap"}', prepare % "ece", prepare % "nll", '{"do": "lap"}'], answers.append)
        return answers

    hello, early, raised, _, _ = said("scikit-learn")
    assert {"ece", "nll", "brier", "temperature"} <= set(hello["offers"])
    assert early == {"failed": "AssertionError: nothing is prepared"}
    assert raised == {"failed": "ValueError: no bins"}
    assert said("no-such-library")[0] == {"absent": "not installed", "offers": ["ece"]}


@pytest.mark.parametrize("task", ["ece", "aece", "sce", "nll", "brier", "smooth_ece"])
def test_the_exact_values_are_those_of_the_library(benchmark_modules, task):
    import trueup

    tasks, truths = benchmark_modules("tasks"), benchmark_modules("truths")
    data = tasks.draw("metric", 700, 6, 3)
    assert truths.reference(task, data) == pytest.approx(trueup.METRICS[task](*data), abs=1e-7)


def test_only_the_truth_has_no_excess(benchmark_modules):
    tasks, truths = benchmark_modules("tasks"), benchmark_modules("truths")
    data = tasks.draw("fit", 4000, 4, 3)
    nll, ece = truths.excess(data, lambda z: z / tasks.TRUE_TEMPERATURE)
    assert nll == pytest.approx(0.0, abs=1e-12)
    assert ece < 0.04
    assert truths.excess(data, lambda z: z).nll > 0.05
    assert truths.excess(data, np.zeros_like).nll > 0.05


@pytest.fixture
def benchmark_modules(monkeypatch):
    """Import a module of the benchmarks for this test alone: their names are short and might be others' too."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield importlib.import_module
    folder = str(ROOT / "benchmarks")
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(folder):
            del sys.modules[name]
