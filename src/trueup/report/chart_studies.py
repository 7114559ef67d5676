"""Charts of a study's records: when samples were learned, exponents, starts, and shifted inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from trueup.report import palette
from trueup.report.labels import label
from trueup.report.studies import GammaSweep, LearnedEpochs, MaxLogits, ShiftCurves, Starts
from trueup.report.style import figure, plain

if TYPE_CHECKING:
    from plotly.graph_objects import Figure

_COLOURS = (palette.BLUE, palette.VERMILION, palette.GREEN, palette.BLACK, palette.GREY)
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")


def learned_epochs(record: LearnedEpochs) -> Figure:
    """Steps of how many samples each run learned when."""
    return figure(
        [_steps(k, plain(name), record.edges, record.counts[k]) for k, name in enumerate(record.names)],
        x="Epoch from which on a sample stayed right",
        y="Samples",
    )


def max_logits(record: MaxLogits) -> Figure:
    """Steps of the greatest logits, by when the samples were learned."""
    names = [
        "never learned" if np.isinf(band.first) else f"epochs {band.first:.0f}–{band.last:.0f}" for band in record.bands
    ]
    traces = [_steps(k, names[k], record.edges, np.asarray(band.count)) for k, band in enumerate(record.bands)]
    return figure(traces, x="Greatest logit", y="Samples")


def gamma_sweep(record: GammaSweep) -> Figure:
    """ECE and entropy along the exponent, each on its own axis."""
    traces = [
        _line(0, "ECE (left)", record.gammas, record.ece),
        _line(1, "entropy (right)", record.gammas, record.entropy) | {"yaxis": "y2"},
    ]
    drawn = figure(traces, x="Exponent γ of the focal loss", y="ECE")
    second = drawn.layout.yaxis.to_plotly_json() | {"overlaying": "y", "side": "right", "showgrid": False}
    drawn.update_layout(yaxis2=second, margin_r=52)
    drawn.layout.yaxis2.title.text = label("entropy")
    return drawn.update_layout(yaxis2_tickmode="auto")


def starts(record: Starts) -> Figure:
    """A box for each start, with all of its numbers beside it."""
    traces = [
        {"type": "box", "name": plain(name), "y": values, "boxpoints": "all", "jitter": 0.3}
        | {"marker": {"color": palette.BLUE, "size": 5}, "line": {"color": palette.BLUE, "width": 1.4}}
        | {"fillcolor": "rgba(0,0,0,0)"}
        for name, values in zip(record.names, record.values, strict=True)
    ]
    return figure(traces, x="Start", y=label(record.metric), legend=False)


def shift_curves(record: ShiftCurves) -> Figure:
    """A curve for each series along the severity of the shift."""
    traces = [
        _line(k, plain(name), record.severities, values) for k, (name, values) in enumerate(record.series.items())
    ]
    drawn = figure(traces, x="Severity of the shift", y=label(record.metric))
    return drawn.update_xaxes(tickvals=record.severities)


def _line(place: int, name: str, x: np.ndarray, y: np.ndarray) -> dict[str, Any]:
    colour, dash = (each[place % len(each)] for each in (_COLOURS, _DASHES))
    looks = {"line": {"color": colour, "width": 2, "dash": dash}, "marker": {"color": colour, "size": 6}}
    return {"type": "scatter", "mode": "lines+markers", "name": name, "x": x, "y": y, **looks}


def _steps(place: int, name: str, edges: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    line = _line(place, name, edges, np.append(counts, counts[-1:]))
    return line | {"mode": "lines", "line": line["line"] | {"shape": "hv"}}
