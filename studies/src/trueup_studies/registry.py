"""Networks by name, resolved on first use: listing them imports nothing heavy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING

from trueup._core.registry import Registry

if TYPE_CHECKING:
    from torch import nn


class _Networks(Registry[Callable[..., "nn.Module"]]):
    """The registry, with every network of timm under `timm:` and its name there."""

    def __getitem__(self, name: str) -> Callable[..., nn.Module]:
        if isinstance(name, str) and name.startswith("timm:"):
            return partial(import_module("trueup_studies.timm_networks").timm_network, name.removeprefix("timm:"))
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or (isinstance(name, str) and name.startswith("timm:"))


NETWORKS = _Networks(
    "network",
    {
        **{
            name: f"trueup_studies.networks:{name}"
            for name in ("resnet8", "resnet20", "resnet32", "resnet110", "wrn16x4", "wrn28x10", "wrn40x10")
        },
        "cnn": "trueup_studies.networks:CNN",
        "mlp": "trueup_studies.networks:MLP",
        "text_cnn": "trueup_studies.sequences:TextCNN",
        "char_transformer": "trueup_studies.sequences:CharTransformer",
    },
)
"""Name → function that builds the network; its first argument is the number of outputs. `timm:resnet18` is timm's."""
