"""Calibration monitored over time: `Monitor` in a service, with an alarm whose false-alarm rate is guaranteed."""

from trueup.monitor.checkpoint import load_monitor, save_monitor
from trueup.monitor.monitor import Alarm, Monitor, Status

__all__ = ["Alarm", "Monitor", "Status", "load_monitor", "save_monitor"]
