"""An audit's finding in plain words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.core.formatting import format_percent
from trueup.report.method_titles import RAW, title

if TYPE_CHECKING:
    from trueup.report.audit import Audit


def verdict(found: Audit) -> str:
    """What the network says, how often it is right, and what repairs it, in one or two sentences."""
    scores, chosen = found.scores, found.chosen
    said, right = (scores[RAW, metric].value for metric in ("confidence", "accuracy"))
    before = scores[RAW, "ece"].value
    close = abs(said - right) < 0.01
    digits = 1 if close or max(said, right) >= 0.995 else 0  # nobody is right 100 % of the time by rounding
    says, does = (format_percent(share, digits) for share in (said, right))
    honest = scores.tests[RAW].p_value > 0.05
    if honest:
        opening = f"This network says {says} and is right {does} of the time: nothing speaks against its calibration"
        if chosen == RAW:
            return f"{opening}. It needs no repair."
        losses = (scores[name, "nll"].value for name in (RAW, chosen))
        fell = scores.changes[chosen]["nll"].high < 0
        better = "still takes its log-loss from {:.3f} to {:.3f}".format(*losses)
        return f"{opening}. {title(chosen)} {better}." if fell else f"{opening}. No repair makes it clearly better."
    if close:
        opening = (
            f"On average this network says {says} and is right {does} of the time, but of some predictions it is too "
            "sure and of others not sure enough."
        )
    else:
        opening = f"This network says {says} when it is right {does} of the time."
    if chosen == RAW:
        tried = len(found.calibrators)
        none = "The one method tried does not repair it" if tried == 1 else f"None of the {tried} methods repairs it"
        return f"{opening} {none}." if tried else f"{opening} No method could be tried."
    after, change = scores[chosen, "ece"].value, scores.changes[chosen]["ece"]
    if change.high >= 0:
        return (
            f"{opening} {title(chosen)} is the best of the methods by log-loss, but the calibration error (ECE) does "
            f"not clearly fall: {before:.3f} before, {after:.3f} after."
        )
    honest = scores.tests[chosen].p_value > 0.05
    how = "repairs it" if honest else "repairs most of it" if after < before / 2 else "repairs part of it"
    return f"{opening} {title(chosen)} {how}: its calibration error (ECE) falls from {before:.3f} to {after:.3f}."
