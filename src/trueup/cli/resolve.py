"""Networks and data that the user names: an import path, a file, a folder; what the studies know by name, they read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trueup.cli.plugins import load_resolver

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

RUN = "run.json"
"""In a folder of `train`: the network, its data and its settings."""


def load_model(name: str) -> nn.Module:
    """A network from "package.module:name", a network or a function that makes one, or from a folder of `train`."""
    if is_run(name):
        trained: nn.Module = _load_run(name)[0]
        return trained
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
        raise ValueError(f"there is no module {error.name} in {here} or among the installed ones") from None
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
    """A network with the weights of a .safetensors file, or of a .pt file that holds nothing but tensors."""
    from trueup.io.atomic import errors_name_file, require_file
    from trueup.models import networks

    if require_file(path).suffix.lower() != ".safetensors":
        with errors_name_file(path):
            return networks.load_weights(model, path)
    from safetensors.torch import load_file

    with errors_name_file(path):
        loaded, wanted = load_file(path), model.state_dict()
        differing = [name for name in {**wanted, **loaded} if _shape(wanted, name) != _shape(loaded, name)]
        if differing:
            name, more = differing[0], f" and {len(differing) - 1} more" if len(differing) > 1 else ""
            raise ValueError(
                f"the weights must fit the network: {name} is {_shape(loaded, name)} in the file, "
                f"{_shape(wanted, name)} in the network{more}"
            )
        model.load_state_dict(loaded)
    return model


def _shape(tensors: Mapping[str, Any], name: str) -> str:
    return f"{tuple(tensors[name].shape)}" if name in tensors else "missing"


def load_val_and_test(data: str, folder: Path | None, seed: int) -> tuple[Dataset[Any], Dataset[Any]]:
    """The validation and test parts of a .npz file with `images` or `inputs`, and `labels`; of a folder; or by name.

    Images (n, H, W) or (n, H, W, C) become pixels in [0, 1]; inputs go to the network as they are. A folder has one of
    pictures for each class, or two such, `val` and `test`. What does not name its parts is halved at random.
    """
    if Path(data).suffix.lower() == ".npz":
        return _load_npz(Path(data), seed)
    if Path(data).is_dir():
        from trueup.models.image_data import load_folder

        if (parts := load_folder(Path(data), seed)) is not None:
            return parts
    if Path(data).suffix or Path(data).name != data:
        raise ValueError(f"{data}: the data must be a .npz file, a folder of images by class, or a data set's name")
    named: tuple[Dataset[Any], Dataset[Any]] = load_resolver("data", f"the data set {data!r}")(data, folder, seed)
    return named


def is_run(model: str) -> bool:
    """Whether this is a folder that `train` wrote."""
    return (Path(model) / RUN).is_file()


def _load_run(model: str) -> tuple[nn.Module, str, int | None]:
    """The network of a folder that `train` wrote, the name of its data, and the seed that drew their parts."""
    run: tuple[nn.Module, str, int | None] = load_resolver("run", f"the folder {model}, which `train` wrote,")(model)
    return run


def require_data(model: str, data: str | None) -> None:
    """Refuse a network without data, unless it is in a folder of `train`, which names them."""
    if data is None and not is_run(model):
        raise ValueError("--data must name a .npz file, a folder of images, or a data set")


def load_network_and_data(
    model: str,
    data: str | None,
    weights: Path | None,
    *,
    device: str | None,
    folder: Path | None,
    seed: int | None,
    batch_size: int,
    labels: bool = True,
) -> tuple[nn.Module, list[DataLoader[Any]], str]:
    """A network with its weights; loaders of the validation and test parts of its data; and the name of these.

    Unless `labels` are needed, a .npz file may have none: then there is one loader, of inputs alone.
    """
    from torch.utils.data import DataLoader

    if data is None:
        network, data, seed = _load_run(model)
    else:
        network = load_model(model)
    if weights is not None:
        network = load_weights(network, weights)
    parts: tuple[Dataset[Any], ...]
    if not labels and lacks_labels(Path(data)):
        parts = (load_inputs(Path(data)),)
    else:
        parts = load_val_and_test(data, folder, seed or 0)
    loaders = [DataLoader(part, batch_size=batch_size) for part in parts]
    network.eval()  # whatever made it: nothing here trains
    return network if device is None else network.to(device), loaders, data


def _load_npz(path: Path, seed: int) -> tuple[Dataset[Any], Dataset[Any]]:
    import numpy as np
    import torch
    from torch.utils.data import TensorDataset

    from trueup._core.splits import split_indices
    from trueup.io.atomic import errors_name_file
    from trueup.models.image_data import npz, pixels, select

    inputs = inputs_of(path)
    parts = npz(path, inputs)
    with errors_name_file(path):
        if not {"val", "test"} <= set(parts):
            if set(parts) != {"train"}:
                raise ValueError(f"wanted val_{inputs} and test_{inputs}, or {inputs} alone, got {', '.join(parts)}")
            val, test = split_indices(len(parts["train"].labels), share=0.5, seed=seed)
            parts = {"val": select(parts["train"], val), "test": select(parts["train"], test)}
        datasets = []
        for key in ("val", "test"):
            x, y = parts[key]
            if len(x) != len(y):
                raise ValueError(f"{key} must have a label for each of its {len(x)} inputs, got {len(y)}")
            x = pixels(x) if inputs == "images" else torch.from_numpy(x)
            datasets.append(TensorDataset(x, torch.from_numpy(y.astype(np.int64))))
    return datasets[0], datasets[1]


def inputs_of(path: Path) -> str:
    """What a .npz file calls its inputs: `images`, which become pixels in [0, 1], or `inputs`."""
    from trueup.io.atomic import errors_name_file, require_file
    from trueup.models.image_data import arrays_in

    with errors_name_file(require_file(path)), arrays_in(path) as arrays:
        return next((name for name in ("images", "inputs") if any(k.endswith(name) for k in arrays)), "images")


def lacks_labels(path: Path) -> bool:
    """Whether this is a .npz file without labels."""
    from trueup.io.atomic import errors_name_file, require_file
    from trueup.models.image_data import arrays_in

    if path.suffix.lower() != ".npz":
        return False
    with errors_name_file(require_file(path)), arrays_in(path) as arrays:
        return not any(name.endswith("labels") for name in arrays)


def load_inputs(path: Path) -> Dataset[Any]:
    """The inputs alone of a .npz file: `images` or `inputs`, where parts are named those of validation."""
    import numpy as np
    import torch
    from torch.utils.data import TensorDataset

    from trueup.io.atomic import errors_name_file, require_file
    from trueup.models.image_data import arrays_in, pixels

    with errors_name_file(require_file(path)), arrays_in(path) as arrays:
        names = ("val_images", "images", "val_inputs", "inputs")
        name = next((name for name in names if name in arrays), None)
        if name is None:
            raise ValueError(f"wanted one of the arrays {', '.join(names)}, got {', '.join(arrays) or 'none'}")
        x = arrays[name]
        if not np.isfinite(x).all():
            raise ValueError(f"{name} must be finite")
        return TensorDataset(pixels(x) if name.endswith("images") else torch.from_numpy(x))


def load_labelled(path: Path) -> Dataset[Any]:
    """All samples of a .npz file with labels, where parts are named those of validation."""
    import numpy as np
    import torch
    from torch.utils.data import TensorDataset

    from trueup.models.image_data import npz

    parts = npz(path, inputs_of(path))
    labels = parts["val" if "val" in parts else next(iter(parts))].labels
    return TensorDataset(*load_inputs(path).tensors, torch.from_numpy(labels.astype(np.int64)))  # type: ignore[attr-defined]
