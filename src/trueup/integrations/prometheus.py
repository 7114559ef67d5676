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
    "rows": "Number of predictions",
    "accuracy": "Share of correct predictions; for an event, its frequency",
    "confidence": "Mean confidence; for an event, its mean probability",
    "nll": "Mean negative log-likelihood",
    "ece": "Expected calibration error",
    "evidence": "E-value against calibration; the alarm is raised at 1/(1 − level)",
    "p_value": "Anytime-valid p-value of calibration",
}
PARTS = {
    "promise_broken": ("promise broken", "1 if the promised error rate was refuted, else 0"),
    "promise_errors": ("promise observed", "Share of wrong answers"),
    "promise_errors_low": ("promise low", "Anytime-valid lower bound of the error rate of answers"),
    "promise_errors_high": ("promise high", "Anytime-valid upper bound of the error rate of answers"),
    "unlabelled_rows": ("unlabelled rows", "Number of predictions without labels"),
    "expected_accuracy": (
        "unlabelled accuracy value",
        "Expected accuracy of the predictions without labels, if calibrated",
    ),
}
"""Gauges of monitors with a promise or rows without labels: path in the status, and description."""
WINDOWS = {"": "all", "recent_": "window", "fading_": "fading"}


class Collector:
    """A collector of Prometheus metrics, for the registry of the client library.

    Parameters
    ----------
    monitors
        Monitors by name; the mapping is read at each scrape.
    """

    def __init__(self, monitors: Mapping[str, Monitor]) -> None:
        self._monitors = monitors

    def collect(self) -> Iterable[Metric]:
        """Collect all gauges of all monitors.

        Yields
        ------
        Metric
            One family per gauge.
        """
        states = {name: monitor.status() for name, monitor in self._monitors.items()}
        for gauge, text in GAUGES.items():
            family = GaugeMetricFamily(f"trueup_{gauge}", text, labels=["monitor", "rows"])
            for name, state in states.items():
                for prefix, window in WINDOWS.items():
                    value = getattr(state, prefix + gauge, None)
                    if value is not None:
                        family.add_metric([name, window], value)
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


def prometheus_text(monitors: Monitor | Mapping[str, Monitor], *collectors: Any) -> bytes:
    """Write the metrics of monitors in the text format of Prometheus.

    Parameters
    ----------
    monitors
        A monitor, which gets the name "monitor", or monitors by name.
    *collectors
        Other collectors of the client library to include.

    Returns
    -------
    bytes
        The body of an answer to a scrape, such as ``GET /metrics``.

    Examples
    --------
    >>> text = prometheus_text({"net": Monitor(2)}).decode()
    >>> 'trueup_alarm{monitor="net"} 0.0' in text
    True
    >>> 'trueup_alarm{monitor="monitor"} 0.0' in prometheus_text(Monitor(2)).decode()
    True
    """
    registry = CollectorRegistry(auto_describe=False)
    by_name = {"monitor": monitors} if isinstance(monitors, Monitor) else monitors
    for collector in (Collector(by_name), *collectors):
        registry.register(collector)
    return generate_latest(registry)
