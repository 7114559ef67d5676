"""Settings of the rethinking study for each data set: losses, coefficients, networks and schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trueup_studies.grid import Options, read_toml
from trueup_studies.registry import NETWORKS

STOPPED = "cross_entropy_stopped"
"""Cross-entropy that keeps the epoch with the lowest NLL after temperature scaling."""
REFERENCE = "cross_entropy"
_KNOWN = read_toml(__package__, "presets.toml")
NEGATIVE_NOTE = " ".join(_KNOWN.pop("negative_note").split())
TITLES: Mapping[str, str] = _KNOWN.pop("titles")
DATA_TITLES: Mapping[str, str] = _KNOWN.pop("data_titles")
CANDIDATES: Mapping[str, Sequence[float]] = _KNOWN.pop("candidates")
"""Loss → the coefficients to choose from."""
NEGATIVE: Mapping[str, Sequence[float]] = _KNOWN.pop("negative")
"""Loss → negative coefficients, which raise confidence."""
SWEEP = (("focal", 3), ("focal", 2), ("focal", 1), (REFERENCE, 0), *(("inverse_focal", gamma) for gamma in (1, 2, 3)))
"""Losses and coefficients of figure 6, by rising confidence."""


@dataclass(frozen=True)
class Growth:
    """Training sets of several sizes, to choose a coefficient for each: figure 1(d)."""

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
    """Options of the network."""
    how: Mapping[str, Any] = field(default_factory=dict)
    """Options of `train`, and `augment`."""
    sizes: Sequence[int | None] = (None, None, None)
    """Numbers of training, validation and test samples; None for all."""
    pooled: bool = False
    """Whether to pool all parts and split them anew."""
    seeds: int = 5
    candidates: Mapping[str, Sequence[float]] = field(default_factory=lambda: CANDIDATES)
    negative: Mapping[str, Sequence[float]] = field(default_factory=lambda: NEGATIVE)
    growth: Growth | None = None
    sweep: bool = True
    """Whether to run the losses of figure 6."""

    @property
    def title(self) -> str:
        """The data set's name in tables."""
        return DATA_TITLES.get(self.data, self.data)


def _read_presets(known: dict[str, Any]) -> dict[str, tuple[Plan, ...]]:
    schedule, coefficients = known.pop("schedule"), {name: known.pop(name) for name in ("growing", "wide")}

    def plan(how: dict[str, Any], growth: dict[str, Any] | None = None, sizes: Sequence[int] = (), **more: Any) -> Plan:
        if growth is not None:
            growth["coefficients"] = coefficients[growth["coefficients"]]
            more["growth"] = Growth(**growth)
        return Plan(how=schedule | how, sizes=[size or None for size in sizes or (0, 0, 0)], **more)

    return {name: tuple(plan(**each) for each in plans) for name, plans in known.items()}


PRESETS = _read_presets(_KNOWN)
"""Name → plans."""


def plans(options: Options) -> list[Plan]:
    """Return the plans that the options select: a preset, or its plan for one data set.

    >>> [plan.data for plan in plans(Options(preset="paper"))]
    ['svhn', 'cifar10', 'cifar100', 'newsgroups20']
    """
    preset = options.preset or ("digits" if options.data is None else options.data)
    if preset not in PRESETS:
        name = "preset" if options.preset else "data, without a preset,"
        raise ValueError(f"{name} must be one of {', '.join(PRESETS)}, got {preset!r}")
    plans = [plan for plan in PRESETS[preset] if options.data in (None, plan.data)]
    if not plans:
        names = ", ".join(plan.data for plan in PRESETS[preset])
        raise ValueError(f"data must be one of {names} with preset {preset!r}, got {options.data!r}")
    if options.network is None:
        return plans
    if options.network not in NETWORKS:
        raise ValueError(f"network must be one of {', '.join(NETWORKS)}, or timm:NAME, got {options.network!r}")
    # The preset's options belong to its own network.
    return [
        plan if plan.network == options.network else replace(plan, network=options.network, options={})
        for plan in plans
    ]
