"""Reports on calibration: an audit of a network and its calibration, figures as frozen records, and the page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trueup.registry import lazy_names

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
    from trueup.report.repair_page import RepairReport, report_repair


__all__ = [
    "Audit",
    "ForecastAudit",
    "ForecastReport",
    "RepairReport",
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
    "report_repair",
    "risk_coverage",
    "summary",
    "temperature_sweep",
]

if not TYPE_CHECKING:  # a checker is to find what is misspelt
    __getattr__, __dir__ = lazy_names(
        __name__,
        {
            "audit": "Audit method_title",
            "figures": "chart draw numbers summary",
            "figures.class_errors": "class_errors",
            "figures.comparison": "comparison",
            "figures.confidence_histogram": "confidence_histogram",
            "figures.coverage_curve": "coverage_curve",
            "figures.groups": "group_errors",
            "figures.method_choice": "method_choice",
            "figures.net_benefit": "decision_curve",
            "figures.pit_histogram": "pit_histogram",
            "figures.promise": "promise",
            "figures.reliability": "plot_reliability reliability",
            "figures.risk_coverage": "risk_coverage",
            "figures.temperature_sweep": "temperature_sweep",
            "forecast_audit": "ForecastAudit audit_forecasts",
            "forecast_page": "ForecastReport report_forecasts",
            "page": "Report report",
            "repair_page": "RepairReport report_repair",
        },
    )
