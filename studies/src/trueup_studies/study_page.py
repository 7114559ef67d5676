"""The page of a study: its tables and figures in one HTML file, and each of them in files next to it."""

from __future__ import annotations

import base64
import io
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

from trueup.io.atomic import atomic_write
from trueup.reports.html import document, escape, footer
from trueup_studies.claims import ClaimTable, judge_claims
from trueup_studies.grid import Options, Rows, Study, as_json
from trueup_studies.published import compare_with_paper, comparison_csv, comparison_section
from trueup_studies.store import Outcome, Store
from trueup_studies.tables import save_tables, to_csv
from trueup_studies.templates import render

TABLE_FORMATS = ("md", "tex", "csv")
FORMATS = ("pdf", "svg", "png")
WRITTEN = (*TABLE_FORMATS, *FORMATS)
STUDY_MARK = "<span>Study</span>"
"""Marks an HTML file as the page of a study."""
DPI = 200
WIDE = 5.0
"""Width in inches from which a figure has its own row."""
LARGEST = 2**18
"""Largest SVG in bytes; larger figures become pixels."""
MANY = 12
"""Largest number of listed values of a setting; with more, only their number is printed."""
SUMMARY = "run.csv"
"""File with the summary of the run."""
COMPARISON = "paper.csv"
"""File with our numbers and the published ones."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def save_page(study: Study, store: Store, options: Options | None, folder: str | Path) -> Path:
    """Write the page of a study from the results in a store, with its tables and figures in files; return its path.

    Tables are written as Markdown, LaTeX and CSV, figures as PDF, SVG and PNG. Nothing is run: cells without a result
    are listed as missing, and every number comes from the store or from a paper. While cells are missing, each row
    shows its number of runs. `paper.csv` has our numbers and the published ones. Files that a former page links to and
    this one does not are removed, since they belong to other options.

    >>> from tempfile import TemporaryDirectory
    >>> from trueup_studies import STUDIES, run
    >>> options = Options(data="overconfident", seeds=1, methods=("identity", "temperature"))
    >>> with TemporaryDirectory() as folder:
    ...     store = Store(f"{folder}/results.sqlite")
    ...     ran = run(STUDIES["post-hoc"], store, options=options, progress=False)
    ...     page = save_page(STUDIES["post-hoc"], store, options, f"{folder}/page")
    ...     print(page.name, sorted(path.name for path in page.parent.glob("scores.*")))
    index.html ['scores.csv', 'scores.md', 'scores.tex']
    """
    options = options or Options()
    cells = study.cells(options)
    outcomes = store.outcomes(cells)
    finished = [outcome for outcome in outcomes if outcome.status == "finished"]
    rows = [{**outcome.settings, **row} for outcome in finished for row in outcome.rows]
    incomplete = len(finished) < len(cells)
    tables = {
        name: replace(table, count_runs=incomplete or table.count_runs)
        for name, table in (study.tables(rows, options).items() if rows else ())
    }
    claims = judge_rows(study, rows, options) if rows and study.claims() else None
    figures = dict(study.figures(rows, options)) if rows else {}
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    save_tables({**({"claims": claims} if claims else {}), **tables}, target)
    summary = summarise_run(study, len(cells), outcomes, options)
    with atomic_write(target / SUMMARY) as [draft]:
        draft.write_text(to_csv(list(summary.items()), ["what", "value"]), encoding="utf-8")
    drawings = [_save_figure(name, figure, target) for name, figure in figures.items()]
    comparisons = compare_with_paper(tables, rows, study.paper) if study.paper and rows else []
    if comparisons:
        with atomic_write(target / COMPARISON) as [draft]:
            draft.write_text(comparison_csv(comparisons), encoding="utf-8")
    done = len(finished)
    minutes = sum(outcome.seconds for outcome in outcomes) / 60
    counts = {"Runs": done, "Failed": len(outcomes) - done, "Not run": len(cells) - len(outcomes)}
    body = render(
        "study.html.j2",
        study=study, cells=len(cells), done=done, outcomes=outcomes, drawings=drawings, mark=STUDY_MARK,
        counts=[*((name, f"{n:,}") for name, n in counts.items()), ("Minutes of work", f"{minutes:,.1f}")],
        tables={"claims": claims, **tables} if claims else tables,
        comparison=comparison_section(study.paper, comparisons, options) if rows else "",
        items=_run_items(study, outcomes, options),
        links=_links, words=_words, table_formats=TABLE_FORMATS, footer=footer(),
    )  # fmt: skip
    page = target / "index.html"
    former = _linked_files(page.read_text(encoding="utf-8", errors="replace")) if page.is_file() else set()
    content = document(study.title or study.name, body, policy=POLICY)
    with atomic_write(page) as (draft,):
        draft.write_text(content, encoding="utf-8")
    for name in former - _linked_files(content) if rows else ():  # an empty page replaces nothing
        (target / name).unlink(missing_ok=True)
    return page


def judge_rows(study: Study, rows: Rows, options: Options) -> ClaimTable:
    """Judge the claims of a study from its rows."""
    ratios: dict[str, float] = {}
    for row in rows:
        ratios[row["data"]] = max(ratios.get(row["data"], 0.0), study.resplit_ratio(row))
    return judge_claims(study.claims(), rows, options, resplit_ratio=ratios)


def _linked_files(page: str) -> set[str]:
    """Return the files that a page of a study links to; none for any other page.

    >>> sorted(_linked_files(f'<header><h1><span>Study</span> x</h1>{_links("scores", ["md", "csv"])}'))
    ['scores.csv', 'scores.md']
    """
    if STUDY_MARK not in page:
        return set()
    return {unescape(name) for name in re.findall(rf'<a href="([^"/\\]+\.(?:{"|".join(WRITTEN)}))">', page)}


def summarise_run(study: Study, cells: int, outcomes: Sequence[Outcome], options: Options) -> dict[str, str]:
    """Summarise a run: the command, the data, the numbers of runs, the hours and the machine."""
    done = [outcome for outcome in outcomes if outcome.status == "finished"]
    values = dict(_settings(done))
    seeds = {as_json(outcome.settings.get("seed", outcome.settings.get("split"))) for outcome in done}
    return {
        "command": command_of(study, options),
        "data": ", ".join(dict.fromkeys(str(outcome.settings.get("data", "")) for outcome in done)),
        "networks": values.get("network", ""),
        "seeds": str(len(seeds)),
        "runs": f"{len(done)}",
        "failed": f"{len(outcomes) - len(done)}",
        "not run": f"{cells - len(outcomes)}",
        "hours": f"{sum(outcome.seconds for outcome in outcomes) / 3600:.2f}",
        "machine": _origins(outcomes, "machine"),
        "version": f"{study.name} {study.version}; {_origins(outcomes, 'software')}",
    }


def command_of(study: Study, options: Options) -> str:
    """Return the command that runs a study with these options; FOLDER stands for the folder of data.

    >>> from trueup_studies import STUDIES
    >>> command_of(STUDIES["rethinking"], Options(preset="trec", data_dir="/data", seeds=2, without=("figure-1d",)))
    'trueup study rethinking --preset trec --data-dir FOLDER --seeds 2 --without figure-1d'
    """
    named = {"preset": options.preset, "data": options.data, "network": options.network}
    words = [f"--{name} {value}" for name, value in named.items() if value is not None]
    words += ["--data-dir FOLDER"] if options.data_dir is not None else []
    words += [] if options.seeds is None else [f"--seeds {options.seeds}"]
    words += [f"-m {method}" for method in options.methods]
    words += [f"--without {part}" for part in options.without]
    words += [f"--{name}" for name in ("oracle", "retrain") if getattr(options, name)]
    return " ".join(["trueup study", study.name, *words])


def _save_figure(name: str, figure: Any, folder: Path) -> str:
    """Write a figure in every format; return its HTML, as SVG or, if that is too large, as PNG."""
    for suffix in FORMATS:
        with atomic_write(folder / f"{name}.{suffix}") as (draft,):
            figure.savefig(draft, format=suffix, dpi=DPI)
    kind, out = "svg+xml", io.BytesIO()
    figure.savefig(out, format="svg", transparent=True)
    if out.tell() > LARGEST:
        kind, out = "png", io.BytesIO()
        figure.savefig(out, format="png", transparent=True, dpi=DPI)
    source = f"data:image/{kind};base64,{base64.b64encode(out.getvalue()).decode('ascii')}"
    wide = ' class="wide"' if figure.get_size_inches()[0] > WIDE else ""
    image = f'<img alt="{escape(_words(name))}" src="{source}">'
    return f"<figure{wide}>{image}<figcaption>{_links(name, FORMATS)}</figcaption></figure>"


def _run_items(study: Study, outcomes: Sequence[Outcome], options: Options) -> list[tuple[str, str]]:
    """List every setting, the machine and the versions."""
    local = ("threads", "device")  # implied by the machine
    chosen = {n: value for n, value in vars(options).items() if value not in (None, (), False) and n not in local}
    items = [("Options", ", ".join(f"{name} {value}" for name, value in chosen.items()) or "the study's defaults")]
    items += [(_words(name).capitalize(), values) for name, values in _settings(outcomes)]
    items.append(("Machine", _origins(outcomes, "machine")))
    return [*items, ("Version", f"{study.name} {study.version}; {_origins(outcomes, 'software')}")]


def _settings(outcomes: Iterable[Outcome]) -> list[tuple[str, str]]:
    """List the values of every setting over all runs, or only their number if there are many."""
    values: dict[str, dict[str, None]] = {}
    for outcome in outcomes:
        for name, value in outcome.settings.items():
            values.setdefault(name, {})[value if isinstance(value, str) else as_json(value)] = None
    return [(n, ", ".join(v) if len(v) <= MANY else f"{len(v):,} values") for n, v in values.items()]


def _origins(outcomes: Iterable[Outcome], what: str) -> str:
    """Name the machine or software of the runs; with several, each with its number of runs.

    >>> from trueup_studies.store import Origin
    >>> done = [Outcome("", "", 1, {}, "finished", "", 0.0, [], Origin(name)) for name in ("one", "one", "two", "")]
    >>> _origins(done, "machine"), _origins(done[:2], "machine")
    ('one (2 runs); two (1 run); not recorded (1 run)', 'one')
    """
    counts = Counter(getattr(outcome.origin, what) or "not recorded" for outcome in outcomes)
    if len(counts) < 2:
        return next(iter(counts), "no run")
    return "; ".join(f"{name} ({count:,} {'run' if count == 1 else 'runs'})" for name, count in counts.items())


def _links(name: str, suffixes: Iterable[str]) -> str:
    links = (f'<a href="{escape(name)}.{suffix}">{suffix}</a>' for suffix in suffixes)
    return f'<p class="files">{escape(_words(name))}: {" · ".join(links)}</p>'


def _words(name: str) -> str:
    return name.replace("_", " ").replace("-", " ")
