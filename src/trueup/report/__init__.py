"""Reports on calibration: an audit of a network and its calibration, figures as frozen records, and the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trueup.registry import lazy_attribute

if TYPE_CHECKING:
    from trueup.report.audit import Audit, method_title
    from trueup.report.figures import chart, draw, numbers, summary
    from trueup.report.figures.class_errors import class_errors
    from trueup.report.figures.comparison import comparison
    from trueup.report.figures.confidence_histogram import confidence_histogram
    from trueup.report.figures.coverage_curve import coverage_curve
    from trueup.report.figures.groups import group_errors
    from trueup.report.figures.method_choice import method_choice
    from trueup.report.figures.net_benefit import decision_curve
    from trueup.report.figures.pit_histogram import pit_histogram
    from trueup.report.figures.promise import promise
    from trueup.report.figures.reliability import plot_reliability, reliability
    from trueup.report.figures.risk_coverage import risk_coverage
    from trueup.report.figures.temperature_sweep import temperature_sweep
    from trueup.report.forecast_audit import ForecastAudit, audit_forecasts
    from trueup.report.forecast_page import ForecastReport, report_forecasts
    from trueup.report.page import Report, report

_MODULES = {
    "Audit": "audit",
    "ForecastAudit": "forecast_audit",
    "ForecastReport": "forecast_page",
    "Report": "page",
    "audit_forecasts": "forecast_audit",
    "chart": "figures",
    "class_errors": "figures.class_errors",
    "comparison": "figures.comparison",
    "confidence_histogram": "figures.confidence_histogram",
    "coverage_curve": "figures.coverage_curve",
    "decision_curve": "figures.net_benefit",
    "draw": "figures",
    "group_errors": "figures.groups",
    "method_choice": "figures.method_choice",
    "method_title": "audit",
    "numbers": "figures",
    "pit_histogram": "figures.pit_histogram",
    "plot_reliability": "figures.reliability",
    "promise": "figures.promise",
    "reliability": "figures.reliability",
    "report": "page",
    "report_forecasts": "forecast_page",
    "risk_coverage": "figures.risk_coverage",
    "summary": "figures",
    "temperature_sweep": "figures.temperature_sweep",
}

__all__ = [
    "Audit",
    "ForecastAudit",
    "ForecastReport",
    "Report",
    "audit_forecasts",
    "chart",
    "class_errors",
    "comparison",
    "confidence_histogram",
    "coverage_curve",
    "decision_curve",
    "draw",
    "group_errors",
    "method_choice",
    "method_title",
    "numbers",
    "pit_histogram",
    "plot_reliability",
    "promise",
    "reliability",
    "report",
    "report_forecasts",
    "risk_coverage",
    "summary",
    "temperature_sweep",
]


if not TYPE_CHECKING:  # a checker is to find what is misspelt

    def __getattr__(name: str) -> Any:
        return lazy_attribute(__name__, name, _MODULES)


def __dir__() -> list[str]:
    return sorted(__all__)
