"""One cell of the rethinking study: a network trained with one loss, and everything that is asked of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import ConcatDataset, DataLoader, Subset

from trueup import metrics
from trueup.core.warning_capture import record_warnings
from trueup.models.calibrated import collect
from trueup.models.networks import Normalise
from trueup.registry import LOSSES, NETWORKS
from trueup.report.figures.reliability import reliability
from trueup.study.figures import max_logits
from trueup.training.augment import flip_and_crop
from trueup.training.calibratability import SIZES, calibratability, validation_sizes
from trueup.training.data import load_data
from trueup.training.data.dataset import Data
from trueup.training.loop import Trained, train

OPTIONS: Mapping[str, tuple[str | None, Mapping[str, Any]]] = {
    "cross_entropy": (None, {}),
    "label_smoothing": ("smoothing", {}),
    "norm": ("strength", {"order": 1.0}),
    "focal": ("gamma", {"detach_weight": True}),
    "inverse_focal": ("gamma", {"detach_weight": True}),
}
"""Loss → what its coefficient is called, and its other options: the paper's code lets no gradient through weights."""
SEQUENCES = "deep_text_cnn"
"""The one network that is not among those of the toolkit."""


class DeepTextCNN(nn.Module):
    """Eight layers over embedded words: six convolutions of width 3, halving the length at each second, then two dense.

    The paper says no more than "8-layer 1D-CNN"; the layout is ours.

    >>> DeepTextCNN(20, vocabulary=50, width=8)(torch.ones(2, 40, dtype=torch.int64)).shape
    torch.Size([2, 20])
    """

    def __init__(self, classes: int, *, vocabulary: int, width: int = 128, seed: int = 0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width, padding_idx=0)
        self.convolutions = nn.ModuleList(nn.Conv1d(width, width, 3, padding=1) for _ in range(6))
        self.hidden, self.linear = nn.Linear(width, width), nn.Linear(width, classes)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.parameters():
                spread = math.sqrt(2 / weight[0].numel()) if weight.dim() > 1 else 0.0
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
            self.embedding.weight[0] = 0

    def forward(self, words: Tensor) -> Tensor:
        """Whole numbers (n, length) to logits."""
        x = self.embedding(words).transpose(1, 2)
        for place, convolution in enumerate(self.convolutions):
            x = F.relu(convolution(x))
            if place % 2:
                x = F.max_pool1d(x, 2, ceil_mode=True)
        return self.linear(F.relu(self.hidden(x.amax(dim=2))))


def work(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train one network and measure it raw, after repairs, along the epochs and by how early it learned its samples.

    `sizes` are those of train, val and test, None where all are to be used. `pooled` data are parted anew: test samples
    are the same for every seed, and fewer training samples are among more. `how` has options of `train`, `options`
    those of the network.
    """
    data = parts(settings)
    how = {**settings["how"]}
    augment = flip_and_crop if how.pop("augment", False) else None
    network = made(settings["network"], data, settings["options"], settings["seed"])
    name, others = OPTIONS[settings["loss"]]
    options = {**others, **({} if name is None else {name: float(settings["coefficient"])})}
    loss = LOSSES[settings["loss"]](**options)
    seed = settings["seed"]
    done = train(network, data, loss, settings["epochs"], augment=augment, seed=seed, progress=False, **how)
    with record_warnings() as messages:  # how the fits ended is part of the result
        row = measured(settings, data, done)
    return [{**row, "warning": "; ".join(messages)}]


def measured(settings: Mapping[str, Any], data: Data, done: Trained) -> dict[str, Any]:
    """Everything that tables and figures are made of."""
    val: Any = done.val
    test: Any = done.test
    [row] = calibratability({(settings["loss"], settings["coefficient"], settings["seed"]): done})
    sizes = [size for size in SIZES if size < len(val.labels)] + [len(val.labels)]
    repairs = validation_sizes(val, test, sizes=sizes, seed=settings["seed"])
    learned = collect(done.model, DataLoader(data.train, batch_size=512), progress=False)
    return {
        **asdict(row),
        "val_accuracy": metrics.accuracy(*val),
        "val_ece_temperature": metrics.ece(val.logits / row.temperature, val.labels),
        "train_accuracy": done.history.epochs[-1].train_accuracy,
        "optimal_ece": [epoch.optimal_ece for epoch in done.history.epochs],
        "validation_sizes": [asdict(repair) for repair in repairs],
        "reliability": asdict(reliability(*test)),
        "reliability_temperature": asdict(reliability(test.logits / row.temperature, test.labels)),
        "max_logits": asdict(max_logits(learned.logits, done.history.learned_epochs())),
    }


def made(name: str, data: Data, options: Mapping[str, Any], seed: int) -> nn.Module:
    """The network, for the inputs and classes of a data set, with its normalisation in front."""
    maker = DeepTextCNN if name == SEQUENCES else NETWORKS[name]
    one = data.train[0][0]
    has = {"channels": len(one), "inputs": one.numel(), "vocabulary": len(data.vocabulary), "seed": seed}
    wanted = inspect.signature(maker).parameters
    network = maker(len(data.classes), **{**{key: has[key] for key in has if key in wanted}, **options})
    return network if data.normalisation is None else nn.Sequential(Normalise(*data.normalisation), network)


def parts(settings: Mapping[str, Any]) -> Data:
    """The data set in the sizes that the settings want.

    >>> data = parts({"data": "digits", "sizes": [200, 450, 900], "pooled": True, "seed": 1})
    >>> len(data.train), len(data.val), len(data.test)
    (200, 450, 900)
    """
    sizes, seed = settings["sizes"], settings["seed"]
    # What is pooled must come in one order, so that the test samples are the same for every seed.
    data = load_data(settings["data"], settings.get("data_dir"), seed=0 if settings["pooled"] else seed)
    halves: list[Any] = [data.train, data.val, data.test]
    orders = [_order(len(half), place, s) for place, (half, s) in enumerate(zip(halves, (seed, seed, 0), strict=True))]
    if settings["pooled"]:
        halves = [ConcatDataset(halves)] * 3
        order = _order(len(halves[0]), 2, 0)
        cut = max(len(order) - sizes[2], 0)
        rest = order[:cut][_order(cut, 0, seed)]
        orders = [rest[sizes[1] :], rest[: sizes[1]], order[cut:]]
    there = [len(order) for order in orders]
    if any(size is not None and size > most for size, most in zip(sizes, there, strict=True)):
        raise ValueError(f"sizes must be at most {there} for train, val and test of {data.name}, got {sizes}")
    train_part, val, test = (
        Subset(half, order[:size].tolist()) for half, order, size in zip(halves, orders, sizes, strict=True)
    )
    return replace(data, train=train_part, val=val, test=test)


def _order(n: int, place: int, seed: int) -> np.ndarray:
    """Each place has a stream of its own: permutations by one seed are alike even where their lengths differ."""
    return np.random.RandomState([place, seed]).permutation(n)
