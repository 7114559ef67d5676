"""A monitor's checkpoint: a few kilobytes of safetensors with a JSON header, never a pickle."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from trueup.bins import Bins, equal_width
from trueup.disk import blaming, existing, replacing
from trueup.monitor.betting import Evidence
from trueup.monitor.recent import Lately, Window
from trueup.monitor.watch import Alarm, Monitor

SCHEMA = 1
KEY = "trueup_monitor"


def save_monitor(monitor: Monitor, path: str | os.PathLike[str]) -> None:
    """Write a monitor to a `.safetensors` file that is either complete or not there.

    >>> from tempfile import TemporaryDirectory
    >>> monitor = Monitor(2)
    >>> _ = monitor.update([[1.0, 0.0]], [0])
    >>> with TemporaryDirectory() as folder:
    ...     save_monitor(monitor, f"{folder}/watch.safetensors")
    ...     load_monitor(f"{folder}/watch.safetensors").rows
    1
    """
    file = _parsed(path)
    tallies = [monitor.total, monitor.fading, *monitor.recent.pieces]
    arrays = {
        "wealth": monitor.evidence.wealth,
        "tallies": np.stack([np.stack([t.bins.count, t.bins.confidence, t.bins.hits]) for t in tallies]),
        "nll": np.array([t.nll for t in tallies]),
        "peak": np.array([monitor.peak]),
    }
    evidence = monitor.evidence
    header = {
        "schema": SCHEMA,
        "settings": {
            "classes": monitor.classes,
            "alpha": monitor.alpha,
            "bins": monitor.bins,
            "window": monitor.recent.size,
            "half_life": monitor.half_life,
            "block": evidence.block,
            "classwise": monitor.classwise,
        },
        "seen": {"rows": evidence.rows, "begun": evidence.begun, "streams": evidence.streams},
        "alarm": None if monitor.alarm is None else asdict(monitor.alarm),
    }
    with replacing(file) as (draft,):
        save_file({name: np.ascontiguousarray(a) for name, a in arrays.items()}, draft, {KEY: json.dumps(header)})


def load_monitor(path: str | os.PathLike[str]) -> Monitor:
    """Read a monitor, which goes on as if it had never stopped."""
    file = existing(_parsed(path))
    with blaming(file), safe_open(file, "np") as content:
        header = _header(content.metadata())
        arrays = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
        return _made(header, arrays)


def _header(metadata: Any) -> dict[str, Any]:
    if not metadata or KEY not in metadata:
        raise ValueError("holds no monitor")
    header = json.loads(metadata[KEY])
    if header.get("schema") != SCHEMA:
        raise ValueError(
            f"the schema must be {SCHEMA}, got {header.get('schema')!r}: it needs another version of trueup"
        )
    return dict(header)


def _made(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> Monitor:
    try:
        monitor = Monitor(**header["settings"])
        wealth, sums, nll = (arrays[name] for name in ("wealth", "tallies", "nll"))
        if wealth.shape != monitor.evidence.wealth.shape or sums.shape[1:] != (3, monitor.bins):
            raise ValueError("its arrays do not fit its settings")
        edges = equal_width(monitor.bins)
        tallies = [Lately(Bins(edges, *each), float(loss)) for each, loss in zip(sums, nll, strict=True)]
        monitor.total, monitor.fading, *pieces = tallies
        monitor.recent = Window(monitor.recent.size, tuple(pieces))
        monitor.evidence = Evidence(monitor.evidence.block, **header["seen"], wealth=wealth)
        monitor.peak = float(arrays["peak"][0])
        monitor.alarm = None if header["alarm"] is None else Alarm(**header["alarm"])
    except (KeyError, TypeError) as error:
        raise ValueError(f"is no whole monitor ({error})") from None
    return monitor


def _parsed(path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    if file.suffix.lower() != ".safetensors":
        raise ValueError(f"{file}: the suffix must be .safetensors, got {file.suffix!r}")
    return file
