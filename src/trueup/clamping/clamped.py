"""The clamped network, the record of its fit, and the content of its file: δ, T and the record.

The header is {"before": "Shift", "record": …, "model": …, "weights": …}. `model` holds the shapes of all parameters and
buffers, and `weights` a fingerprint of them. So a file cannot be loaded with another network.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn

from trueup.calibrators.temperature import Temperature
from trueup.clamping.maps import Affine, Shift
from trueup.clamping.problem import InputMap, Norm
from trueup.io.artifacts import pack, unpack
from trueup.models.calibrated import Calibrated, device_of
from trueup.models.freezing import unwrap

_TABLES = ("candidates", "gammas")  # fields of the record that are mappings; files hold them as lists of pairs
_KINDS: Mapping[str, type[Shift]] = {"Shift": Shift, "Affine": Affine}
WEIGHTS = "weights"
"""Header entry of the fingerprint; files of older versions have none."""
_MAX_LISTED = 4  # differences of a model that an error lists
_PROJECTIONS = 4  # random projections of the weights in a fingerprint
_TOLERANCE = 0.02  # projections of different weights differ by about 1; half precision changes them by 0.001


@dataclass(frozen=True)
class FitRecord:
    """Settings, results and cost of a fit by `clamp`."""

    recipe: str
    """Name of the recipe."""
    loss: str
    """"ce" or "focal"."""
    gamma: float
    """Exponent of the focal loss; 0 for cross-entropy."""
    gammas: Mapping[float, float]
    """ECE of each γ in the pool, on the calibration set or, with `gamma_folds`, on held-out folds."""
    penalty: float
    """λ; infinite if only a temperature was kept."""
    candidates: Mapping[float, float]
    """Held-out loss of each λ that was tried; infinity is temperature alone."""
    norm: Norm
    """Norm of the penalty, "l2sq" or "l2"."""
    input_map: InputMap
    """Kind of the map, "shift" or "affine"."""
    temperature: float
    """Fitted temperature."""
    delta_norm: float
    """‖δ‖."""
    objective: float
    """Final mean loss plus penalty, on the calibration set."""
    baseline: float
    """Mean loss of temperature alone, on the same set."""
    forwards: float
    """Forward passes over the calibration set of all ranks."""
    backwards: float
    """Backward passes to the input."""
    backward_cost: float
    """Measured cost of a backward pass in units of a forward pass."""
    equivalents: float
    """Cost of all passes in units of a forward pass."""
    lemma_residual: float
    """Distance of the temperature from its optimality condition, relative to the spread of the logits."""
    evidence: float | None
    """p-value of the hypothesis that the mean input gradient is zero, if it was tested."""
    verdict: str
    """Whether the input map lowered the held-out loss, in one sentence."""
    samples: int
    """Number of samples."""
    seed: int
    """Seed of the random draws."""
    notes: Mapping[str, object] = field(default_factory=dict)
    """Further results of the recipe."""


class Clamped(Calibrated):
    """A network with δ before it and a temperature after it, and the record of their fit."""

    fit_record: FitRecord


def to_artifact(clamped: Clamped) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the header and the arrays of a clamped network's file: δ, T and the record, without the weights."""
    before, after = clamped.before, clamped.after
    if _KINDS.get(type(before).__name__) is not type(before) or not isinstance(after, Temperature):
        raise ValueError(
            "clamped must have a Shift or Affine before and a Temperature after the model, "
            f"got {type(before).__name__} and {type(after).__name__}"
        )
    record = asdict(clamped.fit_record)
    for table in _TABLES:
        record[table] = list(record[table].items())
    content = {
        "before": type(before).__name__,
        "record": pack(record, "record", None),
        **identify_model(clamped.model),
    }
    return content, {**dict(before.named_buffers()), "temperature": np.array(after.temperature)}


def from_artifact(content: Any, arrays: dict[str, np.ndarray], model: nn.Module) -> Clamped:
    """Rebuild a clamped network around its model; an error names the differences of another model."""
    if not isinstance(content, dict) or set(content) - {WEIGHTS} != {"before", "record", "model"}:
        raise ValueError("the header must have before, record and model")
    require_model(content, model, "clamped")
    kind, tensors = content["before"], {name: torch.as_tensor(array) for name, array in arrays.items()}
    if kind not in _KINDS:
        raise ValueError(f"no input map is called {kind!r}; the maps are: {', '.join(_KINDS)}")
    expected = {"delta", "temperature"} | ({"scale"} if kind == "Affine" else set())
    box = {"low", "high"} if tensors.keys() & {"low", "high"} else set()
    if set(tensors) != expected | box:
        raise ValueError(f"the tensors must be {', '.join(sorted(expected))}, got {', '.join(sorted(tensors))}")
    for name, tensor in tensors.items():  # the ends of a box may be infinite
        if not bool((torch.isfinite(tensor) if name in expected else ~torch.isnan(tensor)).all()):
            raise ValueError(f"the tensor {name} must be finite")
    after = Temperature(float(tensors.pop("temperature")))
    before = _KINDS[kind](box=(tensors.pop("low"), tensors.pop("high")) if box else None, **tensors)
    record = unpack(content["record"], {})
    if "lam" in record:  # the penalty's name in older files
        record["penalty"] = record.pop("lam")
    for table in _TABLES:
        record[table] = dict(record[table])
    clamped = Clamped(model, before=before.to(device_of(model)), after=after)
    try:
        clamped.fit_record = FitRecord(**record)
    except TypeError as error:
        raise ValueError(f"the record of the fit is incomplete: {error}") from None
    return clamped


def identify_model(model: nn.Module, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the header entries that identify a network, without the tensors that were changed."""
    tensors = unwrap(model, compiled=True).state_dict()
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items() if name not in without}
    return {"model": shapes, WEIGHTS: project_weights(model, without)}


def require_model(content: Mapping[str, Any], model: nn.Module, participle: str, without: Collection[str] = ()) -> None:
    """Reject a model whose parameters differ in name, shape or value from the fitted one."""
    entries = identify_model(model, without)
    shapes, fitted = ({name: f"{tuple(s)}" for name, s in header["model"].items()} for header in (entries, content))
    differing = [
        f"{name} {shapes.get(name, 'missing')} instead of {fitted.get(name, 'missing')}"
        for name in {**fitted, **shapes}
        if fitted.get(name) != shapes.get(name)
    ]
    if differing:
        more = f" and {len(differing) - _MAX_LISTED} more" if len(differing) > _MAX_LISTED else ""
        raise ValueError(f"model must be the one that was {participle}, got {'; '.join(differing[:_MAX_LISTED])}{more}")
    if WEIGHTS not in content:
        return
    projections, stored = entries[WEIGHTS], content[WEIGHTS]
    if isinstance(stored, list) and len(stored) == _PROJECTIONS:  # files of older versions have no sizes
        projections = projections[:_PROJECTIONS]
    is_valid = isinstance(stored, list) and all(isinstance(number, float) for number in stored)
    if not is_valid or len(stored) != len(projections):
        raise ValueError(f"the header must have {len(projections)} numbers for the weights")
    if not all(abs(a - b) <= _TOLERANCE for a, b in zip(stored, projections, strict=True)):
        raise ValueError(f"model must be the one that was {participle}, got one of the same shapes but other weights")


def project_weights(model: nn.Module, without: Collection[str] = ()) -> list[float]:
    """Compute a fingerprint of a network's weights: Σ_t r·w_t/‖w_t‖ over √t, with r random signs.

    The final number is Σ_t ln‖w_t‖ over √t. It changes if a temperature is folded into a layer. Numbers that are not
    finite count as zero.

    >>> one, other = nn.Linear(3, 4), nn.Linear(3, 4)
    >>> project_weights(one) == project_weights(one), project_weights(one) == project_weights(other)
    (True, False)
    """
    rng, sums, tensors = np.random.default_rng(0), np.zeros(_PROJECTIONS + 1), 0
    skipped = _all_names(model, without)
    for name, tensor in unwrap(model, compiled=True).state_dict().items():
        if name in skipped or not tensor.is_floating_point():
            continue
        values = np.nan_to_num(tensor.detach().cpu().double().flatten().numpy(), nan=0.0, posinf=0.0, neginf=0.0)
        signs = (2 * rng.integers(0, 2, size=len(values), dtype=np.int8) - 1 for _ in range(_PROJECTIONS))
        size = float(np.linalg.norm(values)) or 1.0
        sums += [*(float(values @ row) / size for row in signs), math.log(size)]
        tensors += 1
    return [float(total) for total in sums / math.sqrt(max(tensors, 1))]


def _all_names(model: nn.Module, names: Collection[str]) -> set[str]:
    """Return all names of some tensors, since a network may hold a module twice.

    >>> norm = nn.BatchNorm1d(2)
    >>> sorted(_all_names(nn.Sequential(norm, nn.ReLU(), norm), ["0.running_mean"]))
    ['0.running_mean', '2.running_mean']
    """
    modules = dict(unwrap(model, compiled=True).named_modules(remove_duplicate=False))
    parts = [name.rpartition(".") for name in names]
    pairs = [(path, leaf) for base, _, leaf in parts for path, module in modules.items() if module is modules.get(base)]
    return {f"{path}.{leaf}" if path else leaf for path, leaf in pairs}
