"""Networks and data sets that the user names: by an import path, a folder of `train`, a file, or the registry."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.cli.output import SCHEMA, plain

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

RUN, WEIGHTS = "run.json", "weights.safetensors"
"""In a folder of `train`: what was trained on what, and what came out."""


def model_at(where: str) -> nn.Module:
    """A network from "package.module:name", a network or a function that makes one, or from a folder of `train`."""
    if (Path(where) / RUN).is_file():
        run = run_in(Path(where))
        return with_weights(built(run["network"], run["options"], run["normalisation"]), Path(where) / WEIGHTS)
    module, colon, name = where.partition(":")
    if not colon or not module or not name:
        raise ValueError(f"the model must be package.module:make_model or a folder that train wrote, got {where!r}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"there is no module {error.name} in {here} or among the installed ones") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"{module} has no {name}; it has: {', '.join(k for k in vars(found) if k[0] != '_')}")
        found = getattr(found, part)
    from torch import nn

    model = found if isinstance(found, nn.Module) else found() if callable(found) else found
    if not isinstance(model, nn.Module):
        raise ValueError(f"{where} must be or make a torch network, got {type(model).__name__}")
    return model


def with_weights(model: nn.Module, path: Path) -> nn.Module:
    """A network with the weights of a .safetensors file, or of a .pt file that holds nothing but tensors."""
    from trueup.io.atomic import errors_name_file, require_file
    from trueup.models.networks import load_weights

    if require_file(path).suffix.lower() != ".safetensors":
        with errors_name_file(path):
            return load_weights(model, path)
    from safetensors.torch import load_file

    with errors_name_file(path):
        weights, own = load_file(path), model.state_dict()
        differing = [name for name in {**own, **weights} if _shape(own, name) != _shape(weights, name)]
        if differing:
            name, more = differing[0], f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            raise ValueError(
                f"the weights must fit the network: {name} is {_told(weights, name)} in the file, "
                f"{_told(own, name)} in the network{more}"
            )
        model.load_state_dict(weights)
    return model


def _shape(tensors: Mapping[str, Any], name: str) -> tuple[int, ...] | None:
    return tuple(tensors[name].shape) if name in tensors else None


def _told(tensors: Mapping[str, Any], name: str) -> str:
    return f"{_shape(tensors, name)}" if name in tensors else "missing"


def val_and_test(data: str, folder: Path | None, seed: int) -> tuple[Dataset[Any], Dataset[Any]]:
    """The validation and test parts of a data set, or of a .npz file with `images` or `inputs`, and `labels`.

    Images (n, H, W) or (n, H, W, C) become pixels in [0, 1]; inputs go to the network as they are. A file that does not
    name its parts is halved at random.
    """
    if Path(data).suffix.lower() == ".npz":
        return _halves(Path(data), seed)
    from trueup.cli.options import known
    from trueup.training.data import DATASETS, load_data

    if Path(data).suffix:
        raise ValueError(f"{data}: the data must be a .npz file or a name that `trueup datasets` lists")
    found = load_data(known("data set", DATASETS, data), folder, seed=seed)
    return found.val, found.test


def _halves(path: Path, seed: int) -> tuple[Dataset[Any], Dataset[Any]]:
    import numpy as np
    import torch
    from torch.utils.data import TensorDataset

    from trueup.core.splits import split_indices
    from trueup.io.atomic import errors_name_file, require_file
    from trueup.training.data.dataset import select
    from trueup.training.data.images import pixels
    from trueup.training.data.readers import npz

    with errors_name_file(require_file(path)), np.load(path, allow_pickle=False) as file:
        inputs = next((name for name in ("images", "inputs") if any(k.endswith(name) for k in file.files)), "images")
    parts = npz(path, inputs)
    with errors_name_file(path):
        if not {"val", "test"} <= set(parts):
            if set(parts) != {"train"}:
                raise ValueError(f"wanted val_{inputs} and test_{inputs}, or {inputs} alone, got {', '.join(parts)}")
            one, other = split_indices(len(parts["train"].labels), share=0.5, seed=seed)
            parts = {"val": select(parts["train"], one), "test": select(parts["train"], other)}
        made = []
        for key in ("val", "test"):
            x, y = parts[key]
            if len(x) != len(y):
                raise ValueError(f"{key} must have a label for each of its {len(x)} inputs, got {len(y)}")
            x = pixels(x) if inputs == "images" else torch.from_numpy(x)
            made.append(TensorDataset(x, torch.from_numpy(y.astype(np.int64))))
    return made[0], made[1]


def network_for(data: Any, name: str, seed: int) -> tuple[nn.Module, dict[str, Any]]:
    """A network of the registry that takes the inputs of a data set, and how to make it again."""
    from trueup.registry import NETWORKS

    if data.kind not in ("image", "text"):
        raise ValueError(f"train takes images or texts of several classes, got {data.name}, which is {data.kind}")
    wanted = inspect.signature(NETWORKS[name]).parameters
    one = data.train[0][0]
    has = {"channels": len(one), "inputs": one.numel()} if data.kind == "image" else {}
    has |= {"vocabulary": len(data.vocabulary)} if data.vocabulary else {}
    missing = [key for key in ("channels", "inputs", "vocabulary", "context") if key in wanted and key not in has]
    if missing:
        raise ValueError(f"{name} is not for {data.kind}s such as {data.name}: `trueup networks` lists others")
    outputs = next(iter(wanted))
    chosen = {key: value for key, value in has.items() if key in wanted}
    options = {outputs: len(data.classes), **chosen, "seed": seed}
    told = {"network": name, "options": options, "normalisation": data.normalisation}
    return built(**told), told


def built(network: str, options: Mapping[str, Any], normalisation: Any) -> nn.Module:
    """A network of the registry, behind the normalisation of its images."""
    from torch import nn

    from trueup.models.networks import Normalise
    from trueup.registry import NETWORKS

    made: nn.Module = NETWORKS[network](**options)
    return made if normalisation is None else nn.Sequential(Normalise(*normalisation), made)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Plain data with its schema, in a file that is whole or not there."""
    from trueup.io.atomic import atomic_write

    with atomic_write(path) as (draft,):
        draft.write_text(json.dumps(plain({"schema": SCHEMA, **content}), indent=2, allow_nan=False), encoding="utf-8")


def run_in(folder: Path) -> dict[str, Any]:
    """What `train` says of a folder of its own."""
    from trueup.io.atomic import errors_name_file

    with errors_name_file(folder / RUN):
        run = json.loads((folder / RUN).read_text(encoding="utf-8"))
        if run.get("schema") != SCHEMA:
            raise ValueError(f"the schema must be {SCHEMA}, got {run.get('schema')!r}")
        return dict(run)
