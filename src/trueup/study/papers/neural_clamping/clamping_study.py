"""Neural Clamping beside the methods it was compared with, what its parts do, and what it costs.

Tang, Chen & Ho (2024), Neural Clamping: joint input perturbation and temperature scaling for neural network
calibration.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, fields
from functools import partial
from typing import Any

import torch
from torch import nn

from trueup import metrics
from trueup.calibrators.identity import Identity
from trueup.calibrators.temperature import Temperature
from trueup.clamping.ablation import ablate, compare_starts
from trueup.clamping.closed import SCALES, closed
from trueup.clamping.fit import clamp
from trueup.clamping.fit_record import Clamped
from trueup.clamping.published import code, paper
from trueup.core.arrays import as_tensors
from trueup.core.warning_capture import record_warnings
from trueup.io.predictions import Predictions
from trueup.models.calibrated import collect
from trueup.registry import METHODS
from trueup.report.figures.reliability import Reliability, reliability
from trueup.study.grid import Options, Study, product
from trueup.study.papers.neural_clamping.clamping_presets import how_made, preset_of
from trueup.study.papers.neural_clamping.clamping_tables import BINS, PASS_BACK, figures, tables
from trueup.study.trained_networks import Loader, trained
from trueup.training.data.sources import folder_of

RUNS = 5


def by_steps(logits: Any, labels: Any, *, steps: int = 1000, rate: float = 1e-3) -> Temperature:
    """Temperature scaling as the paper fits it: full-batch descent from T = 1, which may end short of the best T.

    >>> import numpy as np
    >>> generator = np.random.default_rng(0)
    >>> z = generator.normal(size=(2000, 5))
    >>> y = (z + generator.gumbel(size=z.shape)).argmax(axis=1)
    >>> print(f"{float(by_steps(3 * z, y).temperature):.4f} {float(Temperature.fit(3 * z, y).temperature):.4f}")
    1.5745 3.0135
    """
    z, y = as_tensors(logits, labels, at_least=1)
    z = z.double()
    own, t = z.gather(1, y[:, None])[:, 0], 1.0
    for _ in range(steps):
        said = (torch.softmax(z / t, dim=1) * z).sum(dim=1)
        t -= rate * float((own - said).mean()) / t**2
    return Temperature(t)


LOGITS = (
    "uncalibrated",
    "temperature",
    "temperature_steps",
    "temperature_ece",
    "vector",
    "matrix",
    "ms_odir",
    "dirichlet_odir",
)
"""Methods that see nothing of a network but its logits."""
CLAMPS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "nc_code": lambda s: {"recipe": partial(code, epochs=s["epochs"], batch=2 * s["batch"]), "loss": "focal"},
    "nc_short": lambda s: {"recipe": partial(paper, epochs=1, batch=s["batch"])},
    "nc_converged": lambda s: {"recipe": "projected", "lam": "R1"},
    "closed": lambda s: {"recipe": "closed", "boxed": True},
    "closed_scaled": lambda s: {"recipe": partial(closed, scale=SCALES), "boxed": True},
    "ours": lambda s: {},
}
"""What `clamp` is told, of the cell's settings."""
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
        known = {**net, "how": how_made(net, options), "val_rows": preset.val_rows}

        def run(seed: int, known: Mapping[str, Any] = known) -> dict[str, Any]:
            return {**known, "network_seed": seed if preset.retrained else 0, "draw": seed, "seed": seed}

        for method, seed in ((m, s) for m in wanted if m not in SWEPT for s in runs):
            told = descent if method in ("nc_code", "nc_short") else {}
            yield {**run(seed), "part": "method", "method": method, **told}
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
    model, val, test = trained(settings)
    val = val.some(settings["val_rows"], settings["draw"])
    with record_warnings() as messages:  # how the fit ended is part of the result
        rows = {"method": _method, "sweep": _sweep, "starts": _starts}[settings["part"]](model, val, test, settings)
    return [{**row, "fit_rows": len(val), "test_rows": len(test), "warning": "; ".join(messages)} for row in rows]


def measured(pair: Predictions) -> dict[str, Any]:
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
        given, asked = (collect(model, half, progress=False) for half in (val, test))
        own: dict[str, Callable[..., Any]] = {"uncalibrated": Identity.fit, "temperature_steps": by_steps}
        fitted = (own[name] if name in own else METHODS[name])(*given)
        t = getattr(fitted, "temperature", None)
        after = Predictions(fitted(asked.logits), asked.labels)
        return [{**measured(after), "temperature": None if t is None else float(t), "cost": 1}]
    told = CLAMPS[name](settings)
    box = val.box if told.pop("boxed", False) else None
    clamped = clamp(model, val, box=box, seed=settings["seed"], progress=False, **told)
    return [{**measured(collect(clamped, test, progress=False)), **_told(clamped)}]


def _told(clamped: Clamped) -> dict[str, Any]:
    record = clamped.fit_record
    cost = record.forwards + PASS_BACK * record.backwards
    found = {"temperature": record.temperature, "delta_norm": record.delta_norm, "verdict": record.verdict}
    return {**found, "cost": cost}


def _sweep(model: nn.Module, val: Loader, test: Loader, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The paper's recipe at one exponent, and what its δ and T do apart."""
    recipe = partial(paper, epochs=settings["epochs"], batch=settings["batch"])
    clamped = clamp(
        model, val, recipe=recipe, loss="focal", gamma=settings["exponent"], seed=settings["seed"], progress=False
    )
    rows = [asdict(row) for row in ablate(clamped, val, test)]
    fit_ece = metrics.ece(*collect(clamped, val, progress=False))
    rows[-1] |= {**measured(collect(clamped, test, progress=False)), **_told(clamped), "fit_ece": fit_ece}
    return rows


def _starts(model: nn.Module, val: Loader, test: Loader, settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    found = compare_starts(
        model,
        val,
        test,
        starts=[settings["start"]],
        seeds=[settings["seed"]],
        recipe=partial(paper, epochs=settings["epochs"], batch=settings["batch"]),
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
    title="Neural Clamping",
    paper="neural-clamping",
)
