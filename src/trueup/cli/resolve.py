"""Loading of networks and data from import paths, files and folders; the studies add names of data sets."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.cli.plugins import load_resolver

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import Dataset

RUN = "run.json"
"""File in a folder of `train` with the network, its data and its settings."""


def load_model(name: str) -> nn.Module:
    """Load a network: from "package.module:name", where name is a network or makes one, or from a folder of `train`."""
    if is_run(name):
        return load_run(name)[0]
    module, colon, attribute = name.partition(":")
    if not colon or not module or not attribute:
        raise ValueError(f"the model must be package.module:make_model or a folder that train wrote, got {name!r}")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        value: Any = import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"there is no module {error.name} in {here} or among the installed packages") from None
    for part in attribute.split("."):
        if not hasattr(value, part):
            names = ", ".join(key for key in vars(value) if key[0] != "_")
            raise ValueError(f"{module} has no {attribute}; it has: {names}")
        value = getattr(value, part)
    from torch import nn

    model = value if isinstance(value, nn.Module) else value() if callable(value) else value
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} must be or make a torch network, got {type(model).__name__}")
    return model


def load_weights(model: nn.Module, path: Path) -> nn.Module:
    """Load weights into a network from a .safetensors file, or from a .pt file that holds only tensors."""
    from trueup.io.atomic import errors_name_file, require_file
    from trueup.models import networks

    if require_file(path).suffix.lower() != ".safetensors":
        with errors_name_file(path):
            return networks.load_weights(model, path)
    from safetensors.torch import load_file

    with errors_name_file(path):
        loaded, expected = load_file(path), model.state_dict()
        differing = [name for name in {**expected, **loaded} if _shape(expected, name) != _shape(loaded, name)]
        if differing:
            name, others = differing[0], f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            raise ValueError(
                f"the weights must fit the network: {name} is {_shape(loaded, name)} in the file, "
                f"{_shape(expected, name)} in the network{others}"
            )
        model.load_state_dict(loaded)
    return model


def _shape(tensors: Mapping[str, Any], name: str) -> str:
    return f"{tuple(tensors[name].shape)}" if name in tensors else "missing"


def load_val_and_test(data: str, folder: Path | None, seed: int) -> tuple[Dataset[Any], Dataset[Any]]:
    """Load the validation and test parts of a .npz file, of a folder of images, or of a data set by name.

    Arrays `images`, (n, H, W) or (n, H, W, C), become pixels in [0, 1]; `inputs` stay unchanged. A folder has one
    folder of images per class, or two such folders, `val` and `test`. Data without these parts is split in half at
    random.
    """
    if Path(data).suffix.lower() == ".npz":
        return _load_npz(Path(data), seed)
    if Path(data).is_dir():
        from trueup.models.image_data import load_folder

        if (parts := load_folder(Path(data), seed)) is not None:
            return parts
    if Path(data).suffix or Path(data).name != data:
        raise ValueError(f"{data}: the data must be a .npz file, a folder of images by class, or a data set's name")
    return load_resolver("data", f"the data set {data!r}")(data, folder, seed)


def is_run(model: str) -> bool:
    """Return whether this is a folder that `train` wrote."""
    return (Path(model) / RUN).is_file()


def load_run(model: str) -> tuple[nn.Module, str, int | None]:
    """Load from a folder that `train` wrote: the network, the name of its data, and the seed of the split."""
    return load_resolver("run", f"the folder {model}, which `train` wrote,")(model)


def _load_npz(path: Path, seed: int) -> tuple[Dataset[Any], Dataset[Any]]:
    from trueup._core.splits import split_indices
    from trueup.io.atomic import errors_name_file
    from trueup.models.image_data import npz, select

    inputs = inputs_of(path)
    parts = npz(path, inputs)
    with errors_name_file(path):
        if not {"val", "test"} <= set(parts):
            if set(parts) != {"train"}:
                raise ValueError(f"expected val_{inputs} and test_{inputs}, or {inputs} alone, got {', '.join(parts)}")
            val, test = split_indices(len(parts["train"].labels), share=0.5, seed=seed)
            parts = {"val": select(parts["train"], val), "test": select(parts["train"], test)}
        for key in ("val", "test"):
            x, y = parts[key]
            if len(x) != len(y):
                raise ValueError(f"{key} must have a label for each of its {len(x)} inputs, got {len(y)}")
        return _dataset(inputs, *parts["val"]), _dataset(inputs, *parts["test"])


def _dataset(name: str, inputs: Any, labels: Any = None) -> Dataset[Any]:
    """Make a data set of arrays; images become pixels in [0, 1]."""
    import torch
    from torch.utils.data import TensorDataset

    from trueup.models.image_data import pixels

    tensors = [pixels(inputs) if name.endswith("images") else torch.from_numpy(inputs)]
    return TensorDataset(*tensors, *(() if labels is None else (torch.from_numpy(labels),)))


def _names(path: Path) -> list[str]:
    """Return the names of the arrays in a .npz file."""
    from trueup.io.atomic import errors_name_file, require_file
    from trueup.models.image_data import arrays_in

    with errors_name_file(require_file(path)), arrays_in(path) as arrays:
        return list(arrays)


def inputs_of(path: Path) -> str:
    """Return the name that a .npz file has for its inputs: `images` or `inputs`."""
    names = _names(path)
    return next((name for name in ("images", "inputs") if any(key.endswith(name) for key in names)), "images")


def lacks_labels(path: Path) -> bool:
    """Return whether this is a .npz file without labels."""
    return path.suffix.lower() == ".npz" and not any(name.endswith("labels") for name in _names(path))


def load_inputs(path: Path, labels: Any = None) -> Dataset[Any]:
    """Load the inputs of a .npz file (its validation part, if it has parts), with `labels` if they are passed."""
    import numpy as np

    from trueup.io.atomic import errors_name_file, require_file
    from trueup.models.image_data import arrays_in

    with errors_name_file(require_file(path)), arrays_in(path) as arrays:
        names = ("val_images", "images", "val_inputs", "inputs")
        name = next((name for name in names if name in arrays), None)
        if name is None:
            raise ValueError(f"there must be one of the arrays {', '.join(names)}, got {', '.join(arrays) or 'none'}")
        inputs = arrays[name]
        if not np.isfinite(inputs).all():
            raise ValueError(f"{name} must be finite")
        return _dataset(name, inputs, labels)


def load_labelled(path: Path) -> Dataset[Any]:
    """Load the samples of a .npz file with labels (its validation part, if it has parts)."""
    from trueup.models.image_data import npz

    parts = npz(path, inputs_of(path))
    return load_inputs(path, parts["val" if "val" in parts else next(iter(parts))].labels)
