"""Checkpoints of monitors: a few kilobytes of safetensors with a JSON header, without pickle."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from trueup._core.bins import Bins, equal_width
from trueup.io.artifacts import rename_arguments
from trueup.io.atomic import shorten
from trueup.metrics.groups import GroupTally
from trueup.monitor.betting import GLOBAL_BETS, SLOPE_BETS, Evidence
from trueup.monitor.monitor import MAX_ALARMS, MAX_GROUPS, Alarm, Monitor
from trueup.monitor.promise import PromiseCheck, Unlabelled
from trueup.monitor.windows import WeightedTally, Window


def to_artifact(monitor: Monitor) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the header and the arrays of a monitor's file."""
    monitor = copy(monitor)  # other threads cannot change the copy
    tallies, evidence = [monitor.total, monitor.fading, *monitor.recent.pieces], monitor.evidence
    sums = np.stack([np.stack([t.bins.count, t.bins.confidence, t.bins.hits]) for t in tallies])
    arrays = {"wealth": evidence.wealth, "tallies": sums, "peak": np.array([monitor.peak])}
    arrays |= {"nll": np.array([t.nll for t in tallies]), "rows": np.array([t.seen for t in tallies])}
    counts = {"rows": evidence.rows, "begun": evidence.begun, "streams": evidence.streams}
    alarm = None if monitor.alarm is None else asdict(monitor.alarm)
    header: dict[str, Any] = {"settings": monitor.settings(), "seen": counts, "alarm": alarm}
    if monitor.promise is not None:
        seen, check = monitor.promise.seen, monitor.promise.check
        header["promise"] = {"seen": seen, "answered": check.rows, "wrong": check.wrong, "broken": check.refuted}
    if monitor.acknowledged:
        header["acknowledged"] = [asdict(alarm) for alarm in monitor.acknowledged]
    if monitor.unlabelled.rows:
        header["unlabelled"] = asdict(monitor.unlabelled)
    if monitor.groups is not None:
        header["groups"], arrays["group_cells"], arrays["group_sums"] = monitor.groups.pack()
    return header, arrays


def from_artifact(header: dict[str, Any], arrays: dict[str, np.ndarray], model: None = None) -> Monitor:
    """Restore a monitor from the contents of its file; it continues as if it had never stopped."""
    try:
        return _build(header, arrays)
    except (KeyError, TypeError) as error:
        raise ValueError(f"is not a complete monitor ({error})") from None


def settings_in(header: dict[str, Any]) -> dict[str, Any]:
    """Return the monitor's settings from the header of a checkpoint.

    Checkpoints without the entry tally two classes by the predicted class, so they continue with `top_label`.
    """
    settings = rename_arguments(Monitor, {"fold": True} | _plain(header, "settings"))
    if isinstance(promise := settings.get("promise"), dict):
        settings["promise"] = rename_arguments(PromiseCheck, promise)
    return settings


def _plain(header: dict[str, Any], name: str) -> dict[str, Any]:
    """Return an entry of the header that must be a dictionary."""
    value = header.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"is not a complete monitor ({name} must be a dictionary, got {shorten(repr(value), 300)})")
    return value


def _build(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> Monitor:
    wealth, sums, nll = (arrays[name] for name in ("wealth", "tallies", "nll"))
    settings, seen, alarm = settings_in(header), _plain(header, "seen"), header["alarm"]
    # Check the sizes before allocating arrays of the sizes in the file.
    if sums.shape[1:] != (3, settings["bins"]) or (settings["classwise"] and settings["n_classes"] > wealth.size):
        raise ValueError("its arrays do not fit its settings")
    monitor = Monitor.from_settings(settings)
    rows = _check(arrays, seen, monitor.evidence.block)
    evidence = Evidence(monitor.evidence.block, **seen, wealth=wealth)
    if wealth.size == monitor.evidence.wealth.size - len(SLOPE_BETS):  # a file from before these bettors
        evidence = evidence.with_new_bettors(len(GLOBAL_BETS), len(SLOPE_BETS))
    if evidence.wealth.shape != monitor.evidence.wealth.shape:
        raise ValueError("its arrays do not fit its settings")
    monitor.alarm = None if alarm is None else _alarm(_plain(header, "alarm"), seen["rows"])
    if not isinstance(alarms := header.get("acknowledged", []), list) or len(alarms) > MAX_ALARMS:
        raise ValueError(f"its acknowledged alarms must be a list of at most {MAX_ALARMS}")
    monitor.acknowledged = tuple(_alarm(_plain({"alarm": each}, "alarm"), seen["rows"]) for each in alarms)
    edges = equal_width(monitor.bins)
    each = zip(sums, nll, rows, strict=True)
    tallies = [WeightedTally(Bins(edges, *s), float(loss), float(n)) for s, loss, n in each]
    monitor.total, monitor.fading, *pieces = tallies
    monitor.recent = Window(monitor.recent.size, tuple(pieces))
    monitor.evidence = evidence
    monitor.peak = float(arrays["peak"][0])
    if monitor.promise is not None:
        monitor.promise = _promise(monitor.promise, _plain(header, "promise"), seen["rows"])
    if "unlabelled" in header:
        monitor.unlabelled = Unlabelled(**_plain(header, "unlabelled")).check()
    if "groups" in header:
        if len(header["groups"]) > MAX_GROUPS:
            raise ValueError(f"its groups must be at most {MAX_GROUPS:,}, got {len(header['groups']):,}")
        monitor.groups = GroupTally.unpack(header["groups"], arrays["group_cells"], arrays["group_sums"])
    return monitor


def _promise(promise: PromiseCheck, counts: dict[str, Any], rows: int) -> PromiseCheck:
    """Restore a promise; reject counts that no rows can have."""
    wrong, answered, seen = (counts[name] for name in ("wrong", "answered", "seen"))
    whole = all(type(number) is int for number in (wrong, answered, seen))
    if not whole or not 0 <= wrong <= answered <= seen <= rows or type(counts["broken"]) is not bool:
        raise ValueError(f"the counts of its promise contradict each other, got {shorten(str(counts), 300)}")
    check = replace(promise.check, rows=answered, wrong=wrong, refuted=counts["broken"])
    return replace(promise, check=check, seen=seen)


def _alarm(fields: dict[str, Any], rows: int) -> Alarm:
    """Restore an alarm; reject one that no rows can have raised."""
    alarm = Alarm(**fields)
    row, evidence, reason = alarm.row, alarm.evidence, alarm.reason
    if type(row) is not int or not 0 <= row <= rows:
        raise ValueError(f"the row of its alarm must lie in 0..{rows}, got {shorten(repr(row), 300)}")
    if type(evidence) is not float or not 0 < evidence < math.inf:
        raise ValueError(f"the evidence of its alarm must be a positive number, got {shorten(repr(evidence), 300)}")
    if type(reason) is not str:
        raise ValueError(f"the reason of its alarm must be text, got {shorten(repr(reason), 300)}")
    return alarm


def _check(arrays: dict[str, np.ndarray], seen: dict[str, Any], block: int) -> np.ndarray:
    """Reject numbers that no rows can have led to; return the number of rows per tally.

    Old checkpoints, from before `sample_weight`, have no array `rows`: their tallies count rows.
    """
    if not all(np.isfinite(array).all() for array in arrays.values()):
        raise ValueError("its arrays must be finite")
    least = {"rows": 0, "begun": 1, "streams": 1}
    if any(type(seen[name]) is not int or not low <= seen[name] < 1 << 53 for name, low in least.items()):
        raise ValueError(f"{', '.join(least)} must be whole numbers, got {shorten(str(seen), 300)}")
    if seen["begun"] > 1 + seen["rows"] // block:
        raise ValueError(f"its bettors cannot have started {seen['begun']:,} times in {seen['rows']:,} rows")
    sums, nll = arrays["tallies"], arrays["nll"]
    counts, total, slack = sums[:, :1], sums[0], 1 + 1e-9
    within = (sums >= 0).all() and (sums <= slack * counts).all() and (sums <= slack * total).all()
    losses = (nll > -1e-6).all() and (nll < slack * nll[0] + 1e-6).all()  # a row's loss may round to just below 0
    rows = arrays["rows"] if "rows" in arrays else sums[:, 0].sum(axis=1)
    counted = rows.shape == nll.shape and (rows >= 0).all() and (rows <= seen["rows"]).all() and rows[0] == seen["rows"]
    if not (within and losses and counted):
        raise ValueError("its tallies contradict each other")
    return rows
