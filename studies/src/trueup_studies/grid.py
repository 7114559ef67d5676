"""What a study is: a grid of settings, the work on one of them, and tables of the rows that come out."""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.resources import files
from itertools import product as combinations
from typing import TYPE_CHECKING, Any, NamedTuple

from trueup._core.registry import Registry

if TYPE_CHECKING:
    from trueup_studies.claims import Claim
    from trueup_studies.tables import Table

Rows = Sequence[Mapping[str, Any]]

STUDIES: Registry[Study] = Registry(
    "study",
    {
        "neural-clamping": "trueup_studies.papers.neural_clamping.clamping_study:STUDY",
        "rethinking": "trueup_studies.papers.rethinking.rethinking_study:STUDY",
        "clue": "trueup_studies.papers.clue.clue_study:STUDY",
        "post-hoc": "trueup_studies.papers.post_hoc.post_hoc_study:STUDY",
        "calarena": "trueup_studies.papers.calarena.calarena_study:STUDY",
    },
)
"""Name → Study, imported when it is asked for."""


@dataclass(frozen=True)
class Cell:
    """What is to be run: settings in plain data, which say everything that the result depends on.

    `local` says where this machine keeps its files and how many threads to use. The work sees it among the settings,
    but it is no part of the cell's identity, nor kept with the results.

    >>> cell = Cell("demo", 1, {"method": "temperature", "seed": 0}, local={"folder": "/data"})
    >>> cell.key == Cell("demo", 1, {"seed": 0.0, "method": "temperature"}).key
    True
    >>> cell.key == Cell("demo", 2, {"method": "temperature", "seed": 0}).key
    False
    """

    study: str
    version: int
    """Of the study: a change of what it computes makes new cells of it."""
    settings: Mapping[str, Any]
    local: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", plain(self.settings, "settings"))
        object.__setattr__(self, "local", plain(self.local, "local"))
        if both := sorted(self.settings.keys() & self.local.keys()):
            raise ValueError(f"local must not repeat the names of settings, got {both[0]!r} in both")

    def __hash__(self) -> int:
        return hash(self.key)

    @cached_property
    def key(self) -> str:
        """The identity: a hash of study, version and settings, however these are ordered."""
        known = [self.study, self.version, _canonical(self.settings)]
        return digest(as_json(known, sort_keys=True).encode())

    def __str__(self) -> str:
        return f"{self.study}({', '.join(f'{name}={value}' for name, value in self.settings.items())})"


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
    network: str | None = None
    """Another network than the preset's, or one of several."""
    oracle: bool = False
    """Choose on the test half, as some papers did."""
    without: tuple[str, ...] = ()
    """Parts of a study that are left out, as "figure-1d"."""
    device: str | None = None
    """Where networks are, such as "cuda"; if None, the GPU of whoever runs a cell, or its CPU."""
    retrain: bool = False
    """Train also the networks that come with the package."""
    threads: int = 1
    """Of one cell. Another number than one may change the last digits."""

    def __post_init__(self) -> None:
        for name, value in (("seeds", self.seeds), ("threads", self.threads)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


class WantedFile(NamedTuple):
    """A file, or several by a pattern, of the folder of data."""

    path: str
    words: str = ""
    """What it is for; of one that is not needed, what is done without it."""
    needed: bool = True


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
    figures: Callable[[Rows, Options], Mapping[str, Any]] = lambda rows, options: {}
    """Name of a file → figure of Matplotlib."""
    local: Callable[[Options], Mapping[str, Any]] = lambda options: {}
    """What of the options tells about the machine, such as where data are: it makes no new cells."""
    presets: Callable[[], Mapping[str, Sequence[str]]] = dict
    """Preset → its data sets, the default first."""
    files: Callable[[str], Sequence[WantedFile]] = lambda preset: ()
    """Preset → files that it wants in the folder of data beside those of its data sets."""
    claims: Callable[[], Sequence[Claim]] = tuple
    """What the paper says, each judged by the rows."""
    resplit_ratio: Callable[[Mapping[str, Any]], float] = lambda row: 0.0
    """A row with its settings → how many samples its run tests on over how many it does not, where each run splits the
    same samples anew; 0 elsewhere."""
    flops: Callable[[Sequence[Mapping[str, Any]]], tuple[float, list[str]]] | None = None
    """Settings of cells → the floating-point operations of their networks, and what could not be counted."""
    parts: tuple[str, ...] = ()
    """What may be left out of it."""
    takes: tuple[str, ...] = ()
    """Which of the options `network` and `retrain` it knows."""
    chooses: bool = False
    """Whether it chooses something on validation samples, which an oracle would choose on the test's."""
    title: str = ""
    paper: str = ""
    """Whose published numbers to compare with: a name in published.csv."""

    def cells(self, options: Options | None = None) -> list[Cell]:
        """Every cell of the study, each once, in the order of the grid."""
        options = options or Options()
        if options.oracle and not self.chooses:
            raise ValueError(f"oracle is of studies that choose among settings, got it with {self.name}")
        for name in ("network", "retrain"):
            if getattr(options, name) and name not in self.takes:
                raise ValueError(f"{name} is no option of {self.name}, got {getattr(options, name)!r}")
        if options.preset is not None and not self.presets():
            raise ValueError(f"{self.name} has no presets, got {options.preset!r}")
        if unknown := [part for part in options.without if part not in self.parts]:
            words = f"must be among {', '.join(self.parts)} in" if self.parts else "leaves nothing out of"
            raise ValueError(f"without {words} {self.name}, got {unknown[0]!r}")
        local = {"threads": options.threads, **self.local(options)}
        local |= {} if options.device is None else {"device": options.device}
        cells = [Cell(self.name, self.version, settings, local) for settings in self.grid(options)]
        if not cells:
            given = {name: value for name, value in vars(options).items() if value and name != "threads"}
            words = ", ".join(f"{name} {as_json(value)}" for name, value in given.items()) or "its defaults"
            raise ValueError(f"nothing to run: no cell of {self.name} has {words}")
        return list({cell.key: cell for cell in cells}.values())


def product(**axes: Iterable[Any]) -> list[dict[str, Any]]:
    """Settings for every combination of the axes' values, the last axis running fastest.

    >>> product(method=["a", "b"], seed=[0, 1])[:3]
    [{'method': 'a', 'seed': 0}, {'method': 'a', 'seed': 1}, {'method': 'b', 'seed': 0}]
    """
    return [dict(zip(axes, values, strict=True)) for values in combinations(*axes.values())]


def plain(value: Any, name: str) -> Any:
    """The value as JSON has it: NumPy's and torch's numbers become Python's, arrays and tuples become lists.

    >>> plain({"sizes": (50, 100)}, "settings")
    {'sizes': [50, 100]}
    >>> plain({"when": {1, 2}}, "settings")
    Traceback (most recent call last):
    ValueError: settings['when'] must be plain data (None, bool, number, text, list, dict), got set
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Mapping):
        if strange := [key for key in value if not isinstance(key, str)]:
            raise ValueError(f"{name} must have names for keys, got {strange[0]!r}")
        return {str(key): plain(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, (list, tuple, range)):
        return [plain(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if hasattr(value, "tolist"):
        return plain(value.tolist(), name)
    for kind in (bool, int, float, str):  # an IntEnum or a str of a subclass is what it is of
        if isinstance(value, kind):
            return kind(value)
    wanted = "plain data (None, bool, number, text, list, dict)"
    raise ValueError(f"{name} must be {wanted}, got {type(value).__name__}")


def read_toml(package: str, name: str) -> dict[str, Any]:
    """A file of plain data that comes with a package."""
    return tomllib.loads(files(package).joinpath(name).read_text(encoding="utf-8"))


def digest(content: bytes) -> str:
    """A short hash of some content, by which files and settings are identified.

    >>> digest(b"")
    'e3b0c44298fc1c149afbf4c8996fb924'
    """
    return hashlib.sha256(content).hexdigest()[:32]


def as_json(value: Any, *, sort_keys: bool = False) -> str:
    """Text that `json.loads` turns into the very same value, NaN and infinities too."""
    return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), ensure_ascii=False)


def _canonical(value: Any) -> Any:
    """Equal numbers written equally: 1.0 is 1."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
