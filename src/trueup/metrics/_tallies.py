"""Names of the foundations that belong to the public metrics."""

from trueup._core.bins import Bins
from trueup._core.registry import METRICS
from trueup._core.tally import Mean, Tally

__all__ = ["METRICS", "Bins", "Mean", "Tally"]
