"""What the rethinking study runs on which data set: losses, coefficients, networks and schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trueup_studies.grid import Options, read_toml
from trueup_studies.registry import NETWORKS

STOPPED = "cross_entropy_stopped"
"""The network of the epoch that is best after a temperature: what follows if calibratable is what counts."""
REFERENCE = "cross_entropy"
_KNOWN = read_toml(__package__, "presets.toml")
NEGATIVE_NOTE = " ".join(_KNOWN.pop("negative_note").split())
TITLES: Mapping[str, str] = _KNOWN.pop("titles")
DATA_TITLES: Mapping[str, str] = _KNOWN.pop("data_titles")
CANDIDATES: Mapping[str, Sequence[float]] = _KNOWN.pop("candidates")
"""Loss → the coefficients of which one is chosen."""
NEGATIVE: Mapping[str, Sequence[float]] = _KNOWN.pop("negative")
"""Loss → coefficients that push confidence up."""
SWEEP = (("focal", 3), ("focal", 2), ("focal", 1), (REFERENCE, 0), *(("inverse_focal", gamma) for gamma in (1, 2, 3)))
"""From less confident to more: figure 6."""


@dataclass(frozen=True)
class Growth:
    """Training sets of several sizes, to see which coefficient each likes best: figure 1(d)."""

    sizes: Sequence[int]
    coefficients: Mapping[str, Sequence[float]]
    seeds: int


@dataclass(frozen=True)
class Plan:
    """The experiment on one data set."""

    data: str
    network: str
    epochs: int
    options: Mapping[str, Any] = field(default_factory=dict)
    """Of the network."""
    how: Mapping[str, Any] = field(default_factory=dict)
    """Options of `train`, and whether to augment."""
    sizes: Sequence[int | None] = (None, None, None)
    """Samples to train, to validate and to test; None is all."""
    pooled: bool = False
    """Split all samples anew, where the data set has no test part of its own."""
    seeds: int = 5
    candidates: Mapping[str, Sequence[float]] = field(default_factory=lambda: CANDIDATES)
    negative: Mapping[str, Sequence[float]] = field(default_factory=lambda: NEGATIVE)
    growth: Growth | None = None


def _read_presets(known: dict[str, Any]) -> dict[str, tuple[Plan, ...]]:
    schedule, coefficients = known.pop("schedule"), {name: known.pop(name) for name in ("growing", "wide")}

    def plan(how: dict[str, Any], growth: dict[str, Any] | None = None, sizes: Sequence[int] = (), **own: Any) -> Plan:
        if growth is not None:
            growth["coefficients"] = coefficients[growth["coefficients"]]
            own["growth"] = Growth(**growth)
        return Plan(how=schedule | how, sizes=[size or None for size in sizes or (0, 0, 0)], **own)

    return {name: tuple(plan(**each) for each in plans) for name, plans in known.items()}


PRESETS = _read_presets(_KNOWN)
"""Sizes and schedules by name."""


def plans(options: Options) -> list[Plan]:
    """The experiments that the options name: a preset, or the part of it on one data set.

    >>> [plan.data for plan in plans(Options(preset="paper"))]
    ['svhn', 'cifar10', 'cifar100', 'newsgroups20']
    """
    preset = options.preset or ("digits" if options.data is None else options.data)
    if preset not in PRESETS:
        wish = "preset" if options.preset else "data, without a preset,"
        raise ValueError(f"{wish} must be one of {', '.join(PRESETS)}, got {preset!r}")
    plans = [plan for plan in PRESETS[preset] if options.data in (None, plan.data)]
    if not plans:
        names = ", ".join(plan.data for plan in PRESETS[preset])
        raise ValueError(f"data must be one of {names} with preset {preset!r}, got {options.data!r}")
    if options.network is None:
        return plans
    if options.network not in NETWORKS:
        raise ValueError(f"network must be one of {', '.join(NETWORKS)}, or timm:NAME, got {options.network!r}")
    # The options are those of the preset's own network.
    return [
        plan if plan.network == options.network else replace(plan, network=options.network, options={})
        for plan in plans
    ]
