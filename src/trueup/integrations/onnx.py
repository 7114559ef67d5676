"""Export to `torch.export` and ONNX: which calibrators can be exported, and by how much their outputs differ.

    python -m trueup.integrations.onnx

prints a table of all methods. A calibrated network is an `nn.Module`, so torch exports it without this module:
`torch.onnx.export(Calibrated(network, after=calibrator), …, dynamo=True)`.
"""

from __future__ import annotations

import copy
import io
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trueup._core.errors import silence_warnings
from trueup._core.registry import METHODS
from trueup._core.types import ArrayLike
from trueup.calibrators.forecasts import Recalibrator
from trueup.models._value_module import as_module

__all__ = ["TOLERANCE", "check_export", "export_recalibrator", "export_table"]

TOLERANCE = 1e-5
"""Largest accepted difference of an exported calibrator: relative for logits above 1, absolute below."""


def check_export(module: Any, logits: Tensor) -> dict[str, float | str]:
    """Export a calibrator by each exporter, and compare the outputs of the exported programs.

    The number of rows is dynamic: the export sees a few of the rows, and the exported program runs on all of them.

    Parameters
    ----------
    module
        A calibrator, another fitted object that `models.as_module` takes, or an `nn.Module` with one input.
    logits
        Rows to compare, shape (n, classes).

    Returns
    -------
    dict[str, float | str]
        For each exporter the largest difference of the outputs, or the reason why the export failed.

    Examples
    --------
    >>> from trueup.calibrators.temperature import Temperature
    >>> differences = check_export(Temperature(2.0), torch.eye(5))
    >>> differences["torch.export"]
    0.0
    """
    module = copy.deepcopy(as_module(module)).eval()  # the copy keeps the caller's module in its mode
    with torch.no_grad():
        expected = module(logits)
    differences: dict[str, float | str] = {}
    for name, run in EXPORTERS.items():
        try:
            with _quiet_exporters():
                differences[name] = _difference(run(module, logits), expected)
        except Exception as error:  # exporters raise errors of any type
            differences[name] = _reason(error)
    return differences


def export_table(methods: Mapping[str, Callable[..., Any]] | None = None) -> str:
    """Fit methods to simulated data, and make a Markdown table of the exporters that work.

    Parameters
    ----------
    methods
        Methods by name (default: all of `METHODS`).

    Returns
    -------
    str
        One row per method, with the largest difference of the outputs.

    Examples
    --------
    >>> from trueup import METHODS
    >>> print(export_table({"temperature": METHODS["temperature"]}))
    | method | torch.export | ONNX |
    |---|---|---|
    | `temperature` | yes (0e+00) | ... |
    """
    logits, labels = _simulate()
    lines = [f"| method | {' | '.join(EXPORTERS)} |", f"|---|{'---|' * len(EXPORTERS)}"]
    for name, fit in (methods or METHODS).items():
        cells = map(_cell, check_export(fit(logits, labels), logits).values())
        lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def export_recalibrator(recalibrator: Recalibrator, *, levels: ArrayLike | None = None) -> bytes:
    """Export a recalibrator of Gaussian forecasts to ONNX.

    The model has the inputs `mean` and `std`, float32, for any number of rows.

    Parameters
    ----------
    recalibrator
        The recalibrator to export.
    levels
        Quantile levels, shape (k,). With them the output is `quantiles`, shape (n, k); without them the outputs are
        `calibrated_mean` and `calibrated_std`.

    Returns
    -------
    bytes
        The ONNX model; write it to a file or pass it to `onnxruntime.InferenceSession`.
    """
    module = as_module(recalibrator if levels is None else recalibrator.at_levels(levels))
    rows = torch.export.Dim("rows")
    names = ["calibrated_mean", "calibrated_std"] if levels is None else ["quantiles"]
    return _onnx_bytes(module, (torch.zeros(3), torch.ones(3)), ({0: rows}, {0: rows}), ["mean", "std"], names)


def _run_torch_export(module: nn.Module, logits: Tensor) -> Tensor:
    first_rows, shapes = _example(logits)
    return torch.export.export(module, first_rows, dynamic_shapes=shapes).module()(logits)


def _run_onnx(module: nn.Module, logits: Tensor) -> Tensor:
    # The output needs a name of its own, because the identity returns its input.
    model = _onnx_bytes(module, *_example(logits), ["logits"], ["calibrated"])
    import onnxruntime

    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"logits": logits.numpy()})[0])


def _onnx_bytes(
    module: nn.Module, example: tuple[Tensor, ...], shapes: Any, inputs: list[str], outputs: list[str]
) -> bytes:
    try:
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401, the exporter needs it
    except ImportError:
        raise ImportError("ONNX needs onnx, onnxscript and onnxruntime: pip install 'trueup[onnx]'") from None
    options: dict[str, Any] = {"dynamic_shapes": shapes, "input_names": inputs, "output_names": outputs}
    with _quiet_exporters():
        program = torch.onnx.export(copy.deepcopy(module).eval(), example, dynamo=True, verbose=False, **options)
    file = io.BytesIO()
    program.save(file)  # type: ignore[union-attr,arg-type]
    return file.getvalue()


EXPORTERS: Mapping[str, Callable[[nn.Module, Tensor], Tensor]] = {"torch.export": _run_torch_export, "ONNX": _run_onnx}


def _example(logits: Tensor) -> tuple[tuple[Tensor], tuple[dict[int, Any]]]:
    return (logits[:3].clone(),), ({0: torch.export.Dim("rows")},)


def _difference(output: Tensor, expected: Tensor) -> float:
    if output.shape != expected.shape or output.dtype != expected.dtype:
        raise ValueError(f"expected {tuple(expected.shape)} {expected.dtype}, got {tuple(output.shape)} {output.dtype}")
    difference = (output - expected).abs() / expected.abs().clamp(min=1)
    return float(torch.where(output == expected, 0.0, difference).max())  # logits of −∞ are equal


def _simulate(rows: int = 2000, classes: int = 5) -> tuple[Tensor, Tensor]:
    rng = np.random.default_rng(0)
    z = rng.normal(size=(rows, classes)) * 2
    y = (z / 2 + rng.gumbel(size=z.shape)).argmax(axis=1)
    return torch.from_numpy(z).float(), torch.from_numpy(y)


def _cell(result: float | str) -> str:
    if isinstance(result, str):
        return f"no: {result}"
    return f"yes ({result:.0e})" if result <= TOLERANCE else f"no: differs by {result:.0e}"


def _reason(error: BaseException) -> str:
    """Return the first line of the innermost cause, without colours: exporters wrap errors in advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return " ".join(re.sub(r"\x1b\[\d*m", "", line).split())[:120].replace("|", "\\|")


@contextmanager
def _quiet_exporters() -> Iterator[None]:
    """Silence warnings and logs of the exporters, such as deprecations inside torch."""
    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with silence_warnings():
            yield
    finally:
        log.setLevel(level)


if __name__ == "__main__":
    print(export_table())
