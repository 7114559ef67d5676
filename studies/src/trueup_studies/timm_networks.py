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
    """Any image network of timm, as timm makes it; `NETWORKS["timm:resnet18"]` is this function of that name.

    Weights are drawn from `seed`, or fetched with `pretrained`, except for the last layer where the number of classes
    differs. Dropout is put before the last layer by `insert_dropout`, since timm's own is not always a layer that can
    be switched on by itself; timm's split into features and head lets `mc_dropout` repeat only the head.

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
    """The library, if it can be imported and has a network of this name."""
    timm = _timm()
    if ":" not in name and not timm.is_model(name):  # with a colon it is the name of a file or a hub
        near = get_close_matches(name, timm.list_models(), n=3, cutoff=0.0)
        raise ValueError(f"name must be a network of timm, such as {', '.join(near)}, got {name!r}")
    return timm


def _timm() -> Any:
    try:
        return import_module("timm")
    except (ImportError, RuntimeError) as error:  # a torchvision that does not go with torch raises the second
        reason = " ".join(str(error).split())
        raise ImportError(f"networks of timm need it: pip install 'trueup-studies[vision]' ({reason})") from None


def _last_layer(network: nn.Module) -> int | list[str]:
    """Where the classifier is by timm's own account, else the last layer of all."""
    asked: Any = getattr(network, "get_classifier", None)
    found = asked() if callable(asked) else None
    return [name for name, module in network.named_modules() if module is found] or 1
