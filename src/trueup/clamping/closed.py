"""The efficient variant: δ from the closed form of Theorem 3.2, then only T is fitted, on cached logits."""

from __future__ import annotations

from collections.abc import Sequence

from trueup.clamping.problem import Problem, Solution
from trueup.clamping.starts import theorem, warn_if_contradicted

SCALES = (0.25, 0.5, 0.75, 1.0)
"""A small grid of multiples of the closed form's δ."""


def closed(problem: Problem, *, quantile: float = 0.0, scale: float | Sequence[float] = 1.0) -> Solution:
    """Take δ from Theorem 3.2 at T = 1, frozen, and the T of least loss on the logits there.

    Costs one forward-backward pass and one forward for each scale; of several scales, the one of least loss on the
    calibration set is kept (`SCALES` is a small grid). The start, λ and norm of the problem play no part. Images that
    use their whole range make δ zero, which is temperature scaling, unless a quantile leaves some out.
    Tang et al., "Neural Clamping" (2024), section 4.3; its details are not published.
    """
    scales = (scale,) if isinstance(scale, int | float) else tuple(scale)
    if not scales or not all(0 < s <= 1 for s in scales):
        raise ValueError(f"scale must lie in (0, 1], got {scale}")
    network, loss = problem.network, problem.loss
    whole = theorem(network, quantile=quantile)
    moved = bool(whole.delta.any())
    found = []
    for s in scales if moved else scales[:1]:
        before = problem.mapping(s * whole.delta)
        logits = network.logits(before) if moved else network.plain()
        temperature = loss.temperature(logits, network.labels)
        found.append((loss.mean(logits, network.labels, temperature), s, before, logits, temperature))
    _, s, before, logits, temperature = min(found, key=lambda entry: entry[:2])
    warn_if_contradicted(network, whole, logits, 1.0)
    return Solution(
        before=before, temperature=temperature, lam=0.0, logits=logits, notes={"scale": s, "gain": s * whole.gain}
    )
