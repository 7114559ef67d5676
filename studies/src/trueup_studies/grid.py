"""Definition of a study: a grid of settings, the work on one of them, and tables of the resulting rows."""

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
"""Name → study, imported on first use."""


@dataclass(frozen=True)
class Cell:
    """One unit of work: settings in plain data, which determine the result.

    `local` holds the machine's folders and number of threads. The work gets it among the settings, but it is neither
    part of the cell's key nor stored with the results.

    >>> cell = Cell("demo", 1, {"method": "temperature", "seed": 0}, local={"folder": "/data"})
    >>> cell.key == Cell("demo", 1, {"seed": 0.0, "method": "temperature"}).key
    True
    >>> cell.key == Cell("demo", 2, {"method": "temperature", "seed": 0}).key
    False
    """

    study: str
    version: int
    """Version of the study; a new version makes new cells."""
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
        """Hash of study, version and settings, whatever their order."""
        known = [self.study, self.version, _canonical(self.settings)]
        return digest(as_json(known, sort_keys=True).encode())

    def __str__(self) -> str:
        return f"{self.study}({', '.join(f'{name}={value}' for name, value in self.settings.items())})"


@dataclass(frozen=True)
class Options:
    """Options of a user; None is the study's default."""

    data: str | None = None
    """Data set, or one of several files."""
    data_dir: str | None = None
    """Folder of data sets."""
    seeds: int | None = None
    """Number of runs of everything."""
    preset: str | None = None
    """Sizes and schedules by name, as "digits" or "paper"."""
    methods: tuple[str, ...] = ()
    """Methods to run; all if empty."""
    network: str | None = None
    """Another network than the preset's, or one of several."""
    oracle: bool = False
    """Whether to choose coefficients on the test half, as some papers did."""
    without: tuple[str, ...] = ()
    """Parts to leave out, such as "figure-1d"."""
    device: str | None = None
    """Device of networks, such as "cuda"; None for the GPU of the machine that runs a cell, or its CPU."""
    retrain: bool = False
    """Whether to train the networks that come with the package, too."""
    threads: int = 1
    """Threads of one cell; more than one may change the final digits."""

    def __post_init__(self) -> None:
        for name, value in (("seeds", self.seeds), ("threads", self.threads)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")


class WantedFile(NamedTuple):
    """A file, or a pattern of files, in the folder of data."""

    path: str
    words: str = ""
    """Purpose of the file; for an optional one, what happens without it."""
    needed: bool = True


@dataclass(frozen=True)
class Study:
    """An experiment.

    `work` is "module:function", so that a worker on another machine can import it. The function takes the settings of
    one cell, including `local`, and returns rows in plain data. It must be deterministic in its settings.

    >>> study = Study("demo", 1, grid=lambda options: product(method=["a", "b"], seed=range(2)), work="math:exp",
    ...               tables=lambda rows, options: {})
    >>> [cell.settings["seed"] for cell in study.cells(Options())]
    [0, 1, 0, 1]
    """

    name: str
    version: int
    """Increased whenever the same settings would give other rows; old results no longer count then."""
    grid: Callable[[Options], Iterable[Mapping[str, Any]]]
    """Function that yields the settings of every cell."""
    work: str
    tables: Callable[[Rows, Options], Mapping[str, Table]]
    """Name of a file → table."""
    figures: Callable[[Rows, Options], Mapping[str, Any]] = lambda rows, options: {}
    """Name of a file → figure of Matplotlib."""
    local: Callable[[Options], Mapping[str, Any]] = lambda options: {}
    """Options → settings of the machine, such as folders, which make no new cells."""
    presets: Callable[[], Mapping[str, Sequence[str]]] = dict
    """Preset → its data sets; the default preset comes first."""
    files: Callable[[str], Sequence[WantedFile]] = lambda preset: ()
    """Preset → files in the folder of data that it needs besides those of its data sets."""
    claims: Callable[[], Sequence[Claim]] = tuple
    """Claims of the paper, which the rows judge."""
    resplit_ratio: Callable[[Mapping[str, Any]], float] = lambda row: 0.0
    """Row → test samples over other samples, where each run splits the same samples anew; else 0."""
    flops: Callable[[Sequence[Mapping[str, Any]]], tuple[float, list[str]]] | None = None
    """Settings of cells → floating-point operations of their networks, and descriptions of uncounted networks."""
    parts: tuple[str, ...] = ()
    """Parts that can be left out."""
    takes: tuple[str, ...] = ()
    """Supported options among `network` and `retrain`."""
    chooses: bool = False
    """Whether it chooses settings on validation samples, so that an oracle could choose on test samples."""
    title: str = ""
    paper: str = ""
    """Paper with the published numbers, as named in published.csv."""

    def cells(self, options: Options | None = None) -> list[Cell]:
        """Return every cell of the study once, in the order of the grid."""
        options = options or Options()
        if options.oracle and not self.chooses:
            raise ValueError(f"oracle is for studies that choose among settings, got it with {self.name}")
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
            chosen = {name: value for name, value in vars(options).items() if value and name != "threads"}
            words = ", ".join(f"{name} {as_json(value)}" for name, value in chosen.items()) or "its defaults"
            raise ValueError(f"nothing to run: no cell of {self.name} has {words}")
        return list({cell.key: cell for cell in cells}.values())


def product(**axes: Iterable[Any]) -> list[dict[str, Any]]:
    """Return settings for every combination of the axes' values; the final axis varies fastest.

    >>> product(method=["a", "b"], seed=[0, 1])[:3]
    [{'method': 'a', 'seed': 0}, {'method': 'a', 'seed': 1}, {'method': 'b', 'seed': 0}]
    """
    return [dict(zip(axes, values, strict=True)) for values in combinations(*axes.values())]


def plain(value: Any, name: str) -> Any:
    """Convert a value to plain data: NumPy and torch numbers to Python numbers, arrays and tuples to lists.

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
    for kind in (bool, int, float, str):  # an IntEnum, or a subclass of str
        if isinstance(value, kind):
            return kind(value)
    raise ValueError(f"{name} must be plain data (None, bool, number, text, list, dict), got {type(value).__name__}")


def read_toml(package: str, name: str) -> dict[str, Any]:
    """Read a TOML file of a package."""
    return tomllib.loads(files(package).joinpath(name).read_text(encoding="utf-8"))


def digest(content: bytes) -> str:
    """Return a short hash that identifies files and settings.

    >>> digest(b"")
    'e3b0c44298fc1c149afbf4c8996fb924'
    """
    return hashlib.sha256(content).hexdigest()[:32]


def as_json(value: Any, *, sort_keys: bool = False) -> str:
    """Format as JSON that `json.loads` restores exactly, including NaN and infinities."""
    return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), ensure_ascii=False)


def _canonical(value: Any) -> Any:
    """Replace whole floats by integers, so that 1.0 and 1 give the same JSON."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
