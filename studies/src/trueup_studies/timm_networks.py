"""Networks of the timm library by name, behind the extra `trueup-studies[vision]`."""

from __future__ import annotations

from difflib import get_close_matches
from importlib import import_module
from typing import Any

import torch
from torch import nn

from trueup.models.dropout import insert_dropout


def timm_network(
    name: str, classes: int = 10, *, channels: int = 3, dropout: float = 0.0, pretrained: bool = False, seed: int = 0
) -> nn.Module:
    """Build an image network of timm; `NETWORKS["timm:resnet18"]` is this function with that name.

    Weights are drawn from `seed`, or downloaded with `pretrained`. The final layer is always drawn if the number of
    classes differs. `insert_dropout` puts dropout before the final layer, since timm's own dropout is not always a
    separate layer. timm's split into features and head lets `mc_dropout` repeat only the head.

    >>> import pytest
    >>> timm = pytest.importorskip("timm", exc_type=ImportError)
    >>> net = timm_network("resnet18", 10, dropout=0.3)
    >>> net.eval()(torch.zeros(2, 3, 32, 32)).shape
    torch.Size([2, 10])

    Wightman (2019), PyTorch image models.
    """
    timm = require_network(name)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network: nn.Module = timm.create_model(name, pretrained=pretrained, num_classes=classes, in_chans=channels)
    if dropout:
        insert_dropout(network, dropout, layers=_last_layer(network), in_place=True)
    return network


def require_network(name: str) -> Any:
    """Import timm and check that it has a network of this name."""
    try:
        timm = import_module("timm")
    except (ImportError, RuntimeError) as error:  # RuntimeError: torchvision does not fit torch
        reason = " ".join(str(error).split())
        raise ImportError(f"networks of timm need it: pip install 'trueup-studies[vision]' ({reason})") from None
    if ":" not in name and not timm.is_model(name):  # a name with a colon is a file or a hub
        near = get_close_matches(name, timm.list_models(), n=3, cutoff=0.0)
        raise ValueError(f"name must be a network of timm, such as {', '.join(near)}, got {name!r}")
    return timm


def _last_layer(network: nn.Module) -> int | list[str]:
    """Return the name of timm's classifier, else the number of final layers, 1."""
    get_classifier: Any = getattr(network, "get_classifier", None)
    classifier = get_classifier() if callable(get_classifier) else None
    return [name for name, module in network.named_modules() if module is classifier] or 1
