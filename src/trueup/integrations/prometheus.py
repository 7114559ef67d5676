"""The metrics of monitors in the text format of Prometheus, through its client library."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from operator import getitem
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from trueup.monitor.monitor import Monitor

__all__ = ["Collector", "prometheus_text"]

GAUGES = {
    "rows": "Predictions seen",
    "accuracy": "Share of correct predictions; of two classes, how often class 1 happened",
    "confidence": "Mean confidence; of two classes, mean probability of class 1",
    "nll": "Mean negative log-likelihood",
    "ece": "Expected calibration error",
    "evidence": "E-value against calibration; the alarm is at 1/(1 − level)",
    "p_value": "Anytime-valid p-value of calibration",
}
PARTS = {
    "promise_broken": ("promise broken", "1 if the promise on the answers was refuted, else 0"),
    "promise_errors": ("promise observed", "Share of the answers that were wrong"),
    "promise_errors_low": ("promise low", "Anytime-valid lower bound of that share"),
    "promise_errors_high": ("promise high", "Anytime-valid upper bound of that share"),
    "unlabelled_rows": ("unlabelled rows", "Predictions that wait for their labels"),
    "expected_accuracy": ("unlabelled accuracy value", "Accuracy expected of them if calibration holds"),
}
"""Of monitors that have a promise or rows without labels: the field of the status, then keys in it."""
SPANS = {"": "all", "recent_": "window", "fading_": "fading"}


class Collector:
    """A collector for the client library's registry: monitors by name."""

    def __init__(self, monitors: Mapping[str, Monitor]) -> None:
        self._monitors = monitors

    def collect(self) -> Iterable[Metric]:
        """All gauges of all monitors."""
        states = {name: monitor.status() for name, monitor in self._monitors.items()}
        for gauge, text in GAUGES.items():
            family = GaugeMetricFamily(f"trueup_{gauge}", text, labels=["monitor", "rows"])
            for name, state in states.items():
                for prefix, span in SPANS.items():
                    value = getattr(state, prefix + gauge, None)
                    if value is not None:
                        family.add_metric([name, span], value)
            yield family
        for gauge, (path, text) in PARTS.items():
            part, *keys = path.split()
            family = GaugeMetricFamily(f"trueup_{gauge}", text, labels=["monitor"])
            for name, state in states.items():
                value = getattr(state, part)
                if value is not None and (value := reduce(getitem, keys, value)) is not None:
                    family.add_metric([name], float(value))
            if family.samples:
                yield family
        alarm = GaugeMetricFamily("trueup_alarm", "1 if the alarm was raised, else 0", labels=["monitor"])
        for name, state in states.items():
            alarm.add_metric([name], float(state.alarm is not None))
        yield alarm


def prometheus_text(monitors: Mapping[str, Monitor], *more: Any) -> bytes:
    """The text of `/metrics`; `more` are other collectors of the client library.

    >>> text = prometheus_text({"net": Monitor(2)}).decode()
    >>> 'trueup_alarm{monitor="net"} 0.0' in text
    True
    """
    registry = CollectorRegistry(auto_describe=False)
    for collector in (Collector(monitors), *more):
        registry.register(collector)
    return generate_latest(registry)
