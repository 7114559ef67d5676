"""What a study is: a grid of settings, the work on one of them, and tables of the rows that come out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product as combinations
from typing import TYPE_CHECKING, Any

from trueup.registry import Lazy
from trueup.study.cell import Cell

if TYPE_CHECKING:
    from trueup.study.tables import Table

Rows = Sequence[Mapping[str, Any]]

STUDIES = Lazy(
    "study",
    {
        "neural-clamping": "trueup.study.papers.neural_clamping.clamping_study:STUDY",
        "rethinking": "trueup.study.papers.rethinking.rethinking_study:STUDY",
        "clue": "trueup.study.papers.clue.clue_study:STUDY",
        "post-hoc": "trueup.study.papers.post_hoc.post_hoc_study:STUDY",
    },
)
"""Name → Study, imported when it is asked for."""


@dataclass(frozen=True)
class Options:
    """What a user may choose. None is the study's own default."""

    data: str | None = None
    """The data set, or the one file of several."""
    data_dir: str | None = None
    """Where data sets are kept."""
    seeds: int | None = None
    """How many runs of everything."""
    preset: str | None = None
    """Sizes and schedules by name, as "digits" or "paper"."""
    methods: tuple[str, ...] = ()
    """These alone; every one if empty."""
    oracle: bool = False
    """Choose on the test half, as some papers did."""
    threads: int = 1
    """Of one cell. Another number than one may change the last digits."""

    def __post_init__(self) -> None:
        for name, value in (("seeds", self.seeds), ("threads", self.threads)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


def no_local(options: Options) -> Mapping[str, Any]:
    """Nothing that depends on the machine."""
    return {}


def no_figures(rows: Rows, options: Options) -> Mapping[str, Any]:
    """No figure at all."""
    return {}


@dataclass(frozen=True)
class Study:
    """An experiment: one short file that ends in one of these.

    `work` is "module:function", so that a worker on another machine finds it. The function takes the settings of one
    cell, `local` among them, and returns rows in plain data. It must be deterministic given the settings.

    >>> study = Study("demo", 1, grid=lambda options: product(method=["a", "b"], seed=range(2)), work="math:exp",
    ...               tables=lambda rows, options: {})
    >>> [cell.settings["seed"] for cell in study.cells(Options())]
    [0, 1, 0, 1]
    """

    name: str
    version: int
    """Raised whenever the same settings would give other rows: old results then no longer count."""
    grid: Callable[[Options], Iterable[Mapping[str, Any]]]
    """The settings of every cell."""
    work: str
    tables: Callable[[Rows, Options], Mapping[str, Table]]
    """Name of a file → table."""
    figures: Callable[[Rows, Options], Mapping[str, Any]] = no_figures
    """Name of a file → figure of Matplotlib."""
    local: Callable[[Options], Mapping[str, Any]] = no_local
    """What of the options tells about the machine, such as where data are: it makes no new cells."""
    title: str = ""
    paper: str = ""
    """Whose printed numbers to set beside ours: a name in the facts."""

    def cells(self, options: Options | None = None) -> list[Cell]:
        """Every cell of the study, each once, in the order of the grid."""
        options = options or Options()
        local = {"threads": options.threads, **self.local(options)}
        found = {cell.key: cell for s in self.grid(options) for cell in [Cell(self.name, self.version, s, local)]}
        return list(found.values())


def product(**axes: Iterable[Any]) -> list[dict[str, Any]]:
    """Settings for every combination of the axes' values, the last axis running fastest.

    >>> product(method=["a", "b"], seed=[0, 1])[:3]
    [{'method': 'a', 'seed': 0}, {'method': 'a', 'seed': 1}, {'method': 'b', 'seed': 0}]
    """
    return [dict(zip(axes, values, strict=True)) for values in combinations(*axes.values())]
