"""What a repair is made of: its record, the network it returns, and the work that its parts share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from trueup.calibrators.base import Calibrator
from trueup.calibrators.compose import Chain
from trueup.calibrators.temperature import Temperature
from trueup.clamping.batch_norm import Augment, batch_norms, estimate, share_copy
from trueup.clamping.head import features_noted
from trueup.clamping.ladder import Climb, Ladder, nested_rows, paired_gain
from trueup.clamping.network import Network
from trueup.clamping.repair_maps import Composition, PixelSpace
from trueup.clamping.subspace_search import STANDARD_ERRORS
from trueup.core.distributed import all_gather_object, all_gather_rows, raise_on_all_ranks
from trueup.models.batches import Batch
from trueup.models.calibrated import Calibrated, device_of

FEWEST = 50
"""Samples below which, with labels, nothing but a temperature is fitted, and without labels nothing is done: statistics
of so few are noise."""
ABSENT = -1e4
"""Logits below it are those of masked classes."""
KEPT = 3
"""Networks with new statistics whose answers are kept."""


@dataclass(frozen=True)
class RungRecord:
    """One step of the ladder and what it gave on samples left out."""

    name: str
    title: str
    parameters: int
    loss: float
    """Held-out cross-entropy."""
    gain: float
    """Below the rung it was compared with."""
    error: float
    """Standard error of the gain."""
    kept: bool
    p_value: float | None
    """Of the score test that chose it, if one did."""
    wanted: float = STANDARD_ERRORS
    """Standard errors that the gain had to exceed."""


@dataclass(frozen=True)
class RepairRecord:
    """What was wrong, what was done about it, what it gained and what it cost."""

    verdict: str
    """In words."""
    causes: tuple[str, ...]
    """What the map is a remedy for, such as "white balance"; for inputs that are no images, what it is.

    That it helps is measured. That just this was wrong is not: what helps may make up for something else.
    """
    words: tuple[str, ...]
    """What the input map does, such as "red gain 0.82"."""
    parts: tuple[str, ...]
    """What was repaired: some of "input", "batch_norm", "head"."""
    rungs: tuple[RungRecord, ...]
    """All that was tried, in order; the first is temperature alone, or the network as it is."""
    temperature: float
    batch_norm_weight: float
    """Of the new statistics; 0 where the old ones stay."""
    ridge: float | None
    """Penalty of the last layer's correction."""
    baseline: float
    """Held-out loss of temperature alone; 0, as all that follows, where there are no labels to tell."""
    held_out: float
    """Held-out loss of the repaired network, each step kept or refused without the samples it is judged on.

    Which steps are proposed, and the penalty of the last layer, all samples have a say in.
    """
    gain: float
    error: float
    """Standard error of the gain."""
    p_values: Mapping[str, float]
    """Of each family's score test on the inputs as they are."""
    samples: int
    labelled: bool
    forwards: float
    """Forward passes over all samples."""
    backwards: float
    equivalents: float
    """All passes, counted in forward passes."""
    seed: int
    notes: tuple[str, ...] = field(default_factory=tuple)
    """What was left out and why."""
    moved: float | None = None
    """Without labels: the p-value of the test whether inputs have moved."""
    last: str = "temperature"
    """What follows the last layer."""


class Repaired(Calibrated):
    """A network with an input map before it and a temperature after it, and the record of the repair.

    Where batch norm or the last layer was repaired, the network inside is a copy that shares every other tensor with
    the caller's; `changed` holds the tensors that are new, by the names of `state_dict`.
    """

    repair_record: RepairRecord
    changed: dict[str, Tensor]


class Answers(NamedTuple):
    """What a network says of all samples behind a map, with new batch-norm statistics or the old ones."""

    changed: dict[str, Tensor]
    """The new statistics."""
    logits: Tensor
    features: np.ndarray | None
    """What goes into the last layer, if that was asked for."""


@dataclass(frozen=True)
class Job:
    """The samples, what may be repaired, and how."""

    network: Network
    parts: tuple[str, ...]
    low: Tensor
    high: Tensor
    families: tuple[str, ...]
    augment: Augment | None
    seed: int
    budget: float
    progress: Callable[[str], None]
    last: str = "temperature"
    notes: list[str] = field(default_factory=list)
    _known: dict[tuple[str, bytes, float, str | None], Answers] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """Of this network: a job with another one begins with none."""

    def climb(self, targets: Tensor, temperature: float | None = None) -> Climb:
        """A ladder for these targets."""
        return Climb(
            self.network, targets, self.low, self.high, self.families, self.seed, self.budget, self.progress,
            temperature,
        )  # fmt: skip

    def space(self, composition: Composition) -> PixelSpace | None:
        """A map before the network, if it is one."""
        return PixelSpace(composition, self.low, self.high) if len(composition.theta) else None

    def answers(self, composition: Composition, weight: float, head: str | None) -> Answers:
        """Logits behind a map and statistics renewed by this weight, and what goes into the last layer.

        The last few are kept: where there is no map, several parts ask for the same.
        """
        key = composition.name, composition.theta.cpu().numpy().tobytes(), weight, head
        if key not in self._known:
            before = self.space(composition)
            changed = estimate(self.network, before, weight, augment=self.augment, seed=self.seed) if weight else {}
            while len(self._known) >= KEPT:
                del self._known[next(iter(self._known))]
            self._known[key] = Answers(changed, *forward(self, before, changed, head))
        return self._known[key]


def forward(
    job: Job, before: nn.Module | None, changed: Mapping[str, Tensor], head: str | None
) -> tuple[Tensor, np.ndarray | None]:
    """Logits of all samples, and what goes into the last layer."""
    model = share_copy(job.network.model, changed) if changed or head else job.network.model
    network = job.network.with_model(model)
    if head is None:
        return network.logits(network.laid_out(before)), None
    layer = model.get_submodule(head)
    assert isinstance(layer, nn.Linear)
    with features_noted(layer) as seen:
        logits = network.logits(network.laid_out(before))
    features = torch.cat(seen) if seen else torch.empty(0, layer.in_features)
    return logits, all_gather_rows(features).double().numpy()


def assemble(
    job: Job,
    model: nn.Module,
    ladder: Ladder,
    before: PixelSpace | None,
    changed: dict[str, Tensor],
    temperature: float,
    weight: float,
    ridge: float | None,
    *,
    labelled: bool,
    moved: float | None = None,
    last: Calibrator | None = None,
    also: Sequence[str] = (),
) -> Repaired:
    """The repaired network and its record; `also` says what was done beside the parts."""
    inside = share_copy(job.network.model, changed) if changed else model
    device = device_of(job.network.model)
    after: Calibrator = Temperature(temperature)
    after = after if last is None else Chain([after, last])
    repaired = Repaired(inside, before=before, after=after.to(device))
    repaired.changed = changed
    cost = job.network.cost()
    rungs = ladder.rungs
    losses = nested_rows(rungs)[0] if ladder.current else rungs[0].losses
    gain, error = paired_gain(rungs[0].losses, losses)
    composition = before.inner if before is not None else Composition([])
    assert isinstance(composition, Composition)
    found = (("input", before is not None), ("batch_norm", weight > 0), ("head", ridge is not None))
    parts = tuple(name for name, was in found if was)
    causes = tuple(dict.fromkeys(part.diagnosis() for part in composition.parts))
    words = tuple(before.words()) if before is not None else ()
    done = _done(parts, causes if labelled else (), words, is_image=len(composition.shape) == 3)
    also = [*also, *([] if last is None else [f"{job.last} after the temperature"])]
    repaired.repair_record = RepairRecord(
        verdict=_verdict(ladder, done, also, (float(rungs[0].losses.mean()), gain, error), labelled=labelled),
        causes=causes,
        words=words,
        parts=parts,
        rungs=tuple(
            RungRecord(r.name, r.title, r.size, float(r.losses.mean()), r.gain, r.error, r.kept, r.p_value, r.wanted)
            for r in rungs
        ),
        temperature=temperature,
        batch_norm_weight=weight,
        ridge=ridge,
        baseline=float(rungs[0].losses.mean()),
        held_out=float(losses.mean()),
        gain=gain,
        error=error,
        p_values=ladder.p_values,
        samples=len(job.network.labels),
        labelled=labelled,
        forwards=cost.forwards,
        backwards=cost.backwards,
        equivalents=cost.equivalents,
        seed=job.seed,
        notes=tuple(job.notes),
        moved=moved,
        last="temperature" if last is None else job.last,
    )
    return repaired


def _done(parts: Sequence[str], causes: Sequence[str], words: Sequence[str], *, is_image: bool) -> list[str]:
    """What was done to the network, part by part; causes are named where labels say that the map helps."""
    done = []
    if "input" in parts:
        kind = f"a remedy for {_listed(causes)}" if is_image and causes else _listed(causes)
        done.append(f"{', '.join(words) or 'an input map too small to see'}{f' ({kind})' if kind else ''}")
    if "batch_norm" in parts:
        done.append("new batch-norm statistics")
    if "head" in parts:
        done.append("a corrected last layer")
    return done


def _verdict(
    ladder: Ladder, done: Sequence[str], also: Sequence[str], gained: tuple[float, float, float], *, labelled: bool
) -> str:
    before, gain, error = gained
    whole = "; ".join([*done, *also])
    if not labelled and done:
        return f"Repaired without labels: {whole}. What it gained cannot be known without labels."
    lowered = (
        f"{whole} lowered the loss on samples left out from {before:.4f} to {before - gain:.4f} "
        f"(standard error of the gain {error:.4f})"
    )
    if done:
        # Each step was certain; all of it together, chosen by some samples and judged by others, may be less so.
        sure = "Yes" if gain > STANDARD_ERRORS * error else "Probably" if gain > error else "Perhaps"
        return f"{sure}: {lowered}."
    reason = ladder.stopped or "nothing was asked for"
    if also:
        return f"No: the network itself stays as it is; {reason}. But {lowered}."
    first = "No: the network stays as it is"
    if ladder.rungs[0].name == "temperature":
        if len(ladder.rungs) > 1 and not ladder.p_values:
            reason = "nothing that was tried helped samples left out"
        first = "No: temperature is enough" if ladder.p_values or len(ladder.rungs) > 1 else "No: temperature alone"
    return f"{first}; {reason}."


def _listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def no_batch_norm(network: Network) -> str:
    """Why batch norm cannot be repaired, or nothing."""
    if not batch_norms(network.model):
        return "batch norm is left as it is: the network has no layers of nn.BatchNorm with running statistics"
    reason = no_copy(network)
    return f"batch norm is left as it is: {reason}" if reason else ""


def no_copy(network: Network) -> str:
    """Why the network cannot be copied, or nothing. All ranks say the same."""
    with raise_on_all_ranks():
        batch = next(iter(network.inputs), None)
        if batch is not None:
            batch = network.inputs.rows(batch, torch.arange(min(8, len(batch.labels))))
            network.call(batch, None)  # of which something may be left in the copy
        try:
            copied = share_copy(network.model, {})
        except Exception as error:
            reason = f"the network cannot be copied ({type(error).__name__})"
        else:
            reason = "" if batch is None or _same(network, copied, batch) else "its copy computes something else"
    return next(filter(None, all_gather_object(reason)), "")


@torch.no_grad()
def _same(network: Network, copied: nn.Module, batch: Batch) -> bool:
    """Whether a copy answers alike, unlike one whose hooks write into the network that it is a copy of."""
    turned = network.inputs.rows(batch, torch.arange(len(batch.labels)).flip(0))
    try:
        other = network.with_model(copied).call(turned, None)
    except Exception:  # which the network itself does not raise
        return False
    own, again = network.call(turned, None), network.call(turned, None)
    if not torch.equal(own, again):  # answers are drawn at random
        return True
    scale = float(torch.where(own > ABSENT, own, 0.0).abs().max())
    return torch.allclose(other, own, rtol=1e-3, atol=1e-3 * scale)
