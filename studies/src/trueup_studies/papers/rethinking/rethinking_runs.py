"""One cell of the rethinking study: train a network with one loss and measure it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Subset

from trueup import metrics
from trueup._core.errors import record_warnings
from trueup._core.registry import LOSSES
from trueup._core.splits import random_order, split_by_sizes
from trueup.models.calibrated import collect
from trueup.reports.figures.reliability import reliability
from trueup_studies.figures import max_logits
from trueup_studies.networks import build_network, network_options
from trueup_studies.papers.rethinking.rethinking_presets import STOPPED
from trueup_studies.papers.rethinking.rethinking_study import CHOICES
from trueup_studies.trained_networks import channels_last, checkpoint_file
from trueup_studies.training.augment import flip_and_crop
from trueup_studies.training.calibratability import SIZES, measure_calibratability, validation_sizes
from trueup_studies.training.data import load_data
from trueup_studies.training.data.dataset import Data
from trueup_studies.training.loop import TrainingError, TrainingResult, make_fabric, train
from trueup_studies.training.run_settings import with_current_names
from trueup_studies.training.tasks import Classification

UNDETACHED = "_undetached"
"""Suffix of losses whose weight has gradients, as in the paper's equation; its code detaches the weight."""
OPTIONS: Mapping[str, tuple[str | None, Mapping[str, Any]]] = {
    **dict.fromkeys(("cross_entropy", STOPPED), (None, {})),
    **{"label_smoothing": ("smoothing", {}), "norm": ("strength", {"order": 1.0})},
    **dict.fromkeys(("focal", "inverse_focal"), ("gamma", {"detach_weight": True})),
    **dict.fromkeys(("focal" + UNDETACHED, "inverse_focal" + UNDETACHED), ("gamma", {})),
}
"""Loss → name of its coefficient, and other options."""
UNBOUNDED = "has no lower bound: training may fail"
FAILED = "training failed"
"""Part of the warning of a run that diverged."""
SETTINGS = ("data", "network", "options", "how", "sizes", "pooled", "epochs", "loss", "coefficient", "seed", "stop_on")
"""Settings of a cell that its training depends on."""


class NegativePenalty(nn.Module):
    """Label smoothing or the L1 norm with a negative coefficient; neither has a lower bound, so only the study has it.

    >>> with record_warnings() as messages:
    ...     loss = NegativePenalty("norm", -0.1)
    >>> loss(torch.tensor([[2.0, 0.0]]), torch.tensor([0])), messages
    (tensor(-0.0731), ['norm with a coefficient of -0.1 has no lower bound: training may fail'])
    """

    def __init__(self, loss: str, coefficient: float) -> None:
        super().__init__()
        self.loss, self.coefficient = loss, coefficient
        warnings.warn(f"{loss} with a coefficient of {coefficient:g} {UNBOUNDED}", stacklevel=2)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean over the batch."""
        entropy = F.cross_entropy(logits, labels)
        if self.loss == "norm":
            return entropy + self.coefficient * logits.abs().sum(dim=1).mean()
        uniform = -torch.log_softmax(logits, dim=1).mean()
        return (1 - self.coefficient) * entropy + self.coefficient * uniform


def work(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train one network; measure it raw, after calibration, along the epochs and by learned epoch.

    `sizes` are the numbers of training, validation and test samples, None for all. With `pooled` all samples are split
    anew: test samples are the same for every seed, and a smaller training set is part of a larger one. `how` has
    options of `train`, `options` those of the network. With `curves = false` in `how`, only the trained network is
    measured, which halves the time of a small one.
    """
    data = load_parts(settings)
    how = with_current_names(settings["how"])
    data = replace(data, augment=flip_and_crop if how.pop("augment", False) else None)
    seed, network = settings["seed"], settings["network"]
    model_options = network_options(network, data, **{"seed": seed, **settings["options"]})
    model = channels_last(build_network(network, model_options, normalisation=data.normalisation))
    name, others = OPTIONS[settings["loss"]]
    coefficient = float(settings["coefficient"])
    options = {**others, **({} if name is None else {name: coefficient})}
    loss: nn.Module
    with record_warnings() as messages:
        if coefficient < 0:
            loss = NegativePenalty(settings["loss"], coefficient)
        else:
            function = "cross_entropy" if settings["loss"] == STOPPED else settings["loss"].removesuffix(UNDETACHED)
            loss = LOSSES[function](**options)
    how["stop_on"] = settings.get("stop_on")
    curves = how.pop("curves", True)
    parts = data if curves else SimpleNamespace(train=data.train, augment=data.augment)
    fabric = make_fabric(settings.get("device"))
    how |= {"fabric": fabric, "seed": seed, "progress": False, "evaluate_train": curves}
    known = [settings[name] for name in SETTINGS if name in settings]
    try:
        with checkpoint_file(settings, known, len(data.train)) as checkpoint:  # type: ignore[arg-type]
            result = train(model, parts, loss, settings["epochs"], checkpoint=checkpoint, **how)
            with record_warnings() as more:  # warnings of the fits are part of the result
                row = measure(settings, data, result)
    except (FloatingPointError, TrainingError) as error:
        if not coefficient:
            raise
        # With a large coefficient, or a loss without a lower bound, a failed training is the result.
        guessing = 1 / len(data.classes)
        failure = f"{FAILED}: {str(error).partition(';')[0]}"  # without the path of the checkpoint
        worst = dict.fromkeys(CHOICES, math.inf)  # never chosen
        return [{"accuracy": guessing, "val_accuracy": guessing, **worst, "warning": "; ".join([*messages, failure])}]
    return [{**row, "warning": "; ".join([*messages, *more])}]


def measure(settings: Mapping[str, Any], data: Data, result: TrainingResult) -> dict[str, Any]:
    """Compute everything that tables and figures need."""
    curves = result.test is not None
    if not curves:
        loaders = (DataLoader(half, batch_size=512) for half in (data.val, data.test))
        val_pair, test_pair = (collect(result.model, loader, progress=False) for loader in loaders)
        result = replace(result, val=val_pair, test=test_pair)
    val: Any = result.val
    test: Any = result.test
    [row] = measure_calibratability({(settings["loss"], settings["coefficient"], settings["seed"]): result})
    sizes = [size for size in SIZES if size < len(val.labels)] + [len(val.labels)]
    repairs = validation_sizes(val, test, sizes=sizes, seed=settings["seed"])
    history = result.history.until(result.epoch)  # without the epochs after the one whose weights are kept
    train_pair = collect(result.model, DataLoader(data.train, batch_size=512), progress=False)
    learned = history.learned_epochs() if curves else np.ones(len(train_pair.labels))
    return {
        **asdict(row),
        "val_accuracy": metrics.accuracy(*val),
        "val_ece_temperature": metrics.ece(val.logits / row.temperature, val.labels),
        "epoch": result.epoch,
        "train_accuracy": history.epochs[-1].train_accuracy if curves else metrics.accuracy(*train_pair),
        "optimal_ece": [epoch.optimal_ece for epoch in result.history.epochs]
        if curves
        else [Classification().figures(None, test)["optimal_ece"]],
        "validation_sizes": [asdict(repair) for repair in repairs],
        "reliability": asdict(reliability(*test)),
        "reliability_temperature": asdict(reliability(test.logits / row.temperature, test.labels)),
        "max_logits": asdict(max_logits(train_pair.logits, learned)),
    }


def load_parts(settings: Mapping[str, Any]) -> Data:
    """Load the data set in the sizes of the settings.

    >>> data = load_parts({"data": "digits", "sizes": [200, 450, 900], "pooled": True, "seed": 1})
    >>> len(data.train), len(data.val), len(data.test)
    (200, 450, 900)
    """
    sizes, seed = settings["sizes"], settings["seed"]
    # Pooled samples come in one order, so that the test samples are the same for every seed.
    data = _load(settings["data"], settings.get("data_dir"), 0 if settings["pooled"] else seed)
    halves: list[Any] = [data.train, data.val, data.test]
    orders = [_order(len(half), i, s) for i, (half, s) in enumerate(zip(halves, (seed, seed, 0), strict=True))]
    if settings["pooled"]:
        halves = [ConcatDataset(halves)] * 3
        order = _order(len(halves[0]), 2, 0)
        rest, test_order = split_by_sizes(order, [max(len(order) - sizes[2], 0)])
        val_order, train_order = split_by_sizes(rest[_order(len(rest), 0, seed)], [sizes[1]])
        orders = [train_order, val_order, test_order]
    limits = [len(order) for order in orders]
    if any(size is not None and size > limit for size, limit in zip(sizes, limits, strict=True)):
        raise ValueError(f"sizes must be at most {limits} for train, val and test of {data.name}, got {sizes}")
    train_part, val, test = (
        Subset(half, order[:size].tolist()) for half, order, size in zip(halves, orders, sizes, strict=True)
    )
    return replace(data, train=train_part, val=val, test=test)


@lru_cache(maxsize=6)  # texts take seconds to read, and each loss needs the same seeds
def _load(name: str, folder: str | None, seed: int) -> Data:
    return load_data(name, folder, seed=seed)


def _order(n: int, part: int, seed: int) -> np.ndarray:
    """Draw a permutation from the part's own stream, since equal seeds give similar permutations of other lengths."""
    return random_order(n, [part, seed])
