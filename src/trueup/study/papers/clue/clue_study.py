"""CLUE beside cross-entropy: same network, same dropout, same Monte-Carlo evaluation; what it gains and what it costs.

The level of its square and its α are chosen on validation, never on test. The paper's tables are not in the package's
facts, so there are no printed numbers to set beside these.

Mendes, Romano & Garlan (2025), CLUE: calibration by learning uncertainty–error alignment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueup.core.warning_capture import record_warnings
from trueup.models.networks import Normalise
from trueup.models.shift import by_severity, evaluate_ood, evaluate_shift
from trueup.models.uncertainty import log_probs_of, mc_dropout, mean_log_probs, mutual_information
from trueup.study.grid import Options, Study, product
from trueup.study.papers.clue import clue_tables
from trueup.study.papers.clue import mc_dropout as doubt
from trueup.study.papers.clue.clue_tables import (
    AVERAGED,
    CLASSIFIERS,
    CLUES,
    GAUSSIAN,
    HEAD,
    PASSES_IN_TRAINING,
    REGRESSORS,
)
from trueup.training.data.dataset import Data
from trueup.training.data.sources import folder_of

SEEDS, PASSES, SHIFTED, SEVERITIES = 5, 10, 1000, (0, 1, 3, 5)
"""How many runs of everything; passes at evaluation; test images that are shifted, at most, and how far."""
IMAGE = {"epochs": 3, "batch": 128, "rate": 2e-3, "network": {"width": 16, "dropout": 0.3}}
TEXT = {"epochs": 8, "batch": 64, "rate": 2e-3, "network": {"width": 64, "dropout": 0.3}}
TABLE = {"epochs": 150, "batch": 64, "rate": 2e-3, "network": {"hidden": [50, 50], "dropout": 0.1}}
SMALL_BOOK = {"width": 32, "heads": 2, "layers": 2, "dropout": 0.1}
HOW: Mapping[str, Mapping[str, Any]] = {
    "digits": IMAGE | {"epochs": 20, "batch": 64},
    "diabetes": TABLE | {"epochs": 60},
    "descriptions": {"epochs": 20, "batch": 16, "rate": 3e-3, "network": SMALL_BOOK},
    "fashion_mnist": IMAGE,
    "cifar10": IMAGE | {"epochs": 5, "network": {"width": 32, "dropout": 0.3}},
    "trec": TEXT,
    "sst5": TEXT | {"epochs": 4},
    "tinyshakespeare": {"epochs": 2, "batch": 32, "rate": 2e-3, "network": {"width": 64, "dropout": 0.1}},
    **{f"uci_{name}": TABLE for name in ("boston", "concrete", "energy", "wine", "yacht")},
}
"""Data set → its network and schedule."""
TABLES = tuple(name for name in HOW if name.startswith("uci"))
"""Regressions from files."""
PRESETS: Mapping[str, Sequence[str]] = {
    "digits": ("digits", "diabetes", "descriptions"),
    "files": ("fashion_mnist", "trec", "sst5", "tinyshakespeare", *TABLES),
    "uci": TABLES,
    **{name: (name,) for name in ("fashion_mnist", "cifar10", "trec", "sst5", "tinyshakespeare")},
}
"""The first needs no files; the others read those in the folder of data."""


def grid(options: Options) -> Iterator[dict[str, Any]]:
    """A cell for each data set, method and seed."""
    if unknown := [method for method in options.methods if method not in REGRESSORS]:
        raise ValueError(f"methods must be among {', '.join(REGRESSORS)}, got {unknown[0]!r}")
    for name in data_sets(options):
        known = REGRESSORS if name in ("diabetes", *TABLES) else CLASSIFIERS
        content = {"content": _digest(doubt.description())} if name == "descriptions" else {}
        told = {"data": name, **content, **HOW[name], "passes": [PASSES_IN_TRAINING, PASSES]}
        wanted = [method for method in options.methods or known if method in known]
        yield from ({**told, **each} for each in product(method=wanted, seed=range(options.seeds or SEEDS)))


def data_sets(options: Options) -> Sequence[str]:
    """The data sets that are asked for: one by its name, those of a preset, or all whose files there may be."""
    preset = options.preset or ("digits" if options.data_dir is None else "files")
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    if options.data is None:
        return PRESETS[preset]
    if options.data not in (names := {**HOW, **PRESETS}):
        raise ValueError(f"data must be one of {', '.join(names)}, got {options.data!r}")
    return (options.data,) if options.data in HOW else PRESETS[options.data]


def local(options: Options) -> dict[str, Any]:
    """The folder of data."""
    return {"folder": str(folder_of(options.data_dir).expanduser().resolve())}


def work(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train one network, and judge what it says when it is asked several times.

    >>> how = {**HOW["diabetes"], "epochs": 2, "passes": [5, 10]}
    >>> rows = work({"data": "diabetes", **how, "method": "plain", "seed": 0})
    >>> [row["part"] for row in rows], sorted(rows[0])[:4]
    (['figures'], ['alignment', 'auroc', 'correlation', 'coverage'])
    """
    method, seed, (training, passes) = settings["method"], settings["seed"], settings["passes"]
    data = doubt.data_of(settings["data"], settings.get("folder"), seed)
    train, val, test = doubt.tensors_of(data)
    head = method == GAUSSIAN or method.endswith(HEAD)
    share = {"alpha": 1.0} if method == AVERAGED else CLUES.get(method.removesuffix(HEAD))
    clue = None if share is None else {**share, "passes": training}
    epochs, batch = settings["epochs"], settings["batch"]
    ramp = max(1, epochs * -(-len(train[1]) // batch) // 10)
    task = doubt.task_of(data.kind, head=head)

    def made() -> tuple[nn.Module, Any]:
        network = doubt.network_of(data, settings["network"], seed, head=head)
        return network, doubt.loss_of(data.kind, head=head, clue=clue, ramp=ramp)

    network, loss = made()
    cost = doubt.operations(network, (train[0][:batch], train[1][:batch]), loss, task)
    network, loss = made()
    doubt.learned(network, train, loss, task, epochs=epochs, batch=batch, rate=settings["rate"], seed=seed)
    found = [doubt.forecast(network, part, data.kind, passes, head=head) for part in (val, test)]
    with record_warnings() as messages:  # a temperature at its bound is part of the result
        row = doubt.figures(found[1], found[0])
    warning = "; ".join(messages)
    rows = [{"part": "figures", **row, "val_nll": doubt.loss_on(found[0]), "operations": cost, "warning": warning}]
    return rows + (_images(network, data, passes, seed) if data.kind == "image" else [])


def _images(network: nn.Module, data: Data, passes: int, seed: int) -> list[dict[str, Any]]:
    """The same network on shifted and on foreign images."""
    assert data.normalisation is not None
    normalise = Normalise(*data.normalisation)
    x, y = (part[:SHIFTED] for part in doubt.whole(data.test))

    def said(images: Tensor) -> Tensor:
        return mean_log_probs(log_probs_of(mc_dropout(network, normalise(images), passes), None))

    shifted = by_severity(evaluate_shift(said, x, y, severities=SEVERITIES, seed=seed, progress=False))
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


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


STUDY = Study(
    "clue",
    1,
    grid=grid,
    work="trueup.study.papers.clue.clue_study:work",
    tables=clue_tables.tables,
    figures=clue_tables.figures,
    local=local,
    title="CLUE: uncertainty that equals the error",
)
