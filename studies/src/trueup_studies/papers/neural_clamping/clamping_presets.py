"""Presets of the Neural Clamping study: networks and the sizes of the experiments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trueup_studies.ablation import GAMMAS
from trueup_studies.grid import Options, WantedFile, digest, read_toml
from trueup_studies.trained_networks import KNOWN_WEIGHTS, read_split
from trueup_studies.training.data.sources import folder_of


@dataclass(frozen=True)
class Preset:
    """Networks, and the size of the experiments with each."""

    networks: Sequence[Mapping[str, Any]]
    """Each has `data`, `network` and `how`; weights in the folder of data are used in the place of training."""
    batch: int
    """Batch size of the descent over the calibration set."""
    code_batch: int | None = None
    """Batch size of the released code's descent; twice `batch` if None."""
    epochs: int = 100
    gammas: Sequence[float] = GAMMAS
    penalties: Sequence[float] = ()
    """Values of λ that are searched besides the rule's, each with `searched_gammas`."""
    searched_gammas: Sequence[float] = (0.25, 0.5, 0.75, 1.0)
    sum_form: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the sum form that differ: epochs, batch, rate and gammas."""
    val_rows: int | None = None
    """Number of calibration images, drawn anew in each run; None for all."""
    retrained: bool = False
    """Whether each run trains a new network on a new split."""
    resplit: bool = False
    """Whether each run but the first splits calibration and test images anew, for the same network."""

    def gammas_of(self, reduction: str | None) -> Sequence[float]:
        """Return the exponents of the sweep with this form of the objective; None is the mean."""
        gammas: Sequence[float] = self.sum_form.get("gammas", self.gammas) if reduction == "sum" else self.gammas
        return gammas


_RESNETS: list[dict[str, Any]] = [
    {"data": "cifar10", "network": f"resnet{depth}", "how": {"weights": f"weights/cifar10_resnet{depth}.th"}}
    for depth in (20, 32)
]


def _preset(networks: Any, shifts: Sequence[Any] = (), **sizes: Any) -> Preset:
    nets: list[dict[str, Any]] = _RESNETS if networks == "resnets" else networks
    shifted = [{**net, "how": {**net["how"], "shift": shift}} for shift in shifts for net in nets]
    return Preset(networks=shifted or nets, **sizes)


PRESETS = {name: _preset(**settings) for name, settings in read_toml(__package__, "presets.toml").items()}
"""Name → preset."""


def preset_of(options: Options) -> Preset:
    """Return the selected preset, or the first one with the selected data set."""
    name = options.preset
    if name is None:
        data = options.data or "digits"
        name = next((n for n, p in PRESETS.items() if any(net["data"] == data for net in p.networks)), data)
    if name not in PRESETS:
        known = dict.fromkeys(net["data"] for preset in PRESETS.values() for net in preset.networks)
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, or data of {', '.join(known)}, got {name!r}")
    return PRESETS[name]


def networks_of(preset: Preset, options: Options) -> list[Mapping[str, Any]]:
    """Return the networks of a preset, restricted to the selected data set and network."""
    networks = list(preset.networks)
    for name, value in (("data", options.data), ("network", options.network)):
        chosen = [net for net in networks if value in (None, net[name])]
        if not chosen:
            names = ", ".join(dict.fromkeys(net[name] for net in networks))
            raise ValueError(f"{name} must be one of {names}, got {value!r}")
        networks = chosen
    return networks


def weights_file(net: Mapping[str, Any]) -> str:
    """Return the path of a network's weights in the folder of data."""
    return str(net["how"].get("weights", f"weights/{net['data']}_{net['network'].replace(':', '-')}.th"))


def weights_files(preset: str) -> list[WantedFile]:
    """List the files of weights that a preset needs, or can use in the place of training."""
    files = {}
    for net in PRESETS[preset].networks:
        path, how = weights_file(net), net["how"]
        side = f"with {path.removesuffix('.th')}.json, which says what they were trained on"
        if "weights" in how:
            files[path] = WantedFile(path, f"published weights, or others {side}")
        elif net["data"] != "digits":
            without = "timm fetches its own" if how.get("options", {}).get("pretrained") else "it is trained"
            files[path] = WantedFile(path, f"{side}; without it {without}", needed=False)
    return list(files.values())


def training_settings(net: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Return how to obtain a network: from a file of weights, identified by its content, or else by training."""
    how, folder = net["how"], folder_of(options.data_dir)
    file = weights_file(net)
    if (folder / file).exists():
        known = {"options": {}, "weights": file, "digest": digest((folder / file).read_bytes())}
        known |= {name: how[name] for name in ("shift", "resize") if name in how}
        if known["digest"] in KNOWN_WEIGHTS:
            return known
        split = read_split(folder / file, net["data"])
        # Older cells do not have the field `published`, and must keep their keys.
        return {**known, "split": split if split.published else split[:2]}
    if "weights" in how:
        raise FileNotFoundError(f"{folder / file}: no such file; data_dir must name the folder that has it")
    return {**how, "retrain": True} if options.retrain else dict(how)
