"""What a fit says of itself, and the network it made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trueup.clamping.problem import InputMap, Norm
from trueup.models.calibrated import Calibrated


@dataclass(frozen=True)
class FitRecord:
    """How a clamped network came about, and what it cost."""

    recipe: str
    loss: str
    """"ce" or "focal"."""
    gamma: float
    gammas: Mapping[float, float]
    """ECE of each γ of the pool, if there was one: on the calibration set itself, or, where `gamma_folds` were asked
    for, with each fold scored by the fit that left it out."""
    penalty: float
    """λ; infinite where temperature alone was kept."""
    candidates: Mapping[float, float]
    """Each λ that was tried, with the loss on samples left out of its fit; that of infinity is temperature alone."""
    norm: Norm
    input_map: InputMap
    temperature: float
    delta_norm: float
    objective: float
    """Mean loss and penalty at the end, on the calibration set."""
    baseline: float
    """Mean loss of temperature alone, on the same set."""
    forwards: float
    """Forward passes over the calibration set; as all that follows, over the samples of all ranks together."""
    backwards: float
    """Backward passes to the input."""
    backward_cost: float
    """What a backward pass took, in forward passes, as measured."""
    equivalents: float
    """All of it in forward passes."""
    lemma_residual: float
    """By how much the temperature misses its own optimality, relative to the logits' spread; see `lemma_residual`."""
    evidence: float | None
    """p-value of the hypothesis that the mean input gradient is zero, where the recipe looked."""
    verdict: str
    """Whether the input map earned its place, in one sentence."""
    samples: int
    seed: int
    notes: Mapping[str, object] = field(default_factory=dict)
    """What else the recipe has to say."""


class Clamped(Calibrated):
    """A network with δ before it and a temperature after it, and the record of their fit."""

    fit_record: FitRecord
