"""Write docs/studies.md from the tables that studies have written: `python docs/studies.py`.

`--take NAME FOLDER` first copies the tables of a page of `trueup study` (FOLDER holds its index.html) to
docs/studies/NAME, and the rows of the store beside FOLDER. `--restore NAME STORE` writes these rows to a store, such as
results/clue.sqlite, so that `trueup study clue -o results` goes on from them. `--costs` first counts the operations of
every preset. No number is typed here: each comes from a file in docs/studies, and a test compares the page with them.
"""

from __future__ import annotations

import argparse
import csv
import math
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

DOCS = Path(__file__).parent
TABLES = DOCS / "studies"
PAGE = DOCS / "studies.md"
COSTS = "costs.csv"
ROWS = "cells.jsonl.gz"
LARGEST = 2**20
"""Bytes of rows that are kept; those of the post-hoc study are more, and are made again in minutes."""
VERDICTS = ("held", "did not hold", "not distinguishable")
NAMES = ("TFLOP/s", "core GFLOP/s", "GPU hours", "core hours")

HEAD = """# Studies: what held in our runs

`trueup study NAME`, of the distribution `trueup-studies` (`pip install trueup-studies`; see `studies/README.md`), runs
a paper's experiments on the data at hand, on one machine or a cluster, and puts our numbers beside the printed ones. A
study is a grid of independent cells; their rows are kept in one SQLite file, a finished cell is never run twice, and a
run that was killed goes on where it was.

```sh
$ trueup study post-hoc --data overconfident --seeds 1 -m identity -m temperature -j 1 -o results
$ trueup study report post-hoc --data overconfident --seeds 1 -m identity -m temperature -o results
```

| study | what it asks |
|---|---|
| `neural-clamping` | does a shift of the input help beyond a temperature? |
| `rethinking` | is a regularised network calibrated, and is it still calibratable? |
| `clue` | does aligning uncertainty with error help, for classes, numbers and language, and under shift? |
| `post-hoc` | every method on every file of logits: scores, ranks, and the regret of an automatic choice |
| `calarena` | win rate, rank and excess loss of ours beside the published results of a public benchmark |

`trueup study list` shows every preset with the files it wants. `--preset` takes larger settings (`cifar10`,
`fashion_mnist`, `paper` …), `--data-dir` their files, `--network` another network, `--device cpu` leaves a GPU alone
(else it is used, and several processes are dealt to several), `--workers` and `--scheduler` bring more hands,
`--without` leaves a part out, and `--oracle` chooses coefficients on the test half as some papers did. A run of
networks that would take more than a day, or nobody knows how long, asks first, and a long training that was killed goes
on from its last epoch.

This page is assembled by `python docs/studies.py` from the tables that the commands below have written. They are kept
in `docs/studies`, most with the rows that they were made of: `python docs/studies.py --restore clue-trec
results/clue.sqlite` makes a store of those, to which `trueup study clue --preset trec --seeds 8 -o results` adds more.

A claim *held* if the interval of its paired difference lies on the claim's side of zero, *did not hold* if it lies on
the other, and is *not distinguishable* otherwise. Ranks that agree in every run need six runs, a count needs one. Where
each run splits the same samples anew (digits and all of the calibration images with Neural Clamping, tables with CLUE),
intervals are wider for what splits share (Nadeau & Bengio 2003); elsewhere all runs have the same test samples, and the
chance in these is not in the intervals. The settings are small: they neither confirm nor refute what a paper reports
for its own networks, and one run alone distinguishes nothing. What was not run says so, with what it would cost.
"""


class Run(NamedTuple):
    """A run that the page shows, if its tables are there."""

    name: str
    """Of its folder in docs/studies."""
    title: str
    words: str
    tables: Sequence[str]
    """Which of its tables are shown after the claims; all are kept."""


class Section(NamedTuple):
    """A study."""

    study: str
    title: str
    words: str
    runs: Sequence[Run]


_TASKS = tuple(
    f"{task}{more}" for task in ("classification", "language", "regression") for more in ("", "-differences")
)
_CLUE = (*_TASKS, "shift", "ood", "overhead")
_LOSSES = ("table_1", "table_2", "table_3", "coefficients", "negative")
_CLAMPING = ("methods", "ablation", "gamma", "starts", "efficient")
SECTIONS = (
    Section(
        "neural-clamping",
        "Neural Clamping",
        "Tang, Chen & Ho (2024). A shift δ of the input and a temperature T, fitted together by SGD. Its rows are "
        "those of the paper's Tables 1–4; every baseline is there twice, fitted to its end and by the paper's own "
        "number of gradient steps, since a descent that ends early flatters whoever is compared with it.",
        (
            Run(
                "neural-clamping-digits",
                "Digits",
                "A small CNN a run, each with a split of its own. The networks come with the package, so that every "
                "machine fits to the same ones.",
                _CLAMPING,
            ),
            Run(
                "neural-clamping-cifar10",
                "CIFAR-10, a published ResNet, a fifth of the calibration images",
                "Each run draws its own calibration images; the network and the test images are the same in all, so "
                "that runs are not independent, and an interval does not know the chance in the test images. "
                "The paper's gradient steps end far short of the best temperature of this network, those of Neural "
                "Clamping and of the baselines alike; its released code takes longer ones, and ends short of it too, "
                "but beyond it with its augmentation.",
                _CLAMPING,
            ),
            Run(
                "neural-clamping-cifar10-resnet32",
                "CIFAR-10, the deeper of the two ResNets",
                "A fifth of the calibration images, drawn anew in each run, as above.",
                _CLAMPING,
            ),
            Run(
                "neural-clamping-cifar10-5000",
                "CIFAR-10, all of the calibration images",
                "Each run but the first splits the images to calibrate and to test on anew, for the same networks.",
                _CLAMPING,
            ),
            Run(
                "neural-clamping-cifar10-shift",
                "CIFAR-10 under two shifts",
                "Images with a colour cast, which a constant δ can take back but for what was clipped, and blurred "
                "ones, both to calibrate on and to test on.",
                _CLAMPING,
            ),
            Run(
                "neural-clamping-cifar10-shift-resnet32",
                "CIFAR-10 under two shifts, the deeper of the two ResNets",
                "As above.",
                _CLAMPING,
            ),
        ),
    ),
    Section(
        "rethinking",
        "Rethinking calibration",
        "Wang, Feng & Zhang (2021). Losses that hold confidence down are compared before a repair (calibrated) and "
        "after one (calibratable). Coefficients are chosen on validation samples.",
        (
            Run("rethinking-digits", "Digits", "A multilayer perceptron on few images.", _LOSSES),
            Run(
                "rethinking-trec",
                "TREC",
                "The paper's kind of text CNN, narrower, on short questions. Those to test on are easier than those to "
                "validate on, so that a repair fitted to the latter leaves an overconfident network too unsure of the "
                "former: what did not hold after a repair says as much of that as of the losses.",
                _LOSSES,
            ),
            Run(
                "rethinking-fashion_mnist",
                "Fashion-MNIST",
                "A small CNN on few images, trained so briefly that it does not fit all of them: with cross-entropy it "
                "is hardly overconfident, so that there is little for the other losses to hold down.",
                _LOSSES,
            ),
            Run(
                "rethinking-cifar10",
                "CIFAR-10",
                "A small ResNet on few images, without augmentation.",
                _LOSSES,
            ),
        ),
    ),
    Section(
        "clue",
        "CLUE",
        "Mendes, Romano & Garlan (2025). Uncertainty that equals the error, by a loss that aligns the two. The paper's "
        "sizes and tables are not published, so there is no preset of the paper; same network and dropout for all "
        "methods, and the same Monte-Carlo passes, which the members of an ensemble share (where they cannot be shared "
        "evenly, the few left over are not done). The members of the ensemble of CLUE's compute share the epochs that "
        "cost as much to train as CLUE, which leaves each but a few where a step of CLUE costs little. Level and α are "
        "chosen by NLL on validation; the coefficients of focal loss, MMCE and AvUC are our defaults and not chosen: "
        "what holds against them here says little of them tuned.",
        (
            Run(
                "clue-digits",
                "Digits",
                "A small CNN, also on shifted and foreign images.",
                _CLUE,
            ),
            Run("clue-diabetes", "Diabetes", "A regression by a small perceptron.", _CLUE),
            *(
                Run(f"clue-{name}", title, words, _CLUE)
                for name, title, words in (
                    ("descriptions", "Descriptions", "A small transformer on characters."),
                    ("uci", "UCI tables", "Regressions by small perceptrons."),
                    (
                        "fashion_mnist",
                        "Fashion-MNIST",
                        "A small CNN, also on shifted and foreign images. Three epochs leave it far from its end.",
                    ),
                    ("trec", "TREC", "A text CNN on short questions."),
                    ("sst5", "SST-5", "A text CNN on sentences of films' reviews, few of which it tells apart."),
                    (
                        "tinyshakespeare",
                        "tinyshakespeare",
                        "A transformer on characters. Some of the methods were left out.",
                    ),
                )
            ),
        ),
    ),
    Section(
        "post-hoc",
        "Post-hoc methods",
        "Methods on files of logits. Regret is the test NLL above that of the best of those that were run, known "
        "afterwards.",
        (
            Run(
                "post-hoc-files",
                "Networks of CIFAR-10 and CIFAR-100",
                "Methods that take seconds on a hundred classes; slower ones (matrix scaling, Dirichlet and ODIR, "
                "order-invariant networks) were left out here, and the automatic choice is measured on [a page of its "
                "own](choice.md). Files that come with a validation and a test half have one split.",
                ("regret", "ranks"),
            ),
            Run(
                "post-hoc-cifar10",
                "Networks of CIFAR-10, more methods",
                "Files with ten classes alone, so that matrix scaling, Dirichlet calibration and ODIR are among them; "
                "FOLDER holds the files of these networks and no others. "
                "Of probabilities, which most files hold, MS-ODIR and Dirichlet calibration with ODIR are one method.",
                ("regret", "ranks"),
            ),
            Run(
                "post-hoc-resnet20",
                "One network, all columns",
                "The file of the ResNet to which Neural Clamping was fitted above, with the columns of that paper's "
                "tables.",
                ("scores",),
            ),
        ),
    ),
)

CALARENA = """
## CalArena

`trueup study calarena --data-dir FOLDER` fits our methods (`auto` unless `-m` says otherwise) on the files of the
public benchmark [CalArena](https://github.com/probkit/CalArena) and puts them beside its published results. `FOLDER` is
the benchmark's own, or one with the same files:

```text
calibration_benchmarks/{benchmark}.h5     {data set}/{model}/ → probas_cal, labels_cal, probas_test, labels_test
results/{benchmark}/{method}.csv          dataset, model, cal_size, test_size, {method}_logloss, {method}_brier, …
```

The benchmarks are `tabrepo-` and `tabarena-` (tables) and `cv-` (images), each `-binary` and `-multiclass`, and
`imagenet-multiclass`; `--data tabrepo-binary` runs one. The `.h5` files have to be downloaded by hand and need `pip
install 'trueup[hdf5]'`. Of two classes the probabilities are those of the second. Any other file of this form is read
as well, as a family of its own.

The page has, by family and by benchmark, for each method of ours and theirs: the *win rate* (the share of the other
methods with a greater loss, as the benchmark counts it: of two equal losses neither wins), the mean rank, the mean loss
above the least of all, and the worst harm. Only methods with a result on every experiment are compared, and a published
result counts only if its numbers of rows are those of the file. Not run: the benchmark's files are not here; [the
automatic choice, measured](choice.md) is this study on other predictions.
"""


def assemble(folder: Path = TABLES) -> str:
    """The page, from the tables of a folder."""
    costs = _read(folder / COSTS)
    parts = [HEAD, count_verdicts(folder)]
    for section in SECTIONS:
        parts.append(f"\n## {section.title}\n\n{section.words}\n")
        parts += [_run(run, folder / run.name) for run in section.runs if (folder / run.name).is_dir()]
        missing = [run.title for run in section.runs if not (folder / run.name).is_dir()]
        parts += [f"\nNot run for this page: {'; '.join(missing)}.\n"] if missing else []
        parts.append(_costs(section.study, costs, folder))
    return "".join([*parts, CALARENA])


def count_verdicts(folder: Path) -> str:
    """How many claims of each run held, and how many did not."""
    lines = ["\n| claims of | on | " + " | ".join(VERDICTS) + " |", "|:--|:--|" + "--:|" * len(VERDICTS)]
    for section in SECTIONS:
        for run in section.runs:
            if claims := _read(folder / run.name / "claims.csv"):
                counts = Counter(claim["verdict"] for claim in claims)
                cells = [section.title, run.title, *(str(counts[verdict]) for verdict in VERDICTS)]
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _run(run: Run, folder: Path) -> str:
    facts = {line["what"]: line["value"] for line in _read(folder / "run.csv")}
    lines = [f"\n### {run.title}\n", run.words, "", "```text", facts["command"], "```", ""]
    missing = "" if facts["not run"] == "0" else f", {facts['not run']} not run yet"
    failed = "" if facts["failed"] == "0" else f", {facts['failed']} failed"
    lines.append(
        f"Data: {facts['data']}. Seeds or splits: {facts['seeds']}. Runs: {facts['runs']}{failed}{missing}; "
        f"{facts['hours']} hours summed over runs, on {facts['machine']}."
    )
    if (folder / "claims.csv").exists():
        lines += ["", "#### Claims", "", *_claims(_read(folder / "claims.csv"))]
    for name in run.tables:
        path = folder / f"{name}.md"
        if path.exists():
            lines += ["", f"#### {name.replace('_', ' ').capitalize()}", "", path.read_text(encoding="utf-8").strip()]
    return "\n".join(lines) + "\n"


def _claims(results: Sequence[dict[str, str]]) -> list[str]:
    """Claim, paper, ours, held: the numbers of claims.csv, rounded."""
    lines = ["| claim | paper | data | ours (95 % interval, runs) | verdict |", "|:--|:--|:--|:--|:--|"]
    for result in results:
        ends = [result[end] for end in ("low", "high")]
        interval = f"{_number(ends[0])} to {_number(ends[1])}" if all(ends) else "no interval"
        ours = f"{_number(result['mean'])} ({interval}, {result['runs']}); {result['measured']}"
        claim = f"{result['source']}: {result['claim']}"
        cells = [claim, result["paper"] or "–", result["data"], ours, f"**{result['verdict']}**"]
        lines.append("| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |")
    return [
        *lines,
        "",
        "Each number is a difference of runs with the same seed, positive where it speaks for the claim; one that is "
        "the same in every run has no interval. Nothing is corrected for the number of claims. The best baseline is "
        "the one that turns out best on the test half, which favours it.",
    ]


def _number(text: str) -> str:
    """A number with three significant digits.

    >>> _number("0.0123456"), _number("-12.345")
    ('+0.0123', '-12.3')
    """
    value = float(text)
    digits = 2 if value == 0 else max(0, min(4, 2 - math.floor(math.log10(abs(value)))))
    return f"{value:+.{digits}f}"


def _costs(study: str, costs: Sequence[dict[str, str]], folder: Path) -> str:
    """What each preset of a study would cost on a GPU."""
    own = [line for line in costs if line["study"] == study and line["flops"]]
    if not own:
        return ""
    rate = own[0]["TFLOP/s"]
    lines = [
        "\n### What the presets cost\n",
        f"Hours of networks on a GPU that sustains {rate} TFLOP/s, and on one core of the machine on which they were "
        f"counted, at the {own[0]['core GFLOP/s']} GFLOP/s that it was measured to do: from the operations that torch "
        "counts for one pass of each network (a backward pass to the weights counts as two, one to the input alone as "
        "one), the sizes of the data, the epochs and the runs; of Neural Clamping fits to logits too. Reading data "
        "and metrics are not counted; they are most of the work of small networks.\n",
        "| preset | data | runs | operations | GPU hours | core hours | runs done here |",
        "|:--|:--|--:|--:|--:|--:|--:|",
    ]
    done = [_runs_done(line, own[0]["preset"], folder) for line in own]
    for line, here in zip(own, done, strict=True):
        others = {data for other, runs in zip(own, done, strict=True) if runs for data in other["data"].split(", ")}
        here = here or ("by other presets" if others.issuperset(line["data"].split(", ")) else "not run")
        more = f" (without {line['not counted']})" if line["not counted"] else ""
        hours = [line["GPU hours"], line["core hours"]]
        cells = [f"`{line['preset']}`", line["data"] + more, line["runs"], line["flops"], *hours, here]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _runs_done(line: dict[str, str], default: str, folder: Path) -> str:
    """Runs of a preset that the tables are of, by its own name or by that of one of its data sets."""
    runs = []
    for path in sorted(folder.glob(f"{line['study']}-*/run.csv")):
        facts = {fact["what"]: fact["value"] for fact in _read(path)}
        words = facts["command"].split()
        given = {name: words[words.index(name) + 1] for name in ("--preset", "--data") if name in words}
        own = (line["preset"],) if "--preset" in given else (line["preset"], *line["data"].split(", "))
        if given.get("--preset", given.get("--data", default)) in own:
            runs.append(facts["runs"])
    return " + ".join(runs)


def count_costs(path: Path) -> None:
    """Count the operations of every preset, where its networks can be built."""
    from trueup_studies.cost import GPU_RATE, measure_rate
    from trueup_studies.overview import list_presets

    rates = [GPU_RATE, measure_rate()]
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["study", "preset", "data", "runs", "flops", *NAMES, "not counted"])
        for preset in list_presets():
            if preset.flops is None:
                continue
            hours = (preset.flops / rate / 3600 for rate in rates)
            data = ", ".join(dict.fromkeys(preset.data))
            counted = [f"{preset.flops:.2e}", f"{rates[0] / 1e12:g}", f"{rates[1] / 1e9:.1f}"]
            counted += ["< 0.001" if h < 1e-3 else f"{h:.3f}" if h < 1 else f"{h:,.1f}" for h in hours]
            writer.writerow([preset.study, preset.preset, data, preset.cells, *counted, "; ".join(preset.uncounted)])


def take(name: str, page: Path) -> None:
    """Copy the tables of a study's page, in the place of those of a run before."""
    target, tables = TABLES / name, sorted(page.glob("*.csv"))
    if not tables or page.resolve() == target.resolve():
        raise SystemExit(f"{page}: no tables of another folder to take")
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        old.unlink()
    for path in tables:
        shutil.copy(path, target / path.name)
        if path.with_suffix(".md").exists():
            shutil.copy(path.with_suffix(".md"), target / f"{path.stem}.md")
    if (store := page.with_suffix(".sqlite")).exists():
        from trueup_studies import Store

        Store(store).dump(page.name, target / ROWS)
        if (target / ROWS).stat().st_size > LARGEST:
            (target / ROWS).unlink()


def restore(name: str, store: Path) -> None:
    """Write the rows of a run to a store, which is made if it is not there."""
    from trueup_studies import Store

    store.parent.mkdir(parents=True, exist_ok=True)
    print(f"{store}: {Store(store).restore(TABLES / name / ROWS)} cells more")


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def main(arguments: Sequence[str] | None = None) -> None:
    """Take tables if told to, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--take", nargs=2, action="append", default=[], metavar=("NAME", "FOLDER"))
    parser.add_argument("--restore", nargs=2, action="append", default=[], metavar=("NAME", "STORE"))
    parser.add_argument("--costs", action="store_true", help="count the operations of every preset again")
    chosen = parser.parse_args(arguments)
    for name, page in chosen.take:
        take(name, Path(page))
    for name, store in chosen.restore:
        restore(name, Path(store))
    if chosen.costs:
        TABLES.mkdir(exist_ok=True)
        count_costs(TABLES / COSTS)
    PAGE.write_text(assemble(TABLES), encoding="utf-8")


if __name__ == "__main__":
    main()
