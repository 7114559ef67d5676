"""Neural Clamping beside the methods it was compared with, what its parts do, and what it costs.

Tang, Chen & Ho (2024), Neural Clamping: joint input perturbation and temperature scaling for neural network
calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import partial
from typing import Any

from torch import nn

from trueup import metrics
from trueup.calibrators.base import Identity
from trueup.clamping.ablation import ablate, compare_starts
from trueup.clamping.fit import clamp
from trueup.clamping.fit_record import Clamped
from trueup.clamping.published_recipes import SCALES, closed_form, code, paper
from trueup.core.errors import record_warnings
from trueup.io.predictions import Predictions
from trueup.models.calibrated import collect
from trueup.registry import METHODS
from trueup.report.figures.reliability import Reliability, reliability
from trueup.study.grid import Options, Study, product
from trueup.study.papers.neural_clamping.clamping_claims import CLAIMS
from trueup.study.papers.neural_clamping.clamping_presets import PRESETS, preset_of, training_settings
from trueup.study.papers.neural_clamping.clamping_tables import BINS, PASS_BACK, figures, tables
from trueup.study.papers.neural_clamping.gradient_steps import BY_STEPS
from trueup.study.trained_networks import Loader, load_or_train
from trueup.training.data.sources import folder_of

RUNS = 5


LOGITS = (
    "uncalibrated",
    "temperature",
    "temperature_ece",
    "vector",
    "matrix",
    "ms_odir",
    "dirichlet_odir",
    *BY_STEPS,
)
"""Methods that see nothing of a network but its logits."""
CLAMPS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "nc_code": lambda s: {"recipe": partial(code, epochs=s["epochs"], batch_size=2 * s["batch"]), "loss": "focal"},
    "nc_short": lambda s: {"recipe": partial(paper, epochs=1, batch_size=s["batch"])},
    "nc_converged": lambda s: {"recipe": "varpro", "penalty": "R1"},
    "closed": lambda s: {"recipe": "closed_form", "boxed": True},
    "closed_scaled": lambda s: {"recipe": partial(closed_form, scale=SCALES), "boxed": True},
    "ours": lambda s: {},
}
"""Options of `clamp`, from the cell's settings."""
SWEPT = ("nc_ce", "nc_fl")
"""Neural Clamping by the paper's recipe: with γ = 0, and with the γ > 0 of least ECE on the calibration set."""
NAMES = (*LOGITS, *CLAMPS, *SWEPT)


def grid(options: Options) -> Iterator[dict[str, Any]]:
    """A cell for each network, run and method, exponent or start."""
    preset, runs = preset_of(options), range(options.seeds or RUNS)
    wanted = options.methods or NAMES
    if unknown := [name for name in wanted if name not in NAMES]:
        raise ValueError(f"methods must be among {', '.join(NAMES)}, got {unknown[0]!r}")
    descent = {"epochs": preset.epochs, "batch": preset.batch}
    networks = [net for net in preset.networks if options.data in (None, net["data"])]
    if not networks:
        raise ValueError(f"data must be one of {', '.join(n['data'] for n in preset.networks)}, got {options.data!r}")
    for net in networks:
        known = {**net, "how": training_settings(net, options), "val_rows": preset.val_rows}

        def run(seed: int, known: Mapping[str, Any] = known) -> dict[str, Any]:
            return {**known, "network_seed": seed if preset.retrained else 0, "draw": seed, "seed": seed}

        for method, seed in ((m, s) for m in wanted if m not in SWEPT for s in runs):
            own = descent if method in ("nc_code", "nc_short") else {}
            yield {**run(seed), "part": "method", "method": method, **own}
        if set(SWEPT) & set(wanted):
            for gamma, seed in ((g, s) for g in preset.gammas for s in runs):
                yield {**run(seed), "part": "sweep", "exponent": gamma, **descent}
        if not options.methods:
            for each in product(start=["random", "data"], seed=runs):
                yield {**run(0), "part": "starts", "exponent": 1.0, **descent, **each}


def local(options: Options) -> dict[str, Any]:
    """The folder of data."""
    return {"folder": str(folder_of(options.data_dir).expanduser().resolve())}


def work(settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One fit on the calibration images of one network, measured on its test images."""
    model, val, test = load_or_train(settings)
    val = val.sample(settings["val_rows"], settings["draw"])
    with record_warnings() as messages:  # how the fit ended is part of the result
        rows = {"method": _method, "sweep": _sweep, "starts": _starts}[settings["part"]](model, val, test, settings)
    return [{**row, "fit_rows": len(val), "test_rows": len(test), "warning": "; ".join(messages)} for row in rows]


def measure(pair: Predictions) -> dict[str, Any]:
    """Every figure of the tables, and the reliability diagram's numbers."""
    shown = reliability(*pair)
    names = ("accuracy", "entropy", "nll", "ece", "aece", "sce")
    return {
        **{name: getattr(metrics, name)(*pair) for name in names},
        **{f"ece_{bins}": metrics.ece(*pair, bins=bins) for bins in BINS},
        "reliability": {field.name: getattr(shown, field.name) for field in fields(Reliability)},
    }


def _method(model: nn.Module, val: Loader, test: Loader, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    name = settings["method"]
    if name in LOGITS:
        val_pair, test_pair = (collect(model, half, progress=False) for half in (val, test))
        own: dict[str, Callable[..., Any]] = {"uncalibrated": Identity.fit, **BY_STEPS}
        fitted = (own[name] if name in own else METHODS[name])(*val_pair)
        t = getattr(fitted, "temperature", None)
        after = Predictions(fitted(test_pair.logits), test_pair.labels)
        return [{**measure(after), "temperature": None if t is None else float(t), "cost": 1}]
    options = CLAMPS[name](settings)
    box = val.box if options.pop("boxed", False) else None
    clamped = clamp(model, val, box=box, seed=settings["seed"], progress=False, **options)
    return [{**measure(collect(clamped, test, progress=False)), **_fit_facts(clamped)}]


def _fit_facts(clamped: Clamped) -> dict[str, Any]:
    record = clamped.fit_record
    cost = record.forwards + PASS_BACK * record.backwards
    facts = {"temperature": record.temperature, "delta_norm": record.delta_norm, "verdict": record.verdict}
    return {**facts, "cost": cost}


def _sweep(model: nn.Module, val: Loader, test: Loader, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The paper's recipe at one exponent, and what its δ and T do apart."""
    recipe = partial(paper, epochs=settings["epochs"], batch_size=settings["batch"])
    clamped = clamp(
        model, val, recipe=recipe, loss="focal", gamma=settings["exponent"], seed=settings["seed"], progress=False
    )
    rows = [asdict(row) for row in ablate(clamped, val, test)]
    fit_ece = metrics.ece(*collect(clamped, val, progress=False))
    rows[-1] |= {**measure(collect(clamped, test, progress=False)), **_fit_facts(clamped), "fit_ece": fit_ece}
    return rows


def _starts(model: nn.Module, val: Loader, test: Loader, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = compare_starts(
        model,
        val,
        test,
        starts=[settings["start"]],
        seeds=[settings["seed"]],
        recipe=partial(paper, epochs=settings["epochs"], batch_size=settings["batch"]),
        loss="focal",
        gamma=settings["exponent"],
        box=val.box,
        progress=False,
    )
    return [asdict(row) for row in found]


STUDY = Study(
    "neural-clamping",
    1,
    grid=grid,
    work="trueup.study.papers.neural_clamping.clamping_study:work",
    tables=tables,
    figures=figures,
    local=local,
    presets=lambda: {name: [net["data"] for net in preset.networks] for name, preset in PRESETS.items()},
    claims=lambda: CLAIMS,
    title="Neural Clamping",
    paper="neural-clamping",
)
