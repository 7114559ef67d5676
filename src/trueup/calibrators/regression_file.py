"""Recalibrators and their files: safetensors with a JSON header, which nothing but data can be in.

A file holds the constructor's arguments, each a tensor under its own name, and this header:

    {"schema": 1, "recalibrator": "VarianceScaling", "versions": {"trueup": "0.1.0", "torch": "2.13.0"}, "summary": …}

On loading, the name is looked up among the recalibrators of this package, and nothing is imported by name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trueup.calibrators.regression import IsotonicQuantiles, Recalibrator, VarianceScaling
from trueup.core.version import __version__
from trueup.io.atomic import atomic_write, errors_name_file, require_file
from trueup.io.headers import KEY, SCHEMA, header_content, safetensors_file

KNOWN: Mapping[str, type[Recalibrator]] = {kind.__name__: kind for kind in (VarianceScaling, IsotonicQuantiles)}

_CONTENT = {"schema", "recalibrator", "versions", "summary"}


class Header(NamedTuple):
    """What a file says of the recalibrator it holds."""

    method: str
    """The class's name."""
    versions: Mapping[str, str]
    summary: Any
    """What the one who saved it wrote about the fit."""


def save_recalibrator(recalibrator: Recalibrator, path: str | os.PathLike[str], *, summary: Any = None) -> None:
    """Write a recalibrator to a `.safetensors` file that is either complete or not there.

    `summary`, plain data, is for whoever reads the file. What is loaded has the same parameters bit for bit.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     save_recalibrator(VarianceScaling(1.7), f"{folder}/net.safetensors", summary={"fitted to": "val"})
    ...     load_recalibrator(f"{folder}/net.safetensors"), header(f"{folder}/net.safetensors").summary
    (VarianceScaling(scale=1.7), {'fitted to': 'val'})
    """
    file = safetensors_file(path)
    kind = type(recalibrator).__name__
    if KNOWN.get(kind) is not type(recalibrator):
        wish = f"recalibrator must be one of {', '.join(KNOWN)}, since no other could be found again"
        raise ValueError(f"{wish}, got {kind}")
    versions = {"trueup": __version__, "torch": str(torch.__version__)}
    content = {"schema": SCHEMA, "recalibrator": kind, "versions": versions, "summary": summary}
    try:
        text = json.dumps(content, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError) as error:
        raise ValueError(f"summary must be plain data to be saved: {error}") from None
    tensors = {
        name: value.detach().cpu().clone(memory_format=torch.contiguous_format)
        for name, value in recalibrator.config().items()
    }
    with atomic_write(file) as (draft,):
        save_file(tensors, draft, metadata={KEY: text})


def load_recalibrator(path: str | os.PathLike[str]) -> Recalibrator:
    """Read a recalibrator that `save_recalibrator` wrote; of anything else one sentence says what is wrong."""
    file = require_file(Path(path))
    with errors_name_file(file), safe_open(file, framework="pt") as stored:
        method = _content(stored)["recalibrator"]
        if method not in KNOWN:
            raise ValueError(f"no recalibrator is called {method!r}; there are: {', '.join(sorted(KNOWN))}")
        tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
        try:
            return KNOWN[method](**tensors)
        except Exception as error:
            raise ValueError(f"{method} does not take the parameters of the file: {error}") from None


def header(path: str | os.PathLike[str]) -> Header:
    """Read what a file says of its recalibrator, without the recalibrator."""
    file = require_file(Path(path))
    with errors_name_file(file), safe_open(file, framework="pt") as stored:
        content = _content(stored)
        return Header(content["recalibrator"], content["versions"], content["summary"])


def _content(stored: Any) -> dict[str, Any]:
    content = header_content(stored, "recalibrator")
    if set(content) != _CONTENT:
        raise ValueError(f"the header must have {', '.join(sorted(_CONTENT))}, got {', '.join(sorted(content))}")
    return content
