"""What a repair returns: the network, the record of what was wrong, done and gained, and their part of a file.

The content of the header is {"maps": {name: shape}, "record": …, "model": {name: shape}, "weights": numbers that
identify the network}. Tensors are `map.NAME` (θ of each family), `low`, `high`, `temperature`, and, for batch-norm
statistics and the last layer, `model.NAME`. The weights that stay are not in it.
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
from trueup.adaptation.input_maps import FAMILIES
from trueup.calibrators.base import Calibrator
from trueup.calibrators.compose import Chain
from trueup.calibrators.temperature import Temperature
from trueup.clamping.clamped import WEIGHTS, identify_model, require_model
from trueup.clamping.subspace_search import STANDARD_ERRORS
from trueup.io.artifacts import pack, unpack
from trueup.models.calibrated import Calibrated, device_of
from trueup.models.freezing import copy_modes, unwrap

_ENTRIES = {"maps", "record", "model"}
_LAST = "last"
"""An entry of files whose network ends in more than a temperature."""


@dataclass(frozen=True)
class StepRecord:
    """One step of the forward selection, and its loss on samples left out."""

    name: str
    title: str
    parameters: int
    loss: float
    """Held-out cross-entropy."""
    gain: float
    """Below the step it was compared with."""
    error: float
    """Standard error of the gain."""
    kept: bool
    p_value: float | None
    """Of the score test that chose it, if one did."""
    required_errors: float = STANDARD_ERRORS
    """Standard errors that the gain had to exceed."""


@dataclass(frozen=True)
class RepairRecord:
    """What was wrong, what was done about it, what it gained and what it cost."""

    verdict: str
    """In words."""
    causes: tuple[str, ...]
    """What the map is a remedy for, such as "white balance"; for inputs that are no images, what it does.

    That it helps is measured. The cause is not: what helps may make up for something else.
    """
    words: tuple[str, ...]
    """What the input map does, such as "red gain 0.82"."""
    parts: tuple[str, ...]
    """What was repaired: some of "input", "batch_norm", "head"."""
    steps: tuple[StepRecord, ...]
    """All that was tried, in order; the first is temperature alone, or the network as it is."""
    temperature: float
    batch_norm_weight: float
    """Of the new statistics; 0 where the stored ones stay."""
    ridge: float | None
    """Penalty of the last layer's correction."""
    baseline: float
    """Held-out loss of temperature alone; 0, as all that follows, without labels."""
    held_out: float
    """Held-out loss of the repaired network, each step kept or refused without the samples it is scored on.

    All samples have a say in which steps are proposed, and in the penalty of the last layer.
    """
    gain: float
    error: float
    """Standard error of the gain."""
    p_values: Mapping[str, float]
    """Of each family's score test on the inputs as they are."""
    samples: int
    labelled: bool
    forwards: float
    """Forward passes over all samples."""
    backwards: float
    equivalents: float
    """All passes, counted in forward passes."""
    seed: int
    notes: tuple[str, ...] = field(default_factory=tuple)
    """What was left out and why."""
    moved: float | None = None
    """Without labels: the p-value of the test whether inputs have moved."""
    method: str = "temperature"
    """The post-hoc method at the end."""


class Repaired(Calibrated):
    """A network with an input map before it and a temperature after it, and the record of the repair.

    Where batch norm or the last layer was repaired, the network inside is a copy that shares every other tensor with
    the caller's; `changed` holds the new tensors, by the names of `state_dict`.
    """

    repair_record: RepairRecord
    changed: dict[str, Tensor]


@dataclass(frozen=True)
class Repair:
    """What is done to a network."""

    before: PixelSpace | None = None
    changed: dict[str, Tensor] = field(default_factory=dict)
    temperature: float = 1.0
    batch_norm_weight: float = 0.0
    ridge: float | None = None
    method: str = "temperature"
    after: Calibrator | None = None
    """What the method fitted after the temperature."""
    also: tuple[str, ...] = ()
    """What was done besides, in words."""


def assemble(
    context: RepairContext, selection: ForwardSelection, repair: Repair, *, labelled: bool, moved: float | None = None
) -> Repaired:
    """The repaired network and its record."""
    network, before, after = context.network, repair.before, Temperature(repair.temperature)
    inside = share_copy(network.model, repair.changed) if repair.changed else context.model
    chain = after if repair.after is None else Chain([after, repair.after])
    repaired = Repaired(inside, before=before, after=chain)
    repaired.changed = repair.changed
    cost, steps = network.cost(), selection.steps
    losses, gain, error = selection.nested_gain()
    composition = before.inner if before is not None else Composition([])
    assert isinstance(composition, Composition)
    done = (("input", before is not None), ("batch_norm", repair.batch_norm_weight > 0), ("head", repair.ridge))
    parts = tuple(name for name, was in done if was)
    causes = tuple(dict.fromkeys(part.diagnosis() for part in composition.parts))
    words = tuple(composition.words())
    changes = _changes(parts, causes if labelled else (), words, is_image=len(composition.shape) == 3)
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
        moved=moved,
        method="temperature" if repair.after is None else repair.method,
    )
    return repaired


def restore_modes(repaired: Repaired, model: nn.Module) -> Repaired:
    """Put the copy inside into the modes of the caller's model, which was frozen while it was made."""
    if repaired.changed:
        copy_modes(unwrap(model, compiled=True), repaired.model)
    repaired.training = repaired.model.training
    return repaired


def _changes(parts: Sequence[str], causes: Sequence[str], words: Sequence[str], *, is_image: bool) -> list[str]:
    """What was done to the network, part by part; causes are named where labels say that the map helps."""
    listed = " and ".join([", ".join(causes[:-1]), causes[-1]] if len(causes) > 1 else causes)
    kind = f"a remedy for {listed}" if is_image and causes else listed
    phrases = {
        "input": f"{', '.join(words) or 'an input map too small to see'}{f' ({kind})' if kind else ''}",
        "batch_norm": "new batch-norm statistics",
        "head": "a corrected last layer",
    }
    return [phrases[part] for part in parts]


def _verdict(
    selection: ForwardSelection,
    changes: Sequence[str],
    also: Sequence[str],
    gained: tuple[float, float, float],
    *,
    labelled: bool,
) -> str:
    before, gain, error = gained
    whole = "; ".join([*changes, *also])
    if not labelled and changes:
        return f"Repaired without labels: {whole}. What it gained cannot be known without labels."
    lowered = (
        f"{whole} lowered the loss on samples left out from {before:.4f} to {before - gain:.4f} "
        f"(standard error of the gain {error:.4f})"
    )
    if changes:
        # Each step was certain; all of it together, chosen by some samples and scored on others, may be less so.
        sure = "Yes" if gain > STANDARD_ERRORS * error else "Probably" if gain > error else "Perhaps"
        return f"{sure}: {lowered}."
    reason = selection.stopped or "nothing was asked for"
    if also:
        return f"No: the network itself stays as it is; {reason}. But {lowered}."
    first = "No: the network stays as it is"
    if selection.steps[0].name == "temperature":
        tried = len(selection.steps) > 1
        if tried and not selection.p_values:
            reason = "nothing that was tried helped samples left out"
        first = "No: temperature is enough" if selection.p_values or tried else "No: temperature alone"
    return f"{first}; {reason}."


def to_artifact(repaired: Repaired) -> tuple[dict[str, Any], dict[str, Any]]:
    """The header and the arrays of a repaired network's file: what the repair changed, not the other weights."""
    before, after = repaired.before, repaired.after
    first, *last = after.steps if isinstance(after, Chain) else [after]
    if not isinstance(before, PixelSpace | None) or not isinstance(first, Temperature):
        raise ValueError("repaired must have the map and the temperature that repair gave it, got others")
    tensors: dict[str, Any] = {f"model.{name}": tensor for name, tensor in repaired.changed.items()}
    tensors["temperature"] = np.array(first.temperature)
    maps: dict[str, list[int]] = {}
    if before is not None:
        assert isinstance(before.inner, Composition)
        maps = {part.name: list(part.shape) for part in before.inner.parts}
        tensors |= {f"map.{part.name}": part.theta for part in before.inner.parts}
        tensors |= {"low": before.low, "high": before.high}
    inside = {"maps": maps, "record": pack(asdict(repaired.repair_record), "record", None)}
    inside |= identify_model(repaired.model, repaired.changed)
    if last:
        inside[_LAST] = pack(last[0], _LAST, tensors)
    return inside, tensors


def from_artifact(inside: Any, arrays: dict[str, np.ndarray], model: nn.Module) -> Repaired:
    """A repaired network around the one that was repaired, which stays as it is; another network raises an error.

    Another one is a network with tensors of other names or shapes, or with other weights in them; rounding to half
    precision does not count.
    """
    if not isinstance(inside, dict) or set(inside) - {_LAST, WEIGHTS} != _ENTRIES:
        raise ValueError(f"the header must have {', '.join(sorted(_ENTRIES))}")
    tensors = {name: torch.as_tensor(array) for name, array in arrays.items()}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ValueError(f"the tensor {name} must be finite")
    changed = {name.removeprefix("model."): tensors.pop(name) for name in list(tensors) if name.startswith("model.")}
    require_model(inside, model, "repaired", changed)
    before = _map(inside["maps"], tensors)
    own = {name: tensors.pop(name) for name in list(tensors) if name.split(".")[0] == _LAST}
    if set(tensors) != {"temperature"}:
        raise ValueError(f"the tensors must be those of a repaired network, got {', '.join(sorted(tensors))} besides")
    inside_model = share_copy(unwrap(model, compiled=True), _as_in(model, changed)) if changed else model
    after: Calibrator = Temperature(float(tensors["temperature"]))
    if _LAST in inside:
        after = Chain([after, unpack(inside[_LAST], own)])
    repaired = Repaired(inside_model, before=None if before is None else before.to(device_of(model)), after=after)
    repaired.changed = changed
    repaired.repair_record = _record(unpack(inside["record"], {}))
    return repaired


def _as_in(model: nn.Module, changed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """New tensors on the device and in the precision of those that they replace, or of the weight beside a new bias."""
    state = unwrap(model, compiled=True).state_dict()
    beside = {name: name if name in state else f"{name.rpartition('.')[0]}.weight" for name in changed}
    return {name: tensor.to(state[beside[name]]) for name, tensor in changed.items()}


def _map(maps: Mapping[str, Any], tensors: dict[str, Tensor]) -> PixelSpace | None:
    parts = []
    for name, shape in maps.items():
        if name not in FAMILIES:
            raise ValueError(f"no input map is called {name!r}; there are: {', '.join(FAMILIES)}")
        if f"map.{name}" not in tensors:
            raise ValueError(f"the tensor map.{name} is missing")
        parts.append(FAMILIES[name](shape, tensors.pop(f"map.{name}")))
    if not parts:
        return None
    if not {"low", "high"} <= set(tensors):
        raise ValueError("the tensors low and high are missing")
    return PixelSpace(Composition(parts), tensors.pop("low"), tensors.pop("high"))


def _record(record: dict[str, Any]) -> RepairRecord:
    """The record, also of files whose fields had other names."""
    try:
        for old, new in (("rungs", "steps"), ("last", "method")):
            record[new] = record.pop(old) if old in record else record[new]
        for step in record["steps"]:
            step["required_errors"] = step.pop("wanted") if "wanted" in step else step["required_errors"]
        steps = tuple(StepRecord(**step) for step in record.pop("steps"))
        return RepairRecord(**record, steps=steps)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the record of the repair is none: {error}") from None
