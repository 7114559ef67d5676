"""Calls of clamp, repair and adapt with the fields of their options as keywords."""

from typing import Any

from trueup.adaptation import AdaptOptions, Repaired, RepairOptions, adapt, repair
from trueup.clamping import Clamped, MapOptions, Objective, clamp


def clamp_with(model: Any, loader: Any, **settings: Any) -> Clamped:
    """`clamp`."""
    objective = {name: settings.pop(name) for name in list(settings) if name in Objective.__dataclass_fields__}
    names = {"input_map": "kind", "start": "start", "box": "box"}
    mapped = {field: settings.pop(name) for name, field in names.items() if name in settings}
    return clamp(model, loader, objective=Objective(**objective), input_map=MapOptions(**mapped), **settings)


def repair_with(
    model: Any, loader: Any, *, normalise: Any = None, method: str = "temperature", **options: Any
) -> Repaired:
    """`repair` with the fields of its options as keywords."""
    settings = RepairOptions(**{name: value for name, value in options.items() if name != "progress"})
    return repair(model, loader, normalise=normalise, method=method, options=settings, progress=False)


def adapt_with(
    model: Any, loader: Any, *, normalise: Any = None, reference: Any = None, labelled: Any = None, **options: Any
) -> Repaired:
    """`adapt` with the fields of its options as keywords."""
    settings = AdaptOptions(**{name: value for name, value in options.items() if name != "progress"})
    samples = {"reference": reference, "labelled": labelled}
    return adapt(model, loader, normalise=normalise, **samples, options=settings, progress=False)
