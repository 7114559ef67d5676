"""Numbers become frozen records, records become drawings, and drawings one page."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trueup.report.charts import chart
    from trueup.report.drawings import draw
    from trueup.report.page import Report, report
    from trueup.report.records import (
        class_errors,
        comparison,
        confidences,
        reliability,
        risk_coverage,
        temperature_sweep,
    )
    from trueup.report.studies import gamma_sweep, learned_epochs, max_logits, shift_curves, starts

_WHERE = {
    "Report": "page",
    "chart": "charts",
    "class_errors": "records",
    "comparison": "records",
    "confidences": "records",
    "draw": "drawings",
    "gamma_sweep": "studies",
    "learned_epochs": "studies",
    "max_logits": "studies",
    "reliability": "records",
    "report": "page",
    "risk_coverage": "records",
    "shift_curves": "studies",
    "starts": "studies",
    "temperature_sweep": "records",
}

__all__ = [
    "Report",
    "chart",
    "class_errors",
    "comparison",
    "confidences",
    "draw",
    "gamma_sweep",
    "learned_epochs",
    "max_logits",
    "reliability",
    "report",
    "risk_coverage",
    "shift_curves",
    "starts",
    "temperature_sweep",
]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(f"trueup.report.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'trueup.report' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
