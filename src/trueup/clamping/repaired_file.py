"""A repaired network's own part in a file: the input map, the tensors that changed, T and the record, in safetensors.

The header is JSON, under the schema of calibrators' files: {"schema": 1, "repaired": {"maps": {name: shape}, "record":
…, "model": {name: shape}, "weights": numbers by which the network is known again}, "versions": …}. Tensors are
`map.NAME` (θ of each family), `low`, `high`, `temperature`, and, for batch-norm statistics and the last layer,
`model.NAME`. The weights that stay are not in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from trueup.calibrators.base import Calibrator
from trueup.calibrators.compose import Chain
from trueup.calibrators.temperature import Temperature
from trueup.clamping.batch_norm import share_copy
from trueup.clamping.known_network import compare_shapes, compare_weights, model_shapes, project_weights
from trueup.clamping.repair_job import Repaired, RepairRecord, RungRecord
from trueup.clamping.repair_maps import FAMILIES, Composition, PixelSpace
from trueup.io.artifacts import open_artifact, pack, require_safetensors_suffix, unpack, versions, write_artifact
from trueup.models.calibrated import device_of
from trueup.models.freezing import unwrap

_ENTRIES = {"maps", "record", "model"}
_LAST = "last"
"""An entry of files whose network ends in more than a temperature."""
_WEIGHTS = "weights"
"""An entry that files of former versions do not have."""


def save_repaired(repaired: Repaired, path: str | os.PathLike[str]) -> None:
    """Write what a repair changed to a `.safetensors` file that is either complete or not there.

    The network's other weights are not in it. Nothing is rounded: what is loaded is the same bit for bit.

    >>> from tempfile import TemporaryDirectory
    >>> from trueup.clamping.input_repair import repair
    >>> model, x, y = nn.Identity(), torch.eye(3).repeat(20, 1), torch.tensor([0, 1, 2, 0, 1, 1]).repeat(10)
    >>> repaired = repair(model, [(x, y)])
    >>> with TemporaryDirectory() as folder:
    ...     save_repaired(repaired, f"{folder}/net.safetensors")
    ...     bool((load_repaired(model, f"{folder}/net.safetensors")(x) == repaired(x)).all())
    True
    """
    require_safetensors_suffix(path)
    if not isinstance(repaired, Repaired):
        raise ValueError(f"repaired must be what repair returns, got {type(repaired).__name__}")
    before, after = repaired.before, repaired.after
    steps = list(after.steps) if isinstance(after, Chain) else [after]
    first, *last = steps
    if not isinstance(before, PixelSpace | None) or not isinstance(first, Temperature):
        raise ValueError("repaired must have the map and the temperature that repair gave it, got others")
    tensors = {f"model.{name}": tensor for name, tensor in repaired.changed.items()}
    tensors["temperature"] = first.temperature
    maps: dict[str, list[int]] = {}
    if before is not None:
        assert isinstance(before.inner, Composition)
        maps = {part.name: list(part.shape) for part in before.inner.parts}
        tensors |= {f"map.{part.name}": part.theta for part in before.inner.parts}
        tensors |= {"low": before.low, "high": before.high}
    shapes = model_shapes(repaired.model)
    inside: dict[str, Any] = {
        "maps": maps,
        "record": pack(asdict(repaired.repair_record), "record", None),
        "model": {name: shape for name, shape in shapes.items() if name not in repaired.changed},
        _WEIGHTS: project_weights(repaired.model, repaired.changed),
    }
    if last:
        inside[_LAST] = pack(last[0], _LAST, tensors)
    content = {"repaired": inside, "versions": versions()}
    write_artifact(path, "repaired", content, tensors)


def load_repaired(network: nn.Module, path: str | os.PathLike[str]) -> Repaired:
    """Put what `save_repaired` wrote around a network, which stays as it is; another network raises an error.

    Another one is a network with tensors of other names or shapes, or with other weights in them; rounding to half
    precision does not count.
    """
    with open_artifact(path, "repaired") as artifact:
        inside = artifact.content.get("repaired")
        if not isinstance(inside, dict) or set(inside) - {_LAST, _WEIGHTS} != _ENTRIES:
            raise ValueError(f"the header must tell of {', '.join(sorted(_ENTRIES))}")
        tensors = artifact.tensors()
        for name, tensor in tensors.items():
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"the tensor {name} must be finite")
        changed = {
            name.removeprefix("model."): tensors.pop(name) for name in list(tensors) if name.startswith("model.")
        }
        shapes = model_shapes(network)
        compare_shapes(inside["model"], {n: s for n, s in shapes.items() if n not in changed}, "repaired")
        if _WEIGHTS in inside:
            compare_weights(inside[_WEIGHTS], project_weights(network, changed), "repaired")
        device = device_of(network)
        before = _map(inside["maps"], tensors)
        own = {name: tensors.pop(name) for name in list(tensors) if name.split(".")[0] == _LAST}
        if set(tensors) != {"temperature"}:
            raise ValueError(
                f"the tensors must be those of a repaired network, got {', '.join(sorted(tensors))} besides"
            )
        model = share_copy(unwrap(network, compiled=True), _as_in(network, changed)) if changed else network
        after: Calibrator = Temperature(tensors["temperature"])
        if _LAST in inside:
            after = Chain([after, unpack(inside[_LAST], own)])
        repaired = Repaired(model, before=None if before is None else before.to(device), after=after.to(device))
        repaired.changed = changed
        repaired.repair_record = _record(unpack(inside["record"], {}))
    return repaired


def _as_in(network: nn.Module, changed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """New tensors on the device and in the precision of those that they replace, or of the weight beside a new bias."""
    state = unwrap(network, compiled=True).state_dict()
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
    try:
        rungs = tuple(RungRecord(**rung) for rung in record.pop("rungs"))
        return RepairRecord(**record, rungs=rungs)
    except (KeyError, TypeError) as error:
        raise ValueError(f"the record of the repair is none: {error}") from None
