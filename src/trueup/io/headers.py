"""The headers of our .safetensors files: what a file holds, and of one that holds another thing, what reads it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

SCHEMA = 1
"""Raised when a file of this version could be misread by an older one."""
KEY = "trueup"
"""Under which a file's metadata has the header."""
MONITOR_KEY = "trueup_monitor"
"""The same, of a monitor's checkpoint."""

KINDS = {
    "calibrator": ("calibrator", "load_calibrator(path)"),
    "clamped": ("clamped network", "load_clamped(model, path)"),
    "recalibrator": ("recalibrator", "load_recalibrator(path)"),
    "monitor": ("monitor", "load_monitor(path)"),
}
"""What a file may hold, by its entry in the header: its name, and what reads it."""


def safetensors_file(path: str | os.PathLike[str]) -> Path:
    """The path of a file that is called what it is."""
    file = Path(path)
    if file.suffix.lower() != ".safetensors":
        raise ValueError(f"{file}: the suffix must be .safetensors, got {file.suffix!r}")
    return file


def header_content(stored: Any, kind: str) -> dict[str, Any]:
    """The header of an open file that should hold one kind of thing; of any other, an error says what reads it."""
    wish, _ = KINDS[kind]
    metadata = stored.metadata() or {}
    key = next((key for key in (KEY, MONITOR_KEY) if key in metadata), None)
    if key is None:
        raise ValueError(f"this file holds no {wish} but {', '.join(stored.keys()) or 'nothing'}")
    content = _parsed(metadata[key])
    held = ["monitor"] if key == MONITOR_KEY else [other for other in KINDS if other in content]
    if held and kind not in held:
        name, reader = KINDS[held[0]]
        raise ValueError(f"this file holds no {wish} but a {name}, which {reader} reads")
    if content.get("schema") != SCHEMA:
        fact = content.get("schema")
        raise ValueError(f"the schema must be {SCHEMA}, got {fact!r}; a newer version of trueup may read it")
    return content


def _parsed(text: str) -> dict[str, Any]:
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ValueError(f"the header is not JSON: {error}") from None
    return content if isinstance(content, dict) else {}
