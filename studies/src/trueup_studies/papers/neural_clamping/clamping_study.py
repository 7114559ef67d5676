"""Neural Clamping compared with the paper's baselines, its ablation and its cost.

Tang, Chen & Ho (2024), Neural Clamping: joint input perturbation and temperature scaling for neural network
calibration.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from functools import partial
from typing import Any

import torch
from torch import nn

from trueup import metrics
from trueup._core.errors import record_warnings
from trueup._core.registry import METHODS
from trueup.calibrators.base import Identity
from trueup.calibrators.linear import PENALTIES
from trueup.clamping import Clamped
from trueup.clamping.published_recipes import SCALES, closed_form, code, paper
from trueup.io.predictions import Predictions
from trueup.models.calibrated import Calibrated, collect
from trueup.reports.figures.reliability import Reliability, reliability
from trueup_studies import cost
from trueup_studies.ablation import ablation_rows, clamp_with, score_row
from trueup_studies.grid import Options, Study, as_json, product
from trueup_studies.papers.neural_clamping import clamping_presets as presets
from trueup_studies.papers.neural_clamping.clamping_claims import CLAIMS
from trueup_studies.papers.neural_clamping.clamping_tables import BINS, FORMS, PASS_BACK, figures, tables
from trueup_studies.papers.neural_clamping.gradient_steps import BY_STEPS, RATE, STEPS
from trueup_studies.trained_networks import SETTINGS, Loader, load_or_train, resplit
from trueup_studies.training.data.sources import folder_of

RUNS = 5
MEASURED = ("accuracy", "entropy", "nll", "ece", "aece", "sce")
KEPT = 4 * RUNS
"""Number of halves whose logits a process caches, since a dozen methods need those of the same network."""
_CONVERGED = ("temperature", "temperature_ece", "vector", "matrix", "ms_odir", "dirichlet_odir")
LOGITS = ("uncalibrated", *_CONVERGED, *BY_STEPS)
"""Methods that use only the network's logits."""
CLAMPS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "nc_code": lambda s: {"recipe": partial(code, epochs=s["epochs"], batch_size=_code_batch(s)), "loss": "focal"},
    "nc_code_augmented": lambda s: {
        "recipe": partial(code, epochs=s["epochs"], batch_size=_code_batch(s), augment=True, cutout=s["cutout"]),
        "loss": "focal",
    },
    "nc_short": lambda s: {"recipe": partial(paper, epochs=1, batch_size=s["batch"])},
    "nc_converged": lambda s: {"recipe": "varpro", "penalty": "R1"},
    "nc_converged_fl": lambda s: {"recipe": "varpro", "penalty": "R1", "loss": "focal", "gamma": s["gammas"]},
    "closed": lambda s: {"recipe": "closed_form", "boxed": True},
    "closed_scaled": lambda s: {"recipe": partial(closed_form, scale=SCALES), "boxed": True},
    "ours": lambda s: {},
}
"""Method → function from a cell's settings to options of `clamp`."""
CODE, AUGMENTED = "nc_code", "nc_code_augmented"
CUTOUTS = {"cifar10": 6, "cifar100": 4, "imagenet": 32}
"""Side of the square that the released code blanks in the images of each data set."""
PASSES = {"nc_short": 6, "nc_converged": 54, "nc_converged_fl": 216, "closed": 4, "closed_scaled": 7, "ours": 17}
"""Passes over the calibration images that the methods took on digits; the cost elsewhere is estimated from these."""
EVALUATIONS = {
    **{"vector": 19, "matrix": 123, "ms_odir": 348, "dirichlet_odir": 855},
    **dict.fromkeys((f"{name}_{end}" for name in ("vector", "matrix") for end in ("steps", "sum")), STEPS),
    **dict.fromkeys(
        (f"{name}_odir_{end}" for name in ("ms", "dirichlet") for end in ("steps", "sum")), STEPS * len(PENALTIES)
    ),
}
"""Evaluations of the likelihood on all calibration images: the paper's steps, or those of a converged fit on digits.

Fits of one number cost too little to count."""
SWEPT = {form: tuple(f"{prefix}_{name}" for name in ("ce", "fl", "searched")) for form, prefix in FORMS.items()}
"""Neural Clamping by the paper's recipe: γ = 0; γ > 0 chosen by calibration ECE; and γ and λ chosen so."""
NAMES = (*LOGITS, *CLAMPS, *SWEPT["mean"], *SWEPT["sum"])


def grid(options: Options) -> Iterator[dict[str, Any]]:
    """Yield the settings of each network, run, and method, exponent or start."""
    preset, runs = presets.preset_of(options), range(options.seeds or RUNS)
    selected = options.methods or NAMES
    if unknown := [name for name in selected if name not in NAMES]:
        raise ValueError(f"methods must be among {', '.join(NAMES)}, got {unknown[0]!r}")
    networks = presets.networks_of(preset, options)
    _require_possible(options.methods, preset, networks)
    descent = {"epochs": preset.epochs, "batch": preset.batch}
    for net in networks:
        known = {**net, "how": presets.training_settings(net, options), "val_rows": preset.val_rows}

        def run(seed: int, known: Mapping[str, Any] = known) -> dict[str, Any]:
            split = {"split": seed} if preset.resplit and seed else {}
            return {**known, **split, "network_seed": seed if preset.retrained else 0, "draw": seed, "seed": seed}

        methods = [m for m in selected if m in (*LOGITS, *CLAMPS) and (m != AUGMENTED or net["data"] in CUTOUTS)]
        for method, seed in ((m, s) for m in methods for s in runs):
            how: dict[str, Any] = dict(descent) if method in (CODE, AUGMENTED, "nc_short") else {}
            if preset.code_batch and method in (CODE, AUGMENTED):
                how["code_batch"] = preset.code_batch
            how |= {"cutout": CUTOUTS[net["data"]]} if method == AUGMENTED else {}
            how |= {"gammas": list(preset.searched_gammas)} if method == "nc_converged_fl" else {}
            yield {**run(seed), "part": "method", "method": method, **how}
        for form, names in SWEPT.items():
            other = {} if form == "mean" else {"reduction": form, **preset.sum_form}
            other.pop("gammas", None)
            sweep = {"part": "sweep", **descent, **other}
            if set(names) & set(selected):
                for gamma, seed in ((g, s) for g in preset.gammas_of(form) for s in runs):
                    yield {**run(seed), **sweep, "exponent": gamma}
            if names[-1] in selected:
                for each in product(penalty=preset.penalties, exponent=preset.searched_gammas, seed=runs):
                    yield {**run(each["seed"]), **sweep, **each}
        if not options.methods and "starts" not in options.without:
            for each in product(start=["random", "data"], seed=runs):
                yield {**run(0), "part": "starts", "exponent": 1.0, **descent, **each}


def _require_possible(methods: Sequence[str], preset: presets.Preset, networks: Sequence[Mapping[str, Any]]) -> None:
    """Reject a method that is selected by name but has no cell."""
    data = list(dict.fromkeys(net["data"] for net in networks))
    if AUGMENTED in methods and not set(data) & CUTOUTS.keys():
        raise ValueError(f"{AUGMENTED} is for {', '.join(CUTOUTS)}, like the released code, got {data[0]}")
    if {names[-1] for names in SWEPT.values()} & set(methods) and not preset.penalties:
        names = ", ".join(name for name, each in presets.PRESETS.items() if each.penalties)
        raise ValueError(f"nc_searched needs a preset that searches λ too ({names}); this one searches γ only")


def work(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Fit one method on the calibration images of one network, and measure it on the test images."""
    model, val, test = load_or_train(settings)
    if settings.get("split"):
        val, test = resplit(val, test, settings["split"])
    val = val.sample(settings["val_rows"], settings["draw"])
    key = _key(settings, settings.get("method"), val.name, test.name)
    if key not in _fitted:
        with record_warnings() as messages:  # warnings of the fit are part of the result
            rows = {"method": _method, "sweep": _sweep, "starts": _starts}[settings["part"]](model, val, test, settings)
        sizes = {"fit_rows": len(val), "test_rows": len(test), "warning": "; ".join(messages)}
        rows = [{**row, **sizes} for row in rows]
        if settings.get("method") not in LOGITS:
            return rows
        _fitted[key] = rows
    return _fitted[key]


def _code_batch(settings: Mapping[str, Any]) -> int:
    return int(settings.get("code_batch") or 2 * settings["batch"])


def resplit_ratio(row: Mapping[str, Any]) -> float:
    """Return test samples over the other samples where each run splits the same samples anew, else 0.

    >>> resplit_ratio({"how": {"sizes": [400, 700, 550]}, "network_seed": 1})
    0.5
    >>> resplit_ratio({"how": {}, "network_seed": 0, "split": 1, "fit_rows": 8, "test_rows": 4})
    0.5
    """
    sizes = row["how"].get("sizes")
    if sizes and row["network_seed"]:
        return float(sizes[2] / (sizes[0] + sizes[1]))
    return float(row["test_rows"] / row["fit_rows"]) if row.get("split") else 0.0


def measure(pair: Predictions) -> dict[str, Any]:
    """Compute every metric of the tables, and the numbers of the reliability diagram."""
    shown = reliability(*pair)
    return {
        **{name: getattr(metrics, name)(*pair) for name in MEASURED},
        **{f"ece_{bins}": metrics.ece(*pair, bins=bins) for bins in BINS},
        "reliability": {field.name: getattr(shown, field.name) for field in fields(Reliability)},
    }


def _method(model: nn.Module, val: Loader, test: Loader, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    name = settings["method"]
    if name in LOGITS:
        val_pair, test_pair = (_logits(model, half, settings) for half in (val, test))
        device = settings.get("device") if name in BY_STEPS else None  # a thousand passes over the logits
        fit = BY_STEPS.get(name) or (Identity.fit if name == "uncalibrated" else METHODS[name])
        try:
            fitted = fit(*(torch.as_tensor(part, device=device) for part in val_pair) if device else val_pair)
        except FloatingPointError as error:  # steps of the sum may be too long; that is a result
            warnings.warn(str(error), stacklevel=2)
            return [dict.fromkeys((*MEASURED, *(f"ece_{bins}" for bins in BINS)), math.nan)]
        t = getattr(fitted, "temperature", None)
        after = Predictions(fitted(test_pair.logits), test_pair.labels)
        return [{**measure(after), "temperature": None if t is None else float(t), "cost": 1}]
    options = CLAMPS[name](settings)
    box = val.box if options.pop("boxed", False) else None
    clamped = clamp_with(model, val, box=box, seed=settings["seed"], progress=False, **options)
    return [{**measure(collect(clamped, test, progress=False)), **_fit_facts(clamped)}]


_kept: dict[str, Predictions] = {}
_fitted: dict[str, list[dict[str, Any]]] = {}
"""Rows of methods that use logits only; runs without random draws share them."""


def _key(settings: Mapping[str, Any], *more: Any) -> str:
    """Return a cache key: the network, the machine's folders, and further settings of the result."""
    return as_json([*(settings[name] for name in SETTINGS), *map(settings.get, ("folder", "cache")), *more])


def _logits(model: nn.Module, half: Loader, settings: Mapping[str, Any]) -> Predictions:
    """Return the network's predictions for a half, cached."""
    key = _key(settings, half.name)
    if key not in _kept:
        while len(_kept) >= KEPT:
            del _kept[next(iter(_kept))]
        _kept[key] = collect(model, half, progress=False)
    return _kept[key]


def _fit_facts(clamped: Clamped) -> dict[str, Any]:
    record = clamped.fit_record
    cost = record.forwards + PASS_BACK * record.backwards
    facts = {"temperature": record.temperature, "delta_norm": record.delta_norm, "verdict": record.verdict}
    return {**facts, "cost": cost}


def _sweep(model: nn.Module, val: Loader, test: Loader, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Fit by the paper's recipe at one exponent, and score δ and T alone and jointly."""
    reduction = settings.get("reduction", "mean")
    steps = {"epochs": settings["epochs"], "batch_size": settings["batch"], "lr": settings.get("rate", RATE)}
    recipe = partial(paper, reduction=reduction, **steps)
    how = {"gamma": settings["exponent"], "penalty": settings.get("penalty", "auto"), "seed": settings["seed"]}
    clamped = clamp_with(model, val, recipe=recipe, loss="focal", progress=False, **how)
    shifted = collect(Calibrated(model, before=clamped.before), test, progress=False)
    fit, plain = (_logits(model, half, settings) for half in (val, test))
    rows = [asdict(row) for row in ablation_rows(clamped.fit_record, fit, plain, shifted)]
    fit_ece = metrics.ece(*collect(clamped, val, progress=False))
    joint = Predictions(shifted.logits / clamped.fit_record.temperature, shifted.labels)
    rows[-1] |= {**measure(joint), **_fit_facts(clamped), "fit_ece": fit_ece}
    return rows


def _starts(model: nn.Module, val: Loader, test: Loader, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    recipe = partial(paper, epochs=settings["epochs"], batch_size=settings["batch"])
    start, how = settings["start"], {"loss": "focal", "gamma": settings["exponent"], "seed": settings["seed"]}
    clamped = clamp_with(model, val, start=start, recipe=recipe, box=val.box, progress=False, **how)
    return [asdict(score_row(start, collect(clamped, test, progress=False), clamped.fit_record))]


def flops(cells: Sequence[Mapping[str, Any]]) -> tuple[float, list[str]]:
    """Count the operations of these cells.

    Each network is trained once. Its logits are computed, and methods are fitted to them, once per draw.
    """
    total, unknown = 0.0, []
    trained, collected, fitted = set(), set(), set()
    for settings in cells:
        how = settings["how"]
        try:
            forward = cost.forward_flops(settings["network"], settings["data"], as_json(how.get("options", {})))
        except cost.Unknown as error:
            unknown.append(str(error))
            continue
        sizes = cost.part_sizes(settings["data"], how.get("sizes"))
        val, test = min(settings["val_rows"] or sizes[1], sizes[1]), sizes[2]
        network = as_json([settings[name] for name in SETTINGS])
        if network not in trained and "epochs" in how:
            total += cost.training_flops(forward, sizes, how["epochs"])
        method = settings.get("method", "")
        halves = network, settings["val_rows"] and settings["draw"], settings.get("split")
        if halves not in collected:
            total += forward * (val + test)
        if method in EVALUATIONS and (method, halves) not in fitted:
            total += EVALUATIONS[method] * _likelihood_flops(method, val, cost.SIZES[settings["data"]].classes)
        trained.add(network)
        collected.add(halves)
        fitted.add((method, halves))
        if method not in LOGITS:
            passes = PASSES.get(method) or (1 + cost.INPUT_BACKWARD) * settings["epochs"]
            total += forward * (passes * val + 2 * val + test)
    return total, unknown


def _likelihood_flops(method: str, rows: int, classes: int) -> float:
    """Count the operations of one evaluation: the scores of every row, and their gradient."""
    return 4.0 * rows * classes * (1 if method.startswith("vector") else classes)


STUDY = Study(
    "neural-clamping",
    1,
    grid=grid,
    work="trueup_studies.papers.neural_clamping.clamping_study:work",
    tables=tables,
    figures=figures,
    local=lambda options: {"folder": str(folder_of(options.data_dir).expanduser().resolve())},
    presets=lambda: {name: [net["data"] for net in preset.networks] for name, preset in presets.PRESETS.items()},
    claims=lambda: CLAIMS,
    resplit_ratio=resplit_ratio,
    flops=flops,
    files=presets.weights_files,
    parts=("starts",),
    takes=("network", "retrain"),
    chooses=True,
    title="Neural Clamping",
    paper="neural-clamping",
)
