"""The page about a study: its tables and figures in one HTML file, and every one of them in files beside it."""

from __future__ import annotations

import base64
import io
import platform
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from trueup.core.version import __version__
from trueup.io.atomic import atomic_write
from trueup.report.html import definition_list, document, escape, footer, paragraph, section
from trueup.study import tables as room
from trueup.study.cell import as_json
from trueup.study.grid import Options, Study
from trueup.study.paper_comparison import beside
from trueup.study.paper_comparison_html import beside_section, note, scrolling
from trueup.study.store import Outcome, Store
from trueup.study.tables import Table

FORMATS = ("pdf", "svg", "png")
DPI = 200
WIDE = 5.0
"""Inches from which on a figure has a row for itself."""
LARGEST = 2**18
"""Bytes of vectors: hatches make millions."""
MANY = 12
"""Values of a setting that are listed; of more, how many there are."""
WRAPS = {0: "{}", 1: "<strong>{}</strong>", 2: "<em>{}</em>"}
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


def save(study: Study, store: Store, options: Options | None, folder: str | Path) -> Path:
    """Write the page of what a store holds of a study, with its tables and figures in files; tell where the page is.

    Tables are written as Markdown, LaTeX and CSV, figures as PDF, SVG and PNG. Nothing is run: a cell without a result
    is told to be missing, and no number stands on the page that was not computed from the store or printed in a paper.

    >>> from tempfile import TemporaryDirectory
    >>> from trueup.study import STUDIES, run
    >>> options = Options(data="overconfident", seeds=1, methods=("identity", "temperature"))
    >>> with TemporaryDirectory() as folder:
    ...     store = Store(f"{folder}/results.sqlite")
    ...     ran = run(STUDIES["post-hoc"], store, options=options, progress=False)
    ...     page = save(STUDIES["post-hoc"], store, options, f"{folder}/page")
    ...     print(page.name, sorted(path.name for path in page.parent.glob("scores.*")))
    index.html ['scores.csv', 'scores.md', 'scores.tex']
    """
    options = options or Options()
    cells = study.cells(options)
    outcomes = store.outcomes(cells)
    finished = [outcome for outcome in outcomes if outcome.status == "finished"]
    rows = [{**outcome.settings, **row} for outcome in finished for row in outcome.rows]
    tables = dict(study.tables(rows, options)) if rows else {}
    figures = dict(study.figures(rows, options)) if rows else {}
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    room.save(tables, target)
    drawings = [_drawn(name, figure, target) for name, figure in figures.items()]
    compared = beside(tables, rows, study.paper) if study.paper and rows else []
    body = "".join(
        [
            _header(study, len(cells), outcomes),
            "<main>",
            *(_table_section(name, table) for name, table in tables.items()),
            _figures_section(drawings),
            beside_section(study.paper, compared, options) if rows else "",
            _run_section(study, len(cells), outcomes, options),
            "</main>",
            footer(),
        ]
    )
    page = target / "index.html"
    with atomic_write(page) as (draft,):
        draft.write_text(document(study.title or study.name, body, policy=POLICY), encoding="utf-8")
    return page


def _header(study: Study, cells: int, outcomes: Sequence[Outcome]) -> str:
    done = sum(outcome.status == "finished" for outcome in outcomes)
    failed = len(outcomes) - done
    left = cells - done - failed
    said = (
        "Every run is in." if done == cells else f"{done:,} of {cells:,} runs are in; the numbers are of these alone."
    )
    minutes = sum(outcome.seconds for outcome in outcomes) / 60
    facts = [("Runs", f"{done:,}"), ("Failed", f"{failed:,}"), ("Not run", f"{left:,}")]
    facts.append(("Minutes of work", f"{minutes:,.1f}"))
    heading = f"<span>Study</span> {escape(study.name)}"
    words = f"{study.title or study.name}. {said}"
    return f"<header><h1>{heading}</h1>{paragraph(words, 'verdict')}{definition_list(facts, 'facts')}</header>"


def _table_section(name: str, table: Table) -> str:
    heading = table.title or name.replace("_", " ").replace("-", " ").capitalize()
    links = _links(name, ("md", "tex", "csv"))
    return section(f"table-{escape(name)}", heading, table_html(table), *map(note, table.notes), links)


def table_html(table: Table) -> str:
    """A table as the page shows it: the best in bold, the second underlined, marks as arrows.

    >>> rows = [{"method": "raw", "ece": 0.05}, {"method": "temperature", "ece": 0.01}]
    >>> made = room.tabulate(rows, by="method", columns=[room.Column("ece", scale=100, digits=2)])
    >>> "<td><strong>1.00</strong></td>" in table_html(made)
    True
    """
    head = "".join(f'<th scope="col">{escape(column.heading)}</th>' for column in table.columns)
    lines = []
    for group, members in table.groups.items():
        if group:
            lines.append(f'<tr><th scope="rowgroup" colspan="{1 + len(table.columns)}">{escape(group)}</th></tr>')
        for name, entries in members.items():
            cells = "".join(f"<td>{table._text(entries, column, WRAPS)}</td>" for column in table.columns)
            lines.append(f'<tr><th scope="row">{escape(name)}</th>{cells}</tr>')
    first = f'<th scope="col">{escape(table.head)}</th>'
    return scrolling(table.title or table.head, f"<thead><tr>{first}{head}</tr></thead><tbody>{''.join(lines)}</tbody>")


def _drawn(name: str, figure: Any, folder: Path) -> str:
    """Write a figure in every format; its vectors, or pixels where those are too many, for the page."""
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


def _figures_section(drawings: Sequence[str]) -> str:
    if not drawings:
        return ""
    return section("figures", "Figures", f'<div class="drawings">{"".join(drawings)}</div>')


def _run_section(study: Study, cells: int, outcomes: Sequence[Outcome], options: Options) -> str:
    """Every setting, what failed and why, and with what it was run."""
    chosen = {
        name: value for name, value in vars(options).items() if value not in (None, (), False) and name != "threads"
    }
    items = [("Asked for", ", ".join(f"{name} {value}" for name, value in chosen.items()) or "those of the study")]
    items += [(name.replace("_", " ").capitalize(), said) for name, said in _settings(outcomes)]
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "numpy", "scipy"))
    items.append(
        (
            "Version",
            f"{study.name} {study.version}, trueup {__version__}, Python {platform.python_version()}, {packages}",
        )
    )
    missing = cells - len(outcomes)
    parts = [definition_list(items, "how")]
    if missing:
        parts.append(
            paragraph(f"{missing:,} runs of {cells:,} have not been done yet: the same command goes on with them.")
        )
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failed:
        told = ", ".join(f"{name} {value}" for name, value in outcome.settings.items())
        parts.append(
            f'<h3>A run that failed</h3>{note(told)}<pre tabindex="0" class="error">{escape(outcome.error)}</pre>'
        )
    return section("how", "How it was run", *parts)


def _settings(outcomes: Iterable[Outcome]) -> list[tuple[str, str]]:
    """The values of every setting over all runs; of the many, how many."""
    found: dict[str, dict[str, None]] = {}
    for outcome in outcomes:
        for name, value in outcome.settings.items():
            found.setdefault(name, {})[value if isinstance(value, str) else as_json(value)] = None
    return [(n, ", ".join(v) if len(v) <= MANY else f"{len(v):,} values") for n, v in found.items()]


def _links(name: str, suffixes: Iterable[str]) -> str:
    links = (f'<a href="{escape(name)}.{suffix}">{suffix}</a>' for suffix in suffixes)
    return f'<p class="files">{escape(_words(name))}: {" · ".join(links)}</p>'


def _words(name: str) -> str:
    return name.replace("_", " ").replace("-", " ")
