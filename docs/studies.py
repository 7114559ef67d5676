"""Write the pages docs/papers/*.md and their figures from stored tables of studies: `python docs/studies.py`.

`--take NAME FOLDER` first copies the tables of a page of `trueup study` to docs/studies/NAME, and the rows of the store
next to FOLDER, which holds the page's index.html. `--restore NAME STORE` writes these rows to a store, such as
results/clue.sqlite, so that `trueup study clue -o results` continues from them. `--judge NAME` judges the claims again
from these rows. `--costs` first counts the operations of every preset, and `--seconds` measures steps of CLUE. The
templates contain no numbers: each comes from a file in docs/studies, and tests hold that.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, median
from tempfile import TemporaryDirectory
from time import process_time
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

DOCS = Path(__file__).parent
sys.path.append(str(DOCS.parent / "benchmarks"))
from measured import made_from  # noqa: E402

TABLES = DOCS / "studies"
PAPERS = DOCS / "papers"
IMAGES = DOCS / "images" / "papers"
COSTS, SECONDS = "costs.csv", "clue-seconds.csv"
ORIGIN = "made-from.txt"
"""File in docs/studies with the last line of every page, the version and the commit; those of runs are in run.csv."""
ROWS = "cells.jsonl.gz"
LARGEST = 2**20
"""Largest file of rows in bytes; larger ones, those of the post-hoc study, are quick to compute again."""
NAMES = ("TFLOP/s", "core GFLOP/s", "GPU hours", "core hours")
VERDICTS = {"held": "held", "did not hold": "did not hold", "not distinguishable": "open"}
SHORT = {
    "Cross-Entropy": "CE", "Label Smoothing": "label smoothing", "L1 Norm": "L1 norm", "Focal Loss": "focal",
    "Inverse Focal Loss": "inverse focal",
}  # fmt: skip


def read(path: Path) -> list[dict[str, str]]:
    """Read a CSV file; no lines if it does not exist."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def entry(run: str, table: str, group: str, name: str, figure: str) -> dict[str, str]:
    """Find one number of a stored table."""
    lines = read(TABLES / run / f"{table}.csv")
    [line] = [x for x in lines if (x["group"], list(x.values())[1], x["figure"]) == (group, name, figure)]
    return line


def value(run: str, table: str, group: str, name: str, figure: str, digits: int = 2, spread: bool = False) -> str:
    """Format one number of a stored table, with its standard deviation if `spread`."""
    line = entry(run, table, group, name, figure)
    text = f"{float(line['mean']):.{digits}f}"
    return f"{text} ± {float(line['std']):.{digits}f}" if spread and line["std"] else text


def count(run: str, table: str, group: str, name: str, figure: str) -> str:
    """Return the number of runs behind one number of a stored table."""
    return entry(run, table, group, name, figure)["count"]


def difference(run: str, group: str, name: str, figure: str, digits: int = 3) -> str:
    """Format a paired difference from level "batch", with an arrow if it is significant."""
    kind = next(path.stem for path in (TABLES / run).glob("*-levels.csv"))
    line = entry(run, kind, group, f"{name} − batch", figure)
    return f"{float(line['mean']):+.{digits}f}" + {"higher": " ↑", "lower": " ↓", "": ""}[line["mark"]]


def beside(run: str, data: str) -> str:
    """Make a table of our means beside the numbers that a paper prints for its network on the same data."""
    shown = {
        "accuracy, %": "accuracy, %", "ece, %": "ECE, %", "temperature": "T", "ece, temperature, %": "ECE after T, %",
    }  # fmt: skip
    lines = [line for line in read(TABLES / run / "paper.csv") if line["data"] == data]
    methods = list(dict.fromkeys(line["method"] for line in lines if line["table"] == "table 1"))
    rows = ["| loss | " + " | ".join(f"{words} | paper" for words in shown.values()) + " |"]
    rows.append("|:--|" + "--:|--:|" * len(shown))
    for method in methods:
        cells = []
        for figure in shown:
            [line] = [x for x in lines if (x["method"], x["figure"]) == (method, figure)]
            digits = 2 if figure == "temperature" else 1
            cells += [f"{float(line['ours']):.{digits}f}", line["paper"]]
        rows.append(f"| {SHORT[method]} | {' | '.join(cells)} |")
    return "\n".join(rows)


def fact(run: str, what: str) -> str:
    """Return one line of a run's summary."""
    return next(line["value"] for line in read(TABLES / run / "run.csv") if line["what"] == what)


def claims(columns: Sequence[tuple[str, Sequence[tuple[str, str]]]], rows: Sequence[tuple[str, str, int]]) -> str:
    """Make a table of verdicts: rows are (words, claim, digits), columns (heading, pairs of run and data or network).

    A claim about one data set has its mean difference; one about several counts its verdicts. A dash stands where it
    was not run, or where the paper does not claim it.
    """
    lines = ["| claim | " + " | ".join(heading for heading, _ in columns) + " |", "|:--|" + ":--|" * len(columns)]
    for words, claim, digits in rows:
        cells = []
        for _, places in columns:
            results = [
                line
                for run, data in places
                for line in read(TABLES / run / "claims.csv")
                if f"{line['source']}: {line['claim']}" == claim and line["data"].startswith(data)
            ]
            verdicts = Counter(VERDICTS[line["verdict"]] for line in results)
            if len(results) == 1:
                cells.append(f"**{next(iter(verdicts))}** ({float(results[0]['mean']):+.{digits}f})")
            else:
                cells.append(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()) or "–")
        lines.append(f"| {words} | " + " | ".join(cells) + " |")
    if len(lines) == 2 or any("claim" not in line for line in lines[:1]):
        raise ValueError("no claims")
    return "\n".join(lines)


def count_verdicts() -> str:
    """Count the verdicts of the main claims of each stored run."""
    lines = ["| study | held | did not hold | open | tables |", "|:--|--:|--:|--:|:--|"]
    for run in sorted(path.parent.name for path in TABLES.glob("*/claims.csv")):
        mains = (line for line in read(TABLES / run / "claims.csv") if line["main"] == "True")
        counts = Counter(line["verdict"] for line in mains)
        numbers = " | ".join(str(counts[verdict]) for verdict in VERDICTS)
        lines.append(f"| {run} | {numbers} | `docs/studies/{run}` |")
    return "\n".join(lines)


def fitted(run: str) -> str:
    """Return the mean accuracy in percent of cross-entropy on its training samples, from the stored rows."""
    with gzip.open(TABLES / run / ROWS, "rt", encoding="utf-8") as file:
        rows = [row for line in file for row in json.loads(line)["rows"] if row["loss"] == "cross_entropy"]
    return f"{100 * mean(row['train_accuracy'] for row in rows):.1f}"


def costs(study: str, prefix: str = "") -> str:
    """Make a table of what each preset of a study costs whose name begins with `prefix`."""
    known = [line for line in read(TABLES / COSTS) if line["study"] == study and line["flops"]]
    known = [line for line in known if line["preset"].startswith(prefix)]
    lines = ["| preset | data | runs | hours on a GPU | hours on one core |", "|:--|:--|--:|--:|--:|"]
    for line in known:
        cells = [f"`{line['preset']}`", line["data"], line["runs"], line["GPU hours"], line["core hours"]]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def rate(name: str) -> str:
    """Return the speed for which the costs are stated."""
    return read(TABLES / COSTS)[0][name]


def seconds() -> str:
    """Make a table of the times of training steps."""
    lines = ["| plain `nn.Sequential` | cross-entropy, ms | CLUE, ms | ratio |", "|:--|--:|--:|--:|"]
    for line in read(TABLES / SECONDS):
        plain, clue = float(line["cross-entropy"]), float(line["CLUE"])
        lines.append(f"| {line['network']} | {1e3 * plain:.1f} | {1e3 * clue:.1f} | {clue / plain:.2f} |")
    return "\n".join(lines)


def assemble() -> dict[str, str]:
    """Render every template; return name of the page → text."""
    loader = FileSystemLoader(PAPERS)
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True)
    helpers = (value, count, beside, difference, fact, fitted, claims, count_verdicts, costs, rate, seconds)
    environment.globals |= {function.__name__: function for function in helpers}
    names = sorted(path.name for path in PAPERS.glob("*.md.j2"))
    origin = (TABLES / ORIGIN).read_text(encoding="utf-8")
    return {name.removesuffix(".j2"): f"{environment.get_template(name).render()}\n{origin}" for name in names}


def _dots(ax: Any, names: Sequence[str], series: dict[str, list[tuple[float, float]]], label: str) -> None:
    """Draw means with error bars: one row per name, one colour per series."""
    from trueup.reports import style

    for index, (words, numbers) in enumerate(series.items()):
        at = [len(names) - i - 0.15 * (index - (len(series) - 1) / 2) for i in range(len(names))]
        look = {key: x for key, x in style.line_style(index).items() if key != "linestyle"}
        ax.errorbar([m for m, _ in numbers], at, xerr=[s for _, s in numbers], **look, linestyle="", label=words)
    ax.set_yticks(range(len(names), 0, -1), labels=list(names))
    style.set_labels(ax, "", label, "")
    ax.grid(axis="x", alpha=0.3)


def _legend(figure: Any, ax: Any, columns: int = 5) -> None:
    """Put the legend of one panel below the figure."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize="x-small", frameon=False)


def _pair(run: str, table: str, group: str, name: str, figure: str) -> tuple[float, float]:
    """Return a mean and its standard deviation; NaN for a method that was not run."""
    lines = [line for line in read(TABLES / run / f"{table}.csv") if (line["group"], line["figure"]) == (group, figure)]
    line = next((line for line in lines if list(line.values())[1] == name), {"mean": "", "std": ""})
    return float(line["mean"] or "nan"), float(line["std"] or 0)


def draw_figures(folder: Path) -> list[Path]:
    """Draw the figures of all pages from the stored tables."""
    from matplotlib import rc_context

    from trueup.reports import style
    from trueup_studies.figures import panels

    drawn = {}
    figure, [ax] = panels(1, 1, height=3.6)
    methods = {
        "Uncalibrated": "uncalibrated", "Temperature Scaling": "temperature scaling",
        "Vector Scaling": "vector scaling", "Matrix Scaling": "matrix scaling",
        "Neural Clamping (FL)": "clamping, mean form",
        "Neural Clamping (FL), sum form, λ and γ by ECE": "clamping, sum form, λ chosen too",
        "Neural Clamping (FL), sum form": "clamping, sum form",
        "Neural Clamping (CE), sum form": "clamping (CE), sum form",
        "Neural Clamping (FL), converged": "clamping, converged", "Neural Clamping, released code": "clamping, code",
    }  # fmt: skip
    digits = "neural-clamping-digits", "methods", "digits, cnn"
    _dots(ax, list(methods.values()), {"digits": [_pair(*digits, m, "ECE, %") for m in methods]}, "ECE on digits (%)")
    figure.set_size_inches(5.0, 3.2)
    drawn["clamping-digits"] = figure

    figure, axes = panels(1, 2, height=2.8)
    methods = {
        "Uncalibrated": "uncalibrated", "Temperature Scaling": "temperature scaling",
        "Neural Clamping (FL)": "clamping, mean form", "Neural Clamping, released code": "clamping, code",
        "trueup clamp": "trueup clamp",
    }  # fmt: skip
    shifted = {"no shift": ("neural-clamping-cifar10-5000", "cifar10, resnet20")}
    shifted |= {
        words: ("neural-clamping-cifar10-shift", f"cifar10, {name} 3, resnet20")
        for words, name in (("colour cast", "colour_cast"), ("blur", "gaussian_blur"))
    }
    for ax, metric, label in zip(axes, ("NLL", "accuracy, %"), ("NLL", "Accuracy (%)"), strict=True):
        series = {w: [_pair(run, "methods", group, m, metric) for m in methods] for w, (run, group) in shifted.items()}
        _dots(ax, list(methods.values()), series, label)
    axes[1].set_yticklabels([])
    _legend(figure, axes[0])
    drawn["clamping-shift"] = figure

    names = {"newsgroups20": "20Newsgroups", "digits": "digits", "trec-pooled": "trec"}
    names |= {"fashion_mnist-fitted": "fashion_mnist", "cifar10": "CIFAR-10"}
    titles = {"newsgroups20": "20 newsgroups", "digits": "digits", "trec-pooled": "TREC, pooled"}
    titles |= dict.fromkeys(("fashion_mnist", "fashion_mnist-fitted"), "Fashion-MNIST") | {"cifar10": "CIFAR-10"}
    figure, axes = panels(1, len(names), height=2.6)
    figure.set_size_inches(10.0, 2.8)
    for index, (ax, (data, group)) in enumerate(zip(axes, names.items(), strict=True)):
        for number, (loss, short) in enumerate(SHORT.items()):
            raw = _pair(f"rethinking-{data}", "table_1", group, loss, "ECE, %")
            after = _pair(f"rethinking-{data}", "table_2", group, loss, "ECE with TS, %")
            ax.plot([0, 1], [raw[0], after[0]], **style.line_style(number), label=short)
        ax.set_xticks([0, 1], labels=["raw", "after temperature"])
        ax.set(xlim=(-0.2, 1.2), ylim=(0, None))
        style.set_labels(ax, titles[data], "", "" if index else "ECE (%)")
    _legend(figure, axes[0])
    drawn["rethinking-before-after"] = figure

    figure, [ax] = panels(1, 1)
    figure.set_size_inches(5.0, 2.8)
    for index, (data, group) in enumerate(names.items()):
        order = ["Focal Loss", "Label Smoothing", "L1 Norm", "Cross-Entropy", "Inverse Focal Loss"]
        temperatures = [_pair(f"rethinking-{data}", "table_2", group, loss, "temperature")[0] for loss in order]
        look = {**style.line_style(index), "linestyle": ""}
        ax.plot(range(len(order)), temperatures, **look, label=titles[data])
    ax.set_xticks(range(len(order)), labels=[SHORT[loss] for loss in order], rotation=15)
    ax.axhline(1, color=style.GREY, linewidth=0.7)
    style.set_labels(ax, "", "", "Fitted temperature")
    _legend(figure, ax)
    drawn["rethinking-temperature"] = figure

    figure, axes = panels(1, 4, height=3.0)
    figure.set_size_inches(10.0, 3.0)
    methods = {
        "cross-entropy": "cross-entropy", "cross-entropy of 5 passes": "CE of the mean of 5 passes",
        "cross-entropy, ensemble of 5": "ensemble of 5", "focal loss": "focal", "AvUC": "AvUC", "MMCE": "MMCE",
        "CLUE batch, α 0.5": "CLUE batch, α ½", "CLUE group, α 0.9": "CLUE group, α 0.9",
        "CLUE sample, α 0.5": "CLUE sample, α ½", "CLUE consistent, α 0.5": "CLUE consistent, α ½",
    }  # fmt: skip
    tasks = {"digits": "digits", "fashion_mnist": "Fashion-MNIST", "trec": "TREC", "sst5": "SST-5"}
    for ax, (data, words) in zip(axes, tasks.items(), strict=True):
        numbers = [_pair(f"clue-{data}", "classification", data, method, "ECE, %") for method in methods]
        _dots(ax, list(methods.values()), {words: numbers}, f"ECE on {words} (%)")
    for ax in axes[1:]:
        ax.set_yticklabels([])
    drawn["clue-ece"] = figure

    figure, axes = panels(1, 2, height=2.8)
    for ax, data in zip(axes, ("digits", "fashion_mnist"), strict=True):
        lines = [line for line in read(TABLES / f"clue-{data}" / "shift.csv") if line["figure"] == "ECE, %"]
        chosen = next(line["method"] for line in lines if line["method"].startswith("CLUE"))
        severities = sorted({int(line["group"].split()[-1]) for line in lines})
        for index, method in enumerate(("cross-entropy", "cross-entropy of 5 passes", "focal loss", chosen)):
            ece = [_pair(f"clue-{data}", "shift", f"{data}, severity {s}", method, "ECE, %")[0] for s in severities]
            words = "CLUE, chosen on validation" if method == chosen else method.replace("of 5", "of the mean of 5")
            ax.plot(severities, ece, **style.line_style(index), label=words)
        style.set_labels(ax, titles[data], "Severity of the shift", "ECE (%)")
        ax.set_xticks(severities)
    _legend(figure, axes[0], columns=2)
    drawn["clue-shift"] = figure

    folder.mkdir(parents=True, exist_ok=True)
    for name, figure in drawn.items():
        with rc_context({"svg.hashsalt": name}):  # equal figures are equal files
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None}, bbox_inches="tight")
    return [folder / f"{name}.svg" for name in drawn]


def count_costs(path: Path) -> None:
    """Count the operations of every preset whose networks can be built."""
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


def measure_seconds(path: Path) -> None:
    """Measure training steps of two plain networks with dropout before the last layer, on one thread."""
    import torch
    from torch import nn

    from trueup import losses

    torch.set_num_threads(1)
    torch.manual_seed(0)

    def convolve(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU(), nn.MaxPool2d(2)]

    def layers(first: int, width: int) -> list[nn.Module]:
        return [nn.Linear(first, width), nn.ReLU(), nn.Dropout(0.3), nn.Linear(width, 10)]

    networks = {
        "2 convolutions, 2 linear layers": [*convolve(1, 16), *convolve(16, 32), nn.Flatten(), *layers(1568, 128)],
        "3 linear layers of 512": [nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), *layers(512, 512)],
    }
    images, labels = torch.rand(128, 1, 28, 28), torch.randint(10, (128,))
    plain, clue = nn.CrossEntropyLoss(), losses.CLUE(passes=5)
    lines = ["network,cross-entropy,CLUE"]
    for name, parts in networks.items():
        network = nn.Sequential(*parts)
        optimiser = torch.optim.SGD(network.parameters(), lr=0.01)
        times: dict[bool, list[float]] = {False: [], True: []}
        for number in range(200):
            aligned, start = bool(number % 2), process_time()
            optimiser.zero_grad()
            (clue(network, images, labels) if aligned else plain(network(images), labels)).backward()
            optimiser.step()
            times[aligned].append(process_time() - start)
        lines.append(f'"{name}",{median(times[False]):.5f},{median(times[True]):.5f}')
    path.write_text("\n".join([*lines, ""]), encoding="utf-8")


def take(name: str, page: Path) -> None:
    """Copy the tables of a study's page, replacing those of an earlier run."""
    target, tables = TABLES / name, sorted(page.glob("*.csv"))
    if not tables or page.resolve() == target.resolve():
        raise SystemExit(f"{page}: no tables of another folder to take")
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        old.unlink()
    for path in tables:
        shutil.copy(path, target / path.name)
    if (store := page.with_suffix(".sqlite")).exists():
        from trueup_studies import Store

        Store(store).dump(page.name, target / ROWS)
        if (target / ROWS).stat().st_size > LARGEST:
            (target / ROWS).unlink()


def restore(name: str, store: Path) -> None:
    """Write the rows of a run to a store, which is created if it is missing."""
    from trueup_studies import Store

    store.parent.mkdir(parents=True, exist_ok=True)
    print(f"{store}: {Store(store).restore(TABLES / name / ROWS)} new cells")


def judge(name: str) -> None:
    """Judge the claims of a stored run again, from its rows."""
    from trueup_studies import STUDIES, Options, Store
    from trueup_studies.study_page import judge_rows

    parser = argparse.ArgumentParser()
    parser.add_argument("study")
    for option in ("preset", "data", "network", "seeds", "data-dir"):
        parser.add_argument(f"--{option}", type=int if option == "seeds" else str)
    for short, option in (("-m", "--method"), ("-w", "--without")):
        parser.add_argument(short, option, action="append", default=[])
    chosen = vars(parser.parse_args(fact(name, "command").split()[2:]))
    study = STUDIES[chosen.pop("study")]
    options = Options(methods=tuple(chosen.pop("method")), **{**chosen, "without": tuple(chosen["without"])})
    with TemporaryDirectory() as folder:
        store = Store(Path(folder) / "rows.sqlite")
        store.restore(TABLES / name / ROWS)
        rows = [{**outcome.settings, **row} for outcome in store.known(study.name) for row in outcome.rows]
    (TABLES / name / "claims.csv").write_text(judge_rows(study, rows, options).csv(), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Take tables if requested, and write the pages and figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--take", nargs=2, action="append", default=[], metavar=("NAME", "FOLDER"))
    parser.add_argument("--restore", nargs=2, action="append", default=[], metavar=("NAME", "STORE"))
    parser.add_argument("--judge", action="append", default=[], metavar="NAME", help="judge the claims of a run again")
    parser.add_argument("--costs", action="store_true", help="count the operations of every preset again")
    parser.add_argument("--seconds", action="store_true", help="measure the seconds of a step of CLUE again")
    chosen = parser.parse_args(arguments)
    for name, page in chosen.take:
        take(name, Path(page))
    for name, store in chosen.restore:
        restore(name, Path(store))
    for name in chosen.judge:
        judge(name)
    if chosen.costs:
        TABLES.mkdir(exist_ok=True)
        count_costs(TABLES / COSTS)
    if chosen.seconds:
        measure_seconds(TABLES / SECONDS)
    draw_figures(IMAGES)
    (TABLES / ORIGIN).write_text(f"Made from {made_from()}.\n", encoding="utf-8")
    for name, text in assemble().items():
        (PAPERS / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
