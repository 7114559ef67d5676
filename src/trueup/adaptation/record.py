"""The repaired network, its record, and the content of its file.

The header is {"maps": {name: shape}, "record": …, "model": {name: shape}, "weights": fingerprint of the network}. The
tensors are `map.NAME` (θ of each family), `low`, `high`, `temperature`, and `model.NAME` for changed tensors of the
network. Unchanged weights are not stored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trueup.adaptation.batch_norm import share_copy
from trueup.adaptation.composition import Composition, PixelSpace
from trueup.adaptation.context import RepairContext
from trueup.adaptation.forward_selection import ForwardSelection
from trueup.adaptation.input_maps import MAP_TYPES, Orientation, is_image
from trueup.calibrators.base import Calibrator
from trueup.calibrators.compose import Chain
from trueup.calibrators.temperature import Temperature
from trueup.clamping.clamped import WEIGHTS, identify_model, require_model
from trueup.clamping.subspace_search import STANDARD_ERRORS
from trueup.io.artifacts import pack, unpack
from trueup.models.calibrated import Calibrated, device_of
from trueup.models.freezing import copy_modes, unwrap

LOWER_ENTROPY = "predictive entropy lowered by the scales of normalisation layers"
_ENTRIES = {"maps", "record", "model"}
_METHOD_ENTRY = "last"
"""Entry for the post-hoc method after the temperature, if there is one."""


@dataclass(frozen=True)
class StepRecord:
    """One step of the forward selection, and its held-out loss."""

    name: str
    """Short name of the step."""
    title: str
    """Description of the step."""
    parameters: int
    """Number of parameters besides the temperature."""
    loss: float
    """Held-out cross-entropy."""
    gain: float
    """Decrease of the loss from the step it is compared with."""
    error: float
    """Standard error of the gain."""
    kept: bool
    """Whether the step was kept."""
    p_value: float | None
    """p-value of the score test that chose the step, if there was one."""
    required_errors: float = STANDARD_ERRORS
    """Standard errors that the gain had to exceed."""


@dataclass(frozen=True)
class RepairRecord:
    """Diagnosis, corrections, held-out gain and cost of a repair."""

    verdict: str
    """Summary in one or two sentences."""
    causes: tuple[str, ...]
    """Faults that the input map corrects, such as "white balance"; for other inputs than images, names of the maps.

    A fault is named only if the score test of its family stands out from those of all others. The gain is measured. The
    cause is not: a map may compensate for another fault.
    """
    words: tuple[str, ...]
    """Effects of the input map, such as "red gain 0.82"."""
    parts: tuple[str, ...]
    """Repaired parts: some of "input", "batch_norm", "head", "weights", "normalisation"."""
    steps: tuple[StepRecord, ...]
    """All steps in order; the first is temperature alone, or the network as it is."""
    temperature: float
    """Temperature of the result."""
    batch_norm_weight: float
    """Weight of the new batch-norm statistics; 0 if the stored ones stay."""
    ridge: float | None
    """Penalty of the last layer's correction."""
    baseline: float
    """Held-out loss of temperature alone; 0 if no labels were given.

    The same holds for `held_out`, `gain` and `error`.
    """
    held_out: float
    """Held-out loss of the repaired network, with steps chosen without the samples that score them.

    All samples influence the proposed steps, and the penalty of the last layer.
    """
    gain: float
    """Decrease of the held-out loss."""
    error: float
    """Standard error of the gain."""
    p_values: Mapping[str, float]
    """p-value of each family's score test on the original inputs."""
    samples: int
    """Number of samples."""
    labelled: bool
    """Whether labels were used."""
    forwards: float
    """Forward passes over all samples."""
    backwards: float
    """Backward passes over all samples."""
    equivalents: float
    """Cost of all passes in units of a forward pass."""
    seed: int
    """Seed of the random draws."""
    notes: tuple[str, ...] = field(default_factory=tuple)
    """Notes on steps that were left out, and why."""
    shift_p_value: float | None = None
    """p-value of the test for an input shift; None with labels."""
    method: str = "temperature"
    """Post-hoc method after the temperature."""


class Repaired(Calibrated):
    """A network with an input map before it and a temperature after it, and the record of the repair.

    If batch norm or the last layer was repaired, the inner network is a copy. The copy shares all other tensors with
    the caller's model. `changed` holds the new tensors by the names of `state_dict`.
    """

    repair_record: RepairRecord
    changed: dict[str, Tensor]


@dataclass(frozen=True)
class Pipeline:
    """A complete correction of a network: input map, changed tensors, temperature and method."""

    before: PixelSpace | None = None
    changed: dict[str, Tensor] = field(default_factory=dict)
    temperature: float = 1.0
    batch_norm_weight: float = 0.0
    ridge: float | None = None
    fine_tuned: bool = False
    """Whether all weights were fine-tuned."""
    method: str = "temperature"
    after: Calibrator | None = None
    """Fitted method after the temperature."""
    also: tuple[str, ...] = ()
    """Descriptions of further changes."""


def assemble(
    context: RepairContext,
    selection: ForwardSelection,
    repair: Pipeline,
    *,
    labelled: bool,
    shift_p_value: float | None = None,
) -> Repaired:
    """Build the repaired network and its record."""
    network, before, after = context.network, repair.before, Temperature(repair.temperature)
    inside = share_copy(network.model, repair.changed) if repair.changed else context.model
    chain = after if repair.after is None else Chain([after, repair.after])
    repaired = Repaired(inside, before=before, after=chain)
    repaired.changed = repair.changed
    cost, steps = network.cost(), selection.steps
    losses, gain, error = selection.nested_gain()
    composition = before.inner if before is not None else Composition([])
    assert isinstance(composition, Composition)
    done = {
        "input": before is not None,
        "batch_norm": repair.batch_norm_weight > 0,
        "head": repair.ridge is not None,
        "weights": repair.fine_tuned,
    }
    done["normalisation"] = bool(repair.changed) and not any(done.values())
    parts = tuple(name for name, was in done.items() if was)
    # A family names a cause only if its score test stood out; an orientation was tested against all others.
    named = {Orientation.name, *selection.outstanding} if labelled else set[str]()
    causes = tuple(dict.fromkeys(part.diagnosis() for part in composition.parts if part.name in named))
    words = tuple(composition.words())
    if labelled and any(part.name not in named for part in composition.parts):
        context.notes.append(
            "inputs differ from training in a way that the maps do not name; the fitted map is "
            f"{', '.join(words) or 'barely visible'}"
        )
    changes = _changes(parts, causes, words, is_image=is_image(composition.shape))
    also = [*repair.also, *([] if repair.after is None else [f"{repair.method} after the temperature"])]
    baseline = float(steps[0].losses.mean())
    repaired.repair_record = RepairRecord(
        verdict=_verdict(selection, changes, also, (baseline, gain, error), labelled=labelled),
        causes=causes,
        words=words,
        parts=parts,
        steps=tuple(
            StepRecord(s.name, s.title, s.size, float(s.losses.mean()), s.gain, s.error, s.kept, s.p_value, s.required)
            for s in steps
        ),
        temperature=repair.temperature,
        batch_norm_weight=repair.batch_norm_weight,
        ridge=repair.ridge,
        baseline=baseline,
        held_out=float(losses.mean()),
        gain=gain,
        error=error,
        p_values=selection.p_values,
        samples=len(network.labels),
        labelled=labelled,
        forwards=cost.forwards,
        backwards=cost.backwards,
        equivalents=cost.equivalents,
        seed=context.seed,
        notes=tuple(context.notes),
        shift_p_value=shift_p_value,
        method="temperature" if repair.after is None else repair.method,
    )
    return repaired


def restore_modes(repaired: Repaired, model: nn.Module) -> Repaired:
    """Give the inner copy the training modes of the caller's model, which was frozen meanwhile."""
    if repaired.changed:
        copy_modes(unwrap(model, compiled=True), repaired.model)
    repaired.training = repaired.model.training
    return repaired


def _changes(parts: Sequence[str], causes: Sequence[str], words: Sequence[str], *, is_image: bool) -> list[str]:
    """Describe the changes part by part."""
    listed = " and ".join([", ".join(causes[:-1]), causes[-1]] if len(causes) > 1 else causes)
    kind = f"a remedy for {listed}" if is_image and causes else listed
    phrases = {
        "input": f"{', '.join(words) or 'a barely visible input map'}{f' ({kind})' if kind else ''}",
        "batch_norm": "new batch-norm statistics",
        "head": "a corrected last layer",
        "weights": "all weights fine-tuned",
        "normalisation": LOWER_ENTROPY,
    }
    return [phrases[part] for part in parts]


def _verdict(
    selection: ForwardSelection,
    changes: Sequence[str],
    also: Sequence[str],
    held_out: tuple[float, float, float],
    *,
    labelled: bool,
) -> str:
    before, gain, error = held_out
    description = "; ".join([*changes, *also])
    if not labelled and changes:
        assumed = "This assumes that classes are as frequent as in training"
        return f"Repaired without labels: {description}. {assumed}; the gain cannot be measured without labels."
    lowered = (
        f"{description} lowered the held-out loss from {before:.4f} to {before - gain:.4f} "
        f"(standard error of the gain {error:.4f})"
    )
    if changes:
        # Each step was significant, but the nested gain of all steps may be smaller.
        certainty = "Yes" if gain > STANDARD_ERRORS * error else "Probably" if gain > error else "Perhaps"
        return f"{certainty}: {lowered}."
    reason = selection.stopped or "no correction was requested"
    if also:
        return f"No: the network itself stays as it is; {reason}. But {lowered}."
    first = "No: the network stays as it is"
    if selection.steps[0].name == "temperature":
        tried = len(selection.steps) > 1
        if tried and not selection.p_values:
            reason = "no correction lowered the held-out loss"
        first = "No: temperature is enough" if selection.p_values or tried else "No: temperature alone"
    return f"{first}; {reason}."


def to_artifact(repaired: Repaired) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the header and the arrays of a repaired network's file, without the unchanged weights."""
    before, after = repaired.before, repaired.after
    first, *method = after.steps if isinstance(after, Chain) else [after]
    if not isinstance(before, PixelSpace | None) or not isinstance(first, Temperature):
        raise ValueError("repaired must have the map and the temperature that repair fitted, got others")
    tensors: dict[str, Any] = {f"model.{name}": tensor for name, tensor in repaired.changed.items()}
    tensors["temperature"] = np.array(first.temperature)
    maps: dict[str, list[int]] = {}
    if before is not None:
        assert isinstance(before.inner, Composition)
        maps = {part.name: list(part.shape) for part in before.inner.parts}
        tensors |= {f"map.{part.name}": part.stored for part in before.inner.parts}
        tensors |= {"low": before.low, "high": before.high}
    inside = {"maps": maps, "record": pack(asdict(repaired.repair_record), "record", None)}
    inside |= identify_model(repaired.model, repaired.changed)
    if method:
        inside[_METHOD_ENTRY] = pack(method[0], _METHOD_ENTRY, tensors)
    return inside, tensors


def from_artifact(inside: Any, arrays: dict[str, np.ndarray], model: nn.Module) -> Repaired:
    """Rebuild a repaired network around the model that was repaired, which does not change.

    A model with tensors of other names, shapes or weights raises an error; rounding to half precision is accepted.
    """
    if not isinstance(inside, dict) or set(inside) - {_METHOD_ENTRY, WEIGHTS} != _ENTRIES:
        raise ValueError(f"the header must have {', '.join(sorted(_ENTRIES))}")
    tensors = {name: torch.as_tensor(array) for name, array in arrays.items()}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"the tensor {name} must be finite")
    changed = {name.removeprefix("model."): tensors.pop(name) for name in list(tensors) if name.startswith("model.")}
    require_model(inside, model, "repaired", changed)
    before = _map(inside["maps"], tensors)
    method = {name: tensors.pop(name) for name in list(tensors) if name.split(".")[0] == _METHOD_ENTRY}
    if set(tensors) != {"temperature"}:
        raise ValueError(f"the tensors must be those of a repaired network, got also {', '.join(sorted(tensors))}")
    inside_model = share_copy(unwrap(model, compiled=True), _as_in(model, changed)) if changed else model
    after: Calibrator = Temperature(float(tensors["temperature"]))
    if _METHOD_ENTRY in inside:
        after = Chain([after, unpack(inside[_METHOD_ENTRY], method)])
    repaired = Repaired(inside_model, before=None if before is None else before.to(device_of(model)), after=after)
    repaired.changed = changed
    repaired.repair_record = _record(unpack(inside["record"], {}))
    return repaired


def _as_in(model: nn.Module, changed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert new tensors to the device and dtype of those they replace; a new bias follows its layer's weight."""
    state = unwrap(model, compiled=True).state_dict()
    replaced = {name: name if name in state else f"{name.rpartition('.')[0]}.weight" for name in changed}
    return {name: tensor.to(state[replaced[name]]) for name, tensor in changed.items()}


def _map(maps: Mapping[str, Any], tensors: dict[str, Tensor]) -> PixelSpace | None:
    parts = []
    for name, shape in maps.items():
        if name not in MAP_TYPES:
            raise ValueError(f"no input map is called {name!r}; the maps are: {', '.join(MAP_TYPES)}")
        if f"map.{name}" not in tensors:
            raise ValueError(f"the tensor map.{name} is missing")
        parts.append(MAP_TYPES[name](shape, tensors.pop(f"map.{name}")))
    if not parts:
        return None
    if not {"low", "high"} <= set(tensors):
        raise ValueError("the tensors low and high are missing")
    return PixelSpace(Composition(parts), tensors.pop("low"), tensors.pop("high"))


def _record(record: dict[str, Any]) -> RepairRecord:
    """Rebuild the record; files of older versions have other field names."""
    try:
        for old, new in (("rungs", "steps"), ("last", "method"), ("moved", "shift_p_value")):
            record[new] = record.pop(old) if old in record else record[new]
        for step in record["steps"]:
            step["required_errors"] = step.pop("wanted") if "wanted" in step else step["required_errors"]
        steps = tuple(StepRecord(**step) for step in record.pop("steps"))
        return RepairRecord(**record, steps=steps)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the record of the repair is incomplete: {error}") from None
