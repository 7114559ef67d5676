"""Which calibrators leave torch: each is exported with a free number of rows, run outside, and compared.

    python -m trueup.integrations.onnx

prints the table of all methods. A calibrated network is an `nn.Module` like any other, so exporting one needs nothing
of this: `torch.onnx.export(nn.Sequential(network, calibrator), …, dynamo=True)`.
"""

from __future__ import annotations

import copy
import io
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trueup.registry import METHODS

TOLERANCE = 1e-5
"""By how much an exported calibrator may differ: relative for logits above 1, absolute below."""


def exportable(module: nn.Module, logits: Tensor) -> dict[str, float | str]:
    """Try each way out of torch on a module of one input: by how much its outputs differ there, or why it cannot go.

    The number of rows is left free: the module is exported with a few of the rows, and run with all of them.

    >>> from trueup.calibrators.temperature import Temperature
    >>> ways = exportable(Temperature(2.0), torch.eye(5))
    >>> ways["torch.export"]
    0.0
    """
    module = copy.deepcopy(module).eval()  # the caller's stays in its mode
    with torch.no_grad():
        expected = module(logits)
    found: dict[str, float | str] = {}
    for way, run in WAYS.items():
        try:
            with _quietly():
                found[way] = _difference(run(module, logits), expected)
        except Exception as error:  # an exporter raises anything
            found[way] = _reason(error)
    return found


def table(methods: Mapping[str, Callable[..., Any]] | None = None) -> str:
    """A row of Markdown for each method, fitted to drawn data: where it can be exported to, and how far it is off."""
    logits, labels = _drawn()
    lines = [f"| method | {' | '.join(WAYS)} |", f"|---|{'---|' * len(WAYS)}"]
    for name, fit in (methods or METHODS).items():
        ways = exportable(fit(logits, labels), logits)
        cells = (_cell(ways[way]) for way in WAYS)
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def _by_torch(module: nn.Module, logits: Tensor) -> Tensor:
    few, shapes = _example(logits)
    program = torch.export.export(module, few, dynamic_shapes=shapes)
    result: Tensor = program.module()(logits)
    return result


def _by_onnx(module: nn.Module, logits: Tensor) -> Tensor:
    try:
        import onnxruntime
        import onnxscript  # noqa: F401, the exporter needs it
    except ImportError:
        raise ImportError("ONNX needs onnx, onnxscript and onnxruntime: pip install 'trueup[onnx]'") from None
    few, shapes = _example(logits)
    program = torch.onnx.export(
        module,
        few,
        dynamo=True,
        dynamic_shapes=shapes,
        input_names=["logits"],
        output_names=["calibrated"],  # else the identity has one name twice
        verbose=False,
    )
    file = io.BytesIO()
    program.save(file)  # type: ignore[union-attr,arg-type]
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"logits": logits.numpy()})[0])


WAYS: Mapping[str, Callable[[nn.Module, Tensor], Tensor]] = {"torch.export": _by_torch, "ONNX": _by_onnx}


def _example(logits: Tensor) -> tuple[tuple[Tensor], tuple[dict[int, Any]]]:
    return (logits[:3].clone(),), ({0: torch.export.Dim("rows")},)


def _difference(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise ValueError(f"wanted {tuple(expected.shape)} {expected.dtype}, got {tuple(found.shape)} {found.dtype}")
    return float(((found - expected).abs() / expected.abs().clamp(min=1)).max())


def _drawn(rows: int = 2000, classes: int = 5) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(rows, classes)) * 2
    y = (z / 2 + rng.gumbel(size=z.shape)).argmax(axis=1)
    return torch.from_numpy(z).float(), torch.from_numpy(y)


def _cell(result: float | str) -> str:
    if isinstance(result, str):
        return f"no: {result}"
    return f"yes ({result:.0e})" if result <= TOLERANCE else f"no: differs by {result:.0e}"


def _reason(error: BaseException) -> str:
    """The first line of the innermost cause, without colours: exporters wrap what went wrong in advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return " ".join(re.sub(r"\x1b\[\d*m", "", line).split())[:120].replace("|", "\\|")


@contextmanager
def _quietly() -> Iterator[None]:
    """The exporters warn and log about themselves (deprecations inside torch, packages that are not installed)."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


if __name__ == "__main__":
    print(table())
