from .audit import Audit as Audit, method_title as method_title
from .figures import chart as chart, draw as draw, numbers as numbers, summary as summary
from .figures.class_errors import class_errors as class_errors
from .figures.comparison import comparison as comparison
from .figures.confidence_histogram import confidence_histogram as confidence_histogram
from .figures.coverage_curve import coverage_curve as coverage_curve
from .figures.groups import group_errors as group_errors
from .figures.method_choice import method_choice as method_choice
from .figures.net_benefit import decision_curve as decision_curve
from .figures.pit_histogram import pit_histogram as pit_histogram
from .figures.promise import promise as promise
from .figures.reliability import plot_reliability as plot_reliability, reliability as reliability
from .figures.risk_coverage import risk_coverage as risk_coverage
from .figures.temperature_sweep import temperature_sweep as temperature_sweep
from .forecasts import ForecastAudit as ForecastAudit, report_forecasts as report_forecasts
from .page import Report as Report, report as report
