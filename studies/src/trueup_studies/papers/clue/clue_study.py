"""CLUE compared with cross-entropy: its gain and its cost, with the same network, dropout and Monte-Carlo evaluation.

The level of its square and α are chosen on validation samples. There are no published numbers to compare with.

Mendes, Romano & Garlan (2025), CLUE: calibration by learning uncertainty–error alignment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trueup._core.errors import record_warnings
from trueup.models.corruptions import corruptions_for
from trueup.models.dropout import log_probs_of, mean_log_probs, mutual_information
from trueup.models.networks import Normalise
from trueup.models.shift import Shifts, by_severity, evaluate_ood, evaluate_shift
from trueup_studies import cost
from trueup_studies.grid import Options, Study, as_json, digest, product, read_toml
from trueup_studies.papers.clue import clue_tables
from trueup_studies.papers.clue import mc_dropout as mc
from trueup_studies.papers.clue.clue_claims import CLAIMS
from trueup_studies.training.data.dataset import Data
from trueup_studies.training.data.sources import folder_of

RAMP, WARMUP = 10, 5
"""Divisors of the number of steps: CLUE's square is ramped over a tenth of them, AvUC begins after a fifth."""
SEEDS, PASSES, SHIFTED, SEVERITIES = 5, 10, 1000, (0, 1, 3, 5)
"""Runs of everything; passes at evaluation; largest number of shifted test images, and their severities."""
OWN_SETTINGS: Mapping[str, Mapping[str, Any]] = {"avuc": {"warmup": WARMUP}, clue_tables.SHARED: {"compute": "clue"}}
"""Additional settings of some methods."""
_KNOWN = read_toml(__package__, "presets.toml")
HOW: Mapping[str, Mapping[str, Any]] = _KNOWN["how"]
"""Data set → its network and schedule."""
PRESETS: Mapping[str, Sequence[str]] = _KNOWN["presets"]
"""Preset → data sets; the first preset needs no files."""
TABLES = PRESETS["uci"]
"""Regression data sets from files."""


def grid(options: Options) -> Iterator[dict[str, Any]]:
    """Yield the settings of each data set, method and seed."""
    names = dict.fromkeys([*clue_tables.CLASSIFIERS, *clue_tables.REGRESSORS])
    if unknown := [method for method in options.methods if method not in names]:
        raise ValueError(f"methods must be among {', '.join(names)}, got {unknown[0]!r}")
    for name in data_sets(options):
        known = clue_tables.REGRESSORS if name in ("diabetes", *TABLES) else clue_tables.CLASSIFIERS
        content = {"content": digest(mc.description().encode())} if name == "descriptions" else {}
        common = {"data": name, **content, **HOW[name], "passes": [clue_tables.PASSES_IN_TRAINING, PASSES]}
        methods = [method for method in options.methods or known if method in known]
        for each in product(method=methods, seed=range(options.seeds or SEEDS)):
            yield {**common, **each, **OWN_SETTINGS.get(each["method"], {})}


def data_sets(options: Options) -> Sequence[str]:
    """Return the selected data sets: one by name, or those of a preset."""
    preset = options.preset or ("digits" if options.data_dir is None else "files")
    if preset not in PRESETS:
        raise ValueError(f"preset must be one of {', '.join(PRESETS)}, got {preset!r}")
    if options.data is None:
        return PRESETS[preset]
    if options.data not in (names := {**HOW, **PRESETS}):
        raise ValueError(f"data must be one of {', '.join(names)}, got {options.data!r}")
    return (options.data,) if options.data in HOW else PRESETS[options.data]


def work(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Train one network, and evaluate it with Monte-Carlo dropout.

    >>> how = {**HOW["diabetes"], "epochs": 2, "passes": [5, 10]}
    >>> rows = work({"data": "diabetes", **how, "method": "plain", "seed": 0})
    >>> [row["part"] for row in rows], sorted(rows[0])[:4]
    (['figures'], ['alignment', 'auroc', 'correlation', 'coverage'])
    """
    method, seed, (training, passes) = settings["method"], settings["seed"], settings["passes"]
    data = mc.load_data_set(settings["data"], settings.get("folder"), seed)
    train, val, test = mc.normalised_tensors(data)
    head = method == clue_tables.GAUSSIAN or method.endswith(clue_tables.HEAD)
    clue = (
        {"alpha": 1.0}
        if method == clue_tables.AVERAGED
        else clue_tables.CLUES.get(method.removesuffix(clue_tables.HEAD))
    )
    epochs, batch = settings["epochs"], settings["batch"]
    ramp = max(1, epochs * -(-len(train[1]) // batch) // settings.get("warmup", RAMP))
    task = mc.make_task(data.kind, head=head)

    rival = method if method in clue_tables.RIVALS else "cross_entropy"

    def network_and_loss(member: int, clue: Mapping[str, Any] | None = clue) -> tuple[nn.Module, Any]:
        network = mc.make_network(data, settings["network"], seed + 1000 * member, head=head)
        options = None if clue is None else {**clue, "passes": training}
        return network, mc.make_loss(data.kind, head=head, clue=options, ramp=ramp, name=rival)

    def count_step(clue: Mapping[str, Any] | None) -> int:
        return mc.count_flops(*network_and_loss(0, clue), (train[0][:batch], train[1][:batch]), task)

    step = count_step(clue)
    # Every level of CLUE has the same passes.
    clue_steps = count_step(next(iter(clue_tables.CLUES.values()))) / step if method == clue_tables.SHARED else 1.0
    members, member_epochs = _members(method, epochs, clue_steps)
    # Cost of all members, per step of one network that is trained for all epochs.
    operations = step * members * member_epochs / epochs
    how = {"epochs": member_epochs, "batch_size": batch, "lr": settings["rate"], "device": settings.get("device")}
    networks = []
    for member in range(members):
        network, loss = network_and_loss(member)
        networks.append(mc.train_network(network, train, loss, task, seed=seed + 1000 * member, **how))
    val_forecast, test_forecast = (mc.forecast(networks, part, data.kind, passes, head=head) for part in (val, test))
    with record_warnings() as messages:  # a temperature at its bound is a result
        row = mc.figures(test_forecast, val_forecast)
    row |= {"part": "figures", "val_nll": mc.validation_nll(val_forecast), "operations": operations}
    rows = [{**row, "warning": "; ".join(messages)}]
    return rows + (_images(networks, data, passes, seed) if data.kind == "image" else [])


def _members(method: str, epochs: int, clue_steps: float) -> tuple[int, int]:
    """Return the number of networks of a method and their epochs; a step of CLUE costs `clue_steps` plain steps."""
    if method == clue_tables.SHARED:
        return clue_tables.share_epochs(int(epochs * clue_steps))
    return clue_tables.MEMBERS if method == clue_tables.ENSEMBLE else 1, epochs


def _images(networks: Sequence[nn.Module], data: Data, passes: int, seed: int) -> list[dict[str, Any]]:
    """Evaluate the networks on shifted and on out-of-distribution images."""
    assert data.normalisation is not None
    normalise = Normalise(*data.normalisation)
    x, y = (part[:SHIFTED] for part in mc.stack_samples(data.test))

    def predict(images: Tensor) -> Tensor:
        return mean_log_probs(log_probs_of(mc.sample(networks, normalise(images), passes), None))

    shifted = by_severity(evaluate_shift(predict, x, y, Shifts(None, SEVERITIES, seed), progress=False))
    rows = [{"part": "shift", **asdict(row)} for row in shifted]
    samples = mc.sample(networks, normalise(x), passes)
    for name, images in foreign(x, data.name, seed).items():
        others = mc.sample(networks, normalise(images), passes)
        scores = {"mutual information": (mutual_information(samples), mutual_information(others))}
        means = (mean_log_probs(log_probs_of(each, None)) for each in (samples, others))
        rows += [{"part": "ood", "foreign": name, **asdict(row)} for row in evaluate_ood(*means, scores=scores)]
    return rows


def foreign(images: Tensor, data: str, seed: int) -> dict[str, Tensor]:
    """Make out-of-distribution images (n, C, H, W): noise, inverted images, and images with shuffled pixels."""
    generator = torch.Generator().manual_seed(seed)
    n, channels, *size = images.shape
    order = torch.rand(n, 1, *size, generator=generator).flatten(2).argsort(dim=2).expand(-1, channels, -1)
    images_by_kind = {
        "noise": torch.rand(images.shape, generator=generator),
        "inverted": 1 - images,
        "pixels in disorder": images.flatten(2).gather(2, order).reshape(images.shape),
    }
    if data != "digits":
        shown, _ = mc.stack_samples(mc.load_data_set("digits", None, 0).test)
        images_by_kind["digits"] = F.interpolate(shown, size).expand(-1, channels, -1, -1)
    return images_by_kind


def flops(cells: Sequence[Mapping[str, Any]]) -> tuple[float, list[str]]:
    """Count the operations of training and evaluating the networks of these cells."""
    total = 0.0
    for settings in cells:
        data, method, (training, passes) = settings["data"], settings["method"], settings["passes"]
        size = cost.SIZES[data]
        named = mc.NETWORK[size.kind], data, as_json(settings["network"])
        whole, head = cost.forward_flops(*named), cost.head_flops(*named)
        members, epochs = _members(method, settings["epochs"], 1 + (training - 1) * head / whole)
        heads = (
            training
            if method == clue_tables.AVERAGED or method.removesuffix(clue_tables.HEAD) in clue_tables.CLUES
            else 1
        )
        steps = epochs * size.train * (1 + cost.BACKWARD)
        evaluated = size.val + size.test
        if size.kind == "image":  # shifted images, and the unshifted ones with three kinds of foreign images
            shifts = len(corruptions_for(size.shape[0])) * (len(SEVERITIES) - 1) + 1
            evaluated += min(SHIFTED, size.test) * (shifts + 1 + 3)
        sampled = whole + (max(1, passes // members) - 1) * head
        total += members * (steps * (whole + (heads - 1) * head) + evaluated * sampled)
    return total, []


STUDY = Study(
    "clue",
    1,
    grid=grid,
    work="trueup_studies.papers.clue.clue_study:work",
    tables=clue_tables.tables,
    figures=clue_tables.figures,
    local=lambda options: {"folder": str(folder_of(options.data_dir).expanduser().resolve())},
    presets=lambda: PRESETS,
    claims=lambda: CLAIMS,
    resplit_ratio=lambda row: clue_tables.resplit_ratio(row["data"]),
    flops=flops,
    chooses=True,
    title="CLUE: uncertainty that equals the error",
)
