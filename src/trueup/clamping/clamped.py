"""A clamped network, the record of its fit, and its part of a file: δ, T and the record, never the network itself.

The content of the header is {"before": "Shift", "record": …, "model": …, "weights": …}. `model` holds the shape of
every parameter and buffer of the network that was clamped, and `weights` a few sums of them, so that a file is not put
before another one.
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

_TABLES = ("candidates", "gammas")
_KINDS: Mapping[str, type[Shift]] = {"Shift": Shift, "Affine": Affine}
WEIGHTS = "weights"
"""An entry that files of former versions do not have."""


_SHOWN = 4
_PROJECTIONS = 4
_ALIKE = 0.02  # of projections that differ by about 1 where weights do; half precision moves them by 0.001


@dataclass(frozen=True)
class FitRecord:
    """How a clamped network came about, and what it cost."""

    recipe: str
    loss: str
    """"ce" or "focal"."""
    gamma: float
    gammas: Mapping[float, float]
    """ECE of each γ of the pool, if there was one: on the calibration set itself, or, where `gamma_folds` were asked
    for, with each fold scored by the fit that left it out."""
    penalty: float
    """λ; infinite where temperature alone was kept."""
    candidates: Mapping[float, float]
    """Each λ that was tried, with the loss on samples left out of its fit; that of infinity is temperature alone."""
    norm: Norm
    input_map: InputMap
    temperature: float
    delta_norm: float
    objective: float
    """Mean loss and penalty at the end, on the calibration set."""
    baseline: float
    """Mean loss of temperature alone, on the same set."""
    forwards: float
    """Forward passes over the calibration set; as all that follows, over the samples of all ranks together."""
    backwards: float
    """Backward passes to the input."""
    backward_cost: float
    """What a backward pass took, in forward passes, as measured."""
    equivalents: float
    """All of it in forward passes."""
    lemma_residual: float
    """By how much the temperature misses its own optimality, relative to the logits' spread; see `lemma_residual`."""
    evidence: float | None
    """p-value of the hypothesis that the mean input gradient is zero, where the recipe looked."""
    verdict: str
    """Whether the input map earned its place, in one sentence."""
    samples: int
    seed: int
    notes: Mapping[str, object] = field(default_factory=dict)
    """What else the recipe has to say."""


class Clamped(Calibrated):
    """A network with δ before it and a temperature after it, and the record of their fit."""

    fit_record: FitRecord


def to_artifact(clamped: Clamped) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header and the arrays of a clamped network's file: δ, T and the record, without the network's weights."""
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
    """A clamped network around the model that was clamped; if the model is another one, an error names what differs."""
    if not isinstance(content, dict) or set(content) - {WEIGHTS} != {"before", "record", "model"}:
        raise ValueError("the header must have before, record and model")
    require_model(content, model, "clamped")
    kind, tensors = content["before"], {name: torch.as_tensor(array) for name, array in arrays.items()}
    if kind not in _KINDS:
        raise ValueError(f"no input map is called {kind!r}; there are: {', '.join(_KINDS)}")
    wanted = {"delta", "temperature"} | ({"scale"} if kind == "Affine" else set())
    box = {"low", "high"} if tensors.keys() & {"low", "high"} else set()
    if set(tensors) != wanted | box:
        raise ValueError(f"the tensors must be {', '.join(sorted(wanted))}, got {', '.join(sorted(tensors))}")
    for name, tensor in tensors.items():  # a box may be open, at infinity
        if not bool((torch.isfinite(tensor) if name in wanted else ~torch.isnan(tensor)).all()):
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
        raise ValueError(f"the record of the fit is not one: {error}") from None
    return clamped


def identify_model(model: nn.Module, without: Collection[str] = ()) -> dict[str, Any]:
    """The entries of a header by which a network is known again, but for tensors that were changed."""
    tensors = unwrap(model, compiled=True).state_dict()
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items() if name not in without}
    return {"model": shapes, WEIGHTS: project_weights(model, without)}


def require_model(content: Mapping[str, Any], model: nn.Module, participle: str, without: Collection[str] = ()) -> None:
    """Refuse a model whose parameters have other names, shapes or weights than the one that was fitted to."""
    entries = identify_model(model, without)
    shapes, fitted = ({name: f"{tuple(s)}" for name, s in header["model"].items()} for header in (entries, content))
    differing = [
        f"{name} {shapes.get(name, 'missing')} instead of {fitted.get(name, 'missing')}"
        for name in {**fitted, **shapes}
        if fitted.get(name) != shapes.get(name)
    ]
    if differing:
        more = f" and {len(differing) - _SHOWN} more" if len(differing) > _SHOWN else ""
        raise ValueError(f"model must be the one that was {participle}, got {'; '.join(differing[:_SHOWN])}{more}")
    if WEIGHTS not in content:
        return
    projections, stored = entries[WEIGHTS], content[WEIGHTS]
    if isinstance(stored, list) and len(stored) == _PROJECTIONS:  # files of former versions have no sizes
        projections = projections[:_PROJECTIONS]
    is_valid = isinstance(stored, list) and all(isinstance(number, float) for number in stored)
    if not is_valid or len(stored) != len(projections):
        raise ValueError(f"the header must have {len(projections)} numbers for the weights")
    if not all(abs(a - b) <= _ALIKE for a, b in zip(stored, projections, strict=True)):
        raise ValueError(f"model must be the one that was {participle}, got one of the same shapes but other weights")


def project_weights(model: nn.Module, without: Collection[str] = ()) -> list[float]:
    """A few numbers by which a network's weights are known again: Σ_t r·w_t/‖w_t‖ over √t, r being random signs.

    The last is Σ_t ln‖w_t‖ over √t, which a temperature folded into a layer changes. What is not finite counts as zero.

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
    """These tensors by every name that they have, since a network may hold a module twice.

    >>> norm = nn.BatchNorm1d(2)
    >>> sorted(_all_names(nn.Sequential(norm, nn.ReLU(), norm), ["0.running_mean"]))
    ['0.running_mean', '2.running_mean']
    """
    modules = dict(unwrap(model, compiled=True).named_modules(remove_duplicate=False))
    parts = [name.rpartition(".") for name in names]
    pairs = [(path, leaf) for base, _, leaf in parts for path, module in modules.items() if module is modules.get(base)]
    return {f"{path}.{leaf}" if path else leaf for path, leaf in pairs}
