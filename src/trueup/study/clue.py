"""CLUE beside cross-entropy: same network, same dropout, same Monte-Carlo evaluation; what it gains and what it costs.

The level of its square and its α are chosen on validation, never on test. The paper's tables are not in the package's
facts, so there are no printed numbers to set beside these.

Mendes, Romano & Garlan (2025), CLUE: calibration by learning uncertainty–error alignment.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueup.networks import Normalise
from trueup.report import canvas, draw, shift_curves
from trueup.shift import ShiftRow, by_severity, evaluate_ood, evaluate_shift
from trueup.study import doubt
from trueup.study.differences import paired
from trueup.study.study import Options, Rows, Study, product
from trueup.study.tables import Column, Table, tabulate
from trueup.training.record import Data
from trueup.training.sources import folder_of
from trueup.uncertainty import log_probs_of, mc_dropout, mean_log_probs, mutual_information

SEEDS, PASSES, PASSES_IN_TRAINING, SHIFTED = 5, 10, 5, 1000
"""How many runs of everything; passes at evaluation and in training; test images that are shifted, at most."""
CLUES = {f"{each['level']}_{each['alpha']}": each for each in product(level=("batch", "group", "sample"), alpha=(0.5, 0.9))}
PLAIN, AVERAGED, GAUSSIAN, HEAD = "plain", "passes", "gaussian", "_head"
"""The loss of one pass; that of the mean of several, CLUE with α = 1; the Gaussian of a variance head."""
CHOSEN, CHOSEN_HEAD = "chosen", "chosen_head"
IMAGE = {"epochs": 3, "batch": 128, "rate": 2e-3, "network": {"width": 16, "dropout": 0.3}}
TEXT = {"epochs": 8, "batch": 64, "rate": 2e-3, "network": {"width": 64, "dropout": 0.3}}
TABLE = {"epochs": 150, "batch": 64, "rate": 2e-3, "network": {"hidden": [50, 50], "dropout": 0.1}}
SMALL_BOOK = {"width": 32, "heads": 2, "layers": 2, "dropout": 0.1}
HOW: Mapping[str, Mapping[str, Any]] = {
    "digits": IMAGE | {"epochs": 30, "batch": 64},
    "diabetes": TABLE | {"epochs": 100},
    "descriptions": {"epochs": 60, "batch": 16, "rate": 3e-3, "network": SMALL_BOOK},
    "fashion_mnist": IMAGE,
    "cifar10": IMAGE | {"epochs": 5, "network": {"width": 32, "dropout": 0.3}},
    "trec": TEXT,
    "sst5": TEXT | {"epochs": 4},
    "tinyshakespeare": {"epochs": 2, "batch": 32, "rate": 2e-3, "network": {"width": 64, "dropout": 0.1}},
    **{f"uci_{name}": TABLE for name in ("boston", "concrete", "energy", "wine", "yacht")},
}
"""Data set → its network and schedule."""
TABLES = tuple(name for name in HOW if name.startswith("uci"))
PRESETS: Mapping[str, Sequence[str]] = {
    "digits": ("digits", "diabetes", "descriptions"),
    "files": ("fashion_mnist", "trec", "sst5", "tinyshakespeare", *TABLES),
    "uci": TABLES,
    **{name: (name,) for name in ("fashion_mnist", "cifar10", "trec", "sst5", "tinyshakespeare")},
}
"""The first needs no files; the others read those in the folder of data."""
NUMBERS = ("diabetes", *TABLES)
KINDS = {"tinyshakespeare": "characters", "descriptions": "characters", "trec": "text", "sst5": "text"}


def grid(options: Options) -> Iterator[dict[str, Any]]:
    """A cell for each data set, method and seed."""
    for name in data_sets(options):
        known = methods_for(name)
        if unknown := [method for method in options.methods if method not in {*methods_for("digits"), *_regression()}]:
            raise ValueError(f"methods must be among {', '.join(_regression())}, got {unknown[0]!r}")
        content = {"content": _digest(doubt.description())} if name == "descriptions" else {}
        told = {"data": name, **content, **HOW[name], "passes": [PASSES_IN_TRAINING, PASSES]}
        for method in options.methods or known:
            if method in known:
                yield from ({**told, "method": method, "seed": seed} for seed in range(options.seeds or SEEDS))


def data_sets(options: Options) -> Sequence[str]:
    """The data sets that are asked for: one by its name, those of a preset, or all whose files there may be."""
    preset = options.preset or ("digits" if options.data_dir is None else "files")
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    if options.data is None:
        return PRESETS[preset]
    if options.data not in {**HOW, **PRESETS}:
        raise ValueError(f"data must be one of {', '.join({**HOW, **PRESETS})}, got {options.data!r}")
    # The name of the preset that needs no files is also that of one of its data sets.
    return PRESETS["digits"] if options.data == preset == "digits" else PRESETS.get(options.data, (options.data,))


def methods_for(data: str) -> tuple[str, ...]:
    """The names of what is trained on a data set: baselines first."""
    return _regression() if data in NUMBERS else (PLAIN, AVERAGED, *CLUES)


def _regression() -> tuple[str, ...]:
    return (PLAIN, AVERAGED, GAUSSIAN, *CLUES, *(name + HEAD for name in CLUES))


def local(options: Options) -> dict[str, Any]:
    """The folder of data."""
    return {"folder": str(folder_of(options.data_dir).expanduser().resolve())}


def work(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train one network, and judge what it says when it is asked several times.

    >>> rows = work({"data": "diabetes", **HOW["diabetes"], "epochs": 2, "passes": [5, 10], "method": "plain", "seed": 0})
    >>> [row["part"] for row in rows], sorted(rows[0])[:4]
    (['figures'], ['alignment', 'auroc', 'correlation', 'coverage'])
    """
    method, seed, (training, passes) = settings["method"], settings["seed"], settings["passes"]
    data = doubt.data_of(settings["data"], settings.get("folder"), seed)
    train, val, test = doubt.tensors_of(data)
    head = method == GAUSSIAN or method.endswith(HEAD)
    share = {"alpha": 1.0} if method == AVERAGED else CLUES.get(method.removesuffix(HEAD))
    how = {name: settings[name] for name in ("epochs", "batch", "rate")}
    steps = how["epochs"] * -(-len(train[1]) // how["batch"])
    clue = None if share is None else {**share, "passes": training}
    loss = doubt.loss_of(data.kind, head=head, clue=clue, ramp=max(1, steps // 10))
    task = doubt.task_of(data.kind, head=head)
    network = doubt.network_of(data, settings["network"], seed, head=head)
    first = (train[0][: how["batch"]], train[1][: how["batch"]])
    cost = doubt.operations(doubt.network_of(data, settings["network"], seed, head=head), first, loss, task)
    doubt.learned(network, train, doubt.loss_of(data.kind, head=head, clue=clue, ramp=max(1, steps // 10)), task, seed=seed, **how)
    found = [doubt.forecast(network, part, data.kind, passes, head=head) for part in (val, test)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")  # a temperature at its bound is part of the result
        row = doubt.figures(found[1], found[0])
    said = "; ".join(dict.fromkeys(str(w.message) for w in caught))
    rows = [{"part": "figures", **row, "val_nll": doubt.loss_on(found[0]), "operations": cost, "warning": said}]
    return rows + (_images(network, data, passes, seed) if data.kind == "image" else [])


def _images(network: nn.Module, data: Data, passes: int, seed: int) -> list[dict[str, Any]]:
    """The same network on shifted and on foreign images."""
    assert data.normalisation is not None
    normalise = Normalise(*data.normalisation)
    x, y = (part[:SHIFTED] for part in doubt.whole(data.test))

    def said(images: Tensor) -> Tensor:
        return mean_log_probs(log_probs_of(mc_dropout(network, normalise(images), passes), None))

    shifted = by_severity(evaluate_shift(said, x, y, seed=seed, progress=False))
    rows = [{"part": "shift", **asdict(row)} for row in shifted]
    samples = mc_dropout(network, normalise(x), passes)
    for name, images in foreign(x, data.name, seed).items():
        others = mc_dropout(network, normalise(images), passes)
        told = {"mutual information": (mutual_information(samples), mutual_information(others))}
        means = (mean_log_probs(log_probs_of(each, None)) for each in (samples, others))
        rows += [{"part": "ood", "foreign": name, **asdict(row)} for row in evaluate_ood(*means, scores=told)]
    return rows


def foreign(images: Tensor, data: str, seed: int) -> dict[str, Tensor]:
    """Images (n, C, H, W) that show nothing the network knows: noise, known ones inverted, their pixels in disorder."""
    generator = torch.Generator().manual_seed(seed)
    n, channels, *size = images.shape
    order = torch.rand(n, 1, *size, generator=generator).flatten(2).argsort(dim=2).expand(-1, channels, -1)
    found = {
        "noise": torch.rand(images.shape, generator=generator),
        "inverted": 1 - images,
        "pixels in disorder": images.flatten(2).gather(2, order).reshape(images.shape),
    }
    if data != "digits":
        shown, _ = doubt.whole(doubt.data_of("digits", None, 0).test)
        found["digits"] = F.interpolate(shown, size).expand(-1, channels, -1, -1)
    return found


def title(method: str, data: str | None = None) -> str:
    """A method's name for a reader.

    >>> title("group_0.5"), title("batch_0.9_head"), title("plain", "diabetes")
    ('CLUE group, α 0.5', 'CLUE batch, α 0.9, variance head', 'squared error')
    """
    task = "squared error" if data in NUMBERS else "cross-entropy"
    plain = {PLAIN: task, AVERAGED: f"{task} of {PASSES_IN_TRAINING} passes", GAUSSIAN: "Gaussian NLL, variance head"}
    plain |= {CHOSEN: "CLUE, chosen", CHOSEN_HEAD: "CLUE, chosen, variance head"}
    if method in plain:
        return plain[method]
    level, alpha = method.removesuffix(HEAD).split("_")
    return f"CLUE {level}, α {alpha}{', variance head' if method.endswith(HEAD) else ''}"


def chosen(rows: Rows, data: str, *, head: bool = False, oracle: bool = False) -> str | None:
    """CLUE's level and α of least mean NLL on validation, over the seeds; an oracle looks at the test part."""
    key = "nll" if oracle else "val_nll"
    names = [name + HEAD if head else name for name in CLUES]
    alike = {name: [row[key] for row in _figures(rows, data) if row["method"] == name] for name in names}
    most = max(map(len, alike.values()), default=0)
    means = {name: float(np.mean(values)) for name, values in alike.items() if most and len(values) == most}
    return min(means, key=means.__getitem__, default=None)
