"""Which networks the study of Neural Clamping takes, and how much it does with each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trueup_studies.ablation import GAMMAS
from trueup_studies.grid import Options, WantedFile, digest, read_toml
from trueup_studies.trained_networks import KNOWN_WEIGHTS, read_split
from trueup_studies.training.data.sources import folder_of


@dataclass(frozen=True)
class Preset:
    """Networks, and how much is done with each."""

    networks: Sequence[Mapping[str, Any]]
    """Each `data`, `network` and `how`; a file of weights in the folder of data goes before training."""
    batch: int
    """Of the descent over the calibration set."""
    code_batch: int | None = None
    """Of the released code's; twice as many if None, which is half as many steps as there."""
    epochs: int = 100
    gammas: Sequence[float] = GAMMAS
    penalties: Sequence[float] = ()
    """λ that are searched beside the rule's, each with some γ."""
    searched_gammas: Sequence[float] = (0.25, 0.5, 0.75, 1.0)
    val_rows: int | None = None
    """Calibration images, drawn anew in each run; all of them if None."""
    retrained: bool = False
    """Whether each run has a network and a split of its own."""
    resplit: bool = False
    """Whether each run but the first splits the images to calibrate and to test on anew, for the same network."""


_RESNETS: list[dict[str, Any]] = [
    {"data": "cifar10", "network": f"resnet{depth}", "how": {"weights": f"weights/cifar10_resnet{depth}.th"}}
    for depth in (20, 32)
]


def _preset(networks: Any, shifts: Sequence[Any] = (), **own: Any) -> Preset:
    nets: list[dict[str, Any]] = _RESNETS if networks == "resnets" else networks
    shifted = [{**net, "how": {**net["how"], "shift": shift}} for shift in shifts for net in nets]
    return Preset(networks=shifted or nets, **own)


PRESETS = {name: _preset(**own) for name, own in read_toml(__package__, "presets.toml").items()}
"""By name; without one, that which has the data set asked for."""


def preset_of(options: Options) -> Preset:
    """The preset that was asked for, or the first with the data set that was."""
    name = options.preset
    if name is None:
        data = options.data or "digits"
        name = next((n for n, p in PRESETS.items() if any(net["data"] == data for net in p.networks)), data)
    if name not in PRESETS:
        known = dict.fromkeys(net["data"] for preset in PRESETS.values() for net in preset.networks)
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, or data of {', '.join(known)}, got {name!r}")
    return PRESETS[name]


def networks_of(preset: Preset, options: Options) -> list[Mapping[str, Any]]:
    """The networks of a preset that were asked for, by data set and by name."""
    networks = list(preset.networks)
    for name, wanted in (("data", options.data), ("network", options.network)):
        chosen = [net for net in networks if wanted in (None, net[name])]
        if not chosen:
            names = ", ".join(dict.fromkeys(net[name] for net in networks))
            raise ValueError(f"{name} must be one of {names}, got {wanted!r}")
        networks = chosen
    return networks


def weights_file(net: Mapping[str, Any]) -> str:
    """The file of a network's weights in the folder of data."""
    return str(net["how"].get("weights", f"weights/{net['data']}_{net['network'].replace(':', '-')}.th"))


def weights_files(preset: str) -> list[WantedFile]:
    """The files of weights that a preset needs, or takes in the place of training."""
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
    """How a network is obtained: from a file of weights, identified by its content, or else by training."""
    how, folder = net["how"], folder_of(options.data_dir)
    file = weights_file(net)
    if (folder / file).exists():
        known = {"options": {}, "weights": file, "digest": digest((folder / file).read_bytes())}
        known |= {name: how[name] for name in ("shift", "resize") if name in how}
        if known["digest"] in KNOWN_WEIGHTS:
            return known
        split = read_split(folder / file, net["data"])
        # Cells from before there was a word for the paper's weights keep their names.
        return {**known, "split": split if split.published else split[:2]}
    if "weights" in how:
        raise FileNotFoundError(f"{folder / file}: no such file; data_dir must name the folder that has it")
    return {**how, "retrain": True} if options.retrain else dict(how)
