"""What the rethinking study runs on which data set: losses, coefficients, networks and schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trueup.registry import NETWORKS
from trueup.study.grid import Options

STOPPED = "cross_entropy_stopped"
"""The network of the epoch that is best after a temperature: what follows if calibratable is what counts."""
TITLES = {
    "cross_entropy": "Cross-Entropy",
    STOPPED: "Cross-Entropy, stopped on refinement",
    "label_smoothing": "Label Smoothing",
    "norm": "L1 Norm",
    "focal": "Focal Loss",
    "inverse_focal": "Inverse Focal Loss",
}
DATA_TITLES = {"svhn": "SVHN", "cifar10": "CIFAR-10", "cifar100": "CIFAR-100", "newsgroups20": "20Newsgroups"}
REFERENCE = "cross_entropy"
CANDIDATES: Mapping[str, Sequence[float]] = {
    "cross_entropy": (0,),
    STOPPED: (0,),
    "label_smoothing": (0.01, 0.03, 0.05, 0.07, 0.09),
    "norm": (0.001, 0.005, 0.01, 0.05, 0.1),
    "focal": (1, 3, 5, 7, 9),
    "inverse_focal": (1, 2, 3),
}
"""The coefficients of the paper, of which one is chosen; it tabulates no inverse focal loss."""
NEGATIVE: Mapping[str, Sequence[float]] = {"label_smoothing": (-0.01, -0.05), "norm": (-0.001, -0.01)}
"""Coefficients that push confidence up, which the paper found to destroy accuracy."""
SWEEP = (("focal", 3), ("focal", 2), ("focal", 1), (REFERENCE, 0), *(("inverse_focal", gamma) for gamma in (1, 2, 3)))
"""From less confident to more: figure 6."""
SCHEDULE = {"batch": 512, "rate": 0.1, "momentum": 0.9, "decay": 1e-4, "schedule": "steps", "drops": [0.5, 0.75]}


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
    how: Mapping[str, Any] = field(default_factory=lambda: SCHEDULE)
    """Options of `train`, and whether to augment."""
    sizes: Sequence[int | None] = (None, None, None)
    """Samples to train, to validate and to test; None is all."""
    pooled: bool = False
    """Split all samples anew, where the data set has no test part of its own."""
    seeds: int = 5
    candidates: Mapping[str, Sequence[float]] = field(default_factory=lambda: CANDIDATES)
    negative: Mapping[str, Sequence[float]] = field(default_factory=lambda: NEGATIVE)
    growth: Growth | None = None


_SMALL = {**SCHEDULE, "batch": 50}
_GROWING = {
    "label_smoothing": (0.01, 0.05, 0.09, 0.13, 0.17, 0.21, 0.25),
    **{k: CANDIDATES[k] for k in ("norm", "focal")},
}
_WIDE = {
    "label_smoothing": tuple(round(0.01 * i, 2) for i in range(1, 26)),
    "norm": tuple(round(0.01 * i, 2) for i in range(1, 11)),
    "focal": CANDIDATES["focal"],
}
_TENTHS = (5000, 15000, 25000, 35000, 45000)
_CIFAR = {**SCHEDULE, "augment": True}
_NEWS = {**SCHEDULE, "batch": 128, "rate": 0.01, "drops": [0.5]}

PRESETS: dict[str, tuple[Plan, ...]] = {
    "digits": (
        Plan(
            "digits",
            "mlp",
            60,
            how=_SMALL,
            sizes=(200, 450, 900),
            pooled=True,
            growth=Growth((50, 100, 200, 400), _GROWING, 3),
        ),
    ),
    "fashion_mnist": (
        Plan(
            "fashion_mnist",
            "cnn",
            30,
            {"width": 8},
            how={**_SMALL, "rate": 0.05},
            sizes=(2000, 2000, 4000),
            seeds=3,
            growth=Growth((500, 1000, 2000, 4000), _GROWING, 1),
        ),
    ),
    "cifar10": (Plan("cifar10", "resnet8", 20, how={**_SMALL, "rate": 0.05}, sizes=(2000, 1000, 2000), seeds=3),),
    "trec": (Plan("trec", "text_cnn", 20, {"width": 32}, how={**_NEWS, "batch": 50}, seeds=3),),
    "paper": (
        Plan("svhn", "resnet32", 200, how={**SCHEDULE, "augment": False}),
        Plan("cifar10", "resnet32", 200, how=_CIFAR, sizes=(45000, None, None), growth=Growth(_TENTHS, _WIDE, 5)),
        Plan("cifar100", "resnet32", 200, how=_CIFAR),
        Plan("newsgroups20", "text_cnn", 100, how=_NEWS),
    ),
    "paper-resnet110": tuple(
        Plan(data, "resnet110", 200, how={**SCHEDULE, "augment": data != "svhn"})
        for data in ("svhn", "cifar10", "cifar100")
    ),
}
"""Sizes and schedules: what takes minutes on two cores, and the paper's own, for machines that have the time."""


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
